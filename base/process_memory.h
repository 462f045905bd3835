/* process_memory.h - what this process holds and takes, as the system and our own allocations tell. */
#ifndef TRIDENT_BASE_PROCESS_MEMORY_H
#define TRIDENT_BASE_PROCESS_MEMORY_H

#include <stdint.h>

/* Proportional set size: resident bytes, each page divided by the number of processes that map it, so that sums
 * over processes count shared pages once. -1 where the system does not say. Walks all pages: about 20 ms a GB where
 * these are small. */
int64_t process_bytes(void);

#endif
