/* rope_avx2.c - RoPE in fp32, eight pairs at a time. cos and sin of the row are sorted apart once and
 * then serve all heads. */
#ifdef __AVX2__
#include "kernels/cpu/rope.h"

#include "kernels/cpu/simd_avx2.h"

void rope_row_avx2(float *x, const float *table, float sign, int64_t heads, int64_t half) {
    float cosine[ROPE_HALF_MAX], sine[ROPE_HALF_MAX];
    for (int64_t j = 0; j < half; j++) {
        cosine[j] = table[2 * j];
        sine[j] = sign * table[2 * j + 1];
    }
    for (int64_t h = 0; h < heads; h++, x += 2 * half) {
        for (int64_t j = 0; j < half; j += 8) {
            int64_t n = half - j;
            __m256 c = load_row_ps(cosine + j, n), s = load_row_ps(sine + j, n);
            __m256 x1 = load_row_ps(x + j, n), x2 = load_row_ps(x + j + half, n);
            store_row_ps(x + j, n, _mm256_fmsub_ps(x1, c, _mm256_mul_ps(x2, s)));
            store_row_ps(x + j + half, n, _mm256_fmadd_ps(x2, c, _mm256_mul_ps(x1, s)));
        }
    }
}
#endif
