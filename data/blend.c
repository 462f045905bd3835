/* blend.c - weights to whole numbers, and the balanced sequence.
 *
 * The j-th sample of a corpus of weight w/P (j from 0) belongs into the slots from floor(j P / w) up to,
 * but not including, ceil((j + 1) P / w): inside these windows its count is less than 1 away from n w / P
 * for every n. One slot for each job, in order of deadline among those that may start, meets all windows,
 * because the weights sum to the number of slots (the fluid schedule that gives each corpus its share of
 * every slot meets them, and earliest deadline first meets whatever any schedule can). blend_init
 * proves it anew for each table: a missed window is a broken invariant. */
#include "data/blend.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Largest remainder, with a floor of 1 for positive weights: those whose share is below 1 get 1, and the
 * others share what is left. */
int blend_quantise(const double *weights, int corpora, int32_t *quantised, Error *err) {
    int positive = 0;
    double largest = 0;
    for (int i = 0; i < corpora; i++) {
        positive += weights[i] > 0;
        if (weights[i] > largest) largest = weights[i];
    }
    if (positive == 0) return error_set(err, EXIT_CONFIG, "all %d weights of the data are zero", corpora);
    if (positive > BLEND_PERIOD) {
        return error_set(err, EXIT_DATA, "%d corpora: a blend has at most %d", positive, BLEND_PERIOD);
    }
    memset(quantised, 0, (size_t)corpora * sizeof *quantised);
    double share_of_one = 0;
    int32_t left = BLEND_PERIOD;
    for (int raised = 1; raised > 0;) {
        raised = 0;
        double sum = 0; /* of weights relative to the largest, which cannot overflow */
        for (int i = 0; i < corpora; i++) sum += quantised[i] == 0 ? weights[i] / largest : 0;
        share_of_one = left / sum;
        for (int i = 0; i < corpora; i++) {
            if (quantised[i] == 0 && weights[i] > 0 && weights[i] / largest * share_of_one < 1) {
                quantised[i] = 1;
                raised++;
            }
        }
        left -= raised;
    }
    double *remainder = xcalloc((uint64_t)corpora, sizeof *remainder);
    for (int i = 0; i < corpora; i++) {
        remainder[i] = -1;
        if (quantised[i] != 0 || !(weights[i] > 0)) continue;
        double share = weights[i] / largest * share_of_one;
        quantised[i] = (int32_t)share;
        remainder[i] = share - quantised[i];
        left -= quantised[i];
    }
    while (left != 0) { /* below the number of corpora times */
        int best = -1;
        for (int i = 0; i < corpora; i++) {
            if (remainder[i] >= 0 && (best < 0 || remainder[i] > remainder[best])) best = i;
        }
        REQUIRE(best >= 0 && left > 0);
        quantised[best]++;
        remainder[best] = 0; /* rounding of the shares can leave more than one round: then equal ones in order */
        left--;
    }
    free(remainder);
    return 0;
}

/* ---- the period ---- */

/* A sample that waits for its slot: the next of a corpus. */
typedef struct {
    int32_t deadline; /* exclusive */
    int32_t corpus;
} Job;

static int job_before(Job a, Job b) { return a.deadline != b.deadline ? a.deadline < b.deadline : a.corpus < b.corpus; }

static void heap_push(Job *heap, int *n, Job job) {
    int at = (*n)++;
    while (at > 0 && job_before(job, heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = job;
}

static Job heap_pop(Job *heap, int *n) {
    Job top = heap[0], last = heap[--*n];
    int at = 0;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= *n) break;
        if (child + 1 < *n && job_before(heap[child + 1], heap[child])) child++;
        if (!job_before(heap[child], last)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return top;
}

static int32_t slot_floor(int64_t j, int32_t weight) { return (int32_t)(j * BLEND_PERIOD / weight); }
static int32_t slot_ceil(int64_t j, int32_t weight) { return (int32_t)((j * BLEND_PERIOD + weight - 1) / weight); }

/* At most one job of a corpus waits at a time; those that may not start yet hang in lists by first slot. */
static void build_period(Blend *blend) {
    int32_t *first_of_slot = xmalloc((BLEND_PERIOD + 1) * sizeof *first_of_slot);
    int32_t *next_in_slot = xmalloc((uint64_t)blend->corpora * sizeof *next_in_slot);
    int32_t *done = xcalloc((uint64_t)blend->corpora, sizeof *done);
    Job *heap = xmalloc((uint64_t)blend->corpora * sizeof *heap);
    int n_heap = 0;
    for (int slot = 0; slot <= BLEND_PERIOD; slot++) first_of_slot[slot] = -1;
    for (int i = blend->corpora - 1; i >= 0; i--) {
        if (blend->weight[i] == 0) continue;
        next_in_slot[i] = first_of_slot[0];
        first_of_slot[0] = i;
    }
    for (int slot = 0; slot < BLEND_PERIOD; slot++) {
        for (int i = first_of_slot[slot]; i >= 0; i = next_in_slot[i]) {
            heap_push(heap, &n_heap, (Job){slot_ceil(done[i] + 1, blend->weight[i]), i});
        }
        REQUIRE(n_heap > 0);
        Job job = heap_pop(heap, &n_heap);
        REQUIRE(slot < job.deadline);
        int i = job.corpus;
        blend->corpus[slot] = (uint16_t)i;
        blend->before[slot] = (uint16_t)done[i]++;
        if (done[i] == blend->weight[i]) continue;
        int32_t from = slot_floor(done[i], blend->weight[i]);
        if (from <= slot) from = slot + 1;
        next_in_slot[i] = first_of_slot[from];
        first_of_slot[from] = i;
    }
    free(first_of_slot);
    free(next_in_slot);
    free(done);
    free(heap);
}

int blend_init(Blend *blend, const double *weights, int corpora, Error *err) {
    *blend = (Blend){.corpora = corpora, .weight = xcalloc((uint64_t)corpora, sizeof *blend->weight)};
    if (corpora > BLEND_PERIOD) {
        blend_free(blend);
        return error_set(err, EXIT_DATA, "%d corpora: a blend has at most %d", corpora, BLEND_PERIOD);
    }
    if (blend_quantise(weights, corpora, blend->weight, err) != 0) {
        blend_free(blend);
        return -1;
    }
    blend->corpus = xcalloc(BLEND_PERIOD, sizeof *blend->corpus);
    blend->before = xcalloc(BLEND_PERIOD, sizeof *blend->before);
    build_period(blend);
    return 0;
}

void blend_free(Blend *blend) {
    free(blend->weight);
    free(blend->corpus);
    free(blend->before);
    *blend = (Blend){0};
}

int blend_corpus(const Blend *blend, int64_t k, int64_t *index) {
    int64_t period = k / BLEND_PERIOD, slot = k % BLEND_PERIOD;
    int corpus = blend->corpus[slot];
    *index = period * blend->weight[corpus] + blend->before[slot];
    return corpus;
}

void blend_counts(const Blend *blend, int64_t n, int64_t *counts) {
    int64_t period = n / BLEND_PERIOD, slots = n % BLEND_PERIOD;
    for (int i = 0; i < blend->corpora; i++) counts[i] = period * blend->weight[i];
    for (int64_t slot = 0; slot < slots; slot++) counts[blend->corpus[slot]]++;
}
