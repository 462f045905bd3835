/* peak.c - the multiply-add loop in plain C; the compiler turns it into what the target's baseline has. */
#include "kernels/cpu/peak.h"

#include "kernels/cpu/common.h"

enum { LANES = 48 };

double peak_loop_flops(DType dtype, int register_bytes) {
    return 2.0 * (register_bytes ? (double)PEAK_CHAINS * register_bytes / (double)dtype_size(dtype) : LANES);
}

static double loop_f32(int64_t iterations) {
    float x[LANES];
    for (int c = 0; c < LANES; c++) x[c] = (float)c;
    for (int64_t i = 0; i < iterations; i++) {
        for (int c = 0; c < LANES; c++) x[c] = x[c] * 0.5f + 0.5f;
    }
    float sum = 0.0f;
    for (int c = 0; c < LANES; c++) sum += x[c];
    return sum;
}

static double loop_f64(int64_t iterations) {
    double x[LANES];
    for (int c = 0; c < LANES; c++) x[c] = (double)c;
    for (int64_t i = 0; i < iterations; i++) {
        for (int c = 0; c < LANES; c++) x[c] = x[c] * 0.5 + 0.5;
    }
    double sum = 0.0;
    for (int c = 0; c < LANES; c++) sum += x[c];
    return sum;
}

double peak_loop_portable(DType dtype, int64_t iterations) {
    return dtype == DT_F64 ? loop_f64(iterations) : loop_f32(iterations);
}
