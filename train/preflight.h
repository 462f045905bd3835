/* preflight.h - what would end a run late, or spoil it, looked at before its first step: memory, disk, data. */
#ifndef TRIDENT_TRAIN_PREFLIGHT_H
#define TRIDENT_TRAIN_PREFLIGHT_H

#include "data/source.h"
#include "train/trainer.h"

/* The memory plan of all ranks of this host against what the host (or its control group) has left. On all
 * ranks, between plan and allocation; -1 with err (EXIT_LAUNCH) naming the largest owners and the settings that
 * would make it fit. */
int preflight_memory(const Trainer *trainer, Error *err);

/* All ranks opened the same data: -1 with err (EXIT_DATA) naming the setting and the first rank that did not. On
 * all ranks; key, spec: the setting and its value. */
int preflight_data(const Trainer *trainer, const DataSource *source, const char *key, const char *spec, Error *err);

/* Makes checkpoint.dir, which must be writable and the same directory on all hosts (-1 with err, EXIT_CHECKPOINT), and
 * log.dir (EXIT_CONFIG), and takes both for this run until its first rank ends. Warns where the file system has no room
 * for the checkpoints that will be there at once. On all ranks, which all get the outcome, when the trainer's step is
 * known. */
int preflight_disk(const Trainer *trainer, Error *err);

/* Bytes that processes of this host can still get: free memory and swap, or what the control group leaves of
 * its limit. INT64_MAX where the system does not say. */
int64_t host_available_bytes(void);

#endif
