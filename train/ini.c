/* ini.c - the INI reader: lines, quoting, includes.
 * In: file or text. Out: entries with their places, all errors printed.
 * Invariant: a line is either an entry or reported; nothing is dropped. */
#include "train/ini.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/file.h"

enum { INCLUDE_DEPTH_MAX = 16, FILE_BYTES_MAX = 16 << 20 };

/* A file that is being read, and the one that includes it. */
typedef struct Source {
    const struct Source *parent;
    const char *name;
    bool is_file;
    int depth, line, first_entry;
    char *section; /* owned; NULL before the first */
    bool section_known_bad;
} Source;

static void read_source(Ini *ini, Source *source, const char *text, size_t bytes);

static void complain(Ini *ini, const Source *s, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void complain(Ini *ini, const Source *s, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(ini->out, "%s:%d: ", s->name, s->line);
    vfprintf(ini->out, format, args);
    fputc('\n', ini->out);
    va_end(args);
    ini->errors++;
}

static char *trim(char *text) {
    while (isspace((unsigned char)*text)) text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1])) end--;
    *end = 0;
    return text;
}

static void add_entry(Ini *ini, const char *section, const char *key, const char *value, char *where) {
    if (ini->n == ini->capacity) {
        ini->capacity = ini->capacity ? 2 * ini->capacity : 64;
        ini->entries = xrealloc(ini->entries, (uint64_t)ini->capacity * sizeof *ini->entries);
    }
    ini->entries[ini->n++] = (IniEntry){xstrdup(section), xstrdup(key), xstrdup(value), where};
}

/* Cuts a comment off and takes quotes away, in place. False where a quote is left open or text follows one. */
static bool clean_value(char *value, const char **problem) {
    *problem = NULL;
    if (*value == '"') {
        char *to = value, *from = value + 1;
        while (*from && *from != '"') {
            if (*from == '\\' && from[1]) {
                from++;
                *to++ = *from == 'n' ? '\n' : *from;
                from++;
            } else {
                *to++ = *from++;
            }
        }
        if (*from != '"') {
            *problem = "the quote is not closed";
            return false;
        }
        char *rest = trim(from + 1);
        if (*rest && *rest != '#' && *rest != ';') {
            *problem = "text follows the closing quote";
            return false;
        }
        *to = 0;
        return true;
    }
    for (char *p = value; *p; p++) {
        if ((*p == '#' || *p == ';') && (p == value || isspace((unsigned char)p[-1]))) {
            *p = 0;
            break;
        }
    }
    char *clean = trim(value);
    memmove(value, clean, strlen(clean) + 1);
    return true;
}

static bool in_progress(const Source *s, const char *path) {
    for (; s; s = s->parent) {
        if (strcmp(s->name, path) == 0) return true;
    }
    return false;
}

static void read_file_below(Ini *ini, const Source *parent, const char *path) {
    Source source = {.parent = parent, .name = path, .is_file = true, .depth = parent ? parent->depth + 1 : 0};
    Error err;
    size_t bytes;
    char *text = file_read(path, &bytes, FILE_BYTES_MAX, &err, EXIT_CONFIG);
    if (!text) {
        if (parent) {
            complain(ini, parent, "include: %s", err.message);
        } else {
            fprintf(ini->out, "%s\n", err.message);
            ini->errors++;
        }
        return;
    }
    read_source(ini, &source, text, bytes);
    free(text);
}

static void include(Ini *ini, const Source *s, const char *value) {
    if (!s->is_file) {
        complain(ini, s, "include = %s: only a file may include another", value);
        return;
    }
    if (s->section) {
        complain(ini, s, "include = %s stands in [%s]; it belongs before the first section", value, s->section);
        return;
    }
    const char *slash = strrchr(s->name, '/');
    char *path = value[0] == '/' || !slash ? xstrdup(value)
                                           : xasprintf("%.*s/%s", (int)(slash - s->name), s->name, value);
    if (in_progress(s, path)) {
        complain(ini, s, "include = %s: that file is being read already (a cycle)", value);
    } else if (s->depth >= INCLUDE_DEPTH_MAX) {
        complain(ini, s, "include = %s: more than %d files deep", value, INCLUDE_DEPTH_MAX);
    } else {
        read_file_below(ini, s, path);
    }
    free(path);
}

static void read_section(Ini *ini, Source *s, char *line) {
    char *end = strchr(line, ']');
    free(s->section);
    s->section = NULL;
    if (!end) {
        complain(ini, s, "%s: the ] is missing", line);
        s->section = xstrdup("?");
        s->section_known_bad = true;
        return;
    }
    char *rest = trim(end + 1);
    *end = 0;
    char *name = trim(line + 1);
    s->section = xstrdup(name);
    s->section_known_bad = !*name;
    if (!*name) complain(ini, s, "[]: the section has no name");
    if (*rest && *rest != '#' && *rest != ';') complain(ini, s, "[%s] is followed by \"%s\"", name, rest);
}

/* The entry of this very file (not of what it includes) that set the key before. */
static const IniEntry *earlier_in_file(const Ini *ini, const Source *s, const char *key) {
    const size_t length = strlen(s->name);
    for (int i = s->first_entry; i < ini->n; i++) {
        const IniEntry *e = &ini->entries[i];
        if (strcmp(e->section, s->section) != 0 || strcmp(e->key, key) != 0) continue;
        if (strncmp(e->where, s->name, length) == 0 && e->where[length] == ':') return e;
    }
    return NULL;
}

static void read_key(Ini *ini, Source *s, char *line) {
    char *equals = strchr(line, '=');
    if (!equals) {
        complain(ini, s, "\"%s\" is neither [section] nor key = value", line);
        return;
    }
    *equals = 0;
    char *key = trim(line), *value = trim(equals + 1);
    const char *problem;
    if (!*key) {
        complain(ini, s, "= %s: the key is missing", value);
    } else if (!clean_value(value, &problem)) {
        complain(ini, s, "%s = %s: %s", key, value, problem);
    } else if (strcmp(key, "include") == 0) {
        include(ini, s, value);
    } else if (!s->section) {
        complain(ini, s, "%s = %s stands before the first [section]", key, value);
    } else if (!s->section_known_bad) {
        const IniEntry *earlier = earlier_in_file(ini, s, key);
        if (earlier) {
            complain(ini, s, "%s.%s = %s: set already at %s, to %s", s->section, key, value, earlier->where,
                     earlier->value);
            return;
        }
        add_entry(ini, s->section, key, value, xasprintf("%s:%d", s->name, s->line));
    }
}

static void read_line(Ini *ini, Source *s, char *line) {
    line = trim(line);
    if (!*line || *line == '#' || *line == ';') return;
    if (*line == '[') {
        read_section(ini, s, line);
    } else {
        read_key(ini, s, line);
    }
}

/* The next line into *line (grown), continuation lines joined; how many lines of the file it took, 0 at the end. */
static int next_line(const char **at, const char *end, char **line, size_t *capacity) {
    size_t n = 0;
    int lines = 0;
    bool more = true;
    while (more && *at < end) {
        const char *newline = memchr(*at, '\n', (size_t)(end - *at));
        const char *stop = newline ? newline : end;
        size_t length = (size_t)(stop - *at);
        if (n + length + 2 > *capacity) *line = xrealloc(*line, *capacity = 2 * (n + length + 2));
        memcpy(*line + n, *at, length);
        n += length;
        while (n && (*line)[n - 1] == '\r') n--;
        *at = newline ? newline + 1 : end;
        lines++;
        more = n > 0 && (*line)[n - 1] == '\\';
        if (more) (*line)[n - 1] = ' ';
    }
    if (lines) (*line)[n] = 0;
    return lines;
}

static void read_source(Ini *ini, Source *s, const char *text, size_t bytes) {
    const char *at = text, *end = text + bytes;
    if (bytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) at += 3;
    const char *zero = memchr(at, 0, (size_t)(end - at));
    s->first_entry = ini->n;
    s->line = 1;
    if (zero) {
        complain(ini, s, "a zero byte at offset %zu: this is no text file", (size_t)(zero - text));
        return;
    }
    char *line = NULL;
    size_t capacity = 0;
    int used;
    while ((used = next_line(&at, end, &line, &capacity)) > 0) {
        read_line(ini, s, line);
        s->line += used;
    }
    free(line);
    free(s->section);
}

void ini_read_file(Ini *ini, const char *path) { read_file_below(ini, NULL, path); }

void ini_read_text(Ini *ini, const char *text, size_t bytes, const char *name) {
    Source source = {.name = name};
    read_source(ini, &source, text, bytes);
}

void ini_read_override(Ini *ini, const char *text) {
    char *copy = xstrdup(text), *equals = strchr(copy, '='), *dot = strchr(copy, '.');
    if (!equals || !dot || dot > equals) {
        fprintf(ini->out, "--set %s: section.key=value is expected\n", text);
        ini->errors++;
    } else {
        *equals = *dot = 0;
        add_entry(ini, trim(copy), trim(dot + 1), trim(equals + 1), xstrdup("--set"));
    }
    free(copy);
}

void ini_free(Ini *ini) {
    for (int i = 0; i < ini->n; i++) {
        free(ini->entries[i].section);
        free(ini->entries[i].key);
        free(ini->entries[i].value);
        free(ini->entries[i].where);
    }
    free(ini->entries);
    *ini = (Ini){0};
}
