/* ingest.h - the stages of `trident tokenize`: a reader cuts inputs into jobs, threads encode them, a writer
 * takes them in order. Private to data/. */
#ifndef TRIDENT_DATA_INGEST_H
#define TRIDENT_DATA_INGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/check.h"
#include "data/encoder.h"

enum { JOB_BYTES = 1 << 20 };

/* A stretch of a document in a job's text. */
typedef struct {
    size_t bytes;
    bool ends;  /* the document */
    bool empty; /* nothing of the document came before, nor is here: only where ends */
} TextSpan;

/* A stretch of a document in a job's tokens. */
typedef struct {
    int64_t tokens;
    bool ends;
} TokenSpan;

typedef struct {
    /* filled by the reader */
    const char *path;
    bool jsonl; /* whole lines, the first of which is number first_line; else spans */
    int64_t first_line;
    char *text;
    size_t bytes, room;
    TextSpan *spans;
    int64_t n_spans, span_room;
    int64_t input_bytes; /* how far this job brings the reading of its input */
    /* filled by job_encode */
    int32_t *ids;
    int64_t n_ids, id_room;
    TokenSpan *documents;
    int64_t n_documents, document_room;
    int64_t repaired; /* invalid parts of UTF-8 that were replaced */
    int rc;
    Error err;
} Job;

void job_clear(Job *job);
void job_free(Job *job);
void job_add_text(Job *job, const char *text, size_t bytes);
/* Encodes a job: fills ids (narrowed in place to width bytes each), documents, rc and err. */
void job_encode(Job *job, Encoder *encoder, int32_t end_of_document, int width);

/* ---- reading ---- */
typedef struct Reader Reader;

/* document_line: NULL, or the line that separates documents in plain text. Opens all inputs once, so that a
 * wrong name is found before the work begins. NULL with err (EXIT_DATA). */
Reader *reader_open(char *const *paths, int n_paths, const char *document_line, const Tokenizer *tokenizer, Error *err);
/* Bytes of all inputs; -1 where one is not a regular file. */
int64_t reader_total_bytes(const Reader *reader);
/* Lines equal to document_line so far. */
int64_t reader_separators(const Reader *reader);
/* Fills a cleared job. 1, or 0 at the end, or -1 with err. */
int reader_next(Reader *reader, Job *job, Error *err);
void reader_close(Reader *reader);

#endif
