/* launch_pmi2.c - the store of the process manager (srun --mpi=pmi2) through libpmi2, opened at run time.
 *
 * PMI2 keeps short C strings, so a value is written in hex and cut into pieces; the first piece begins
 * with the length, the hash of the value and the hash of its key, and get checks all three: a process
 * manager that shortens or mixes up values is found out. A piece that is refused is halved. Keys are
 * hashed too, since PMI2's are short and shared by all ranks.
 * PMI2 calls have no time limit; a guard thread says what is being waited for, and ends the process at
 * the deadline. Each get costs about a millisecond: put few, large values. */
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/log.h"
#include "parallel/launch_internal.h"

enum {
    PIECE_MAX = 512, /* some managers go wrong near their stated limit of 1024 */
    PIECE_MIN = 64,  /* must hold the head */
    HEAD_CHARS = 48, /* length, hash of the value, hash of rank and key: 16 hex digits each */
    VALUE_CAPACITY = 2048,
    PMI2_OWN_JOB_ANY_RANK = -1,
};
static const double message_every_s = 5.0;

typedef struct {
    int (*init)(int *spawned, int *size, int *rank, int *appnum);
    int (*finalize)(void);
    int (*put)(const char *key, const char *value);
    int (*fence)(void);
    int (*get)(const char *job, int source, const char *key, char *value, int capacity, int *length);
} Pmi2;

/* Watches one call at a time. */
typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool quit;
    char doing[128]; /* "": no call is under way */
    double start_s, timeout_s;
} Guard;

typedef struct {
    void *library;
    Pmi2 call;
    Guard guard;
    StoreTable *own_keys; /* to notice a second put */
    int piece_chars;
} Pmi2State;

/* ---- guard ---- */

static void *guard_run(void *argument) {
    Guard *guard = argument;
    double next_message = 0;
    pthread_mutex_lock(&guard->lock);
    while (!guard->quit) {
        double now = clock_s();
        bool busy = guard->doing[0] != 0;
        double waited_s = busy ? now - guard->start_s : 0;
        if (busy && waited_s >= guard->timeout_s) {
            die(EXIT_LAUNCH,
                "waited %.3g s for PMI2 (%s): a rank has left or was not started, or the process manager hangs",
                guard->timeout_s, guard->doing);
        }
        if (!busy || waited_s < message_every_s) next_message = guard->start_s + message_every_s;
        if (busy && now >= next_message) {
            log_warn(LOG_LAUNCH, "waiting for PMI2 (%s), %.0f s", guard->doing, waited_s);
            next_message = now + message_every_s;
        }
        double until = now + 3600.0;
        if (busy)
            until = next_message < guard->start_s + guard->timeout_s ? next_message : guard->start_s + guard->timeout_s;
        struct timespec at = {(time_t)until, (long)((until - (double)(time_t)until) * 1e9)};
        pthread_cond_timedwait(&guard->changed, &guard->lock, &at);
    }
    pthread_mutex_unlock(&guard->lock);
    return NULL;
}

static void guard_start(Guard *guard, double timeout_s) {
    guard->timeout_s = timeout_s;
    pthread_mutex_init(&guard->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&guard->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&guard->thread, NULL, guard_run, guard);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0) die(EXIT_LAUNCH, "cannot start a thread: %s", strerror(status));
}

static void guard_set(Guard *guard, const char *doing, const char *detail) {
    pthread_mutex_lock(&guard->lock);
    snprintf(guard->doing, sizeof guard->doing, "%s%s%s", doing, detail[0] ? " " : "", detail);
    guard->start_s = clock_s();
    pthread_cond_broadcast(&guard->changed);
    pthread_mutex_unlock(&guard->lock);
}

static void guard_stop(Guard *guard) {
    pthread_mutex_lock(&guard->lock);
    guard->quit = true;
    pthread_cond_broadcast(&guard->changed);
    pthread_mutex_unlock(&guard->lock);
    pthread_join(guard->thread, NULL);
    pthread_mutex_destroy(&guard->lock);
    pthread_cond_destroy(&guard->changed);
}

/* ---- the store ---- */

static void to_hex(char *to, const uint8_t *from, size_t bytes) {
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < bytes; i++) {
        *to++ = digits[from[i] >> 4];
        *to++ = digits[from[i] & 15];
    }
    *to = 0;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

/* false where the text holds something else than pairs of hex digits. */
static bool from_hex(uint8_t *to, const char *from, size_t chars) {
    if (chars % 2 != 0) return false;
    for (size_t i = 0; i < chars; i += 2) {
        int high = hex_digit(from[i]), low = hex_digit(from[i + 1]);
        if (high < 0 || low < 0) return false;
        *to++ = (uint8_t)(high << 4 | low);
    }
    return true;
}

static uint64_t key_hash(int rank, const char *key) {
    return XXH3_64bits_withSeed(key, strlen(key), (uint64_t)(int64_t)rank);
}

static void piece_key(char name[40], int rank, const char *key, int piece) {
    snprintf(name, 40, "td-%016llx-%d", (unsigned long long)XXH64(key, strlen(key), (uint64_t)(int64_t)rank), piece);
}

static void pmi2_put(Launch *launch, const char *key, const void *value, size_t bytes) {
    Pmi2State *state = launch->store_state;
    if (!store_table_put(state->own_keys, launch->rank, key, NULL, 0)) {
        die(EXIT_INTERNAL, "rank %d put the key \"%s\" twice", launch->rank, key);
    }
    char *text = xmalloc(HEAD_CHARS + 2 * bytes + 1), name[40], piece_text[PIECE_MAX + 1];
    snprintf(text, HEAD_CHARS + 1, "%016llx%016llx%016llx", (unsigned long long)bytes,
             (unsigned long long)XXH3_64bits(value, bytes), (unsigned long long)key_hash(launch->rank, key));
    to_hex(text + HEAD_CHARS, value, bytes);
    size_t chars = HEAD_CHARS + 2 * bytes;
    int piece = 0;
    for (size_t done = 0; done < chars; piece++) {
        size_t n = chars - done < (size_t)state->piece_chars ? chars - done : (size_t)state->piece_chars;
        memcpy(piece_text, text + done, n);
        piece_text[n] = 0;
        piece_key(name, launch->rank, key, piece);
        guard_set(&state->guard, "put of", key);
        int status = state->call.put(name, piece_text);
        guard_set(&state->guard, "", "");
        if (status == 0) {
            done += n;
        } else if (state->piece_chars > PIECE_MIN && n > PIECE_MIN) {
            state->piece_chars /= 2;
            piece--;
        } else {
            die(EXIT_LAUNCH, "PMI2 refused the value of \"%s\" (%zu characters; error %d from the process manager)",
                key, n, status);
        }
    }
    free(text);
}

static int pmi2_get_piece(Launch *launch, int from_rank, const char *key, int piece, char text[VALUE_CAPACITY]) {
    Pmi2State *state = launch->store_state;
    char name[40];
    int length = 0;
    piece_key(name, from_rank, key, piece);
    guard_set(&state->guard, "get of", key);
    memset(text, 0, VALUE_CAPACITY);
    int status = state->call.get(NULL, PMI2_OWN_JOB_ANY_RANK, name, text, VALUE_CAPACITY - 1, &length);
    guard_set(&state->guard, "", "");
    return status;
}

static void refuse_value(int from_rank, const char *key, const char *what) __attribute__((noreturn));
static void refuse_value(int from_rank, const char *key, const char *what) {
    die(EXIT_LAUNCH,
        "the process manager's PMI2 did not give back the value of key \"%s\" of rank %d as it was put: %s; "
        "start with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT instead",
        key, from_rank, what);
}

static void *pmi2_get(Launch *launch, int from_rank, const char *key, size_t *bytes) {
    char text[VALUE_CAPACITY], what[160];
    int status = pmi2_get_piece(launch, from_rank, key, 0, text);
    if (status != 0) {
        die(EXIT_LAUNCH,
            "key \"%s\" of rank %d is not in the PMI2 store (error %d; no fence since it was put, or never put)", key,
            from_rank, status);
    }
    unsigned long long head[3];
    size_t chars = strlen(text);
    if (chars < HEAD_CHARS || sscanf(text, "%16llx%16llx%16llx", &head[0], &head[1], &head[2]) != 3) {
        snprintf(what, sizeof what, "its first piece has %zu characters", chars);
        refuse_value(from_rank, key, what);
    }
    if (head[2] != key_hash(from_rank, key)) refuse_value(from_rank, key, "it is the value of another key");
    if (head[0] > 1u << 30) refuse_value(from_rank, key, "its length is impossible");
    size_t wanted = (size_t)head[0], got = 0;
    uint8_t *value = xmalloc(wanted + VALUE_CAPACITY);
    const char *part = text + HEAD_CHARS;
    for (int piece = 1;; piece++) {
        size_t n = strlen(part);
        if (!from_hex(value + got, part, n)) refuse_value(from_rank, key, "it holds characters that were not put");
        got += n / 2;
        if (got >= wanted) break;
        if (pmi2_get_piece(launch, from_rank, key, piece, text) != 0 || !text[0]) break;
        part = text;
    }
    snprintf(what, sizeof what, "%zu of %zu bytes came back (values are cut short?)", got, wanted);
    if (got != wanted) refuse_value(from_rank, key, what);
    if (XXH3_64bits(value, wanted) != head[1]) refuse_value(from_rank, key, "its bytes differ");
    *bytes = wanted;
    return value;
}

static void pmi2_fence(Launch *launch, const char *what) {
    Pmi2State *state = launch->store_state;
    guard_set(&state->guard, "fence", what);
    int status = state->call.fence();
    guard_set(&state->guard, "", "");
    if (status != 0) {
        die(EXIT_LAUNCH, "PMI2 fence \"%s\" failed (error %d): the process manager has gone, or refuses", what, status);
    }
}

static void pmi2_finish(Launch *launch) {
    Pmi2State *state = launch->store_state;
    guard_set(&state->guard, "finalize", "");
    int status = state->call.finalize();
    if (status != 0) log_warn(LOG_LAUNCH, "PMI2 finalize gave error %d", status);
    guard_stop(&state->guard);
    store_table_free(state->own_keys);
    free(state); /* the library stays open: it may have left handlers behind */
    launch->store_state = NULL;
}

static const LaunchStore pmi2_store = {pmi2_put, pmi2_get, pmi2_fence, NULL, NULL, pmi2_finish};

/* ---- start ---- */

static void *find(void *library, const char *name) {
    void *symbol = dlsym(library, name);
    if (!symbol) die(EXIT_LAUNCH, "libpmi2 has no function %s: %s", name, dlerror());
    return symbol;
}

static void open_library(Pmi2State *state) {
    state->library = dlopen("libpmi2.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!state->library) state->library = dlopen("libpmi2.so", RTLD_NOW | RTLD_LOCAL);
    if (!state->library) {
        die(EXIT_LAUNCH,
            "started under a PMI process manager (PMI_FD is set), but libpmi2 cannot be opened: %s; install it "
            "(Debian: "
            "libpmi2-0), or start with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            dlerror());
    }
    /* POSIX lets dlsym's pointers be functions; C does not, hence the detour. */
    *(void **)&state->call.init = find(state->library, "PMI2_Init");
    *(void **)&state->call.finalize = find(state->library, "PMI2_Finalize");
    *(void **)&state->call.put = find(state->library, "PMI2_KVS_Put");
    *(void **)&state->call.fence = find(state->library, "PMI2_KVS_Fence");
    *(void **)&state->call.get = find(state->library, "PMI2_KVS_Get");
}

/* A process manager that is not asked the right way starts every task as a world of its own. */
static void check_world(int size, int rank) {
    const char *step = launch_env_text("SLURM_STEP_ID"), *tasks = launch_env_text("SLURM_STEP_NUM_TASKS");
    if (size < 1 || size > LAUNCH_RANKS_MAX || rank < 0 || rank >= size) {
        die(EXIT_LAUNCH, "PMI2 says rank %d of %d, which is impossible", rank, size);
    }
    if (step && tasks && launch_env_number("SLURM_STEP_NUM_TASKS", tasks, 1, LAUNCH_RANKS_MAX) != size) {
        die(EXIT_LAUNCH,
            "PMI2 says that this job has %d ranks, but the Slurm step has SLURM_STEP_NUM_TASKS=%s tasks: start "
            "with srun --mpi=pmi2",
            size, tasks);
    }
}

/* libpmi2 writes to a process manager that may have gone: that is to be an error, not a silent death. */
static void ignore_broken_pipe(void) {
    struct sigaction action;
    if (sigaction(SIGPIPE, NULL, &action) != 0 || action.sa_handler != SIG_DFL) return;
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, NULL);
}

void launch_pmi2_start(Launch *launch) {
    Pmi2State *state = xcalloc(1, sizeof *state);
    open_library(state);
    ignore_broken_pipe();
    state->piece_chars = PIECE_MAX;
    state->own_keys = store_table_create();
    guard_start(&state->guard, launch->timeout_s);
    int spawned = 0, size = 0, rank = -1, appnum = 0;
    guard_set(&state->guard, "init", "");
    int status = state->call.init(&spawned, &size, &rank, &appnum);
    guard_set(&state->guard, "", "");
    if (status != 0) {
        die(EXIT_LAUNCH,
            "PMI2 init failed (error %d): the process manager does not speak PMI2? start with srun --mpi=pmi2", status);
    }
    check_world(size, rank);
    const char *local = launch_env_text("SLURM_LOCALID");
    if (local) launch->local_rank = (int)launch_env_number("SLURM_LOCALID", local, 0, LAUNCH_RANKS_MAX);
    launch->kind = "pmi2";
    launch->prints_for_all = true;
    launch_set_rank(launch, rank, size);
    launch->store = &pmi2_store;
    launch->store_state = state;
}
