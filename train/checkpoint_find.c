/* checkpoint_find.c - which checkpoints there are, and what one holds.
 * In: directories. Out: a path, the state, lists, a page of text. Nothing here is changed. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"
#include "train/checkpoint_files.h"
#include "train/checkpoint_load.h"

/* The newest complete one of these steps, or NULL; *damaged: one that had a manifest, or NULL. */
static char *newest_complete(const char *dir, const int64_t *steps, int n, char **damaged) {
    *damaged = NULL;
    for (int i = 0; i < n; i++) {
        Error fault = {0};
        char *step_dir = step_directory(dir, steps[i]);
        if (!has_manifest(step_dir)) {
            log_warn(LOG_CKPT, "passing over %s: it has no manifest.json, so its save was not finished", step_dir);
        } else if (check_complete(step_dir, &fault) != 0) {
            log_warn(LOG_CKPT, "passing over %s: %s", step_dir, fault.message);
            if (!*damaged) *damaged = xstrdup(fault.message);
        } else {
            return step_dir;
        }
        free(step_dir);
    }
    return NULL;
}

static char *without_end_slashes(const char *path) {
    char *copy = xstrdup(path);
    for (size_t n = strlen(copy); n > 1 && copy[n - 1] == '/'; n--) copy[n - 1] = 0;
    return copy;
}

/* A directory that is a checkpoint, or by its name should be. */
static bool is_step_directory(const char *path) {
    struct stat facts;
    return has_manifest(path) || (step_of_directory(path) >= 0 && stat(path, &facts) == 0);
}

char *checkpoint_find(const char *dir, Error *err) {
    *err = (Error){0};
    if (is_step_directory(dir)) {
        if (check_complete(dir, err) != 0) return NULL;
        return without_end_slashes(dir);
    }
    int64_t *steps;
    int n;
    if (list_steps(dir, &steps, &n, err) != 0) return NULL;
    char *damaged, *path = without_end_slashes(dir);
    char *found = newest_complete(path, steps, n, &damaged);
    /* Starting anew over damaged checkpoints would be the end of them: a person decides. */
    if (!found && damaged) {
        error_set(err, EXIT_CHECKPOINT,
                  "%s holds no complete checkpoint, but a damaged one (%s); restore it, or "
                  "choose another checkpoint.dir",
                  path, damaged);
    }
    free(damaged);
    free(path);
    free(steps);
    return found;
}

int checkpoint_missing(const char *dir, Error *err) {
    struct stat facts;
    char *below = xasprintf("%s/checkpoints", dir);
    if (stat(dir, &facts) != 0) {
        error_set(err, EXIT_CHECKPOINT, "%s: there is no complete checkpoint: %s", dir, strerror(errno));
    } else {
        const bool has_below = stat(below, &facts) == 0;
        error_set(err, EXIT_CHECKPOINT, "%s: there is no complete checkpoint%s%s", dir,
                  has_below ? "; there may be one in " : "", has_below ? below : "");
    }
    free(below);
    return -1;
}

int64_t checkpoint_count(const char *dir) {
    Error err;
    int64_t *steps, count = 0;
    int n;
    if (list_steps(dir, &steps, &n, &err) != 0) return 0;
    for (int i = 0; i < n; i++) {
        char *step_dir = step_directory(dir, steps[i]);
        count += has_manifest(step_dir);
        free(step_dir);
    }
    free(steps);
    return count;
}

int checkpoint_read_state(const char *step_dir, CheckpointState *state, Error *err) {
    Manifest manifest;
    if (manifest_read(step_dir, &manifest, err) != 0) return -1;
    *state = manifest.state;
    manifest.state = (CheckpointState){0};
    manifest_free(&manifest);
    return 0;
}

int checkpoint_list(const char *step_dir, CheckpointArray **arrays, Error *err) {
    Manifest manifest;
    if (manifest_read(step_dir, &manifest, err) != 0) return -1;
    const int n = manifest.n_arrays;
    *arrays = manifest.arrays;
    manifest.arrays = NULL;
    manifest_free(&manifest);
    return n;
}

static void print_state(const char *step_dir, const Manifest *manifest, FILE *out) {
    const CheckpointState *state = &manifest->state;
    int64_t bytes = 0;
    for (int i = 0; i < manifest->n_files; i++) bytes += manifest->files[i].bytes;
    fprintf(out, "checkpoint %s\n", step_dir);
    fprintf(out, "  step         %" PRId64 " (%" PRId64 " of them skipped)\n", state->step, state->skipped);
    fprintf(out, "  samples      %" PRId64 "\n  tokens       %" PRId64 "\n", state->samples, state->tokens);
    if (isfinite(state->last_loss)) fprintf(out, "  last loss    %.9g\n", state->last_loss);
    fprintf(out, "  written by   tensor %d x pipeline %d x data %d; any other layout reads it too\n",
            state->grid_size[0], state->grid_size[1], state->grid_size[2]);
    fprintf(out, "  data         fingerprint %016" PRIx64 ", samples drawn of each corpus:", state->data_fingerprint);
    for (int i = 0; i < state->n_corpora; i++) fprintf(out, " %" PRId64, state->corpus_counters[i]);
    fprintf(out, "\n  size         %" PRId64 " bytes in %d file%s\n", bytes, manifest->n_files,
            manifest->n_files == 1 ? "" : "s");
}

static int64_t elements(const CheckpointArray *array) {
    return array->shape[0] * (array->dims == 2 ? array->shape[1] : 1);
}

/* "adam_m" of "adam_m/embed.weight". */
static int family_length(const char *name) { return (int)strcspn(name, "/"); }

static void print_arrays(const Manifest *manifest, FILE *out) {
    fprintf(out, "\narrays\n");
    int64_t sum = 0;
    for (int i = 0; i < manifest->n_arrays; i++) {
        const CheckpointArray *array = &manifest->arrays[i];
        char shape[64];
        if (array->dims == 1) snprintf(shape, sizeof shape, "%" PRId64, array->shape[0]);
        else snprintf(shape, sizeof shape, "%" PRId64 " x %" PRId64, array->shape[0], array->shape[1]);
        fprintf(out, "  %-44s %-5s %s\n", array->name, dtype_name(array->dtype), shape);
        sum += elements(array);
        const int length = family_length(array->name);
        const bool last = i + 1 == manifest->n_arrays || family_length(array[1].name) != length ||
                          strncmp(array->name, array[1].name, (size_t)length) != 0;
        if (!last) continue;
        fprintf(out, "  %.*s: %" PRId64 " elements\n", length, array->name, sum);
        sum = 0;
    }
}

static void print_page(const char *step_dir, const Manifest *manifest, FILE *out) {
    print_state(step_dir, manifest, out);
    print_arrays(manifest, out);
    fprintf(out, "\nfiles\n");
    for (int i = 0; i < manifest->n_files; i++) {
        const ManifestFile *file = &manifest->files[i];
        fprintf(out, "  %s  %" PRId64 " bytes  xxh3 %016" PRIx64 "  parts of %d arrays\n", file->name, file->bytes,
                file->xxh3, manifest->sets[file->set].n);
    }
    fprintf(out, "\nconfig\n%s", manifest->state.config_text);
    if (manifest->state.extra_json) fprintf(out, "\nother state\n%s\n", manifest->state.extra_json);
}

/* The checkpoints in a directory, each in a line. */
static int print_directory(const char *dir, FILE *out, Error *err) {
    int64_t *steps;
    int n;
    if (list_steps(dir, &steps, &n, err) != 0) return -1;
    for (int i = 0; i < n; i++) {
        Error fault = {0};
        char *step_dir = step_directory(dir, steps[i]);
        const char *what = "complete";
        if (!has_manifest(step_dir)) what = "not finished: no manifest.json";
        else if (check_complete(step_dir, &fault) != 0) what = fault.message;
        fprintf(out, "%s: %s\n", step_dir, what);
        free(step_dir);
    }
    if (n) fprintf(out, "\n");
    free(steps);
    return 0;
}

int checkpoint_inspect(const char *path, bool verify, FILE *out, Error *err) {
    if (!is_step_directory(path) && print_directory(path, out, err) != 0) return -1;
    char *step_dir = checkpoint_find(path, err);
    if (!step_dir) {
        return err->status ? -1 : checkpoint_missing(path, err);
    }
    Manifest manifest;
    int rc = manifest_read(step_dir, &manifest, err);
    if (rc == 0) {
        print_page(step_dir, &manifest, out);
        if (verify) rc = checkpoint_verify(step_dir, &manifest, err);
        if (verify && rc == 0) fprintf(out, "\nverified: every file and every array is as it was written\n");
        manifest_free(&manifest);
    }
    free(step_dir);
    return rc;
}
