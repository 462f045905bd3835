/* commands.c - the subcommands that are a few lines over other modules: train, eval, inspect, tokenize,
 * help. In: words of the command line. Out: exit status. */
#include "train/commands.h"

#include <glob.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/cores.h"
#include "base/log.h"
#include "data/tokenizer.h"
#include "kernels/kernels.h"
#include "train/checkpoint.h"
#include "train/evaluate.h"
#include "train/preflight.h"
#include "train/resume.h"
#include "train/run.h"

#define COMMAND_LINE(usage_text, option_table)                                                                 \
    {                                                                                                          \
        .usage = usage_text, .options = option_table, .n_options = sizeof option_table / sizeof *option_table, \
        .argc = argc, .argv = argv                                                                             \
    }

/* The one word that a command needs. */
static const char *single_word(const CommandLine *line, const char *what) {
    char **words;
    int n = command_words(line, &words);
    if (n == 0) usage_error(line, "%s is missing", what);
    if (n > 1) {
        usage_error(line, "%d words (%s, %s%s) where one is expected: %s", n, words[0], words[1], n > 2 ? ", ..." : "",
                    what);
    }
    const char *word = words[0];
    free(words);
    return word;
}

static const Option train_options[] = {
    {"--set", "section.key=value", "override a setting; may be repeated", true},
    {"--print-config", NULL, "print the resolved settings with the origin of each, and stop", false},
};

int command_train(int argc, char **argv) {
    const CommandLine line = COMMAND_LINE("trident train CONFIG [--set section.key=value]... [--print-config]",
                                          train_options);
    const char *path = single_word(&line, "the config file");
    char **overrides;
    int n = option_values(&line, "--set", &overrides);
    const bool print_only = option_value(&line, "--print-config") != NULL;
    Prepared prepared;
    prepare(&prepared, path, overrides, n, !print_only, !print_only);
    if (print_only) {
        config_print_origins(&prepared.config, stdout);
        return EXIT_DONE;
    }
    Launch *launch = ranks_start(&prepared.config);
    int status = run_training(&prepared, launch);
    prepared_free(&prepared);
    free(overrides);
    return status;
}

static const Option eval_options[] = {
    {"--set", "section.key=value", "override a setting; may be repeated", true},
    {"--data", "PREFIX", "token file to evaluate on (default: data.valid)", false},
    {"--checkpoint", "DIR", "checkpoint (default: the newest in checkpoint.dir)", false},
};

/* Loads the weights that eval wants. */
static int64_t load_weights(Trainer *t, const char *dir) {
    Error err = {0};
    char *step_dir = resume_find(t, dir, "");
    CheckpointState state;
    trainer_require(t, checkpoint_read_state(step_dir, &state, &err), &err);
    resume_check_model(t, &state, step_dir);
    int n;
    CheckpointPiece *pieces = trainer_pieces(t, false, &n);
    trainer_require(t, checkpoint_load(step_dir, pieces, n, &err), &err);
    trainer_pieces_free(pieces, n);
    int64_t step = state.step;
    checkpoint_state_free(&state);
    free(step_dir);
    return step;
}

static int run_eval(Prepared *p, Launch *launch, const char *checkpoint) {
    const Config *c = &p->config;
    kernels_init(rank_threads(c, launch));
    const CommOptions options = {.timeout_s = c->timeout_s};
    Comm *comm = comm_create(launch, &options);
    Trainer trainer;
    trainer_create(&trainer, c, launch, comm, false, false);
    Error err;
    trainer_require(&trainer, preflight_data(&trainer, p->valid, "data.valid", c->valid_data, &err), &err);
    const int64_t step = load_weights(&trainer, checkpoint), windows = source_windows(p->valid);
    if (trainer.grid.rank == 0) warn_of_repeats(p->valid, windows);
    const Evaluation e = evaluate_windows(&trainer, p->valid, windows, NULL);
    if (e.tokens == 0) {
        error_set(&err, EXIT_DATA,
                  "data.valid = %s: no token of it has another of its document behind it: with mask_documents "
                  "there is nothing to predict",
                  c->valid_data);
        launch_die_together(&err);
    }
    if (trainer.grid.rank == 0) {
        printf("step %" PRId64 ": %" PRId64 " windows, %" PRId64 " tokens: loss %.9g nats a token, perplexity %.6g\n",
               step, windows, e.tokens, e.loss, exp(e.loss));
        fflush(stdout);
    }
    launch_finish(launch);
    trainer_destroy(&trainer);
    comm_destroy(comm);
    return isfinite(e.loss) ? EXIT_DONE : EXIT_NUMBERS;
}

int command_eval(int argc, char **argv) {
    const CommandLine line = COMMAND_LINE(
        "trident eval CONFIG [--data PREFIX] [--checkpoint DIR] [--set section.key=value]...", eval_options);
    const char *path = single_word(&line, "the config file");
    char **overrides, *data = NULL;
    int n = option_values(&line, "--set", &overrides);
    if (option_value(&line, "--data")) {
        data = xasprintf("data.valid=%s", option_value(&line, "--data"));
        overrides[n++] = data;
    }
    Prepared prepared;
    prepare(&prepared, path, overrides, n, false, true);
    if (!prepared.valid) usage_error(&line, "no data to evaluate on: set data.valid, or give --data PREFIX");
    const char *checkpoint = option_value(&line, "--checkpoint");
    Launch *launch = ranks_start(&prepared.config);
    int status = run_eval(&prepared, launch, checkpoint ? checkpoint : prepared.config.checkpoint_dir);
    prepared_free(&prepared);
    free(overrides);
    free(data);
    return status;
}

static const Option inspect_options[] = {
    {"--verify", NULL, "read everything and check the sums", false},
};

/* Reads all tokens: the largest one. */
static int print_largest_token(const TokenFile *file, Error *err) {
    int32_t tokens[4096], largest = -1;
    for (int64_t first = 0; first < token_file_tokens(file); first += 4096) {
        const int64_t n = min_i64(4096, token_file_tokens(file) - first);
        if (token_file_read(file, first, n, INT64_MAX, tokens, NULL, err) != 0) return -1;
        for (int64_t i = 0; i < n; i++) largest = tokens[i] > largest ? tokens[i] : largest;
    }
    printf("verified: every token can be read; the largest is %" PRId32 "\n", largest);
    return 0;
}

static int inspect_tokens(const char *path, bool verify, Error *err) {
    TokenFile *file = token_file_open(path, err);
    if (!file) return -1;
    int32_t tokens[16];
    const int64_t n = min_i64(16, token_file_tokens(file));
    int rc = token_file_read(file, 0, n, INT64_MAX, tokens, NULL, err);
    const int64_t documents = rc == 0 ? token_file_documents(file) : 0;
    if (documents < 0) rc = error_set(err, EXIT_DATA, "%s: cannot be read to its end", path);
    if (rc == 0) {
        printf("%s: %s, %s, %" PRId64 " tokens in %" PRId64 " documents\nfirst tokens:", path, token_file_format(file),
               token_file_type(file), token_file_tokens(file), documents);
        for (int64_t i = 0; i < n; i++) printf(" %" PRId32, tokens[i]);
        printf("\n");
        if (verify) rc = print_largest_token(file, err);
    }
    token_file_close(file);
    return rc;
}

/* A directory without a checkpoint: says which of its files can be looked at, where there is one. */
static void name_token_file(const char *directory, Error *err) {
    glob_t found;
    char *pattern = xasprintf("%s/*.bin", directory);
    if (glob(pattern, 0, NULL, &found) == 0) {
        error_set(err, err->status, "%s; for the tokens in it: trident inspect %s", err->message, found.gl_pathv[0]);
        globfree(&found);
    }
    free(pattern);
}

/* A file that is no token file: says what it belongs to, where that is a checkpoint. */
static void name_checkpoint(const char *file, Error *err) {
    char *directory = xstrdup(file), *slash = strrchr(directory, '/');
    if (slash) *slash = 0;
    char *manifest = xasprintf("%s/manifest.json", slash ? directory : ".");
    if (access(manifest, R_OK) == 0) {
        error_set(err, err->status, "%s is a file of a checkpoint, which is looked at as a whole: trident inspect %s",
                  file, slash ? directory : ".");
    }
    free(manifest);
    free(directory);
}

int command_inspect(int argc, char **argv) {
    const CommandLine line = COMMAND_LINE("trident inspect PATH [--verify]", inspect_options);
    const char *path = single_word(&line, "a checkpoint directory or a token file");
    const bool verify = option_value(&line, "--verify") != NULL;
    struct stat facts;
    Error err;
    int rc;
    if (stat(path, &facts) == 0 && S_ISDIR(facts.st_mode)) {
        rc = checkpoint_inspect(path, verify, stdout, &err);
        if (rc != 0) name_token_file(path, &err);
    } else {
        rc = inspect_tokens(path, verify, &err);
        if (rc != 0) name_checkpoint(path, &err);
    }
    if (rc == 0) return EXIT_DONE;
    fprintf(stderr, "error: %s\n", err.message);
    return err.status;
}

static const Option tokenize_options[] = {
    {"--tokenizer", "bytes|DIR", "bytes, or a directory with vocab.json and merges.txt", false},
    {"--out", "PREFIX", "writes PREFIX.bin and PREFIX.idx", false},
    {"--document-line", "TEXT", "a line that is exactly this separates documents", false},
    {"--threads", "N", "default: all cores that it may run on", false},
};

int command_tokenize(int argc, char **argv) {
    const CommandLine line = COMMAND_LINE("trident tokenize --tokenizer bytes|DIR --out PREFIX TEXT...",
                                          tokenize_options);
    char **words;
    TokenizeOptions options = {.n_inputs = command_words(&line, &words)};
    options.inputs = words;
    options.tokenizer = option_value(&line, "--tokenizer");
    options.out_prefix = option_value(&line, "--out");
    options.document_line = option_value(&line, "--document-line");
    options.threads = (int)option_int(&line, "--threads", cores_allowed(), 1, 1024);
    if (!options.tokenizer) usage_error(&line, "--tokenizer is missing");
    if (!options.out_prefix) usage_error(&line, "--out is missing");
    const size_t length = strlen(options.out_prefix);
    if (length == 0 || options.out_prefix[length - 1] == '/') {
        usage_error(&line, "--out %s: the name of PREFIX.bin and PREFIX.idx is expected", options.out_prefix);
    }
    if (!options.n_inputs) usage_error(&line, "no text file is given");
    Error err;
    int rc = tokenize_files(&options, &err);
    free(words);
    if (rc == 0) return EXIT_DONE;
    fprintf(stderr, "error: %s\n", err.message);
    return err.status;
}

int command_help(int argc, char **argv) {
    if (argc > 1) {
        fprintf(stderr, "error: help takes one topic, %d are given\n", argc);
        return EXIT_CONFIG;
    }
    return config_help(argc ? argv[0] : NULL, stdout, stderr) == 0 ? EXIT_DONE : EXIT_CONFIG;
}
