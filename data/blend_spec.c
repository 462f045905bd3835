/* blend_spec.c - reads "path:weight, path:weight".
 *
 * In: the text of data.train or data.valid.  Out: paths and weights, in order.
 * Invariant: either every entry has a weight or none has; paths differ from one another. */
#include <ctype.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "data/blend.h"

static bool is_separator(char c) { return c == ',' || c == ':' || c == 0; }

/* Reads a path at *at: a quoted one as it is, else up to a comma or colon, without spaces around it. */
static char *parse_path(const char *spec, const char **at, Error *err) {
    const char *p = *at;
    char *path;
    if (*p == '"') {
        const char *end = strchr(p + 1, '"');
        if (!end) {
            error_set(err, EXIT_CONFIG, "data \"%s\": the quote at character %d is never closed", spec,
                      (int)(p - spec) + 1);
            return NULL;
        }
        path = strndup(p + 1, (size_t)(end - p - 1));
        p = end + 1;
        while (isspace((unsigned char)*p)) p++;
        if (!is_separator(*p)) {
            error_set(err, EXIT_CONFIG,
                      "data \"%s\": after the quoted path at character %d, a comma or a colon with a "
                      "weight is expected",
                      spec, (int)(p - spec) + 1);
            free(path);
            return NULL;
        }
    } else {
        const char *end = p;
        while (!is_separator(*end)) end++;
        const char *last = end;
        while (last > p && isspace((unsigned char)last[-1])) last--;
        path = strndup(p, (size_t)(last - p));
        p = end;
    }
    if (path && path[0] == 0) {
        error_set(err, EXIT_CONFIG, "data \"%s\": a path is missing at character %d", spec, (int)(*at - spec) + 1);
        free(path);
        return NULL;
    }
    *at = p;
    return path;
}

/* Reads a weight at *at, up to a comma or the end. */
static int parse_weight(const char *spec, const char **at, double *weight, Error *err) {
    char *end;
    *weight = strtod(*at, &end);
    const char *number_end = end;
    while (isspace((unsigned char)*end)) end++;
    if (number_end == *at || (*end != ',' && *end != 0)) {
        return error_set(err, EXIT_CONFIG,
                         "data \"%s\": a weight is expected at character %d; a path with a colon or "
                         "comma in it is written in double quotes",
                         spec, (int)(*at - spec) + 1);
    }
    if (!isfinite(*weight) || *weight < 0) {
        return error_set(err, EXIT_CONFIG,
                         "data \"%s\": the weight at character %d is %g; weights are finite and not "
                         "negative",
                         spec, (int)(*at - spec) + 1, *weight);
    }
    *at = end;
    return 0;
}

static int check_entries(const char *spec, const BlendEntry *entries, int n, Error *err) {
    for (int i = 0; i < n; i++) {
        if ((entries[i].weight < 0) != (entries[0].weight < 0)) {
            return error_set(err, EXIT_CONFIG,
                             "data \"%s\": %s has a weight and %s has none; give all of them weights, or "
                             "none (then each counts by its size)",
                             spec, entries[entries[i].weight < 0 ? 0 : i].path,
                             entries[entries[i].weight < 0 ? i : 0].path);
        }
        for (int j = 0; j < i; j++) {
            if (strcmp(entries[i].path, entries[j].path) != 0) continue;
            return error_set(err, EXIT_CONFIG,
                             "data \"%s\": %s is given twice; its samples would be drawn twice an "
                             "epoch: add the weights up instead",
                             spec, entries[i].path);
        }
    }
    return 0;
}

int blend_parse(const char *spec, BlendEntry **entries, Error *err) {
    *entries = NULL;
    int n = 0, rc = 0;
    const char *at = spec;
    while (rc == 0) {
        while (isspace((unsigned char)*at)) at++;
        char *path = parse_path(spec, &at, err);
        if (!path) {
            rc = -1;
            break;
        }
        *entries = xrealloc(*entries, (uint64_t)(n + 1) * sizeof **entries);
        BlendEntry *entry = &(*entries)[n++];
        *entry = (BlendEntry){path, -1};
        if (*at == ':') {
            at++;
            rc = parse_weight(spec, &at, &entry->weight, err);
        }
        if (rc != 0 || *at == 0) break;
        at++;
    }
    if (rc == 0) rc = check_entries(spec, *entries, n, err);
    if (rc == 0) return n;
    blend_entries_free(*entries, n);
    *entries = NULL;
    return -1;
}

void blend_entries_free(BlendEntry *entries, int n) {
    for (int i = 0; i < n; i++) free(entries[i].path);
    free(entries);
}
