/* schedule_simulate.c - runs the schedules of all stages against each other, in simulated time.
 * In: one schedule for each stage, costs.  Out: time of the last step, idle time of each stage.
 * Invariants: the same rules as train/pipeline.c and a transport without any buffer. A compute step holds
 * the thread that issues; a transfer, or a group of them, takes its place in its lane when it is issued,
 * and moves when it and the peer's are both at the head of their lanes. Times are exact maxima and sums,
 * whatever the order in which the loops below come to them. */
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/types.h"
#include "parallel/schedule.h"

enum { GROUP_MAX = 32, RING_COUNT = 4 };

/* Steps that are issued together. */
typedef struct {
    const Step *steps;
    int n, n_done;
    unsigned done;  /* bit k: steps[k] has met its peer */
    double begin_s; /* at the head of its lane */
    double end_s;
} Transfer;

typedef struct {
    const Schedule *schedule;
    int next_step;
    double thread_s, busy_s;
    Transfer *transfers; /* room for all; owned */
    int n_transfers;
    Transfer **lane[LANE_COUNT]; /* issued, in order; owned */
    int issued[LANE_COUNT], finished[LANE_COUNT];
    Transfer **last_use[RING_COUNT]; /* of each buffer of each ring; owned */
} StageRun;

/* What each transfer does: the ring of buffers that it uses, the stage at the other end, what it does there. */
static int ring_of(StepKind kind) {
    switch (kind) {
    case STEP_RECV_FORWARD: return 0;
    case STEP_SEND_FORWARD: return 1;
    case STEP_RECV_BACKWARD: return 2;
    case STEP_SEND_BACKWARD: return 3;
    default: return -1;
    }
}

static int direction_of(StepKind kind) { return kind == STEP_SEND_FORWARD || kind == STEP_RECV_BACKWARD ? 1 : -1; }

static StepKind opposite_of(StepKind kind) {
    switch (kind) {
    case STEP_RECV_FORWARD: return STEP_SEND_FORWARD;
    case STEP_SEND_FORWARD: return STEP_RECV_FORWARD;
    case STEP_RECV_BACKWARD: return STEP_SEND_BACKWARD;
    default: return STEP_RECV_BACKWARD;
    }
}

static void stage_init(StageRun *run, const Schedule *schedule) {
    const int buffers[RING_COUNT] = {schedule->input_buffers, schedule->output_buffers, schedule->grad_input_buffers,
                                     schedule->grad_output_buffers};
    *run = (StageRun){.schedule = schedule};
    run->transfers = xcalloc((uint64_t)schedule->n_steps, sizeof *run->transfers);
    for (int lane = 0; lane < LANE_COUNT; lane++) {
        run->lane[lane] = xcalloc((uint64_t)schedule->n_steps, sizeof **run->lane);
    }
    for (int ring = 0; ring < RING_COUNT; ring++) {
        run->last_use[ring] = xcalloc((uint64_t)buffers[ring], sizeof **run->last_use);
    }
}

static void stage_free(StageRun *run) {
    free(run->transfers);
    for (int lane = 0; lane < LANE_COUNT; lane++) free(run->lane[lane]);
    for (int ring = 0; ring < RING_COUNT; ring++) free(run->last_use[ring]);
}

static bool is_complete(const Transfer *transfer) { return transfer->n_done == transfer->n; }

/* Issues the transfer at next_step, and what is in its group. */
static void issue_transfer(StageRun *run) {
    const Schedule *schedule = run->schedule;
    const Step *steps = &schedule->steps[run->next_step];
    Transfer *transfer = &run->transfers[run->n_transfers++];
    const Lane lane = steps[0].lane;
    *transfer = (Transfer){.steps = steps, .n = 1, .begin_s = run->thread_s};
    while (steps[0].group >= 0 && run->next_step + transfer->n < schedule->n_steps &&
           steps[transfer->n].group == steps[0].group)
        transfer->n++;
    REQUIRE(transfer->n <= GROUP_MAX);
    for (int k = 0; k < transfer->n; k++) {
        REQUIRE(ring_of(steps[k].kind) >= 0 && steps[k].lane == lane);
        run->last_use[ring_of(steps[k].kind)][steps[k].buffer] = transfer;
    }
    const int before = run->issued[lane] - 1;
    if (before >= 0 && is_complete(run->lane[lane][before]) && run->lane[lane][before]->end_s > transfer->begin_s) {
        transfer->begin_s = run->lane[lane][before]->end_s;
    }
    run->lane[lane][run->issued[lane]++] = transfer;
    run->next_step += transfer->n;
}

/* Micro-batch that the ring's buffer was last filled with or sent from, -1: none. */
static int micro_batch_in(const StageRun *run, int ring, int buffer) {
    const Transfer *use = run->last_use[ring][buffer];
    for (int k = 0; use && k < use->n; k++) {
        if (ring_of(use->steps[k].kind) == ring && use->steps[k].buffer == buffer) return use->steps[k].micro_batch;
    }
    return -1;
}

/* 1: the compute step may start at *start_s; 0: it must wait; -1: it would read something else. */
static int compute_start(const StageRun *run, const Step *step, double *start_s, char problem[256]) {
    const bool forward = step->kind == STEP_FORWARD;
    const struct {
        int ring, buffer;
        bool reads;
    } uses[] = {{0, forward ? step->buffer : step->input_buffer, true},
                {2, forward ? -1 : step->buffer, true},
                {forward ? 1 : 3, step->out_buffer, false}};
    *start_s = run->thread_s;
    for (size_t i = 0; i < sizeof uses / sizeof uses[0]; i++) {
        if (uses[i].buffer < 0) continue;
        const Transfer *use = run->last_use[uses[i].ring][uses[i].buffer];
        if (uses[i].reads && micro_batch_in(run, uses[i].ring, uses[i].buffer) != step->micro_batch) {
            snprintf(problem, 256, "stage %d: %s of micro-batch %d reads buffer %d, which holds micro-batch %d",
                     run->schedule->stage, step_kind_name(step->kind), step->micro_batch, uses[i].buffer,
                     micro_batch_in(run, uses[i].ring, uses[i].buffer));
            return -1;
        }
        if (!use) continue;
        if (!is_complete(use)) return 0;
        if (use->end_s > *start_s) *start_s = use->end_s;
    }
    return 1;
}

/* Issues what the stage's thread can. 1: something, 0: nothing, -1: problem. */
static int advance_thread(StageRun *run, double forward_s, double backward_s, char problem[256]) {
    int moved = 0;
    while (run->next_step < run->schedule->n_steps) {
        const Step *step = &run->schedule->steps[run->next_step];
        if (ring_of(step->kind) >= 0) {
            issue_transfer(run);
        } else if (step->kind == STEP_FORWARD || step->kind == STEP_BACKWARD) {
            double start_s;
            const double cost_s = step->kind == STEP_FORWARD ? forward_s : backward_s;
            const int ready = compute_start(run, step, &start_s, problem);
            if (ready <= 0) return ready < 0 ? -1 : moved;
            run->thread_s = start_s + cost_s;
            run->busy_s += cost_s;
            run->next_step++;
        } else {
            run->next_step++; /* reductions over other dimensions cost the pipeline nothing */
        }
        moved = 1;
    }
    return moved;
}

static Transfer *head_of(const StageRun *run, Lane lane) {
    return run->finished[lane] < run->issued[lane] ? run->lane[lane][run->finished[lane]] : NULL;
}

static void finish_member(StageRun *run, Lane lane, int k, double end_s) {
    Transfer *head = head_of(run, lane);
    head->done |= 1u << k;
    head->n_done++;
    if (end_s > head->end_s) head->end_s = end_s;
    if (!is_complete(head)) return;
    run->finished[lane]++;
    Transfer *next = head_of(run, lane);
    if (next && head->end_s > next->begin_s) next->begin_s = head->end_s;
}

/* Lets one transfer of the stage's lane meet its peer. 1: one did, 0: none can, -1: the wrong ones met. */
static int advance_lane(StageRun *runs, int stages, int stage, Lane lane, double transfer_s, char problem[256]) {
    Transfer *mine = head_of(&runs[stage], lane);
    for (int k = 0; mine && k < mine->n; k++) {
        const Step *step = &mine->steps[k];
        const int peer = stage + direction_of(step->kind);
        if (mine->done & 1u << k || peer < 0 || peer >= stages) continue;
        const Transfer *other = head_of(&runs[peer], lane);
        for (int j = 0; other && j < other->n; j++) {
            if (other->done & 1u << j || other->steps[j].kind != opposite_of(step->kind)) continue;
            if (other->steps[j].micro_batch != step->micro_batch) {
                snprintf(problem, 256, "stage %d: %s of micro-batch %d meets stage %d's %s of micro-batch %d", stage,
                         step_kind_name(step->kind), step->micro_batch, peer, step_kind_name(other->steps[j].kind),
                         other->steps[j].micro_batch);
                return -1;
            }
            const double begin_s = mine->begin_s > other->begin_s ? mine->begin_s : other->begin_s;
            finish_member(&runs[peer], lane, j, begin_s + transfer_s);
            finish_member(&runs[stage], lane, k, begin_s + transfer_s);
            return 1;
        }
    }
    return 0;
}

/* One round over all stages: 1 moved, 0 stood still, -1 problem. */
static int advance_all(StageRun *runs, int stages, const ScheduleCosts *costs, char problem[256]) {
    int moved = 0;
    for (int stage = 0; stage < stages; stage++) {
        int rc = advance_thread(&runs[stage], costs->forward_s[stage], costs->backward_s[stage], problem);
        if (rc < 0) return -1;
        moved |= rc;
        for (int lane = 0; lane < LANE_COUNT; lane++) {
            while ((rc = advance_lane(runs, stages, stage, (Lane)lane, costs->transfer_s, problem)) > 0) moved = 1;
            if (rc < 0) return -1;
        }
    }
    return moved;
}

/* Says where the first stage that is not done stands. Returns false where all are done. */
static bool find_stuck(const StageRun *runs, int stages, char problem[256]) {
    for (int stage = 0; stage < stages; stage++) {
        const StageRun *run = &runs[stage];
        for (int lane = 0; lane < LANE_COUNT; lane++) {
            const Transfer *head = head_of(run, (Lane)lane);
            if (!head) continue;
            const int k = __builtin_ctz(~head->done);
            snprintf(problem, 256, "stuck: stage %d waits in %s of micro-batch %d", stage,
                     step_kind_name(head->steps[k].kind), head->steps[k].micro_batch);
            return true;
        }
        if (run->next_step < run->schedule->n_steps) {
            const Step *step = &run->schedule->steps[run->next_step];
            snprintf(problem, 256, "stuck: stage %d waits before %s of micro-batch %d", stage,
                     step_kind_name(step->kind), step->micro_batch);
            return true;
        }
    }
    return false;
}

/* When the stage's last compute step and its last transfer are done. */
static double stage_end_s(const StageRun *run) {
    double end_s = run->thread_s;
    for (int i = 0; i < run->n_transfers; i++) {
        if (run->transfers[i].end_s > end_s) end_s = run->transfers[i].end_s;
    }
    return end_s;
}

double schedule_simulate(const Schedule *schedules, const ScheduleCosts *costs, double *idle_s, char problem[256]) {
    const int stages = schedules[0].stages;
    StageRun *runs = xcalloc((uint64_t)stages, sizeof *runs);
    for (int stage = 0; stage < stages; stage++) {
        REQUIRE(schedules[stage].stages == stages && schedules[stage].stage == stage);
        stage_init(&runs[stage], &schedules[stage]);
    }
    int rc;
    while ((rc = advance_all(runs, stages, costs, problem)) > 0) continue;
    double last_s = rc < 0 || find_stuck(runs, stages, problem) ? -1.0 : 0.0;
    for (int stage = 0; last_s >= 0.0 && stage < stages; stage++) {
        const double end_s = stage_end_s(&runs[stage]);
        if (end_s > last_s) last_s = end_s;
    }
    for (int stage = 0; stage < stages; stage++) {
        if (idle_s && last_s >= 0.0) idle_s[stage] = last_s - runs[stage].busy_s;
        stage_free(&runs[stage]);
    }
    free(runs);
    return last_s;
}
