/* utf8.h - decoding UTF-8, with a fixed answer for invalid input. */
#ifndef TRIDENT_DATA_UTF8_H
#define TRIDENT_DATA_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Decodes the character at text (bytes > 0). Returns its length, with *code; for an invalid one *code is
 * -1 and the length is that of the maximal invalid part, which one U+FFFD replaces (Unicode, 3.9). */
size_t utf8_decode(const char *text, size_t bytes, int32_t *code);
/* Writes code (a valid scalar value) to `to` (4 bytes of room). Returns the length. */
size_t utf8_encode(int32_t code, char *to);
/* Length of the longest valid beginning. */
size_t utf8_valid_prefix(const char *text, size_t bytes);
/* A copy with each maximal invalid part replaced by U+FFFD; *length of it, *replaced: how many. The caller
 * frees. */
char *utf8_repair(const char *text, size_t bytes, size_t *length, int64_t *replaced);

#endif
