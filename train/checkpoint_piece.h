/* checkpoint_piece.h - where the elements of a piece lie in its logical array: pure arithmetic. */
#ifndef TRIDENT_TRAIN_CHECKPOINT_PIECE_H
#define TRIDENT_TRAIN_CHECKPOINT_PIECE_H

#include "train/checkpoint.h"

/* A flat range of a rectangle is at most the end of one row, whole rows, and the beginning of one. */
enum { PIECE_BOXES_MAX = 3 };

/* Rows and columns of the logical array; an array of one dimension is one row. Element (r, c) is element
 * at + (r - first[0]) * stride + (c - first[1]) of the piece's data. */
typedef struct {
    int64_t first[2], count[2];
    int64_t at, stride;
} Box;

/* Rectangle within the shape, range within the rectangle, nothing empty or too large for int64. */
bool piece_valid(const CheckpointPiece *piece);
/* Number of boxes; together they are the piece's elements, each once. */
int piece_boxes(const CheckpointPiece *piece, Box boxes[PIECE_BOXES_MAX]);
/* *common: the elements of a that are in b, placed as in a's data. */
bool box_common(const Box *a, const Box *b, Box *common);
/* Where (row, column) of the logical array is in the data of the box's piece. */
int64_t box_element(const Box *box, int64_t row, int64_t column);

/* One line that says what an entry of a shard holds: "xxh3=H shape=A,B first=A,B count=A,B flat=F,N array=NAME".
 * Caller frees. */
char *piece_note(const CheckpointPiece *piece, uint64_t xxh3);
/* The reverse; dtype, data and write stay as they are, name points into note. False where it is no valid piece. */
bool piece_from_note(const char *note, CheckpointPiece *piece, uint64_t *xxh3);
/* 16 hexadecimal digits and nothing else but what follows at *end (NULL: nothing may). */
bool hex64_parse(const char *text, const char **end, uint64_t *value);

#endif
