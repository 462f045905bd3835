/* config.h - the run's settings. One table (config_table.c) parses, bounds, prints help, rejects unknown
 * keys, says what a resume may do with a changed value, and prints the resolved run. */
#ifndef TRIDENT_TRAIN_CONFIG_H
#define TRIDENT_TRAIN_CONFIG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/types.h"
#include "parallel/schedule.h"

typedef enum { ARCH_GPT, ARCH_LLAMA } Arch;
typedef enum { PRECISION_FP32, PRECISION_FP64 } Precision;
typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_SGD } OptimizerKind;
typedef enum { DECAY_CONSTANT, DECAY_COSINE, DECAY_LINEAR, DECAY_WSD } DecayKind;
typedef enum { LR_SCALING_NONE, LR_SCALING_LINEAR, LR_SCALING_SQRT } LrScaling;
typedef enum { AUTO, YES, NO } Tristate;

typedef struct Config {
    /* [model] */
    Arch arch;
    int64_t layers, hidden, heads, kv_heads /* 0: heads */, ffn /* 0: 4 hidden (gpt), 8/3 hidden to a multiple of 64 */;
    int64_t vocab /* 0: the tokenizer's */, seq_len;
    double rope_theta, norm_eps;
    Tristate tie_choice; /* YES or NO once loaded: auto is yes for gpt, no for llama */
    bool tie_embeddings; /* the same */
    /* [parallel] */
    int ranks, data, pipeline, tensor;
    char *order;
    ScheduleKind schedule;
    Tristate sequence_parallel;
    bool allow_cross_node_tensor;
    /* [train] */
    int64_t steps, tokens; /* one of them */
    int64_t micro_batch, global_batch;
    uint64_t seed;
    Precision precision;
    int threads; /* 0: cores of this host / ranks on it */
    double init_std;
    int64_t eval_every, eval_batches;
    double timeout_s;
    /* [optimizer] */
    OptimizerKind optimizer;
    double lr, min_lr, beta1, beta2, eps, weight_decay, clip;
    int64_t warmup_steps;
    int64_t decay_steps; /* WSD: steps of the final decay; else 0 */
    DecayKind decay;
    LrScaling lr_scaling;
    int64_t base_batch;
    int64_t max_skipped; /* non-finite steps in a row before the run stops */
    /* [data] */
    char *train_data, *valid_data, *tokenizer; /* paths relative to the current directory */
    bool mask_documents;
    /* [checkpoint] */
    char *checkpoint_dir; /* default runs/NAME/checkpoints */
    int64_t checkpoint_every, checkpoint_keep;
    char *resume;           /* auto, none, DIR, weights:DIR */
    char *checkpoint_allow; /* comma list of keys that a resume may change */
    /* [log] */
    char *log_dir; /* default runs/NAME/log */
    int64_t log_every;
    bool tensorboard;

    /* derived, not keys */
    char **origins;       /* place of each setting, NULL: default; see config_table.h */
    char *path, *name;    /* the config file, and its name without directory and .ini; "selftest" etc. */
    int64_t accumulation; /* global_batch / (micro_batch * data): set by config_resolve_world */
    int64_t total_steps;  /* steps, or ceil(tokens / (global_batch * seq_len)) */
    bool sequence_parallel_on;
    DType dtype; /* of parameters and activations */
} Config;

/* Reads the file (with its includes) and the --set overrides ("section.key=value"), checks every
 * value and every rule between values, and prints ALL errors found, each with file, line, both
 * values and the nearest known key, to `errors`. Returns the number of errors; 0: *config is filled
 * and config_free frees it. No file but the config's own, no device, no socket is touched. */
int config_load(Config *config, const char *path, char *const *overrides, int n_overrides, FILE *errors);
/* The same from text; name stands for the file in messages; `include` is an error. */
int config_load_text(Config *config, const char *text, const char *name, char *const *overrides, int n_overrides,
                     FILE *errors);
/* What needs the world: data = 0 takes what is left, accumulation, sequence parallelism. Number of errors, as above.
 * world: ranks of the launcher, or 0. */
int config_resolve_world(Config *config, int world, FILE *errors);
void config_print_equation(const Config *config, FILE *out);
/* The world size a config asks for, before a launcher is known: ranks, else the product, else 0. */
int config_world_size(const Config *config);
/* The resolved config as INI text that config_load reads back to the same values. Caller frees. */
char *config_text(const Config *config);
/* The same with the origin of each value (default, file:line, --set) as a comment. */
void config_print_origins(const Config *config, FILE *out);
/* Resolves ffn, kv_heads, vocab where they were 0; tokenizer_vocab 0: not known. */
int config_resolve_model(Config *config, int64_t tokenizer_vocab, FILE *errors);
void config_free(Config *config);

/* What a resume from a checkpoint that holds old_text does with the changed values: prints a line
 * for each (free: nothing; warn: both values); refuse unless checkpoint.allow names the key. Number of
 * refusals, printed with both values to `errors`. section: only its keys, NULL: all. */
int config_compare_resume(const Config *config, const char *old_text, const char *section, FILE *notes, FILE *errors);
/* checkpoint.allow names it; name: "section.key". */
bool config_allows(const Config *config, const char *name);

/* `trident help [section | section.key]`: unit, default, bounds, choices. 0, or -1: no such key (the
 * nearest is named on errors). */
int config_help(const char *topic, FILE *out, FILE *errors);

/* Nearest of n names by edit distance, or NULL where none is near. Used for every did-you-mean. */
const char *nearest_name(const char *name, const char *const *names, int n);

#endif
