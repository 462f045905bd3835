/* selftest.c - `trident selftest CONFIG`: the same model on one rank and on the configured grid.
 * In: the user's config. Out: a page that compares losses, gradient norms, first-step gradients and
 * final parameters; the first tensor that differs, and EXIT_NUMBERS.
 *
 * All ranks train the model on the grid. Rank 0 then trains it once more, alone, on the same samples,
 * and compares with the parts that it gathered from all ranks. Samples are random tokens, a pure
 * function of (seed, sample), so that no data file is needed.
 *
 * Tolerances: u is the unit roundoff of the precision. Sums over ranks associate differently, so that a
 * gradient of length-n sums differs by about sqrt(n) u of its norm through each of the layers; losses
 * average many such terms. For fp64 (u = 1.1e-16) 1e-11 leaves a factor of 1e3 over what n = 1e4 gives; the
 * parameters get 1e-9 since Adam divides by the root of the second moment, and a gradient that is zero
 * but for rounding (a key bias) is divided by eps. For fp32 (u = 6e-8) the same reasoning gives 1e-6 for
 * losses, 1e-4 for gradients; parameters 1e-3, where eps keeps such rounding from becoming a step. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/rng.h"
#include "kernels/kernels.h"
#include "train/commands.h"
#include "train/run.h"
#include "train/trainer.h"

typedef struct {
    double loss, gradient, parameter;
} Tolerance;

static Tolerance tolerance_of(Precision precision) {
    if (precision == PRECISION_FP64) return (Tolerance){1e-11, 1e-11, 1e-9};
    return (Tolerance){1e-6, 1e-4, 1e-3};
}

/* ---- random samples ---- */

typedef struct {
    const Config *config;
    int data_size, data_rank;
    int64_t next_micro_batch;
    Batch batch;
} RandomSource;

/* Documents of 1 to 16 tokens; without masking the whole window is one. */
static void fill_sample(const Config *c, int64_t k, Batch *b, int64_t row) {
    const int64_t T = c->seq_len;
    const uint64_t stream = rng_stream("selftest");
    const uint64_t first = (uint64_t)k * (uint64_t)(T + 1);
    int64_t start = 0;
    for (int64_t t = 0; t < T; t++) {
        const int64_t i = row * T + t;
        const bool next_begins = c->mask_documents && rng_bits(c->seed, stream + 1, first + (uint64_t)t + 1) % 8 == 0;
        b->tokens[i] = (int32_t)(rng_bits(c->seed, stream, first + (uint64_t)t) % (uint64_t)c->vocab);
        b->targets[i] = (int32_t)(rng_bits(c->seed, stream, first + (uint64_t)t + 1) % (uint64_t)c->vocab);
        if (next_begins) b->targets[i] = -1;
        b->doc_start[i] = (int32_t)start;
        b->positions[i] = (int32_t)(t - start);
        if (next_begins) start = t + 1;
    }
}

static const Batch *next_random(void *context, Error *err) {
    (void)err;
    RandomSource *r = context;
    const Config *c = r->config;
    const int64_t accumulation = c->global_batch / (c->micro_batch * r->data_size);
    const int64_t step = r->next_micro_batch / accumulation, j = r->next_micro_batch % accumulation;
    r->next_micro_batch++;
    for (int64_t i = 0; i < c->micro_batch; i++) {
        int64_t k = step * c->global_batch + (j * r->data_size + r->data_rank) * c->micro_batch + i;
        fill_sample(c, k, &r->batch, i);
    }
    return &r->batch;
}

/* ---- one training run and what it leaves ---- */

/* A tensor's values as rank 0 gets them: this header, then real_count values, first the gradient after one
 * step, then the parameter after all steps; all fp64. */
typedef struct {
    char name[64];
    int64_t shape[2], first[2], count[2], real_count;
} PartHeader;

typedef struct {
    Trainer trainer;
    StepResult *results; /* (steps) */
    double *gradients;   /* (n_elements) after the first step */
} Trial;

static double value_at(const void *flat, int64_t i, DType dtype) {
    return dtype == DT_F64 ? ((const double *)flat)[i] : (double)((const float *)flat)[i];
}

/* Planned is used: nothing was written behind a buffer, and each was written, all of it. */
static void check_memory(const Arena *arena) {
    const char *overrun = arena_check(arena);
    if (overrun) die(EXIT_NUMBERS, "something was written behind the buffer \"%s\"", overrun);
    for (int i = 0; i < arena->n_entries; i++) {
        const MemoryEntry *e = &arena->entries[i];
        const size_t used = arena_high_water(arena, i), untouched = arena_untouched(arena, i);
        if (used == e->bytes && untouched == 0) continue;
        die(EXIT_NUMBERS,
            "the buffer \"%s\" (%s) has %zu bytes in the memory plan, but the run left %zu of them untouched (the "
            "last one that it wrote is number %zu)",
            e->name, memory_owner_name(e->owner), e->bytes, untouched > e->bytes - used ? untouched : e->bytes - used,
            used);
    }
}

static void run_trial(Trial *trial, const Config *c, Launch *launch, Comm *comm, int64_t steps) {
    Trainer *t = &trial->trainer;
    trainer_create(t, c, launch, comm, true, true);
    RandomSource random = {.config = c, .data_size = t->grid.size[DIM_DATA], .data_rank = t->grid.index[DIM_DATA]};
    const uint64_t n = (uint64_t)(c->micro_batch * c->seq_len);
    int32_t *memory = xcalloc(4 * n, sizeof *memory);
    random.batch = batch_in(memory, c->micro_batch, c->seq_len);
    const BatchSource source = {next_random, &random};
    trial->results = xcalloc((uint64_t)steps, sizeof *trial->results);
    trial->gradients = xcalloc((uint64_t)t->model.tensors.n_elements, sizeof *trial->gradients);
    for (int64_t step = 0; step < steps; step++) {
        trial->results[step] = trainer_step(t, &source, false);
        if (step > 0) continue;
        for (int64_t i = 0; i < t->model.tensors.n_elements; i++) {
            trial->gradients[i] = value_at(t->model.grads, i, c->dtype);
        }
    }
    free(memory);
    check_memory(&t->arena);
}

static void free_trial(Trial *trial) {
    free(trial->results);
    free(trial->gradients);
    trainer_destroy(&trial->trainer);
}

/* This rank's parts, one behind the other; those of other replicas are left out. */
static char *pack_parts(const Trial *trial, int64_t *bytes) {
    const Trainer *t = &trial->trainer;
    char *packed = NULL;
    *bytes = 0;
    for (int i = 0; i < t->model.tensors.n; i++) {
        const Tensor *tensor = &t->model.tensors.list[i];
        if (!tensor->counted || t->grid.index[DIM_DATA] != 0) continue;
        PartHeader h = {.shape = {tensor->shape[0], tensor->shape[1]},
                        .count = {tensor->local[0], tensor->local[1]},
                        .real_count = tensor_real_count(tensor)};
        memcpy(h.name, tensor->name, sizeof h.name);
        if (tensor->split != SPLIT_NONE) {
            h.first[tensor->split] = tensor->part.first;
            h.count[tensor->split] = tensor->part.count;
        }
        const int64_t size = (int64_t)sizeof h + 2 * h.real_count * (int64_t)sizeof(double);
        packed = xrealloc(packed, (uint64_t)(*bytes + size));
        char *at = packed + *bytes;
        memcpy(at, &h, sizeof h);
        double *values = (double *)(at + sizeof h);
        for (int64_t k = 0; k < h.real_count; k++) {
            values[k] = trial->gradients[tensor->offset + k];
            values[h.real_count + k] = value_at(t->model.params, tensor->offset + k, t->config->dtype);
        }
        *bytes += size;
    }
    return packed;
}

/* ---- comparison, on rank 0 ---- */

typedef struct {
    double error, norm; /* squared, summed over parts */
    int64_t elements;
} Difference;

typedef struct {
    double loss, grad_norm, gradient, parameter; /* worst relative differences */
    const char *worst_gradient, *worst_parameter;
    char first_bad[128];
} Verdict;

static void add_part(const PartHeader *h, const double *values, const double *whole, Difference *d) {
    for (int64_t k = 0; k < h->real_count; k++) {
        const int64_t row = h->first[0] + k / h->count[1], column = h->first[1] + k % h->count[1];
        const double reference = whole[row * h->shape[1] + column];
        const double error = values[k] - reference;
        d->error += error * error;
        d->norm += reference * reference;
        d->elements++;
    }
}

/* kind: 0 gradient, 1 parameter. */
static Difference compare_tensor(const Trial *alone, const Tensor *tensor, const char *parts, int64_t bytes, int kind) {
    Difference d = {0};
    const Trainer *t = &alone->trainer;
    double *whole = xmalloc((uint64_t)tensor->count * sizeof *whole);
    for (int64_t k = 0; k < tensor->count; k++) {
        whole[k] = kind ? value_at(t->model.params, tensor->offset + k, t->config->dtype)
                        : alone->gradients[tensor->offset + k];
    }
    for (int64_t at = 0; at < bytes;) {
        PartHeader h;
        memcpy(&h, parts + at, sizeof h);
        const double *values = (const double *)(parts + at + sizeof h);
        if (strcmp(h.name, tensor->name) == 0) add_part(&h, values + kind * h.real_count, whole, &d);
        at += (int64_t)sizeof h + 2 * h.real_count * (int64_t)sizeof(double);
    }
    free(whole);
    if (d.elements != tensor->shape[0] * tensor->shape[1]) {
        die(EXIT_NUMBERS, "%s: the ranks hold %" PRId64 " elements of it, it has %" PRId64, tensor->name, d.elements,
            tensor->shape[0] * tensor->shape[1]);
    }
    return d;
}

static double relative(double a, double b) { return fabs(a - b) / fmax(fabs(b), 1e-300); }

static void keep_worst(Verdict *v, const Tensor *tensor, int kind, double error, double allowed) {
    double *worst = kind ? &v->parameter : &v->gradient;
    const char **name = kind ? &v->worst_parameter : &v->worst_gradient;
    if (!(error <= *worst)) {
        *worst = error;
        *name = tensor->name;
    }
    if (!(error <= allowed) && !v->first_bad[0]) {
        snprintf(v->first_bad, sizeof v->first_bad, "%s (%s)", tensor->name, kind ? "parameter" : "gradient");
    }
}

static Verdict compare(const Trial *grid, const Trial *alone, const char *parts, int64_t bytes, int64_t steps,
                       const Tolerance *allowed) {
    Verdict v = {.worst_gradient = "-", .worst_parameter = "-"};
    for (int64_t s = 0; s < steps; s++) {
        /* fmax would drop a NaN. */
        double loss = relative(grid->results[s].loss, alone->results[s].loss);
        double norm = relative(grid->results[s].grad_norm, alone->results[s].grad_norm);
        if (!(loss <= v.loss)) v.loss = loss;
        if (!(norm <= v.grad_norm)) v.grad_norm = norm;
    }
    const TensorTable *tensors = &alone->trainer.model.tensors;
    const double batch_tokens = (double)alone->trainer.config->global_batch * (double)alone->trainer.config->seq_len;
    const double global_norm = alone->results[0].grad_norm * (double)alone->results[0].tokens / batch_tokens;
    for (int i = 0; i < tensors->n; i++) {
        const Tensor *tensor = &tensors->list[i];
        Difference d = compare_tensor(alone, tensor, parts, bytes, 0);
        double scale = fmax(sqrt(d.norm), 1e-3 * global_norm);
        keep_worst(&v, tensor, 0, sqrt(d.error) / scale, allowed->gradient);
        d = compare_tensor(alone, tensor, parts, bytes, 1);
        scale = fmax(sqrt(d.norm), 1e-3 * sqrt((double)d.elements));
        keep_worst(&v, tensor, 1, sqrt(d.error) / scale, allowed->parameter);
    }
    return v;
}

static bool print_row(const char *what, double worst, double allowed, const char *where) {
    const bool good = worst <= allowed;
    printf("  %-26s %12.3e %12.0e   %-6s %s\n", what, worst, allowed, good ? "equal" : "DIFFERS", where);
    return good;
}

static bool print_verdict(const Config *c, const Verdict *v, const Tolerance *allowed, int64_t steps) {
    printf("%s, %" PRId64 " steps on one rank and on data %d x pipeline %d x tensor %d:\n",
           c->precision == PRECISION_FP64 ? "fp64" : "fp32", steps, c->data, c->pipeline, c->tensor);
    printf("  %-26s %12s %12s   %-6s %s\n", "largest relative difference", "found", "allowed", "", "worst tensor");
    bool good = print_row("loss", v->loss, allowed->loss, "");
    good &= print_row("gradient norm", v->grad_norm, fmax(allowed->loss, allowed->gradient), "");
    good &= print_row("gradient of each tensor", v->gradient, allowed->gradient, v->worst_gradient);
    good &= print_row("each final parameter", v->parameter, allowed->parameter, v->worst_parameter);
    if (v->first_bad[0]) printf("  first tensor that differs: %s\n", v->first_bad);
    return good;
}

/* On all ranks: trains on the grid; rank 0 also alone, and compares. */
static bool prove(const Config *c, const Config *single, Launch *launch, Comm *comm, int64_t steps) {
    Trial grid = {0}, alone = {0};
    run_trial(&grid, c, launch, comm, steps);
    int64_t bytes;
    char *mine = pack_parts(&grid, &bytes);
    Group *world = grid.trainer.groups.world;
    int64_t *lengths = xcalloc((uint64_t)grid.trainer.grid.world_size, sizeof *lengths);
    char *all = mine;
    if (world) {
        all = comm_host_gather(world, mine, bytes, lengths);
        free(mine);
        bytes = 0;
        for (int i = 0; i < grid.trainer.grid.world_size; i++) bytes += lengths[i];
    }
    free(lengths);
    double bad = 0.0;
    if (grid.trainer.grid.rank == 0) {
        const Tolerance allowed = tolerance_of(c->precision);
        run_trial(&alone, single, NULL, NULL, steps);
        Verdict v = compare(&grid, &alone, all, bytes, steps, &allowed);
        bad = !print_verdict(c, &v, &allowed, steps);
        free_trial(&alone);
    }
    if (world) comm_host_reduce(world, &bad, 1, COMM_SUM);
    free(all);
    free_trial(&grid);
    return bad == 0.0;
}

/* ---- the small model with the user's layout ---- */

/* Settings that make the user's model small but keep what matters to the layout: the grid, the kind of model,
 * the ratio of heads, stages that hold different numbers of layers, tied or not, masked or not. */
static int small_model(const Config *c, char **overrides) {
    int n = 0;
    const int64_t kv = c->kv_heads >= c->tensor ? c->tensor : c->kv_heads;
    int64_t heads = kv * min_i64(c->heads / c->kv_heads, 4);
    if (heads % c->tensor != 0) heads = round_up(heads, c->tensor);
    const int64_t accumulation = min_i64(c->accumulation, 2 * c->pipeline);
    overrides[n++] = xasprintf("model.layers=%d", c->pipeline > 1 ? c->pipeline + 1 : 2);
    overrides[n++] = xasprintf("model.heads=%" PRId64, heads);
    overrides[n++] = xasprintf("model.kv_heads=%" PRId64, kv);
    overrides[n++] = xasprintf("model.hidden=%" PRId64, 16 * heads);
    overrides[n++] = xasprintf("model.ffn=%" PRId64, (int64_t)24 * c->tensor);
    overrides[n++] = xasprintf("model.vocab=101");
    overrides[n++] = xasprintf("model.seq_len=%d", 8 * c->tensor);
    overrides[n++] = xasprintf("train.micro_batch=1");
    overrides[n++] = xasprintf("train.global_batch=%" PRId64, accumulation * c->data);
    return n;
}

/* Settings that do not belong to the proof: its length, files, and an eps under which rounding noise in fp32 does
 * not become a step of its own. */
static int common_settings(const Config *c, int64_t steps, Precision precision, char **overrides) {
    int n = 0;
    overrides[n++] = xasprintf("train.steps=%" PRId64, steps);
    overrides[n++] = xasprintf("train.tokens=0");
    overrides[n++] = xasprintf("train.precision=%s", precision == PRECISION_FP64 ? "fp64" : "fp32");
    overrides[n++] = xasprintf("train.eval_every=0");
    overrides[n++] = xasprintf("optimizer.warmup_steps=%" PRId64, min_i64(c->warmup_steps, steps / 4));
    overrides[n++] = xasprintf("optimizer.decay_steps=%" PRId64, min_i64(c->decay_steps, max_i64(steps / 4, 1)));
    if (precision == PRECISION_FP32) overrides[n++] = xasprintf("optimizer.eps=1e-3");
    return n;
}

static int single_rank_settings(char **overrides) {
    int n = 0;
    overrides[n++] = xasprintf("parallel.ranks=1");
    overrides[n++] = xasprintf("parallel.data=1");
    overrides[n++] = xasprintf("parallel.pipeline=1");
    overrides[n++] = xasprintf("parallel.tensor=1");
    overrides[n++] = xasprintf("parallel.sequence_parallel=auto");
    return n;
}

enum { OVERRIDES_MAX = 32 };

typedef struct {
    const char *path;
    char **user; /* overrides of the command line */
    int n_user;
    bool own_model;
    int64_t steps;
    const Config *config; /* as the user has it */
} Request;

static void load_variant(Config *out, const Request *r, Precision precision, bool single) {
    char **overrides = xcalloc((uint64_t)(r->n_user + OVERRIDES_MAX), sizeof *overrides);
    int n = 0;
    for (int i = 0; i < r->n_user; i++) overrides[n++] = xstrdup(r->user[i]);
    if (!r->own_model) n += small_model(r->config, overrides + n);
    n += common_settings(r->config, r->steps, precision, overrides + n);
    const int world = r->config->data * r->config->pipeline * r->config->tensor;
    if (single) n += single_rank_settings(overrides + n);
    int errors = config_load(out, r->path, overrides, n, stderr);
    if (!errors) errors = config_resolve_world(out, single ? 1 : world, stderr);
    if (!errors) errors = config_resolve_model(out, 0, stderr);
    if (errors) {
        fprintf(stderr, "error: the small model of the self-test does not load with this config (above)\n");
        exit(EXIT_CONFIG);
    }
    for (int i = 0; i < n; i++) free(overrides[i]);
    free(overrides);
}

static const Option options[] = {
    {"--set", "section.key=value", "override a setting; may be repeated", true},
    {"--own-model", NULL, "the config's own model in place of a small one", false},
    {"--steps", "N", "training steps to compare (5)", false},
};

int command_selftest(int argc, char **argv) {
    const CommandLine line = {.usage = "trident selftest CONFIG [--own-model] [--steps N] [--set section.key=value]...",
                              .options = options,
                              .n_options = sizeof options / sizeof options[0],
                              .argc = argc,
                              .argv = argv};
    char **words, **user;
    if (command_words(&line, &words) != 1) usage_error(&line, "one config file is expected");
    Prepared prepared;
    Request request = {.path = words[0],
                       .own_model = option_value(&line, "--own-model") != NULL,
                       .steps = option_int(&line, "--steps", 5, 1, 100000),
                       .config = &prepared.config};
    request.n_user = option_values(&line, "--set", &user);
    request.user = user;
    prepare(&prepared, request.path, request.user, request.n_user, false, false);
    const Precision precisions[] = {PRECISION_FP64, prepared.config.precision};
    const int n = prepared.config.precision == PRECISION_FP64 ? 1 : 2;
    Config grid[2], single[2];
    for (int i = 0; i < n; i++) {
        load_variant(&grid[i], &request, precisions[i], false);
        load_variant(&single[i], &request, precisions[i], true);
    }
    Launch *launch = ranks_start(&prepared.config);
    kernels_init(rank_threads(&prepared.config, launch));
    bool good = true;
    for (int i = 0; i < n; i++) {
        const CommOptions comm_options = {.timeout_s = prepared.config.timeout_s};
        Comm *comm = comm_create(launch, &comm_options);
        good &= prove(&grid[i], &single[i], launch, comm, request.steps);
        comm_destroy(comm);
    }
    if (launch_rank(launch) == 0) printf("%s\n", good ? "selftest passed" : "selftest FAILED");
    fflush(stdout);
    launch_finish(launch);
    for (int i = 0; i < n; i++) {
        config_free(&grid[i]);
        config_free(&single[i]);
    }
    prepared_free(&prepared);
    free(words);
    free(user);
    return good ? EXIT_DONE : EXIT_NUMBERS;
}
