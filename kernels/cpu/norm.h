/* norm.h - arguments of the norms, shared by the portable and the AVX2 files. */
#ifndef TRIDENT_KERNELS_CPU_NORM_H
#define TRIDENT_KERNELS_CPU_NORM_H

#include "kernels/cpu/common.h"
#include "kernels/kernels.h"

typedef struct {
    void *x_out, *y, *mean, *rstd;
    const void *x, *delta, *bias, *w, *b;
    double eps;
    int64_t N, C, chunk_rows;
} NormForwardArgs;

typedef struct {
    void *dx, *partial; /* partial: (blocks, 1 or 2, C) sums of dw and db */
    void *dw, *db;
    const void *dy, *x, *w, *mean, *rstd;
    int64_t N, C, block_rows, blocks;
    bool layer;
} NormBackwardArgs;

void norm_forward_chunk_avx2(void *args, int64_t index);
void norm_backward_block_avx2(void *args, int64_t index);

#endif
