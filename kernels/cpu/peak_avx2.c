/* peak_avx2.c - twelve chains of fused multiply-adds: enough to hide their latency of four to five
 * cycles at two a cycle. The chains converge to 1, so that nothing overflows or becomes denormal. */
#ifdef __AVX2__
#include <immintrin.h>

#include "kernels/cpu/peak.h"

static double loop_f32(int64_t iterations) {
    const __m256 half = _mm256_set1_ps(0.5f);
    __m256 x[PEAK_CHAINS];
    for (int c = 0; c < PEAK_CHAINS; c++) x[c] = _mm256_set1_ps((float)c);
    for (int64_t i = 0; i < iterations; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < PEAK_CHAINS; c++) {
            x[c] = _mm256_fmadd_ps(x[c], half, half);
        }
    }
    for (int c = 1; c < PEAK_CHAINS; c++) x[0] = _mm256_add_ps(x[0], x[c]);
    return _mm256_cvtss_f32(x[0]);
}

static double loop_f64(int64_t iterations) {
    const __m256d half = _mm256_set1_pd(0.5);
    __m256d x[PEAK_CHAINS];
    for (int c = 0; c < PEAK_CHAINS; c++) x[c] = _mm256_set1_pd((double)c);
    for (int64_t i = 0; i < iterations; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < PEAK_CHAINS; c++) {
            x[c] = _mm256_fmadd_pd(x[c], half, half);
        }
    }
    for (int c = 1; c < PEAK_CHAINS; c++) x[0] = _mm256_add_pd(x[0], x[c]);
    return _mm256_cvtsd_f64(x[0]);
}

double peak_loop_avx2(DType dtype, int64_t iterations) {
    return dtype == DT_F64 ? loop_f64(iterations) : loop_f32(iterations);
}
#endif
