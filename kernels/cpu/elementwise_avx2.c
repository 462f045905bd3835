/* elementwise_avx2.c - SwiGLU in fp32, eight elements at a time. */
#ifdef __AVX2__
#include "kernels/cpu/elementwise.h"

#include "kernels/cpu/simd_avx2.h"

static inline __m256 sigmoid_ps(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(one, _mm256_add_ps(one, exp256_ps(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

void swiglu_row_avx2(float *y, const float *gate, const float *up, int64_t F) {
    for (int64_t f = 0; f < F; f += 8) {
        const int64_t n = F - f;
        __m256 g = load_row_ps(gate + f, n), u = load_row_ps(up + f, n);
        store_row_ps(y + f, n, _mm256_mul_ps(_mm256_mul_ps(g, sigmoid_ps(g)), u));
    }
}

void swiglu_backward_row_avx2(float *dgate, float *dup, const float *dy, const float *gate, const float *up,
                              int64_t F) {
    const __m256 one = _mm256_set1_ps(1.0f);
    for (int64_t f = 0; f < F; f += 8) {
        const int64_t n = F - f;
        __m256 g = load_row_ps(gate + f, n), u = load_row_ps(up + f, n), d = load_row_ps(dy + f, n);
        __m256 s = sigmoid_ps(g);
        __m256 slope = _mm256_mul_ps(s, _mm256_fmadd_ps(g, _mm256_sub_ps(one, s), one));
        store_row_ps(dup + f, n, _mm256_mul_ps(d, _mm256_mul_ps(g, s)));
        store_row_ps(dgate + f, n, _mm256_mul_ps(_mm256_mul_ps(d, u), slope));
    }
}
#endif
