/* attention.h - what the portable and the AVX2 attention share: arguments, and which keys a row sees. */
#ifndef TRIDENT_KERNELS_CPU_ATTENTION_H
#define TRIDENT_KERNELS_CPU_ATTENTION_H

#include <stdint.h>

#include "kernels/kernels.h"

enum { HEAD_SIZE_MAX = 256 };

typedef struct {
    AttentionShape shape; /* stride_kv filled in */
    double scale;         /* 1 / sqrt(D) */
    void *out, *lse;      /* backward: read only */
    const void *q, *k, *v;
    void *dq, *dk, *dv; /* backward */
    const void *dout;
    void *delta; /* backward: (B, H, T) row sums of dout * out, stat dtype */
    DType dtype;
    int64_t task_heads, task_tokens; /* forward: query rows of one task, per key head */
} AttentionArgs;

/* A forward task: heads [head, head + heads) of one key head, queries [token, token + tokens). */
typedef struct {
    int64_t sequence, kv_head, head, heads, token, tokens;
} AttentionTask;

/* Sets task_heads and task_tokens so that one task has at most rows_max rows, and returns the number
 * of tasks. Heads that share keys stand together, so that keys are packed once for all of them. */
int64_t attention_split(AttentionArgs *a, int64_t rows_max);
AttentionTask attention_task(const AttentionArgs *a, int64_t index);

/* Keys [first, end) that query t of the sequence sees. */
static inline int64_t attention_first_key(const AttentionShape *s, int64_t sequence, int64_t t) {
    return s->doc_start ? s->doc_start[sequence * s->T + t] : 0;
}
static inline int64_t attention_end_key(const AttentionShape *s, int64_t t) { return s->T_keys - s->T + t + 1; }

void attention_forward_f32(AttentionArgs *a);
void attention_forward_f64(AttentionArgs *a);
void attention_forward_avx2(AttentionArgs *a);
void attention_backward_f32(AttentionArgs *a);
void attention_backward_f64(AttentionArgs *a);
void attention_backward_avx2(AttentionArgs *a);

#endif
