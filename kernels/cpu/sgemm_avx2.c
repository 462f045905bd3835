/* sgemm_avx2.c - fp32 product for AVX2 and FMA: sgemm_packed.h with tiles of 6 x 16. */
#ifdef __AVX2__
#include "kernels/cpu/microkernel_avx2.h"

/* Tuned on Zen 3 with scripts/bench/gemm_bench.c. A strip of B (BLOCK_K x 16, 24 KiB) stays in the first
 * cache while a block of A (BLOCK_ROWS x BLOCK_K, 144 KiB, in the second) passes by. */
enum { STRIP_ROWS = TILE_ROWS, STRIP_COLS = TILE_COLS, TILE_ROWS_STEP = TILE_ROWS };
enum { BLOCK_K = 384, BLOCK_ROWS = 96, BLOCK_COLS = 1024, A_STRIP_STAYS = 0 };
#define SGEMM_RECTANGLE sgemm_rectangle_avx2
#define SGEMM_BUFFERS sgemm_buffers_avx2

static inline __attribute__((always_inline)) void strip_tile(float *c, int64_t ldc, bool add, int64_t rows, int64_t K,
                                                             const float *a, const float *b) {
    (void)rows; /* always all */
    if (add) {
        tile_6x16(c, ldc, true, K, a, 1, STRIP_ROWS, b, STRIP_COLS);
    } else {
        tile_6x16(c, ldc, false, K, a, 1, STRIP_ROWS, b, STRIP_COLS);
    }
}

#include "kernels/cpu/sgemm_packed.h"
#endif
