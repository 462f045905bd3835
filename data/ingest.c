/* ingest.c - `trident tokenize`: text to a Megatron token file.
 *
 * In: plain text and JSONL.  Out: PREFIX.bin and PREFIX.idx.
 * One thread (the caller's) reads and writes, the others encode; jobs go round a ring, so that the output
 * is in the order of the input and the memory is that of the ring.
 * Invariants: job j lies in slot j % slots; written <= encoded jobs < read <= written + slots. */
#include <inttypes.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cores.h"
#include "base/log.h"
#include "base/types.h"
#include "data/ingest.h"
#include "data/token_writer.h"

enum { THREADS_MAX = 256 };

typedef struct {
    const Tokenizer *tokenizer;
    int width;
    Job *jobs;   /* (slots) */
    bool *ready; /* (slots) encoded */
    int64_t slots;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int64_t read, started; /* jobs handed out by the reader; taken up by a thread */
    bool stop;
} Ring;

static void *encode_jobs(void *argument) {
    Ring *ring = argument;
    Encoder encoder;
    encoder_init(&encoder, ring->tokenizer);
    pthread_mutex_lock(&ring->mutex);
    for (;;) {
        while (ring->started == ring->read && !ring->stop) pthread_cond_wait(&ring->changed, &ring->mutex);
        if (ring->stop) break;
        int64_t slot = ring->started++ % ring->slots;
        pthread_mutex_unlock(&ring->mutex);
        job_encode(&ring->jobs[slot], &encoder, tokenizer_end_of_document(ring->tokenizer), ring->width);
        pthread_mutex_lock(&ring->mutex);
        ring->ready[slot] = true;
        pthread_cond_broadcast(&ring->changed);
    }
    pthread_mutex_unlock(&ring->mutex);
    encoder_end(&encoder);
    return NULL;
}

static void ring_init(Ring *ring, const Tokenizer *tokenizer, int width, int threads) {
    *ring = (Ring){.tokenizer = tokenizer, .width = width, .slots = 2 * threads + 2};
    ring->jobs = xcalloc((uint64_t)ring->slots, sizeof *ring->jobs);
    ring->ready = xcalloc((uint64_t)ring->slots, sizeof *ring->ready);
    pthread_mutex_init(&ring->mutex, NULL);
    pthread_cond_init(&ring->changed, NULL);
}

static void ring_free(Ring *ring) {
    for (int64_t i = 0; i < ring->slots; i++) job_free(&ring->jobs[i]);
    free(ring->jobs);
    free(ring->ready);
    pthread_mutex_destroy(&ring->mutex);
    pthread_cond_destroy(&ring->changed);
}

static void ring_stop(Ring *ring) {
    pthread_mutex_lock(&ring->mutex);
    ring->stop = true;
    pthread_cond_broadcast(&ring->changed);
    pthread_mutex_unlock(&ring->mutex);
}

/* ---- progress ---- */

typedef struct {
    int64_t total_bytes, done_bytes, repaired;
    const char *first_repaired; /* path */
    double start_s, last_s;
    bool live; /* standard error is a terminal */
} Progress;

static void progress_show(Progress *progress, const TokenWriter *writer, bool last) {
    double now = clock_s(), elapsed_s = now - progress->start_s;
    if (!last && now - progress->last_s < (progress->live ? 0.2 : 30.0)) return;
    progress->last_s = now;
    int64_t documents, tokens = token_writer_total(writer, &documents);
    double done = (double)progress->done_bytes, total = (double)progress->total_bytes;
    double rate = elapsed_s > 0 ? done / elapsed_s : 0;
    char text[256];
    int n = snprintf(text, sizeof text, "%.1f MB, %.1f million tokens, %.1f MB/s", 1e-6 * done, 1e-6 * (double)tokens,
                     1e-6 * rate);
    if (total > 0 && rate > 0 && !last) {
        snprintf(text + n, sizeof text - (size_t)n, ", %.0f%%, %.0f s left", 100 * done / total, (total - done) / rate);
    }
    if (!progress->live) {
        if (!last) log_info(LOG_DATA, "tokenize: %s", text);
        return;
    }
    fprintf(stderr, last ? "\r\033[K" : "\r%s\033[K", text);
    fflush(stderr);
}

static void progress_summary(const Progress *progress, const TokenWriter *writer) {
    int64_t documents, tokens = token_writer_total(writer, &documents);
    double elapsed_s = clock_s() - progress->start_s;
    const char *prefix = token_writer_prefix(writer);
    if (progress->repaired > 0) {
        log_warn(LOG_DATA, "%" PRId64 " places with invalid UTF-8 were read as U+FFFD, the first of them in %s",
                 progress->repaired, progress->first_repaired);
    }
    log_info(LOG_DATA,
             "%s.bin and .idx: %" PRId64 " tokens of %s, %" PRId64 " document%s, from %" PRId64
             " bytes of text in %.1f s (%.1f MB/s)",
             prefix, tokens, token_writer_width(writer) == 2 ? "uint16" : "int32", documents, documents == 1 ? "" : "s",
             progress->done_bytes, elapsed_s, 1e-6 * (double)progress->done_bytes / elapsed_s);
}

/* ---- */

static int write_job(TokenWriter *writer, const Job *job, Progress *progress, Error *err) {
    if (job->rc != 0) {
        *err = job->err;
        return -1;
    }
    if (token_writer_tokens(writer, job->ids, job->n_ids, err) != 0) return -1;
    for (int64_t i = 0; i < job->n_documents; i++) {
        if (token_writer_document(writer, job->documents[i].tokens, job->documents[i].ends, err) != 0) return -1;
    }
    if (progress->repaired == 0) progress->first_repaired = job->path;
    progress->repaired += job->repaired;
    progress->done_bytes += job->input_bytes;
    progress_show(progress, writer, false);
    return 0;
}

/* Reads as far ahead as the ring allows, and writes what is ready, in order. */
static int run_ring(Ring *ring, Reader *reader, TokenWriter *writer, Progress *progress, Error *err) {
    int64_t written = 0;
    bool at_end = false;
    for (;;) {
        if (!at_end && ring->read - written < ring->slots) {
            Job *job = &ring->jobs[ring->read % ring->slots];
            job_clear(job);
            int rc = reader_next(reader, job, err);
            if (rc < 0) return -1;
            at_end = rc == 0;
            if (at_end) continue;
            pthread_mutex_lock(&ring->mutex);
            ring->ready[ring->read++ % ring->slots] = false;
            pthread_cond_broadcast(&ring->changed);
            pthread_mutex_unlock(&ring->mutex);
            continue;
        }
        if (written == ring->read) return 0;
        int64_t slot = written % ring->slots;
        pthread_mutex_lock(&ring->mutex);
        while (!ring->ready[slot]) pthread_cond_wait(&ring->changed, &ring->mutex);
        pthread_mutex_unlock(&ring->mutex);
        if (write_job(writer, &ring->jobs[slot], progress, err) != 0) return -1;
        written++;
    }
}

/* Starts the threads, runs, joins them. Signals stay with the caller's thread. */
static int run_threads(Ring *ring, int threads, Reader *reader, TokenWriter *writer, Progress *progress, Error *err) {
    pthread_t handles[THREADS_MAX];
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int started = 0, rc = 0;
    while (started < threads && rc == 0) {
        rc = pthread_create(&handles[started], NULL, encode_jobs, ring);
        started += rc == 0;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0) rc = error_set(err, EXIT_LAUNCH, "cannot start thread %d: %s", started, strerror(rc));
    else rc = run_ring(ring, reader, writer, progress, err);
    ring_stop(ring);
    for (int i = 0; i < started; i++) pthread_join(handles[i], NULL);
    return rc;
}

static int tokenize_with(const TokenizeOptions *options, const Tokenizer *tokenizer, Error *err) {
    int threads = options->threads > 0 ? options->threads : cores_allowed();
    threads = (int)max_i64(1, min_i64(threads, THREADS_MAX));
    Reader *reader = reader_open(options->inputs, options->n_inputs, options->document_line, tokenizer, err);
    if (!reader) return -1;
    TokenWriter *writer = token_writer_open(options->out_prefix, tokenizer_vocab(tokenizer), err);
    if (!writer) {
        reader_close(reader);
        return -1;
    }
    for (int i = 0; i < options->n_inputs; i++) {
        if (token_writer_check_input(writer, options->inputs[i], err) == 0) continue;
        token_writer_close(writer);
        reader_close(reader);
        return -1;
    }
    Ring ring;
    ring_init(&ring, tokenizer, token_writer_width(writer), threads);
    Progress progress = {
        .total_bytes = reader_total_bytes(reader), .start_s = clock_s(), .live = isatty(STDERR_FILENO) != 0};
    progress.last_s = progress.start_s;
    json_object_seed(0); /* jansson asks for this before threads use it */
    int rc = run_threads(&ring, threads, reader, writer, &progress, err);
    progress_show(&progress, writer, true);
    int64_t documents;
    if (rc == 0 && token_writer_total(writer, &documents) == 0) {
        rc = error_set(err, EXIT_DATA, "%s: %d input%s without any text; nothing is written", options->inputs[0],
                       options->n_inputs, options->n_inputs == 1 ? "" : "s");
    }
    if (rc == 0 && options->document_line && reader_separators(reader) == 0) {
        log_warn(LOG_DATA, "--document-line %s: no line is exactly that; each input of plain text became one document",
                 options->document_line);
    }
    if (rc == 0) rc = token_writer_commit(writer, err);
    if (rc == 0) progress_summary(&progress, writer);
    ring_free(&ring);
    token_writer_close(writer);
    reader_close(reader);
    return rc;
}

int tokenize_files(const TokenizeOptions *options, Error *err) {
    if (options->n_inputs < 1) return error_set(err, EXIT_CONFIG, "tokenize: no text file is given");
    Tokenizer *tokenizer = tokenizer_open(options->tokenizer, err);
    if (!tokenizer) return -1;
    int rc = tokenize_with(options, tokenizer, err);
    tokenizer_close(tokenizer);
    return rc;
}
