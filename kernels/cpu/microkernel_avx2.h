/* microkernel_avx2.h - the innermost products: a 6 x 16 or 6 x 8 tile of C held in registers.
 *
 * For files named *_avx2.c. C (6, 8 V) = or += A (6, K) . B (K, 8 V), where A's element (r, k) lies at
 * a[r * a_row + k * a_k] and row k of B at b + k * b_k. Six rows of two registers make twelve
 * independent sums, enough to hide the latency of the multiply-add, and leave three registers for the
 * operands. Sums start at zero, run over k in order and are then added to C: an element's bits depend
 * on its row of A and column of B alone, not on its place in the tile. */
#ifndef TRIDENT_KERNELS_CPU_MICROKERNEL_AVX2_H
#define TRIDENT_KERNELS_CPU_MICROKERNEL_AVX2_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

enum { TILE_ROWS = 6, TILE_COLS = 16 };

static inline __attribute__((always_inline)) void tile_6x16(float *c, int64_t ldc, bool add, int64_t K, const float *a,
                                                            int64_t a_row, int64_t a_k, const float *b, int64_t b_k) {
    __m256 sum[TILE_ROWS][2];
    for (int r = 0; r < TILE_ROWS; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < K; k++) {
        __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
        for (int r = 0; r < TILE_ROWS; r++) {
            __m256 x = _mm256_broadcast_ss(a + r * a_row);
            sum[r][0] = _mm256_fmadd_ps(x, b0, sum[r][0]);
            sum[r][1] = _mm256_fmadd_ps(x, b1, sum[r][1]);
        }
        a += a_k;
        b += b_k;
    }
    for (int r = 0; r < TILE_ROWS; r++, c += ldc) {
        _mm256_storeu_ps(c, add ? _mm256_add_ps(_mm256_loadu_ps(c), sum[r][0]) : sum[r][0]);
        _mm256_storeu_ps(c + 8, add ? _mm256_add_ps(_mm256_loadu_ps(c + 8), sum[r][1]) : sum[r][1]);
    }
}

static inline __attribute__((always_inline)) void tile_6x8(float *c, int64_t ldc, bool add, int64_t K, const float *a,
                                                           int64_t a_row, int64_t a_k, const float *b, int64_t b_k) {
    __m256 sum[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++) sum[r] = _mm256_setzero_ps();
    for (int64_t k = 0; k < K; k++) {
        __m256 b0 = _mm256_loadu_ps(b);
#pragma GCC unroll 6
        for (int r = 0; r < TILE_ROWS; r++) {
            sum[r] = _mm256_fmadd_ps(_mm256_broadcast_ss(a + r * a_row), b0, sum[r]);
        }
        a += a_k;
        b += b_k;
    }
    for (int r = 0; r < TILE_ROWS; r++, c += ldc) {
        _mm256_storeu_ps(c, add ? _mm256_add_ps(_mm256_loadu_ps(c), sum[r]) : sum[r]);
    }
}

/* Six rows of C, N columns (a multiple of 8). */
static inline __attribute__((always_inline)) void tile_row(float *c, int64_t ldc, bool add, int64_t N, int64_t K,
                                                           const float *a, int64_t a_row, int64_t a_k, const float *b,
                                                           int64_t b_k) {
    int64_t n = 0;
    for (; n + 16 <= N; n += 16) tile_6x16(c + n, ldc, add, K, a, a_row, a_k, b + n, b_k);
    if (n < N) tile_6x8(c + n, ldc, add, K, a, a_row, a_k, b + n, b_k);
}

#endif
