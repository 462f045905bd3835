/* test_attention.c - attention against the textbook formula in fp64, by bounds carried along with it.
 *
 * Bounds (u: unit roundoff, first order). A scaled score s = c q.k is off by E = (D + 3) u c sum|q k|, and
 * the subtraction of the maximum or of lse by u |s| more, twice. So a weight exp(s - m), good to 4 u itself,
 * has the relative error R = 2 (max E + 2 u max|s|) + 4 u at most, numerator and denominator together twice
 * that; sums over n keys add n u, rescaling between blocks of at least 16 keys adds 6 u a block.
 *   out:   sum p |v| times W, W = 2 R + (2 n + 6 n / 16 + 12) u.  lse: W + 2 u |lse|.
 *   p (backward): relative P = E + W + 2 u (|s| + |lse|) + 4 u.
 *   delta = dout.out: D u sum|dout out| + sum |dout| (error of out).  dp = dout.v: D u sum|dout v|.
 *   ds = p (dp - delta): p (P |dp - delta| + error of dp + of delta + 2 u (|dp| + |delta|)).
 *   dq, dk, dv: products of n terms with ds or p: sum of (error of ds) |k| + (n + 4) u sum |ds k|, and so on. */
#include "tests/unit/kernels/reference.h"

typedef struct {
    AttentionShape s;
    DType dtype;
    int64_t n_q, n_kv, n_out, n_lse; /* elements with strides */
    void *q, *k, *v, *out, *lse, *dout, *dq, *dk, *dv;
    int32_t *doc_start;
} Problem;

static int64_t at_q(const AttentionShape *s, int64_t b, int64_t t, int64_t h) {
    return (b * s->T + t) * s->ld_q + h * s->D;
}
static int64_t at_out(const AttentionShape *s, int64_t b, int64_t t, int64_t h) {
    return (b * s->T + t) * s->ld_out + h * s->D;
}
static int64_t at_kv(const AttentionShape *s, int64_t b, int64_t j, int64_t h) {
    int64_t stride = s->stride_kv ? s->stride_kv : s->T_keys * s->ld_kv;
    return b * stride + j * s->ld_kv + h / (s->H / s->KV) * s->D;
}

/* Values and error bounds of everything a pass writes; indices as in the problem's arrays. */
typedef struct {
    double *out, *lse, *dq, *dk, *dv;
    double *out_e, *lse_e, *dq_e, *dk_e, *dv_e;
} Reference;

static double dot(const void *a, int64_t i, const void *b, int64_t j, int64_t D, DType dtype, double *size) {
    double sum = 0.0;
    *size = 0.0;
    for (int64_t d = 0; d < D; d++) {
        double x = element(a, i + d, dtype) * element(b, j + d, dtype);
        sum += x;
        *size += fabs(x);
    }
    return sum;
}

typedef struct {
    int64_t b, t, h, first, end;
    double *score, *score_e; /* by key */
    double lse, weight_error;
} RowScores;

static void reference_scores(const Problem *p, RowScores *r) {
    const AttentionShape *s = &p->s;
    double u = sum_error(p->dtype, 1.0), scale = 1.0 / sqrt((double)s->D), max = -INFINITY, sum = 0.0;
    double error = 0.0, size_max = 0.0, n = (double)(r->end - r->first);
    for (int64_t j = r->first; j < r->end; j++) {
        double size;
        r->score[j] = scale *
                      dot(p->q, at_q(s, r->b, r->t, r->h), p->k, at_kv(s, r->b, j, r->h), s->D, p->dtype, &size);
        r->score_e[j] = (double)(s->D + 3) * u * scale * size;
        max = fmax(max, r->score[j]);
        error = fmax(error, r->score_e[j]);
        size_max = fmax(size_max, fabs(r->score[j]));
    }
    for (int64_t j = r->first; j < r->end; j++) sum += exp(r->score[j] - max);
    r->lse = max + log(sum);
    double R = 2.0 * (error + 2.0 * u * size_max) + 4.0 * u;
    r->weight_error = 2.0 * R + (2.0 * n + 6.0 * n / 16.0 + 12.0) * u;
}

static void reference_forward_row(const Problem *p, RowScores *r, Reference *ref) {
    const AttentionShape *s = &p->s;
    reference_scores(p, r);
    int64_t stat = (r->b * s->H + r->h) * s->T + r->t, o = at_out(s, r->b, r->t, r->h);
    ref->lse[stat] = r->lse;
    ref->lse_e[stat] = r->weight_error + 2.0 * sum_error(p->dtype, fabs(r->lse));
    for (int64_t d = 0; d < s->D; d++) {
        double sum = 0.0, size = 0.0;
        for (int64_t j = r->first; j < r->end; j++) {
            double x = exp(r->score[j] - r->lse) * element(p->v, at_kv(s, r->b, j, r->h) + d, p->dtype);
            sum += x;
            size += fabs(x);
        }
        ref->out[o + d] = sum;
        ref->out_e[o + d] = r->weight_error * size;
    }
}

/* Adds key j's part of the gradients of row r; delta and its error are the row's. */
static void reference_backward_pair(const Problem *p, const RowScores *r, int64_t j, double delta, double delta_e,
                                    Reference *ref) {
    const AttentionShape *s = &p->s;
    double u = sum_error(p->dtype, 1.0), scale = 1.0 / sqrt((double)s->D), size;
    int64_t q = at_q(s, r->b, r->t, r->h), kv = at_kv(s, r->b, j, r->h), o = at_out(s, r->b, r->t, r->h);
    double prob = exp(r->score[j] - r->lse), terms = (double)(s->T_keys + s->T * (s->H / s->KV) + 4);
    double prob_e = prob * (r->score_e[j] + r->weight_error + 2.0 * u * (fabs(r->score[j]) + fabs(r->lse)) + 4.0 * u);
    double dp = dot(p->dout, o, p->v, kv, s->D, p->dtype, &size), dp_e = (double)s->D * u * size;
    double ds = prob * (dp - delta);
    double ds_e = prob_e * fabs(dp - delta) + prob * (dp_e + delta_e + 2.0 * u * (fabs(dp) + fabs(delta)));
    for (int64_t d = 0; d < s->D; d++) {
        double x_q = element(p->q, q + d, p->dtype), x_k = element(p->k, kv + d, p->dtype);
        double x_o = element(p->dout, o + d, p->dtype);
        ref->dq[q + d] += scale * ds * x_k;
        ref->dq_e[q + d] += scale * fabs(x_k) * (ds_e + terms * u * fabs(ds));
        ref->dk[kv + d] += scale * ds * x_q;
        ref->dk_e[kv + d] += scale * fabs(x_q) * (ds_e + terms * u * fabs(ds));
        ref->dv[kv + d] += prob * x_o;
        ref->dv_e[kv + d] += fabs(x_o) * (prob_e + terms * u * prob);
    }
}

static void reference_backward_row(const Problem *p, const RowScores *r, Reference *ref) {
    const AttentionShape *s = &p->s;
    int64_t o = at_out(s, r->b, r->t, r->h);
    double delta = 0.0, delta_e = 0.0;
    for (int64_t d = 0; d < s->D; d++) {
        double x = element(p->dout, o + d, p->dtype);
        delta += x * ref->out[o + d];
        delta_e += sum_error(p->dtype, (double)s->D) * fabs(x * ref->out[o + d]) + fabs(x) * ref->out_e[o + d];
    }
    for (int64_t j = r->first; j < r->end; j++) reference_backward_pair(p, r, j, delta, delta_e, ref);
}

static Reference reference_run(const Problem *p) {
    const AttentionShape *s = &p->s;
    Reference ref = {xcalloc((uint64_t)p->n_out, 8), xcalloc((uint64_t)p->n_lse, 8), xcalloc((uint64_t)p->n_q, 8),
                     xcalloc((uint64_t)p->n_kv, 8),  xcalloc((uint64_t)p->n_kv, 8),  xcalloc((uint64_t)p->n_out, 8),
                     xcalloc((uint64_t)p->n_lse, 8), xcalloc((uint64_t)p->n_q, 8),   xcalloc((uint64_t)p->n_kv, 8),
                     xcalloc((uint64_t)p->n_kv, 8)};
    RowScores r = {.score = xcalloc((uint64_t)s->T_keys, 8), .score_e = xcalloc((uint64_t)s->T_keys, 8)};
    for (r.b = 0; r.b < s->B; r.b++) {
        for (r.h = 0; r.h < s->H; r.h++) {
            for (r.t = 0; r.t < s->T; r.t++) {
                r.first = p->doc_start ? p->doc_start[r.b * s->T + r.t] : 0;
                r.end = s->T_keys - s->T + r.t + 1;
                reference_forward_row(p, &r, &ref);
                reference_backward_row(p, &r, &ref);
            }
        }
    }
    free(r.score), free(r.score_e);
    return ref;
}

static void reference_free(Reference *r) {
    free(r->out), free(r->lse), free(r->dq), free(r->dk), free(r->dv);
    free(r->out_e), free(r->lse_e), free(r->dq_e), free(r->dk_e), free(r->dv_e);
}

/* Documents of random length; a start may lie anywhere up to the query's own key. */
static int32_t *random_documents(TestRandom *r, const AttentionShape *s) {
    int32_t *start = xmalloc((uint64_t)(s->B * s->T) * sizeof(int32_t));
    for (int64_t b = 0; b < s->B; b++) {
        int64_t first = random_int(r, s->T_keys - s->T + 1);
        for (int64_t t = 0; t < s->T; t++) {
            if (random_int(r, 24) == 0) first = s->T_keys - s->T + t;
            start[b * s->T + t] = (int32_t)first;
        }
    }
    return start;
}

static Problem make_problem(TestRandom *r, AttentionShape s, bool documents, double size, DType dtype) {
    Problem p = {.s = s, .dtype = dtype};
    p.n_q = s.B * s.T * s.ld_q;
    p.n_kv = s.B * (s.stride_kv ? s.stride_kv : s.T_keys * s.ld_kv);
    p.n_out = s.B * s.T * s.ld_out;
    p.n_lse = s.B * s.H * s.T;
    p.q = random_array(r, p.n_q, size, dtype);
    p.k = random_array(r, p.n_kv, size, dtype);
    p.v = random_array(r, p.n_kv, 1.0, dtype);
    p.dout = random_array(r, p.n_out, 1.0, dtype);
    p.out = random_array(r, p.n_out, 0.0, dtype);
    p.lse = random_array(r, p.n_lse, 1.0, dtype);
    p.dq = random_array(r, p.n_q, 0.0, dtype);
    p.dk = random_array(r, p.n_kv, 0.0, dtype);
    p.dv = random_array(r, p.n_kv, 0.0, dtype);
    if (documents) p.doc_start = random_documents(r, &s);
    p.s.doc_start = p.doc_start;
    return p;
}

static void free_problem(Problem *p) {
    free(p->q), free(p->k), free(p->v), free(p->out), free(p->lse), free(p->dout);
    free(p->dq), free(p->dk), free(p->dv), free(p->doc_start);
}

static void run_problem(Problem *p) {
    void *workspace = xmalloc((uint64_t)attention_backward_workspace(&p->s, p->dtype));
    attention_forward(p->out, p->lse, p->q, p->k, p->v, &p->s, p->dtype, NULL);
    attention_backward(p->dq, p->dk, p->dv, p->dout, p->q, p->k, p->v, p->out, p->lse, &p->s, workspace, p->dtype,
                       NULL);
    free(workspace);
}

static void compare(const Problem *p, const char *path, const char *what, const void *got, const double *want,
                    const double *bound, int64_t n) {
    const AttentionShape *s = &p->s;
    for (int64_t i = 0; i < n; i++) {
        double x = element(got, i, p->dtype);
        ck_assert_msg(
            bounded_error(x, want[i], bound[i]),
            "%s: B %lld T %lld keys %lld H %lld KV %lld D %lld documents %d: %s[%lld] %.9g, wanted %.9g within "
            "%.3g",
            path, (long long)s->B, (long long)s->T, (long long)s->T_keys, (long long)s->H, (long long)s->KV,
            (long long)s->D, p->doc_start != NULL, what, (long long)i, x, want[i], bound[i]);
    }
}

static void check_shape(TestRandom *r, AttentionShape s, bool documents, double size) {
    for (int i = 0; i < 3; i++) {
        const TestPath *path = &test_paths[i];
        Problem p = make_problem(r, s, documents, size, path->dtype);
        test_path_choose(path);
        run_problem(&p);
        Reference ref = reference_run(&p);
        /* Gaps between rows hold zero in the reference and in the arrays: writing there shows too. */
        compare(&p, path->name, "out", p.out, ref.out, ref.out_e, p.n_out);
        compare(&p, path->name, "lse", p.lse, ref.lse, ref.lse_e, p.n_lse);
        compare(&p, path->name, "dq", p.dq, ref.dq, ref.dq_e, p.n_q);
        compare(&p, path->name, "dk", p.dk, ref.dk, ref.dk_e, p.n_kv);
        compare(&p, path->name, "dv", p.dv, ref.dv, ref.dv_e, p.n_kv);
        reference_free(&ref);
        free_problem(&p);
    }
    kernels_limit_path(NULL);
}

static AttentionShape shape_of(int64_t B, int64_t T, int64_t T_keys, int64_t KV, int64_t group, int64_t D,
                               int64_t gap) {
    return (AttentionShape){.B = B,
                            .T = T,
                            .T_keys = T_keys,
                            .H = KV * group,
                            .KV = KV,
                            .D = D,
                            .ld_q = KV * group * D + gap,
                            .ld_kv = KV * D + 2 * gap,
                            .ld_out = KV * group * D + gap};
}

START_TEST(random_shapes_match) {
    static const int64_t lengths[] = {1, 2, 3, 5, 6, 7, 16, 17, 47, 49, 65, 96, 97, 127};
    static const int64_t heads[] = {16, 18, 20, 24, 30, 32, 40, 50, 64, 72};
    static const int64_t groups[] = {1, 2, 3, 8};
    TestRandom r = test_random("random_shapes_match");
    kernels_init(2);
    for (int n = 0; n < 14; n++) {
        int64_t T = random_choice(&r, lengths, 14);
        int64_t T_keys = random_int(&r, 3) ? T : T + random_int(&r, 120);
        AttentionShape s = shape_of(1 + random_int(&r, 2), T, T_keys, 1 + random_int(&r, 2),
                                    random_choice(&r, groups, 4), random_choice(&r, heads, 10), random_int(&r, 5));
        if (random_int(&r, 3) == 0) s.stride_kv = (s.T_keys + random_int(&r, 4)) * s.ld_kv;
        check_shape(&r, s, random_int(&r, 2), random_int(&r, 4) ? 1.0 : 6.0);
    }
}
END_TEST

START_TEST(long_rows_and_large_heads_match) {
    TestRandom r = test_random("long_rows_and_large_heads_match");
    kernels_init(2);
    check_shape(&r, shape_of(1, 300, 300, 1, 1, 16, 0), false, 2.0);
    check_shape(&r, shape_of(1, 40, 40, 1, 2, 256, 3), true, 1.0);
    check_shape(&r, shape_of(1, 290, 310, 1, 1, 18, 1), true, 1.0);
    check_shape(&r, shape_of(2, 1, 500, 2, 3, 64, 0), false, 1.0);
    check_shape(&r, shape_of(1, 1, 33, 1, 140, 16, 0), false, 1.0);
}
END_TEST

/* The reference's own gradients against central differences of its own forward pass. */
static double loss_of(const Problem *p) {
    Reference ref = reference_run(p);
    double loss = 0.0;
    for (int64_t i = 0; i < p->n_out; i++) loss += ref.out[i] * element(p->dout, i, DT_F64);
    reference_free(&ref);
    return loss;
}

START_TEST(reference_gradients_match_differences) {
    TestRandom r = test_random("reference_gradients_match_differences");
    Problem p = make_problem(&r, shape_of(1, 7, 9, 2, 2, 16, 0), true, 1.0, DT_F64);
    Reference ref = reference_run(&p);
    for (int n = 0; n < 60; n++) {
        double *x[3] = {p.q, p.k, p.v}, *gradient[3] = {ref.dq, ref.dk, ref.dv};
        int64_t count[3] = {p.n_q, p.n_kv, p.n_kv}, which = random_int(&r, 3), i = random_int(&r, count[which]);
        double old = x[which][i], step = 1e-5;
        x[which][i] = old + step;
        double up = loss_of(&p);
        x[which][i] = old - step;
        double down = loss_of(&p);
        x[which][i] = old;
        /* Third derivatives are of order 1 here: step^2, plus rounding of a loss of order 10 over the step. */
        ck_assert(fabs((up - down) / (2.0 * step) - gradient[which][i]) <= 1e-8);
    }
    reference_free(&ref);
    free_problem(&p);
}
END_TEST

static void check_bits(Problem *p, const char *path) {
    void *got[5] = {p->out, p->lse, p->dq, p->dk, p->dv}, *first[5];
    int64_t count[5] = {p->n_out, p->n_lse, p->n_q, p->n_kv, p->n_kv};
    static const int threads[] = {1, 1, 2, 3, 2};
    for (int n = 0; n < 5; n++) {
        kernels_init(threads[n]);
        run_problem(p);
        for (int i = 0; i < 5; i++) {
            if (n == 0) first[i] = copy_array(got[i], count[i], p->dtype);
            ck_assert_msg(memcmp(first[i], got[i], (size_t)count[i] * dtype_size(p->dtype)) == 0,
                          "%s: array %d differs with %d threads", path, i, threads[n]);
        }
    }
    for (int i = 0; i < 5; i++) free(first[i]);
}

START_TEST(threads_do_not_change_bits) {
    TestRandom r = test_random("threads_do_not_change_bits");
    for (int n = 0; n < 4; n++) {
        for (int i = 0; i < 3; i++) {
            Problem p = make_problem(&r, shape_of(2, 150, 150 + n, 2, 1 + n, 32 + 2 * n, n), n % 2, 1.0,
                                     test_paths[i].dtype);
            test_path_choose(&test_paths[i]);
            check_bits(&p, test_paths[i].name);
            free_problem(&p);
        }
    }
    kernels_limit_path(NULL);
}
END_TEST

/* With one thread no parallel region is entered, and a NaN in a query shows in its row alone. */
START_TEST(nan_in_a_query_shows) {
    TestRandom r = test_random("nan_in_a_query_shows");
    kernels_init(1);
    for (int i = 0; i < 3; i++) {
        Problem p = make_problem(&r, shape_of(1, 20, 20, 1, 1, 16, 0), false, 1.0, test_paths[i].dtype);
        test_path_choose(&test_paths[i]);
        set_element(p.q, at_q(&p.s, 0, 9, 0) + 3, NAN, p.dtype);
        run_problem(&p);
        for (int64_t t = 0; t < 20; t++) ck_assert(isnan(element(p.out, at_out(&p.s, 0, t, 0), p.dtype)) == (t == 9));
        free_problem(&p);
    }
    kernels_limit_path(NULL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("attention");
    TCase *tcase = tcase_create("attention");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, random_shapes_match);
    tcase_add_test(tcase, long_rows_and_large_heads_match);
    tcase_add_test(tcase, reference_gradients_match_differences);
    tcase_add_test(tcase, threads_do_not_change_bits);
    tcase_add_test(tcase, nan_in_a_query_shows);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
