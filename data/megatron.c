/* megatron.c - opens a Megatron token file: PREFIX.bin, described by PREFIX.idx.
 *
 * In: both files.  Out: a TokenFile whose document index comes from the .idx alone, never from tokens.
 * The whole .idx is checked in one pass with bounded memory: sizes, contiguity of the sequences, order of
 * the documents, and that it describes all of the .bin. All arithmetic is 64 bits, and no count is
 * multiplied before it is known to fit the file. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/file.h"
#include "base/types.h"
#include "data/token_file.h"

/*  offset  bytes
 *       0      9  magic
 *       9      8  version
 *      17      1  token type
 *      18      8  sequences N
 *      26      8  documents + 1, D
 *      34     4N  tokens of each sequence, int32
 *             8N  byte offset of each sequence, int64
 *             8D  sequences before each document, int64
 *              N  mode of each sequence, int8: multimodal files only  */
enum { HEADER_BYTES = 34, CURSOR_BYTES = 1 << 16 };
static const char magic[9] = "MMIDIDX\0"; /* the ninth byte is zero as well */

typedef struct {
    int fd;
    const char *path;
    int64_t file_bytes;
    uint8_t type;
    uint64_t version, sequences, document_entries;
    bool modes;
} Index;

/* Reads one of the arrays front to back through a small buffer, and hashes what it passes. */
typedef struct {
    const Index *index;
    int64_t offset, end;
    size_t used, filled;
    XXH3_state_t *hash;
    char buffer[CURSOR_BYTES];
} Cursor;

static void cursor_begin(Cursor *cursor, const Index *index, int64_t offset, int64_t bytes, XXH3_state_t *hash) {
    cursor->index = index;
    cursor->offset = offset;
    cursor->end = offset + bytes;
    cursor->used = cursor->filled = 0;
    cursor->hash = hash;
}

/* The next element. The buffer's size is a multiple of every element's. */
static int cursor_next(Cursor *cursor, void *to, size_t bytes, Error *err) {
    if (cursor->used == cursor->filled) {
        size_t wanted = (size_t)min_i64(CURSOR_BYTES, cursor->end - cursor->offset);
        REQUIRE(wanted >= bytes);
        if (file_read_at(cursor->index->fd, cursor->index->path, cursor->buffer, wanted, cursor->offset, err,
                         EXIT_DATA) != 0)
            return -1;
        XXH3_64bits_update(cursor->hash, cursor->buffer, wanted);
        cursor->offset += (int64_t)wanted;
        cursor->filled = wanted;
        cursor->used = 0;
    }
    memcpy(to, cursor->buffer + cursor->used, bytes);
    cursor->used += bytes;
    return 0;
}

static int read_header(Index *index, XXH3_state_t *hash, Error *err) {
    char header[HEADER_BYTES];
    const char *path = index->path;
    if (index->file_bytes < HEADER_BYTES) {
        return error_set(err, EXIT_DATA, "%s: has %" PRId64 " bytes, an index has at least %d", path, index->file_bytes,
                         HEADER_BYTES);
    }
    if (file_read_at(index->fd, path, header, sizeof header, 0, err, EXIT_DATA) != 0) return -1;
    XXH3_64bits_update(hash, header, sizeof header);
    if (memcmp(header, magic, sizeof magic) != 0) {
        return error_set(err, EXIT_DATA,
                         "%s: is not a Megatron index: it should begin with the bytes \"MMIDIDX\" and "
                         "two zeros",
                         path);
    }
    memcpy(&index->version, header + 9, 8);
    index->type = (uint8_t)header[17];
    memcpy(&index->sequences, header + 18, 8);
    memcpy(&index->document_entries, header + 26, 8);
    if (index->version != 1) {
        return error_set(err, EXIT_DATA, "%s: has version %" PRIu64 " (byte 9), version 1 is expected", path,
                         index->version);
    }
    if (token_type_bytes(index->type) == 0 || index->type > TOKEN_U16) {
        return error_set(err, EXIT_DATA,
                         "%s: has token type %d (%s, byte 17); integer types are expected: 1 uint8, "
                         "2 int8, 3 int16, 4 int32, 5 int64, 8 uint16",
                         path, index->type, token_type_name(index->type));
    }
    return 0;
}

/* The header's counts against the size of the file. */
static int check_size(Index *index, Error *err) {
    const char *path = index->path;
    uint64_t room = (uint64_t)index->file_bytes - HEADER_BYTES;
    if (index->sequences > room / 12) {
        return error_set(err, EXIT_DATA,
                         "%s: has %" PRIu64 " sequences (byte 18), but a file of %" PRId64 " bytes has "
                         "room for %" PRIu64,
                         path, index->sequences, index->file_bytes, room / 12);
    }
    if (index->document_entries < 1 || index->document_entries > room / 8) {
        return error_set(err, EXIT_DATA,
                         "%s: has %" PRIu64 " document entries (byte 26); a file of %" PRId64 " bytes "
                         "has 1 to %" PRIu64 " (one more than it has documents)",
                         path, index->document_entries, index->file_bytes, room / 8);
    }
    int64_t plain = HEADER_BYTES + 12 * (int64_t)index->sequences + 8 * (int64_t)index->document_entries;
    int64_t with_modes = plain + (int64_t)index->sequences;
    if (index->file_bytes != plain && index->file_bytes != with_modes) {
        return error_set(err, EXIT_DATA,
                         "%s: has %" PRId64 " bytes; with %" PRIu64 " sequences and %" PRIu64
                         " document entries it should have %" PRId64 " (or %" PRId64 " with sequence modes): it is "
                         "cut off or damaged",
                         path, index->file_bytes, index->sequences, index->document_entries, plain, with_modes);
    }
    index->modes = index->file_bytes != plain;
    return 0;
}

/* Document entry number `entry`, where `sequences` sequences came before: how many it says. */
static int check_document(const Index *index, uint64_t entry, int64_t says, int64_t before, Error *err) {
    int64_t last = (int64_t)index->sequences;
    if (entry == 0 && says != 0) {
        return error_set(err, EXIT_DATA, "%s: document entry 0 is %" PRId64 ", expected 0", index->path, says);
    }
    if (says < before || says > last) {
        return error_set(err, EXIT_DATA,
                         "%s: document entry %" PRIu64 " is %" PRId64 "; entries may not fall (the one "
                         "before is %" PRId64 ") nor pass the %" PRId64 " sequences",
                         index->path, entry, says, before, last);
    }
    if (entry == index->document_entries - 1 && says != last) {
        return error_set(err, EXIT_DATA,
                         "%s: the last document entry is %" PRId64 ", but there are %" PRId64 " sequences: %" PRId64
                         " of them belong to no document. Write the index again from the text, "
                         "or append %" PRId64 " as one more entry",
                         index->path, says, last, last - says, last);
    }
    return 0;
}

/* One pass over the three arrays side by side: sequence after sequence, and each document at the sequence
 * with which it begins. */
static int read_arrays(const Index *index, int64_t bin_bytes, const char *bin_path, Cursor *cursors,
                       DocumentIndex *documents, int64_t *tokens_out, Error *err) {
    Cursor *lengths = &cursors[0], *pointers = &cursors[1], *entries = &cursors[2];
    int64_t width = token_type_bytes(index->type), tokens = 0, n_added = 0, entry_value = 0, before = 0;
    uint64_t entry = 0;
    if (cursor_next(entries, &entry_value, sizeof entry_value, err) != 0) return -1;
    for (uint64_t s = 0; s <= index->sequences; s++) {
        while (entry < index->document_entries) {
            if (check_document(index, entry, entry_value, before, err) != 0) return -1;
            if (entry_value > (int64_t)s) break;
            before = entry_value;
            if (entry < index->document_entries - 1) document_index_add(documents, &n_added, tokens);
            if (++entry == index->document_entries) break;
            if (cursor_next(entries, &entry_value, sizeof entry_value, err) != 0) return -1;
        }
        if (s == index->sequences) break;
        int32_t length;
        int64_t pointer;
        if (cursor_next(lengths, &length, sizeof length, err) != 0) return -1;
        if (cursor_next(pointers, &pointer, sizeof pointer, err) != 0) return -1;
        if (length < 0) {
            return error_set(err, EXIT_DATA, "%s: sequence %" PRIu64 " has length %d", index->path, s, length);
        }
        if (pointer != tokens * width) {
            return error_set(err, EXIT_DATA,
                             "%s: sequence %" PRIu64 " begins at byte %" PRId64 " of the .bin, but the "
                             "ones before end at %" PRId64,
                             index->path, s, pointer, tokens * width);
        }
        tokens += length;
        if (tokens * width > bin_bytes) {
            return error_set(err, EXIT_DATA,
                             "%s: has %" PRId64 " bytes, but sequence %" PRIu64 " of %s ends at byte %" PRId64
                             ": the .bin is cut off, or belongs to another .idx",
                             bin_path, bin_bytes, s, index->path, tokens * width);
        }
    }
    document_index_end(documents, n_added);
    *tokens_out = tokens;
    return 0;
}

/* Modes say which sequences are not text. */
static int check_modes(const Index *index, Cursor *cursor, Error *err) {
    for (uint64_t s = 0; index->modes && s < index->sequences; s++) {
        int8_t mode;
        if (cursor_next(cursor, &mode, sizeof mode, err) != 0) return -1;
        if (mode != 0) {
            return error_set(err, EXIT_DATA,
                             "%s: is multimodal: sequence %" PRIu64 " has mode %d; only text (mode 0) can "
                             "be trained on",
                             index->path, s, mode);
        }
    }
    return 0;
}

static int read_index(Index *index, TokenFile *file, int64_t bin_bytes, const char *bin_path, Error *err) {
    XXH3_state_t *hashes[5];
    for (int i = 0; i < 5; i++) {
        hashes[i] = XXH3_createState();
        REQUIRE(hashes[i]);
        XXH3_64bits_reset(hashes[i]);
    }
    Cursor *cursors = xmalloc(4 * sizeof *cursors);
    int rc = read_header(index, hashes[0], err);
    if (rc == 0) rc = check_size(index, err);
    if (rc == 0) {
        int64_t n = (int64_t)index->sequences, d = (int64_t)index->document_entries;
        cursor_begin(&cursors[0], index, HEADER_BYTES, 4 * n, hashes[1]);
        cursor_begin(&cursors[1], index, HEADER_BYTES + 4 * n, 8 * n, hashes[2]);
        cursor_begin(&cursors[2], index, HEADER_BYTES + 12 * n, 8 * d, hashes[3]);
        cursor_begin(&cursors[3], index, HEADER_BYTES + 12 * n + 8 * d, n, hashes[4]);
        file->type = (TokenType)index->type;
        document_index_begin(&file->documents, d - 1, bin_bytes / token_type_bytes(file->type));
        rc = read_arrays(index, bin_bytes, bin_path, cursors, &file->documents, &file->tokens, err);
        if (rc == 0) rc = check_modes(index, &cursors[3], err);
    }
    int64_t described = file->tokens * token_type_bytes(file->type);
    if (rc == 0 && described != bin_bytes) {
        rc = error_set(err, EXIT_DATA,
                       "%s: has %" PRId64 " bytes, but %s describes %" PRId64 " (%" PRId64 " tokens of "
                       "type %s): the two do not belong together",
                       bin_path, bin_bytes, index->path, described, file->tokens, token_type_name(file->type));
    }
    uint64_t parts[5];
    for (int i = 0; i < 5; i++) {
        parts[i] = XXH3_64bits_digest(hashes[i]);
        XXH3_freeState(hashes[i]);
    }
    file->header_hash = XXH3_64bits(parts, sizeof parts);
    free(cursors);
    return rc;
}

TokenFile *megatron_open(int bin_fd, const char *bin_path, int idx_fd, const char *idx_path, Error *err) {
    TokenFile *file = xcalloc(1, sizeof *file);
    file->megatron = true;
    file->n_segments = 1;
    file->segments = xcalloc(1, sizeof *file->segments);
    file->segments[0] = (TokenSegment){.fd = bin_fd, .path = xstrdup(bin_path)};
    struct stat bin, idx;
    int rc = 0;
    if (fstat(bin_fd, &bin) != 0 || fstat(idx_fd, &idx) != 0) {
        rc = error_set(err, EXIT_DATA, "%s: cannot stat it or its index: %m", bin_path);
    } else if (!S_ISREG(bin.st_mode) || !S_ISREG(idx.st_mode)) {
        rc = error_set(err, EXIT_DATA, "%s: is not a regular file", S_ISREG(bin.st_mode) ? idx_path : bin_path);
    } else {
        Index index = {.fd = idx_fd, .path = idx_path, .file_bytes = idx.st_size};
        rc = read_index(&index, file, bin.st_size, bin_path, err);
        file->segments[0].tokens = file->tokens;
    }
    close(idx_fd);
    if (rc == 0) return file;
    token_file_close(file);
    return NULL;
}
