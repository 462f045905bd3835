/* launch_internal.h - what the files launch*.c share: the Launch itself, the store, the sockets.
 *
 * launch.c        the interface: which launcher, who is there, the store's front
 * launch_local.c  forks the ranks; the parent serves the store
 * launch_env.c    RANK / WORLD_SIZE: rank 0 serves the store on MASTER_PORT
 * launch_pmi2.c   the store of the process manager, through libpmi2
 * launch_store.c  the store's table, server and client
 * launch_net.c    TCP listeners that only take peers of the job
 * launch_watch.c  control connections and the watchdog thread */
#ifndef TRIDENT_PARALLEL_LAUNCH_INTERNAL_H
#define TRIDENT_PARALLEL_LAUNCH_INTERNAL_H

#include <pthread.h>
#include <stdarg.h>
#include <sys/types.h>

#include "base/check.h"
#include "parallel/launch.h"

enum {
    LAUNCH_HOST_MAX = 256,
    LAUNCH_KEY_MAX = 63,
    LAUNCH_ADDRESS_MAX = 256,
    LAUNCH_TEXT_MAX = 1024,
    LAUNCH_RANKS_MAX = 1 << 20,
};

/* One way to keep and find values. All calls come from the main thread, except end_words. */
typedef struct {
    void (*put)(Launch *launch, const char *key, const void *value, size_t bytes);
    void *(*get)(Launch *launch, int from_rank, const char *key, size_t *bytes);
    void (*fence)(Launch *launch, const char *what);
    /* Dies where the store knows that a rank is lost; NULL where it cannot know. For waits at start-up. */
    void (*check)(Launch *launch);
    /* Last words of this rank before it dies (message NULL: the others know them); NULL where the store cannot carry
     * them. */
    void (*end_words)(Launch *launch, int status, const char *message);
    /* Orderly goodbye; frees the state. */
    void (*finish)(Launch *launch);
} LaunchStore;

typedef struct Door Door;
typedef struct Watch Watch;

struct Launch {
    int rank, size;
    const char *kind;
    int local_rank; /* as the launcher says, -1: it does not */
    double timeout_s;
    char host[LAUNCH_HOST_MAX];
    char host_of_rank0[LAUNCH_HOST_MAX];
    char (*hosts)[LAUNCH_HOST_MAX]; /* (size) on rank 0 only */
    uint8_t secret[16];
    bool loopback_only;                /* all ranks are on this machine: listeners bind to 127.0.0.1 */
    bool prints_for_all;               /* one rank's words about a loss reach the user's eye: the others keep quiet */
    char own_address[LAUNCH_HOST_MAX]; /* where peers reach this host, "" where that must be found out */
    const LaunchStore *store;
    void *store_state;
    void *launcher_state; /* what the launcher keeps besides, and what ends it; NULL: nothing */
    void (*launcher_finish)(Launch *launch);
    /* Where this process dies during the start: lets its server tell the others why. NULL: it has none. */
    void (*launcher_linger)(Launch *launch);
    bool all_know;     /* why this process dies */
    LaunchCores cores; /* all 0: not asked yet */
    Door *doors;       /* listeners with their unfinished handshakes */
    Watch *watch;
};

/* ---- launch.c ---- */
/* A whole number in an environment variable: dies with EXIT_LAUNCH, naming it, where it is none. */
int64_t launch_env_number(const char *name, const char *text, int64_t min, int64_t max);
/* Like die, but silent in ranks whose words would only repeat what another process prints. */
void launch_stop(const Launch *launch, int status, const char *format, ...)
    __attribute__((noreturn, format(printf, 3, 4)));
/* Sets rank, size, host name and the logger's coordinates. */
void launch_set_rank(Launch *launch, int rank, int size);
/* The host name that `rank` reports on this machine: real, or from TRIDENT_TEST_HOSTNAME. */
void launch_host_name(int rank, char host[LAUNCH_HOST_MAX]);
/* A variable of the environment; NULL where it is unset or empty. */
const char *launch_env_text(const char *name);
const char *launch_status_name(int status);
/* The store of a world of one. */
void launch_use_single_store(Launch *launch);

/* ---- launch_local.c, launch_env.c, launch_pmi2.c: fill rank, size, kind, store ---- */
void launch_local_start(Launch *launch, int ranks);
void launch_env_start(Launch *launch);
void launch_pmi2_start(Launch *launch);

/* ---- launch_store.c ---- */
typedef struct StoreTable StoreTable;
StoreTable *store_table_create(void);
/* false where (rank, key) is there already. */
bool store_table_put(StoreTable *table, int rank, const char *key, const void *value, size_t bytes);
/* Memory of the table, or NULL. */
const void *store_table_get(const StoreTable *table, int rank, const char *key, size_t *bytes);
void store_table_free(StoreTable *table);

/* What a rank says of itself when it joins over TCP. */
typedef struct {
    int32_t world_size, pid;
    uint64_t config_hash, program_hash; /* of LaunchOptions */
    char host[LAUNCH_HOST_MAX];
} StoreCard;

typedef struct StoreServer StoreServer;
StoreServer *store_server_create(int size);
/* Takes the socket over. card NULL: the process there claims to be `rank` and must still send its card. */
void store_server_add(StoreServer *server, int fd, int rank, const StoreCard *card);
/* Readable when store_server_step has work. */
int store_server_fd(const StoreServer *server);
void store_server_step(StoreServer *server);
/* Everyone gets this answer to whatever they ask from now on. The first call counts. */
void store_server_stop(StoreServer *server, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* NULL, or why the store stopped. *by_rank: the rank that was lost, or whose own last words they are; else -1. */
const char *store_server_stopped(const StoreServer *server, int *by_rank);
bool store_server_said_bye(const StoreServer *server, int rank);
/* All ranks that ever joined are gone. */
bool store_server_done(const StoreServer *server);
void store_server_free(StoreServer *server);

/* The store at the other end of a stream socket. */
extern const LaunchStore store_client;
void *store_client_create(int fd);
void store_client_join(Launch *launch, const StoreCard *card);

/* ---- launch_watch.c ---- */
/* Tells the peers that this rank dies, and why; returns within about a second. */
void watch_last_words(Launch *launch, int status, const char *message);
/* Waits until all ranks have said goodbye, then ends the thread. */
void watch_finish(Launch *launch);

/* ---- launch_net.c ---- */
/* Reads or writes all bytes by the time `deadline` (clock_s): 0; -1 with errno (0: end of file). */
int net_read(int fd, void *to, size_t bytes, double deadline);
int net_write(int fd, const void *from, size_t bytes, double deadline);
/* A random secret or nonce. */
void net_random(void *to, size_t bytes);
/* port 0: any. Returns the listening socket; dies. */
int net_listen(Launch *launch, int port, double bind_patience_s);
/* One attempt to connect and to prove both sides' knowledge of the secret; -1 with a reason. */
int net_connect_once(const Launch *launch, const char *host, const char *port, int to_rank, double deadline,
                     char reason[128]);
/* launch_connect without its warning: -1 with a reason. */
int net_connect(const Launch *launch, const char *address, double timeout_s, char reason[128]);
/* A descriptor that is readable when a listener of launch_listen / net_listen has work. */
int net_door_fd(const Launch *launch, int listener);
void net_doors_free(Launch *launch);

#endif
