/* utf8.c - decoding UTF-8 by table 3-7 of the Unicode Standard (no surrogates, nothing over-long).
 *
 * Invariant: repairing two halves of a text gives the repaired text, wherever the second half does not
 * begin with a continuation byte; data/bpe.c cuts long texts by that. */
#include "data/utf8.h"

#include <string.h>

#include "base/check.h"

size_t utf8_decode(const char *text, size_t bytes, int32_t *code) {
    const unsigned char *s = (const unsigned char *)text;
    if (s[0] < 0x80) {
        *code = s[0];
        return 1;
    }
    *code = -1;
    size_t length = s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : 2;
    if (s[0] < 0xC2 || s[0] > 0xF4) return 1;
    /* The second byte's range keeps out over-long forms, surrogates, and what is above U+10FFFF. */
    unsigned char low = 0x80, high = 0xBF;
    if (s[0] == 0xE0) low = 0xA0;
    if (s[0] == 0xED) high = 0x9F;
    if (s[0] == 0xF0) low = 0x90;
    if (s[0] == 0xF4) high = 0x8F;
    int32_t value = s[0] & (0xFF >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if (i == bytes || s[i] < low || s[i] > high) return i;
        value = value << 6 | (s[i] & 0x3F);
        low = 0x80;
        high = 0xBF;
    }
    *code = value;
    return length;
}

size_t utf8_encode(int32_t code, char *to) {
    if (code < 0x80) {
        to[0] = (char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--) {
        to[i] = (char)(0x80 | (code & 0x3F));
        code >>= 6;
    }
    to[0] = (char)(0xF00 >> length | code);
    return length;
}

size_t utf8_valid_prefix(const char *text, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
        uint64_t word;
        if (at + sizeof word <= bytes) { /* eight ASCII bytes at a time */
            memcpy(&word, text + at, sizeof word);
            if ((word & UINT64_C(0x8080808080808080)) == 0) {
                at += sizeof word;
                continue;
            }
        }
        int32_t code;
        size_t length = utf8_decode(text + at, bytes - at, &code);
        if (code < 0) break;
        at += length;
    }
    return at;
}

char *utf8_repair(const char *text, size_t bytes, size_t *length, int64_t *replaced) {
    char *repaired = xmalloc(3 * (uint64_t)bytes + 1);
    size_t out = 0;
    *replaced = 0;
    for (size_t at = 0; at < bytes;) {
        size_t valid = utf8_valid_prefix(text + at, bytes - at);
        memcpy(repaired + out, text + at, valid);
        at += valid;
        out += valid;
        if (at == bytes) break;
        int32_t code;
        at += utf8_decode(text + at, bytes - at, &code);
        out += utf8_encode(0xFFFD, repaired + out);
        ++*replaced;
    }
    *length = out;
    return repaired;
}
