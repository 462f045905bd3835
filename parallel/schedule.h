/* schedule.h - the order of work of one pipeline stage, as a plain array. No communication here.
 *
 * Invariants (proved by a test for every shape in range): each FORWARD has one BACKWARD; sends meet
 * receives in the same order on both sides, with no buffering at all; at most
 * min(stages - stage, micro_batches) activations live under 1F1B, micro_batches under GPipe. */
#ifndef TRIDENT_PARALLEL_SCHEDULE_H
#define TRIDENT_PARALLEL_SCHEDULE_H

#include <stdint.h>

typedef enum { SCHEDULE_GPIPE, SCHEDULE_1F1B } ScheduleKind;

typedef enum {
    STEP_RECV_FORWARD,  /* activations from the piece before, into input buffer `buffer` */
    STEP_FORWARD,       /* reads input `buffer`, fills activation slot `slot` */
    STEP_SEND_FORWARD,  /* output buffer `buffer` to the piece after */
    STEP_RECV_BACKWARD, /* gradient of the output from the piece after, into `buffer` */
    STEP_BACKWARD,      /* both gradients, of input and of weight; frees slot `slot` */
    STEP_BACKWARD_INPUT,
    STEP_BACKWARD_WEIGHT,
    STEP_SEND_BACKWARD, /* gradient of the input to the piece before */
    STEP_GATHER,        /* parameters of a chunk */
    STEP_REDUCE,        /* gradients of a chunk: its last backward is done */
    STEP_KIND_COUNT
} StepKind;

typedef enum { LANE_COMPUTE, LANE_FORWARD, LANE_BACKWARD, LANE_DATA, LANE_COUNT } Lane;

typedef struct {
    StepKind kind;
    Lane lane;
    int micro_batch, chunk;
    int slot;   /* activation slot of FORWARD/BACKWARD, else -1 */
    int buffer; /* receive buffer of RECV_* and of the step that reads it; send buffer of SEND_* and
                 * of the step that fills it is out_buffer there; -1: none */
    int out_buffer;
    int group;  /* steps with the same group >= 0 are issued together */
} Step;

typedef struct {
    ScheduleKind kind;
    int stages, stage, chunks, micro_batches;
    int n_steps;
    Step *steps; /* owned */
    int slots;          /* activation slots needed */
    int input_buffers;  /* receive buffers for forward activations (0 on the first stage) */
    int output_buffers; /* send buffers for forward activations (0 on the last stage) */
    int grad_input_buffers;  /* receive buffers for output gradients (0 on the last stage) */
    int grad_output_buffers; /* send buffers for input gradients (0 on the first stage) */
} Schedule;

/* stages, micro_batches >= 1; chunks must be 1 for the two kinds here. */
Schedule schedule_build(ScheduleKind kind, int stages, int stage, int chunks, int micro_batches);
void schedule_free(Schedule *schedule);
const char *schedule_kind_name(ScheduleKind kind);
const char *step_kind_name(StepKind kind);
/* Ideal bubble: idle over ideal compute time, (stages - 1) / (chunks * micro_batches). */
double schedule_bubble(ScheduleKind kind, int stages, int chunks, int micro_batches);

#endif
