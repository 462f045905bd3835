/* preflight.h - what would end a run late, looked at before its first step: memory and disk. */
#ifndef TRIDENT_TRAIN_PREFLIGHT_H
#define TRIDENT_TRAIN_PREFLIGHT_H

#include "train/trainer.h"

/* The memory plan of all ranks of this host against what the host (or its control group) has left. On all
 * ranks, between plan and allocation; dies with EXIT_LAUNCH, naming the largest owners and the settings that
 * would make it fit. */
void preflight_memory(const Trainer *trainer);

/* Makes checkpoint.dir, which must be writable (-1 with err, EXIT_CHECKPOINT), and warns where the file system
 * has no room for one checkpoint more. On one rank, before the first step. */
int preflight_disk(const Trainer *trainer, Error *err);

/* Bytes that processes of this host can still get: free memory and swap, or what the control group leaves of
 * its limit. INT64_MAX where the system does not say. */
int64_t host_available_bytes(void);

#endif
