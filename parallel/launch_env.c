/* launch_env.c - RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK, as other schedulers set them.
 *
 * Rank 0 serves the store on MASTER_PORT from a thread; the others connect until the deadline. The
 * listener takes only processes that know the job's first secret: TRIDENT_JOB_SECRET where it is set,
 * else what the ranks of one job have in common (port, user, the scheduler's job number). Once all
 * are there, they share a random one (launch.c). The first secret does not hold the world size or the
 * address, so that a disagreement in those is named instead of looking like a stranger. */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/log.h"
#include "parallel/launch_internal.h"

enum { MASTER_PORT_DEFAULT = 29500, HOST_CHARS_MAX = 200 };
static const double bind_patience_s = 10.0; /* a job that was just killed may still hold the port */
static const time_t linger_s = 1;
static const double try_s = 5.0, pause_min_s = 0.005, pause_max_s = 0.25, message_every_s = 5.0;

/* Rank 0's server. */
typedef struct {
    pthread_t thread;
    StoreServer *server;
    Launch door_side; /* rank, secret and listener as the thread uses them */
    int listener;
    int quit; /* eventfd: the main thread waits no longer */
} EnvServer;

static void first_secret(uint8_t secret[16], const char *port) {
    static const char *const job_variables[] = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID",
                                                "TORCHELASTIC_RUN_ID"};
    char shared[2048];
    const char *given = launch_env_text("TRIDENT_JOB_SECRET");
    int used = snprintf(shared, sizeof shared, "%s:%u", port, (unsigned)getuid());
    for (size_t i = 0; i < sizeof job_variables / sizeof job_variables[0]; i++) {
        const char *value = launch_env_text(job_variables[i]);
        used += snprintf(shared + used, sizeof shared - (size_t)used, ":%.256s", value ? value : "");
    }
    XXH128_hash_t hash = given ? XXH3_128bits_withSeed(given, strlen(given), 1) : XXH3_128bits(shared, (size_t)used);
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, hash);
    memcpy(secret, canonical.digest, 16);
}

/* ---- rank 0: the server ---- */

static void *env_serve(void *argument) {
    EnvServer *env = argument;
    struct pollfd ready[3] = {{.fd = store_server_fd(env->server), .events = POLLIN},
                              {.fd = net_door_fd(&env->door_side, env->listener), .events = POLLIN},
                              {.fd = env->quit, .events = POLLIN}};
    while (!store_server_done(env->server) && !ready[2].revents) {
        poll(ready, 3, 500);
        int rank = -1;
        for (;;) { /* also without a sign of life: silent visitors are dropped in time */
            int fd = launch_accept(&env->door_side, env->listener, &rank, 0.0);
            if (fd < 0) break;
            store_server_add(env->server, fd, rank, NULL);
        }
        store_server_step(env->server);
    }
    return NULL;
}

static void warn_where_master_is_not_here(const char *host) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
    if (getaddrinfo(host, NULL, &hints, &list) != 0) return;
    bool here = false;
    for (const struct addrinfo *address = list; address && !here; address = address->ai_next) {
        int fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        here = fd >= 0 && bind(fd, address->ai_addr, address->ai_addrlen) == 0;
        if (fd >= 0) close(fd);
    }
    freeaddrinfo(list);
    if (!here) {
        log_warn(LOG_LAUNCH,
                 "MASTER_ADDR=%s is no address of this host, but RANK=0 runs here: the other ranks look for "
                 "rank 0 there",
                 host);
    }
}

static EnvServer *env_server_start(const Launch *launch, const StoreCard *card, int port, int *own_end) {
    EnvServer *env = xcalloc(1, sizeof *env);
    env->door_side = *launch;
    double patience_s = launch->timeout_s < bind_patience_s ? launch->timeout_s : bind_patience_s;
    env->listener = net_listen(&env->door_side, port, patience_s);
    env->server = store_server_create(launch->size);
    env->quit = eventfd(0, EFD_CLOEXEC);
    int pair[2];
    if (env->quit < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
        die(EXIT_LAUNCH, "socketpair: %s", strerror(errno));
    }
    store_server_add(env->server, pair[0], 0, card);
    *own_end = pair[1];
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&env->thread, NULL, env_serve, env);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0) die(EXIT_LAUNCH, "cannot start the store's thread: %s", strerror(status));
    return env;
}

/* Waits until the others have left the store too, so that none of them sees it vanish. */
static void env_server_finish(EnvServer *env, double limit_s) {
    double until = clock_s() + limit_s;
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_sec += (time_t)(until - clock_s());
    if (pthread_timedjoin_np(env->thread, NULL, &at) != 0) {
        uint64_t one = 1;
        if (write(env->quit, &one, sizeof one) != sizeof one) die(EXIT_INTERNAL, "eventfd: %s", strerror(errno));
        pthread_join(env->thread, NULL);
    }
    launch_close_listener(&env->door_side, env->listener);
    store_server_free(env->server);
    close(env->quit);
    free(env);
}

/* ---- the others: connect ---- */

static int env_connect(const Launch *launch, const char *host, const char *port) {
    double start = clock_s(), deadline = start + launch->timeout_s, next_message = start + message_every_s;
    double pause_s = pause_min_s;
    for (;;) {
        char reason[128] = "";
        double now = clock_s();
        int fd = net_connect_once(launch, host, port, 0, now + try_s < deadline ? now + try_s : deadline, reason);
        if (fd >= 0) return fd;
        now = clock_s();
        if (now + pause_s >= deadline) {
            die(EXIT_LAUNCH,
                "no connection to rank 0 at %s:%s within %.0f s: %s (is RANK=0 running there, with the same "
                "MASTER_PORT%s?)",
                host, port, launch->timeout_s, reason,
                launch_env_text("TRIDENT_JOB_SECRET") ? " and TRIDENT_JOB_SECRET" : ", user and job");
        }
        if (now >= next_message) {
            log_warn(LOG_LAUNCH, "waiting for rank 0 at %s:%s, %.0f s (%s)", host, port, now - start, reason);
            next_message = now + message_every_s;
        }
        sleep_s(pause_s);
        pause_s = 2 * pause_s < pause_max_s ? 2 * pause_s : pause_max_s;
    }
}

/* The address from which this host reached rank 0 is the one where peers reach this host. A loopback
 * address says nothing of that where rank 0's name is a real one. */
static void find_own_address(Launch *launch, int fd) {
    struct sockaddr_storage own;
    socklen_t bytes = sizeof own;
    char host[64];
    if (getsockname(fd, (struct sockaddr *)&own, &bytes) != 0) return;
    if (getnameinfo((struct sockaddr *)&own, bytes, host, sizeof host, NULL, 0, NI_NUMERICHOST) != 0) return;
    const char *v4 = strncmp(host, "::ffff:", 7) == 0 ? host + 7 : host;
    if (strncmp(v4, "127.", 4) == 0 || strcmp(v4, "::1") == 0) return;
    snprintf(launch->own_address, sizeof launch->own_address, "%s", v4);
}

/* ---- start ---- */

static void env_finish(Launch *launch) {
    env_server_finish(launch->launcher_state, launch->timeout_s);
    launch->launcher_state = NULL;
}

/* The others read why the start ends before their connections do. Also called by a thread that is not the main one. */
static void env_linger(Launch *launch) {
    EnvServer *env = launch->launcher_state;
    struct timespec at;
    if (!env || pthread_equal(env->thread, pthread_self())) return;
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_sec += linger_s;
    pthread_timedjoin_np(env->thread, NULL, &at);
}

static const char *required_host(void) {
    const char *host = launch_env_text("MASTER_ADDR");
    if (!host) {
        die(EXIT_LAUNCH,
            "RANK and WORLD_SIZE are set, but MASTER_ADDR is not: set it to the host where RANK=0 runs, the "
            "same for all ranks (and MASTER_PORT, default %d)",
            MASTER_PORT_DEFAULT);
    }
    if (strlen(host) > HOST_CHARS_MAX) die(EXIT_LAUNCH, "MASTER_ADDR is too long (%zu characters)", strlen(host));
    return host;
}

void launch_env_start(Launch *launch) {
    int size = (int)launch_env_number("WORLD_SIZE", getenv("WORLD_SIZE"), 1, LAUNCH_RANKS_MAX);
    int rank = (int)launch_env_number("RANK", getenv("RANK"), 0, size - 1);
    const char *local = launch_env_text("LOCAL_RANK"), *port_text = launch_env_text("MASTER_PORT");
    int port = port_text ? (int)launch_env_number("MASTER_PORT", port_text, 1, 65535) : MASTER_PORT_DEFAULT;
    if (local) launch->local_rank = (int)launch_env_number("LOCAL_RANK", local, 0, size - 1);
    launch->kind = "env";
    launch_set_rank(launch, rank, size);
    if (size == 1) {
        launch->loopback_only = true;
        launch_use_single_store(launch);
        return;
    }
    const char *host = required_host();
    char port_digits[8];
    snprintf(port_digits, sizeof port_digits, "%d", port);
    first_secret(launch->secret, port_digits);
    launch->loopback_only = strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0;
    launch->store = &store_client;

    StoreCard card = {.world_size = size, .pid = (int32_t)getpid()};
    memcpy(card.host, launch->host, sizeof card.host);
    int fd;
    if (rank == 0) {
        warn_where_master_is_not_here(host);
        launch->launcher_state = env_server_start(launch, &card, port, &fd);
        launch->launcher_finish = env_finish;
        launch->launcher_linger = env_linger;
        snprintf(launch->own_address, sizeof launch->own_address, "%s", host);
        launch->store_state = store_client_create(fd);
    } else {
        fd = env_connect(launch, host, port_digits);
        find_own_address(launch, fd);
        launch->store_state = store_client_create(fd);
        store_client_join(launch, &card);
    }
}
