/* source.h - where tokens come from: token files, blends of them, and the order of samples. */
#ifndef TRIDENT_DATA_SOURCE_H
#define TRIDENT_DATA_SOURCE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/check.h"

/* ---- one token file: Megatron PREFIX.bin/.idx or llm.c shard(s) ---- */
typedef struct TokenFile TokenFile;

/* path: a Megatron prefix (or its .bin / .idx), an llm.c .bin, or a glob of llm.c shards. All header
 * facts are checked at open (magic, sizes, offsets, dtype). NULL with err (EXIT_DATA). Thread-safe reads. */
TokenFile *token_file_open(const char *path, Error *err);
void token_file_close(TokenFile *file);
int64_t token_file_tokens(const TokenFile *file);
/* Megatron: as the .idx has it, empty ones too. llm.c: counted by reading all tokens; -1 where that fails. */
int64_t token_file_documents(const TokenFile *file);
const char *token_file_format(const TokenFile *file); /* "megatron", "llm.c" */
const char *token_file_type(const TokenFile *file);   /* "uint16", "int32", ... */
/* Tokens [first, first + count) of the packed stream. doc_start (may be NULL): for each, the stream
 * position of the first token of its document. A token >= vocab is an error with file, position and
 * document. -1 with err. */
int token_file_read(const TokenFile *file, int64_t first, int64_t count, int64_t vocab, int32_t *tokens,
                    int64_t *doc_start, Error *err);

/* ---- samples ---- */
typedef struct DataSource DataSource;

typedef struct {
    const char *spec; /* "path" or "path:weight, path:weight" (paths with commas or colons are quoted) */
    int64_t seq_len, vocab;
    uint64_t seed;
    bool mask_documents;
    bool shuffle; /* false: samples in file order (validation, eval) */
} DataOptions;

/* Opens all files that spec names; options and spec stay the caller's. NULL with err: EXIT_CONFIG for the form of spec,
 * EXIT_DATA for files. */
DataSource *data_open(const DataOptions *options, Error *err);
void data_close(DataSource *source);
int64_t data_seq_len(const DataSource *source);
int data_corpora(const DataSource *source);
const char *data_corpus_path(const DataSource *source, int corpus);
int64_t data_corpus_tokens(const DataSource *source, int corpus);
/* Windows of seq_len + 1 tokens that one epoch of the corpus has. */
int64_t data_corpus_windows(const DataSource *source, int corpus);
/* How often each period of the blend draws from it; 0: never. */
int32_t data_corpus_weight(const DataSource *source, int corpus);
/* XXH3 over the corpora's names, sizes and headers: a resume with other data is noticed. */
uint64_t data_fingerprint(const DataSource *source);
/* What the weights mean for this many samples: tokens and epochs per corpus, printed at start. */
void data_print(const DataSource *source, int64_t samples);

/* How many samples of each corpus the run has used before global sample `samples` (counted over the whole
 * run, not below first_sample). data_set_base continues a run with the counters of its checkpoint from
 * global sample `first_sample` on (all zero for a new run). The place in the blend's period is the global
 * sample number itself, so a run continued with the same blend draws what it would have drawn without a
 * stop, and one continued with another blend goes on in each corpus where it was. Before loader_start. */
void data_counters(const DataSource *source, int64_t samples, int64_t *counters);
void data_set_base(DataSource *source, int64_t first_sample, const int64_t *counters);

/* Global sample k: tokens (seq_len), targets (seq_len; -1 where the loss is masked: the next token
 * begins another document and mask_documents), positions (seq_len: restart at each document where
 * mask_documents), doc_start (seq_len: window-relative start of the token's document, all 0
 * where not mask_documents). Pure function of (options, k, base). -1 with err. */
int data_sample(const DataSource *source, int64_t k, int32_t *tokens, int32_t *targets, int32_t *positions,
                int32_t *doc_start, Error *err);

/* ---- reading ahead: one thread ---- */
typedef struct Loader Loader;
typedef struct {
    int64_t sequences;                                 /* micro_batch */
    int32_t *tokens, *targets, *positions, *doc_start; /* (sequences, seq_len) */
} Batch;

/* What the arrays of a micro-batch take, and a Batch whose arrays are that memory; the caller owns it. */
int64_t batch_bytes(int64_t micro_batch, int64_t seq_len);
Batch batch_in(int32_t *memory, int64_t micro_batch, int64_t seq_len);

/* This rank's micro-batches in order, from global sample first_sample on. Micro-batch j (from 0) of step s (from 0)
 * of data rank d holds global samples  first_sample + s * global_batch + (j * data_size + d) * micro_batch + i. */
Loader *loader_start(const DataSource *source, int64_t micro_batch, int64_t global_batch, int data_size, int data_rank,
                     int64_t first_sample);
/* What a loader holds. */
int64_t loader_bytes(int64_t micro_batch, int64_t seq_len);
/* Blocks until it is there; valid until the next call. NULL with err on a data error. *wait_s (may be
 * NULL): how long the caller waited. */
const Batch *loader_next(Loader *loader, double *wait_s, Error *err);
void loader_stop(Loader *loader);

#endif
