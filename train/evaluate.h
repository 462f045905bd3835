/* evaluate.h - loss on held-out windows, each looked at exactly once. */
#ifndef TRIDENT_TRAIN_EVALUATE_H
#define TRIDENT_TRAIN_EVALUATE_H

#include "data/source.h"
#include "train/trainer.h"

/* Windows of all corpora together: one epoch. */
int64_t source_windows(const DataSource *source);
/* Says which corpora so many windows would read more than once. */
void warn_of_repeats(const DataSource *source, int64_t windows);
/* Mean loss over the unmasked tokens of the first n windows, spread over the data ranks; what the last
 * micro-batches lack is filled with masked windows. asked_to_stop: as in trainer_evaluate. */
Evaluation evaluate_windows(Trainer *trainer, const DataSource *source, int64_t windows, bool (*asked_to_stop)(void));

#endif
