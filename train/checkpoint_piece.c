/* checkpoint_piece.c - pieces of logical arrays as boxes, and as a line of text in a shard.
 * Pure functions; text that is parsed may be anything. */
#include "train/checkpoint_piece.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Elements of the whole array or of the rectangle; -1 where an extent is not positive or they are too many. */
static int64_t product(const int64_t *extent, int dims) {
    int64_t total = 1;
    for (int i = 0; i < dims; i++) {
        if (extent[i] <= 0 || __builtin_mul_overflow(total, extent[i], &total)) return -1;
    }
    /* In bytes it must fit too. */
    return total > INT64_MAX / 16 ? -1 : total;
}

bool piece_valid(const CheckpointPiece *piece) {
    if (piece->dims < 1 || piece->dims > PIECE_DIMS_MAX || product(piece->shape, piece->dims) < 0) return false;
    const int64_t elements = product(piece->count, piece->dims);
    if (elements < 0) return false;
    for (int i = 0; i < piece->dims; i++) {
        if (piece->first[i] < 0 || piece->first[i] > piece->shape[i] - piece->count[i]) return false;
    }
    return piece->flat_first >= 0 && piece->flat_count > 0 && piece->flat_first <= elements - piece->flat_count;
}

int piece_boxes(const CheckpointPiece *piece, Box boxes[PIECE_BOXES_MAX]) {
    const bool one = piece->dims == 1;
    const int64_t row0 = one ? 0 : piece->first[0], column0 = one ? piece->first[0] : piece->first[1];
    const int64_t width = one ? piece->count[0] : piece->count[1];
    const int64_t end = piece->flat_first + piece->flat_count;
    int n = 0;
    /* Each turn takes the largest box that begins at `at`: the rest of a row, whole rows, or part of one. */
    for (int64_t at = piece->flat_first; at < end;) {
        const int64_t row = at / width, column = at % width;
        const int64_t rows = column == 0 ? max_i64(1, (end - at) / width) : 1;
        const int64_t columns = rows > 1 ? width : min_i64(width - column, end - at);
        REQUIRE(n < PIECE_BOXES_MAX);
        boxes[n++] = (Box){.first = {row0 + row, column0 + column},
                           .count = {rows, columns},
                           .at = at - piece->flat_first,
                           .stride = width};
        at += rows * columns;
    }
    return n;
}

bool box_common(const Box *a, const Box *b, Box *common) {
    *common = *a;
    for (int i = 0; i < 2; i++) {
        const int64_t first = max_i64(a->first[i], b->first[i]);
        const int64_t end = min_i64(a->first[i] + a->count[i], b->first[i] + b->count[i]);
        if (first >= end) return false;
        common->first[i] = first;
        common->count[i] = end - first;
    }
    common->at = box_element(a, common->first[0], common->first[1]);
    return true;
}

int64_t box_element(const Box *box, int64_t row, int64_t column) {
    return box->at + (row - box->first[0]) * box->stride + (column - box->first[1]);
}

static char *pair_text(const int64_t *values, int dims) {
    return dims == 1 ? xasprintf("%" PRId64, values[0]) : xasprintf("%" PRId64 ",%" PRId64, values[0], values[1]);
}

char *piece_note(const CheckpointPiece *piece, uint64_t xxh3) {
    char *shape = pair_text(piece->shape, piece->dims), *first = pair_text(piece->first, piece->dims);
    char *count = pair_text(piece->count, piece->dims);
    char *note = xasprintf("xxh3=%016" PRIx64 " shape=%s first=%s count=%s flat=%" PRId64 ",%" PRId64 " array=%s", xxh3,
                           shape, first, count, piece->flat_first, piece->flat_count, piece->name);
    free(shape);
    free(first);
    free(count);
    return note;
}

bool hex64_parse(const char *text, const char **end, uint64_t *value) {
    *value = 0;
    for (int i = 0; i < 16; i++, text++) {
        const char c = *text;
        if (!(c >= '0' && c <= '9') && !(c >= 'a' && c <= 'f')) return false;
        *value = *value << 4 | (uint64_t)(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    if (end) *end = text;
    return end || *text == 0;
}

/* Moves *text past prefix. */
static bool skip(const char **text, const char *prefix) {
    const size_t length = strlen(prefix);
    if (strncmp(*text, prefix, length) != 0) return false;
    *text += length;
    return true;
}

/* prefix, then one or two numbers with a comma between them: how many, 0 where it is something else. */
static int parse_numbers(const char **text, const char *prefix, int64_t values[2]) {
    if (!skip(text, prefix)) return 0;
    for (int n = 0; n < 2; n++) {
        if (**text < '0' || **text > '9') return 0;
        char *end;
        errno = 0;
        values[n] = strtoll(*text, &end, 10);
        if (errno) return 0;
        *text = end;
        if (*end != ',') return n + 1;
        (*text)++;
    }
    return 0;
}

bool piece_from_note(const char *note, CheckpointPiece *piece, uint64_t *xxh3) {
    int64_t flat[2];
    if (!skip(&note, "xxh3=") || !hex64_parse(note, &note, xxh3)) return false;
    piece->dims = parse_numbers(&note, " shape=", piece->shape);
    if (piece->dims == 0 || parse_numbers(&note, " first=", piece->first) != piece->dims ||
        parse_numbers(&note, " count=", piece->count) != piece->dims || parse_numbers(&note, " flat=", flat) != 2 ||
        !skip(&note, " array=")) {
        return false;
    }
    piece->flat_first = flat[0];
    piece->flat_count = flat[1];
    piece->name = note;
    return note[0] && piece_valid(piece);
}
