/* llmc.c - opens the token shards of llm.c: 256 int32 of header, then 16-bit or 32-bit tokens.
 *
 * In: one or more shards, in order.  Out: a TokenFile that reads them as one packed stream; documents
 * begin with the end-of-text token and may run across shards.
 * Invariant: all shards have the same kind, so one document token and one width. */
#include <inttypes.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/file.h"
#include "data/token_file.h"

enum { HEADER_INTS = 256, HEADER_BYTES = 4 * HEADER_INTS };

typedef struct {
    int32_t magic, version;
    TokenType type;
    int32_t document_token;
    const char *name;
} ShardKind;

static const ShardKind kinds[] = {
    {20240520, 1, TOKEN_U16, 50256, "GPT-2"},
    {20240801, 7, TOKEN_U32, 128000, "LLaMA-3"},
};

/* The kind of a header, or NULL with err. */
static const ShardKind *kind_of(const int32_t *header, const char *path, Error *err) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (header[0] != kinds[i].magic) continue;
        if (header[1] == kinds[i].version) return &kinds[i];
        error_set(err, EXIT_DATA, "%s: has version %d (byte 4), %s token shards have version %d", path, header[1],
                  kinds[i].name, kinds[i].version);
        return NULL;
    }
    const char *hint = header[0] == 20240522                            ? " (an llm.c evaluation file)"
                       : header[0] == 20240326 || header[0] == 20240803 ? " (llm.c model weights)"
                                                                        : "";
    error_set(err, EXIT_DATA,
              "%s: is not a token file: it begins with %d%s; llm.c shards begin with %d (GPT-2) or %d "
              "(LLaMA-3), and a Megatron .bin needs its .idx beside it. Make token files from text with `trident "
              "tokenize`",
              path, header[0], hint, kinds[0].magic, kinds[1].magic);
    return NULL;
}

static int check_shard(const int32_t *header, const ShardKind *kind, int64_t bytes, const char *path, Error *err) {
    if (header[2] < 0) {
        return error_set(err, EXIT_DATA, "%s: has %d tokens (byte 8)", path, header[2]);
    }
    int64_t expected = HEADER_BYTES + (int64_t)header[2] * token_type_bytes(kind->type);
    if (bytes != expected) {
        return error_set(err, EXIT_DATA,
                         "%s: has %" PRId64 " bytes; with %d tokens (byte 8) it should have %" PRId64
                         ": it is cut off or damaged",
                         path, bytes, header[2], expected);
    }
    return 0;
}

TokenFile *llmc_append(TokenFile *previous, int fd, const char *path, Error *err) {
    int32_t header[HEADER_INTS];
    struct stat facts;
    int rc = 0;
    const ShardKind *kind = NULL;
    if (fstat(fd, &facts) != 0) {
        rc = error_set(err, EXIT_DATA, "%s: cannot stat: %m", path);
    } else if (!S_ISREG(facts.st_mode)) {
        rc = error_set(err, EXIT_DATA, "%s: is not a regular file", path);
    } else if (facts.st_size < HEADER_BYTES) {
        rc = error_set(err, EXIT_DATA,
                       "%s: has %" PRId64 " bytes: too short for a token file (a shard of llm.c has "
                       "a header of %d bytes, a Megatron .bin has its .idx beside it)",
                       path, (int64_t)facts.st_size, HEADER_BYTES);
    } else {
        rc = file_read_at(fd, path, header, sizeof header, 0, err, EXIT_DATA);
    }
    if (rc == 0) kind = kind_of(header, path, err);
    if (rc == 0 && !kind) rc = -1;
    if (rc == 0) rc = check_shard(header, kind, facts.st_size, path, err);
    if (rc == 0 && previous && previous->type != kind->type) {
        rc = error_set(err, EXIT_DATA,
                       "%s: has tokens of type %s, but %s before it has %s: one corpus has one kind of "
                       "shards",
                       path, token_type_name(kind->type), previous->segments[0].path, token_type_name(previous->type));
    }
    if (rc != 0) {
        close(fd);
        token_file_close(previous);
        return NULL;
    }
    TokenFile *file = previous;
    if (!file) {
        file = xcalloc(1, sizeof *file);
        file->type = kind->type;
        file->document_token = kind->document_token;
    }
    file->segments = xrealloc(file->segments, (uint64_t)(file->n_segments + 1) * sizeof *file->segments);
    file->segments[file->n_segments++] = (TokenSegment){
        .fd = fd, .path = xstrdup(path), .header_bytes = HEADER_BYTES, .first = file->tokens, .tokens = header[2]};
    file->tokens += header[2];
    file->header_hash = XXH3_64bits_withSeed(header, sizeof header, file->header_hash);
    return file;
}

TokenFile *llmc_open(char *const *paths, int n_paths, Error *err) {
    TokenFile *file = NULL;
    for (int i = 0; i < n_paths; i++) {
        int fd = token_file_descriptor(paths[i], err);
        if (fd < 0) {
            token_file_close(file);
            return NULL;
        }
        file = llmc_append(file, fd, paths[i], err);
        if (!file) return NULL;
    }
    return file;
}
