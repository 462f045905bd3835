/* source.c - samples: fixed windows of the packed streams of several corpora, in a keyed order.
 *
 * In: corpora and weights, seq_len, seed, and a global sample number.
 * Out: tokens, targets, positions and document starts of that sample.
 * Invariants: a sample is a pure function of (options, number, base counters). The i-th sample of a corpus is
 * window permute(i mod windows) of epoch i / windows; window w is tokens [w seq_len, w seq_len + seq_len],
 * one more than seq_len, so that windows overlap by one token and each token is a target once an epoch. */
#include "data/source.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "base/log.h"
#include "base/rng.h"
#include "base/types.h"
#include "data/blend.h"
#include "data/permutation.h"
#include "data/token_file.h"

typedef struct {
    char *path;
    TokenFile *file;
    int64_t windows;
    uint64_t stream; /* of random numbers: from its place in the list, so that moving files changes nothing */
} Corpus;

struct DataSource {
    DataOptions options; /* spec: not kept */
    int n_corpora;
    Corpus *corpora;
    Blend blend;
    bool weighted;       /* weights were given, not derived from sizes */
    int64_t *base;       /* (corpora) samples used before first_sample... */
    int64_t *base_count; /* (corpora) ...and how many the present blend counts before it */
    int64_t first_sample;
};

/* However the two were named. */
static bool same_file(const TokenFile *a, const TokenFile *b) {
    struct stat x, y;
    return fstat(a->segments[0].fd, &x) == 0 && fstat(b->segments[0].fd, &y) == 0 && x.st_dev == y.st_dev &&
           x.st_ino == y.st_ino;
}

static int corpus_open(Corpus *corpus, int number, BlendEntry *entry, const DataOptions *options, Error *err) {
    corpus->path = xstrdup(entry->path);
    corpus->file = token_file_open(entry->path, err);
    if (!corpus->file) return -1;
    int64_t tokens = token_file_tokens(corpus->file);
    if (tokens < options->seq_len + 1) {
        return error_set(err, EXIT_DATA,
                         "%s: has %" PRId64 " tokens; with model.seq_len = %" PRId64 " it needs at least %" PRId64,
                         entry->path, tokens, options->seq_len, options->seq_len + 1);
    }
    for (const Corpus *other = corpus - number; other < corpus; other++) {
        if (!same_file(other->file, corpus->file)) continue;
        return error_set(
            err, EXIT_CONFIG,
            "data: %s and %s are the same file; its samples would be drawn twice an epoch: add the weights "
            "up instead",
            other->path, corpus->path);
    }
    corpus->windows = (tokens - 1) / options->seq_len;
    char name[64];
    snprintf(name, sizeof name, "data/order/%d", number);
    corpus->stream = rng_stream(name);
    return 0;
}

DataSource *data_open(const DataOptions *options, Error *err) {
    REQUIRE(options->seq_len > 0 && options->seq_len < INT32_MAX && options->vocab > 0);
    BlendEntry *entries;
    int n = blend_parse(options->spec, &entries, err);
    if (n < 0) return NULL;
    DataSource *source = xcalloc(1, sizeof *source);
    source->options = *options;
    source->options.spec = NULL;
    source->corpora = xcalloc((uint64_t)n, sizeof *source->corpora);
    source->weighted = entries[0].weight >= 0;
    double *weights = xcalloc((uint64_t)n, sizeof *weights);
    int rc = 0;
    for (int i = 0; rc == 0 && i < n; i++) {
        rc = corpus_open(&source->corpora[i], i, &entries[i], options, err);
        source->n_corpora = i + 1;
        weights[i] = source->weighted ? entries[i].weight : (double)source->corpora[i].windows;
    }
    if (rc == 0) rc = blend_init(&source->blend, weights, n, err);
    source->base = xcalloc((uint64_t)n, sizeof *source->base);
    source->base_count = xcalloc((uint64_t)n, sizeof *source->base_count);
    blend_entries_free(entries, n);
    free(weights);
    if (rc == 0) return source;
    data_close(source);
    return NULL;
}

void data_close(DataSource *source) {
    if (!source) return;
    for (int i = 0; i < source->n_corpora; i++) {
        token_file_close(source->corpora[i].file);
        free(source->corpora[i].path);
    }
    free(source->corpora);
    blend_free(&source->blend);
    free(source->base);
    free(source->base_count);
    free(source);
}

int64_t data_seq_len(const DataSource *source) { return source->options.seq_len; }

int data_corpora(const DataSource *source) { return source->n_corpora; }

static const Corpus *corpus_at(const DataSource *source, int corpus) {
    REQUIRE(corpus >= 0 && corpus < source->n_corpora);
    return &source->corpora[corpus];
}

const char *data_corpus_path(const DataSource *source, int corpus) { return corpus_at(source, corpus)->path; }

int64_t data_corpus_tokens(const DataSource *source, int corpus) {
    return token_file_tokens(corpus_at(source, corpus)->file);
}

int64_t data_corpus_windows(const DataSource *source, int corpus) { return corpus_at(source, corpus)->windows; }

int32_t data_corpus_weight(const DataSource *source, int corpus) {
    REQUIRE(corpus >= 0 && corpus < source->n_corpora);
    return source->blend.weight[corpus];
}

uint64_t data_fingerprint(const DataSource *source) {
    uint64_t hash = 0;
    for (int i = 0; i < source->n_corpora; i++) {
        const Corpus *corpus = &source->corpora[i];
        const char *slash = strrchr(corpus->path, '/'); /* the folder may move */
        const char *name = slash ? slash + 1 : corpus->path;
        hash = XXH3_64bits_withSeed(name, strlen(name), hash);
        int64_t facts[2] = {corpus->file->tokens, (int64_t)corpus->file->header_hash};
        hash = XXH3_64bits_withSeed(facts, sizeof facts, hash);
    }
    return hash;
}

/* 12345678 as "12.3M". */
static const char *short_count(char *text, size_t bytes, int64_t count) {
    static const char units[] = {' ', 'k', 'M', 'G', 'T', 'P'};
    double value = (double)count;
    int unit = 0;
    while (value >= 999.5 && unit < 5) {
        value /= 1000;
        unit++;
    }
    if (unit == 0) snprintf(text, bytes, "%" PRId64, count);
    else snprintf(text, bytes, "%.3g%c", value, units[unit]);
    return text;
}

void data_print(const DataSource *source, int64_t samples) {
    int64_t *counts = xcalloc((uint64_t)source->n_corpora, sizeof *counts);
    data_counters(source, max_i64(samples, source->first_sample), counts);
    char tokens[32], used[32], windows[32];
    log_info(LOG_DATA, "%6s %8s %10s %10s %8s  %s", "weight", "tokens", "samples", "used", "epochs", "corpus");
    for (int i = 0; i < source->n_corpora; i++) {
        const Corpus *corpus = &source->corpora[i];
        log_info(LOG_DATA, "%5.1f%% %8s %10s %10s %8.3g  %s (%s, %s)", 100.0 * source->blend.weight[i] / BLEND_PERIOD,
                 short_count(tokens, sizeof tokens, token_file_tokens(corpus->file)),
                 short_count(windows, sizeof windows, corpus->windows), short_count(used, sizeof used, counts[i]),
                 (double)counts[i] / (double)corpus->windows, corpus->path, token_file_format(corpus->file),
                 token_file_type(corpus->file));
    }
    if (!source->weighted && source->n_corpora > 1) {
        log_info(LOG_DATA, "no weights are given: each corpus counts by its size");
    }
    free(counts);
}

/* ---- which window ---- */

void data_counters(const DataSource *source, int64_t samples, int64_t *counters) {
    REQUIRE(samples >= source->first_sample);
    blend_counts(&source->blend, samples, counters);
    for (int i = 0; i < source->n_corpora; i++) counters[i] += source->base[i] - source->base_count[i];
}

void data_set_base(DataSource *source, int64_t first_sample, const int64_t *counters) {
    REQUIRE(first_sample >= 0);
    source->first_sample = first_sample;
    blend_counts(&source->blend, first_sample, source->base_count);
    memcpy(source->base, counters, (size_t)source->n_corpora * sizeof *counters);
}

/* The corpus of global sample k, and the first token of its window. */
static const Corpus *locate(const DataSource *source, int64_t k, int64_t *first) {
    REQUIRE(k >= source->first_sample);
    int64_t index;
    int i = blend_corpus(&source->blend, k, &index);
    index += source->base[i] - source->base_count[i];
    const Corpus *corpus = &source->corpora[i];
    int64_t window = index % corpus->windows, epoch = index / corpus->windows;
    if (source->options.shuffle) {
        uint64_t key = rng_bits(source->options.seed, corpus->stream, (uint64_t)epoch);
        window = permute(key, corpus->windows, window);
    }
    *first = window * source->options.seq_len;
    return corpus;
}

int data_sample(const DataSource *source, int64_t k, int32_t *tokens, int32_t *targets, int32_t *positions,
                int32_t *doc_start, Error *err) {
    int64_t seq_len = source->options.seq_len, vocab = source->options.vocab, first;
    const Corpus *corpus = locate(source, k, &first);
    int32_t last;
    if (token_file_read(corpus->file, first, seq_len, vocab, tokens, NULL, err) != 0) return -1;
    if (token_file_read(corpus->file, first + seq_len, 1, vocab, &last, NULL, err) != 0) return -1;
    memcpy(targets, tokens + 1, (size_t)(seq_len - 1) * sizeof *targets);
    targets[seq_len - 1] = last;
    if (!source->options.mask_documents) {
        for (int64_t i = 0; i < seq_len; i++) positions[i] = (int32_t)i;
        memset(doc_start, 0, (size_t)seq_len * sizeof *doc_start);
        return 0;
    }
    token_file_window_documents(corpus->file, first, seq_len, tokens, doc_start);
    for (int64_t i = 0; i < seq_len; i++) {
        positions[i] = (int32_t)i - doc_start[i];
        if (i > 0 && doc_start[i] == i) targets[i - 1] = -1;
    }
    if (token_file_begins_document(corpus->file, first + seq_len, last)) targets[seq_len - 1] = -1;
    return 0;
}
