/* lanes_real.h - sums over a row in LANES partial sums, for one REAL. Included inside template files.
 * Vectors of the compiler's own: one text for every instruction set, and the order of additions is
 * the same on all of them. */

typedef REAL NAME(vec) __attribute__((vector_size(32)));
enum { NAME(LANES) = 32 / sizeof(REAL) };

static inline NAME(vec) NAME(vec_load)(const REAL *x) {
    NAME(vec) v;
    __builtin_memcpy(&v, x, sizeof v);
    return v;
}

static inline void NAME(vec_store)(REAL *x, NAME(vec) v) { __builtin_memcpy(x, &v, sizeof v); }

static inline NAME(vec) NAME(vec_all)(REAL value) { return value - (NAME(vec)){0}; }

static inline REAL NAME(vec_sum)(NAME(vec) v) {
    REAL sum = 0;
    for (int i = 0; i < NAME(LANES); i++) sum += v[i];
    return sum;
}
