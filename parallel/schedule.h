/* schedule.h - the order of work of one pipeline stage, as a plain array. No communication here.
 *
 * Invariants (proved by a test for every shape in range): each FORWARD has one BACKWARD; sends meet
 * receives in the same order on both sides, with no buffering at all; at most
 * min(stages - stage, micro_batches) activations live under 1F1B, micro_batches under GPipe; and a
 * step that fills a buffer or slot stands in the array behind the step that freed it, so that the
 * event to wait for was recorded by then: an input buffer is freed by the BACKWARD of its
 * micro-batch, an output buffer by its SEND_FORWARD, a gradient receive buffer by the BACKWARD that
 * reads it, a gradient send buffer by its SEND_BACKWARD, an activation slot by its BACKWARD. */
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
    int group;        /* steps with the same group >= 0 are issued together; they stand next to each other */
    int input_buffer; /* BACKWARD: input buffer of its FORWARD, read once more and then free; else -1 */
} Step;

typedef struct {
    ScheduleKind kind;
    int stages, stage, chunks, micro_batches;
    int n_steps;
    Step *steps;             /* owned */
    int slots;               /* activation slots needed */
    int input_buffers;       /* receive buffers for forward activations (0 on the first stage) */
    int output_buffers;      /* send buffers for forward activations (0 on the last stage) */
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

/* Costs for schedule_simulate. forward_s, backward_s: (stages). transfer_s: one send. */
typedef struct {
    const double *forward_s, *backward_s;
    double transfer_s;
} ScheduleCosts;

/* Runs the schedules of all stages against each other: lanes are FIFOs, sends have no buffer at all
 * (both ends must be at the head of their lanes), a compute step holds the issuing thread until it
 * is done, a reused buffer waits for its earlier use. schedules: (stages), in order of stage, of one
 * build. Returns the time of the last step, and each stage's idle time until then in idle_s (may be
 * NULL); or -1 where the schedules get stuck or a send meets another micro-batch's receive, said in
 * `problem`. */
double schedule_simulate(const Schedule *schedules, const ScheduleCosts *costs, double *idle_s, char problem[256]);

#endif
