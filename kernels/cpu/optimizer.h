/* optimizer.h - arguments of the updates, shared by the portable and the AVX2 file. */
#ifndef TRIDENT_KERNELS_CPU_OPTIMIZER_H
#define TRIDENT_KERNELS_CPU_OPTIMIZER_H

#include "kernels/cpu/common.h"
#include "kernels/kernels.h"

typedef struct {
    void *p, *m, *v;
    const void *g;
    const AdamwStep *step;
    double lr, momentum, weight_decay, grad_scale; /* SGD */
    int64_t n;
} UpdateArgs;

void adamw_chunk_avx2(void *args, int64_t index);
void sgd_chunk_avx2(void *args, int64_t index);

#endif
