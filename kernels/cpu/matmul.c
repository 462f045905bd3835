/* matmul.c - matrix product as single-threaded CBLAS calls on panels of C.
 * In: row-major matrices and an epilogue.  Out: C, and aux where the epilogue writes it.
 * Invariants: how C is cut into panels depends on M, N and K alone, and each panel is one call over
 * the whole of K, so that the bits of C do not depend on the number of threads. The BLAS must not
 * start threads of its own (kernels_init sees to it). */
#include <cblas.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/common.h"
#include "kernels/cpu/matmul_epilogue.h"
#include "kernels/kernels.h"

typedef struct {
    void *C;
    const void *A, *B;
    int64_t ldc, lda, ldb, M, N, K;
    bool trans_a, trans_b, accumulate;
    const MatmulEpilogue *epilogue;
    DType dtype;
    int64_t panel_rows, panel_cols; /* of every panel but the last in its direction */
} Product;

#define REAL float
#define SUFFIX f32
#define TANH tanhf
#define GEMM cblas_sgemm
#define EPILOGUE_ROW(...) (kernels_avx2() ? epilogue_row_avx2(__VA_ARGS__) : epilogue_row_f32(__VA_ARGS__))
#include "kernels/cpu/matmul_real.h"
#undef REAL
#undef SUFFIX
#undef TANH
#undef GEMM
#undef EPILOGUE_ROW

#define REAL double
#define SUFFIX f64
#define TANH tanh
#define GEMM cblas_dgemm
#define EPILOGUE_ROW epilogue_row_f64
#include "kernels/cpu/matmul_real.h"

#ifndef PANEL_COUNT
#define PANEL_COUNT 8
#define PANEL_MIN 64
#define PANEL_FLOP_MIN 4e6
#define PANEL_MULTIPLE 16
#endif
/* Cuts the longer side of C. */
static void choose_panels(Product *p) {
    p->panel_rows = p->M;
    p->panel_cols = p->N;
    double flop = 2.0 * (double)p->M * (double)p->N * (double)p->K;
    int64_t wanted = (int64_t)(flop / PANEL_FLOP_MIN);
    if (wanted > PANEL_COUNT) wanted = PANEL_COUNT;
    int64_t *side = p->M >= p->N ? &p->panel_rows : &p->panel_cols;
    if (wanted > 1) *side = max_i64(round_up(ceil_div(*side, wanted), PANEL_MULTIPLE), PANEL_MIN);
    p->panel_rows = min_i64(p->panel_rows, p->M);
    p->panel_cols = min_i64(p->panel_cols, p->N);
}

static void panel_task(void *args, int64_t index) {
    const Product *p = args;
    int64_t across = ceil_div(p->N, p->panel_cols);
    int64_t row = index / across * p->panel_rows, col = index % across * p->panel_cols;
    int64_t rows = min_i64(p->panel_rows, p->M - row), cols = min_i64(p->panel_cols, p->N - col);
    if (p->dtype == DT_F64) {
        panel_f64(p, row, rows, col, cols);
    } else {
        panel_f32(p, row, rows, col, cols);
    }
}

void matmul(void *C, int64_t ldc, const void *A, int64_t lda, bool trans_a, const void *B, int64_t ldb, bool trans_b,
            int64_t M, int64_t N, int64_t K, bool accumulate, const MatmulEpilogue *epilogue, DType dtype,
            Stream *stream) {
    (void)stream; /* compute runs at the call on this platform */
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(M >= 0 && N >= 0 && K >= 0);
    if (M == 0 || N == 0) return;
    REQUIRE(ldc >= N && lda >= (trans_a ? M : K) && ldb >= (trans_b ? K : N));
    /* CBLAS counts in int. Rows and columns are cut into panels, these can't be. */
    REQUIRE(K <= INT_MAX && ldc <= INT_MAX && lda <= INT_MAX && ldb <= INT_MAX);
    Epilogue kind = epilogue ? epilogue->kind : EPILOGUE_NONE;
    REQUIRE(kind == EPILOGUE_NONE || !accumulate);
    REQUIRE((kind != EPILOGUE_BIAS_GELU && kind != EPILOGUE_DGELU) || epilogue->aux);
    /* CBLAS refuses leading dimensions below 1, which empty matrices may have. */
    Product p = {.C = C, .A = A, .B = B, .ldc = ldc, .lda = max_i64(lda, 1), .ldb = max_i64(ldb, 1), .M = M, .N = N,
                 .K = K, .trans_a = trans_a, .trans_b = trans_b, .accumulate = accumulate, .epilogue = epilogue,
                 .dtype = dtype};
    choose_panels(&p);
    share_tasks(ceil_div(M, p.panel_rows) * ceil_div(N, p.panel_cols), panel_task, &p);
}
