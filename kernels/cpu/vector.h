/* vector.h - sums of squares of a chunk, as the portable and the AVX2 file have them. */
#ifndef TRIDENT_KERNELS_CPU_VECTOR_H
#define TRIDENT_KERNELS_CPU_VECTOR_H

#include <stdint.h>

double squares_avx2(const float *x, int64_t n);

#endif
