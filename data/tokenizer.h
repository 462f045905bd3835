/* tokenizer.h - text to token ids and back: bytes, and GPT-2 byte-level BPE. */
#ifndef TRIDENT_DATA_TOKENIZER_H
#define TRIDENT_DATA_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "base/check.h"

typedef struct Tokenizer Tokenizer;

/* spec: "bytes", or a directory (or its vocab.json / merges.txt) of GPT-2 files. NULL with err (EXIT_DATA). */
Tokenizer *tokenizer_open(const char *spec, Error *err);
void tokenizer_close(Tokenizer *tokenizer);
int64_t tokenizer_vocab(const Tokenizer *tokenizer);           /* bytes: 257 */
int32_t tokenizer_end_of_document(const Tokenizer *tokenizer); /* bytes: 256 */
/* Appends ids to *ids (grown with realloc; *n used, *capacity). Thread-safe. Text is taken as it is:
 * specials are not recognised in it. Invalid UTF-8 is replaced by U+FFFD for BPE, kept for bytes. */
void tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t bytes, int32_t **ids, int64_t *n,
                      int64_t *capacity);
/* The bytes of one token (not zero-terminated); end of document: empty. Valid as long as the tokenizer. */
const char *tokenizer_token(const Tokenizer *tokenizer, int32_t id, size_t *bytes);

/* `trident tokenize` after its own arguments were parsed. Streams with bounded memory over `threads`
 * threads, writes PREFIX.bin/.idx (Megatron, uint16 or int32), each document followed by the end-of-
 * document token. Plain text: one file one document, or split at lines equal to `document_line`
 * where that is not NULL; JSONL: the `text` field of each line. Prints progress. */
typedef struct {
    const char *tokenizer, *out_prefix, *document_line;
    char **inputs;
    int n_inputs, threads;
} TokenizeOptions;
int tokenize_files(const TokenizeOptions *options, Error *err);

#endif
