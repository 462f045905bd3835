/* attention_real.h - portable attention for one REAL; included by attention.c for float and double.
 * Keys are taken in blocks and transposed, so that the inner loops run over neighbouring keys or over
 * the head's elements, which any compiler vectorises. */

enum { NAME(KEYS) = 32, NAME(ROWS) = 32 };

/* to (D, KEYS) = the block's n rows, transposed. */
static void NAME(transpose_keys)(REAL *to, const REAL *from, int64_t ld, int64_t n, int64_t D) {
    for (int64_t j = 0; j < n; j++) {
        for (int64_t d = 0; d < D; d++) to[d * NAME(KEYS) + j] = from[j * ld + d];
    }
}

/* s[j] = scale * x . key j */
static void NAME(row_scores)(REAL *s, const REAL *x, const REAL *keys_t, REAL scale, int64_t D) {
    for (int64_t j = 0; j < NAME(KEYS); j++) s[j] = 0;
    for (int64_t d = 0; d < D; d++) {
        for (int64_t j = 0; j < NAME(KEYS); j++) s[j] += x[d] * keys_t[d * NAME(KEYS) + j];
    }
    for (int64_t j = 0; j < NAME(KEYS); j++) s[j] *= scale;
}

typedef struct {
    REAL max, sum;
    REAL o[HEAD_SIZE_MAX];
} NAME(Row);

/* Online softmax: takes keys [lo, hi) of the block into the row. */
static void NAME(row_step)(NAME(Row) * row, REAL *s, const REAL *v, int64_t ld, int64_t lo, int64_t hi, int64_t D) {
    REAL max = row->max;
    for (int64_t j = lo; j < hi; j++) max = s[j] > max ? s[j] : max;
    REAL shrink = EXP(row->max - max); /* 0 for the first block: max starts at minus infinity */
    row->max = max;
    row->sum *= shrink;
    for (int64_t d = 0; d < D; d++) row->o[d] *= shrink;
    for (int64_t j = lo; j < hi; j++) {
        REAL p = EXP(s[j] - max);
        row->sum += p;
        for (int64_t d = 0; d < D; d++) row->o[d] += p * v[j * ld + d];
    }
}

/* All keys of one head for queries [token, token + tokens). */
static void NAME(forward_head)(const AttentionArgs *a, const AttentionTask *t, int64_t head) {
    const AttentionShape *s = &a->shape;
    REAL keys_t[HEAD_SIZE_MAX * NAME(KEYS)] = {0}, scores[NAME(KEYS)];
    NAME(Row) rows[NAME(ROWS)];
    for (int64_t i = 0; i < t->tokens; i++) rows[i] = (NAME(Row)){.max = -(REAL)INFINITY};
    const REAL *q = (const REAL *)a->q + (t->sequence * s->T + t->token) * s->ld_q + head * s->D;
    const REAL *k = (const REAL *)a->k + t->sequence * s->stride_kv + t->kv_head * s->D;
    const REAL *v = (const REAL *)a->v + t->sequence * s->stride_kv + t->kv_head * s->D;
    int64_t end = attention_end_key(s, t->token + t->tokens - 1);
    for (int64_t j = 0; j < end; j += NAME(KEYS)) {
        int64_t n = min_i64(NAME(KEYS), end - j);
        NAME(transpose_keys)(keys_t, k + j * s->ld_kv, s->ld_kv, n, s->D);
        for (int64_t i = 0; i < t->tokens; i++) {
            int64_t lo = max_i64(attention_first_key(s, t->sequence, t->token + i) - j, 0);
            int64_t hi = min_i64(attention_end_key(s, t->token + i) - j, n);
            if (lo >= hi) continue;
            NAME(row_scores)(scores, q + i * s->ld_q, keys_t, (REAL)a->scale, s->D);
            NAME(row_step)(&rows[i], scores, v + j * s->ld_kv, s->ld_kv, lo, hi, s->D);
        }
    }
    REAL *lse = (REAL *)a->lse + (t->sequence * s->H + head) * s->T + t->token;
    REAL *out = (REAL *)a->out + (t->sequence * s->T + t->token) * s->ld_out + head * s->D;
    for (int64_t i = 0; i < t->tokens; i++) {
        lse[i] = rows[i].max + LOG(rows[i].sum);
        for (int64_t d = 0; d < s->D; d++) out[i * s->ld_out + d] = rows[i].o[d] / rows[i].sum;
    }
}

static void NAME(forward_task)(void *args, int64_t index) {
    AttentionTask t = attention_task(args, index);
    for (int64_t h = 0; h < t.heads; h++) NAME(forward_head)(args, &t, t.head + h);
}

void NAME(attention_forward)(AttentionArgs *a) {
    int64_t tasks = attention_split(a, NAME(ROWS));
    share_tasks(tasks, NAME(forward_task), a);
}

typedef struct {
    int64_t first, n; /* keys of the block */
    REAL keys_t[HEAD_SIZE_MAX * NAME(KEYS)], values_t[HEAD_SIZE_MAX * NAME(KEYS)];
    REAL dk[NAME(KEYS) * HEAD_SIZE_MAX], dv[NAME(KEYS) * HEAD_SIZE_MAX]; /* (KEYS, D) */
} NAME(KeyBlock);

/* Row t of one head against a block of keys: adds to dq, and to the block's dk and dv. */
static void NAME(backward_row)(const AttentionArgs *a, NAME(KeyBlock) * b, int64_t sequence, int64_t head, int64_t t) {
    const AttentionShape *s = &a->shape;
    int64_t D = s->D, token = sequence * s->T + t, stat = (sequence * s->H + head) * s->T + t;
    int64_t lo = max_i64(attention_first_key(s, sequence, t) - b->first, 0);
    int64_t hi = min_i64(attention_end_key(s, t) - b->first, b->n);
    if (lo >= hi) return;
    const REAL *q = (const REAL *)a->q + token * s->ld_q + head * D;
    const REAL *dout = (const REAL *)a->dout + token * s->ld_out + head * D;
    const REAL *k = (const REAL *)a->k + sequence * s->stride_kv + b->first * s->ld_kv + head / (s->H / s->KV) * D;
    REAL *dq = (REAL *)a->dq + token * s->ld_q + head * D;
    REAL scale = (REAL)a->scale, lse = ((const REAL *)a->lse)[stat], delta = ((const REAL *)a->delta)[stat];
    REAL scores[NAME(KEYS)], dp[NAME(KEYS)];
    NAME(row_scores)(scores, q, b->keys_t, scale, D);
    NAME(row_scores)(dp, dout, b->values_t, (REAL)1, D);
    for (int64_t j = lo; j < hi; j++) {
        REAL p = EXP(scores[j] - lse);
        REAL ds = p * (dp[j] - delta) * scale;
        for (int64_t d = 0; d < D; d++) b->dv[j * D + d] += p * dout[d];
        for (int64_t d = 0; d < D; d++) b->dk[j * D + d] += ds * q[d];
        for (int64_t d = 0; d < D; d++) dq[d] += ds * k[j * s->ld_kv + d];
    }
}

/* delta = row sums of dout * out; dq = 0. */
static void NAME(backward_start)(const AttentionArgs *a, int64_t sequence, int64_t head) {
    const AttentionShape *s = &a->shape;
    for (int64_t t = 0; t < s->T; t++) {
        int64_t token = sequence * s->T + t;
        const REAL *dout = (const REAL *)a->dout + token * s->ld_out + head * s->D;
        const REAL *out = (const REAL *)a->out + token * s->ld_out + head * s->D;
        REAL sum = 0;
        for (int64_t d = 0; d < s->D; d++) sum += dout[d] * out[d];
        ((REAL *)a->delta)[(sequence * s->H + head) * s->T + t] = sum;
        memset((REAL *)a->dq + token * s->ld_q + head * s->D, 0, (size_t)s->D * sizeof(REAL));
    }
}

static void NAME(backward_task)(void *args, int64_t index) {
    const AttentionArgs *a = args;
    const AttentionShape *s = &a->shape;
    int64_t sequence = index / s->KV, kv_head = index % s->KV, group = s->H / s->KV, D = s->D;
    int64_t at = sequence * s->stride_kv + kv_head * D;
    for (int64_t g = 0; g < group; g++) NAME(backward_start)(a, sequence, kv_head * group + g);
    NAME(KeyBlock) b;
    memset(b.keys_t, 0, sizeof(b.keys_t)); /* rows behind the last key are multiplied, never used */
    memset(b.values_t, 0, sizeof(b.values_t));
    for (b.first = 0; b.first < s->T_keys; b.first += NAME(KEYS)) {
        b.n = min_i64(NAME(KEYS), s->T_keys - b.first);
        NAME(transpose_keys)(b.keys_t, (const REAL *)a->k + at + b.first * s->ld_kv, s->ld_kv, b.n, D);
        NAME(transpose_keys)(b.values_t, (const REAL *)a->v + at + b.first * s->ld_kv, s->ld_kv, b.n, D);
        memset(b.dk, 0, (size_t)(b.n * D) * sizeof(REAL));
        memset(b.dv, 0, (size_t)(b.n * D) * sizeof(REAL));
        int64_t t_first = max_i64(0, b.first - (s->T_keys - s->T));
        for (int64_t g = 0; g < group; g++) {
            for (int64_t t = t_first; t < s->T; t++) NAME(backward_row)(a, &b, sequence, kv_head * group + g, t);
        }
        for (int64_t j = 0; j < b.n; j++) {
            size_t bytes = (size_t)D * sizeof(REAL);
            memcpy((REAL *)a->dk + at + (b.first + j) * s->ld_kv, b.dk + j * D, bytes);
            memcpy((REAL *)a->dv + at + (b.first + j) * s->ld_kv, b.dv + j * D, bytes);
        }
    }
}

void NAME(attention_backward)(AttentionArgs *a) { share_tasks(a->shape.B * a->shape.KV, NAME(backward_task), a); }
