/* vector_avx2.c - the sum of squares' fp32 text once more, compiled for AVX2. */
#ifdef __AVX2__
#include "kernels/cpu/vector.h"

#include "kernels/cpu/common.h"

enum { SQUARES_LANES = 16 };
#define SQUARES_LINKAGE
#define REAL float
#define SUFFIX avx2
#include "kernels/cpu/vector_real.h"
#endif
