/* model_memory.c - sizes and memory of one rank's share of the model.
 * In: config, grid. Out: dims, tensor table, pointers into the arena.
 * Invariant: model_take asks the arena for the same buffers in the same order each time. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "train/model_internal.h"

/* Logits of one chunk of the loss head: small enough for the last-level cache, and at least so many
 * rows that reading and writing the head's weight gradient once a chunk does not matter. */
enum { HEAD_CHUNK_BYTES = 16 << 20, HEAD_ROWS_MIN = 256 };

static Dims dims_make(const Config *c, const Grid *grid) {
    const int tensor = grid->size[DIM_TENSOR], t = grid->index[DIM_TENSOR];
    Dims d = {.B = c->micro_batch, .T = c->seq_len, .C = c->hidden, .D = div_exact(c->hidden, c->heads)};
    d.N = d.B * d.T;
    d.N_local = c->sequence_parallel_on ? div_exact(d.N, tensor) : d.N;
    d.H_local = div_exact(c->heads, tensor);
    d.KV_local = kv_share(c->kv_heads, tensor, t).count;
    d.QKV_local = (d.H_local + 2 * d.KV_local) * d.D;
    d.F_local = div_exact(c->ffn, tensor);
    d.up_columns = c->arch == ARCH_GPT ? d.F_local : 2 * d.F_local;
    d.vocab = vocab_share(c->vocab, tensor, t);
    d.V_local = ceil_div(c->vocab, tensor);
    int64_t rows = HEAD_CHUNK_BYTES / (d.V_local * (int64_t)dtype_size(c->dtype));
    d.head_rows = min_i64(d.N, max_i64(rows, HEAD_ROWS_MIN));
    return d;
}

/* Loads of the embedding and the head in units of one layer, by floating-point operations. The look-up
 * itself costs next to nothing; the head is a product with the whole vocabulary. */
static double head_cost_layers(const Config *c) {
    double kv = (double)c->kv_heads / (double)c->heads;
    double per_layer = (double)c->hidden * ((2.0 + 2.0 * kv) * (double)c->hidden +
                                            (c->arch == ARCH_GPT ? 2.0 : 3.0) * (double)c->ffn + (double)c->seq_len);
    return (double)c->hidden * (double)c->vocab / per_layer;
}

void model_init(Model *model, const Config *config, const Grid *grid, const Groups *groups, Stream *compute) {
    *model = (Model){.config = config, .grid = grid, .groups = *groups, .compute = compute};
    const int stages = grid->size[DIM_PIPELINE], stage = grid->index[DIM_PIPELINE];
    model->dims = dims_make(config, grid);
    layer_map_make(&model->map, config->layers, stages, 1, 0.05, head_cost_layers(config));
    model->layers = layers_of_piece(&model->map, 0, stage);
    model->first = stage == 0;
    model->last = stage == stages - 1;
    model->tensors = tensor_table_make(config, grid, &model->layers, 1, model->first, model->last);
}

/* Address of a tensor in a flat array, or NULL where this model has no such tensor. */
static void *locate(const Model *model, void *flat, const char *name, bool exists) {
    if (!exists || !flat) return NULL;
    return (char *)flat + tensor_find(&model->tensors, name)->offset * (int64_t)dtype_size(model->config->dtype);
}

static void *locate_in_block(const Model *model, void *flat, int64_t layer, const char *part, bool exists) {
    char name[64];
    tensor_name(name, layer, part);
    return locate(model, flat, name, exists);
}

static BlockTensors block_tensors(const Model *m, void *flat, int64_t l) {
    const bool gpt = m->config->arch == ARCH_GPT;
    return (BlockTensors){
        .norm1_w = locate_in_block(m, flat, l, "norm1.weight", true),
        .norm1_b = locate_in_block(m, flat, l, "norm1.bias", gpt),
        .qkv_w = locate_in_block(m, flat, l, "attn.q.weight", true),
        .qkv_b = locate_in_block(m, flat, l, "attn.q.bias", gpt),
        .out_w = locate_in_block(m, flat, l, "attn.out.weight", true),
        .out_b = locate_in_block(m, flat, l, "attn.out.bias", gpt),
        .norm2_w = locate_in_block(m, flat, l, "norm2.weight", true),
        .norm2_b = locate_in_block(m, flat, l, "norm2.bias", gpt),
        .up_w = locate_in_block(m, flat, l, gpt ? "mlp.up.weight" : "mlp.gate.weight", true),
        .up_b = locate_in_block(m, flat, l, "mlp.up.bias", gpt),
        .down_w = locate_in_block(m, flat, l, "mlp.down.weight", true),
        .down_b = locate_in_block(m, flat, l, "mlp.down.bias", gpt),
    };
}

static void take_parameters(Model *m, Arena *arena, bool training) {
    const size_t bytes = (size_t)m->tensors.n_elements * dtype_size(m->config->dtype);
    const bool gpt = m->config->arch == ARCH_GPT;
    m->params = arena_take(arena, OWNER_PARAMETERS, "run", bytes, "parameters");
    m->grads = training ? arena_take(arena, OWNER_GRADIENTS, "step", bytes, "gradients") : NULL;
    m->embed_w = locate(m, m->params, "embed.weight", m->first);
    m->dembed_w = locate(m, m->grads, "embed.weight", m->first);
    m->positions_w = locate(m, m->params, "positions.weight", m->first && gpt);
    m->dpositions_w = locate(m, m->grads, "positions.weight", m->first && gpt);
    m->final_w = locate(m, m->params, "final_norm.weight", m->last);
    m->dfinal_w = locate(m, m->grads, "final_norm.weight", m->last);
    m->final_b = locate(m, m->params, "final_norm.bias", m->last && gpt);
    m->dfinal_b = locate(m, m->grads, "final_norm.bias", m->last && gpt);
    const char *head = m->config->tie_embeddings ? "embed.weight" : "head.weight";
    m->head_w = locate(m, m->params, head, m->last);
    m->dhead_w = locate(m, m->grads, head, m->last);
    if (!m->blocks) {
        m->blocks = xcalloc((uint64_t)m->layers.count, sizeof *m->blocks);
        m->dblocks = xcalloc((uint64_t)m->layers.count, sizeof *m->dblocks);
    }
    for (int64_t i = 0; i < m->layers.count; i++) {
        m->blocks[i] = block_tensors(m, m->params, m->layers.first + i);
        m->dblocks[i] = block_tensors(m, m->grads, m->layers.first + i);
    }
}

typedef struct {
    Arena *arena;
    size_t element, stat; /* bytes of a value, of a statistic */
    int slot;
} Taker;

static void *take_activation(const Taker *t, int64_t rows, int64_t columns, size_t element, const char *name,
                             int64_t layer) {
    return arena_take(t->arena, OWNER_ACTIVATIONS, "micro-batch", (size_t)(rows * columns) * element,
                      "slot %d layer %lld %s", t->slot, (long long)layer, name);
}

static void take_block(const Model *m, const Taker *t, BlockActivations *a, int64_t index) {
    const Dims *d = &m->dims;
    const int64_t layer = m->layers.first + index;
    const bool gpt = m->config->arch == ARCH_GPT;
    a->x = index ? take_activation(t, d->N_local, d->C, t->element, "input", layer) : NULL;
    a->mean1 = gpt ? take_activation(t, d->N_local, 1, t->stat, "norm1 mean", layer) : NULL;
    a->rstd1 = take_activation(t, d->N_local, 1, t->stat, "norm1 rstd", layer);
    a->n1 = take_activation(t, d->N_local, d->C, t->element, "norm1", layer);
    a->qkv = take_activation(t, d->N, d->QKV_local, t->element, "qkv", layer);
    a->att = take_activation(t, d->N, d->H_local * d->D, t->element, "attention", layer);
    a->lse = take_activation(t, d->N, d->H_local, t->stat, "attention lse", layer);
    a->x_mid = take_activation(t, d->N_local, d->C, t->element, "middle", layer);
    a->mean2 = gpt ? take_activation(t, d->N_local, 1, t->stat, "norm2 mean", layer) : NULL;
    a->rstd2 = take_activation(t, d->N_local, 1, t->stat, "norm2 rstd", layer);
    a->n2 = take_activation(t, d->N_local, d->C, t->element, "norm2", layer);
    a->pre = take_activation(t, d->N, d->up_columns, t->element, "mlp up", layer);
    a->act = take_activation(t, d->N, d->F_local, t->element, "mlp act", layer);
}

static void take_slot(Model *m, const Taker *t, Slot *slot) {
    const Dims *d = &m->dims;
    slot->tokens = take_activation(t, d->N, 1, sizeof(int32_t), "tokens", -1);
    slot->targets = take_activation(t, d->N, 1, sizeof(int32_t), "targets", -1);
    slot->positions = take_activation(t, d->N, 1, sizeof(int32_t), "positions", -1);
    slot->doc_start = take_activation(t, d->N, 1, sizeof(int32_t), "doc_start", -1);
    if (m->first) slot->x_embed = take_activation(t, d->N_local, d->C, t->element, "embedding", -1);
    if (!slot->blocks) slot->blocks = xcalloc((uint64_t)m->layers.count, sizeof *slot->blocks);
    for (int64_t i = 0; i < m->layers.count; i++) take_block(m, t, &slot->blocks[i], i);
    if (!m->last) return;
    slot->x_final = take_activation(t, d->N_local, d->C, t->element, "final", m->config->layers);
    if (m->config->arch == ARCH_GPT) {
        slot->mean_final = take_activation(t, d->N_local, 1, t->stat, "final mean", m->config->layers);
    }
    slot->rstd_final = take_activation(t, d->N_local, 1, t->stat, "final rstd", m->config->layers);
    slot->n_final = take_activation(t, d->N_local, d->C, t->element, "final norm", m->config->layers);
}

static void *take_work(Arena *arena, size_t bytes, const char *name) {
    return arena_take(arena, OWNER_WORKSPACE, "layer", bytes, "%s", name);
}

static void take_workspace(Model *m, Arena *arena, const Taker *t, bool training) {
    const Dims *d = &m->dims;
    const size_t e = t->element;
    const bool tensor = m->grid->size[DIM_TENSOR] > 1, sequence = m->config->sequence_parallel_on;
    Workspace *w = &m->work;
    *w = (Workspace){0};
    if (sequence) {
        w->gathered = take_work(arena, (size_t)(d->N * d->C) * e, "gathered tokens");
        w->reduced = take_work(arena, (size_t)(d->N_local * d->C) * e, "reduced tokens");
    }
    w->partial = take_work(arena, (size_t)(d->N * d->C) * e, "partial sums");
    if (m->config->arch == ARCH_LLAMA) w->rope = take_work(arena, (size_t)(d->T * d->D) * t->stat, "rope table");
    if (training) {
        const AttentionShape shape = model_attention_shape(m, NULL);
        const int64_t norm_bytes = norm_backward_workspace(model_norm_kind(m), d->N_local, d->C, m->config->dtype);
        const int64_t attention_bytes = attention_backward_workspace(&shape, m->config->dtype);
        /* Later stages make it where the stage before gets it from. */
        if (m->first) w->dx = take_work(arena, (size_t)(d->N_local * d->C) * e, "residual gradient");
        w->dwide = take_work(arena, (size_t)(d->N * max_i64(d->F_local, d->H_local * d->D)) * e, "wide gradient");
        w->dqkv = take_work(arena, (size_t)(d->N * d->QKV_local) * e, "qkv gradient");
        if (norm_bytes) w->norm = take_work(arena, (size_t)norm_bytes, "norm workspace");
        if (attention_bytes) w->attention = take_work(arena, (size_t)attention_bytes, "attention workspace");
    }
    if (m->last) {
        const size_t ranks = tensor ? (size_t)m->grid->size[DIM_TENSOR] : 1;
        w->logits = take_work(arena, (size_t)(d->head_rows * d->V_local) * e, "logits");
        w->stats = take_work(arena, ranks * (size_t)d->head_rows * 3 * t->stat, "loss statistics");
        w->head_lse = take_work(arena, (size_t)d->head_rows * t->stat, "loss lse");
        w->losses = take_work(arena, (size_t)d->head_rows * t->stat, "losses");
    }
}

void model_take(Model *model, Arena *arena, int n_slots, bool training) {
    Taker t = {.arena = arena,
               .element = dtype_size(model->config->dtype),
               .stat = dtype_size(stat_dtype(model->config->dtype))};
    take_parameters(model, arena, training);
    if (!model->slots) model->slots = xcalloc((uint64_t)n_slots, sizeof *model->slots);
    model->n_slots = n_slots;
    for (t.slot = 0; t.slot < n_slots; t.slot++) take_slot(model, &t, &model->slots[t.slot]);
    take_workspace(model, arena, &t, training);
}

void model_fill(Model *model, bool init_parameters) {
    const Config *c = model->config;
    device_zero(model->params, (size_t)model->tensors.n_elements * dtype_size(c->dtype), model->compute);
    for (int i = 0; init_parameters && i < model->tensors.n; i++) {
        tensor_init(&model->tensors.list[i], c->seed, c->dtype, model->params);
    }
    if (model->work.rope) {
        rope_table(model->work.rope, c->seq_len, model->dims.D, c->rope_theta, c->dtype, model->compute);
    }
}

void model_free(Model *model) {
    for (int i = 0; i < model->n_slots; i++) free(model->slots[i].blocks);
    free(model->slots);
    free(model->blocks);
    free(model->dblocks);
    tensor_table_free(&model->tensors);
    *model = (Model){0};
}

double model_flops_per_token(const Config *c) {
    const double C = (double)c->hidden, kv = C * (double)c->kv_heads / (double)c->heads;
    double block = 2.0 * C * C + 2.0 * C * kv + (c->arch == ARCH_GPT ? 2.0 : 3.0) * C * (double)c->ffn;
    double matrices = (double)c->layers * block + C * (double)c->vocab;
    return 6.0 * matrices + 6.0 * C * (double)c->seq_len * (double)c->layers;
}
