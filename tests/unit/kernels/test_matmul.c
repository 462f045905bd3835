/* test_matmul.c - matmul against a triple loop in fp64, by bounds derived from K; bits against threads.
 *
 * Bounds. The product: K + 1 rounded terms with accumulate or a bias, so K + 2 units of u times
 * S = sum |a b| (+ |c| or |bias|). An epilogue passes on the product's error times its slope (at most
 * 1.13 in absolute value for gelu, 0.79 for gelu') and adds its own: the argument of tanh is good to 4 u
 * relative, z tanh'(z) <= 0.45, tanh itself is good to 6 u: 1 + tanh is off by 9 u absolute. So gelu is
 * off by |x| 9/2 u and one rounding of the result; gelu' = (1 + t) / 2 + x (1 - t^2) z' / 2 by 5 u,
 * plus |x z'| / 2 times (18 + 6) u, plus the roundings. */
#include "tests/unit/kernels/reference.h"

typedef struct {
    int64_t M, N, K, lda, ldb, ldc;
    bool trans_a, trans_b, accumulate, with_bias;
    Epilogue kind;
} Case;

static double tanh_argument_slope(double x) { return sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x); }

static double tanh_of(double x) { return tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)); }

static double gelu_slope(double x) {
    double t = tanh_of(x);
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * tanh_argument_slope(x);
}

typedef struct {
    const Case *c;
    const TestPath *path;
    void *C, *A, *B, *bias, *aux, *C_before, *aux_before;
} Arrays;

/* Wanted C and aux of one element, with bounds. */
static void reference_element(const Arrays *x, int64_t i, int64_t j, double want[2], double bound[2]) {
    const Case *c = x->c;
    DType dtype = x->path->dtype;
    double sum = 0.0, size = 0.0;
    for (int64_t k = 0; k < c->K; k++) {
        double a = element(x->A, c->trans_a ? k * c->lda + i : i * c->lda + k, dtype);
        double b = element(x->B, c->trans_b ? j * c->ldb + k : k * c->ldb + j, dtype);
        sum += a * b;
        size += fabs(a * b);
    }
    double extra = 0.0;
    if (c->accumulate) extra = element(x->C_before, i * c->ldc + j, dtype);
    if (c->with_bias && (c->kind == EPILOGUE_BIAS || c->kind == EPILOGUE_BIAS_GELU)) extra = element(x->bias, j, dtype);
    sum += extra;
    double u = sum_error(dtype, 1.0), error = (double)(c->K + 2) * u * (size + fabs(extra));
    want[0] = sum, bound[0] = error;
    want[1] = element(x->aux_before, i * c->ldc + j, dtype), bound[1] = 0.0;
    if (c->kind == EPILOGUE_BIAS_GELU) {
        want[1] = sum, bound[1] = error;
        want[0] = 0.5 * sum * (1.0 + tanh_of(sum));
        bound[0] = 1.13 * error + (4.5 * fabs(sum) + fabs(want[0])) * u;
    } else if (c->kind == EPILOGUE_DGELU) {
        double z = want[1], slope = gelu_slope(z);
        want[0] = sum * slope;
        double slope_error = (5.0 + 12.0 * fabs(z * tanh_argument_slope(z)) + 2.0 * fabs(slope)) * u;
        bound[0] = fabs(slope) * error + fabs(sum) * (slope_error + fabs(slope) * u);
    }
}

static void run_case(const Arrays *x) {
    const Case *c = x->c;
    MatmulEpilogue e = {c->kind, c->with_bias ? x->bias : NULL, x->aux};
    matmul(x->C, c->ldc, x->A, c->lda, c->trans_a, x->B, c->ldb, c->trans_b, c->M, c->N, c->K, c->accumulate,
           c->kind == EPILOGUE_NONE ? NULL : &e, x->path->dtype, NULL);
}

static void compare_case(const Arrays *x) {
    const Case *c = x->c;
    for (int64_t i = 0; i < c->M; i++) {
        for (int64_t j = 0; j < c->ldc; j++) {
            double want[2], bound[2] = {0.0, 0.0};
            if (j < c->N) {
                reference_element(x, i, j, want, bound);
            } else { /* behind the row's end: not ours to write */
                want[0] = element(x->C_before, i * c->ldc + j, x->path->dtype);
                want[1] = element(x->aux_before, i * c->ldc + j, x->path->dtype);
            }
            double got[2] = {element(x->C, i * c->ldc + j, x->path->dtype),
                             element(x->aux, i * c->ldc + j, x->path->dtype)};
            for (int o = 0; o < 2; o++) {
                ck_assert_msg(bounded_error(got[o], want[o], bound[o]),
                              "%s: M %lld N %lld K %lld trans %d %d accumulate %d epilogue %d, %s (%lld, %lld): %.9g, "
                              "wanted %.9g within %.3g",
                              x->path->name, (long long)c->M, (long long)c->N, (long long)c->K, c->trans_a, c->trans_b,
                              c->accumulate, c->kind, o ? "aux" : "C", (long long)i, (long long)j, got[o], want[o],
                              bound[o]);
            }
        }
    }
}

static Arrays make_arrays(TestRandom *r, const Case *c, const TestPath *path) {
    DType dtype = path->dtype;
    int64_t n = c->M * c->ldc;
    Arrays x = {.c = c, .path = path};
    x.A = random_array(r, (c->trans_a ? c->K : c->M) * c->lda, 1.0, dtype);
    x.B = random_array(r, (c->trans_b ? c->N : c->K) * c->ldb, 1.0, dtype);
    x.C = random_array(r, n, 1.0, dtype);
    x.aux = random_array(r, n, 4.0, dtype);
    x.bias = random_array(r, c->N, 1.0, dtype);
    x.C_before = copy_array(x.C, n, dtype);
    x.aux_before = copy_array(x.aux, n, dtype);
    return x;
}

static void free_arrays(Arrays *x) {
    free(x->A), free(x->B), free(x->C), free(x->aux), free(x->bias), free(x->C_before), free(x->aux_before);
}

static void check_case(TestRandom *r, const Case *c, const TestPath *path) {
    test_path_choose(path);
    Arrays x = make_arrays(r, c, path);
    run_case(&x);
    compare_case(&x);
    free_arrays(&x);
    kernels_limit_path(NULL);
}

static void set_strides(TestRandom *r, Case *c, int64_t slack) {
    c->lda = (c->trans_a ? c->M : c->K) + random_int(r, slack + 1);
    c->ldb = (c->trans_b ? c->K : c->N) + random_int(r, slack + 1);
    c->ldc = c->N + random_int(r, slack + 1);
}

START_TEST(random_shapes_match) {
    static const int64_t sizes[] = {1, 2, 3, 5, 6, 7, 8, 15, 16, 17, 31, 33, 65, 100, 127};
    enum { SIZES = sizeof(sizes) / sizeof(sizes[0]) };
    TestRandom r = test_random("random_shapes_match");
    kernels_init(1 + (int)random_int(&r, 3));
    for (int n = 0; n < 150; n++) {
        Case c = {.M = random_choice(&r, sizes, SIZES),
                  .N = random_choice(&r, sizes, SIZES),
                  .K = random_choice(&r, sizes, SIZES),
                  .trans_a = random_int(&r, 2),
                  .trans_b = random_int(&r, 2),
                  .with_bias = random_int(&r, 4) > 0};
        c.kind = (Epilogue)random_int(&r, 4);
        c.accumulate = c.kind == EPILOGUE_NONE && random_int(&r, 2);
        set_strides(&r, &c, 9);
        for (int p = 0; p < TEST_PATHS; p++) check_case(&r, &c, &test_paths[p]);
    }
}
END_TEST

/* Large enough for several panels and several blocks of K, with rests in every direction. */
START_TEST(blocked_shapes_match) {
    static const int64_t shapes[][3] = {{259, 131, 70}, {67, 530, 45}, {40, 40, 1100}, {150, 97, 513}, {1, 300, 200}};
    TestRandom r = test_random("blocked_shapes_match");
    kernels_init(2);
    for (size_t n = 0; n < sizeof(shapes) / sizeof(shapes[0]); n++) {
        for (int trans = 0; trans < 4; trans++) {
            Case c = {.M = shapes[n][0],
                      .N = shapes[n][1],
                      .K = shapes[n][2],
                      .trans_a = trans & 1,
                      .trans_b = trans & 2,
                      .accumulate = trans == 3,
                      .with_bias = true};
            if (trans < 3) c.kind = (Epilogue)(trans + 1);
            set_strides(&r, &c, 20);
            for (int p = 0; p < TEST_PATHS; p++) check_case(&r, &c, &test_paths[p]);
        }
    }
}
END_TEST

START_TEST(empty_sides_are_handled) {
    TestRandom r = test_random("empty_sides_are_handled");
    for (int bits = 1; bits < 8; bits++) {
        for (int kind = EPILOGUE_NONE; kind <= EPILOGUE_DGELU; kind++) {
            Case c = {.M = bits & 1 ? 0 : 5,
                      .N = bits & 2 ? 0 : 7,
                      .K = bits & 4 ? 0 : 3,
                      .with_bias = true,
                      .kind = (Epilogue)kind,
                      .accumulate = kind == EPILOGUE_NONE && bits == 4};
            set_strides(&r, &c, 0);
            for (int p = 0; p < TEST_PATHS; p++) check_case(&r, &c, &test_paths[p]);
        }
    }
}
END_TEST

START_TEST(threads_do_not_change_bits) {
    static const int64_t shapes[][3] = {
        {300, 200, 150}, {129, 700, 300}, {64, 48, 1000}, {513, 128, 384}, {5, 1000, 400}};
    TestRandom r = test_random("threads_do_not_change_bits");
    for (size_t n = 0; n < sizeof(shapes) / sizeof(shapes[0]); n++) {
        for (int p = 0; p < TEST_PATHS; p++) {
            Case c = {.M = shapes[n][0],
                      .N = shapes[n][1],
                      .K = shapes[n][2],
                      .trans_b = n % 2,
                      .with_bias = true,
                      .kind = n % 2 ? EPILOGUE_BIAS_GELU : EPILOGUE_DGELU};
            set_strides(&r, &c, 3);
            test_path_choose(&test_paths[p]);
            Arrays x = make_arrays(&r, &c, &test_paths[p]);
            size_t bytes = (size_t)(c.M * c.ldc) * dtype_size(x.path->dtype);
            void *first = NULL;
            /* Many times: a BLAS that isn't safe to call from several threads errs about once in a hundred. */
            for (int t = 0; t < 100; t++) {
                kernels_init(t == 0 ? 1 : 1 + t % 3);
                memcpy(x.C, x.C_before, bytes);
                memcpy(x.aux, x.aux_before, bytes);
                run_case(&x);
                if (!first) first = copy_array(x.C, c.M * c.ldc, x.path->dtype);
                ck_assert_msg(memcmp(first, x.C, bytes) == 0, "%s, %d threads, shape %zu", x.path->name,
                              t == 0 ? 1 : 1 + t % 3, n);
            }
            free(first);
            free_arrays(&x);
        }
    }
    kernels_limit_path(NULL);
}
END_TEST

START_TEST(nan_spreads_to_its_row_only) {
    float a[2 * 3] = {1, NAN, 1, 1, 2, 3}, b[3 * 4] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, c[2 * 4];
    matmul(c, 4, a, 3, false, b, 4, false, 2, 4, 3, false, NULL, DT_F32, NULL);
    for (int j = 0; j < 4; j++) ck_assert(isnan(c[j]) && !isnan(c[4 + j]));
}
END_TEST

int main(void) {
    Suite *suite = suite_create("matmul");
    TCase *tcase = tcase_create("matmul");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, random_shapes_match);
    tcase_add_test(tcase, blocked_shapes_match);
    tcase_add_test(tcase, empty_sides_are_handled);
    tcase_add_test(tcase, threads_do_not_change_bits);
    tcase_add_test(tcase, nan_spreads_to_its_row_only);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
