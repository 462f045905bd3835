/* blend.h - several corpora mixed by weight into one sequence of samples.
 *
 * Weights become whole numbers of 1/65,536; a period of 65,536 samples holds each corpus exactly that
 * often, spread so that in every prefix of the sequence the count of a corpus is less than 1 away from
 * its weight's share. Which corpus sample k comes from, and how many of its samples came before, are one
 * table look-up. */
#ifndef TRIDENT_DATA_BLEND_H
#define TRIDENT_DATA_BLEND_H

#include <stdint.h>

#include "base/check.h"

enum { BLEND_PERIOD = 65536 };

typedef struct {
    int corpora;
    int32_t *weight;  /* (corpora) of BLEND_PERIOD; their sum is BLEND_PERIOD */
    uint16_t *corpus; /* (BLEND_PERIOD) which corpus */
    uint16_t *before; /* (BLEND_PERIOD) samples of that corpus earlier in the period */
} Blend;

/* weights: finite, >= 0, at least one > 0; a positive one gets at least 1/65,536. -1 with err. */
int blend_quantise(const double *weights, int corpora, int32_t *quantised, Error *err);
/* Also builds the period. */
int blend_init(Blend *blend, const double *weights, int corpora, Error *err);
void blend_free(Blend *blend);

/* The corpus of sample k, and in *index how many samples of it come before k. */
int blend_corpus(const Blend *blend, int64_t k, int64_t *index);
/* Samples of each corpus among the first n: counts (corpora). */
void blend_counts(const Blend *blend, int64_t n, int64_t *counts);

/* One entry of a data spec, "path:weight" or "path". */
typedef struct {
    char *path;
    double weight; /* < 0: not given */
} BlendEntry;
/* Entries of "path:weight, path:weight"; text in double quotes is taken as it is. Returns how many, with
 * *entries to be freed by blend_entries_free; -1 with err (EXIT_CONFIG). */
int blend_parse(const char *spec, BlendEntry **entries, Error *err);
void blend_entries_free(BlendEntry *entries, int n);

#endif
