/* cross_entropy.h - one row of the loss, as the portable and the AVX2 file have it. */
#ifndef TRIDENT_KERNELS_CPU_CROSS_ENTROPY_H
#define TRIDENT_KERNELS_CPU_CROSS_ENTROPY_H

#include "kernels/cpu/common.h"
#include "kernels/kernels.h"

/* Maximum of n logits (NaN is passed over), and the sum of exp(logit - maximum), which keeps a NaN; 0 where all are
 * -inf. */
void softmax_stats_row_avx2(const float *logits, int64_t n, float *maximum, float *sum);
/* logits become factor * exp(logit - lse). */
void softmax_row_avx2(float *logits, int64_t n, float lse, float factor);

#endif
