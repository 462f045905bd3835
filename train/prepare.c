/* prepare.c - what every command does before it touches devices or peers: config, world, data.
 * In: command line. Out: checked config and opened data.
 * Invariant: nothing but the named files has been touched when an error is reported. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/check.h"
#include "base/file.h"
#include "data/tokenizer.h"
#include "train/run.h"

static void stop_on(int errors) {
    if (errors) {
        fprintf(stderr, "%d error%s in the configuration; nothing was started\n", errors, errors == 1 ? "" : "s");
        exit(EXIT_CONFIG);
    }
}

/* key: the setting that named the data. */
static void stop_on_data(const char *key, const Error *err) {
    const bool setting = err->status == EXIT_CONFIG;
    fprintf(stderr, "error: %s%s%s\n", setting ? key : "", setting ? ": " : "", err->message);
    exit(err->status);
}

static int64_t tokenizer_size(const char *spec) {
    if (!spec || !spec[0]) return 0;
    Error err;
    Tokenizer *tokenizer = tokenizer_open(spec, &err);
    if (!tokenizer) stop_on_data("data.tokenizer", &err);
    int64_t vocab = tokenizer_vocab(tokenizer);
    tokenizer_close(tokenizer);
    return vocab;
}

static DataSource *open_source(const Config *c, const char *key, const char *spec, bool shuffle) {
    Error err;
    const DataOptions options = {.spec = spec,
                                 .seq_len = c->seq_len,
                                 .vocab = c->vocab,
                                 .seed = c->seed,
                                 .mask_documents = c->mask_documents,
                                 .shuffle = shuffle};
    DataSource *source = data_open(&options, &err);
    if (!source) stop_on_data(key, &err);
    return source;
}

void prepare(Prepared *p, const char *path, char *const *overrides, int n_overrides, bool with_train, bool with_valid) {
    memset(p, 0, sizeof *p);
    Config *c = &p->config;
    stop_on(config_load(c, path, overrides, n_overrides, stderr));
    stop_on(config_resolve_world(c, launch_detect_world_size(), stderr));
    stop_on(config_resolve_model(c, tokenizer_size(c->tokenizer), stderr));
    if (with_train && !c->train_data[0]) {
        fprintf(stderr, "%s: data.train is not set: name the token files to train on\n", c->path);
        stop_on(1);
    }
    if (with_train) p->train = open_source(c, "data.train", c->train_data, true);
    if (with_valid && c->valid_data[0]) p->valid = open_source(c, "data.valid", c->valid_data, false);
}

void prepared_free(Prepared *p) {
    if (p->train) data_close(p->train);
    if (p->valid) data_close(p->valid);
    config_free(&p->config);
}

/* Of this executable's bytes: ranks of two builds may round differently. 0 where the system does not show them. */
static uint64_t program_hash(void) {
    Error err;
    size_t bytes;
    char *program = file_read("/proc/self/exe", &bytes, (size_t)1 << 30, &err, EXIT_LAUNCH);
    if (!program) return 0;
    const uint64_t hash = XXH3_64bits(program, bytes);
    free(program);
    return hash;
}

Launch *ranks_start(const Config *config) {
    char *text = config_text(config);
    const LaunchOptions options = {.world_size = config->data * config->pipeline * config->tensor,
                                   .timeout_s = config->timeout_s,
                                   .config_text = text,
                                   .program_hash = program_hash()};
    Launch *launch = launch_start(&options);
    free(text);
    if (launch_size(launch) != options.world_size) {
        die(EXIT_LAUNCH, "the launcher started %d ranks, but data x pipeline x tensor = %d x %d x %d = %d",
            launch_size(launch), config->data, config->pipeline, config->tensor, options.world_size);
    }
    launch_fence(launch, "start");
    launch_watch_start(launch);
    return launch;
}

int rank_threads(const Config *config, Launch *launch) {
    const LaunchCores cores = launch_cores(launch);
    return config->threads ? config->threads : (int)max_i64(1, cores.allowed / cores.sharers);
}
