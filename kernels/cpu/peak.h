/* peak.h - loops of independent multiply-adds, for kernels_peak_flops. */
#ifndef TRIDENT_KERNELS_CPU_PEAK_H
#define TRIDENT_KERNELS_CPU_PEAK_H

#include <stdbool.h>
#include <stdint.h>

#include "base/types.h"

/* FLOP of one iteration of the loops below. */
double peak_loop_flops(DType dtype, bool avx2);
/* The value returned has no meaning; it depends on all of the arithmetic. */
double peak_loop_avx2(DType dtype, int64_t iterations);
double peak_loop_portable(DType dtype, int64_t iterations);

#endif
