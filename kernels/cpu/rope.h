/* rope.h - the row operation of RoPE for each path. */
#ifndef TRIDENT_KERNELS_CPU_ROPE_H
#define TRIDENT_KERNELS_CPU_ROPE_H

#include <stdint.h>

/* Rotates the heads of one row. table: (half, 2) cos, sin of the row's position; sign is 1, or -1 for
 * the inverse. Half is D / 2, at most ROPE_HALF_MAX. */
enum { ROPE_HALF_MAX = 128 };
void rope_row_f32(float *x, const float *table, float sign, int64_t heads, int64_t half);
void rope_row_f64(double *x, const double *table, double sign, int64_t heads, int64_t half);
void rope_row_avx2(float *x, const float *table, float sign, int64_t heads, int64_t half);

#endif
