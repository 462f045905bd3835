/* test_embedding.c - token and position tables, forward and backward.
 *
 * No tolerance: looking up copies bits, and the gradient is defined as a sum in token order, so that the
 * reference adds in the same order and rounds each sum to the dtype. For fp32 it adds in fp64 and rounds
 * once more, which changes nothing: 53 bits are more than twice 24 and two (Figueroa 1995). */
#include "tests/unit/kernels/reference.h"

static const int64_t row_counts[] = {0, 1, 2, 3, 17, 64, 301};
static const int64_t widths[] = {1, 2, 7, 8, 9, 31, 63, 64, 65, 130, 257};
enum { ROW_COUNTS = sizeof(row_counts) / sizeof(row_counts[0]), WIDTHS = sizeof(widths) / sizeof(widths[0]) };

/* Ids of [0, vocab), some several times; ids that no rank has where strangers is set. */
static int32_t *random_ids(TestRandom *r, int64_t N, int64_t vocab, bool strangers) {
    static const int32_t none[] = {-1, INT32_MIN, INT32_MAX};
    int32_t *ids = xmalloc((uint64_t)max_i64(N, 1) * sizeof(int32_t));
    for (int64_t i = 0; i < N; i++) {
        const bool repeat = i > 0 && random_int(r, 4) == 0;
        ids[i] = repeat ? ids[random_int(r, i)] : (int32_t)random_int(r, vocab);
        if (strangers && random_int(r, 10) == 0) ids[i] = none[random_int(r, 3)];
        if (strangers && random_int(r, 20) == 0) ids[i] = (int32_t)vocab;
    }
    return ids;
}

/* Ranges of the ranks: the last ones may be shorter, or empty. */
static Range range_of(int64_t vocab, int64_t ranks, int64_t rank) {
    const int64_t share = ceil_div(vocab, ranks), first = min_i64(vocab, rank * share);
    return (Range){first, min_i64(share, vocab - first)};
}

static bool holds(Range range, int64_t id) { return id >= range.first && id < range.first + range.count; }

static void add_to(void *x, int64_t i, double value, DType dtype) {
    set_element(x, i, element(x, i, dtype) + value, dtype);
}

/* dtable += rows of dx whose id the range holds, in token order. */
static void reference_scatter(void *dtable, const void *dx, const int32_t *ids, Range range, int64_t N, int64_t C,
                              DType dtype) {
    for (int64_t i = 0; i < N; i++) {
        if (!holds(range, ids[i])) continue;
        for (int64_t c = 0; c < C; c++) {
            add_to(dtable, (ids[i] - range.first) * C + c, element(dx, i * C + c, dtype), dtype);
        }
    }
}

/* A row more than the operation is told of stands behind x and behind the table. */
static void check_forward(TestRandom *r, const TestPath *path, int64_t N, int64_t C, int64_t vocab, int64_t ranks) {
    const DType dtype = path->dtype;
    int32_t *ids = random_ids(r, N, vocab, true);
    void *table = random_array(r, vocab * C, 1.0, dtype), *sum = random_array(r, N * C, 0.0, dtype);
    for (int64_t rank = 0; rank < ranks; rank++) {
        const Range range = range_of(vocab, ranks, rank);
        void *x = random_array(r, (N + 1) * C, 1.0, dtype), *before = copy_array(x, (N + 1) * C, dtype);
        embedding_forward(x, ids, (char *)table + (size_t)(range.first * C) * dtype_size(dtype), range, N, C, dtype,
                          NULL);
        for (int64_t i = 0; i < N * C; i++) {
            const int64_t id = ids[i / C];
            const double want = holds(range, id) ? element(table, id * C + i % C, dtype) : 0.0;
            check_close(path, "x", i, element(x, i, dtype), want, 0.0);
            add_to(sum, i, element(x, i, dtype), dtype);
        }
        check_same(path, "row behind x", (char *)x + (size_t)(N * C) * dtype_size(dtype),
                   (char *)before + (size_t)(N * C) * dtype_size(dtype), C);
        free(x), free(before);
    }
    for (int64_t i = 0; i < N * C; i++) { /* the ranks together: each token once */
        const int64_t id = ids[i / C];
        const double want = holds((Range){0, vocab}, id) ? element(table, id * C + i % C, dtype) : 0.0;
        check_close(path, "sum of the ranks", i, element(sum, i, dtype), want, 0.0);
    }
    free(ids), free(table), free(sum);
}

static void check_backward(TestRandom *r, const TestPath *path, int64_t N, int64_t C, int64_t vocab, int64_t ranks) {
    const DType dtype = path->dtype;
    int32_t *ids = random_ids(r, N, vocab, true);
    void *dx = random_array(r, N * C, 1.0, dtype);
    for (int64_t rank = 0; rank < ranks; rank++) {
        const Range range = range_of(vocab, ranks, rank);
        void *dtable = random_array(r, (range.count + 1) * C, 1.0, dtype);
        void *want = copy_array(dtable, (range.count + 1) * C, dtype);
        embedding_backward(dtable, dx, ids, range, N, C, dtype, NULL);
        reference_scatter(want, dx, ids, range, N, C, dtype);
        check_same(path, "dtable", dtable, want, (range.count + 1) * C);
        free(dtable), free(want);
    }
    free(ids), free(dx);
}

START_TEST(tokens_match) {
    static const int64_t vocabularies[] = {1, 2, 5, 37, 256};
    TestRandom r = test_random("tokens_match");
    for (int n = 0; n < 60 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        kernels_init(1 + n % 3);
        test_path_choose(path);
        const int64_t N = random_choice(&r, row_counts, ROW_COUNTS), C = random_choice(&r, widths, WIDTHS);
        const int64_t vocab = random_choice(&r, vocabularies, 5), ranks = 1 + random_int(&r, 4);
        check_forward(&r, path, N, C, vocab, ranks);
        check_backward(&r, path, N, C, vocab, ranks);
    }
    kernels_limit_path(NULL);
}
END_TEST

START_TEST(positions_match) {
    TestRandom r = test_random("positions_match");
    for (int n = 0; n < 40 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        const DType dtype = path->dtype;
        kernels_init(1 + n % 3);
        test_path_choose(path);
        const int64_t N = random_choice(&r, row_counts, ROW_COUNTS), C = random_choice(&r, widths, WIDTHS);
        const int64_t positions = 1 + random_int(&r, 70);
        int32_t *ids = random_ids(&r, N, positions, false);
        void *table = random_array(&r, positions * C, 1.0, dtype), *x = random_array(&r, (N + 1) * C, 1.0, dtype);
        void *want = copy_array(x, (N + 1) * C, dtype);
        position_forward(x, ids, table, N, C, dtype, NULL);
        for (int64_t i = 0; i < N * C; i++) add_to(want, i, element(table, ids[i / C] * C + i % C, dtype), dtype);
        check_same(path, "x", x, want, (N + 1) * C);
        void *dtable = random_array(&r, (positions + 1) * C, 1.0, dtype);
        void *want_dtable = copy_array(dtable, (positions + 1) * C, dtype);
        position_backward(dtable, x, ids, positions, N, C, dtype, NULL);
        reference_scatter(want_dtable, x, ids, (Range){0, positions}, N, C, dtype);
        check_same(path, "dtable", dtable, want_dtable, (positions + 1) * C);
        free(ids), free(table), free(x), free(want), free(dtable), free(want_dtable);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* The look-up is linear in the table, so its gradient is the adjoint: <lookup(table), dx> = <table, gradient(dx)>.
 * Small integers, so that both products are exact. */
START_TEST(backward_is_the_adjoint_of_forward) {
    enum { N = 50, C = 19, VOCAB = 23 };
    TestRandom r = test_random("backward_is_the_adjoint_of_forward");
    int32_t *ids = random_ids(&r, N, VOCAB, false);
    float table[VOCAB * C], x[2][N * C] = {{0}}, dx[N * C], dtable[2][VOCAB * C] = {{0}};
    for (int i = 0; i < VOCAB * C; i++) table[i] = (float)(random_int(&r, 9) - 4);
    for (int i = 0; i < N * C; i++) dx[i] = (float)(random_int(&r, 9) - 4);
    embedding_forward(x[0], ids, table, (Range){0, VOCAB}, N, C, DT_F32, NULL);
    embedding_backward(dtable[0], dx, ids, (Range){0, VOCAB}, N, C, DT_F32, NULL);
    position_forward(x[1], ids, table, N, C, DT_F32, NULL);
    position_backward(dtable[1], dx, ids, VOCAB, N, C, DT_F32, NULL);
    for (int n = 0; n < 2; n++) {
        double left = 0.0, right = 0.0;
        for (int i = 0; i < N * C; i++) left += (double)x[n][i] * (double)dx[i];
        for (int i = 0; i < VOCAB * C; i++) right += (double)table[i] * (double)dtable[n][i];
        ck_assert(left == right);
    }
    free(ids);
}
END_TEST

typedef struct {
    void *x, *dtable;
    const void *table;
    const int32_t *ids;
    int64_t vocab, N, C;
    DType dtype;
} BitsArgs;

static void run_all(void *args) {
    const BitsArgs *a = args;
    embedding_forward(a->x, a->ids, a->table, (Range){0, a->vocab}, a->N, a->C, a->dtype, NULL);
    position_forward(a->x, a->ids, a->table, a->N, a->C, a->dtype, NULL);
    embedding_backward(a->dtable, a->x, a->ids, (Range){0, a->vocab}, a->N, a->C, a->dtype, NULL);
    position_backward(a->dtable, a->x, a->ids, a->vocab, a->N, a->C, a->dtype, NULL);
}

START_TEST(threads_do_not_change_bits) {
    enum { N = 500, C = 200, VOCAB = 40 };
    TestRandom r = test_random("threads_do_not_change_bits");
    for (int n = 0; n < TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n];
        test_path_choose(path);
        void *x = random_array(&r, N * C, 1.0, path->dtype), *table = random_array(&r, VOCAB * C, 1.0, path->dtype);
        void *dtable = random_array(&r, VOCAB * C, 1.0, path->dtype);
        int32_t *ids = random_ids(&r, N, VOCAB, false);
        BitsArgs args = {x, dtable, table, ids, VOCAB, N, C, path->dtype};
        TestOutput out[] = {{"x", x, N * C}, {"dtable", dtable, VOCAB * C}};
        check_threads(path, run_all, &args, out, 2);
        free(x), free(table), free(dtable), free(ids);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* In rows of the table and of the gradient that hold it, and in no other. */
START_TEST(non_finite_values_show_in_their_rows) {
    enum { N = 30, C = 11, VOCAB = 6 };
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    TestRandom r = test_random("non_finite_values_show_in_their_rows");
    for (int n = 0; n < 3 * TEST_PATHS; n++) {
        const TestPath *path = &test_paths[n % TEST_PATHS];
        test_path_choose(path);
        kernels_init(2);
        int32_t *ids = random_ids(&r, N, VOCAB, false);
        void *table = random_array(&r, VOCAB * C, 1.0, path->dtype), *x = random_array(&r, N * C, 1.0, path->dtype);
        void *dtable = random_array(&r, VOCAB * C, 1.0, path->dtype);
        BitsArgs args = {x, dtable, table, ids, VOCAB, N, C, path->dtype};
        const int64_t at = ids[random_int(&r, N)] * C + random_int(&r, C);
        set_element(table, at, bad[n / TEST_PATHS], path->dtype);
        run_all(&args);
        for (int64_t i = 0; i < N * C; i++) {
            ck_assert(isfinite(element(x, i, path->dtype)) == (ids[i / C] * C + i % C != at));
        }
        for (int64_t i = 0; i < VOCAB * C; i++) ck_assert(isfinite(element(dtable, i, path->dtype)) == (i != at));
        free(ids), free(table), free(x), free(dtable);
    }
    kernels_limit_path(NULL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("embedding");
    TCase *tcase = tcase_create("embedding");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, tokens_match);
    tcase_add_test(tcase, positions_match);
    tcase_add_test(tcase, backward_is_the_adjoint_of_forward);
    tcase_add_test(tcase, threads_do_not_change_bits);
    tcase_add_test(tcase, non_finite_values_show_in_their_rows);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
