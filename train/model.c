/* model.c - one piece of the pipeline: embedding, blocks, final norm and loss, forward and backward.
 * In: batches and the activations or gradients of the neighbouring piece. Out: the same for the other
 * neighbour, gradients of this rank's parameters, loss sums. */
#include "train/model.h"

#include <string.h>

#include "base/check.h"
#include "train/model_internal.h"

void model_begin_step(Model *m) {
    if (m->grads) {
        device_zero(m->grads, (size_t)m->tensors.n_elements * dtype_size(m->config->dtype), m->compute);
    }
    m->loss_sum = 0.0;
    m->loss_tokens = 0;
}

void model_set_batch(Model *m, int slot_index, const Batch *batch) {
    REQUIRE(batch->sequences == m->dims.B);
    Slot *slot = &m->slots[slot_index];
    const size_t bytes = (size_t)m->dims.N * sizeof(int32_t);
    device_copy(slot->tokens, batch->tokens, bytes, m->compute);
    device_copy(slot->targets, batch->targets, bytes, m->compute);
    device_copy(slot->positions, batch->positions, bytes, m->compute);
    device_copy(slot->doc_start, batch->doc_start, bytes, m->compute);
}

/* Positions of this rank's own tokens. */
static const int32_t *own_positions(const Model *m, const Slot *slot) {
    int64_t first = m->config->sequence_parallel_on ? m->grid->index[DIM_TENSOR] * m->dims.N_local : 0;
    return slot->positions + first;
}

static void embed(Model *m, Slot *slot) {
    const Dims *d = &m->dims;
    const DType dtype = m->config->dtype;
    embedding_forward(m->work.partial, slot->tokens, m->embed_w, d->vocab, d->N, d->C, dtype, m->compute);
    const void *x = tensor_sum(m);
    device_copy(slot->x_embed, x, (size_t)(d->N_local * d->C) * dtype_size(dtype), m->compute);
    if (m->positions_w) {
        position_forward(slot->x_embed, own_positions(m, slot), m->positions_w, d->N_local, d->C, dtype, m->compute);
    }
}

void model_forward(Model *m, int slot_index, const void *input, void *output) {
    const Dims *d = &m->dims;
    Slot *slot = &m->slots[slot_index];
    if (m->first) embed(m, slot);
    const void *x = m->first ? slot->x_embed : input;
    const void *delta = NULL, *bias = NULL;
    for (int64_t l = 0; l < m->layers.count; l++) {
        delta = block_forward(m, &m->blocks[l], &slot->blocks[l], slot, x, delta, bias);
        x = slot->blocks[l].x_mid;
        bias = m->blocks[l].down_b;
    }
    if (m->last) {
        residual_norm_forward(slot->x_final, slot->n_final, slot->mean_final, slot->rstd_final, x, delta, bias,
                              m->final_w, m->final_b, model_norm_kind(m), m->config->norm_eps, d->N_local, d->C,
                              m->config->dtype, m->compute);
    } else {
        residual_add(output, x, delta, bias, d->N_local, d->C, m->config->dtype, m->compute);
    }
}

void model_loss(Model *m, int slot) {
    REQUIRE(m->last);
    head_run(m, &m->slots[slot], false, 0.0);
}

/* Loss and its gradient at the input of the final norm, into dx. */
static void head_backward(Model *m, const Slot *slot, void *dx, double grad_scale) {
    const Dims *d = &m->dims;
    head_run(m, slot, true, grad_scale);
    const void *dn = tensor_sum(m);
    device_zero(dx, (size_t)(d->N_local * d->C) * dtype_size(m->config->dtype), m->compute);
    norm_backward(dx, m->dfinal_w, m->dfinal_b, dn, slot->x_final, m->final_w, slot->mean_final, slot->rstd_final,
                  model_norm_kind(m), d->N_local, d->C, m->work.norm, m->config->dtype, m->compute);
}

static void embed_backward(Model *m, const Slot *slot, const void *dx) {
    const Dims *d = &m->dims;
    if (m->dpositions_w) {
        position_backward(m->dpositions_w, dx, own_positions(m, slot), d->T, d->N_local, d->C, m->config->dtype,
                          m->compute);
    }
    embedding_backward(m->dembed_w, tensor_tokens(m, dx), slot->tokens, d->vocab, d->N, d->C, m->config->dtype,
                       m->compute);
}

void model_backward(Model *m, int slot_index, const void *input, void *dout, void *dinput, double grad_scale) {
    const Dims *d = &m->dims;
    Slot *slot = &m->slots[slot_index];
    void *dx = dinput ? dinput : m->work.dx;
    if (m->last) {
        head_backward(m, slot, dx, grad_scale);
    } else {
        device_copy(dx, dout, (size_t)(d->N_local * d->C) * dtype_size(m->config->dtype), m->compute);
    }
    const void *piece_input = m->first ? slot->x_embed : input;
    for (int64_t l = m->layers.count - 1; l >= 0; l--) {
        const void *x = l ? slot->blocks[l].x : piece_input;
        block_backward(m, &m->blocks[l], &m->dblocks[l], &slot->blocks[l], slot, x, dx);
    }
    if (m->first) embed_backward(m, slot, dx);
}

/* Key and value gradients of heads that several tensor ranks share. k and v lie next to each other. */
static void sum_shared_heads(Model *m) {
    static const char *const parts[2][2] = {{"attn.k.weight", "attn.v.weight"}, {"attn.k.bias", "attn.v.bias"}};
    const int kinds = m->config->arch == ARCH_GPT ? 2 : 1;
    for (int64_t l = 0; l < m->layers.count; l++) {
        for (int kind = 0; kind < kinds; kind++) {
            char k_name[64], v_name[64];
            tensor_name(k_name, m->layers.first + l, parts[kind][0]);
            tensor_name(v_name, m->layers.first + l, parts[kind][1]);
            const Tensor *k = tensor_find(&m->tensors, k_name), *v = tensor_find(&m->tensors, v_name);
            REQUIRE(v->offset == k->offset + k->count);
            char *grads = (char *)m->grads + k->offset * (int64_t)dtype_size(m->config->dtype);
            comm_all_reduce(m->groups.kv_sharers, grads, k->count + v->count, m->config->dtype, COMM_SUM, m->compute);
        }
    }
}

void model_finish_gradients(Model *m) {
    const DType dtype = m->config->dtype;
    if (m->config->sequence_parallel_on) {
        comm_all_reduce(m->groups.tensor, m->grads, m->tensors.n_tensor_summed, dtype, COMM_SUM, m->compute);
    }
    if (m->groups.kv_sharers) sum_shared_heads(m);
    if (m->groups.embedding) {
        const Tensor *t = tensor_find(&m->tensors, "embed.weight");
        char *grads = (char *)m->grads + t->offset * (int64_t)dtype_size(dtype);
        comm_all_reduce(m->groups.embedding, grads, t->count, dtype, COMM_SUM, m->compute);
    }
}
