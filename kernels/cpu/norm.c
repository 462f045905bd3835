/* norm.c - LayerNorm and RMSNorm, fused with the residual addition; backward pass.
 * In: rows. Out: normalised rows, statistics; gradients of rows and weights.
 * Invariants: a row is summed in an order that depends on C only; weight gradients are summed by
 * blocks of rows whose number depends on N only, and the blocks in order. */
#include "kernels/cpu/norm.h"

#include <math.h>

/* Row blocks of the backward pass: enough for many threads, few enough to add up quickly. */
enum { BLOCKS_MAX = 32, BLOCK_ROWS_MIN = 16 };

#define NORM_LINKAGE static
#define REAL float
#define SUFFIX f32
#define REAL_SQRT sqrtf
#include "kernels/cpu/norm_real.h"
#undef REAL
#undef SUFFIX
#undef REAL_SQRT

#define REAL double
#define SUFFIX f64
#define REAL_SQRT sqrt
#include "kernels/cpu/norm_real.h"

/* The partial sums of all blocks, in their order, onto the gradients. */
#define DEFINE_COMBINE(REAL_TYPE, name)                                               \
    static void name(const NormBackwardArgs *a) {                                     \
        const int64_t C = a->C, width = C * (a->layer ? 2 : 1);                       \
        REAL_TYPE *dw = a->dw, *db = a->db;                                           \
        for (int64_t block = 0; block < a->blocks; block++) {                         \
            const REAL_TYPE *partial = (const REAL_TYPE *)a->partial + block * width; \
            for (int64_t c = 0; c < C; c++) dw[c] += partial[c];                      \
            for (int64_t c = 0; a->layer && c < C; c++) db[c] += partial[C + c];      \
        }                                                                             \
    }
DEFINE_COMBINE(float, combine_f32)
DEFINE_COMBINE(double, combine_f64)

static int64_t block_rows(int64_t N) { return max_i64(BLOCK_ROWS_MIN, ceil_div(N, BLOCKS_MAX)); }

void residual_norm_forward(void *x_out, void *y, void *mean, void *rstd, const void *x, const void *delta,
                           const void *bias, const void *w, const void *b, NormKind kind, double eps, int64_t N,
                           int64_t C, DType dtype, Stream *stream) {
    (void)stream; /* compute runs at the call on this platform */
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(N >= 0 && C >= 1 && (x_out || !delta) && (delta || !bias));
    REQUIRE((kind == NORM_LAYER) == (mean != NULL));
    NormForwardArgs a = {.x_out = x_out,
                         .y = y,
                         .mean = mean,
                         .rstd = rstd,
                         .x = x,
                         .delta = delta,
                         .bias = bias,
                         .w = w,
                         .b = b,
                         .eps = eps,
                         .N = N,
                         .C = C};
    a.chunk_rows = max_i64(1, CHUNK_ELEMENTS / C);
    const ChunkFunction fp32 = kernels_avx2() ? norm_forward_chunk_avx2 : norm_forward_chunk_f32;
    share_chunks(ceil_div(N, a.chunk_rows), dtype == DT_F64 ? norm_forward_chunk_f64 : fp32, &a);
}

int64_t norm_backward_workspace(NormKind kind, int64_t N, int64_t C, DType dtype) {
    return ceil_div(N, block_rows(N)) * (kind == NORM_LAYER ? 2 : 1) * C * (int64_t)dtype_size(dtype);
}

void norm_backward(void *dx, void *dw, void *db, const void *dy, const void *x, const void *w, const void *mean,
                   const void *rstd, NormKind kind, int64_t N, int64_t C, void *workspace, DType dtype,
                   Stream *stream) {
    (void)stream;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(N >= 0 && C >= 1 && (kind == NORM_LAYER) == (db != NULL));
    NormBackwardArgs a = {.dx = dx,
                          .partial = workspace,
                          .dw = dw,
                          .db = db,
                          .dy = dy,
                          .x = x,
                          .w = w,
                          .mean = mean,
                          .rstd = rstd,
                          .N = N,
                          .C = C,
                          .layer = kind == NORM_LAYER};
    a.block_rows = block_rows(N);
    a.blocks = ceil_div(N, a.block_rows);
    const ChunkFunction fp32 = kernels_avx2() ? norm_backward_block_avx2 : norm_backward_block_f32;
    share_chunks(a.blocks, dtype == DT_F64 ? norm_backward_block_f64 : fp32, &a);
    if (dtype == DT_F64) {
        combine_f64(&a);
    } else {
        combine_f32(&a);
    }
}
