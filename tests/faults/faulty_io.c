/* faulty_io.c - stands before libc's file calls and makes the k-th of them fail.
 *
 * Two uses. Included in a test program, which arms it by faulty_io_set and faulty_io_thread. Or as a library
 * that is loaded before libc, for a whole program and all processes that it starts:
 *     gcc -shared -fPIC -o faulty_io.so tests/faults/faulty_io.c
 *     LD_PRELOAD=./faulty_io.so FAULT_AT=7 FAULT_ERRNO=28 FAULT_BELOW=/checkpoints/ trident train ...
 * FAULT_AT: the call, from 1; FAULT_ERRNO: what it answers, 0: the process is killed there; FAULT_STICKY=1: all
 * later calls fail too; FAULT_SHORT=N: writes take at most N bytes, every other call is interrupted first;
 * FAULT_COUNTER: a file through which the processes count together (each for itself without it). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "tests/faults/faulty_io.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static FaultyIo faults;
static atomic_long own_count, *count = &own_count;
static atomic_llong written_bytes;
static _Thread_local bool thread_counts;
static bool all_threads_count;

void faulty_io_set(const FaultyIo *wanted) {
    faults = *wanted;
    atomic_store(count, 0);
    atomic_store(&written_bytes, 0);
}

long faulty_io_calls(void) { return atomic_load(count); }

void faulty_io_thread(bool counts) { thread_counts = counts; }

static long number(const char *name) {
    const char *text = getenv(name);
    return text ? strtol(text, NULL, 10) : 0;
}

__attribute__((constructor)) static void arm_from_environment(void) {
    const char *counter = getenv("FAULT_COUNTER");
    if (!getenv("FAULT_AT") && !getenv("FAULT_SHORT") && !counter) return;
    all_threads_count = true;
    faults = (FaultyIo){.below = getenv("FAULT_BELOW"),
                        .at = number("FAULT_AT"),
                        .error = (int)number("FAULT_ERRNO"),
                        .sticky = number("FAULT_STICKY") != 0,
                        .short_writes = (int)number("FAULT_SHORT")};
    if (!counter) return;
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, counter, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || ftruncate(fd, sizeof *count) != 0) abort();
    count = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (count == MAP_FAILED) abort();
    syscall(SYS_close, fd);
}

static bool watching(void) { return (thread_counts || all_threads_count) && faults.below; }

/* The path must concern us; otherwise the call passes. */
static bool concerns(const char *path) { return watching() && strstr(path, faults.below) != NULL; }

static void path_of(int fd, char path[4096]) {
    char link[64];
    path[0] = 0;
    if (!watching()) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, 4095);
    path[n > 0 ? n : 0] = 0;
}

/* Whether this call is to fail; errno is set then. */
static bool fails(const char *path) {
    if (!concerns(path)) return false;
    const long now = atomic_fetch_add(count, 1) + 1;
    const bool here = faults.at && (now == faults.at || (faults.sticky && now > faults.at));
    if (!here) return false;
    if (faults.error == 0) kill(getpid(), SIGKILL);
    errno = faults.error;
    return true;
}

static bool interrupted(const char *path) {
    static _Thread_local bool again;
    if (!faults.short_writes || !concerns(path)) return false;
    again = !again;
    if (again) errno = EINTR;
    return again;
}

static long done(long result, const char *call, const char *path) {
    const int saved = errno;
    if (result >= 0 && faults.after && concerns(path)) faults.after(call, path);
    errno = saved;
    return result;
}

static int open_path(const char *path, int flags, va_list arguments) {
    const mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    /* Reading is not what this is about. */
    if ((flags & O_ACCMODE) != O_RDONLY && fails(path)) return -1;
    const long fd = syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    return (int)((flags & O_ACCMODE) != O_RDONLY ? done(fd, "open", path) : fd);
}

int open(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const int fd = open_path(path, flags, arguments);
    va_end(arguments);
    return fd;
}

int open64(const char *path, int flags, ...);
int open64(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const int fd = open_path(path, flags, arguments);
    va_end(arguments);
    return fd;
}

ssize_t write(int fd, const void *bytes, size_t n) {
    char path[4096];
    path_of(fd, path);
    if (concerns(path)) {
        if (interrupted(path) || fails(path)) return -1;
        if (faults.short_writes && n > (size_t)faults.short_writes) n = (size_t)faults.short_writes;
        if (faults.capacity && atomic_fetch_add(&written_bytes, (long long)n) + (long long)n > faults.capacity) {
            errno = ENOSPC;
            return -1;
        }
    }
    return done(syscall(SYS_write, fd, bytes, n), "write", path);
}

int fsync(int fd) {
    char path[4096];
    path_of(fd, path);
    if (interrupted(path) || fails(path)) return -1;
    return (int)done(syscall(SYS_fsync, fd), "fsync", path);
}

int close(int fd) {
    char path[4096];
    path_of(fd, path);
    /* Only files that were written can tell of an error here. */
    const int flags = (int)syscall(SYS_fcntl, fd, F_GETFL);
    const bool failing = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY && fails(path);
    const int error = errno;
    const long result = syscall(SYS_close, fd);
    if (!failing) return (int)result;
    errno = error;
    return -1;
}

int mkdir(const char *path, mode_t mode) {
    return fails(path) ? -1 : (int)done(syscall(SYS_mkdirat, AT_FDCWD, path, mode), "mkdir", path);
}

int rename(const char *from, const char *to) {
    return fails(to) ? -1 : (int)done(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0), "rename", to);
}

int unlink(const char *path) {
    return fails(path) ? -1 : (int)done(syscall(SYS_unlinkat, AT_FDCWD, path, 0), "unlink", path);
}

int rmdir(const char *path) {
    return fails(path) ? -1 : (int)done(syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR), "rmdir", path);
}
