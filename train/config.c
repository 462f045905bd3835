/* config.c - loads, resolves and frees the run's settings.
 * In: INI file or text, overrides, size of the world. Out: Config.
 * Invariants: every error of a file is printed, not only the first; a config that loads with no error is
 * complete; nothing but config files is touched. */
#include "train/config.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "train/config_table.h"

void complain_about(Complaints *c, const char *section_key, const char *format, ...) {
    const char *dot = strchr(section_key, '.'), *where = NULL;
    for (int i = 0; i < n_settings && dot && c->where; i++) {
        const size_t n = (size_t)(dot - section_key);
        if (strncmp(settings[i].section, section_key, n) == 0 && settings[i].section[n] == 0 &&
            strcmp(settings[i].key, dot + 1) == 0) where = c->where[i];
    }
    va_list args;
    va_start(args, format);
    fprintf(c->out, "%s: ", where ? where : section_key);
    vfprintf(c->out, format, args);
    fputc('\n', c->out);
    va_end(args);
    c->n++;
}

static int distance(const char *a, const char *b) {
    enum { MAX = 64 };
    int row[MAX + 1];
    const int n = (int)strlen(a), m = (int)strlen(b);
    if (n > MAX || m > MAX) return MAX;
    for (int j = 0; j <= m; j++) row[j] = j;
    for (int i = 1; i <= n; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= m; j++) {
            const int up = row[j];
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (up + 1 < best) best = up + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = up;
            row[j] = best;
        }
    }
    return row[m];
}

const char *nearest_name(const char *name, const char *const *names, int n) {
    const char *best = NULL;
    int best_distance = 2 + (int)strlen(name) / 4;
    for (int i = 0; i < n; i++) {
        const int d = distance(name, names[i]);
        if (d < best_distance) {
            best = names[i];
            best_distance = d;
        }
    }
    return best;
}

/* Names of all sections (key NULL) or of a section's keys, without repeats. */
static int list_names(const char *section, const char **names) {
    int n = 0;
    for (int i = 0; i < n_settings; i++) {
        if (section && strcmp(settings[i].section, section) != 0) continue;
        const char *name = section ? settings[i].key : settings[i].section;
        if (!n || strcmp(names[n - 1], name) != 0) names[n++] = name;
    }
    return n;
}

static void unknown_key(const IniEntry *e, Complaints *c) {
    const char **names = xcalloc((uint64_t)n_settings, sizeof *names);
    c->n++;
    fprintf(c->out, "%s: [%s] %s = %s: ", e->where, e->section, e->key, e->value);
    int n = list_names(NULL, names);
    bool known_section = false;
    for (int i = 0; i < n; i++) known_section |= strcmp(names[i], e->section) == 0;
    const char *near = NULL;
    for (int i = 0; i < n_settings; i++) {
        if (strcmp(settings[i].key, e->key) == 0) near = settings[i].section;
    }
    if (near) {
        fprintf(c->out, "%s belongs in [%s]\n", e->key, near);
    } else if (!known_section) {
        near = nearest_name(e->section, names, n);
        fprintf(c->out, "there is no section [%s]%s%s%s\n", e->section, near ? "; did you mean [" : "",
                near ? near : "", near ? "]?" : "");
    } else {
        n = list_names(e->section, names);
        near = nearest_name(e->key, names, n);
        fprintf(c->out, "unknown key%s%s%s\n", near ? "; did you mean " : "; `trident help ", near ? near : e->section,
                near ? "?" : "` lists those of the section");
    }
    free(names);
}

static void apply_entry(Config *config, const IniEntry *e, Complaints *c, char **where) {
    const Setting *s = setting_find(e->section, e->key);
    char problem[256];
    if (!s) {
        unknown_key(e, c);
        return;
    }
    char **place = &where[s - settings];
    free(*place);
    *place = xstrdup(e->where);
    if (setting_parse(s, config, e->value, problem) != 0) {
        fprintf(c->out, "%s: %s.%s = %s: %s is expected%s%s\n", e->where, s->section, s->key, e->value, problem,
                s->unit[0] ? ", in " : "", s->unit);
        c->n++;
    }
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
    c->tie_embeddings = c->tie_choice == AUTO ? c->arch == ARCH_GPT : c->tie_choice == YES;
    c->dtype = c->precision == PRECISION_FP64 ? DT_F64 : DT_F32;
    const int64_t batch_tokens = c->global_batch * c->seq_len;
    c->total_steps = c->steps ? c->steps : ceil_div(c->tokens, batch_tokens);
}

static int finish_load(Config *config, Ini *ini, const char *path, char *const *overrides, int n_overrides) {
    for (int i = 0; i < n_overrides; i++) ini_read_override(ini, overrides[i]);
    set_defaults(config);
    char **where = xcalloc((uint64_t)n_settings, sizeof *where);
    Complaints c = {.out = ini->out, .n = ini->errors, .where = where};
    for (int i = 0; i < ini->n; i++) apply_entry(config, &ini->entries[i], &c, where);
    config->origins = where;
    derive(config, path);
    /* Rules between values make sense only where the values are what the user meant. */
    if (c.n == 0) config_check_rules(config, &c);
    ini_free(ini);
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
    return c->data ? c->data * c->pipeline * c->tensor : 0;
}

static void resolve_batch(Config *c, Complaints *out) {
    const int64_t unit = c->micro_batch * c->data;
    if (c->global_batch % unit != 0) {
        const int64_t below = c->global_batch / unit * unit;
        complain_about(out, "train.global_batch", "global_batch = %" PRId64 " is no multiple of micro_batch x data = %"
                       PRId64 " x %d = %" PRId64 "; nearest: %" PRId64 "%s%" PRId64, c->global_batch, c->micro_batch,
                       c->data, unit, below ? below : unit, below ? " or " : " and not ", below ? below + unit : below);
        return;
    }
    c->accumulation = c->global_batch / unit;
    const bool divides = c->micro_batch * c->seq_len % c->tensor == 0;
    if (c->sequence_parallel == YES && (c->tensor == 1 || !divides)) {
        complain_about(out, "parallel.sequence_parallel", "sequence_parallel = yes needs tensor > 1 that divides "
                       "micro_batch x seq_len = %" PRId64 " x %" PRId64 "; tensor = %d. auto turns it on where it can be",
                       c->micro_batch, c->seq_len, c->tensor);
    }
    c->sequence_parallel_on = c->sequence_parallel != NO && c->tensor > 1 && divides;
}

int config_resolve_world(Config *c, int world, FILE *errors) {
    Complaints out = {.out = errors, .where = c->origins};
    const int64_t model = (int64_t)c->pipeline * c->tensor;
    const bool launched = world > 0;
    if (!launched) world = config_world_size(c);
    if (!world) world = (int)model;
    if (c->ranks && c->ranks != world) {
        complain_about(&out, "parallel.ranks", "ranks = %d, but the launcher started %d processes", c->ranks, world);
    }
    if (!c->data && world % model != 0) {
        complain_about(&out, "parallel.data", "%d processes are no multiple of pipeline x tensor = %d x %d = %" PRId64
                       "; nearest: %" PRId64 " or %" PRId64 " processes", world, c->pipeline, c->tensor, model,
                       max_i64(1, world / model) * model, (world / model + 1) * model);
    } else if (!c->data) {
        c->data = (int)(world / model);
    }
    if (out.n == 0 && c->data * model != world) {
        complain_about(&out, "parallel.data", "data x pipeline x tensor = %d x %d x %d = %" PRId64 ", but there %s %d "
                       "process%s (%s)", c->data, c->pipeline, c->tensor, c->data * model, world == 1 ? "is" : "are",
                       world, world == 1 ? "" : "es", launched ? "from the launcher" : "parallel.ranks");
    }
    if (out.n == 0) resolve_batch(c, &out);
    return out.n;
}

int config_resolve_model(Config *c, int64_t tokenizer_vocab, FILE *errors) {
    Complaints out = {.out = errors, .where = c->origins};
    if (!c->vocab) c->vocab = tokenizer_vocab;
    if (!c->vocab) {
        complain_about(&out, "model.vocab", "the vocabulary is not known: set model.vocab, or name data.tokenizer");
    }
    if (c->vocab && c->vocab < c->tensor) {
        complain_about(&out, "model.vocab", "vocab = %" PRId64 " is below tensor = %d", c->vocab, c->tensor);
    }
    return out.n;
}
