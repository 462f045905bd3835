/* rope_real.h - portable RoPE for one REAL; included by rope.c for float and double. */

void NAME(rope_row)(REAL *x, const REAL *table, REAL sign, int64_t heads, int64_t half) {
    for (int64_t h = 0; h < heads; h++, x += 2 * half) {
        for (int64_t j = 0; j < half; j++) {
            REAL c = table[2 * j], s = sign * table[2 * j + 1];
            REAL x1 = x[j], x2 = x[j + half];
            x[j] = x1 * c - x2 * s;
            x[j + half] = x2 * c + x1 * s;
        }
    }
}

static void NAME(table_row)(REAL *row, int64_t position, int64_t D, double theta) {
    for (int64_t j = 0; j < D / 2; j++) {
        double angle = (double)position * pow(theta, -2.0 * (double)j / (double)D);
        row[2 * j] = (REAL)cos(angle);
        row[2 * j + 1] = (REAL)sin(angle);
    }
}

static void NAME(rope_chunk)(void *args, int64_t index) {
    const RopeArgs *a = args;
    int64_t end = min_i64(a->N, (index + 1) * a->chunk_rows);
    for (int64_t i = index * a->chunk_rows; i < end; i++) {
        const REAL *table = (const REAL *)a->table + (int64_t)a->positions[i] * a->D;
        ROPE_ROW((REAL *)a->x + i * a->ld, table, a->inverse ? (REAL)-1 : (REAL)1, a->heads, a->D / 2);
    }
}
