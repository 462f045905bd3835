/* comm_reduce.c - sums and maxima over ranks, in rank order, for any machine; and the choice of the best twin. */
#define REDUCE_TABLE comm_reduce_portable
#include "parallel/comm_reduce_body.h"

static const CommReduceTable *best_table(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return &comm_reduce_avx2;
#endif
    return &comm_reduce_portable;
}

void comm_reduce(void *const *out, int n_out, const void *const *in, int n_in, int64_t count, DType dtype, CommOp op) {
    REQUIRE(n_in >= 1 && n_out >= 1 && dtype < DT_COUNT && (op == COMM_SUM || op == COMM_MAX));
    (*best_table())[dtype][op](out, n_out, in, n_in, count);
}
