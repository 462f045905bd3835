/* optimizer_avx2.c - the updates' fp32 text once more, compiled for AVX2. */
#ifdef __AVX2__
#include "kernels/cpu/optimizer.h"

#include <math.h>

#define UPDATE_LINKAGE
#define REAL float
#define SUFFIX avx2
#define REAL_SQRT sqrtf
#include "kernels/cpu/optimizer_real.h"
#endif
