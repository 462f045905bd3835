/* config_rules.c - rules between settings that hold whatever started the run.
 * In: parsed config. Out: one message for each broken rule, with both values and what would be right. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "parallel/grid.h"
#include "train/config_table.h"

enum { RANKS_MAX = 1 << 20 };

/* The positive multiples of unit around value, as text. */
static const char *nearest_multiples(int64_t value, int64_t unit, char text[64]) {
    const int64_t below = value / unit * unit;
    if (below > 0) {
        snprintf(text, 64, "%" PRId64 " or %" PRId64, below, below + unit);
    } else {
        snprintf(text, 64, "%" PRId64, unit);
    }
    return text;
}

/* keys: the value's first. */
static void check_divides(Complaints *out, const char *keys, int64_t value, const char *by_name, int64_t by) {
    char text[64];
    if (value % by == 0) return;
    const char *name = strchr(keys, '.') + 1;
    complain_about(out, keys, "%.*s = %" PRId64 " is no multiple of %s = %" PRId64 "; nearest: %s",
                   (int)strcspn(name, " "), name, value, by_name, by, nearest_multiples(value, by, text));
}

static void check_model(const Config *c, Complaints *out) {
    check_divides(out, "model.hidden model.heads", c->hidden, "heads", c->heads);
    if (c->heads % c->kv_heads != 0) {
        complain_about(out, "model.kv_heads model.heads", "kv_heads = %" PRId64 " does not divide heads = %" PRId64,
                       c->kv_heads, c->heads);
    }
    const int64_t D = c->hidden / c->heads;
    if (c->hidden % c->heads == 0 && (D < 16 || D > 256 || D % 2 != 0)) {
        complain_about(out, "model.heads model.hidden",
                       "hidden / heads = %" PRId64 " / %" PRId64 " = %" PRId64
                       " is the head size; an even number from 16 to 256 is needed",
                       c->hidden, c->heads, D);
    }
}

static void check_parallel(const Config *c, Complaints *out) {
    check_divides(out, "model.heads parallel.tensor", c->heads, "tensor", c->tensor);
    check_divides(out, "model.ffn parallel.tensor model.hidden model.arch", c->ffn, "tensor", c->tensor);
    if (c->kv_heads % c->tensor != 0 && c->tensor % c->kv_heads != 0) {
        complain_about(out, "model.kv_heads parallel.tensor",
                       "kv_heads = %" PRId64 " and tensor = %d: one must be a "
                       "multiple of the other",
                       c->kv_heads, c->tensor);
    }
    if (c->vocab && c->vocab < c->tensor) {
        complain_about(out, "model.vocab parallel.tensor", "vocab = %" PRId64 " is below tensor = %d", c->vocab,
                       c->tensor);
    }
    if (c->pipeline > c->layers) {
        complain_about(out, "parallel.pipeline model.layers",
                       "pipeline = %d stages for layers = %" PRId64 ": each stage needs a layer; at most %" PRId64,
                       c->pipeline, c->layers, c->layers);
    }
    if (c->sequence_parallel == YES && (c->tensor == 1 || c->micro_batch * c->seq_len % c->tensor != 0)) {
        complain_about(out, "parallel.sequence_parallel parallel.tensor train.micro_batch model.seq_len",
                       "sequence_parallel = yes needs tensor > 1 that divides micro_batch x seq_len = %" PRId64
                       " x %" PRId64 "; tensor = %d. auto turns it on where it can be",
                       c->micro_batch, c->seq_len, c->tensor);
    }
    Dim order[DIM_COUNT];
    Error err;
    if (grid_parse_order(order, c->order, &err) != 0) complain_about(out, "parallel.order", "%s", err.message);
}

void config_check_batch(const Config *c, int64_t data, Complaints *out) {
    const int64_t unit = c->micro_batch * data;
    char text[64];
    if (c->global_batch % unit == 0) return;
    complain_about(out, "train.global_batch train.micro_batch parallel.data",
                   "global_batch = %" PRId64 " is no multiple of micro_batch x data = %" PRId64 " x %" PRId64
                   " = %" PRId64 "; nearest: %s",
                   c->global_batch, c->micro_batch, data, unit, nearest_multiples(c->global_batch, unit, text));
}

/* What ranks and data say, before a launcher is looked for. */
static void check_world(const Config *c, Complaints *out) {
    static const char keys[] = "parallel.ranks parallel.data parallel.pipeline parallel.tensor";
    const int64_t model = (int64_t)c->pipeline * c->tensor, world = max_i64(c->data, 1) * model;
    if (world > RANKS_MAX) {
        complain_about(out, "parallel.data parallel.pipeline parallel.tensor",
                       "data x pipeline x tensor = %d x %d x %d is more than %d processes", c->data, c->pipeline,
                       c->tensor, RANKS_MAX);
        return;
    }
    char text[64];
    if (c->ranks && c->data && c->ranks != world) {
        complain_about(out, keys, "ranks = %d, but data x pipeline x tensor = %d x %d x %d = %" PRId64, c->ranks,
                       c->data, c->pipeline, c->tensor, world);
    } else if (c->ranks && c->ranks % model != 0) {
        complain_about(out, keys, "ranks = %d is no multiple of pipeline x tensor = %d x %d = %" PRId64 "; nearest: %s",
                       c->ranks, c->pipeline, c->tensor, model, nearest_multiples(c->ranks, model, text));
    } else if (c->data || c->ranks) {
        config_check_batch(c, c->data ? c->data : c->ranks / model, out);
    } else {
        check_divides(out, "train.global_batch train.micro_batch", c->global_batch, "micro_batch", c->micro_batch);
    }
}

static void check_length(const Config *c, Complaints *out) {
    if ((c->steps > 0) == (c->tokens > 0)) {
        complain_about(out, "train.steps train.tokens",
                       "steps = %" PRId64 " and tokens = %" PRId64
                       ": the length of the run is given by exactly one of them",
                       c->steps, c->tokens);
        return;
    }
    const int64_t step_tokens = c->global_batch * c->seq_len;
    if (c->total_steps > INT64_MAX / step_tokens) {
        complain_about(out, "train.steps train.global_batch model.seq_len",
                       "steps x global_batch x seq_len = %" PRId64 " x %" PRId64 " x %" PRId64
                       " tokens are more than can be counted",
                       c->steps, c->global_batch, c->seq_len);
    }
}

static void check_decay(const Config *c, Complaints *out) {
    const char *const length = c->tokens ? "train.tokens" : "train.steps";
    char keys[128];
    if (c->total_steps && c->decay == DECAY_WSD && c->decay_steps > c->total_steps - c->warmup_steps) {
        snprintf(keys, sizeof keys, "optimizer.decay_steps optimizer.warmup_steps %s", length);
        complain_about(out, keys,
                       "warmup_steps + decay_steps = %" PRId64 " + %" PRId64 " is longer than the run of %" PRId64
                       " steps",
                       c->warmup_steps, c->decay_steps, c->total_steps);
    }
    if (c->decay == DECAY_WSD && c->decay_steps == 0) {
        complain_about(out, "optimizer.decay optimizer.decay_steps",
                       "decay = wsd needs decay_steps, the length of its final decay");
    }
    if (c->decay != DECAY_WSD && c->decay_steps != 0) {
        complain_about(out, "optimizer.decay_steps optimizer.decay",
                       "decay_steps = %" PRId64 " is looked at by decay = wsd only", c->decay_steps);
    }
}

static void check_optimizer(const Config *c, Complaints *out) {
    if (c->min_lr > c->lr) {
        complain_about(out, "optimizer.min_lr optimizer.lr", "min_lr = %g is above lr = %g", c->min_lr, c->lr);
    }
    if (c->lr_scaling != LR_SCALING_NONE && c->base_batch == 0) {
        complain_about(out, "optimizer.lr_scaling optimizer.base_batch",
                       "lr_scaling needs base_batch, the global batch that lr = %g was chosen for (this run's is "
                       "%" PRId64 ")",
                       c->lr, c->global_batch);
    }
}

/* Nothing is expanded, so that a run means the same on every host; a directory named ~ helps nobody. */
static void check_path(const char *key, const char *path, Complaints *out) {
    char excerpt[INI_EXCERPT_BYTES];
    const char *dollar = strchr(path, '$');
    const bool variable = dollar && (dollar[1] == '{' || dollar[1] == '_' || (dollar[1] >= 'A' && dollar[1] <= 'Z'));
    if (!variable && strncmp(path, "~/", 2) != 0 && strcmp(path, "~") != 0) return;
    complain_about(out, key, "%s = %s: %s is not replaced by anything; write the path out", strchr(key, '.') + 1,
                   ini_excerpt(path, excerpt), variable ? "a $VARIABLE" : "~");
}

static void check_paths(const Config *c, Complaints *out) {
    check_path("data.train", c->train_data, out);
    check_path("data.valid", c->valid_data, out);
    check_path("data.tokenizer", c->tokenizer, out);
    check_path("checkpoint.dir", c->checkpoint_dir, out);
    check_path("checkpoint.resume", c->resume, out);
    check_path("log.dir", c->log_dir, out);
    if (c->eval_every && !c->valid_data[0]) {
        complain_about(out, "train.eval_every data.valid", "eval_every = %" PRId64 " needs data.valid", c->eval_every);
    }
    if (!c->resume[0] || strcmp(c->resume, "weights:") == 0) {
        complain_about(out, "checkpoint.resume",
                       "resume = \"%s\" names nothing: auto, none, a directory, or "
                       "weights:DIRECTORY is expected",
                       c->resume);
    }
}

/* Each word of checkpoint.allow names a setting. */
static void check_allow(const Config *c, Complaints *out) {
    char **names = xcalloc((uint64_t)n_settings, sizeof *names);
    for (int i = 0; i < n_settings; i++) names[i] = xasprintf("%s.%s", settings[i].section, settings[i].key);
    char *copy = xstrdup(c->checkpoint_allow), *rest = NULL, excerpt[INI_EXCERPT_BYTES];
    for (char *word = strtok_r(copy, ", \t\n", &rest); word; word = strtok_r(NULL, ", \t\n", &rest)) {
        const char *near = nearest_name(word, (const char *const *)names, n_settings);
        if (near && strcmp(near, word) == 0) continue;
        for (int i = 0; i < n_settings; i++) {
            if (strcmp(settings[i].key, word) == 0) near = names[i]; /* without its section */
        }
        complain_about(out, "checkpoint.allow", "allow: there is no setting %s%s%s%s", ini_excerpt(word, excerpt),
                       near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
    }
    for (int i = 0; i < n_settings; i++) free(names[i]);
    free(names);
    free(copy);
}

/* Sizes that later products form must fit: reported once, by the largest. */
static void check_sizes(const Config *c, Complaints *out) {
    const double elements = (double)c->micro_batch * (double)c->seq_len * (double)(3 * c->ffn + 4 * c->hidden);
    if (elements > 0x1p60) {
        complain_about(out, "train.micro_batch model.seq_len model.hidden",
                       "micro_batch x seq_len = %" PRId64 " x %" PRId64 " tokens of %" PRId64
                       " are more than any memory holds",
                       c->micro_batch, c->seq_len, c->hidden);
    }
    const double parameters = (double)c->layers * (double)c->hidden * (double)(4 * c->hidden + 3 * c->ffn);
    if (parameters > 0x1p60) {
        complain_about(out, "model.layers model.hidden",
                       "layers = %" PRId64 " of hidden = %" PRId64 " and ffn = %" PRId64
                       " are more parameters than any memory holds",
                       c->layers, c->hidden, c->ffn);
    }
}

void config_check_rules(const Config *config, Complaints *complaints) {
    check_model(config, complaints);
    check_parallel(config, complaints);
    check_world(config, complaints);
    check_length(config, complaints);
    check_decay(config, complaints);
    check_optimizer(config, complaints);
    check_paths(config, complaints);
    check_allow(config, complaints);
    check_sizes(config, complaints);
}
