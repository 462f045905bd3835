/* permutation.h - the order of samples: a permutation of [0, n) that is computed, not stored.
 *
 * A Feistel network over the smallest power of two that holds n, its rounds keyed by Philox; results
 * outside [0, n) are put in again ("cycle walking"), fewer than once on average. Any element of any
 * epoch is available at once, so seeking costs nothing and no rank has to wait for another's file. */
#ifndef TRIDENT_DATA_PERMUTATION_H
#define TRIDENT_DATA_PERMUTATION_H

#include <stdint.h>

/* Where index (0 <= index < n) goes. Pure: equal arguments give equal results on every machine. */
int64_t permute(uint64_t key, int64_t n, int64_t index);

#endif
