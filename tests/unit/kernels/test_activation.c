/* test_activation.c - SwiGLU, GELU, residual addition and bias gradient against the formulas in long double.
 *
 * Bounds (u: unit roundoff, first order):
 *   sigmoid s = 1 / (1 + exp(-g)), exp good to 3 u: 5 u relative. y = g s up: 7 u |y|. Where exp(-g) overflows,
 *     s becomes 0 instead of exp(g): |g up| times the least normal number more, for the subnormal ones too.
 *   dup = dy g s: 7 u |dup|.  silu' = s (1 + g (1 - s)): 1 - s is off by 6 u, so that dgate = dy up silu' is off
 *     by u |dy up| (6 s |g| + s |g (1 - s)| + 9 |silu'|), and by (1 + |g|) |dy up| times the least normal number.
 *   gelu and gelu': as test_matmul.c derives, up to |x| = 9. From there on tanh is 1 to 2 exp(-66), which
 *     rounds away: gelu is x or 0, gelu' 1 or 0, within the products' roundings.
 *   residual_add: two additions, 2 u (|a| + |b| + |bias|).
 *   db: N rows in any order onto what was there, (N + 1) u (|db| + sum |dy|). */
#include "tests/unit/kernels/reference.h"

#include <float.h>

static const int64_t row_counts[] = {0, 1, 2, 3, 16, 33}, widths[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 64, 100};
enum { ROW_COUNTS = sizeof(row_counts) / sizeof(row_counts[0]), WIDTHS = sizeof(widths) / sizeof(widths[0]) };

static double least_normal(DType dtype) { return dtype == DT_F64 ? DBL_MIN : (double)FLT_MIN; }

/* Mostly of size 4, some far out where exp overflows or vanishes, some zeros. */
static void *wide_array(TestRandom *r, int64_t count, double far_out, DType dtype) {
    void *x = random_array(r, count, 4.0, dtype);
    for (int64_t i = 0; i < count; i++) {
        const int64_t kind = random_int(r, 8);
        if (kind < 2) set_element(x, i, kind == 0 ? 0.0 : far_out * (2.0 * random_uniform(r) - 1.0), dtype);
    }
    return x;
}

/* ---- SwiGLU ---- */

/* y and dgate_up hold a row more than the operation is told of. */
typedef struct {
    const TestPath *path;
    int64_t N, F;
    void *y, *dgate_up, *dy, *gate_up;
} Swiglu;

static Swiglu make_swiglu(TestRandom *r, const TestPath *path, int64_t N, int64_t F, bool in_place) {
    const double far_out = path->dtype == DT_F64 ? 800.0 : 120.0;
    Swiglu s = {.path = path, .N = N, .F = F};
    s.y = random_array(r, (N + 1) * F, 1.0, path->dtype), s.dy = random_array(r, N * F, 1.0, path->dtype);
    s.gate_up = wide_array(r, (N + 1) * 2 * F, far_out, path->dtype);
    s.dgate_up = in_place ? s.gate_up : random_array(r, (N + 1) * 2 * F, 1.0, path->dtype);
    return s;
}

static void free_swiglu(Swiglu *s) {
    if (s->dgate_up != s->gate_up) free(s->dgate_up);
    free(s->y), free(s->dy), free(s->gate_up);
}

static void run_swiglu_forward(void *args) {
    const Swiglu *s = args;
    swiglu_forward(s->y, s->gate_up, s->N, s->F, s->path->dtype, NULL);
}

static void run_swiglu_backward(void *args) {
    const Swiglu *s = args;
    swiglu_backward(s->dgate_up, s->dy, s->gate_up, s->N, s->F, s->path->dtype, NULL);
}

static long double sigmoid(long double x) { return 1.0L / (1.0L + expl(-x)); }

static long double silu_slope(long double x) { return sigmoid(x) * (1.0L + x * (1.0L - sigmoid(x))); }

static void check_swiglu_forward(const Swiglu *s) {
    const DType dtype = s->path->dtype;
    const double u = sum_error(dtype, 1.0);
    void *y0 = copy_array(s->y, (s->N + 1) * s->F, dtype), *gate_up0 = copy_array(s->gate_up, s->N * 2 * s->F, dtype);
    run_swiglu_forward((void *)(uintptr_t)s);
    for (int64_t i = 0; i < s->N * s->F; i++) {
        const int64_t at = i / s->F * 2 * s->F + i % s->F;
        const long double g = element(s->gate_up, at, dtype), up = element(s->gate_up, at + s->F, dtype);
        const double want = (double)(g * sigmoid(g) * up);
        check_close(s->path, "y", i, element(s->y, i, dtype), want,
                    7.0 * u * fabs(want) + least_normal(dtype) * (double)fabsl(g * up));
    }
    for (int64_t i = s->N * s->F; i < (s->N + 1) * s->F; i++) {
        ck_assert(element(s->y, i, dtype) == element(y0, i, dtype));
    }
    check_same(s->path, "gate_up", s->gate_up, gate_up0, s->N * 2 * s->F);
    free(y0), free(gate_up0);
}

static void check_swiglu_backward(const Swiglu *s) {
    const DType dtype = s->path->dtype;
    const double u = sum_error(dtype, 1.0), least = least_normal(dtype);
    const int64_t count = s->N * 2 * s->F, all = count + 2 * s->F;
    void *gate_up0 = copy_array(s->gate_up, all, dtype), *dgate_up0 = copy_array(s->dgate_up, all, dtype);
    run_swiglu_backward((void *)(uintptr_t)s);
    for (int64_t i = 0; i < s->N * s->F; i++) {
        const int64_t at = i / s->F * 2 * s->F + i % s->F;
        const long double g = element(gate_up0, at, dtype), up = element(gate_up0, at + s->F, dtype);
        const long double dy = element(s->dy, i, dtype), sig = sigmoid(g), slope = silu_slope(g);
        const double dup = (double)(dy * g * sig), size = (double)fabsl(dy * up);
        const double parts = (double)(6.0L * sig * fabsl(g) + sig * fabsl(g * (1.0L - sig)) + 9.0L * fabsl(slope));
        check_close(s->path, "dgate", at, element(s->dgate_up, at, dtype), (double)(dy * up * slope),
                    size * (u * parts + least * (1.0 + (double)fabsl(g))));
        check_close(s->path, "dup", at, element(s->dgate_up, at + s->F, dtype), dup,
                    7.0 * u * fabs(dup) + least * (double)fabsl(dy * g));
    }
    for (int64_t i = count; i < all; i++) ck_assert(element(s->dgate_up, i, dtype) == element(dgate_up0, i, dtype));
    if (s->dgate_up != s->gate_up) check_same(s->path, "gate_up", s->gate_up, gate_up0, all);
    free(gate_up0), free(dgate_up0);
}

START_TEST(swiglu_matches) {
    TestRandom r = test_random("swiglu_matches");
    for (int n = 0; n < 60 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        kernels_init(1 + n % 3);
        test_path_choose(path);
        const bool large = n < TEST_PATHS; /* a row longer than a chunk */
        Swiglu s = make_swiglu(&r, path, large ? 2 : random_choice(&r, row_counts, ROW_COUNTS),
                               large ? 16391 : random_choice(&r, widths, WIDTHS), random_int(&r, 2));
        check_swiglu_forward(&s);
        check_swiglu_backward(&s);
        free_swiglu(&s);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* ---- GELU, as epilogue of a product with 1 ---- */

static long double tanh_argument(long double x) { return sqrtl(2.0L / M_PI) * (x + 0.044715L * x * x * x); }
static long double tanh_argument_slope(long double x) { return sqrtl(2.0L / M_PI) * (1.0L + 3 * 0.044715L * x * x); }
static long double gelu(long double x) { return 0.5L * x * (1.0L + tanhl(tanh_argument(x))); }
static long double gelu_slope(long double x) {
    const long double t = tanhl(tanh_argument(x));
    return 0.5L * (1.0L + t) + 0.5L * x * (1.0L - t * t) * tanh_argument_slope(x);
}

/* c = gelu(x) with a copy of x in aux, or c = y gelu'(x); n elements. */
static void run_gelu(void *c, void *aux, const void *x, const void *y, Epilogue kind, int64_t n, DType dtype) {
    void *one = xmalloc(sizeof(double));
    set_element(one, 0, 1.0, dtype);
    if (kind == EPILOGUE_DGELU) memcpy(aux, x, (size_t)n * dtype_size(dtype));
    const MatmulEpilogue epilogue = {kind, NULL, aux};
    matmul(c, n, one, 1, false, kind == EPILOGUE_DGELU ? y : x, n, false, 1, n, 1, false, &epilogue, dtype, NULL);
    free(one);
}

START_TEST(gelu_matches_far_out) {
    enum { N = 203, FAR = 9 };
    TestRandom r = test_random("gelu_matches_far_out");
    kernels_init(2);
    for (int n = 0; n < 10 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        const DType dtype = path->dtype;
        const double u = sum_error(dtype, 1.0);
        test_path_choose(path);
        void *x = wide_array(&r, N, random_int(&r, 2) ? 20.0 : 1e4, dtype), *y = random_array(&r, N, 1.0, dtype);
        void *c = random_array(&r, N, 1.0, dtype), *d = random_array(&r, N, 1.0, dtype);
        void *aux = random_array(&r, N, 1.0, dtype);
        run_gelu(c, aux, x, y, EPILOGUE_BIAS_GELU, N, dtype);
        check_same(path, "aux", aux, x, N);
        run_gelu(d, aux, x, y, EPILOGUE_DGELU, N, dtype);
        check_same(path, "aux", aux, x, N);
        for (int64_t i = 0; i < N; i++) {
            const double value = element(x, i, dtype), size = fabs(value), dy = element(y, i, dtype);
            const double g = (double)gelu(value), slope = (double)gelu_slope(value);
            const double curve = fabs(value * (double)tanh_argument_slope(value));
            const double vanished = exp(-60.0) * size;
            check_close(path, "gelu", i, element(c, i, dtype), g,
                        size < FAR ? (4.5 * size + fabs(g)) * u : 2.0 * u * fabs(g) + vanished);
            check_close(path, "dgelu", i, element(d, i, dtype), dy * slope,
                        fabs(dy) * (size < FAR ? (5.0 + 12.0 * curve + 3.0 * fabs(slope)) * u
                                               : 3.0 * u * fabs(slope) + vanished));
        }
        free(x), free(y), free(c), free(d), free(aux);
    }
    kernels_limit_path(NULL);
}
END_TEST

START_TEST(reference_slopes_match_differences) {
    const long double step = 1e-5L;
    for (int n = -60; n <= 60; n++) {
        const long double x = n / 10.0L;
        const long double dgelu = (gelu(x + step) - gelu(x - step)) / (2.0L * step);
        const long double dsilu = ((x + step) * sigmoid(x + step) - (x - step) * sigmoid(x - step)) / (2.0L * step);
        /* Third derivatives are below 10: 10 step^2 / 6, and roundings of numbers up to 6 over the step. */
        ck_assert(fabsl(dgelu - gelu_slope(x)) <= 1e-9L && fabsl(dsilu - silu_slope(x)) <= 1e-9L);
    }
}
END_TEST

/* ---- residual addition, bias gradient ---- */

START_TEST(residual_add_matches) {
    TestRandom r = test_random("residual_add_matches");
    for (int n = 0; n < 80 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        const DType dtype = path->dtype;
        const double u = sum_error(dtype, 1.0);
        kernels_init(1 + n % 3);
        test_path_choose(path);
        const int64_t N = random_choice(&r, row_counts, ROW_COUNTS), C = random_choice(&r, widths, WIDTHS);
        const bool with_b = random_int(&r, 2), with_bias = random_int(&r, 2);
        const int64_t place = random_int(&r, with_b ? 3 : 2); /* y apart, y is a, y is b */
        void *a = random_array(&r, (N + 1) * C, 1.0, dtype), *b = random_array(&r, (N + 1) * C, 1.0, dtype);
        void *bias = random_array(&r, C, 1.0, dtype), *apart = random_array(&r, (N + 1) * C, 1.0, dtype);
        void *y = place == 0 ? apart : place == 1 ? a : b;
        void *a0 = copy_array(a, (N + 1) * C, dtype), *b0 = copy_array(b, (N + 1) * C, dtype);
        void *y0 = copy_array(y, (N + 1) * C, dtype);
        residual_add(y, a, with_b ? b : NULL, with_bias ? bias : NULL, N, C, dtype, NULL);
        for (int64_t i = 0; i < N * C; i++) {
            const double terms[3] = {element(a0, i, dtype), with_b ? element(b0, i, dtype) : 0.0,
                                     with_bias ? element(bias, i % C, dtype) : 0.0};
            const double size = fabs(terms[0]) + fabs(terms[1]) + fabs(terms[2]);
            check_close(path, "y", i, element(y, i, dtype), terms[0] + terms[1] + terms[2],
                        with_b || with_bias ? 2.0 * u * size : 0.0);
        }
        for (int64_t i = N * C; i < (N + 1) * C; i++) ck_assert(element(y, i, dtype) == element(y0, i, dtype));
        if (place != 1) check_same(path, "a", a, a0, (N + 1) * C);
        if (place != 2) check_same(path, "b", b, b0, (N + 1) * C);
        free(a), free(b), free(bias), free(apart), free(a0), free(b0), free(y0);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* What stands between the rows is NaN: looking at it shows. */
START_TEST(bias_gradient_matches) {
    static const int64_t columns[] = {1, 7, 17, 127, 128, 129, 300};
    TestRandom r = test_random("bias_gradient_matches");
    for (int n = 0; n < 60 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        const DType dtype = path->dtype;
        kernels_init(1 + n % 3);
        test_path_choose(path);
        const int64_t N = random_choice(&r, row_counts, ROW_COUNTS), C = random_choice(&r, columns, 7);
        const int64_t ld = C + random_int(&r, 6);
        void *dy = random_array(&r, N * ld, 1.0, dtype), *db = random_array(&r, C + 1, 1.0, dtype);
        void *db0 = copy_array(db, C + 1, dtype);
        for (int64_t i = 0; i < N * ld; i++) {
            if (i % ld >= C) set_element(dy, i, NAN, dtype);
        }
        bias_backward(db, dy, ld, N, C, dtype, NULL);
        for (int64_t c = 0; c <= C; c++) {
            long double sum = element(db0, c, dtype), size = fabsl(sum);
            for (int64_t i = 0; i < N && c < C; i++) {
                sum += element(dy, i * ld + c, dtype), size += fabs(element(dy, i * ld + c, dtype));
            }
            check_close(path, "db", c, element(db, c, dtype), (double)sum,
                        c < C ? sum_error(dtype, (double)(N + 1)) * (double)size : 0.0);
        }
        free(dy), free(db), free(db0);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* ---- bits, and numbers that are none ---- */

static void run_add(void *args) {
    const Swiglu *s = args;
    residual_add(s->y, s->y, s->dy, s->gate_up, s->N, s->F, s->path->dtype, NULL);
}

static void run_bias_gradient(void *args) {
    const Swiglu *s = args;
    bias_backward(s->y, s->gate_up, 2 * s->F, s->N, s->F, s->path->dtype, NULL);
}

START_TEST(threads_do_not_change_bits) {
    enum { N = 101, F = 701 };
    TestRandom r = test_random("threads_do_not_change_bits");
    for (int n = 0; n < TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n];
        test_path_choose(path);
        Swiglu s = make_swiglu(&r, path, N, F, true);
        TestOutput y = {"y", s.y, N * F}, dgate_up = {"dgate_up", s.dgate_up, N * 2 * F};
        check_threads(path, run_add, &s, &y, 1);
        check_threads(path, run_bias_gradient, &s, &y, 1);
        check_threads(path, run_swiglu_forward, &s, &y, 1);
        check_threads(path, run_swiglu_backward, &s, &dgate_up, 1);
        free_swiglu(&s);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* Also -inf, whose gelu and silu have the limit 0: it stands for an overflow. */
START_TEST(non_finite_values_show_in_their_place) {
    enum { N = 5, F = 13, COUNT = N * F };
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    TestRandom r = test_random("non_finite_values_show_in_their_place");
    kernels_init(2);
    for (int n = 0; n < 4 * 3 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        const DType dtype = path->dtype;
        test_path_choose(path);
        const double value = bad[n / TEST_PATHS % 3];
        const int64_t at = random_int(&r, COUNT), gate = at / F * 2 * F + at % F, where = n / TEST_PATHS / 3;
        Swiglu s = make_swiglu(&r, path, N, F, false);
        if (where == 0) set_element(s.gate_up, gate, value, dtype);
        if (where == 1) set_element(s.gate_up, gate + F, value, dtype), set_element(s.gate_up, gate, 1.0, dtype);
        if (where >= 2) set_element(s.dy, at, value, dtype);
        run_swiglu_forward(&s);
        run_swiglu_backward(&s);
        for (int64_t i = 0; i < COUNT; i++) {
            const int64_t g = i / F * 2 * F + i % F;
            const bool dgate = isfinite(element(s.dgate_up, g, dtype)),
                       dup = isfinite(element(s.dgate_up, g + F, dtype));
            ck_assert(isfinite(element(s.y, i, dtype)) == (i != at || where >= 2));
            ck_assert(i == at ? !dgate || !dup : dgate && dup);
        }
        residual_add(s.y, s.gate_up, s.dy, where == 3 ? s.dy : NULL, N, F, dtype, NULL);
        if (where >= 2) ck_assert(!isfinite(element(s.y, at, dtype)));
        void *db = random_array(&r, F, 1.0, dtype), *aux = random_array(&r, COUNT, 1.0, dtype);
        bias_backward(db, s.dy, F, N, F, dtype, NULL);
        for (int64_t c = 0; c < F; c++) ck_assert(isfinite(element(db, c, dtype)) == (c != at % F || where < 2));
        run_gelu(s.y, aux, s.dy, s.gate_up, EPILOGUE_BIAS_GELU, COUNT, dtype);
        run_gelu(s.dgate_up, aux, s.dy, s.gate_up, EPILOGUE_DGELU, COUNT, dtype);
        if (where >= 2) ck_assert(!isfinite(element(s.y, at, dtype)) && !isfinite(element(s.dgate_up, at, dtype)));
        free(db), free(aux);
        free_swiglu(&s);
    }
    kernels_limit_path(NULL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("activation");
    TCase *tcase = tcase_create("activation");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, swiglu_matches);
    tcase_add_test(tcase, gelu_matches_far_out);
    tcase_add_test(tcase, reference_slopes_match_differences);
    tcase_add_test(tcase, residual_add_matches);
    tcase_add_test(tcase, bias_gradient_matches);
    tcase_add_test(tcase, threads_do_not_change_bits);
    tcase_add_test(tcase, non_finite_values_show_in_their_place);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
