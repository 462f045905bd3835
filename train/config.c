/* config.c - loads, resolves and frees the run's settings.
 * In: INI file or text, overrides, size of the world. Out: Config.
 * Invariants: every error of a file is printed, not only the first; a config that loads with no error is
 * complete; nothing but config files is touched. */
#include "train/config.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "train/config_table.h"

/* The section, or the one that it was probably meant to be, so that the lines below it are looked at too. */
static void apply_section(const IniEntry *e, Complaints *c) {
    const char *meant = section_meant(e->section);
    if (!meant || strcmp(meant, e->section) != 0) complain_unknown(c, e);
}

static void apply_entry(Config *config, const IniEntry *e, Complaints *c, char **where, bool *bad) {
    const Setting *s = setting_find(e->section, e->key);
    if (!s && e->file >= 0) { /* a misspelt [section] has been reported */
        const char *meant = section_meant(e->section);
        if (meant && strcmp(meant, e->section) != 0) s = setting_find(meant, e->key);
    }
    if (!s) {
        complain_unknown(c, e);
        return;
    }
    const int i = (int)(s - settings);
    char problem[256], value[INI_EXCERPT_BYTES];
    free(where[i]);
    where[i] = xstrdup(e->where);
    bad[i] = setting_parse(s, config, e->value, problem) != 0;
    if (!bad[i] || !ini_error_shows(c->out, c->n++)) return;
    fprintf(c->out, "%s: %s.%s = %s: %s is expected%s%s\n", e->where, s->section, s->key, ini_excerpt(e->value, value),
            problem, s->unit[0] ? ", in " : "", s->unit);
}

static void set_defaults(Config *config) {
    memset(config, 0, sizeof *config);
    for (int i = 0; i < n_settings; i++) {
        char problem[256];
        REQUIRE(setting_parse(&settings[i], config, settings[i].fallback, problem) == 0);
    }
}

/* NAME of runs/NAME: the file's name without directory and .ini. */
static char *name_of(const char *path) {
    const char *slash = strrchr(path, '/');
    char *name = xstrdup(slash ? slash + 1 : path);
    const size_t n = strlen(name);
    if (n > 4 && strcmp(name + n - 4, ".ini") == 0) name[n - 4] = 0;
    return name;
}

static void default_directory(char **directory, const char *name, const char *leaf) {
    if (**directory) return;
    free(*directory);
    *directory = xasprintf("runs/%s/%s", name, leaf);
}

static void derive(Config *c, const char *path) {
    c->path = xstrdup(path);
    c->name = name_of(path);
    default_directory(&c->checkpoint_dir, c->name, "checkpoints");
    default_directory(&c->log_dir, c->name, "log");
    if (!c->kv_heads) c->kv_heads = c->heads;
    if (!c->ffn) c->ffn = c->arch == ARCH_GPT ? 4 * c->hidden : round_up(ceil_div(8 * c->hidden, 3), 64);
    /* Resolved here and written so: a checkpoint's "auto" must not differ from this run's "yes". */
    if (c->tie_choice == AUTO) c->tie_choice = c->arch == ARCH_GPT ? YES : NO;
    c->tie_embeddings = c->tie_choice == YES;
    c->dtype = c->precision == PRECISION_FP64 ? DT_F64 : DT_F32;
    c->total_steps = c->steps ? c->steps : ceil_div(c->tokens, c->global_batch * c->seq_len);
}

static int finish_load(Config *config, Ini *ini, const char *path, char *const *overrides, int n_overrides) {
    for (int i = 0; i < n_overrides; i++) ini_read_override(ini, overrides[i]);
    set_defaults(config);
    char **where = xcalloc((uint64_t)n_settings, sizeof *where);
    bool *bad = xcalloc((uint64_t)n_settings, sizeof *bad);
    Complaints c = {.out = ini->out, .n = ini->errors, .name = path, .where = where, .bad = bad};
    for (int i = 0; i < ini->n; i++) {
        if (ini->entries[i].key) {
            apply_entry(config, &ini->entries[i], &c, where, bad);
        } else {
            apply_section(&ini->entries[i], &c);
        }
    }
    config->origins = where;
    derive(config, path);
    c.incomplete = c.n > 0;
    config_check_rules(config, &c);
    ini_free(ini);
    free(bad);
    if (c.n) config_free(config);
    return c.n;
}

int config_load(Config *config, const char *path, char *const *overrides, int n_overrides, FILE *errors) {
    Ini ini = {.out = errors};
    ini_read_file(&ini, path);
    return finish_load(config, &ini, path, overrides, n_overrides);
}

int config_load_text(Config *config, const char *text, const char *name, char *const *overrides, int n_overrides,
                     FILE *errors) {
    Ini ini = {.out = errors};
    ini_read_text(&ini, text, strlen(text), name);
    return finish_load(config, &ini, name, overrides, n_overrides);
}

void config_free(Config *config) {
    for (int i = 0; i < n_settings; i++) {
        if (settings[i].type == TYPE_TEXT) free(*(char **)((char *)config + settings[i].offset));
        if (config->origins) free(config->origins[i]);
    }
    free(config->origins);
    free(config->path);
    free(config->name);
    memset(config, 0, sizeof *config);
}

int config_world_size(const Config *c) {
    if (c->ranks) return c->ranks;
    return c->data * c->pipeline * c->tensor; /* at most 2^20: a rule; 0 where data is not given */
}

int config_resolve_world(Config *c, int world, FILE *errors) {
    Complaints out = {.out = errors, .name = c->path, .where = c->origins};
    const int64_t model = (int64_t)c->pipeline * c->tensor;
    if (world <= 0) world = config_world_size(c);
    if (world <= 0) world = (int)model;
    if (c->ranks && c->ranks != world) {
        complain_about(&out, "parallel.ranks", "ranks = %d, but the launcher started %d process%s", c->ranks, world,
                       world == 1 ? "" : "es");
    } else if (!c->data && world % model != 0) {
        complain_about(&out, "parallel.pipeline parallel.tensor",
                       "%d process%s (from the launcher): no multiple of "
                       "pipeline x tensor = %d x %d = %" PRId64 "; nearest: %" PRId64 " or %" PRId64 " processes",
                       world, world == 1 ? "" : "es", c->pipeline, c->tensor, model, max_i64(1, world / model) * model,
                       (world / model + 1) * model);
    } else if (c->data && c->data * model != world) {
        complain_about(&out, "parallel.data parallel.pipeline parallel.tensor",
                       "data x pipeline x tensor = %d x %d x %d = %" PRId64 ", but the launcher started %d process%s",
                       c->data, c->pipeline, c->tensor, c->data * model, world, world == 1 ? "" : "es");
    }
    if (out.n) return out.n;
    if (!c->data) c->data = (int)(world / model);
    config_check_batch(c, c->data, &out);
    if (out.n) return out.n;
    c->accumulation = c->global_batch / (c->micro_batch * c->data);
    const bool divides = c->micro_batch * c->seq_len % c->tensor == 0;
    c->sequence_parallel_on = c->sequence_parallel != NO && c->tensor > 1 && divides;
    return 0;
}

int config_resolve_model(Config *c, int64_t tokenizer_vocab, FILE *errors) {
    Complaints out = {.out = errors, .name = c->path, .where = c->origins};
    if (!c->vocab) c->vocab = tokenizer_vocab;
    if (!c->vocab) {
        complain_about(&out, "model.vocab", "the vocabulary is not known: set model.vocab, or name data.tokenizer");
    } else if (c->vocab < tokenizer_vocab) {
        complain_about(&out, "model.vocab data.tokenizer",
                       "vocab = %" PRId64 " is below the %" PRId64 " tokens of tokenizer = %s", c->vocab,
                       tokenizer_vocab, c->tokenizer);
    }
    if (c->vocab && c->vocab < c->tensor) {
        complain_about(&out, "model.vocab parallel.tensor", "vocab = %" PRId64 " is below tensor = %d", c->vocab,
                       c->tensor);
    }
    return out.n;
}
