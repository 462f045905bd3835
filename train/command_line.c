/* command_line.c - the words of a command line against a table of options.
 * In: argv, table. Out: checked words and values. Every mistake ends with EXIT_CONFIG and the usage. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "train/commands.h"
#include "train/config.h"

enum { OPTIONS_MAX = 32 };

void usage_error(const CommandLine *line, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "error: ");
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\nusage: %s\n", line->usage);
    exit(EXIT_CONFIG);
}

static void print_usage(const CommandLine *line) {
    printf("usage: %s\n", line->usage);
    for (int i = 0; i < line->n_options; i++) {
        char name[64];
        const Option *o = &line->options[i];
        snprintf(name, sizeof name, "%s %s", o->name, o->value ? o->value : "");
        printf("  %-28s %s\n", name, o->help);
    }
}

/* The option that word i is, its value in *value ("--name=value", or the next word: *used is 2 then). */
static const Option *match(const CommandLine *line, int i, const char **value, int *used) {
    const char *word = line->argv[i];
    for (int k = 0; k < line->n_options; k++) {
        const Option *o = &line->options[k];
        const size_t length = strlen(o->name);
        if (strncmp(word, o->name, length) != 0 || (word[length] != 0 && word[length] != '=')) continue;
        *used = 1;
        *value = word[length] == '=' ? word + length + 1 : NULL;
        if (!o->value) {
            if (*value) usage_error(line, "%s takes no value", o->name);
            *value = "";
        } else if (!*value) {
            if (i + 1 >= line->argc) usage_error(line, "%s needs a value: %s", o->name, o->value);
            *value = line->argv[i + 1];
            *used = 2;
        }
        return o;
    }
    return NULL;
}

static void unknown_option(const CommandLine *line, const char *word) {
    const char *names[OPTIONS_MAX];
    REQUIRE(line->n_options <= OPTIONS_MAX);
    for (int k = 0; k < line->n_options; k++) names[k] = line->options[k].name;
    const char *near = nearest_name(word, names, line->n_options);
    if (near) usage_error(line, "unknown option %s; did you mean %s?", word, near);
    usage_error(line, "unknown option %s", word);
}

int command_words(const CommandLine *line, char ***words) {
    *words = xcalloc((uint64_t)line->argc + 1, sizeof **words);
    int n = 0;
    for (int i = 0, used = 1; i < line->argc; i += used) {
        const char *value;
        used = 1;
        if (strcmp(line->argv[i], "--help") == 0 || strcmp(line->argv[i], "-h") == 0) {
            print_usage(line);
            exit(EXIT_DONE);
        }
        const Option *o = match(line, i, &value, &used);
        if (o && !o->repeats && option_value(line, o->name) != value) {
            usage_error(line, "%s is given twice", o->name);
        }
        if (o) continue;
        if (strncmp(line->argv[i], "--", 2) == 0) unknown_option(line, line->argv[i]);
        (*words)[n++] = line->argv[i];
    }
    return n;
}

const char *option_value(const CommandLine *line, const char *name) {
    const char *found = NULL;
    for (int i = 0, used = 1; i < line->argc; i += used) {
        const char *value;
        used = 1;
        const Option *o = match(line, i, &value, &used);
        if (o && strcmp(o->name, name) == 0) found = value;
    }
    return found;
}

int option_values(const CommandLine *line, const char *name, char ***values) {
    *values = xcalloc((uint64_t)line->argc + 1, sizeof **values);
    int n = 0;
    for (int i = 0, used = 1; i < line->argc; i += used) {
        const char *value;
        used = 1;
        const Option *o = match(line, i, &value, &used);
        if (o && strcmp(o->name, name) == 0) (*values)[n++] = (char *)(uintptr_t)value;
    }
    return n;
}

int64_t option_int(const CommandLine *line, const char *name, int64_t fallback, int64_t min, int64_t max) {
    const char *text = option_value(line, name);
    if (!text) return fallback;
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno || value < min || value > max) {
        usage_error(line, "%s %s: a whole number from %" PRId64 " to %" PRId64 " is expected", name, text, min, max);
    }
    return value;
}

double option_double(const CommandLine *line, const char *name, double fallback, double min, double max) {
    const char *text = option_value(line, name);
    if (!text) return fallback;
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= min && value <= max)) {
        usage_error(line, "%s %s: a number from %g to %g is expected", name, text, min, max);
    }
    return value;
}
