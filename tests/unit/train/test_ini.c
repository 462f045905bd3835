/* test_ini.c - the INI reader: what becomes an entry, with its place, and what is refused.
 *
 * Each case gives a text and what must come out: the entries as "section.key=value@place", one a line, and
 * the errors as they are printed. */
#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "train/ini.h"

typedef struct {
    char *entries, *errors;
    int n_errors;
} Result;

static Result collect(Ini *ini, FILE *errors_file, char **errors_text) {
    Result result = {.n_errors = ini->errors};
    size_t bytes;
    FILE *out = open_memstream(&result.entries, &bytes);
    for (int i = 0; i < ini->n; i++) {
        const IniEntry *e = &ini->entries[i];
        if (e->key) fprintf(out, "%s.%s=%s@%s\n", e->section, e->key, e->value, e->where);
    }
    fclose(out);
    fclose(errors_file);
    result.errors = *errors_text;
    ini_free(ini);
    return result;
}

static Result read_text(const char *text, size_t bytes) {
    char *errors;
    size_t error_bytes;
    FILE *out = open_memstream(&errors, &error_bytes);
    Ini ini = {.out = out};
    ini_read_text(&ini, text, bytes, "t");
    return collect(&ini, out, &errors);
}

static Result read_file(const char *path) {
    char *errors;
    size_t error_bytes;
    FILE *out = open_memstream(&errors, &error_bytes);
    Ini ini = {.out = out};
    ini_read_file(&ini, path);
    return collect(&ini, out, &errors);
}

static void result_free(Result *result) {
    free(result->entries);
    free(result->errors);
}

static const struct {
    const char *text, *entries, *errors;
} cases[] = {
    {"", "", ""},
    {"\n\n  \n\t\n", "", ""},
    {"[a]\nx = 1\n", "a.x=1@t:2\n", ""},
    {"[a]\nx=1", "a.x=1@t:2\n", ""},
    {"  [ a ]  \n\t x\t=\t1 2 \t\n", "a.x=1 2@t:2\n", ""},
    {"\xEF\xBB\xBF[a]\r\nx = 1\r\ny = 2\r\n", "a.x=1@t:2\na.y=2@t:3\n", ""},
    {"[a]\nx =\ny = \"\"\n", "a.x=@t:2\na.y=@t:3\n", ""},
    {"# c\n; c\n  # c\n[a] # c\nx = 1 # c\ny = 2 ; c\n", "a.x=1@t:5\na.y=2@t:6\n", ""},
    /* # and ; within a word are part of it; lists keep all their items */
    {"[a]\nx = /d/a#b\ny = p;q;r\nz = a=b\n", "a.x=/d/a#b@t:2\na.y=p;q;r@t:3\na.z=a=b@t:4\n", ""},
    /* an indented line is a line of its own, not more of the value before */
    {"[a]\nx = 1\n  ; c\n  y = 2\n", "a.x=1@t:2\na.y=2@t:4\n", ""},
    {"[a]\nx = \"a # b\" # c\ny = \"a \\\"b\\\" \\\\ c\\nd\"\n", "a.x=a # b@t:2\na.y=a \"b\" \\ c\nd@t:3\n", ""},
    {"[a]\nx = \"  a  \"\ny = a \"b\" c\n", "a.x=  a  @t:2\na.y=a \"b\" c@t:3\n", ""},
    {"[a]\nx = 1 \\\n  2 \\\r\n 3\ny = 4\n", "a.x=1    2   3@t:2\na.y=4@t:5\n", ""},
    {"[a]\nx = 1 \\", "a.x=1@t:2\n", ""},
    /* a comment does not take the next line with it */
    {"# c \\\n[a] # k = v \\\nx = 1 # c \\\ny = \"2\" ; c \\\nz = 3\n", "a.x=1@t:3\na.y=2@t:4\na.z=3@t:5\n", ""},
    {"[a]\nx = \"a # b \\\nc\"\n", "a.x=a # b  c@t:2\n", ""},
    {"[a]\nx = 1\n[b]\nx = 2\n[a]\ny = 3\n", "a.x=1@t:2\nb.x=2@t:4\na.y=3@t:6\n", ""},
    {"[a]\nx = caf\xC3\xA9 \xE6\x97\xA5\n", "a.x=caf\xC3\xA9 \xE6\x97\xA5@t:2\n", ""},
    /* refused, and what is good still comes out */
    {"x = 1\n[a]\ny = 2\n", "a.y=2@t:3\n", "t:1: x = 1 stands before the first [section]\n"},
    {"[a]\nx\n= 1\n", "", "t:2: \"x\" is neither [section] nor key = value\nt:3: = 1: the key is missing\n"},
    {"[a\nx = 1\n[b]\ny = 2\n", "b.y=2@t:4\n", "t:1: [a: the ] is missing\n"},
    {"[a] junk\nx = 1\n[]\ny = 1\n", "a.x=1@t:2\n",
     "t:1: [a] is followed by \"junk\"\nt:3: []: the section has no name\n"},
    {"[a]\nx = \"1\ny = \"1\" 2\nz = \"a\\tb\"\n", "",
     "t:2: x = \"1: the quote is not closed\n"
     "t:3: y = \"1\" 2: text follows the closing quote; a \" inside is written \\\"\n"
     "t:4: z = \"a\\tb\": in quotes, \\ stands before \", \\ or n only\n"},
    {"[a]\nx = #1\ny = ;\n", "",
     "t:2: x = #1: a value that begins with # or ; stands in quotes (\"\" is the empty one)\n"
     "t:3: y = ;: a value that begins with # or ; stands in quotes (\"\" is the empty one)\n"},
    {"[a]\nx = 1\ny = 2\n[b]\nx = 1\n[a]\nx = 3\n", "a.x=1@t:2\na.y=2@t:3\nb.x=1@t:5\n",
     "t:7: a.x = 3: set already at t:2, to 1\n"},
    {"[a]\nx = 1\nx = 1\n", "a.x=1@t:2\n", "t:3: a.x = 1: set already at t:2, to 1\n"},
    {"include = b.ini\n", "", "t:1: include = b.ini: only a file may include another\n"},
    {"[a]\nx = \xFF\n", "", "t:2: byte 0xff at offset 8: this is no text file (UTF-8 is expected)\n"},
    {"[a]\nx = \x1B[2J\n", "", "t:2: byte 0x1b at offset 8: this is no text file (UTF-8 is expected)\n"},
    {"[a]\nx = \x7F\n", "", "t:2: byte 0x7f at offset 8: this is no text file (UTF-8 is expected)\n"},
    {"[a]\rx = 1\r", "", "t:1: byte 0x0d at offset 3: this is no text file (UTF-8 is expected)\n"},
};

START_TEST(texts) {
    Result result = read_text(cases[_i].text, strlen(cases[_i].text));
    ck_assert_str_eq(result.entries, cases[_i].entries);
    ck_assert_str_eq(result.errors, cases[_i].errors);
    int lines = 0;
    for (const char *p = result.errors; (p = strchr(p, '\n')) != NULL; p++) lines++;
    ck_assert_int_eq(result.n_errors, lines);
    result_free(&result);
}
END_TEST

START_TEST(zero_byte) {
    Result result = read_text("[a]\nx = 1\0y = 2\n", 16);
    ck_assert_str_eq(result.entries, "");
    ck_assert_str_eq(result.errors, "t:2: byte 0x00 at offset 9: this is no text file (UTF-8 is expected)\n");
    result_free(&result);
}
END_TEST

/* One line of a megabyte is one value; as one wrong line it gives one short message. */
START_TEST(long_lines) {
    enum { LENGTH = 1 << 20, BEFORE = 8 };
    char *text = xcalloc(1, BEFORE + LENGTH + 2);
    memset(text, 'v', BEFORE + LENGTH);
    memcpy(text, "[a]\nx = ", BEFORE);
    text[BEFORE + LENGTH] = '\n';
    Result result = read_text(text, strlen(text));
    ck_assert_uint_eq(strlen(result.entries), strlen("a.x=@t:2\n") + LENGTH);
    ck_assert_str_eq(result.errors, "");
    result_free(&result);
    text[BEFORE - 2] = 'v'; /* no = is left */
    result = read_text(text, strlen(text));
    ck_assert_int_eq(result.n_errors, 1);
    ck_assert_uint_lt(strlen(result.errors), 200);
    ck_assert_msg(strstr(result.errors, "..."), "%s", result.errors);
    result_free(&result);
    free(text);
}
END_TEST

/* A novel in place of a config: not a line of output for each of its lines. */
START_TEST(many_errors) {
    char *text = xmalloc(100000), *to = text;
    for (int i = 0; i < 5000; i++) to += sprintf(to, "it was the %d\n", i);
    Result result = read_text(text, strlen(text));
    ck_assert_int_eq(result.n_errors, 5000);
    ck_assert_msg(strstr(result.errors, "t:100:") && !strstr(result.errors, "t:101:"), "%s", result.errors);
    ck_assert_msg(strstr(result.errors, "there are more errors; 100 are shown\n"), "%s", result.errors);
    result_free(&result);
    to = text + sprintf(text, "[a]\n");
    for (int i = 0; i < 12000; i++) to += sprintf(to, "x%d=\n", i);
    result = read_text(text, strlen(text));
    ck_assert_int_eq(result.n_errors, 1);
    ck_assert_msg(strstr(result.errors, "t:10001: more than 10000 lines of settings"), "%s", result.errors);
    result_free(&result);
    free(text);
}
END_TEST

/* ---- files ---- */

static char directory[64];

static void enter_directory(void) {
    strcpy(directory, "/tmp/test_ini_XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(directory));
    ck_assert_int_eq(chdir(directory), 0);
    ck_assert_int_eq(mkdir("sub", 0777), 0);
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

static void check_file(const char *path, const char *entries, const char *errors) {
    Result result = read_file(path);
    ck_assert_str_eq(result.entries, entries);
    ck_assert_str_eq(result.errors, errors);
    result_free(&result);
}

START_TEST(includes) {
    write_file("main.ini", "include = sub/one.ini\ninclude = two.ini # c\n[a]\nx = main\n");
    write_file("sub/one.ini", "include = three.ini\n[a]\nx = one\ny = one\n");
    write_file("sub/three.ini", "include = ../two.ini\n[a]\ny = three\nz = three\n");
    write_file("two.ini", "[b]\nx = two\n");
    check_file("main.ini",
               "b.x=two@sub/../two.ini:2\na.y=three@sub/three.ini:3\na.z=three@sub/three.ini:4\n"
               "a.x=one@sub/one.ini:3\na.y=one@sub/one.ini:4\nb.x=two@two.ini:2\na.x=main@main.ini:4\n",
               "");
    char *absolute = xasprintf("include = %s/two.ini\n", directory);
    write_file("sub/one.ini", absolute);
    char *entries = xasprintf("b.x=two@%s/two.ini:2\nb.x=two@two.ini:2\na.x=main@main.ini:4\n", directory);
    check_file("main.ini", entries, "");
    free(absolute);
    free(entries);
}
END_TEST

START_TEST(bad_includes) {
    write_file("main.ini", "[a]\nx = 1\ninclude = two.ini\n");
    check_file("main.ini", "a.x=1@main.ini:2\n",
               "main.ini:3: include = two.ini stands in [a]; it belongs before the first section\n");
    write_file("main.ini", "include = none.ini\ninclude = sub\ninclude =\n[a]\nx = 1\n");
    check_file("main.ini", "a.x=1@main.ini:5\n",
               "main.ini:1: include: none.ini: cannot open: No such file or directory\n"
               "main.ini:2: include: sub: is a directory, not a config file\n"
               "main.ini:3: include names no file\n");
    write_file("main.ini", "include = sub/one.ini\n");
    write_file("sub/one.ini", "include = .././main.ini\n");
    check_file("main.ini", "", "sub/one.ini:1: include: sub/.././main.ini is being read already (a cycle)\n");
    write_file("main.ini", "include = main.ini\n[a]\nx = 1\n");
    check_file("main.ini", "a.x=1@main.ini:3\n", "main.ini:1: include: main.ini is being read already (a cycle)\n");
    write_file("main.ini", "include = sub/one.ini\n[a]\nx = 1\n");
    write_file("sub/one.ini", "[a]\nx 1\n");
    check_file("main.ini", "a.x=1@main.ini:3\n", "sub/one.ini:2: \"x 1\" is neither [section] nor key = value\n");
}
END_TEST

/* A chain that is too deep, and a tree that would be read 10^15 times. */
START_TEST(many_includes) {
    char path[32], text[512];
    for (int i = 0; i <= 17; i++) {
        snprintf(path, sizeof path, "f%d.ini", i);
        snprintf(text, sizeof text, "include = f%d.ini\n", i + 1);
        write_file(path, i < 17 ? text : "[a]\nx = 1\n");
    }
    check_file("f1.ini", "a.x=1@f17.ini:2\n", "");
    check_file("f0.ini", "", "f16.ini:1: include = f17.ini: more than 16 files deep\n");
    for (int i = 1; i < 16; i++) {
        snprintf(path, sizeof path, "f%d.ini", i);
        char *to = text;
        for (int k = 0; k < 10; k++) to += sprintf(to, "include = f%d.ini\n", i + 1);
        write_file(path, text);
    }
    Result result = read_file("f1.ini");
    ck_assert_int_gt(result.n_errors, 0);
    ck_assert_msg(strstr(result.errors, "more than 256 files"), "%s", result.errors);
    result_free(&result);
}
END_TEST

START_TEST(unreadable_files) {
    check_file("none.ini", "", "none.ini: cannot open: No such file or directory\n");
    check_file("sub", "", "sub: is a directory, not a config file\n");
    ck_assert_int_eq(mkfifo("pipe", 0666), 0);
    check_file("pipe", "", "pipe: is no regular file, not a config file\n");
    write_file("empty.ini", "");
    check_file("empty.ini", "", "");
    write_file("secret.ini", "[a]\nx = 1\n");
    ck_assert_int_eq(chmod("secret.ini", 0), 0);
    if (geteuid() != 0) check_file("secret.ini", "", "secret.ini: cannot open: Permission denied\n");
    ck_assert_int_eq(symlink("loop", "loop"), 0);
    check_file("loop", "", "loop: cannot open: Too many levels of symbolic links\n");
    FILE *file = fopen("huge.ini", "w");
    ck_assert_int_eq(ftruncate(fileno(file), (16 << 20) + 1), 0);
    fclose(file);
    check_file("huge.ini", "", "huge.ini: has 16777217 bytes, at most 16777216 are accepted\n");
}
END_TEST

/* ---- --set ---- */

static const struct {
    const char *text, *entries, *errors;
} overrides[] = {
    {"a.x=1", "a.x=1@--set\n", ""},
    {" a . x = 1 2 ", "a.x=1 2@--set\n", ""},
    {"a.x=", "a.x=@--set\n", ""},
    {"a.x=b=c # d \"", "a.x=b=c # d \"@--set\n", ""},
    {"a.x.y=1", "a.x.y=1@--set\n", ""},
    {"a.x", "", "--set a.x: section.key=value is expected\n"},
    {"x=1.5", "", "--set x=1.5: section.key=value is expected\n"},
    {"", "", "--set : section.key=value is expected\n"},
    {"=", "", "--set =: section.key=value is expected\n"},
    {".x=1", "", "--set .x=1: section.key=value is expected\n"},
    {"a.=1", "", "--set a.=1: section.key=value is expected\n"},
};

START_TEST(command_line) {
    char *errors;
    size_t bytes;
    FILE *out = open_memstream(&errors, &bytes);
    Ini ini = {.out = out};
    ini_read_override(&ini, overrides[_i].text);
    Result result = collect(&ini, out, &errors);
    ck_assert_str_eq(result.entries, overrides[_i].entries);
    ck_assert_str_eq(result.errors, overrides[_i].errors);
    result_free(&result);
}
END_TEST

START_TEST(excerpts) {
    char excerpt[INI_EXCERPT_BYTES], text[300];
    ck_assert_str_eq(ini_excerpt("a\nb\x1B", excerpt), "a?b?");
    memset(text, 'a', sizeof text);
    for (size_t n = 90; n < 100; n++) {
        text[n] = 0;
        ini_excerpt(text, excerpt);
        ck_assert_int_eq(strlen(excerpt) < n, n >= INI_EXCERPT_BYTES);
        text[n] = 'a';
    }
    for (size_t shift = 0; shift < 3; shift++) { /* a character of three bytes is kept whole or left out */
        for (size_t i = shift; i + 3 < sizeof text; i += 3) memcpy(text + i, "\xE6\x97\xA5", 3);
        text[297] = 0;
        ini_excerpt(text, excerpt);
        ck_assert_uint_eq((strlen(excerpt) - 3 - shift) % 3, 0);
    }
}
END_TEST

int main(void) {
    Suite *suite = suite_create("ini");
    TCase *text = tcase_create("text");
    tcase_add_loop_test(text, texts, 0, (int)(sizeof cases / sizeof cases[0]));
    tcase_add_test(text, zero_byte);
    tcase_add_test(text, long_lines);
    tcase_add_test(text, many_errors);
    tcase_add_test(text, excerpts);
    tcase_add_loop_test(text, command_line, 0, (int)(sizeof overrides / sizeof overrides[0]));
    suite_add_tcase(suite, text);
    TCase *files = tcase_create("files");
    tcase_add_checked_fixture(files, enter_directory, leave_directory);
    tcase_add_test(files, includes);
    tcase_add_test(files, bad_includes);
    tcase_add_test(files, many_includes);
    tcase_add_test(files, unreadable_files);
    suite_add_tcase(suite, files);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
