/* cores.h - the processor cores that this process may run on. */
#ifndef TRIDENT_BASE_CORES_H
#define TRIDENT_BASE_CORES_H

/* taskset, the binding of a launcher, and containers with a set of cores give fewer than there are. At least 1. */
int cores_allowed(void);

#endif
