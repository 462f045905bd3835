/* ingest_job.c - one job of `trident tokenize`: some text to tokens, with the ends of its documents.
 *
 * In: spans of plain text, or lines of JSON.  Out: tokens, each document with tokens closed by the
 * end-of-document token.
 * Invariant: what a job yields depends on its text alone, so the number of threads changes nothing. */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "data/ingest.h"

void job_clear(Job *job) {
    job->bytes = 0;
    job->n_spans = job->n_ids = job->n_documents = 0;
    job->repaired = job->input_bytes = 0;
    job->rc = 0;
}

void job_free(Job *job) {
    free(job->text);
    free(job->spans);
    free(job->ids);
    free(job->documents);
}

void job_add_text(Job *job, const char *text, size_t bytes) {
    if (bytes == 0) return;
    if (job->bytes + bytes > job->room) {
        job->room = job->bytes + bytes + JOB_BYTES;
        job->text = xrealloc(job->text, job->room);
    }
    memcpy(job->text + job->bytes, text, bytes);
    job->bytes += bytes;
}

static void add_document(Job *job, int64_t tokens, bool ends) {
    if (job->n_documents == job->document_room) {
        job->document_room = 2 * job->document_room + 16;
        job->documents = xrealloc(job->documents, (uint64_t)job->document_room * sizeof *job->documents);
    }
    job->documents[job->n_documents++] = (TokenSpan){tokens, ends};
}

static void encode(Job *job, Encoder *encoder, const char *text, size_t bytes) {
    encoder_encode(encoder, text, bytes, &job->ids, &job->n_ids, &job->id_room);
}

static void add_end(Job *job, int32_t end_of_document) {
    if (job->n_ids == job->id_room) {
        job->id_room = 2 * job->id_room + 16;
        job->ids = xrealloc(job->ids, (uint64_t)job->id_room * sizeof *job->ids);
    }
    job->ids[job->n_ids++] = end_of_document;
}

static void encode_spans(Job *job, Encoder *encoder, int32_t end_of_document) {
    size_t at = 0;
    for (int64_t i = 0; i < job->n_spans; i++) {
        TextSpan span = job->spans[i];
        int64_t before = job->n_ids;
        if (span.bytes > 0) encode(job, encoder, job->text + at, span.bytes); /* else text may be NULL */
        at += span.bytes;
        if (span.ends && !span.empty) add_end(job, end_of_document);
        add_document(job, job->n_ids - before, span.ends);
    }
}

/* The value of "text" in one line; *line_json is to be released by the caller. NULL with err. */
static const char *text_of_line(const char *line, size_t bytes, const char *where, json_t **line_json, size_t *length,
                                Error *err) {
    json_error_t at;
    /* Other fields may hold any number. */
    *line_json = json_loadb(line, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &at);
    if (!*line_json) {
        error_set(err, EXIT_DATA, "%s: column %d: not valid JSON: %s", where, at.column, at.text);
        return NULL;
    }
    if (!json_is_object(*line_json)) {
        error_set(err, EXIT_DATA, "%s: should be a JSON object with a \"text\" field", where);
        return NULL;
    }
    json_t *text = json_object_get(*line_json, "text");
    if (!text) {
        const char *key = json_object_iter_key(json_object_iter(*line_json));
        error_set(err, EXIT_DATA, "%s: has no \"text\" field (its first field is \"%.60s\")", where, key ? key : "");
        return NULL;
    }
    if (!json_is_string(text)) {
        error_set(err, EXIT_DATA, "%s: its \"text\" field is not a string", where);
        return NULL;
    }
    *length = json_string_length(text);
    return json_string_value(text);
}

static bool is_blank(const char *line, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        if (!memchr(" \t\r", line[i], 3)) return false;
    }
    return true;
}

static int encode_line(Job *job, Encoder *encoder, int32_t end_of_document, const char *line, size_t bytes,
                       int64_t number) {
    if (number == 1 && bytes >= 3 && memcmp(line, "\xEF\xBB\xBF", 3) == 0) { /* a byte order mark */
        line += 3;
        bytes -= 3;
    }
    if (is_blank(line, bytes)) return 0;
    char where[512];
    snprintf(where, sizeof where, "%.400s:%" PRId64, job->path, number);
    json_t *line_json = NULL;
    size_t length = 0;
    const char *text = text_of_line(line, bytes, where, &line_json, &length, &job->err);
    if (text) {
        int64_t before = job->n_ids;
        encode(job, encoder, text, length);
        if (length > 0) add_end(job, end_of_document);
        add_document(job, job->n_ids - before, true);
    }
    json_decref(line_json);
    return text ? 0 : -1;
}

static int encode_lines(Job *job, Encoder *encoder, int32_t end_of_document) {
    int64_t number = job->first_line;
    for (size_t at = 0; at < job->bytes; number++) {
        const char *line = job->text + at, *end = memchr(line, '\n', job->bytes - at);
        size_t bytes = end ? (size_t)(end - line) : job->bytes - at;
        if (encode_line(job, encoder, end_of_document, line, bytes, number) != 0) return -1;
        at += bytes + 1;
    }
    return 0;
}

/* The file's width; ids below the vocabulary always fit. Narrowing in place goes upwards, behind the reads. */
static void narrow(Job *job) {
    uint16_t *to = (uint16_t *)job->ids;
    for (int64_t i = 0; i < job->n_ids; i++) {
        int32_t id = job->ids[i];
        REQUIRE(id >= 0 && id <= UINT16_MAX);
        uint16_t narrowed = (uint16_t)id;
        memcpy(to + i, &narrowed, sizeof narrowed);
    }
}

void job_encode(Job *job, Encoder *encoder, int32_t end_of_document, int width) {
    int64_t repaired_before = encoder_repaired(encoder);
    if (job->jsonl) job->rc = encode_lines(job, encoder, end_of_document);
    else encode_spans(job, encoder, end_of_document);
    job->repaired = encoder_repaired(encoder) - repaired_before;
    if (width == 2) narrow(job);
}
