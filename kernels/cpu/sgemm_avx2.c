/* sgemm_avx2.c - fp32 product of packed blocks (the scheme of Goto and van de Geijn 2008).
 * In: a rectangle of C and the operands.  Out: the rectangle, epilogue done.
 * Invariants: K is cut into blocks that depend on K alone, and within a block an element's sum runs
 * over k in order: the bits of an element depend on its row of A and its column of B only. So a
 * product may be cut into any rectangles, for any number of threads. */
#ifdef __AVX2__
#include "kernels/cpu/sgemm.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/types.h"
#include "kernels/cpu/matmul_epilogue.h"
#include "kernels/cpu/microkernel_avx2.h"
#include "kernels/cpu/simd_avx2.h"

/* Tuned on Zen 3 with scripts/bench/gemm_bench.c. A strip of B (BLOCK_K x 16, 24 KiB) stays in the first
 * cache while a block of A (BLOCK_ROWS x BLOCK_K, 144 KiB, in the second) passes by. */
enum {
    BLOCK_K = 384,
    BLOCK_ROWS = 96,
    BLOCK_COLS = 1024,
    SLACK = 8 /* packing writes whole registers */
};

typedef struct {
    float *a; /* strips of 6 rows, each (k, 6) */
    float *b; /* strips of 16 columns, each (k, 16) */
} Packed;

/* One pair of buffers a thread, made at its first product and kept: a product allocates nothing. */
static Packed thread_buffers(void) {
    static _Thread_local float *buffer;
    const size_t a_count = BLOCK_ROWS * BLOCK_K + SLACK, b_count = BLOCK_COLS * BLOCK_K;
    if (!buffer) {
        buffer = aligned_alloc(64, round_up((int64_t)((a_count + b_count) * sizeof(float)), 64));
        REQUIRE(buffer);
    }
    return (Packed){buffer + b_count, buffer};
}

/* ---- packing ---- */

/* Six rows of A from memory (row, k): transposed eight k at a time. A store of eight covers six values
 * and two of the next k, which the next store sets right. */
static void pack_a_rows(float *to, const float *a, int64_t lda, int64_t rows, int64_t K) {
    for (int64_t k = 0; k < K; k += 8) {
        __m256 row[8];
        for (int64_t i = 0; i < 8; i++) row[i] = i < rows ? load_row_ps(a + i * lda + k, K - k) : _mm256_setzero_ps();
        transpose_8x8(row);
        for (int64_t i = 0; i < 8 && k + i < K; i++) _mm256_storeu_ps(to + (k + i) * TILE_ROWS, row[i]);
    }
}

/* The same from memory (k, row). */
static void pack_a_transposed(float *to, const float *a, int64_t lda, int64_t rows, int64_t K) {
    __m256i mask = tail_mask_epi32(rows);
    for (int64_t k = 0; k < K; k++) _mm256_storeu_ps(to + k * TILE_ROWS, _mm256_maskload_ps(a + k * lda, mask));
}

/* Sixteen columns of B from memory (k, column). */
static void pack_b_rows(float *to, const float *b, int64_t ldb, int64_t cols, int64_t K) {
    for (int64_t k = 0; k < K; k++, b += ldb, to += TILE_COLS) {
        _mm256_store_ps(to, load_row_ps(b, cols));
        _mm256_store_ps(to + 8, cols > 8 ? load_row_ps(b + 8, cols - 8) : _mm256_setzero_ps());
    }
}

/* The same from memory (column, k). */
static void pack_b_transposed(float *to, const float *b, int64_t ldb, int64_t cols, int64_t K) {
    for (int64_t half = 0; half < TILE_COLS; half += 8) {
        for (int64_t k = 0; k < K; k += 8) {
            __m256 row[8];
            for (int64_t i = 0; i < 8; i++) {
                row[i] = half + i < cols ? load_row_ps(b + (half + i) * ldb + k, K - k) : _mm256_setzero_ps();
            }
            transpose_8x8(row);
            for (int64_t i = 0; i < 8 && k + i < K; i++) _mm256_store_ps(to + (k + i) * TILE_COLS + half, row[i]);
        }
    }
}

static void pack_a(float *to, const Sgemm *g, int64_t row, int64_t rows, int64_t k, int64_t K) {
    for (int64_t i = 0; i < rows; i += TILE_ROWS, to += TILE_ROWS * K) {
        int64_t n = min_i64(TILE_ROWS, rows - i);
        if (g->trans_a) {
            pack_a_transposed(to, g->A + k * g->lda + row + i, g->lda, n, K);
        } else {
            pack_a_rows(to, g->A + (row + i) * g->lda + k, g->lda, n, K);
        }
    }
}

static void pack_b(float *to, const Sgemm *g, int64_t col, int64_t cols, int64_t k, int64_t K) {
    for (int64_t j = 0; j < cols; j += TILE_COLS, to += TILE_COLS * K) {
        int64_t n = min_i64(TILE_COLS, cols - j);
        if (g->trans_b) {
            pack_b_transposed(to, g->B + (col + j) * g->ldb + k, g->ldb, n, K);
        } else {
            pack_b_rows(to, g->B + k * g->ldb + col + j, g->ldb, n, K);
        }
    }
}

/* ---- product ---- */

/* A tile at the edge of C goes through a whole one. */
static void edge_tile(float *c, int64_t ldc, bool add, int64_t rows, int64_t cols, int64_t K, const float *a,
                      const float *b) {
    float tile[TILE_ROWS * TILE_COLS];
    tile_6x16(tile, TILE_COLS, false, K, a, 1, TILE_ROWS, b, TILE_COLS);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < cols; j++) {
            float sum = tile[i * TILE_COLS + j];
            c[i * ldc + j] = add ? c[i * ldc + j] + sum : sum;
        }
    }
}

/* A packed block of rows times a packed block of columns. */
static void multiply_block(float *c, int64_t ldc, bool add, int64_t rows, int64_t cols, int64_t K, const Packed *p) {
    for (int64_t j = 0; j < cols; j += TILE_COLS) {
        const float *b = p->b + j * K;
        for (int64_t i = 0; i < rows; i += TILE_ROWS) {
            const float *a = p->a + i * K;
            float *at = c + i * ldc + j;
            if (i + TILE_ROWS > rows || j + TILE_COLS > cols) {
                edge_tile(at, ldc, add, min_i64(TILE_ROWS, rows - i), min_i64(TILE_COLS, cols - j), K, a, b);
                continue;
            }
            for (int r = 0; r < TILE_ROWS; r++) _mm_prefetch((const char *)(at + r * ldc + TILE_COLS - 1), _MM_HINT_T0);
            if (add) {
                tile_6x16(at, ldc, true, K, a, 1, TILE_ROWS, b, TILE_COLS);
            } else {
                tile_6x16(at, ldc, false, K, a, 1, TILE_ROWS, b, TILE_COLS);
            }
        }
    }
}

static void finish_block(const Sgemm *g, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    const MatmulEpilogue *e = g->epilogue;
    if (!e || e->kind == EPILOGUE_NONE) return;
    for (int64_t i = row; i < row + rows; i++) {
        int64_t at = i * g->ldc + col;
        epilogue_row_avx2(g->C + at, e->aux ? (float *)e->aux + at : NULL,
                          e->bias ? (const float *)e->bias + col : NULL, e->kind, cols);
    }
}

/* Columns [col, col + cols) of the rectangle, at most BLOCK_COLS of them. */
static void multiply_columns(const Sgemm *g, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    Packed p = thread_buffers();
    /* BIAS_GELU keeps the product in aux and writes the activation to C. */
    float *product = g->epilogue && g->epilogue->kind == EPILOGUE_BIAS_GELU ? g->epilogue->aux : g->C;
    int64_t block_k = round_up(ceil_div(g->K, ceil_div(g->K, BLOCK_K)), 8);
    int64_t block_rows = round_up(ceil_div(rows, ceil_div(rows, BLOCK_ROWS)), TILE_ROWS);
    for (int64_t k = 0; k < g->K; k += block_k) {
        int64_t K = min_i64(block_k, g->K - k);
        pack_b(p.b, g, col, cols, k, K);
        for (int64_t i = row; i < row + rows; i += block_rows) {
            int64_t n = min_i64(block_rows, row + rows - i);
            pack_a(p.a, g, i, n, k, K);
            multiply_block(product + i * g->ldc + col, g->ldc, g->accumulate || k > 0, n, cols, K, &p);
            if (k + K == g->K) finish_block(g, i, n, col, cols);
        }
    }
}

void sgemm_rectangle_avx2(const Sgemm *g, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    int64_t block_cols = round_up(ceil_div(cols, ceil_div(cols, BLOCK_COLS)), TILE_COLS);
    for (int64_t j = col; j < col + cols; j += block_cols) {
        multiply_columns(g, row, rows, j, min_i64(block_cols, col + cols - j));
    }
}
#endif
