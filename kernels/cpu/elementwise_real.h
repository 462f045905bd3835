/* elementwise_real.h - residual addition, bias gradient, SwiGLU, for one REAL. */

static void NAME(add_chunk)(void *args, int64_t index) {
    const AddArgs *a = args;
    const int64_t end = min_i64(a->N, (index + 1) * a->chunk_rows);
    for (int64_t i = index * a->chunk_rows; i < end; i++) {
        REAL *y = (REAL *)a->y + i * a->C;
        const REAL *x = (const REAL *)a->a + i * a->C, *b = a->b ? (const REAL *)a->b + i * a->C : NULL;
        const REAL *bias = a->bias;
        for (int64_t c = 0; c < a->C; c++) {
            /* The same association as in the fused norm: x + (delta + bias). */
            REAL term = b && bias ? b[c] + bias[c] : b ? b[c] : bias ? bias[c] : 0;
            y[c] = x[c] + term;
        }
    }
}

/* Column sums of COLUMNS columns; rows in order. */
static void NAME(bias_chunk)(void *args, int64_t index) {
    const BiasArgs *a = args;
    const int64_t first = index * BIAS_COLUMNS, n = min_i64(BIAS_COLUMNS, a->C - first);
    REAL sum[BIAS_COLUMNS] = {0};
    for (int64_t i = 0; i < a->N; i++) {
        const REAL *dy = (const REAL *)a->dy + i * a->ld + first;
        for (int64_t c = 0; c < n; c++) sum[c] += dy[c];
    }
    for (int64_t c = 0; c < n; c++) ((REAL *)a->db)[first + c] += sum[c];
}

static void NAME(swiglu_row)(REAL *y, const REAL *gate, const REAL *up, int64_t F) {
    for (int64_t f = 0; f < F; f++) y[f] = gate[f] / ((REAL)1 + REAL_EXP(-gate[f])) * up[f];
}

/* d silu(g)/dg = s (1 + g (1 - s)), s = sigmoid(g). gate and dgate may be the same. */
static void NAME(swiglu_backward_row)(REAL *dgate, REAL *dup, const REAL *dy, const REAL *gate, const REAL *up,
                                      int64_t F) {
    for (int64_t f = 0; f < F; f++) {
        const REAL g = gate[f], s = (REAL)1 / ((REAL)1 + REAL_EXP(-g)), u = up[f];
        dup[f] = dy[f] * (g * s);
        dgate[f] = dy[f] * u * (s * ((REAL)1 + g * ((REAL)1 - s)));
    }
}

static void NAME(swiglu_chunk)(void *args, int64_t index) {
    const SwigluArgs *a = args;
    const int64_t end = min_i64(a->N, (index + 1) * a->chunk_rows);
    for (int64_t i = index * a->chunk_rows; i < end; i++) {
        const REAL *gate = (const REAL *)a->gate_up + i * 2 * a->F;
        SWIGLU_ROW((REAL *)a->y + i * a->F, gate, gate + a->F, a->F);
    }
}

static void NAME(swiglu_backward_chunk)(void *args, int64_t index) {
    const SwigluArgs *a = args;
    const int64_t end = min_i64(a->N, (index + 1) * a->chunk_rows);
    for (int64_t i = index * a->chunk_rows; i < end; i++) {
        const REAL *gate = (const REAL *)a->gate_up + i * 2 * a->F;
        REAL *dgate = (REAL *)a->dgate_up + i * 2 * a->F;
        SWIGLU_BACKWARD_ROW(dgate, dgate + a->F, (const REAL *)a->dy + i * a->F, gate, gate + a->F, a->F);
    }
}
