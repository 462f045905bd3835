/* gemm_bench.c - matmul() against OpenBLAS with threads of its own, on the products of a training step.
 * Usage: gemm_bench THREADS [SECONDS] [OPENBLAS_LIBRARY]
 * Rounds over all products are run until SECONDS (30) have passed. In a round each product is called for some
 * milliseconds by us and by the peer, who begin in turn, and the median call of each counts; a product's figure is
 * the median of its rounds. So a load or a clock that changes during the run meets all products and both programs.
 * With several threads a program begins when the other's threads have stopped looking for work.
 * The last lines are harmonic means over the 17 shapes x 3 transposes, of the medians and of the best rounds, with
 * their ratios, and the worst products.
 * Without the peer library (default: Debian's openmp build) our own figures are printed alone. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/check.h"
#include "base/log.h"
#include "kernels/kernels.h"

typedef void (*Sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                      const float *b, int ldb, float beta, float *c, int ldc);
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112, CALLS_MAX = 2000, ROUNDS_MAX = 100, ROUNDS_MIN = 3 };
enum { SHAPES = 17, PRODUCTS = 3 * SHAPES };
enum { OURS, PEER, PROGRAMS };
static const double BLOCK_S = 8e-3;

/* M tokens, K inputs, N outputs of a linear layer. */
static const int shapes[SHAPES][3] = {
    {256, 256, 768},   {256, 256, 1024},  {256, 1024, 256},  {1024, 256, 768}, {1024, 256, 1024}, {1024, 1024, 256},
    {2048, 256, 768},  {2048, 256, 1024}, {256, 768, 2304},  {1024, 768, 768}, {1024, 768, 2304}, {1024, 768, 3072},
    {1024, 3072, 768}, {2048, 768, 3072}, {2048, 256, 8192}, {512, 128, 512},  {1024, 128, 384}};

typedef struct {
    const char *name;
    const float *a, *b;
    bool trans_a, trans_b;
    int m, n, k, lda, ldb;
    double gflop;
    double seconds[PROGRAMS][ROUNDS_MAX]; /* a call, by round; sorted when all are done */
} Product;

static Product products[PRODUCTS];
static float *out; /* of any product: inputs stay as they are */
static Sgemm peer; /* NULL: there is none */

static Sgemm peer_open(const char *path, int threads) {
    /* DEEPBIND: the peer must find its own symbols, not those of the BLAS that we are linked with. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!library) {
        printf("no peer: %s\n", dlerror());
        return NULL;
    }
    void (*set_threads)(int) = (void (*)(int))dlsym(library, "openblas_set_num_threads");
    if (set_threads) set_threads(threads);
    return (Sgemm)dlsym(library, "cblas_sgemm");
}

/* ---- products ---- */

static float *filled(int64_t count, unsigned seed) {
    float *x = aligned_alloc(64, (size_t)round_up(count * (int64_t)sizeof(float), 64)); /* as the arena does */
    REQUIRE(x);
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)((((uint64_t)i + seed) * 2654435761u >> 8) & 1023) / 1024.0f - 0.5f;
    return x;
}

/* forward y = x w^T (NT), dx = dy w (NN), dw = dy^T x (TN). */
static void make_products(void) {
    int64_t out_count = 0;
    for (int s = 0; s < SHAPES; s++) {
        int M = shapes[s][0], K = shapes[s][1], N = shapes[s][2];
        const float *x = filled((int64_t)M * K, 1), *w = filled((int64_t)N * K, 2), *y = filled((int64_t)M * N, 3);
        double gflop = 2e-9 * M * N * K;
        Product *p = &products[3 * s];
        p[0] = (Product){"NT", x, w, false, true, M, N, K, K, K, gflop, {{0}}};
        p[1] = (Product){"NN", y, w, false, false, M, K, N, N, K, gflop, {{0}}};
        p[2] = (Product){"TN", y, x, true, false, N, K, M, N, K, gflop, {{0}}};
        for (int d = 0; d < 3; d++) out_count = max_i64(out_count, (int64_t)p[d].m * p[d].n);
    }
    out = filled(out_count, 4);
}

static void call(const Product *p, int program) {
    if (program == OURS) {
        matmul(out, p->n, p->a, p->lda, p->trans_a, p->b, p->ldb, p->trans_b, p->m, p->n, p->k, false, NULL, DT_F32,
               NULL);
    } else {
        peer(ROW_MAJOR, p->trans_a ? TRANS : NO_TRANS, p->trans_b ? TRANS : NO_TRANS, p->m, p->n, p->k, 1.0f, p->a,
             p->lda, p->b, p->ldb, 0.0f, out, p->n);
    }
}

/* ---- timing ---- */

static int compare_double(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double sorted_median(double *x, int count) {
    qsort(x, (size_t)count, sizeof(double), compare_double);
    return x[count / 2];
}

/* Returns when this process has used no processor for a while, at the latest after half a second. The system books the
 * time of threads that run on other cores at its ticks, up to 10 ms apart: a shorter look sees nothing of them. */
static void wait_for_idle_threads(void) {
    for (int i = 0; i < 20; i++) {
        clock_t before = clock();
        nanosleep(&(struct timespec){.tv_nsec = 25000000}, NULL);
        if ((double)(clock() - before) / CLOCKS_PER_SEC < 1e-3) return;
    }
}

/* The median call of some milliseconds, after one that wakes the threads and fetches the inputs. */
static double time_block(const Product *p, int program) {
    static double call_s[CALLS_MAX];
    int n = 0;
    call(p, program);
    double start_s = clock_s(), now_s = start_s;
    while (n < CALLS_MAX && (n == 0 || now_s - start_s < BLOCK_S)) {
        double before_s = now_s;
        call(p, program);
        now_s = clock_s();
        call_s[n++] = now_s - before_s;
    }
    return sorted_median(call_s, n);
}

static int run_rounds(int threads, double limit_s) {
    int round = 0;
    double start_s = clock_s();
    for (; round < ROUNDS_MAX && (round < ROUNDS_MIN || clock_s() - start_s < limit_s); round++) {
        for (Product *p = products; p < products + PRODUCTS; p++) {
            for (int i = 0; i < PROGRAMS; i++) {
                int program = (round + i) % PROGRAMS;
                if (program == PEER && !peer) continue;
                if (threads > 1) wait_for_idle_threads();
                p->seconds[program][round] = time_block(p, program);
            }
        }
    }
    return round;
}

/* ---- table ---- */

static double ratio_of(const Product *p, int at) { return p->seconds[PEER][at] / p->seconds[OURS][at]; }

static void print_product(const Product *p, int at, double mean) {
    double ours = p->gflop / p->seconds[OURS][at];
    printf("%s M %4d N %4d K %4d  %6.1f GFLOP/s, %3.0f %% of the mean", p->name, p->m, p->n, p->k, ours,
           100.0 * ours / mean);
    if (peer) printf("; peer %6.1f, ratio %.3f", p->gflop / p->seconds[PEER][at], ratio_of(p, at));
    printf("\n");
}

/* Harmonic mean of the rates in one place of the sorted rounds. */
static double mean_rate(int program, int at) {
    double sum = 0.0;
    for (const Product *p = products; p < products + PRODUCTS; p++) sum += p->seconds[program][at] / p->gflop;
    return PRODUCTS / sum;
}

static void print_means(const char *what, int at) {
    double ours = mean_rate(OURS, at);
    printf("harmonic mean of the %s: %.1f GFLOP/s", what, ours);
    if (peer) printf("; peer %.1f, ratio %.3f", mean_rate(PEER, at), ours / mean_rate(PEER, at));
    const Product *slowest = products, *weakest = products;
    for (const Product *p = products; p < products + PRODUCTS; p++) {
        if (p->gflop / p->seconds[OURS][at] < slowest->gflop / slowest->seconds[OURS][at]) slowest = p;
        if (peer && ratio_of(p, at) < ratio_of(weakest, at)) weakest = p;
    }
    printf("\n  slowest:        ");
    print_product(slowest, at, ours);
    if (!peer) return;
    printf("  smallest ratio: ");
    print_product(weakest, at, ours);
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    double limit_s = argc > 2 ? atof(argv[2]) : 30.0;
    if (threads < 1) die(EXIT_CONFIG, "threads must be at least 1, not %s", argv[1]);
    kernels_init(threads);
    peer = peer_open(argc > 3 ? argv[3] : "/usr/lib/x86_64-linux-gnu/openblas-openmp/libopenblas.so.0", threads);
    make_products();
    int rounds = run_rounds(threads, limit_s);
    for (Product *p = products; p < products + PRODUCTS; p++) {
        for (int i = 0; i < PROGRAMS; i++) sorted_median(p->seconds[i], rounds);
    }
    printf("%d thread(s), %d interleaved rounds; a product's figure is the median of its rounds\n", threads, rounds);
    for (const Product *p = products; p < products + PRODUCTS; p++) {
        print_product(p, rounds / 2, mean_rate(OURS, rounds / 2));
    }
    print_means("medians", rounds / 2);
    print_means("best rounds", 0);
    printf("peak of this machine: %.1f GFLOP/s\n", kernels_peak_flops(DT_F32) * 1e-9);
    return 0;
}
