/* tensors.h - the tensor table: every parameter that this rank holds, with its logical shape, split,
 * initialisation, decay, and how its gradient is reduced. It drives allocation, initialisation,
 * gradient sums, the clipping norm, the optimizer and checkpoints. */
#ifndef TRIDENT_TRAIN_TENSORS_H
#define TRIDENT_TRAIN_TENSORS_H

#include <stdbool.h>
#include <stdint.h>

#include "parallel/grid.h"
#include "parallel/partition.h"
#include "train/config.h"

enum { SPLIT_NONE = -1, SPLIT_ROWS = 0, SPLIT_COLUMNS = 1 };

typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL } InitKind;

typedef struct {
    char name[64];
    int dims;
    int64_t shape[2]; /* logical */
    int split;        /* SPLIT_*: over the tensor ranks */
    Range part;       /* this rank's logical indices along the split axis (all of axis 0 where none) */
    int64_t local[2]; /* as stored: part.count along the split axis, plus vocabulary padding */
    InitKind init;
    double init_std;
    bool decay;           /* weight decay: matrices only */
    bool sum_over_tensor; /* each tensor rank has the gradient of its own tokens only (sequence parallel) */
    int sharers;          /* consecutive tensor ranks that hold this very part and sum its gradient; 1: none */
    bool tied_copy;       /* the last stage's copy of the embedding: neither counted nor saved */
    bool counted;         /* of all ranks of one model replica that hold this part, this one counts it */
    int64_t offset;       /* first element in the flat arrays */
    int64_t count;        /* elements stored */
} Tensor;

typedef struct {
    Tensor *list;
    int n;
    int64_t n_elements;      /* of the flat arrays, with alignment gaps (always zero) */
    int64_t n_tensor_summed; /* the first elements hold all tensors with sum_over_tensor */
} TensorTable;

/* Names of one block's parameters: "blocks.LAYER.PART". */
void tensor_name(char name[64], int64_t layer, const char *part);
/* layers: what this stage holds; has_embed, has_head: its first and last piece. */
TensorTable tensor_table_make(const Config *config, const Grid *grid, const Range *layers, int chunks, bool has_embed,
                              bool has_head);
void tensor_table_free(TensorTable *table);
/* Dies where it is missing. */
const Tensor *tensor_find(const TensorTable *table, const char *name);
/* Parameters of the whole model by the closed formula; the tables' sum over ranks must equal it. */
int64_t model_parameters(const Config *config);
/* Elements of this rank's real (not padding) part of a tensor. */
int64_t tensor_real_count(const Tensor *tensor);
/* Fills a tensor's storage with its initial values: a pure function of (seed, name, logical index). */
void tensor_init(const Tensor *tensor, uint64_t seed, DType dtype, void *flat);

#endif
