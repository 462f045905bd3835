/* test_optimizer.c - AdamW and SGD, step by step, against the textbook update in long double.
 *
 * Each step's reference starts from the parameters and moments that the kernel left, so that a bound covers
 * one step. Bounds (u: unit roundoff, first order; each constant is rounded once to the dtype):
 *   AdamW. grad = f g: 2 u.  m' = b1 m + r1 grad: 5 u M, M = |b1 m| + |r1 grad|.  v' = b2 v + r2 grad^2: 8 u v'.
 *     Its root, corrected, plus eps: 8 u. Step m' c1 / (..): 5 u for m', 2 for c1, 8, and 1 for the division:
 *     16 u S, S = M c1 / (root + eps).  p' = p - lr (step + decay p): u |p'| and lr (20 u S + 6 u |decay p|).
 *   SGD.  m' = momentum m + f g: 3 u M, M = |momentum m| + |f g|.  p': u |p'| and lr (7 u M + 6 u |decay p|).
 * Moments below the smallest normal number are off by half the smallest number there is. */
#include "tests/unit/kernels/reference.h"

static const int64_t lengths[] = {0, 1, 2, 7, 8, 9, 17, 31, 100, 16384, 16391, 40000};
enum { LENGTHS = sizeof(lengths) / sizeof(lengths[0]), STEPS = 5 };

/* n elements are updated; the arrays hold one more, which has to stay as it is. */
typedef struct {
    const TestPath *path;
    int64_t n;
    void *p, *m, *v, *g;
    AdamwStep step; /* of AdamW; the next four of SGD */
    double momentum;
} Problem;

static void run_adamw(void *args) {
    const Problem *x = args;
    adamw_step(x->p, x->m, x->v, x->g, &x->step, x->n, x->path->dtype, NULL);
}

static void run_sgd(void *args) {
    const Problem *x = args;
    sgd_step(x->p, x->m, x->g, x->step.lr, x->momentum, x->step.weight_decay, x->step.grad_scale, x->n, x->path->dtype,
             NULL);
}

static Problem make_problem(TestRandom *r, const TestPath *path, int64_t n) {
    static const double decays[] = {0.0, 0.1}, scales[] = {1.0, 0.037, 12.0};
    Problem x = {.path = path, .n = n, .momentum = 0.9};
    x.p = random_array(r, n + 1, 1.0, path->dtype);
    x.m = random_array(r, n + 1, 0.0, path->dtype);
    x.v = random_array(r, n + 1, 0.0, path->dtype);
    x.g = NULL;
    x.step = (AdamwStep){.lr = 0.01 + random_uniform(r),
                         .beta1 = 0.9,
                         .beta2 = 0.95,
                         .eps = 1e-8,
                         .weight_decay = decays[random_int(r, 2)],
                         .grad_scale = scales[random_int(r, 3)]};
    return x;
}

static void free_problem(Problem *x) { free(x->p), free(x->m), free(x->v), free(x->g); }

/* Gradients from 1e-6 to 1, and zeros. */
static void next_gradient(TestRandom *r, Problem *x, int t) {
    free(x->g);
    x->g = random_array(r, x->n + 1, 1.0, x->path->dtype);
    for (int64_t i = 0; i < x->n; i++) {
        double factor = random_int(r, 8) == 0 ? 0.0 : random_int(r, 2) ? 1.0 : 1e-6;
        set_element(x->g, i, factor * element(x->g, i, x->path->dtype), x->path->dtype);
    }
    x->step.bias_correction1 = 1.0 - pow(x->step.beta1, t);
    x->step.bias_correction2 = 1.0 - pow(x->step.beta2, t);
}

static void check_adamw_step(Problem *x) {
    const DType dtype = x->path->dtype;
    const AdamwStep *s = &x->step;
    const double u = sum_error(dtype, 1.0), least = dtype == DT_F64 ? 0x1p-1074 : 0x1p-149;
    void *p0 = copy_array(x->p, x->n + 1, dtype), *m0 = copy_array(x->m, x->n + 1, dtype);
    void *v0 = copy_array(x->v, x->n + 1, dtype), *g0 = copy_array(x->g, x->n + 1, dtype);
    run_adamw(x);
    for (int64_t i = 0; i < x->n; i++) {
        const long double p = element(p0, i, dtype), old_m = element(m0, i, dtype);
        const long double grad = (long double)s->grad_scale * element(x->g, i, dtype);
        const long double m = s->beta1 * old_m + (1.0L - s->beta1) * grad;
        const long double v = s->beta2 * (long double)element(v0, i, dtype) + (1.0L - s->beta2) * grad * grad;
        const long double root = sqrtl(v / s->bias_correction2) + s->eps;
        const long double want = p - s->lr * (m / s->bias_correction1 / root + s->weight_decay * p);
        const double M = (double)(fabsl(s->beta1 * old_m) + fabsl((1.0L - s->beta1) * grad));
        const double S = M / s->bias_correction1 / (double)root, decay = fabs(s->weight_decay * (double)p);
        check_close(x->path, "m", i, element(x->m, i, dtype), (double)m, 5.0 * u * M + least);
        check_close(x->path, "v", i, element(x->v, i, dtype), (double)v, 8.0 * u * (double)v + least);
        check_close(x->path, "p", i, element(x->p, i, dtype), (double)want,
                    u * fabs((double)want) + s->lr * u * (20.0 * S + 6.0 * decay));
    }
    check_same(x->path, "g", x->g, g0, x->n + 1);
    for (int i = 0; i < 3; i++) {
        const void *now[3] = {x->p, x->m, x->v}, *old[3] = {p0, m0, v0};
        ck_assert(element(now[i], x->n, dtype) == element(old[i], x->n, dtype));
    }
    free(p0), free(m0), free(v0), free(g0);
}

START_TEST(adamw_matches) {
    TestRandom r = test_random("adamw_matches");
    kernels_init(2);
    for (int n = 0; n < LENGTHS * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        test_path_choose(path);
        Problem x = make_problem(&r, path, lengths[n / TEST_PATHS]);
        for (int t = 1; t <= STEPS; t++) {
            next_gradient(&r, &x, t);
            check_adamw_step(&x);
        }
        free_problem(&x);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* What the formula means: the first step is lr against the gradient's sign, whatever its size or scale; without
 * gradient and decay nothing moves; and decay alone shrinks by lr x decay. */
START_TEST(adamw_moves_as_it_should) {
    TestRandom r = test_random("adamw_moves_as_it_should");
    for (int n = 0; n < TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n];
        const DType dtype = path->dtype;
        const double u = sum_error(dtype, 1.0);
        test_path_choose(path);
        Problem x = make_problem(&r, path, 50);
        next_gradient(&r, &x, 1);
        for (int64_t i = 0; i < x.n; i++) set_element(x.g, i, (i % 2 ? 1.0 : -1.0) * (0.1 + (double)i), dtype);
        x.step.weight_decay = 0.0, x.step.eps = 1e-30;
        void *before = copy_array(x.p, x.n, dtype);
        run_adamw(&x);
        for (int64_t i = 0; i < x.n; i++) {
            const double p = element(before, i, dtype), want = p - (i % 2 ? x.step.lr : -x.step.lr);
            check_close(path, "p", i, element(x.p, i, dtype), want, u * (fabs(want) + 20.0 * x.step.lr));
        }
        memset(x.m, 0, (size_t)x.n * dtype_size(dtype)), memset(x.v, 0, (size_t)x.n * dtype_size(dtype));
        memset(x.g, 0, (size_t)x.n * dtype_size(dtype));
        memcpy(before, x.p, (size_t)x.n * dtype_size(dtype));
        run_adamw(&x);
        check_same(path, "p", x.p, before, x.n);
        x.step.weight_decay = 0.5, x.step.lr = 0.125;
        run_adamw(&x);
        for (int64_t i = 0; i < x.n; i++) {
            const double want = element(before, i, dtype) * (1.0 - 0.0625);
            check_close(path, "p", i, element(x.p, i, dtype), want, u * fabs(want));
        }
        free(before);
        free_problem(&x);
    }
    kernels_limit_path(NULL);
}
END_TEST

static void check_sgd_step(Problem *x) {
    const DType dtype = x->path->dtype;
    const AdamwStep *s = &x->step;
    const double u = sum_error(dtype, 1.0);
    void *p0 = copy_array(x->p, x->n + 1, dtype), *m0 = copy_array(x->m, x->n + 1, dtype);
    void *g0 = copy_array(x->g, x->n + 1, dtype);
    run_sgd(x);
    for (int64_t i = 0; i < x->n; i++) {
        const long double p = element(p0, i, dtype), grad = (long double)s->grad_scale * element(x->g, i, dtype);
        const long double old_m = x->momentum * (long double)element(m0, i, dtype), m = old_m + grad;
        const long double want = p - s->lr * (m + s->weight_decay * p);
        const double M = (double)(fabsl(old_m) + fabsl(grad)), decay = fabs(s->weight_decay * (double)p);
        check_close(x->path, "m", i, element(x->m, i, dtype), (double)m, 3.0 * u * M);
        check_close(x->path, "p", i, element(x->p, i, dtype), (double)want,
                    u * fabs((double)want) + s->lr * u * (7.0 * M + 6.0 * decay));
    }
    check_same(x->path, "g", x->g, g0, x->n + 1);
    ck_assert(element(x->p, x->n, dtype) == element(p0, x->n, dtype) && element(x->m, x->n, dtype) == 0.0);
    free(p0), free(m0), free(g0);
}

START_TEST(sgd_matches) {
    TestRandom r = test_random("sgd_matches");
    kernels_init(2);
    for (int n = 0; n < LENGTHS * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        test_path_choose(path);
        Problem x = make_problem(&r, path, lengths[n / TEST_PATHS]);
        x.momentum = random_int(&r, 2) ? 0.9 : 0.0;
        for (int t = 1; t <= STEPS; t++) {
            next_gradient(&r, &x, t);
            check_sgd_step(&x);
        }
        free_problem(&x);
    }
    kernels_limit_path(NULL);
}
END_TEST

START_TEST(threads_do_not_change_bits) {
    TestRandom r = test_random("threads_do_not_change_bits");
    for (int n = 0; n < 2 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        test_path_choose(path);
        Problem x = make_problem(&r, path, 70001);
        next_gradient(&r, &x, 3);
        TestOutput out[] = {{"p", x.p, x.n}, {"m", x.m, x.n}, {"v", x.v, x.n}};
        check_threads(path, n / TEST_PATHS ? run_sgd : run_adamw, &x, out, 3);
        free_problem(&x);
    }
    kernels_limit_path(NULL);
}
END_TEST

START_TEST(non_finite_gradients_show_in_their_place) {
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    TestRandom r = test_random("non_finite_gradients_show_in_their_place");
    kernels_init(1);
    for (int n = 0; n < 2 * 3 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        test_path_choose(path);
        Problem x = make_problem(&r, path, 1 + random_int(&r, 40));
        next_gradient(&r, &x, 2);
        const int64_t at = random_int(&r, x.n);
        set_element(x.g, at, bad[n / TEST_PATHS % 3], path->dtype);
        (n < 3 * TEST_PATHS ? run_adamw : run_sgd)(&x);
        for (int64_t i = 0; i < x.n; i++) {
            ck_assert(isfinite(element(x.p, i, path->dtype)) == (i != at));
            ck_assert(isfinite(element(x.m, i, path->dtype)) == (i != at));
        }
        free_problem(&x);
    }
    kernels_limit_path(NULL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("optimizer");
    TCase *tcase = tcase_create("optimizer");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, adamw_matches);
    tcase_add_test(tcase, adamw_moves_as_it_should);
    tcase_add_test(tcase, sgd_matches);
    tcase_add_test(tcase, threads_do_not_change_bits);
    tcase_add_test(tcase, non_finite_gradients_show_in_their_place);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
