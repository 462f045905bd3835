/* matmul_real.h - epilogues and the panel product for one REAL; included by matmul.c for float and double. */

static REAL NAME(gelu)(REAL x) {
    return (REAL)0.5 * x * ((REAL)1 + TANH((REAL)GELU_A * (x + (REAL)GELU_B * x * x * x)));
}

static REAL NAME(gelu_slope)(REAL x) {
    REAL t = TANH((REAL)GELU_A * (x + (REAL)GELU_B * x * x * x));
    REAL inner = (REAL)GELU_A * ((REAL)1 + (REAL)(3 * GELU_B) * x * x);
    return (REAL)0.5 * ((REAL)1 + t) + (REAL)0.5 * x * ((REAL)1 - t * t) * inner;
}

void NAME(epilogue_row)(REAL *c, REAL *aux, const REAL *bias, Epilogue kind, int64_t cols) {
    if (kind == EPILOGUE_BIAS) {
        for (int64_t j = 0; bias && j < cols; j++) c[j] += bias[j];
    } else if (kind == EPILOGUE_BIAS_GELU) {
        for (int64_t j = 0; j < cols; j++) {
            if (bias) aux[j] += bias[j];
            c[j] = NAME(gelu)(aux[j]);
        }
    } else {
        for (int64_t j = 0; j < cols; j++) c[j] *= NAME(gelu_slope)(aux[j]);
    }
}

/* One panel of C: rows [row, row + rows), columns [col, col + cols). */
static void NAME(panel)(const Product *p, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    const MatmulEpilogue *e = p->epilogue;
    int64_t at = row * p->ldc + col;
    REAL *c = (REAL *)p->C + at;
    /* BIAS_GELU keeps the product in aux and writes the activation to C. */
    REAL *product = e && e->kind == EPILOGUE_BIAS_GELU ? (REAL *)e->aux + at : c;
    if (p->K > 0) {
        const REAL *a = (const REAL *)p->A + (p->trans_a ? row : row * p->lda);
        const REAL *b = (const REAL *)p->B + (p->trans_b ? col * p->ldb : col);
        GEMM(CblasRowMajor, p->trans_a ? CblasTrans : CblasNoTrans, p->trans_b ? CblasTrans : CblasNoTrans, (int)rows,
             (int)cols, (int)p->K, (REAL)1, a, (int)p->lda, b, (int)p->ldb, p->accumulate ? (REAL)1 : (REAL)0, product,
             (int)p->ldc);
    } else if (!p->accumulate) {
        for (int64_t i = 0; i < rows; i++) memset(product + i * p->ldc, 0, (size_t)cols * sizeof(REAL));
    }
    if (!e || e->kind == EPILOGUE_NONE) return;
    const REAL *bias = e->bias ? (const REAL *)e->bias + col : NULL;
    for (int64_t i = 0; i < rows; i++) {
        REAL *aux = e->aux ? (REAL *)e->aux + at + i * p->ldc : NULL;
        EPILOGUE_ROW(c + i * p->ldc, aux, bias, e->kind, cols);
    }
}
