/* norm_avx2.c - the norms' fp32 text once more, compiled for AVX2. */
#ifdef __AVX2__
#include "kernels/cpu/norm.h"

#include <math.h>

#define NORM_LINKAGE
#define REAL float
#define SUFFIX avx2
#define REAL_SQRT sqrtf
#include "kernels/cpu/norm_real.h"
#endif
