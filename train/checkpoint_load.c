/* checkpoint_load.c - putting pieces together from the shards of any layout.
 *
 * Manifest -> the arrays that the pieces belong to -> the files that hold parts of these -> their headers
 * (checked against the manifest) -> their entries as sources -> for each piece the boxes that it has in common
 * with the sources -> every source that is used is read once and checked against the sum in its header -> only
 * then is it read again, and copied. What no piece asks for is not read.
 * Invariants: nothing is changed before everything is verified; memory does not grow with the arrays. */
#include "train/checkpoint_load.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/file.h"
#include "train/checkpoint_piece.h"
#include "train/safetensors.h"

enum { BUFFER_BYTES = 4 << 20, ROW_BYTES_DIRECT = 64 << 10 };

/* An entry of a shard. */
typedef struct {
    CheckpointPiece piece; /* data NULL; name: the manifest's */
    int file, array;       /* indices in the manifest */
    int64_t first_byte, bytes;
    uint64_t xxh3;
    bool used;
} Source;

/* A box to copy: elements at `from` in the source go to element `to` of the piece. */
typedef struct {
    int source, piece;
    int64_t rows, columns;
    int64_t from, from_stride, to, to_stride;
    int64_t first[2]; /* in the logical array */
} Transfer;

typedef struct {
    const char *step_dir;
    const Manifest *manifest;
    const CheckpointPiece *pieces;
    int n_pieces;
    bool *array_wanted;
    Source *sources; /* by array, then by file and place in it */
    int n_sources, sources_max;
    Transfer *transfers;
    int n_transfers, transfers_max;
    char *buffer;  /* BUFFER_BYTES */
    int open_file; /* index in the manifest, -1: none */
    int fd;
    char *path; /* of the open file */
} Load;

/* Doubles what a list can hold where it is full. */
static void *grow(void *list, int n, int *max, size_t element) {
    if (n < *max) return list;
    *max = *max ? 2 * *max : 64;
    return xrealloc(list, (uint64_t)*max * element);
}

/* ---- files ---- */

static void close_file(Load *load) {
    if (load->open_file >= 0) close(load->fd);
    free(load->path);
    load->path = NULL;
    load->open_file = -1;
}

/* Files are used one at a time: a checkpoint may have more of them than a process may open. */
static int open_file(Load *load, int index, Error *err) {
    if (load->open_file == index) return 0;
    close_file(load);
    const ManifestFile *file = &load->manifest->files[index];
    load->path = xasprintf("%s/%s", load->step_dir, file->name);
    load->fd = open(load->path, O_RDONLY | O_CLOEXEC);
    if (load->fd < 0) {
        return error_set(err, EXIT_CHECKPOINT, "%s: cannot open: %s", load->path, strerror(errno));
    }
    load->open_file = index;
    struct stat facts = {0};
    if (fstat(load->fd, &facts) != 0) {
        return error_set(err, EXIT_CHECKPOINT, "%s: cannot stat: %s", load->path, strerror(errno));
    }
    if (facts.st_size != file->bytes) {
        return error_set(err, EXIT_CHECKPOINT, "%s: has %" PRId64 " bytes, the manifest says %" PRId64, load->path,
                         (int64_t)facts.st_size, file->bytes);
    }
    return 0;
}

/* XXH3 of a part of the open file. */
static int hash_part(Load *load, int64_t first_byte, int64_t bytes, uint64_t *xxh3, Error *err) {
    XXH3_state_t *hash = XXH3_createState();
    REQUIRE(hash && XXH3_64bits_reset(hash) == XXH_OK);
    int rc = 0;
    for (int64_t done = 0; done < bytes && rc == 0;) {
        const int64_t n = min_i64(bytes - done, BUFFER_BYTES);
        rc = file_read_at(load->fd, load->path, load->buffer, (size_t)n, first_byte + done, err, EXIT_CHECKPOINT);
        if (rc == 0) XXH3_64bits_update(hash, load->buffer, (size_t)n);
        done += n;
    }
    *xxh3 = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return rc;
}

/* ---- sources ---- */

static int read_entry(Load *load, int file, const SafetensorsEntry *entry, Error *err) {
    Source source = {.file = file, .first_byte = entry->first_byte, .bytes = entry->bytes};
    CheckpointPiece *piece = &source.piece;
    piece->dtype = safetensors_dtype(entry->type);
    if (!entry->note || !piece_from_note(entry->note, piece, &source.xxh3) || piece->dtype == DT_COUNT ||
        entry->bytes != piece->flat_count * (int64_t)dtype_size(piece->dtype)) {
        return error_set(err, EXIT_CHECKPOINT,
                         "%s: entry \"%s\" does not say which part of which array it is, or not "
                         "what its %" PRId64 " bytes are",
                         load->path, entry->name, entry->bytes);
    }
    source.array = manifest_find_array(load->manifest, piece->name);
    if (source.array < 0) {
        return error_set(err, EXIT_CHECKPOINT, "%s: holds a part of %s, which the manifest does not know", load->path,
                         piece->name);
    }
    const CheckpointArray *array = &load->manifest->arrays[source.array];
    if (piece->dtype != array->dtype || piece->dims != array->dims || piece->shape[0] != array->shape[0] ||
        (piece->dims == 2 && piece->shape[1] != array->shape[1])) {
        return error_set(err, EXIT_CHECKPOINT, "%s: its part of %s has another shape or dtype than the manifest says",
                         load->path, piece->name);
    }
    if (!load->array_wanted[source.array]) return 0;
    piece->name = array->name;
    load->sources = grow(load->sources, load->n_sources, &load->sources_max, sizeof source);
    load->sources[load->n_sources++] = source;
    return 0;
}

/* The header of a file, verified before it is understood. */
static int read_header(Load *load, int index, Error *err) {
    const ManifestFile *file = &load->manifest->files[index];
    int64_t bytes;
    if (open_file(load, index, err) != 0) return -1;
    char *header = safetensors_read_header(load->fd, load->path, file->bytes, &bytes, err);
    if (!header) return -1;
    const uint64_t found = XXH3_64bits(header, (size_t)bytes);
    Safetensors entries = {0};
    int rc = 0;
    if (bytes != file->header_bytes || found != file->header_xxh3) {
        rc = error_set(err, EXIT_CHECKPOINT,
                       "%s: damaged, or the file of another save: its header has %" PRId64
                       " bytes with checksum %016" PRIx64 ", the manifest says %" PRId64 " with %016" PRIx64,
                       load->path, bytes, found, file->header_bytes, file->header_xxh3);
    } else {
        rc = safetensors_parse(load->path, header, bytes, file->bytes, &entries, err);
    }
    for (int i = 0; i < entries.n && rc == 0; i++) rc = read_entry(load, index, &entries.entries[i], err);
    safetensors_free(&entries);
    free(header);
    return rc;
}

static int by_array_and_place(const void *a, const void *b) {
    const Source *x = a, *y = b;
    if (x->array != y->array) return x->array < y->array ? -1 : 1;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    return (x->first_byte > y->first_byte) - (x->first_byte < y->first_byte);
}

static bool file_needed(const Load *load, const ManifestFile *file) {
    const ManifestSet *set = &load->manifest->sets[file->set];
    for (int i = 0; i < set->n; i++) {
        if (load->array_wanted[set->arrays[i]]) return true;
    }
    return false;
}

static int read_sources(Load *load, Error *err) {
    for (int i = 0; i < load->manifest->n_files; i++) {
        if (file_needed(load, &load->manifest->files[i]) && read_header(load, i, err) != 0) return -1;
    }
    if (load->n_sources) {
        qsort(load->sources, (size_t)load->n_sources, sizeof *load->sources, by_array_and_place);
    }
    return 0;
}

/* ---- what goes where ---- */

static void shape_text(char text[64], int dims, const int64_t *shape) {
    if (dims == 1) snprintf(text, 64, "(%" PRId64 ")", shape[0]);
    else snprintf(text, 64, "(%" PRId64 ", %" PRId64 ")", shape[0], shape[1]);
}

static int want_array(Load *load, const CheckpointPiece *piece, Error *err) {
    REQUIRE(piece->flat_count == 0 || piece_valid(piece));
    const int index = manifest_find_array(load->manifest, piece->name);
    if (index < 0) {
        return error_set(err, EXIT_CHECKPOINT, "%s: has no array %s", load->step_dir, piece->name);
    }
    const CheckpointArray *array = &load->manifest->arrays[index];
    char saved[64], wanted[64];
    shape_text(saved, array->dims, array->shape);
    shape_text(wanted, piece->dims, piece->shape);
    if (strcmp(saved, wanted) != 0) {
        return error_set(err, EXIT_CHECKPOINT, "%s: %s has shape %s, this run needs %s", load->step_dir, piece->name,
                         saved, wanted);
    }
    if (array->dtype != piece->dtype) {
        return error_set(err, EXIT_CHECKPOINT, "%s: %s was saved as %s, this run needs %s", load->step_dir, piece->name,
                         dtype_name(array->dtype), dtype_name(piece->dtype));
    }
    load->array_wanted[index] = true;
    return 0;
}

/* The first source of the array. */
static int first_source(const Load *load, int array) {
    int low = 0, high = load->n_sources;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (load->sources[middle].array < array) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void add_transfers(Load *load, int source, int piece, const Box *from, const Box *wanted, int n_wanted) {
    for (int i = 0; i < n_wanted; i++) {
        Box part;
        if (!box_common(from, &wanted[i], &part)) continue;
        load->sources[source].used = true;
        load->transfers = grow(load->transfers, load->n_transfers, &load->transfers_max, sizeof *load->transfers);
        load->transfers[load->n_transfers++] = (Transfer){.source = source,
                                                          .piece = piece,
                                                          .rows = part.count[0],
                                                          .columns = part.count[1],
                                                          .from = part.at,
                                                          .from_stride = part.stride,
                                                          .to = box_element(&wanted[i], part.first[0], part.first[1]),
                                                          .to_stride = wanted[i].stride,
                                                          .first = {part.first[0], part.first[1]}};
    }
}

static int by_first_row(const void *a, const void *b) {
    const Transfer *x = a, *y = b;
    if (x->first[0] != y->first[0]) return x->first[0] < y->first[0] ? -1 : 1;
    return (x->first[1] > y->first[1]) - (x->first[1] < y->first[1]);
}

/* The boxes found for one piece must be all of it, each element once. */
static int check_coverage(const Load *load, int first, const CheckpointPiece *piece, Error *err) {
    const int n = load->n_transfers - first;
    Transfer *list = n ? load->transfers + first : NULL;
    int64_t covered = 0;
    if (n) qsort(list, (size_t)n, sizeof *list, by_first_row);
    for (int i = 0; i < n; i++) {
        covered += list[i].rows * list[i].columns;
        for (int k = i + 1; k < n && list[k].first[0] < list[i].first[0] + list[i].rows; k++) {
            if (list[k].first[1] >= list[i].first[1] + list[i].columns ||
                list[i].first[1] >= list[k].first[1] + list[k].columns) {
                continue;
            }
            return error_set(err, EXIT_CHECKPOINT, "%s: %s and %s both hold row %" PRId64 ", column %" PRId64 " of %s",
                             load->step_dir, load->manifest->files[load->sources[list[i].source].file].name,
                             load->manifest->files[load->sources[list[k].source].file].name, list[k].first[0],
                             max_i64(list[i].first[1], list[k].first[1]), piece->name);
        }
    }
    if (covered == piece->flat_count) return 0;
    return error_set(err, EXIT_CHECKPOINT,
                     "%s: the files hold %" PRId64 " of the %" PRId64 " elements of %s that this "
                     "rank needs",
                     load->step_dir, covered, piece->flat_count, piece->name);
}

static int plan_piece(Load *load, int index, Error *err) {
    const CheckpointPiece *piece = &load->pieces[index];
    const int array = manifest_find_array(load->manifest, piece->name), first = load->n_transfers;
    Box wanted[PIECE_BOXES_MAX], held[PIECE_BOXES_MAX];
    const int n_wanted = piece_boxes(piece, wanted);
    for (int s = first_source(load, array); s < load->n_sources && load->sources[s].array == array; s++) {
        const int n_held = piece_boxes(&load->sources[s].piece, held);
        for (int i = 0; i < n_held; i++) add_transfers(load, s, index, &held[i], wanted, n_wanted);
    }
    return check_coverage(load, first, piece, err);
}

static int plan(Load *load, Error *err) {
    for (int i = 0; i < load->n_pieces; i++) {
        if (want_array(load, &load->pieces[i], err) != 0) return -1;
    }
    if (read_sources(load, err) != 0) return -1;
    for (int i = 0; i < load->n_pieces; i++) {
        if (load->pieces[i].flat_count > 0 && plan_piece(load, i, err) != 0) return -1;
    }
    return 0;
}

/* ---- verifying and copying ---- */

static int verify_source(Load *load, const Source *source, Error *err) {
    uint64_t found;
    if (open_file(load, source->file, err) != 0 ||
        hash_part(load, source->first_byte, source->bytes, &found, err) != 0) {
        return -1;
    }
    if (found == source->xxh3) return 0;
    return error_set(err, EXIT_CHECKPOINT,
                     "%s: damaged: its part of %s (bytes %" PRId64 " to %" PRId64 ") has "
                     "checksum %016" PRIx64 ", was written with %016" PRIx64,
                     load->path, source->piece.name, source->first_byte, source->first_byte + source->bytes, found,
                     source->xxh3);
}

/* Index of sources or transfers in the order of their bytes, so that files are read from front to back. */
typedef struct {
    int file, index;
    int64_t byte;
} Place;

static int by_place(const void *a, const void *b) {
    const Place *x = a, *y = b;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    return (x->byte > y->byte) - (x->byte < y->byte);
}

static int verify_sources(Load *load, Error *err) {
    Place *order = xcalloc((uint64_t)load->n_sources, sizeof *order);
    int n = 0, rc = 0;
    for (int i = 0; i < load->n_sources; i++) {
        if (load->sources[i].used) order[n++] = (Place){load->sources[i].file, i, load->sources[i].first_byte};
    }
    qsort(order, (size_t)n, sizeof *order, by_place);
    for (int i = 0; i < n && rc == 0; i++) rc = verify_source(load, &load->sources[order[i].index], err);
    free(order);
    return rc;
}

/* Many narrow rows: a stretch of the file goes through the buffer. */
static int copy_rows(Load *load, const Transfer *t, int64_t first_byte, int64_t element, char *to, Error *err) {
    const int64_t width = t->columns * element, stride = t->from_stride * element;
    for (int64_t row = 0; row < t->rows;) {
        const int64_t rows = min_i64(t->rows - row, (BUFFER_BYTES - width) / stride + 1);
        if (file_read_at(load->fd, load->path, load->buffer, (size_t)((rows - 1) * stride + width),
                         first_byte + row * stride, err, EXIT_CHECKPOINT) != 0) {
            return -1;
        }
        for (int64_t i = 0; i < rows; i++) {
            memcpy(to + (row + i) * t->to_stride * element, load->buffer + i * stride, (size_t)width);
        }
        row += rows;
    }
    return 0;
}

static int copy(Load *load, const Transfer *t, Error *err) {
    const Source *source = &load->sources[t->source];
    const int64_t element = (int64_t)dtype_size(source->piece.dtype);
    const int64_t first_byte = source->first_byte + t->from * element;
    char *to = (char *)load->pieces[t->piece].data + t->to * element;
    if (open_file(load, source->file, err) != 0) return -1;
    const bool contiguous = t->rows == 1 || (t->columns == t->from_stride && t->columns == t->to_stride);
    if (!contiguous && t->columns * element < ROW_BYTES_DIRECT) {
        return copy_rows(load, t, first_byte, element, to, err);
    }
    const int64_t rows = contiguous ? 1 : t->rows, columns = contiguous ? t->rows * t->columns : t->columns;
    for (int64_t row = 0; row < rows; row++) {
        if (file_read_at(load->fd, load->path, to + row * t->to_stride * element, (size_t)(columns * element),
                         first_byte + row * t->from_stride * element, err, EXIT_CHECKPOINT) != 0) {
            return -1;
        }
    }
    return 0;
}

static int copy_all(Load *load, Error *err) {
    Place *order = xcalloc((uint64_t)load->n_transfers, sizeof *order);
    int rc = 0;
    for (int i = 0; i < load->n_transfers; i++) {
        const Source *source = &load->sources[load->transfers[i].source];
        order[i] = (Place){source->file, i,
                           source->first_byte + load->transfers[i].from * (int64_t)dtype_size(source->piece.dtype)};
    }
    qsort(order, (size_t)load->n_transfers, sizeof *order, by_place);
    for (int i = 0; i < load->n_transfers && rc == 0; i++) rc = copy(load, &load->transfers[order[i].index], err);
    free(order);
    return rc;
}

static Load load_begin(const char *step_dir, const Manifest *manifest, const CheckpointPiece *pieces, int n) {
    return (Load){.step_dir = step_dir,
                  .manifest = manifest,
                  .pieces = pieces,
                  .n_pieces = n,
                  .open_file = -1,
                  .array_wanted = xcalloc((uint64_t)manifest->n_arrays, sizeof(bool)),
                  .buffer = xmalloc(BUFFER_BYTES)};
}

static void load_end(Load *load) {
    close_file(load);
    free(load->array_wanted);
    free(load->sources);
    free(load->transfers);
    free(load->buffer);
}

int checkpoint_load(const char *step_dir, const CheckpointPiece *pieces, int n, Error *err) {
    Manifest manifest;
    if (manifest_read(step_dir, &manifest, err) != 0) return -1;
    Load load = load_begin(step_dir, &manifest, pieces, n);
    int rc = plan(&load, err);
    if (rc == 0) rc = verify_sources(&load, err);
    if (rc == 0) rc = copy_all(&load, err);
    load_end(&load);
    manifest_free(&manifest);
    return rc;
}

static int verify_files(Load *load, Error *err) {
    for (int i = 0; i < load->manifest->n_files; i++) {
        const ManifestFile *file = &load->manifest->files[i];
        uint64_t found;
        if (open_file(load, i, err) != 0 || hash_part(load, 0, file->bytes, &found, err) != 0) return -1;
        if (found != file->xxh3) {
            return error_set(err, EXIT_CHECKPOINT,
                             "%s: damaged: its %" PRId64 " bytes have checksum %016" PRIx64
                             ", the manifest says %016" PRIx64,
                             load->path, file->bytes, found, file->xxh3);
        }
    }
    return 0;
}

int checkpoint_verify(const char *step_dir, const Manifest *manifest, Error *err) {
    const int n = manifest->n_arrays;
    CheckpointPiece *pieces = xcalloc((uint64_t)n, sizeof *pieces);
    for (int i = 0; i < n; i++) {
        const CheckpointArray *array = &manifest->arrays[i];
        pieces[i] = (CheckpointPiece){.name = array->name, .dtype = array->dtype, .dims = array->dims, .flat_count = 1};
        for (int k = 0; k < array->dims; k++) {
            pieces[i].shape[k] = pieces[i].count[k] = array->shape[k];
            pieces[i].flat_count *= array->shape[k];
        }
    }
    Load load = load_begin(step_dir, manifest, pieces, n);
    /* Entries first: they name the array where something is wrong. */
    int rc = plan(&load, err);
    if (rc == 0) rc = verify_sources(&load, err);
    if (rc == 0) rc = verify_files(&load, err);
    load_end(&load);
    free(pieces);
    return rc;
}
