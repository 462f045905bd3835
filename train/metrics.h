/* metrics.h - what a run shows: the live line, metrics.jsonl, TensorBoard event files. Only the rank
 * that calls metrics_open writes; the others never call it. */
#ifndef TRIDENT_TRAIN_METRICS_H
#define TRIDENT_TRAIN_METRICS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/check.h"

typedef struct Metrics Metrics;

typedef struct {
    int64_t step; /* steps done, from 1 */
    int64_t total_steps;
    double loss, grad_norm, lr;
    int64_t tokens; /* trained on so far */
    double tokens_per_s, step_ms, data_wait_ms;
    double mfu;        /* 0..1; NAN: peak not known */
    int64_t mem_bytes; /* planned = used, the largest of all ranks */
    int64_t skipped;   /* steps skipped so far */
    double valid_loss; /* NAN: not evaluated at this step */
} StepMetrics;

/* dir is made; metrics.jsonl is cut back to rows of steps <= first_step (resume; written through a temporary
 * file and rename), and appended to. A new run (first_step 0) sets rows of an earlier one aside, as
 * metrics.N.jsonl. Rows hold loss and grad_norm so that they read back to the same
 * double. The live line goes to standard error where that is a terminal; else plain lines, one every log_every
 * steps. NULL with err (EXIT_DATA). */
Metrics *metrics_open(const char *dir, int64_t first_step, int64_t log_every, bool tensorboard, Error *err);
void metrics_step(Metrics *metrics, const StepMetrics *row);
/* A line of text that must not tear the live line (validation, saves). */
void metrics_note(Metrics *metrics, const char *format, ...) __attribute__((format(printf, 2, 3)));
void metrics_close(Metrics *metrics);

#endif
