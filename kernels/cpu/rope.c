/* rope.c - rotary position embedding: the table of angles and the rotation in place.
 * In: rows of heads, a position a row.  Out: the same rows, rotated (back, where inverse).
 * Invariants: angles are computed in fp64 whatever the dtype; rows are independent. */
#include "kernels/cpu/rope.h"

#include <math.h>

#include "kernels/cpu/common.h"
#include "kernels/kernels.h"

typedef struct {
    void *x;
    const int32_t *positions;
    const void *table;
    int64_t ld, N, heads, D, chunk_rows;
    bool inverse;
} RopeArgs;

#define REAL float
#define SUFFIX f32
#define ROPE_ROW(...) (kernels_avx2() ? rope_row_avx2(__VA_ARGS__) : rope_row_f32(__VA_ARGS__))
#include "kernels/cpu/rope_real.h"
#undef REAL
#undef SUFFIX
#undef ROPE_ROW

#define REAL double
#define SUFFIX f64
#define ROPE_ROW rope_row_f64
#include "kernels/cpu/rope_real.h"

void rope_table(void *table, int64_t positions, int64_t D, double theta, DType dtype, Stream *stream) {
    (void)stream; /* compute runs at the call on this platform */
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(positions >= 0 && D >= 2 && D % 2 == 0 && theta > 0.0);
    for (int64_t p = 0; p < positions; p++) {
        if (dtype == DT_F64) {
            table_row_f64((double *)table + p * D, p, D, theta);
        } else {
            table_row_f32((float *)table + p * D, p, D, theta);
        }
    }
}

void rope(void *x, int64_t ld, const int32_t *positions, const void *table, bool inverse, int64_t N, int64_t heads,
          int64_t D, DType dtype, Stream *stream) {
    (void)stream;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(N >= 0 && heads >= 0 && D >= 2 && D % 2 == 0 && D / 2 <= ROPE_HALF_MAX && ld >= heads * D);
    if (N == 0 || heads == 0) return;
    RopeArgs a = {
        .x = x, .positions = positions, .table = table, .ld = ld, .N = N, .heads = heads, .D = D, .inverse = inverse};
    a.chunk_rows = max_i64(1, CHUNK_ELEMENTS / (heads * D));
    share_chunks(ceil_div(N, a.chunk_rows), dtype == DT_F64 ? rope_chunk_f64 : rope_chunk_f32, &a);
}
