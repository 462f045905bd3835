/* simd_avx2.h - exp and tanh of eight floats, sums over a register, loads of row ends.
 *
 * For files named *_avx2.c only. Errors stated are the largest found over all floats of the range
 * (tests/unit/kernels/test_simd_avx2.c samples them); NaN comes out as NaN. */
#ifndef TRIDENT_KERNELS_CPU_SIMD_AVX2_H
#define TRIDENT_KERNELS_CPU_SIMD_AVX2_H

#include <immintrin.h>
#include <stdint.h>

/* exp(r) = 1 + r + r^2 q(r) for |r| <= ln(2) / 2. q is the Chebyshev interpolant of degree 4
 * ((exp(r) - 1 - r) / r^2), relative error 1.1e-8 in exp: a sixth of the rounding unit. */
#define EXP_Q0 0.5f
#define EXP_Q1 0.16666576266288757f
#define EXP_Q2 0.041666463017463684f
#define EXP_Q3 0.008363205008208752f
#define EXP_Q4 0.001393368816934526f

/* r + r^2 q(r), which is expm1(r). */
static inline __m256 expm1_reduced_ps(__m256 r) {
    __m256 q = _mm256_fmadd_ps(_mm256_set1_ps(EXP_Q4), r, _mm256_set1_ps(EXP_Q3));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(EXP_Q2));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(EXP_Q1));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(EXP_Q0));
    return _mm256_fmadd_ps(_mm256_mul_ps(q, r), r, r);
}

/* Splits x = n ln(2) + r. *shifted holds n in its low mantissa bits: adding 1.5 * 2^23 rounds to an
 * integer, and its exponent bits fall off in the shift of power_of_two_ps. */
static inline __m256 exp_reduce_ps(__m256 x, __m256 *shifted) {
    const __m256 magic = _mm256_set1_ps(12582912.0f);
    *shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(1.44269504f), magic);
    __m256 n = _mm256_sub_ps(*shifted, magic);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.69314718246f), x);
    return _mm256_fnmadd_ps(n, _mm256_set1_ps(-1.904654323e-9f), r);
}

/* 2^(n + offset), for -126 <= n + offset <= 127. */
static inline __m256 power_of_two_ps(__m256 shifted, int offset) {
    __m256i exponent = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127 + offset));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

/* exp(x) within 1.5 units in the last place; 0 below -86.6 (exp: 2.5e-38); infinity above 88.73. */
static inline __m256 exp256_ps(__m256 x) {
    const __m256 low = _mm256_set1_ps(-86.6f);
    __m256 keep = _mm256_cmp_ps(x, low, _CMP_NLT_UQ); /* true for NaN */
    /* x stands second: min and max then hand a NaN on. */
    __m256 clamped = _mm256_min_ps(_mm256_set1_ps(89.0f), _mm256_max_ps(low, x));
    __m256 shifted;
    __m256 p = expm1_reduced_ps(exp_reduce_ps(clamped, &shifted));
    p = _mm256_add_ps(p, _mm256_set1_ps(1.0f));
    /* 2^128 is no float: double first, then multiply by 2^(n - 1). */
    p = _mm256_mul_ps(_mm256_add_ps(p, p), power_of_two_ps(shifted, -1));
    return _mm256_and_ps(p, keep);
}

/* The same for x <= 0 (softmax): saves two instructions. */
static inline __m256 exp256_nonpositive_ps(__m256 x) {
    const __m256 low = _mm256_set1_ps(-86.6f);
    __m256 keep = _mm256_cmp_ps(x, low, _CMP_NLT_UQ);
    __m256 shifted;
    __m256 p = expm1_reduced_ps(exp_reduce_ps(_mm256_max_ps(low, x), &shifted));
    __m256 power = power_of_two_ps(shifted, 0);
    return _mm256_and_ps(_mm256_fmadd_ps(p, power, power), keep);
}

/* tanh(x) = e / (e + 2), e = expm1(2|x|), with the sign of x; within 3 units in the last place. */
static inline __m256 tanh256_ps(__m256 x) {
    const __m256 sign_bit = _mm256_set1_ps(-0.0f);
    __m256 sign = _mm256_and_ps(x, sign_bit);
    __m256 twice = _mm256_add_ps(x, x);
    /* Above 2|x| = 20 the quotient rounds to 1. */
    __m256 y = _mm256_min_ps(_mm256_set1_ps(20.0f), _mm256_andnot_ps(sign_bit, twice));
    __m256 shifted;
    __m256 p = expm1_reduced_ps(exp_reduce_ps(y, &shifted));
    __m256 power = power_of_two_ps(shifted, 0);
    __m256 e = _mm256_fmadd_ps(p, power, _mm256_sub_ps(power, _mm256_set1_ps(1.0f)));
    __m256 t = _mm256_div_ps(e, _mm256_add_ps(e, _mm256_set1_ps(2.0f)));
    return _mm256_or_ps(t, sign);
}

/* Sum of the eight, in a fixed order. */
static inline float sum256_ps(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

static inline float max256_ps(__m256 x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

/* Mask of the first n lanes, 0 <= n <= 8. */
static inline __m256i tail_mask_epi32(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The next eight floats of a row of which n are left; lanes behind the end read as 0 and are not
 * written. The masked store is for the end only: it costs AMD processors a dozen plain ones. */
static inline __m256 load_row_ps(const float *x, int64_t n) {
    return n >= 8 ? _mm256_loadu_ps(x) : _mm256_maskload_ps(x, tail_mask_epi32(n));
}

static inline void store_row_ps(float *x, int64_t n, __m256 value) {
    if (n >= 8) {
        _mm256_storeu_ps(x, value);
    } else {
        _mm256_maskstore_ps(x, tail_mask_epi32(n), value);
    }
}

/* Eight rows of eight floats each become eight columns. */
static inline void transpose_8x8(__m256 row[8]) {
    __m256 t[8], u[8];
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(row[2 * i], row[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(row[2 * i], row[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
        u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        row[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        row[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

/* to (K, ld_to), its first `cols` columns = transpose of n <= cols rows from (n, K); columns behind them are zero.
 * Where 8 does not divide cols, stores of eight reach into the next row of `to`: rows go from the last eight to the
 * first, so that later stores set that right; behind the last row, `to` has room for them. */
static inline void pack_transposed(float *to, int64_t ld_to, int64_t cols, const float *from, int64_t ld, int64_t n,
                                   int64_t K) {
    for (int64_t first = (cols - 1) / 8 * 8; first >= 0; first -= 8) {
        for (int64_t k = 0; k < K; k += 8) {
            __m256 row[8];
            for (int64_t i = 0; i < 8; i++) {
                row[i] = first + i < n ? load_row_ps(from + (first + i) * ld + k, K - k) : _mm256_setzero_ps();
            }
            transpose_8x8(row);
            for (int64_t i = 0; i < 8 && k + i < K; i++) _mm256_storeu_ps(to + (k + i) * ld_to + first, row[i]);
        }
    }
}

#endif
