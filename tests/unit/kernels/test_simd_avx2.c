/* test_simd_avx2.c - exp and tanh of simd_avx2.h: the errors stated there, limits, NaN. */
#include "tests/unit/kernels/reference.h"

#ifdef __AVX2__
#include "kernels/cpu/simd_avx2.h"

static float lane(__m256 x) { return _mm256_cvtss_f32(x); }

/* Distance in units of the last place of want, as a float. */
static double ulps(float got, double want) {
    float rounded = (float)want;
    double ulp = (double)(nextafterf(fabsf(rounded), INFINITY) - fabsf(rounded));
    return fabs((double)got - want) / ulp;
}

START_TEST(exp_and_tanh_are_accurate) {
    double worst_exp = 0.0, worst_softmax = 0.0, worst_tanh = 0.0;
    for (double x = -86.5; x < 88.7; x += 1.9e-4) {
        float v = (float)x;
        worst_exp = fmax(worst_exp, ulps(lane(exp256_ps(_mm256_set1_ps(v))), exp((double)v)));
        if (v > 0.0f) continue;
        worst_softmax = fmax(worst_softmax, ulps(lane(exp256_nonpositive_ps(_mm256_set1_ps(v))), exp((double)v)));
    }
    for (float v = 1e-30f; v < 12.0f; v *= 1.00004f) {
        worst_tanh = fmax(worst_tanh, ulps(lane(tanh256_ps(_mm256_set1_ps(v))), tanh((double)v)));
        ck_assert(lane(tanh256_ps(_mm256_set1_ps(-v))) == -lane(tanh256_ps(_mm256_set1_ps(v))));
    }
    printf("worst error in units in the last place: exp %.2f, exp for softmax %.2f, tanh %.2f\n", worst_exp,
           worst_softmax, worst_tanh);
    ck_assert(worst_exp <= 1.5 && worst_softmax <= 1.5 && worst_tanh <= 3.0);
}
END_TEST

START_TEST(exp_and_tanh_have_their_limits) {
    const float inf = INFINITY;
    ck_assert(lane(exp256_ps(_mm256_set1_ps(-inf))) == 0.0f && lane(exp256_ps(_mm256_set1_ps(inf))) == inf);
    ck_assert(lane(exp256_ps(_mm256_set1_ps(89.0f))) == inf && lane(exp256_ps(_mm256_set1_ps(0.0f))) == 1.0f);
    ck_assert(lane(exp256_nonpositive_ps(_mm256_set1_ps(-inf))) == 0.0f);
    ck_assert(lane(exp256_nonpositive_ps(_mm256_set1_ps(0.0f))) == 1.0f);
    ck_assert(lane(tanh256_ps(_mm256_set1_ps(inf))) == 1.0f && lane(tanh256_ps(_mm256_set1_ps(-inf))) == -1.0f);
    ck_assert(lane(tanh256_ps(_mm256_set1_ps(0.0f))) == 0.0f);
    static const uint32_t nans[] = {0x7fc00000u, 0x7fc00001u, 0xffffffffu, 0x7fabcdefu};
    for (int i = 0; i < 4; i++) {
        __m256 x = _mm256_castsi256_ps(_mm256_set1_epi32((int)nans[i]));
        ck_assert(isnan(lane(exp256_ps(x))) && isnan(lane(exp256_nonpositive_ps(x))) && isnan(lane(tanh256_ps(x))));
    }
}
END_TEST

static bool cpu_has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

int main(void) {
    if (!cpu_has_avx2()) {
        printf("skipped: this CPU has no AVX2 and FMA\n");
        return 0;
    }
    Suite *suite = suite_create("simd");
    TCase *tcase = tcase_create("simd");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, exp_and_tanh_are_accurate);
    tcase_add_test(tcase, exp_and_tanh_have_their_limits);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
#else
int main(void) {
    printf("skipped: built for a machine without AVX2\n");
    return 0;
}
#endif
