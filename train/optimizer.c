/* optimizer.c - learning-rate schedule, squared norm, and the update of every tensor.
 * In: reduced gradients. Out: parameters and optimizer state.
 * Invariant: a skipped step calls nothing here, so no counter moves. */
#include "train/optimizer.h"

#include <math.h>

#include "base/check.h"
#include "kernels/kernels.h"

void optimizer_init(Optimizer *optimizer, const Config *config) {
    const bool adamw = config->optimizer == OPTIMIZER_ADAMW;
    *optimizer = (Optimizer){.config = config,
                             .states = adamw ? 2 : 1,
                             .state_names = {adamw ? "adam_m" : "momentum", adamw ? "adam_v" : NULL}};
}

static size_t state_bytes(const Optimizer *optimizer, const TensorTable *tensors) {
    return (size_t)tensors->n_elements * dtype_size(optimizer->config->dtype);
}

void optimizer_take(Optimizer *optimizer, Arena *arena, const TensorTable *tensors) {
    for (int i = 0; i < optimizer->states; i++) {
        optimizer->state[i] = arena_take(arena, OWNER_OPTIMIZER, "run", state_bytes(optimizer, tensors), "%s",
                                         optimizer->state_names[i]);
    }
}

void optimizer_zero(Optimizer *optimizer, const TensorTable *tensors, Stream *stream) {
    for (int i = 0; i < optimizer->states; i++) {
        device_zero(optimizer->state[i], state_bytes(optimizer, tensors), stream);
    }
}

static double batch_factor(const Config *c) {
    if (c->lr_scaling == LR_SCALING_NONE) return 1.0;
    double ratio = (double)c->global_batch / (double)c->base_batch;
    return c->lr_scaling == LR_SCALING_LINEAR ? ratio : sqrt(ratio);
}

/* Part of the way from lr (0) to min_lr (1). */
static double decay_progress(const Config *c, int64_t update) {
    int64_t first = c->decay == DECAY_WSD ? c->total_steps - c->decay_steps : c->warmup_steps;
    int64_t length = c->total_steps - first;
    if (c->decay == DECAY_CONSTANT || length <= 0 || update < first) return 0.0;
    double progress = (double)(update - first) / (double)length;
    return progress < 1.0 ? progress : 1.0;
}

double learning_rate(const Config *c, int64_t update) {
    const double factor = batch_factor(c);
    if (update < c->warmup_steps) return factor * c->lr * (double)(update + 1) / (double)c->warmup_steps;
    double progress = decay_progress(c, update);
    double remaining = c->decay == DECAY_COSINE ? 0.5 * (1.0 + cos(M_PI * progress)) : 1.0 - progress;
    return factor * (c->min_lr + (c->lr - c->min_lr) * remaining);
}

static char *element(const void *flat, int64_t offset, DType dtype) {
    return (char *)(uintptr_t)flat + offset * (int64_t)dtype_size(dtype);
}

void optimizer_step(Optimizer *o, const TensorTable *tensors, void *params, const void *grads, int64_t update,
                    double lr, double grad_scale, Stream *stream) {
    const Config *c = o->config;
    const DType dtype = c->dtype;
    AdamwStep step = {.lr = lr,
                      .beta1 = c->beta1,
                      .beta2 = c->beta2,
                      .eps = c->eps,
                      .grad_scale = grad_scale,
                      .bias_correction1 = 1.0 - pow(c->beta1, (double)(update + 1)),
                      .bias_correction2 = 1.0 - pow(c->beta2, (double)(update + 1))};
    for (int i = 0; i < tensors->n; i++) {
        const Tensor *t = &tensors->list[i];
        void *p = element(params, t->offset, dtype), *m = element(o->state[0], t->offset, dtype);
        const void *g = element(grads, t->offset, dtype);
        const double decay = t->decay ? c->weight_decay : 0.0;
        if (c->optimizer == OPTIMIZER_ADAMW) {
            step.weight_decay = decay;
            adamw_step(p, m, element(o->state[1], t->offset, dtype), g, &step, t->count, dtype, stream);
        } else {
            sgd_step(p, m, g, lr, c->beta1, decay, grad_scale, t->count, dtype, stream);
        }
    }
}

double gradient_squared_norm(const TensorTable *tensors, const void *grads, DType dtype, Stream *stream) {
    double sum = 0.0;
    for (int i = 0; i < tensors->n; i++) {
        const Tensor *t = &tensors->list[i];
        if (t->counted) squared_norm(&sum, element(grads, t->offset, dtype), t->count, dtype, stream);
    }
    return sum;
}
