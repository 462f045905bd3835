/* test_config.c - the settings: what is accepted, what is refused and with which words, what is printed.
 *
 * Bad input is a table: the text, how many errors it has, and what the messages must hold. */
#include <check.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/rng.h"
#include "train/config.h"
#include "train/config_table.h"

/* Five lines without an error; what is appended begins at line 6. */
#define GOOD "[model]\nlayers = 4\nvocab = 100\n[train]\nsteps = 10\n"

typedef struct {
    Config config;
    int n_errors;
    char *errors;
} Loaded;

static FILE *open_errors(Loaded *loaded) {
    static size_t bytes;
    return open_memstream(&loaded->errors, &bytes);
}

static void load(Loaded *loaded, const char *text, char *const *overrides, int n_overrides) {
    FILE *out = open_errors(loaded);
    loaded->n_errors = config_load_text(&loaded->config, text, "t.ini", overrides, n_overrides, out);
    fclose(out);
}

static void load_path(Loaded *loaded, const char *path) {
    FILE *out = open_errors(loaded);
    loaded->n_errors = config_load(&loaded->config, path, NULL, 0, out);
    fclose(out);
}

static void unload(Loaded *loaded) {
    if (loaded->n_errors == 0) config_free(&loaded->config);
    free(loaded->errors);
}

static int count_lines(const char *text) {
    int lines = 0;
    for (; (text = strchr(text, '\n')) != NULL; text++) lines++;
    return lines;
}

/* ---- bad input ---- */

typedef struct {
    const char *text;
    int n_errors;
    const char *says[5];
} BadCase;

static const BadCase bad[] = {
    /* names */
    {GOOD "[model]\nlayer = 4\n", 1, {"t.ini:7: [model] layer = 4: unknown key; did you mean layers?\n"}},
    {GOOD "[model]\nlaeyrs = 4\n", 1, {"t.ini:7:", "did you mean layers?"}},
    {GOOD "[parallel]\nmicro_batch = 4\n", 1, {"t.ini:7: [parallel] micro_batch = 4: micro_batch belongs in [train]"}},
    {GOOD "[train]\nevery = 4\n", 1, {"every belongs in [checkpoint] or [log]"}},
    {GOOD "[train]\nwieght_decay = 4\n", 1, {"did you mean weight_decay of [optimizer]?"}},
    {GOOD "[train]\noptimizer.lr = 4\n", 1, {"write lr in [optimizer]"}},
    {GOOD "[train]\nxyzzy = 4\n", 1, {"unknown key; `trident help train` lists what there is"}},
    {GOOD "[paralel]\ntensor = 2\n", 1, {"t.ini:6: [paralel]: there is no such section; did you mean [parallel]?"}},
    {GOOD "[paralel]\ntenser = 2\n",
     2,
     {"t.ini:6:", "t.ini:7: [paralel] tenser = 2: unknown key; did you mean tensor?"}},
    {GOOD "[paralel]\ntensor = two\n", 2, {"t.ini:6:", "t.ini:7: parallel.tensor = two"}},
    {GOOD "[zzzzzz]\n", 1, {"t.ini:6: [zzzzzz]: there is no such section; `trident help` lists them"}},
    {GOOD "[Model]\nhidden = 64\n", 1, {"did you mean [model]?"}},
    {GOOD "[parallel]\nzero = 1\n", 1, {"t.ini:7: [parallel] zero = 1: unknown key"}},
    {GOOD "[parallel]\nchunks = 2\n", 1, {"unknown key"}},
    /* values */
    {GOOD "[model]\nhidden = wide\n",
     1,
     {"t.ini:7: model.hidden = wide: a whole number (such as 64, 10_000, 32k, 4Ki) from 16 to 1048576 is expected\n"}},
    {GOOD "[model]\nhidden =\n", 1, {"t.ini:7: model.hidden = : a whole number"}},
    {GOOD "[model]\nhidden = 8\n", 1, {"model.hidden = 8:", "from 16 to 1048576"}},
    {GOOD "[model]\nhidden = -64\n", 1, {"model.hidden = -64:"}},
    {GOOD "[model]\nhidden = 64.5\n", 1, {"model.hidden = 64.5:"}},
    {GOOD "[model]\nhidden = 0x80\n", 1, {"model.hidden = 0x80:"}},
    {GOOD "[model]\nhidden = 1e3\n", 1, {"model.hidden = 1e3:"}},
    {GOOD "[model]\nhidden = 128 64\n", 1, {"model.hidden = 128 64:"}},
    {GOOD "[model]\nhidden = 1__28\n", 1, {"model.hidden = 1__28:"}},
    {GOOD "[model]\nhidden = 128_\n", 1, {"model.hidden = 128_:"}},
    {GOOD "[model]\nhidden = 1K\n", 1, {"model.hidden = 1K:"}},
    {GOOD "[train]\ntokens = 99999999999999999999999\n", 1, {"train.tokens = 9999", "at least 0", "in tokens"}},
    {GOOD "[train]\ntokens = 9223372T\n", 1, {"train.tokens = 9223372T"}},
    {GOOD "[optimizer]\nlr = fast\n", 1, {"t.ini:7: optimizer.lr = fast: a number from 0 to 1000 is expected"}},
    {GOOD "[optimizer]\nlr = nan\n", 1, {"optimizer.lr = nan:"}},
    {GOOD "[optimizer]\nlr = inf\n", 1, {"optimizer.lr = inf:"}},
    {GOOD "[optimizer]\nlr = 1e999\n", 1, {"optimizer.lr = 1e999:"}},
    {GOOD "[optimizer]\nlr = 1e-999\n", 1, {"optimizer.lr = 1e-999:"}},
    {GOOD "[optimizer]\nlr = 0x1p-3\n", 1, {"optimizer.lr = 0x1p-3:"}},
    {GOOD "[optimizer]\nlr = 3e-4k\n", 1, {"optimizer.lr = 3e-4k:"}},
    {GOOD "[optimizer]\nlr = -0.1\n", 1, {"optimizer.lr = -0.1:"}},
    {GOOD "[optimizer]\nlr = 1,5\n", 1, {"optimizer.lr = 1,5:"}},
    {GOOD "[optimizer]\nbeta1 = 1\n", 1, {"optimizer.beta1 = 1: a number from 0 to 0.999999"}},
    {GOOD "[train]\ntimeout = soon\n",
     1,
     {"train.timeout = soon: a time (such as 30s, 10m or 2h) from 1s to 10000000s"}},
    {GOOD "[train]\ntimeout = 10x\n", 1, {"train.timeout = 10x"}},
    {GOOD "[train]\ntimeout = 10ms\n", 1, {"train.timeout = 10ms"}},
    {GOOD "[train]\nprecision = fp16\n", 1, {"t.ini:7: train.precision = fp16: one of fp32, fp64; did you mean fp"}},
    {GOOD "[train]\nprecision = FP32\n", 1, {"train.precision = FP32"}},
    {GOOD "[model]\narch = lama\n", 1, {"model.arch = lama: one of gpt, llama; did you mean llama?"}},
    {GOOD "[parallel]\nschedule = interleaved\n", 1, {"one of gpipe, 1f1b"}},
    {GOOD "[data]\nmask_documents = maybe\n", 1, {"t.ini:7: data.mask_documents = maybe: yes or no is expected"}},
    {GOOD "[log]\ndir = #x\n", 1, {"t.ini:7: dir = #x: a value that begins with # or ; stands in quotes"}},
    {GOOD "[log]\ndir = ~/logs\n", 1, {"t.ini:7: dir = ~/logs: ~ is not replaced by anything; write the path out"}},
    {GOOD "[data]\ntrain = a, ${SCRATCH}/b\n", 1, {"t.ini:7: train = a, ${SCRATCH}/b: a $VARIABLE is not replaced"}},
    /* twice, in the wrong place */
    {GOOD "[model]\nlayers = 8\n", 1, {"t.ini:7: model.layers = 8: set already at t.ini:2, to 4"}},
    {"layers = 4\n" GOOD, 1, {"t.ini:1: layers = 4 stands before the first [section]"}},
    {GOOD "layers\n", 1, {"t.ini:6: \"layers\" is neither [section] nor key = value"}},
    {GOOD "[model\nlayers = 8\n", 1, {"t.ini:6: [model: the ] is missing"}},
    {"include = other.ini\n" GOOD, 1, {"t.ini:1:"}},
    /* sizes that do not divide; both values, both places, what would be right */
    {GOOD "[model]\nhidden = 100\nheads = 3\n",
     1,
     {"t.ini:7: hidden = 100 is no multiple of heads = 3; nearest: 99 or 102 (heads: t.ini:8)\n"}},
    {GOOD "[model]\nheads = 256\n",
     1,
     {"t.ini: hidden = 128 is no multiple of heads = 256; nearest: 256 (heads: t.ini:7)"}},
    {GOOD "[model]\nkv_heads = 3\n", 1, {"t.ini:7: kv_heads = 3 does not divide heads = 4\n"}},
    {GOOD "[model]\nheads = 16\n",
     1,
     {"t.ini:7: hidden / heads = 128 / 16 = 8 is the head size; an even number from 16"}},
    {GOOD "[model]\nhidden = 1028\n", 1, {"hidden / heads = 1028 / 4 = 257 is the head size"}},
    {GOOD "[model]\nhidden = 68\n", 1, {"hidden / heads = 68 / 4 = 17 is the head size"}},
    {GOOD "[parallel]\ntensor = 3\n",
     2, /* ffn = 384 divides */
     {"t.ini: heads = 4 is no multiple of tensor = 3; nearest: 3 or 6 (tensor: t.ini:7)\n",
      "t.ini: kv_heads = 4 and tensor = 3: one must be a multiple of the other (tensor: t.ini:7)\n"}},
    {GOOD "[model]\nffn = 30\n[parallel]\ntensor = 4\n",
     1,
     {"t.ini:7: ffn = 30 is no multiple of tensor = 4; nearest: 28 or 32 (tensor: t.ini:9)"}},
    {GOOD "[model]\nheads = 8\nkv_heads = 2\n[parallel]\ntensor = 8\n[model]\nffn = 64\nhidden = 128\n"
          "[parallel]\ndata = 1\npipeline = 5\n",
     1,
     {"t.ini:16: pipeline = 5 stages for layers = 4: each stage needs a layer; at most 4 (layers: t.ini:2)"}},
    {"[model]\nvocab = 3\n[train]\nsteps = 1\n[parallel]\ntensor = 4\n",
     1,
     {"t.ini:2: vocab = 3 is below tensor = 4 (tensor: t.ini:6)"}},
    {GOOD "[parallel]\norder = tensor, data\n", 1, {"t.ini:7: order = tensor, data: pipeline is missing"}},
    {GOOD "[parallel]\norder = tensor, data, data\n", 1, {"t.ini:7:", "data is named twice"}},
    {GOOD "[parallel]\nsequence_parallel = yes\n", 1, {"t.ini:7: sequence_parallel = yes needs tensor > 1"}},
    {GOOD "[parallel]\nranks = 6\npipeline = 4\n",
     1,
     {"t.ini:7: ranks = 6 is no multiple of pipeline x tensor = 4 x 1 = 4; nearest: 4 or 8 (pipeline: t.ini:8)"}},
    {GOOD "[parallel]\nranks = 6\ndata = 2\npipeline = 2\n",
     1,
     {"t.ini:7: ranks = 6, but data x pipeline x tensor = 2 x 2 x 1 = 4 (data: t.ini:8, pipeline: t.ini:9)"}},
    {GOOD "[parallel]\ndata = 1000000\npipeline = 4\n", 1, {"is more than 1048576 processes"}},
    {GOOD "[train]\nglobal_batch = 10\nmicro_batch = 4\n",
     1,
     {"t.ini:7: global_batch = 10 is no multiple of micro_batch = 4; nearest: 8 or 12 (micro_batch: t.ini:8)"}},
    {GOOD "[train]\nglobal_batch = 20\nmicro_batch = 4\n[parallel]\ndata = 2\n",
     1,
     {"t.ini:7: global_batch = 20 is no multiple of micro_batch x data = 4 x 2 = 8; nearest: 16 or 24 (micro_batch: "
      "t.ini:8, data: t.ini:10)"}},
    {GOOD "[parallel]\nranks = 16\n",
     1,
     {"global_batch = 8 is no multiple of micro_batch x data = 1 x 16 = 16; nearest: 16"}},
    /* length, rates */
    {"[model]\nvocab = 9\n",
     1,
     {"t.ini: steps = 0 and tokens = 0: the length of the run is given by exactly one of them\n"}},
    {GOOD "tokens = 100\n", 1, {"t.ini:5: steps = 10 and tokens = 100:", "(tokens: t.ini:6)"}},
    {GOOD "global_batch = 1Gi\n[model]\nseq_len = 16Mi\n[train]\nmicro_batch = 1\n[parallel]\ndata = 1\n[train]\n",
     0,
     {NULL}},
    {"[model]\nvocab = 9\nseq_len = 1Mi\n[train]\nsteps = 8_000_000T\n",
     1,
     {"t.ini:5: steps x global_batch x seq_len = "}},
    {GOOD "[optimizer]\nwarmup_steps = 11\n", 0, {NULL}},
    {GOOD "[optimizer]\ndecay = wsd\n", 1, {"t.ini:7: decay = wsd needs decay_steps"}},
    {GOOD "[optimizer]\ndecay_steps = 3\n", 1, {"t.ini:7: decay_steps = 3 is looked at by decay = wsd only"}},
    {GOOD "[optimizer]\ndecay = wsd\ndecay_steps = 8\nwarmup_steps = 3\n",
     1,
     {"t.ini:8: warmup_steps + decay_steps = 3 + 8 is longer than the run of 10 steps (warmup_steps: t.ini:9, steps: "
      "t.ini:5)"}},
    {GOOD "[optimizer]\ndecay = wsd\ndecay_steps = 9_000_000T\nwarmup_steps = 9_000_000T\n",
     1,
     {"warmup_steps + decay_steps = 9000000000000000000 + 9000000000000000000 is longer"}},
    {GOOD "[optimizer]\nlr = 1e-4\nmin_lr = 1e-3\n", 1, {"t.ini:8: min_lr = 0.001 is above lr = 0.0001 (lr: t.ini:7)"}},
    {GOOD "[optimizer]\nlr_scaling = sqrt\n", 1, {"t.ini:7: lr_scaling needs base_batch", "this run's is 8"}},
    {GOOD "[train]\neval_every = 5\n", 1, {"t.ini:7: eval_every = 5 needs data.valid"}},
    {GOOD "[checkpoint]\nresume =\n",
     1,
     {"t.ini:7: resume = \"\" names nothing: auto, none, a directory, or weights:DIR"}},
    {GOOD "[checkpoint]\nresume = weights:\n", 1, {"t.ini:7: resume = \"weights:\" names nothing"}},
    {GOOD "[checkpoint]\nallow = model.sed, train.seed\n", 1, {"t.ini:7: allow: there is no setting model.sed"}},
    {GOOD "[checkpoint]\nallow = train.sead\n", 1, {"train.sead; did you mean train.seed?"}},
    {"[model]\nvocab = 9\nlayers = 10_000\nhidden = 1Mi\nheads = 4096\nffn = 16Mi\nseq_len = 16Mi\n[train]\nsteps = 1\n"
     "micro_batch = 1Mi\nglobal_batch = 1Mi\n",
     1,
     {"are more than any memory holds"}},
    /* no text */
    {GOOD "\x01\n", 1, {"t.ini:6: byte 0x01 at offset"}},
    {GOOD "[log]\ndir = \xC3(\n", 1, {"t.ini:7: byte 0xc3 at offset"}},
    /* all errors at once; no rule blames a value that a refused line was to set */
    {"[model]\nlayer = 3\nhidden = wide\nheads = 3\n[train]\nsteps 10\nlr = 1\nseed = -1\n",
     5,
     {"t.ini:2: [model] layer = 3", "t.ini:3: model.hidden = wide", "t.ini:6: \"steps 10\"",
      "t.ini:7: [train] lr = 1: lr "
      "belongs in [optimizer]",
      "t.ini:8: train.seed = -1"}},
    {"[model]\nvocab = 9\nhidden = 100\nheads = 3\nkv_heads = 2\n[train]\nsteps = 10\nprecision = half\n[optimizer]\n"
     "lr = 1\nmin_lr = 2\n",
     4,
     {"t.ini:3: hidden = 100", "t.ini:5: kv_heads = 2 does not divide heads = 3", "t.ini:8: train.precision = half",
      "t.ini:11: min_lr = 2 is above lr = 1"}},
    {"[model]\nvocab = 9\n[train]\nstep = 10\n", 1, {"t.ini:4: [train] step = 10: unknown key; did you mean steps?"}},
};

START_TEST(bad_input) {
    const BadCase *c = &bad[_i];
    Loaded loaded;
    load(&loaded, c->text, NULL, 0);
    ck_assert_msg(loaded.n_errors == c->n_errors, "%d errors, %d expected\n%s\n%s", loaded.n_errors, c->n_errors,
                  c->text, loaded.errors);
    ck_assert_msg(count_lines(loaded.errors) == c->n_errors, "%s", loaded.errors);
    for (int i = 0; i < 5 && c->says[i]; i++) {
        ck_assert_msg(strstr(loaded.errors, c->says[i]) != NULL, "%s\nis not in\n%s", c->says[i], loaded.errors);
    }
    unload(&loaded);
}
END_TEST

/* ---- --set ---- */

START_TEST(overrides) {
    char *good[] = {"model.layers=6", "model.layers=8", "log.dir=a # b", "data.train= x y "};
    Loaded loaded;
    load(&loaded, GOOD, good, 4);
    ck_assert_msg(loaded.n_errors == 0, "%s", loaded.errors);
    ck_assert_int_eq(loaded.config.layers, 8);
    ck_assert_str_eq(loaded.config.log_dir, "a # b");
    ck_assert_str_eq(loaded.config.train_data, "x y");
    unload(&loaded);
    char *wrong[] = {"layers=4",      "model.layer=4",     "modle.layers=4",
                     "model.heads=x", "parallel.tensor=3", "log.dir=\x1B[2J"};
    load(&loaded, GOOD, wrong, 6);
    ck_assert_msg(loaded.n_errors == 5, "%s", loaded.errors);
    static const char *const says[] = {"--set layers=4: section.key=value is expected\n",
                                       "--set: [model] layer = 4: unknown key; did you mean layers?\n",
                                       "--set: [modle] layers = 4: layers belongs in [model]\n",
                                       "--set: model.heads = x: a whole number",
                                       "--set: log.dir = ?[2J: text in UTF-8 without control characters is expected\n"};
    for (int i = 0; i < 5; i++) {
        ck_assert_msg(strstr(loaded.errors, says[i]) != NULL, "%s\nis not in\n%s", says[i], loaded.errors);
    }
    unload(&loaded);
    char *rule[] = {"model.hidden=129"};
    load(&loaded, GOOD, rule, 1);
    ck_assert_msg(strstr(loaded.errors, "--set: hidden = 129 is no multiple of heads = 4; nearest: 128 or "
                                        "132\n") != NULL,
                  "%s", loaded.errors);
    unload(&loaded);
}
END_TEST

/* ---- what is accepted, and how ---- */

START_TEST(values) {
    Loaded loaded;
    load(&loaded,
         GOOD "seed = 1_000_000\neval_batches = 2k\ntimeout = 1.5h\nmicro_batch = 2\nglobal_batch = 1Ki\n"
              "[model]\nnorm_eps = 1e-6\nrope_theta = 5e5\n[optimizer]\nlr = +.5\n[data]\nmask_documents = on\n",
         NULL, 0);
    ck_assert_msg(loaded.n_errors == 0, "%s", loaded.errors);
    const Config *c = &loaded.config;
    ck_assert_uint_eq(c->seed, 1000000);
    ck_assert_int_eq(c->eval_batches, 2000);
    ck_assert_int_eq(c->global_batch, 1024);
    ck_assert(c->timeout_s == 5400.0 && c->norm_eps == 1e-6 && c->rope_theta == 5e5 && c->lr == 0.5);
    ck_assert(c->mask_documents);
    unload(&loaded);
    static const struct {
        const char *text;
        double seconds;
    } times[] = {{"1", 1}, {"90", 90}, {"2s", 2}, {"1500ms", 1.5}, {"2m", 120}, {"1h", 3600}, {"1d", 86400}};
    for (size_t i = 0; i < sizeof times / sizeof times[0]; i++) {
        char *override = xasprintf("train.timeout=%s", times[i].text);
        load(&loaded, GOOD, &override, 1);
        ck_assert_msg(loaded.n_errors == 0 && loaded.config.timeout_s == times[i].seconds, "%s", times[i].text);
        unload(&loaded);
        free(override);
    }
}
END_TEST

START_TEST(derived) {
    Loaded loaded;
    load(&loaded, GOOD, NULL, 0);
    const Config *c = &loaded.config;
    ck_assert_str_eq(c->name, "t");
    ck_assert_str_eq(c->checkpoint_dir, "runs/t/checkpoints");
    ck_assert_str_eq(c->log_dir, "runs/t/log");
    ck_assert_int_eq(c->kv_heads, 4);
    ck_assert_int_eq(c->ffn, 384); /* 8/3 x 128 = 341.3, up to a multiple of 64 */
    ck_assert(!c->tie_embeddings && c->dtype == DT_F32);
    ck_assert_int_eq(c->total_steps, 10);
    unload(&loaded);
    load(&loaded, "[model]\narch = gpt\nvocab = 9\n[train]\ntokens = 10_241\nprecision = fp64\n", NULL, 0);
    ck_assert_msg(loaded.n_errors == 0, "%s", loaded.errors);
    ck_assert_int_eq(c->ffn, 512);
    ck_assert(c->tie_embeddings && c->dtype == DT_F64);
    ck_assert_int_eq(c->total_steps, 11); /* 8 x 128 tokens each: the last step goes beyond */
    unload(&loaded);
}
END_TEST

static int resolve(Loaded *loaded, int world) {
    free(loaded->errors);
    FILE *out = open_errors(loaded);
    const int n = config_resolve_world(&loaded->config, world, out);
    fclose(out);
    return n;
}

static const struct {
    const char *text;
    int world, data; /* data 0: refused */
    int64_t accumulation;
    const char *says;
} worlds[] = {
    {"", 0, 1, 8, ""},
    {"", 4, 4, 2, ""},
    {"pipeline = 2\n", 0, 1, 8, ""},
    {"pipeline = 2\n", 8, 4, 2, ""},
    {"ranks = 8\npipeline = 2\ntensor = 2\n", 0, 2, 4, ""},
    {"ranks = 8\npipeline = 2\ntensor = 2\n", 8, 2, 4, ""},
    {"data = 2\npipeline = 2\n", 0, 2, 4, ""},
    {"data = 2\npipeline = 2\n", 4, 2, 4, ""},
    {"data = 2\npipeline = 2\n", 8, 0, 0,
     "t.ini:7: data x pipeline x tensor = 2 x 2 x 1 = 4, but the launcher started 8 processes (pipeline: t.ini:8)\n"},
    {"ranks = 4\n", 8, 0, 0, "t.ini:7: ranks = 4, but the launcher started 8 processes\n"},
    {"pipeline = 2\ntensor = 2\n", 6, 0, 0,
     "t.ini:7: 6 processes (from the launcher): no multiple of pipeline x tensor = 2 x 2 = 4; nearest: 4 or 8 "
     "processes "
     "(tensor: t.ini:8)\n"},
    {"", 3, 0, 0, "t.ini: global_batch = 8 is no multiple of micro_batch x data = 1 x 3 = 3; nearest: 6 or 9\n"},
};

START_TEST(world) {
    Loaded loaded;
    char *text = xasprintf(GOOD "[parallel]\n%s", worlds[_i].text);
    load(&loaded, text, NULL, 0);
    ck_assert_msg(loaded.n_errors == 0, "%s", loaded.errors);
    const int n = resolve(&loaded, worlds[_i].world);
    ck_assert_int_eq(n, worlds[_i].data == 0);
    ck_assert_str_eq(loaded.errors, worlds[_i].says);
    if (n == 0) {
        ck_assert_int_eq(loaded.config.data, worlds[_i].data);
        ck_assert_int_eq(loaded.config.accumulation, worlds[_i].accumulation);
        ck_assert_int_eq(loaded.config.sequence_parallel_on, loaded.config.tensor > 1);
    }
    unload(&loaded);
    free(text);
}
END_TEST

START_TEST(equation) {
    char *text, *overrides_list[] = {"parallel.data=2", "train.micro_batch=2", "train.global_batch=16"};
    size_t bytes;
    Loaded loaded;
    load(&loaded, GOOD, overrides_list, 3);
    ck_assert_int_eq(resolve(&loaded, 0), 0);
    FILE *out = open_memstream(&text, &bytes);
    config_print_equation(&loaded.config, out);
    fclose(out);
    ck_assert_str_eq(text, "global_batch 16 = micro_batch 2 x data 2 x accumulation 4 sequences; x seq_len 128 = 2048 "
                           "tokens "
                           "a step; x 10 steps = 2.048e+04 tokens\n");
    free(text);
    unload(&loaded);
}
END_TEST

START_TEST(vocabulary) {
    Loaded loaded;
    load(&loaded, "[train]\nsteps = 1\n[parallel]\ntensor = 2\n", NULL, 0);
    ck_assert_msg(loaded.n_errors == 0, "%s", loaded.errors);
    free(loaded.errors);
    FILE *out = open_errors(&loaded);
    Config *c = &loaded.config;
    ck_assert_int_eq(config_resolve_model(c, 0, out), 1);
    ck_assert_int_eq(config_resolve_model(c, 1, out), 1);
    c->vocab = 0;
    ck_assert_int_eq(config_resolve_model(c, 256, out), 0);
    ck_assert_int_eq(c->vocab, 256);
    ck_assert_int_eq(config_resolve_model(c, 200, out), 0);
    ck_assert_int_eq(config_resolve_model(c, 512, out), 1);
    ck_assert_int_eq(c->vocab, 256);
    fclose(out);
    ck_assert_msg(strstr(loaded.errors, "the vocabulary is not known: set model.vocab, or name data.tokenizer"), "%s",
                  loaded.errors);
    ck_assert_msg(strstr(loaded.errors, "vocab = 1 is below tensor = 2"), "%s", loaded.errors);
    ck_assert_msg(strstr(loaded.errors, "vocab = 256 is below the 512 tokens of tokenizer = "), "%s", loaded.errors);
    unload(&loaded);
}
END_TEST

/* ---- files ---- */

static char directory[64];

static void enter_directory(void) {
    strcpy(directory, "/tmp/test_config_XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(directory));
    ck_assert_int_eq(chdir(directory), 0);
}

static void leave_directory(void) {
    char command[96];
    ck_assert_int_eq(chdir("/"), 0);
    snprintf(command, sizeof command, "rm -rf %s", directory);
    ck_assert_int_eq(system(command), 0);
}

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    fputs(text, file);
    fclose(file);
}

START_TEST(includes_and_order) {
    ck_assert_int_eq(mkdir("models", 0777), 0);
    write_file("models/m.ini", "include = base.ini\n[model]\nlayers = 3\nhidden = 256\n");
    write_file("models/base.ini", "[model]\nlayers = 2\nvocab = 50\nheads = 8\n[train]\nsteps = 5\n");
    write_file("run.ini", "include = models/m.ini\n[model]\nhidden = 512\n");
    Loaded loaded;
    load_path(&loaded, "run.ini");
    ck_assert_msg(loaded.n_errors == 0, "%s", loaded.errors);
    ck_assert_int_eq(loaded.config.layers, 3);
    ck_assert_int_eq(loaded.config.hidden, 512);
    ck_assert_int_eq(loaded.config.heads, 8);
    ck_assert_str_eq(loaded.config.checkpoint_dir, "runs/run/checkpoints");
    char *text;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    config_print_origins(&loaded.config, out);
    fclose(out);
    ck_assert_msg(strstr(text, "= 512                          # run.ini:3\n"), "%s", text);
    ck_assert_msg(strstr(text, "= 3                            # models/m.ini:3\n"), "%s", text);
    ck_assert_msg(strstr(text, "= 8                            # models/base.ini:4\n"), "%s", text);
    ck_assert_msg(strstr(text, "# default\n") && strstr(text, "# default; off here\n"), "%s", text);
    free(text);
    unload(&loaded);
    write_file("run.ini", "include = models/m.ini\n[model]\nheads = 3\n");
    load_path(&loaded, "run.ini");
    ck_assert_str_eq(loaded.errors, "models/m.ini:4: hidden = 256 is no multiple of heads = 3; nearest: 255 or 258 "
                                    "(heads: "
                                    "run.ini:3)\n");
    unload(&loaded);
}
END_TEST

/* A file that is not there is one error: no rule complains about what it would have set. */
START_TEST(missing_files) {
    Loaded loaded;
    load_path(&loaded, "none.ini");
    ck_assert_int_eq(loaded.n_errors, 1);
    ck_assert_str_eq(loaded.errors, "none.ini: cannot open: No such file or directory\n");
    unload(&loaded);
    load_path(&loaded, ".");
    ck_assert_str_eq(loaded.errors, ".: is a directory, not a config file\n");
    unload(&loaded);
    write_file("run.ini", "include = none.ini\n[model]\nhidden = 100\nheads = 3\n");
    load_path(&loaded, "run.ini");
    ck_assert_int_eq(loaded.n_errors, 2);
    ck_assert_msg(strstr(loaded.errors, "run.ini:1: include: none.ini: cannot open"), "%s", loaded.errors);
    ck_assert_msg(strstr(loaded.errors, "run.ini:3: hidden = 100 is no multiple"), "%s", loaded.errors);
    unload(&loaded);
    write_file("empty.ini", "");
    load_path(&loaded, "empty.ini");
    ck_assert_str_eq(loaded.errors, "empty.ini: steps = 0 and tokens = 0: the length of the run is given by exactly "
                                    "one of "
                                    "them\n");
    unload(&loaded);
}
END_TEST

/* ---- printing and reading again ---- */

static uint64_t seed;

static void choose_seed(void) {
    const char *given = getenv("TRIDENT_TEST_SEED");
    seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    printf("TRIDENT_TEST_SEED=%" PRIu64 " replays this\n", seed);
    fflush(stdout);
}

static uint64_t draw(uint64_t *n, uint64_t below) { return rng_bits(seed, 1, (*n)++) % below; }

static char *random_text(uint64_t *n) {
    static const char *const parts[] = {"a", "/", " ", "#",        ";",    "\"", "\\",   "\n", "\t",
                                        "=", "[", "]", "\xC3\xA9", ":0.5", ",",  "runs", "'",  "\xE6\x97\xA5"};
    char text[128] = "";
    const uint64_t length = draw(n, 12);
    for (uint64_t i = 0; i < length; i++) strcat(text, parts[draw(n, sizeof parts / sizeof parts[0])]);
    return xstrdup(text);
}

/* Any value that the table allows. */
static char *random_value(const Setting *s, uint64_t *n) {
    const double u = (double)draw(n, 1 << 20) / (1 << 20);
    int choices = 0;
    switch (s->type) {
    case TYPE_TEXT: return random_text(n);
    case TYPE_BOOL: return xstrdup(draw(n, 2) ? "yes" : "no");
    case TYPE_CHOICE:
        while (s->choices[choices]) choices++;
        return xstrdup(s->choices[draw(n, (uint64_t)choices)]);
    case TYPE_INT:
    case TYPE_INT64: return xasprintf("%.0f", floor(s->min + u * u * u * (s->max - s->min)));
    case TYPE_DOUBLE:
    case TYPE_DURATION: break;
    }
    const double low = s->min > 0 ? s->min : 1e-12; /* over all magnitudes, all bits of the mantissa */
    double value = low * pow(s->max / low, u);
    if (value > s->max) value = s->max;
    return xasprintf("%.17g", value);
}

/* Every setting's value goes to text and back: for the whole table, whether or not the values go together. */
START_TEST(values_round_trip) {
    choose_seed();
    uint64_t n = 0;
    for (int trial = 0; trial < 300; trial++) {
        for (int i = 0; i < n_settings; i++) {
            Config a = {0}, b = {0};
            char problem[256] = "", *value = random_value(&settings[i], &n);
            ck_assert_msg(setting_parse(&settings[i], &a, value, problem) == 0,
                          "TRIDENT_TEST_SEED=%" PRIu64 ": %s.%s "
                          "= %s: %s",
                          seed, settings[i].section, settings[i].key, value, problem);
            char *text = setting_format(&settings[i], &a);
            char *file = xasprintf("[%s]\n%s = %s\n", settings[i].section, settings[i].key, text);
            Ini ini = {.out = stderr};
            ini_read_text(&ini, file, strlen(file), "printed");
            ck_assert_msg(ini.errors == 0 && ini.n == 2, "TRIDENT_TEST_SEED=%" PRIu64 ": %s", seed, file);
            ck_assert_int_eq(setting_parse(&settings[i], &b, ini.entries[1].value, problem), 0);
            char *again = setting_format(&settings[i], &b);
            ck_assert_msg(strcmp(text, again) == 0, "TRIDENT_TEST_SEED=%" PRIu64 ": %s, then %s", seed, text, again);
            if (settings[i].type == TYPE_TEXT) {
                char *const *x = (char *const *)(const void *)((const char *)&a + settings[i].offset);
                char *const *y = (char *const *)(const void *)((const char *)&b + settings[i].offset);
                ck_assert_str_eq(*x, *y);
                ck_assert_str_eq(*x, value);
                free(*x);
                free(*y);
            } else {
                ck_assert_mem_eq(&a, &b, sizeof a);
            }
            ini_free(&ini);
            free(again);
            free(file);
            free(text);
            free(value);
        }
    }
}
END_TEST

/* A random config that keeps the rules, printed as it was resolved and read again, is the same. */
START_TEST(configs_round_trip) {
    choose_seed();
    uint64_t n = 1 << 30;
    int loaded_configs = 0;
    for (int trial = 0; trial < 400; trial++) {
        const int64_t tensor = INT64_C(1) << draw(&n, 4), kv = INT64_C(1) << draw(&n, 5);
        const int64_t heads = kv * (int64_t)(1 + draw(&n, 3)) * tensor, layers = 1 + (int64_t)draw(&n, 20);
        const int64_t data = 1 + (int64_t)draw(&n, 6), micro = 1 + (int64_t)draw(&n, 4);
        char *free_text[3] = {random_text(&n), random_text(&n), random_text(&n)};
        char *overrides_list[] = {
            xasprintf("model.arch=%s", draw(&n, 2) ? "gpt" : "llama"),
            xasprintf("model.layers=%" PRId64, layers),
            xasprintf("model.heads=%" PRId64, heads),
            xasprintf("model.kv_heads=%" PRId64, draw(&n, 2) ? kv : 0),
            xasprintf("model.hidden=%" PRId64, heads * 2 * (8 + (int64_t)draw(&n, 100))),
            xasprintf("model.vocab=%d", (int)(8 + draw(&n, 100000))),
            xasprintf("parallel.tensor=%" PRId64, tensor),
            xasprintf("parallel.pipeline=%" PRId64, 1 + (int64_t)draw(&n, (uint64_t)layers)),
            xasprintf("parallel.data=%" PRId64, draw(&n, 2) ? data : 0),
            xasprintf("train.micro_batch=%" PRId64, micro),
            xasprintf("train.global_batch=%" PRId64, micro * data * (1 + (int64_t)draw(&n, 9))),
            xasprintf("%s=%d", draw(&n, 2) ? "train.steps" : "train.tokens", (int)(1 + draw(&n, 1000000))),
            xasprintf("optimizer.lr=%.17g", 1e-4 + 1e-3 * (double)draw(&n, 1 << 20)),
            xasprintf("model.tie_embeddings=%s", (const char *[]){"auto", "yes", "no"}[draw(&n, 3)]),
            xasprintf("data.train=%s", free_text[0]),
            xasprintf("data.valid=%s", free_text[1]),
            xasprintf("log.dir=%s", free_text[2])};
        const int count = sizeof overrides_list / sizeof overrides_list[0];
        Loaded first, second;
        load(&first, "", overrides_list, count);
        if (first.n_errors == 0 && resolve(&first, 0) == 0) {
            char *text = config_text(&first.config);
            load(&second, text, NULL, 0);
            ck_assert_msg(second.n_errors == 0 && resolve(&second, 0) == 0, "TRIDENT_TEST_SEED=%" PRIu64 "\n%s\n%s",
                          seed, text, second.errors);
            char *again = config_text(&second.config);
            ck_assert_str_eq(text, again);
            ck_assert_int_eq(first.config.total_steps, second.config.total_steps);
            ck_assert_int_eq(first.config.accumulation, second.config.accumulation);
            ck_assert_int_eq(first.config.tie_embeddings, second.config.tie_embeddings);
            char *notes;
            size_t bytes;
            FILE *out = open_memstream(&notes, &bytes);
            ck_assert_int_eq(config_compare_resume(&first.config, text, NULL, out, out), 0);
            fclose(out);
            ck_assert_str_eq(notes, "");
            free(notes);
            free(again);
            free(text);
            unload(&second);
            loaded_configs++;
        }
        unload(&first);
        for (int i = 0; i < 3; i++) free(free_text[i]);
        for (int i = 0; i < count; i++) free(overrides_list[i]);
    }
    ck_assert_msg(loaded_configs > 100, "TRIDENT_TEST_SEED=%" PRIu64 ": %d of 400 configs were valid", seed,
                  loaded_configs);
}
END_TEST

/* ---- resume ---- */

static const struct {
    const char *change, *allow;
    int refusals;
    const char *notes, *errors;
} resumes[] = {
    {"train.threads=3", "", 0, "", ""},
    {"log.every=3", "", 0, "", ""},
    {"parallel.pipeline=2", "", 0, "", ""},
    {"train.micro_batch=2", "", 0, "", ""},
    {"optimizer.lr=0.5", "", 0, "optimizer.lr: 0.5 from now on, was 0.0003\n", ""},
    {"train.steps=20", "", 0, "train.steps: 20 from now on, was 10\n", ""},
    {"data.train=b", "", 0, "data.train: b from now on, was a\n", ""},
    {"model.layers=8", "", 1, "", "model.layers = 8, but the checkpoint was written with 4\n"},
    {"train.seed=8", "", 1, "", "train.seed = 8, but the checkpoint was written with 1234\n"},
    {"train.seed=8", "train.seed", 0, "train.seed: 8 from now on, was 1234\n", ""},
    {"train.seed=8", "model.layers,  train.seed", 0, "train.seed: 8 from now on, was 1234\n", ""},
    {"train.seed=8", "train.steps", 1, "", "train.seed = 8, but the checkpoint was written with 1234\n"},
    {"train.global_batch=16", "", 1, "", "train.global_batch = 16, but the checkpoint was written with 8\n"},
    {"train.precision=fp64", "", 1, "", "train.precision = fp64, but the checkpoint was written with fp32\n"},
    {"data.mask_documents=yes", "", 1, "", "data.mask_documents = yes, but the checkpoint was written with no\n"},
    {"optimizer.kind=sgd", "", 1, "", "optimizer.kind = sgd, but the checkpoint was written with adamw\n"},
    {"model.tie_embeddings=no", "", 0, "", ""}, /* auto was no already */
    {"model.kv_heads=4", "", 0, "", ""},        /* 0 was 4 already */
};

START_TEST(resume) {
    Loaded before, now;
    char *data = "data.train=a";
    load(&before, GOOD, &data, 1);
    char *old_text = config_text(&before.config);
    char *allow = xasprintf("checkpoint.allow=%s", resumes[_i].allow);
    char *overrides_list[] = {"data.train=a", (char *)(uintptr_t)resumes[_i].change, allow};
    load(&now, GOOD, overrides_list, 3);
    ck_assert_msg(now.n_errors == 0, "%s", now.errors);
    char *notes, *errors;
    size_t bytes;
    FILE *notes_file = open_memstream(&notes, &bytes), *errors_file = open_memstream(&errors, &bytes);
    ck_assert_int_eq(config_compare_resume(&now.config, old_text, NULL, notes_file, errors_file), resumes[_i].refusals);
    fclose(notes_file);
    fclose(errors_file);
    ck_assert_str_eq(notes, resumes[_i].notes);
    ck_assert_str_eq(errors, resumes[_i].errors);
    free(notes);
    free(errors);
    free(allow);
    free(old_text);
    unload(&before);
    unload(&now);
}
END_TEST

/* ---- help ---- */

static int help(const char *topic, char **text, char **errors) {
    size_t bytes;
    FILE *out = open_memstream(text, &bytes), *error_out = open_memstream(errors, &bytes);
    const int rc = config_help(topic, out, error_out);
    fclose(out);
    fclose(error_out);
    return rc;
}

START_TEST(help_texts) {
    char *text, *errors;
    ck_assert_int_eq(help(NULL, &text, &errors), 0);
    for (int i = 0; i < n_settings; i++) {
        ck_assert_msg(strstr(text, settings[i].help) && strstr(text, settings[i].key), "%s", settings[i].key);
    }
    free(text);
    free(errors);
    for (int i = 0; i < n_settings; i++) {
        char *topic = xasprintf("%s.%s", settings[i].section, settings[i].key), bounds[96];
        ck_assert_int_eq(help(topic, &text, &errors), 0);
        ck_assert_msg(strncmp(text, topic, strlen(topic)) == 0 && strstr(text, settings[i].unit) &&
                          strstr(text, setting_bounds(&settings[i], bounds)) && strstr(text, settings[i].fallback),
                      "%s", text);
        ck_assert_str_eq(errors, "");
        free(text);
        free(errors);
        ck_assert_int_eq(help(settings[i].key, &text, &errors), 0);
        const char *meant = section_meant(settings[i].key);
        const bool is_section = meant && strcmp(meant, settings[i].key) == 0; /* [train], not data.train */
        ck_assert_msg(is_section || strstr(text, topic), "%s", text);
        free(text);
        free(errors);
        free(topic);
    }
    ck_assert_int_eq(help("parallel", &text, &errors), 0);
    ck_assert_msg(strstr(text, "parallel.ranks\n") && strstr(text, "parallel.allow_cross_node_tensor\n"), "%s", text);
    free(text);
    free(errors);
}
END_TEST

START_TEST(unknown_help) {
    static const char *const pairs[][2] = {{"parallel.tenser", "did you mean parallel.tensor?"},
                                           {"paralel", "did you mean parallel?"},
                                           {"laeyrs", "did you mean layers?"},
                                           {"zzzzzzzz", "`trident help` lists them all"},
                                           {"parallel.", "did you mean parallel?"}};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        char *text, *errors;
        ck_assert_int_eq(help(pairs[i][0], &text, &errors), -1);
        ck_assert_str_eq(text, "");
        ck_assert_msg(strstr(errors, pairs[i][1]) != NULL, "%s", errors);
        free(text);
        free(errors);
    }
}
END_TEST

/* Every key misspelt by one letter, left out, put twice, or swapped, and moved to a section that does not have it. */
START_TEST(every_key_misspelt) {
    for (int i = 0; i < n_settings; i++) {
        const char *key = settings[i].key;
        const size_t length = strlen(key);
        for (size_t at = 0; at < length; at++) {
            char wrong[4][64];
            snprintf(wrong[0], 64, "%.*s%s", (int)at, key, key + at + 1);
            snprintf(wrong[1], 64, "%.*s%c%s", (int)at, key, key[at], key + at);
            snprintf(wrong[2], 64, "%.*sz%s", (int)at, key, key + at + 1);
            snprintf(wrong[3], 64, "%s", key);
            if (at + 1 < length) {
                wrong[3][at] = key[at + 1];
                wrong[3][at + 1] = key[at];
            }
            for (int k = 0; k < 4; k++) {
                if (!wrong[k][0] || setting_find(settings[i].section, wrong[k])) continue;
                Loaded loaded;
                char *text = xasprintf(GOOD "[%s]\n%s = 1\n", settings[i].section, wrong[k]);
                load(&loaded, text, NULL, 0);
                ck_assert_msg(loaded.n_errors == 1 && strstr(loaded.errors, "t.ini:7:"), "%s\n%s", text, loaded.errors);
                const bool near = length < 3 || strstr(loaded.errors, "did you mean ") ||
                                  strstr(loaded.errors, " belongs in ");
                ck_assert_msg(near, "%s", loaded.errors);
                unload(&loaded);
                free(text);
            }
        }
        const char *elsewhere = setting_find("log", key) ? "model" : "log";
        Loaded loaded;
        char *text = xasprintf(GOOD "[%s]\n%s = 1\n", elsewhere, key);
        load(&loaded, text, NULL, 0);
        ck_assert_msg(loaded.n_errors == 1 && strstr(loaded.errors, " belongs in ") &&
                          strstr(loaded.errors, settings[i].section),
                      "%s", loaded.errors);
        unload(&loaded);
        free(text);
    }
}
END_TEST

START_TEST(nearest) {
    const char *const names[] = {"train", "eval", "generate", "tokenize"};
    ck_assert_str_eq(nearest_name("trian", names, 4), "train");
    ck_assert_str_eq(nearest_name("tran", names, 4), "train");
    ck_assert_str_eq(nearest_name("tokenise", names, 4), "tokenize");
    ck_assert_ptr_null(nearest_name("xyz", names, 4));
    ck_assert_ptr_null(nearest_name("", names, 4));
    char longest[200];
    memset(longest, 't', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    ck_assert_ptr_null(nearest_name(longest, names, 4));
}
END_TEST

#define COUNT(array) ((int)(sizeof array / sizeof array[0]))

int main(void) {
    Suite *suite = suite_create("config");
    TCase *texts = tcase_create("texts");
    tcase_set_timeout(texts, 60);
    tcase_add_loop_test(texts, bad_input, 0, COUNT(bad));
    tcase_add_test(texts, overrides);
    tcase_add_test(texts, values);
    tcase_add_test(texts, derived);
    tcase_add_loop_test(texts, world, 0, COUNT(worlds));
    tcase_add_test(texts, equation);
    tcase_add_test(texts, vocabulary);
    tcase_add_test(texts, values_round_trip);
    tcase_add_test(texts, configs_round_trip);
    tcase_add_loop_test(texts, resume, 0, COUNT(resumes));
    tcase_add_test(texts, help_texts);
    tcase_add_test(texts, unknown_help);
    tcase_add_test(texts, every_key_misspelt);
    tcase_add_test(texts, nearest);
    suite_add_tcase(suite, texts);
    TCase *files = tcase_create("files");
    tcase_add_checked_fixture(files, enter_directory, leave_directory);
    tcase_add_test(files, includes_and_order);
    tcase_add_test(files, missing_files);
    suite_add_tcase(suite, files);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
