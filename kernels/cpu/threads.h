/* threads.h - a process's own worker threads, which share the chunks of one operation with the caller. */
#ifndef TRIDENT_KERNELS_CPU_THREADS_H
#define TRIDENT_KERNELS_CPU_THREADS_H

#include <stdint.h>

#include "kernels/cpu/common.h"

enum { BLOCKS_MAX = 256 };

/* Calls run(args, i) for i in [0, count) on the caller and up to threads - 1 workers, and returns when all are done.
 * Each thread starts in its own of `blocks` contiguous blocks of indexes, takes them in order, and then helps in
 * the other blocks; 1 block: each index goes to the next free thread. A call from inside run, or while another
 * thread of the process is in here, runs on the calling thread alone. */
void threads_run(int threads, int64_t blocks, int64_t count, ChunkFunction run, void *args);

/* What each new worker calls once, before its first chunk; no two do so at a time. */
void threads_set_start(void (*start)(void));

#endif
