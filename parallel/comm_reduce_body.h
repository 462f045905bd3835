/* comm_reduce_body.h - sums and maxima in rank order, compiled once for every instruction set.
 *
 * The file that includes it defines REDUCE_TABLE, the name of the resulting table. Every element is
 * accumulated on its own, so neither blocks nor vector width change a bit. */
#include <string.h>

#include "parallel/comm_internal.h"

enum { BLOCK_ELEMENTS = 2048 }; /* of sums that the first-level cache keeps */

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
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return (uint16_t)(x != x ? quiet : rounded); /* a NaN is never rounded to infinity */
}

static inline float f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    /* Scaling by a power of two is exact, and makes subnormal numbers normal. */
    uint32_t finite = f32_to_bits(bits_to_f32(rest << 13) * 0x1p112f), special = 0x7f800000 | (rest & 0x3ff) << 13;
    return bits_to_f32(sign | (rest >= 0x7c00 ? special : finite));
}

static inline uint16_t f32_to_f16(float x) {
    uint32_t bits = f32_to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    /* Below 2^-14 the last place is 2^-24: the sum with a half is rounded there. */
    uint32_t subnormal = f32_to_bits(bits_to_f32(rest) + 0.5f) - f32_to_bits(0.5f);
    uint32_t normal = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    uint32_t half = rest < 0x38800000 ? subnormal : normal;
    half = rest >= 0x477ff000 ? 0x7c00 : half; /* from 65520 on: infinity */
    half = rest > 0x7f800000 ? 0x7e00 : half;
    return (uint16_t)(sign | half);
}

static inline float f32_to_f32(float x) { return x; }
static inline double f64_to_f64(double x) { return x; }
static inline uint32_t i32_to_u32(int32_t x) { return (uint32_t)x; }
static inline int32_t u32_to_i32(uint32_t x) { return (int32_t)x; }

/* ---- any format: a block of sums, joined by one vector after the other ---- */

#define SUM(a, b) ((a) + (b))
#define LARGER(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))
#define LARGER_INT(a, b) ((int32_t)(b) > (int32_t)(a) ? (b) : (a))

/* STORED: in the vectors; TYPE: of the sums. */
#define REDUCE_IN_BLOCKS(name, STORED, TYPE, widen, narrow, JOIN)                                       \
    static void name(void *const *out, int n_out, const void *const *in, int n_in, int64_t count) {     \
        TYPE sum[BLOCK_ELEMENTS];                                                                       \
        for (int64_t first = 0; first < count; first += BLOCK_ELEMENTS) {                               \
            const int64_t n = min_i64(BLOCK_ELEMENTS, count - first);                                   \
            const STORED *x = (const STORED *)in[0] + first;                                            \
            STORED *y = (STORED *)out[0] + first;                                                       \
            for (int64_t i = 0; i < n; i++) sum[i] = widen(x[i]);                                       \
            for (int j = 1; j < n_in; j++) {                                                            \
                x = (const STORED *)in[j] + first;                                                      \
                for (int64_t i = 0; i < n; i++) {                                                       \
                    TYPE one = widen(x[i]);                                                             \
                    sum[i] = JOIN(sum[i], one);                                                         \
                }                                                                                       \
            }                                                                                           \
            for (int64_t i = 0; i < n; i++) y[i] = narrow(sum[i]);                                      \
            for (int j = 1; j < n_out; j++) memcpy((STORED *)out[j] + first, y, (size_t)n * sizeof *y); \
        }                                                                                               \
    }

REDUCE_IN_BLOCKS(max_f32, float, float, f32_to_f32, f32_to_f32, LARGER)
REDUCE_IN_BLOCKS(max_f64, double, double, f64_to_f64, f64_to_f64, LARGER)
REDUCE_IN_BLOCKS(sum_bf16, uint16_t, float, bf16_to_f32, f32_to_bf16, SUM)
REDUCE_IN_BLOCKS(max_bf16, uint16_t, float, bf16_to_f32, f32_to_bf16, LARGER)
REDUCE_IN_BLOCKS(sum_f16, uint16_t, float, f16_to_f32, f32_to_f16, SUM)
REDUCE_IN_BLOCKS(max_f16, uint16_t, float, f16_to_f32, f32_to_f16, LARGER)
REDUCE_IN_BLOCKS(sum_i32, int32_t, uint32_t, i32_to_u32, u32_to_i32, SUM)
REDUCE_IN_BLOCKS(max_i32, int32_t, uint32_t, i32_to_u32, u32_to_i32, LARGER_INT)

/* ---- sums of fp32 and fp64: in registers, two cache lines at a time ---- */

typedef float FloatVector __attribute__((vector_size(32), aligned(4), may_alias));
typedef double DoubleVector __attribute__((vector_size(32), aligned(8), may_alias));

#define SUM_IN_REGISTERS(name, TYPE, VECTOR)                                                        \
    static void name(void *const *out, int n_out, const void *const *in, int n_in, int64_t count) { \
        enum { EACH = sizeof(VECTOR) / sizeof(TYPE) };                                              \
        int64_t i = 0;                                                                              \
        for (; i + 4 * EACH <= count; i += 4 * EACH) {                                              \
            const TYPE *x = (const TYPE *)in[0] + i;                                                \
            VECTOR a = *(const VECTOR *)x, b = *(const VECTOR *)(x + EACH);                         \
            VECTOR c = *(const VECTOR *)(x + 2 * EACH), d = *(const VECTOR *)(x + 3 * EACH);        \
            for (int j = 1; j < n_in; j++) {                                                        \
                x = (const TYPE *)in[j] + i;                                                        \
                a += *(const VECTOR *)x;                                                            \
                b += *(const VECTOR *)(x + EACH);                                                   \
                c += *(const VECTOR *)(x + 2 * EACH);                                               \
                d += *(const VECTOR *)(x + 3 * EACH);                                               \
            }                                                                                       \
            for (int j = 0; j < n_out; j++) {                                                       \
                TYPE *y = (TYPE *)out[j] + i;                                                       \
                *(VECTOR *)y = a;                                                                   \
                *(VECTOR *)(y + EACH) = b;                                                          \
                *(VECTOR *)(y + 2 * EACH) = c;                                                      \
                *(VECTOR *)(y + 3 * EACH) = d;                                                      \
            }                                                                                       \
        }                                                                                           \
        for (; i < count; i++) {                                                                    \
            TYPE sum = ((const TYPE *)in[0])[i];                                                    \
            for (int j = 1; j < n_in; j++) sum += ((const TYPE *)in[j])[i];                         \
            for (int j = 0; j < n_out; j++) ((TYPE *)out[j])[i] = sum;                              \
        }                                                                                           \
    }

SUM_IN_REGISTERS(sum_f32, float, FloatVector)
SUM_IN_REGISTERS(sum_f64, double, DoubleVector)

const CommReduceTable REDUCE_TABLE = {
    [DT_F32] = {sum_f32, max_f32}, [DT_F64] = {sum_f64, max_f64}, [DT_BF16] = {sum_bf16, max_bf16},
    [DT_F16] = {sum_f16, max_f16}, [DT_I32] = {sum_i32, max_i32},
};
