/* partition.h - who holds what: layers of a stage, rows and columns of a tensor rank. Pure. */
#ifndef TRIDENT_PARALLEL_PARTITION_H
#define TRIDENT_PARALLEL_PARTITION_H

#include <stdio.h>

#include "base/types.h"

enum { PARTITION_PIECES_MAX = 4096 };

/* Contiguous layers for every (chunk, stage): piece = chunk * stages + stage is also the order in
 * which a micro-batch passes them. The embedding belongs to the first piece, the head to the last. */
typedef struct {
    int stages, chunks;
    Range layers[PARTITION_PIECES_MAX];
} LayerMap;

/* Spreads layers so that the most loaded piece is as light as can be: embed_cost and head_cost are
 * in units of one layer. Pieces that tie: the later one takes the layer (less memory under 1F1B).
 * Every layer is held once; a piece is empty only where layers < pieces (the config refuses that). */
void layer_map_make(LayerMap *map, int64_t layers, int stages, int chunks, double embed_cost, double head_cost);
Range layers_of_piece(const LayerMap *map, int chunk, int stage);
void layer_map_print(const LayerMap *map, FILE *out);

/* Share of rank in n things; leftovers go to the first ranks. */
Range share_of(int64_t n, int ranks, int rank);
/* Vocabulary rows of a tensor rank: ceil(vocab / ranks) rows are allocated on each; count is how many
 * of them are real (0 is possible on the last ranks). */
Range vocab_share(int64_t vocab, int ranks, int rank);
/* Key/value heads of a tensor rank. kv_heads >= ranks: kv_heads / ranks of its own. Fewer: one head,
 * shared by ranks / kv_heads consecutive ranks. Divisibility is checked by the config. */
Range kv_share(int64_t kv_heads, int ranks, int rank);

#endif
