/* trainer.c - sets one rank up and runs its steps.
 * In: config, launch. Out: a trained share of the model.
 * Invariants: every decision that ranks must share (skip, clip factor, stop) is made from values that
 * one reduction gave to all of them. */
#include "train/trainer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "train/preflight.h"

static void gather_seats(Trainer *t, Launch *launch) {
    const int size = launch_size(launch);
    Seat mine = {0};
    snprintf(mine.host, sizeof mine.host, "%s", launch_host(launch));
    int64_t *lengths = xcalloc((uint64_t)size, sizeof *lengths);
    t->seats = comm_host_gather(comm_world(t->comm), &mine, sizeof mine, lengths);
    free(lengths);
    for (int rank = 0; rank < size; rank++) {
        for (int other = 0; other < rank; other++) {
            t->seats[rank].local_device += strcmp(t->seats[other].host, t->seats[rank].host) == 0;
        }
    }
}

static void make_grid(Trainer *t, Launch *launch) {
    const Config *c = t->config;
    Error err;
    t->grid.size[DIM_TENSOR] = c->tensor;
    t->grid.size[DIM_PIPELINE] = c->pipeline;
    t->grid.size[DIM_DATA] = c->data;
    t->grid.world_size = c->tensor * c->pipeline * c->data;
    if (grid_parse_order(t->grid.order, c->order, &err) != 0) die_error(&err);
    Seat alone = {.host = "here"};
    if (launch) gather_seats(t, launch);
    const Seat *seats = launch ? t->seats : &alone;
    const int rank = launch ? launch_rank(launch) : 0;
    if (grid_place(&t->grid, seats, rank, c->allow_cross_node_tensor, &err) != 0) launch_die_together(&err);
}

static Group *make_group(Trainer *t, const char *name, unsigned mask) {
    int *ranks = xcalloc((uint64_t)t->grid.world_size, sizeof *ranks), mine;
    int n = grid_group(&t->grid, mask, ranks, &mine);
    Group *group = n > 1 ? comm_group(t->comm, name, ranks, n) : NULL;
    free(ranks);
    return group;
}

/* First and last stage, where both hold the embedding. */
static Group *make_embedding_group(Trainer *t) {
    const int stages = t->grid.size[DIM_PIPELINE], stage = t->grid.index[DIM_PIPELINE];
    if (!t->config->tie_embeddings || stages == 1 || (stage != 0 && stage != stages - 1)) return NULL;
    int index[DIM_COUNT], ranks[2];
    memcpy(index, t->grid.index, sizeof index);
    for (int end = 0; end < 2; end++) {
        index[DIM_PIPELINE] = end ? stages - 1 : 0;
        ranks[end] = grid_rank_at(&t->grid, index);
    }
    return comm_group(t->comm, "embedding", ranks, 2);
}

static Group *make_kv_group(Trainer *t) {
    const int tensor = t->grid.size[DIM_TENSOR];
    if (t->config->kv_heads >= tensor) return NULL;
    const int sharers = tensor / (int)t->config->kv_heads;
    int *ranks = xcalloc((uint64_t)sharers, sizeof *ranks), index[DIM_COUNT];
    memcpy(index, t->grid.index, sizeof index);
    const int first = index[DIM_TENSOR] / sharers * sharers;
    for (int i = 0; i < sharers; i++) {
        index[DIM_TENSOR] = first + i;
        ranks[i] = grid_rank_at(&t->grid, index);
    }
    Group *group = comm_group(t->comm, "shared key/value heads", ranks, sharers);
    free(ranks);
    return group;
}

/* Every transfer has a buffer of its own until it is done; two of them may be grouped under a third operation, and
 * the other lanes have one operation each. */
static void reserve_operations(Trainer *t) {
    const Schedule *s = &t->schedule;
    const int transfers = s->input_buffers + s->output_buffers + s->grad_input_buffers + s->grad_output_buffers;
    if (t->groups.world) comm_reserve(t->comm, 2 * transfers + LANE_COUNT);
}

static void make_groups(Trainer *t) {
    if (!t->comm || t->grid.world_size == 1) return;
    t->groups.world = comm_world(t->comm);
    t->groups.tensor = make_group(t, "tensor", DIM_BIT(DIM_TENSOR));
    t->groups.pipeline = make_group(t, "pipeline", DIM_BIT(DIM_PIPELINE));
    t->groups.data = make_group(t, "data", DIM_BIT(DIM_DATA));
    t->groups.embedding = make_embedding_group(t);
    t->groups.kv_sharers = make_kv_group(t);
}

static void take_memory(Trainer *t, int slots, bool training) {
    model_take(&t->model, &t->arena, slots, training);
    if (training) optimizer_take(&t->optimizer, &t->arena, &t->model.tensors);
    pipeline_take(&t->pipeline, &t->arena);
}

/* What is held outside the arena; all of it is there before the first step. */
static void note_memory(Trainer *t, bool training) {
    const Config *c = t->config;
    arena_note(&t->arena, OWNER_WORKSPACE, "run", (size_t)kernels_prepare(c->dtype), "packing of matrix products");
    if (t->groups.world) {
        arena_note(&t->arena, OWNER_COMMUNICATION, "run", (size_t)comm_held_bytes(t->comm), "messages between ranks");
    }
    if (training) {
        arena_note(&t->arena, OWNER_DATA, "run", (size_t)loader_bytes(c->micro_batch, c->seq_len),
                   "batches read ahead");
    }
    if (c->valid_data[0]) {
        const int64_t bytes = batch_bytes(c->micro_batch, c->seq_len);
        arena_note(&t->arena, OWNER_DATA, "run", (size_t)bytes, "batch of held-out windows");
        t->eval_batch = xcalloc(1, (uint64_t)bytes);
    }
}

static void set_coordinates(const Trainer *t) {
    char text[64];
    snprintf(text, sizeof text, "d%d p%d t%d", t->grid.index[DIM_DATA], t->grid.index[DIM_PIPELINE],
             t->grid.index[DIM_TENSOR]);
    log_set_rank(t->grid.rank, text);
}

void trainer_create(Trainer *t, const Config *config, Launch *launch, Comm *comm, bool training, bool guarded) {
    static const char *const lane_names[LANE_COUNT] = {"compute", "pipeline forward", "pipeline backward", "data"};
    *t = (Trainer){.config = config, .comm = comm, .last_loss = NAN};
    make_grid(t, comm ? launch : NULL);
    if (comm && t->grid.world_size > 1) set_coordinates(t);
    make_groups(t);
    for (int lane = 0; lane < LANE_COUNT; lane++) {
        t->lanes[lane] = stream_create(lane_names[lane], lane == LANE_COMPUTE ? STREAM_COMPUTE : STREAM_COMM);
    }
    t->schedule = schedule_build(config->schedule, config->pipeline, t->grid.index[DIM_PIPELINE], 1,
                                 (int)config->accumulation);
    reserve_operations(t);
    model_init(&t->model, config, &t->grid, &t->groups, t->lanes[LANE_COMPUTE]);
    optimizer_init(&t->optimizer, config);
    pipeline_init(&t->pipeline, &t->model, &t->schedule, comm, t->lanes);
    const int slots = training ? t->schedule.slots : 1;
    arena_plan_begin(&t->arena, guarded);
    take_memory(t, slots, training);
    note_memory(t, training);
    Error err;
    trainer_require(t, preflight_memory(t, &err), &err);
    arena_commit(&t->arena);
    take_memory(t, slots, training);
    arena_seal(&t->arena);
    if (comm && t->grid.world_size > 1) comm_register(comm, &t->arena.memory);
    model_fill(&t->model, true);
    if (training) optimizer_zero(&t->optimizer, &t->model.tensors, t->lanes[LANE_COMPUTE]);
}

void trainer_require(const Trainer *t, int rc, Error *err) {
    if (comm_agree(t->groups.world, rc, err) != 0) launch_die_together(err);
}

void trainer_destroy(Trainer *t) {
    pipeline_free(&t->pipeline);
    model_free(&t->model);
    arena_free(&t->arena);
    for (int lane = 0; lane < LANE_COUNT; lane++) stream_destroy(t->lanes[lane]);
    schedule_free(&t->schedule);
    grid_free(&t->grid);
    free(t->seats);
    free(t->eval_batch);
    *t = (Trainer){0};
}

enum { SUM_LOSS, SUM_TOKENS, SUM_SQUARES, SUM_STOPS, SUM_COUNT };

/* Sums over the world what only one rank of each kind contributes. */
static void reduce_sums(Trainer *t, double sums[SUM_COUNT]) {
    if (t->groups.world) comm_host_reduce(t->groups.world, sums, SUM_COUNT, COMM_SUM);
}

/* Loss is the same on all tensor ranks of the last stage: the first of them speaks for its data rank. */
static void add_loss(const Trainer *t, double sums[SUM_COUNT]) {
    if (!t->model.last || t->grid.index[DIM_TENSOR] != 0) return;
    sums[SUM_LOSS] = t->model.loss_sum;
    sums[SUM_TOKENS] = (double)t->model.loss_tokens;
}

StepResult trainer_step(Trainer *t, const BatchSource *source, bool stop_requested) {
    const Config *c = t->config;
    const double batch_tokens = (double)c->global_batch * (double)c->seq_len;
    t->pipeline.step = t->step + 1;
    model_begin_step(&t->model);
    pipeline_train(&t->pipeline, source, 1.0 / batch_tokens);
    double sums[SUM_COUNT] = {[SUM_STOPS] = stop_requested};
    add_loss(t, sums);
    /* After the reduction over data ranks all replicas hold the same gradients: the first one counts. */
    if (t->grid.index[DIM_DATA] == 0) {
        sums[SUM_SQUARES] = gradient_squared_norm(&t->model.tensors, t->model.grads, c->dtype, t->model.compute);
    }
    reduce_sums(t, sums);
    const int64_t update = t->step - t->skipped;
    /* The backward pass divided by all tokens of the batch; the mean is over the unmasked ones. */
    const double correction = batch_tokens / sums[SUM_TOKENS];
    StepResult r = {.loss = sums[SUM_LOSS] / sums[SUM_TOKENS],
                    .grad_norm = sqrt(sums[SUM_SQUARES]) * correction,
                    .lr = learning_rate(c, update),
                    .tokens = (int64_t)sums[SUM_TOKENS],
                    .stop = sums[SUM_STOPS] > 0.0};
    r.skipped = r.tokens == 0 || !isfinite(r.loss) || !isfinite(r.grad_norm);
    if (!r.skipped) {
        double clip = c->clip > 0.0 && r.grad_norm > c->clip ? c->clip / r.grad_norm : 1.0;
        launch_watch_phase("optimizer", t->pipeline.step);
        optimizer_step(&t->optimizer, &t->model.tensors, t->model.params, t->model.grads, update, r.lr,
                       correction * clip, t->model.compute);
        t->last_loss = r.loss;
    }
    t->step++;
    t->samples += c->global_batch;
    t->tokens += c->global_batch * c->seq_len;
    t->skipped += r.skipped;
    t->skipped_in_row = r.skipped ? t->skipped_in_row + 1 : 0;
    return r;
}

/* Whether some rank was asked to stop, agreed by all. */
static bool any_stop(const Trainer *t, bool asked) {
    double stop = asked;
    if (t->groups.world) comm_host_reduce(t->groups.world, &stop, 1, COMM_MAX);
    return stop > 0.0;
}

Evaluation trainer_evaluate(Trainer *t, const BatchSource *source, int64_t n, bool (*asked_to_stop)(void)) {
    t->pipeline.step = t->step;
    t->model.loss_sum = 0.0;
    t->model.loss_tokens = 0;
    Evaluation e = {.loss = NAN};
    for (int64_t done = 0; done < n && !e.stopped; done += t->config->accumulation) {
        launch_watch_deadline(t->config->timeout_s);
        pipeline_evaluate(&t->pipeline, source, min_i64(t->config->accumulation, n - done));
        if (asked_to_stop) e.stopped = any_stop(t, asked_to_stop());
    }
    launch_watch_deadline(0.0);
    double sums[SUM_COUNT] = {0};
    add_loss(t, sums);
    reduce_sums(t, sums);
    e.tokens = (int64_t)sums[SUM_TOKENS];
    if (e.tokens > 0 && !e.stopped) e.loss = sums[SUM_LOSS] / sums[SUM_TOKENS];
    return e;
}
