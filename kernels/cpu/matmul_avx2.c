/* matmul_avx2.c - epilogues of fp32 products, eight elements at a time.
 * Ends of rows go through masked loads, so that an element's value does not depend on its place. */
#ifdef __AVX2__
#include "kernels/cpu/matmul_epilogue.h"
#include "kernels/cpu/simd_avx2.h"

static inline __m256 gelu_tanh(__m256 x, __m256 x2) {
    __m256 inner = _mm256_fmadd_ps(_mm256_set1_ps((float)(GELU_A * GELU_B)), x2, _mm256_set1_ps((float)GELU_A));
    return tanh256_ps(_mm256_mul_ps(x, inner));
}

static inline __m256 gelu(__m256 x) {
    __m256 half_x = _mm256_mul_ps(_mm256_set1_ps(0.5f), x);
    return _mm256_fmadd_ps(half_x, gelu_tanh(x, _mm256_mul_ps(x, x)), half_x);
}

static inline __m256 gelu_slope(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f), half = _mm256_set1_ps(0.5f);
    __m256 x2 = _mm256_mul_ps(x, x);
    __m256 t = gelu_tanh(x, x2);
    __m256 inner = _mm256_fmadd_ps(_mm256_set1_ps((float)(3.0 * GELU_A * GELU_B)), x2, _mm256_set1_ps((float)GELU_A));
    /* (1 - t)(1 + t) keeps its digits where t is near 1. */
    __m256 slope = _mm256_mul_ps(_mm256_sub_ps(one, t), _mm256_mul_ps(x, inner));
    return _mm256_mul_ps(_mm256_mul_ps(half, _mm256_add_ps(one, t)), _mm256_add_ps(one, slope));
}

static void bias_row(float *c, const float *bias, int64_t cols) {
    for (int64_t j = 0; j < cols; j += 8) {
        store_row_ps(c + j, cols - j, _mm256_add_ps(load_row_ps(c + j, cols - j), load_row_ps(bias + j, cols - j)));
    }
}

static void bias_gelu_row(float *c, float *aux, const float *bias, int64_t cols) {
    for (int64_t j = 0; j < cols; j += 8) {
        __m256 x = load_row_ps(aux + j, cols - j);
        if (bias) {
            x = _mm256_add_ps(x, load_row_ps(bias + j, cols - j));
            store_row_ps(aux + j, cols - j, x);
        }
        store_row_ps(c + j, cols - j, gelu(x));
    }
}

static void dgelu_row(float *c, const float *aux, int64_t cols) {
    for (int64_t j = 0; j < cols; j += 8) {
        __m256 slope = gelu_slope(load_row_ps(aux + j, cols - j));
        store_row_ps(c + j, cols - j, _mm256_mul_ps(load_row_ps(c + j, cols - j), slope));
    }
}

void epilogue_row_avx2(float *c, float *aux, const float *bias, Epilogue kind, int64_t cols) {
    if (kind == EPILOGUE_BIAS) {
        if (bias) bias_row(c, bias, cols);
    } else if (kind == EPILOGUE_BIAS_GELU) {
        bias_gelu_row(c, aux, bias, cols);
    } else {
        dgelu_row(c, aux, cols);
    }
}
#endif
