/* attention.c - causal grouped-query attention: checks, tasks, and the portable path for float and double.
 * In: q, k, v by rows of tokens.  Out: out and lse, or dq, dk, dv.
 * Invariants: scores exist for one tile at a time; the backward pass recomputes them from lse. Forward
 * tasks write rows of their own; a backward task owns a key head with all its query heads, so that no
 * sum depends on threads. */
#include "kernels/cpu/attention.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/common.h"

int64_t attention_split(AttentionArgs *a, int64_t rows_max) {
    int64_t group = a->shape.H / a->shape.KV;
    a->task_heads = min_i64(group, rows_max);
    int64_t tokens_max = max_i64(1, rows_max / a->task_heads);
    /* Evenly: a short last block would pack all keys for few queries. */
    a->task_tokens = ceil_div(a->shape.T, ceil_div(a->shape.T, tokens_max));
    return a->shape.B * a->shape.KV * ceil_div(group, a->task_heads) * ceil_div(a->shape.T, a->task_tokens);
}

AttentionTask attention_task(const AttentionArgs *a, int64_t index) {
    int64_t group = a->shape.H / a->shape.KV;
    int64_t token_blocks = ceil_div(a->shape.T, a->task_tokens), head_blocks = ceil_div(group, a->task_heads);
    AttentionTask t;
    /* The longest rows first: dynamic sharing then ends evenly. */
    t.token = (token_blocks - 1 - index % token_blocks) * a->task_tokens;
    index /= token_blocks;
    int64_t first_head = index % head_blocks * a->task_heads;
    index /= head_blocks;
    t.kv_head = index % a->shape.KV;
    t.sequence = index / a->shape.KV;
    t.head = t.kv_head * group + first_head;
    t.heads = min_i64(a->task_heads, group - first_head);
    t.tokens = min_i64(a->task_tokens, a->shape.T - t.token);
    return t;
}

#define REAL float
#define SUFFIX f32
#define EXP expf
#define LOG logf
#include "kernels/cpu/attention_real.h"
#undef REAL
#undef SUFFIX
#undef EXP
#undef LOG

#define REAL double
#define SUFFIX f64
#define EXP exp
#define LOG log
#include "kernels/cpu/attention_real.h"

static AttentionShape checked_shape(const AttentionShape *shape, DType dtype) {
    AttentionShape s = *shape;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(s.B >= 0 && s.T >= 0 && s.KV > 0 && s.H % s.KV == 0);
    REQUIRE(s.D >= 2 && s.D <= HEAD_SIZE_MAX);
    REQUIRE(s.T_keys >= s.T);
    REQUIRE(s.ld_q >= s.H * s.D && s.ld_kv >= s.KV * s.D && s.ld_out >= s.H * s.D);
    if (s.stride_kv == 0) s.stride_kv = s.T_keys * s.ld_kv;
    return s;
}

void attention_forward(void *out, void *lse, const void *q, const void *k, const void *v, const AttentionShape *shape,
                       DType dtype, Stream *stream) {
    (void)stream; /* compute runs at the call on this platform */
    AttentionArgs a = {
        .shape = checked_shape(shape, dtype), .out = out, .lse = lse, .q = q, .k = k, .v = v, .dtype = dtype};
    a.scale = 1.0 / sqrt((double)a.shape.D);
    if (a.shape.B == 0 || a.shape.T == 0 || a.shape.H == 0) return;
    if (dtype == DT_F64) {
        attention_forward_f64(&a);
    } else if (kernels_avx2()) {
        attention_forward_avx2(&a);
    } else {
        attention_forward_f32(&a);
    }
}

int64_t attention_backward_workspace(const AttentionShape *shape, DType dtype) {
    return shape->B * shape->H * shape->T * (int64_t)dtype_size(stat_dtype(dtype));
}

void attention_backward(void *dq, void *dk, void *dv, const void *dout, const void *q, const void *k, const void *v,
                        const void *out, const void *lse, const AttentionShape *shape, void *workspace, DType dtype,
                        Stream *stream) {
    (void)stream;
    AttentionArgs a = {.shape = checked_shape(shape, dtype),
                       .out = (void *)(uintptr_t)out,
                       .lse = (void *)(uintptr_t)lse,
                       .q = q,
                       .k = k,
                       .v = v,
                       .dq = dq,
                       .dk = dk,
                       .dv = dv,
                       .dout = dout,
                       .delta = workspace,
                       .dtype = dtype};
    a.scale = 1.0 / sqrt((double)a.shape.D);
    if (a.shape.B == 0 || a.shape.T_keys == 0) return;
    if (dtype == DT_F64) {
        attention_backward_f64(&a);
    } else if (kernels_avx2()) {
        attention_backward_avx2(&a);
    } else {
        attention_backward_f32(&a);
    }
}
