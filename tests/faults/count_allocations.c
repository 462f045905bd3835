/* count_allocations.c - stands before libc's ways to get memory and counts those taken between two steps of a run.
 *
 * A library that is loaded before libc, for a whole program and all processes that it starts:
 *     gcc -shared -fPIC -o count.so tests/faults/count_allocations.c
 *     LD_PRELOAD=./count.so COUNT_FILE=/tmp/n COUNT_FROM=2 COUNT_TO=9 trident train ...
 * Counts from the moment at which some process has written the row of step COUNT_FROM to metrics.jsonl to that at
 * which it writes the row of step COUNT_TO. COUNT_FILE: where the processes count together; its first bytes are a
 * Counts. Who takes memory meanwhile is shown on standard error, the first few times in each process.
 * Memory that libc takes by itself is seen where malloc serves it; a thread's stack is not. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    atomic_long counting; /* 1: between the two rows; 2: past them */
    atomic_long mallocs, mallocs_bytes, maps;
} Counts;

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t n, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);

static Counts nothing, *counts = &nothing;
static long first_step = -1, last_step = -1;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("COUNT_FILE"), *from = getenv("COUNT_FROM"), *to = getenv("COUNT_TO");
    void *frame;
    if (!path || !from || !to) return;
    backtrace(&frame, 1); /* takes memory the first time */
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || ftruncate(fd, sizeof *counts) != 0) abort();
    counts = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (counts == MAP_FAILED) abort();
    syscall(SYS_close, fd);
    first_step = strtol(from, NULL, 10);
    last_step = strtol(to, NULL, 10);
}

static void count(atomic_long *kind, size_t bytes) {
    enum { SHOWN_MAX = 4, FRAMES_MAX = 16 };
    static atomic_int shown;
    if (atomic_load_explicit(&counts->counting, memory_order_relaxed) != 1) return;
    atomic_fetch_add(kind, 1);
    if (kind == &counts->mallocs) atomic_fetch_add(&counts->mallocs_bytes, (long)bytes);
    if (atomic_fetch_add(&shown, 1) >= SHOWN_MAX) return;
    void *frames[FRAMES_MAX];
    const int saved = errno;
    char line[80]; /* dprintf takes memory */
    const int n = snprintf(line, sizeof line, "process %d takes %zu bytes:\n", (int)getpid(), bytes);
    syscall(SYS_write, 2, line, n);
    backtrace_symbols_fd(frames, backtrace(frames, FRAMES_MAX), 2);
    errno = saved;
}

void *malloc(size_t bytes) {
    count(&counts->mallocs, bytes);
    return __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes) {
    count(&counts->mallocs, n * bytes);
    return __libc_calloc(n, bytes);
}

void *realloc(void *old, size_t bytes) {
    count(&counts->mallocs, bytes);
    return __libc_realloc(old, bytes);
}

void *memalign(size_t alignment, size_t bytes) {
    count(&counts->mallocs, bytes);
    return __libc_memalign(alignment, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void **to, size_t alignment, size_t bytes) {
    *to = memalign(alignment, bytes);
    return *to ? 0 : ENOMEM;
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    count(&counts->maps, bytes);
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

void *mmap64(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    return mmap(at, bytes, protection, flags, fd, offset);
}

/* Where a row of metrics.jsonl begins or ends the counting. */
ssize_t write(int fd, const void *bytes, size_t n) {
    static const char head[] = "{\"step\": ";
    long step = -1;
    if (last_step >= 0 && n > sizeof head && memcmp(bytes, head, sizeof head - 1) == 0) {
        step = strtol((const char *)bytes + sizeof head - 1, NULL, 10);
    }
    if (step >= last_step && step >= 0) atomic_store(&counts->counting, 2);
    const ssize_t result = syscall(SYS_write, fd, bytes, n);
    if (step == first_step && first_step >= 0) atomic_store(&counts->counting, 1);
    return result;
}
