/* trainer_state.c - a rank's state as checkpoint pieces, and the check that replicas agree.
 * In: trainer. Out: pieces that point into its memory.
 * Invariant: of all ranks that hold the same part of a tensor, exactly one writes it; the work of
 * writing is spread over the data ranks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/check.h"
#include "kernels/kernels.h"
#include "train/trainer.h"

static void add_piece(const Trainer *t, CheckpointPiece *piece, const Tensor *tensor, const char *prefix, void *flat,
                      int writer) {
    const DType dtype = t->config->dtype;
    *piece = (CheckpointPiece){
        .name = xasprintf("%s/%s", prefix, tensor->name),
        .dtype = dtype,
        .dims = tensor->dims,
        .shape = {tensor->shape[0], tensor->shape[1]},
        .count = {tensor->local[0], tensor->local[1]},
        .flat_count = tensor_real_count(tensor),
        .data = (char *)flat + tensor->offset * (int64_t)dtype_size(dtype),
        .write = tensor->counted && writer == t->grid.index[DIM_DATA],
    };
    if (tensor->split != SPLIT_NONE) {
        piece->first[tensor->split] = tensor->part.first;
        piece->count[tensor->split] = tensor->part.count;
    }
}

CheckpointPiece *trainer_pieces(const Trainer *t, bool with_optimizer, int *n) {
    const TensorTable *tensors = &t->model.tensors;
    const int kinds = 1 + (with_optimizer ? t->optimizer.states : 0);
    CheckpointPiece *pieces = xcalloc((uint64_t)(tensors->n * kinds), sizeof *pieces);
    *n = 0;
    for (int i = 0; i < tensors->n; i++) {
        /* A rank past the end of the vocabulary holds padding only. */
        if (tensor_real_count(&tensors->list[i]) == 0) continue;
        for (int kind = 0; kind < kinds; kind++) {
            const char *prefix = kind ? t->optimizer.state_names[kind - 1] : "param";
            void *flat = kind ? t->optimizer.state[kind - 1] : t->model.params;
            add_piece(t, &pieces[*n], &tensors->list[i], prefix, flat, i % t->grid.size[DIM_DATA]);
            (*n)++;
        }
    }
    return pieces;
}

void trainer_pieces_free(CheckpointPiece *pieces, int n) {
    for (int i = 0; i < n; i++) free((char *)(uintptr_t)pieces[i].name);
    free(pieces);
}

/* Checksums of the tensors, by ranks of a group, must agree where `shared` says that they hold the same. */
static int compare_over(Trainer *t, Group *group, const char *group_name, bool (*shared)(const Tensor *), Error *err) {
    if (!group) return 0;
    const TensorTable *tensors = &t->model.tensors;
    const size_t element = dtype_size(t->config->dtype);
    uint64_t *sums = xcalloc((uint64_t)tensors->n, sizeof *sums);
    int n = 0;
    for (int i = 0; i < tensors->n; i++) {
        const Tensor *tensor = &tensors->list[i];
        if (!shared(tensor)) continue;
        sums[n++] = XXH3_64bits((char *)t->model.params + (size_t)tensor->offset * element,
                                (size_t)tensor->count * element);
    }
    const int size = group_size(group);
    int64_t *lengths = xcalloc((uint64_t)size, sizeof *lengths);
    uint64_t *all = comm_host_gather(group, sums, (int64_t)((size_t)n * sizeof *sums), lengths);
    int rc = 0;
    for (int rank = 1; rank < size && rc == 0; rank++) {
        REQUIRE(lengths[rank] == lengths[0]);
        for (int i = 0, k = 0; i < tensors->n && rc == 0; i++) {
            if (!shared(&tensors->list[i])) continue;
            if (all[k] != all[rank * n + k]) {
                rc = error_set(err, EXIT_NUMBERS,
                               "%s differs between ranks 0 and %d of the %s group after step %lld, "
                               "though both must hold the same bits: memory or a reduction is at fault",
                               tensors->list[i].name, rank, group_name, (long long)t->step);
            }
            k++;
        }
    }
    free(all);
    free(lengths);
    free(sums);
    return rc;
}

int trainer_check_finite(const Trainer *t, Error *err) {
    const TensorTable *tensors = &t->model.tensors;
    const DType dtype = t->config->dtype;
    const Tensor *bad = NULL;
    const char *kind = NULL;
    for (int k = 0; k <= t->optimizer.states && !bad; k++) {
        const char *flat = k ? t->optimizer.state[k - 1] : t->model.params;
        for (int i = 0; i < tensors->n && !bad; i++) {
            const Tensor *tensor = &tensors->list[i];
            double sum = 0.0;
            squared_norm(&sum, flat + tensor->offset * (int64_t)dtype_size(dtype), tensor->count, dtype,
                         t->model.compute);
            if (!isfinite(sum)) bad = tensor;
        }
        kind = k ? t->optimizer.state_names[k - 1] : "param";
    }
    const int rc = bad ? error_set(err, EXIT_NUMBERS,
                                   "%s/%s is not finite after step %lld, and no later step can repair that: nothing is "
                                   "saved, and the checkpoints before are as they were. A lower optimizer.lr or "
                                   "optimizer.clip may help",
                                   kind, bad->name, (long long)t->step)
                       : 0;
    return comm_agree(t->groups.world, rc, err);
}

static bool any_tensor(const Tensor *tensor) { return tensor->count > 0; }
static bool unsplit_tensor(const Tensor *tensor) { return tensor->split == SPLIT_NONE; }
static bool embedding_tensor(const Tensor *tensor) { return strcmp(tensor->name, "embed.weight") == 0; }
static bool shared_head_tensor(const Tensor *tensor) { return tensor->sharers > 1; }

int trainer_check_replicas(Trainer *t, Error *err) {
    const struct {
        Group *group;
        const char *name;
        bool (*shared)(const Tensor *);
    } kinds[] = {
        {t->groups.data, "data", any_tensor},
        {t->groups.tensor, "tensor", unsplit_tensor},
        {t->groups.kv_sharers, "shared key/value heads", shared_head_tensor},
        {t->groups.embedding, "tied embedding", embedding_tensor},
    };
    /* All comparisons run on all ranks, also after a difference: they are collective. */
    int rc = 0;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        Error found;
        if (compare_over(t, kinds[i].group, kinds[i].name, kinds[i].shared, &found) != 0 && rc == 0) {
            *err = found;
            rc = -1;
        }
    }
    return comm_agree(t->groups.world, rc, err);
}
