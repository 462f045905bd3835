/* launch.h - who am I, how many are we, and a key-value store to find one another.
 *
 * Three launchers behind one interface: Slurm PMI2 (libpmi2 opened at run time), RANK / WORLD_SIZE /
 * MASTER_ADDR / MASTER_PORT of other schedulers, and the built-in local launcher, which forks the
 * ranks on this machine. Precedence: RANK/WORLD_SIZE, PMI2, a world given by the config (local
 * launcher), one process. All errors die with EXIT_LAUNCH and say what was found and what to do. */
#ifndef TRIDENT_PARALLEL_LAUNCH_H
#define TRIDENT_PARALLEL_LAUNCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/check.h"

typedef struct Launch Launch;

typedef struct {
    int world_size;   /* from the config; 0: not known (takes what the launcher says, else 1) */
    double timeout_s; /* for every wait at start-up */
    /* Ranks with another config (lines of text; NULL: none) or of another executable are refused by name. */
    const char *config_text;
    uint64_t program_hash;
} LaunchOptions;

/* What the environment says, without starting anything: the world size of the launcher, or 0. */
int launch_detect_world_size(void);

/* Local launcher: the calling process forks the ranks and stays as their parent: it serves the
 * store, forwards signals, reaps, and calls exit() itself with the run's status (the status of the
 * first rank that failed); this function returns in the ranks only. Other launchers: connects. */
Launch *launch_start(const LaunchOptions *options);
int launch_rank(const Launch *launch);
int launch_size(const Launch *launch);
const char *launch_kind(const Launch *launch); /* "local", "pmi2", "env", "single" */

/* The place among the ranks of this host as the launcher says it (LOCAL_RANK, SLURM_LOCALID; local
 * launcher: the rank), or -1: count the ranks of equal host name. */
int launch_local_rank(const Launch *launch);

/* Values up to 1 GiB; keys of 1 to 63 printable characters other than space, ';' and '='; a rank puts
 * each key once. put is visible to get after the next fence. get dies where the key is missing.
 * *bytes is set; the caller frees. what: short text, the same on all ranks. Main thread only. */
void launch_put(Launch *launch, const char *key, const void *value, size_t bytes);
void *launch_get(Launch *launch, int from_rank, const char *key, size_t *bytes);
void launch_fence(Launch *launch, const char *what);

/* The per-job secret of every TCP listener, the same on all ranks. */
void launch_secret(const Launch *launch, uint8_t secret[16]);
/* The host name that this rank reports. TRIDENT_TEST_HOSTNAME overrides it, to simulate nodes: one name
 * for all ranks, or a list indexed by rank ("n0,n0,n1,n1"). */
const char *launch_host(const Launch *launch);

/* Cores, as the affinity masks of all ranks of this host say it. */
typedef struct {
    int allowed; /* that this rank may run on */
    int sharers; /* ranks of this host that may run on one of those, this one among them */
    int host;    /* that any rank of this host may run on */
    int ranks;   /* of this host */
} LaunchCores;
/* The first call is made by all ranks at the same place; later ones return what it found. */
LaunchCores launch_cores(Launch *launch);

/* Control connections and the watchdog thread: tells every rank within a second when a rank dies,
 * hangs up or reports an error, names it, and ends this process with EXIT_PEER_LOST (or the status
 * the peer reported). Call after the first fence; also sets the die hook. */
void launch_watch_start(Launch *launch);
/* What this rank is doing, for the peers' last words: static or long-lived text. */
void launch_watch_phase(const char *phase, int64_t step);
/* The named operation must end within the limit, else this rank says so, tells the peers and exits
 * with EXIT_HANG. limit_s 0: none. Used around steps; comm has its own per-wait deadlines. */
void launch_watch_deadline(double limit_s);

/* Ends the run with an error that all ranks hold at the same point: rank 0 says it, and it reaches the others over
 * their control connections, so that output which comes together holds it once. */
void launch_die_together(const Error *err) __attribute__((noreturn));

/* Orderly end: after it a closing connection is no loss. */
void launch_finish(Launch *launch);

/* TCP listeners and connections that only ranks of this job pass (see launch_net.c; it keeps strangers
 * and strays out, it is no cryptography). address: "host:port[,host:port...]#rank", to publish in the
 * store; the hosts are those of the interface named in TRIDENT_INTERFACE where that is set. The
 * descriptors are blocking, with TCP_NODELAY. A connect completes when the peer accepts: where all
 * connect to all, each connects to lower ranks first, then accepts the higher ones. accept serves
 * any number of handshakes at once and drops those that are wrong or silent. Both return a
 * descriptor that the caller closes, or -1 when the time is over (connect says why on stderr).
 * One thread at a time a listener. */
int launch_listen(const Launch *launch, char address[256]);
int launch_accept(const Launch *launch, int listener, int *peer_rank, double timeout_s);
int launch_connect(const Launch *launch, const char *address, double timeout_s);
void launch_close_listener(Launch *launch, int listener);

#endif
