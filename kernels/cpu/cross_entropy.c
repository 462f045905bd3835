/* cross_entropy.c - the loss over a chunk of rows whose vocabulary is split over ranks.
 * In: logits of this rank's columns. Out: statistics, loss, gradient in place.
 * Invariants: rows are independent; NaN or inf among a row's logits gives a loss that is none;
 * -inf is a weight of 0, unless it is the target's. */
#include "kernels/cpu/cross_entropy.h"

#include <math.h>

typedef struct {
    void *stats, *loss, *lse, *logits;
    const void *all_stats;
    const int32_t *targets;
    double scale;
    int64_t vocab_first, ranks, n, V_valid, V, chunk_rows;
} LossArgs;

#define REAL float
#define SUFFIX f32
#define REAL_EXP expf
#define REAL_LOG logf
#define SOFTMAX_STATS_ROW(...) \
    (kernels_avx2() ? softmax_stats_row_avx2(__VA_ARGS__) : softmax_stats_row_f32(__VA_ARGS__))
#define SOFTMAX_ROW(...) (kernels_avx2() ? softmax_row_avx2(__VA_ARGS__) : softmax_row_f32(__VA_ARGS__))
#include "kernels/cpu/cross_entropy_real.h"
#undef REAL
#undef SUFFIX
#undef REAL_EXP
#undef REAL_LOG
#undef SOFTMAX_STATS_ROW
#undef SOFTMAX_ROW

#define REAL double
#define SUFFIX f64
#define REAL_EXP exp
#define REAL_LOG log
#define SOFTMAX_STATS_ROW softmax_stats_row_f64
#define SOFTMAX_ROW softmax_row_f64
#include "kernels/cpu/cross_entropy_real.h"

static void run_rows(LossArgs *args, ChunkFunction run) {
    args->chunk_rows = max_i64(1, CHUNK_ELEMENTS / args->V);
    share_chunks(ceil_div(args->n, args->chunk_rows), run, args);
}

void cross_entropy_stats(void *stats, const void *logits, const int32_t *targets, int64_t vocab_first, int64_t n,
                         int64_t V_valid, int64_t V, DType dtype, Stream *stream) {
    (void)stream; /* compute runs at the call on this platform */
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(n >= 0 && V >= 1 && V_valid >= 0 && V_valid <= V);
    LossArgs args = {.stats = stats,
                     .logits = (void *)(uintptr_t)logits,
                     .targets = targets,
                     .vocab_first = vocab_first,
                     .n = n,
                     .V_valid = V_valid,
                     .V = V};
    run_rows(&args, dtype == DT_F64 ? stats_chunk_f64 : stats_chunk_f32);
}

void cross_entropy_combine(void *loss, void *lse, const void *stats, const int32_t *targets, int64_t ranks, int64_t n,
                           DType dtype, Stream *stream) {
    (void)stream;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(n >= 0 && ranks >= 1);
    LossArgs args = {.loss = loss, .lse = lse, .all_stats = stats, .targets = targets, .ranks = ranks, .n = n};
    for (int64_t i = 0; i < n; i++) {
        if (dtype == DT_F64) {
            combine_row_f64(&args, i);
        } else {
            combine_row_f32(&args, i);
        }
    }
}

void cross_entropy_backward(void *logits, const void *lse, const int32_t *targets, double scale, int64_t vocab_first,
                            int64_t n, int64_t V_valid, int64_t V, DType dtype, Stream *stream) {
    (void)stream;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(n >= 0 && V >= 1 && V_valid >= 0 && V_valid <= V);
    LossArgs args = {.logits = logits,
                     .lse = (void *)(uintptr_t)lse,
                     .targets = targets,
                     .scale = scale,
                     .vocab_first = vocab_first,
                     .n = n,
                     .V_valid = V_valid,
                     .V = V};
    run_rows(&args, dtype == DT_F64 ? backward_chunk_f64 : backward_chunk_f32);
}
