/* test_schedule.c - proof of the pipeline schedules: every kind, stage and micro-batch count in range.
 *
 * What is shown: sends meet receives of the same micro-batch although no send has a buffer; nothing gets
 * stuck; each micro-batch goes forward and backward once; activations alive are bounded; buffers and slots
 * are filled only when they are free and read only while they hold what is wanted; the bubble is exactly
 * (stages - 1) / micro_batches where stages cost the same. And that the checkers see a broken schedule. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/rng.h"
#include "base/types.h"
#include "parallel/schedule.h"

enum { STAGES_MAX = 16, MICRO_BATCHES_MAX = 64, EMPTY = -1 };

/* What the buffers of one kind hold. */
typedef struct {
    int n, holds[MICRO_BATCHES_MAX + 1];
} Buffers;

typedef struct {
    Buffers slots, inputs, outputs, grad_inputs, grad_outputs;
    int forwards[MICRO_BATCHES_MAX], backwards[MICRO_BATCHES_MAX];
    int live, live_max;
} StageState;

static Buffers buffers_make(int n) {
    Buffers buffers = {.n = n};
    for (int i = 0; i <= MICRO_BATCHES_MAX; i++) buffers.holds[i] = EMPTY;
    return buffers;
}

static bool fill(Buffers *buffers, int i, int micro_batch) {
    if (i < 0 || i >= buffers->n || buffers->holds[i] != EMPTY) return false;
    buffers->holds[i] = micro_batch;
    return true;
}

static bool holds(const Buffers *buffers, int i, int micro_batch) {
    return i >= 0 && i < buffers->n && buffers->holds[i] == micro_batch;
}

static bool empty(Buffers *buffers, int i, int micro_batch) {
    if (!holds(buffers, i, micro_batch)) return false;
    buffers->holds[i] = EMPTY;
    return true;
}

static bool all_empty(const Buffers *buffers) {
    for (int i = 0; i < buffers->n; i++) {
        if (buffers->holds[i] != EMPTY) return false;
    }
    return true;
}

/* Does the step to the state of its stage; false where it fills what is in use, or reads what is not there. */
static bool apply(StageState *s, const Step *step, bool first, bool last) {
    const int m = step->micro_batch;
    switch (step->kind) {
    case STEP_RECV_FORWARD: return !first && fill(&s->inputs, step->buffer, m);
    case STEP_SEND_FORWARD: return !last && empty(&s->outputs, step->buffer, m);
    case STEP_RECV_BACKWARD: return !last && fill(&s->grad_inputs, step->buffer, m);
    case STEP_SEND_BACKWARD: return !first && empty(&s->grad_outputs, step->buffer, m);
    case STEP_FORWARD:
        s->forwards[m]++;
        if (++s->live > s->live_max) s->live_max = s->live;
        return fill(&s->slots, step->slot, m) && (first || holds(&s->inputs, step->buffer, m)) &&
               (last || fill(&s->outputs, step->out_buffer, m));
    case STEP_BACKWARD:
        s->backwards[m]++;
        s->live--;
        return s->forwards[m] == 1 && empty(&s->slots, step->slot, m) &&
               (first || empty(&s->inputs, step->input_buffer, m)) &&
               (last || empty(&s->grad_inputs, step->buffer, m)) &&
               (first || fill(&s->grad_outputs, step->out_buffer, m));
    default: return false;
    }
}

/* Goes through one stage's array. True: all holds; else the first fault is in problem. */
static bool stage_holds(const Schedule *schedule, char problem[256]) {
    const bool first = schedule->stage == 0, last = schedule->stage == schedule->stages - 1;
    StageState s = {.slots = buffers_make(schedule->slots),
                    .inputs = buffers_make(schedule->input_buffers),
                    .outputs = buffers_make(schedule->output_buffers),
                    .grad_inputs = buffers_make(schedule->grad_input_buffers),
                    .grad_outputs = buffers_make(schedule->grad_output_buffers)};
    const int steps = schedule->n_steps - 1;
    for (int i = 0; i < steps; i++) {
        const Step *step = &schedule->steps[i];
        if (!apply(&s, step, first, last)) {
            snprintf(problem, 256, "step %d (%s of micro-batch %d): its buffer is not as it must be", i,
                     step_kind_name(step->kind), step->micro_batch);
            return false;
        }
    }
    bool good = schedule->steps[steps].kind == STEP_REDUCE && s.live == 0;
    for (int m = 0; m < schedule->micro_batches; m++) good &= s.forwards[m] == 1 && s.backwards[m] == 1;
    good &= all_empty(&s.slots) && all_empty(&s.inputs) && all_empty(&s.outputs) && all_empty(&s.grad_inputs) &&
            all_empty(&s.grad_outputs);
    const bool gpipe = schedule->kind == SCHEDULE_GPIPE;
    const int bound = gpipe ? schedule->micro_batches
                            : (int)min_i64(schedule->stages - schedule->stage, schedule->micro_batches);
    good &= s.live_max <= bound && schedule->slots <= bound;
    if (!good)
        snprintf(problem, 256, "counts: %d live at most, %d slots, bound %d", s.live_max, schedule->slots, bound);
    return good;
}

static void build_all(Schedule *schedules, ScheduleKind kind, int stages, int micro_batches) {
    for (int stage = 0; stage < stages; stage++) {
        schedules[stage] = schedule_build(kind, stages, stage, 1, micro_batches);
    }
}

static void free_all(Schedule *schedules, int stages) {
    for (int stage = 0; stage < stages; stage++) schedule_free(&schedules[stage]);
}

static ScheduleCosts equal_costs(double *forward_s, double *backward_s, double forward, double backward) {
    for (int stage = 0; stage < STAGES_MAX; stage++) {
        forward_s[stage] = forward;
        backward_s[stage] = backward;
    }
    return (ScheduleCosts){.forward_s = forward_s, .backward_s = backward_s};
}

/* Small whole numbers as costs: their sums are exact in fp64, so the bubble can be compared with ==. */
static void check_bubble(const Schedule *schedules, int stages, int micro_batches, double forward, double backward) {
    double forward_s[STAGES_MAX], backward_s[STAGES_MAX], idle_s[STAGES_MAX];
    char problem[256] = "";
    const ScheduleCosts costs = equal_costs(forward_s, backward_s, forward, backward);
    const double total_s = schedule_simulate(schedules, &costs, idle_s, problem);
    ck_assert_msg(total_s >= 0.0, "%s, %d stages, %d micro-batches: %s", schedule_kind_name(schedules[0].kind), stages,
                  micro_batches, problem);
    const double ideal_s = micro_batches * (forward + backward);
    for (int stage = 0; stage < stages; stage++) {
        ck_assert_msg(idle_s[stage] == (stages - 1) * (forward + backward),
                      "%s, %d stages, %d micro-batches: stage %d is idle %g of %g",
                      schedule_kind_name(schedules[0].kind), stages, micro_batches, stage, idle_s[stage], total_s);
    }
    const double bubble = schedule_bubble(schedules[0].kind, stages, 1, micro_batches);
    ck_assert(bubble == (total_s - ideal_s) / ideal_s);
}

START_TEST(every_shape_holds) {
    const ScheduleKind kind = _i / STAGES_MAX ? SCHEDULE_1F1B : SCHEDULE_GPIPE;
    const int stages = _i % STAGES_MAX + 1;
    char problem[256] = "";
    for (int micro_batches = 1; micro_batches <= MICRO_BATCHES_MAX; micro_batches++) {
        Schedule schedules[STAGES_MAX];
        build_all(schedules, kind, stages, micro_batches);
        for (int stage = 0; stage < stages; stage++) {
            ck_assert_msg(stage_holds(&schedules[stage], problem), "%s, %d stages, stage %d, %d micro-batches: %s",
                          schedule_kind_name(kind), stages, stage, micro_batches, problem);
        }
        check_bubble(schedules, stages, micro_batches, 1.0, 2.0);
        check_bubble(schedules, stages, micro_batches, 1.0, 1.0);
        check_bubble(schedules, stages, micro_batches, 3.0, 2.0);
        free_all(schedules, stages);
    }
}
END_TEST

/* Without buffers a bad order may pass for equal costs and stick for others. */
START_TEST(random_costs_never_stick) {
    const uint64_t seed = 20240611;
    double forward_s[STAGES_MAX], backward_s[STAGES_MAX], idle_s[STAGES_MAX];
    for (uint64_t trial = 0; trial < 300; trial++) {
        uint64_t draw = 100 * trial;
        const int stages = 1 + (int)(rng_bits(seed, 0, draw++) % STAGES_MAX);
        const int micro_batches = 1 + (int)(rng_bits(seed, 0, draw++) % MICRO_BATCHES_MAX);
        double slowest = 0.0;
        for (int stage = 0; stage < stages; stage++) {
            forward_s[stage] = (double)(rng_bits(seed, 0, draw++) % 100);
            backward_s[stage] = (double)(rng_bits(seed, 0, draw++) % 200);
            if (forward_s[stage] + backward_s[stage] > slowest) slowest = forward_s[stage] + backward_s[stage];
        }
        const ScheduleCosts costs = {forward_s, backward_s, (double)(rng_bits(seed, 0, draw++) % 50)};
        for (int kind = SCHEDULE_GPIPE; kind <= SCHEDULE_1F1B; kind++) {
            Schedule schedules[STAGES_MAX];
            char problem[256] = "";
            build_all(schedules, (ScheduleKind)kind, stages, micro_batches);
            const double total_s = schedule_simulate(schedules, &costs, idle_s, problem);
            ck_assert_msg(total_s >= slowest * micro_batches, "seed %llu trial %llu: %g, %s", (unsigned long long)seed,
                          (unsigned long long)trial, total_s, problem);
            for (int stage = 0; stage < stages; stage++) ck_assert(idle_s[stage] >= 0.0);
            free_all(schedules, stages);
        }
    }
}
END_TEST

/* GPipe hides transfers that are shorter than a step: what they cost does not grow with the number of
 * micro-batches. Under 1F1B with the fewest activations stage 0 may start micro-batch i + stages only when i has
 * come back, so that `stages` micro-batches pay one way down and up, 2 (stages - 1) transfers; no order that
 * keeps the bound on activations can do better, and ours does no worse. */
START_TEST(transfers_cost_no_more_than_they_must) {
    double forward_s[STAGES_MAX], backward_s[STAGES_MAX], extra_s[2];
    char problem[256];
    for (int kind = SCHEDULE_GPIPE; kind <= SCHEDULE_1F1B; kind++) {
        for (int stages = 2; stages <= 8; stages *= 2) {
            for (int i = 0; i < 2; i++) {
                Schedule schedules[STAGES_MAX];
                const int micro_batches = i ? 64 : 32;
                ScheduleCosts costs = equal_costs(forward_s, backward_s, 100.0, 200.0);
                costs.transfer_s = 8.0;
                build_all(schedules, (ScheduleKind)kind, stages, micro_batches);
                const double total_s = schedule_simulate(schedules, &costs, NULL, problem);
                extra_s[i] = total_s - 300.0 * (micro_batches + stages - 1);
                free_all(schedules, stages);
            }
            const double each_s = kind == SCHEDULE_GPIPE ? 0.0 : 8.0 * 2 * (stages - 1) / stages;
            ck_assert_msg(extra_s[0] > 0.0 && extra_s[1] - extra_s[0] == 32 * each_s, "%s, %d stages: %g and %g",
                          schedule_kind_name((ScheduleKind)kind), stages, extra_s[0], extra_s[1]);
        }
    }
}
END_TEST

/* True where one of the checkers objects to the schedules. */
static bool seen(const Schedule *schedules, int stages) {
    double forward_s[STAGES_MAX], backward_s[STAGES_MAX];
    char problem[256];
    const ScheduleCosts costs = equal_costs(forward_s, backward_s, 1.0, 2.0);
    for (int stage = 0; stage < stages; stage++) {
        if (!stage_holds(&schedules[stage], problem)) return true;
    }
    return schedule_simulate(schedules, &costs, NULL, problem) < 0.0;
}

/* Every swap of two neighbouring steps, in every stage. Those that leave the program the same (two transfers on
 * different lanes, both ends of one group) or that another order serves as well are found by the same
 * rules, so they are named here: what must be seen is a step before what it needs. */
static bool must_be_seen(const Step *a, const Step *b) {
    if (a->micro_batch == b->micro_batch) {
        return (a->kind == STEP_RECV_FORWARD && b->kind == STEP_FORWARD) ||
               (a->kind == STEP_FORWARD && b->kind == STEP_SEND_FORWARD) ||
               (a->kind == STEP_FORWARD && b->kind == STEP_BACKWARD) ||
               (a->kind == STEP_RECV_BACKWARD && b->kind == STEP_BACKWARD) ||
               (a->kind == STEP_BACKWARD && b->kind == STEP_SEND_BACKWARD) || b->kind == STEP_REDUCE;
    }
    return a->kind == b->kind && a->lane != LANE_COMPUTE;
}

START_TEST(broken_order_is_seen) {
    int must = 0;
    for (int kind = SCHEDULE_GPIPE; kind <= SCHEDULE_1F1B; kind++) {
        for (int stages = 1; stages <= 5; stages++) {
            for (int stage = 0; stage < stages; stage++) {
                Schedule schedules[STAGES_MAX];
                build_all(schedules, (ScheduleKind)kind, stages, 7);
                Schedule *s = &schedules[stage];
                for (int i = 0; i + 1 < s->n_steps; i++) {
                    Step a = s->steps[i], b = s->steps[i + 1];
                    if (!must_be_seen(&a, &b)) continue;
                    s->steps[i] = b;
                    s->steps[i + 1] = a;
                    ck_assert_msg(seen(schedules, stages), "%s, %d stages, stage %d: steps %d and %d swapped",
                                  schedule_kind_name((ScheduleKind)kind), stages, stage, i, i + 1);
                    s->steps[i] = a;
                    s->steps[i + 1] = b;
                    must++;
                }
                ck_assert(!seen(schedules, stages));
                free_all(schedules, stages);
            }
        }
    }
    ck_assert_int_gt(must, 300);
}
END_TEST

/* Single faults of other kinds: another micro-batch's slot, a buffer of another one, a step left out. */
START_TEST(broken_steps_are_seen) {
    for (int kind = SCHEDULE_GPIPE; kind <= SCHEDULE_1F1B; kind++) {
        Schedule schedules[STAGES_MAX];
        build_all(schedules, (ScheduleKind)kind, 4, 6);
        for (int stage = 0; stage < 4; stage++) {
            Schedule *s = &schedules[stage];
            for (int i = 0; i + 1 < s->n_steps; i++) {
                const Step before = s->steps[i];
                int *numbers[] = {&s->steps[i].micro_batch, &s->steps[i].slot, &s->steps[i].buffer,
                                  &s->steps[i].out_buffer, &s->steps[i].input_buffer};
                for (int k = 0; k < 5; k++) {
                    if (*numbers[k] < 0) continue;
                    *numbers[k] = *numbers[k] ? *numbers[k] - 1 : 1;
                    ck_assert_msg(seen(schedules, 4), "stage %d step %d number %d", stage, i, k);
                    s->steps[i] = before;
                }
                s->steps[i].kind = STEP_REDUCE;
                ck_assert_msg(seen(schedules, 4), "stage %d step %d left out", stage, i);
                s->steps[i] = before;
            }
        }
        free_all(schedules, 4);
    }
}
END_TEST

/* Receives in another order than the sends, the same on both sides of the array's own rules. */
START_TEST(crossed_transfers_are_seen) {
    double cost_s[2] = {1.0, 1.0};
    const ScheduleCosts costs = {cost_s, cost_s, 0.0};
    Schedule schedules[2];
    char problem[256] = "";
    build_all(schedules, SCHEDULE_GPIPE, 2, 3);
    Step *steps = schedules[1].steps;
    ck_assert(steps[0].kind == STEP_RECV_FORWARD && steps[1].kind == STEP_RECV_FORWARD);
    const Step swapped = steps[0];
    steps[0] = steps[1];
    steps[1] = swapped;
    ck_assert(schedule_simulate(schedules, &costs, NULL, problem) < 0.0);
    ck_assert_msg(strstr(problem, "micro-batch 0") && strstr(problem, "micro-batch 1"), "%s", problem);
    free_all(schedules, 2);
}
END_TEST

/* Each stage waits for the other: the send of a stage behind a receive that only that send can serve. */
START_TEST(deadlock_is_seen) {
    double cost_s[2] = {1.0, 1.0};
    const ScheduleCosts costs = {cost_s, cost_s, 0.0};
    Schedule schedules[2];
    char problem[256] = "";
    build_all(schedules, SCHEDULE_1F1B, 2, 4);
    for (int i = 0; i < schedules[0].n_steps; i++) {
        if (schedules[0].steps[i].kind != STEP_SEND_FORWARD) continue;
        memmove(&schedules[0].steps[i], &schedules[0].steps[i + 1],
                (size_t)(schedules[0].n_steps - i - 1) * sizeof(Step));
        schedules[0].n_steps--;
        break;
    }
    ck_assert(schedule_simulate(schedules, &costs, NULL, problem) < 0.0);
    ck_assert_msg(strstr(problem, "stuck") || strstr(problem, "meets"), "%s", problem);
    free_all(schedules, 2);
}
END_TEST

START_TEST(names_and_bubble) {
    ck_assert_str_eq(schedule_kind_name(SCHEDULE_GPIPE), "gpipe");
    ck_assert_str_eq(schedule_kind_name(SCHEDULE_1F1B), "1f1b");
    for (int kind = 0; kind < STEP_KIND_COUNT; kind++) ck_assert_str_ne(step_kind_name((StepKind)kind), "unknown");
    ck_assert(schedule_bubble(SCHEDULE_1F1B, 8, 1, 64) == 7.0 / 64.0);
    ck_assert(schedule_bubble(SCHEDULE_1F1B, 8, 4, 64) == 7.0 / 256.0);
    ck_assert(schedule_bubble(SCHEDULE_GPIPE, 1, 1, 3) == 0.0);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("schedule");
    TCase *proof = tcase_create("proof");
    tcase_set_timeout(proof, 120);
    tcase_add_loop_test(proof, every_shape_holds, 0, 2 * STAGES_MAX);
    tcase_add_test(proof, random_costs_never_stick);
    tcase_add_test(proof, transfers_cost_no_more_than_they_must);
    tcase_add_test(proof, names_and_bubble);
    suite_add_tcase(suite, proof);
    TCase *mutation = tcase_create("mutation");
    tcase_set_timeout(mutation, 120);
    tcase_add_test(mutation, broken_order_is_seen);
    tcase_add_test(mutation, broken_steps_are_seen);
    tcase_add_test(mutation, crossed_transfers_are_seen);
    tcase_add_test(mutation, deadlock_is_seen);
    suite_add_tcase(suite, mutation);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
