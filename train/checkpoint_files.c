/* checkpoint_files.c - directories of checkpoints: naming, listing, checking, removing.
 * Invariants: only files that this program names so are ever removed; a manifest goes, durably, before the
 * files that it names; what is not understood stays. */
#include "train/checkpoint_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"

int create_file(const char *path, int flags, Error *err) {
    for (;;) {
        const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0666);
        if (fd >= 0) return fd;
        if (errno != EINTR) return error_set(err, EXIT_CHECKPOINT, "%s: cannot create: %s", path, strerror(errno));
    }
}

int sync_and_close(int fd, const char *path, int rc, Error *err) {
    if (rc == 0 && file_sync(fd) != 0) {
        rc = error_set(err, EXIT_CHECKPOINT, "%s: cannot sync: %s", path, strerror(errno));
    }
    /* Network file systems may tell of a full disk only here. An interrupted close has closed. */
    if (close(fd) != 0 && errno != EINTR && rc == 0) {
        rc = error_set(err, EXIT_CHECKPOINT, "%s: cannot close: %s", path, strerror(errno));
    }
    return rc;
}

char *step_directory(const char *dir, int64_t step) { return xasprintf("%s/step-%08" PRId64, dir, step); }

static int descending(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

int list_steps(const char *dir, int64_t **steps, int *n, Error *err) {
    *steps = NULL;
    *n = 0;
    DIR *listing = opendir(dir);
    if (!listing) {
        if (errno == ENOENT) return 0;
        return error_set(err, EXIT_CHECKPOINT, "%s: cannot look for checkpoints: %s", dir, strerror(errno));
    }
    for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) {
        const int64_t step = step_of_directory(entry->d_name);
        if (step < 0) continue;
        /* step-000000100 reads as a number too, but is not what step_directory makes of it. */
        char *name = step_directory(dir, step);
        if (strcmp(name + strlen(dir) + 1, entry->d_name) == 0) {
            *steps = xrealloc(*steps, ((uint64_t)*n + 1) * sizeof **steps);
            (*steps)[(*n)++] = step;
        }
        free(name);
    }
    closedir(listing);
    if (*n) qsort(*steps, (size_t)*n, sizeof **steps, descending);
    return 0;
}

bool has_manifest(const char *step_dir) {
    char *path = xasprintf("%s/manifest.json", step_dir);
    struct stat facts;
    const bool there = lstat(path, &facts) == 0;
    free(path);
    return there;
}

static int check_sizes(const char *step_dir, const Manifest *manifest, Error *err) {
    int rc = 0;
    for (int i = 0; i < manifest->n_files && rc == 0; i++) {
        const ManifestFile *file = &manifest->files[i];
        char *path = xasprintf("%s/%s", step_dir, file->name);
        struct stat facts;
        if (stat(path, &facts) != 0) {
            rc = error_set(err, EXIT_CHECKPOINT, "%s: the manifest names it, but: %s", path, strerror(errno));
        } else if (facts.st_size != file->bytes) {
            rc = error_set(err, EXIT_CHECKPOINT, "%s: has %" PRId64 " bytes, the manifest says %" PRId64, path,
                           (int64_t)facts.st_size, file->bytes);
        }
        free(path);
    }
    return rc;
}

int check_complete(const char *step_dir, Error *err) {
    Manifest manifest;
    if (manifest_read(step_dir, &manifest, err) != 0) return -1;
    int rc = check_sizes(step_dir, &manifest, err);
    manifest_free(&manifest);
    return rc;
}

static bool begins_with(const char *text, const char *prefix) { return strncmp(text, prefix, strlen(prefix)) == 0; }

static bool names_file(const Manifest *manifest, const char *name) {
    for (int i = 0; manifest && i < manifest->n_files; i++) {
        if (strcmp(manifest->files[i].name, name) == 0) return true;
    }
    return false;
}

void remove_shards(const char *step_dir, const Manifest *kept) {
    DIR *listing = opendir(step_dir);
    if (!listing) return;
    for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) {
        const bool ours = begins_with(entry->d_name, "shard-") || begins_with(entry->d_name, "manifest.json.tmp.");
        if (!ours || names_file(kept, entry->d_name)) continue;
        char *path = xasprintf("%s/%s", step_dir, entry->d_name);
        if (unlink(path) != 0 && errno != ENOENT) log_warn(LOG_CKPT, "%s: cannot remove: %s", path, strerror(errno));
        free(path);
    }
    closedir(listing);
}

/* Removes a checkpoint: after a death at any point it is whole, or has no manifest. */
static void remove_checkpoint(const char *step_dir) {
    Error err;
    char *path = xasprintf("%s/manifest.json", step_dir);
    const bool gone = unlink(path) == 0 || errno == ENOENT;
    if (!gone) log_warn(LOG_CKPT, "%s: cannot remove: %s", path, strerror(errno));
    free(path);
    if (!gone) return;
    if (directory_sync(step_dir, &err, EXIT_CHECKPOINT) != 0) {
        log_warn(LOG_CKPT, "%s", err.message);
        return;
    }
    remove_shards(step_dir, NULL);
    if (rmdir(step_dir) != 0) log_warn(LOG_CKPT, "%s: cannot remove the directory: %s", step_dir, strerror(errno));
}

static void warn_newer(const char *step_dir, int64_t step) {
    log_warn(LOG_CKPT,
             "%s is newer than what was saved now (step %" PRId64 "): checkpoint.resume = auto will take it, "
             "unless it is removed",
             step_dir, step);
}

void remove_outdated(const char *dir, int64_t step, int64_t keep) {
    Error err;
    Manifest manifest;
    int64_t *steps, kept = 0;
    int n;
    if (list_steps(dir, &steps, &n, &err) != 0) {
        log_warn(LOG_CKPT, "%s", err.message);
        return;
    }
    for (int i = 0; i < n; i++) {
        char *step_dir = step_directory(dir, steps[i]);
        if (steps[i] > step) {
            if (has_manifest(step_dir)) warn_newer(step_dir, step);
        } else if (!has_manifest(step_dir)) {
            remove_checkpoint(step_dir);
        } else if (manifest_read(step_dir, &manifest, &err) != 0) {
            log_warn(LOG_CKPT, "left as it is, though damaged: %s", err.message);
        } else {
            if (steps[i] == step) remove_shards(step_dir, &manifest);
            if (keep && kept >= keep) remove_checkpoint(step_dir);
            kept++;
            manifest_free(&manifest);
        }
        free(step_dir);
    }
    free(steps);
}
