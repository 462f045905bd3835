/* gemm_bench.c - matmul() against OpenBLAS with threads of its own, on the products of a training step.
 * Usage: gemm_bench THREADS [SECONDS_PER_SHAPE] [OPENBLAS_LIBRARY]
 * Each shape is run by both in turn, so that both see the same neighbours; rates are of the best call
 * and of the median. The last lines are harmonic means over the 17 shapes x 3 transposes, their
 * ratio, and the worst shape as a share of our mean.
 * Without the peer library (default: Debian's openmp build) our own figures are printed alone. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/log.h"
#include "kernels/kernels.h"

typedef void (*Sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                      const float *b, int ldb, float beta, float *c, int ldc);
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112, CALLS_MAX = 2000, SHAPES = 17 };

/* M tokens, K inputs, N outputs of a linear layer. */
static const int shapes[SHAPES][3] = {
    {256, 256, 768},   {256, 256, 1024},  {256, 1024, 256},  {1024, 256, 768}, {1024, 256, 1024}, {1024, 1024, 256},
    {2048, 256, 768},  {2048, 256, 1024}, {256, 768, 2304},  {1024, 768, 768}, {1024, 768, 2304}, {1024, 768, 3072},
    {1024, 3072, 768}, {2048, 768, 3072}, {2048, 256, 8192}, {512, 128, 512},  {1024, 128, 384}};

typedef struct {
    float *c, *a, *b;
    bool trans_a, trans_b;
    int m, n, k, lda, ldb;
} Call;

typedef struct {
    double best_s, median_s;
} Times;

static Sgemm peer_open(const char *path, int threads) {
    /* DEEPBIND: the peer must find its own symbols, not those of the BLAS that we are linked with. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!library) return NULL;
    void (*set_threads)(int) = (void (*)(int))dlsym(library, "openblas_set_num_threads");
    if (set_threads) set_threads(threads);
    return (Sgemm)dlsym(library, "cblas_sgemm");
}

static float *filled(int64_t count, unsigned seed) {
    float *x = aligned_alloc(64, (size_t)round_up(count * (int64_t)sizeof(float), 64)); /* as the arena does */
    REQUIRE(x);
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)((((uint64_t)i + seed) * 2654435761u >> 8) & 1023) / 1024.0f - 0.5f;
    return x;
}

static double run_ours(const Call *c) {
    double start_s = clock_s();
    matmul(c->c, c->n, c->a, c->lda, c->trans_a, c->b, c->ldb, c->trans_b, c->m, c->n, c->k, false, NULL, DT_F32, NULL);
    return clock_s() - start_s;
}

static double run_peer(Sgemm peer, const Call *c) {
    double start_s = clock_s();
    peer(ROW_MAJOR, c->trans_a ? TRANS : NO_TRANS, c->trans_b ? TRANS : NO_TRANS, c->m, c->n, c->k, 1.0f, c->a, c->lda,
         c->b, c->ldb, 0.0f, c->c, c->n);
    return clock_s() - start_s;
}

static int compare_double(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static Times times_of(double *seconds, int count) {
    qsort(seconds, (size_t)count, sizeof(double), compare_double);
    return (Times){seconds[0], seconds[count / 2]};
}

static void bench_call(const Call *call, Sgemm peer, double limit_s, Times *ours, Times *theirs) {
    static double ours_s[CALLS_MAX], peer_s[CALLS_MAX];
    run_ours(call);
    if (peer) run_peer(peer, call);
    int n = 0;
    double start_s = clock_s();
    while (n < CALLS_MAX && (n < 5 || clock_s() - start_s < limit_s)) {
        ours_s[n] = run_ours(call);
        peer_s[n] = peer ? run_peer(peer, call) : ours_s[n];
        n++;
    }
    *ours = times_of(ours_s, n);
    *theirs = times_of(peer_s, n);
}

/* forward y = x w^T (NT), dx = dy w (NN), dw = dy^T x (TN). */
static Call call_of(const int shape[3], int direction, float *x, float *w, float *y) {
    int M = shape[0], K = shape[1], N = shape[2];
    if (direction == 0) return (Call){y, x, w, false, true, M, N, K, K, K};
    if (direction == 1) return (Call){x, y, w, false, false, M, K, N, N, K};
    return (Call){w, y, x, true, false, N, K, M, N, K};
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    double limit_s = argc > 2 ? atof(argv[2]) : 0.25;
    const char *path = argc > 3 ? argv[3] : "/usr/lib/x86_64-linux-gnu/openblas-openmp/libopenblas.so.0";
    static const char *const names[3] = {"NT", "NN", "TN"};
    if (threads < 1) die(EXIT_CONFIG, "threads must be at least 1, not %s", argv[1]);
    kernels_init(threads);
    Sgemm peer = peer_open(path, threads);
    if (!peer) printf("no peer: %s\n", dlerror());
    double sums[4] = {0}, worst = 1e30, worst_ratio = 1e30;
    int n = 0;
    for (int s = 0; s < SHAPES; s++) {
        int64_t M = shapes[s][0], K = shapes[s][1], N = shapes[s][2];
        float *x = filled(M * K, 1), *w = filled(N * K, 2), *y = filled(M * N, 3);
        for (int d = 0; d < 3; d++, n++) {
            Call call = call_of(shapes[s], d, x, w, y);
            double gflop = 2e-9 * (double)M * (double)N * (double)K;
            Times ours, theirs;
            bench_call(&call, peer, limit_s, &ours, &theirs);
            printf("%s M %4d N %4d K %4d  best %6.1f of %6.1f  median %6.1f of %6.1f GFLOP/s  ratio %.3f\n", names[d],
                   call.m, call.n, call.k, gflop / ours.best_s, gflop / theirs.best_s, gflop / ours.median_s,
                   gflop / theirs.median_s, theirs.median_s / ours.median_s);
            sums[0] += ours.best_s / gflop, sums[1] += theirs.best_s / gflop;
            sums[2] += ours.median_s / gflop, sums[3] += theirs.median_s / gflop;
            worst = gflop / ours.best_s < worst ? gflop / ours.best_s : worst;
            double ratio = theirs.median_s / ours.median_s;
            worst_ratio = ratio < worst_ratio ? ratio : worst_ratio;
        }
        free(x), free(w), free(y);
    }
    printf("harmonic mean, %d thread(s): best %.1f of %.1f (ratio %.3f), median %.1f of %.1f (ratio %.3f) GFLOP/s\n",
           threads, n / sums[0], n / sums[1], sums[1] / sums[0], n / sums[2], n / sums[3], sums[3] / sums[2]);
    printf("worst shape: %.2f of the mean; worst ratio %.3f; peak %.1f GFLOP/s\n", worst / (n / sums[0]), worst_ratio,
           kernels_peak_flops(DT_F32) * 1e-9);
    return 0;
}
