/* test_metrics.c - metrics.jsonl reads back to the same numbers and is cut back on resume; event files are TFRecords
 * of the events that were written, read here by a reader of its own; plain lines where there is no terminal. */
#include <check.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/rng.h"
#include "train/event_file.h"
#include "train/metrics.h"

static char directory[64];

/* What the run shows goes to the file "shown". */
static void enter_directory(void) {
    strcpy(directory, "/tmp/test_metrics_XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(directory));
    ck_assert_int_eq(chdir(directory), 0);
    ck_assert_ptr_nonnull(freopen("shown", "w", stderr));
}

static void leave_directory(void) {
    char command[96];
    ck_assert_int_eq(chdir("/"), 0);
    snprintf(command, sizeof command, "rm -rf %s", directory);
    ck_assert_int_eq(system(command), 0);
}

static char *slurp(const char *path, size_t *bytes) {
    struct stat facts;
    ck_assert_int_eq(stat(path, &facts), 0);
    char *text = xcalloc(1, (uint64_t)facts.st_size + 1);
    FILE *file = fopen(path, "rb");
    ck_assert_ptr_nonnull(file);
    *bytes = fread(text, 1, (size_t)facts.st_size, file);
    fclose(file);
    return text;
}

static Metrics *open_metrics(int64_t first_step, bool tensorboard) {
    Error err = {0};
    Metrics *m = metrics_open("runs/a/log", first_step, 5, tensorboard, &err);
    ck_assert_msg(m != NULL, "%s", err.message);
    return m;
}

static StepMetrics row_of(int64_t step, uint64_t seed) {
    return (StepMetrics){.step = step,
                         .total_steps = 12,
                         .loss = rng_normal(seed, 0, (uint64_t)step),
                         .grad_norm = rng_uniform(seed, 1, (uint64_t)step),
                         .lr = 3e-4 / 7.0,
                         .tokens = 1024 * step,
                         .tokens_per_s = 12345.678,
                         .step_ms = 8.1,
                         .mfu = 0.25,
                         .mem_bytes = 1 << 20,
                         .valid_loss = NAN};
}

static json_t *read_row(char *line) {
    json_error_t problem;
    json_t *row = json_loads(line, JSON_REJECT_DUPLICATES, &problem);
    ck_assert_msg(row != NULL, "%s: %s", line, problem.text);
    return row;
}

/* Every row of the file; *n of them. */
static json_t **read_rows(int *n) {
    size_t bytes;
    char *text = slurp("runs/a/log/metrics.jsonl", &bytes), *rest = NULL;
    json_t **rows = xcalloc(1000, sizeof *rows);
    ck_assert(bytes == 0 || text[bytes - 1] == '\n');
    *n = 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        rows[(*n)++] = read_row(line);
    free(text);
    return rows;
}

static void free_rows(json_t **rows, int n) {
    for (int i = 0; i < n; i++) json_decref(rows[i]);
    free(rows);
}

static double number(const json_t *row, const char *key) {
    const json_t *value = json_object_get(row, key);
    ck_assert_msg(json_is_number(value), "%s", key);
    return json_number_value(value);
}

static void check_steps(const int64_t *steps, int count) {
    int n;
    json_t **rows = read_rows(&n);
    ck_assert_int_eq(n, count);
    for (int i = 0; i < n; i++) ck_assert_int_eq(json_integer_value(json_object_get(rows[i], "step")), steps[i]);
    free_rows(rows, n);
}

/* ---- metrics.jsonl ---- */

/* Doubles of random bits: all magnitudes, subnormals too; and fp32 losses, which must come back as the same float. */
START_TEST(numbers_round_trip) {
    enum { ROWS = 500 };
    double losses[ROWS];
    Metrics *m = open_metrics(0, false);
    for (int i = 0; i < ROWS; i++) {
        uint64_t bits = rng_bits(77, 3, (uint64_t)i);
        if (i % 2) {
            const uint32_t half = (uint32_t)bits;
            float value;
            memcpy(&value, &half, sizeof value);
            losses[i] = value;
        } else {
            memcpy(&losses[i], &bits, sizeof bits);
        }
        if (i == 10) losses[i] = 5e-324;
        if (i == 12) losses[i] = 1.7976931348623157e308;
        if (i == 14) losses[i] = 0.1;
        if (!isfinite(losses[i])) losses[i] = 1.0 / 3.0;
        StepMetrics row = row_of(i + 1, 1);
        row.loss = losses[i];
        row.grad_norm = losses[i];
        metrics_step(m, &row);
    }
    metrics_close(m);
    int n;
    json_t **rows = read_rows(&n);
    ck_assert_int_eq(n, ROWS);
    for (int i = 0; i < ROWS; i++) {
        const double loss = number(rows[i], "loss");
        ck_assert_msg(memcmp(&loss, &losses[i], sizeof loss) == 0, "%.17g, written %.17g", loss, losses[i]);
        ck_assert(number(rows[i], "grad_norm") == losses[i]);
        ck_assert(number(rows[i], "lr") == 3e-4 / 7.0);
        ck_assert_int_eq(json_integer_value(json_object_get(rows[i], "tokens")), 1024 * (i + 1));
        ck_assert_int_eq(json_integer_value(json_object_get(rows[i], "mem_bytes")), 1 << 20);
        ck_assert(number(rows[i], "mfu") == 0.25 && number(rows[i], "skipped") == 0);
        ck_assert_ptr_null(json_object_get(rows[i], "valid_loss"));
    }
    free_rows(rows, n);
}
END_TEST

/* JSON has no such numbers; a reader still gets a line, and a word to look for. */
START_TEST(no_numbers) {
    Metrics *m = open_metrics(0, true);
    StepMetrics row = row_of(1, 1);
    row.loss = NAN;
    row.grad_norm = INFINITY;
    row.tokens_per_s = -INFINITY;
    row.mfu = NAN;
    row.valid_loss = 2.5;
    metrics_step(m, &row);
    metrics_close(m);
    int n;
    json_t **rows = read_rows(&n);
    ck_assert_int_eq(n, 1);
    ck_assert_str_eq(json_string_value(json_object_get(rows[0], "loss")), "nan");
    ck_assert_str_eq(json_string_value(json_object_get(rows[0], "grad_norm")), "inf");
    ck_assert_str_eq(json_string_value(json_object_get(rows[0], "tokens_per_s")), "-inf");
    ck_assert_str_eq(json_string_value(json_object_get(rows[0], "mfu")), "nan");
    ck_assert(number(rows[0], "valid_loss") == 2.5);
    free_rows(rows, n);
}
END_TEST

static void write_steps(int64_t first, int64_t last) {
    Metrics *m = open_metrics(first - 1, false);
    for (int64_t step = first; step <= last; step++) {
        const StepMetrics row = row_of(step, 4);
        metrics_step(m, &row);
    }
    metrics_close(m);
}

START_TEST(cut_back_on_resume) {
    size_t bytes, again;
    write_steps(1, 10);
    char *whole = slurp("runs/a/log/metrics.jsonl", &bytes);
    write_steps(7, 10);
    char *resumed = slurp("runs/a/log/metrics.jsonl", &again);
    ck_assert_uint_eq(bytes, again);
    ck_assert_mem_eq(whole, resumed, bytes); /* the rows of the run that was never stopped */
    free(whole);
    free(resumed);
    Metrics *m = open_metrics(3, false);
    metrics_close(m);
    check_steps((int64_t[]){1, 2, 3}, 3);
    write_steps(9, 9); /* a checkpoint beyond the log: the rows between are not there */
    check_steps((int64_t[]){1, 2, 3, 9}, 4);
    m = open_metrics(0, false); /* a new run in the same place */
    metrics_close(m);
    check_steps(NULL, 0);
}
END_TEST

/* A process that died while it wrote. */
START_TEST(torn_last_line) {
    write_steps(1, 4);
    FILE *file = fopen("runs/a/log/metrics.jsonl", "a");
    fputs("{\"step\": 5, \"loss\": 1.2", file);
    fclose(file);
    write_steps(6, 6);
    check_steps((int64_t[]){1, 2, 3, 4, 6}, 5);
}
END_TEST

START_TEST(refused_directories) {
    Error err = {0};
    FILE *file = fopen("plain", "w");
    fclose(file);
    ck_assert_ptr_null(metrics_open("plain/log", 0, 1, true, &err));
    ck_assert_msg(err.status == EXIT_DATA && strstr(err.message, "plain"), "%s", err.message);
    ck_assert_int_eq(mkdir("taken", 0777), 0);
    ck_assert_int_eq(mkdir("taken/metrics.jsonl", 0777), 0);
    ck_assert_ptr_null(metrics_open("taken", 0, 1, true, &err));
    ck_assert_msg(strstr(err.message, "taken/metrics.jsonl"), "%s", err.message);
}
END_TEST

/* ---- what is shown ---- */

START_TEST(plain_lines) {
    size_t bytes;
    Metrics *m = open_metrics(0, false);
    for (int64_t step = 1; step <= 12; step++) {
        StepMetrics row = row_of(step, 2);
        if (step == 7) row.valid_loss = 1.5;
        metrics_step(m, &row);
        if (step == 8) metrics_note(m, "saved %s", "here");
    }
    metrics_close(m);
    fflush(stderr);
    char *text = slurp("shown", &bytes), *rest = NULL;
    ck_assert_ptr_null(strpbrk(text, "\r\033"));
    static const char *const starts[] = {"step 1/12 loss ", "step 5/12 ",  "step 7/12 ",
                                         "saved here",      "step 10/12 ", "step 12/12 "};
    int n = 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest), n++) {
        ck_assert_int_lt(n, 6);
        ck_assert_msg(strncmp(line, starts[n], strlen(starts[n])) == 0, "%s", line);
        if (n == 2) ck_assert_msg(strstr(line, "valid 1.5000"), "%s", line);
        if (n != 3)
            ck_assert_msg(strstr(line, " tok/s ") && strstr(line, " mfu 25.0%") && strstr(line, " left "), "%s", line);
    }
    ck_assert_int_eq(n, 6);
    free(text);
}
END_TEST

/* ---- event files ---- */

/* CRC-32C by its definition: the remainder of the reflected message, one bit at a time, other than the writer's. */
static uint32_t reference_crc32c(const uint8_t *data, size_t bytes) {
    uint32_t table[256], crc = ~0u;
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++) table[i] = table[i] & 1 ? table[i] >> 1 ^ 0x82F63B78u : table[i] >> 1;
    }
    for (size_t i = 0; i < bytes; i++) crc = crc >> 8 ^ table[(crc ^ data[i]) & 255];
    return ~crc;
}

static uint32_t reference_mask(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u; }

static uint64_t fixed(const uint8_t *from, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)from[i] << 8 * i;
    return value;
}

typedef struct {
    const uint8_t *at, *end;
} Span;

static uint64_t varint(Span *s) {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
        ck_assert(s->at < s->end && shift < 64);
        value |= (uint64_t)(*s->at & 127) << shift;
        if (!(*s->at++ & 128)) return value;
    }
}

static Span nested(Span *s) {
    const uint64_t length = varint(s);
    ck_assert(length <= (uint64_t)(s->end - s->at));
    const Span inner = {s->at, s->at + length};
    s->at += length;
    return inner;
}

typedef struct {
    double wall_time_s;
    int64_t step;
    char version[32];
    int n;
    char tags[8][64];
    float values[8];
} Event;

static void copy_text(char *to, size_t room, Span text) {
    const size_t n = (size_t)(text.end - text.at);
    ck_assert_uint_lt(n, room);
    memcpy(to, text.at, n);
    to[n] = 0;
}

static void read_scalar(Span value, Event *event) {
    ck_assert_int_lt(event->n, 8);
    while (value.at < value.end) {
        const uint64_t tag = varint(&value);
        if (tag == (1 << 3 | 2)) {
            copy_text(event->tags[event->n], 64, nested(&value));
        } else {
            ck_assert_uint_eq(tag, 2 << 3 | 5);
            const uint32_t bits = (uint32_t)fixed(value.at, 4);
            memcpy(&event->values[event->n], &bits, 4);
            value.at += 4;
        }
    }
    event->n++;
}

static Event read_event(Span s) {
    Event event = {0};
    while (s.at < s.end) {
        const uint64_t tag = varint(&s);
        if (tag == (1 << 3 | 1)) {
            const uint64_t bits = fixed(s.at, 8);
            memcpy(&event.wall_time_s, &bits, 8);
            s.at += 8;
        } else if (tag == (2 << 3 | 0)) {
            event.step = (int64_t)varint(&s);
        } else if (tag == (3 << 3 | 2)) {
            copy_text(event.version, sizeof event.version, nested(&s));
        } else {
            ck_assert_uint_eq(tag, 5 << 3 | 2);
            Span summary = nested(&s);
            while (summary.at < summary.end) {
                ck_assert_uint_eq(varint(&summary), 1 << 3 | 2);
                read_scalar(nested(&summary), &event);
            }
        }
    }
    return event;
}

/* Frames with both checksums; how many. */
static int read_events(const char *path, Event *events, int room) {
    size_t bytes;
    char *text = slurp(path, &bytes);
    const uint8_t *at = (const uint8_t *)text, *end = at + bytes;
    int n = 0;
    while (at < end) {
        ck_assert_int_ge(end - at, 16);
        const uint64_t length = fixed(at, 8);
        ck_assert_uint_le(length, (uint64_t)(end - at - 16));
        ck_assert_uint_eq(fixed(at + 8, 4), reference_mask(reference_crc32c(at, 8)));
        ck_assert_uint_eq(fixed(at + 12 + length, 4), reference_mask(reference_crc32c(at + 12, length)));
        ck_assert_int_lt(n, room);
        events[n++] = read_event((Span){at + 12, at + 12 + length});
        at += 16 + length;
    }
    free(text);
    return n;
}

START_TEST(checksums) {
    static const uint8_t known[] = "\x1a\x11"
                                   "CRC test, one two";
    ck_assert_uint_eq(reference_crc32c((const uint8_t *)"123456789", 9), 0xE3069283u);
    ck_assert_uint_eq(masked_crc32c("123456789", 9), reference_mask(0xE3069283u));
    ck_assert_uint_eq(masked_crc32c(known, sizeof known - 1), 0x5794D08Au);
    uint8_t data[300];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)rng_bits(3, 3, i);
    for (size_t n = 0; n <= sizeof data; n++) {
        ck_assert_uint_eq(masked_crc32c(data, n), reference_mask(reference_crc32c(data, n)));
    }
}
END_TEST

START_TEST(event_records) {
    glob_t found;
    static Event events[16];
    Metrics *m = open_metrics(0, true);
    for (int64_t step = 1; step <= 3; step++) {
        StepMetrics row = row_of(step, 6);
        if (step == 2) row.valid_loss = 1.25;
        metrics_step(m, &row);
    }
    metrics_close(m);
    ck_assert_int_eq(glob("runs/a/log/events.out.tfevents.*", 0, NULL, &found), 0);
    ck_assert_uint_eq(found.gl_pathc, 1);
    ck_assert_int_eq(read_events(found.gl_pathv[0], events, 16), 4);
    ck_assert_str_eq(events[0].version, "brain.Event:2");
    ck_assert(events[0].wall_time_s > 1.6e9 && events[3].wall_time_s >= events[0].wall_time_s);
    for (int64_t step = 1; step <= 3; step++) {
        const Event *e = &events[step];
        const StepMetrics row = row_of(step, 6);
        ck_assert_int_eq(e->step, step);
        ck_assert_int_eq(e->n, step == 2 ? 5 : 4);
        ck_assert_str_eq(e->tags[0], "train/loss");
        ck_assert_str_eq(e->tags[1], "train/grad_norm");
        ck_assert_str_eq(e->tags[2], "train/lr");
        ck_assert(e->values[0] == (float)row.loss && e->values[1] == (float)row.grad_norm);
        ck_assert(e->values[2] == (float)row.lr);
        if (step == 2) ck_assert(strcmp(e->tags[4], "valid/loss") == 0 && e->values[4] == 1.25f);
    }
    globfree(&found);
    m = open_metrics(3, true); /* a resumed run opens another file, whose name sorts behind the first */
    metrics_close(m);
    ck_assert_int_eq(glob("runs/a/log/events.out.tfevents.*", 0, NULL, &found), 0);
    ck_assert_uint_eq(found.gl_pathc, 2);
    ck_assert_int_eq(read_events(found.gl_pathv[1], events, 16), 1);
    globfree(&found);
}
END_TEST

/* Steps beyond 2^32 and many scalars: the varints and lengths hold. */
START_TEST(event_sizes) {
    static Event events[8];
    Error err = {0};
    const EventScalar scalars[] = {
        {"a", 1e38}, {"a/rather/long/tag/that/has/more/than/31/letters", -0.5}, {"nan", NAN}};
    int fd = event_file_open(".", &err);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(event_file_write(fd, INT64_C(1) << 40, 1.5, scalars, 3, &err), 0);
    ck_assert_int_eq(event_file_write(fd, 0, 2.5, scalars, 0, &err), 0);
    close(fd);
    glob_t found;
    ck_assert_int_eq(glob("events.out.tfevents.*", 0, NULL, &found), 0);
    ck_assert_int_eq(read_events(found.gl_pathv[0], events, 8), 3);
    globfree(&found);
    ck_assert(events[1].step == INT64_C(1) << 40 && events[1].wall_time_s == 1.5 && events[1].n == 3);
    ck_assert_str_eq(events[1].tags[1], scalars[1].tag);
    ck_assert(events[1].values[0] == 1e38f && events[1].values[1] == -0.5f && isnan(events[1].values[2]));
    ck_assert(events[2].step == 0 && events[2].n == 0);
    ck_assert_int_eq(event_file_open("none", &err), -1);
    ck_assert_int_eq(err.status, EXIT_DATA);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("metrics");
    TCase *tcase = tcase_create("metrics");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, enter_directory, leave_directory);
    tcase_add_test(tcase, numbers_round_trip);
    tcase_add_test(tcase, no_numbers);
    tcase_add_test(tcase, cut_back_on_resume);
    tcase_add_test(tcase, torn_last_line);
    tcase_add_test(tcase, refused_directories);
    tcase_add_test(tcase, plain_lines);
    tcase_add_test(tcase, checksums);
    tcase_add_test(tcase, event_records);
    tcase_add_test(tcase, event_sizes);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
