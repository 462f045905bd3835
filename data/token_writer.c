/* token_writer.c - PREFIX.bin and PREFIX.idx under temporary names, then synced and renamed.
 *
 * In: tokens, and where documents end.  Out: a pair of files that data/megatron.c reads.
 * Invariants: memory does not grow with the data (the lengths of the sequences wait in an unlinked file);
 * a reader never sees a new .bin with an old .idx, and never half a file. */
#include "data/token_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "data/token_file.h"

/* A length in the waiting file. Zero: a document without tokens. Negative: the document goes on in the
 * next sequence, since one holds at most 2^31 - 1 tokens. */
typedef int32_t LengthRecord;

struct TokenWriter {
    char *prefix, *bin_path, *idx_path, *bin_temporary, *idx_temporary, *directory;
    int bin_fd;
    FILE *lengths;
    TokenType type;
    int64_t tokens, sequences, documents;
    int64_t in_document; /* tokens of the present document not yet in a sequence */
    bool begun;          /* the present document has tokens or sequences */
    bool committed;
};

static int open_failed(const char *path, Error *err) {
    return error_set(err, EXIT_DATA, "%s: cannot create: %s", path, strerror(errno));
}

/* Opens the temporary .bin and locks it, so that two writers of one prefix do not mix. */
static int open_locked(const char *path, Error *err) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return open_failed(path, err);
    struct stat ours, named;
    /* Some network file systems have no locks; then two writers are the user's own care. */
    bool busy = flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    /* The other may have renamed the file between our open and our lock: it is not ours to truncate. */
    if (busy || fstat(fd, &ours) != 0 || stat(path, &named) != 0 || ours.st_ino != named.st_ino) {
        close(fd);
        return error_set(err, EXIT_DATA, "%s: another process is writing it", path);
    }
    if (ftruncate(fd, 0) != 0) {
        open_failed(path, err);
        close(fd);
        return -1;
    }
    return fd;
}

static FILE *open_lengths(const char *path, Error *err) {
    FILE *file = fopen(path, "w+e");
    if (!file) {
        open_failed(path, err);
        return NULL;
    }
    unlink(path);
    return file;
}

int token_writer_check_input(const TokenWriter *writer, const char *input, Error *err) {
    const char *const outputs[] = {writer->bin_path, writer->idx_path};
    struct stat in, out;
    if (stat(input, &in) != 0) return 0; /* opening it says more */
    for (int i = 0; i < 2; i++) {
        if (stat(outputs[i], &out) != 0 || out.st_dev != in.st_dev || out.st_ino != in.st_ino) continue;
        return error_set(err, EXIT_CONFIG, "%s is both an input and what is written (%s): choose another --out", input,
                         outputs[i]);
    }
    return 0;
}

/* What a signal that ends the process takes away. */
static const char *volatile temporaries[2];

static void remove_temporaries(int signal_number) {
    for (int i = 0; i < 2; i++) {
        if (temporaries[i]) unlink(temporaries[i]);
    }
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void guard_temporaries(const char *bin, const char *idx) {
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
    temporaries[0] = bin;
    temporaries[1] = idx;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        struct sigaction action = {.sa_handler = bin ? remove_temporaries : SIG_DFL}, before;
        sigaction(ends[i], NULL, &before);
        if (before.sa_handler != SIG_IGN) sigaction(ends[i], &action, NULL);
    }
}

TokenWriter *token_writer_open(const char *prefix, int64_t vocab, Error *err) {
    TokenWriter *writer = xcalloc(1, sizeof *writer);
    writer->bin_fd = -1;
    writer->prefix = xstrdup(prefix);
    size_t length = strlen(prefix);
    if (length > 4 && (strcmp(prefix + length - 4, ".bin") == 0 || strcmp(prefix + length - 4, ".idx") == 0)) {
        writer->prefix[length - 4] = 0;
    }
    writer->type = vocab <= 65536 ? TOKEN_U16 : TOKEN_I32;
    writer->bin_path = xasprintf("%s.bin", writer->prefix);
    writer->idx_path = xasprintf("%s.idx", writer->prefix);
    writer->bin_temporary = xasprintf("%s.bin.tmp", writer->prefix);
    writer->idx_temporary = xasprintf("%s.idx.tmp", writer->prefix);
    const char *slash = strrchr(writer->prefix, '/');
    writer->directory = slash ? strndup(writer->prefix, (size_t)(slash - writer->prefix) + 1) : xstrdup(".");
    if (directory_make(writer->directory, err, EXIT_DATA) == 0 &&
        (writer->bin_fd = open_locked(writer->bin_temporary, err)) >= 0 &&
        (writer->lengths = open_lengths(writer->idx_temporary, err)) != NULL) {
        guard_temporaries(writer->bin_temporary, writer->idx_temporary);
        return writer;
    }
    token_writer_close(writer);
    return NULL;
}

int token_writer_width(const TokenWriter *writer) { return token_type_bytes(writer->type); }

int64_t token_writer_total(const TokenWriter *writer, int64_t *documents) {
    *documents = writer->documents;
    return writer->tokens;
}

const char *token_writer_prefix(const TokenWriter *writer) { return writer->prefix; }

int token_writer_tokens(TokenWriter *writer, const void *tokens, int64_t count, Error *err) {
    writer->tokens += count;
    return file_write_all(writer->bin_fd, writer->bin_temporary, tokens, (size_t)(count * token_writer_width(writer)),
                          err, EXIT_DATA);
}

static int index_write(FILE *file, const char *path, const void *from, size_t bytes, Error *err) {
    if (fwrite(from, 1, bytes, file) == bytes) return 0;
    return error_set(err, EXIT_DATA, "%s: cannot write: %s", path, strerror(errno));
}

static int put_length(TokenWriter *writer, LengthRecord record, Error *err) {
    writer->sequences += record != 0;
    return index_write(writer->lengths, writer->idx_temporary, &record, sizeof record, err);
}

int token_writer_document(TokenWriter *writer, int64_t count, bool ends, Error *err) {
    writer->in_document += count;
    for (; writer->in_document > INT32_MAX; writer->in_document -= INT32_MAX) {
        if (put_length(writer, -INT32_MAX, err) != 0) return -1;
    }
    if (!ends) return 0;
    if (put_length(writer, (LengthRecord)writer->in_document, err) != 0) return -1;
    writer->in_document = 0;
    writer->documents++;
    return 0;
}

/* ---- the index ---- */

typedef enum { PART_LENGTHS, PART_POINTERS, PART_DOCUMENTS } IndexPart;

/* One pass over the waiting lengths for one of the three arrays. */
static int write_part(TokenWriter *writer, FILE *index, IndexPart part, Error *err) {
    LengthRecord record;
    int64_t pointer = 0, sequences = 0;
    rewind(writer->lengths);
    if (part == PART_DOCUMENTS && index_write(index, writer->idx_temporary, &sequences, sizeof sequences, err) != 0) {
        return -1;
    }
    while (fread(&record, sizeof record, 1, writer->lengths) == 1) {
        int32_t length = record < 0 ? -record : record;
        int rc = 0;
        if (part == PART_LENGTHS && record != 0) {
            rc = index_write(index, writer->idx_temporary, &length, sizeof length, err);
        } else if (part == PART_POINTERS && record != 0) {
            rc = index_write(index, writer->idx_temporary, &pointer, sizeof pointer, err);
        }
        pointer += (int64_t)length * token_writer_width(writer);
        sequences += record != 0;
        if (part == PART_DOCUMENTS && record >= 0) {
            rc = index_write(index, writer->idx_temporary, &sequences, sizeof sequences, err);
        }
        if (rc != 0) return -1;
    }
    if (ferror(writer->lengths)) {
        return error_set(err, EXIT_DATA, "%s: cannot read back: %s", writer->idx_temporary, strerror(errno));
    }
    return 0;
}

static int write_index(TokenWriter *writer, Error *err) {
    if (fflush(writer->lengths) != 0) {
        return error_set(err, EXIT_DATA, "%s: cannot write: %s", writer->idx_temporary, strerror(errno));
    }
    FILE *index = fopen(writer->idx_temporary, "we");
    if (!index) return open_failed(writer->idx_temporary, err);
    uint64_t version = 1, sequences = (uint64_t)writer->sequences, entries = (uint64_t)writer->documents + 1;
    char header[34] = "MMIDIDX\0"; /* the ninth byte is zero as well */
    memcpy(header + 9, &version, 8);
    header[17] = (char)writer->type;
    memcpy(header + 18, &sequences, 8);
    memcpy(header + 26, &entries, 8);
    int rc = index_write(index, writer->idx_temporary, header, sizeof header, err);
    for (IndexPart part = PART_LENGTHS; rc == 0 && part <= PART_DOCUMENTS; part++) {
        rc = write_part(writer, index, part, err);
    }
    if (rc == 0 && (fflush(index) != 0 || file_sync(fileno(index)) != 0)) {
        rc = error_set(err, EXIT_DATA, "%s: cannot write: %s", writer->idx_temporary, strerror(errno));
    }
    if (fclose(index) != 0 && rc == 0) {
        rc = error_set(err, EXIT_DATA, "%s: cannot close: %s", writer->idx_temporary, strerror(errno));
    }
    return rc;
}

int token_writer_commit(TokenWriter *writer, Error *err) {
    REQUIRE(!writer->committed && writer->in_document == 0);
    if (write_index(writer, err) != 0) return -1;
    if (file_sync(writer->bin_fd) != 0) {
        return error_set(err, EXIT_DATA, "%s: cannot sync: %s", writer->bin_temporary, strerror(errno));
    }
    /* An old index must not describe the new tokens, not even for a moment. */
    if (unlink(writer->idx_path) != 0 && errno != ENOENT) {
        return error_set(err, EXIT_DATA, "%s: cannot replace: %s", writer->idx_path, strerror(errno));
    }
    if (rename(writer->bin_temporary, writer->bin_path) != 0) {
        return error_set(err, EXIT_DATA, "%s: cannot rename to %s: %s", writer->bin_temporary, writer->bin_path,
                         strerror(errno));
    }
    if (rename(writer->idx_temporary, writer->idx_path) != 0) {
        return error_set(err, EXIT_DATA, "%s: cannot rename to %s: %s", writer->idx_temporary, writer->idx_path,
                         strerror(errno));
    }
    writer->committed = true;
    return directory_sync(writer->directory, err, EXIT_DATA);
}

void token_writer_close(TokenWriter *writer) {
    if (!writer) return;
    guard_temporaries(NULL, NULL);
    if (writer->bin_fd >= 0 && !writer->committed) {
        unlink(writer->bin_temporary);
        unlink(writer->idx_temporary);
    }
    if (writer->lengths) fclose(writer->lengths);
    if (writer->bin_fd >= 0) close(writer->bin_fd);
    free(writer->prefix);
    free(writer->bin_path);
    free(writer->idx_path);
    free(writer->bin_temporary);
    free(writer->idx_temporary);
    free(writer->directory);
    free(writer);
}
