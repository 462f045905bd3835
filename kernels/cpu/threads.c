/* threads.c - worker threads that share the chunks of one operation with the thread that called it.
 * In: a function of an index, and how many indexes.  Out: each was run once.
 * Invariants: workers are made when first needed, in the process that uses them (a fork's child makes its own), and
 * stay. Nobody is waited for but a thread that runs a chunk: a worker that has no core is not missed.
 *
 * A job is published by a new `generation`. A block's turn holds the generation beside the number of its indexes that
 * nobody took yet, and is changed by compare-and-exchange: a worker that comes late can't take an index of a job that
 * it doesn't know. It may have read the job's fields while those of the next were written: they are used only when an
 * index was taken, and then they are right, since they aren't written before that index is done. That is why the turn
 * counts what is left: an end that is compared with would be one of those fields.
 *
 * Waiting. Operations follow one another within microseconds, and waking a sleeping thread takes longer: who waits
 * looks for spin_s first, if there is a core for each thread, and then sleeps in the kernel. The limit matters: with
 * others on the cores, who waits for a thread that lost its core must make room for it.
 *
 * Place. Linux likes to wake a thread on the core of its waker. Here the waker goes on to compute, or to look for
 * work, and the woken one waits behind it, for up to tens of milliseconds beside idle cores. So sleeping workers are
 * kept off the core that the caller is on, and a caller that sleeps stays on its own; who has woken may run anywhere
 * again. */
#include "kernels/cpu/threads.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/cores.h"
#include "base/log.h"

static const double spin_s = 200e-6; /* more than threads of one product end apart */

typedef struct {
    _Alignas(64) _Atomic uint64_t turn; /* generation << 32 | indexes that nobody took */
} Block;

static struct {
    /* Read by all, written by the caller at each job. */
    _Alignas(64) _Atomic uint32_t generation; /* futex word of idle workers */
    _Atomic(ChunkFunction) run;
    _Atomic(void *) args;
    _Atomic uint32_t count, blocks, threads;
    /* Written by all. */
    _Alignas(64) _Atomic uint32_t left; /* indexes not done; futex word of the caller */
    _Atomic uint32_t caller_sleeps, workers_asleep;
    _Alignas(64) Block block[BLOCKS_MAX];
    /* The caller's only. */
    _Alignas(64) atomic_bool in_use;
    uint32_t workers;
    pthread_t *handles; /* (workers + 1); the caller's is not used */
    cpu_set_t allowed;  /* cores that this process may use */
    long cores;         /* how many; 0: not asked yet */
    void (*start)(void);
    _Atomic uint32_t ready; /* workers that have started; futex word of the caller */
} pool;

/* A worker sleeps under its own bit, so that only those that a job needs are woken. */
static uint32_t worker_bit(uint32_t worker) { return 1U << (worker % 32); }

static void futex_wait(_Atomic uint32_t *word, uint32_t seen, uint32_t bits) {
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG, seen, NULL, NULL, bits);
}

static void futex_wake(_Atomic uint32_t *word, uint32_t bits) {
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET | FUTEX_PRIVATE_FLAG, INT_MAX, NULL, NULL, bits);
}

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Looks at the word for a while; false when it still holds the value. */
static bool spin_while(_Atomic uint32_t *word, uint32_t value) {
    if (atomic_load_explicit(word, memory_order_acquire) != value) return true;
    if (pool.cores < (long)atomic_load_explicit(&pool.threads, memory_order_relaxed)) return false;
    const double end_s = clock_s() + spin_s;
    do {
        for (int i = 0; i < 8; i++) {
            cpu_relax();
            if (atomic_load_explicit(word, memory_order_acquire) != value) return true;
        }
    } while (clock_s() < end_s);
    return false;
}

/* ---- sharing ---- */

/* Takes one of the block's indexes: how many were left, that one included; 0: none, or the job of this generation is
 * over. */
static uint32_t take(_Atomic uint64_t *turn, uint32_t generation) {
    uint64_t now = atomic_load_explicit(turn, memory_order_relaxed);
    do {
        if ((uint32_t)(now >> 32) != generation || (uint32_t)now == 0) return 0;
    } while (!atomic_compare_exchange_weak_explicit(turn, &now, now - 1, memory_order_acq_rel, memory_order_relaxed));
    return (uint32_t)now;
}

static uint32_t block_first(uint32_t block, uint32_t blocks, uint32_t count) {
    return (uint32_t)((uint64_t)count * block / blocks);
}

/* Runs indexes of the job while there are any, from block `own` on. */
static void work(uint32_t generation, uint32_t own) {
    const ChunkFunction run = atomic_load_explicit(&pool.run, memory_order_relaxed);
    void *args = atomic_load_explicit(&pool.args, memory_order_relaxed);
    const uint32_t count = atomic_load_explicit(&pool.count, memory_order_relaxed);
    const uint32_t blocks = atomic_load_explicit(&pool.blocks, memory_order_relaxed);
    uint32_t done = 0;
    for (uint32_t i = 0; i < blocks; i++) {
        const uint32_t b = (own + i) % blocks, end = block_first(b + 1, blocks, count);
        for (uint32_t left; (left = take(&pool.block[b].turn, generation)) > 0; done++) run(args, (int64_t)end - left);
    }
    if (done > 0 && atomic_fetch_sub(&pool.left, done) == done && atomic_load(&pool.caller_sleeps)) {
        futex_wake(&pool.left, FUTEX_BITSET_MATCH_ANY);
    }
}

/* ---- workers ---- */

/* Before workers are woken, each of which lifts that again. */
static void keep_workers_off_this_core(uint32_t threads) {
    const int core = sched_getcpu();
    if (core < 0 || pool.cores < (long)threads) return;
    cpu_set_t others = pool.allowed;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) == 0) return;
    for (uint32_t w = 1; w < threads; w++) pthread_setaffinity_np(pool.handles[w], sizeof others, &others);
}

static void wait_for_job(uint32_t seen, uint32_t bit) {
    if (spin_while(&pool.generation, seen)) return;
    atomic_fetch_add(&pool.workers_asleep, 1);
    while (atomic_load(&pool.generation) == seen) futex_wait(&pool.generation, seen, bit);
    atomic_fetch_sub(&pool.workers_asleep, 1);
    if (CPU_COUNT(&pool.allowed) > 0) sched_setaffinity(0, sizeof pool.allowed, &pool.allowed);
}

static void *worker_run(void *number) {
    const uint32_t worker = (uint32_t)(uintptr_t)number; /* from 1 on: the caller is 0 */
    uint32_t generation = atomic_load(&pool.generation);
    if (pool.start) pool.start();
    atomic_store(&pool.ready, worker);
    futex_wake(&pool.ready, FUTEX_BITSET_MATCH_ANY);
    for (;;) {
        wait_for_job(generation, worker_bit(worker));
        generation = atomic_load_explicit(&pool.generation, memory_order_acquire);
        if (worker < atomic_load_explicit(&pool.threads, memory_order_relaxed)) work(generation, worker);
    }
    return NULL;
}

static void forget_workers(void) { /* in a fork's child: the parent's workers aren't here */
    memset(&pool.block, 0, sizeof pool.block);
    atomic_store(&pool.workers_asleep, 0);
    atomic_store(&pool.caller_sleeps, 0);
    atomic_store(&pool.ready, 0);
    atomic_store(&pool.in_use, false);
    pool.workers = 0;
}

static void make_workers(uint32_t workers) {
    if (pool.cores == 0) {
        pool.cores = cores_allowed();
        if (sched_getaffinity(0, sizeof pool.allowed, &pool.allowed) != 0) CPU_ZERO(&pool.allowed);
        pthread_atfork(NULL, NULL, forget_workers);
    }
    sigset_t all, before; /* signals are the main thread's */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pool.handles = xrealloc(pool.handles, (workers + 1) * sizeof *pool.handles);
    while (pool.workers < workers) {
        const uint32_t worker = pool.workers + 1;
        pthread_t *thread = &pool.handles[worker];
        const int status = pthread_create(thread, NULL, worker_run, (void *)(uintptr_t)worker);
        if (status != 0) die(EXIT_LAUNCH, "cannot start thread %u of this rank: %s", worker + 1, strerror(status));
        pthread_detach(*thread);
        for (uint32_t seen; (seen = atomic_load(&pool.ready)) != worker;) {
            futex_wait(&pool.ready, seen, FUTEX_BITSET_MATCH_ANY);
        }
        pool.workers = worker;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* ---- the caller ---- */

static void publish(uint32_t threads, uint32_t blocks, uint32_t count, ChunkFunction run, void *args) {
    const uint32_t generation = atomic_load_explicit(&pool.generation, memory_order_relaxed) + 1;
    atomic_store_explicit(&pool.run, run, memory_order_relaxed);
    atomic_store_explicit(&pool.args, args, memory_order_relaxed);
    atomic_store_explicit(&pool.count, count, memory_order_relaxed);
    atomic_store_explicit(&pool.blocks, blocks, memory_order_relaxed);
    atomic_store_explicit(&pool.threads, threads, memory_order_relaxed);
    atomic_store_explicit(&pool.left, count, memory_order_relaxed);
    for (uint32_t b = 0; b < blocks; b++) {
        const uint32_t indexes = block_first(b + 1, blocks, count) - block_first(b, blocks, count);
        atomic_store_explicit(&pool.block[b].turn, (uint64_t)generation << 32 | indexes, memory_order_relaxed);
    }
    atomic_store(&pool.generation, generation);
    if (atomic_load(&pool.workers_asleep) > 0) {
        keep_workers_off_this_core(threads);
        uint32_t bits = 0;
        for (uint32_t w = 1; w < threads; w++) bits |= worker_bit(w);
        futex_wake(&pool.generation, bits);
    }
}

/* While the caller sleeps: the worker that wakes it goes on looking for work on its own core. */
static bool stay_on_this_core(void) {
    const int core = sched_getcpu();
    if (core < 0 || !CPU_ISSET(core, &pool.allowed)) return false;
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(core, &here);
    return sched_setaffinity(0, sizeof here, &here) == 0;
}

static void wait_for_end(void) {
    for (uint32_t left; (left = atomic_load_explicit(&pool.left, memory_order_acquire)) != 0;) {
        if (spin_while(&pool.left, left)) continue;
        atomic_store(&pool.caller_sleeps, 1);
        const bool stays = stay_on_this_core();
        while ((left = atomic_load(&pool.left)) != 0) futex_wait(&pool.left, left, FUTEX_BITSET_MATCH_ANY);
        if (stays) sched_setaffinity(0, sizeof pool.allowed, &pool.allowed);
        atomic_store(&pool.caller_sleeps, 0);
    }
}

void threads_set_start(void (*start)(void)) { pool.start = start; }

void threads_run(int threads, int64_t blocks, int64_t count, ChunkFunction run, void *args) {
    REQUIRE(blocks >= 1 && blocks <= BLOCKS_MAX);
    if (threads <= 1 || count >= UINT32_MAX || atomic_exchange(&pool.in_use, true)) {
        for (int64_t i = 0; i < count; i++) run(args, i);
        return;
    }
    if (pool.workers < (uint32_t)threads - 1) make_workers((uint32_t)threads - 1);
    publish((uint32_t)threads, (uint32_t)blocks, (uint32_t)count, run, args);
    work(atomic_load_explicit(&pool.generation, memory_order_relaxed), 0);
    wait_for_end();
    atomic_store(&pool.in_use, false);
}
