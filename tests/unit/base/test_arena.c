/* test_arena.c - the memory plan: what it adds up to, and that the checks find what was not planned or not used. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"

enum { FIRST, SECOND, N_BUFFERS };
static const size_t sizes[N_BUFFERS] = {100, 1000};

/* A guarded arena of two buffers. */
static void make(Arena *arena, char *buffers[N_BUFFERS]) {
    arena_plan_begin(arena, true);
    for (int run = 0; run < 2; run++) {
        buffers[FIRST] = arena_take(arena, OWNER_ACTIVATIONS, "layer", sizes[FIRST], "first");
        buffers[SECOND] = arena_take(arena, OWNER_GRADIENTS, "step", sizes[SECOND], "second");
        arena_note(arena, OWNER_GRADIENTS, "run", 5000, "elsewhere");
        if (run == 0) arena_commit(arena);
    }
    arena_seal(arena);
}

START_TEST(the_plan_adds_up) {
    Arena arena;
    char *buffers[N_BUFFERS];
    make(&arena, buffers);
    ck_assert_uint_eq(arena_owner_bytes(&arena, OWNER_ACTIVATIONS), sizes[FIRST]);
    ck_assert_uint_eq(arena_owner_bytes(&arena, OWNER_GRADIENTS), sizes[SECOND] + 5000);
    ck_assert_uint_eq(arena_owner_bytes(&arena, OWNER_WORKSPACE), 0);
    ck_assert_uint_eq(arena_outside_bytes(&arena), 5000);
    ck_assert_uint_eq(arena_planned_bytes(&arena), arena.bytes + 5000);
    arena_free(&arena);
}
END_TEST

START_TEST(full_use_is_no_mismatch) {
    Arena arena;
    char *buffers[N_BUFFERS];
    make(&arena, buffers);
    for (int i = 0; i < N_BUFFERS; i++) {
        memset(buffers[i], 0, sizes[i]);
        buffers[i][sizes[i] - 1] = (char)0xA5; /* by chance what the arena was filled with */
        ck_assert_uint_eq(arena_high_water(&arena, i), sizes[i]);
        ck_assert_uint_eq(arena_untouched(&arena, i), 0);
    }
    ck_assert_ptr_null(arena_check(&arena));
    arena_free(&arena);
}
END_TEST

START_TEST(a_write_behind_a_buffer_names_it) {
    for (int i = 0; i < N_BUFFERS; i++) {
        Arena arena;
        char *buffers[N_BUFFERS];
        make(&arena, buffers);
        buffers[i][sizes[i]] = 0;
        ck_assert_str_eq(arena_check(&arena), i == FIRST ? "first" : "second");
        arena_free(&arena);
    }
}
END_TEST

START_TEST(what_was_not_used_is_counted) {
    Arena arena;
    char *buffers[N_BUFFERS];
    make(&arena, buffers);
    ck_assert_uint_eq(arena_high_water(&arena, SECOND), 0);
    ck_assert_uint_eq(arena_untouched(&arena, SECOND), sizes[SECOND]);
    memset(buffers[SECOND], 0, sizes[SECOND] - 8); /* too large by one double */
    ck_assert_uint_eq(arena_high_water(&arena, SECOND), sizes[SECOND] - 8);
    ck_assert_uint_eq(arena_untouched(&arena, SECOND), 8);
    arena_free(&arena);
    make(&arena, buffers);
    memset(buffers[SECOND], 0, 96); /* a gap, which the high-water mark does not show */
    memset(buffers[SECOND] + 160, 0, sizes[SECOND] - 160);
    ck_assert_uint_eq(arena_high_water(&arena, SECOND), sizes[SECOND]);
    ck_assert_uint_eq(arena_untouched(&arena, SECOND), 64);
    arena_free(&arena);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("memory plan");
    TCase *cases = tcase_create("arena");
    tcase_add_test(cases, the_plan_adds_up);
    tcase_add_test(cases, full_use_is_no_mismatch);
    tcase_add_test(cases, a_write_behind_a_buffer_names_it);
    tcase_add_test(cases, what_was_not_used_is_counted);
    suite_add_tcase(suite, cases);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
