/* peak_avx512.c - as peak_avx2.c, with registers of twice the width. */
#ifdef __AVX512F__
#include <immintrin.h>

#include "kernels/cpu/peak.h"

static double loop_f32(int64_t iterations) {
    const __m512 half = _mm512_set1_ps(0.5f);
    __m512 x[PEAK_CHAINS];
    for (int c = 0; c < PEAK_CHAINS; c++) x[c] = _mm512_set1_ps((float)c);
    for (int64_t i = 0; i < iterations; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < PEAK_CHAINS; c++) {
            x[c] = _mm512_fmadd_ps(x[c], half, half);
        }
    }
    for (int c = 1; c < PEAK_CHAINS; c++) x[0] = _mm512_add_ps(x[0], x[c]);
    return _mm512_cvtss_f32(x[0]);
}

static double loop_f64(int64_t iterations) {
    const __m512d half = _mm512_set1_pd(0.5);
    __m512d x[PEAK_CHAINS];
    for (int c = 0; c < PEAK_CHAINS; c++) x[c] = _mm512_set1_pd((double)c);
    for (int64_t i = 0; i < iterations; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < PEAK_CHAINS; c++) {
            x[c] = _mm512_fmadd_pd(x[c], half, half);
        }
    }
    for (int c = 1; c < PEAK_CHAINS; c++) x[0] = _mm512_add_pd(x[0], x[c]);
    return _mm512_cvtsd_f64(x[0]);
}

double peak_loop_avx512(DType dtype, int64_t iterations) {
    return dtype == DT_F64 ? loop_f64(iterations) : loop_f32(iterations);
}
#endif
