/* config_value.c - one value: from text, to text.
 * Invariant: setting_parse(setting_format(x)) gives x. */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "data/utf8.h"
#include "train/config_table.h"

static void *field(const Setting *s, const Config *config) { return (char *)(uintptr_t)config + s->offset; }

/* Whole digits with single _ between them, then k, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti. */
static int parse_int64(const char *text, int64_t *value) {
    static const struct {
        const char *suffix;
        int64_t factor;
    } suffixes[] = {{"", 1},
                    {"k", 1000},
                    {"M", 1000000},
                    {"G", 1000000000},
                    {"T", 1000000000000},
                    {"Ki", INT64_C(1) << 10},
                    {"Mi", INT64_C(1) << 20},
                    {"Gi", INT64_C(1) << 30},
                    {"Ti", INT64_C(1) << 40}};
    const bool negative = *text == '-';
    const char *p = text + (*text == '-' || *text == '+');
    int64_t number = 0;
    if (!isdigit((unsigned char)*p)) return -1;
    for (; isdigit((unsigned char)*p) || (*p == '_' && isdigit((unsigned char)p[1])); p++) {
        if (*p == '_') continue;
        if (__builtin_mul_overflow(number, 10, &number) || __builtin_add_overflow(number, *p - '0', &number)) return -1;
    }
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        if (strcmp(p, suffixes[i].suffix) != 0) continue;
        return __builtin_mul_overflow(negative ? -number : number, suffixes[i].factor, value) ? -1 : 0;
    }
    return -1;
}

/* A finite decimal number at the start of text; *end is behind it. No hexadecimal, no nan, no inf; what is too
 * small for a double is refused too, as it would silently become 0. */
static int parse_decimal(const char *text, const char **end, double *value) {
    const char *digits = text + (*text == '-' || *text == '+');
    const char *first = digits + (*digits == '.');
    if (!isdigit((unsigned char)*first) || (digits[0] == '0' && (digits[1] == 'x' || digits[1] == 'X'))) return -1;
    char *behind;
    errno = 0;
    *value = strtod(text, &behind);
    *end = behind;
    return errno || !isfinite(*value) ? -1 : 0;
}

static int parse_double(const char *text, double *value) {
    const char *end;
    return parse_decimal(text, &end, value) != 0 || *end ? -1 : 0;
}

static int parse_duration(const char *text, double *seconds) {
    static const struct {
        const char *suffix;
        double factor;
    } suffixes[] = {{"", 1}, {"s", 1}, {"ms", 1e-3}, {"m", 60}, {"h", 3600}, {"d", 86400}};
    const char *end;
    double number;
    if (parse_decimal(text, &end, &number) != 0) return -1;
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        if (strcmp(end, suffixes[i].suffix) != 0) continue;
        *seconds = number * suffixes[i].factor;
        return 0;
    }
    return -1;
}

static int parse_bool(const char *text, bool *value) {
    static const char *const words[2][4] = {{"no", "false", "off", "0"}, {"yes", "true", "on", "1"}};
    for (int truth = 0; truth < 2; truth++) {
        for (int i = 0; i < 4; i++) {
            if (strcmp(text, words[truth][i]) == 0) return *value = truth, 0;
        }
    }
    return -1;
}

static int parse_choice(const Setting *s, const char *text, int *value, char problem[256]) {
    int n = 0;
    size_t used = (size_t)snprintf(problem, 256, "one of");
    for (; s->choices[n]; n++) {
        if (strcmp(text, s->choices[n]) == 0) return *value = n, 0;
        used += (size_t)snprintf(problem + used, 256 - used, "%s %s", n ? "," : "", s->choices[n]);
    }
    const char *near = nearest_name(text, s->choices, n);
    if (near) snprintf(problem + used, 256 - used, "; did you mean %s?", near);
    return -1;
}

static int parse_whole(const Setting *s, Config *config, const char *text, char problem[256]) {
    int64_t value;
    char bounds[96];
    snprintf(problem, 256, "a whole number (such as 64, 10_000, 32k, 4Ki) %s", setting_bounds(s, bounds));
    if (parse_int64(text, &value) != 0 || (double)value < s->min || (double)value > s->max) return -1;
    if (s->type == TYPE_INT) {
        *(int *)field(s, config) = (int)value;
    } else {
        *(int64_t *)field(s, config) = value;
    }
    return 0;
}

static int parse_real(const Setting *s, Config *config, const char *text, char problem[256]) {
    double value;
    char bounds[96];
    const bool duration = s->type == TYPE_DURATION;
    snprintf(problem, 256, "%s %s", duration ? "a time (such as 30s, 10m or 2h)" : "a number",
             setting_bounds(s, bounds));
    int rc = duration ? parse_duration(text, &value) : parse_double(text, &value);
    if (rc != 0 || !(value >= s->min && value <= s->max)) return -1;
    *(double *)field(s, config) = value;
    return 0;
}

static bool has_controls(const char *text) {
    for (; *text; text++) {
        if (iscntrl((unsigned char)*text) && *text != '\n' && *text != '\t') return true;
    }
    return false;
}

const char *setting_bounds(const Setting *s, char text[96]) {
    const char *unit = s->type == TYPE_DURATION ? "s" : "";
    text[0] = 0;
    if (s->type == TYPE_TEXT || s->type == TYPE_BOOL || s->type == TYPE_CHOICE) return text;
    if (s->max == SETTING_MAX_NONE) {
        snprintf(text, 96, "at least %.15g%s", s->min, unit);
    } else {
        snprintf(text, 96, "from %.15g%s to %.15g%s", s->min, unit, s->max, unit);
    }
    return text;
}

int setting_parse(const Setting *s, Config *config, const char *text, char problem[256]) {
    switch (s->type) {
    case TYPE_INT:
    case TYPE_INT64: return parse_whole(s, config, text, problem);
    case TYPE_DOUBLE:
    case TYPE_DURATION: return parse_real(s, config, text, problem);
    case TYPE_BOOL: snprintf(problem, 256, "yes or no"); return parse_bool(text, field(s, config));
    case TYPE_CHOICE: return parse_choice(s, text, field(s, config), problem);
    case TYPE_TEXT: {
        char **to = field(s, config);
        /* Logs and checkpoints are JSON and INI, which hold nothing else. */
        snprintf(problem, 256, "text in UTF-8 without control characters");
        if (utf8_valid_prefix(text, strlen(text)) != strlen(text) || has_controls(text)) return -1;
        free(*to);
        *to = xstrdup(text);
        return 0;
    }
    }
    return -1;
}

/* A decimal that reads back to the same double: 15 digits where they do, which leaves 0.1 and 600 as they are. */
static char *format_double(double value, const char *suffix) {
    char text[40];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    return xasprintf("%s%s", text, suffix);
}

/* Quoted where the reader would otherwise cut or trim it. */
static char *format_text(const char *text) {
    const size_t n = strlen(text);
    bool plain = n > 0 && text[0] != '"' && text[0] != ' ' && text[n - 1] != ' ' && text[n - 1] != '\\';
    if (plain && !strpbrk(text, "#;\n\r\t")) return xstrdup(text);
    char *quoted = xmalloc(2 * n + 3), *to = quoted;
    *to++ = '"';
    for (const char *p = text; *p; p++) {
        if (*p == '"' || *p == '\\' || *p == '\n') *to++ = '\\';
        *to++ = *p == '\n' ? 'n' : *p;
    }
    *to++ = '"';
    *to = 0;
    return quoted;
}

char *setting_format(const Setting *s, const Config *config) {
    const void *from = field(s, config);
    switch (s->type) {
    case TYPE_INT: return xasprintf("%d", *(const int *)from);
    case TYPE_INT64: return xasprintf("%" PRId64, *(const int64_t *)from);
    case TYPE_DOUBLE: return format_double(*(const double *)from, "");
    case TYPE_DURATION: return format_double(*(const double *)from, "s");
    case TYPE_BOOL: return xstrdup(*(const bool *)from ? "yes" : "no");
    case TYPE_CHOICE: return xstrdup(s->choices[*(const int *)from]);
    case TYPE_TEXT: return format_text(*(char *const *)from);
    }
    die(EXIT_INTERNAL, "%s.%s has no type", s->section, s->key);
}
