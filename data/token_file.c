/* token_file.c - finds the files that a path means, and reads tokens out of them.
 *
 * In: a Megatron prefix (or its .bin or .idx), an llm.c shard, or a glob of shards.
 * Out: tokens of the packed stream as int32, each checked against the vocabulary.
 * Invariants: segments follow one another without gap in the stream; descriptors stay open from open to
 * close, and reads are pread only, so that any number of threads may read at once. */
#include "data/token_file.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/types.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token files are little-endian and read as they are");

/* Tokens converted at a time: the buffer lies on the stack, since nothing may be allocated in training. */
enum { CHUNK_BYTES = 1 << 15 };

int token_type_bytes(TokenType type) {
    switch (type) {
    case TOKEN_U8:
    case TOKEN_I8: return 1;
    case TOKEN_I16:
    case TOKEN_U16: return 2;
    case TOKEN_I32:
    case TOKEN_U32: return 4;
    case TOKEN_I64: return 8;
    default: return 0;
    }
}

const char *token_type_name(TokenType type) {
    static const char *const names[] = {
        [TOKEN_U8] = "uint8",  [TOKEN_I8] = "int8",     [TOKEN_I16] = "int16",   [TOKEN_I32] = "int32",
        [TOKEN_I64] = "int64", [TOKEN_F64] = "float64", [TOKEN_F32] = "float32", [TOKEN_U16] = "uint16"};
    if (type == TOKEN_U32) return "uint32";
    return type >= TOKEN_U8 && type <= TOKEN_U16 ? names[type] : "unknown";
}

/* ---- opening ---- */

int token_file_descriptor(const char *path, Error *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == EMFILE) {
        struct rlimit limit;
        if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
            limit.rlim_cur = limit.rlim_max;
            if (setrlimit(RLIMIT_NOFILE, &limit) == 0) fd = open(path, O_RDONLY | O_CLOEXEC);
            else errno = EMFILE;
        }
    }
    if (fd < 0 && errno == EMFILE) {
        return error_set(err, EXIT_DATA,
                         "%s: too many open files: each shard stays open for the whole run; raise the "
                         "limit (`ulimit -n`) or merge shards",
                         path);
    }
    if (fd < 0) return error_set(err, EXIT_DATA, "%s: cannot open: %s", path, strerror(errno));
    return fd;
}

static bool exists(const char *path) {
    struct stat facts;
    return stat(path, &facts) == 0;
}

/* path without its last four characters where these are the suffix; else a copy. Caller frees. */
static char *without_suffix(const char *path, const char *suffix) {
    char *prefix = xstrdup(path);
    size_t length = strlen(path), tail = strlen(suffix);
    if (length > tail && strcmp(path + length - tail, suffix) == 0) prefix[length - tail] = 0;
    return prefix;
}

static TokenFile *open_pair(const char *bin_path, const char *idx_path, Error *err) {
    int bin_fd = token_file_descriptor(bin_path, err);
    if (bin_fd < 0) return NULL;
    int idx_fd = token_file_descriptor(idx_path, err);
    if (idx_fd < 0) {
        close(bin_fd);
        return NULL;
    }
    return megatron_open(bin_fd, bin_path, idx_fd, idx_path, err);
}

static TokenFile *open_glob(const char *pattern, Error *err) {
    glob_t found;
    TokenFile *file = NULL;
    int rc = glob(pattern, 0, NULL, &found); /* sorted */
    if (rc == GLOB_NOMATCH) {
        error_set(err, EXIT_DATA, "%s: no file matches", pattern);
    } else if (rc != 0) {
        error_set(err, EXIT_DATA, "%s: cannot list the files: %s", pattern, strerror(errno));
    } else if (found.gl_pathc > INT32_MAX) {
        error_set(err, EXIT_DATA, "%s: matches %zu files", pattern, found.gl_pathc);
    } else {
        file = llmc_open(found.gl_pathv, (int)found.gl_pathc, err);
    }
    if (rc == 0) globfree(&found);
    return file;
}

TokenFile *token_file_open(const char *path, Error *err) {
    char *without_idx = without_suffix(path, ".idx");
    char *prefix = without_suffix(without_idx, ".bin");
    char *bin_path = xasprintf("%s.bin", prefix), *idx_path = xasprintf("%s.idx", prefix);
    bool idx_asked = strcmp(without_idx, path) != 0;
    TokenFile *file = NULL;
    if (idx_asked || exists(idx_path)) {
        file = open_pair(bin_path, idx_path, err);
    } else if (exists(path)) {
        file = llmc_open(&(char *){(char *)path}, 1, err);
    } else if (strpbrk(path, "*?[")) {
        file = open_glob(path, err);
    } else if (exists(bin_path)) {
        file = llmc_open(&bin_path, 1, err);
    } else {
        char here[512];
        const bool relative = path[0] != '/' && getcwd(here, sizeof here);
        error_set(err, EXIT_DATA,
                  "%s: there is no such token file (looked%s%s for %s with %s, and for an llm.c shard of that name)",
                  path, relative ? " from " : "", relative ? here : "", bin_path, idx_path);
    }
    free(without_idx);
    free(prefix);
    free(bin_path);
    free(idx_path);
    return file;
}

void token_file_close(TokenFile *file) {
    if (!file) return;
    for (int i = 0; i < file->n_segments; i++) {
        close(file->segments[i].fd);
        free(file->segments[i].path);
    }
    free(file->segments);
    document_index_free(&file->documents);
    free(file);
}

int64_t token_file_tokens(const TokenFile *file) { return file->tokens; }

const char *token_file_format(const TokenFile *file) { return file->megatron ? "megatron" : "llm.c"; }

const char *token_file_type(const TokenFile *file) { return token_type_name(file->type); }

/* ---- reading ---- */

/* The segment that holds a token. */
static const TokenSegment *segment_of(const TokenFile *file, int64_t position) {
    int low = 0, high = file->n_segments - 1;
    while (low < high) { /* the last segment with first <= position; empty ones lose to the one behind them */
        int middle = low + (high - low + 1) / 2;
        if (file->segments[middle].first <= position) low = middle;
        else high = middle - 1;
    }
    return &file->segments[low];
}

#define CONVERT(type_name)                                              \
    for (int64_t i = 0; i < count; i++) {                               \
        type_name value;                                                \
        memcpy(&value, from + i * (int64_t)sizeof value, sizeof value); \
        outside |= (value < 0) | ((uint64_t)value >= (uint64_t)vocab);  \
        to[i] = (int32_t)value;                                         \
    }                                                                   \
    break
/* The same without a comparison that is always false for these types. */
#define CONVERT_UNSIGNED(type_name)                                     \
    for (int64_t i = 0; i < count; i++) {                               \
        type_name value;                                                \
        memcpy(&value, from + i * (int64_t)sizeof value, sizeof value); \
        outside |= (uint64_t)value >= (uint64_t)vocab;                  \
        to[i] = (int32_t)value;                                         \
    }                                                                   \
    break

/* Is each of count raw tokens at `from` in [0, vocab)? Written to `to` in any case. */
static bool convert(TokenType type, const char *from, int64_t count, int64_t vocab, int32_t *to) {
    unsigned outside = 0;
    switch (type) {
    case TOKEN_U8: CONVERT_UNSIGNED(uint8_t);
    case TOKEN_I8: CONVERT(int8_t);
    case TOKEN_I16: CONVERT(int16_t);
    case TOKEN_I32: CONVERT(int32_t);
    case TOKEN_I64: CONVERT(int64_t);
    case TOKEN_U16: CONVERT_UNSIGNED(uint16_t);
    case TOKEN_U32: CONVERT_UNSIGNED(uint32_t);
    default: REQUIRE(!"an integer token type");
    }
    return outside == 0;
}

/* One raw token, exactly. */
static int64_t raw_value(TokenType type, const char *from) {
    union {
        uint8_t u8;
        int8_t i8;
        int16_t i16;
        uint16_t u16;
        int32_t i32;
        uint32_t u32;
        int64_t i64;
    } v;
    memcpy(&v, from, (size_t)token_type_bytes(type));
    switch (type) {
    case TOKEN_U8: return v.u8;
    case TOKEN_I8: return v.i8;
    case TOKEN_I16: return v.i16;
    case TOKEN_U16: return v.u16;
    case TOKEN_I32: return v.i32;
    case TOKEN_U32: return v.u32;
    default: return v.i64;
    }
}

/* First token of the document of position: in llm.c files by reading backwards. */
static int64_t document_start(const TokenFile *file, int64_t position, Error *err) {
    if (file->megatron) return document_index_start(&file->documents, document_index_find(&file->documents, position));
    char raw[CHUNK_BYTES];
    int64_t width = token_type_bytes(file->type), end = position + 1;
    while (end > 0) {
        const TokenSegment *segment = segment_of(file, end - 1);
        int64_t first = max_i64(segment->first, end - CHUNK_BYTES / width);
        if (file_read_at(segment->fd, segment->path, raw, (size_t)((end - first) * width),
                         segment->header_bytes + (first - segment->first) * width, err, EXIT_DATA) != 0)
            return -1;
        for (int64_t at = end - 1; at >= first; at--) {
            if (raw_value(file->type, raw + (at - first) * width) == file->document_token) return at;
        }
        end = first;
    }
    return 0;
}

/* Says which of the tokens at stream position `first` is outside the vocabulary. Returns -1. */
static int outside_error(const TokenFile *file, const TokenSegment *segment, const char *raw, int64_t first,
                         int64_t vocab, Error *err) {
    int64_t width = token_type_bytes(file->type), i = 0, value = raw_value(file->type, raw);
    while (value >= 0 && value < vocab) value = raw_value(file->type, raw + ++i * width);
    int64_t position = first + i, start = document_start(file, position, err);
    if (start < 0) return -1;
    char document[96];
    if (file->megatron) {
        snprintf(document, sizeof document, "document %" PRId64 ", token %" PRId64 " of it",
                 document_index_find(&file->documents, position), position - start);
    } else {
        snprintf(document, sizeof document, "the document that begins at token %" PRId64 " of the stream", start);
    }
    return error_set(err, EXIT_DATA,
                     "%s: token %" PRId64 " of the file (in %s) is %" PRId64 ", outside the vocabulary "
                     "of %" PRId64 ": the file was made with another tokenizer, or model.vocab is too small",
                     segment->path, position - segment->first, document, value, vocab);
}

static int read_tokens(const TokenFile *file, int64_t first, int64_t count, int64_t vocab, int32_t *tokens,
                       Error *err) {
    char raw[CHUNK_BYTES];
    int64_t width = token_type_bytes(file->type);
    while (count > 0) {
        const TokenSegment *segment = segment_of(file, first);
        int64_t in_segment = segment->first + segment->tokens - first;
        int64_t chunk = min_i64(min_i64(count, in_segment), CHUNK_BYTES / width);
        if (file_read_at(segment->fd, segment->path, raw, (size_t)(chunk * width),
                         segment->header_bytes + (first - segment->first) * width, err, EXIT_DATA) != 0)
            return -1;
        if (!convert(file->type, raw, chunk, vocab, tokens)) {
            return outside_error(file, segment, raw, first, vocab, err);
        }
        first += chunk;
        tokens += chunk;
        count -= chunk;
    }
    return 0;
}

int token_file_read(const TokenFile *file, int64_t first, int64_t count, int64_t vocab, int32_t *tokens,
                    int64_t *doc_start, Error *err) {
    if (first < 0 || count < 0 || count > file->tokens || first > file->tokens - count) {
        return error_set(err, EXIT_DATA, "%s: %" PRId64 " tokens from %" PRId64 " on are asked for, it has %" PRId64,
                         file->segments[0].path, count, first, file->tokens);
    }
    /* Values above INT32_MAX cannot be returned, whatever the vocabulary. */
    vocab = min_i64(vocab, (int64_t)INT32_MAX + 1);
    if (read_tokens(file, first, count, vocab, tokens, err) != 0) return -1;
    if (!doc_start || count == 0) return 0;
    int64_t start = document_start(file, first, err);
    if (start < 0) return -1;
    int64_t d = file->megatron ? document_index_find(&file->documents, first) : 0;
    for (int64_t i = 0; i < count; i++) {
        if (!file->megatron) {
            if (tokens[i] == file->document_token) start = first + i;
        } else {
            while (d + 1 < file->documents.documents && document_index_start(&file->documents, d + 1) <= first + i) {
                start = document_index_start(&file->documents, ++d);
            }
        }
        doc_start[i] = start;
    }
    return 0;
}

bool token_file_begins_document(const TokenFile *file, int64_t position, int32_t token) {
    if (!file->megatron) return token == file->document_token;
    return document_index_start(&file->documents, document_index_find(&file->documents, position)) == position;
}

void token_file_window_documents(const TokenFile *file, int64_t first, int64_t count, const int32_t *tokens,
                                 int32_t *doc_start) {
    int32_t start = 0;
    if (!file->megatron) {
        for (int64_t i = 0; i < count; i++) {
            if (tokens[i] == file->document_token) start = (int32_t)i;
            doc_start[i] = start;
        }
        return;
    }
    const DocumentIndex *index = &file->documents;
    int64_t next = document_index_find(index, first) + 1, i = 0;
    while (i < count) {
        int64_t until = next < index->documents ? document_index_start(index, next++) - first : count;
        for (; i < min_i64(until, count); i++) doc_start[i] = start;
        start = (int32_t)i;
    }
}

int64_t token_file_documents(const TokenFile *file) {
    if (file->megatron) return file->documents.documents;
    int32_t tokens[4096];
    int64_t documents = 0;
    for (int64_t first = 0; first < file->tokens; first += 4096) {
        int64_t count = min_i64(4096, file->tokens - first);
        Error err;
        if (token_file_read(file, first, count, INT64_MAX, tokens, NULL, &err) != 0) return -1;
        for (int64_t i = 0; i < count; i++) documents += tokens[i] == file->document_token || first + i == 0;
    }
    return documents;
}
