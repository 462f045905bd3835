/* test_rope.c - RoPE against angles in fp64 (the table) and a rotation in fp64 (the rows).
 *
 * Bounds. Table: the angle is computed in fp64, off by 3 roundings of position * theta^.., which moves
 * cos and sin by 4 x 2^-53 x angle; then one rounding to the dtype. Rotation: two products and a sum,
 * 3 u (|x1 c| + |x2 s|). There and back: the table's errors leave c^2 + s^2 = 1 within 4 u, and each way
 * adds 3 u sqrt(2) |x|; 16 u |x| in all. */
#include "tests/unit/kernels/reference.h"

enum { POSITIONS = 300 };

START_TEST(table_matches) {
    static const int64_t sizes[] = {2, 16, 18, 64, 256};
    for (int i = 1; i < 3; i++) {
        DType dtype = test_paths[i].dtype;
        for (int n = 0; n < 5; n++) {
            int64_t D = sizes[n];
            void *table = xmalloc((uint64_t)(POSITIONS * D) * dtype_size(dtype));
            rope_table(table, POSITIONS, D, 10000.0, dtype, NULL);
            for (int64_t p = 0; p < POSITIONS; p++) {
                for (int64_t j = 0; j < D / 2; j++) {
                    long double angle = (long double)p * powl(10000.0L, -2.0L * (long double)j / (long double)D);
                    double bound = unit_roundoff(dtype) + 8.0 * 0x1p-53 * (1.0 + (double)angle);
                    ck_assert(bounded_error(element(table, p * D + 2 * j, dtype), (double)cosl(angle), bound));
                    ck_assert(bounded_error(element(table, p * D + 2 * j + 1, dtype), (double)sinl(angle), bound));
                }
            }
            free(table);
        }
    }
}
END_TEST

/* Contexts of 128k and large bases: angles near 131071 keep what the bound of the table leaves them, in every pair. */
START_TEST(far_positions_match) {
    enum { FAR = 131072, D = 128 };
    static const double thetas[] = {10000.0, 500000.0};
    for (int i = 1; i < 3; i++) {
        DType dtype = test_paths[i].dtype;
        void *table = xmalloc((uint64_t)FAR * D * dtype_size(dtype));
        for (int n = 0; n < 2; n++) {
            rope_table(table, FAR, D, thetas[n], dtype, NULL);
            for (int64_t p = FAR - 1; p > 0; p -= 1 + p / 50) {
                for (int64_t j = 0; j < D / 2; j++) {
                    long double angle = (long double)p * powl(thetas[n], -2.0L * (long double)j / (long double)D);
                    double bound = unit_roundoff(dtype) + 8.0 * 0x1p-53 * (1.0 + (double)angle);
                    ck_assert(bounded_error(element(table, p * D + 2 * j, dtype), (double)cosl(angle), bound));
                    ck_assert(bounded_error(element(table, p * D + 2 * j + 1, dtype), (double)sinl(angle), bound));
                }
            }
        }
        free(table);
    }
}
END_TEST

static void check_rotation(TestRandom *r, const TestPath *path, int64_t N, int64_t heads, int64_t D, int64_t gap) {
    DType dtype = path->dtype;
    int64_t ld = heads * D + gap, half = D / 2;
    double u = sum_error(dtype, 1.0);
    void *table = xmalloc((uint64_t)(POSITIONS * D) * dtype_size(dtype));
    rope_table(table, POSITIONS, D, 10000.0, dtype, NULL);
    int32_t *positions = xmalloc((uint64_t)N * sizeof(int32_t));
    for (int64_t i = 0; i < N; i++) positions[i] = (int32_t)random_int(r, POSITIONS);
    void *x = random_array(r, N * ld, 1.0, dtype), *before = copy_array(x, N * ld, dtype);
    rope(x, ld, positions, table, false, N, heads, D, dtype, NULL);
    for (int64_t i = 0; i < N * ld; i++) {
        int64_t row = i / ld, d = i % ld % D;
        if (i % ld >= heads * D) {
            ck_assert(element(x, i, dtype) == element(before, i, dtype));
            continue;
        }
        int64_t j = d % half, at = (int64_t)positions[row] * D + 2 * j, head = i - d;
        double c = element(table, at, dtype), s = element(table, at + 1, dtype);
        double x1 = element(before, head + j, dtype), x2 = element(before, head + j + half, dtype);
        double want = d < half ? x1 * c - x2 * s : x2 * c + x1 * s;
        double bound = 3.0 * u * (d < half ? fabs(x1 * c) + fabs(x2 * s) : fabs(x2 * c) + fabs(x1 * s));
        ck_assert_msg(bounded_error(element(x, i, dtype), want, bound), "%s: N %lld heads %lld D %lld at %lld",
                      path->name, (long long)N, (long long)heads, (long long)D, (long long)i);
    }
    rope(x, ld, positions, table, true, N, heads, D, dtype, NULL);
    for (int64_t i = 0; i < N * ld; i++) {
        ck_assert(bounded_error(element(x, i, dtype), element(before, i, dtype), 16.0 * u * sqrt(2.0)));
    }
    free(table), free(positions), free(x), free(before);
}

START_TEST(rotation_matches_and_inverts) {
    static const int64_t sizes[] = {16, 18, 30, 64, 128, 256};
    TestRandom r = test_random("rotation_matches_and_inverts");
    for (int n = 0; n < 30; n++) {
        kernels_init(1 + n % 3);
        for (int i = 0; i < 3; i++) {
            test_path_choose(&test_paths[i]);
            check_rotation(&r, &test_paths[i], 1 + random_int(&r, 65), 1 + random_int(&r, 4),
                           random_choice(&r, sizes, 6), random_int(&r, 8));
        }
    }
    kernels_limit_path(NULL);
}
END_TEST

START_TEST(threads_do_not_change_bits) {
    enum { N = 400, HEADS = 8, D = 32, COUNT = N * HEADS * D };
    TestRandom r = test_random("threads_do_not_change_bits");
    for (int i = 0; i < 3; i++) {
        DType dtype = test_paths[i].dtype;
        test_path_choose(&test_paths[i]);
        void *x = random_array(&r, COUNT, 1.0, dtype), *table = random_array(&r, N * D, 1.0, dtype), *first = NULL;
        int32_t positions[N];
        for (int32_t n = 0; n < N; n++) positions[n] = n;
        for (int threads = 1; threads <= 3; threads++) {
            kernels_init(threads);
            void *y = copy_array(x, COUNT, dtype);
            rope(y, HEADS * D, positions, table, false, N, HEADS, D, dtype, NULL);
            if (!first) first = copy_array(y, COUNT, dtype);
            ck_assert(memcmp(first, y, COUNT * dtype_size(dtype)) == 0);
            free(y);
        }
        free(x), free(table), free(first);
    }
    kernels_limit_path(NULL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("rope");
    TCase *tcase = tcase_create("rope");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, table_matches);
    tcase_add_test(tcase, far_positions_match);
    tcase_add_test(tcase, rotation_matches_and_inverts);
    tcase_add_test(tcase, threads_do_not_change_bits);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
