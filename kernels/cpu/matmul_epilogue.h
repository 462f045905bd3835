/* matmul_epilogue.h - what is done to a panel of a product while it is in cache. */
#ifndef TRIDENT_KERNELS_CPU_MATMUL_EPILOGUE_H
#define TRIDENT_KERNELS_CPU_MATMUL_EPILOGUE_H

#include <stdint.h>

#include "kernels/kernels.h"

/* gelu(x) = x (1 + tanh(GELU_A (x + GELU_B x^3))) / 2: Hendrycks and Gimpel 2016, tanh form. */
#define GELU_A 0.79788456080286535588 /* sqrt(2 / pi) */
#define GELU_B 0.044715

/* One row of cols elements. c: the product on entry (BIAS, DGELU) or only written (BIAS_GELU, where
 * aux holds the product on entry). bias may be NULL. */
void epilogue_row_f32(float *c, float *aux, const float *bias, Epilogue kind, int64_t cols);
void epilogue_row_f64(double *c, double *aux, const double *bias, Epilogue kind, int64_t cols);
void epilogue_row_avx2(float *c, float *aux, const float *bias, Epilogue kind, int64_t cols);

#endif
