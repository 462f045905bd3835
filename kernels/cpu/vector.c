/* vector.c - norms, sums and scaling of flat arrays.
 * In: arrays. Out: fp64 sums, scaled arrays.
 * Invariant: sums are added by chunks of fixed size, and the chunks in order, so that they depend on
 * the length only. */
#include "kernels/cpu/vector.h"

#include "kernels/cpu/common.h"
#include "kernels/kernels.h"

enum { PARTIALS = 1024, SQUARES_LANES = 16 };

typedef struct {
    const void *x;
    void *y;
    double *partial;
    double factor;
    int64_t n;
} VectorArgs;

#define SQUARES_LINKAGE static
#define REAL float
#define SUFFIX f32
#include "kernels/cpu/vector_real.h"
#undef REAL
#undef SUFFIX

#define REAL double
#define SUFFIX f64
#include "kernels/cpu/vector_real.h"

static void squares_chunk_f32(void *args, int64_t index) {
    const VectorArgs *a = args;
    const int64_t first = index * CHUNK_ELEMENTS, n = min_i64(CHUNK_ELEMENTS, a->n - first);
    const float *x = (const float *)a->x + first;
    a->partial[index] = kernels_avx2() ? squares_avx2(x, n) : squares_f32(x, n);
}

static void squares_chunk_f64(void *args, int64_t index) {
    const VectorArgs *a = args;
    const int64_t first = index * CHUNK_ELEMENTS;
    a->partial[index] = squares_f64((const double *)a->x + first, min_i64(CHUNK_ELEMENTS, a->n - first));
}

void squared_norm(double *sum, const void *x, int64_t n, DType dtype, Stream *stream) {
    (void)stream; /* compute runs at the call on this platform */
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(n >= 0);
    double partial[PARTIALS];
    const int64_t span = (int64_t)PARTIALS * CHUNK_ELEMENTS;
    for (int64_t first = 0; first < n; first += span) {
        VectorArgs args = {.x = (const char *)x + first * (int64_t)dtype_size(dtype),
                           .partial = partial,
                           .n = min_i64(span, n - first)};
        const int64_t chunks = ceil_div(args.n, CHUNK_ELEMENTS);
        share_chunks(chunks, dtype == DT_F64 ? squares_chunk_f64 : squares_chunk_f32, &args);
        for (int64_t i = 0; i < chunks; i++) *sum += partial[i];
    }
}

static void scale_chunk_f32(void *args, int64_t index) {
    const VectorArgs *a = args;
    const int64_t end = min_i64(a->n, (index + 1) * CHUNK_ELEMENTS);
    const float factor = (float)a->factor;
    for (int64_t i = index * CHUNK_ELEMENTS; i < end; i++) ((float *)a->y)[i] *= factor;
}

static void scale_chunk_f64(void *args, int64_t index) {
    const VectorArgs *a = args;
    const int64_t end = min_i64(a->n, (index + 1) * CHUNK_ELEMENTS);
    for (int64_t i = index * CHUNK_ELEMENTS; i < end; i++) ((double *)a->y)[i] *= a->factor;
}

void scale(void *x, double factor, int64_t n, DType dtype, Stream *stream) {
    (void)stream;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(n >= 0);
    VectorArgs args = {.y = x, .factor = factor, .n = n};
    share_chunks(ceil_div(n, CHUNK_ELEMENTS), dtype == DT_F64 ? scale_chunk_f64 : scale_chunk_f32, &args);
}

void sum_stats(double *sum, const void *x, int64_t n, DType dtype, Stream *stream) {
    (void)stream;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    for (int64_t i = 0; i < n; i++) {
        *sum += dtype == DT_F64 ? ((const double *)x)[i] : (double)((const float *)x)[i];
    }
}
