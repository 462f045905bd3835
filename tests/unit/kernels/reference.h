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

/* main of a test program with one suite. */
static inline int run_suite(Suite *suite) {
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}

#endif
