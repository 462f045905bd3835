/* resume.c - continuing a run from a checkpoint, and saving one.
 * In: checkpoint directory, config. Out: trainer and data source as they were.
 * Invariants: rank 0 chooses, all ranks obey; nothing is changed before everything that the config may
 * refuse has been looked at. */
#include "train/resume.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "kernels/kernels.h"

/* Rank 0's text on all ranks; NULL stays NULL. Caller frees. */
static char *from_first_rank(Group *world, char *text) {
    if (!world) return text;
    int64_t *lengths = xcalloc((uint64_t)group_size(world), sizeof *lengths);
    const bool mine = group_rank(world) == 0 && text;
    char *all = comm_host_gather(world, text, mine ? (int64_t)strlen(text) + 1 : 0, lengths);
    free(text);
    char *result = lengths[0] ? xstrdup(all) : NULL;
    free(all);
    free(lengths);
    return result;
}

char *resume_find(const Trainer *t, const char *dir, const char *named) {
    char *found = NULL;
    if (t->grid.rank == 0) {
        Error err = {0};
        found = checkpoint_find(dir, &err);
        if (!found && err.status) die_error(&err);
        if (!found && named) {
            checkpoint_missing(dir, &err);
            die(EXIT_CHECKPOINT, "%s%s", named, err.message);
        }
    }
    return from_first_rank(t->groups.world, found);
}

/* What the rounding depends on, besides the grid and the settings that a resume warns of. Caller frees. */
static char *numerics_text(const Trainer *t) {
    const Config *c = t->config;
    return xasprintf("%s, micro_batch %" PRId64 ", sequence parallelism %s, schedule %s", kernels_numerics(c->dtype),
                     c->micro_batch, c->sequence_parallel_on ? "on" : "off", schedule_kind_name(c->schedule));
}

/* {"skipped_in_row": n, "numerics": text, "corpora": [{"path": p, "drawn": n}, ...]} */
static char *extra_state(const Trainer *t, const DataSource *source, const int64_t *drawn) {
    json_t *corpora = json_array();
    for (int i = 0; i < data_corpora(source); i++) {
        int failed = json_array_append_new(
            corpora, json_pack("{s:s, s:I}", "path", data_corpus_path(source, i), "drawn", (json_int_t)drawn[i]));
        if (failed) die(EXIT_INTERNAL, "%s: this path is not valid UTF-8", data_corpus_path(source, i));
    }
    char *numerics = numerics_text(t);
    json_t *root = json_pack("{s:I, s:s, s:o}", "skipped_in_row", (json_int_t)t->skipped_in_row, "numerics", numerics,
                             "corpora", corpora);
    char *text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    free(numerics);
    REQUIRE(text);
    return text;
}

static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static bool has_corpus(const DataSource *source, const char *path) {
    for (int i = 0; i < data_corpora(source); i++) {
        if (strcmp(data_corpus_path(source, i), path) == 0) return true;
    }
    return false;
}

/* What was drawn of the corpus with this path, else (its folder has moved) of the one with its name that is no
 * longer there under its own path; 0: it is new. en/text may not stand for a new de/text beside it. */
static int64_t drawn_of_path(const json_t *corpora, const DataSource *source, const char *path) {
    size_t i;
    json_t *corpus, *moved = NULL;
    int of_name = 0;
    json_array_foreach(corpora, i, corpus) {
        const char *old = json_string_value(json_object_get(corpus, "path"));
        if (!old) continue;
        if (strcmp(old, path) == 0) return json_integer_value(json_object_get(corpus, "drawn"));
        if (strcmp(file_name(old), file_name(path)) != 0 || has_corpus(source, old)) continue;
        moved = corpus;
        of_name++;
    }
    if (of_name > 1) {
        log_warn(LOG_CKPT,
                 "%s: %d corpora of before have this name, and which of them it is cannot be told: it is "
                 "read from its beginning",
                 path, of_name);
    }
    return of_name == 1 ? json_integer_value(json_object_get(moved, "drawn")) : 0;
}

/* Each corpus goes on behind what was already drawn from it, so that nothing repeats. Where the mix is the one
 * of before, that is where an uninterrupted run would be. */
static void restore_data(DataSource *source, const CheckpointState *state, const json_t *extra) {
    const json_t *corpora = json_object_get(extra, "corpora");
    const int n = data_corpora(source);
    /* The same files in the same order, wherever they are now: their numbers hold. */
    const bool same = state->data_fingerprint == data_fingerprint(source) && state->n_corpora == n;
    int64_t *drawn = xcalloc((uint64_t)n, sizeof *drawn);
    for (int i = 0; i < n; i++) {
        drawn[i] = same ? state->corpus_counters[i] : drawn_of_path(corpora, source, data_corpus_path(source, i));
    }
    data_set_base(source, state->samples, drawn);
    free(drawn);
}

/* Settings of the section (NULL: all) that may not differ and do. Rank 0 prints every difference that matters;
 * *differ (may be NULL): whether there is one. */
static int count_refusals(const Trainer *t, const CheckpointState *state, const char *section, bool *differ) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (!out) die(EXIT_LAUNCH, "out of memory for comparing settings");
    const int refusals = config_compare_resume(t->config, state->config_text, section, out, out);
    fclose(out);
    if (t->grid.rank == 0) fputs(text, stderr);
    if (differ) *differ = bytes > 0;
    free(text);
    return refusals;
}

void resume_check_model(const Trainer *t, const CheckpointState *state, const char *step_dir) {
    if (count_refusals(t, state, "model", NULL) == 0) return;
    Error err;
    error_set(&err, EXIT_CHECKPOINT,
              "%s holds the weights of another model (above); change [model], or name the settings in "
              "checkpoint.allow",
              step_dir);
    launch_die_together(&err);
}

/* *differ: settings that the coming steps depend on are not those of the steps before. */
static void check_may_continue(const Trainer *t, const DataSource *source, const CheckpointState *state,
                               const char *step_dir, bool *differ) {
    const Config *c = t->config;
    Error err;
    if (count_refusals(t, state, NULL, differ)) {
        error_set(&err, EXIT_CHECKPOINT,
                  "%s was written by a run with other settings (above); change them back, name them in "
                  "checkpoint.allow, or start anew with checkpoint.resume = none and another checkpoint.dir",
                  step_dir);
        launch_die_together(&err);
    }
    if (state->data_fingerprint != data_fingerprint(source) && !config_allows(c, "data.train")) {
        error_set(&err, EXIT_CHECKPOINT,
                  "the files of data.train = %s are not those that %s was trained on (fingerprint "
                  "%016" PRIx64 ", was %016" PRIx64 "); checkpoint.allow = data.train accepts that",
                  c->train_data, step_dir, data_fingerprint(source), state->data_fingerprint);
        launch_die_together(&err);
    }
}

/* Whether the run goes on with the bits of one that was never stopped, or why that cannot be promised. */
static void print_promise(const Trainer *t, const CheckpointState *state, const json_t *extra, bool differ) {
    const int *now = t->grid.size, *then = state->grid_size;
    const char *before = json_string_value(json_object_get(extra, "numerics"));
    char *numerics = numerics_text(t);
    if (then[0] != now[DIM_TENSOR] || then[1] != now[DIM_PIPELINE] || then[2] != now[DIM_DATA]) {
        log_info(LOG_CKPT,
                 "written by tensor %d x pipeline %d x data %d: the state is bit-equal, later sums round "
                 "differently",
                 then[0], then[1], then[2]);
    } else if (!before || strcmp(before, numerics) != 0) {
        log_info(LOG_CKPT,
                 "same layout, but written with %s, now %s: the state is bit-equal, later sums may round "
                 "differently",
                 before ? before : "another program", numerics);
    } else if (differ) {
        log_info(LOG_CKPT, "same layout, but other settings (above): the state is bit-equal, what follows is not that "
                           "of the old ones");
    } else {
        log_info(LOG_CKPT, "same layout: the run goes on with the bits of one that was never stopped");
    }
    free(numerics);
}

static void load_pieces(Trainer *t, const char *step_dir, bool with_optimizer) {
    Error err;
    int n;
    CheckpointPiece *pieces = trainer_pieces(t, with_optimizer, &n);
    int rc = checkpoint_load(step_dir, pieces, n, &err);
    if (rc != 0) {
        rc = error_set(&err, err.status, "%s. checkpoint.resume = DIR/step-N names another checkpoint", err.message);
    }
    trainer_pieces_free(pieces, n);
    trainer_require(t, rc, &err);
}

static void start_from_weights(Trainer *t, const char *step_dir) {
    Error err;
    CheckpointState state;
    trainer_require(t, checkpoint_read_state(step_dir, &state, &err), &err);
    resume_check_model(t, &state, step_dir);
    load_pieces(t, step_dir, false);
    log_info(LOG_CKPT, "a new run with the weights of %s", step_dir);
    checkpoint_state_free(&state);
}

static void continue_from(Trainer *t, DataSource *source, const char *step_dir) {
    Error err;
    CheckpointState state;
    trainer_require(t, checkpoint_read_state(step_dir, &state, &err), &err);
    bool differ;
    check_may_continue(t, source, &state, step_dir, &differ);
    load_pieces(t, step_dir, true);
    json_t *extra = json_loads(state.extra_json ? state.extra_json : "{}", JSON_REJECT_DUPLICATES, NULL);
    restore_data(source, &state, extra);
    t->step = state.step;
    t->samples = state.samples;
    t->tokens = state.tokens;
    t->last_loss = state.last_loss;
    t->skipped = state.skipped;
    t->skipped_in_row = json_integer_value(json_object_get(extra, "skipped_in_row"));
    log_info(LOG_CKPT, "resuming from %s: step %" PRId64 ", %" PRId64 " samples, %" PRId64 " tokens", step_dir,
             state.step, state.samples, state.tokens);
    print_promise(t, &state, extra, differ);
    json_decref(extra);
    checkpoint_state_free(&state);
}

void resume_run(Trainer *t, DataSource *source) {
    const char *resume = t->config->resume;
    if (strcmp(resume, "none") == 0) return;
    const bool weights = strncmp(resume, "weights:", 8) == 0;
    const bool automatic = strcmp(resume, "auto") == 0;
    char *step_dir = resume_find(t,
                                 weights     ? resume + 8
                                 : automatic ? t->config->checkpoint_dir
                                             : resume,
                                 automatic ? NULL : "checkpoint.resume = ");
    if (!step_dir) return;
    if (weights) start_from_weights(t, step_dir);
    else continue_from(t, source, step_dir);
    free(step_dir);
}

int save_run(Trainer *t, const DataSource *source, Error *err) {
    const Config *c = t->config;
    if (trainer_check_finite(t, err) != 0 || trainer_check_replicas(t, err) != 0) return -1;
    int64_t *drawn = xcalloc((uint64_t)data_corpora(source), sizeof *drawn);
    CheckpointState state = {
        .step = t->step,
        .samples = t->samples,
        .tokens = t->tokens,
        .skipped = t->skipped,
        .config_text = config_text(c),
        .data_fingerprint = data_fingerprint(source),
        .n_corpora = data_corpora(source),
        .corpus_counters = drawn,
        .last_loss = t->last_loss,
        .grid_size = {t->grid.size[DIM_TENSOR], t->grid.size[DIM_PIPELINE], t->grid.size[DIM_DATA]}};
    data_counters(source, state.samples, drawn);
    state.extra_json = extra_state(t, source, drawn);
    int n;
    CheckpointPiece *pieces = trainer_pieces(t, true, &n);
    int rc = checkpoint_save(c->checkpoint_dir, &state, pieces, n, t->groups.world, c->checkpoint_keep, err);
    trainer_pieces_free(pieces, n);
    checkpoint_state_free(&state);
    return rc;
}
