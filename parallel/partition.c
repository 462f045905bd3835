/* partition.c - who holds what: layers of a stage, rows and columns of a tensor rank.
 * In: global sizes and the number of ranks.  Out: ranges.
 * Invariants: every layer, row and column is held once, ranges are contiguous and ascend with the
 * rank. Pure arithmetic.
 *
 * Layers: one each first, then layer after layer to the piece that is lightest with it. As all layers
 * weigh the same, no other spread has a lighter heaviest piece. Where pieces tie, the later one takes
 * the layer: under 1F1B earlier stages keep more micro-batches alive, so that a layer there costs more
 * memory. */
#include "parallel/partition.h"

#include <inttypes.h>

#include "base/check.h"

static int lightest_piece(const LayerMap *map, int pieces, double embed_cost, double head_cost) {
    int best = -1;
    double best_load = 0;
    for (int piece = 0; piece < pieces; piece++) {
        double load = (double)map->layers[piece].count;
        if (piece == 0) load += embed_cost;
        if (piece == pieces - 1) load += head_cost;
        if (best < 0 || load <= best_load) {
            best = piece;
            best_load = load;
        }
    }
    return best;
}

void layer_map_make(LayerMap *map, int64_t layers, int stages, int chunks, double embed_cost, double head_cost) {
    REQUIRE(stages >= 1 && chunks >= 1 && layers >= 0 && embed_cost >= 0 && head_cost >= 0);
    REQUIRE((int64_t)stages * chunks <= PARTITION_PIECES_MAX);
    int pieces = stages * chunks;
    int64_t each = layers >= pieces ? 1 : 0;
    *map = (LayerMap){.stages = stages, .chunks = chunks};
    for (int piece = 0; piece < pieces; piece++) map->layers[piece].count = each;
    for (int64_t left = layers - each * pieces; left > 0; left--)
        map->layers[lightest_piece(map, pieces, embed_cost, head_cost)].count++;
    for (int piece = 1; piece < pieces; piece++)
        map->layers[piece].first = map->layers[piece - 1].first + map->layers[piece - 1].count;
}

Range layers_of_piece(const LayerMap *map, int chunk, int stage) {
    REQUIRE(chunk >= 0 && chunk < map->chunks && stage >= 0 && stage < map->stages);
    return map->layers[chunk * map->stages + stage];
}

static void print_piece(const LayerMap *map, int piece, FILE *out) {
    Range range = map->layers[piece];
    int pieces = map->stages * map->chunks;
    if (range.count == 0) fputs(" no layer", out);
    else if (range.count == 1) fprintf(out, " layer %" PRId64, range.first);
    else
        fprintf(out, " layers %" PRId64 "-%" PRId64 " (%" PRId64 ")", range.first, range.first + range.count - 1,
                range.count);
    if (piece == 0) fputs(" + embedding", out);
    if (piece == pieces - 1) fputs(" + head", out);
}

void layer_map_print(const LayerMap *map, FILE *out) {
    for (int stage = 0; stage < map->stages; stage++) {
        fprintf(out, "stage %d:", stage);
        for (int chunk = 0; chunk < map->chunks; chunk++) {
            if (chunk > 0) fputc(',', out);
            print_piece(map, chunk * map->stages + stage, out);
        }
        fputc('\n', out);
    }
}

Range share_of(int64_t n, int ranks, int rank) {
    REQUIRE(n >= 0 && ranks >= 1 && rank >= 0 && rank < ranks);
    int64_t each = n / ranks, extra = n % ranks;
    return (Range){.first = rank * each + min_i64(rank, extra), .count = each + (rank < extra)};
}

Range vocab_share(int64_t vocab, int ranks, int rank) {
    REQUIRE(vocab >= 0 && ranks >= 1 && rank >= 0 && rank < ranks);
    int64_t rows = ceil_div(vocab, ranks);
    int64_t first = min_i64(rank * rows, vocab);
    return (Range){.first = first, .count = min_i64(rows, vocab - first)};
}

Range kv_share(int64_t kv_heads, int ranks, int rank) {
    REQUIRE(kv_heads >= 1 && ranks >= 1 && rank >= 0 && rank < ranks);
    if (kv_heads >= ranks) {
        int64_t each = div_exact(kv_heads, ranks);
        return (Range){.first = rank * each, .count = each};
    }
    return (Range){.first = rank / div_exact(ranks, kv_heads), .count = 1};
}
