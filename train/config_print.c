/* config_print.c - the config as text: for people, for files, for help, against an older one. */
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "train/config_table.h"

static void print_settings(const Config *config, bool origins, FILE *out) {
    const char *section = "";
    for (int i = 0; i < n_settings; i++) {
        const Setting *s = &settings[i];
        if (strcmp(section, s->section) != 0) fprintf(out, "%s[%s]\n", *section ? "\n" : "", s->section);
        section = s->section;
        char *value = setting_format(s, config);
        if (origins) {
            const char *where = config->origins[i] ? config->origins[i] : "default";
            const bool is_auto = s->offset == offsetof(Config, sequence_parallel) && strcmp(value, "auto") == 0;
            fprintf(out, "%-24s = %-28s # %s%s\n", s->key, value, where,
                    !is_auto                       ? ""
                    : config->sequence_parallel_on ? "; on here"
                                                   : "; off here");
        } else {
            fprintf(out, "%s = %s\n", s->key, value);
        }
        free(value);
    }
}

char *config_text(const Config *config) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (!out) die(EXIT_LAUNCH, "out of memory for the config's text");
    print_settings(config, false, out);
    fclose(out);
    return text;
}

void config_print_origins(const Config *config, FILE *out) { print_settings(config, true, out); }

void config_print_equation(const Config *c, FILE *out) {
    fprintf(out,
            "global_batch %" PRId64 " = micro_batch %" PRId64 " x data %d x accumulation %" PRId64
            " sequences; x seq_len %" PRId64 " = %" PRId64 " tokens a step; x %" PRId64 " steps = %.4g tokens\n",
            c->global_batch, c->micro_batch, c->data, c->accumulation, c->seq_len, c->global_batch * c->seq_len,
            c->total_steps, (double)c->global_batch * (double)c->seq_len * (double)c->total_steps);
}

bool config_allows(const Config *config, const char *name) {
    char *copy = xstrdup(config->checkpoint_allow), *rest = NULL;
    bool found = false;
    for (char *word = strtok_r(copy, ", \t\n", &rest); word; word = strtok_r(NULL, ", \t\n", &rest)) {
        found |= strcmp(word, name) == 0;
    }
    free(copy);
    return found;
}

static int compare_setting(const Config *config, const Config *old, const Setting *s, FILE *notes, FILE *errors) {
    char *now = setting_format(s, config), *before = setting_format(s, old);
    int refusals = 0;
    if (strcmp(now, before) != 0 && s->resume != RESUME_FREE) {
        char *name = xasprintf("%s.%s", s->section, s->key);
        const bool allowed = config_allows(config, name);
        free(name);
        if (s->resume == RESUME_REFUSE && !allowed) {
            fprintf(errors, "%s.%s = %s, but the checkpoint was written with %s\n", s->section, s->key, now, before);
            refusals = 1;
        } else {
            fprintf(notes, "%s.%s: %s from now on, was %s\n", s->section, s->key, now, before);
        }
    }
    free(now);
    free(before);
    return refusals;
}

int config_compare_resume(const Config *config, const char *old_text, const char *section, FILE *notes, FILE *errors) {
    Config old;
    /* The old text gives kv_heads and the like as they were resolved. */
    if (config_load_text(&old, old_text, "the checkpoint's config", NULL, 0, errors) != 0) return 1;
    int refusals = 0;
    for (int i = 0; i < n_settings; i++) {
        if (section && strcmp(section, settings[i].section) != 0) continue;
        refusals += compare_setting(config, &old, &settings[i], notes, errors);
    }
    config_free(&old);
    return refusals;
}

static void help_setting(const Setting *s, FILE *out) {
    fprintf(out, "%s.%s\n    %s\n    default: %s%s%s\n", s->section, s->key, s->help,
            s->fallback[0] ? s->fallback : "(empty)", s->unit[0] ? "  unit: " : "", s->unit);
    if (s->choices) {
        fprintf(out, "    one of:");
        for (int i = 0; s->choices[i]; i++) fprintf(out, " %s", s->choices[i]);
        fprintf(out, "\n");
    } else if (s->type == TYPE_BOOL) {
        fprintf(out, "    yes or no\n");
    } else if (s->type != TYPE_TEXT) {
        char bounds[96];
        fprintf(out, "    %s\n", setting_bounds(s, bounds));
    }
    static const char *const policies[] = {"may change when a run is resumed", "a resumed run says that it changed",
                                           "a resumed run refuses a change unless checkpoint.allow names it"};
    fprintf(out, "    %s\n", policies[s->resume]);
}

static void help_line(const Setting *s, FILE *out) {
    fprintf(out, "  %-24s %-24s %s\n", s->key, s->fallback[0] ? s->fallback : "-", s->help);
}

static void help_all(FILE *out) {
    fprintf(out, "Settings, with their defaults. `trident help section.key` tells more of one.\n"
                 "[section] and key = value; # and ; begin comments; include = FILE reads another file first;\n"
                 "whole numbers take k, M, G, T or Ki, Mi, Gi, Ti; times ms, s, m, h, d. --set section.key=value "
                 "overrides.\n");
    const char *section = "";
    for (int i = 0; i < n_settings; i++) {
        if (strcmp(section, settings[i].section) != 0) fprintf(out, "\n[%s]\n", settings[i].section);
        section = settings[i].section;
        help_line(&settings[i], out);
    }
}

static int help_section(const char *name, FILE *out) {
    int found = 0;
    for (int i = 0; i < n_settings; i++) {
        if (strcmp(settings[i].section, name) != 0) continue;
        if (found++) fputc('\n', out);
        help_setting(&settings[i], out);
    }
    return found;
}

/* What a topic may be: each section, each key alone, each section.key. Caller frees list and names. */
static char **list_topics(int *n) {
    char **names = xcalloc(3 * (uint64_t)n_settings, sizeof *names);
    *n = 0;
    for (int i = 0; i < n_settings; i++) {
        const Setting *s = &settings[i];
        if (i == 0 || strcmp(s->section, settings[i - 1].section) != 0) names[(*n)++] = xstrdup(s->section);
        names[(*n)++] = xstrdup(s->key);
        names[(*n)++] = xasprintf("%s.%s", s->section, s->key);
    }
    return names;
}

static void no_such_topic(const char *topic, FILE *errors) {
    int n;
    char **names = list_topics(&n), excerpt[INI_EXCERPT_BYTES];
    const char *near = nearest_name(topic, (const char *const *)names, n);
    fprintf(errors, "error: there is no setting or section %s%s%s%s\n", ini_excerpt(topic, excerpt),
            near ? "; did you mean " : "", near ? near : "", near ? "?" : "; `trident help` lists them all");
    for (int i = 0; i < n; i++) free(names[i]);
    free(names);
}

int config_help(const char *topic, FILE *out, FILE *errors) {
    if (!topic) return help_all(out), 0;
    if (help_section(topic, out)) return 0;
    int found = 0;
    for (int i = 0; i < n_settings; i++) {
        const Setting *s = &settings[i];
        const size_t n = strlen(s->section);
        const bool full = strncmp(topic, s->section, n) == 0 && topic[n] == '.' && strcmp(topic + n + 1, s->key) == 0;
        if (!full && strcmp(topic, s->key) != 0) continue;
        help_setting(s, out);
        found++;
    }
    if (!found) no_such_topic(topic, errors);
    return found ? 0 : -1;
}
