/* comm_reduce.c - sums and maxima over ranks, in rank order.
 *
 * In: one vector a rank. Out: the result, written to any number of places.
 * Every element is accumulated on its own, so neither blocks nor vector width change a bit. Blocks are
 * small enough for the caches to keep what is read until it is overwritten. */
#include <string.h>

#include "parallel/comm_internal.h"

enum { BLOCK_ELEMENTS = 2048 };

/* ---- 16-bit formats: to fp32 exactly, from fp32 to the nearest, ties to even ---- */

static inline float bits_to_f32(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t f32_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float bf16_to_f32(uint16_t h) { return bits_to_f32((uint32_t)h << 16); }

static inline uint16_t f32_to_bf16(float x) {
    uint32_t bits = f32_to_bits(x);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40); /* quiet, and never rounded to infinity */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return bits_to_f32(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    /* Scaling by a power of two is exact, and makes subnormal numbers normal. */
    return bits_to_f32(sign | f32_to_bits(bits_to_f32(rest << 13) * 0x1p112f));
}

static inline uint16_t f32_to_f16(float x) {
    uint32_t bits = f32_to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* from 65520 on: infinity */
    if (rest < 0x38800000) {
        /* Below 2^-14 the last place is 2^-24: this sum is rounded there. */
        return (uint16_t)(sign | (f32_to_bits(bits_to_f32(rest) + 0.5f) - f32_to_bits(0.5f)));
    }
    return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

static inline float f32_to_f32(float x) { return x; }
static inline double f64_to_f64(double x) { return x; }
static inline uint32_t i32_to_u32(int32_t x) { return (uint32_t)x; }
static inline int32_t u32_to_i32(uint32_t x) { return (int32_t)x; }

/* ---- one block of one format ---- */

#define SUM(a, b) ((a) + (b))
#define LARGER(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))
#define LARGER_INT(a, b) ((int32_t)(b) > (int32_t)(a) ? (b) : (a))

/* STORED: in the vectors; TYPE: of the accumulator. */
#define REDUCE_BLOCK(name, STORED, TYPE, widen, narrow, JOIN)                                                          \
    static void name(void *const *out, int n_out, const void *const *in, int n_in, int64_t first, int64_t n) {         \
        TYPE sum[BLOCK_ELEMENTS];                                                                                      \
        const STORED *x = (const STORED *)in[0] + first;                                                               \
        for (int64_t i = 0; i < n; i++) sum[i] = widen(x[i]);                                                          \
        for (int j = 1; j < n_in; j++) {                                                                               \
            x = (const STORED *)in[j] + first;                                                                         \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                TYPE one = widen(x[i]);                                                                                \
                sum[i] = JOIN(sum[i], one);                                                                            \
            }                                                                                                          \
        }                                                                                                              \
        STORED *y = (STORED *)out[0] + first;                                                                          \
        for (int64_t i = 0; i < n; i++) y[i] = narrow(sum[i]);                                                         \
        for (int j = 1; j < n_out; j++) memcpy((STORED *)out[j] + first, y, (size_t)n * sizeof *y);                    \
    }

REDUCE_BLOCK(sum_f32, float, float, f32_to_f32, f32_to_f32, SUM)
REDUCE_BLOCK(max_f32, float, float, f32_to_f32, f32_to_f32, LARGER)
REDUCE_BLOCK(sum_f64, double, double, f64_to_f64, f64_to_f64, SUM)
REDUCE_BLOCK(max_f64, double, double, f64_to_f64, f64_to_f64, LARGER)
REDUCE_BLOCK(sum_bf16, uint16_t, float, bf16_to_f32, f32_to_bf16, SUM)
REDUCE_BLOCK(max_bf16, uint16_t, float, bf16_to_f32, f32_to_bf16, LARGER)
REDUCE_BLOCK(sum_f16, uint16_t, float, f16_to_f32, f32_to_f16, SUM)
REDUCE_BLOCK(max_f16, uint16_t, float, f16_to_f32, f32_to_f16, LARGER)
REDUCE_BLOCK(sum_i32, int32_t, uint32_t, i32_to_u32, u32_to_i32, SUM)
REDUCE_BLOCK(max_i32, int32_t, uint32_t, i32_to_u32, u32_to_i32, LARGER_INT)

typedef void (*ReduceBlock)(void *const *out, int n_out, const void *const *in, int n_in, int64_t first, int64_t n);

static const ReduceBlock blocks[DT_COUNT][2] = {
    [DT_F32] = {sum_f32, max_f32},    [DT_F64] = {sum_f64, max_f64}, [DT_BF16] = {sum_bf16, max_bf16},
    [DT_F16] = {sum_f16, max_f16},    [DT_I32] = {sum_i32, max_i32},
};

void comm_reduce(void *const *out, int n_out, const void *const *in, int n_in, int64_t count, DType dtype, CommOp op) {
    REQUIRE(n_in >= 1 && n_out >= 1 && dtype < DT_COUNT && (op == COMM_SUM || op == COMM_MAX));
    ReduceBlock reduce = blocks[dtype][op];
    for (int64_t first = 0; first < count; first += BLOCK_ELEMENTS) {
        reduce(out, n_out, in, n_in, first, min_i64(BLOCK_ELEMENTS, count - first));
    }
}
