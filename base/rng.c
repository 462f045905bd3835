/* rng.c - Philox 4x32-10 and the draws made from it. */
#include "base/rng.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

Philox philox4x32(uint64_t key, uint64_t counter_high, uint64_t counter_low) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    Philox c = {
        {(uint32_t)counter_low, (uint32_t)(counter_low >> 32), (uint32_t)counter_high, (uint32_t)(counter_high >> 32)}};
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * c.word[0];
        uint64_t product1 = (uint64_t)0xCD9E8D57u * c.word[2];
        c = (Philox){{(uint32_t)(product1 >> 32) ^ c.word[1] ^ k0, (uint32_t)product1,
                      (uint32_t)(product0 >> 32) ^ c.word[3] ^ k1, (uint32_t)product0}};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

uint64_t rng_stream(const char *name) { return XXH3_64bits(name, strlen(name)); }

uint64_t rng_bits(uint64_t seed, uint64_t stream, uint64_t index) {
    Philox p = philox4x32(seed, stream, index);
    return (uint64_t)p.word[1] << 32 | p.word[0];
}

static double unit(uint32_t low, uint32_t high) { return (double)(((uint64_t)high << 32 | low) >> 11) * 0x1p-53; }

double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    Philox p = philox4x32(seed, stream, index);
    return unit(p.word[0], p.word[1]);
}

double rng_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    Philox p = philox4x32(seed, stream, index);
    double u = 1.0 - unit(p.word[0], p.word[1]); /* in (0, 1]: the logarithm is finite */
    double angle = 6.283185307179586476925 * unit(p.word[2], p.word[3]);
    return sqrt(-2.0 * log(u)) * cos(angle);
}
