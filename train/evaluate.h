/* evaluate.h - loss on held-out windows, each looked at exactly once. */
#ifndef TRIDENT_TRAIN_EVALUATE_H
#define TRIDENT_TRAIN_EVALUATE_H

#include "data/source.h"
#include "train/trainer.h"

/* Windows of all corpora together: one epoch. */
int64_t source_windows(const DataSource *source);
/* Mean loss over the unmasked tokens of the first n windows, spread over the data ranks; what the last
 * micro-batches lack is filled with masked windows. *tokens (may be NULL): how many tokens. */
double evaluate_windows(Trainer *trainer, const DataSource *source, int64_t windows, int64_t *tokens);

#endif
