/* model_internal.h - what the files of the model share: memory layout, blocks, loss head. */
#ifndef TRIDENT_TRAIN_MODEL_INTERNAL_H
#define TRIDENT_TRAIN_MODEL_INTERNAL_H

#include "train/model.h"

/* "g" of Megatron-LM (Shoeybi et al. 2019, section 3) in forward, "f" in backward: sums work.partial over
 * the tensor ranks. Returns the sum: of own tokens under sequence parallelism (Korthikanti et al.
 * 2022, section 4.2), of all tokens else. Valid until the next call. */
void *tensor_sum(Model *model);
/* The counterpart: all tokens' rows of x, which holds own tokens under sequence parallelism; x itself
 * otherwise. Valid until the next call. */
const void *tensor_tokens(Model *model, const void *x);

NormKind model_norm_kind(const Model *model);
/* Of this rank's heads over a micro-batch. doc_start: (B, T) of its slot; NULL where only sizes matter. */
AttentionShape model_attention_shape(const Model *model, const int32_t *doc_start);

/* Piece input x, or what the block before left: x + delta + bias, kept in acts->x. Returns the delta of
 * this block's MLP, to be added by whoever comes next, together with the down bias. */
const void *block_forward(Model *model, const BlockTensors *w, BlockActivations *acts, const Slot *slot, const void *x,
                          const void *delta, const void *delta_bias);
/* dx (N_local, C): gradient of the block's output in, of its input out. */
void block_backward(Model *model, const BlockTensors *w, const BlockTensors *dw, BlockActivations *acts,
                    const Slot *slot, const void *x, void *dx);

/* Loss of all tokens of the slot; training: also the gradient of n_final into work.partial (to be summed by
 * tensor_sum), scaled, and of the head weight. */
void head_run(Model *model, const Slot *slot, bool training, double grad_scale);

#endif
