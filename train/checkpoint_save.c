/* checkpoint_save.c - writing a checkpoint from all ranks at once, and publishing it.
 *
 * Order: rank 0 makes the directory and draws the attempt's number -> every rank writes and syncs its shard
 * under a name with that number -> sizes and checksums are gathered -> rank 0 syncs the directory, writes the
 * manifest under a temporary name, syncs it, renames it (the one commit), syncs the directory -> what is
 * outdated goes. Before the rename nothing refers to the new files; after it everything is there.
 * Invariant: all ranks return the same outcome. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/file.h"
#include "base/log.h"
#include "train/checkpoint_files.h"
#include "train/checkpoint_piece.h"
#include "train/safetensors.h"

enum { BUFFER_BYTES = 1 << 20, HEADER_ALIGNMENT = 64 };

/* What a rank tells the others about its shard. bytes 0: it wrote none. */
typedef struct {
    int64_t bytes, header_bytes, data_bytes, n_arrays;
    uint64_t xxh3, header_xxh3;
    uint64_t set_xxh3; /* of the list of its arrays */
} ShardFacts;

typedef struct {
    const CheckpointState *state;
    Group *world; /* NULL: one rank */
    int rank, size;
    const char *dir;
    char *step_dir;
    uint64_t attempt;
    char *path;                      /* of this rank's shard, from when it may exist; NULL: none */
    const CheckpointPiece **written; /* this rank's pieces, in file order */
    int n_written;
    CheckpointArray *arrays; /* of this rank's shard, ascending by name, each once */
    ShardFacts facts;
} Save;

/* Every rank's outcome becomes that of the first rank that failed, which is named. */
static int agree(const Save *save, int rc, Error *err) {
    if (save->world && rc != 0) error_set(err, err->status, "rank %d: %s", save->rank, err->message);
    return comm_agree(save->world, rc, err);
}

/* ---- the shard ---- */

static char *shard_name(const Save *save, int rank) {
    return xasprintf("shard-%05d-%016" PRIx64 ".safetensors", rank, save->attempt);
}

static int64_t piece_bytes(const CheckpointPiece *piece) {
    return piece->flat_count * (int64_t)dtype_size(piece->dtype);
}

/* Wide elements first, so that all of them are aligned. */
static int choose_pieces(Save *save, const CheckpointPiece *pieces, int n, Error *err) {
    save->written = xcalloc((uint64_t)n, sizeof(CheckpointPiece *));
    for (size_t width = 8; width >= 1; width /= 2) {
        for (int i = 0; i < n; i++) {
            const CheckpointPiece *piece = &pieces[i];
            if (!piece->write || piece->flat_count == 0 || dtype_size(piece->dtype) != width) continue;
            if (!piece_valid(piece) || !array_name_valid(piece->name)) {
                return error_set(err, EXIT_INTERNAL, "piece %d (%s) lies outside of its array, or its name is too long",
                                 i, piece->name);
            }
            save->written[save->n_written++] = piece;
        }
    }
    return 0;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const CheckpointArray *)a)->name, ((const CheckpointArray *)b)->name);
}

static bool same_array(const CheckpointArray *a, const CheckpointArray *b) {
    return a->dtype == b->dtype && a->dims == b->dims && a->shape[0] == b->shape[0] &&
           (a->dims == 1 || a->shape[1] == b->shape[1]);
}

/* Sorts a list of arrays and leaves each once. -1 where two entries of one name contradict each other. */
static int unique_arrays(CheckpointArray *arrays, int *n, Error *err) {
    qsort(arrays, (size_t)*n, sizeof *arrays, by_name);
    int kept = 0;
    for (int i = 0; i < *n; i++) {
        if (kept == 0 || strcmp(arrays[kept - 1].name, arrays[i].name) != 0) {
            arrays[kept++] = arrays[i];
        } else if (!same_array(&arrays[kept - 1], &arrays[i])) {
            return error_set(err, EXIT_INTERNAL, "ranks disagree about the shape or dtype of %s", arrays[i].name);
        }
    }
    *n = kept;
    return 0;
}

/* Zeros in all bytes without a meaning: the list is hashed. */
static int list_arrays(Save *save, Error *err) {
    save->arrays = xcalloc((uint64_t)save->n_written, sizeof *save->arrays);
    for (int i = 0; i < save->n_written; i++) {
        const CheckpointPiece *piece = save->written[i];
        CheckpointArray *array = &save->arrays[i];
        strcpy(array->name, piece->name);
        array->dtype = piece->dtype;
        array->dims = piece->dims;
        memcpy(array->shape, piece->shape, (size_t)piece->dims * sizeof piece->shape[0]);
    }
    int n = save->n_written;
    if (unique_arrays(save->arrays, &n, err) != 0) return -1;
    save->facts.n_arrays = n;
    save->facts.set_xxh3 = XXH3_64bits(save->arrays, (size_t)n * sizeof *save->arrays);
    return 0;
}

/* The piece's name; a second piece of the same array in the shard has its place behind it. */
static char *entry_name(const Save *save, int at) {
    const CheckpointPiece *piece = save->written[at];
    for (int i = 0; i < save->n_written; i++) {
        if (i == at || strcmp(save->written[i]->name, piece->name) != 0) continue;
        return xasprintf("%s@%" PRId64 ",%" PRId64 "+%" PRId64, piece->name, piece->first[0],
                         piece->dims == 2 ? piece->first[1] : 0, piece->flat_first);
    }
    return xstrdup(piece->name);
}

static SafetensorsEntry make_entry(const Save *save, int at) {
    const CheckpointPiece *piece = save->written[at];
    int64_t whole = 1;
    for (int i = 0; i < piece->dims; i++) whole *= piece->count[i];
    SafetensorsEntry entry = {.name = entry_name(save, at),
                              .note = piece_note(piece, XXH3_64bits(piece->data, (size_t)piece_bytes(piece))),
                              .type = safetensors_type(piece->dtype),
                              .dims = 1,
                              .shape = {piece->flat_count},
                              .bytes = piece_bytes(piece)};
    if (piece->flat_count == whole) {
        entry.dims = piece->dims;
        memcpy(entry.shape, piece->count, (size_t)piece->dims * sizeof entry.shape[0]);
    }
    return entry;
}

static char *make_header(const Save *save, int64_t *bytes, Error *err) {
    Safetensors file = {.entries = xcalloc((uint64_t)save->n_written, sizeof *file.entries), .n = save->n_written};
    for (int i = 0; i < file.n; i++) file.entries[i] = make_entry(save, i);
    char *header = safetensors_header(file.entries, file.n, HEADER_ALIGNMENT, bytes, err);
    safetensors_free(&file);
    return header;
}

/* A file that is written from front to back, hashed on the way. Small parts are collected. */
typedef struct {
    int fd;
    const char *path;
    XXH3_state_t *hash;
    char *buffer;
    size_t used;
    int64_t bytes;
} Output;

static int output_flush(Output *out, Error *err) {
    const size_t used = out->used;
    out->used = 0;
    return file_write_all(out->fd, out->path, out->buffer, used, err, EXIT_CHECKPOINT);
}

static int output_write(Output *out, const void *from, int64_t bytes, Error *err) {
    out->bytes += bytes;
    for (int64_t done = 0; done < bytes;) {
        const char *part = (const char *)from + done;
        const size_t n = (size_t)min_i64(bytes - done, BUFFER_BYTES);
        XXH3_64bits_update(out->hash, part, n);
        if (out->used + n > BUFFER_BYTES && output_flush(out, err) != 0) return -1;
        if (n == BUFFER_BYTES) {
            if (file_write_all(out->fd, out->path, part, n, err, EXIT_CHECKPOINT) != 0) return -1;
        } else {
            memcpy(out->buffer + out->used, part, n);
            out->used += n;
        }
        done += (int64_t)n;
    }
    return 0;
}

static int write_contents(Save *save, Output *out, Error *err) {
    ShardFacts *facts = &save->facts;
    char *header = make_header(save, &facts->header_bytes, err);
    if (!header) return -1;
    facts->header_xxh3 = XXH3_64bits(header, (size_t)facts->header_bytes);
    int rc = output_write(out, header, facts->header_bytes, err);
    free(header);
    for (int i = 0; i < save->n_written && rc == 0; i++) {
        rc = output_write(out, save->written[i]->data, piece_bytes(save->written[i]), err);
        facts->data_bytes += piece_bytes(save->written[i]);
    }
    if (rc == 0) rc = output_flush(out, err);
    facts->bytes = out->bytes;
    facts->xxh3 = XXH3_64bits_digest(out->hash);
    return rc;
}

/* Rank 0 has made the directory; another host of a shared file system may see it a little later. */
static int open_shard(const Save *save, Error *err) {
    enum { TRIES = 500 };
    for (int try = 0;; try++) {
        const int fd = create_file(save->path, O_EXCL, err);
        if (fd >= 0 || errno != ENOENT || save->rank == 0 || try == TRIES) return fd;
        sleep_s(0.01);
    }
}

static int write_shard(Save *save, Error *err) {
    if (save->n_written == 0) return 0;
    char *name = shard_name(save, save->rank);
    save->path = xasprintf("%s/%s", save->step_dir, name);
    free(name);
    Output out = {.fd = open_shard(save, err), .path = save->path};
    if (out.fd < 0) return -1;
    out.hash = XXH3_createState();
    REQUIRE(out.hash && XXH3_64bits_reset(out.hash) == XXH_OK);
    out.buffer = xmalloc(BUFFER_BYTES);
    int rc = write_contents(save, &out, err);
    rc = sync_and_close(out.fd, out.path, rc, err);
    XXH3_freeState(out.hash);
    free(out.buffer);
    return rc;
}

/* ---- the manifest ---- */

/* Facts and lists of arrays of all ranks; of ranks with equal lists only the first has sent one. */
typedef struct {
    ShardFacts *facts;       /* (size) */
    CheckpointArray *arrays; /* the lists one behind the other */
    int *set_of_rank;        /* (size); -1: no shard */
    int n_sets;
} Gathered;

/* Index of the rank's list among the different ones, and whether it is the first with it. */
static bool first_with_set(Gathered *g, int rank) {
    g->set_of_rank[rank] = -1;
    if (g->facts[rank].bytes == 0) return false;
    for (int other = 0; other < rank; other++) {
        if (g->set_of_rank[other] >= 0 && g->facts[other].set_xxh3 == g->facts[rank].set_xxh3) {
            g->set_of_rank[rank] = g->set_of_rank[other];
            return false;
        }
    }
    g->set_of_rank[rank] = g->n_sets++;
    return true;
}

static Gathered gather_facts(const Save *save) {
    Gathered g = {.set_of_rank = xcalloc((uint64_t)save->size, sizeof(int))};
    int64_t *lengths = xcalloc((uint64_t)save->size, sizeof *lengths);
    if (save->world) {
        g.facts = comm_host_gather(save->world, &save->facts, (int64_t)sizeof save->facts, lengths);
    } else {
        g.facts = memcpy(xmalloc(sizeof save->facts), &save->facts, sizeof save->facts);
    }
    bool sends = false;
    for (int rank = 0; rank < save->size; rank++) {
        const bool first = first_with_set(&g, rank);
        if (rank == save->rank) sends = first;
    }
    const int64_t bytes = sends ? save->facts.n_arrays * (int64_t)sizeof *save->arrays : 0;
    if (save->world) {
        g.arrays = comm_host_gather(save->world, save->arrays, bytes, lengths);
    } else {
        g.arrays = memcpy(xmalloc((uint64_t)bytes), save->arrays, (size_t)bytes);
    }
    free(lengths);
    return g;
}

static void gathered_free(Gathered *g) {
    free(g->facts);
    free(g->arrays);
    free(g->set_of_rank);
}

/* The arrays of all lists, each once; they must be as large as all shards together. */
static int merge_arrays(const Save *save, const Gathered *g, Manifest *manifest, Error *err) {
    int64_t total = 0, data_bytes = 0, array_bytes = 0;
    for (int rank = 0, seen = 0; rank < save->size; rank++) {
        data_bytes += g->facts[rank].data_bytes;
        if (g->set_of_rank[rank] != seen) continue;
        total += g->facts[rank].n_arrays;
        seen++;
    }
    manifest->arrays = xcalloc((uint64_t)total, sizeof *manifest->arrays);
    memcpy(manifest->arrays, g->arrays, (size_t)total * sizeof *manifest->arrays);
    manifest->n_arrays = (int)total;
    if (unique_arrays(manifest->arrays, &manifest->n_arrays, err) != 0) return -1;
    for (int i = 0; i < manifest->n_arrays; i++) {
        const CheckpointArray *array = &manifest->arrays[i];
        array_bytes += array->shape[0] * (array->dims == 2 ? array->shape[1] : 1) * (int64_t)dtype_size(array->dtype);
    }
    if (array_bytes == data_bytes) return 0;
    return error_set(err, EXIT_INTERNAL, "the ranks wrote %" PRId64 " bytes of arrays that have %" PRId64 " bytes",
                     data_bytes, array_bytes);
}

static int make_manifest(const Save *save, const Gathered *g, Manifest *manifest, Error *err) {
    if (merge_arrays(save, g, manifest, err) != 0) return -1;
    manifest->sets = xcalloc((uint64_t)g->n_sets, sizeof *manifest->sets);
    manifest->files = xcalloc((uint64_t)save->size, sizeof *manifest->files);
    const CheckpointArray *next = g->arrays;
    for (int rank = 0; rank < save->size; rank++) {
        const ShardFacts *facts = &g->facts[rank];
        if (facts->bytes == 0) continue;
        if (g->set_of_rank[rank] == manifest->n_sets) {
            ManifestSet *set = &manifest->sets[manifest->n_sets++];
            set->n = (int)facts->n_arrays;
            set->arrays = xcalloc((uint64_t)set->n, sizeof *set->arrays);
            for (int i = 0; i < set->n; i++) set->arrays[i] = manifest_find_array(manifest, (next++)->name);
        }
        manifest->files[manifest->n_files++] = (ManifestFile){.name = shard_name(save, rank),
                                                              .bytes = facts->bytes,
                                                              .xxh3 = facts->xxh3,
                                                              .header_bytes = facts->header_bytes,
                                                              .header_xxh3 = facts->header_xxh3,
                                                              .set = g->set_of_rank[rank]};
    }
    return 0;
}

/* A rename that reports failure may have happened all the same (a server that answered twice). */
static bool was_published(const char *path, const char *text) {
    Error ignored;
    size_t bytes;
    char *found = file_read(path, &bytes, strlen(text), &ignored, EXIT_CHECKPOINT);
    const bool same = found && bytes == strlen(text) && memcmp(found, text, bytes) == 0;
    free(found);
    return same;
}

static int write_temporary(const char *path, const char *text, Error *err) {
    const int fd = create_file(path, O_TRUNC, err);
    if (fd < 0) return -1;
    return sync_and_close(fd, path, file_write_all(fd, path, text, strlen(text), err, EXIT_CHECKPOINT), err);
}

/* *published: the manifest may have its name, also where an error came afterwards. */
static int publish_text(const Save *save, const char *text, bool *published, Error *err) {
    char *path = xasprintf("%s/manifest.json", save->step_dir);
    char *temporary = xasprintf("%s.tmp.%016" PRIx64, path, save->attempt);
    /* The shards' names must last before anything refers to them. */
    int rc = directory_sync(save->step_dir, err, EXIT_CHECKPOINT);
    if (rc == 0) rc = write_temporary(temporary, text, err);
    if (rc == 0 && rename(temporary, path) != 0) {
        rc = error_set(err, EXIT_CHECKPOINT, "%s: cannot rename to %s: %s", temporary, path, strerror(errno));
        if (was_published(path, text)) rc = 0;
    }
    *published = rc == 0;
    if (rc != 0) unlink(temporary);
    if (rc == 0) rc = directory_sync(save->step_dir, err, EXIT_CHECKPOINT);
    free(temporary);
    free(path);
    return rc;
}

static int publish(const Save *save, const Gathered *g, bool *published, Error *err) {
    Manifest manifest = {0};
    int rc = make_manifest(save, g, &manifest, err);
    if (rc == 0) {
        manifest.state = *save->state; /* borrowed */
        char *text = manifest_to_text(&manifest, err);
        rc = text ? publish_text(save, text, published, err) : -1;
        free(text);
    }
    manifest.state = (CheckpointState){0};
    manifest_free(&manifest);
    return rc;
}

/* ---- the whole ---- */

/* The names of the directories above must last as well; one that may not be opened was not made here. */
static void sync_ancestors(const char *dir) {
    Error ignored;
    char *path = xstrdup(dir);
    for (char *slash; (slash = strrchr(path, '/')) != NULL && slash != path;) {
        *slash = 0;
        directory_sync(path, &ignored, EXIT_CHECKPOINT);
    }
    if (path[0] != '/') directory_sync(".", &ignored, EXIT_CHECKPOINT);
    free(path);
}

/* Rank 0 only: directories that last, and a number that no other attempt has. */
static int make_directory(Save *save, Error *err) {
    if (getrandom(&save->attempt, sizeof save->attempt, 0) != sizeof save->attempt) {
        save->attempt = (uint64_t)getpid() << 48 ^ (uint64_t)(clock_s() * 1e9);
    }
    if (directory_make(save->step_dir, err, EXIT_CHECKPOINT) != 0) return -1;
    sync_ancestors(save->dir);
    return directory_sync(save->dir, err, EXIT_CHECKPOINT);
}

static void share_attempt(Save *save) {
    if (!save->world) return;
    int64_t *lengths = xcalloc((uint64_t)save->size, sizeof *lengths);
    const int64_t bytes = save->rank == 0 ? (int64_t)sizeof save->attempt : 0;
    uint64_t *all = comm_host_gather(save->world, &save->attempt, bytes, lengths);
    save->attempt = all[0];
    free(all);
    free(lengths);
}

/* Nothing refers to the new shards: they go, and the directory with them where it holds nothing else. */
static void take_back(const Save *save) {
    if (save->path && unlink(save->path) != 0 && errno != ENOENT) {
        log_warn(LOG_CKPT, "%s: cannot remove: %s", save->path, strerror(errno));
    }
    /* All ranks have removed theirs when this returns. */
    Error unused;
    agree(save, 0, &unused);
    if (save->rank == 0) rmdir(save->step_dir);
}

static int save_steps(Save *save, const CheckpointPiece *pieces, int n, Error *err) {
    int rc = save->rank == 0 ? make_directory(save, err) : 0;
    if (agree(save, rc, err) != 0) {
        if (save->rank == 0) rmdir(save->step_dir);
        return -1;
    }
    share_attempt(save);
    rc = choose_pieces(save, pieces, n, err);
    if (rc == 0) rc = list_arrays(save, err);
    if (rc == 0) rc = write_shard(save, err);
    if (agree(save, rc, err) != 0) {
        take_back(save);
        return -1;
    }
    Gathered g = gather_facts(save);
    bool published = false;
    rc = save->rank == 0 ? publish(save, &g, &published, err) : 0;
    gathered_free(&g);
    /* Whether the new shards may be removed is rank 0's knowledge: it says so with its outcome. */
    Error unused;
    const bool unpublished = agree(save, save->rank == 0 && !published ? error_set(&unused, EXIT_CHECKPOINT, "-") : 0,
                                   &unused) != 0;
    rc = agree(save, rc, err);
    if (unpublished) take_back(save);
    return rc;
}

int checkpoint_save(const char *dir, const CheckpointState *state, const CheckpointPiece *pieces, int n, Group *world,
                    int64_t keep, Error *err) {
    Save save = {.state = state,
                 .world = world,
                 .size = world ? group_size(world) : 1,
                 .rank = world ? group_rank(world) : 0,
                 .dir = dir,
                 .step_dir = step_directory(dir, state->step)};
    int rc = save_steps(&save, pieces, n, err);
    if (rc == 0 && save.rank == 0) remove_outdated(dir, state->step, keep);
    free(save.step_dir);
    free(save.path);
    free(save.written);
    free(save.arrays);
    return rc;
}
