/* reference.h - what the tests of the kernels share: random arrays, access by dtype, error bounds.
 *
 * A test computes in fp64 from the very values that the kernel gets, and a bound for each element from
 * the same sums taken over absolute values: a sum of n products, in any order, fused or not, is off by
 * at most n u / (1 - n u) times the sum of the products' absolute values (Higham 2002, section 3.1),
 * u being half the distance of 1 to the next number. Bounds are first-order; the factor 1.01 of
 * bounded_error covers the products of errors, which are below 1e-2 of the first order here. */
#ifndef TRIDENT_TESTS_UNIT_KERNELS_REFERENCE_H
#define TRIDENT_TESTS_UNIT_KERNELS_REFERENCE_H

#include <check.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/rng.h"
#include "base/types.h"
#include "kernels/kernels.h"

/* Ways through the kernels: what a test loops over. */
typedef struct {
    const char *name;
    DType dtype;
    const char *limit; /* of kernels_limit_path */
} TestPath;

enum { TEST_PATHS = 4 };
static const TestPath test_paths[TEST_PATHS] = {{"fp32, fastest path", DT_F32, NULL},
                                                {"fp32, portable", DT_F32, "portable"},
                                                {"fp64", DT_F64, "portable"},
                                                {"fp32, at most AVX2", DT_F32, "avx2"}};

static inline void test_path_choose(const TestPath *path) { kernels_limit_path(path->limit); }

static inline double unit_roundoff(DType dtype) { return dtype == DT_F64 ? 0x1p-53 : 0x1p-24; }

/* The kernel's rounding and the reference's own. */
static inline double sum_error(DType dtype, double terms) { return terms * (unit_roundoff(dtype) + 0x1p-53); }

typedef struct {
    uint64_t seed, next;
} TestRandom;

/* From TEST_SEED, or the clock; printed, so that a failure can be replayed. */
static inline TestRandom test_random(const char *test) {
    const char *text = getenv("TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : (uint64_t)time(NULL);
    printf("%s: TEST_SEED=%llu\n", test, (unsigned long long)seed);
    fflush(stdout);
    return (TestRandom){seed, 0};
}

static inline double random_uniform(TestRandom *r) { return rng_uniform(r->seed, 1, r->next++); }
static inline int64_t random_int(TestRandom *r, int64_t below) { return (int64_t)(random_uniform(r) * (double)below); }
static inline int64_t random_choice(TestRandom *r, const int64_t *from, int64_t count) {
    return from[random_int(r, count)];
}

static inline double element(const void *x, int64_t i, DType dtype) {
    return dtype == DT_F64 ? ((const double *)x)[i] : (double)((const float *)x)[i];
}

static inline void set_element(void *x, int64_t i, double value, DType dtype) {
    if (dtype == DT_F64) {
        ((double *)x)[i] = value;
    } else {
        ((float *)x)[i] = (float)value;
    }
}

/* Uniform in [-size, size). The caller frees. */
static inline void *random_array(TestRandom *r, int64_t count, double size, DType dtype) {
    void *x = xmalloc((uint64_t)max_i64(count, 1) * dtype_size(dtype));
    for (int64_t i = 0; i < count; i++) set_element(x, i, size * (2.0 * random_uniform(r) - 1.0), dtype);
    return x;
}

static inline void *copy_array(const void *x, int64_t count, DType dtype) {
    size_t bytes = (size_t)max_i64(count, 1) * dtype_size(dtype);
    return memcpy(xmalloc(bytes), x, (size_t)count * dtype_size(dtype));
}

/* Whether got is within tolerance of want; never true for NaN. */
static inline bool bounded_error(double got, double want, double tolerance) {
    return fabs(got - want) <= 1.01 * tolerance;
}

/* Fails, naming the place, unless got is within tolerance of want. */
static inline void check_close(const TestPath *path, const char *what, int64_t at, double got, double want,
                               double tolerance) {
    /* ck_assert would write to a pipe each time. */
    if (bounded_error(got, want, tolerance)) return;
    ck_abort_msg("%s: %s[%lld] is %.17g, wanted %.17g within %.3g", path->name, what, (long long)at, got, want,
                 tolerance);
}

static inline void check_same(const TestPath *path, const char *what, const void *got, const void *want,
                              int64_t count) {
    size_t size = dtype_size(path->dtype);
    for (int64_t i = 0; i < count; i++) {
        const char *a = (const char *)got + (size_t)i * size, *b = (const char *)want + (size_t)i * size;
        if (memcmp(a, b, size) == 0) continue;
        ck_abort_msg("%s: %s[%lld] is %.17g, should have the bits of %.17g", path->name, what, (long long)i,
                     element(got, i, path->dtype), element(want, i, path->dtype));
    }
}

/* What an operation writes or adds to. */
typedef struct {
    const char *name;
    void *data;
    int64_t count;
} TestOutput;

enum { TEST_OUTPUTS_MAX = 4 };

/* run(args) gives outputs of the same bits when it runs again, and with 2 and 3 threads. */
static inline void check_threads(const TestPath *path, void (*run)(void *args), void *args, const TestOutput *out,
                                 int outs) {
    static const int threads[] = {1, 1, 2, 3};
    void *before[TEST_OUTPUTS_MAX], *first[TEST_OUTPUTS_MAX];
    for (int i = 0; i < outs; i++) before[i] = copy_array(out[i].data, out[i].count, path->dtype);
    for (int t = 0; t < 4; t++) {
        kernels_init(threads[t]);
        for (int i = 0; i < outs; i++) {
            memcpy(out[i].data, before[i], (size_t)out[i].count * dtype_size(path->dtype));
        }
        run(args);
        for (int i = 0; i < outs; i++) {
            if (t == 0) first[i] = copy_array(out[i].data, out[i].count, path->dtype);
            check_same(path, out[i].name, out[i].data, first[i], out[i].count);
        }
    }
    for (int i = 0; i < outs; i++) free(before[i]), free(first[i]);
}

/* main of a test program with one suite. */
static inline int run_suite(Suite *suite) {
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}

#endif
