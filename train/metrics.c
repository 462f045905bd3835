/* metrics.c - the live line, metrics.jsonl and TensorBoard scalars of a run.
 * In: one row a step. Out: a line on standard error, a line of JSON, an event.
 * Invariants: a line of metrics.jsonl is written with one write(2); numbers read back to the same
 * double; a log that cannot be written is said once and does not end the run. */
#include "train/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "train/event_file.h"

struct Metrics {
    int json_fd, event_fd; /* -1: not written */
    int64_t log_every, first_step;
    bool tty, line_open; /* line_open: a live line stands on the terminal */
    double smoothed_ms;  /* of recent steps, for the time left */
};

/* Keeps the rows up to first_step of an existing file, which a resumed run continues. */
static int cut_back(const char *path, int64_t first_step, Error *err) {
    size_t bytes;
    if (access(path, F_OK) != 0) return 0;
    char *text = file_read(path, &bytes, (size_t)1 << 40, err, EXIT_DATA);
    if (!text) return -1;
    char *keep = text;
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        const char *step = strstr(line, "\"step\": ");
        if (step && step < end && strtoll(step + 8, NULL, 10) <= first_step) {
            memmove(keep, line, (size_t)(end + 1 - line));
            keep += end + 1 - line;
        }
    }
    int rc = 0;
    if ((size_t)(keep - text) != bytes) {
        rc = file_write_atomic(path, text, (size_t)(keep - text), err, EXIT_DATA);
    }
    free(text);
    return rc;
}

/* A new run in the place of an earlier one: its rows stay, as metrics.N.jsonl. */
static int set_aside(const char *dir, const char *path, Error *err) {
    struct stat facts;
    if (stat(path, &facts) != 0 || !S_ISREG(facts.st_mode) || facts.st_size == 0) return 0;
    char *kept = NULL;
    for (int n = 1; !kept || access(kept, F_OK) == 0; n++) {
        free(kept);
        kept = xasprintf("%s/metrics.%d.jsonl", dir, n);
    }
    int rc = 0;
    if (rename(path, kept) != 0) {
        rc = error_set(err, EXIT_DATA, "%s: cannot rename to %s: %s", path, kept, strerror(errno));
    } else {
        log_info(LOG_TRAIN, "%s is of an earlier run; kept as %s", path, kept);
    }
    free(kept);
    return rc;
}

Metrics *metrics_open(const char *dir, int64_t first_step, int64_t log_every, bool tensorboard, Error *err) {
    if (directory_make(dir, err, EXIT_DATA) != 0) return NULL;
    char *path = xasprintf("%s/metrics.jsonl", dir);
    Metrics *m = xcalloc(1, sizeof *m);
    *m = (Metrics){
        .json_fd = -1, .event_fd = -1, .log_every = log_every, .first_step = first_step, .tty = isatty(STDERR_FILENO)};
    bool good = (first_step == 0 ? set_aside(dir, path, err) : cut_back(path, first_step, err)) == 0;
    if (good) {
        m->json_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        good = m->json_fd >= 0;
        if (!good) error_set(err, EXIT_DATA, "%s: cannot open: %s", path, strerror(errno));
    }
    if (good && tensorboard) {
        m->event_fd = event_file_open(dir, err);
        good = m->event_fd >= 0;
    }
    free(path);
    if (good) return m;
    metrics_close(m);
    return NULL;
}

/* JSON has no NaN or infinity: those are written as text. */
static int format_number(char *to, size_t room, const char *key, double value) {
    if (isfinite(value)) return snprintf(to, room, ", \"%s\": %.17g", key, value);
    return snprintf(to, room, ", \"%s\": \"%s\"", key, isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
}

static void write_json(Metrics *m, const StepMetrics *r) {
    char line[1024];
    const struct {
        const char *key;
        double value;
    } numbers[] = {
        {"loss", r->loss},       {"grad_norm", r->grad_norm},       {"lr", r->lr},  {"tokens_per_s", r->tokens_per_s},
        {"step_ms", r->step_ms}, {"data_wait_ms", r->data_wait_ms}, {"mfu", r->mfu}};
    int n = snprintf(line, sizeof line, "{\"step\": %" PRId64, r->step);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        n += format_number(line + n, sizeof line - (size_t)n, numbers[i].key, numbers[i].value);
    }
    n += snprintf(line + n, sizeof line - (size_t)n,
                  ", \"tokens\": %" PRId64 ", \"mem_bytes\": %" PRId64 ", \"skipped\": %" PRId64, r->tokens,
                  r->mem_bytes, r->skipped);
    if (!isnan(r->valid_loss)) n += format_number(line + n, sizeof line - (size_t)n, "valid_loss", r->valid_loss);
    n += snprintf(line + n, sizeof line - (size_t)n, "}\n");
    Error err;
    if (m->json_fd >= 0 && file_write_all(m->json_fd, "metrics.jsonl", line, (size_t)n, &err, EXIT_DATA) != 0) {
        log_warn(LOG_TRAIN, "%s; no further rows are written", err.message);
        close(m->json_fd);
        m->json_fd = -1;
    }
}

static void write_event(Metrics *m, const StepMetrics *r) {
    if (m->event_fd < 0) return;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    EventScalar scalars[5] = {{"train/loss", r->loss},
                              {"train/grad_norm", r->grad_norm},
                              {"train/lr", r->lr},
                              {"train/tokens_per_s", r->tokens_per_s},
                              {"valid/loss", r->valid_loss}};
    Error err;
    const int n = isnan(r->valid_loss) ? 4 : 5;
    if (event_file_write(m->event_fd, r->step, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec, scalars, n, &err)) {
        log_warn(LOG_TRAIN, "%s; no further events are written", err.message);
        close(m->event_fd);
        m->event_fd = -1;
    }
}

static void format_duration(char text[32], double seconds) {
    if (seconds < 90) {
        snprintf(text, 32, "%.0fs", seconds);
    } else if (seconds < 5400) {
        snprintf(text, 32, "%.1fm", seconds / 60);
    } else if (seconds < 48 * 3600.0) {
        snprintf(text, 32, "%.1fh", seconds / 3600);
    } else {
        snprintf(text, 32, "%.1fd", seconds / 86400);
    }
}

static int terminal_columns(void) {
    struct winsize size;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 20) return 80;
    return size.ws_col;
}

static void clear_line(Metrics *m) {
    if (m->line_open) fputs("\r\033[K", stderr);
    m->line_open = false;
}

static void show(Metrics *m, const StepMetrics *r) {
    char line[512], left[32], mfu[32] = "";
    const bool ends = r->step == r->total_steps;
    if (!m->tty && !ends && r->step != m->first_step + 1 && r->step % m->log_every != 0 && isnan(r->valid_loss)) {
        return;
    }
    format_duration(left, (double)(r->total_steps - r->step) * m->smoothed_ms * 1e-3);
    if (!isnan(r->mfu)) snprintf(mfu, sizeof mfu, " mfu %.1f%%", 100.0 * r->mfu);
    int n = snprintf(
        line, sizeof line, "step %" PRId64 "/%" PRId64 " loss %.4f norm %.3g lr %.3g %.0f tok/s left %s%s mem %.1f MB",
        r->step, r->total_steps, r->loss, r->grad_norm, r->lr, r->tokens_per_s, left, mfu, (double)r->mem_bytes * 1e-6);
    if (!isnan(r->valid_loss)) snprintf(line + n, sizeof line - (size_t)n, " valid %.4f", r->valid_loss);
    clear_line(m);
    if (!m->tty || !isnan(r->valid_loss) || ends) {
        fprintf(stderr, "%s\n", line);
        return;
    }
    fprintf(stderr, "%.*s", terminal_columns() - 1, line);
    m->line_open = true;
}

void metrics_step(Metrics *m, const StepMetrics *row) {
    m->smoothed_ms = m->smoothed_ms == 0.0 ? row->step_ms : 0.9 * m->smoothed_ms + 0.1 * row->step_ms;
    write_json(m, row);
    write_event(m, row);
    show(m, row);
}

void metrics_note(Metrics *m, const char *format, ...) {
    va_list args;
    clear_line(m);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

void metrics_close(Metrics *m) {
    clear_line(m);
    if (m->json_fd >= 0) close(m->json_fd);
    if (m->event_fd >= 0) close(m->event_fd);
    free(m);
}
