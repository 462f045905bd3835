/* manifest.h - manifest.json: the file that makes a directory a checkpoint. What it holds: docs/checkpoints.md. */
#ifndef TRIDENT_TRAIN_MANIFEST_H
#define TRIDENT_TRAIN_MANIFEST_H

#include "train/checkpoint.h"

typedef struct {
    char *name; /* of the file, in the manifest's directory; owned */
    int64_t bytes;
    uint64_t xxh3; /* of the whole file */
    int64_t header_bytes;
    uint64_t header_xxh3; /* of these bytes; they hold the checksum of each entry */
    int set;              /* which arrays have entries in it */
} ManifestFile;

/* Indices into the arrays, ascending. Files that hold parts of the same arrays share a set, so that the
 * manifest grows with the number of files plus the number of arrays, not with their product. */
typedef struct {
    int *arrays; /* owned */
    int n;
} ManifestSet;

typedef struct {
    CheckpointState state;
    CheckpointArray *arrays; /* ascending by name */
    int n_arrays;
    ManifestSet *sets;
    int n_sets;
    ManifestFile *files;
    int n_files;
} Manifest;

void manifest_free(Manifest *manifest);
/* Index of the array, or -1. */
int manifest_find_array(const Manifest *manifest, const char *name);
/* Every reader and writer of array names agrees on this: printable UTF-8 that fits CheckpointArray. */
bool array_name_valid(const char *name);

/* JSON text that begins with a checksum of itself. Caller frees; NULL with err (text that is not UTF-8). */
char *manifest_to_text(const Manifest *manifest, Error *err);
/* path: for messages. text has a zero byte behind it. -1 with err (EXIT_CHECKPOINT), nothing to free then. */
int manifest_from_text(const char *path, const char *text, size_t bytes, Manifest *manifest, Error *err);
/* Reads STEP_DIR/manifest.json. A directory named step-N must hold step N. */
int manifest_read(const char *step_dir, Manifest *manifest, Error *err);

/* The N of a directory's name "step-N" (a path may stand before it, slashes behind); -1: another name. */
int64_t step_of_directory(const char *path);

#endif
