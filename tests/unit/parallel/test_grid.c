/* test_grid.c - rank arithmetic and placement: block, cyclic, plane, uneven, random, impossible. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/rng.h"
#include "parallel/grid.h"

enum { WORLD_MAX = 64 };
static const Dim orders[6][DIM_COUNT] = {{DIM_TENSOR, DIM_PIPELINE, DIM_DATA}, {DIM_TENSOR, DIM_DATA, DIM_PIPELINE},
                                         {DIM_PIPELINE, DIM_TENSOR, DIM_DATA}, {DIM_PIPELINE, DIM_DATA, DIM_TENSOR},
                                         {DIM_DATA, DIM_TENSOR, DIM_PIPELINE}, {DIM_DATA, DIM_PIPELINE, DIM_TENSOR}};

static Grid make_grid(int data, int pipeline, int tensor, const Dim order[DIM_COUNT]) {
    Grid grid = {.size = {[DIM_DATA] = data, [DIM_PIPELINE] = pipeline, [DIM_TENSOR] = tensor},
                 .world_size = data * pipeline * tensor};
    memcpy(grid.order, order, sizeof grid.order);
    return grid;
}

/* hosts: one letter a rank. */
static void make_seats(Seat *seats, const char *hosts) {
    for (int r = 0; hosts[r]; r++) snprintf(seats[r].host, sizeof seats[r].host, "n%c", hosts[r]);
}

static bool tensor_groups_inside(const Grid *grid, const Seat *seats) {
    for (int position = 0; position < grid->world_size; position++) {
        int index[DIM_COUNT];
        grid_coordinates(grid, position, index);
        const char *host = seats[grid_rank_at(grid, index)].host;
        index[DIM_TENSOR] = 0;
        if (strcmp(host, seats[grid_rank_at(grid, index)].host) != 0) return false;
    }
    return true;
}

static void check_bijection(const Grid *grid) {
    bool seen[WORLD_MAX] = {false};
    for (int position = 0; position < grid->world_size; position++) {
        int index[DIM_COUNT], rank = grid->rank_at[position];
        grid_coordinates(grid, position, index);
        for (int dim = 0; dim < DIM_COUNT; dim++) ck_assert(index[dim] >= 0 && index[dim] < grid->size[dim]);
        ck_assert_int_eq(grid_position(grid, index), position);
        ck_assert(rank >= 0 && rank < grid->world_size && !seen[rank]);
        seen[rank] = true;
    }
}

/* The groups of each kind: equal for all members, in grid order, and together each rank once. */
static void check_groups(const Grid *grid, const Seat *seats) {
    for (unsigned mask = 1; mask < 1u << DIM_COUNT; mask++) {
        int members[WORLD_MAX] = {0};
        for (int rank = 0; rank < grid->world_size; rank++) {
            Grid own = *grid;
            Error err;
            int ranks[WORLD_MAX], mine = -1, last = -1;
            ck_assert_int_eq(grid_place(&own, seats, rank, true, &err), 0);
            int n = grid_group(&own, mask, ranks, &mine);
            ck_assert(mine >= 0 && mine < n);
            ck_assert_int_eq(ranks[mine], rank);
            for (int i = 0; i < n; i++) {
                int position = 0;
                while (own.rank_at[position] != ranks[i]) position++;
                ck_assert_int_gt(position, last);
                last = position;
                members[ranks[i]] += mine == 0;
            }
            grid_free(&own);
        }
        for (int rank = 0; rank < grid->world_size; rank++) ck_assert_int_eq(members[rank], 1);
    }
}

START_TEST(every_product_is_a_bijection) {
    for (int data = 1; data <= WORLD_MAX; data++) {
        for (int pipeline = 1; data * pipeline <= WORLD_MAX; pipeline++) {
            for (int tensor = 1; data * pipeline * tensor <= WORLD_MAX; tensor++) {
                Grid grid = make_grid(data, pipeline, tensor, orders[_i]);
                static Seat seats[WORLD_MAX];
                Error err;
                for (int r = 0; r < WORLD_MAX; r++) strcpy(seats[r].host, "n0");
                ck_assert_int_eq(grid_place(&grid, seats, 0, false, &err), 0);
                check_bijection(&grid);
                for (int r = 0; r < grid.world_size; r++) ck_assert_int_eq(grid.rank_at[r], r);
                /* order[0] varies fastest: its neighbours are 1 apart, the next ones a whole size[order[0]]. */
                int one[DIM_COUNT] = {0};
                one[grid.order[0]] = grid.size[grid.order[0]] > 1;
                ck_assert_int_eq(grid_position(&grid, one), grid.size[grid.order[0]] > 1);
                grid_free(&grid);
            }
        }
    }
}
END_TEST

/* Random spreads of whole tensor groups over hosts, shuffled: tensor groups must end up inside hosts. */
START_TEST(random_spreads) {
    const char *given = getenv("TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 10) : (uint64_t)(clock_s() * 1e9), draw = 0;
    printf("random_spreads: TEST_SEED=%llu\n", (unsigned long long)seed);
    for (int round = 0; round < 300; round++) {
        static Seat seats[WORLD_MAX];
        int tensor = 1 + (int)(rng_bits(seed, 1, draw++) % 8),
            rest = 1 + (int)(rng_bits(seed, 1, draw++) % (uint64_t)(WORLD_MAX / tensor));
        int pipeline = 1 + (int)(rng_bits(seed, 1, draw++) % (uint64_t)rest);
        while (rest % pipeline) pipeline--;
        Grid grid = make_grid(rest / pipeline, pipeline, tensor, orders[rng_bits(seed, 1, draw++) % 6]);
        int hosts = 1 + (int)(rng_bits(seed, 1, draw++) % 5);
        for (int group = 0; group < rest; group++) {
            int host = (int)(rng_bits(seed, 1, draw++) % (uint64_t)hosts);
            for (int t = 0; t < tensor; t++) snprintf(seats[group * tensor + t].host, 8, "n%d", host);
        }
        for (int r = grid.world_size - 1; r > 0; r--) {
            int other = (int)(rng_bits(seed, 1, draw++) % (uint64_t)(r + 1));
            Seat kept = seats[r];
            seats[r] = seats[other];
            seats[other] = kept;
        }
        Error err;
        int rank = (int)(rng_bits(seed, 1, draw++) % (uint64_t)grid.world_size);
        ck_assert_msg(grid_place(&grid, seats, rank, false, &err) == 0, "seed %llu: %s", (unsigned long long)seed,
                      err.message);
        check_bijection(&grid);
        ck_assert(tensor_groups_inside(&grid, seats));
        ck_assert_int_eq(grid_rank_at(&grid, grid.index), rank);
        if (round % 20 == 0) check_groups(&grid, seats);
        grid_free(&grid);
    }
}
END_TEST

/* hosts of the ranks; data, pipeline, tensor; expected rank at each position (tensor, pipeline, data order). */
static const struct {
    const char *name, *hosts;
    int data, pipeline, tensor;
    int rank_at[8];
} known[] = {
    {"block: the launcher's order stays", "00001111", 2, 2, 2, {0, 1, 2, 3, 4, 5, 6, 7}},
    {"one host", "00000000", 2, 2, 2, {0, 1, 2, 3, 4, 5, 6, 7}},
    {"cyclic", "01010101", 2, 2, 2, {0, 2, 4, 6, 1, 3, 5, 7}},
    {"cyclic over four", "01230123", 2, 2, 2, {0, 4, 1, 5, 2, 6, 3, 7}},
    {"plane of 2: the launcher's order stays", "00110011", 2, 2, 2, {0, 1, 2, 3, 4, 5, 6, 7}},
    {"plane of 2, tensor 4", "00110011", 2, 1, 4, {0, 1, 4, 5, 2, 3, 6, 7}},
    {"uneven", "00000011", 2, 2, 2, {0, 1, 2, 3, 4, 5, 6, 7}},
    {"uneven, turned", "01000001", 2, 2, 2, {0, 2, 3, 4, 5, 6, 1, 7}},
    {"tensor 1: any spread", "01201201", 2, 4, 1, {0, 1, 2, 3, 4, 5, 6, 7}},
};

START_TEST(known_placements) {
    Seat seats[WORLD_MAX];
    Error err;
    Grid grid = make_grid(known[_i].data, known[_i].pipeline, known[_i].tensor, orders[0]);
    make_seats(seats, known[_i].hosts);
    ck_assert_msg(grid_place(&grid, seats, 5, false, &err) == 0, "%s: %s", known[_i].name, err.message);
    for (int p = 0; p < 8; p++) {
        ck_assert_msg(grid.rank_at[p] == known[_i].rank_at[p], "%s: position %d holds rank %d instead of %d",
                      known[_i].name, p, grid.rank_at[p], known[_i].rank_at[p]);
    }
    ck_assert(tensor_groups_inside(&grid, seats));
    grid_free(&grid);
}
END_TEST

START_TEST(impossible_names_reason_and_nearest) {
    Seat seats[WORLD_MAX];
    Error err;
    make_seats(seats, "000111222333");
    Grid grid = make_grid(3, 1, 4, orders[0]);
    ck_assert_int_eq(grid_place(&grid, seats, 0, false, &err), -1);
    ck_assert_int_eq(err.status, EXIT_LAUNCH);
    ck_assert_ptr_nonnull(strstr(err.message, "tensor = 4"));
    ck_assert_ptr_nonnull(strstr(err.message, "host n0 has 3 ranks"));
    ck_assert_ptr_nonnull(strstr(err.message, "nearest: tensor = 3 (with pipeline = 1, data = 4)"));
    ck_assert_ptr_null(grid.rank_at);

    make_seats(seats, "00000001"); /* 7 + 1: only tensor = 1 fits */
    grid = make_grid(2, 2, 2, orders[0]);
    ck_assert_int_eq(grid_place(&grid, seats, 0, false, &err), -1);
    ck_assert_ptr_nonnull(strstr(err.message, "host n0 has 7 ranks, host n1 has 1 rank;"));
    ck_assert_ptr_nonnull(strstr(err.message, "tensor = 1 (with pipeline = 2, data = 4)"));
    ck_assert_ptr_null(strstr(err.message, " or tensor"));

    /* Nearest on both sides: hosts of 6, tensor 4 -> 3 or 6. */
    make_seats(seats, "000000111111");
    grid = make_grid(1, 3, 4, orders[0]);
    ck_assert_int_eq(grid_place(&grid, seats, 0, false, &err), -1);
    ck_assert_ptr_nonnull(strstr(err.message, "tensor = 3 (with pipeline = 1, data = 4) or tensor = 6"));
}
END_TEST

START_TEST(crossing_is_least_where_allowed) {
    Seat seats[WORLD_MAX];
    Error err;
    int inside = 0;
    make_seats(seats, "00011122"); /* 3, 3, 2 with tensor 2: only one group has to cross */
    Grid grid = make_grid(2, 2, 2, orders[0]);
    ck_assert_int_eq(grid_place(&grid, seats, 7, true, &err), 0);
    check_bijection(&grid);
    for (int group = 0; group < 4; group++) {
        inside += strcmp(seats[grid.rank_at[2 * group]].host, seats[grid.rank_at[2 * group + 1]].host) == 0;
    }
    ck_assert_int_eq(inside, 3);
    grid_free(&grid);
}
END_TEST

START_TEST(wrong_product_is_refused) {
    Seat seats[WORLD_MAX];
    Error err;
    make_seats(seats, "000000");
    Grid grid = make_grid(2, 2, 2, orders[0]);
    grid.world_size = 6;
    ck_assert_int_eq(grid_place(&grid, seats, 0, false, &err), -1);
    ck_assert_ptr_nonnull(strstr(err.message, "= 8 ranks, but 6 were started"));
}
END_TEST

START_TEST(orders_are_parsed) {
    static const char *const bad[][2] = {{"tensor, pipeline", "data is missing"},
                                         {"tensor, tensor, data", "tensor is named twice"},
                                         {"tensor, pipe, data", "\"pipe\" is no dimension"},
                                         {"", "tensor is missing"},
                                         {"tensor, pipeline, data, tensor", "tensor is named twice"}};
    Dim order[DIM_COUNT];
    Error err;
    ck_assert_int_eq(grid_parse_order(order, " tensor,data ,  pipeline", &err), 0);
    ck_assert(order[0] == DIM_TENSOR && order[1] == DIM_DATA && order[2] == DIM_PIPELINE);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ck_assert_int_eq(grid_parse_order(order, bad[i][0], &err), -1);
        ck_assert_int_eq(err.status, EXIT_CONFIG);
        ck_assert_msg(strstr(err.message, bad[i][1]) != NULL, "%s", err.message);
    }
}
END_TEST

START_TEST(picture_shows_hosts_and_groups) {
    Seat seats[WORLD_MAX];
    Error err;
    char *text = NULL;
    size_t bytes = 0;
    make_seats(seats, "01010101");
    Grid grid = make_grid(2, 2, 2, orders[0]);
    ck_assert_int_eq(grid_place(&grid, seats, 0, false, &err), 0);
    FILE *out = open_memstream(&text, &bytes);
    grid_print(&grid, seats, out);
    fclose(out);
    printf("%s", text);
    ck_assert_ptr_nonnull(strstr(text, "n1    d1 p0 t0 = 1  d1 p0 t1 = 3  d1 p1 t0 = 5  d1 p1 t1 = 7\n"));
    ck_assert_ptr_nonnull(strstr(text, "tensor    4 groups of 2: inside a node\n"));
    ck_assert_ptr_nonnull(strstr(text, "pipeline  4 groups of 2: inside a node\n"));
    ck_assert_ptr_nonnull(strstr(text, "data      4 groups of 2: across nodes\n"));
    free(text);
    grid_free(&grid);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("grid");
    TCase *cases = tcase_create("grid");
    tcase_set_timeout(cases, 30);
    tcase_add_loop_test(cases, every_product_is_a_bijection, 0, 6);
    tcase_add_test(cases, random_spreads);
    tcase_add_loop_test(cases, known_placements, 0, (int)(sizeof known / sizeof known[0]));
    tcase_add_test(cases, impossible_names_reason_and_nearest);
    tcase_add_test(cases, crossing_is_least_where_allowed);
    tcase_add_test(cases, wrong_product_is_refused);
    tcase_add_test(cases, orders_are_parsed);
    tcase_add_test(cases, picture_shows_hosts_and_groups);
    suite_add_tcase(suite, cases);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
