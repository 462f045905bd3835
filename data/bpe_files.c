/* bpe_files.c - reads GPT-2's vocab.json and merges.txt into the tables that encoding uses.
 *
 * In: the text of both.  Out: a Bpe.
 * Invariants: ids are 0 .. vocab - 1, each once; all 256 bytes have a token; each merge's parts and result are
 * tokens, and no merge makes the end-of-document token, so text never does either. */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "data/bpe.h"
#include "data/utf8.h"

/* Names under which vocabularies hold the token that ends a document, in order of preference. */
static const char *const end_names[] = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"};

/* White space as Unicode has it; PCRE2's own \s takes U+180E as well, which lost that property. */
#define SPACES "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"

const char *bpe_pattern(void) {
    return "'(?:[sdmt]|ll|ve|re)| ?\\p{L}++| ?\\p{N}++| ?[^" SPACES "\\p{L}\\p{N}]++|[" SPACES "]+(?![^" SPACES
           "])|[" SPACES "]++";
}

/* ---- the byte alphabet: each byte has a printable character ---- */

static bool byte_is_printable(int byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

/* byte_of[code]: the byte of a character below U+0144, or -1. */
enum { ALPHABET_END = 0x144 };
static void make_alphabet(int *byte_of) {
    for (int code = 0; code < ALPHABET_END; code++) byte_of[code] = code < 256 && byte_is_printable(code) ? code : -1;
    int next = 0x100;
    for (int byte = 0; byte < 256; byte++) {
        if (!byte_is_printable(byte)) byte_of[next++] = byte;
    }
}

/* The bytes that a token's text stands for. Returns how many; -1 with err. */
static int64_t token_bytes(const int *byte_of, const char *text, size_t length, char *bytes, const char *name,
                           Error *err) {
    int64_t n = 0;
    for (size_t at = 0; at < length;) {
        int32_t code;
        at += utf8_decode(text + at, length - at, &code);
        if (code < 0 || code >= ALPHABET_END || byte_of[code] < 0) {
            return error_set(err, EXIT_DATA,
                             "%s: token \"%.80s\" has the character U+%04X, which stands for no byte: is this "
                             "the vocabulary of a byte-level BPE?",
                             name, text, (unsigned)code);
        }
        bytes[n++] = (char)byte_of[code];
    }
    if (n == 0) return error_set(err, EXIT_DATA, "%s: has an empty token", name);
    return n;
}

/* ---- vocab.json ---- */

/* Fills text_of[id] and length_of[id] from the object, and checks the ids. */
static int order_tokens(json_t *object, int64_t vocab, const char **text_of, size_t *length_of, const char *name,
                        Error *err) {
    const char *text;
    size_t length;
    json_t *value;
    json_object_keylen_foreach(object, text, length, value) {
        if (!json_is_integer(value)) {
            return error_set(err, EXIT_DATA, "%s: the id of token \"%.80s\" is not a whole number", name, text);
        }
        int64_t id = json_integer_value(value);
        if (id < 0 || id >= vocab) {
            return error_set(err, EXIT_DATA,
                             "%s: token \"%.80s\" has id %" PRId64 "; with %" PRId64 " tokens, ids are 0 to %" PRId64,
                             name, text, id, vocab, vocab - 1);
        }
        if (text_of[id]) {
            return error_set(err, EXIT_DATA, "%s: tokens \"%.80s\" and \"%.80s\" both have id %" PRId64, name,
                             text_of[id], text, id);
        }
        text_of[id] = text;
        length_of[id] = length;
    }
    return 0;
}

static int find_end_of_document(Bpe *bpe, json_t *object, const char *name, Error *err) {
    for (size_t i = 0; i < sizeof end_names / sizeof *end_names; i++) {
        json_t *id = json_object_get(object, end_names[i]);
        if (!id) continue;
        bpe->end_of_document = (int32_t)json_integer_value(id);
        return 0;
    }
    return error_set(err, EXIT_DATA, "%s: has no token that ends a document (looked for %s, %s, %s, %s)", name,
                     end_names[0], end_names[1], end_names[2], end_names[3]);
}

static int fill_tokens(Bpe *bpe, const char **text_of, const size_t *length_of, const char *name, Error *err) {
    int byte_of[ALPHABET_END];
    make_alphabet(byte_of);
    size_t room = 0;
    for (int32_t id = 0; id < bpe->vocab; id++) room += length_of[id];
    bpe->token_text = xmalloc(room);
    bpe->token_offset = xmalloc((uint64_t)(bpe->vocab + 1) * sizeof *bpe->token_offset);
    size_t at = 0;
    for (int byte = 0; byte < 256; byte++) bpe->byte_id[byte] = -1;
    for (int32_t id = 0; id < bpe->vocab; id++) {
        bpe->token_offset[id] = at;
        int64_t n = token_bytes(byte_of, text_of[id], length_of[id], bpe->token_text + at, name, err);
        if (n < 0) return -1;
        if (n == 1 && id != bpe->end_of_document) bpe->byte_id[(unsigned char)bpe->token_text[at]] = id;
        at += (size_t)n;
    }
    bpe->token_offset[bpe->vocab] = at;
    for (int byte = 0; byte < 256; byte++) {
        if (bpe->byte_id[byte] < 0) {
            return error_set(err, EXIT_DATA, "%s: byte 0x%02X has no token: a byte-level BPE has one for each", name,
                             byte);
        }
    }
    return 0;
}

static int parse_vocab(Bpe *bpe, json_t *object, const char *name, Error *err) {
    if (!json_is_object(object)) {
        return error_set(err, EXIT_DATA, "%s: should be one JSON object of tokens and ids", name);
    }
    size_t vocab = json_object_size(object);
    if (vocab < 257 || vocab > INT32_MAX / 2) {
        return error_set(err, EXIT_DATA,
                         "%s: has %zu tokens; a byte-level BPE has at least 257: the bytes and the end of a "
                         "document",
                         name, vocab);
    }
    bpe->vocab = (int32_t)vocab;
    const char **text_of = xcalloc(vocab, sizeof *text_of);
    size_t *length_of = xcalloc(vocab, sizeof *length_of);
    int rc = order_tokens(object, bpe->vocab, text_of, length_of, name, err);
    if (rc == 0) rc = find_end_of_document(bpe, object, name, err);
    if (rc == 0) rc = fill_tokens(bpe, text_of, length_of, name, err);
    free(text_of);
    free(length_of);
    return rc;
}

/* ---- merges.txt ---- */

static uint64_t merge_slot(const Bpe *bpe, uint64_t pair) {
    uint64_t hash = pair * UINT64_C(0x9E3779B97F4A7C15);
    uint64_t slot = (hash ^ hash >> 32) & bpe->merge_mask;
    while (bpe->merges[slot].pair != pair && bpe->merges[slot].pair != BPE_NO_PAIR) slot = (slot + 1) & bpe->merge_mask;
    return slot;
}

const BpeMerge *bpe_merge(const Bpe *bpe, int32_t left, int32_t right) {
    const BpeMerge *merge = &bpe->merges[merge_slot(bpe, (uint64_t)left << 32 | (uint32_t)right)];
    return merge->pair == BPE_NO_PAIR ? NULL : merge;
}

/* The id of a token's text, or -1. */
static int32_t id_of(json_t *vocab, const char *text, size_t length) {
    json_t *id = json_object_getn(vocab, text, length);
    return id ? (int32_t)json_integer_value(id) : -1;
}

/* One line "A B", of rank `rank`. */
static int parse_merge(Bpe *bpe, json_t *vocab, const char *line, size_t length, int32_t rank, char *scratch,
                       const char *where, Error *err) {
    const char *space = memchr(line, ' ', length);
    size_t left_length = space ? (size_t)(space - line) : 0, right_length = space ? length - left_length - 1 : 0;
    if (left_length == 0 || right_length == 0 || memchr(space + 1, ' ', right_length)) {
        return error_set(err, EXIT_DATA, "%s: a merge is two tokens with one space between, not \"%.*s\"", where,
                         (int)(length < 80 ? length : 80), line);
    }
    memcpy(scratch, line, left_length);
    memcpy(scratch + left_length, space + 1, right_length);
    const char *texts[3] = {line, space + 1, scratch};
    size_t lengths[3] = {left_length, right_length, left_length + right_length};
    int32_t ids[3];
    for (int i = 0; i < 3; i++) {
        ids[i] = id_of(vocab, texts[i], lengths[i]);
        if (ids[i] >= 0) continue;
        return error_set(err, EXIT_DATA, "%s: \"%.*s\" is not in the vocabulary: the two files do not belong together",
                         where, (int)(lengths[i] < 80 ? lengths[i] : 80), texts[i]);
    }
    if (ids[2] == bpe->end_of_document) {
        return error_set(err, EXIT_DATA, "%s: this merge makes the token that ends a document out of text", where);
    }
    uint64_t pair = (uint64_t)ids[0] << 32 | (uint32_t)ids[1];
    BpeMerge *merge = &bpe->merges[merge_slot(bpe, pair)];
    if (merge->pair == pair) {
        return error_set(err, EXIT_DATA, "%s: the same merge as merge %d, counted from 0", where, merge->rank);
    }
    *merge = (BpeMerge){.pair = pair, .rank = rank, .result = ids[2]};
    return 0;
}

static int64_t count_lines(const char *text, size_t bytes) {
    int64_t lines = 1;
    for (const char *p = text; (p = memchr(p, '\n', (size_t)(text + bytes - p))); p++) lines++;
    return lines;
}

static int parse_merges(Bpe *bpe, json_t *vocab, const char *text, size_t bytes, const char *name, Error *err) {
    uint64_t slots = 16;
    while (slots < 2 * (uint64_t)count_lines(text, bytes)) slots *= 2;
    bpe->merge_mask = slots - 1;
    bpe->merges = xmalloc(slots * sizeof *bpe->merges);
    for (uint64_t i = 0; i < slots; i++) bpe->merges[i].pair = BPE_NO_PAIR;
    char *scratch = xmalloc(bytes);
    int32_t rank = 0;
    int64_t number = 1;
    int rc = 0;
    for (size_t at = 0; rc == 0 && at < bytes; number++) {
        const char *line = text + at, *end = memchr(line, '\n', bytes - at);
        size_t length = end ? (size_t)(end - line) : bytes - at;
        at += length + 1;
        if (length > 0 && line[length - 1] == '\r') length--;
        if (number == 1 && length >= 8 && memcmp(line, "#version", 8) == 0) continue;
        if (length == 0 && at >= bytes) continue; /* an empty last line */
        char where[512];
        snprintf(where, sizeof where, "%.400s:%" PRId64, name, number);
        rc = parse_merge(bpe, vocab, line, length, rank++, scratch, where, err);
    }
    free(scratch);
    if (rc == 0 && rank == 0) rc = error_set(err, EXIT_DATA, "%s: has no merges", name);
    return rc;
}

/* ---- */

static void *compile(const char *pattern) {
    int code;
    size_t offset;
    pcre2_code *compiled = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                         PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &code, &offset, NULL);
    if (!compiled) die(EXIT_INTERNAL, "PCRE2 refuses a pattern at character %zu (error %d): %s", offset, code, pattern);
    /* Where no code can be made at run time (hardened systems), PCRE2 interprets the pattern. */
    pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);
    return compiled;
}

Bpe *bpe_parse(const char *vocab_text, size_t vocab_bytes, const char *vocab_name, const char *merges_text,
               size_t merges_bytes, const char *merges_name, Error *err) {
    json_error_t where;
    json_t *vocab = json_loadb(vocab_text, vocab_bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &where);
    if (!vocab) {
        error_set(err, EXIT_DATA, "%s:%d: column %d: not valid JSON: %s", vocab_name, where.line, where.column,
                  where.text);
        return NULL;
    }
    Bpe *bpe = xcalloc(1, sizeof *bpe);
    int rc = parse_vocab(bpe, vocab, vocab_name, err);
    if (rc == 0) rc = parse_merges(bpe, vocab, merges_text, merges_bytes, merges_name, err);
    json_decref(vocab);
    if (rc != 0) {
        bpe_free(bpe);
        return NULL;
    }
    bpe->pattern = compile(bpe_pattern());
    bpe->letter = compile("\\p{L}");
    bpe->number = compile("\\p{N}");
    return bpe;
}

void bpe_free(Bpe *bpe) {
    if (!bpe) return;
    pcre2_code_free(bpe->pattern);
    pcre2_code_free(bpe->letter);
    pcre2_code_free(bpe->number);
    free(bpe->token_text);
    free(bpe->token_offset);
    free(bpe->merges);
    free(bpe);
}
