/* token_writer.h - writes a Megatron token file, all of it or none. Private to data/. */
#ifndef TRIDENT_DATA_TOKEN_WRITER_H
#define TRIDENT_DATA_TOKEN_WRITER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/check.h"

typedef struct TokenWriter TokenWriter;

/* prefix: with or without .bin or .idx; its directory is made. Tokens are uint16 where vocab allows, else
 * int32. A signal that ends the process takes the unfinished files away. One at a time. NULL with err (EXIT_DATA). */
TokenWriter *token_writer_open(const char *prefix, int64_t vocab, Error *err);
/* -1 with err where the input is one of the files that the commit replaces. */
int token_writer_check_input(const TokenWriter *writer, const char *input, Error *err);
/* Bytes of one token, 2 or 4, in which token_writer_tokens takes them. */
int token_writer_width(const TokenWriter *writer);
int token_writer_tokens(TokenWriter *writer, const void *tokens, int64_t count, Error *err);
/* The next `count` tokens of those given belong to the present document; ends: and finish it. A document
 * without tokens leaves a boundary and no sequence, as Megatron's tools do. */
int token_writer_document(TokenWriter *writer, int64_t count, bool ends, Error *err);
int64_t token_writer_total(const TokenWriter *writer, int64_t *documents);
/* Path without .bin; valid as long as the writer. */
const char *token_writer_prefix(const TokenWriter *writer);
/* Publishes both files: the .bin, then the .idx, without which a .bin is no token file. */
int token_writer_commit(TokenWriter *writer, Error *err);
/* Frees; what was not committed is removed. */
void token_writer_close(TokenWriter *writer);

#endif
