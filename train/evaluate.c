/* evaluate.c - held-out windows as micro-batches.
 * In: data source, number of windows. Out: loss.
 * Invariant: the result does not depend on the layout, but for rounding. */
#include "train/evaluate.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"

int64_t source_windows(const DataSource *source) {
    int64_t windows = 0;
    for (int i = 0; i < data_corpora(source); i++) {
        if (data_corpus_weight(source, i) > 0) windows += data_corpus_windows(source, i);
    }
    return windows;
}

void warn_of_repeats(const DataSource *source, int64_t windows) {
    int64_t *drawn = xcalloc((uint64_t)data_corpora(source), sizeof *drawn);
    data_counters(source, windows, drawn);
    for (int i = 0; i < data_corpora(source); i++) {
        /* Where sizes are the weights, rounding may read one window more. */
        if (drawn[i] <= data_corpus_windows(source, i) + 1) continue;
        log_warn(LOG_DATA,
                 "data.valid: by its weight, %s is read %.3g times in an evaluation of %" PRId64 " windows; without "
                 "weights each corpus counts by its size",
                 data_corpus_path(source, i), (double)drawn[i] / (double)data_corpus_windows(source, i), windows);
    }
    free(drawn);
}

typedef struct {
    const DataSource *source;
    int64_t windows, next_micro_batch, seq_len, micro_batch;
    int data_size, data_rank;
    Batch batch;
} WindowReader;

static const Batch *next_windows(void *context, Error *err) {
    WindowReader *r = context;
    const int64_t T = r->seq_len;
    const int64_t first = (r->next_micro_batch++ * r->data_size + r->data_rank) * r->micro_batch;
    for (int64_t i = 0; i < r->micro_batch; i++) {
        Batch *b = &r->batch;
        if (first + i < r->windows) {
            if (data_sample(r->source, first + i, b->tokens + i * T, b->targets + i * T, b->positions + i * T,
                            b->doc_start + i * T, err) != 0)
                return NULL;
            continue;
        }
        for (int64_t t = 0; t < T; t++) {
            b->tokens[i * T + t] = 0;
            b->targets[i * T + t] = -1;
            b->positions[i * T + t] = (int32_t)t;
            b->doc_start[i * T + t] = 0;
        }
    }
    return &r->batch;
}

Evaluation evaluate_windows(Trainer *t, const DataSource *source, int64_t windows, bool (*asked_to_stop)(void)) {
    const Config *c = t->config;
    WindowReader reader = {.source = source,
                           .windows = windows,
                           .seq_len = c->seq_len,
                           .micro_batch = c->micro_batch,
                           .data_size = t->grid.size[DIM_DATA],
                           .data_rank = t->grid.index[DIM_DATA],
                           .batch = batch_in(t->eval_batch, c->micro_batch, c->seq_len)};
    const BatchSource batches = {.next = next_windows, .context = &reader};
    const int64_t n = ceil_div(windows, c->micro_batch * reader.data_size);
    return trainer_evaluate(t, &batches, n, asked_to_stop);
}
