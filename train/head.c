/* head.c - the loss: logits, vocabulary-parallel cross-entropy and its gradient, a chunk of tokens at
 * a time, so that logits of all tokens never exist at once (Megatron-LM keeps logits split over the
 * vocabulary in the same way: Shoeybi et al. 2019, section 3).
 * In: final norm of a slot. Out: loss sums; in training the gradients of the norm's output and of the
 * head weight. */
#include "base/check.h"
#include "train/model_internal.h"

typedef struct {
    const char *x;          /* (rows, C) */
    char *dx;               /* (rows, C), NULL: loss only */
    const int32_t *targets; /* (rows) */
    int64_t rows;
} Chunk;

/* Statistics of this rank's columns, gathered from all tensor ranks. */
static void chunk_loss(Model *m, const Chunk *chunk) {
    const Dims *d = &m->dims;
    const DType dtype = m->config->dtype, stat = stat_dtype(dtype);
    const int ranks = m->groups.tensor ? group_size(m->groups.tensor) : 1;
    const int rank = m->groups.tensor ? group_rank(m->groups.tensor) : 0;
    const int64_t n = chunk->rows;
    matmul(m->work.logits, d->V_local, chunk->x, d->C, false, m->head_w, d->C, true, n, d->V_local, d->C, false, NULL,
           dtype, m->compute);
    char *mine = (char *)m->work.stats + (int64_t)rank * n * 3 * (int64_t)dtype_size(stat);
    cross_entropy_stats(mine, m->work.logits, chunk->targets, d->vocab.first, n, d->vocab.count, d->V_local, dtype,
                        m->compute);
    if (ranks > 1) comm_all_gather(m->groups.tensor, m->work.stats, mine, 3 * n, stat, m->compute);
    cross_entropy_combine(m->work.losses, m->work.head_lse, m->work.stats, chunk->targets, ranks, n, dtype, m->compute);
    sum_stats(&m->loss_sum, m->work.losses, n, dtype, m->compute);
}

static void chunk_backward(Model *m, const Chunk *chunk, double grad_scale) {
    const Dims *d = &m->dims;
    const DType dtype = m->config->dtype;
    const int64_t n = chunk->rows;
    cross_entropy_backward(m->work.logits, m->work.head_lse, chunk->targets, grad_scale, d->vocab.first, n,
                           d->vocab.count, d->V_local, dtype, m->compute);
    matmul(chunk->dx, d->C, m->work.logits, d->V_local, false, m->head_w, d->C, false, n, d->C, d->V_local, false, NULL,
           dtype, m->compute);
    matmul(m->dhead_w, d->C, m->work.logits, d->V_local, true, chunk->x, d->C, false, d->V_local, d->C, n, true, NULL,
           dtype, m->compute);
}

void head_run(Model *m, const Slot *slot, bool training, double grad_scale) {
    const Dims *d = &m->dims;
    const int64_t row_bytes = d->C * (int64_t)dtype_size(m->config->dtype);
    const char *x = (const char *)tensor_tokens(m, slot->n_final);
    for (int64_t first = 0; first < d->N; first += d->head_rows) {
        const Chunk chunk = {.x = x + first * row_bytes,
                             .dx = training ? (char *)m->work.partial + first * row_bytes : NULL,
                             .targets = slot->targets + first,
                             .rows = min_i64(d->head_rows, d->N - first)};
        chunk_loss(m, &chunk);
        if (training) chunk_backward(m, &chunk, grad_scale);
    }
    for (int64_t i = 0; i < d->N; i++) m->loss_tokens += slot->targets[i] >= 0;
}
