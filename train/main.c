/* main.c - picks the subcommand. `trident CONFIG` alone trains. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/check.h"
#include "train/commands.h"
#include "train/config.h"

#define TRIDENT_VERSION "0.1.0"

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
    {"selftest", command_selftest,
     "selftest CONFIG                              proof that the layout computes the same"},
    {"help", command_help, "help [section | section.key | COMMAND]       every setting, with unit, default and bounds"},
};
enum { LIBRARIES_S = 10 }; /* more than libraries take to begin */
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static int usage(FILE *out, int status) {
    fprintf(out, "Trident pretrains language models on a data x pipeline x tensor grid of processes.\n\n");
    for (int i = 0; i < N_COMMANDS; i++) fprintf(out, "  trident %s\n", commands[i].summary);
    fprintf(out, "\n`trident CONFIG` alone trains. `trident COMMAND --help` lists a command's options; "
                 "`trident --version` says what this is.\n");
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

/* `trident help tokenize` is `trident tokenize --help`; train is a section of the config as well. */
static int help(int argc, char **argv) {
    char *options[] = {"--help", NULL};
    for (int i = 0; argc == 1 && i < N_COMMANDS; i++) {
        if (strcmp(argv[0], commands[i].name) != 0 || commands[i].run == command_help) continue;
        if (commands[i].run == command_train) {
            command_help(argc, argv);
            printf("\n");
        }
        return commands[i].run(1, options);
    }
    return command_help(argc, argv);
}

static int run_command(int argc, char **argv) {
    if (argc < 2) return usage(stderr, EXIT_CONFIG);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) return usage(stdout, EXIT_DONE);
    if (strcmp(argv[1], "--version") == 0) {
        printf("trident %s (cpu)\n", TRIDENT_VERSION);
        return EXIT_DONE;
    }
    if (strncmp(argv[1], "--set", 5) == 0 || strcmp(argv[1], "--print-config") == 0) {
        return command_train(argc - 1, argv + 1);
    }
    if (strcmp(argv[1], "help") == 0) return help(argc - 2, argv + 2);
    for (int i = 0; i < N_COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 2, argv + 2);
    }
    if (access(argv[1], R_OK) == 0 || strstr(argv[1], ".ini")) return command_train(argc - 1, argv + 1);
    return unknown_command(argv[1]);
}

/* A file opened in the place of a closed standard output would be taken for it. What is put there refuses writes. */
static void fill_standard_descriptors(void) {
    for (int fd = 0; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDONLY) != fd) _exit(EXIT_LAUNCH);
    }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/* OpenBLAS takes address space when it is loaded, and tries again without end where a limit refuses it. */
static void say_what_hangs(int signal_number) {
    static const char text[] =
        "error: the BLAS library cannot start within this limit of address space (ulimit -v): it "
        "needs about 150 MB a core. Raise the limit, or bound memory with a control group\n";
    (void)signal_number;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(EXIT_INTERNAL);
    _exit(EXIT_LAUNCH);
}

static void before_libraries(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
    signal(SIGALRM, say_what_hangs);
    alarm(LIBRARIES_S);
}

/* Called before the libraries' own beginnings. */
__attribute__((section(".preinit_array"), used)) static void (*const first)(void) = before_libraries;
#endif

int main(int argc, char **argv) {
    alarm(0); /* all libraries have begun */
    fill_standard_descriptors();
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is an error of write(2), with the file's name */
    const int status = run_command(argc, argv);
    /* What was asked for is not there where it could not be printed (a full disk, say). */
    if (fflush(stdout) == 0 && !ferror(stdout)) return status;
    fprintf(stderr, "error: cannot write to standard output: %s\n", strerror(errno));
    return status == EXIT_DONE ? EXIT_DATA : status;
}
