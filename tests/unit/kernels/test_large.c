/* test_large.c - arrays of more than 2^31 elements and 2^32 bytes: what lies at their ends is what is read and written.
 *
 * The arrays are reserved addresses, of which only the rows that an operation is told of get memory: few, and far
 * apart, by their leading dimension or by the number of columns that are padding. Whole numbers, so that every result
 * is exact. */
#include "tests/unit/kernels/reference.h"

#include <sys/mman.h>

enum { ROWS = 5, WIDTH = 32 };
static const int64_t LD = INT64_C(1) << 30; /* row 4 begins at 2^32 elements */

static void *reserve(int64_t elements, DType dtype) {
    void *x = mmap(NULL, (size_t)elements * dtype_size(dtype), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ck_assert_msg(x != MAP_FAILED, "%lld elements: %m", (long long)elements);
    return x;
}

static void release(void *x, int64_t elements, DType dtype) { munmap(x, (size_t)elements * dtype_size(dtype)); }

/* Rows of LD elements, of which the first WIDTH are small whole numbers. */
static void *far_rows(DType dtype, int shift) {
    void *x = reserve(ROWS * LD, dtype);
    for (int64_t i = 0; i < ROWS * WIDTH; i++) {
        set_element(x, i / WIDTH * LD + i % WIDTH, (double)((7 * i + shift) % 11 - 5), dtype);
    }
    return x;
}

static void *near_rows(const void *far, DType dtype) {
    void *x = xmalloc(ROWS * WIDTH * dtype_size(dtype));
    for (int64_t i = 0; i < ROWS * WIDTH; i++)
        set_element(x, i, element(far, i / WIDTH * LD + i % WIDTH, dtype), dtype);
    return x;
}

static void check_rows(const TestPath *path, const char *what, const void *far, const void *near) {
    for (int64_t i = 0; i < ROWS * WIDTH; i++) {
        check_close(path, what, i, element(far, i / WIDTH * LD + i % WIDTH, path->dtype), element(near, i, path->dtype),
                    0.0);
    }
}

/* All three matrices, each transposed or not. Of our own products only: OpenBLAS has kernels for small ones that count
 * elements in 32 bits, and no model's product is both small and this wide. */
START_TEST(products) {
    static const int own[] = {0, 3};
    const TestPath *path = &test_paths[own[_i]];
    const DType dtype = path->dtype;
    test_path_choose(path);
    kernels_init(2);
    if (strcmp(kernels_path(), "portable") == 0) return;
    for (int trans = 0; trans < 3; trans++) {
        const bool trans_a = trans == 1, trans_b = trans == 2;
        const int64_t M = trans_a ? WIDTH : ROWS, K = trans_a ? ROWS : WIDTH, N = ROWS;
        void *A = far_rows(dtype, 0), *B = far_rows(dtype, 3), *C = reserve(WIDTH * LD, dtype);
        void *a = near_rows(A, dtype), *b = near_rows(B, dtype), *c = xmalloc(WIDTH * ROWS * dtype_size(dtype));
        if (trans == 0) { /* B has K = WIDTH rows, more than there are far ones: a near one */
            matmul(C, LD, A, LD, false, b, ROWS, false, M, N, K, false, NULL, dtype, NULL);
            matmul(c, ROWS, a, WIDTH, false, b, ROWS, false, M, N, K, false, NULL, dtype, NULL);
        } else {
            matmul(C, LD, A, LD, trans_a, B, LD, trans_b, M, N, K, false, NULL, dtype, NULL);
            matmul(c, ROWS, a, WIDTH, trans_a, b, WIDTH, trans_b, M, N, K, false, NULL, dtype, NULL);
        }
        for (int64_t i = 0; i < M * N; i++) {
            check_close(path, "C", i, element(C, i / N * LD + i % N, dtype), element(c, i, dtype), 0.0);
        }
        release(A, ROWS * LD, dtype), release(B, ROWS * LD, dtype), release(C, WIDTH * LD, dtype);
        free(a), free(b), free(c);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* Logits of a huge vocabulary, of which this rank has WIDTH columns that are no padding. */
START_TEST(losses) {
    const TestPath *path = &test_paths[_i];
    const DType dtype = path->dtype;
    static const int32_t targets[ROWS] = {3, -1, 0, WIDTH - 1, 5};
    test_path_choose(path);
    kernels_init(2);
    void *logits = far_rows(dtype, 0), *near = near_rows(logits, dtype);
    void *stats = xmalloc(3 * ROWS * dtype_size(dtype)), *expected = xmalloc(3 * ROWS * dtype_size(dtype));
    cross_entropy_stats(stats, logits, targets, 0, ROWS, WIDTH, LD, dtype, NULL);
    cross_entropy_stats(expected, near, targets, 0, ROWS, WIDTH, WIDTH, dtype, NULL);
    check_same(path, "stats", stats, expected, 3 * ROWS);
    release(logits, ROWS * LD, dtype);
    free(near), free(stats), free(expected);
    kernels_limit_path(NULL);
}
END_TEST

START_TEST(rotations) {
    const TestPath *path = &test_paths[_i];
    const DType dtype = path->dtype;
    static const int32_t positions[ROWS] = {0, 1, 2, 3, 4};
    test_path_choose(path);
    kernels_init(2);
    void *x = far_rows(dtype, 0), *near = near_rows(x, dtype), *table = xmalloc(ROWS * WIDTH * dtype_size(dtype));
    rope_table(table, ROWS, WIDTH, 10000.0, dtype, NULL);
    rope(x, LD, positions, table, false, ROWS, 1, WIDTH, dtype, NULL);
    rope(near, WIDTH, positions, table, false, ROWS, 1, WIDTH, dtype, NULL);
    check_rows(path, "x", x, near);
    void *db = xcalloc(WIDTH, dtype_size(dtype)), *expected = xcalloc(WIDTH, dtype_size(dtype));
    bias_backward(db, x, LD, ROWS, WIDTH, dtype, NULL);
    bias_backward(expected, near, WIDTH, ROWS, WIDTH, dtype, NULL);
    check_same(path, "db", db, expected, WIDTH);
    release(x, ROWS * LD, dtype);
    free(near), free(table), free(db), free(expected);
    kernels_limit_path(NULL);
}
END_TEST

START_TEST(attention) {
    const TestPath *path = &test_paths[_i];
    const DType dtype = path->dtype;
    const uint64_t bytes = ROWS * WIDTH * dtype_size(dtype);
    test_path_choose(path);
    kernels_init(2);
    /* ROWS tokens of one sequence, and as many sequences of one token. */
    for (int sequences = 0; sequences < 2; sequences++) {
        AttentionShape near = {.B = sequences ? ROWS : 1, .T = sequences ? 1 : ROWS, .H = 1, .KV = 1, .D = WIDTH};
        near.T_keys = near.T;
        near.ld_q = near.ld_kv = near.ld_out = WIDTH;
        AttentionShape far = near;
        far.ld_q = far.ld_kv = far.ld_out = LD;
        void *q = far_rows(dtype, 0), *k = far_rows(dtype, 1), *v = far_rows(dtype, 2), *out = far_rows(dtype, 3);
        void *nq = near_rows(q, dtype), *nk = near_rows(k, dtype), *nv = near_rows(v, dtype), *nout = xmalloc(bytes);
        void *lse = xmalloc(ROWS * dtype_size(dtype)), *nlse = xmalloc(ROWS * dtype_size(dtype));
        attention_forward(out, lse, q, k, v, &far, dtype, NULL);
        attention_forward(nout, nlse, nq, nk, nv, &near, dtype, NULL);
        check_rows(path, "out", out, nout);
        check_same(path, "lse", lse, nlse, ROWS);
        void *dq = reserve(ROWS * LD, dtype), *dk = reserve(ROWS * LD, dtype), *dv = reserve(ROWS * LD, dtype);
        void *ndq = xmalloc(bytes), *ndk = xmalloc(bytes), *ndv = xmalloc(bytes);
        void *workspace = xmalloc((uint64_t)attention_backward_workspace(&near, dtype));
        attention_backward(dq, dk, dv, q, q, k, v, out, lse, &far, workspace, dtype, NULL);
        attention_backward(ndq, ndk, ndv, nq, nq, nk, nv, nout, nlse, &near, workspace, dtype, NULL);
        check_rows(path, "dq", dq, ndq), check_rows(path, "dk", dk, ndk), check_rows(path, "dv", dv, ndv);
        void *const large[] = {q, k, v, out, dq, dk, dv}, *const small[] = {nq,   nk,  nv,  nout, lse,
                                                                            nlse, ndq, ndk, ndv,  workspace};
        for (int i = 0; i < 7; i++) release(large[i], ROWS * LD, dtype);
        for (int i = 0; i < 10; i++) free(small[i]);
    }
    kernels_limit_path(NULL);
}
END_TEST

/* The table of a vocabulary of 250880 x 14336 (3.6e9 elements), the largest that was published. */
START_TEST(embeddings) {
    const TestPath *path = &test_paths[_i];
    const DType dtype = path->dtype;
    const int64_t V = 250880, C = 14336;
    const int32_t tokens[] = {0, 149797 /* at 2^31 */, (int32_t)V - 1, (int32_t)V - 1, 299594 / 2, (int32_t)V};
    enum { N = sizeof tokens / sizeof tokens[0] };
    test_path_choose(path);
    kernels_init(2);
    void *table = reserve(V * C, dtype), *x = xmalloc((uint64_t)(N * C) * dtype_size(dtype));
    for (int i = 0; i < N - 1; i++) set_element(table, tokens[i] * C + C - 1, 1.0 + tokens[i], dtype);
    embedding_forward(x, tokens, table, (Range){0, V}, N, C, dtype, NULL);
    for (int64_t i = 0; i < N; i++) {
        const double expected = tokens[i] < V ? 1.0 + tokens[i] : 0.0;
        check_close(path, "x", i * C, element(x, i * C, dtype), 0.0, 0.0);
        check_close(path, "x", i * C + C - 1, element(x, i * C + C - 1, dtype), expected, 0.0);
    }
    embedding_backward(table, x, tokens, (Range){0, V}, N, C, dtype, NULL);
    for (int i = 0; i < N - 1; i++) {
        int times = 1;
        for (int k = 0; k < N - 1; k++) times += tokens[k] == tokens[i];
        check_close(path, "dtable", i, element(table, tokens[i] * C + C - 1, dtype), times * (1.0 + tokens[i]), 0.0);
    }
    release(table, V * C, dtype);
    free(x);
    kernels_limit_path(NULL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("large");
    TCase *tcase = tcase_create("large");
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, products, 0, 2);
    tcase_add_loop_test(tcase, losses, 0, TEST_PATHS);
    tcase_add_loop_test(tcase, rotations, 0, TEST_PATHS);
    tcase_add_loop_test(tcase, attention, 0, TEST_PATHS);
    tcase_add_loop_test(tcase, embeddings, 0, TEST_PATHS);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
