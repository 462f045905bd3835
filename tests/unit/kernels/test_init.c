/* test_init.c - path and threads, sharing out of chunks, and the measured peak. */
#include "tests/unit/kernels/reference.h"

#include "kernels/cpu/common.h"

START_TEST(path_follows_the_cpu_and_can_be_limited) {
    kernels_limit_path("portable");
    ck_assert_str_eq(kernels_path(), "portable");
    ck_assert(strncmp(kernels_numerics(DT_F32), "portable kernels, libm ", 23) == 0);
    kernels_limit_path(NULL);
#if KERNELS_X86
    bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool wider = wide && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    ck_assert_str_eq(kernels_path(), wider ? "avx512" : wide ? "avx2" : "portable");
    kernels_limit_path("avx512");
    ck_assert_str_eq(kernels_path(), wider ? "avx512" : wide ? "avx2" : "portable");
    kernels_limit_path("avx2");
    ck_assert_str_eq(kernels_path(), wide ? "avx2" : "portable");
#else
    ck_assert_str_eq(kernels_path(), "portable");
#endif
    kernels_limit_path(NULL);
}
END_TEST

static void count_call(void *args, int64_t index) { ((int *)args)[index]++; }

START_TEST(every_index_runs_once) {
    int calls[100];
    for (int threads = 1; threads <= 4; threads++) {
        kernels_init(threads);
        ck_assert_int_eq(kernels_threads(), threads);
        for (int64_t count = 0; count <= 100; count += 1 + count / 3) {
            memset(calls, 0, sizeof(calls));
            share_chunks(count, count_call, calls);
            share_tasks(count, count_call, calls);
            for (int64_t i = 0; i < 100; i++) ck_assert_int_eq(calls[i], i < count ? 2 : 0);
        }
    }
}
END_TEST

START_TEST(peak_is_plausible) {
    kernels_init(1);
    for (int portable = 0; portable < 2; portable++) {
        kernels_limit_path(portable ? "portable" : NULL);
        kernels_init(1);
        double f32 = kernels_peak_flops(DT_F32), f64 = kernels_peak_flops(DT_F64);
        /* Any processor of the last fifteen years does a multiply-add in four cycles at 1 GHz, and none
         * more than 64 a cycle at 10 GHz. */
        ck_assert(f32 > 5e8 && f32 < 1.3e12);
        ck_assert(f64 > 5e8 && f64 < 1.3e12);
        ck_assert(kernels_peak_flops(DT_F32) == f32);
    }
    kernels_limit_path(NULL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("init");
    TCase *tcase = tcase_create("init");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, path_follows_the_cpu_and_can_be_limited);
    tcase_add_test(tcase, every_index_runs_once);
    tcase_add_test(tcase, peak_is_plausible);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
