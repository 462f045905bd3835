/* vector_real.h - sums in fp64 over a chunk, for one REAL. LANES sums side by side, added in order. */

SQUARES_LINKAGE double NAME(squares)(const REAL *x, int64_t n) {
    double lane[SQUARES_LANES] = {0};
    int64_t i = 0;
    for (; i + SQUARES_LANES <= n; i += SQUARES_LANES) {
        for (int l = 0; l < SQUARES_LANES; l++) {
            const double value = (double)x[i + l];
            lane[l] += value * value;
        }
    }
    for (int l = 0; i < n; i++, l++) lane[l] += (double)x[i] * (double)x[i];
    double sum = 0.0;
    for (int l = 0; l < SQUARES_LANES; l++) sum += lane[l];
    return sum;
}
