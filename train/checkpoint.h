/* checkpoint.h - writing and reading checkpoints, whatever the layout of ranks.
 *
 * DIR/step-00000100/: one safetensors file a writing rank plus manifest.json. The state is a set of
 * logical arrays ("param/blocks.0.attn.q.weight", "adam_m/...", ...). A piece is what one rank holds
 * of one of them: a rectangle of it, and a flat range within that rectangle. Any layout reads any
 * checkpoint: a reader asks for its pieces and they are put together from whatever is there.
 * What the files hold, and the order in which they come to be: docs/checkpoints.md. */
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
    int64_t shape[PIECE_DIMS_MAX];                        /* of the logical array */
    int64_t first[PIECE_DIMS_MAX], count[PIECE_DIMS_MAX]; /* the rectangle this piece is (part of) */
    int64_t flat_first, flat_count; /* range within the rectangle, row-major: all of it: 0, product */
    void *data;                     /* flat_count elements, contiguous */
    bool write;                     /* save: this rank writes it (one rank of those that hold the same) */
} CheckpointPiece;

typedef struct {
    int64_t step, samples, tokens;
    int64_t skipped;   /* steps skipped so far */
    char *config_text; /* resolved config; owned */
    uint64_t data_fingerprint;
    int n_corpora;
    int64_t *corpus_counters; /* owned */
    double last_loss;         /* last loss before the save; NAN: not known */
    int grid_size[3];         /* tensor, pipeline, data: for information */
    char *extra_json;         /* other state as a JSON object text, or NULL; owned */
} CheckpointState;

void checkpoint_state_free(CheckpointState *state);

/* Collective over world (NULL: one rank). Every rank learns the outcome: 0, or -1 with the same err on all of them
 * (the first failing rank's message); the checkpoints that were there are as they were then. The written pieces of
 * all ranks together must be all arrays, each element once. keep: how many checkpoints up to this step stay (0:
 * all); newer ones stay in any case. */
int checkpoint_save(const char *dir, const CheckpointState *state, const CheckpointPiece *pieces, int n, Group *world,
                    int64_t keep, Error *err);

/* The newest complete checkpoint below dir: path of its directory (caller frees), or NULL: with err.status 0 where
 * there is none, or only what interrupted saves left; with an error where there are only damaged ones, or dir
 * cannot be read. Incomplete or damaged ones are passed over with a warning each. Looks at manifests and sizes
 * (cheap); sums are verified when read. dir may be a step directory itself: then that one or an error. */
char *checkpoint_find(const char *dir, Error *err);
/* For a directory in which checkpoint_find found none: -1 with err, which says where there may be one. */
int checkpoint_missing(const char *dir, Error *err);

/* How many step directories with a manifest are below dir; 0 where it cannot be read. */
int64_t checkpoint_count(const char *dir);

/* Reads the manifest of a step directory. -1 with err (EXIT_CHECKPOINT). */
int checkpoint_read_state(const char *step_dir, CheckpointState *state, Error *err);
/* Fills the data of every piece. The header of every file that is needed, and every entry in it that is used, are
 * verified against their checksums before any piece is changed (only a disk that fails between that and the copy
 * can leave pieces half filled; -1 then); missing arrays, other shapes or dtypes, gaps in coverage are errors
 * naming the array. Arrays of the checkpoint that no piece asks for are not read, and fine. Memory does not grow
 * with the arrays. Local: each rank calls it for itself. */
int checkpoint_load(const char *step_dir, const CheckpointPiece *pieces, int n, Error *err);

/* Names (ascending), dtypes and shapes of the logical arrays. */
typedef struct {
    char name[96];
    DType dtype;
    int dims;
    int64_t shape[PIECE_DIMS_MAX];
} CheckpointArray;
/* How many, and the list, which the caller frees; -1 with err. */
int checkpoint_list(const char *step_dir, CheckpointArray **arrays, Error *err);

/* `trident inspect DIR` for checkpoints: state, files, arrays; verify: read everything and check every sum. */
int checkpoint_inspect(const char *path, bool verify, FILE *out, Error *err);

#endif
