/* pipeline.h - runs the schedule of this rank's stage: model + communication. */
#ifndef TRIDENT_TRAIN_PIPELINE_H
#define TRIDENT_TRAIN_PIPELINE_H

#include "base/arena.h"
#include "data/source.h"
#include "parallel/schedule.h"
#include "train/model.h"

/* Where micro-batches come from: next gives the following one, valid until the next call, or NULL with
 * err. */
typedef struct {
    const Batch *(*next)(void *context, Error *err);
    void *context;
} BatchSource;

/* Buffers of one direction and the events that guard them. filled: recorded by whoever fills the buffer
 * (a receive lane or the compute stream), waited for by whoever reads it. freed: recorded by the
 * reader, waited for before the buffer is filled again. */
typedef struct {
    int n;
    void **buffer; /* (N_local, C) each */
    Event **filled, **freed;
} BufferRing;

typedef struct {
    Model *model;
    const Schedule *schedule;
    Comm *comm;
    Stream *compute, *lanes[LANE_COUNT]; /* lanes[LANE_COMPUTE] is compute */
    BufferRing inputs, outputs, grad_inputs, grad_outputs;
    Event *grads_ready;   /* recorded: compute, after the sums over tensor ranks; waited: data lane */
    Event *grads_reduced; /* recorded: data lane, after the sum over data ranks; waited: compute */
    int64_t step;         /* for the watchdog's phase */
} Pipeline;

/* All that is passed must outlive the pipeline. comm: NULL for one rank. lanes: (LANE_COUNT). */
void pipeline_init(Pipeline *pipeline, Model *model, const Schedule *schedule, Comm *comm, Stream *const *lanes);
/* Takes the buffers between stages from the arena: called twice, for the plan and for the memory. */
void pipeline_take(Pipeline *pipeline, Arena *arena);
void pipeline_free(Pipeline *pipeline);

/* One training step's forward and backward passes over all micro-batches, and the reduction of gradients.
 * At return (in the order of the compute stream) the flat gradients hold the sum over the global
 * batch. Dies with the source's error. */
void pipeline_train(Pipeline *pipeline, const BatchSource *source, double grad_scale);
/* Forward passes only, of n micro-batches; loss sums are in the model (last stage). */
void pipeline_evaluate(Pipeline *pipeline, const BatchSource *source, int64_t n);

#endif
