/* test_samples.c - the order of samples, blends, document masks, and the thread that reads ahead. */
#include "tests/unit/data/scratch.h"

#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <sys/syscall.h>

#include "base/log.h"
#include "base/types.h"
#include "data/blend.h"
#include "data/permutation.h"
#include "data/source.h"
#include "data/token_writer.h"

/* ---- permutation ---- */

START_TEST(permutation_is_a_bijection) {
    seed_begin();
    for (int64_t n = 1; n <= 300; n++) {
        char seen[300] = {0};
        uint64_t key = rng_bits(test_seed, 1, (uint64_t)n);
        for (int64_t i = 0; i < n; i++) {
            int64_t to = permute(key, n, i);
            ck_assert_msg(to >= 0 && to < n && !seen[to], "n %lld, index %lld " SEED_FORMAT, (long long)n, (long long)i,
                          SEED_VALUE);
            seen[to] = 1;
        }
    }
    /* Large domains: distinct images of a stretch, in range. */
    static const int64_t sizes[] = {65537, (INT64_C(1) << 32) + 1, INT64_C(1) << 40, INT64_MAX};
    for (int s = 0; s < 4; s++) {
        for (int64_t i = 0; i < 100; i++) {
            int64_t to = permute(test_seed, sizes[s], sizes[s] - 1 - i);
            ck_assert(to >= 0 && to < sizes[s]);
        }
    }
}
END_TEST

/* The order is part of what a checkpoint promises: these values may not change. */
START_TEST(permutation_is_fixed) {
    static const int64_t expected[] = {813, 501, 526, 446, 542, 978, 907, 616, 85, 941};
    for (int64_t i = 0; i < 10; i++) {
        ck_assert_msg(permute(1234, 1000, i) == expected[i], "index %lld goes to %lld", (long long)i,
                      (long long)permute(1234, 1000, i));
    }
}
END_TEST

/* Over many keys, each index goes to each place equally often, and so do neighbours' distances. */
START_TEST(permutation_looks_random) {
    enum { N = 37, KEYS = 20000 };
    static int64_t place[N][N], distance[N];
    memset(place, 0, sizeof place);
    memset(distance, 0, sizeof distance);
    for (uint64_t key = 0; key < KEYS; key++) {
        int64_t before = 0;
        for (int64_t i = 0; i < N; i++) {
            int64_t to = permute(key, N, i);
            place[i][to]++;
            if (i > 0) distance[(to - before + N) % N]++;
            before = to;
        }
    }
    /* Binomial counts: six standard deviations hold all 1,369 cells but once in 10^5 sets of keys; the keys
     * are fixed. */
    double expected = (double)KEYS / N, deviation = sqrt(expected * (1 - 1.0 / N));
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < N; j++) ck_assert(fabs((double)place[i][j] - expected) <= 6 * deviation);
    }
    double pairs = (double)KEYS * (N - 1) / (N - 1); /* distances 1 to N - 1 */
    ck_assert_int_eq(distance[0], 0);
    for (int d = 1; d < N; d++) ck_assert(fabs((double)distance[d] - pairs) <= 6 * sqrt(pairs));
}
END_TEST

/* ---- blends ---- */

static void check_blend(const double *weights, int n) {
    Blend blend;
    Error err;
    ck_assert_msg(blend_init(&blend, weights, n, &err) == 0, "%s", err.message);
    double sum = 0;
    int64_t quantised = 0;
    for (int i = 0; i < n; i++) sum += weights[i];
    int small = 0;
    for (int i = 0; i < n; i++) small += weights[i] > 0 && weights[i] / sum * BLEND_PERIOD < 1;
    for (int i = 0; i < n; i++) {
        quantised += blend.weight[i];
        ck_assert((weights[i] > 0) == (blend.weight[i] > 0));
        double share = weights[i] / sum * BLEND_PERIOD;
        /* Largest remainder is less than 1 away from the share, plus what the raised ones take. */
        if (small == 0) ck_assert(fabs(share - blend.weight[i]) < 1 + 1e-6);
        else ck_assert(blend.weight[i] <= share + 1 && (share >= 1 ? blend.weight[i] > share - 1 - small : true));
    }
    ck_assert_int_eq(quantised, BLEND_PERIOD);
    int64_t *counts = xcalloc((uint64_t)n, sizeof *counts), index;
    int64_t gaps = 0, deviating = 0; /* one assertion each: every ck_assert is a write to a pipe */
    for (int64_t k = 0; k < BLEND_PERIOD + 1000; k++) {
        int i = blend_corpus(&blend, k, &index);
        gaps += index != counts[i];
        counts[i]++;
        if (n > 50 && k % 257) continue;
        for (int j = 0; j < n; j++) { /* |counts - (k + 1) w / P| < 1, in whole numbers */
            int64_t deviation = counts[j] * BLEND_PERIOD - (k + 1) * blend.weight[j];
            deviating += llabs(deviation) >= BLEND_PERIOD;
        }
    }
    ck_assert_msg(gaps == 0, "%lld gaps or repeats " SEED_FORMAT, (long long)gaps, SEED_VALUE);
    ck_assert_msg(deviating == 0, "%lld deviations of 1 or more " SEED_FORMAT, (long long)deviating, SEED_VALUE);
    int64_t *answer = xcalloc((uint64_t)n, sizeof *answer);
    blend_counts(&blend, BLEND_PERIOD + 1000, answer);
    ck_assert_mem_eq(answer, counts, (size_t)n * sizeof *counts);
    /* Far away: the same place of the period, the earlier periods counted. */
    int64_t far = INT64_C(1) << 45;
    int i = blend_corpus(&blend, far + 77, &index), near = blend_corpus(&blend, 77, &answer[0]);
    ck_assert_int_eq(i, near);
    ck_assert_int_eq(index, answer[0] + (far >> 16) * blend.weight[i]);
    free(counts);
    free(answer);
    blend_free(&blend);
}

START_TEST(blends_deviate_less_than_one) {
    seed_begin();
    check_blend((double[]){1}, 1);
    check_blend((double[]){0.3, 0.7}, 2);
    check_blend((double[]){0.001, 0.999}, 2);
    check_blend((double[]){1e-300, 1e300}, 2);
    check_blend((double[]){1, 0, 1, 1}, 4);
    check_blend((double[]){1, 1, 1, 1, 1, 1, 1}, 7);
    check_blend((double[]){1e-9, 1, 1e-9, 2e-5, 1.5e-5}, 5);
    for (int round = 0; round < 12; round++) {
        double weights[40];
        int n = 2 + (int)draw(39);
        for (int i = 0; i < n; i++) weights[i] = exp(-14 * rng_uniform(test_seed, 2, (uint64_t)(round * 40 + i)));
        check_blend(weights, n);
    }
    double *many = xmalloc(3000 * sizeof *many);
    for (int i = 0; i < 3000; i++) many[i] = 1 + (double)draw(1000);
    check_blend(many, 3000);
    free(many);
}
END_TEST

START_TEST(as_many_corpora_as_the_period_has_places) {
    double *weights = xmalloc((BLEND_PERIOD + 1) * sizeof *weights);
    for (int i = 0; i <= BLEND_PERIOD; i++) weights[i] = 1 + i;
    Blend blend;
    Error err;
    ck_assert_int_eq(blend_init(&blend, weights, BLEND_PERIOD, &err), 0);
    for (int i = 0; i < BLEND_PERIOD; i++) ck_assert_int_eq(blend.weight[i], 1);
    blend_free(&blend);
    ck_assert_int_eq(blend_init(&blend, weights, BLEND_PERIOD + 1, &err), -1);
    ck_assert_contains(err.message, "at most 65536");
    free(weights);
}
END_TEST

static void expect_spec(const char *spec, int n, const char *const *paths, const double *weights) {
    BlendEntry *entries;
    Error err;
    int found = blend_parse(spec, &entries, &err);
    ck_assert_msg(found == n, "%s: %d, %s", spec, found, found < 0 ? err.message : "");
    for (int i = 0; i < n; i++) {
        ck_assert_str_eq(entries[i].path, paths[i]);
        ck_assert_double_eq(entries[i].weight, weights[i]);
    }
    blend_entries_free(entries, n);
}

static void expect_spec_refused(const char *spec, const char *part) {
    BlendEntry *entries;
    Error err;
    ck_assert_msg(blend_parse(spec, &entries, &err) == -1, "%s was accepted", spec);
    ck_assert_contains(err.message, part);
}

START_TEST(specs) {
    expect_spec("a/b", 1, (const char *const[]){"a/b"}, (double[]){-1});
    expect_spec(" a b :0.5,c:2 ", 2, (const char *const[]){"a b", "c"}, (double[]){0.5, 2});
    expect_spec("\"a:b,c\": 1e-3 , d:0", 2, (const char *const[]){"a:b,c", "d"}, (double[]){1e-3, 0});
    expect_spec("x, y,z", 3, (const char *const[]){"x", "y", "z"}, (double[]){-1, -1, -1});
    expect_spec_refused("", "a path is missing at character 1");
    expect_spec_refused("a,", "a path is missing at character 3");
    expect_spec_refused("a:,b:1", "a weight is expected at character 3");
    expect_spec_refused("a:b:1", "a weight is expected at character 3");
    expect_spec_refused("a:1x", "a weight is expected");
    expect_spec_refused("a:-1", "is -1; weights are finite and not negative");
    expect_spec_refused("a:inf", "weights are finite");
    expect_spec_refused("a:nan", "weights are finite");
    expect_spec_refused("\"a", "never closed");
    expect_spec_refused("\"a\"b", "a comma or a colon");
    expect_spec_refused("a:1,b", "a has a weight and b has none");
    expect_spec_refused("a,b:1", "b has a weight and a has none");
    expect_spec_refused("a:1,b:1,a:2", "a is given twice");
}
END_TEST

/* ---- sources ---- */

/* n tokens base, base + 1, ... in documents of document_tokens. */
static void write_corpus(const char *name, int32_t base, int64_t n, int64_t document_tokens) {
    Error err;
    TokenWriter *writer = token_writer_open(scratch(name), 100000, &err);
    ck_assert_ptr_nonnull(writer);
    int32_t *tokens = xmalloc((uint64_t)n * sizeof *tokens);
    for (int64_t i = 0; i < n; i++) tokens[i] = base + (int32_t)i;
    ck_assert_int_eq(token_writer_tokens(writer, tokens, n, &err), 0);
    free(tokens);
    for (int64_t i = 0; i < n; i++) {
        bool ends = (i + 1) % document_tokens == 0 || i + 1 == n;
        ck_assert_int_eq(token_writer_document(writer, 1, ends, &err), 0);
    }
    ck_assert_msg(token_writer_commit(writer, &err) == 0, "%s", err.message);
    token_writer_close(writer);
}

enum { SEQ = 10 };

static DataSource *open_source(const char *spec, bool mask, bool shuffle) {
    DataOptions options = {
        .spec = spec, .seq_len = SEQ, .vocab = 100000, .seed = 7, .mask_documents = mask, .shuffle = shuffle};
    Error err;
    DataSource *source = data_open(&options, &err);
    ck_assert_msg(source != NULL, "%s", err.message);
    return source;
}

typedef struct {
    int32_t tokens[SEQ], targets[SEQ], positions[SEQ], doc_start[SEQ];
} Sample;

static Sample sample(const DataSource *source, int64_t k) {
    Sample s;
    Error err;
    ck_assert_msg(data_sample(source, k, s.tokens, s.targets, s.positions, s.doc_start, &err) == 0, "%s", err.message);
    return s;
}

START_TEST(an_epoch_sees_each_target_once) {
    write_corpus("c", 1000, 375, 40); /* 37 windows, 4 tokens left over */
    DataSource *source = open_source(scratch("c"), false, true);
    ck_assert_int_eq(data_corpus_windows(source, 0), 37);
    ck_assert_int_eq(data_corpus_tokens(source, 0), 375);
    int32_t previous[37] = {0};
    int different = 0;
    for (int64_t epoch = 0; epoch < 5; epoch++) {
        char seen[375] = {0};
        for (int64_t i = 0; i < 37; i++) {
            Sample s = sample(source, epoch * 37 + i);
            for (int t = 0; t < SEQ; t++) {
                ck_assert_int_eq(s.targets[t], s.tokens[t] + 1);
                ck_assert_int_eq(s.positions[t], t);
                ck_assert_int_eq(s.doc_start[t], 0);
                ck_assert(!seen[s.targets[t] - 1000]);
                seen[s.targets[t] - 1000] = 1;
            }
            different += s.tokens[0] != previous[i];
            previous[i] = s.tokens[0];
        }
        ck_assert(!seen[0]);
        for (int t = 1; t <= 370; t++) ck_assert(seen[t]);
    }
    ck_assert_int_ge(different, 150); /* each epoch has its own order */
    data_close(source);
    source = open_source(scratch("c"), false, false);
    for (int64_t k = 0; k < 80; k++) ck_assert_int_eq(sample(source, k).tokens[0], 1000 + k % 37 * 10);
    data_close(source);
}
END_TEST

START_TEST(masked_documents) {
    write_corpus("c", 0, 371, 7);
    DataSource *source = open_source(scratch("c"), true, true);
    for (int64_t k = 0; k < 37; k++) {
        Sample s = sample(source, k);
        for (int t = 0; t < SEQ; t++) {
            int at = s.tokens[t], document_start = at / 7 * 7, window_start = s.tokens[0];
            int start = document_start > window_start ? document_start - window_start : 0;
            ck_assert_int_eq(s.doc_start[t], start);
            ck_assert_int_eq(s.positions[t], t - start);
            ck_assert_int_eq(s.targets[t], (at + 1) % 7 == 0 ? -1 : at + 1);
        }
    }
    data_close(source);
    /* llm.c: documents begin with the end-of-text token. */
    source = open_source(FIXTURES "llmc_gpt2_val_000000.bin", true, false);
    for (int64_t k = 0; k < data_corpus_windows(source, 0); k++) {
        Sample s = sample(source, k);
        int start = 0;
        for (int t = 0; t < SEQ; t++) {
            if (s.tokens[t] == 50256) start = t;
            ck_assert_int_eq(s.doc_start[t], start);
            if (t + 1 < SEQ) ck_assert_int_eq(s.targets[t], s.tokens[t + 1] == 50256 ? -1 : s.tokens[t + 1]);
        }
    }
    data_close(source);
}
END_TEST

START_TEST(too_short_a_corpus_is_refused) {
    DataOptions options = {.seq_len = SEQ, .vocab = 100000, .shuffle = true};
    for (int tokens = 1; tokens <= SEQ + 2; tokens++) {
        write_corpus("c", 0, tokens, 100);
        options.spec = scratch("c");
        Error err;
        DataSource *source = data_open(&options, &err);
        if (tokens <= SEQ) {
            char part[128];
            snprintf(part, sizeof part, "has %d tokens; with model.seq_len = 10 it needs at least 11", tokens);
            ck_assert_ptr_null(source);
            ck_assert_int_eq(err.status, EXIT_DATA);
            ck_assert_contains(err.message, part);
        } else {
            ck_assert_int_eq(data_corpus_windows(source, 0), 1);
            data_close(source);
        }
    }
}
END_TEST

START_TEST(the_width_in_the_file_changes_no_token) {
    static const int vocabs[] = {65500, 65535, 65536, 65537};
    for (int v = 0; v < 4; v++) {
        uint16_t narrow[64];
        int32_t wide[64];
        for (int i = 0; i < 64; i++) wide[i] = narrow[i] = (uint16_t)(i == 63 ? 65499 : 1000 * i);
        for (int w = 0; w < 2; w++) {
            Error err;
            TokenWriter *writer = token_writer_open(scratch(w ? "wide" : "narrow"), w ? 65537 : 65536, &err);
            ck_assert_int_eq(token_writer_width(writer), w ? 4 : 2);
            ck_assert_int_eq(token_writer_tokens(writer, w ? (void *)wide : (void *)narrow, 64, &err), 0);
            ck_assert_int_eq(token_writer_document(writer, 64, true, &err), 0);
            ck_assert_int_eq(token_writer_commit(writer, &err), 0);
            token_writer_close(writer);
        }
        DataOptions options = {.spec = scratch("narrow"), .seq_len = SEQ, .vocab = vocabs[v], .shuffle = true};
        Error err;
        DataSource *a = data_open(&options, &err);
        options.spec = scratch("wide");
        DataSource *b = data_open(&options, &err);
        for (int64_t k = 0; k < 12; k++) {
            Sample x = sample(a, k), y = sample(b, k);
            ck_assert_mem_eq(&x, &y, sizeof x);
        }
        data_close(a);
        data_close(b);
    }
}
END_TEST

static const char *two_corpora(double first, double second) {
    static char spec[1200];
    snprintf(spec, sizeof spec, "%s:%g, %s:%g", scratch("a"), first, scratch("b"), second);
    return spec;
}

START_TEST(resumed_runs_draw_what_uninterrupted_ones_do) {
    write_corpus("a", 0, 371, 40);
    write_corpus("b", 1000, 131, 40);
    DataSource *whole = open_source(two_corpora(0.3, 0.7), true, true);
    for (int64_t at = 0; at <= 100; at++) {
        DataSource *resumed = open_source(two_corpora(0.3, 0.7), true, true);
        int64_t counters[2], again[2];
        data_counters(whole, at, counters);
        ck_assert_int_eq(counters[0] + counters[1], at);
        data_set_base(resumed, at, counters);
        data_counters(resumed, at, again);
        ck_assert_mem_eq(counters, again, sizeof counters);
        for (int64_t k = at; k < at + 60; k++) {
            Sample x = sample(whole, k), y = sample(resumed, k);
            ck_assert_mem_eq(&x, &y, sizeof x);
        }
        data_counters(whole, at + 1000000, counters);
        data_counters(resumed, at + 1000000, again);
        ck_assert_mem_eq(counters, again, sizeof counters);
        data_close(resumed);
    }
    data_close(whole);
}
END_TEST

START_TEST(a_mix_can_change_without_repeats) {
    write_corpus("a", 0, 3001, 40); /* 300 windows */
    write_corpus("b", 10000, 3001, 40);
    char seen[2][301] = {{0}};
    static const double mixes[][2] = {{1, 1}, {9, 1}, {0, 1}, {0.2, 0.8}};
    int64_t counters[2] = {0}, k = 0;
    for (int m = 0; m < 4; m++) {
        DataSource *source = open_source(two_corpora(mixes[m][0], mixes[m][1]), false, true);
        data_set_base(source, k, counters);
        int64_t before[2] = {counters[0], counters[1]}, end = k + 97;
        for (; k < end; k++) {
            int32_t first = sample(source, k).tokens[0];
            int corpus = first >= 10000;
            ck_assert(!seen[corpus][(first - 10000 * corpus) / 10]);
            seen[corpus][(first - 10000 * corpus) / 10] = 1;
        }
        data_counters(source, k, counters);
        double share = 97 * mixes[m][0] / (mixes[m][0] + mixes[m][1]);
        ck_assert(fabs((double)(counters[0] - before[0]) - share) <= 2);
        ck_assert_int_eq(counters[0] + counters[1], k);
        data_close(source);
    }
}
END_TEST

START_TEST(without_weights_sizes_count) {
    write_corpus("a", 0, 3001, 40);
    write_corpus("b", 10000, 1001, 40);
    char spec[1200];
    snprintf(spec, sizeof spec, "%s, %s", scratch("a"), scratch("b"));
    DataSource *source = open_source(spec, false, true);
    int64_t counters[2];
    data_counters(source, 400, counters);
    ck_assert_int_eq(counters[0], 300);
    ck_assert_int_eq(counters[1], 100);
    data_print(source, 800);
    data_close(source);
}
END_TEST

START_TEST(the_fingerprint_sees_other_data) {
    write_corpus("a", 0, 371, 40);
    write_corpus("b", 0, 371, 40);
    DataSource *source = open_source(scratch("a"), false, true);
    uint64_t first = data_fingerprint(source);
    data_close(source);
    source = open_source(scratch("b"), false, true);
    ck_assert(data_fingerprint(source) != first); /* another name */
    data_close(source);
    write_corpus("a", 0, 371, 41);
    source = open_source(scratch("a"), false, true);
    ck_assert(data_fingerprint(source) != first); /* other documents */
    data_close(source);
    write_corpus("a", 5, 371, 40);
    source = open_source(scratch("a"), false, true);
    ck_assert(data_fingerprint(source) == first); /* tokens are not read */
    data_close(source);
}
END_TEST

/* ---- the loader ---- */

/* Reads can be made slow, for the warnings about that: this definition takes the place of libc's. */
static _Atomic int read_delay_us;
ssize_t pread(int fd, void *to, size_t bytes, off_t offset) {
    int delay_us = atomic_load(&read_delay_us);
    if (delay_us) sleep_s(1e-6 * delay_us);
    return syscall(SYS_pread64, fd, to, bytes, offset);
}

START_TEST(micro_batches_in_order_for_all_ranks) {
    write_corpus("c", 0, 3001, 40);
    DataSource *source = open_source(scratch("c"), true, true);
    static const int layouts[][3] = {
        {1, 12, 1}, {2, 12, 1}, {2, 12, 3}, {3, 12, 4}, {1, 12, 4}}; /* micro, global, data */
    for (int l = 0; l < 5; l++) {
        int micro = layouts[l][0], global = layouts[l][1], data = layouts[l][2];
        for (int rank = 0; rank < data; rank++) {
            int64_t first_sample = (rank + 2) * global + 3 * rank;
            Loader *loader = loader_start(source, micro, global, data, rank, first_sample);
            int in_step = global / (micro * data);
            for (int j = 0; j < 40; j++) {
                double wait_s;
                Error err;
                const Batch *batch = loader_next(loader, &wait_s, &err);
                ck_assert_ptr_nonnull(batch);
                ck_assert_int_eq(batch->sequences, micro);
                ck_assert(wait_s >= 0);
                for (int i = 0; i < micro; i++) {
                    int64_t k = first_sample + j / in_step * global + (j % in_step * data + rank) * micro + i;
                    Sample s = sample(source, k);
                    ck_assert_mem_eq(batch->tokens + i * SEQ, s.tokens, sizeof s.tokens);
                    ck_assert_mem_eq(batch->targets + i * SEQ, s.targets, sizeof s.targets);
                    ck_assert_mem_eq(batch->positions + i * SEQ, s.positions, sizeof s.positions);
                    ck_assert_mem_eq(batch->doc_start + i * SEQ, s.doc_start, sizeof s.doc_start);
                }
            }
            loader_stop(loader);
        }
    }
    data_close(source);
}
END_TEST

START_TEST(a_loader_can_be_stopped_at_any_time) {
    write_corpus("c", 0, 3001, 40);
    DataSource *source = open_source(scratch("c"), false, true);
    for (int round = 0; round < 200; round++) {
        Loader *loader = loader_start(source, 2, 2, 1, 0, 0);
        Error err;
        for (int j = 0; j < round % 7; j++) ck_assert_ptr_nonnull(loader_next(loader, NULL, &err));
        loader_stop(loader);
    }
    loader_stop(NULL);
    data_close(source);
}
END_TEST

START_TEST(a_data_error_comes_behind_the_good_batches) {
    write_corpus("c", 0, 101, 200);
    DataSource *source = open_source(scratch("c"), false, false);
    ck_assert_int_eq(truncate(scratch("c.bin"), 4 * 55), 0); /* windows 0 to 4 are whole, 5 is not */
    Loader *loader = loader_start(source, 1, 1, 1, 0, 0);
    Error err;
    for (int j = 0; j < 5; j++) ck_assert_ptr_nonnull(loader_next(loader, NULL, &err));
    for (int again = 0; again < 2; again++) {
        ck_assert_ptr_null(loader_next(loader, NULL, &err));
        ck_assert_int_eq(err.status, EXIT_DATA);
        ck_assert_contains(err.message, "c.bin: ends at byte 220");
    }
    loader_stop(loader);
    data_close(source);
}
END_TEST

START_TEST(a_slow_file_system_is_named) {
    write_corpus("c", 0, 3001, 40);
    DataSource *source = open_source(scratch("c"), false, true);
    int saved = dup(STDERR_FILENO), log = open(scratch("log"), O_CREAT | O_RDWR, 0666);
    dup2(log, STDERR_FILENO);
    Loader *loader = loader_start(source, 1, 1, 1, 0, 0);
    Error err;
    double start = clock_s();
    atomic_store(&read_delay_us, 50000); /* 0.1 s a sample */
    while (clock_s() - start < 4.5) ck_assert_ptr_nonnull(loader_next(loader, NULL, &err));
    atomic_store(&read_delay_us, 0);
    loader_stop(loader);
    dup2(saved, STDERR_FILENO);
    size_t n;
    char *text = slurp(scratch("log"), &n);
    ck_assert_contains(text, "training waits for the data loader");
    ck_assert_contains(text, scratch("c"));
    free(text);
    data_close(source);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("samples");
    TCase *tests = tcase_create("samples");
    tcase_add_checked_fixture(tests, scratch_make, scratch_remove);
    tcase_set_timeout(tests, 60);
    tcase_add_test(tests, permutation_is_a_bijection);
    tcase_add_test(tests, permutation_is_fixed);
    tcase_add_test(tests, permutation_looks_random);
    tcase_add_test(tests, blends_deviate_less_than_one);
    tcase_add_test(tests, as_many_corpora_as_the_period_has_places);
    tcase_add_test(tests, specs);
    tcase_add_test(tests, an_epoch_sees_each_target_once);
    tcase_add_test(tests, masked_documents);
    tcase_add_test(tests, too_short_a_corpus_is_refused);
    tcase_add_test(tests, the_width_in_the_file_changes_no_token);
    tcase_add_test(tests, resumed_runs_draw_what_uninterrupted_ones_do);
    tcase_add_test(tests, a_mix_can_change_without_repeats);
    tcase_add_test(tests, without_weights_sizes_count);
    tcase_add_test(tests, the_fingerprint_sees_other_data);
    tcase_add_test(tests, micro_batches_in_order_for_all_ranks);
    tcase_add_test(tests, a_loader_can_be_stopped_at_any_time);
    tcase_add_test(tests, a_data_error_comes_behind_the_good_batches);
    tcase_add_test(tests, a_slow_file_system_is_named);
    suite_add_tcase(suite, tests);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
