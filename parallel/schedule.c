/* schedule.c - the order of work of one pipeline stage: GPipe and 1F1B.
 * In: kind, stages, stage, micro_batches.  Out: the Step array, and how many slots and buffers it uses.
 * Invariants: see schedule.h. No communication, no memory beyond the array.
 *
 * Forward traffic (a stage's receives from the stage before and its sends to the stage after) shares
 * one FIFO, and so does backward traffic; sends have no buffer. So the order of a send and the
 * receive that follows decides who waits for whom:
 *
 * 1F1B sends first. Micro-batch i leaves before i + 1 is asked for:
 *     F(i)  {send i, receive i + 1}  B(j)  {send grad j, receive grad j + 1}  F(i + 1) ...
 * In the steady part the receive then runs under the compute step in between. Were i + 1 received
 * first, send i would wait for a forward step of the stage before, which itself waits for backward
 * steps that need send i's stage to go on: a stall of one backward step in every round. While the
 * pipeline fills, a receive is exposed to one transfer, but only steps that have two forward times of
 * slack wait for it: the way of micro-batch 0 down the pipeline, the critical one, meets none.
 *
 * GPipe receives first. Its forward steps follow each other without a gap, so input i + 1 must come
 * in while F(i) runs; send i follows receive i + 1, which a balanced pipeline delivers at the very
 * moment when F(i) ends:
 *     receive 0, receive 1, F(0)  {send 0, receive 2}  F(1)  {send 1, receive 3}  F(2) ... */
#include "parallel/schedule.h"

#include <stdlib.h>

#include "base/check.h"
#include "base/types.h"

const char *schedule_kind_name(ScheduleKind kind) {
    switch (kind) {
    case SCHEDULE_GPIPE: return "gpipe";
    case SCHEDULE_1F1B: return "1f1b";
    }
    return "unknown";
}

const char *step_kind_name(StepKind kind) {
    static const char *const names[STEP_KIND_COUNT] = {
        [STEP_RECV_FORWARD] = "receive forward",
        [STEP_FORWARD] = "forward",
        [STEP_SEND_FORWARD] = "send forward",
        [STEP_RECV_BACKWARD] = "receive backward",
        [STEP_BACKWARD] = "backward",
        [STEP_BACKWARD_INPUT] = "backward of input",
        [STEP_BACKWARD_WEIGHT] = "backward of weight",
        [STEP_SEND_BACKWARD] = "send backward",
        [STEP_GATHER] = "gather",
        [STEP_REDUCE] = "reduce",
    };
    return kind >= 0 && kind < STEP_KIND_COUNT ? names[kind] : "unknown";
}

double schedule_bubble(ScheduleKind kind, int stages, int chunks, int micro_batches) {
    (void)kind; /* the kinds differ in memory, not in idle time */
    return (double)(stages - 1) / ((double)chunks * micro_batches);
}

/* The array under construction, and what is needed to number its buffers. */
typedef struct {
    Schedule *schedule;
    int n_groups;
    bool first, last;
} Builder;

static Step *add_step(Builder *builder, StepKind kind, Lane lane, int micro_batch) {
    Schedule *schedule = builder->schedule;
    Step *step = &schedule->steps[schedule->n_steps++];
    *step = (Step){.kind = kind,
                   .lane = lane,
                   .micro_batch = micro_batch,
                   .slot = -1,
                   .buffer = -1,
                   .out_buffer = -1,
                   .group = -1,
                   .input_buffer = -1};
    return step;
}

/* Receives of micro-batches beyond the last, and on stages that have no such neighbour, are nothing:
 * it keeps the loops below free of special cases. */
static Step *add_recv_forward(Builder *builder, int micro_batch) {
    Schedule *schedule = builder->schedule;
    if (builder->first || micro_batch >= schedule->micro_batches) return NULL;
    Step *step = add_step(builder, STEP_RECV_FORWARD, LANE_FORWARD, micro_batch);
    step->buffer = micro_batch % schedule->input_buffers;
    return step;
}

static Step *add_recv_backward(Builder *builder, int micro_batch) {
    Schedule *schedule = builder->schedule;
    if (builder->last || micro_batch >= schedule->micro_batches) return NULL;
    Step *step = add_step(builder, STEP_RECV_BACKWARD, LANE_BACKWARD, micro_batch);
    step->buffer = micro_batch % schedule->grad_input_buffers;
    return step;
}

static void join(Builder *builder, Step *send, Step *receive) {
    if (!send || !receive) return;
    send->group = receive->group = builder->n_groups++;
}

/* FORWARD, then its send together with the receive of input `next`. */
static void add_forward(Builder *builder, int micro_batch, int next) {
    Schedule *schedule = builder->schedule;
    Step *step = add_step(builder, STEP_FORWARD, LANE_COMPUTE, micro_batch);
    Step *send = NULL;
    step->slot = micro_batch % schedule->slots;
    if (!builder->first) step->buffer = micro_batch % schedule->input_buffers;
    if (!builder->last) {
        step->out_buffer = micro_batch % schedule->output_buffers;
        send = add_step(builder, STEP_SEND_FORWARD, LANE_FORWARD, micro_batch);
        send->buffer = step->out_buffer;
    }
    join(builder, send, add_recv_forward(builder, next));
}

/* BACKWARD, then its send together with the receive of gradient `next`. */
static void add_backward(Builder *builder, int micro_batch, int next) {
    Schedule *schedule = builder->schedule;
    Step *step = add_step(builder, STEP_BACKWARD, LANE_COMPUTE, micro_batch);
    Step *send = NULL;
    step->slot = micro_batch % schedule->slots;
    if (!builder->last) step->buffer = micro_batch % schedule->grad_input_buffers;
    if (!builder->first) {
        step->input_buffer = micro_batch % schedule->input_buffers;
        step->out_buffer = micro_batch % schedule->grad_output_buffers;
        send = add_step(builder, STEP_SEND_BACKWARD, LANE_BACKWARD, micro_batch);
        send->buffer = step->out_buffer;
    }
    join(builder, send, add_recv_backward(builder, next));
}

static void build_gpipe(Builder *builder) {
    int micro_batches = builder->schedule->micro_batches;
    add_recv_forward(builder, 0);
    add_recv_forward(builder, 1);
    for (int i = 0; i < micro_batches; i++) {
        if (i == micro_batches - 1) {
            add_recv_backward(builder, 0);
            add_recv_backward(builder, 1);
        }
        add_forward(builder, i, i + 2);
    }
    for (int i = 0; i < micro_batches; i++) add_backward(builder, i, i + 2);
}

static void build_1f1b(Builder *builder) {
    Schedule *schedule = builder->schedule;
    int micro_batches = schedule->micro_batches;
    int warmup = (int)min_i64(schedule->stages - schedule->stage - 1, micro_batches);
    int before_backward = (int)min_i64(warmup, micro_batches - 1); /* the forward step that BACKWARD 0 follows */
    add_recv_forward(builder, 0);
    for (int i = 0; i < micro_batches; i++) {
        if (i == before_backward) add_recv_backward(builder, 0);
        add_forward(builder, i, i + 1);
        if (i >= warmup) add_backward(builder, i - warmup, i - warmup + 1);
    }
    for (int i = micro_batches - warmup; i < micro_batches; i++) add_backward(builder, i, i + 1);
}

/* Receive buffers: inputs that wait for their BACKWARD, and one that is coming in. Send buffers: one
 * is filled while the other leaves. */
static void count_buffers(Schedule *schedule, bool first, bool last) {
    int micro_batches = schedule->micro_batches;
    bool gpipe = schedule->kind == SCHEDULE_GPIPE;
    int two = (int)min_i64(2, micro_batches);
    schedule->slots = gpipe ? micro_batches : (int)min_i64(schedule->stages - schedule->stage, micro_batches);
    schedule->input_buffers = first ? 0 : (int)min_i64(schedule->slots + 1, micro_batches);
    schedule->output_buffers = last ? 0 : two;
    /* 1F1B asks for the next gradient when the one before has been used. */
    schedule->grad_input_buffers = last ? 0 : gpipe ? two : 1;
    schedule->grad_output_buffers = first ? 0 : two;
}

Schedule schedule_build(ScheduleKind kind, int stages, int stage, int chunks, int micro_batches) {
    REQUIRE(stages >= 1 && stage >= 0 && stage < stages && chunks == 1 && micro_batches >= 1);
    REQUIRE(kind == SCHEDULE_GPIPE || kind == SCHEDULE_1F1B);
    Schedule schedule = {
        .kind = kind, .stages = stages, .stage = stage, .chunks = chunks, .micro_batches = micro_batches};
    Builder builder = {.schedule = &schedule, .first = stage == 0, .last = stage == stages - 1};
    count_buffers(&schedule, builder.first, builder.last);
    /* At most two receives, two sends and two compute steps a micro-batch, and the reduction. */
    schedule.steps = xcalloc(6 * (uint64_t)micro_batches + 1, sizeof *schedule.steps);
    if (kind == SCHEDULE_GPIPE) build_gpipe(&builder);
    else build_1f1b(&builder);
    add_step(&builder, STEP_REDUCE, LANE_DATA, micro_batches - 1);
    return schedule;
}

void schedule_free(Schedule *schedule) {
    free(schedule->steps);
    *schedule = (Schedule){0};
}
