/* matmul.c - matrix product: our own for fp32 on AVX2 and AVX-512 (sgemm_packed.h), else single-threaded CBLAS
 * calls.
 * In: row-major matrices and an epilogue.  Out: C, and aux where the epilogue writes it.
 * Invariants: the bits of C do not depend on the number of threads: CBLAS gets panels whose shape depends
 * on M, N and K alone, each over the whole of K; our own product has that property for any cut. The
 * BLAS must not start threads of its own (kernels_init sees to it). */
#include <cblas.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/common.h"
#include "kernels/cpu/matmul_epilogue.h"
#include "kernels/cpu/sgemm.h"
#include "kernels/kernels.h"

typedef struct {
    void *C;
    const void *A, *B;
    int64_t ldc, lda, ldb, M, N, K;
    bool trans_a, trans_b, accumulate;
    const MatmulEpilogue *epilogue;
    DType dtype;
    bool own_product;               /* sgemm_packed.h, not CBLAS */
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

static const double PANEL_FLOP_MIN = 2e6;

/* CBLAS: a panel's bits may depend on its shape, so the shape must not depend on the threads. Four
 * panels of the longer side: more cost one thread 6 % of its rate, fewer leave nothing to share. */
static void choose_panels_blas(Product *p) {
    enum { PANELS = 4, SIDE_MULTIPLE = 48 };
    double flop = 2.0 * (double)p->M * (double)p->N * (double)p->K;
    int64_t panels = min_i64(PANELS, (int64_t)(flop / PANEL_FLOP_MIN));
    p->panel_rows = min_i64(p->M, INT_MAX);
    p->panel_cols = min_i64(p->N, INT_MAX);
    if (panels <= 1) return;
    int64_t *side = p->M >= p->N ? &p->panel_rows : &p->panel_cols;
    *side = min_i64(*side, round_up(ceil_div(*side, panels), SIDE_MULTIPLE));
}

/* What a thread has to do at most if C is cut into down x across panels, in multiply-adds for each k. Packing an
 * element costs as much as PACKING multiply-adds. */
static double panels_cost(const Product *p, int64_t rows, int64_t cols) {
    enum { PACKING = 20 };
    int64_t panels = ceil_div(p->M, rows) * ceil_div(p->N, cols);
    double panel = (double)rows * (double)cols + PACKING * (double)(rows + cols);
    return (double)ceil_div(panels, kernels_threads()) * panel;
}

/* Our own product may be cut anywhere: not at all for one thread, else into as many pieces as threads, or twice as
 * many where that hardly costs more, so that a thread that lost its core does not keep the others waiting for long;
 * but into none that are too small. */
static void choose_panels_own(Product *p) {
    enum { ROWS_MULTIPLE = 12, COLS_MULTIPLE = 32 }; /* whole tiles of the product's inner loops */
    static const double TWICE_COST_MAX = 1.04;
    const int threads = kernels_threads();
    const int64_t pieces_max = (int64_t)(2.0 * (double)p->M * (double)p->N * (double)p->K / PANEL_FLOP_MIN);
    p->panel_rows = p->M;
    p->panel_cols = p->N;
    if (threads == 1) return;
    double least = INFINITY;
    for (int twice = 0; twice < 2; twice++) {
        const int64_t pieces = min_i64(twice ? 2 * threads : threads, pieces_max);
        double limit = twice ? TWICE_COST_MAX * least : INFINITY;
        for (int64_t across = 1; across <= pieces; across++) {
            if (pieces % across != 0) continue;
            int64_t rows = min_i64(p->M, round_up(ceil_div(p->M, pieces / across), ROWS_MULTIPLE));
            int64_t cols = min_i64(p->N, round_up(ceil_div(p->N, across), COLS_MULTIPLE));
            double cost = panels_cost(p, rows, cols);
            if (cost >= limit) continue;
            limit = least = cost;
            p->panel_rows = rows;
            p->panel_cols = cols;
        }
    }
}

static void panel_task(void *args, int64_t index) {
    const Product *p = args;
    int64_t across = ceil_div(p->N, p->panel_cols);
    int64_t row = index / across * p->panel_rows, col = index % across * p->panel_cols;
    int64_t rows = min_i64(p->panel_rows, p->M - row), cols = min_i64(p->panel_cols, p->N - col);
    if (p->own_product) {
        Sgemm g = {p->C, p->A, p->B, p->ldc, p->lda, p->ldb, p->K, p->trans_a, p->trans_b, p->accumulate, p->epilogue};
        if (kernels_avx512()) {
            sgemm_rectangle_avx512(&g, row, rows, col, cols);
        } else {
            sgemm_rectangle_avx2(&g, row, rows, col, cols);
        }
    } else if (p->dtype == DT_F64) {
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
    Product p = {.C = C,
                 .A = A,
                 .B = B,
                 .ldc = ldc,
                 .lda = max_i64(lda, 1),
                 .ldb = max_i64(ldb, 1),
                 .M = M,
                 .N = N,
                 .K = K,
                 .trans_a = trans_a,
                 .trans_b = trans_b,
                 .accumulate = accumulate,
                 .epilogue = epilogue,
                 .dtype = dtype};
    p.own_product = kernels_avx2() && dtype == DT_F32 && K > 0;
    if (p.own_product) {
        choose_panels_own(&p);
    } else {
        choose_panels_blas(&p);
    }
    int64_t panels = ceil_div(M, p.panel_rows) * ceil_div(N, p.panel_cols);
    if (!p.own_product && kernels_one_blas_caller()) {
        for (int64_t i = 0; i < panels; i++) panel_task(&p, i);
        return;
    }
    share_tasks(panels, panel_task, &p);
}
