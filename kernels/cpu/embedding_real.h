/* embedding_real.h - look-up and scattered addition, for one REAL. */

static void NAME(lookup_chunk)(void *args, int64_t index) {
    const EmbeddingArgs *a = args;
    const size_t bytes = (size_t)a->C * sizeof(REAL);
    const int64_t end = min_i64(a->N, (index + 1) * a->chunk_rows);
    for (int64_t i = index * a->chunk_rows; i < end; i++) {
        const int64_t row = a->ids[i] - a->rows.first;
        REAL *x = (REAL *)a->x + i * a->C;
        if (row >= 0 && row < a->rows.count) {
            memcpy(x, (const REAL *)a->table + row * a->C, bytes);
        } else {
            memset(x, 0, bytes);
        }
    }
}

static void NAME(add_position_chunk)(void *args, int64_t index) {
    const EmbeddingArgs *a = args;
    const int64_t end = min_i64(a->N, (index + 1) * a->chunk_rows);
    for (int64_t i = index * a->chunk_rows; i < end; i++) {
        REAL *x = (REAL *)a->x + i * a->C;
        const REAL *row = (const REAL *)a->table + (int64_t)a->ids[i] * a->C;
        for (int64_t c = 0; c < a->C; c++) x[c] += row[c];
    }
}

/* The gradient rows of one share of the columns, tokens in order. */
static void NAME(scatter_chunk)(void *args, int64_t index) {
    const EmbeddingArgs *a = args;
    const int64_t first = index * SCATTER_COLUMNS, n = min_i64(SCATTER_COLUMNS, a->C - first);
    for (int64_t i = 0; i < a->N; i++) {
        const int64_t row = a->ids[i] - a->rows.first;
        if (row < 0 || row >= a->rows.count) continue;
        REAL *to = (REAL *)a->dtable + row * a->C + first;
        const REAL *from = (const REAL *)a->dx + i * a->C + first;
        for (int64_t c = 0; c < n; c++) to[c] += from[c];
    }
}
