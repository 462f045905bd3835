/* cross_entropy_avx2.c - softmax rows in fp32, eight columns at a time. */
#ifdef __AVX2__
#include "kernels/cpu/cross_entropy.h"

#include <math.h>

#include "kernels/cpu/simd_avx2.h"

void softmax_stats_row_avx2(const float *logits, int64_t n, float *maximum, float *sum) {
    const __m256 lowest = _mm256_set1_ps(-INFINITY);
    __m256 m = lowest;
    /* Stands first: the maximum passes over a NaN, the sum below keeps it. */
    for (int64_t i = 0; i + 8 <= n; i += 8) m = _mm256_max_ps(_mm256_loadu_ps(logits + i), m);
    float best = max256_ps(m);
    for (int64_t i = n & ~(int64_t)7; i < n; i++) best = logits[i] > best ? logits[i] : best;
    const __m256 shift = _mm256_set1_ps(best == -INFINITY ? 0.0f : best);
    __m256 total = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i += 8) {
        const int64_t left = n - i;
        __m256 e = exp256_ps(_mm256_sub_ps(load_row_ps(logits + i, left), shift));
        if (left < 8) e = _mm256_and_ps(e, _mm256_castsi256_ps(tail_mask_epi32(left)));
        total = _mm256_add_ps(total, e);
    }
    *maximum = best;
    *sum = sum256_ps(total);
}

void softmax_row_avx2(float *logits, int64_t n, float lse, float factor) {
    const __m256 shift = _mm256_set1_ps(lse), f = _mm256_set1_ps(factor);
    for (int64_t i = 0; i < n; i += 8) {
        const int64_t left = n - i;
        __m256 e = exp256_ps(_mm256_sub_ps(load_row_ps(logits + i, left), shift));
        store_row_ps(logits + i, left, _mm256_mul_ps(f, e));
    }
}
#endif
