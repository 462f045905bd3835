/* config_complain.c - what is said about a wrong config: where, what, and what was probably meant.
 * In: broken rules, unknown names. Out: one line each, counted.
 * Invariant: a line blames only values that the user wrote, or defaults of a config that has no other error. */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "train/config_table.h"

enum { KEYS_MAX = 8, NAME_MAX_LENGTH = 64 };

/* Edit distance with swaps of neighbours (optimal string alignment); NAME_MAX_LENGTH for long names. */
static int distance(const char *a, const char *b) {
    int d[3][NAME_MAX_LENGTH + 1];
    const int n = (int)strnlen(a, NAME_MAX_LENGTH + 1), m = (int)strnlen(b, NAME_MAX_LENGTH + 1);
    if (n > NAME_MAX_LENGTH || m > NAME_MAX_LENGTH) return NAME_MAX_LENGTH;
    for (int j = 0; j <= m; j++) d[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *row = d[i % 3], *above = d[(i + 2) % 3], *two_above = d[(i + 1) % 3];
        row[0] = i;
        for (int j = 1; j <= m; j++) {
            int best = above[j - 1] + (a[i - 1] != b[j - 1]);
            if (above[j] + 1 < best) best = above[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            const bool swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swap && two_above[j - 2] + 1 < best) best = two_above[j - 2] + 1;
            row[j] = best;
        }
    }
    return d[n % 3][m];
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

/* Names of all sections (section NULL) or of a section's keys, without repeats. */
static int list_names(const char *section, const char **names) {
    int n = 0;
    for (int i = 0; i < n_settings; i++) {
        if (section && strcmp(settings[i].section, section) != 0) continue;
        const char *name = section ? settings[i].key : settings[i].section;
        if (!n || strcmp(names[n - 1], name) != 0) names[n++] = name;
    }
    return n;
}

const char *section_meant(const char *section) {
    const char **names = xcalloc((uint64_t)n_settings, sizeof *names);
    const int n = list_names(NULL, names);
    const char *meant = nearest_name(section, names, n); /* the section itself where it is known: distance 0 */
    free(names);
    return meant;
}

/* "lr belongs in [optimizer]", or "in [checkpoint] or [log]". False where no section has the key. */
static bool say_other_sections(const char *key, FILE *out) {
    int n = 0;
    for (int i = 0; i < n_settings; i++) {
        if (strcmp(settings[i].key, key) != 0) continue;
        fprintf(out, "%s%s[%s]", n ? "" : key, n ? " or " : " belongs in ", settings[i].section);
        n++;
    }
    if (n) fputc('\n', out);
    return n > 0;
}

/* "section.key = value" within a section. */
static bool say_full_name(const char *key, FILE *out) {
    const char *dot = strchr(key, '.');
    for (int i = 0; dot && i < n_settings; i++) {
        const size_t n = strlen(settings[i].section);
        if ((size_t)(dot - key) != n || strncmp(key, settings[i].section, n) != 0) continue;
        if (strcmp(dot + 1, settings[i].key) != 0) continue;
        fprintf(out, "write %s in [%s]\n", settings[i].key, settings[i].section);
        return true;
    }
    return false;
}

static void say_nearest_key(const char *section, const char *key, FILE *out) {
    const char **names = xcalloc((uint64_t)n_settings, sizeof *names);
    const char *near = nearest_name(key, names, section ? list_names(section, names) : 0);
    if (near) {
        fprintf(out, "unknown key; did you mean %s?\n", near);
    } else {
        for (int i = 0; i < n_settings; i++) names[i] = settings[i].key;
        near = nearest_name(key, names, n_settings);
        for (int i = 0; near && i < n_settings; i++) {
            if (names[i] != near) continue;
            fprintf(out, "unknown key; did you mean %s of [%s]?\n", near, settings[i].section);
        }
        if (!near)
            fprintf(out, "unknown key; `trident help%s%s` lists what there is\n", section ? " " : "",
                    section ? section : "");
    }
    free(names);
}

void complain_unknown(Complaints *c, const IniEntry *e) {
    char section[INI_EXCERPT_BYTES], key[INI_EXCERPT_BYTES], value[INI_EXCERPT_BYTES];
    c->incomplete = true;
    if (!ini_error_shows(c->out, c->n++)) return;
    const char *meant = section_meant(e->section);
    const bool known = meant && strcmp(meant, e->section) == 0;
    fprintf(c->out, "%s: [%s]", e->where, ini_excerpt(e->section, section));
    if (e->key) fprintf(c->out, " %s = %s", ini_excerpt(e->key, key), ini_excerpt(e->value, value));
    fputs(": ", c->out);
    if (!e->key && meant) {
        fprintf(c->out, "there is no such section; did you mean [%s]?\n", meant);
    } else if (!e->key) {
        fprintf(c->out, "there is no such section; `trident help` lists them\n");
    } else if (!say_full_name(e->key, c->out) && !say_other_sections(e->key, c->out)) {
        say_nearest_key(known ? e->section : meant, e->key, c->out);
    }
}

/* Index of "section.key", which must be in the table. */
static int index_of(const char *name, size_t length) {
    for (int i = 0; i < n_settings; i++) {
        const size_t n = strlen(settings[i].section);
        if (length == n + 1 + strlen(settings[i].key) && strncmp(name, settings[i].section, n) == 0 && name[n] == '.' &&
            strncmp(name + n + 1, settings[i].key, length - n - 1) == 0)
            return i;
    }
    die(EXIT_INTERNAL, "%.*s is no setting", (int)length, name);
}

static int split_keys(const char *keys, int index[KEYS_MAX]) {
    int n = 0;
    for (const char *p = keys; *p; p += strspn(p, " ")) {
        const size_t length = strcspn(p, " ");
        REQUIRE(n < KEYS_MAX);
        index[n++] = index_of(p, length);
        p += length;
    }
    return n;
}

/* Names the places of the values other than the first: run.ini:7: ... (heads: run.ini:8, tensor: --set). */
static void say_places(const Complaints *c, const int *index, int n, const char *lead) {
    int said = 0;
    for (int k = 0; k < n; k++) {
        const char *place = c->where ? c->where[index[k]] : NULL;
        if (!place || (k == 0 && place == lead)) continue;
        fprintf(c->out, "%s%s: %s", said++ ? ", " : " (", settings[index[k]].key, place);
    }
    fputs(said ? ")\n" : "\n", c->out);
}

void complain_about(Complaints *c, const char *keys, const char *format, ...) {
    int index[KEYS_MAX];
    const int n = split_keys(keys, index);
    for (int k = 0; k < n; k++) {
        if (c->bad && c->bad[index[k]]) return;
        if (c->incomplete && !(c->where && c->where[index[k]])) return;
    }
    if (!ini_error_shows(c->out, c->n++)) return;
    const char *lead = c->where && c->where[index[0]] ? c->where[index[0]] : c->name;
    va_list args;
    va_start(args, format);
    fprintf(c->out, "%s: ", lead);
    vfprintf(c->out, format, args);
    va_end(args);
    say_places(c, index, n, lead);
}
