/* checkpoint_load.h - what inspection shares with loading. */
#ifndef TRIDENT_TRAIN_CHECKPOINT_LOAD_H
#define TRIDENT_TRAIN_CHECKPOINT_LOAD_H

#include "train/manifest.h"

/* Reads every file whole, checks all sums, and that every array is covered. -1 with err. */
int checkpoint_verify(const char *step_dir, const Manifest *manifest, Error *err);

#endif
