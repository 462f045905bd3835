/* test_optimizer.c - the learning rate as a function of the update, its scaling with the batch, the equation of
 * gradient accumulation, and the updates against their formulas. */
#include <check.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/rng.h"
#include "kernels/kernels.h"
#include "train/optimizer.h"

static Config schedule_config(DecayKind decay, int64_t total, int64_t warmup, int64_t decay_steps) {
    return (Config){.lr = 1e-3,
                    .min_lr = 1e-4,
                    .decay = decay,
                    .warmup_steps = warmup,
                    .decay_steps = decay_steps,
                    .total_steps = total,
                    .global_batch = 8};
}

/* One rounding in each of a handful of operations: 10 units in the last place are plenty. */
static void check_lr(double found, double expected) {
    ck_assert_msg(fabs(found - expected) <= 10 * 1.2e-16 * fabs(expected), "%.17g, expected %.17g", found, expected);
}

/* ---- learning rate ---- */

START_TEST(golden) {
    const double pi = 3.14159265358979323846;
    Config c = schedule_config(DECAY_COSINE, 100, 10, 0);
    check_lr(learning_rate(&c, 0), 1e-4); /* the first update has a rate */
    check_lr(learning_rate(&c, 4), 5e-4);
    check_lr(learning_rate(&c, 9), 1e-3);
    check_lr(learning_rate(&c, 10), 1e-3);
    check_lr(learning_rate(&c, 55), 1e-4 + 9e-4 * 0.5);
    check_lr(learning_rate(&c, 40), 1e-4 + 9e-4 * 0.5 * (1 + cos(pi / 3)));
    check_lr(learning_rate(&c, 99), 1e-4 + 9e-4 * 0.5 * (1 + cos(pi * 89.0 / 90.0)));
    check_lr(learning_rate(&c, 100), 1e-4);
    check_lr(learning_rate(&c, 1000), 1e-4); /* a run that was made longer and shorter again */
    c = schedule_config(DECAY_LINEAR, 100, 20, 0);
    check_lr(learning_rate(&c, 20), 1e-3);
    check_lr(learning_rate(&c, 60), 5.5e-4);
    check_lr(learning_rate(&c, 100), 1e-4);
    c = schedule_config(DECAY_CONSTANT, 100, 0, 0);
    for (int64_t update = 0; update <= 200; update++) check_lr(learning_rate(&c, update), 1e-3);
    c = schedule_config(DECAY_WSD, 100, 10, 20);
    check_lr(learning_rate(&c, 79), 1e-3);
    check_lr(learning_rate(&c, 80), 1e-3);
    check_lr(learning_rate(&c, 90), 5.5e-4);
    check_lr(learning_rate(&c, 100), 1e-4);
    c = schedule_config(DECAY_COSINE, 1, 0, 0);
    check_lr(learning_rate(&c, 0), 1e-3);
    c = schedule_config(DECAY_COSINE, 1, 1, 0);
    check_lr(learning_rate(&c, 0), 1e-3);
}
END_TEST

/* For every kind and every small length, warm-up and decay that the config accepts: never 0 before the end, never
 * above lr, up in the warm-up, down behind it, and min_lr at the end. */
START_TEST(total_function) {
    for (int64_t total = 1; total <= 12; total++) {
        for (int64_t warmup = 0; warmup <= total; warmup++) {
            const bool wsd = _i == DECAY_WSD;
            for (int64_t decay_steps = wsd; decay_steps <= (wsd ? total - warmup : 0); decay_steps++) {
                const Config c = schedule_config((DecayKind)_i, total, warmup, decay_steps);
                double before = 0.0;
                for (int64_t update = 0; update <= total + 3; update++) {
                    const double lr = learning_rate(&c, update);
                    ck_assert(lr > 0.0 && lr <= c.lr);
                    if (update < warmup) ck_assert(lr > before);
                    if (update > warmup) ck_assert(lr <= before);
                    if (update >= warmup) ck_assert(lr >= c.min_lr);
                    before = lr;
                }
                const bool decays = _i != DECAY_CONSTANT && (_i == DECAY_WSD || warmup < total);
                check_lr(learning_rate(&c, total), decays ? c.min_lr : c.lr);
            }
        }
    }
}
END_TEST

/* linear: Goyal et al. 2017; sqrt: its root; the whole curve is scaled, its end too. */
START_TEST(batch_scaling) {
    static const struct {
        LrScaling kind;
        int64_t global_batch, base_batch;
        double factor;
    } cases[] = {{LR_SCALING_NONE, 64, 0, 1},    {LR_SCALING_NONE, 64, 16, 1},     {LR_SCALING_LINEAR, 64, 16, 4},
                 {LR_SCALING_SQRT, 64, 16, 2},   {LR_SCALING_LINEAR, 8, 32, 0.25}, {LR_SCALING_SQRT, 8, 32, 0.5},
                 {LR_SCALING_LINEAR, 16, 16, 1}, {LR_SCALING_SQRT, 16, 16, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Config c = schedule_config(DECAY_COSINE, 50, 5, 0), plain = c;
        c.lr_scaling = cases[i].kind;
        c.global_batch = cases[i].global_batch;
        c.base_batch = cases[i].base_batch;
        for (int64_t update = 0; update <= 50; update++) {
            check_lr(learning_rate(&c, update), cases[i].factor * learning_rate(&plain, update));
        }
    }
}
END_TEST

/* ---- accumulation ---- */

/* One global batch in every split of micro-batch and replicas: the equation holds, and the rate is the same. */
START_TEST(accumulation) {
    const int64_t global_batch = 96;
    double first = 0.0;
    int splits = 0;
    for (int64_t micro_batch = 1; micro_batch <= global_batch; micro_batch++) {
        for (int64_t data = 1; data <= global_batch; data++) {
            char *overrides[] = {xasprintf("train.micro_batch=%" PRId64, micro_batch),
                                 xasprintf("parallel.data=%" PRId64, data),
                                 xasprintf("train.global_batch=%" PRId64, global_batch)};
            char *errors;
            size_t bytes;
            FILE *out = open_memstream(&errors, &bytes);
            Config c;
            const bool divides = global_batch % (micro_batch * data) == 0;
            const int n = config_load_text(&c, "[train]\nsteps = 10\n[optimizer]\nlr_scaling = sqrt\nbase_batch = 32\n",
                                           "t", overrides, 3, out);
            ck_assert_int_eq(n, !divides);
            if (divides) {
                ck_assert_int_eq(config_resolve_world(&c, 0, out), 0);
                ck_assert_int_eq(c.accumulation * micro_batch * data, global_batch);
                if (splits++ == 0) first = learning_rate(&c, 3);
                ck_assert(learning_rate(&c, 3) == first);
                config_free(&c);
            }
            fclose(out);
            free(errors);
            for (int i = 0; i < 3; i++) free(overrides[i]);
        }
    }
    ck_assert_int_eq(splits, 63); /* 2^5 x 3 as a product of three: 21 x 3 ways */
}
END_TEST

/* ---- updates ---- */

enum { UPDATES = 5 };

typedef struct {
    Config config;
    TensorTable table;
    Optimizer optimizer;
    double *params, *grads;
    long double *expected, *m, *v;
} Trial;

static void trial_make(Trial *t, const char *kind) {
    char *overrides[] = {"model.vocab=11",
                         "model.layers=1",
                         "model.hidden=32",
                         "model.heads=2",
                         "model.ffn=24",
                         "model.arch=gpt",
                         "train.precision=fp64",
                         "train.steps=9",
                         "optimizer.weight_decay=0.3",
                         xasprintf("optimizer.kind=%s", kind)};
    ck_assert_int_eq(config_load_text(&t->config, "", "t", overrides, 10, stderr), 0);
    free(overrides[9]);
    ck_assert_int_eq(config_resolve_world(&t->config, 0, stderr), 0);
    Grid grid = {.size = {1, 1, 1}};
    const Range layers = {0, 1};
    t->table = tensor_table_make(&t->config, &grid, &layers, 1, true, true);
    const uint64_t n = (uint64_t)t->table.n_elements;
    optimizer_init(&t->optimizer, &t->config);
    t->params = xcalloc(n, sizeof *t->params);
    t->grads = xcalloc(n, sizeof *t->grads);
    for (int i = 0; i < t->optimizer.states; i++) t->optimizer.state[i] = xcalloc(n, sizeof(double));
    t->expected = xcalloc(n, sizeof *t->expected);
    t->m = xcalloc(n, sizeof *t->m);
    t->v = xcalloc(n, sizeof *t->v);
    for (int i = 0; i < t->table.n; i++) tensor_init(&t->table.list[i], 5, DT_F64, t->params);
    for (uint64_t k = 0; k < n; k++) t->expected[k] = t->params[k];
}

static void trial_free(Trial *t) {
    for (int i = 0; i < t->optimizer.states; i++) free(t->optimizer.state[i]);
    free(t->params);
    free(t->grads);
    free(t->expected);
    free(t->m);
    free(t->v);
    tensor_table_free(&t->table);
    config_free(&t->config);
}

static void draw_gradients(Trial *t, int update) {
    for (int i = 0; i < t->table.n; i++) {
        const Tensor *x = &t->table.list[i];
        for (int64_t k = x->offset; k < x->offset + x->count; k++) {
            t->grads[k] = rng_normal(9, (uint64_t)update, (uint64_t)k);
        }
    }
}

/* Algorithm 2 of Loshchilov and Hutter 2019; SGD with momentum and decoupled decay. */
static void expect_update(Trial *t, const Tensor *x, int update, long double lr, long double grad_scale) {
    const Config *c = &t->config;
    const long double decay = x->decay ? c->weight_decay : 0.0, b1 = c->beta1, b2 = c->beta2;
    for (int64_t k = x->offset; k < x->offset + x->count; k++) {
        const long double g = t->grads[k] * grad_scale;
        if (c->optimizer == OPTIMIZER_SGD) {
            t->m[k] = b1 * t->m[k] + g;
            t->expected[k] -= lr * (t->m[k] + decay * t->expected[k]);
            continue;
        }
        t->m[k] = b1 * t->m[k] + (1 - b1) * g;
        t->v[k] = b2 * t->v[k] + (1 - b2) * g * g;
        const long double m = t->m[k] / (1 - powl(b1, update + 1)), v = t->v[k] / (1 - powl(b2, update + 1));
        t->expected[k] -= lr * (m / (sqrtl(v) + c->eps) + decay * t->expected[k]);
    }
}

START_TEST(updates) {
    Trial t;
    kernels_init(1);
    trial_make(&t, _i ? "sgd" : "adamw");
    ck_assert_int_eq(t.optimizer.states, _i ? 1 : 2);
    for (int update = 0; update < UPDATES; update++) {
        const double lr = 1e-2 / (1 + update), grad_scale = 0.37;
        draw_gradients(&t, update);
        for (int i = 0; i < t.table.n; i++) expect_update(&t, &t.table.list[i], update, lr, grad_scale);
        optimizer_step(&t.optimizer, &t.table, t.params, t.grads, update, lr, grad_scale, NULL);
    }
    int decayed = 0, kept = 0;
    for (int i = 0; i < t.table.n; i++) {
        const Tensor *x = &t.table.list[i];
        *(x->decay ? &decayed : &kept) += 1;
        for (int64_t k = x->offset; k < x->offset + x->count; k++) {
            /* Up to 20 roundings an update, each relative to the largest term: parameter or step. */
            const double error = fabs((double)(t.params[k] - t.expected[k]));
            const double bound = UPDATES * 20 * 1.2e-16 * (1.1 + fabs(t.params[k]));
            ck_assert_msg(error <= bound, "%s[%d]: %.17g, expected %.17g", x->name, (int)(k - x->offset), t.params[k],
                          (double)t.expected[k]);
        }
    }
    ck_assert(decayed > 3 && kept > 3);
    trial_free(&t);
}
END_TEST

/* Alignment gaps stay zero: they are part of what is saved and summed. */
START_TEST(gaps_stay_zero) {
    Trial t;
    kernels_init(1);
    trial_make(&t, "adamw");
    draw_gradients(&t, 0);
    optimizer_step(&t.optimizer, &t.table, t.params, t.grads, 0, 0.1, 1.0, NULL);
    bool *used = xcalloc((uint64_t)t.table.n_elements, sizeof *used);
    for (int i = 0; i < t.table.n; i++) {
        memset(used + t.table.list[i].offset, 1, (size_t)t.table.list[i].count);
    }
    int gaps = 0;
    for (int64_t k = 0; k < t.table.n_elements; k++) {
        gaps += !used[k];
        ck_assert(used[k] || t.params[k] == 0.0);
    }
    ck_assert_int_gt(gaps, 0);
    free(used);
    trial_free(&t);
}
END_TEST

/* What is counted, summed in long double; what is not counted does not matter. */
START_TEST(squared_norms) {
    Trial t;
    kernels_init(1);
    trial_make(&t, "adamw");
    draw_gradients(&t, 1);
    t.table.list[1].counted = false;
    long double sum = 0.0;
    for (int i = 0; i < t.table.n; i++) {
        const Tensor *x = &t.table.list[i];
        for (int64_t k = x->offset; x->counted && k < x->offset + x->count; k++) {
            sum += (long double)t.grads[k] * t.grads[k];
        }
    }
    const double found = gradient_squared_norm(&t.table, t.grads, DT_F64, NULL);
    /* A sum of n positive terms: at most n roundings. */
    const double bound = (double)t.table.n_elements * 1.2e-16 * (double)sum;
    ck_assert_msg(fabs((double)(found - sum)) <= bound, "%.17g, expected %.17g", found, (double)sum);
    trial_free(&t);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("optimizer");
    TCase *tcase = tcase_create("optimizer");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, golden);
    tcase_add_loop_test(tcase, total_function, DECAY_CONSTANT, DECAY_WSD + 1);
    tcase_add_test(tcase, batch_scaling);
    tcase_add_test(tcase, accumulation);
    tcase_add_loop_test(tcase, updates, 0, 2);
    tcase_add_test(tcase, gaps_stay_zero);
    tcase_add_test(tcase, squared_norms);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
