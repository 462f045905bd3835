/* config_table.c - every setting with its default, bounds, unit, resume policy and help. */
#include <stddef.h>
#include <string.h>

#include "train/config_table.h"

static const char *const archs[] = {"gpt", "llama", NULL};
static const char *const schedules[] = {"gpipe", "1f1b", NULL};
static const char *const tristates[] = {"auto", "yes", "no", NULL};
static const char *const precisions[] = {"fp32", "fp64", NULL};
static const char *const optimizers[] = {"adamw", "sgd", NULL};
static const char *const decays[] = {"constant", "cosine", "linear", "wsd", NULL};
static const char *const scalings[] = {"none", "linear", "sqrt", NULL};

#define AT(field) offsetof(Config, field)
#define NUMBER(section, key, type, field, fallback, min, max, unit, resume, help) \
    { section, key, type, AT(field), fallback, min, max, unit, NULL, resume, help }
#define WORD(section, key, field, fallback, choices, resume, help) \
    { section, key, TYPE_CHOICE, AT(field), fallback, 0, 0, "", choices, resume, help }
#define FLAG(section, key, field, fallback, resume, help) \
    { section, key, TYPE_BOOL, AT(field), fallback, 0, 0, "", NULL, resume, help }
#define TEXT(section, key, field, fallback, resume, help) \
    { section, key, TYPE_TEXT, AT(field), fallback, 0, 0, "", NULL, resume, help }

const Setting settings[] = {
    WORD("model", "arch", arch, "llama", archs, RESUME_REFUSE,
         "gpt: learned positions, LayerNorm, GELU, biases. llama: RoPE, RMSNorm, SwiGLU, no biases"),
    NUMBER("model", "layers", TYPE_INT64, layers, "4", 1, 10000, "", RESUME_REFUSE, "transformer blocks"),
    NUMBER("model", "hidden", TYPE_INT64, hidden, "128", 16, 1 << 20, "", RESUME_REFUSE,
           "width of the residual stream; a multiple of heads, hidden / heads from 16 to 256 and even"),
    NUMBER("model", "heads", TYPE_INT64, heads, "4", 1, 65536, "", RESUME_REFUSE, "attention (query) heads"),
    NUMBER("model", "kv_heads", TYPE_INT64, kv_heads, "0", 0, 65536, "", RESUME_REFUSE,
           "key/value heads of grouped-query attention; divides heads; 0: as many as heads"),
    NUMBER("model", "ffn", TYPE_INT64, ffn, "0", 0, 1 << 24, "", RESUME_REFUSE,
           "feed-forward width; 0: 4 hidden (gpt), 8/3 hidden up to a multiple of 64 (llama)"),
    NUMBER("model", "vocab", TYPE_INT64, vocab, "0", 0, 1 << 24, "tokens", RESUME_REFUSE,
           "vocabulary size; 0: the tokenizer's"),
    NUMBER("model", "seq_len", TYPE_INT64, seq_len, "128", 1, 1 << 24, "tokens", RESUME_REFUSE, "length of a sample"),
    NUMBER("model", "rope_theta", TYPE_DOUBLE, rope_theta, "10000", 1, 1e12, "", RESUME_REFUSE,
           "base of RoPE's wavelengths (llama)"),
    NUMBER("model", "norm_eps", TYPE_DOUBLE, norm_eps, "1e-5", 1e-12, 1, "", RESUME_REFUSE,
           "added to the variance in norms"),
    WORD("model", "tie_embeddings", tie_choice, "auto", tristates, RESUME_REFUSE,
         "one table for embedding and head; auto: yes for gpt, no for llama"),

    NUMBER("parallel", "ranks", TYPE_INT, ranks, "0", 0, 1 << 20, "processes", RESUME_FREE,
           "processes to start on this machine where no launcher started them; 0: data x pipeline x tensor"),
    NUMBER("parallel", "data", TYPE_INT, data, "0", 0, 1 << 20, "ranks", RESUME_FREE,
           "replicas of the model that share the batch; 0: what pipeline and tensor leave of the world"),
    NUMBER("parallel", "pipeline", TYPE_INT, pipeline, "1", 1, 4096, "stages", RESUME_FREE,
           "stages that the layers are spread over"),
    NUMBER("parallel", "tensor", TYPE_INT, tensor, "1", 1, 4096, "ranks", RESUME_FREE,
           "ranks that split every matrix; divides heads and ffn; stays within a node"),
    TEXT("parallel", "order", order, "tensor, pipeline, data", RESUME_FREE,
         "which dimension varies fastest over the ranks, first to last"),
    WORD("parallel", "schedule", schedule, "1f1b", schedules, RESUME_FREE,
         "order of a stage's work; gpipe: all forward passes first (keeps all micro-batches in memory)"),
    WORD("parallel", "sequence_parallel", sequence_parallel, "auto", tristates, RESUME_FREE,
         "tensor ranks keep norms and residuals of their own tokens only; auto: on where tensor > 1 and it divides"),
    FLAG("parallel", "allow_cross_node_tensor", allow_cross_node_tensor, "no", RESUME_FREE,
         "let a tensor group cross hosts (slow) in place of stopping"),

    NUMBER("train", "steps", TYPE_INT64, steps, "0", 0, SETTING_MAX_NONE, "steps", RESUME_WARN,
           "length of the run; or give tokens"),
    NUMBER("train", "tokens", TYPE_INT64, tokens, "0", 0, SETTING_MAX_NONE, "tokens", RESUME_WARN,
           "length of the run in tokens; or give steps"),
    NUMBER("train", "micro_batch", TYPE_INT64, micro_batch, "1", 1, 1 << 20, "sequences", RESUME_FREE,
           "sequences that one rank takes through the model at a time"),
    NUMBER("train", "global_batch", TYPE_INT64, global_batch, "8", 1, 1 << 30, "sequences", RESUME_REFUSE,
           "sequences of one step over all ranks; a multiple of micro_batch x data"),
    NUMBER("train", "seed", TYPE_INT64, seed, "1234", 0, SETTING_MAX_NONE, "", RESUME_REFUSE,
           "initial weights and sample order are a pure function of it"),
    WORD("train", "precision", precision, "fp32", precisions, RESUME_REFUSE,
         "of parameters and activations; fp64 is the reference, slow"),
    NUMBER("train", "threads", TYPE_INT, threads, "0", 0, 4096, "threads", RESUME_FREE,
           "of each rank; 0: its share of the cores that it may run on; the bits do not depend on it"),
    NUMBER("train", "init_std", TYPE_DOUBLE, init_std, "0.02", 0, 10, "", RESUME_WARN,
           "standard deviation of initial weights; / sqrt(2 layers) where a block adds to the residual stream"),
    NUMBER("train", "eval_every", TYPE_INT64, eval_every, "0", 0, SETTING_MAX_NONE, "steps", RESUME_FREE,
           "validation loss every so many steps and at the end; 0: never"),
    NUMBER("train", "eval_batches", TYPE_INT64, eval_batches, "8", 1, 1 << 30, "global batches", RESUME_FREE,
           "how much validation data each time, at most as much as there is"),
    NUMBER("train", "timeout", TYPE_DURATION, timeout_s, "10m", 1, 1e7, "time", RESUME_FREE,
           "a wait for other ranks, or a step, that takes longer ends the run and names who is late"),

    WORD("optimizer", "kind", optimizer, "adamw", optimizers, RESUME_REFUSE, "adamw, or sgd with momentum beta1"),
    NUMBER("optimizer", "lr", TYPE_DOUBLE, lr, "3e-4", 0, 1e3, "", RESUME_WARN, "learning rate after warm-up"),
    NUMBER("optimizer", "min_lr", TYPE_DOUBLE, min_lr, "0", 0, 1e3, "", RESUME_WARN, "learning rate at the end"),
    NUMBER("optimizer", "warmup_steps", TYPE_INT64, warmup_steps, "0", 0, SETTING_MAX_NONE, "steps", RESUME_WARN,
           "linear warm-up; step s of it (from 1) has lr s / warmup_steps"),
    WORD("optimizer", "decay", decay, "cosine", decays, RESUME_WARN,
         "after warm-up; wsd: constant, then linear over the last decay_steps"),
    NUMBER("optimizer", "decay_steps", TYPE_INT64, decay_steps, "0", 0, SETTING_MAX_NONE, "steps", RESUME_WARN,
           "length of the final decay of wsd"),
    NUMBER("optimizer", "beta1", TYPE_DOUBLE, beta1, "0.9", 0, 0.999999, "", RESUME_WARN,
           "decay of the first moment; momentum of sgd"),
    NUMBER("optimizer", "beta2", TYPE_DOUBLE, beta2, "0.95", 0, 0.999999999, "", RESUME_WARN,
           "decay of the second moment (adamw)"),
    NUMBER("optimizer", "eps", TYPE_DOUBLE, eps, "1e-8", 1e-30, 1, "", RESUME_WARN,
           "added to the root of the second moment (adamw)"),
    NUMBER("optimizer", "weight_decay", TYPE_DOUBLE, weight_decay, "0.1", 0, 10, "", RESUME_WARN,
           "decoupled; on matrices only, not on norms and biases"),
    NUMBER("optimizer", "clip", TYPE_DOUBLE, clip, "1", 0, 1e9, "", RESUME_WARN,
           "largest global norm of the mean gradient; 0: no clipping"),
    WORD("optimizer", "lr_scaling", lr_scaling, "none", scalings, RESUME_WARN,
         "learning rate times global_batch / base_batch (linear), its root (sqrt), or as given"),
    NUMBER("optimizer", "base_batch", TYPE_INT64, base_batch, "0", 0, 1 << 30, "sequences", RESUME_WARN,
           "batch that lr was chosen for; needed by lr_scaling"),
    NUMBER("optimizer", "max_skipped", TYPE_INT64, max_skipped, "10", 1, SETTING_MAX_NONE, "steps", RESUME_FREE,
           "so many non-finite steps in a row stop the run"),

    TEXT("data", "train", train_data, "", RESUME_WARN,
         "token files: PREFIX of .bin/.idx, or llm.c shards; several as \"path:weight, path:weight\""),
    TEXT("data", "valid", valid_data, "", RESUME_FREE, "token files for validation"),
    TEXT("data", "tokenizer", tokenizer, "", RESUME_FREE,
         "bytes, or a directory with vocab.json and merges.txt; names the vocabulary and serves generate"),
    FLAG("data", "mask_documents", mask_documents, "no", RESUME_REFUSE,
         "documents packed in one sample do not see one another; positions restart; no loss across the border"),

    TEXT("checkpoint", "dir", checkpoint_dir, "", RESUME_FREE,
         "default: runs/NAME/checkpoints, NAME of the config "
         "file"),
    NUMBER("checkpoint", "every", TYPE_INT64, checkpoint_every, "0", 0, SETTING_MAX_NONE, "steps", RESUME_FREE,
           "save every so many steps; 0: only at the end and when stopped"),
    NUMBER("checkpoint", "keep", TYPE_INT64, checkpoint_keep, "2", 0, SETTING_MAX_NONE, "checkpoints", RESUME_FREE,
           "how many stay; 0: all"),
    TEXT("checkpoint", "resume", resume, "auto", RESUME_FREE,
         "auto: the newest in checkpoint.dir, if any; none: start anew; DIR: from there; weights:DIR: weights only"),
    TEXT("checkpoint", "allow", checkpoint_allow, "", RESUME_FREE,
         "comma list of settings that this resume may change although it normally refuses"),

    TEXT("log", "dir", log_dir, "", RESUME_FREE, "default: runs/NAME/log"),
    NUMBER("log", "every", TYPE_INT64, log_every, "10", 1, SETTING_MAX_NONE, "steps", RESUME_FREE,
           "plain lines every so many steps where output is no terminal; metrics.jsonl has every step"),
    FLAG("log", "tensorboard", tensorboard, "yes", RESUME_FREE, "write TensorBoard event files beside metrics.jsonl"),
};
const int n_settings = sizeof settings / sizeof settings[0];

const Setting *setting_find(const char *section, const char *key) {
    for (int i = 0; i < n_settings; i++) {
        if (strcmp(settings[i].section, section) == 0 && strcmp(settings[i].key, key) == 0) return &settings[i];
    }
    return NULL;
}
