/* block.c - one transformer block, forward and backward, with its sums over tensor ranks.
 * In: residual stream and the MLP output that is still to be added to it. Out: activations, gradients.
 * Invariants: every product's weight gradient is added into the flat gradients; the residual gradient
 * dx enters as that of the block's output and leaves as that of its input. */
#include "train/model_internal.h"

NormKind model_norm_kind(const Model *model) { return model->config->arch == ARCH_GPT ? NORM_LAYER : NORM_RMS; }

void *tensor_sum(Model *m) {
    if (!m->groups.tensor || group_size(m->groups.tensor) == 1) return m->work.partial;
    const Dims *d = &m->dims;
    if (!m->config->sequence_parallel_on) {
        comm_all_reduce(m->groups.tensor, m->work.partial, d->N * d->C, m->config->dtype, COMM_SUM, m->compute);
        return m->work.partial;
    }
    comm_reduce_scatter(m->groups.tensor, m->work.reduced, m->work.partial, d->N_local * d->C, m->config->dtype,
                        COMM_SUM, m->compute);
    return m->work.reduced;
}

const void *tensor_tokens(Model *m, const void *x) {
    if (!m->config->sequence_parallel_on) return x;
    comm_all_gather(m->groups.tensor, m->work.gathered, x, m->dims.N_local * m->dims.C, m->config->dtype, m->compute);
    return m->work.gathered;
}

/* y (N, outputs) = x (N, inputs) . w^T, w (outputs, inputs). */
static void project(Model *m, void *y, const void *x, const void *w, int64_t inputs, int64_t outputs,
                    const MatmulEpilogue *epilogue) {
    matmul(y, outputs, x, inputs, false, w, inputs, true, m->dims.N, outputs, inputs, false, epilogue, m->config->dtype,
           m->compute);
}

/* dx (N, inputs) = dy (N, outputs) . w. */
static void project_input_gradient(Model *m, void *dx, const void *dy, const void *w, int64_t inputs, int64_t outputs,
                                   const MatmulEpilogue *epilogue) {
    matmul(dx, inputs, dy, outputs, false, w, inputs, false, m->dims.N, inputs, outputs, false, epilogue,
           m->config->dtype, m->compute);
}

/* dw (outputs, inputs) += dy^T . x. */
static void project_weight_gradient(Model *m, void *dw, const void *dy, const void *x, int64_t inputs,
                                    int64_t outputs) {
    matmul(dw, inputs, dy, outputs, true, x, inputs, false, outputs, inputs, m->dims.N, true, NULL, m->config->dtype,
           m->compute);
}

static char *columns(const Model *m, void *rows, int64_t first) {
    return (char *)rows + first * (int64_t)dtype_size(m->config->dtype);
}

AttentionShape model_attention_shape(const Model *m, const int32_t *doc_start) {
    const Dims *d = &m->dims;
    return (AttentionShape){.B = d->B,
                            .T = d->T,
                            .T_keys = d->T_past + d->T,
                            .H = d->H_local,
                            .KV = d->KV_local,
                            .D = d->D,
                            .ld_q = d->QKV_local,
                            .ld_kv = d->QKV_local,
                            .ld_out = d->H_local * d->D,
                            .doc_start = m->config->mask_documents ? doc_start : NULL};
}

/* Rotates queries and keys, which lie side by side, in one call. */
static void rotate(Model *m, void *qkv, const Slot *slot, bool inverse) {
    if (m->config->arch != ARCH_LLAMA) return;
    const Dims *d = &m->dims;
    rope(qkv, d->QKV_local, slot->positions, m->work.rope, inverse, d->N, d->H_local + d->KV_local, d->D,
         m->config->dtype, m->compute);
}

/* Returns the attention output, summed over tensor ranks, without its bias. */
static const void *attention_half(Model *m, const BlockTensors *w, BlockActivations *a, const Slot *slot) {
    const Dims *d = &m->dims;
    const DType dtype = m->config->dtype;
    const AttentionShape shape = model_attention_shape(m, slot->doc_start);
    const MatmulEpilogue bias = {.kind = EPILOGUE_BIAS, .bias = w->qkv_b};
    project(m, a->qkv, tensor_tokens(m, a->n1), w->qkv_w, d->C, d->QKV_local, w->qkv_b ? &bias : NULL);
    rotate(m, a->qkv, slot, false);
    char *k = columns(m, a->qkv, d->H_local * d->D - d->T_past * d->QKV_local);
    attention_forward(a->att, a->lse, a->qkv, k, columns(m, k, d->KV_local * d->D), &shape, dtype, m->compute);
    project(m, m->work.partial, a->att, w->out_w, d->H_local * d->D, d->C, NULL);
    return tensor_sum(m);
}

/* Returns the MLP output, summed over tensor ranks, without its bias. */
static const void *mlp_half(Model *m, const BlockTensors *w, BlockActivations *a) {
    const Dims *d = &m->dims;
    const void *n2 = tensor_tokens(m, a->n2);
    if (m->config->arch == ARCH_GPT) {
        const MatmulEpilogue gelu = {.kind = EPILOGUE_BIAS_GELU, .bias = w->up_b, .aux = a->pre};
        project(m, a->act, n2, w->up_w, d->C, d->F_local, &gelu);
    } else {
        project(m, a->pre, n2, w->up_w, d->C, d->up_columns, NULL);
        swiglu_forward(a->act, a->pre, d->N, d->F_local, m->config->dtype, m->compute);
    }
    project(m, m->work.partial, a->act, w->down_w, d->F_local, d->C, NULL);
    return tensor_sum(m);
}

const void *block_forward(Model *m, const BlockTensors *w, BlockActivations *a, const Slot *slot, const void *x,
                          const void *delta, const void *delta_bias) {
    const Dims *d = &m->dims;
    const double eps = m->config->norm_eps;
    const DType dtype = m->config->dtype;
    const NormKind kind = model_norm_kind(m);
    residual_norm_forward(a->x, a->n1, a->mean1, a->rstd1, x, delta, delta_bias, w->norm1_w, w->norm1_b, kind, eps,
                          d->N_local, d->C, dtype, m->compute);
    const void *attention = attention_half(m, w, a, slot);
    residual_norm_forward(a->x_mid, a->n2, a->mean2, a->rstd2, a->x ? a->x : x, attention, w->out_b, w->norm2_w,
                          w->norm2_b, kind, eps, d->N_local, d->C, dtype, m->compute);
    return mlp_half(m, w, a);
}

/* Adds into dx the gradient that reaches the middle of the block through the MLP. */
static void mlp_backward(Model *m, const BlockTensors *w, const BlockTensors *dw, BlockActivations *a, void *dx) {
    const Dims *d = &m->dims;
    const DType dtype = m->config->dtype;
    if (dw->down_b) bias_backward(dw->down_b, dx, d->C, d->N_local, d->C, dtype, m->compute);
    const void *dout = tensor_tokens(m, dx);
    project_weight_gradient(m, dw->down_w, dout, a->act, d->F_local, d->C);
    void *dpre = m->work.dwide;
    if (m->config->arch == ARCH_GPT) {
        const MatmulEpilogue dgelu = {.kind = EPILOGUE_DGELU, .aux = a->pre};
        project_input_gradient(m, dpre, dout, w->down_w, d->F_local, d->C, &dgelu);
        bias_backward(dw->up_b, dpre, d->F_local, d->N, d->F_local, dtype, m->compute);
    } else {
        project_input_gradient(m, m->work.dwide, dout, w->down_w, d->F_local, d->C, NULL);
        /* The activations before SwiGLU are read here for the last time: their gradient takes their place. */
        dpre = a->pre;
        swiglu_backward(dpre, m->work.dwide, a->pre, d->N, d->F_local, dtype, m->compute);
    }
    project_weight_gradient(m, dw->up_w, dpre, tensor_tokens(m, a->n2), d->C, d->up_columns);
    project_input_gradient(m, m->work.partial, dpre, w->up_w, d->C, d->up_columns, NULL);
    norm_backward(dx, dw->norm2_w, dw->norm2_b, tensor_sum(m), a->x_mid, w->norm2_w, a->mean2, a->rstd2,
                  model_norm_kind(m), d->N_local, d->C, m->work.norm, dtype, m->compute);
}

static void attention_half_backward(Model *m, const BlockTensors *w, const BlockTensors *dw, BlockActivations *a,
                                    const Slot *slot, const void *x, void *dx) {
    const Dims *d = &m->dims;
    const DType dtype = m->config->dtype;
    const AttentionShape shape = model_attention_shape(m, slot->doc_start);
    const int64_t heads = d->H_local * d->D, k = heads, v = heads + d->KV_local * d->D;
    if (dw->out_b) bias_backward(dw->out_b, dx, d->C, d->N_local, d->C, dtype, m->compute);
    const void *dout = tensor_tokens(m, dx);
    project_weight_gradient(m, dw->out_w, dout, a->att, heads, d->C);
    project_input_gradient(m, m->work.dwide, dout, w->out_w, heads, d->C, NULL);
    void *dqkv = m->work.dqkv;
    attention_backward(dqkv, columns(m, dqkv, k), columns(m, dqkv, v), m->work.dwide, a->qkv, columns(m, a->qkv, k),
                       columns(m, a->qkv, v), a->att, a->lse, &shape, m->work.attention, dtype, m->compute);
    rotate(m, dqkv, slot, true);
    if (dw->qkv_b) bias_backward(dw->qkv_b, dqkv, d->QKV_local, d->N, d->QKV_local, dtype, m->compute);
    project_weight_gradient(m, dw->qkv_w, dqkv, tensor_tokens(m, a->n1), d->C, d->QKV_local);
    project_input_gradient(m, m->work.partial, dqkv, w->qkv_w, d->C, d->QKV_local, NULL);
    norm_backward(dx, dw->norm1_w, dw->norm1_b, tensor_sum(m), a->x ? a->x : x, w->norm1_w, a->mean1, a->rstd1,
                  model_norm_kind(m), d->N_local, d->C, m->work.norm, dtype, m->compute);
}

void block_backward(Model *m, const BlockTensors *w, const BlockTensors *dw, BlockActivations *a, const Slot *slot,
                    const void *x, void *dx) {
    mlp_backward(m, w, dw, a, dx);
    attention_half_backward(m, w, dw, a, slot, x, dx);
}
