/* scratch.h - what the data tests share: fixtures, scratch files, seeded random numbers. */
#ifndef TRIDENT_TESTS_DATA_SCRATCH_H
#define TRIDENT_TESTS_DATA_SCRATCH_H

#include <check.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/rng.h"

#define FIXTURES "tests/unit/data/fixtures/"

/* A fresh directory below build/, removed with all in it by scratch_remove. */
static char scratch_path[256];

static inline void scratch_make(void) {
    const char *root = getenv("TMPDIR");
    snprintf(scratch_path, sizeof scratch_path, "%s/trident-data-XXXXXX", root ? root : "/tmp");
    ck_assert_ptr_nonnull(mkdtemp(scratch_path));
}

static inline void scratch_remove(void) {
    char command[512];
    snprintf(command, sizeof command, "rm -rf '%s'", scratch_path);
    ck_assert_int_eq(system(command), 0);
}

/* A path in the scratch directory; four can be in use at a time. */
static inline const char *scratch(const char *name) {
    static char paths[4][512];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", scratch_path, name);
    return path;
}

static inline void scratch_write(const char *name, const void *bytes, size_t n) {
    FILE *file = fopen(scratch(name), "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(bytes, 1, n, file), n);
    ck_assert_int_eq(fclose(file), 0);
}

/* The whole file, zero-terminated. The caller frees. */
static inline char *slurp(const char *path, size_t *n) {
    FILE *file = fopen(path, "rb");
    ck_assert_msg(file != NULL, "cannot open %s: run from the root of the repository", path);
    fseek(file, 0, SEEK_END);
    *n = (size_t)ftell(file);
    rewind(file);
    char *bytes = xmalloc(*n + 1);
    ck_assert_uint_eq(fread(bytes, 1, *n, file), *n);
    bytes[*n] = 0;
    fclose(file);
    return bytes;
}

/* Random cases: a seed from the clock or from TRIDENT_TEST_SEED, printed where a case fails. */
static uint64_t test_seed, test_draws;

static inline void seed_begin(void) {
    const char *given = getenv("TRIDENT_TEST_SEED");
    test_seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL) ^ (uint64_t)getpid() << 32;
    test_draws = 0;
}

/* Uniform in [0, n). */
static inline int64_t draw(int64_t n) { return (int64_t)(rng_bits(test_seed, 0, test_draws++) % (uint64_t)n); }

#define SEED_FORMAT "(replay with TRIDENT_TEST_SEED=%llu)"
#define SEED_VALUE (unsigned long long)test_seed

#define ck_assert_contains(text, part) \
    ck_assert_msg(strstr((text), (part)) != NULL, "\"%s\" does not contain \"%s\"", (text), (part))

#endif
