/* generate.c - `trident generate`: text from a checkpoint of any layout, on one process.
 * In: checkpoint, prompt, sampling options. Out: text on standard output.
 * Keys and values of earlier tokens are kept where the forward pass wrote them: a further token is a
 * forward pass over the next row of the same activations. Where the context is full, its later half
 * is read again from the start. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/cores.h"
#include "base/rng.h"
#include "data/tokenizer.h"
#include "train/commands.h"
#include "train/trainer.h"

typedef struct {
    double temperature, top_p;
    int64_t top_k; /* 0: all */
    uint64_t seed;
} Sampling;

typedef struct {
    Trainer trainer;
    int64_t filled;   /* rows of the context that are computed */
    int32_t *context; /* (seq_len) */
    int64_t n_context;
    struct Candidate {
        double logit;
        int32_t id;
    } * candidates;       /* (n_candidates) */
    int64_t n_candidates; /* the tokenizer's; a model may have more rows than that */
} Generator;

/* Address of row `row` of an activation with the given columns; NULL stays NULL. */
static void *row_of(void *base, int64_t row, int64_t columns, DType dtype) {
    return base ? (char *)base + row * columns * (int64_t)dtype_size(dtype) : NULL;
}

static void shift_block(BlockActivations *a, const Dims *d, int64_t row, DType dtype) {
    const DType stat = stat_dtype(dtype);
    a->x = row_of(a->x, row, d->C, dtype);
    a->mean1 = row_of(a->mean1, row, 1, stat);
    a->rstd1 = row_of(a->rstd1, row, 1, stat);
    a->n1 = row_of(a->n1, row, d->C, dtype);
    a->qkv = row_of(a->qkv, row, d->QKV_local, dtype);
    a->att = row_of(a->att, row, d->H_local * d->D, dtype);
    a->x_mid = row_of(a->x_mid, row, d->C, dtype);
    a->mean2 = row_of(a->mean2, row, 1, stat);
    a->rstd2 = row_of(a->rstd2, row, 1, stat);
    a->n2 = row_of(a->n2, row, d->C, dtype);
    a->pre = row_of(a->pre, row, d->up_columns, dtype);
    a->act = row_of(a->act, row, d->F_local, dtype);
}

/* Computes the rows [filled, n_context): the model sees a micro-batch of just those rows. */
static void compute_rows(Generator *g) {
    Model view = g->trainer.model;
    Slot slot = g->trainer.model.slots[0];
    const Dims *d = &g->trainer.model.dims;
    const DType dtype = view.config->dtype;
    const int64_t first = g->filled, count = g->n_context - first;
    BlockActivations *blocks = xcalloc((uint64_t)view.layers.count, sizeof *blocks);
    memcpy(blocks, slot.blocks, (size_t)view.layers.count * sizeof *blocks);
    for (int64_t l = 0; l < view.layers.count; l++) shift_block(&blocks[l], d, first, dtype);
    for (int64_t i = first; i < g->n_context; i++) {
        slot.tokens[i] = g->context[i];
        slot.positions[i] = (int32_t)i;
    }
    slot.blocks = blocks;
    slot.tokens += first;
    slot.positions += first;
    slot.x_embed = row_of(slot.x_embed, first, d->C, dtype);
    slot.x_final = row_of(slot.x_final, first, d->C, dtype);
    slot.n_final = row_of(slot.n_final, first, d->C, dtype);
    slot.mean_final = row_of(slot.mean_final, first, 1, stat_dtype(dtype));
    slot.rstd_final = row_of(slot.rstd_final, first, 1, stat_dtype(dtype));
    view.slots = &slot;
    view.dims.B = 1;
    view.dims.T = view.dims.N = view.dims.N_local = count;
    view.dims.T_past = first;
    model_forward(&view, 0, NULL, NULL);
    free(blocks);
    g->filled = g->n_context;
}

/* Logits of the last computed row. */
static void compute_candidates(Generator *g) {
    const Model *m = &g->trainer.model;
    const Dims *d = &m->dims;
    const DType dtype = m->config->dtype;
    const void *x = row_of(m->slots[0].n_final, g->filled - 1, d->C, dtype);
    matmul(m->work.logits, d->V_local, x, d->C, false, m->head_w, d->C, true, 1, d->V_local, d->C, false, NULL, dtype,
           m->compute);
    for (int64_t i = 0; i < g->n_candidates; i++) {
        g->candidates[i].id = (int32_t)i;
        g->candidates[i].logit = dtype == DT_F64 ? ((double *)m->work.logits)[i] : ((float *)m->work.logits)[i];
    }
}

static int by_logit_descending(const void *a, const void *b) {
    const struct Candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return x->id - y->id;
}

/* Temperature, then the top_k likeliest, then the smallest set of at least top_p (Holtzman et al. 2020). */
static int32_t sample(Generator *g, const Sampling *s, uint64_t draw) {
    const int64_t n = g->n_candidates;
    struct Candidate *c = g->candidates;
    qsort(c, (size_t)n, sizeof *c, by_logit_descending);
    if (!isfinite(c[0].logit)) die(EXIT_NUMBERS, "the model's logits are not finite");
    if (s->temperature == 0.0) return c[0].id;
    int64_t kept = s->top_k ? min_i64(s->top_k, n) : n;
    double total = 0.0, best = c[0].logit;
    for (int64_t i = 0; i < kept; i++) {
        c[i].logit = exp((c[i].logit - best) / s->temperature);
        total += c[i].logit;
    }
    double nucleus = 0.0;
    for (int64_t i = 0; i < kept; i++) {
        nucleus += c[i].logit;
        if (nucleus >= s->top_p * total) kept = i + 1;
    }
    double left = rng_uniform(s->seed, rng_stream("generate"), draw) * nucleus;
    for (int64_t i = 0; i < kept; i++) {
        left -= c[i].logit;
        if (left < 0.0) return c[i].id;
    }
    return c[kept - 1].id;
}

static void append(Generator *g, int32_t token) {
    const int64_t T = g->trainer.config->seq_len;
    if (g->n_context == T) {
        const int64_t dropped = max_i64(T / 2, 1); /* a context of one token keeps nothing */
        g->n_context = T - dropped;
        memmove(g->context, g->context + dropped, (size_t)g->n_context * sizeof *g->context);
        g->filled = 0;
    }
    g->context[g->n_context++] = token;
}

static void print_token(const Tokenizer *tokenizer, int32_t id) {
    size_t bytes;
    const char *text = tokenizer_token(tokenizer, id, &bytes);
    fwrite(text, 1, bytes, stdout);
}

static void generate(Generator *g, const Tokenizer *tokenizer, const char *prompt, const Sampling *s, int64_t n) {
    int32_t *ids = NULL;
    int64_t n_ids = 0, capacity = 0;
    tokenizer_encode(tokenizer, prompt, strlen(prompt), &ids, &n_ids, &capacity);
    /* What a document begins with is what follows the end of another. */
    append(g, tokenizer_end_of_document(tokenizer));
    for (int64_t i = 0; i < n_ids; i++) append(g, ids[i]);
    free(ids);
    fputs(prompt, stdout);
    for (int64_t i = 0; i < n; i++) {
        compute_rows(g);
        compute_candidates(g);
        int32_t token = sample(g, s, (uint64_t)i);
        if (token == tokenizer_end_of_document(tokenizer)) break;
        print_token(tokenizer, token);
        fflush(stdout);
        append(g, token);
    }
    putchar('\n');
}

/* The checkpoint's own model on one process. */
static void load_config(Config *config, const CheckpointState *state, const char *step_dir, const char *threads) {
    char *overrides[] = {"parallel.ranks=1",
                         "parallel.data=1",
                         "parallel.pipeline=1",
                         "parallel.tensor=1",
                         "train.micro_batch=1",
                         "train.global_batch=1",
                         "parallel.sequence_parallel=auto",
                         "data.mask_documents=no",
                         (char *)(uintptr_t)threads};
    const int n = sizeof overrides / sizeof overrides[0];
    int errors = config_load_text(config, state->config_text, step_dir, overrides, n, stderr);
    if (!errors) errors = config_resolve_world(config, 1, stderr);
    if (!errors) errors = config_resolve_model(config, 0, stderr);
    if (errors) die(EXIT_CHECKPOINT, "%s: the config in the manifest does not load", step_dir);
}

static void load_model(Generator *g, Config *config, const char *dir) {
    Error err = {0};
    char *step_dir = checkpoint_find(dir, &err);
    if (!step_dir && !err.status) checkpoint_missing(dir, &err);
    if (!step_dir) die_error(&err);
    CheckpointState state;
    if (checkpoint_read_state(step_dir, &state, &err) != 0) die_error(&err);
    char *threads = xasprintf("train.threads=%d", cores_allowed());
    load_config(config, &state, step_dir, threads);
    free(threads);
    kernels_init(config->threads);
    trainer_create(&g->trainer, config, NULL, NULL, false, false);
    int n;
    CheckpointPiece *pieces = trainer_pieces(&g->trainer, false, &n);
    if (checkpoint_load(step_dir, pieces, n, &err) != 0) die_error(&err);
    trainer_pieces_free(pieces, n);
    checkpoint_state_free(&state);
    free(step_dir);
    g->context = xcalloc((uint64_t)config->seq_len, sizeof *g->context);
}

static const Option options[] = {
    {"--checkpoint", "DIR", "a checkpoint directory, or one step of it", false},
    {"--prompt", "TEXT", "text to go on from", false},
    {"--tokens", "N", "how many tokens to add (256)", false},
    {"--temperature", "X", "0: always the likeliest token (0.8)", false},
    {"--top-k", "N", "only the N likeliest tokens; 0: all (0)", false},
    {"--top-p", "X", "only the likeliest tokens that make up this probability (0.95)", false},
    {"--seed", "N", "the same seed gives the same text (1)", false},
    {"--tokenizer", "bytes|DIR", "in place of the tokenizer that the checkpoint names", false},
};

int command_generate(int argc, char **argv) {
    const CommandLine line = {.usage = "trident generate --checkpoint DIR --prompt TEXT [options]",
                              .options = options,
                              .n_options = sizeof options / sizeof options[0],
                              .argc = argc,
                              .argv = argv};
    char **words;
    if (command_words(&line, &words) != 0) usage_error(&line, "%s is no option", words[0]);
    free(words);
    const char *dir = option_value(&line, "--checkpoint"), *prompt = option_value(&line, "--prompt");
    if (!dir) usage_error(&line, "--checkpoint is missing");
    if (!prompt) usage_error(&line, "--prompt is missing");
    const Sampling sampling = {.temperature = option_double(&line, "--temperature", 0.8, 0.0, 100.0),
                               .top_p = option_double(&line, "--top-p", 0.95, 0.0, 1.0),
                               .top_k = option_int(&line, "--top-k", 0, 0, INT32_MAX),
                               .seed = (uint64_t)option_int(&line, "--seed", 1, 0, INT64_MAX)};
    const int64_t n = option_int(&line, "--tokens", 256, 0, INT32_MAX);
    Config config;
    Generator g = {0};
    load_model(&g, &config, dir);
    Error err;
    const char *spec = option_value(&line, "--tokenizer");
    if (!spec && !config.tokenizer[0]) {
        die(EXIT_CONFIG, "%s: its config names no data.tokenizer; give --tokenizer bytes|DIR", dir);
    }
    Tokenizer *tokenizer = tokenizer_open(spec ? spec : config.tokenizer, &err);
    if (!tokenizer) die_error(&err);
    if (tokenizer_vocab(tokenizer) > config.vocab) {
        die(EXIT_CONFIG, "the tokenizer %s has %" PRId64 " tokens, the model %" PRId64, spec ? spec : config.tokenizer,
            tokenizer_vocab(tokenizer), config.vocab);
    }
    g.n_candidates = tokenizer_vocab(tokenizer);
    g.candidates = xcalloc((uint64_t)g.n_candidates, sizeof *g.candidates);
    generate(&g, tokenizer, prompt, &sampling, n);
    tokenizer_close(tokenizer);
    trainer_destroy(&g.trainer);
    free(g.context);
    free(g.candidates);
    config_free(&config);
    return EXIT_DONE;
}
