/* init.c - threads and path of the CPU kernels, and the sharing out of chunks.
 * In: kernels_init once per process.  Out: answers for the operations.
 * Invariants: with one thread no other is made; which thread runs a chunk never shows in the result.
 * The values below are properties of the process, as the CPU itself is. */
#include <errno.h>
#include <gnu/libc-version.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/log.h"
#include "kernels/cpu/common.h"
#include "kernels/cpu/peak.h"
#include "kernels/cpu/sgemm.h"
#include "kernels/cpu/threads.h"
#include "kernels/kernels.h"

/* Set by OpenBLAS builds with threads of their own; absent from the serial build and from other BLAS. */
extern void openblas_set_num_threads(int threads) __attribute__((weak));
/* Version, build and the CPU that its kernels are for. OpenBLAS builds without threads share unlocked buffers between
 * callers: two calls at once give wrong numbers, seen with Debian's serial build. */
extern char *openblas_get_config(void) __attribute__((weak));
/* OpenBLAS's pool of work buffers: what is freed is kept for the next call. */
extern void *blas_memory_alloc(int unused) __attribute__((weak));
extern void blas_memory_free(void *buffer) __attribute__((weak));

/* What OpenBLAS maps for a buffer of its pool on x86-64, and the most that it maps anywhere; untouched pages cost
 * nothing but address space. */
enum { BLAS_BUFFER_BYTES = 129 << 20 };

static struct {
    int threads;             /* 0: kernels_init was not called */
    bool no_avx2, no_avx512; /* as kernels_limit_path said */
    bool one_blas_caller;    /* the BLAS may not be called by several threads at once */
    double peak_flops[2];    /* fp32, fp64; 0: not measured yet */
} state;

/* Panels are handed to single-threaded calls; a second pool of threads would fight with ours and make sums depend
 * on their number. Called by every thread of ours: OpenBLAS's OpenMP build asks at each call how many threads OpenMP
 * would use, and that is set for the calling thread only. */
static void blas_without_threads(void) {
    if (openblas_set_num_threads) openblas_set_num_threads(1);
}

static size_t packing_buffers(void) {
    if (kernels_avx512()) return sgemm_buffers_avx512();
    return kernels_avx2() ? sgemm_buffers_avx2() : 0;
}

static void worker_start(void) {
    blas_without_threads();
    packing_buffers();
}

void kernels_init(int threads) {
    REQUIRE(threads >= 1);
    state.threads = threads;
    state.peak_flops[0] = state.peak_flops[1] = 0.0;
    blas_without_threads();
    threads_set_start(worker_start);
    state.one_blas_caller = openblas_get_config && strstr(openblas_get_config(), "SINGLE_THREADED");
    if (state.one_blas_caller && threads > 1) {
        log_warn(LOG_MAIN,
                 "the linked OpenBLAS is a build without threads, which several threads can't call: products that go "
                 "through it use one of this rank's %d threads; link its OpenMP or pthread build",
                 threads);
    }
}

static void do_nothing(void *args, int64_t index) {
    (void)args;
    (void)index;
}

/* OpenBLAS tries without end where the system gives it no buffer (ulimit -v): asked for here first. */
static void require_blas_memory(int threads) {
    const size_t bytes = (size_t)threads * BLAS_BUFFER_BYTES;
    void *room = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
        die(EXIT_LAUNCH,
            "the BLAS may want %zu MiB of address space for %d thread%s, and the system does not give it: %s (ulimit "
            "-v). Raise the limit, or lower train.threads",
            bytes >> 20, threads, threads == 1 ? "" : "s", strerror(errno));
    }
    munmap(room, bytes);
}

/* As many buffers as there are threads which may call the BLAS at once. */
static void fill_blas_pool(int threads) {
    if (!blas_memory_alloc || !blas_memory_free) return;
    require_blas_memory(threads);
    void **buffers = xcalloc((uint64_t)threads, sizeof *buffers);
    for (int i = 0; i < threads; i++) buffers[i] = blas_memory_alloc(0);
    for (int i = 0; i < threads; i++) blas_memory_free(buffers[i]);
    free(buffers);
}

int64_t kernels_prepare(DType dtype) {
    const int threads = kernels_threads();
    const int64_t buffer_bytes = (int64_t)packing_buffers();
    share_tasks(threads, do_nothing, NULL); /* starts the workers, each of which makes its own */
    const bool through_blas = dtype != DT_F32 || buffer_bytes == 0;
    if (through_blas) fill_blas_pool(state.one_blas_caller ? 1 : threads);
    return through_blas ? 0 : threads * buffer_bytes;
}

bool kernels_one_blas_caller(void) { return state.one_blas_caller; }

int kernels_threads(void) { return state.threads > 0 ? state.threads : 1; }

static bool cpu_has_avx2(void) {
#if KERNELS_X86
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

static bool cpu_has_avx512(void) {
#if KERNELS_X86
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

bool kernels_avx2_chosen(void) { return !state.no_avx2 && cpu_has_avx2(); }

bool kernels_avx512_chosen(void) { return !state.no_avx512 && kernels_avx2_chosen() && cpu_has_avx512(); }

const char *kernels_path(void) { return kernels_avx512() ? "avx512" : kernels_avx2() ? "avx2" : "portable"; }

const char *kernels_numerics(DType dtype) {
    static char text[512];
    const bool through_blas = dtype != DT_F32 || !kernels_avx2();
    const char *blas = through_blas && openblas_get_config ? openblas_get_config() : "";
    snprintf(text, sizeof text, "%s kernels, libm %s%s%s%s", kernels_path(), gnu_get_libc_version(),
             through_blas ? ", " : "", blas, through_blas && !blas[0] ? "an unknown BLAS" : "");
    return text;
}

void kernels_limit_path(const char *path) {
    const bool portable = path && strcmp(path, "portable") == 0, avx2 = path && strcmp(path, "avx2") == 0;
    REQUIRE(!path || portable || avx2 || strcmp(path, "avx512") == 0);
    state.no_avx2 = portable;
    state.no_avx512 = portable || avx2;
}

void share_chunks(int64_t count, ChunkFunction run, void *args) {
    int threads = (int)min_i64(kernels_threads(), count);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) run(args, i);
        return;
    }
    threads_run(threads, min_i64(threads, BLOCKS_MAX), count, run, args);
}

void share_tasks(int64_t count, ChunkFunction run, void *args) {
    int threads = (int)min_i64(kernels_threads(), count);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) run(args, i);
        return;
    }
    threads_run(threads, 1, count, run, args);
}

/* ---- multiply-add peak ---- */

typedef struct {
    DType dtype;
    int64_t iterations;
    double *cpu_s; /* (threads) of the last try */
    double sink[]; /* one a task: keeps the arithmetic alive */
} PeakArgs;

static double thread_cpu_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void peak_task(void *args, int64_t index) {
    PeakArgs *a = args;
    double start_s = thread_cpu_s();
    if (kernels_avx512()) {
        a->sink[index] = peak_loop_avx512(a->dtype, a->iterations);
    } else if (kernels_avx2()) {
        a->sink[index] = peak_loop_avx2(a->dtype, a->iterations);
    } else {
        a->sink[index] = peak_loop_portable(a->dtype, a->iterations);
    }
    a->cpu_s[index] = thread_cpu_s() - start_s;
}

double kernels_peak_flops(DType dtype) {
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    double *peak = &state.peak_flops[dtype == DT_F64];
    if (*peak > 0.0) return *peak;
    int threads = kernels_threads();
    PeakArgs *args = xcalloc(1, sizeof(PeakArgs) + sizeof(double) * (uint64_t)threads);
    args->cpu_s = xcalloc((uint64_t)threads, sizeof(double));
    args->dtype = dtype;
    args->iterations = 20000;
    const int register_bytes = kernels_avx512() ? 64 : kernels_avx2() ? 32 : 0;
    double flops = peak_loop_flops(dtype, register_bytes) * (double)args->iterations;
    /* Of the threads' own time, so that waiting for a core that others use counts for nothing; and the best of
     * several tries, since a core that others use is slower too. */
    double start_s = clock_s(), best = 0.0;
    for (int tries = 0; tries < 4 || clock_s() - start_s < 0.02; tries++) {
        share_chunks(threads, peak_task, args);
        double rate = 0.0;
        for (int t = 0; t < threads; t++) rate += flops / args->cpu_s[t];
        if (rate > best) best = rate;
    }
    free(args->cpu_s);
    free(args);
    *peak = best;
    return best;
}
