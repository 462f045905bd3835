/* encoder.h - what one thread needs to encode text with a tokenizer. Private to data/. */
#ifndef TRIDENT_DATA_ENCODER_H
#define TRIDENT_DATA_ENCODER_H

#include "data/bpe.h"
#include "data/tokenizer.h"

typedef struct {
    BpeEncoder *bpe; /* NULL: bytes */
} Encoder;

void encoder_init(Encoder *encoder, const Tokenizer *tokenizer);
void encoder_end(Encoder *encoder);
/* Invalid parts of UTF-8 that were replaced so far. */
int64_t encoder_repaired(const Encoder *encoder);
/* As tokenizer_encode, with what was learnt from earlier text. */
void encoder_encode(Encoder *encoder, const char *text, size_t bytes, int32_t **ids, int64_t *n, int64_t *capacity);
/* The largest cut in (0, bytes] that changes no token, whatever follows the text; 0 where there is none. */
size_t encoder_safe_cut(Encoder *encoder, const char *text, size_t bytes);

#endif
