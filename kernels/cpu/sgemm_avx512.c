/* sgemm_avx512.c - fp32 product for AVX-512: sgemm_packed.h with tiles of 12 x 32, or 8 or 4 rows at the lower
 * edge. Twelve rows of two registers make 24 independent sums, which hide the latency of the multiply-add and
 * load 14 registers for 24 of them. */
#ifdef __AVX512F__
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

/* Tuned on Sapphire Rapids with scripts/bench/gemm_bench.c. A strip of A (12 x BLOCK_K, 12 KiB) stays in the first
 * cache while a block of B (BLOCK_K x BLOCK_COLS, 1 MiB, in the second) passes by: rows of C are then walked along,
 * not across pages. */
enum { STRIP_ROWS = 12, STRIP_COLS = 32, TILE_ROWS_STEP = 4 };
enum { BLOCK_K = 256, BLOCK_ROWS = 384, BLOCK_COLS = 1024, A_STRIP_STAYS = 1 };
#define SGEMM_RECTANGLE sgemm_rectangle_avx512
#define SGEMM_BUFFERS sgemm_buffers_avx512

/* rows is a constant at each call. */
static inline __attribute__((always_inline)) void tile_rows_x32(const int rows, float *c, int64_t ldc, bool add,
                                                                int64_t K, const float *a, const float *b) {
    __m512 sum[STRIP_ROWS][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k++, a += STRIP_ROWS, b += STRIP_COLS) {
        __m512 b0 = _mm512_load_ps(b), b1 = _mm512_load_ps(b + 16);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            __m512 x = _mm512_set1_ps(a[r]);
            sum[r][0] = _mm512_fmadd_ps(x, b0, sum[r][0]);
            sum[r][1] = _mm512_fmadd_ps(x, b1, sum[r][1]);
        }
    }
    for (int r = 0; r < rows; r++, c += ldc) {
        _mm512_storeu_ps(c, add ? _mm512_add_ps(_mm512_loadu_ps(c), sum[r][0]) : sum[r][0]);
        _mm512_storeu_ps(c + 16, add ? _mm512_add_ps(_mm512_loadu_ps(c + 16), sum[r][1]) : sum[r][1]);
    }
}

static inline void strip_tile(float *c, int64_t ldc, bool add, int64_t rows, int64_t K, const float *a,
                              const float *b) {
    if (rows == 12) {
        tile_rows_x32(12, c, ldc, add, K, a, b);
    } else if (rows == 8) {
        tile_rows_x32(8, c, ldc, add, K, a, b);
    } else {
        tile_rows_x32(4, c, ldc, add, K, a, b);
    }
}

#include "kernels/cpu/sgemm_packed.h"
#endif
