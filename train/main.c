/* main.c - picks the subcommand. `trident CONFIG` alone trains. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "train/commands.h"
#include "train/config.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"train", command_train, "train CONFIG [--set section.key=value]...   train, or go on with a stopped run"},
    {"eval", command_eval, "eval CONFIG [--data PREFIX]                  loss and perplexity on held-out text"},
    {"generate", command_generate, "generate --checkpoint DIR --prompt TEXT      text from a trained model"},
    {"tokenize", command_tokenize, "tokenize --tokenizer T --out PREFIX TEXT...  text to a token file"},
    {"inspect", command_inspect, "inspect PATH                                 what a checkpoint or token file holds"},
    {"selftest", command_selftest, "selftest CONFIG                              proof that the layout computes the same"},
    {"help", command_help, "help [section | section.key]                 every setting, with unit, default and bounds"},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static int usage(FILE *out, int status) {
    fprintf(out, "Trident pretrains language models on a data x pipeline x tensor grid of processes.\n\n");
    for (int i = 0; i < N_COMMANDS; i++) fprintf(out, "  trident %s\n", commands[i].summary);
    fprintf(out, "\n`trident CONFIG` alone trains. `trident COMMAND --help` lists a command's options.\n");
    return status;
}

static int unknown_command(const char *word) {
    const char *names[N_COMMANDS];
    for (int i = 0; i < N_COMMANDS; i++) names[i] = commands[i].name;
    const char *near = nearest_name(word, names, N_COMMANDS);
    fprintf(stderr, "error: %s is neither a command nor a readable config file%s%s%s\n\n", word,
            near ? "; did you mean `trident " : "", near ? near : "", near ? "`?" : "");
    return usage(stderr, EXIT_CONFIG);
}

int main(int argc, char **argv) {
    if (argc < 2) return usage(stderr, EXIT_CONFIG);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) return usage(stdout, EXIT_DONE);
    for (int i = 0; i < N_COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 2, argv + 2);
    }
    if (access(argv[1], R_OK) == 0 || strstr(argv[1], ".ini")) return command_train(argc - 1, argv + 1);
    return unknown_command(argv[1]);
}
