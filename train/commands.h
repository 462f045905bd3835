/* commands.h - the subcommands, each given the words behind its name; they return the exit status. */
#ifndef TRIDENT_TRAIN_COMMANDS_H
#define TRIDENT_TRAIN_COMMANDS_H

#include <stdbool.h>
#include <stdint.h>

int command_train(int argc, char **argv);
int command_eval(int argc, char **argv);
int command_selftest(int argc, char **argv);
int command_generate(int argc, char **argv);
int command_inspect(int argc, char **argv);
int command_tokenize(int argc, char **argv);
int command_help(int argc, char **argv);

/* ---- words of a command line ---- */
typedef struct {
    const char *name;  /* "--tokens" */
    const char *value; /* text shown in the usage, NULL: a switch */
    const char *help;
    bool repeats;
} Option;

typedef struct {
    const char *usage; /* one line: "trident generate --checkpoint DIR [options]" */
    const Option *options;
    int n_options;
    int argc;
    char **argv;
} CommandLine;

/* Checks every word against the options (unknown ones with the nearest known name: exit 2), answers --help by
 * printing the usage (exit 0), and collects the words that are no options into *words (caller frees). Returns
 * how many. */
int command_words(const CommandLine *line, char ***words);
/* Value of an option ("" for a switch), NULL where it is not given. The last one counts. */
const char *option_value(const CommandLine *line, const char *name);
/* All values of a repeated option; caller frees the list. */
int option_values(const CommandLine *line, const char *name, char ***values);
/* A number within [min, max], or fallback; else exit 2 with option, value and bounds. */
int64_t option_int(const CommandLine *line, const char *name, int64_t fallback, int64_t min, int64_t max);
double option_double(const CommandLine *line, const char *name, double fallback, double min, double max);
/* Prints the message and the usage, exits with EXIT_CONFIG. */
void usage_error(const CommandLine *line, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));

#endif
