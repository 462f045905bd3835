/* checkpoint_files.h - what the checkpoint's writer, reader and finder share about directories. */
#ifndef TRIDENT_TRAIN_CHECKPOINT_FILES_H
#define TRIDENT_TRAIN_CHECKPOINT_FILES_H

#include "train/manifest.h"

/* Opens for writing what is created with these further flags; -1 with err. */
int create_file(const char *path, int flags, Error *err);
/* Closes in any case; syncs before where rc is 0. rc, or -1 with err. */
int sync_and_close(int fd, const char *path, int rc, Error *err);

/* DIR/step-00000100. Caller frees. */
char *step_directory(const char *dir, int64_t step);
/* Steps of the directories named step-N in dir, descending. Caller frees *steps. -1 with err; a missing dir
 * has none. */
int list_steps(const char *dir, int64_t **steps, int *n, Error *err);
/* Whether the directory holds a manifest.json, whatever is in it. */
bool has_manifest(const char *step_dir);
/* Manifest readable, and every file there with the size that it states. -1 with err. */
int check_complete(const char *step_dir, Error *err);

/* After step was published in dir: removes what its directory holds from earlier attempts, what interrupted
 * saves left of steps before it, and checkpoints before it beyond keep (0: none). Failures are warnings. */
void remove_outdated(const char *dir, int64_t step, int64_t keep);
/* Removes the files that no manifest may name any more: all shards but those in `kept` (NULL: keep none), and
 * temporary manifests. */
void remove_shards(const char *step_dir, const Manifest *kept);

#endif
