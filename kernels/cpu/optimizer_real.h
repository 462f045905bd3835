/* optimizer_real.h - AdamW and SGD over a chunk, for one REAL. Plain loops that the compiler vectorises. */

UPDATE_LINKAGE void NAME(adamw_chunk)(void *args, int64_t index) {
    const UpdateArgs *a = args;
    const AdamwStep *s = a->step;
    const int64_t first = index * CHUNK_ELEMENTS, n = min_i64(CHUNK_ELEMENTS, a->n - first);
    REAL *restrict p = (REAL *)a->p + first, *restrict m = (REAL *)a->m + first, *restrict v = (REAL *)a->v + first;
    const REAL *restrict g = (const REAL *)a->g + first;
    const REAL beta1 = (REAL)s->beta1, beta2 = (REAL)s->beta2, eps = (REAL)s->eps;
    const REAL rest1 = (REAL)(1.0 - s->beta1), rest2 = (REAL)(1.0 - s->beta2), factor = (REAL)s->grad_scale;
    /* m-hat / (sqrt(v-hat) + eps): both corrections as factors, formed in fp64. */
    const REAL correct1 = (REAL)(1.0 / s->bias_correction1), correct2 = (REAL)(1.0 / s->bias_correction2);
    const REAL lr = (REAL)s->lr, decay = (REAL)s->weight_decay;
    for (int64_t i = 0; i < n; i++) {
        const REAL grad = factor * g[i];
        m[i] = beta1 * m[i] + rest1 * grad;
        v[i] = beta2 * v[i] + rest2 * (grad * grad);
        const REAL step = m[i] * correct1 / (REAL_SQRT(v[i] * correct2) + eps);
        p[i] -= lr * (step + decay * p[i]);
    }
}

UPDATE_LINKAGE void NAME(sgd_chunk)(void *args, int64_t index) {
    const UpdateArgs *a = args;
    const int64_t first = index * CHUNK_ELEMENTS, n = min_i64(CHUNK_ELEMENTS, a->n - first);
    REAL *restrict p = (REAL *)a->p + first, *restrict m = (REAL *)a->m + first;
    const REAL *restrict g = (const REAL *)a->g + first;
    const REAL lr = (REAL)a->lr, momentum = (REAL)a->momentum, decay = (REAL)a->weight_decay;
    const REAL factor = (REAL)a->grad_scale;
    for (int64_t i = 0; i < n; i++) {
        m[i] = momentum * m[i] + factor * g[i];
        p[i] -= lr * (m[i] + decay * p[i]);
    }
}
