/* bpe.h - GPT-2 byte-level BPE. Private to data/. */
#ifndef TRIDENT_DATA_BPE_H
#define TRIDENT_DATA_BPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/check.h"

/* Open addressing; key left << 32 | right, BPE_NO_PAIR where the slot is empty. */
typedef struct {
    uint64_t pair;
    int32_t rank, result;
} BpeMerge;
#define BPE_NO_PAIR UINT64_MAX

typedef struct {
    int32_t vocab;
    int32_t end_of_document;
    int32_t byte_id[256];
    char *token_text;     /* all tokens' bytes, one after the other */
    size_t *token_offset; /* (vocab + 1) */
    BpeMerge *merges;     /* (merge_mask + 1), a power of two, at most half full */
    uint64_t merge_mask;
    void *pattern;         /* pcre2_code: one piece of text, at the start of the subject */
    void *letter, *number; /* pcre2_code: one such character */
} Bpe;

/* The two files' texts (not changed) and names, for messages. NULL with err (EXIT_DATA). */
Bpe *bpe_parse(const char *vocab_text, size_t vocab_bytes, const char *vocab_name, const char *merges_text,
               size_t merges_bytes, const char *merges_name, Error *err);
void bpe_free(Bpe *bpe);
/* Rank and result of merging two tokens; NULL where they do not merge. */
const BpeMerge *bpe_merge(const Bpe *bpe, int32_t left, int32_t right);

/* What one thread needs to encode: match state, a cache of pieces, scratch. */
typedef struct BpeEncoder BpeEncoder;
BpeEncoder *bpe_encoder_create(const Bpe *bpe);
void bpe_encoder_free(BpeEncoder *encoder);
/* Invalid parts of UTF-8 that were replaced so far. */
int64_t bpe_encoder_repaired(const BpeEncoder *encoder);
/* Appends the ids of text. */
void bpe_encode(BpeEncoder *encoder, const char *text, size_t bytes, int32_t **ids, int64_t *n, int64_t *capacity);
/* The largest cut in (0, bytes) such that encoding the two sides one after the other gives what encoding
 * the whole gives, whatever follows; 0 where there is none. */
size_t bpe_safe_cut(BpeEncoder *encoder, const char *text, size_t bytes);
/* One piece, by the method for long ones, whatever its length. For tests. */
void bpe_encode_long_piece(BpeEncoder *encoder, const char *piece, size_t bytes, int32_t **ids, int64_t *n,
                           int64_t *capacity);

/* The pattern's text for pieces, and for tests. */
const char *bpe_pattern(void);

#endif
