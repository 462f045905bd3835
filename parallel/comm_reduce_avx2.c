/* comm_reduce_avx2.c - the sums and maxima of comm_reduce.c for machines with AVX2; the same bits. */
#if defined(__x86_64__)
#define REDUCE_TABLE comm_reduce_avx2
#include "parallel/comm_reduce_body.h"
#else
typedef int NothingForThisMachine;
#endif
