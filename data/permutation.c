/* permutation.c - keyed permutation of [0, n) by a Feistel network with cycle walking.
 *
 * Invariant: each round is invertible (one half is XORed with a function of the other), so the network is
 * a bijection of [0, 2^bits), and walking a cycle of it until [0, n) is entered again is one of [0, n). */
#include "data/permutation.h"

#include "base/check.h"
#include "base/rng.h"

/* Four rounds make a Feistel network pseudorandom (Luby and Rackoff, 1988) for large halves; small
 * domains, where halves have few bits, need more. */
enum { ROUNDS = 10 };

/* The two halves have bits / 2 and bits - bits / 2 bits; odd rounds change the one, even ones the other. */
static uint64_t feistel(uint64_t key, int bits, uint64_t value) {
    int low_bits = bits / 2, high_bits = bits - low_bits;
    uint32_t low_mask = (uint32_t)((UINT64_C(1) << low_bits) - 1);
    uint32_t high_mask = (uint32_t)((UINT64_C(1) << high_bits) - 1);
    uint32_t low = (uint32_t)value & low_mask, high = (uint32_t)(value >> low_bits);
    for (uint32_t round = 0; round < ROUNDS; round += 2) {
        high ^= philox4x32(key, round, low).word[0] & high_mask;
        low ^= philox4x32(key, round + 1, high).word[0] & low_mask;
    }
    return (uint64_t)high << low_bits | low;
}

int64_t permute(uint64_t key, int64_t n, int64_t index) {
    REQUIRE(index >= 0 && index < n);
    int bits = 0;
    while (bits < 63 && (INT64_C(1) << bits) < n) bits++;
    uint64_t value = (uint64_t)index;
    do value = feistel(key, bits, value);
    while (value >= (uint64_t)n);
    return (int64_t)value;
}
