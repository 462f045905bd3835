/* config_rules.c - rules between settings that hold whatever the world.
 * In: parsed config. Out: one message for each broken rule, with both values and what would be right. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "parallel/grid.h"
#include "train/config_table.h"

enum { RANKS_MAX = 1 << 20 };

/* The multiples of unit around value, as text. */
static const char *nearest_multiples(int64_t value, int64_t unit, char text[64]) {
    const int64_t below = value / unit * unit;
    if (below > 0) {
        snprintf(text, 64, "%" PRId64 " or %" PRId64, below, below + unit);
    } else {
        snprintf(text, 64, "%" PRId64, unit);
    }
    return text;
}

static void check_divides(Complaints *out, const char *key, int64_t value, const char *by_name, int64_t by) {
    char text[64];
    if (value % by == 0) return;
    complain_about(out, key, "%s = %" PRId64 " is no multiple of %s = %" PRId64 "; nearest: %s", strchr(key, '.') + 1,
                   value, by_name, by, nearest_multiples(value, by, text));
}

static void check_model(const Config *c, Complaints *out) {
    check_divides(out, "model.hidden", c->hidden, "heads", c->heads);
    if (c->heads % c->kv_heads != 0) {
        complain_about(out, "model.kv_heads", "kv_heads = %" PRId64 " does not divide heads = %" PRId64, c->kv_heads,
                       c->heads);
    }
    const int64_t D = c->hidden / c->heads;
    if (c->hidden % c->heads == 0 && (D < 16 || D > 256 || D % 2 != 0)) {
        complain_about(out, "model.heads", "hidden / heads = %" PRId64 " / %" PRId64 " = %" PRId64
                       " is the head size; an even number from 16 to 256 is needed", c->hidden, c->heads, D);
    }
}

static void check_parallel(const Config *c, Complaints *out) {
    check_divides(out, "model.heads", c->heads, "tensor", c->tensor);
    check_divides(out, "model.ffn", c->ffn, "tensor", c->tensor);
    if (c->kv_heads % c->tensor != 0 && c->tensor % c->kv_heads != 0) {
        complain_about(out, "model.kv_heads", "kv_heads = %" PRId64 " and tensor = %d: one must be a multiple of the "
                       "other", c->kv_heads, c->tensor);
    }
    if (c->pipeline > c->layers) {
        complain_about(out, "parallel.pipeline", "pipeline = %d stages for layers = %" PRId64
                       ": each stage needs a layer; at most %" PRId64, c->pipeline, c->layers, c->layers);
    }
    if ((int64_t)max_i64(c->data, 1) * c->pipeline * c->tensor > RANKS_MAX) {
        complain_about(out, "parallel.data", "data x pipeline x tensor = %d x %d x %d is more than %d processes",
                       c->data, c->pipeline, c->tensor, RANKS_MAX);
    }
    Dim order[DIM_COUNT];
    Error err;
    if (grid_parse_order(order, c->order, &err) != 0) complain_about(out, "parallel.order", "%s", err.message);
}

static void check_length(const Config *c, Complaints *out) {
    if ((c->steps > 0) == (c->tokens > 0)) {
        complain_about(out, "train.steps", "steps = %" PRId64 " and tokens = %" PRId64
                       ": the length of the run is given by exactly one of them", c->steps, c->tokens);
        return;
    }
    if (c->warmup_steps > c->total_steps) {
        complain_about(out, "optimizer.warmup_steps", "warmup_steps = %" PRId64 " is longer than the run of %" PRId64
                       " steps", c->warmup_steps, c->total_steps);
    } else if (c->decay == DECAY_WSD && c->warmup_steps + c->decay_steps > c->total_steps) {
        complain_about(out, "optimizer.decay_steps", "warmup_steps + decay_steps = %" PRId64 " + %" PRId64
                       " is longer than the run of %" PRId64 " steps", c->warmup_steps, c->decay_steps,
                       c->total_steps);
    }
    if (c->decay == DECAY_WSD && c->decay_steps == 0) {
        complain_about(out, "optimizer.decay_steps", "decay = wsd needs decay_steps, the length of its final decay");
    }
    if (c->decay != DECAY_WSD && c->decay_steps != 0) {
        complain_about(out, "optimizer.decay_steps", "decay_steps = %" PRId64 " is looked at by decay = wsd only",
                       c->decay_steps);
    }
}

static void check_rest(const Config *c, Complaints *out) {
    if (c->min_lr > c->lr) {
        complain_about(out, "optimizer.min_lr", "min_lr = %g is above lr = %g", c->min_lr, c->lr);
    }
    if (c->lr_scaling != LR_SCALING_NONE && c->base_batch == 0) {
        complain_about(out, "optimizer.lr_scaling", "lr_scaling needs base_batch, the global batch that lr = %g was "
                       "chosen for (this run's is %" PRId64 ")", c->lr, c->global_batch);
    }
    if (c->eval_every && !c->valid_data[0]) {
        complain_about(out, "train.eval_every", "eval_every = %" PRId64 " needs data.valid", c->eval_every);
    }
    if (!c->resume[0]) {
        complain_about(out, "checkpoint.resume", "resume is empty: auto, none, a directory, or weights:DIR");
    }
}

/* Sizes that later products form must fit: reported once, by the largest. */
static void check_sizes(const Config *c, Complaints *out) {
    const double elements = (double)c->micro_batch * (double)c->seq_len * (double)(3 * c->ffn + 4 * c->hidden);
    if (elements > 0x1p60) {
        complain_about(out, "train.micro_batch", "micro_batch x seq_len = %" PRId64 " x %" PRId64
                       " tokens of %" PRId64 " are more than any memory holds", c->micro_batch, c->seq_len, c->hidden);
    }
}

void config_check_rules(const Config *config, Complaints *complaints) {
    check_model(config, complaints);
    check_parallel(config, complaints);
    check_length(config, complaints);
    check_rest(config, complaints);
    check_sizes(config, complaints);
}
