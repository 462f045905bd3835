/* checkpoint_world.h - what the checkpoint tests share: a small state, cut into pieces at random, and ranks that
 * are threads of this process, with the two functions of comm.h that saving needs. */
#ifndef TRIDENT_TESTS_CHECKPOINT_WORLD_H
#define TRIDENT_TESTS_CHECKPOINT_WORLD_H

#include <pthread.h>

#include "base/log.h"
#include "tests/unit/data/scratch.h"
#include "train/checkpoint.h"

enum { RANKS_MAX = 6, ARRAYS_MAX = 8, PIECES_MAX = 400 };

/* ---- ranks ---- */

typedef struct {
    int size;
    pthread_barrier_t barrier;
    const void *mine[RANKS_MAX];
    int64_t bytes[RANKS_MAX];
} World;

struct Group {
    World *world;
    int rank;
};

int group_size(const Group *group) { return group->world->size; }
int group_rank(const Group *group) { return group->rank; }

void *comm_host_gather(Group *group, const void *mine, int64_t bytes, int64_t *lengths) {
    World *world = group->world;
    world->mine[group->rank] = mine;
    world->bytes[group->rank] = bytes;
    pthread_barrier_wait(&world->barrier);
    int64_t total = 0;
    for (int i = 0; i < world->size; i++) total += world->bytes[i];
    char *all = xmalloc((uint64_t)total), *to = all;
    for (int i = 0; i < world->size; i++) {
        lengths[i] = world->bytes[i];
        if (lengths[i]) memcpy(to, world->mine[i], (size_t)lengths[i]);
        to += lengths[i];
    }
    pthread_barrier_wait(&world->barrier);
    return all;
}

/* ---- the state ---- */

typedef struct {
    const char *name; /* static: pieces point to it too */
    DType dtype;
    int dims;
    int64_t shape[2];
} LogicalArray;

typedef struct {
    LogicalArray list[ARRAYS_MAX];
    int n;
    uint64_t version; /* other values for every version */
} Logical;

/* The byte of element `index` of an array. */
static inline uint8_t logical_byte(const Logical *logical, int array, int64_t index, int64_t byte) {
    return (uint8_t)rng_bits(logical->version, (uint64_t)array, (uint64_t)(index * 8 + byte));
}

typedef struct {
    CheckpointPiece piece;
    int array, rank;
} OwnedPiece;

typedef struct {
    OwnedPiece list[PIECES_MAX];
    int n;
} Partition;

/* Index in the logical array of the piece's element number i: the slow and obvious way. */
static inline int64_t logical_index(const CheckpointPiece *piece, int64_t i) {
    i += piece->flat_first;
    if (piece->dims == 1) return piece->first[0] + i;
    return (piece->first[0] + i / piece->count[1]) * piece->shape[1] + piece->first[1] + i % piece->count[1];
}

static inline void piece_fill(const Logical *logical, OwnedPiece *owned) {
    const int64_t width = (int64_t)dtype_size(owned->piece.dtype);
    uint8_t *to = owned->piece.data;
    for (int64_t i = 0; i < owned->piece.flat_count; i++) {
        for (int64_t b = 0; b < width; b++) {
            *to++ = logical_byte(logical, owned->array, logical_index(&owned->piece, i), b);
        }
    }
}

/* Number of the first wrong element, -1: none. */
static inline int64_t piece_differs(const Logical *logical, const OwnedPiece *owned) {
    const int64_t width = (int64_t)dtype_size(owned->piece.dtype);
    const uint8_t *at = owned->piece.data;
    for (int64_t i = 0; i < owned->piece.flat_count; i++) {
        for (int64_t b = 0; b < width; b++) {
            if (*at++ != logical_byte(logical, owned->array, logical_index(&owned->piece, i), b)) return i;
        }
    }
    return -1;
}

static inline CheckpointPiece whole_piece(const LogicalArray *array) {
    CheckpointPiece piece = {.name = array->name, .dtype = array->dtype, .dims = array->dims, .flat_count = 1};
    for (int i = 0; i < array->dims; i++) {
        piece.shape[i] = piece.count[i] = array->shape[i];
        piece.flat_count *= array->shape[i];
    }
    return piece;
}

static inline void add_owned(Partition *partition, int array, CheckpointPiece piece, int rank, bool write) {
    REQUIRE(partition->n < PIECES_MAX);
    piece.write = write;
    piece.data = xcalloc((uint64_t)piece.flat_count, dtype_size(piece.dtype));
    partition->list[partition->n++] = (OwnedPiece){.piece = piece, .array = array, .rank = rank};
}

static inline void partition_free(Partition *partition) {
    for (int i = 0; i < partition->n; i++) free(partition->list[i].piece.data);
    free(partition);
}

/* Everything on one rank. */
static inline Partition *partition_whole(const Logical *logical) {
    Partition *partition = xcalloc(1, sizeof *partition);
    for (int i = 0; i < logical->n; i++) add_owned(partition, i, whole_piece(&logical->list[i]), 0, true);
    return partition;
}

/* A rectangle as one piece, or as flat ranges of it, each with a rank of its own; sometimes another rank
 * holds the same piece without writing it. */
static inline void cut_flat(Partition *partition, int array, CheckpointPiece piece, int ranks) {
    const int64_t total = piece.flat_count;
    const int64_t parts = draw(2) ? 1 : 1 + draw(min_i64(4, total));
    for (int64_t i = 0, from = 0; i < parts; i++) {
        const int64_t left = parts - 1 - i;
        const int64_t count = left ? 1 + draw(total - from - left) : total - from;
        piece.flat_first = from;
        piece.flat_count = count;
        const int rank = (int)draw(ranks);
        add_owned(partition, array, piece, rank, true);
        if (ranks > 1 && draw(4) == 0) add_owned(partition, array, piece, (rank + 1) % ranks, false);
        from += count;
    }
}

/* Cuts the rectangle in two along a random axis, again and again. */
static inline void cut_rectangle(Partition *partition, int array, CheckpointPiece piece, int depth, int ranks) {
    const int axis = (int)draw(piece.dims);
    if (depth == 0 || piece.count[axis] < 2 || draw(4) == 0) {
        cut_flat(partition, array, piece, ranks);
        return;
    }
    const int64_t at = 1 + draw(piece.count[axis] - 1);
    CheckpointPiece first = piece, second = piece;
    first.count[axis] = at;
    second.first[axis] += at;
    second.count[axis] -= at;
    first.flat_count = piece.flat_count / piece.count[axis] * at;
    second.flat_count = piece.flat_count - first.flat_count;
    cut_rectangle(partition, array, first, depth - 1, ranks);
    cut_rectangle(partition, array, second, depth - 1, ranks);
}

static inline Partition *partition_random(const Logical *logical, int ranks) {
    Partition *partition = xcalloc(1, sizeof *partition);
    for (int i = 0; i < logical->n; i++) {
        cut_rectangle(partition, i, whole_piece(&logical->list[i]), (int)draw(4), ranks);
    }
    return partition;
}

static inline Logical logical_random(void) {
    static char names[ARRAYS_MAX][64];
    static const DType dtypes[] = {DT_F32, DT_F64, DT_BF16, DT_F16, DT_I32};
    Logical logical = {.n = 1 + (int)draw(ARRAYS_MAX), .version = (uint64_t)draw(1 << 30)};
    for (int i = 0; i < logical.n; i++) {
        LogicalArray *array = &logical.list[i];
        snprintf(names[i], sizeof names[i], "%s/blocks.%d.\"w\xc3\xa9ight\" %d", i % 2 ? "param" : "adam_m", i, i);
        array->name = names[i];
        array->dtype = dtypes[draw(5)];
        array->dims = 1 + (int)draw(2);
        array->shape[0] = 1 + draw(draw(3) ? 12 : 200);
        array->shape[1] = array->dims == 2 ? 1 + draw(draw(3) ? 12 : 40) : 0;
    }
    return logical;
}

/* A fixed state of three arrays. */
static inline Logical logical_fixed(uint64_t version) {
    return (Logical){.list = {{"param/embed.weight", DT_F32, 2, {6, 5}},
                              {"param/norm.weight", DT_F32, 1, {7, 0}},
                              {"adam_m/embed.weight", DT_F64, 2, {6, 5}}},
                     .n = 3,
                     .version = version};
}

/* A rank holds some rows of each matrix; the vector is the last rank's. */
static inline Partition *partition_rows(const Logical *logical, int ranks) {
    Partition *partition = xcalloc(1, sizeof *partition);
    for (int i = 0; i < logical->n; i++) {
        CheckpointPiece piece = whole_piece(&logical->list[i]);
        for (int rank = 0; rank < ranks && piece.dims == 2; rank++) {
            piece.first[0] = rank * piece.shape[0] / ranks;
            piece.count[0] = (rank + 1) * piece.shape[0] / ranks - piece.first[0];
            piece.flat_count = piece.count[0] * piece.shape[1];
            add_owned(partition, i, piece, rank, true);
        }
        if (piece.dims == 1) add_owned(partition, i, piece, ranks - 1, true);
    }
    return partition;
}

/* ---- saving and loading ---- */

typedef struct {
    World world;
    Group groups[RANKS_MAX];
    const char *dir;
    int64_t step, keep;
    const Partition *partition;
    void (*begin)(int rank); /* called by each rank's thread, or NULL */
    int rc[RANKS_MAX];
    Error err[RANKS_MAX];
} SaveJob;

typedef struct {
    SaveJob *job;
    int rank;
} SaveThread;

static inline void *save_rank(void *argument) {
    const SaveThread *thread = argument;
    SaveJob *job = thread->job;
    CheckpointPiece *pieces = xcalloc((uint64_t)job->partition->n, sizeof *pieces);
    int n = 0;
    for (int i = 0; i < job->partition->n; i++) {
        if (job->partition->list[i].rank == thread->rank) pieces[n++] = job->partition->list[i].piece;
    }
    int64_t counters[2] = {job->step * 3, job->step * 5};
    char config[] = "[model]\nname = \"caf\xc3\xa9\"\n", extra[] = "{\"loss_scale\":1024,\"list\":[1,2]}";
    const CheckpointState state = {.step = job->step,
                                   .samples = job->step * 8,
                                   .tokens = job->step * 128,
                                   .skipped = 1,
                                   .config_text = config,
                                   .data_fingerprint = UINT64_C(0xfedcba9876543210),
                                   .n_corpora = 2,
                                   .corpus_counters = counters,
                                   .last_loss = 1.0 / 3.0,
                                   .grid_size = {1, 2, 3},
                                   .extra_json = extra};
    if (job->begin) job->begin(thread->rank);
    Group *group = job->world.size > 1 ? &job->groups[thread->rank] : NULL;
    job->rc[thread->rank] = checkpoint_save(job->dir, &state, pieces, n, group, job->keep, &job->err[thread->rank]);
    free(pieces);
    return NULL;
}

/* All ranks save; their outcomes must be the same. That outcome; the message is job->err[0]'s. */
static inline int save_all(SaveJob *job, int ranks) {
    pthread_t threads[RANKS_MAX];
    SaveThread arguments[RANKS_MAX];
    job->world.size = ranks;
    memset(job->err, 0, sizeof job->err);
    pthread_barrier_init(&job->world.barrier, NULL, (unsigned)ranks);
    for (int rank = 0; rank < ranks; rank++) {
        job->groups[rank] = (Group){&job->world, rank};
        arguments[rank] = (SaveThread){job, rank};
        ck_assert_int_eq(pthread_create(&threads[rank], NULL, save_rank, &arguments[rank]), 0);
    }
    for (int rank = 0; rank < ranks; rank++) pthread_join(threads[rank], NULL);
    pthread_barrier_destroy(&job->world.barrier);
    for (int rank = 1; rank < ranks; rank++) {
        ck_assert_int_eq(job->rc[rank], job->rc[0]);
        if (job->rc[0]) ck_assert_str_eq(job->err[rank].message, job->err[0].message);
    }
    return job->rc[0];
}

/* Fills the partition with the state and saves it; must succeed. */
static inline void save_good(const char *dir, int64_t step, int64_t keep, const Logical *logical, Partition *partition,
                             int ranks) {
    for (int i = 0; i < partition->n; i++) piece_fill(logical, &partition->list[i]);
    SaveJob job = {.dir = dir, .step = step, .keep = keep, .partition = partition};
    ck_assert_msg(save_all(&job, ranks) == 0, "%s", job.err[0].message);
}

/* Loads what one rank (-1: all of them together) holds. */
static inline int load_rank(const char *step_dir, Partition *partition, int rank, Error *err) {
    CheckpointPiece *pieces = xcalloc((uint64_t)partition->n, sizeof *pieces);
    int n = 0;
    for (int i = 0; i < partition->n; i++) {
        if (rank < 0 || partition->list[i].rank == rank) pieces[n++] = partition->list[i].piece;
    }
    int rc = checkpoint_load(step_dir, pieces, n, err);
    free(pieces);
    return rc;
}

static inline void wipe(Partition *partition, int value) {
    for (int i = 0; i < partition->n; i++) {
        const CheckpointPiece *piece = &partition->list[i].piece;
        memset(piece->data, value, (size_t)piece->flat_count * dtype_size(piece->dtype));
    }
}

static inline bool wiped(const Partition *partition, int value) {
    for (int i = 0; i < partition->n; i++) {
        const CheckpointPiece *piece = &partition->list[i].piece;
        const uint8_t *bytes = piece->data;
        for (size_t b = 0; b < (size_t)piece->flat_count * dtype_size(piece->dtype); b++) {
            if (bytes[b] != value) return false;
        }
    }
    return true;
}

/* Whether the directory's newest complete checkpoint is that step with these values; prints where not. */
static inline bool holds(const char *dir, int64_t step, const Logical *logical) {
    Error err;
    char wanted[64];
    snprintf(wanted, sizeof wanted, "/step-%08lld", (long long)step);
    char *found = checkpoint_find(dir, &err);
    Partition *partition = partition_whole(logical);
    bool good = found && strstr(found, wanted) != NULL;
    if (!good) fprintf(stderr, "found %s: %s\n", found ? found : "nothing", err.message);
    if (good && load_rank(found, partition, -1, &err) != 0) {
        fprintf(stderr, "%s\n", err.message);
        good = false;
    }
    for (int i = 0; i < partition->n && good; i++) good = piece_differs(logical, &partition->list[i]) < 0;
    partition_free(partition);
    free(found);
    return good;
}

#endif
