/* pipeline.c - the one interpreter of schedules.
 * In: Step array, batches. Out: gradients, loss sums.
 * Invariants: compute steps go to the compute stream in the order of the array; a transfer waits for
 * the event of whoever fills or frees its buffer, never for the whole device. */
#include "train/pipeline.h"

#include <stdlib.h>

#include "base/check.h"
#include "parallel/launch.h"

static void ring_init(BufferRing *ring, int n, const char *name) {
    ring->n = n;
    ring->buffer = xcalloc((uint64_t)n, sizeof *ring->buffer);
    ring->filled = xcalloc((uint64_t)n, sizeof *ring->filled);
    ring->freed = xcalloc((uint64_t)n, sizeof *ring->freed);
    for (int i = 0; i < n; i++) {
        ring->filled[i] = event_create(name);
        ring->freed[i] = event_create(name);
    }
}

static void ring_take(BufferRing *ring, Arena *arena, size_t bytes, const char *name) {
    for (int i = 0; i < ring->n; i++) {
        ring->buffer[i] = arena_take(arena, OWNER_COMMUNICATION, "micro-batch", bytes, "%s %d", name, i);
    }
}

static void ring_free(BufferRing *ring) {
    for (int i = 0; i < ring->n; i++) {
        event_destroy(ring->filled[i]);
        event_destroy(ring->freed[i]);
    }
    free(ring->buffer);
    free(ring->filled);
    free(ring->freed);
}

void pipeline_init(Pipeline *p, Model *model, const Schedule *schedule, Comm *comm, Stream *const *lanes) {
    *p = (Pipeline){.model = model, .schedule = schedule, .comm = comm, .compute = lanes[LANE_COMPUTE]};
    for (int lane = 0; lane < LANE_COUNT; lane++) p->lanes[lane] = lanes[lane];
    ring_init(&p->inputs, schedule->input_buffers, "pipeline input");
    ring_init(&p->outputs, schedule->output_buffers, "pipeline output");
    ring_init(&p->grad_inputs, schedule->grad_input_buffers, "pipeline gradient in");
    ring_init(&p->grad_outputs, schedule->grad_output_buffers, "pipeline gradient out");
    p->grads_ready = event_create("gradients ready");
    p->grads_reduced = event_create("gradients reduced");
}

void pipeline_take(Pipeline *p, Arena *arena) {
    const Dims *d = &p->model->dims;
    const size_t bytes = (size_t)(d->N_local * d->C) * dtype_size(p->model->config->dtype);
    ring_take(&p->inputs, arena, bytes, "stage input");
    ring_take(&p->outputs, arena, bytes, "stage output");
    ring_take(&p->grad_inputs, arena, bytes, "stage output gradient");
    ring_take(&p->grad_outputs, arena, bytes, "stage input gradient");
}

void pipeline_free(Pipeline *p) {
    ring_free(&p->inputs);
    ring_free(&p->outputs);
    ring_free(&p->grad_inputs);
    ring_free(&p->grad_outputs);
    event_destroy(p->grads_ready);
    event_destroy(p->grads_reduced);
    *p = (Pipeline){0};
}

/* direction: +1 the stage after, -1 the stage before. */
static int neighbour(const Pipeline *p, int direction) { return p->model->grid->index[DIM_PIPELINE] + direction; }

/* A send or receive step: its buffer, and the events around it. */
typedef struct {
    BufferRing *ring;
    Stream *lane;
    int i, peer;
    bool is_send;
} Transfer;

static Transfer transfer(Pipeline *p, StepKind kind, Lane lane, int buffer) {
    Transfer t = {.lane = p->lanes[lane], .i = buffer};
    switch (kind) {
    case STEP_RECV_FORWARD: t.ring = &p->inputs, t.peer = neighbour(p, -1); break;
    case STEP_SEND_FORWARD: t.ring = &p->outputs, t.peer = neighbour(p, +1), t.is_send = true; break;
    case STEP_RECV_BACKWARD: t.ring = &p->grad_inputs, t.peer = neighbour(p, +1); break;
    case STEP_SEND_BACKWARD: t.ring = &p->grad_outputs, t.peer = neighbour(p, -1), t.is_send = true; break;
    default: die(EXIT_INTERNAL, "%s is no transfer", step_kind_name(kind));
    }
    return t;
}

/* A send waits until its buffer is filled and frees it; a receive the other way round. Grouped
 * transfers proceed together; a library may launch them only when the group ends, so the events are
 * waited for before and recorded after it. */
static void run_transfers(Pipeline *p, const Transfer *list, int n) {
    const Dims *d = &p->model->dims;
    Group *group = p->model->groups.pipeline;
    const DType dtype = p->model->config->dtype;
    for (int k = 0; k < n; k++) {
        const Transfer *t = &list[k];
        stream_wait_event(t->lane, t->is_send ? t->ring->filled[t->i] : t->ring->freed[t->i]);
    }
    if (n > 1) comm_begin(p->comm);
    for (int k = 0; k < n; k++) {
        const Transfer *t = &list[k];
        if (t->is_send) {
            comm_send(group, t->peer, t->ring->buffer[t->i], d->N_local * d->C, dtype, t->lane);
        } else {
            comm_recv(group, t->peer, t->ring->buffer[t->i], d->N_local * d->C, dtype, t->lane);
        }
    }
    if (n > 1) comm_end(p->comm);
    for (int k = 0; k < n; k++) {
        const Transfer *t = &list[k];
        event_record(t->is_send ? t->ring->freed[t->i] : t->ring->filled[t->i], t->lane);
    }
}

/* The buffer, once the compute stream may read it; NULL for index -1. */
static void *reading(Pipeline *p, BufferRing *ring, int i) {
    if (i < 0) return NULL;
    stream_wait_event(p->compute, ring->filled[i]);
    return ring->buffer[i];
}

/* The buffer, once the compute stream may fill it. */
static void *filling(Pipeline *p, BufferRing *ring, int i) {
    if (i < 0) return NULL;
    stream_wait_event(p->compute, ring->freed[i]);
    return ring->buffer[i];
}

static void record(Pipeline *p, Event **events, int i) {
    if (i >= 0) event_record(events[i], p->compute);
}

static const Batch *next_batch(Pipeline *p, const BatchSource *source) {
    Error err;
    launch_watch_phase("reading data", p->step);
    const Batch *batch = source->next(source->context, &err);
    if (!batch) die_error(&err);
    return batch;
}

static void forward(Pipeline *p, const Step *s, const BatchSource *source) {
    model_set_batch(p->model, s->slot, next_batch(p, source));
    launch_watch_phase("forward pass", p->step);
    const void *input = reading(p, &p->inputs, s->buffer);
    model_forward(p->model, s->slot, input, filling(p, &p->outputs, s->out_buffer));
    record(p, p->outputs.filled, s->out_buffer);
}

static void backward(Pipeline *p, const Step *s, double grad_scale) {
    launch_watch_phase("backward pass", p->step);
    const void *input = reading(p, &p->inputs, s->input_buffer);
    void *dout = reading(p, &p->grad_inputs, s->buffer);
    model_backward(p->model, s->slot, input, dout, filling(p, &p->grad_outputs, s->out_buffer), grad_scale);
    record(p, p->grad_outputs.filled, s->out_buffer);
    record(p, p->grad_inputs.freed, s->buffer);
    record(p, p->inputs.freed, s->input_buffer);
}

static void reduce(Pipeline *p) {
    Model *m = p->model;
    launch_watch_phase("gradient reduction", p->step);
    model_finish_gradients(m);
    if (!m->groups.data || group_size(m->groups.data) == 1) return;
    event_record(p->grads_ready, p->compute);
    stream_wait_event(p->lanes[LANE_DATA], p->grads_ready);
    comm_all_reduce(m->groups.data, m->grads, m->tensors.n_elements, m->config->dtype, COMM_SUM, p->lanes[LANE_DATA]);
    event_record(p->grads_reduced, p->lanes[LANE_DATA]);
    stream_wait_event(p->compute, p->grads_reduced);
}

/* The steps from i on that are issued together: one, or all of a group. */
static int group_length(const Schedule *schedule, int i) {
    int n = 1;
    const int group = schedule->steps[i].group;
    while (group >= 0 && i + n < schedule->n_steps && schedule->steps[i + n].group == group) n++;
    return n;
}

static void run_transfer_group(Pipeline *p, const Step *steps, int n) {
    Transfer list[8];
    REQUIRE(n <= (int)(sizeof list / sizeof list[0]));
    for (int k = 0; k < n; k++) list[k] = transfer(p, steps[k].kind, steps[k].lane, steps[k].buffer);
    run_transfers(p, list, n);
}

void pipeline_train(Pipeline *p, const BatchSource *source, double grad_scale) {
    const Schedule *schedule = p->schedule;
    for (int i = 0, n; i < schedule->n_steps; i += n) {
        const Step *s = &schedule->steps[i];
        n = group_length(schedule, i);
        switch (s->kind) {
        case STEP_FORWARD: forward(p, s, source); break;
        case STEP_BACKWARD: backward(p, s, grad_scale); break;
        case STEP_REDUCE: reduce(p); break;
        default: run_transfer_group(p, s, n);
        }
    }
}

static void run_transfer(Pipeline *p, StepKind kind, int buffer) {
    const Transfer t = transfer(p, kind, LANE_FORWARD, buffer);
    run_transfers(p, &t, 1);
}

void pipeline_evaluate(Pipeline *p, const BatchSource *source, int64_t n) {
    Model *m = p->model;
    for (int64_t i = 0; i < n; i++) {
        const int in = m->first ? -1 : (int)(i % p->inputs.n), out = m->last ? -1 : (int)(i % p->outputs.n);
        if (!m->first) run_transfer(p, STEP_RECV_FORWARD, in);
        model_set_batch(m, 0, next_batch(p, source));
        launch_watch_phase("evaluation", p->step);
        const void *input = reading(p, &p->inputs, in);
        model_forward(m, 0, input, filling(p, &p->outputs, out));
        record(p, p->inputs.freed, in);
        record(p, p->outputs.filled, out);
        if (m->last) {
            model_loss(m, 0);
        } else {
            run_transfer(p, STEP_SEND_FORWARD, out);
        }
    }
}
