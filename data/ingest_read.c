/* ingest_read.c - cuts the inputs of `trident tokenize` into jobs.
 *
 * In: plain text and JSONL files.  Out: jobs of about a megabyte, in order.
 * Invariants: memory is bounded whatever the length of a line or document; plain text is cut only where no
 * token changes by it (a stretch of 4 MB without such a place is cut with a warning); JSONL is cut at
 * line ends; a job holds text of one input only. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/types.h"
#include "data/ingest.h"

enum { UNCUT_LIMIT = 4 << 20 };
/* One JSON line must be held and parsed whole. */
static const size_t LINE_LIMIT = 256u << 20;

struct Reader {
    char *const *paths;
    int n_paths, next_path;
    const char *document_line;
    Encoder encoder; /* for safe cuts */
    int64_t total_bytes;
    /* the present input */
    int fd; /* -1: none */
    const char *path;
    bool jsonl, end_of_file;
    char *buffer; /* what was read and is not yet in a job */
    size_t filled, room;
    int64_t offset, line; /* of the buffer's first byte in the input */
    bool at_line_start, document_begun, warned;
    int64_t separators; /* document lines seen in all inputs */
};

static bool is_jsonl(const char *path) {
    size_t length = strlen(path);
    return length > 6 && strcmp(path + length - 6, ".jsonl") == 0;
}

/* Opens a path for reading, and adds its size to *total. */
static int open_input(const char *path, int64_t *total, Error *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return error_set(err, EXIT_DATA, "%s: cannot open: %s", path, strerror(errno));
    struct stat facts;
    if (fstat(fd, &facts) != 0 || S_ISDIR(facts.st_mode)) {
        close(fd);
        return error_set(err, EXIT_DATA, "%s: is a directory; name the text files in it", path);
    }
    if (!S_ISREG(facts.st_mode)) *total = -1;
    if (*total >= 0) *total += facts.st_size;
    return fd;
}

/* A pipe can be opened once only, so that its turn comes later. */
static bool is_regular(const char *path) {
    struct stat facts;
    return stat(path, &facts) != 0 || S_ISREG(facts.st_mode) || S_ISDIR(facts.st_mode);
}

Reader *reader_open(char *const *paths, int n_paths, const char *document_line, const Tokenizer *tokenizer,
                    Error *err) {
    Reader *reader = xcalloc(1, sizeof *reader);
    *reader = (Reader){.paths = paths, .n_paths = n_paths, .document_line = document_line, .fd = -1};
    encoder_init(&reader->encoder, tokenizer);
    for (int i = 0; i < n_paths; i++) {
        if (!is_regular(paths[i])) {
            reader->total_bytes = -1;
            continue;
        }
        int fd = open_input(paths[i], &reader->total_bytes, err);
        if (fd < 0) {
            reader_close(reader);
            return NULL;
        }
        close(fd);
    }
    return reader;
}

int64_t reader_separators(const Reader *reader) { return reader->separators; }

int64_t reader_total_bytes(const Reader *reader) { return reader->total_bytes; }

void reader_close(Reader *reader) {
    if (!reader) return;
    if (reader->fd >= 0) close(reader->fd);
    encoder_end(&reader->encoder);
    free(reader->buffer);
    free(reader);
}

/* ---- the buffer ---- */

/* Reads until it holds `bytes`, or the input ends. */
static int fill(Reader *reader, size_t bytes, Error *err) {
    if (bytes > reader->room) {
        reader->room = bytes;
        reader->buffer = xrealloc(reader->buffer, bytes);
    }
    while (reader->filled < bytes && !reader->end_of_file) {
        ssize_t n = read(reader->fd, reader->buffer + reader->filled, bytes - reader->filled);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return error_set(err, EXIT_DATA, "%s: cannot read: %s", reader->path, strerror(errno));
        reader->end_of_file = n == 0;
        reader->filled += (size_t)n;
    }
    return 0;
}

/* Drops the buffer's first bytes, which are in a job now (or were a separator). */
static void consume(Reader *reader, Job *job, size_t bytes) {
    if (bytes == 0) return;
    reader->at_line_start = reader->buffer[bytes - 1] == '\n';
    memmove(reader->buffer, reader->buffer + bytes, reader->filled - bytes);
    reader->filled -= bytes;
    reader->offset += (int64_t)bytes;
    job->input_bytes += (int64_t)bytes;
}

/* ---- plain text ---- */

static void add_span(Job *job, TextSpan span) {
    if (job->n_spans == job->span_room) {
        job->span_room = 2 * job->span_room + 16;
        job->spans = xrealloc(job->spans, (uint64_t)job->span_room * sizeof *job->spans);
    }
    job->spans[job->n_spans++] = span;
}

/* Puts text of the present document into the job. */
static void give_text(Reader *reader, Job *job, const char *text, size_t bytes, bool ends) {
    if (bytes == 0 && !ends) return;
    job_add_text(job, text, bytes);
    reader->document_begun |= bytes > 0;
    add_span(job, (TextSpan){bytes, ends, ends && !reader->document_begun});
    if (ends) reader->document_begun = false;
}

/* The next whole line of the buffer from `from` on: its end, behind the line break; 0 where it is not all
 * there. *bytes: its length without line break. */
static size_t next_line(const Reader *reader, size_t from, size_t *bytes) {
    const char *line = reader->buffer + from, *end = memchr(line, '\n', reader->filled - from);
    if (!end && !reader->end_of_file) return 0;
    *bytes = end ? (size_t)(end - line) : reader->filled - from;
    size_t behind = from + *bytes + (end != NULL);
    if (*bytes > 0 && line[*bytes - 1] == '\r') --*bytes;
    return behind;
}

/* Gives all documents that end at a separator line. Returns how much of the buffer they took; *limit: up to
 * where the rest can hold no separator, whatever follows. */
static size_t give_separated(Reader *reader, Job *job, size_t *limit) {
    size_t separator = strlen(reader->document_line), taken = 0, at = 0, bytes, behind;
    if (!reader->at_line_start) { /* the rest of a line that began before */
        behind = next_line(reader, 0, &bytes);
        if (behind == 0) return 0;
        at = behind;
    }
    while (at < reader->filled && (behind = next_line(reader, at, &bytes)) != 0) {
        if (bytes == separator && memcmp(reader->buffer + at, reader->document_line, separator) == 0) {
            reader->separators++;
            /* Separators in a row, or first in the file, do not make empty documents. */
            if (at > taken || reader->document_begun) {
                give_text(reader, job, reader->buffer + taken, at - taken, true);
            }
            taken = behind;
        }
        at = behind;
    }
    /* An unfinished line longer than the separator, with a carriage return, is none. */
    if (reader->filled - at <= separator + 1) *limit = at;
    return taken;
}

/* Where the buffer's text from `from` up to `limit` may be cut; `from` where nowhere. */
static size_t cut_text(Reader *reader, size_t from, size_t limit) {
    if (limit == from) return from;
    size_t cut = encoder_safe_cut(&reader->encoder, reader->buffer + from, limit - from);
    if (cut > 0 || limit - from < UNCUT_LIMIT) return from + cut;
    if (!reader->warned) {
        log_warn(LOG_DATA,
                 "%s: byte %" PRId64 ": %d MB in which no cut is safe; such text is cut every %d MB, "
                 "which may change a token there",
                 reader->path, reader->offset + (int64_t)from, UNCUT_LIMIT >> 20, UNCUT_LIMIT >> 20);
        reader->warned = true;
    }
    cut = limit;
    while (cut > from + 1 && (reader->buffer[cut - 1] & 0xC0) == 0x80) cut--; /* before a character... */
    return cut > from + 1 ? cut - 1 : limit;
}

static int read_text(Reader *reader, Job *job, Error *err) {
    size_t wanted = JOB_BYTES;
    for (;;) {
        if (fill(reader, wanted, err) != 0) return -1;
        size_t limit = reader->filled;
        size_t taken = reader->document_line ? give_separated(reader, job, &limit) : 0;
        if (reader->end_of_file) {
            /* The last document; an input without any text is an empty one. */
            bool first = reader->offset == 0 && taken == 0;
            if (reader->filled > taken || reader->document_begun || first) {
                give_text(reader, job, reader->buffer + taken, reader->filled - taken, true);
            }
            consume(reader, job, reader->filled);
            return 0;
        }
        size_t cut = cut_text(reader, taken, limit);
        give_text(reader, job, reader->buffer + taken, cut - taken, false);
        consume(reader, job, cut);
        if (job->n_spans > 0) return 0;
        /* Nothing could be cut off: look at more. After that a cut is forced, unless separators alone came. */
        if (cut == 0) wanted = (size_t)min_i64(2 * (int64_t)wanted, 2 * (int64_t)UNCUT_LIMIT);
    }
}

/* ---- JSONL ---- */

static int read_lines(Reader *reader, Job *job, Error *err) {
    for (size_t wanted = JOB_BYTES;; wanted *= 2) {
        if (fill(reader, wanted, err) != 0) return -1;
        const char *last = memrchr(reader->buffer, '\n', reader->filled);
        size_t bytes = reader->end_of_file ? reader->filled : last ? (size_t)(last - reader->buffer) + 1 : 0;
        if (bytes == 0 && !reader->end_of_file) {
            if (reader->filled < LINE_LIMIT) continue;
            return error_set(err, EXIT_DATA,
                             "%s:%" PRId64 ": a line of more than %zu MB: each line should be one JSON "
                             "object",
                             reader->path, reader->line, LINE_LIMIT >> 20);
        }
        job_add_text(job, reader->buffer, bytes);
        job->first_line = reader->line;
        for (const char *p = job->text; (p = memchr(p, '\n', (size_t)(job->text + job->bytes - p))); p++)
            reader->line++;
        consume(reader, job, bytes);
        return 0;
    }
}

/* Compressed text would make tokens without an error, and a model of noise. */
static int check_format(Reader *reader, Error *err) {
    enum { FIRST_BYTES = 8 };
    static const struct {
        const char *name, *first_bytes, *command;
    } formats[] = {{"gzip", "\x1f\x8b", "zcat"},
                   {"zstd", "\x28\xb5\x2f\xfd", "zstdcat"},
                   {"xz", "\xfd\x37\x7a\x58\x5a", "xzcat"},
                   {"bzip2", "BZh", "bzcat"},
                   {"zip", "PK\x03\x04", "unzip -p"},
                   {"Parquet", "PAR1", "a converter to JSONL"}};
    if (fill(reader, FIRST_BYTES, err) != 0) return -1;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        const size_t bytes = strlen(formats[i].first_bytes);
        if (reader->filled < bytes || memcmp(reader->buffer, formats[i].first_bytes, bytes) != 0) continue;
        return error_set(err, EXIT_DATA, "%s: is a %s file, not text; give its text, from %s", reader->path,
                         formats[i].name, formats[i].command);
    }
    const size_t length = strlen(reader->path);
    if (length > 5 && strcmp(reader->path + length - 5, ".json") == 0) {
        log_warn(LOG_DATA, "%s: is read as plain text; one JSON object a line is expected under a name in .jsonl",
                 reader->path);
    }
    return 0;
}

int reader_next(Reader *reader, Job *job, Error *err) {
    if (reader->fd < 0) {
        if (reader->next_path == reader->n_paths) return 0;
        reader->path = reader->paths[reader->next_path++];
        int64_t ignored = 0;
        reader->fd = open_input(reader->path, &ignored, err);
        if (reader->fd < 0) return -1;
        reader->jsonl = is_jsonl(reader->path);
        reader->end_of_file = reader->document_begun = false;
        reader->filled = 0;
        reader->offset = 0;
        reader->line = 1;
        reader->at_line_start = true;
        if (check_format(reader, err) != 0) return -1;
    }
    job->path = reader->path;
    job->jsonl = reader->jsonl;
    int rc = reader->jsonl ? read_lines(reader, job, err) : read_text(reader, job, err);
    if (reader->end_of_file && reader->filled == 0) {
        close(reader->fd);
        reader->fd = -1;
    }
    return rc == 0 ? 1 : -1;
}
