/* sgemm_packed.h - fp32 product of packed blocks (the scheme of Goto and van de Geijn, "Anatomy of
 * High-Performance Matrix Multiplication", 2008); the body of sgemm_avx2.c and sgemm_avx512.c.
 * Defined before: STRIP_ROWS x STRIP_COLS, the tile of C that registers hold; BLOCK_ROWS, BLOCK_COLS, BLOCK_K,
 * what caches hold; A_STRIP_STAYS, which of the two strips stays in the first cache; TILE_ROWS_STEP, which divides
 * the rows that a tile may have; SGEMM_RECTANGLE and SGEMM_BUFFERS, the names; and strip_tile(c, ldc, add, rows, K,
 * a, b): `rows` rows of C (rows, STRIP_COLS) = or += packed strip a . packed strip b.
 * In: a rectangle of C and the operands.  Out: the rectangle, epilogue done.
 * Invariants: K is cut into blocks that depend on K alone, and within a block an element's sum runs
 * over k in order: the bits of an element depend on its row of A and its column of B only. So a
 * product may be cut into any rectangles, for any number of threads. */
#include <stdlib.h>

#include "base/check.h"
#include "base/types.h"
#include "kernels/cpu/matmul_epilogue.h"
#include "kernels/cpu/sgemm.h"
#include "kernels/cpu/simd_avx2.h"

enum { SLACK = 8 }; /* packing writes whole registers */

typedef struct {
    float *a; /* strips of STRIP_ROWS rows, each (k, STRIP_ROWS) */
    float *b; /* strips of STRIP_COLS columns, each (k, STRIP_COLS) */
} Packed;

enum { A_COUNT = BLOCK_ROWS * BLOCK_K + SLACK, B_COUNT = BLOCK_COLS * BLOCK_K };
enum { BUFFER_BYTES = ((A_COUNT + B_COUNT) * (int)sizeof(float) + 63) / 64 * 64 };

/* One pair of buffers a thread, made before its first product and kept: a product allocates nothing. */
static Packed thread_buffers(void) {
    static _Thread_local float *buffer;
    if (!buffer) {
        buffer = aligned_alloc(64, BUFFER_BYTES);
        REQUIRE(buffer);
    }
    return (Packed){buffer + B_COUNT, buffer};
}

size_t SGEMM_BUFFERS(void) {
    thread_buffers();
    return BUFFER_BYTES;
}

/* ---- packing ---- */

/* Strips of `width` rows of A from memory (k, row), or columns of B from memory (k, column): row by row of
 * memory, since a walk down a strip would touch a page for each k. Stores of eight may reach beyond a strip's row
 * into the next k of it, which is written later; behind the last k the next strip begins. */
static inline __attribute__((always_inline)) void pack_straight(float *to, const float *from, int64_t ld, int64_t count,
                                                                int64_t width, int64_t K) {
    for (int64_t k = 0; k < K; k++, from += ld) {
        float *row = to + k * width;
        for (int64_t first = 0; first < count; first += width, row += width * K) {
            int64_t n = min_i64(width, count - first);
            for (int64_t i = 0; i < width; i += 8) {
                __m256 x = load_row_ps(from + first + i, max_i64(n - i, 0));
                store_row_ps(row + i, k + 1 < K ? 8 : width - i, x);
            }
        }
    }
}

static void pack_a(float *to, const Sgemm *g, int64_t row, int64_t rows, int64_t k, int64_t K) {
    if (g->trans_a) {
        pack_straight(to, g->A + k * g->lda + row, g->lda, rows, STRIP_ROWS, K);
        return;
    }
    for (int64_t i = 0; i < rows; i += STRIP_ROWS, to += STRIP_ROWS * K) {
        pack_transposed(to, STRIP_ROWS, STRIP_ROWS, g->A + (row + i) * g->lda + k, g->lda,
                        min_i64(STRIP_ROWS, rows - i), K);
    }
}

static void pack_b(float *to, const Sgemm *g, int64_t col, int64_t cols, int64_t k, int64_t K) {
    if (!g->trans_b) {
        pack_straight(to, g->B + k * g->ldb + col, g->ldb, cols, STRIP_COLS, K);
        return;
    }
    for (int64_t j = 0; j < cols; j += STRIP_COLS, to += STRIP_COLS * K) {
        pack_transposed(to, STRIP_COLS, STRIP_COLS, g->B + (col + j) * g->ldb + k, g->ldb,
                        min_i64(STRIP_COLS, cols - j), K);
    }
}

/* ---- product ---- */

/* A tile at the edge of C goes through a whole one. */
static void edge_tile(float *c, int64_t ldc, bool add, int64_t rows, int64_t cols, int64_t K, const float *a,
                      const float *b) {
    float tile[STRIP_ROWS * STRIP_COLS];
    strip_tile(tile, STRIP_COLS, false, STRIP_ROWS, K, a, b);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < cols; j++) {
            float sum = tile[i * STRIP_COLS + j];
            c[i * ldc + j] = add ? c[i * ldc + j] + sum : sum;
        }
    }
}

/* C (rows, cols) = or += a strip of A times a strip of B. */
static inline void strip_product(float *c, int64_t ldc, bool add, int64_t rows, int64_t cols, int64_t K, const float *a,
                                 const float *b) {
    if (cols < STRIP_COLS || rows % TILE_ROWS_STEP != 0) {
        edge_tile(c, ldc, add, rows, cols, K, a, b);
        return;
    }
    for (int64_t r = 0; r < rows; r++) _mm_prefetch((const char *)(c + r * ldc + STRIP_COLS - 1), _MM_HINT_T0);
    strip_tile(c, ldc, add, rows, K, a, b);
}

/* A packed block of rows times a packed block of columns: strips of B past a strip of A, or the other way round. */
static void multiply_block(float *c, int64_t ldc, bool add, int64_t rows, int64_t cols, int64_t K, const Packed *p) {
    int64_t across = ceil_div(cols, STRIP_COLS), down = ceil_div(rows, STRIP_ROWS);
    for (int64_t n = 0; n < across * down; n++) {
        int64_t i = (A_STRIP_STAYS ? n / across : n % down) * STRIP_ROWS;
        int64_t j = (A_STRIP_STAYS ? n % across : n / down) * STRIP_COLS;
        strip_product(c + i * ldc + j, ldc, add, min_i64(STRIP_ROWS, rows - i), min_i64(STRIP_COLS, cols - j), K,
                      p->a + i * K, p->b + j * K);
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
    int64_t block_rows = round_up(ceil_div(rows, ceil_div(rows, BLOCK_ROWS)), STRIP_ROWS);
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

void SGEMM_RECTANGLE(const Sgemm *g, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    int64_t block_cols = round_up(ceil_div(cols, ceil_div(cols, BLOCK_COLS)), STRIP_COLS);
    for (int64_t j = col; j < col + cols; j += block_cols) {
        multiply_columns(g, row, rows, j, min_i64(block_cols, col + cols - j));
    }
}
