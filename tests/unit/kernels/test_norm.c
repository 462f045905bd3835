/* test_norm.c - residual addition with norm, and its backward pass, against the formulas in long double.
 *
 * Each stage is checked from what the stage before it wrote, so that a bound covers one stage. Bounds (u: unit
 * roundoff, first order; averages are over the C columns):
 *   x_out: two additions, 2 u (|x| + |delta| + |bias|); without delta the bits of x.
 *   mean: C - 1 additions and a division, C u average |x|.
 *   rstd, of V = average (x - mean)^2: differences and squares 3 u, sum and division C u; eps and its addition
 *     2 u; half of it passes the root, which adds u, as does the division: ((C + 5) / 2 + 2) u rstd.
 *   y = (x - mean) rstd w + b: 4 u (|(x - mean) rstd w| + |b|).
 * Backward, g = dy w, xhat = (x - mean) rstd, G = average |g|, H = average |g xhat|:
 *   average g: (C + 1) u G.  average g xhat: (C + 4) u H.
 *   dx: u (|dx| + rstd (5 |g| + (C + 5) G + (C + 11) |xhat| H)).
 *   dw, db: N rows in any order onto what was there, (N + 4) u (|dw| + sum |dy xhat|), (N + 1) u (|db| + sum |dy|). */
#include "tests/unit/kernels/reference.h"

/* What is given: x_out may be absent, apart, or x itself. */
typedef struct {
    bool delta, bias, x_out, in_place;
} Variant;

static const Variant variants[] = {
    {false, false, false, false}, {false, false, true, false}, {false, false, true, true}, {true, false, true, false},
    {true, false, true, true},    {true, true, true, false},   {true, true, true, true}};
enum { VARIANTS = sizeof(variants) / sizeof(variants[0]) };

static const NormKind kinds[2] = {NORM_LAYER, NORM_RMS};

/* Written arrays hold a row more than the operation is told of. */
typedef struct {
    const TestPath *path;
    DType dtype;
    NormKind kind;
    Variant variant;
    int64_t N, C;
    double eps;
    void *x, *delta, *bias, *w, *b, *x_out, *y, *mean, *rstd;
    void *dx, *dw, *db, *dy, *workspace;
} Problem;

static Problem make_problem(TestRandom *r, const TestPath *path, NormKind kind, Variant variant, int64_t N, int64_t C) {
    static const double epsilons[] = {1e-5, 1e-6, 1e-12};
    const DType dtype = path->dtype;
    Problem p = {.path = path, .dtype = dtype, .kind = kind, .variant = variant, .N = N, .C = C};
    p.eps = epsilons[random_int(r, 3)];
    p.x = random_array(r, (N + 1) * C, 2.0, dtype);
    p.delta = random_array(r, N * C, 1.0, dtype);
    p.bias = random_array(r, C, 1.0, dtype);
    p.w = random_array(r, C, 2.0, dtype), p.b = random_array(r, C, 1.0, dtype);
    p.x_out = variant.in_place ? p.x : random_array(r, (N + 1) * C, 1.0, dtype);
    p.y = random_array(r, (N + 1) * C, 1.0, dtype);
    p.mean = random_array(r, N + 1, 1.0, dtype), p.rstd = random_array(r, N + 1, 1.0, dtype);
    p.dx = random_array(r, (N + 1) * C, 1.0, dtype), p.dy = random_array(r, N * C, 1.0, dtype);
    p.dw = random_array(r, C, 1.0, dtype), p.db = random_array(r, C, 1.0, dtype);
    const size_t bytes = (size_t)norm_backward_workspace(kind, N, C, dtype);
    p.workspace = memset(xmalloc(bytes + 1), 0xff, bytes + 1); /* NaN where it is read before it is written */
    /* Rows far from 0, of zeros, and of one value. */
    for (int64_t i = 0; i < N; i++) {
        const int64_t special = random_int(r, 12);
        for (int64_t c = 0; c < C && special < 3; c++) {
            const double old = element(p.x, i * C + c, dtype);
            set_element(p.x, i * C + c, special == 0 ? old + 50.0 : special == 1 ? 0.0 : 1.7, dtype);
        }
    }
    return p;
}

static void free_problem(Problem *p) {
    if (!p->variant.in_place) free(p->x_out);
    free(p->x), free(p->delta), free(p->bias), free(p->w), free(p->b), free(p->y), free(p->mean), free(p->rstd);
    free(p->dx), free(p->dw), free(p->db), free(p->dy), free(p->workspace);
}

static void run_forward(void *args) {
    const Problem *p = args;
    const Variant v = p->variant;
    const bool layer = p->kind == NORM_LAYER;
    residual_norm_forward(v.x_out ? p->x_out : NULL, p->y, layer ? p->mean : NULL, p->rstd, p->x,
                          v.delta ? p->delta : NULL, v.bias ? p->bias : NULL, p->w, layer ? p->b : NULL, p->kind,
                          p->eps, p->N, p->C, p->dtype, NULL);
}

/* The rows that the forward pass normalised. */
static const void *normed_rows(const Problem *p) { return p->variant.x_out ? p->x_out : p->x; }

static void run_backward(void *args) {
    const Problem *p = args;
    const bool layer = p->kind == NORM_LAYER;
    norm_backward(p->dx, p->dw, layer ? p->db : NULL, p->dy, normed_rows(p), p->w, layer ? p->mean : NULL, p->rstd,
                  p->kind, p->N, p->C, p->workspace, p->dtype, NULL);
}

static void check_row_statistics(const Problem *p, int64_t i, const void *rows) {
    const int64_t C = p->C;
    const double u = sum_error(p->dtype, 1.0), columns = (double)C;
    long double sum = 0.0L, size = 0.0L, squares = 0.0L;
    for (int64_t c = 0; c < C; c++) {
        const long double x = element(rows, i * C + c, p->dtype);
        sum += x, size += fabsl(x);
    }
    const double mean = p->kind == NORM_LAYER ? element(p->mean, i, p->dtype) : 0.0;
    if (p->kind == NORM_LAYER) {
        check_close(p->path, "mean", i, mean, (double)(sum / C), columns * u * (double)(size / C));
    }
    for (int64_t c = 0; c < C; c++) {
        const long double d = (long double)element(rows, i * C + c, p->dtype) - mean;
        squares += d * d;
    }
    const double rstd = element(p->rstd, i, p->dtype), want = (double)(1.0L / sqrtl(squares / C + p->eps));
    check_close(p->path, "rstd", i, rstd, want, ((columns + 5.0) / 2.0 + 2.0) * u * want);
    for (int64_t c = 0; c < C; c++) {
        const long double product = ((long double)element(rows, i * C + c, p->dtype) - mean) * rstd *
                                    element(p->w, c, p->dtype);
        const long double b = p->kind == NORM_LAYER ? element(p->b, c, p->dtype) : 0.0;
        check_close(p->path, "y", i * C + c, element(p->y, i * C + c, p->dtype), (double)(product + b),
                    4.0 * u * (double)(fabsl(product) + fabsl(b)));
    }
}

/* The N rows of x_out, and that the row behind them kept its bits. */
static void check_x_out(const Problem *p, const void *x0, const void *x_out0) {
    const Variant v = p->variant;
    const int64_t C = p->C;
    const double u = sum_error(p->dtype, 1.0);
    if (!v.in_place) check_same(p->path, "x", p->x, x0, (p->N + 1) * C);
    if (!v.x_out) {
        check_same(p->path, "x_out", p->x_out, x_out0, (p->N + 1) * C);
        return;
    }
    for (int64_t i = 0; i < (p->N + 1) * C; i++) {
        const bool behind = i >= p->N * C;
        const double x = element(behind ? x_out0 : x0, i, p->dtype);
        const double delta = v.delta && !behind ? element(p->delta, i, p->dtype) : 0.0;
        const double bias = v.bias && !behind ? element(p->bias, i % C, p->dtype) : 0.0;
        check_close(p->path, "x_out", i, element(p->x_out, i, p->dtype), x + delta + bias,
                    v.delta && !behind ? 2.0 * u * (fabs(x) + fabs(delta) + fabs(bias)) : 0.0);
    }
}

static void check_forward(const Problem *p) {
    const int64_t N = p->N, all = (N + 1) * p->C;
    void *x0 = copy_array(p->x, all, p->dtype), *x_out0 = copy_array(p->x_out, all, p->dtype);
    void *y0 = copy_array(p->y, all, p->dtype);
    const double mean0 = element(p->mean, N, p->dtype), rstd0 = element(p->rstd, N, p->dtype);
    const double first_mean0 = element(p->mean, 0, p->dtype);
    run_forward((void *)(uintptr_t)p);
    check_x_out(p, x0, x_out0);
    for (int64_t i = 0; i < N; i++) check_row_statistics(p, i, normed_rows(p));
    for (int64_t i = N * p->C; i < all; i++) ck_assert(element(p->y, i, p->dtype) == element(y0, i, p->dtype));
    ck_assert(element(p->mean, N, p->dtype) == mean0 && element(p->rstd, N, p->dtype) == rstd0);
    if (p->kind == NORM_RMS) ck_assert(element(p->mean, 0, p->dtype) == first_mean0);
    free(x0), free(x_out0), free(y0);
}

/* ---- backward ---- */

/* Gradient of one row through the norm, in long double; g and xhat, and the averages of |g| and |g xhat|, for
 * the bounds. */
typedef struct {
    long double *dx, *g, *xhat, G, H;
} RowGradient;

static RowGradient row_gradient_make(int64_t C) {
    long double *data = xmalloc((uint64_t)C * 3 * sizeof(long double));
    return (RowGradient){.dx = data, .g = data + C, .xhat = data + 2 * C};
}

static void row_gradient(RowGradient *row, const long double *dy, const long double *x, const long double *w,
                         NormKind kind, long double mean, long double rstd, int64_t C) {
    long double mean_g = 0.0L, mean_gx = 0.0L;
    row->G = row->H = 0.0L;
    for (int64_t c = 0; c < C; c++) {
        row->g[c] = dy[c] * w[c];
        row->xhat[c] = (x[c] - mean) * rstd;
        mean_g += row->g[c] / C, row->G += fabsl(row->g[c]) / C;
        mean_gx += row->g[c] * row->xhat[c] / C, row->H += fabsl(row->g[c] * row->xhat[c]) / C;
    }
    if (kind == NORM_RMS) mean_g = 0.0L, row->G = 0.0L;
    for (int64_t c = 0; c < C; c++) row->dx[c] = rstd * (row->g[c] - mean_g - row->xhat[c] * mean_gx);
}

static void widen(long double *to, const void *from, int64_t first, int64_t count, DType dtype) {
    for (int64_t i = 0; i < count; i++) to[i] = element(from, first + i, dtype);
}

static void check_row_dx(const Problem *p, int64_t i, const RowGradient *row, double rstd, const void *dx0) {
    const double u = sum_error(p->dtype, 1.0), C = (double)p->C;
    for (int64_t c = 0; c < p->C; c++) {
        const int64_t at = i * p->C + c;
        const double old = element(dx0, at, p->dtype);
        const double size = 5.0 * (double)fabsl(row->g[c]) + (C + 5.0) * (double)row->G +
                            (C + 11.0) * (double)(fabsl(row->xhat[c]) * row->H);
        check_close(p->path, "dx", at, element(p->dx, at, p->dtype), (double)(old + row->dx[c]),
                    u * (fabs(old) + rstd * size));
    }
}

static void check_backward(const Problem *p) {
    const int64_t N = p->N, C = p->C;
    const DType dtype = p->dtype;
    const double u = sum_error(dtype, 1.0), rows = (double)N;
    void *dx0 = copy_array(p->dx, (N + 1) * C, dtype), *dw0 = copy_array(p->dw, C, dtype);
    void *db0 = copy_array(p->db, C, dtype);
    run_backward((void *)(uintptr_t)p);
    long double *data = xcalloc((uint64_t)(7 * C), sizeof(long double)), *x = data, *dy = data + C, *w = data + 2 * C;
    long double *dw = data + 3 * C, *dw_size = data + 4 * C, *db = data + 5 * C, *db_size = data + 6 * C;
    widen(w, p->w, 0, C, dtype);
    widen(dw, dw0, 0, C, dtype), widen(db, db0, 0, C, dtype);
    for (int64_t c = 0; c < C; c++) dw_size[c] = fabsl(dw[c]), db_size[c] = fabsl(db[c]);
    RowGradient row = row_gradient_make(C);
    for (int64_t i = 0; i < N; i++) {
        const double mean = p->kind == NORM_LAYER ? element(p->mean, i, dtype) : 0.0, rstd = element(p->rstd, i, dtype);
        widen(x, normed_rows(p), i * C, C, dtype), widen(dy, p->dy, i * C, C, dtype);
        row_gradient(&row, dy, x, w, p->kind, mean, rstd, C);
        check_row_dx(p, i, &row, rstd, dx0);
        for (int64_t c = 0; c < C; c++) {
            dw[c] += dy[c] * row.xhat[c], dw_size[c] += fabsl(dy[c] * row.xhat[c]);
            db[c] += dy[c], db_size[c] += fabsl(dy[c]);
        }
    }
    for (int64_t c = 0; c < C; c++) {
        check_close(p->path, "dw", c, element(p->dw, c, dtype), (double)dw[c], (rows + 4.0) * u * (double)dw_size[c]);
        if (p->kind == NORM_LAYER) {
            check_close(p->path, "db", c, element(p->db, c, dtype), (double)db[c],
                        (rows + 1.0) * u * (double)db_size[c]);
        }
    }
    if (p->kind == NORM_RMS) check_same(p->path, "db", p->db, db0, C);
    for (int64_t i = N * C; i < (N + 1) * C; i++) ck_assert(element(p->dx, i, dtype) == element(dx0, i, dtype));
    free(row.dx), free(data), free(dx0), free(dw0), free(db0);
}

static void check_shape(TestRandom *r, int64_t N, int64_t C) {
    for (int n = 0; n < 2 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        test_path_choose(path);
        Problem p = make_problem(r, path, kinds[n / TEST_PATHS], variants[random_int(r, VARIANTS)], N, C);
        check_forward(&p);
        check_backward(&p);
        free_problem(&p);
    }
    kernels_limit_path(NULL);
}

START_TEST(random_shapes_match) {
    static const int64_t rows[] = {1, 2, 3, 15, 16, 17, 33, 65},
                         columns[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 64, 100};
    TestRandom r = test_random("random_shapes_match");
    for (int n = 0; n < 60; n++) {
        kernels_init(1 + n % 3);
        check_shape(&r, random_choice(&r, rows, 8), random_choice(&r, columns, 12));
    }
}
END_TEST

/* Rows longer than a chunk, more rows than the 32 blocks of the backward pass take 16 of, and none. */
START_TEST(extreme_shapes_match) {
    TestRandom r = test_random("extreme_shapes_match");
    kernels_init(2);
    check_shape(&r, 2, 16391);
    check_shape(&r, 700, 5);
    check_shape(&r, 3, 1000);
    check_shape(&r, 0, 9);
}
END_TEST

/* Every way to give x_out, delta and bias, in every kind, on every path. */
START_TEST(variants_match) {
    TestRandom r = test_random("variants_match");
    kernels_init(2);
    for (int n = 0; n < VARIANTS * 2 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        test_path_choose(path);
        Problem p = make_problem(&r, path, kinds[n / TEST_PATHS % 2], variants[n / TEST_PATHS / 2], 19, 21);
        check_forward(&p);
        free_problem(&p);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* ---- the reference's own gradient ---- */

enum { SMALL_C = 9 };

static void small_statistics(const long double *x, NormKind kind, long double eps, long double *mean,
                             long double *rstd) {
    long double sum = 0.0L, squares = 0.0L;
    for (int c = 0; c < SMALL_C; c++) sum += x[c];
    *mean = kind == NORM_LAYER ? sum / SMALL_C : 0.0L;
    for (int c = 0; c < SMALL_C; c++) squares += (x[c] - *mean) * (x[c] - *mean);
    *rstd = 1.0L / sqrtl(squares / SMALL_C + eps);
}

static long double small_loss(const long double *dy, const long double *x, const long double *w, NormKind kind,
                              long double eps) {
    long double mean, rstd, loss = 0.0L;
    small_statistics(x, kind, eps, &mean, &rstd);
    for (int c = 0; c < SMALL_C; c++) loss += dy[c] * (x[c] - mean) * rstd * w[c];
    return loss;
}

START_TEST(reference_gradients_match_differences) {
    const long double eps = 0.1L, step = 1e-5L;
    TestRandom r = test_random("reference_gradients_match_differences");
    for (int n = 0; n < 20; n++) {
        long double x[SMALL_C], dy[SMALL_C], w[SMALL_C], mean, rstd;
        for (int c = 0; c < SMALL_C; c++) {
            x[c] = 2.0 * random_uniform(&r) - 1.0;
            dy[c] = 2.0 * random_uniform(&r) - 1.0;
            w[c] = 2.0 * random_uniform(&r) - 1.0;
        }
        const NormKind kind = kinds[n % 2];
        RowGradient row = row_gradient_make(SMALL_C);
        small_statistics(x, kind, eps, &mean, &rstd);
        row_gradient(&row, dy, x, w, kind, mean, rstd, SMALL_C);
        for (int c = 0; c < 2 * SMALL_C; c++) {
            long double *moved = c < SMALL_C ? &x[c] : &w[c - SMALL_C], old = *moved;
            *moved = old + step;
            const long double up = small_loss(dy, x, w, kind, eps);
            *moved = old - step;
            const long double down = small_loss(dy, x, w, kind, eps);
            *moved = old;
            const long double got = c < SMALL_C ? row.dx[c] : dy[c - SMALL_C] * row.xhat[c - SMALL_C];
            /* Third derivatives are below 9 rstd^3 |dy| |w| times a small constant, rstd below 3.2: 1e3 step^2. */
            ck_assert(fabsl((up - down) / (2.0L * step) - got) <= 1e-7L);
        }
        free(row.dx);
    }
}
END_TEST

/* ---- bits, and numbers that are none ---- */

START_TEST(threads_do_not_change_bits) {
    enum { N = 203, C = 333 };
    TestRandom r = test_random("threads_do_not_change_bits");
    for (int n = 0; n < 2 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        test_path_choose(path);
        Problem p = make_problem(&r, path, kinds[n / TEST_PATHS], variants[3 + random_int(&r, 4)], N, C);
        TestOutput forward[] = {{"x_out", p.x_out, N * C}, {"y", p.y, N * C}, {"mean", p.mean, N}, {"rstd", p.rstd, N}};
        check_threads(path, run_forward, &p, forward, 4);
        TestOutput backward[] = {{"dx", p.dx, N * C}, {"dw", p.dw, C}, {"db", p.db, C}};
        check_threads(path, run_backward, &p, backward, 3);
        free_problem(&p);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* Whether row i of (.., C) holds a number that isn't finite. */
static bool row_shows(const void *x, int64_t i, int64_t C, DType dtype) {
    for (int64_t c = 0; c < C; c++) {
        if (!isfinite(element(x, i * C + c, dtype))) return true;
    }
    return false;
}

START_TEST(non_finite_values_show_in_their_row) {
    enum { N = 20, C = 21, CASES = 2 * TEST_PATHS * 3 };
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    TestRandom r = test_random("non_finite_values_show_in_their_row");
    kernels_init(2);
    for (int n = 0; n < 3 * CASES; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        test_path_choose(path);
        Problem p = make_problem(&r, path, kinds[n / TEST_PATHS % 2], variants[3 + random_int(&r, 4)], N, C);
        const int64_t row = random_int(&r, N), column = random_int(&r, C), where = n / CASES;
        const double value = bad[n / TEST_PATHS / 2 % 3];
        if (where < 2) set_element(where == 0 ? p.x : p.delta, row * C + column, value, p.dtype);
        run_forward(&p);
        for (int64_t i = 0; i < N && where < 2; i++) {
            ck_assert(row_shows(p.x_out, i, C, p.dtype) == (i == row) && row_shows(p.y, i, C, p.dtype) == (i == row));
        }
        if (where == 2) set_element(p.dy, row * C + column, value, p.dtype);
        run_backward(&p);
        for (int64_t i = 0; i < N; i++) ck_assert(row_shows(p.dx, i, C, p.dtype) == (i == row));
        ck_assert(!isfinite(element(p.dw, column, p.dtype)));
        if (where == 2 && p.kind == NORM_LAYER) ck_assert(!isfinite(element(p.db, column, p.dtype)));
        free_problem(&p);
    }
    kernels_limit_path(NULL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("norm");
    TCase *tcase = tcase_create("norm");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, random_shapes_match);
    tcase_add_test(tcase, extreme_shapes_match);
    tcase_add_test(tcase, variants_match);
    tcase_add_test(tcase, reference_gradients_match_differences);
    tcase_add_test(tcase, threads_do_not_change_bits);
    tcase_add_test(tcase, non_finite_values_show_in_their_row);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
