/* test_tensors.c - the tensor table: over all ranks of a layout every element is there, counted once, initialised to
 * the same value whatever the layout; and the models in configs/models have the published numbers of parameters. */
#include <check.h>
#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/rng.h"
#include "train/tensors.h"

enum { LAYERS = 5, TENSORS_MAX = 128 };

typedef struct {
    const char *model; /* --set words, separated by blanks */
    int tensor, pipeline;
} Layout;

static const Layout layouts[] = {
    {"arch=gpt heads=4 hidden=64 vocab=101 tie_embeddings=yes", 1, 1},
    {"arch=gpt heads=4 hidden=64 vocab=101 tie_embeddings=yes", 4, 3},
    {"arch=gpt heads=8 kv_heads=2 hidden=128 vocab=99 tie_embeddings=yes", 8, 2},
    {"arch=gpt heads=6 kv_heads=3 hidden=96 ffn=60 vocab=100 tie_embeddings=no", 3, 5},
    {"arch=llama heads=4 hidden=64 vocab=7 tie_embeddings=no", 4, 2},
    {"arch=llama heads=8 kv_heads=1 hidden=128 vocab=64 tie_embeddings=yes", 4, 1},
    {"arch=llama heads=8 kv_heads=4 hidden=128 vocab=5 tie_embeddings=yes", 4, 4},
    {"arch=llama heads=6 kv_heads=1 hidden=96 ffn=48 vocab=13 tie_embeddings=no", 6, 5},
};
enum { N_LAYOUTS = sizeof layouts / sizeof layouts[0] };

static void load_config(Config *config, const char *model, int tensor, int pipeline, bool sequence_parallel) {
    char *words = xstrdup(model), *rest = NULL, *overrides[32];
    int n = 0;
    for (char *word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        overrides[n++] = xasprintf("model.%s", word);
    }
    overrides[n++] = xasprintf("model.layers=%d", LAYERS);
    overrides[n++] = xasprintf("model.seq_len=%d", 24);
    overrides[n++] = xasprintf("parallel.tensor=%d", tensor);
    overrides[n++] = xasprintf("parallel.pipeline=%d", pipeline);
    overrides[n++] = xasprintf("parallel.sequence_parallel=%s", sequence_parallel ? "auto" : "no");
    overrides[n++] = xasprintf("train.steps=1");
    ck_assert_int_eq(config_load_text(config, "", "t", overrides, n, stderr), 0);
    ck_assert_int_eq(config_resolve_world(config, 0, stderr), 0);
    ck_assert_int_eq(config_resolve_model(config, 0, stderr), 0);
    for (int i = 0; i < n; i++) free(overrides[i]);
    free(words);
}

static TensorTable make_table(const Config *config, int stage, int rank) {
    static LayerMap map;
    Grid grid = {.size = {config->tensor, config->pipeline, 1}};
    grid.index[DIM_TENSOR] = rank;
    grid.index[DIM_PIPELINE] = stage;
    layer_map_make(&map, config->layers, config->pipeline, 1, 0.5, 0.5);
    const Range layers = layers_of_piece(&map, 0, stage);
    return tensor_table_make(config, &grid, &layers, 1, stage == 0, stage == config->pipeline - 1);
}

/* ---- every element once ---- */

/* What is counted of a tensor over all ranks: a mark for each logical index along its split axis. */
typedef struct {
    char name[64];
    int64_t along, across, marks[1024];
} Covered;

typedef struct {
    Covered list[TENSORS_MAX];
    int n;
} Coverage;

static Covered *find_covered(Coverage *all, const Tensor *t) {
    const int axis = t->split == SPLIT_NONE ? 0 : t->split;
    for (int i = 0; i < all->n; i++) {
        if (strcmp(all->list[i].name, t->name) == 0) return &all->list[i];
    }
    ck_assert_int_lt(all->n, TENSORS_MAX);
    ck_assert_int_le(t->shape[axis], 1024);
    Covered *c = &all->list[all->n++];
    *c = (Covered){.along = t->shape[axis], .across = t->shape[1 - axis]};
    strcpy(c->name, t->name);
    return c;
}

static void cover(Coverage *all, const TensorTable *table) {
    for (int i = 0; i < table->n; i++) {
        const Tensor *t = &table->list[i];
        Covered *c = find_covered(all, t);
        if (!t->counted) continue;
        for (int64_t k = 0; k < t->part.count; k++) c->marks[t->part.first + k]++;
    }
}

static void check_kind(const Config *c, const Tensor *t) {
    const bool is_norm = strstr(t->name, "norm") != NULL, is_bias = strstr(t->name, ".bias") != NULL;
    ck_assert_int_eq(t->decay, !is_norm && !is_bias);
    ck_assert_int_eq(t->dims, is_norm || is_bias ? 1 : 2);
    ck_assert_int_eq(t->sum_over_tensor, c->sequence_parallel_on && t->split == SPLIT_NONE);
    ck_assert_int_eq(t->init, is_bias ? INIT_ZERO : is_norm ? INIT_ONE : INIT_NORMAL);
    const bool residual = strstr(t->name, "attn.out.weight") || strstr(t->name, "mlp.down.weight");
    const double std = residual ? c->init_std / sqrt(2.0 * LAYERS) : c->init_std;
    ck_assert(t->init != INIT_NORMAL || fabs(t->init_std - std) <= 1e-15 * std);
    ck_assert_int_eq(t->tied_copy && t->counted, 0);
    ck_assert(t->sharers >= 1 && c->tensor % t->sharers == 0);
}

/* Flat storage: in order of the list within each half, without overlap, aligned but for what one product reads. */
static void check_storage(const TensorTable *table) {
    int64_t end[2] = {0, table->n_tensor_summed};
    for (int i = 0; i < table->n; i++) {
        const Tensor *t = &table->list[i];
        int64_t *at = &end[t->sum_over_tensor ? 0 : 1];
        const char *part = strrchr(t->name, '.') - 1;
        const bool joined = *part == 'k' || *part == 'v' ||
                            (strstr(t->name, ".mlp.up.weight") && i > 0 &&
                             strstr(table->list[i - 1].name, ".mlp.gate.weight"));
        ck_assert_int_eq(t->count, t->local[0] * t->local[1]);
        ck_assert_int_eq(t->offset, joined ? *at : round_up(*at, 16));
        *at = t->offset + t->count;
    }
    ck_assert_int_eq(round_up(end[0], 16), table->n_tensor_summed);
    ck_assert_int_eq(round_up(end[1], 16), table->n_elements);
}

static void check_layout(const Layout *layout, bool sequence_parallel) {
    static Coverage all;
    Config config;
    load_config(&config, layout->model, layout->tensor, layout->pipeline, sequence_parallel);
    all.n = 0;
    int copies = 0;
    for (int stage = 0; stage < config.pipeline; stage++) {
        for (int rank = 0; rank < config.tensor; rank++) {
            TensorTable table = make_table(&config, stage, rank);
            for (int i = 0; i < table.n; i++) {
                check_kind(&config, &table.list[i]);
                ck_assert_ptr_eq(tensor_find(&table, table.list[i].name), &table.list[i]);
                copies += table.list[i].tied_copy;
            }
            check_storage(&table);
            cover(&all, &table);
            tensor_table_free(&table);
        }
    }
    ck_assert_int_eq(copies, config.tie_embeddings && config.pipeline > 1 ? config.tensor : 0);
    int64_t elements = 0;
    for (int i = 0; i < all.n; i++) {
        const Covered *c = &all.list[i];
        for (int64_t k = 0; k < c->along; k++)
            ck_assert_msg(c->marks[k] == 1, "%s[%d]: %d", c->name, (int)k, (int)c->marks[k]);
        elements += c->along * c->across;
    }
    ck_assert_int_eq(elements, model_parameters(&config));
    config_free(&config);
}

START_TEST(every_element_counts_once) {
    check_layout(&layouts[_i], false);
    check_layout(&layouts[_i], true);
}
END_TEST

/* The sum over ranks of what is real and counted, which the gradient norm and the checkpoint go by. */
START_TEST(real_counts) {
    for (int i = 0; i < N_LAYOUTS; i++) {
        Config config;
        int64_t elements = 0;
        load_config(&config, layouts[i].model, layouts[i].tensor, layouts[i].pipeline, true);
        for (int position = 0; position < config.pipeline * config.tensor; position++) {
            TensorTable table = make_table(&config, position / config.tensor, position % config.tensor);
            for (int k = 0; k < table.n; k++) {
                if (table.list[k].counted) elements += tensor_real_count(&table.list[k]);
            }
            tensor_table_free(&table);
        }
        ck_assert_int_eq(elements, model_parameters(&config));
        config_free(&config);
    }
}
END_TEST

/* ---- initial values ---- */

static void *init_all(const TensorTable *table, uint64_t seed, DType dtype) {
    void *flat = xcalloc((uint64_t)table->n_elements, dtype_size(dtype));
    for (int i = 0; i < table->n; i++) tensor_init(&table->list[i], seed, dtype, flat);
    return flat;
}

/* Every stored value of every rank is that of the whole model at its logical place; padding is zero. */
static void compare_init(const TensorTable *whole, const double *whole_flat, const TensorTable *table,
                         const double *flat) {
    for (int i = 0; i < table->n; i++) {
        const Tensor *t = &table->list[i], *w = tensor_find(whole, t->name);
        ck_assert(w->shape[0] == t->shape[0] && w->shape[1] == t->shape[1]);
        for (int64_t r = 0; r < t->local[0]; r++) {
            for (int64_t c = 0; c < t->local[1]; c++) {
                const int64_t row = r + (t->split == SPLIT_ROWS ? t->part.first : 0);
                const int64_t column = c + (t->split == SPLIT_COLUMNS ? t->part.first : 0);
                const bool padding = t->split == SPLIT_ROWS && r >= t->part.count;
                const double expected = padding ? 0.0 : whole_flat[w->offset + row * w->shape[1] + column];
                ck_assert_msg(flat[t->offset + r * t->local[1] + c] == expected, "%s[%d, %d]", t->name, (int)row,
                              (int)column);
            }
        }
    }
}

START_TEST(init_does_not_depend_on_the_layout) {
    Config config, single;
    load_config(&config, layouts[_i].model, layouts[_i].tensor, layouts[_i].pipeline, true);
    load_config(&single, layouts[_i].model, 1, 1, true);
    TensorTable whole = make_table(&single, 0, 0);
    double *whole_flat = init_all(&whole, 42, DT_F64);
    for (int position = 0; position < config.pipeline * config.tensor; position++) {
        TensorTable table = make_table(&config, position / config.tensor, position % config.tensor);
        double *flat = init_all(&table, 42, DT_F64);
        compare_init(&whole, whole_flat, &table, flat);
        float *flat32 = init_all(&table, 42, DT_F32);
        for (int64_t k = 0; k < table.n_elements; k++) ck_assert(flat32[k] == (float)flat[k]);
        free(flat32);
        free(flat);
        tensor_table_free(&table);
    }
    free(whole_flat);
    tensor_table_free(&whole);
    config_free(&config);
    config_free(&single);
}
END_TEST

START_TEST(init_is_normal) {
    Config config;
    load_config(&config, "arch=llama heads=4 hidden=128 vocab=1000", 1, 1, false);
    TensorTable table = make_table(&config, 0, 0);
    double *a = init_all(&table, 1, DT_F64), *b = init_all(&table, 2, DT_F64);
    for (int i = 0; i < table.n; i++) {
        const Tensor *t = &table.list[i];
        double sum = 0.0, squares = 0.0;
        int64_t same = 0;
        for (int64_t k = t->offset; k < t->offset + t->count; k++) {
            sum += a[k];
            squares += a[k] * a[k];
            same += a[k] == b[k];
        }
        if (t->init != INIT_NORMAL) {
            ck_assert(sum == (double)t->count && squares == sum); /* norms: ones */
            continue;
        }
        /* Six standard errors of mean and variance of n draws: 1 in 500 million by chance, and the seed is fixed. */
        const double n = (double)t->count, std = t->init_std;
        ck_assert_msg(fabs(sum / n) <= 6.0 * std / sqrt(n), "%s: mean %g", t->name, sum / n);
        ck_assert_msg(fabs(squares / n - std * std) <= 6.0 * std * std * sqrt(2.0 / n), "%s: variance %g", t->name,
                      squares / n);
        ck_assert_int_eq(same, 0);
    }
    ck_assert(a[tensor_find(&table, "blocks.0.attn.q.weight")->offset] !=
              a[tensor_find(&table, "blocks.1.attn.q.weight")->offset]);
    free(a);
    free(b);
    tensor_table_free(&table);
    config_free(&config);
}
END_TEST

/* ---- published models ---- */

/* Parameters as the papers and model cards give them; unit: what their last digit stands for. */
static const struct {
    const char *file;
    double parameters, unit;
} published[] = {
    {"gpt2-124m.ini", 124439808, 1},   {"gpt2-355m.ini", 354823168, 1},       {"gpt2-774m.ini", 774030080, 1},
    {"gpt2-1558m.ini", 1557611200, 1}, {"gpt3-125m.ini", 125.2e6, 1e5},       {"gpt3-350m.ini", 355.9e6, 1e5},
    {"gpt3-760m.ini", 760.3e6, 1e5},   {"gpt3-1.3b.ini", 1.316e9, 1e6},       {"gpt3-2.7b.ini", 2.652e9, 1e6},
    {"gpt3-6.7b.ini", 6.658e9, 1e6},   {"gpt3-13b.ini", 12.85e9, 1e7},        {"gpt3-175b.ini", 174.6e9, 1e8},
    {"llama-7b.ini", 6.738e9, 1e6},    {"llama-13b.ini", 13.016e9, 1e6},      {"llama-33b.ini", 32.529e9, 1e6},
    {"llama-65b.ini", 65.286e9, 1e6},  {"llama2-7b.ini", 6.738e9, 1e6},       {"llama2-13b.ini", 13.016e9, 1e6},
    {"llama2-34b.ini", 33.744e9, 1e6}, {"llama2-70b.ini", 68.977e9, 1e6},     {"llama3-8b.ini", 8.030e9, 1e6},
    {"llama3-70b.ini", 70.554e9, 1e6}, {"llama3.1-405b.ini", 405.853e9, 1e6}, {"llama3.2-1b.ini", 1.236e9, 1e6},
    {"llama3.2-3b.ini", 3.213e9, 1e6},
};
enum { N_PUBLISHED = sizeof published / sizeof published[0] };

/* configs/models from the root of the repository, or from a build folder below it. */
static const char *models_directory(void) {
    static const char *const places[] = {"configs/models", "../../configs/models", "../configs/models"};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        if (access(places[i], R_OK) == 0) return places[i];
    }
    ck_abort_msg("configs/models is not found from here");
    return NULL;
}

START_TEST(published_models) {
    char path[512], run_path[64] = "/tmp/test_tensors_XXXXXX", root[256], *steps = "train.steps=100";
    Config config;
    const int fd = mkstemp(run_path);
    ck_assert_int_ge(fd, 0);
    ck_assert_ptr_nonnull(realpath(models_directory(), root));
    snprintf(path, sizeof path, "include = %s/%s\n[train]\nglobal_batch = 4\n", root, published[_i].file);
    ck_assert_int_eq(write(fd, path, strlen(path)), (ssize_t)strlen(path));
    close(fd);
    ck_assert_int_eq(config_load(&config, run_path, &steps, 1, stderr), 0);
    ck_assert_int_eq(unlink(run_path), 0);
    ck_assert_int_eq(config_resolve_world(&config, 0, stderr), 0);
    ck_assert_int_eq(config_resolve_model(&config, 0, stderr), 0);
    const double found = (double)model_parameters(&config);
    ck_assert_msg(fabs(found - published[_i].parameters) <= 0.5 * published[_i].unit,
                  "%s: %.0f parameters, published "
                  "%.0f",
                  published[_i].file, found, published[_i].parameters);
    /* The formula against the table itself, of which each stage's is small enough to make. */
    TensorTable table = make_table(&config, 0, 0);
    double elements = 0.0;
    for (int i = 0; i < table.n; i++) elements += (double)tensor_real_count(&table.list[i]);
    ck_assert(elements == found);
    tensor_table_free(&table);
    config_free(&config);
}
END_TEST

/* Every file there is in the list above. */
START_TEST(all_models_are_compared) {
    DIR *dir = opendir(models_directory());
    ck_assert_ptr_nonnull(dir);
    int files = 0;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (entry->d_name[0] == '.') continue;
        bool listed = false;
        for (int i = 0; i < N_PUBLISHED; i++) listed |= strcmp(entry->d_name, published[i].file) == 0;
        ck_assert_msg(listed, "configs/models/%s", entry->d_name);
        files++;
    }
    closedir(dir);
    ck_assert_int_eq(files, N_PUBLISHED);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("tensors");
    TCase *table = tcase_create("table");
    tcase_set_timeout(table, 60);
    tcase_add_loop_test(table, every_element_counts_once, 0, N_LAYOUTS);
    tcase_add_test(table, real_counts);
    tcase_add_loop_test(table, init_does_not_depend_on_the_layout, 0, N_LAYOUTS);
    tcase_add_test(table, init_is_normal);
    suite_add_tcase(suite, table);
    TCase *models = tcase_create("models");
    tcase_add_loop_test(models, published_models, 0, N_PUBLISHED);
    tcase_add_test(models, all_models_are_compared);
    suite_add_tcase(suite, models);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
