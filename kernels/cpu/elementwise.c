/* elementwise.c - residual addition, bias gradient and SwiGLU.
 * In, out: rows. Invariant: rows, or columns of the bias gradient, are independent, so that any
 * number of threads gives the same bits. */
#include "kernels/cpu/elementwise.h"

#include <math.h>

enum { BIAS_COLUMNS = 128 };

typedef struct {
    void *y;
    const void *a, *b, *bias;
    int64_t N, C, chunk_rows;
} AddArgs;

typedef struct {
    void *db;
    const void *dy;
    int64_t ld, N, C;
} BiasArgs;

typedef struct {
    void *y, *dgate_up;
    const void *dy, *gate_up;
    int64_t N, F, chunk_rows;
} SwigluArgs;

#define REAL float
#define SUFFIX f32
#define REAL_EXP expf
#define SWIGLU_ROW(...) (kernels_avx2() ? swiglu_row_avx2(__VA_ARGS__) : swiglu_row_f32(__VA_ARGS__))
#define SWIGLU_BACKWARD_ROW(...) \
    (kernels_avx2() ? swiglu_backward_row_avx2(__VA_ARGS__) : swiglu_backward_row_f32(__VA_ARGS__))
#include "kernels/cpu/elementwise_real.h"
#undef REAL
#undef SUFFIX
#undef REAL_EXP
#undef SWIGLU_ROW
#undef SWIGLU_BACKWARD_ROW

#define REAL double
#define SUFFIX f64
#define REAL_EXP exp
#define SWIGLU_ROW swiglu_row_f64
#define SWIGLU_BACKWARD_ROW swiglu_backward_row_f64
#include "kernels/cpu/elementwise_real.h"

void residual_add(void *y, const void *a, const void *b, const void *bias, int64_t N, int64_t C, DType dtype,
                  Stream *stream) {
    (void)stream; /* compute runs at the call on this platform */
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(N >= 0 && C >= 1);
    AddArgs args = {.y = y, .a = a, .b = b, .bias = bias, .N = N, .C = C, .chunk_rows = max_i64(1, CHUNK_ELEMENTS / C)};
    share_chunks(ceil_div(N, args.chunk_rows), dtype == DT_F64 ? add_chunk_f64 : add_chunk_f32, &args);
}

void bias_backward(void *db, const void *dy, int64_t ld, int64_t N, int64_t C, DType dtype, Stream *stream) {
    (void)stream;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(N >= 0 && C >= 1 && ld >= C);
    BiasArgs args = {.db = db, .dy = dy, .ld = ld, .N = N, .C = C};
    share_chunks(ceil_div(C, BIAS_COLUMNS), dtype == DT_F64 ? bias_chunk_f64 : bias_chunk_f32, &args);
}

void swiglu_forward(void *y, const void *gate_up, int64_t N, int64_t F, DType dtype, Stream *stream) {
    (void)stream;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(N >= 0 && F >= 1);
    SwigluArgs args = {.y = y, .gate_up = gate_up, .N = N, .F = F, .chunk_rows = max_i64(1, CHUNK_ELEMENTS / F)};
    share_chunks(ceil_div(N, args.chunk_rows), dtype == DT_F64 ? swiglu_chunk_f64 : swiglu_chunk_f32, &args);
}

void swiglu_backward(void *dgate_up, const void *dy, const void *gate_up, int64_t N, int64_t F, DType dtype,
                     Stream *stream) {
    (void)stream;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(N >= 0 && F >= 1);
    SwigluArgs args = {.dgate_up = dgate_up,
                       .dy = dy,
                       .gate_up = gate_up,
                       .N = N,
                       .F = F,
                       .chunk_rows = max_i64(1, CHUNK_ELEMENTS / F)};
    share_chunks(ceil_div(N, args.chunk_rows), dtype == DT_F64 ? swiglu_backward_chunk_f64 : swiglu_backward_chunk_f32,
                 &args);
}
