/* manifest.c - manifest.json, made and read.
 * In: what a checkpoint holds, or the bytes of a file. Out: the reverse.
 * Invariants: one flipped bit anywhere in the text is noticed (it begins with a checksum of itself); what
 * was read is consistent: every index in range, names safe to open. */
#include "train/manifest.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/file.h"
#include "train/checkpoint_piece.h"

enum { FORMAT_VERSION = 1, CHECKSUM_DIGITS = 16 };
static const size_t MANIFEST_BYTES_MAX = (size_t)1 << 30;
/* The text begins with this, then the digits; the checksum is that of the text with zeros for digits. */
static const char checksum_prefix[] = "{\n \"checksum\": \"";
static const char no_checksum[] = "0000000000000000";

void checkpoint_state_free(CheckpointState *state) {
    free(state->config_text);
    free(state->corpus_counters);
    free(state->extra_json);
    *state = (CheckpointState){0};
}

void manifest_free(Manifest *manifest) {
    checkpoint_state_free(&manifest->state);
    for (int i = 0; i < manifest->n_sets; i++) free(manifest->sets[i].arrays);
    for (int i = 0; i < manifest->n_files; i++) free(manifest->files[i].name);
    free(manifest->arrays);
    free(manifest->sets);
    free(manifest->files);
    *manifest = (Manifest){0};
}

int manifest_find_array(const Manifest *manifest, const char *name) {
    int low = 0, high = manifest->n_arrays;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        const int order = strcmp(name, manifest->arrays[middle].name);
        if (order == 0) return middle;
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return -1;
}

bool array_name_valid(const char *name) {
    const size_t length = strlen(name);
    for (size_t i = 0; i < length; i++) {
        if ((unsigned char)name[i] < ' ' || name[i] == 127) return false;
    }
    return length > 0 && length < sizeof((CheckpointArray *)NULL)->name;
}

int64_t step_of_directory(const char *path) {
    size_t end = strlen(path), first;
    while (end > 0 && path[end - 1] == '/') end--;
    for (first = end; first > 0 && path[first - 1] != '/';) first--;
    if (end - first < strlen("step-") + 8 || end - first > strlen("step-") + 18) return -1;
    if (strncmp(path + first, "step-", strlen("step-")) != 0) return -1;
    int64_t step = 0;
    for (size_t i = first + strlen("step-"); i < end; i++) {
        if (path[i] < '0' || path[i] > '9') return -1;
        step = step * 10 + (path[i] - '0');
    }
    return step;
}

/* ---- writing ---- */

static json_t *hex64(uint64_t value) { return json_sprintf("%016" PRIx64, value); }

static json_t *integers(const int64_t *values, int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(list, json_integer(values[i]));
    return list;
}

static json_t *arrays_to_json(const Manifest *manifest) {
    json_t *list = json_array();
    for (int i = 0; i < manifest->n_arrays; i++) {
        const CheckpointArray *array = &manifest->arrays[i];
        json_array_append_new(list, json_pack("{s:s, s:s, s:o}", "name", array->name, "dtype", dtype_name(array->dtype),
                                              "shape", integers(array->shape, array->dims)));
    }
    return list;
}

static json_t *sets_to_json(const Manifest *manifest) {
    json_t *list = json_array();
    for (int i = 0; i < manifest->n_sets; i++) {
        json_t *set = json_array();
        for (int k = 0; k < manifest->sets[i].n; k++) {
            json_array_append_new(set, json_integer(manifest->sets[i].arrays[k]));
        }
        json_array_append_new(list, set);
    }
    return list;
}

static json_t *files_to_json(const Manifest *manifest) {
    json_t *list = json_array();
    for (int i = 0; i < manifest->n_files; i++) {
        const ManifestFile *file = &manifest->files[i];
        json_array_append_new(list, json_pack("{s:s, s:I, s:o, s:I, s:o, s:i}", "name", file->name, "bytes",
                                              (json_int_t)file->bytes, "xxh3", hex64(file->xxh3), "header_bytes",
                                              (json_int_t)file->header_bytes, "header_xxh3", hex64(file->header_xxh3),
                                              "arrays", file->set));
    }
    return list;
}

/* NULL with err. */
static json_t *state_to_json(const CheckpointState *state, Error *err) {
    json_t *root = json_object();
    json_object_set_new(root, "checksum", json_string(no_checksum));
    json_object_set_new(root, "format_version", json_integer(FORMAT_VERSION));
    json_object_set_new(root, "step", json_integer(state->step));
    json_object_set_new(root, "samples", json_integer(state->samples));
    json_object_set_new(root, "tokens", json_integer(state->tokens));
    json_object_set_new(root, "skipped", json_integer(state->skipped));
    /* JSON knows no NaN. */
    json_object_set_new(root, "last_loss", isfinite(state->last_loss) ? json_real(state->last_loss) : json_null());
    json_object_set_new(root, "grid",
                        json_pack("{s:i, s:i, s:i}", "tensor", state->grid_size[0], "pipeline", state->grid_size[1],
                                  "data", state->grid_size[2]));
    json_object_set_new(root, "data_fingerprint", hex64(state->data_fingerprint));
    json_object_set_new(root, "corpus_counters", integers(state->corpus_counters, state->n_corpora));
    json_error_t where;
    json_t *extra = state->extra_json ? json_loads(state->extra_json, JSON_REJECT_DUPLICATES, &where) : json_null();
    if (!extra || json_object_set_new(root, "extra", extra) != 0) {
        error_set(err, EXIT_CHECKPOINT, "the additional state is not a JSON object: %s", where.text);
        json_decref(root);
        return NULL;
    }
    if (json_object_set_new(root, "config", json_string(state->config_text ? state->config_text : "")) != 0) {
        error_set(err, EXIT_CHECKPOINT,
                  "the config holds text that is not UTF-8 (a path, perhaps), which a checkpoint "
                  "cannot hold");
        json_decref(root);
        return NULL;
    }
    return root;
}

char *manifest_to_text(const Manifest *manifest, Error *err) {
    json_t *root = state_to_json(&manifest->state, err);
    if (!root) return NULL;
    json_object_set_new(root, "arrays", arrays_to_json(manifest));
    json_object_set_new(root, "array_sets", sets_to_json(manifest));
    json_object_set_new(root, "files", files_to_json(manifest));
    char *body = json_dumps(root, JSON_INDENT(1));
    json_decref(root);
    if (!body) {
        error_set(err, EXIT_CHECKPOINT, "out of memory for the manifest of %d files", manifest->n_files);
        return NULL;
    }
    char *text = xasprintf("%s\n", body);
    free(body);
    REQUIRE(strncmp(text, checksum_prefix, strlen(checksum_prefix)) == 0);
    char digits[CHECKSUM_DIGITS + 1];
    snprintf(digits, sizeof digits, "%016" PRIx64, XXH3_64bits(text, strlen(text)));
    memcpy(text + strlen(checksum_prefix), digits, CHECKSUM_DIGITS);
    return text;
}

/* ---- reading ---- */

/* Where the reader is, for messages; rc becomes -1 with the first fault. */
typedef struct {
    const char *path;
    Error *err;
    int rc;
} Reader;

static void fault(Reader *reader, const char *where, const char *wanted) {
    if (reader->rc != 0) return;
    reader->rc = error_set(reader->err, EXIT_CHECKPOINT, "%s: \"%s\" must be %s", reader->path, where, wanted);
}

static int64_t read_int(Reader *reader, const json_t *object, const char *key, int64_t max) {
    const json_t *value = json_object_get(object, key);
    const int64_t number = json_is_integer(value) ? json_integer_value(value) : -1;
    if (number < 0 || number > max) {
        char *wanted = xasprintf("a whole number from 0 to %" PRId64, max);
        fault(reader, key, wanted);
        free(wanted);
        return 0;
    }
    return number;
}

static uint64_t read_hex64(Reader *reader, const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    uint64_t value = 0;
    if (!text || !hex64_parse(text, NULL, &value)) fault(reader, key, "16 hexadecimal digits");
    return value;
}

/* The list under key and its length; NULL (and length 0) where it is none. */
static const json_t *read_list(Reader *reader, const json_t *object, const char *key, int *n) {
    const json_t *list = json_object_get(object, key);
    *n = json_is_array(list) ? (int)min_i64((int64_t)json_array_size(list), INT32_MAX) : 0;
    if (!json_is_array(list)) fault(reader, key, "a list");
    return json_is_array(list) ? list : NULL;
}

static void read_state(Reader *reader, const json_t *root, CheckpointState *state) {
    static const char *const dims[3] = {"tensor", "pipeline", "data"};
    state->step = read_int(reader, root, "step", INT64_MAX);
    state->samples = read_int(reader, root, "samples", INT64_MAX);
    state->tokens = read_int(reader, root, "tokens", INT64_MAX);
    state->skipped = read_int(reader, root, "skipped", INT64_MAX);
    state->data_fingerprint = read_hex64(reader, root, "data_fingerprint");
    const json_t *loss = json_object_get(root, "last_loss");
    if (!json_is_number(loss) && !json_is_null(loss)) fault(reader, "last_loss", "a number or null");
    state->last_loss = json_is_number(loss) ? json_number_value(loss) : NAN;
    const json_t *grid = json_object_get(root, "grid");
    for (int i = 0; i < 3; i++) state->grid_size[i] = (int)read_int(reader, grid, dims[i], INT32_MAX);
    const json_t *counters = read_list(reader, root, "corpus_counters", &state->n_corpora);
    state->corpus_counters = xcalloc((uint64_t)state->n_corpora, sizeof *state->corpus_counters);
    for (int i = 0; i < state->n_corpora; i++) {
        const json_t *value = json_array_get(counters, (size_t)i);
        if (!json_is_integer(value) || json_integer_value(value) < 0) fault(reader, "corpus_counters", "counts");
        state->corpus_counters[i] = json_integer_value(value);
    }
    const char *config = json_string_value(json_object_get(root, "config"));
    if (!config) fault(reader, "config", "text");
    state->config_text = xstrdup(config ? config : "");
    const json_t *extra = json_object_get(root, "extra");
    if (!json_is_object(extra) && !json_is_null(extra)) fault(reader, "extra", "an object or null");
    state->extra_json = json_is_object(extra) ? json_dumps(extra, JSON_COMPACT) : NULL;
}

static DType dtype_of_name(const char *name) {
    int dtype = 0;
    while (dtype < DT_COUNT && strcmp(dtype_name((DType)dtype), name) != 0) dtype++;
    return (DType)dtype;
}

static void read_array(Reader *reader, const json_t *value, CheckpointArray *array) {
    const char *name = json_string_value(json_object_get(value, "name"));
    const char *dtype = json_string_value(json_object_get(value, "dtype"));
    if (!name || !array_name_valid(name)) return fault(reader, "arrays: name", "the name of an array");
    strcpy(array->name, name);
    array->dtype = dtype ? dtype_of_name(dtype) : DT_COUNT;
    if (array->dtype == DT_COUNT) return fault(reader, array->name, "of a known dtype");
    const json_t *shape = read_list(reader, value, "shape", &array->dims);
    if (array->dims < 1 || array->dims > PIECE_DIMS_MAX) return fault(reader, array->name, "of one or two dimensions");
    CheckpointPiece whole = {.name = array->name, .dtype = array->dtype, .dims = array->dims, .flat_count = 1};
    for (int i = 0; i < array->dims; i++) {
        array->shape[i] = json_integer_value(json_array_get(shape, (size_t)i));
        whole.shape[i] = whole.count[i] = array->shape[i];
    }
    if (!piece_valid(&whole)) fault(reader, array->name, "of positive extents");
}

static void read_arrays(Reader *reader, const json_t *root, Manifest *manifest) {
    const json_t *list = read_list(reader, root, "arrays", &manifest->n_arrays);
    manifest->arrays = xcalloc((uint64_t)manifest->n_arrays, sizeof *manifest->arrays);
    for (int i = 0; i < manifest->n_arrays; i++) {
        read_array(reader, json_array_get(list, (size_t)i), &manifest->arrays[i]);
        if (i > 0 && strcmp(manifest->arrays[i - 1].name, manifest->arrays[i].name) >= 0) {
            fault(reader, "arrays", "in ascending order of their names");
        }
    }
}

static void read_sets(Reader *reader, const json_t *root, Manifest *manifest) {
    const json_t *list = read_list(reader, root, "array_sets", &manifest->n_sets);
    manifest->sets = xcalloc((uint64_t)manifest->n_sets, sizeof *manifest->sets);
    for (int i = 0; i < manifest->n_sets; i++) {
        ManifestSet *set = &manifest->sets[i];
        const json_t *members = json_array_get(list, (size_t)i);
        set->n = (int)min_i64((int64_t)json_array_size(members), INT32_MAX);
        set->arrays = xcalloc((uint64_t)set->n, sizeof *set->arrays);
        for (int k = 0; k < set->n; k++) {
            const json_t *value = json_array_get(members, (size_t)k);
            const int64_t array = json_is_integer(value) ? json_integer_value(value) : -1;
            if (array < 0 || array >= manifest->n_arrays) fault(reader, "array_sets", "lists of indices into arrays");
            else set->arrays[k] = (int)array;
        }
    }
}

/* A name that stays inside the directory. */
static bool file_name_valid(const char *name) {
    return name[0] && name[0] != '.' && !strchr(name, '/') && strlen(name) < 200;
}

static void read_files(Reader *reader, const json_t *root, Manifest *manifest) {
    int n;
    const json_t *list = read_list(reader, root, "files", &n);
    manifest->files = xcalloc((uint64_t)n, sizeof *manifest->files);
    for (int i = 0; i < n && reader->rc == 0; i++) {
        const json_t *value = json_array_get(list, (size_t)i);
        ManifestFile *file = &manifest->files[i];
        const char *name = json_string_value(json_object_get(value, "name"));
        if (!name || !file_name_valid(name)) return fault(reader, "files: name", "the name of a file beside this one");
        file->bytes = read_int(reader, value, "bytes", INT64_MAX);
        file->xxh3 = read_hex64(reader, value, "xxh3");
        file->header_bytes = read_int(reader, value, "header_bytes", file->bytes);
        file->header_xxh3 = read_hex64(reader, value, "header_xxh3");
        file->set = (int)read_int(reader, value, "arrays", max_i64(manifest->n_sets - 1, 0));
        if (manifest->n_sets == 0) fault(reader, "files: arrays", "an index into array_sets");
        file->name = xstrdup(name);
        manifest->n_files++;
    }
}

/* 0 where the text is what was written. */
static int check_checksum(const char *path, const char *text, size_t bytes, Error *err) {
    const size_t prefix = strlen(checksum_prefix);
    uint64_t stated;
    const char *end = NULL;
    if (bytes < prefix + CHECKSUM_DIGITS || memcmp(text, checksum_prefix, prefix) != 0 ||
        !hex64_parse(text + prefix, &end, &stated)) {
        return error_set(err, EXIT_CHECKPOINT, "%s: %zu bytes that do not begin as a manifest does, with its checksum",
                         path, bytes);
    }
    XXH3_state_t *hash = XXH3_createState();
    REQUIRE(hash && XXH3_64bits_reset(hash) == XXH_OK);
    XXH3_64bits_update(hash, text, prefix);
    XXH3_64bits_update(hash, no_checksum, CHECKSUM_DIGITS);
    XXH3_64bits_update(hash, text + prefix + CHECKSUM_DIGITS, bytes - prefix - CHECKSUM_DIGITS);
    const uint64_t found = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    if (found == stated) return 0;
    return error_set(err, EXIT_CHECKPOINT,
                     "%s: damaged: its %zu bytes have checksum %016" PRIx64 ", it states "
                     "%016" PRIx64,
                     path, bytes, found, stated);
}

int manifest_from_text(const char *path, const char *text, size_t bytes, Manifest *manifest, Error *err) {
    *manifest = (Manifest){0};
    if (check_checksum(path, text, bytes, err) != 0) return -1;
    json_error_t where;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    if (!json_is_object(root)) {
        json_decref(root);
        return error_set(err, EXIT_CHECKPOINT, "%s: is not a JSON object: line %d: %s", path, where.line, where.text);
    }
    Reader reader = {.path = path, .err = err};
    const int64_t version = read_int(&reader, root, "format_version", INT32_MAX);
    if (reader.rc == 0 && version != FORMAT_VERSION) {
        reader.rc = error_set(err, EXIT_CHECKPOINT, "%s: has format version %" PRId64 ", this program reads version %d",
                              path, version, FORMAT_VERSION);
    }
    read_state(&reader, root, &manifest->state);
    read_arrays(&reader, root, manifest);
    read_sets(&reader, root, manifest);
    read_files(&reader, root, manifest);
    json_decref(root);
    if (reader.rc != 0) manifest_free(manifest);
    return reader.rc;
}

int manifest_read(const char *step_dir, Manifest *manifest, Error *err) {
    char *path = xasprintf("%s/manifest.json", step_dir);
    size_t bytes;
    char *text = file_read(path, &bytes, MANIFEST_BYTES_MAX, err, EXIT_CHECKPOINT);
    int rc = text ? manifest_from_text(path, text, bytes, manifest, err) : -1;
    const int64_t step = step_of_directory(step_dir);
    if (rc == 0 && step >= 0 && step != manifest->state.step) {
        rc = error_set(err, EXIT_CHECKPOINT,
                       "%s: is the manifest of step %" PRId64 ", but its directory says step "
                       "%" PRId64 "; was it renamed or copied?",
                       path, manifest->state.step, step);
        manifest_free(manifest);
    }
    free(text);
    free(path);
    return rc;
}
