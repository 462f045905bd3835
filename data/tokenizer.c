/* tokenizer.c - opens a tokenizer, and the operations that both kinds share.
 *
 * In: "bytes", or where GPT-2's two files lie.  Out: ids for text, bytes for ids.
 * Invariant: a Tokenizer does not change after it was opened, so any number of threads may use it. */
#include "data/tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "data/encoder.h"

enum { BYTES_VOCAB = 257, BYTES_END = 256 };
/* The largest vocabularies in use have files of some ten megabytes. */
static const size_t FILE_LIMIT_BYTES = 256u << 20;

struct Tokenizer {
    Bpe *bpe; /* NULL: bytes */
    char byte_text[256];
};

static bool is_file(const char *path) {
    struct stat facts;
    return stat(path, &facts) == 0 && S_ISREG(facts.st_mode);
}

/* The first of two names that is a file in the directory, else the first. Caller frees. */
static char *pick(const char *directory, const char *name, const char *other_name) {
    char *path = xasprintf("%s/%s", directory, name), *other = xasprintf("%s/%s", directory, other_name);
    if (!is_file(path) && is_file(other)) {
        free(path);
        return other;
    }
    free(other);
    return path;
}

static bool ends_with(const char *text, const char *tail) {
    size_t length = strlen(text), tail_length = strlen(tail);
    return length >= tail_length && strcmp(text + length - tail_length, tail) == 0;
}

/* The directory that spec means, or NULL with err. Caller frees. */
static char *directory_of(const char *spec, Error *err) {
    struct stat facts;
    if (stat(spec, &facts) != 0) {
        error_set(err, EXIT_DATA,
                  "tokenizer %s: there is no such file or directory; give \"bytes\", or a directory with "
                  "vocab.json and merges.txt of a GPT-2 tokenizer",
                  spec);
        return NULL;
    }
    if (S_ISDIR(facts.st_mode)) return xstrdup(spec);
    static const char *const names[] = {"vocab.json", "merges.txt", "encoder.json", "vocab.bpe"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (!ends_with(spec, names[i])) continue;
        const char *slash = strrchr(spec, '/');
        if (strcmp(slash ? slash + 1 : spec, names[i]) != 0) continue;
        return slash ? strndup(spec, (size_t)(slash == spec ? 1 : slash - spec)) : xstrdup(".");
    }
    error_set(err, EXIT_DATA,
              "tokenizer %s: is neither a directory nor one of vocab.json and merges.txt; other kinds of "
              "tokenizer files are not read",
              spec);
    return NULL;
}

static Bpe *open_bpe(const char *spec, Error *err) {
    char *directory = directory_of(spec, err);
    if (!directory) return NULL;
    char *vocab_path = pick(directory, "vocab.json", "encoder.json");
    char *merges_path = pick(directory, "merges.txt", "vocab.bpe");
    size_t vocab_bytes = 0, merges_bytes = 0;
    char *vocab = file_read(vocab_path, &vocab_bytes, FILE_LIMIT_BYTES, err, EXIT_DATA);
    char *merges = vocab ? file_read(merges_path, &merges_bytes, FILE_LIMIT_BYTES, err, EXIT_DATA) : NULL;
    Bpe *bpe = merges ? bpe_parse(vocab, vocab_bytes, vocab_path, merges, merges_bytes, merges_path, err) : NULL;
    free(directory);
    free(vocab_path);
    free(merges_path);
    free(vocab);
    free(merges);
    return bpe;
}

Tokenizer *tokenizer_open(const char *spec, Error *err) {
    Bpe *bpe = NULL;
    if (strcmp(spec, "bytes") != 0) {
        bpe = open_bpe(spec, err);
        if (!bpe) return NULL;
    }
    Tokenizer *tokenizer = xcalloc(1, sizeof *tokenizer);
    tokenizer->bpe = bpe;
    for (int byte = 0; byte < 256; byte++) tokenizer->byte_text[byte] = (char)byte;
    return tokenizer;
}

void tokenizer_close(Tokenizer *tokenizer) {
    if (!tokenizer) return;
    bpe_free(tokenizer->bpe);
    free(tokenizer);
}

int64_t tokenizer_vocab(const Tokenizer *tokenizer) { return tokenizer->bpe ? tokenizer->bpe->vocab : BYTES_VOCAB; }

int32_t tokenizer_end_of_document(const Tokenizer *tokenizer) {
    return tokenizer->bpe ? tokenizer->bpe->end_of_document : BYTES_END;
}

const char *tokenizer_token(const Tokenizer *tokenizer, int32_t id, size_t *bytes) {
    REQUIRE(id >= 0 && id < tokenizer_vocab(tokenizer));
    *bytes = 0;
    if (id == tokenizer_end_of_document(tokenizer)) return "";
    if (!tokenizer->bpe) {
        *bytes = 1;
        return &tokenizer->byte_text[id];
    }
    *bytes = tokenizer->bpe->token_offset[id + 1] - tokenizer->bpe->token_offset[id];
    return tokenizer->bpe->token_text + tokenizer->bpe->token_offset[id];
}

/* ---- encoding ---- */

void encoder_init(Encoder *encoder, const Tokenizer *tokenizer) {
    encoder->bpe = tokenizer->bpe ? bpe_encoder_create(tokenizer->bpe) : NULL;
}

void encoder_end(Encoder *encoder) { bpe_encoder_free(encoder->bpe); }

int64_t encoder_repaired(const Encoder *encoder) { return encoder->bpe ? bpe_encoder_repaired(encoder->bpe) : 0; }

void encoder_encode(Encoder *encoder, const char *text, size_t bytes, int32_t **ids, int64_t *n, int64_t *capacity) {
    if (bytes == 0) return;
    if (encoder->bpe) {
        bpe_encode(encoder->bpe, text, bytes, ids, n, capacity);
        return;
    }
    if (*n + (int64_t)bytes > *capacity) {
        *capacity = *n + (int64_t)bytes + *capacity / 2;
        *ids = xrealloc(*ids, (uint64_t)*capacity * sizeof **ids);
    }
    int32_t *to = *ids + *n;
    for (size_t i = 0; i < bytes; i++) to[i] = (unsigned char)text[i];
    *n += (int64_t)bytes;
}

size_t encoder_safe_cut(Encoder *encoder, const char *text, size_t bytes) {
    return encoder->bpe ? bpe_safe_cut(encoder->bpe, text, bytes) : bytes;
}

void tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t bytes, int32_t **ids, int64_t *n,
                      int64_t *capacity) {
    Encoder encoder;
    encoder_init(&encoder, tokenizer);
    encoder_encode(&encoder, text, bytes, ids, n, capacity);
    encoder_end(&encoder);
}
