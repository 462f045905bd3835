/* test_tokenize_files.c - `trident tokenize`: what is written equals tokenizing each document whole, however
 * it was cut and however many threads did it; failures leave nothing behind and old files untouched. */
#include "tests/unit/data/scratch.h"

#include <pthread.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "base/log.h"
#include "data/source.h"
#include "data/tokenizer.h"

#define TINY FIXTURES "tiny_bpe"

typedef struct {
    int32_t *ids;
    int64_t n, capacity;
} Ids;

static int run(const char *tokenizer, const char *prefix, const char *document_line, int threads, int n_inputs,
               const char *first, const char *second, Error *err) {
    char *inputs[2] = {(char *)first, (char *)second}, out[512];
    snprintf(out, sizeof out, "%s/%s", scratch_path, prefix);
    TokenizeOptions options = {.tokenizer = tokenizer,
                               .out_prefix = out,
                               .document_line = document_line,
                               .inputs = inputs,
                               .n_inputs = n_inputs,
                               .threads = threads};
    return tokenize_files(&options, err);
}

static void run_good(const char *tokenizer, const char *prefix, const char *document_line, int threads, int n_inputs,
                     const char *first, const char *second) {
    Error err;
    ck_assert_msg(run(tokenizer, prefix, document_line, threads, n_inputs, first, second, &err) == 0, "%s",
                  err.message);
}

static void add_id(Ids *ids, int32_t id) {
    if (ids->n == ids->capacity) {
        ids->capacity = 2 * ids->capacity + 64;
        ids->ids = xrealloc(ids->ids, (uint64_t)ids->capacity * 4);
    }
    ids->ids[ids->n++] = id;
}

/* Appends a document's tokens, and the end where it is not empty. */
static void add_document(const Tokenizer *tokenizer, Ids *ids, const char *text, size_t bytes) {
    tokenizer_encode(tokenizer, text, bytes, &ids->ids, &ids->n, &ids->capacity);
    if (bytes > 0) add_id(ids, tokenizer_end_of_document(tokenizer));
}

/* The file PREFIX has exactly these tokens; documents < 0: any number. */
static void expect_file(const char *prefix, const Ids *expected, int64_t documents) {
    Error err;
    TokenFile *file = token_file_open(scratch(prefix), &err);
    ck_assert_msg(file != NULL, "%s", err.message);
    ck_assert_int_eq(token_file_tokens(file), expected->n);
    if (documents >= 0) ck_assert_int_eq(token_file_documents(file), documents);
    int32_t *tokens = xmalloc((uint64_t)expected->n * 4);
    int64_t *starts = xmalloc((uint64_t)expected->n * 8);
    ck_assert_int_eq(token_file_read(file, 0, expected->n, 100000, tokens, starts, &err), 0);
    int64_t differing = 0;
    for (int64_t i = 0; i < expected->n; i++) differing += tokens[i] != expected->ids[i];
    ck_assert_int_eq(differing, 0);
    free(tokens);
    free(starts);
    token_file_close(file);
    ck_assert_int_ne(access(scratch("out.bin.tmp"), F_OK), 0);
    ck_assert_int_ne(access(scratch("out.idx.tmp"), F_OK), 0);
}

START_TEST(a_file_is_a_document) {
    scratch_write("a.txt", "first\nlines", 11);
    scratch_write("b.txt", "the second\n", 11);
    static const char *const tokenizers[] = {"bytes", TINY};
    for (int t = 0; t < 2; t++) {
        run_good(tokenizers[t], "out", NULL, 2, 2, scratch("a.txt"), scratch("b.txt"));
        Error err;
        Tokenizer *tokenizer = tokenizer_open(tokenizers[t], &err);
        Ids expected = {0};
        add_document(tokenizer, &expected, "first\nlines", 11);
        add_document(tokenizer, &expected, "the second\n", 11);
        expect_file("out", &expected, 2);
        free(expected.ids);
        tokenizer_close(tokenizer);
    }
    size_t n;
    char *idx = slurp(scratch("out.idx"), &n);
    ck_assert_uint_eq(n, 34 + 12 * 2 + 8 * 3);
    ck_assert_int_eq(idx[17], 8); /* uint16 */
    free(idx);
}
END_TEST

START_TEST(empty_documents_leave_a_boundary) {
    scratch_write("empty.txt", "", 0);
    scratch_write("b.txt", "b", 1);
    run_good("bytes", "out", NULL, 1, 2, scratch("empty.txt"), scratch("b.txt"));
    Ids expected = {(int32_t[]){'b', 256}, 2, 2};
    expect_file("out", &expected, 2);
    run_good("bytes", "out", NULL, 1, 2, scratch("b.txt"), scratch("empty.txt"));
    expect_file("out", &expected, 2);
    Error err;
    ck_assert_int_eq(run("bytes", "none", NULL, 1, 1, scratch("empty.txt"), NULL, &err), -1);
    ck_assert_int_eq(err.status, EXIT_DATA);
    ck_assert_contains(err.message, "without any text");
    ck_assert_int_ne(access(scratch("none.bin"), F_OK), 0);
    static const char lines[] = "{\"text\":\"\"}\n\n{\"text\":\"b\"}\n  \r\n{\"text\":\"\"}";
    scratch_write("e.jsonl", lines, sizeof lines - 1);
    run_good("bytes", "out", NULL, 1, 1, scratch("e.jsonl"), NULL);
    expect_file("out", &expected, 3);
}
END_TEST

START_TEST(separator_lines) {
    static const struct {
        const char *text, *documents[4];
    } cases[] = {
        {"one\n***\ntwo\n", {"one\n", "two\n"}},
        {"***\none\n***\n***\ntwo\n***\n", {"one\n", "two\n"}},
        {"***\r\none\r\n***\r\ntwo", {"one\r\n", "two"}},
        {"one ***\n*** \n****\n***x\n***", {"one ***\n*** \n****\n***x\n"}},
        {"\n\n***\n\n", {"\n\n", "\n"}},
        {"no separator", {"no separator"}},
    };
    Error err;
    Tokenizer *tokenizer = tokenizer_open(TINY, &err);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        scratch_write("a.txt", cases[c].text, strlen(cases[c].text));
        run_good(TINY, "out", "***", 1, 1, scratch("a.txt"), NULL);
        Ids expected = {0};
        int64_t documents = 0;
        for (; cases[c].documents[documents]; documents++) {
            add_document(tokenizer, &expected, cases[c].documents[documents], strlen(cases[c].documents[documents]));
        }
        expect_file("out", &expected, documents);
        free(expected.ids);
    }
    /* An empty separator: blank lines. */
    scratch_write("a.txt", "one\n\ntwo\nlines\n\n\nthree", 22);
    run_good(TINY, "out", "", 1, 1, scratch("a.txt"), NULL);
    Ids expected = {0};
    add_document(tokenizer, &expected, "one\n", 4);
    add_document(tokenizer, &expected, "two\nlines\n", 10);
    add_document(tokenizer, &expected, "three", 5);
    expect_file("out", &expected, 3);
    free(expected.ids);
    tokenizer_close(tokenizer);
}
END_TEST

/* ---- long texts, which are cut into jobs ---- */

static const char *const words[] = {"the ",
                                    "and",
                                    " heaven's",
                                    "\n",
                                    "  ",
                                    " 1611",
                                    ", ",
                                    "\xE6\x97\xA5\xE6\x9C\xAC",
                                    "\xE3\x80\x82",
                                    "\xC3\xA9t\xC3\xA9",
                                    "'s",
                                    "'",
                                    "\t",
                                    "\xE2\x80\xA8",
                                    "God",
                                    "\xFF",
                                    "\xF0\x9F\x99\x82",
                                    "\r\n",
                                    "***"};
enum { WORDS = sizeof words / sizeof *words };

static char *long_text(size_t bytes, int64_t kinds, size_t *n) {
    char *text = xmalloc(bytes + 64);
    int64_t offset = draw(WORDS);
    for (*n = 0; *n < bytes;) {
        const char *word = words[(offset + draw(kinds)) % WORDS];
        memcpy(text + *n, word, strlen(word));
        *n += strlen(word);
    }
    return text;
}

START_TEST(cutting_and_threads_change_nothing) {
    seed_begin();
    Error err;
    Tokenizer *tokenizer = tokenizer_open(TINY, &err);
    for (int round = 0; round < 4; round++) {
        size_t n;
        char *text = long_text(((size_t)1 << 20) * (size_t)(1 + draw(4)) + (size_t)draw(9), round % 2 ? 4 : WORDS, &n);
        scratch_write("long.txt", text, n);
        Ids expected = {0};
        add_document(tokenizer, &expected, text, n);
        for (int threads = 1; threads <= 4; threads += 3) {
            run_good(TINY, "out", NULL, threads, 1, scratch("long.txt"), NULL);
            expect_file("out", &expected, 1);
        }
        free(expected.ids);
        free(text);
    }
    tokenizer_close(tokenizer);
}
END_TEST

/* Documents of all lengths around the cuts, with separators across them. */
START_TEST(separators_at_cuts) {
    seed_begin();
    Error err;
    Tokenizer *tokenizer = tokenizer_open(TINY, &err);
    for (int round = 0; round < 3; round++) {
        size_t n, begin = 0, at = 0, made;
        char *text = long_text(3 << 20, WORDS, &n);
        Ids expected = {0};
        int64_t documents = 0, where = 0;
        while (at < n) { /* put separators in by hand: lines of random distance, many of them near a megabyte */
            size_t distance = (size_t)draw(round == 0 ? 2000 : 700000) + 1;
            at += distance;
            if (at + 6 >= n) break;
            memcpy(text + at, "\n***\n", 5);
            at += 5;
        }
        for (char *p = text; p < text + n;) { /* the plain definition: line by line */
            char *end = memchr(p, '\n', (size_t)(text + n - p));
            made = end ? (size_t)(end - p) : (size_t)(text + n - p);
            size_t bare = made > 0 && p[made - 1] == '\r' ? made - 1 : made;
            if (bare == 3 && memcmp(p, "***", 3) == 0) {
                if ((size_t)(p - text) > begin)
                    add_document(tokenizer, &expected, text + begin, (size_t)(p - text) - begin), documents++;
                begin = (size_t)(p - text) + made + (end != NULL);
            }
            p += made + 1;
            where++;
        }
        if (begin < n) add_document(tokenizer, &expected, text + begin, n - begin), documents++;
        ck_assert_int_gt(where, 3);
        scratch_write("long.txt", text, n);
        run_good(TINY, "out", "***", 2, 1, scratch("long.txt"), NULL);
        expect_file("out", &expected, documents);
        free(expected.ids);
        free(text);
    }
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(text_without_any_safe_cut_is_cut_with_a_warning) {
    size_t n = 9u << 20, bytes;
    char *text = xmalloc(n);
    memset(text, ' ', n);
    scratch_write("spaces.txt", text, n);
    int saved = dup(STDERR_FILENO), log = open(scratch("log"), O_CREAT | O_RDWR, 0666);
    dup2(log, STDERR_FILENO);
    run_good(TINY, "out", NULL, 2, 1, scratch("spaces.txt"), NULL);
    dup2(saved, STDERR_FILENO);
    char *said = slurp(scratch("log"), &bytes);
    ck_assert_contains(said, "spaces.txt: byte 0: 4 MB in which no cut is safe");
    free(said);
    Error err;
    Tokenizer *tokenizer = tokenizer_open(TINY, &err);
    TokenFile *file = token_file_open(scratch("out"), &err);
    int64_t tokens = token_file_tokens(file), sum = 0;
    int32_t *ids = xmalloc((uint64_t)tokens * 4);
    ck_assert_int_eq(token_file_read(file, 0, tokens, 512, ids, NULL, &err), 0);
    for (int64_t i = 0; i < tokens; i++) {
        tokenizer_token(tokenizer, ids[i], &bytes);
        sum += (int64_t)bytes;
    }
    ck_assert_int_eq(sum, (int64_t)n);
    token_file_close(file);
    tokenizer_close(tokenizer);
    free(ids);
    free(text);
}
END_TEST

/* gcc and clang say it in ways of their own. */
#ifdef __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define WITH_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define WITH_SANITIZER
#endif

START_TEST(memory_does_not_grow_with_the_text) {
    int fd = open(scratch("huge.txt"), O_CREAT | O_WRONLY, 0666);
    ck_assert_int_eq(ftruncate(fd, INT64_C(100) << 20), 0); /* one line, one document, of zero bytes */
    close(fd);
#ifndef WITH_SANITIZER /* these take more than that */
    struct rlimit limit = {INT64_C(80) << 20, INT64_C(80) << 20};
    setrlimit(RLIMIT_DATA, &limit);
#endif
    run_good("bytes", "out", NULL, 2, 1, scratch("huge.txt"), NULL);
    Error err;
    TokenFile *file = token_file_open(scratch("out"), &err);
    ck_assert_int_eq(token_file_tokens(file), (INT64_C(100) << 20) + 1);
    token_file_close(file);
}
END_TEST

/* ---- JSONL ---- */

START_TEST(jsonl_text_fields) {
    static const char lines[] =
        "\xEF\xBB\xBF{\"text\": \"one\"}\n"
        "{\"id\": 123456789012345678901234567890, \"meta\": {\"text\": \"no\"}, \"text\": \"caf\\u00e9 "
        "\\ud83d\\ude42\"}\r\n"
        "\n"
        "{\"text\": \"a\\u0000b\\n\"}";
    scratch_write("x.jsonl", lines, sizeof lines - 1);
    run_good("bytes", "out", NULL, 2, 1, scratch("x.jsonl"), NULL);
    Error err;
    Tokenizer *tokenizer = tokenizer_open("bytes", &err);
    Ids expected = {0};
    add_document(tokenizer, &expected, "one", 3);
    add_document(tokenizer, &expected, "caf\xC3\xA9 \xF0\x9F\x99\x82", 10);
    add_document(tokenizer, &expected, "a\0b\n", 4);
    expect_file("out", &expected, 3);
    free(expected.ids);
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(many_json_lines_in_order) {
    size_t room = 6u << 20, n = 0;
    char *text = xmalloc(room);
    Error err;
    Tokenizer *tokenizer = tokenizer_open(TINY, &err);
    Ids expected = {0};
    int64_t documents = 0;
    for (; n < room - 400; documents++) {
        char words_of_it[256] = "";
        for (int64_t i = 0; i < documents % 30; i++) strcat(words_of_it, " heaven");
        n += (size_t)sprintf(text + n, "{\"text\":\"the %lld%s\"}\n", (long long)documents, words_of_it);
        char plain[300];
        int length = snprintf(plain, sizeof plain, "the %lld%s", (long long)documents, words_of_it);
        tokenizer_encode(tokenizer, plain, (size_t)length, &expected.ids, &expected.n, &expected.capacity);
        add_id(&expected, 511);
    }
    scratch_write("many.jsonl", text, n);
    run_good(TINY, "out", NULL, 3, 1, scratch("many.jsonl"), NULL);
    expect_file("out", &expected, documents);
    free(expected.ids);
    free(text);
    tokenizer_close(tokenizer);
}
END_TEST

/* ---- refusals ---- */

static void expect_refused(const char *name, const char *text, size_t n, const char *part) {
    Error err;
    scratch_write(name, text, n);
    scratch_write("kept.bin", "old", 3);
    scratch_write("kept.idx", "old", 3);
    ck_assert_int_eq(run("bytes", "kept", NULL, 2, 1, scratch(name), NULL, &err), -1);
    ck_assert_int_eq(err.status, EXIT_DATA);
    ck_assert_contains(err.message, part);
    size_t bytes;
    char *bin = slurp(scratch("kept.bin"), &bytes), *idx = slurp(scratch("kept.idx"), &bytes);
    ck_assert_str_eq(bin, "old");
    ck_assert_str_eq(idx, "old");
    free(bin);
    free(idx);
    ck_assert_int_ne(access(scratch("kept.bin.tmp"), F_OK), 0);
    ck_assert_int_ne(access(scratch("kept.idx.tmp"), F_OK), 0);
}

START_TEST(bad_lines_are_located_and_leave_old_files) {
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"{\"text\": \"a\"}\n\n{\"text\": \"b\"\n", "x.jsonl:3: column"},
        {"{\"text\": \"a\"}\n[\"text\"]\n", "x.jsonl:2: should be a JSON object with a \"text\" field"},
        {"{\"content\": \"a\"}\n", "x.jsonl:1: has no \"text\" field (its first field is \"content\")"},
        {"{}\n", "x.jsonl:1: has no \"text\" field"},
        {"{\"text\": 7}\n", "x.jsonl:1: its \"text\" field is not a string"},
        {"{\"text\": \"a\", \"text\": \"b\"}\n", "x.jsonl:1: column"},
        {"{\"text\": \"a\"} {\"text\": \"b\"}\n", "x.jsonl:1: column"},
        {"{\"text\": \"\xFF\"}\n", "x.jsonl:1: column"},
        {"{\"text\": \"\\ud800\"}\n", "x.jsonl:1: column"},
        {"plain text\n", "x.jsonl:1: column"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expect_refused("x.jsonl", cases[i].text, strlen(cases[i].text), cases[i].part);
    }
    /* Far down in the file, in the third job. */
    size_t n = 0;
    char *text = xmalloc(4u << 20);
    int64_t line = 1;
    for (; n < (3u << 20) - 100; line++) n += (size_t)sprintf(text + n, "{\"text\":\"%0*d\"}\n", (int)(line % 50), 1);
    n += (size_t)sprintf(text + n, "{\"text\":}\n{\"text\":\"good\"}\n");
    char part[64];
    snprintf(part, sizeof part, "x.jsonl:%lld: column", (long long)line);
    expect_refused("x.jsonl", text, n, part);
    free(text);
}
END_TEST

START_TEST(missing_inputs_are_found_before_the_work) {
    Error err;
    scratch_write("a.txt", "a", 1);
    ck_assert_int_eq(run("bytes", "out", NULL, 1, 2, scratch("a.txt"), scratch("none.txt"), &err), -1);
    ck_assert_contains(err.message, "none.txt: cannot open");
    ck_assert_int_eq(err.status, EXIT_DATA);
    ck_assert_int_eq(run("bytes", "out", NULL, 1, 1, scratch_path, NULL, &err), -1);
    ck_assert_contains(err.message, "is a directory");
    ck_assert_int_eq(run("bytes", "a.txt/out", NULL, 1, 1, scratch("a.txt"), NULL, &err), -1);
    ck_assert_int_eq(run(scratch("none"), "out", NULL, 1, 1, scratch("a.txt"), NULL, &err), -1);
    ck_assert_contains(err.message, "there is no such file or directory");
    ck_assert_int_eq(run("bytes", "out", NULL, 1, 0, NULL, NULL, &err), -1);
    ck_assert_int_eq(err.status, EXIT_CONFIG);
    ck_assert_int_ne(access(scratch("out.bin"), F_OK), 0);
    ck_assert_int_ne(access(scratch("out.bin.tmp"), F_OK), 0);
}
END_TEST

START_TEST(two_writers_of_one_prefix_do_not_mix) {
    Error err;
    scratch_write("a.txt", "a", 1);
    int fd = open(scratch("out.bin.tmp"), O_CREAT | O_RDWR, 0666);
    ck_assert_int_eq(flock(fd, LOCK_EX), 0);
    ck_assert_int_eq(run("bytes", "out", NULL, 1, 1, scratch("a.txt"), NULL, &err), -1);
    ck_assert_contains(err.message, "another process is writing it");
    ck_assert_int_eq(access(scratch("out.bin.tmp"), F_OK), 0); /* the other's, still there */
    close(fd);
    run_good("bytes", "out", NULL, 1, 1, scratch("a.txt"), NULL); /* left behind by a killed one: used again */
    run_good("bytes", "deep/er/out.bin", NULL, 1, 1, scratch("a.txt"), NULL);
    ck_assert_int_eq(access(scratch("deep/er/out.idx"), F_OK), 0);
}
END_TEST

START_TEST(a_full_disk_is_an_error_and_leaves_nothing) {
    Error err;
    char *text = xcalloc(4u << 20, 1);
    scratch_write("a.txt", text, 4u << 20);
    free(text);
    struct rlimit limit = {1u << 20, 1u << 20};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    ck_assert_int_eq(run("bytes", "out", NULL, 2, 1, scratch("a.txt"), NULL, &err), -1);
    ck_assert_contains(err.message, "out.bin.tmp: cannot write");
    ck_assert_int_ne(access(scratch("out.bin.tmp"), F_OK), 0);
    ck_assert_int_ne(access(scratch("out.bin"), F_OK), 0);
}
END_TEST

static void *feed_pipe(void *path) {
    FILE *pipe = fopen(path, "w");
    for (int i = 0; i < 300000; i++) fprintf(pipe, "%d\n", i);
    fclose(pipe);
    return NULL;
}

START_TEST(a_pipe_can_be_read) {
    char path[512];
    snprintf(path, sizeof path, "%s", scratch("pipe"));
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    pthread_t feeder;
    ck_assert_int_eq(pthread_create(&feeder, NULL, feed_pipe, path), 0);
    run_good("bytes", "out", NULL, 2, 1, path, NULL);
    pthread_join(feeder, NULL);
    Error err;
    TokenFile *file = token_file_open(scratch("out"), &err);
    int64_t bytes = 0;
    for (int i = 0; i < 300000; i++) bytes += snprintf(NULL, 0, "%d\n", i);
    ck_assert_int_eq(token_file_tokens(file), bytes + 1);
    token_file_close(file);
}
END_TEST

int main(void) {
    log_set_rank(1, ""); /* no summaries of every run */
    Suite *suite = suite_create("tokenize files");
    TCase *tests = tcase_create("tokenize files");
    tcase_add_checked_fixture(tests, scratch_make, scratch_remove);
    tcase_set_timeout(tests, 60);
    tcase_add_test(tests, a_file_is_a_document);
    tcase_add_test(tests, empty_documents_leave_a_boundary);
    tcase_add_test(tests, separator_lines);
    tcase_add_test(tests, cutting_and_threads_change_nothing);
    tcase_add_test(tests, separators_at_cuts);
    tcase_add_test(tests, text_without_any_safe_cut_is_cut_with_a_warning);
    tcase_add_test(tests, memory_does_not_grow_with_the_text);
    tcase_add_test(tests, jsonl_text_fields);
    tcase_add_test(tests, many_json_lines_in_order);
    tcase_add_test(tests, bad_lines_are_located_and_leave_old_files);
    tcase_add_test(tests, missing_inputs_are_found_before_the_work);
    tcase_add_test(tests, two_writers_of_one_prefix_do_not_mix);
    tcase_add_test(tests, a_full_disk_is_an_error_and_leaves_nothing);
    tcase_add_test(tests, a_pipe_can_be_read);
    suite_add_tcase(suite, tests);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
