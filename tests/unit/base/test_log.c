/* test_log.c - what a log line holds (time since the program began, coordinates, subsystem, level, text), and who
 * prints it. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

/* Standard error goes to a file of its own in each test, which check runs in a process of its own. */
static FILE *captured;

static void capture(void) {
    captured = tmpfile();
    ck_assert_ptr_nonnull(captured);
    ck_assert_int_eq(dup2(fileno(captured), STDERR_FILENO), STDERR_FILENO);
}

/* The next line of it; "" at the end. */
static const char *next_line(void) {
    static char line[4096];
    static long at;
    ck_assert_int_eq(fseek(captured, at, SEEK_SET), 0);
    if (!fgets(line, sizeof line, captured)) return "";
    at = ftell(captured);
    return line;
}

/* The first line says how long the program ran already, not 0. */
START_TEST(time_counts_from_the_start) {
    sleep_s(0.05);
    log_info(LOG_MAIN, "first");
    sleep_s(0.05);
    log_info(LOG_MAIN, "second");
    char *end;
    const double first_s = strtod(next_line(), &end);
    ck_assert_str_eq(end, "s main: first\n");
    const double second_s = strtod(next_line(), &end);
    ck_assert_str_eq(end, "s main: second\n");
    /* Printed to a millisecond. */
    ck_assert_double_ge(first_s, 0.0499);
    ck_assert_double_ge(second_s - first_s, 0.0489);
    ck_assert_double_lt(second_s, 60.0);
}
END_TEST

START_TEST(others_than_rank_0_print_no_info) {
    log_set_rank(3, "d0 p1 t1");
    log_info(LOG_DATA, "not this");
    log_warn(LOG_CKPT, "slow: %d", 7);
    log_error(LOG_PIPE, "lost");
    log_set_all_ranks(true);
    log_info(LOG_MEM, "this");
    static const char *const expected[] = {"s d0 p1 t1 checkpoint: warning: slow: 7\n",
                                           "s d0 p1 t1 pipe: error: lost\n", "s d0 p1 t1 memory: this\n"};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        char *end;
        strtod(next_line(), &end);
        ck_assert_str_eq(end, expected[i]);
    }
    ck_assert_str_eq(next_line(), "");
    ck_assert_str_eq(log_coordinates(), "d0 p1 t1");
}
END_TEST

/* A text that is too long is cut, and the line still ends. */
START_TEST(long_lines_end) {
    static char text[3000];
    memset(text, 'x', sizeof text - 1);
    log_warn(LOG_TRAIN, "%s", text);
    log_warn(LOG_TRAIN, "next");
    const char *line = next_line();
    const size_t length = strlen(line);
    ck_assert_uint_gt(length, 2000);
    ck_assert_uint_lt(length, 2100);
    ck_assert_int_eq(line[length - 1], '\n');
    ck_assert_ptr_nonnull(strstr(next_line(), "train: warning: next\n"));
}
END_TEST

int main(void) {
    Suite *suite = suite_create("log");
    TCase *lines = tcase_create("lines");
    tcase_add_checked_fixture(lines, capture, NULL);
    tcase_add_test(lines, time_counts_from_the_start);
    tcase_add_test(lines, others_than_rank_0_print_no_info);
    tcase_add_test(lines, long_lines_end);
    suite_add_tcase(suite, lines);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
