/* preflight.c - what would end a run late, or spoil it, looked at before its first step: memory, disk, data.
 * In: the memory plan, checkpoint.dir, the opened data. Out: nothing, a warning, or an error with numbers. */
#include "train/preflight.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "base/types.h"

/* ---- memory ---- */

/* The number behind `name` at the start of a line of a /proc or control group file, or -1. */
static int64_t number_in_file(const char *path, const char *name) {
    char line[256];
    FILE *file = fopen(path, "re");
    int64_t value = -1;
    const size_t length = strlen(name);
    while (file && value < 0 && fgets(line, sizeof line, file)) {
        char *end, *text = line + length;
        if (strncmp(line, name, length) != 0) continue;
        const long long number = strtoll(text, &end, 10);
        if (end != text && number >= 0) value = number;
    }
    if (file) fclose(file);
    return value;
}

/* What one control group (version 2) leaves; pages that only cache files are given up on demand. */
static int64_t group_available(const char *directory) {
    char path[1200];
    snprintf(path, sizeof path, "%s/memory.max", directory);
    const int64_t limit = number_in_file(path, "");
    snprintf(path, sizeof path, "%s/memory.current", directory);
    const int64_t used = number_in_file(path, "");
    snprintf(path, sizeof path, "%s/memory.stat", directory);
    const int64_t cached = max_i64(number_in_file(path, "inactive_file "), 0);
    if (limit < 0 || used < 0) return INT64_MAX;
    return max_i64(limit - used + cached, 0);
}

/* The least that this process's control group and those above it leave. */
static int64_t groups_available(void) {
    char line[1024], directory[1100];
    FILE *file = fopen("/proc/self/cgroup", "re");
    int64_t least = INT64_MAX;
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, "0::/", 4) != 0) continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(directory, sizeof directory, "/sys/fs/cgroup%s", line + 3);
        for (char *slash; (slash = strrchr(directory, '/')) && slash > directory + strlen("/sys/fs"); *slash = 0) {
            least = min_i64(least, group_available(directory));
        }
    }
    if (file) fclose(file);
    return least;
}

int64_t host_available_bytes(void) {
    const int64_t free_kib = number_in_file("/proc/meminfo", "MemAvailable:");
    const int64_t swap_kib = number_in_file("/proc/meminfo", "SwapFree:");
    const int64_t host = free_kib < 0 ? INT64_MAX : 1024 * (free_kib + max_i64(swap_kib, 0));
    return min_i64(host, groups_available());
}

/* Planned bytes of this host's ranks together, and how many they are. */
static double host_bytes(const Trainer *t, int *ranks_here) {
    const double mine = (double)arena_planned_bytes(&t->arena);
    *ranks_here = 1;
    if (!t->groups.world) return mine;
    const int size = t->grid.world_size;
    int64_t *lengths = xcalloc((uint64_t)size, sizeof *lengths);
    double *all = comm_host_gather(t->groups.world, &mine, sizeof mine, lengths), sum = 0.0;
    *ranks_here = 0;
    for (int rank = 0; rank < size; rank++) {
        if (strcmp(t->seats[rank].host, t->seats[t->grid.rank].host) != 0) continue;
        sum += all[rank];
        (*ranks_here)++;
    }
    free(all);
    free(lengths);
    return sum;
}

int preflight_memory(const Trainer *t, Error *err) {
    int ranks_here;
    const double needed = host_bytes(t, &ranks_here), available = (double)host_available_bytes();
    if (needed <= available) return 0;
    double gib[OWNER_COUNT];
    for (int owner = 0; owner < OWNER_COUNT; owner++) {
        gib[owner] = (double)arena_owner_bytes(&t->arena, (MemoryOwner)owner) * 0x1p-30;
    }
    return error_set(
        err, EXIT_LAUNCH,
        "out of memory: %d rank%s on %s%s need%s %.3g GiB, but it has %.3g GiB left. Rank %d's "
        "plan: parameters %.3g GiB, gradients %.3g, optimizer %.3g, activations %.3g, communication %.3g, "
        "workspace %.3g, data %.3g. More hosts, more tensor or pipeline ranks, or a smaller train.micro_batch or model "
        "make it fit",
        ranks_here, ranks_here == 1 ? "" : "s", t->seats ? "host " : "",
        t->seats ? t->seats[t->grid.rank].host : "this host", ranks_here == 1 ? "s" : "", needed * 0x1p-30,
        available * 0x1p-30, t->grid.rank, gib[OWNER_PARAMETERS], gib[OWNER_GRADIENTS], gib[OWNER_OPTIMIZER],
        gib[OWNER_ACTIVATIONS], gib[OWNER_COMMUNICATION], gib[OWNER_WORKSPACE], gib[OWNER_DATA]);
}

/* ---- data ---- */

int preflight_data(const Trainer *t, const DataSource *source, const char *key, const char *spec, Error *err) {
    if (!t->groups.world) return 0;
    const uint64_t mine = data_fingerprint(source);
    int64_t *lengths = xcalloc((uint64_t)t->grid.world_size, sizeof *lengths);
    uint64_t *all = comm_host_gather(t->groups.world, &mine, sizeof mine, lengths);
    int rc = 0;
    for (int rank = 1; rank < t->grid.world_size && rc == 0; rank++) {
        if (all[rank] == all[0]) continue;
        rc = error_set(err, EXIT_DATA,
                       "%s = %s: rank %d on host %s finds other files there than rank 0 on host %s (fingerprint "
                       "%016" PRIx64 ", not %016" PRIx64 "); all hosts need the same ones",
                       key, spec, rank, t->seats[rank].host, t->seats[0].host, all[rank], all[0]);
    }
    free(all);
    free(lengths);
    return rc;
}

/* ---- disk ---- */

/* How many more checkpoints than now there will be at once: those that stay, and one while it is written. */
static double checkpoints_to_come(const Trainer *t) {
    const Config *c = t->config;
    const int64_t steps = max_i64(c->total_steps - t->step, 0);
    const int64_t saves = max_i64(c->checkpoint_every ? ceil_div(steps, c->checkpoint_every) : 1, 1);
    if (c->checkpoint_keep == 0) return (double)saves;
    const int64_t kept = checkpoint_count(c->checkpoint_dir);
    return (double)min_i64(saves, c->checkpoint_keep + 1 - min_i64(kept, c->checkpoint_keep));
}

static void warn_of_little_room(const Trainer *t) {
    const Config *c = t->config;
    struct statvfs facts;
    if (statvfs(c->checkpoint_dir, &facts) != 0) return;
    const double room = (double)facts.f_bavail * (double)facts.f_frsize;
    const double one = (double)model_parameters(c) * (double)dtype_size(c->dtype) * (1.0 + t->optimizer.states);
    const double count = checkpoints_to_come(t);
    if (room >= one * count) return;
    log_warn(LOG_CKPT,
             "checkpoint.dir = %s: a checkpoint takes %.4g MB and %.0f more of them will be there at once "
             "(checkpoint.keep = %" PRId64 "), but only %.4g MB are free there: saving will fail",
             c->checkpoint_dir, one * 1e-6, count, c->checkpoint_keep, room * 1e-6);
}

static int directory_usable(const char *dir, Error *err) {
    if (directory_make(dir, err, EXIT_CHECKPOINT) != 0) {
        return error_set(err, err->status, "checkpoint.dir = %s", err->message);
    }
    if (access(dir, W_OK | X_OK) == 0) return 0;
    return error_set(err, EXIT_CHECKPOINT, "checkpoint.dir = %s: cannot write there: %s", dir, strerror(errno));
}

static bool same_directory(const char *a, const char *b) {
    struct stat of_a, of_b;
    return stat(a, &of_a) == 0 && stat(b, &of_b) == 0 && of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
}

/* Two runs in one directory would remove one another's checkpoints and rows. */
static int lock_directories(const Config *c, Error *err) {
    if (directory_lock(c->checkpoint_dir, err, EXIT_CHECKPOINT) != 0) {
        return error_set(err, err->status, "checkpoint.dir = %s", err->message);
    }
    if (directory_make(c->log_dir, err, EXIT_CONFIG) != 0 ||
        (!same_directory(c->log_dir, c->checkpoint_dir) && directory_lock(c->log_dir, err, EXIT_CONFIG) != 0)) {
        return error_set(err, err->status, "log.dir = %s", err->message);
    }
    return 0;
}

/* Another host of a shared file system may see a new file a little later. */
static bool file_appears(const char *path) {
    enum { TRIES = 500 };
    for (int try = 0; try < TRIES; try++) {
        const int fd = open(path, O_RDONLY | O_CLOEXEC); /* an open asks the server, where a look may not */
        if (fd >= 0) {
            close(fd);
            return true;
        }
        sleep_s(0.01);
    }
    return false;
}

/* Whether ranks on other hosts see a file that rank 0 makes in checkpoint.dir and takes away again. */
static int directory_shared(const Trainer *t, Error *err) {
    const Config *c = t->config;
    char name[64];
    snprintf(name, sizeof name, ".seen-%d-%08x", (int)getpid(), (unsigned)(clock_s() * 1e6));
    int64_t *lengths = xcalloc((uint64_t)t->grid.world_size, sizeof *lengths);
    const bool maker = t->grid.rank == 0;
    char *names = comm_host_gather(t->groups.world, name, maker ? sizeof name : 0, lengths);
    char *path = xasprintf("%s/%s", c->checkpoint_dir, names);
    int rc = maker ? file_write_atomic(path, "", 0, err, EXIT_CHECKPOINT) : 0;
    double failed = rc != 0;
    comm_host_reduce(t->groups.world, &failed, 1, COMM_MAX);
    const bool elsewhere = strcmp(t->seats[t->grid.rank].host, t->seats[0].host) != 0;
    if (failed == 0.0 && elsewhere && !file_appears(path)) {
        rc = error_set(err, EXIT_CHECKPOINT,
                       "checkpoint.dir = %s: host %s does not see what host %s writes there; all hosts must share "
                       "this directory",
                       c->checkpoint_dir, t->seats[t->grid.rank].host, t->seats[0].host);
    }
    double looked = 0.0;
    comm_host_reduce(t->groups.world, &looked, 1, COMM_MAX);
    if (maker) unlink(path);
    free(path);
    free(names);
    free(lengths);
    return rc;
}

int preflight_disk(const Trainer *t, Error *err) {
    int rc = 0;
    if (t->grid.rank == 0) {
        rc = directory_usable(t->config->checkpoint_dir, err);
        if (rc == 0) rc = lock_directories(t->config, err);
        if (rc == 0) warn_of_little_room(t);
    }
    if (comm_agree(t->groups.world, rc, err) != 0) return -1;
    bool hosts_differ = false;
    for (int rank = 1; rank < t->grid.world_size; rank++) {
        hosts_differ |= strcmp(t->seats[rank].host, t->seats[0].host) != 0;
    }
    return hosts_differ ? comm_agree(t->groups.world, directory_shared(t, err), err) : 0;
}
