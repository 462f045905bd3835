/* test_partition.c - who holds what, for all combinations in range: every layer, row and head once, in order, and
 * spread as evenly as can be. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "parallel/partition.h"

enum { LAYERS_MAX = 48, STAGES_MAX = 16, RANKS_MAX = 16 };

static const double costs[][2] = {{0, 0}, {0.5, 0.5}, {0, 1}, {0.25, 1.75}, {1, 3.5}, {0, 12}, {2, 0}};
enum { N_COSTS = sizeof costs / sizeof costs[0] };

static double load_of(const LayerMap *map, int piece, double embed_cost, double head_cost) {
    const int pieces = map->stages * map->chunks;
    return (double)map->layers[piece].count + (piece == 0 ? embed_cost : 0) + (piece == pieces - 1 ? head_cost : 0);
}

/* The heaviest piece of the best spread there is, by search: the least m for which the pieces, each filled up to m
 * and with one layer at least, hold all layers. Loads are multiples of 1/4 here. */
static double best_heaviest(int64_t layers, int pieces, double embed_cost, double head_cost) {
    for (double m = (double)(layers / pieces);; m += 0.25) {
        int64_t room = 0;
        bool fits = true;
        for (int piece = 0; piece < pieces; piece++) {
            const double other = (piece == 0 ? embed_cost : 0) + (piece == pieces - 1 ? head_cost : 0);
            const int64_t most = m >= other ? (int64_t)(m - other) : -1;
            fits &= most >= (layers >= pieces ? 1 : 0);
            room += most;
        }
        if (fits && room >= layers) return m;
    }
}

static void check_map(int64_t layers, int stages, int chunks, double embed_cost, double head_cost) {
    static LayerMap map;
    const int pieces = stages * chunks;
    layer_map_make(&map, layers, stages, chunks, embed_cost, head_cost);
    int64_t next = 0, least = layers, most = 0;
    double heaviest = 0.0;
    for (int piece = 0; piece < pieces; piece++) {
        const Range range = layers_of_piece(&map, piece / stages, piece % stages);
        ck_assert_int_eq(range.first, next);
        ck_assert_int_ge(range.count, layers >= pieces ? 1 : 0);
        next += range.count;
        least = min_i64(least, range.count);
        most = max_i64(most, range.count);
        const double load = load_of(&map, piece, embed_cost, head_cost);
        if (load > heaviest) heaviest = load;
    }
    ck_assert_int_eq(next, layers);
    const double best = best_heaviest(layers, pieces, embed_cost, head_cost);
    ck_assert_msg(heaviest == best, "%d layers on %d pieces, embedding %g, head %g: heaviest %g, best %g", (int)layers,
                  pieces, embed_cost, head_cost, heaviest, best);
    if (embed_cost == 0 && head_cost == 0) ck_assert_int_le(most - least, 1);
}

START_TEST(layer_maps) {
    for (int stages = 1; stages <= STAGES_MAX; stages++) {
        for (int chunks = 1; chunks <= 3; chunks++) {
            for (int64_t layers = 1; layers <= LAYERS_MAX; layers++) {
                check_map(layers, stages, chunks, costs[_i][0], costs[_i][1]);
            }
        }
    }
}
END_TEST

/* Leftover layers go to later stages, which keep fewer micro-batches alive; a heavy head takes layers from the
 * last stage. */
START_TEST(ties_and_loads) {
    static LayerMap map;
    static const struct {
        int layers, stages;
        double embed_cost, head_cost;
        int64_t counts[4];
    } cases[] = {{10, 4, 0, 0, {2, 2, 3, 3}},
                 {8, 4, 0, 0, {2, 2, 2, 2}},
                 {10, 4, 0.5, 0.5, {2, 3, 3, 2}},
                 {12, 4, 0, 2, {3, 3, 4, 2}},
                 {4, 4, 5, 5, {1, 1, 1, 1}},
                 {9, 2, 0, 1, {5, 4}},
                 {7, 1, 3, 9, {7}}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        layer_map_make(&map, cases[i].layers, cases[i].stages, 1, cases[i].embed_cost, cases[i].head_cost);
        for (int stage = 0; stage < cases[i].stages; stage++) {
            ck_assert_msg(map.layers[stage].count == cases[i].counts[stage], "case %zu stage %d: %d", i, stage,
                          (int)map.layers[stage].count);
        }
    }
}
END_TEST

START_TEST(printed_map) {
    static LayerMap map;
    char *text;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    layer_map_make(&map, 5, 2, 2, 0, 0);
    layer_map_print(&map, out);
    layer_map_make(&map, 1, 2, 1, 0, 0);
    layer_map_print(&map, out);
    fclose(out);
    ck_assert_str_eq(text, "stage 0: layer 0 + embedding, layer 2\n"
                           "stage 1: layer 1, layers 3-4 (2) + head\n"
                           "stage 0: no layer + embedding\n"
                           "stage 1: layer 0 + head\n");
    free(text);
}
END_TEST

START_TEST(largest_map) {
    static LayerMap map;
    layer_map_make(&map, 10000, PARTITION_PIECES_MAX, 1, 0, 0);
    ck_assert_int_eq(map.layers[PARTITION_PIECES_MAX - 1].first + map.layers[PARTITION_PIECES_MAX - 1].count, 10000);
}
END_TEST

START_TEST(shares) {
    for (int ranks = 1; ranks <= RANKS_MAX; ranks++) {
        for (int64_t n = 0; n <= 200; n++) {
            int64_t next = 0;
            for (int rank = 0; rank < ranks; rank++) {
                const Range share = share_of(n, ranks, rank);
                ck_assert_int_eq(share.first, next);
                ck_assert(share.count == n / ranks || share.count == n / ranks + 1);
                ck_assert(rank == 0 || share.count <= share_of(n, ranks, rank - 1).count);
                next += share.count;
            }
            ck_assert_int_eq(next, n);
        }
    }
    const Range last = share_of(INT64_C(4000000000000000003), 3, 2);
    ck_assert(last.first + last.count == INT64_C(4000000000000000003));
}
END_TEST

/* Every row once, in order; the same number of rows is stored everywhere, and less than one row each is padding. */
START_TEST(vocabulary) {
    static const int64_t large[] = {50257, 50304, 32000, 128256, 151936, 101, 255};
    for (int ranks = 1; ranks <= RANKS_MAX; ranks++) {
        for (int64_t i = 1; i <= 207; i++) {
            const int64_t vocab = i <= 200 ? i : large[i - 201], rows = ceil_div(vocab, ranks);
            int64_t next = 0;
            ck_assert(rows * ranks - vocab < ranks);
            for (int rank = 0; rank < ranks; rank++) {
                const Range share = vocab_share(vocab, ranks, rank);
                ck_assert_int_eq(share.first, next);
                ck_assert(share.count >= 0 && share.count <= rows);
                ck_assert(share.count == rows || share.first + share.count == vocab);
                next += share.count;
            }
            ck_assert_int_eq(next, vocab);
        }
    }
}
END_TEST

/* Each rank's query heads find their key/value heads on the rank: head h uses head h / (heads / kv_heads). */
START_TEST(heads) {
    int shapes = 0;
    for (int ranks = 1; ranks <= RANKS_MAX; ranks++) {
        for (int64_t kv_heads = 1; kv_heads <= 32; kv_heads++) {
            if (kv_heads % ranks != 0 && ranks % kv_heads != 0) continue;
            for (int64_t n = kv_heads; n <= 4 * kv_heads * ranks; n += kv_heads) {
                if (n % ranks != 0) continue;
                int64_t holders[32] = {0};
                for (int rank = 0; rank < ranks; rank++) {
                    const Range q = share_of(n, ranks, rank), kv = kv_share(kv_heads, ranks, rank);
                    for (int64_t h = q.first; h < q.first + q.count; h++) {
                        const int64_t needed = h / (n / kv_heads);
                        ck_assert(needed >= kv.first && needed < kv.first + kv.count);
                        /* and where the kernel looks, which knows local heads only */
                        ck_assert_int_eq(needed - kv.first, (h - q.first) / (q.count / kv.count));
                    }
                    for (int64_t h = kv.first; h < kv.first + kv.count; h++) holders[h]++;
                }
                for (int64_t h = 0; h < kv_heads; h++) ck_assert_int_eq(holders[h], max_i64(1, ranks / kv_heads));
                shapes++;
            }
        }
    }
    ck_assert_int_gt(shapes, 500);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("partition");
    TCase *tcase = tcase_create("all shapes");
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, layer_maps, 0, N_COSTS);
    tcase_add_test(tcase, ties_and_loads);
    tcase_add_test(tcase, printed_map);
    tcase_add_test(tcase, largest_map);
    tcase_add_test(tcase, shares);
    tcase_add_test(tcase, vocabulary);
    tcase_add_test(tcase, heads);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
