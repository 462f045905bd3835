/* sgemm.h - fp32 product for AVX2 with FMA and for AVX-512, by rectangles of C. */
#ifndef TRIDENT_KERNELS_CPU_SGEMM_H
#define TRIDENT_KERNELS_CPU_SGEMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

/* As the arguments of matmul; K at least 1. */
typedef struct {
    float *C;
    const float *A, *B;
    int64_t ldc, lda, ldb, K;
    bool trans_a, trans_b, accumulate;
    const MatmulEpilogue *epilogue;
} Sgemm;

/* Rows [row, row + rows), columns [col, col + cols) of C, neither empty. */
void sgemm_rectangle_avx2(const Sgemm *g, int64_t row, int64_t rows, int64_t col, int64_t cols);
void sgemm_rectangle_avx512(const Sgemm *g, int64_t row, int64_t rows, int64_t col, int64_t cols);

/* Makes the calling thread's packing buffers, which are kept. Returns their bytes. */
size_t sgemm_buffers_avx2(void);
size_t sgemm_buffers_avx512(void);

#endif
