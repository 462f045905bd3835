/* test_rng.c - Philox against the known answers of its authors' library (Random123, kat_vectors, philox4x32 10), and
 * the draws made from it: initial weights, samples and their order are in every checkpoint's history. */
#include <check.h>
#include <math.h>

#include "base/rng.h"

static const struct {
    uint64_t key, counter_high, counter_low;
    uint32_t word[4];
} known[] = {
    {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {UINT64_MAX, UINT64_MAX, UINT64_MAX, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

START_TEST(known_answers) {
    const Philox found = philox4x32(known[_i].key, known[_i].counter_high, known[_i].counter_low);
    for (int w = 0; w < 4; w++) ck_assert_uint_eq(found.word[w], known[_i].word[w]);
}
END_TEST

START_TEST(bits_are_the_first_words) {
    ck_assert(rng_bits(known[2].key, known[2].counter_high, known[2].counter_low) == UINT64_C(0x94fdccebd16cfe09));
}
END_TEST

/* Means of n draws scatter by sigma / sqrt(n); five of that are allowed, as the draws never change. */
START_TEST(moments) {
    enum { N = 100000 };
    double uniform = 0.0, normal = 0.0, squares = 0.0;
    for (uint64_t i = 0; i < N; i++) {
        const double u = rng_uniform(1, 2, i), x = rng_normal(1, 3, i);
        ck_assert(u >= 0.0 && u < 1.0 && isfinite(x));
        uniform += u / N;
        normal += x / N;
        squares += x * x / N;
    }
    ck_assert(fabs(uniform - 0.5) <= 5.0 * sqrt(1.0 / 12.0 / N));
    ck_assert(fabs(normal) <= 5.0 * sqrt(1.0 / N));
    ck_assert(fabs(squares - 1.0) <= 5.0 * sqrt(2.0 / N));
}
END_TEST

int main(void) {
    Suite *suite = suite_create("random numbers");
    TCase *tests = tcase_create("philox");
    tcase_add_loop_test(tests, known_answers, 0, sizeof known / sizeof known[0]);
    tcase_add_test(tests, bits_are_the_first_words);
    tcase_add_test(tests, moments);
    suite_add_tcase(suite, tests);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
