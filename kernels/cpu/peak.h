/* peak.h - loops of independent multiply-adds, for kernels_peak_flops. */
#ifndef TRIDENT_KERNELS_CPU_PEAK_H
#define TRIDENT_KERNELS_CPU_PEAK_H

#include <stdint.h>

#include "base/types.h"

enum { PEAK_CHAINS = 12 }; /* independent sums of the SIMD loops */

/* FLOP of one iteration of the loops below; register_bytes: of the SIMD loop, 0: the portable one. */
double peak_loop_flops(DType dtype, int register_bytes);
/* The value returned has no meaning; it depends on all of the arithmetic. */
double peak_loop_avx2(DType dtype, int64_t iterations);
double peak_loop_avx512(DType dtype, int64_t iterations);
double peak_loop_portable(DType dtype, int64_t iterations);

#endif
