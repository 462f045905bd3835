/* elementwise.h - arguments of the element-wise operations, shared with their AVX2 file. */
#ifndef TRIDENT_KERNELS_CPU_ELEMENTWISE_H
#define TRIDENT_KERNELS_CPU_ELEMENTWISE_H

#include "kernels/cpu/common.h"
#include "kernels/kernels.h"

/* One row of SwiGLU; F elements of gate, up, y. */
void swiglu_row_avx2(float *y, const float *gate, const float *up, int64_t F);
void swiglu_backward_row_avx2(float *dgate, float *dup, const float *dy, const float *gate, const float *up, int64_t F);

#endif
