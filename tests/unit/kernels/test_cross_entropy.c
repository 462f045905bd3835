/* test_cross_entropy.c - the loss of a vocabulary split over ranks, and its gradient, against the whole row in
 * long double.
 *
 * Padding columns hold NaN: looking at them shows. Bounds (u: unit roundoff, first order; d = x - maximum):
 *   stats: the maximum and the target's logit keep their bits. The sum has terms e = exp(d), off by (|d| + 4) u
 *     for the difference and exp's 3 u, and V additions: sum e (|d| + 4) u + V u sum e. The largest term is 1,
 *     beside which V terms that exp flushes to 0 (below 2.5e-38) are nothing.
 *   lse: a rank's sum s is scaled by exp(maximum - m), (|maximum - m| + 4) u more, and ranks are added, u each;
 *     the relative error R of the whole passes the logarithm as an absolute one: R + 2 u |log| + u |lse|.
 *   loss = lse - target: u |loss| more.
 *   gradient scale (p - onehot), p = exp(x - lse): p |scale| (|x - lse| + 3 + 2) u, 2 u |scale| where the target
 *     is, u of the result, and |scale| times 2.5e-38 (fp64: the least number) for what exp flushes. */
#include "tests/unit/kernels/reference.h"

#include <float.h>

/* n rows of V valid columns in all; each rank holds `columns`, the last ones partly or wholly padding. Written
 * arrays hold a row more than the operation is told of. */
typedef struct {
    const TestPath *path;
    DType dtype;
    int64_t n, V, ranks, columns, padding;
    double scale;
    int32_t *targets;
    void *all;        /* (n, V) */
    void **logits;    /* of each rank (n + 1, columns) */
    void *stats;      /* (ranks, n, 3), and 3 more */
    void *lse, *loss; /* (n + 1) */
} Problem;

static int64_t valid_columns(const Problem *p, int64_t rank) {
    return max_i64(0, min_i64(p->columns, p->V - rank * p->columns));
}

static void split_logits(const Problem *p) {
    for (int64_t rank = 0; rank < p->ranks; rank++) {
        for (int64_t i = 0; i < (p->n + 1) * p->columns; i++) {
            const int64_t row = i / p->columns, column = rank * p->columns + i % p->columns;
            const double value = row == p->n     ? 7.0
                                 : column < p->V ? element(p->all, row * p->V + column, p->dtype)
                                                 : NAN;
            set_element(p->logits[rank], i, value, p->dtype);
        }
    }
}

/* Logits uniform in offset + [-size, size). */
static Problem make_problem(TestRandom *r, const TestPath *path, int64_t n, int64_t V, int64_t ranks, double size,
                            double offset) {
    Problem p = {.path = path, .dtype = path->dtype, .n = n, .V = V, .ranks = ranks};
    p.columns = ceil_div(V, ranks) + random_int(r, 3) * random_int(r, 5);
    p.scale = random_int(r, 2) ? 1.0 / 3.0 : -0.7;
    p.targets = xmalloc(sizeof(int32_t) * (uint64_t)max_i64(n, 1));
    for (int64_t i = 0; i < n; i++) p.targets[i] = random_int(r, 5) ? (int32_t)random_int(r, V) : -1;
    p.all = random_array(r, n * V, size, p.dtype);
    for (int64_t i = 0; i < n * V; i++) set_element(p.all, i, element(p.all, i, p.dtype) + offset, p.dtype);
    p.logits = xmalloc(sizeof(void *) * (uint64_t)ranks);
    for (int64_t k = 0; k < ranks; k++) p.logits[k] = random_array(r, (n + 1) * p.columns, 1.0, p.dtype);
    p.stats = random_array(r, (ranks * n + 1) * 3, 1.0, p.dtype);
    p.lse = random_array(r, n + 1, 1.0, p.dtype), p.loss = random_array(r, n + 1, 1.0, p.dtype);
    split_logits(&p);
    return p;
}

static void free_problem(Problem *p) {
    for (int64_t k = 0; k < p->ranks; k++) free(p->logits[k]);
    free(p->targets), free(p->all), free(p->logits), free(p->stats), free(p->lse), free(p->loss);
}

static void run_loss(void *args) {
    const Problem *p = args;
    for (int64_t k = 0; k < p->ranks; k++) {
        cross_entropy_stats((char *)p->stats + (size_t)(3 * k * p->n) * dtype_size(p->dtype), p->logits[k], p->targets,
                            k * p->columns, p->n, valid_columns(p, k), p->columns, p->dtype, NULL);
    }
    cross_entropy_combine(p->loss, p->lse, p->stats, p->targets, p->ranks, p->n, p->dtype, NULL);
}

static void run_gradient(void *args) {
    const Problem *p = args;
    for (int64_t k = 0; k < p->ranks; k++) {
        cross_entropy_backward(p->logits[k], p->lse, p->targets, p->scale, k * p->columns, p->n, valid_columns(p, k),
                               p->columns, p->dtype, NULL);
    }
}

/* Maximum, sum of exp(x - maximum) and its bound, over columns [first, first + count) of a row. */
typedef struct {
    long double maximum, sum, error;
} RowSum;

static RowSum row_sum(const Problem *p, int64_t row, int64_t first, int64_t count) {
    const double u = sum_error(p->dtype, 1.0);
    RowSum s = {-INFINITY, 0.0L, 0.0L};
    for (int64_t c = 0; c < count; c++) s.maximum = fmaxl(s.maximum, element(p->all, row * p->V + first + c, p->dtype));
    for (int64_t c = 0; c < count && !isinf(s.maximum); c++) {
        const long double d = element(p->all, row * p->V + first + c, p->dtype) - s.maximum;
        if (isinf(d)) continue; /* a weight of 0 */
        s.sum += expl(d), s.error += expl(d) * (fabsl(d) + 4.0L) * u;
    }
    s.error += (long double)count * u * s.sum;
    return s;
}

static void check_row_loss(const Problem *p, int64_t row) {
    const double u = sum_error(p->dtype, 1.0);
    const int64_t target = p->targets[row];
    const RowSum whole = row_sum(p, row, 0, p->V);
    long double error = (long double)p->ranks * u * whole.sum;
    for (int64_t k = 0; k < p->ranks; k++) {
        const int64_t first = k * p->columns, valid = valid_columns(p, k), at = 3 * (k * p->n + row);
        const bool here = target >= first && target < first + valid;
        RowSum part = row_sum(p, row, first, valid);
        ck_assert(element(p->stats, at, p->dtype) == (double)part.maximum);
        check_close(p->path, "sum", at + 1, element(p->stats, at + 1, p->dtype), (double)part.sum, (double)part.error);
        check_close(p->path, "target", at + 2, element(p->stats, at + 2, p->dtype),
                    here ? element(p->all, row * p->V + target, p->dtype) : 0.0, 0.0);
        if (isinf(part.maximum)) continue; /* no column, or none above -inf */
        const long double shift = part.maximum - whole.maximum, factor = expl(shift);
        error += factor * (part.error + part.sum * (fabsl(shift) + 4.0L) * u);
    }
    const long double lse = whole.maximum + logl(whole.sum);
    const double bound = (double)(error / whole.sum) + 2.0 * u * (double)fabsl(logl(whole.sum)) +
                         u * (double)fabsl(lse);
    const long double loss = target >= 0 ? lse - element(p->all, row * p->V + target, p->dtype) : 0.0L;
    check_close(p->path, "lse", row, element(p->lse, row, p->dtype), (double)lse, bound);
    check_close(p->path, "loss", row, element(p->loss, row, p->dtype), (double)loss,
                target >= 0 ? bound + u * (double)fabsl(loss) : 0.0);
}

static void check_loss(const Problem *p) {
    void *lse0 = copy_array(p->lse, p->n + 1, p->dtype), *loss0 = copy_array(p->loss, p->n + 1, p->dtype);
    void *stats0 = copy_array(p->stats, (p->ranks * p->n + 1) * 3, p->dtype);
    run_loss((void *)(uintptr_t)p);
    for (int64_t row = 0; row < p->n; row++) check_row_loss(p, row);
    ck_assert(element(p->lse, p->n, p->dtype) == element(lse0, p->n, p->dtype));
    ck_assert(element(p->loss, p->n, p->dtype) == element(loss0, p->n, p->dtype));
    for (int64_t i = p->ranks * p->n * 3; i < (p->ranks * p->n + 1) * 3; i++) {
        ck_assert(element(p->stats, i, p->dtype) == element(stats0, i, p->dtype));
    }
    free(lse0), free(loss0), free(stats0);
}

/* Of loss by its logit, given the row's lse. */
static long double slope(long double logit, long double lse, bool is_target, double scale) {
    return scale * (expl(logit - lse) - is_target);
}

static void check_gradient(const Problem *p) {
    const double u = sum_error(p->dtype, 1.0), flushed = p->dtype == DT_F64 ? DBL_MIN : 2.5e-38;
    run_gradient((void *)(uintptr_t)p);
    for (int64_t k = 0; k < p->ranks; k++) {
        for (int64_t i = 0; i < (p->n + 1) * p->columns; i++) {
            const int64_t row = i / p->columns, column = k * p->columns + i % p->columns;
            const double got = element(p->logits[k], i, p->dtype);
            if (row == p->n || p->targets[row] < 0 || column >= p->V) {
                check_close(p->path, "gradient", i, got, row == p->n ? 7.0 : 0.0, 0.0);
                continue;
            }
            const bool is_target = p->targets[row] == column;
            const double logit = element(p->all, row * p->V + column, p->dtype), lse = element(p->lse, row, p->dtype);
            const double want = (double)slope(logit, lse, is_target, p->scale), scale_size = fabs(p->scale);
            const double p_error = isinf(logit) ? 0.0 : exp(logit - lse) * (fabs(logit - lse) + 5.0) * u;
            const double bound = scale_size * (p_error + flushed) + (is_target ? 2.0 * u * scale_size : 0.0) +
                                 u * fabs(want);
            check_close(p->path, "gradient", i, got, want, bound);
        }
    }
}

START_TEST(random_shapes_match) {
    static const int64_t rows[] = {0, 1, 2, 7, 16, 33}, vocabularies[] = {1, 2, 3, 7, 8, 9, 17, 31, 64, 100, 257};
    TestRandom r = test_random("random_shapes_match");
    for (int n = 0; n < 100 * TEST_PATHS; n++) {
        kernels_init(1 + n % 3);
        test_path_choose(&test_paths[n % TEST_PATHS]);
        const double sizes[] = {1.0, 5.0, 100.0, 1e4}, offsets[] = {0.0, 0.0, 1e4, -1e4};
        Problem p = make_problem(&r, &test_paths[n % TEST_PATHS], random_choice(&r, rows, 6),
                                 random_choice(&r, vocabularies, 11), 1 + random_int(&r, 3), sizes[random_int(&r, 4)],
                                 offsets[random_int(&r, 4)]);
        check_loss(&p);
        check_gradient(&p);
        free_problem(&p);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* Longer than a chunk, with more ranks than columns, and a rank whose logits all lie far below. */
START_TEST(extreme_shapes_match) {
    TestRandom r = test_random("extreme_shapes_match");
    kernels_init(2);
    for (int n = 0; n < TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n];
        test_path_choose(path);
        Problem p[3] = {make_problem(&r, path, 2, 50257, 3, 5.0, 0.0), make_problem(&r, path, 3, 2, 3, 5.0, 0.0),
                        make_problem(&r, path, 3, 30, 3, 5.0, 0.0)};
        for (int64_t i = 0; i < 3 * 30; i++) {
            if (i % 30 < p[2].columns) set_element(p[2].all, i, -1e4, path->dtype);
        }
        split_logits(&p[2]);
        for (int k = 0; k < 3; k++) {
            check_loss(&p[k]);
            check_gradient(&p[k]);
            free_problem(&p[k]);
        }
    }
    kernels_limit_path(NULL);
}
END_TEST

/* The reference's gradient against differences of the reference's loss. */
START_TEST(reference_gradient_matches_differences) {
    enum { V = 9 };
    const long double step = 1e-5L;
    TestRandom r = test_random("reference_gradient_matches_differences");
    Problem p = make_problem(&r, &test_paths[2], 4, V, 1, 3.0, 0.0);
    for (int64_t row = 0; row < p.n; row++) {
        const int64_t target = random_int(&r, V);
        const RowSum whole = row_sum(&p, row, 0, V);
        const long double lse = whole.maximum + logl(whole.sum);
        double *x = (double *)p.all + row * V;
        for (int c = 0; c < V; c++) {
            long double loss[2];
            for (int side = 0; side < 2; side++) {
                long double sum = 0.0L, sign = side ? -1.0L : 1.0L;
                for (int j = 0; j < V; j++) sum += expl(x[j] + (j == c ? sign * step : 0.0L));
                loss[side] = p.scale * (logl(sum) - (x[target] + (c == target ? sign * step : 0.0L)));
            }
            /* The third derivative is below 1, and the loss of order 10 is rounded to 1e-16 at worst. */
            ck_assert(fabsl((loss[0] - loss[1]) / (2.0L * step) - slope(x[c], lse, c == target, p.scale)) <= 2e-10L);
        }
    }
    free_problem(&p);
}
END_TEST

START_TEST(threads_do_not_change_bits) {
    enum { ROWS = 150, V = 1003 };
    TestRandom r = test_random("threads_do_not_change_bits");
    for (int n = 0; n < TEST_PATHS; n++) {
        test_path_choose(&test_paths[n]);
        Problem p = make_problem(&r, &test_paths[n], ROWS, V, 1, 5.0, 0.0);
        TestOutput loss[] = {{"stats", p.stats, 3 * ROWS}, {"loss", p.loss, ROWS}, {"lse", p.lse, ROWS}};
        check_threads(p.path, run_loss, &p, loss, 3);
        TestOutput gradient = {"gradient", p.logits[0], ROWS * p.columns};
        check_threads(p.path, run_gradient, &p, &gradient, 1);
        free_problem(&p);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* NaN and inf anywhere make the row's loss and gradient none, but for a masked row, which is 0. So does -inf at the
 * target; elsewhere it is a weight of 0, as softmax has it. */
START_TEST(non_finite_logits_show_in_their_row) {
    enum { ROWS = 6, V = 21 };
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    TestRandom r = test_random("non_finite_logits_show_in_their_row");
    kernels_init(2);
    for (int n = 0; n < 20 * 3 * TEST_PATHS; n++) {
        test_path_choose(&test_paths[n % TEST_PATHS]);
        Problem p = make_problem(&r, &test_paths[n % TEST_PATHS], ROWS, V, 1 + random_int(&r, 3), 5.0, 0.0);
        const double value = bad[n / TEST_PATHS % 3];
        const int64_t row = random_int(&r, ROWS), column = random_int(&r, V);
        const bool masked = p.targets[row] < 0, shows = !masked && (value != -INFINITY || p.targets[row] == column);
        set_element(p.all, row * V + column, value, p.dtype);
        split_logits(&p);
        run_loss(&p);
        if (value == -INFINITY && !shows) check_row_loss(&p, row);
        if (masked) ck_assert(element(p.loss, row, p.dtype) == 0.0);
        for (int64_t i = 0; i < ROWS; i++) ck_assert(isfinite(element(p.loss, i, p.dtype)) == !(shows && i == row));
        run_gradient(&p);
        const bool gradient_shows = shows && value != -INFINITY;
        for (int64_t k = 0; k < p.ranks; k++) {
            for (int64_t i = 0; i < ROWS * p.columns; i++) {
                const bool here = i / p.columns == row && i % p.columns < valid_columns(&p, k);
                ck_assert(isfinite(element(p.logits[k], i, p.dtype)) == !(here && gradient_shows));
            }
        }
        free_problem(&p);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* A rank that has nothing above -inf adds nothing, as if these columns weren't there. */
START_TEST(a_rank_of_zero_weights_adds_nothing) {
    enum { ROWS = 12, V = 30 };
    TestRandom r = test_random("a_rank_of_zero_weights_adds_nothing");
    kernels_init(2);
    for (int n = 0; n < 3 * TEST_PATHS; n++) {
        test_path_choose(&test_paths[n % TEST_PATHS]);
        Problem p = make_problem(&r, &test_paths[n % TEST_PATHS], ROWS, V, 3, 5.0, 0.0);
        for (int64_t i = 0; i < ROWS * V; i++) {
            if (i % V / p.columns == n / TEST_PATHS) set_element(p.all, i, -INFINITY, p.dtype);
        }
        for (int64_t i = 0; i < ROWS; i++) { /* no target there: that loss is infinite */
            if (p.targets[i] / p.columns == n / TEST_PATHS) p.targets[i] = -1;
        }
        split_logits(&p);
        check_loss(&p);
        check_gradient(&p);
        free_problem(&p);
    }
    kernels_limit_path(NULL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("cross_entropy");
    TCase *tcase = tcase_create("cross_entropy");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, random_shapes_match);
    tcase_add_test(tcase, extreme_shapes_match);
    tcase_add_test(tcase, reference_gradient_matches_differences);
    tcase_add_test(tcase, threads_do_not_change_bits);
    tcase_add_test(tcase, non_finite_logits_show_in_their_row);
    tcase_add_test(tcase, a_rank_of_zero_weights_adds_nothing);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
