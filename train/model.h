/* model.h - one rank's share of the transformer: its parameters, activations and workspace, and the
 * forward and backward pass of one piece (the layers of one chunk of one stage) on one micro-batch.
 *
 * Letters: B sequences of a micro-batch, T tokens of a sequence, N = B x T, C hidden, D head size,
 * F feed-forward size, V vocabulary. _local is this rank's share; N_local = N / tensor under sequence
 * parallelism (each tensor rank keeps the residual stream and the norms of its own tokens), else N. */
#ifndef TRIDENT_TRAIN_MODEL_H
#define TRIDENT_TRAIN_MODEL_H

#include "base/arena.h"
#include "data/source.h"
#include "kernels/kernels.h"
#include "parallel/comm.h"
#include "parallel/grid.h"
#include "parallel/partition.h"
#include "parallel/schedule.h"
#include "train/config.h"
#include "train/tensors.h"

typedef struct {
    int64_t B, T, N, N_local, C, D;
    int64_t T_past; /* tokens of the sequence before these rows, kept in the rows before (generation); else 0 */
    int64_t H_local, KV_local;
    int64_t QKV_local; /* (H_local + 2 KV_local) * D: columns of the fused query, key, value product */
    int64_t F_local;
    int64_t up_columns; /* F_local for gpt, 2 F_local = [gate | up] for llama */
    int64_t V_local;    /* rows of the vocabulary tables stored here, with padding */
    Range vocab;        /* the real ones, global ids */
    int64_t head_rows;  /* tokens of one chunk of the loss head */
} Dims;

/* The parameters of one block, or their gradients. NULL where the architecture has none. */
typedef struct {
    void *norm1_w, *norm1_b; /* (C)                     same on all tensor ranks */
    void *qkv_w, *qkv_b;     /* (QKV_local, C)          heads split over tensor ranks */
    void *out_w, *out_b;     /* (C, H_local * D), (C)   columns split; bias the same on all */
    void *norm2_w, *norm2_b; /* (C) */
    void *up_w, *up_b;       /* (up_columns, C)         rows split */
    void *down_w, *down_b;   /* (C, F_local), (C)       columns split; bias the same on all */
} BlockTensors;

/* What one block keeps of a micro-batch from forward to backward. */
typedef struct {
    void *x;                  /* (N_local, C) block input; NULL in the first block of a piece: the piece's input */
    void *mean1, *rstd1, *n1; /* (N_local), (N_local), (N_local, C) */
    void *qkv;                /* (N, QKV_local) after RoPE */
    void *att, *lse;          /* (N, H_local * D), (B, H_local, T) */
    void *x_mid;              /* (N_local, C) after attention */
    void *mean2, *rstd2, *n2;
    void *pre; /* (N, up_columns) before the activation function */
    void *act; /* (N, F_local) */
} BlockActivations;

/* Everything of one micro-batch in flight. */
typedef struct {
    int32_t *tokens, *targets, *positions, *doc_start; /* (N) */
    BlockActivations *blocks;                          /* all blocks of the stage, chunk after chunk; owned */
    void *x_embed;                                     /* (N_local, C) first piece only */
    void *x_final, *mean_final, *rstd_final, *n_final; /* last piece only */
} Slot;

typedef struct {
    void *gathered;          /* (N, C) all tokens of a norm's output, or of the residual gradient (sequence parallel) */
    void *partial;           /* (N, C) this rank's term of a sum over tensor ranks */
    void *reduced;           /* (N_local, C) that sum, own tokens (sequence parallel; else partial itself) */
    void *dx;                /* (N_local, C) gradient of the residual stream where no send buffer serves */
    void *dwide;             /* (N, max(F_local, H_local * D)) */
    void *dqkv;              /* (N, QKV_local) */
    void *norm, *attention;  /* workspace of the kernels */
    void *logits;            /* (head_rows, V_local) */
    void *stats;             /* (tensor, head_rows, 3) */
    void *head_lse, *losses; /* (head_rows) */
    void *rope;              /* (T, D / 2, 2) */
} Workspace;

typedef struct {
    Group *tensor, *pipeline, *data, *world;
    Group *embedding;  /* first and last stage where both hold the tied embedding, else NULL */
    Group *kv_sharers; /* tensor ranks that hold the same key/value head, else NULL */
} Groups;

typedef struct {
    const Config *config;
    const Grid *grid;
    Groups groups;
    Stream *compute;
    Dims dims;
    LayerMap map;
    Range layers;     /* of this stage (one chunk) */
    bool first, last; /* holds the embedding; the head */
    TensorTable tensors;
    void *params, *grads; /* flat, tensors.n_elements each */
    BlockTensors *blocks, *dblocks;
    void *embed_w, *positions_w, *final_w, *final_b, *head_w;
    void *dembed_w, *dpositions_w, *dfinal_w, *dfinal_b, *dhead_w;
    int n_slots;
    Slot *slots;
    Workspace work;
    double loss_sum;     /* over unmasked tokens of the micro-batches since model_begin_step; last stage only */
    int64_t loss_tokens; /* how many */
} Model;

/* Dims, layer map and tensor table: no memory yet. groups may be empty (all NULL) for a plan. */
void model_init(Model *model, const Config *config, const Grid *grid, const Groups *groups, Stream *compute);
/* Takes parameters, gradients (training), activations for n_slots micro-batches and workspace from the
 * arena: called twice, for the plan and for the memory. */
void model_take(Model *model, Arena *arena, int n_slots, bool training);
/* Fills parameters with initial values and derives tables. Call after the memory is there. */
void model_fill(Model *model, bool init_parameters);
void model_free(Model *model);

/* Zeroes gradients and loss sums. */
void model_begin_step(Model *model);
/* Copies the batch into the slot. */
void model_set_batch(Model *model, int slot, const Batch *batch);
/* input: (N_local, C) from the piece before, NULL on the first; output: (N_local, C), NULL on the last. */
void model_forward(Model *model, int slot, const void *input, void *output);
/* The loss of a slot whose forward is done, added to loss_sum; no gradients. Last stage only. */
void model_loss(Model *model, int slot);
/* dout: (N_local, C), NULL on the last piece (its head gives loss and gradient, scaled by grad_scale);
 * dinput: (N_local, C), written; NULL on the first piece. input as in the forward pass. Adds into grads. */
void model_backward(Model *model, int slot, const void *input, void *dout, void *dinput, double grad_scale);
/* Sums over tensor ranks and tied copies that the backward passes left open (not over data ranks). */
void model_finish_gradients(Model *model);

/* Floating-point operations of forward and backward for one token of the whole model: 6 for each
 * matrix parameter it meets (head included, embedding look-up not) plus 6 C T L for causal attention
 * (PaLM, appendix B counts 12 for the full square; we do not compute the masked half). */
double model_flops_per_token(const Config *config);

#endif
