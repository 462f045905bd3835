/* log.c - the one logger, and the clock. A line is written with one write(2), so that the lines of
 * several processes on one terminal or file do not tear. */
#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static struct {
    int rank;
    bool all;
    char coordinates[64];
} state;

static const char *const area_names[] = {
    [LOG_MAIN] = "main", [LOG_LAUNCH] = "launch",   [LOG_COMM] = "comm",  [LOG_PIPE] = "pipe",
    [LOG_DATA] = "data", [LOG_CKPT] = "checkpoint", [LOG_MEM] = "memory", [LOG_TRAIN] = "train",
};

double clock_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void sleep_s(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) continue;
}

/* When the program (that of the parent, in a rank that it forked) began, before main. */
static double start_s;

__attribute__((constructor)) static void note_start(void) { start_s = clock_s(); }

void log_set_rank(int rank, const char *coordinates) {
    state.rank = rank;
    snprintf(state.coordinates, sizeof state.coordinates, "%s", coordinates);
}

const char *log_coordinates(void) { return state.coordinates; }

void log_set_all_ranks(bool all) { state.all = all; }

static void log_line(LogArea area, const char *level, const char *format, va_list args) {
    char line[2048];
    int n = snprintf(line, sizeof line, "%8.3fs %s%s%s: %s", clock_s() - start_s, state.coordinates,
                     state.coordinates[0] ? " " : "", area_names[area], level);
    int m = vsnprintf(line + n, sizeof line - (size_t)n, format, args);
    size_t length = (size_t)(n + m) < sizeof line - 1 ? (size_t)(n + m) : sizeof line - 2;
    line[length++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, length);
    (void)written; /* nowhere left to complain */
}

#define LOG_BODY(level)                  \
    va_list args;                        \
    va_start(args, format);              \
    log_line(area, level, format, args); \
    va_end(args)

void log_info(LogArea area, const char *format, ...) {
    if (state.rank != 0 && !state.all) return;
    LOG_BODY("");
}

void log_warn(LogArea area, const char *format, ...) { LOG_BODY("warning: "); }

void log_error(LogArea area, const char *format, ...) { LOG_BODY("error: "); }
