/* attention_avx2.c - attention in fp32 on tiles of 6 query rows and up to KEYS keys.
 * In, out and invariants: as attention.c. Keys and values of a block are packed once for all rows of a
 * task (strides of q, k, v in memory are often multiples of a large power of two, which caches dislike);
 * scores of six rows live in 6 x KEYS floats from product to product. Head sizes are padded to a
 * multiple of 8 inside; tiles end where causality does, in steps of 16 keys. */
#ifdef __AVX2__
#include "kernels/cpu/attention.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/common.h"
#include "kernels/cpu/microkernel_avx2.h"
#include "kernels/cpu/simd_avx2.h"

enum {
    KEYS = 96,          /* of a block; a multiple of 6 and of 16 */
    FORWARD_ROWS = 132, /* of a forward task */
    QUERIES = 48,       /* of a backward tile; a multiple of 6 */
    FORWARD_GROUPS = FORWARD_ROWS / TILE_ROWS
};

#define ALIGNED __attribute__((aligned(64)))

static const float MAX_START = -1e30f; /* below any score; not infinite, so that max - max is 0 */

/* ---- packing ---- */

/* to (D, KEYS) = transpose of n rows; columns up to the next multiple of 16 are zero. */
static void pack_keys(float *to, const float *from, int64_t ld, int64_t n, int64_t D) {
    pack_transposed(to, KEYS, round_up(n, TILE_COLS), from, ld, n, D);
}

/* to (n, Dp) = factor * n rows, zeros behind D. */
static void pack_rows(float *to, const float *from, int64_t ld, int64_t n, int64_t D, float factor) {
    int64_t Dp = round_up(D, 8);
    __m256 f = _mm256_set1_ps(factor);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t d = 0; d < Dp; d += 8) {
            _mm256_store_ps(to + i * Dp + d, _mm256_mul_ps(load_row_ps(from + i * ld + d, D - d), f));
        }
    }
}

/* ---- forward ---- */

typedef struct {
    int64_t rows, groups, D, Dp;
    int64_t first[FORWARD_ROWS], end[FORWARD_ROWS];                 /* keys that a row sees */
    int64_t group_first[FORWARD_GROUPS], group_end[FORWARD_GROUPS]; /* that any row of six sees */
    float max[FORWARD_ROWS], sum[FORWARD_ROWS];
    float q[FORWARD_ROWS * HEAD_SIZE_MAX] ALIGNED; /* (rows, Dp), scaled */
    float o[FORWARD_ROWS * HEAD_SIZE_MAX] ALIGNED; /* (rows, Dp), not yet divided by sum */
    float keys_t[HEAD_SIZE_MAX * KEYS] ALIGNED;    /* (D, KEYS) */
    float values[KEYS * HEAD_SIZE_MAX] ALIGNED;    /* (KEYS, Dp) */
    float scores[TILE_ROWS * KEYS] ALIGNED;
} ForwardTile;

static void forward_load(ForwardTile *f, const AttentionArgs *a, const AttentionTask *t) {
    const AttentionShape *s = &a->shape;
    f->D = s->D;
    f->Dp = round_up(s->D, 8);
    f->rows = t->heads * t->tokens;
    f->groups = ceil_div(f->rows, TILE_ROWS);
    for (int64_t r = 0; r < f->groups * TILE_ROWS; r++) {
        /* Rows behind the last repeat it: they cost nothing extra and need no special case. */
        int64_t row = min_i64(r, f->rows - 1), head = t->head + row / t->tokens, token = t->token + row % t->tokens;
        const float *q = (const float *)a->q + (t->sequence * s->T + token) * s->ld_q + head * s->D;
        pack_rows(f->q + r * f->Dp, q, 0, 1, f->D, (float)a->scale);
        int64_t first = attention_first_key(s, t->sequence, token), end = attention_end_key(s, token);
        int64_t g = r / TILE_ROWS;
        bool opens = r % TILE_ROWS == 0;
        f->first[r] = first;
        f->end[r] = end;
        f->group_first[g] = opens ? first : min_i64(f->group_first[g], first);
        f->group_end[g] = opens ? end : max_i64(f->group_end[g], end);
        f->max[r] = MAX_START;
        f->sum[r] = 0.0f;
    }
    memset(f->o, 0, (size_t)(f->groups * TILE_ROWS * f->Dp) * sizeof(float));
}

/* Scores outside [lo, hi) become minus infinity; columns [from, to) in steps of 8. */
static void mask_row(float *s, int64_t from, int64_t to, int64_t lo, int64_t hi) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 outside = _mm256_set1_ps(-INFINITY);
    if (lo <= from && to <= hi) return;
    for (int64_t j = from; j < to; j += 8) {
        if (lo <= j && j + 8 <= hi) continue;
        __m256i at = _mm256_add_epi32(lane, _mm256_set1_epi32((int)j));
        __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)lo), at);
        __m256i inside = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)hi), at));
        __m256 x = _mm256_blendv_ps(outside, _mm256_load_ps(s + j), _mm256_castsi256_ps(inside));
        _mm256_store_ps(s + j, x);
    }
}

/* Online softmax of one row over columns [from, to): scores become probabilities relative to the new
 * maximum; what the row gathered before shrinks accordingly. */
static void softmax_row(ForwardTile *f, int64_t r, float *s, int64_t from, int64_t to) {
    __m256 top = _mm256_load_ps(s + from);
    for (int64_t j = from + 8; j < to; j += 8) top = _mm256_max_ps(top, _mm256_load_ps(s + j));
    float old = f->max[r], max = max256_ps(top);
    if (!(max > old)) max = old;
    __m256 m = _mm256_set1_ps(max), total = _mm256_setzero_ps();
    for (int64_t j = from; j < to; j += 8) {
        __m256 p = exp256_nonpositive_ps(_mm256_sub_ps(_mm256_load_ps(s + j), m));
        _mm256_store_ps(s + j, p);
        total = _mm256_add_ps(total, p);
    }
    if (f->sum[r] > 0.0f && max > old) {
        float shrink = _mm256_cvtss_f32(exp256_nonpositive_ps(_mm256_set1_ps(old - max)));
        __m256 factor = _mm256_set1_ps(shrink);
        float *o = f->o + r * f->Dp;
        for (int64_t d = 0; d < f->Dp; d += 8) _mm256_store_ps(o + d, _mm256_mul_ps(_mm256_load_ps(o + d), factor));
        f->sum[r] *= shrink;
    }
    f->max[r] = max;
    f->sum[r] += sum256_ps(total);
}

/* Six rows against keys [j0, j0 + n) of the packed block. */
static void forward_group(ForwardTile *f, int64_t g, int64_t j0, int64_t n) {
    int64_t lo = max_i64(f->group_first[g] - j0, 0), hi = min_i64(f->group_end[g] - j0, n);
    if (lo >= hi) return;
    int64_t from = lo / TILE_COLS * TILE_COLS, to = round_up(hi, TILE_COLS);
    const float *q = f->q + g * TILE_ROWS * f->Dp;
    for (int64_t j = from; j < to; j += TILE_COLS) {
        tile_6x16(f->scores + j, KEYS, false, f->D, q, f->Dp, 1, f->keys_t + j, KEYS);
    }
    for (int64_t i = 0; i < TILE_ROWS; i++) {
        int64_t r = g * TILE_ROWS + i;
        float *s = f->scores + i * KEYS;
        mask_row(s, from, to, f->first[r] - j0, min_i64(f->end[r] - j0, n));
        softmax_row(f, r, s, from, to);
    }
    tile_row(f->o + g * TILE_ROWS * f->Dp, f->Dp, true, f->Dp, hi - lo, f->scores + lo, KEYS, 1, f->values + lo * f->Dp,
             f->Dp);
}

static void forward_store(const ForwardTile *f, const AttentionArgs *a, const AttentionTask *t) {
    const AttentionShape *s = &a->shape;
    for (int64_t r = 0; r < f->rows; r++) {
        int64_t head = t->head + r / t->tokens, token = t->token + r % t->tokens;
        float *out = (float *)a->out + (t->sequence * s->T + token) * s->ld_out + head * s->D;
        const float *o = f->o + r * f->Dp;
        __m256 inverse = _mm256_set1_ps(1.0f / f->sum[r]);
        for (int64_t d = 0; d < f->Dp; d += 8) {
            store_row_ps(out + d, f->D - d, _mm256_mul_ps(_mm256_load_ps(o + d), inverse));
        }
        ((float *)a->lse)[(t->sequence * s->H + head) * s->T + token] = f->max[r] + logf(f->sum[r]);
    }
}

static void forward_task(void *args, int64_t index) {
    const AttentionArgs *a = args;
    const AttentionShape *s = &a->shape;
    AttentionTask t = attention_task(a, index);
    ForwardTile f;
    forward_load(&f, a, &t);
    int64_t first = f.group_first[0], end = f.group_end[0];
    for (int64_t g = 1; g < f.groups; g++) {
        first = min_i64(first, f.group_first[g]);
        end = max_i64(end, f.group_end[g]);
    }
    const float *k = (const float *)a->k + t.sequence * s->stride_kv + t.kv_head * s->D;
    const float *v = (const float *)a->v + t.sequence * s->stride_kv + t.kv_head * s->D;
    for (int64_t j = first / KEYS * KEYS; j < end; j += KEYS) {
        int64_t n = min_i64(KEYS, end - j);
        pack_keys(f.keys_t, k + j * s->ld_kv, s->ld_kv, n, s->D);
        pack_rows(f.values, v + j * s->ld_kv, s->ld_kv, n, s->D, 1.0f);
        for (int64_t g = 0; g < f.groups; g++) forward_group(&f, g, j, n);
    }
    forward_store(&f, a, &t);
}

void attention_forward_avx2(AttentionArgs *a) {
    int64_t tasks = attention_split(a, FORWARD_ROWS);
    share_tasks(tasks, forward_task, a);
}

/* ---- backward ---- */

typedef struct {
    int64_t sequence, kv_head, D, Dp;
    int64_t first_key, n_keys;                    /* of the block */
    float keys_t[HEAD_SIZE_MAX * KEYS] ALIGNED;   /* (D, KEYS) */
    float values_t[HEAD_SIZE_MAX * KEYS] ALIGNED; /* (D, KEYS) */
    float keys[KEYS * HEAD_SIZE_MAX] ALIGNED;     /* (KEYS, Dp) */
    float dk[KEYS * HEAD_SIZE_MAX] ALIGNED;       /* (KEYS, Dp) */
    float dv[KEYS * HEAD_SIZE_MAX] ALIGNED;       /* (KEYS, Dp) */
    int64_t head, token, tokens;                  /* of the tile of queries */
    float q[QUERIES * HEAD_SIZE_MAX] ALIGNED;     /* (QUERIES, Dp), scaled */
    float dout[QUERIES * HEAD_SIZE_MAX] ALIGNED;  /* (QUERIES, Dp) */
    float p[QUERIES * KEYS] ALIGNED;              /* probabilities */
    float ds[QUERIES * KEYS] ALIGNED;             /* gradient of the scaled scores */
    float dq[TILE_ROWS * HEAD_SIZE_MAX] ALIGNED;  /* (6, Dp), to be scaled */
} BackwardTile;

/* delta = row sums of dout * out; dq = 0. */
static void backward_start(const AttentionArgs *a, int64_t sequence, int64_t head) {
    const AttentionShape *s = &a->shape;
    for (int64_t t = 0; t < s->T; t++) {
        int64_t token = sequence * s->T + t;
        const float *dout = (const float *)a->dout + token * s->ld_out + head * s->D;
        const float *out = (const float *)a->out + token * s->ld_out + head * s->D;
        float *dq = (float *)a->dq + token * s->ld_q + head * s->D;
        __m256 sum = _mm256_setzero_ps();
        for (int64_t d = 0; d < s->D; d += 8) {
            sum = _mm256_fmadd_ps(load_row_ps(dout + d, s->D - d), load_row_ps(out + d, s->D - d), sum);
            store_row_ps(dq + d, s->D - d, _mm256_setzero_ps());
        }
        ((float *)a->delta)[(sequence * s->H + head) * s->T + t] = sum256_ps(sum);
    }
}

/* p = exp(score - lse) and ds = p (dp - delta) of one row over columns [from, to), zero before and in
 * the eight columns behind: so far can the six keys of a dk tile reach that the row sees the first of. */
static void backward_row(float *p, float *ds, int64_t from, int64_t to, float lse, float delta) {
    __m256 l = _mm256_set1_ps(lse), mean = _mm256_set1_ps(delta), zero = _mm256_setzero_ps();
    for (int64_t j = 0; j < from; j += 8) {
        _mm256_store_ps(p + j, zero);
        _mm256_store_ps(ds + j, zero);
    }
    for (int64_t j = from; j < to; j += 8) {
        __m256 x = exp256_nonpositive_ps(_mm256_sub_ps(_mm256_load_ps(p + j), l));
        _mm256_store_ps(p + j, x);
        _mm256_store_ps(ds + j, _mm256_mul_ps(x, _mm256_sub_ps(_mm256_load_ps(ds + j), mean)));
    }
    if (to < KEYS) {
        _mm256_store_ps(p + to, zero);
        _mm256_store_ps(ds + to, zero);
    }
}

/* dq of six rows, from the tile's ds over keys [lo, hi), into memory. */
static void backward_dq(BackwardTile *b, const AttentionArgs *a, int64_t i0, int64_t lo, int64_t hi) {
    const AttentionShape *s = &a->shape;
    tile_row(b->dq, b->Dp, false, b->Dp, hi - lo, b->ds + i0 * KEYS + lo, KEYS, 1, b->keys + lo * b->Dp, b->Dp);
    __m256 scale = _mm256_set1_ps((float)a->scale);
    for (int64_t i = 0; i < TILE_ROWS && i0 + i < b->tokens; i++) {
        float *dq = (float *)a->dq + (b->sequence * s->T + b->token + i0 + i) * s->ld_q + b->head * s->D;
        for (int64_t d = 0; d < b->D; d += 8) {
            __m256 x = _mm256_load_ps(b->dq + i * b->Dp + d);
            store_row_ps(dq + d, b->D - d, _mm256_fmadd_ps(x, scale, load_row_ps(dq + d, b->D - d)));
        }
    }
}

/* Six rows of queries of the tile: p, ds and dq. */
static void backward_group(BackwardTile *b, const AttentionArgs *a, int64_t i0) {
    const AttentionShape *s = &a->shape;
    int64_t row_lo[TILE_ROWS], row_hi[TILE_ROWS], lo = KEYS, hi = 0;
    int64_t rows = min_i64(TILE_ROWS, b->tokens - i0);
    for (int64_t i = 0; i < rows; i++) {
        int64_t t = b->token + i0 + i;
        row_lo[i] = max_i64(attention_first_key(s, b->sequence, t) - b->first_key, 0);
        row_hi[i] = min_i64(attention_end_key(s, t) - b->first_key, b->n_keys);
        lo = min_i64(lo, row_lo[i]);
        hi = max_i64(hi, row_hi[i]);
    }
    float *p = b->p + i0 * KEYS, *ds = b->ds + i0 * KEYS;
    if (lo >= hi) {
        memset(p, 0, TILE_ROWS * KEYS * sizeof(float));
        memset(ds, 0, TILE_ROWS * KEYS * sizeof(float));
        return;
    }
    int64_t from = lo / TILE_COLS * TILE_COLS, to = round_up(hi, TILE_COLS);
    for (int64_t j = from; j < to; j += TILE_COLS) {
        tile_6x16(p + j, KEYS, false, b->D, b->q + i0 * b->Dp, b->Dp, 1, b->keys_t + j, KEYS);
        tile_6x16(ds + j, KEYS, false, b->D, b->dout + i0 * b->Dp, b->Dp, 1, b->values_t + j, KEYS);
    }
    int64_t stat = (b->sequence * s->H + b->head) * s->T + b->token + i0;
    for (int64_t i = 0; i < rows; i++) { /* nobody reads what rows behind the last give */
        mask_row(p + i * KEYS, from, to, row_lo[i], row_hi[i]);
        backward_row(p + i * KEYS, ds + i * KEYS, from, to, ((const float *)a->lse)[stat + i],
                     ((const float *)a->delta)[stat + i]);
    }
    backward_dq(b, a, i0, lo, hi);
}

/* One tile of queries of one head against the packed block of keys. */
static void backward_tile(BackwardTile *b, const AttentionArgs *a) {
    const AttentionShape *s = &a->shape;
    int64_t padded = round_up(b->tokens, TILE_ROWS), row = b->sequence * s->T + b->token;
    pack_rows(b->q, (const float *)a->q + row * s->ld_q + b->head * s->D, s->ld_q, b->tokens, b->D, (float)a->scale);
    pack_rows(b->dout, (const float *)a->dout + row * s->ld_out + b->head * s->D, s->ld_out, b->tokens, b->D, 1.0f);
    size_t tail_bytes = (size_t)((padded - b->tokens) * b->Dp) * sizeof(float);
    memset(b->q + b->tokens * b->Dp, 0, tail_bytes);
    memset(b->dout + b->tokens * b->Dp, 0, tail_bytes);
    for (int64_t i = 0; i < padded; i += TILE_ROWS) backward_group(b, a, i);
    for (int64_t j = 0; j < b->n_keys; j += TILE_ROWS) {
        /* The first query that sees key j. */
        int64_t i = max_i64(0, b->first_key + j - (s->T_keys - s->T) - b->token);
        if (i >= b->tokens) break;
        tile_row(b->dv + j * b->Dp, b->Dp, true, b->Dp, b->tokens - i, b->p + i * KEYS + j, 1, KEYS,
                 b->dout + i * b->Dp, b->Dp);
        tile_row(b->dk + j * b->Dp, b->Dp, true, b->Dp, b->tokens - i, b->ds + i * KEYS + j, 1, KEYS, b->q + i * b->Dp,
                 b->Dp);
    }
}

/* Whether any of the tile's queries sees a key before end: documents start later and later. */
static bool tile_sees(const BackwardTile *b, const AttentionShape *s, int64_t end) {
    for (int64_t i = 0; i < b->tokens; i++) {
        if (attention_first_key(s, b->sequence, b->token + i) < end) return true;
    }
    return false;
}

static void backward_block(BackwardTile *b, const AttentionArgs *a) {
    const AttentionShape *s = &a->shape;
    int64_t group = s->H / s->KV, D = s->D;
    int64_t at = b->sequence * s->stride_kv + b->first_key * s->ld_kv + b->kv_head * D;
    pack_keys(b->keys_t, (const float *)a->k + at, s->ld_kv, b->n_keys, D);
    pack_keys(b->values_t, (const float *)a->v + at, s->ld_kv, b->n_keys, D);
    pack_rows(b->keys, (const float *)a->k + at, s->ld_kv, b->n_keys, D, 1.0f);
    memset(b->dk, 0, (size_t)(KEYS * b->Dp) * sizeof(float));
    memset(b->dv, 0, (size_t)(KEYS * b->Dp) * sizeof(float));
    int64_t first = max_i64(0, b->first_key - (s->T_keys - s->T));
    for (int64_t g = 0; g < group; g++) {
        b->head = b->kv_head * group + g;
        for (b->token = first / QUERIES * QUERIES; b->token < s->T; b->token += QUERIES) {
            b->tokens = min_i64(QUERIES, s->T - b->token);
            if (tile_sees(b, s, b->first_key + b->n_keys)) backward_tile(b, a);
        }
    }
    for (int64_t j = 0; j < b->n_keys; j++) {
        memcpy((float *)a->dk + at + j * s->ld_kv, b->dk + j * b->Dp, (size_t)D * sizeof(float));
        memcpy((float *)a->dv + at + j * s->ld_kv, b->dv + j * b->Dp, (size_t)D * sizeof(float));
    }
}

static void backward_task(void *args, int64_t index) {
    const AttentionArgs *a = args;
    const AttentionShape *s = &a->shape;
    BackwardTile b;
    b.sequence = index / s->KV;
    b.kv_head = index % s->KV;
    b.D = s->D;
    b.Dp = round_up(s->D, 8);
    int64_t group = s->H / s->KV;
    for (int64_t g = 0; g < group; g++) backward_start(a, b.sequence, b.kv_head * group + g);
    for (b.first_key = 0; b.first_key < s->T_keys; b.first_key += KEYS) {
        b.n_keys = min_i64(KEYS, s->T_keys - b.first_key);
        backward_block(&b, a);
    }
}

void attention_backward_avx2(AttentionArgs *a) { share_tasks(a->shape.B * a->shape.KV, backward_task, a); }
#endif
