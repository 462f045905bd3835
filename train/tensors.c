/* tensors.c - builds the tensor table of one rank.
 * In: config, grid, the layers of this stage. Out: TensorTable.
 * Invariants: tensors that one matrix product reads together (q, k, v; gate, up) lie next to each
 * other in the flat arrays without a gap; all others start at a multiple of 16 elements. */
#include "train/tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/rng.h"

enum { FLAT_ALIGNMENT = 16 };

typedef struct {
    const Config *config;
    const Grid *grid;
    TensorTable *table;
    int ranks, rank; /* of the tensor dimension */
    bool *joined;    /* tensor i follows tensor i - 1 without a gap */
    int capacity;
} Builder;

void tensor_name(char name[64], int64_t layer, const char *part) {
    snprintf(name, 64, "blocks.%lld.%s", (long long)layer, part);
}

static Tensor *add(Builder *b, const char *name, int64_t rows, int64_t columns, int split) {
    TensorTable *table = b->table;
    if (table->n == b->capacity) {
        b->capacity = b->capacity ? 2 * b->capacity : 64;
        table->list = xrealloc(table->list, (uint64_t)b->capacity * sizeof *table->list);
        b->joined = xrealloc(b->joined, (uint64_t)b->capacity * sizeof *b->joined);
    }
    b->joined[table->n] = false;
    Tensor *t = &table->list[table->n++];
    *t = (Tensor){
        .dims = columns > 0 ? 2 : 1, .shape = {rows, columns > 0 ? columns : 1}, .split = split, .sharers = 1};
    snprintf(t->name, sizeof t->name, "%s", name);
    t->local[0] = t->shape[0];
    t->local[1] = t->shape[1];
    t->part = (Range){0, t->shape[0]};
    if (split != SPLIT_NONE) {
        t->part = share_of(t->shape[split], b->ranks, b->rank);
        t->local[split] = t->part.count;
    }
    bool sequence_parallel = b->config->sequence_parallel_on;
    t->sum_over_tensor = split == SPLIT_NONE && sequence_parallel;
    t->counted = split != SPLIT_NONE || b->rank == 0;
    t->decay = t->dims == 2;
    t->init = t->dims == 2 ? INIT_NORMAL : INIT_ZERO;
    t->init_std = b->config->init_std;
    return t;
}

static void join(Builder *b) { b->joined[b->table->n - 1] = true; }

/* A table over the vocabulary: every rank stores the same number of rows. */
static Tensor *add_vocabulary(Builder *b, const char *name) {
    Tensor *t = add(b, name, b->config->vocab, b->config->hidden, SPLIT_ROWS);
    t->part = vocab_share(b->config->vocab, b->ranks, b->rank);
    t->local[0] = ceil_div(b->config->vocab, b->ranks);
    return t;
}

/* weight_name, bias_name: of the norm; the bias exists for gpt only. */
static void add_norm(Builder *b, const char *weight_name, const char *bias_name) {
    add(b, weight_name, b->config->hidden, 0, SPLIT_NONE)->init = INIT_ONE;
    if (b->config->arch == ARCH_GPT) add(b, bias_name, b->config->hidden, 0, SPLIT_NONE);
}

static void add_block_norm(Builder *b, int64_t layer, const char *weight_part, const char *bias_part) {
    char weight[64], bias[64];
    tensor_name(weight, layer, weight_part);
    tensor_name(bias, layer, bias_part);
    add_norm(b, weight, bias);
}

/* Rows of heads [first, first + count) of D each; k and v may be shared by several ranks. */
static void add_heads(Builder *b, int64_t layer, const char *part, int64_t heads, int64_t columns, bool joined) {
    char name[64];
    tensor_name(name, layer, part);
    const int64_t D = b->config->hidden / b->config->heads;
    Tensor *t = add(b, name, heads * D, columns, SPLIT_ROWS);
    if (heads < b->ranks) {
        Range share = kv_share(heads, b->ranks, b->rank);
        t->sharers = (int)(b->ranks / heads);
        t->part = (Range){share.first * D, share.count * D};
        t->local[0] = t->part.count;
        t->counted = b->rank % t->sharers == 0;
    }
    if (joined) join(b);
}

static void add_row_parallel(Builder *b, int64_t layer, const char *part, int64_t inputs) {
    char name[64];
    const Config *c = b->config;
    tensor_name(name, layer, part);
    Tensor *t = add(b, name, c->hidden, inputs, SPLIT_COLUMNS);
    /* GPT-2's residual scaling: each block adds two terms to the residual stream. */
    t->init_std = c->init_std * 0.70710678118654752440 / __builtin_sqrt((double)c->layers);
}

static void add_bias(Builder *b, int64_t layer, const char *part, int64_t rows, int split) {
    char name[64];
    tensor_name(name, layer, part);
    add(b, name, rows, 0, split);
}

static void add_block(Builder *b, int64_t layer) {
    const Config *c = b->config;
    const bool gpt = c->arch == ARCH_GPT;
    char name[64];
    add_block_norm(b, layer, "norm1.weight", "norm1.bias");
    add_heads(b, layer, "attn.q.weight", c->heads, c->hidden, false);
    add_heads(b, layer, "attn.k.weight", c->kv_heads, c->hidden, true);
    add_heads(b, layer, "attn.v.weight", c->kv_heads, c->hidden, true);
    if (gpt) {
        add_heads(b, layer, "attn.q.bias", c->heads, 0, false);
        add_heads(b, layer, "attn.k.bias", c->kv_heads, 0, true);
        add_heads(b, layer, "attn.v.bias", c->kv_heads, 0, true);
    }
    add_row_parallel(b, layer, "attn.out.weight", c->hidden);
    if (gpt) add_bias(b, layer, "attn.out.bias", c->hidden, SPLIT_NONE);
    add_block_norm(b, layer, "norm2.weight", "norm2.bias");
    if (!gpt) {
        tensor_name(name, layer, "mlp.gate.weight");
        add(b, name, c->ffn, c->hidden, SPLIT_ROWS);
    }
    tensor_name(name, layer, "mlp.up.weight");
    add(b, name, c->ffn, c->hidden, SPLIT_ROWS);
    if (!gpt) join(b);
    if (gpt) add_bias(b, layer, "mlp.up.bias", c->ffn, SPLIT_ROWS);
    add_row_parallel(b, layer, "mlp.down.weight", c->ffn);
    if (gpt) add_bias(b, layer, "mlp.down.bias", c->hidden, SPLIT_NONE);
}

/* Offsets: first all that are summed over the tensor ranks, so that one collective sums them. */
static void place(Builder *b) {
    TensorTable *table = b->table;
    int64_t at = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < table->n; i++) {
            Tensor *t = &table->list[i];
            if (t->sum_over_tensor != (pass == 0)) continue;
            t->count = t->local[0] * t->local[1];
            if (!b->joined[i]) at = round_up(at, FLAT_ALIGNMENT);
            t->offset = at;
            at += t->count;
        }
        at = round_up(at, FLAT_ALIGNMENT);
        if (pass == 0) table->n_tensor_summed = at;
    }
    table->n_elements = at;
}

TensorTable tensor_table_make(const Config *config, const Grid *grid, const Range *layers, int chunks, bool has_embed,
                              bool has_head) {
    TensorTable table = {0};
    Builder b = {.config = config,
                 .grid = grid,
                 .table = &table,
                 .ranks = grid->size[DIM_TENSOR],
                 .rank = grid->index[DIM_TENSOR]};
    if (has_embed) {
        add_vocabulary(&b, "embed.weight");
        if (config->arch == ARCH_GPT) {
            add(&b, "positions.weight", config->seq_len, config->hidden, SPLIT_NONE);
        }
    }
    for (int chunk = 0; chunk < chunks; chunk++) {
        for (int64_t l = 0; l < layers[chunk].count; l++) add_block(&b, layers[chunk].first + l);
    }
    if (has_head) {
        add_norm(&b, "final_norm.weight", "final_norm.bias");
        if (!config->tie_embeddings) {
            add_vocabulary(&b, "head.weight");
        } else if (!has_embed) {
            Tensor *copy = add_vocabulary(&b, "embed.weight");
            copy->tied_copy = true;
            copy->counted = false;
        }
    }
    place(&b);
    free(b.joined);
    return table;
}

void tensor_table_free(TensorTable *table) {
    free(table->list);
    *table = (TensorTable){0};
}

const Tensor *tensor_find(const TensorTable *table, const char *name) {
    for (int i = 0; i < table->n; i++) {
        if (strcmp(table->list[i].name, name) == 0) return &table->list[i];
    }
    die(EXIT_INTERNAL, "no tensor named %s on this rank", name);
}

int64_t model_parameters(const Config *c) {
    const int64_t C = c->hidden, D = C / c->heads, kv = c->kv_heads * D;
    const bool gpt = c->arch == ARCH_GPT;
    int64_t attention = C * C + 2 * kv * C + C * C, norm = gpt ? 2 * C : C;
    int64_t mlp = (gpt ? 2 : 3) * C * c->ffn;
    int64_t biases = gpt ? C + 2 * kv + C + c->ffn + C : 0;
    int64_t tables = c->vocab * C * (c->tie_embeddings ? 1 : 2) + (gpt ? c->seq_len * C : 0);
    return tables + c->layers * (attention + mlp + biases + 2 * norm) + norm;
}

int64_t tensor_real_count(const Tensor *t) {
    if (t->split == SPLIT_NONE) return t->count;
    return t->part.count * t->local[1 - t->split];
}

void tensor_init(const Tensor *t, uint64_t seed, DType dtype, void *flat) {
    char stream_name[80];
    snprintf(stream_name, sizeof stream_name, "init/%s", t->name);
    const uint64_t stream = rng_stream(stream_name);
    const int64_t first_row = t->split == SPLIT_ROWS ? t->part.first : 0;
    const int64_t first_column = t->split == SPLIT_COLUMNS ? t->part.first : 0;
    const int64_t real_rows = t->split == SPLIT_ROWS ? t->part.count : t->local[0];
    for (int64_t r = 0; r < t->local[0]; r++) {
        for (int64_t c = 0; c < t->local[1]; c++) {
            double value = 0.0;
            if (r < real_rows && t->init == INIT_ONE) value = 1.0;
            if (r < real_rows && t->init == INIT_NORMAL) {
                int64_t index = (first_row + r) * t->shape[1] + first_column + c;
                value = t->init_std * rng_normal(seed, stream, (uint64_t)index);
            }
            int64_t at = t->offset + r * t->local[1] + c;
            if (dtype == DT_F64) {
                ((double *)flat)[at] = value;
            } else {
                ((float *)flat)[at] = (float)value;
            }
        }
    }
}
