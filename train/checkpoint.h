/* checkpoint.h - writing and reading checkpoints, whatever the layout of ranks.
 *
 * DIR/step-00000100/: one safetensors file a writing rank plus manifest.json. The state is a set of
 * logical arrays ("param/blocks.0.attn.q.weight", "adam_m/...", ...). A piece is what one rank holds
 * of one of them: a rectangle of it, and a flat range within that rectangle. Any layout reads any
 * checkpoint: a reader asks for its pieces and they are put together from whatever is there.
 * Publication order: design of docs/formats.md (temporary names, fsync, checksums gathered, manifest
 * written, synced and renamed as the one commit, directory synced, then older ones removed). */
#ifndef TRIDENT_TRAIN_CHECKPOINT_H
#define TRIDENT_TRAIN_CHECKPOINT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/check.h"
#include "base/types.h"
#include "parallel/comm.h"

enum { PIECE_DIMS_MAX = 2 };

typedef struct {
    const char *name; /* logical array; valid during the call */
    DType dtype;
    int dims;
    int64_t shape[PIECE_DIMS_MAX];               /* of the logical array */
    int64_t first[PIECE_DIMS_MAX], count[PIECE_DIMS_MAX]; /* the rectangle this piece is (part of) */
    int64_t flat_first, flat_count;              /* range within the rectangle, row-major: all of it: 0, product */
    void *data;                                  /* flat_count elements, contiguous */
    bool write; /* save: this rank writes it (one rank of those that hold the same) */
} CheckpointPiece;

typedef struct {
    int64_t step, samples, tokens;
    int64_t skipped;                /* steps skipped so far */
    char *config_text;              /* resolved config; owned */
    uint64_t data_fingerprint;
    int n_corpora;
    int64_t *corpus_counters;       /* owned */
    double first_loss;              /* loss of the step after the save is not known: NAN; else last loss */
    int grid_size[3];               /* tensor, pipeline, data: for information */
    char *extra_json;               /* other state as a JSON object text, or NULL; owned */
} CheckpointState;

void checkpoint_state_free(CheckpointState *state);

/* Collective over world. Every rank learns the outcome: 0, or -1 with the same err on all of them
 * (the first failing rank's message). keep: how many checkpoints stay (0: all). */
int checkpoint_save(const char *dir, const CheckpointState *state, const CheckpointPiece *pieces, int n, Group *world,
                    int64_t keep, Error *err);

/* The newest complete checkpoint below dir: path of its directory (caller frees), or NULL. Incomplete
 * or damaged ones are passed over with a warning each. Looks at manifests and sizes (cheap); sums are
 * verified when read. dir may be a step directory itself. */
char *checkpoint_find(const char *dir, Error *err);

/* Reads the manifest of a step directory. -1 with err (EXIT_CHECKPOINT). */
int checkpoint_read_state(const char *step_dir, CheckpointState *state, Error *err);
/* Fills the data of every piece. Every file that is read is verified against its checksum before any
 * piece is changed; missing arrays, other shapes or dtypes, gaps in coverage are errors naming the array.
 * Arrays of the checkpoint that no piece asks for are fine. Local: each rank calls it for itself. */
int checkpoint_load(const char *step_dir, const CheckpointPiece *pieces, int n, Error *err);

/* Names, dtypes and shapes of the logical arrays. Caller frees the list with free() . */
typedef struct {
    char name[96];
    DType dtype;
    int dims;
    int64_t shape[PIECE_DIMS_MAX];
} CheckpointArray;
int checkpoint_list(const char *step_dir, CheckpointArray **arrays, Error *err);

/* `trident inspect DIR` for checkpoints: state, files, arrays; verify: read and check every sum. */
int checkpoint_inspect(const char *path, bool verify, FILE *out, Error *err);

#endif
