/* attention_bench.c - rate of attention, forward and backward, at the sizes that are trained.
 * Usage: attention_bench THREADS [SECONDS_PER_SHAPE]
 * FLOP are those of the causal half: 2 products of T (T + 1) / 2 x D forward, 5 backward. Minimum and
 * median over the calls, and the share of the machine's measured multiply-add peak. */
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/log.h"
#include "kernels/kernels.h"

enum { CALLS_MAX = 5000 };

typedef struct {
    const char *name;
    int64_t B, T, H, KV, D;
} Case;

static const Case cases[] = {{"tiny", 8, 128, 4, 4, 32},          {"small", 8, 256, 8, 8, 32},
                             {"124m", 4, 256, 12, 12, 64},        {"grouped", 4, 512, 16, 4, 64},
                             {"long, D 128", 1, 2048, 8, 2, 128}, {"odd head 72", 4, 256, 8, 8, 72}};

static float *filled(int64_t count, unsigned seed) {
    float *x = aligned_alloc(64, (size_t)round_up(count * (int64_t)sizeof(float), 64)); /* as the arena does */
    REQUIRE(x);
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)((((uint64_t)i + seed) * 2654435761u >> 8) & 1023) / 512.0f - 1.0f;
    return x;
}

static int compare_double(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *what, double *seconds, int n, double gflop) {
    qsort(seconds, (size_t)n, sizeof(double), compare_double);
    double best = gflop / seconds[0], peak = kernels_peak_flops(DT_F32) * 1e-9;
    printf("  %-9s best %8.3f ms %6.1f GFLOP/s (%2.0f %% of peak)  median %8.3f ms %6.1f GFLOP/s\n", what,
           1e3 * seconds[0], best, 100.0 * best / peak, 1e3 * seconds[n / 2], gflop / seconds[n / 2]);
}

static void bench_case(const Case *c, double limit_s) {
    static double forward_s[CALLS_MAX], backward_s[CALLS_MAX];
    int64_t q_width = c->H * c->D, kv_width = c->KV * c->D, ld = q_width + 2 * kv_width, N = c->B * c->T;
    float *qkv = filled(N * ld, 1), *dqkv = filled(N * ld, 2), *out = filled(N * q_width, 3);
    float *dout = filled(N * q_width, 4), *lse = filled(c->B * c->H * c->T, 5);
    AttentionShape s = {.B = c->B,
                        .T = c->T,
                        .T_keys = c->T,
                        .H = c->H,
                        .KV = c->KV,
                        .D = c->D,
                        .ld_q = ld,
                        .ld_kv = ld,
                        .ld_out = q_width};
    void *workspace = xmalloc((uint64_t)attention_backward_workspace(&s, DT_F32));
    double begin_s = clock_s();
    int n = 0;
    while (n < CALLS_MAX && (n < 4 || clock_s() - begin_s < limit_s)) {
        double t0 = clock_s();
        attention_forward(out, lse, qkv, qkv + q_width, qkv + q_width + kv_width, &s, DT_F32, NULL);
        double t1 = clock_s();
        attention_backward(dqkv, dqkv + q_width, dqkv + q_width + kv_width, dout, qkv, qkv + q_width,
                           qkv + q_width + kv_width, out, lse, &s, workspace, DT_F32, NULL);
        forward_s[n] = t1 - t0;
        backward_s[n++] = clock_s() - t1;
    }
    double product_gflop = 1e-9 * (double)(c->B * c->H * c->D) * (double)c->T * (double)(c->T + 1);
    printf("%s: B %lld, T %lld, H %lld, KV %lld, D %lld\n", c->name, (long long)c->B, (long long)c->T, (long long)c->H,
           (long long)c->KV, (long long)c->D);
    report("forward", forward_s, n, 2.0 * product_gflop);
    report("backward", backward_s, n, 5.0 * product_gflop);
    free(qkv), free(dqkv), free(out), free(dout), free(lse), free(workspace);
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    double limit_s = argc > 2 ? atof(argv[2]) : 0.5;
    if (threads < 1) die(EXIT_CONFIG, "threads must be at least 1, not %s", argv[1]);
    kernels_init(threads);
    printf("%d thread(s), path %s, peak %.1f GFLOP/s\n", threads, kernels_path(), kernels_peak_flops(DT_F32) * 1e-9);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) bench_case(&cases[i], limit_s);
    return 0;
}
