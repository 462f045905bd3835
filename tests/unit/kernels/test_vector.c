/* test_vector.c - sums of squares, sums and scaling of flat arrays.
 *
 * Bounds. Sums run in fp64 whatever the dtype: n additions in any order and the rounding of each square,
 * (n + 2) 2^-53 times the sum of the absolute values. scale: the factor's rounding and the product's, 2 u. */
#include "tests/unit/kernels/reference.h"

/* Around the lanes (16), a chunk (16384) and several chunks. */
static const int64_t lengths[] = {0, 1, 2, 7, 15, 16, 17, 33, 255, 16383, 16384, 16385, 50001};
enum { LENGTHS = sizeof(lengths) / sizeof(lengths[0]) };

START_TEST(sums_match) {
    TestRandom r = test_random("sums_match");
    kernels_init(2);
    for (int n = 0; n < LENGTHS; n++) {
        for (int p = 0; p < TEST_PATHS; p++) {
            const TestPath *path = &test_paths[p];
            test_path_choose(path);
            void *x = random_array(&r, lengths[n], 3.0, path->dtype);
            long double squares = 0.25L, sum = -0.5L, sizes = 0.5L;
            for (int64_t i = 0; i < lengths[n]; i++) {
                long double value = element(x, i, path->dtype);
                squares += value * value, sum += value, sizes += fabsl(value);
            }
            double got_squares = 0.25, got_sum = -0.5, rounding = (double)(lengths[n] + 2) * 0x1p-53;
            squared_norm(&got_squares, x, lengths[n], path->dtype, NULL);
            sum_stats(&got_sum, x, lengths[n], path->dtype, NULL);
            check_close(path, "squared norm of length", lengths[n], got_squares, (double)squares,
                        rounding * (double)squares);
            check_close(path, "sum of length", lengths[n], got_sum, (double)sum, rounding * (double)sizes);
            free(x);
        }
    }
    kernels_limit_path(NULL);
}
END_TEST

/* More elements than the chunks whose sums are kept at a time (1024 of 16384). Small integers: every sum is exact. */
START_TEST(long_arrays_are_summed_whole) {
    enum { N = 1024 * 16384 + 16384 + 5 };
    float *x = xmalloc(sizeof(float) * N);
    double squares = 0.0, sum = 0.0;
    for (int i = 0; i < N; i++) {
        x[i] = (float)((i & 7) - 2);
        squares += (double)x[i] * (double)x[i], sum += (double)x[i];
    }
    for (int p = 0; p < 2; p++) {
        kernels_init(2);
        test_path_choose(&test_paths[p]);
        double got_squares = 1.0, got_sum = 1.0;
        squared_norm(&got_squares, x, N, DT_F32, NULL);
        sum_stats(&got_sum, x, N, DT_F32, NULL);
        ck_assert(got_squares == squares + 1.0 && got_sum == sum + 1.0);
    }
    free(x);
    kernels_limit_path(NULL);
}
END_TEST

/* Neither the threads nor the path nor where the array starts: the sum follows the length. */
START_TEST(squared_norm_has_one_order) {
    TestRandom r = test_random("squared_norm_has_one_order");
    for (int n = 0; n < LENGTHS; n++) {
        double first[2] = {0.0, 0.0};
        void *x[2] = {random_array(&r, lengths[n], 1.0, DT_F32), random_array(&r, lengths[n], 1.0, DT_F64)};
        float *shifted = xmalloc(sizeof(float) * (uint64_t)(lengths[n] + 1));
        memcpy(shifted + 1, x[0], sizeof(float) * (uint64_t)lengths[n]);
        for (int t = 0; t < 3 * TEST_PATHS; t++) {
            const TestPath *path = &test_paths[t % TEST_PATHS];
            const int wide = path->dtype == DT_F64;
            kernels_init(1 + t / TEST_PATHS);
            test_path_choose(path);
            double sum = 0.0, sum_shifted = 0.0;
            squared_norm(&sum, x[wide], lengths[n], path->dtype, NULL);
            squared_norm(&sum_shifted, shifted + 1, lengths[n], DT_F32, NULL);
            if (first[wide] == 0.0) first[wide] = sum;
            ck_assert(sum == first[wide] && (sum_shifted == first[0]));
        }
        free(x[0]), free(x[1]), free(shifted);
    }
    kernels_limit_path(NULL);
}
END_TEST

typedef struct {
    void *x;
    double factor;
    int64_t n;
    DType dtype;
} ScaleArgs;

static void run_scale(void *args) {
    const ScaleArgs *a = args;
    scale(a->x, a->factor, a->n, a->dtype, NULL);
}

START_TEST(scale_matches) {
    static const double factors[] = {0.3, -7.0, 0.0, 1.0};
    TestRandom r = test_random("scale_matches");
    for (int n = 0; n < LENGTHS * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        const int64_t length = lengths[n / TEST_PATHS];
        const double u = sum_error(path->dtype, 1.0), factor = factors[random_int(&r, 4)];
        test_path_choose(path);
        /* One element more than is scaled. */
        void *x = random_array(&r, length + 1, 3.0, path->dtype), *before = copy_array(x, length + 1, path->dtype);
        ScaleArgs args = {x, factor, length, path->dtype};
        check_threads(path, run_scale, &args, &(TestOutput){"x", x, length + 1}, 1);
        for (int64_t i = 0; i <= length; i++) {
            const double old = element(before, i, path->dtype), want = i < length ? old * factor : old;
            check_close(path, "x", i, element(x, i, path->dtype), want, i < length ? 2.0 * u * fabs(want) : 0.0);
        }
        free(x), free(before);
    }
    kernels_limit_path(NULL);
}
END_TEST

START_TEST(non_finite_values_show) {
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    TestRandom r = test_random("non_finite_values_show");
    kernels_init(2);
    for (int n = 0; n < 3 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        test_path_choose(path);
        const int64_t length = 1 + random_int(&r, 40), at = random_int(&r, length);
        void *x = random_array(&r, length, 1.0, path->dtype);
        set_element(x, at, bad[n / TEST_PATHS], path->dtype);
        double squares = 0.0, sum = 0.0;
        squared_norm(&squares, x, length, path->dtype, NULL);
        sum_stats(&sum, x, length, path->dtype, NULL);
        ck_assert(!isfinite(squares) && !isfinite(sum));
        /* A factor of 0 doesn't hide it. */
        scale(x, 0.0, length, path->dtype, NULL);
        for (int64_t i = 0; i < length; i++) ck_assert((element(x, i, path->dtype) == 0.0) == (i != at));
        free(x);
    }
    kernels_limit_path(NULL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("vector");
    TCase *tcase = tcase_create("vector");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, sums_match);
    tcase_add_test(tcase, long_arrays_are_summed_whole);
    tcase_add_test(tcase, squared_norm_has_one_order);
    tcase_add_test(tcase, scale_matches);
    tcase_add_test(tcase, non_finite_values_show);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
