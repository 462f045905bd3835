/* optimizer.h - learning rate, clipping, AdamW and SGD over the flat parameters. */
#ifndef TRIDENT_TRAIN_OPTIMIZER_H
#define TRIDENT_TRAIN_OPTIMIZER_H

#include "base/arena.h"
#include "base/device.h"
#include "train/config.h"
#include "train/tensors.h"

/* An optimizer keeps `states` flat arrays as long as the parameters. */
typedef struct {
    const Config *config;
    int states;                 /* adamw: 2 (m, v); sgd: 1 (momentum) */
    const char *state_names[2]; /* "adam_m", "adam_v"; "momentum": prefixes in checkpoints */
    void *state[2];
} Optimizer;

/* config must outlive the optimizer. */
void optimizer_init(Optimizer *optimizer, const Config *config);
/* Takes the state from the arena: called twice, for the plan and for the memory. */
void optimizer_take(Optimizer *optimizer, Arena *arena, const TensorTable *tensors);
void optimizer_zero(Optimizer *optimizer, const TensorTable *tensors, Stream *stream);

/* Learning rate of the update number `update` (from 0): linear warm-up (update + 1) / warmup_steps, then
 * constant, cosine (Loshchilov and Hutter 2017), linear, or constant with a linear end over decay_steps
 * (WSD: Hu et al. 2024) down to min_lr at the end of the run; scaled with the batch by lr_scaling
 * (linear: Goyal et al. 2017). A total function of its arguments. */
double learning_rate(const Config *config, int64_t update);

/* update: number of updates done before this one. grad_scale: the gradients are multiplied by it first. */
void optimizer_step(Optimizer *optimizer, const TensorTable *tensors, void *params, const void *grads, int64_t update,
                    double lr, double grad_scale, Stream *stream);

/* This rank's part of the squared gradient norm of one model replica: each element counted once. */
double gradient_squared_norm(const TensorTable *tensors, const void *grads, DType dtype, Stream *stream);

#endif
