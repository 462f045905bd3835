/* slow_io.c - a library that is loaded before libc and makes a file system slow, stuck or behind the times.
 *
 *     gcc -shared -fPIC -o slow_io.so tests/faults/slow_io.c
 *     LD_PRELOAD=./slow_io.so SLOW_BELOW=/checkpoints/ SLOW_MS=20 trident train ...
 * SLOW_BELOW: only calls on paths that contain this. SLOW_MS=N: opening, fsync and mkdir take 0 to N ms each, as the
 * process number and a counter draw them; SLOW_AT=K: the K-th of these calls, from 1, takes N ms and the others
 * nothing; SLOW_STOP=1: in place of sleeping the process stops itself. SLOW_BEHIND=1: a directory that was just
 * made is said to exist already, and not to exist when it is looked at for the first time (what clients of one
 * file system with caches of their own see). SLOW_READS=FILE: the sizes of all reads, in the end, one a line.
 * SLOW_SHORT=N: reads give at most N bytes, and every other one is interrupted first. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static atomic_long calls;

static bool concerns(const char *path) {
    const char *below = getenv("SLOW_BELOW");
    return below && strstr(path, below) != NULL;
}

static long number(const char *name) {
    const char *text = getenv(name);
    return text ? strtol(text, NULL, 10) : 0;
}

static void take_time(const char *path) {
    const long limit_ms = number("SLOW_MS"), at = number("SLOW_AT");
    if (!concerns(path) || (!limit_ms && !number("SLOW_STOP"))) return;
    const long now = atomic_fetch_add(&calls, 1) + 1;
    if (at && now != at) return;
    if (number("SLOW_STOP")) {
        kill(getpid(), SIGSTOP);
        return;
    }
    const unsigned drawn = ((unsigned)getpid() * 2654435761u + (unsigned)now * 40503u) >> 7;
    const long ms = at ? limit_ms : (long)(drawn % (unsigned)(limit_ms + 1));
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

int open(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    take_time(path);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

static void path_of(int fd, char path[4096]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, 4095);
    path[n > 0 ? n : 0] = 0;
}

int fsync(int fd) {
    char path[4096];
    path_of(fd, path);
    take_time(path);
    return (int)syscall(SYS_fsync, fd);
}

/* ---- a directory that is there, and is not ---- */

static char unseen[4096]; /* the next look at it finds nothing */

int mkdir(const char *path, mode_t mode) {
    take_time(path);
    const int rc = (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (rc != 0 || !number("SLOW_BEHIND") || !concerns(path)) return rc;
    snprintf(unseen, sizeof unseen, "%s", path);
    errno = EEXIST;
    return -1;
}

int stat(const char *restrict path, struct stat *restrict facts) {
    if (unseen[0] && strcmp(path, unseen) == 0) {
        unseen[0] = 0;
        errno = ENOENT;
        return -1;
    }
    return (int)syscall(SYS_newfstatat, AT_FDCWD, path, facts, 0);
}

/* ---- reads: short ones, and the sizes of all ---- */

static FILE *reads;

static bool interrupted(void) {
    static _Thread_local bool again;
    again = !again;
    if (again) errno = EINTR;
    return again;
}

ssize_t pread(int fd, void *to, size_t bytes, off_t offset) {
    const long limit = number("SLOW_SHORT");
    char path[4096] = "";
    if (limit || getenv("SLOW_READS")) path_of(fd, path);
    const bool here = path[0] && concerns(path);
    if (here && limit && interrupted()) return -1;
    if (here && limit && bytes > (size_t)limit) bytes = (size_t)limit;
    const ssize_t n = syscall(SYS_pread64, fd, to, bytes, offset);
    if (!here || !getenv("SLOW_READS")) return n;
    if (!reads) reads = fopen(getenv("SLOW_READS"), "ae");
    if (reads) fprintf(reads, "%zd\n", n);
    return n;
}

__attribute__((destructor)) static void write_reads(void) {
    if (reads) fflush(reads);
}
