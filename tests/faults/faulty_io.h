/* faulty_io.h - file calls that fail, die or come up short at a chosen one; see faulty_io.c. */
#ifndef TRIDENT_TESTS_FAULTY_IO_H
#define TRIDENT_TESTS_FAULTY_IO_H

#include <stdbool.h>

typedef struct {
    const char *below;  /* only calls on paths that contain this count */
    long at;            /* the call that fails, from 1; 0: none */
    int error;          /* its errno; 0: the process is killed there, before the call */
    bool sticky;        /* all later calls fail too (a disk that stays full) */
    int short_writes;   /* not 0: every write takes at most this many bytes, and every other call is interrupted */
    long long capacity; /* not 0: bytes that can be written altogether, then ENOSPC */
    /* After a call that took effect: its name and path (of the target for rename). NULL: none. */
    void (*after)(const char *call, const char *path);
} FaultyIo;

/* Counts from 0 again. In the program that includes faulty_io.c; not while other threads do input or output. */
void faulty_io_set(const FaultyIo *faults);
/* Calls that counted so far. */
long faulty_io_calls(void);
/* Calls of this thread count, or do not (the default). */
void faulty_io_thread(bool counts);

#endif
