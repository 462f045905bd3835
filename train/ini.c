/* ini.c - the INI reader: lines, quoting, includes.
 * In: file or text. Out: entries with their places, all errors printed.
 * Invariant: a line is either an entry, a comment, or reported; nothing is dropped. */
#include "train/ini.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/check.h"
#include "base/file.h"
#include "data/utf8.h"

/* Far above what a run needs; they keep the time and the output of a wrong file within bounds. */
enum { INCLUDE_DEPTH_MAX = 16, FILES_MAX = 256, ENTRIES_MAX = 10000, FILE_BYTES_MAX = 16 << 20 };

/* A file that is being read, and the one that includes it. */
typedef struct Source {
    const struct Source *parent;
    const char *name;
    bool is_file;
    int number, depth, line, first_entry;
    dev_t device;
    ino_t inode;
    char *section; /* owned; NULL before the first */
    bool section_known_bad, full;
} Source;

static void read_source(Ini *ini, Source *source, const char *text, size_t bytes);

bool ini_error_shows(FILE *out, int n) {
    if (n == INI_ERRORS_SHOWN) fprintf(out, "there are more errors; %d are shown\n", n);
    return n < INI_ERRORS_SHOWN;
}

const char *ini_excerpt(const char *text, char excerpt[INI_EXCERPT_BYTES]) {
    static const char more[] = "...";
    const size_t room = INI_EXCERPT_BYTES - sizeof more;
    size_t n = strnlen(text, INI_EXCERPT_BYTES);
    const bool cut = n == INI_EXCERPT_BYTES;
    if (cut) n = room;
    while (cut && n && ((unsigned char)text[n] & 0xC0) == 0x80) n--; /* not within a character */
    for (size_t i = 0; i < n; i++) excerpt[i] = iscntrl((unsigned char)text[i]) ? '?' : text[i];
    memcpy(excerpt + n, cut ? more : "", cut ? sizeof more : 1);
    return excerpt;
}

static void complain(Ini *ini, const Source *s, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void complain(Ini *ini, const Source *s, const char *format, ...) {
    if (!ini_error_shows(ini->out, ini->errors++)) return;
    va_list args;
    va_start(args, format);
    if (s->line) {
        fprintf(ini->out, "%s:%d: ", s->name, s->line);
    } else {
        fprintf(ini->out, "%s: ", s->name);
    }
    vfprintf(ini->out, format, args);
    fputc('\n', ini->out);
    va_end(args);
}

static char *trim(char *text) {
    while (isspace((unsigned char)*text)) text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1])) end--;
    *end = 0;
    return text;
}

static void add_entry(Ini *ini, int file, const char *section, const char *key, const char *value, char *where) {
    if (ini->n == ini->capacity) {
        ini->capacity = ini->capacity ? 2 * ini->capacity : 64;
        ini->entries = xrealloc(ini->entries, (uint64_t)ini->capacity * sizeof *ini->entries);
    }
    ini->entries[ini->n++] = (IniEntry){.section = xstrdup(section),
                                        .key = key ? xstrdup(key) : NULL,
                                        .value = value ? xstrdup(value) : NULL,
                                        .where = where,
                                        .file = file};
}

static bool has_room(Ini *ini, Source *s) {
    if (ini->n < ENTRIES_MAX) return true;
    if (!s->full) complain(ini, s, "more than %d lines of settings: the rest is not read", ENTRIES_MAX);
    s->full = true;
    return false;
}

static bool begins_comment(char c) { return c == '#' || c == ';'; }

/* Behind the closing quote of a quoted value, or NULL where it is not closed. */
static const char *skip_quoted(const char *p) {
    for (p++; *p && *p != '"'; p++) {
        if (*p == '\\' && p[1]) p++;
    }
    return *p ? p + 1 : NULL;
}

/* The comment of a line, or NULL. What stands in a quoted value is none. */
static const char *find_comment(const char *line) {
    bool blank_before = true, in_value = false;
    for (const char *p = line; p && *p;) {
        if (begins_comment(*p) && blank_before) return p;
        blank_before = isspace((unsigned char)*p);
        if (*p == '=' && !in_value) {
            in_value = true;
            p += 1 + strspn(p + 1, " \t");
            blank_before = true;
            if (*p == '"') p = skip_quoted(p);
        } else {
            p++;
        }
    }
    return NULL;
}

/* Takes the quotes away, in place. NULL, or what is wrong. */
static const char *unquote(char *value) {
    const char *end = skip_quoted(value);
    if (!end) return "the quote is not closed";
    const char *rest = end + strspn(end, " \t");
    if (*rest && !begins_comment(*rest)) return "text follows the closing quote; a \" inside is written \\\"";
    char *to = value;
    for (const char *from = value + 1; from < end - 1; from++) {
        if (*from == '\\') {
            from++;
            if (*from != '"' && *from != '\\' && *from != 'n') return "in quotes, \\ stands before \", \\ or n only";
            *to++ = *from == 'n' ? '\n' : *from;
        } else {
            *to++ = *from;
        }
    }
    *to = 0;
    return NULL;
}

/* Cuts a comment off and takes quotes away, in place. NULL, or what is wrong. */
static const char *clean_value(char *value) {
    if (*value == '"') return unquote(value);
    if (begins_comment(*value)) return "a value that begins with # or ; stands in quotes (\"\" is the empty one)";
    for (char *p = value; *p; p++) {
        if (begins_comment(*p) && isspace((unsigned char)p[-1])) {
            *p = 0;
            break;
        }
    }
    trim(value); /* begins with no white space: nothing moves */
    return NULL;
}

static bool in_progress(const Source *s, const struct stat *facts) {
    for (; s; s = s->parent) {
        if (s->device == facts->st_dev && s->inode == facts->st_ino) return true;
    }
    return false;
}

static void read_file_below(Ini *ini, const Source *parent, const char *path) {
    Source source = {.parent = parent, .name = path, .is_file = true, .depth = parent ? parent->depth + 1 : 0};
    Error err;
    size_t bytes;
    struct stat facts = {0};
    const bool there = stat(path, &facts) == 0;
    if (there && in_progress(parent, &facts)) {
        complain(ini, parent, "include: %s is being read already (a cycle)", path);
        return;
    }
    source.device = facts.st_dev;
    source.inode = facts.st_ino;
    char *text = NULL;
    if (there && !S_ISREG(facts.st_mode)) { /* opening a pipe would wait for whoever fills it */
        error_set(&err, EXIT_CONFIG, "%s: is %s, not a config file", path,
                  S_ISDIR(facts.st_mode) ? "a directory" : "no regular file");
    } else {
        text = file_read(path, &bytes, FILE_BYTES_MAX, &err, EXIT_CONFIG);
    }
    if (text) {
        read_source(ini, &source, text, bytes);
    } else if (parent) {
        complain(ini, parent, "include: %s", err.message);
    } else if (ini_error_shows(ini->out, ini->errors++)) {
        fprintf(ini->out, "%s\n", err.message);
    }
    free(text);
}

static void include(Ini *ini, const Source *s, const char *value) {
    char excerpt[INI_EXCERPT_BYTES];
    ini_excerpt(value, excerpt);
    if (!s->is_file) {
        complain(ini, s, "include = %s: only a file may include another", excerpt);
    } else if (s->section) {
        complain(ini, s, "include = %s stands in [%s]; it belongs before the first section", excerpt, s->section);
    } else if (!*value) {
        complain(ini, s, "include names no file");
    } else if (s->depth >= INCLUDE_DEPTH_MAX) {
        complain(ini, s, "include = %s: more than %d files deep", excerpt, INCLUDE_DEPTH_MAX);
    } else if (ini->files >= FILES_MAX) {
        complain(ini, s, "include = %s: more than %d files", excerpt, FILES_MAX);
    } else {
        const char *slash = strrchr(s->name, '/');
        char *path = value[0] == '/' || !slash ? xstrdup(value)
                                               : xasprintf("%.*s/%s", (int)(slash - s->name), s->name, value);
        read_file_below(ini, s, path);
        free(path);
    }
}

static void read_section(Ini *ini, Source *s, char *line) {
    char excerpt[INI_EXCERPT_BYTES];
    char *end = strchr(line, ']');
    free(s->section);
    s->section_known_bad = true;
    if (!end) {
        complain(ini, s, "%s: the ] is missing", ini_excerpt(line, excerpt));
        s->section = xstrdup("?");
        return;
    }
    char *rest = trim(end + 1);
    *end = 0;
    s->section = xstrdup(trim(line + 1));
    ini_excerpt(s->section, excerpt);
    if (!*s->section) {
        complain(ini, s, "[]: the section has no name");
        return;
    }
    s->section_known_bad = false;
    if (has_room(ini, s)) add_entry(ini, s->number, s->section, NULL, NULL, xasprintf("%s:%d", s->name, s->line));
    if (*rest && !begins_comment(*rest)) {
        char rest_excerpt[INI_EXCERPT_BYTES];
        complain(ini, s, "[%s] is followed by \"%s\"", excerpt, ini_excerpt(rest, rest_excerpt));
    }
}

/* The entry of this very file (not of what it includes) that set the key before. */
static const IniEntry *earlier_in_file(const Ini *ini, const Source *s, const char *key) {
    for (int i = s->first_entry; i < ini->n; i++) {
        const IniEntry *e = &ini->entries[i];
        if (e->file == s->number && e->key && strcmp(e->key, key) == 0 && strcmp(e->section, s->section) == 0) return e;
    }
    return NULL;
}

static void read_setting(Ini *ini, Source *s, const char *key, const char *value) {
    char key_excerpt[INI_EXCERPT_BYTES], value_excerpt[INI_EXCERPT_BYTES], before[INI_EXCERPT_BYTES];
    ini_excerpt(key, key_excerpt);
    ini_excerpt(value, value_excerpt);
    if (!s->section) {
        complain(ini, s, "%s = %s stands before the first [section]", key_excerpt, value_excerpt);
        return;
    }
    if (s->section_known_bad || s->full) return;
    const IniEntry *earlier = earlier_in_file(ini, s, key);
    if (earlier) {
        complain(ini, s, "%s.%s = %s: set already at %s, to %s", s->section, key_excerpt, value_excerpt, earlier->where,
                 ini_excerpt(earlier->value, before));
    } else if (has_room(ini, s)) {
        add_entry(ini, s->number, s->section, key, value, xasprintf("%s:%d", s->name, s->line));
    }
}

static void read_key(Ini *ini, Source *s, char *line) {
    char excerpt[INI_EXCERPT_BYTES], key_excerpt[INI_EXCERPT_BYTES];
    char *equals = strchr(line, '=');
    if (!equals) {
        complain(ini, s, "\"%s\" is neither [section] nor key = value", ini_excerpt(line, excerpt));
        return;
    }
    *equals = 0;
    char *key = trim(line), *value = trim(equals + 1);
    ini_excerpt(value, excerpt);
    const char *problem = *key ? clean_value(value) : "the key is missing";
    if (problem) {
        complain(ini, s, "%s%s= %s: %s", ini_excerpt(key, key_excerpt), *key ? " " : "", excerpt, problem);
    } else if (strcmp(key, "include") == 0) {
        include(ini, s, value);
    } else {
        read_setting(ini, s, key, value);
    }
}

static void read_line(Ini *ini, Source *s, char *line) {
    line = trim(line);
    if (!*line || begins_comment(*line)) return;
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
        const size_t length = (size_t)(stop - *at);
        if (n + length + 2 > *capacity) *line = xrealloc(*line, *capacity = 2 * (n + length + 2));
        memcpy(*line + n, *at, length);
        n += length;
        if (n && (*line)[n - 1] == '\r') n--;
        (*line)[n] = 0;
        *at = newline ? newline + 1 : end;
        lines++;
        more = n > 0 && (*line)[n - 1] == '\\' && !find_comment(*line);
        if (more) (*line)[n - 1] = ' ';
    }
    return lines;
}

/* False, and said where, if the bytes are no text. */
static bool check_text(Ini *ini, Source *s, const char *text, size_t bytes) {
    const size_t valid = utf8_valid_prefix(text, bytes);
    s->line = 1;
    for (size_t i = 0; i < bytes; i++) {
        const unsigned char c = (unsigned char)text[i];
        const bool end_of_line = c == '\n' || (c == '\r' && (i + 1 == bytes || text[i + 1] == '\n'));
        if (i >= valid || c == 127 || (c < 32 && c != '\t' && !end_of_line)) {
            complain(ini, s, "byte 0x%02x at offset %zu: this is no text file (UTF-8 is expected)", c, i);
            return false;
        }
        s->line += c == '\n';
    }
    return true;
}

static void read_source(Ini *ini, Source *s, const char *text, size_t bytes) {
    if (!check_text(ini, s, text, bytes)) return;
    const char *at = text, *end = text + bytes;
    if (bytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) at += 3;
    s->number = ini->files++;
    s->first_entry = ini->n;
    s->line = 1;
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
    char *copy = xstrdup(text), *equals = strchr(copy, '=');
    char *dot = equals ? memchr(copy, '.', (size_t)(equals - copy)) : NULL;
    if (dot) *equals = *dot = 0;
    char *section = trim(copy), *key = dot ? trim(dot + 1) : NULL;
    if (!dot || !*section || !*key) {
        char excerpt[INI_EXCERPT_BYTES];
        if (ini_error_shows(ini->out, ini->errors++)) {
            fprintf(ini->out, "--set %s: section.key=value is expected\n", ini_excerpt(text, excerpt));
        }
    } else {
        add_entry(ini, -1, section, key, trim(equals + 1), xstrdup("--set"));
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
