/* norm_real.h - residual addition, norm, and its backward pass, for one REAL. */
#include "kernels/cpu/lanes_real.h"

/* out = x + delta + bias, where the last may be missing. out may be x: vectors by hand, since `restrict` would not
 * be true and the compiler's own check for overlap finds one. */
static inline void NAME(add_row)(REAL *out, const REAL *x, const REAL *delta, const REAL *bias, int64_t C) {
    int64_t c = 0;
    for (; c + NAME(LANES) <= C; c += NAME(LANES)) {
        NAME(vec) term = NAME(vec_load)(delta + c);
        if (bias) term += NAME(vec_load)(bias + c);
        NAME(vec_store)(out + c, NAME(vec_load)(x + c) + term);
    }
    for (; c < C; c++) out[c] = x[c] + (bias ? delta[c] + bias[c] : delta[c]);
}

static inline REAL NAME(row_mean)(const REAL *x, int64_t C) {
    NAME(vec) sum = {0};
    int64_t c = 0;
    for (; c + NAME(LANES) <= C; c += NAME(LANES)) sum += NAME(vec_load)(x + c);
    REAL total = NAME(vec_sum)(sum);
    for (; c < C; c++) total += x[c];
    return total / (REAL)C;
}

/* Mean of (x - mean)^2. */
static inline REAL NAME(row_variance)(const REAL *x, REAL mean, int64_t C) {
    NAME(vec) sum = {0};
    const NAME(vec) m = NAME(vec_all)(mean);
    int64_t c = 0;
    for (; c + NAME(LANES) <= C; c += NAME(LANES)) {
        NAME(vec) d = NAME(vec_load)(x + c) - m;
        sum += d * d;
    }
    REAL total = NAME(vec_sum)(sum);
    for (; c < C; c++) total += (x[c] - mean) * (x[c] - mean);
    return total / (REAL)C;
}

static inline void NAME(scale_row)(REAL *restrict y, const REAL *x, const REAL *w, const REAL *b, REAL mean, REAL rstd,
                                   int64_t C) {
    if (b) {
        for (int64_t c = 0; c < C; c++) y[c] = (x[c] - mean) * rstd * w[c] + b[c];
    } else {
        for (int64_t c = 0; c < C; c++) y[c] = (x[c] - mean) * rstd * w[c];
    }
}

NORM_LINKAGE void NAME(norm_forward_chunk)(void *args, int64_t index) {
    const NormForwardArgs *a = args;
    const int64_t C = a->C, end = min_i64(a->N, (index + 1) * a->chunk_rows);
    for (int64_t i = index * a->chunk_rows; i < end; i++) {
        const REAL *x = (const REAL *)a->x + i * C;
        if (a->delta) {
            REAL *out = (REAL *)a->x_out + i * C;
            NAME(add_row)(out, x, (const REAL *)a->delta + i * C, a->bias, C);
            x = out;
        } else if (a->x_out && a->x_out != a->x) {
            __builtin_memcpy((REAL *)a->x_out + i * C, x, (size_t)C * sizeof(REAL));
        }
        const REAL mean = a->mean ? NAME(row_mean)(x, C) : 0;
        const REAL rstd = (REAL)1 / REAL_SQRT(NAME(row_variance)(x, mean, C) + (REAL)a->eps);
        if (a->mean) ((REAL *)a->mean)[i] = mean;
        ((REAL *)a->rstd)[i] = rstd;
        NAME(scale_row)((REAL *)a->y + i * C, x, a->w, a->b, mean, rstd, C);
    }
}

/* Means over the row of g = dy w and of g xhat, xhat = (x - mean) rstd. */
static inline void NAME(backward_means)(const REAL *dy, const REAL *x, const REAL *w, REAL mean, REAL rstd, int64_t C,
                                        REAL *mean_g, REAL *mean_gx) {
    NAME(vec) sum_g = {0}, sum_gx = {0};
    const NAME(vec) m = NAME(vec_all)(mean), r = NAME(vec_all)(rstd);
    int64_t c = 0;
    for (; c + NAME(LANES) <= C; c += NAME(LANES)) {
        NAME(vec) g = NAME(vec_load)(dy + c) * NAME(vec_load)(w + c);
        sum_g += g;
        sum_gx += g * ((NAME(vec_load)(x + c) - m) * r);
    }
    REAL total_g = NAME(vec_sum)(sum_g), total_gx = NAME(vec_sum)(sum_gx);
    for (; c < C; c++) {
        REAL g = dy[c] * w[c];
        total_g += g;
        total_gx += g * ((x[c] - mean) * rstd);
    }
    *mean_g = total_g / (REAL)C;
    *mean_gx = total_gx / (REAL)C;
}

/* dx += rstd (g - mean_g - xhat mean_gx); dw += dy xhat; db += dy. mean_g is 0 for RMSNorm. */
static inline void NAME(backward_row)(REAL *restrict dx, REAL *restrict dw, REAL *restrict db, const REAL *dy,
                                      const REAL *x, const REAL *w, REAL mean, REAL rstd, REAL mean_g, REAL mean_gx,
                                      int64_t C) {
    for (int64_t c = 0; c < C; c++) {
        REAL normal = (x[c] - mean) * rstd;
        dx[c] += rstd * (dy[c] * w[c] - mean_g - normal * mean_gx);
        dw[c] += dy[c] * normal;
    }
    if (!db) return;
    for (int64_t c = 0; c < C; c++) db[c] += dy[c];
}

/* A block of rows, into its own partial sums. */
NORM_LINKAGE void NAME(norm_backward_block)(void *args, int64_t index) {
    const NormBackwardArgs *a = args;
    const int64_t C = a->C, end = min_i64(a->N, (index + 1) * a->block_rows);
    REAL *dw = (REAL *)a->partial + index * C * (a->layer ? 2 : 1);
    REAL *db = a->layer ? dw + C : NULL;
    for (int64_t c = 0; c < C * (a->layer ? 2 : 1); c++) dw[c] = 0;
    for (int64_t i = index * a->block_rows; i < end; i++) {
        const REAL *dy = (const REAL *)a->dy + i * C, *x = (const REAL *)a->x + i * C;
        const REAL mean = a->layer ? ((const REAL *)a->mean)[i] : 0, rstd = ((const REAL *)a->rstd)[i];
        REAL mean_g, mean_gx;
        NAME(backward_means)(dy, x, a->w, mean, rstd, C, &mean_g, &mean_gx);
        if (!a->layer) mean_g = 0;
        NAME(backward_row)((REAL *)a->dx + i * C, dw, db, dy, x, a->w, mean, rstd, mean_g, mean_gx, C);
    }
}
