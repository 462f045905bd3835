/* test_comm_reduce.c - sums and maxima in rank order: every 16-bit number, roundings, NaN and infinities; the
 * portable code and its AVX2 twin give the same bits. */
#include <math.h>

#include "parallel/comm_internal.h"
#include "tests/unit/parallel/comm_harness.h"

static const CommReduceTable *tables[2];
static int n_tables;

static void find_tables(void) {
    n_tables = 0;
    tables[n_tables++] = &comm_reduce_portable;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) tables[n_tables++] = &comm_reduce_avx2;
#endif
}

static uint16_t join16(const CommReduceTable *table, DType dtype, CommOp op, uint16_t a, uint16_t b) {
    uint16_t result = 0;
    void *out[1] = {&result};
    const void *in[2] = {&a, &b};
    (*table)[dtype][op](out, 1, in, 2, 1);
    return result;
}

static float join32(const CommReduceTable *table, CommOp op, float a, float b) {
    float result = 0;
    void *out[1] = {&result};
    const void *in[2] = {&a, &b};
    (*table)[DT_F32][op](out, 1, in, 2, 1);
    return result;
}

/* The value of 16 bits, from the format's definition. */
static double value16(DType dtype, uint16_t h) {
    int fraction_bits = dtype == DT_BF16 ? 7 : 10, exponent_bits = 15 - fraction_bits;
    int fraction = h & ((1 << fraction_bits) - 1), exponent = h >> fraction_bits & ((1 << exponent_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1;
    double x;
    if (exponent == (1 << exponent_bits) - 1) {
        x = fraction ? NAN : INFINITY;
    } else if (exponent == 0) {
        x = ldexp(fraction, 1 - bias - fraction_bits);
    } else {
        x = ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
    }
    return h & 0x8000 ? -x : x;
}

static bool same(double a, double b) { return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b)); }

START_TEST(every_16_bit_number_passes_unchanged) {
    static const DType formats[2] = {DT_BF16, DT_F16};
    find_tables();
    for (int t = 0; t < n_tables; t++) {
        static uint16_t all[65536], got[65536];
        void *out[1] = {got};
        const void *in[1] = {all};
        for (int i = 0; i < 65536; i++) all[i] = (uint16_t)i;
        (*tables[t])[formats[_i]][COMM_SUM](out, 1, in, 1, 65536);
        for (int i = 0; i < 65536; i++) {
            bool nan = isnan(value16(formats[_i], all[i]));
            ck_assert_msg(nan ? isnan(value16(formats[_i], got[i])) : got[i] == all[i], "table %d: %04x becomes %04x",
                          t, all[i], got[i]);
        }
    }
}
END_TEST

/* fp32 sums of two 16-bit numbers are exact or rounded once before; both roundings are repeated here. */
START_TEST(sums_of_16_bit_numbers_are_rounded_to_nearest_even) {
    static const DType formats[2] = {DT_BF16, DT_F16};
    uint64_t seed = random_seed(), state = seed;
    find_tables();
    for (int i = 0; i < 200000; i++) {
        uint64_t bits = random_next(&state);
        uint16_t a = (uint16_t)bits, b = (uint16_t)(bits >> 16);
        if (bits >> 32 & 1) b = (uint16_t)((a & 0x7c00) | (b & 0x83ff)); /* near in size */
        double x = value16(formats[_i], a), y = value16(formats[_i], b);
        double wanted = round_for(formats[_i], (double)((float)x + (float)y));
        for (int t = 0; t < n_tables; t++) {
            double got = value16(formats[_i], join16(tables[t], formats[_i], COMM_SUM, a, b));
            ck_assert_msg(same(got, wanted), "%04x + %04x is %a, not %a; TEST_SEED=%llu", a, b, got, wanted,
                          (unsigned long long)seed);
            double larger = isnan(x) || isnan(y) ? NAN : x > y ? x : y;
            got = value16(formats[_i], join16(tables[t], formats[_i], COMM_MAX, a, b));
            ck_assert_msg(isnan(larger) ? isnan(got) : got == larger, "max of %04x and %04x is %a", a, b, got);
        }
    }
}
END_TEST

START_TEST(not_a_number_is_never_lost) {
    find_tables();
    for (int t = 0; t < n_tables; t++) {
        for (int op = COMM_SUM; op <= COMM_MAX; op++) {
            ck_assert(isnan(join32(tables[t], (CommOp)op, NAN, 1)));
            ck_assert(isnan(join32(tables[t], (CommOp)op, 1, NAN)));
            ck_assert(isnan(join32(tables[t], (CommOp)op, INFINITY, NAN)));
        }
        ck_assert(join32(tables[t], COMM_MAX, -INFINITY, INFINITY) == INFINITY);
        ck_assert(join32(tables[t], COMM_MAX, -1, -2) == -1);
    }
}
END_TEST

/* Any number of inputs, outputs and elements, at any alignment; an output may be an input. */
START_TEST(all_shapes_give_the_bits_of_the_definition) {
    enum { N = 5000, MANY = 9 };
    static char memory[MANY][N * 8 + 64], results[2][N * 8 + 64];
    static const int64_t counts[] = {0, 1, 31, 32, 33, 100, 2047, 2048, 2049, 4100};
    find_tables();
    for (int n = 1; n <= MANY; n += 2) {
        for (DType dtype = 0; dtype < DT_COUNT; dtype++) {
            for (int c = 0; c < 10 * 2; c++) {
                const int64_t count = counts[c / 2], skip = c % 3;
                const CommOp op = c % 2 ? COMM_MAX : COMM_SUM;
                const size_t size = dtype_size(dtype);
                int ranks[MANY];
                for (int t = 0; t < n_tables; t++) {
                    void *out[MANY];
                    const void *in[MANY];
                    for (int j = 0; j < n; j++) {
                        ranks[j] = j;
                        in[j] = out[j] = memory[j] + (size_t)skip * size;
                        fill_values(out[j], dtype, j, 0, count, (uint64_t)c);
                    }
                    (*tables[t])[dtype][op](out, n, in, n, count);
                    for (int j = 1; j < n; j++) ck_assert(memcmp(out[j], out[0], (size_t)count * size) == 0);
                    memcpy(results[t], out[0], (size_t)count * size);
                }
                ck_assert(memcmp(results[0], results[n_tables - 1], (size_t)count * size) == 0);
                for (int64_t i = 0; i < count; i++) {
                    char wanted[8];
                    store(wanted, 0, dtype, reduced(dtype, op, ranks, n, i, (uint64_t)c));
                    ck_assert_msg(memcmp(wanted, results[0] + (size_t)i * size, size) == 0,
                                  "%s, %d inputs, element %lld of %lld", dtype_name(dtype), n, (long long)i,
                                  (long long)count);
                }
            }
        }
    }
}
END_TEST

static void add_tests(TCase *cases) {
    tcase_add_loop_test(cases, every_16_bit_number_passes_unchanged, 0, 2);
    tcase_add_loop_test(cases, sums_of_16_bit_numbers_are_rounded_to_nearest_even, 0, 2);
    tcase_add_test(cases, not_a_number_is_never_lost);
    tcase_add_test(cases, all_shapes_give_the_bits_of_the_definition);
}

int main(void) { return run_suite("comm reduce", add_tests); }
