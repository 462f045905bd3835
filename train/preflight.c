/* preflight.c - what would end a run late, looked at before its first step: memory and disk.
 * In: the memory plan, checkpoint.dir. Out: nothing, a warning, or an error with numbers. */
#include "train/preflight.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

/* Arena bytes of this host's ranks together, and how many they are. */
static double host_bytes(const Trainer *t, int *ranks_here) {
    const double mine = (double)t->arena.bytes;
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

void preflight_memory(const Trainer *t) {
    int ranks_here;
    const double needed = host_bytes(t, &ranks_here), available = (double)host_available_bytes();
    if (needed <= available) return;
    double gib[OWNER_COUNT];
    for (int owner = 0; owner < OWNER_COUNT; owner++) {
        gib[owner] = (double)arena_owner_bytes(&t->arena, (MemoryOwner)owner) * 0x1p-30;
    }
    die(EXIT_LAUNCH,
        "out of memory: %d rank%s on this host need%s %.3g GiB, but this host has %.3g GiB left. This "
        "rank's plan: parameters %.3g GiB, gradients %.3g, optimizer %.3g, activations %.3g, communication %.3g, "
        "workspace %.3g. More hosts, more tensor or pipeline ranks, or a smaller train.micro_batch or model make "
        "it fit",
        ranks_here, ranks_here == 1 ? "" : "s", ranks_here == 1 ? "s" : "", needed * 0x1p-30, available * 0x1p-30,
        gib[OWNER_PARAMETERS], gib[OWNER_GRADIENTS], gib[OWNER_OPTIMIZER], gib[OWNER_ACTIVATIONS],
        gib[OWNER_COMMUNICATION], gib[OWNER_WORKSPACE]);
}

/* ---- disk ---- */

int preflight_disk(const Trainer *t, Error *err) {
    const Config *c = t->config;
    const char *dir = c->checkpoint_dir;
    if (directory_make(dir, err, EXIT_CHECKPOINT) != 0) return -1;
    if (access(dir, W_OK | X_OK) != 0) {
        return error_set(err, EXIT_CHECKPOINT, "checkpoint.dir = %s: cannot write there: %s", dir, strerror(errno));
    }
    struct statvfs facts;
    if (statvfs(dir, &facts) != 0) return 0;
    const double room = (double)facts.f_bavail * (double)facts.f_frsize;
    const double needed = (double)model_parameters(c) * (double)dtype_size(c->dtype) * (1.0 + t->optimizer.states);
    if (room < needed) {
        log_warn(LOG_CKPT,
                 "checkpoint.dir = %s: a checkpoint takes %.4g MB, but only %.4g MB are free there: saving will "
                 "fail",
                 dir, needed * 1e-6, room * 1e-6);
    }
    return 0;
}
