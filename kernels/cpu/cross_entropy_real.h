/* cross_entropy_real.h - softmax statistics, their combination and the gradient, for one REAL. */

static void NAME(softmax_stats_row)(const REAL *logits, int64_t n, REAL *maximum, REAL *sum) {
    REAL m = -INFINITY, total = 0;
    for (int64_t i = 0; i < n; i++) m = logits[i] > m ? logits[i] : m;
    /* Where all are -inf (or NaN), -inf - m would be NaN: 0 keeps them a weight of 0 (and NaN). */
    const REAL shift = m == -INFINITY ? 0 : m;
    for (int64_t i = 0; i < n; i++) total += REAL_EXP(logits[i] - shift);
    *maximum = m;
    *sum = total;
}

static void NAME(softmax_row)(REAL *logits, int64_t n, REAL lse, REAL factor) {
    for (int64_t i = 0; i < n; i++) logits[i] = factor * REAL_EXP(logits[i] - lse);
}

static void NAME(stats_chunk)(void *args, int64_t index) {
    const LossArgs *a = args;
    const int64_t end = min_i64(a->n, (index + 1) * a->chunk_rows);
    for (int64_t i = index * a->chunk_rows; i < end; i++) {
        const REAL *logits = (const REAL *)a->logits + i * a->V;
        REAL *stats = (REAL *)a->stats + 3 * i;
        SOFTMAX_STATS_ROW(logits, a->V_valid, &stats[0], &stats[1]);
        const int64_t column = a->targets[i] - a->vocab_first;
        const bool here = a->targets[i] >= 0 && column >= 0 && column < a->V_valid;
        stats[2] = here ? logits[column] : 0;
    }
}

/* A rank without real columns, or with none above -inf, has maximum -inf and sum 0, and adds nothing. A NaN sum stays
 * NaN. */
static void NAME(combine_row)(const LossArgs *a, int64_t i) {
    REAL m = -INFINITY, sum = 0, target = 0;
    for (int64_t r = 0; r < a->ranks; r++) {
        const REAL *stats = (const REAL *)a->all_stats + 3 * (r * a->n + i);
        if (stats[0] > m) m = stats[0];
        target += stats[2];
    }
    for (int64_t r = 0; r < a->ranks; r++) {
        const REAL *stats = (const REAL *)a->all_stats + 3 * (r * a->n + i);
        if (stats[1] != 0) sum += stats[1] * REAL_EXP(stats[0] - m);
    }
    const REAL lse = m + REAL_LOG(sum);
    ((REAL *)a->lse)[i] = lse;
    ((REAL *)a->loss)[i] = a->targets[i] >= 0 ? lse - target : 0;
}

static void NAME(backward_chunk)(void *args, int64_t index) {
    const LossArgs *a = args;
    const int64_t end = min_i64(a->n, (index + 1) * a->chunk_rows);
    for (int64_t i = index * a->chunk_rows; i < end; i++) {
        REAL *logits = (REAL *)a->logits + i * a->V;
        const int64_t valid = a->targets[i] >= 0 ? a->V_valid : 0;
        SOFTMAX_ROW(logits, valid, ((const REAL *)a->lse)[i], (REAL)a->scale);
        for (int64_t c = valid; c < a->V; c++) logits[c] = 0;
        const int64_t column = a->targets[i] - a->vocab_first;
        if (column >= 0 && column < valid) logits[column] -= (REAL)a->scale;
    }
}
