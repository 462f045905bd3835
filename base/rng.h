/* rng.h - counter-based random numbers: a draw is a pure function of (key, stream, index).
 * Philox 4x32 with 10 rounds: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC11. */
#ifndef TRIDENT_BASE_RNG_H
#define TRIDENT_BASE_RNG_H

#include <stdint.h>

typedef struct {
    uint32_t word[4];
} Philox;

Philox philox4x32(uint64_t key, uint64_t counter_high, uint64_t counter_low);

/* A stream number for a name ("init/blocks.0.attn.q.weight"): XXH3, 64 bits. */
uint64_t rng_stream(const char *name);
/* 64 random bits. */
uint64_t rng_bits(uint64_t seed, uint64_t stream, uint64_t index);
/* Uniform in [0, 1), 53 bits. */
double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index);
/* Standard normal (Box-Muller in fp64). */
double rng_normal(uint64_t seed, uint64_t stream, uint64_t index);

#endif
