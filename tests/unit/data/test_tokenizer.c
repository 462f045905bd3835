/* test_tokenizer.c - bytes and GPT-2's BPE: against golden ids, against plain re-implementations, and on
 * damaged files. GPT-2's real vocabulary is used where ../shared/tokenizers/gpt2 or TRIDENT_GPT2 has it. */
#include "tests/unit/data/scratch.h"

#include <jansson.h>
#include <pthread.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/log.h"
#include "data/encoder.h"
#include "data/utf8.h"

#define TINY FIXTURES "tiny_bpe"

typedef struct {
    int32_t *ids;
    int64_t n, capacity;
} Ids;

static Tokenizer *open_good(const char *spec) {
    Error err;
    Tokenizer *tokenizer = tokenizer_open(spec, &err);
    ck_assert_msg(tokenizer != NULL, "%s", err.message);
    return tokenizer;
}

static Ids encode(const Tokenizer *tokenizer, const char *text, size_t bytes) {
    Ids ids = {0};
    tokenizer_encode(tokenizer, text, bytes, &ids.ids, &ids.n, &ids.capacity);
    return ids;
}

static const char *gpt2_directory(void) {
    const char *given = getenv("TRIDENT_GPT2");
    if (given) return given;
    static const char *const place = "../shared/tokenizers/gpt2";
    if (access(place, R_OK) == 0) return place;
    printf("skipped: GPT-2's vocab.json and merges.txt are not at %s, nor where TRIDENT_GPT2 says\n", place);
    return NULL;
}

/* [{"text": ..., "ids": [...]}, ...]; specials_found: the reference recognised specials in text, which we do
 * not, so that such cases are left out. */
static void check_golden(const Tokenizer *tokenizer, json_t *cases, bool specials_found) {
    ck_assert_int_ge((int64_t)json_array_size(cases), 10);
    for (size_t c = 0; c < json_array_size(cases); c++) {
        json_t *text = json_object_get(json_array_get(cases, c), "text");
        json_t *expected = json_object_get(json_array_get(cases, c), "ids");
        if (specials_found && strstr(json_string_value(text), "<|endoftext|>")) continue;
        Ids ids = encode(tokenizer, json_string_value(text), json_string_length(text));
        ck_assert_msg(ids.n == (int64_t)json_array_size(expected), "\"%s\": %lld ids", json_string_value(text),
                      (long long)ids.n);
        for (int64_t i = 0; i < ids.n; i++) {
            ck_assert_msg(ids.ids[i] == json_integer_value(json_array_get(expected, (size_t)i)),
                          "\"%s\": id %lld is %d", json_string_value(text), (long long)i, ids.ids[i]);
        }
        free(ids.ids);
    }
}

static json_t *load(const char *path) {
    json_error_t where;
    json_t *json = json_load_file(path, JSON_ALLOW_NUL, &where);
    ck_assert_msg(json != NULL, "%s: %s", path, where.text);
    return json;
}

START_TEST(tiny_bpe_gives_golden_ids) {
    Tokenizer *tokenizer = open_good(TINY);
    ck_assert_int_eq(tokenizer_vocab(tokenizer), 512);
    ck_assert_int_eq(tokenizer_end_of_document(tokenizer), 511);
    json_t *golden = load(TINY "/golden.json");
    check_golden(tokenizer, json_object_get(json_object_get(golden, "sets"), "tokenizer.json"), true);
    json_decref(golden);
    tokenizer_close(tokenizer);
    tokenizer_close(open_good(TINY "/vocab.json"));
    tokenizer_close(open_good(TINY "/merges.txt"));
    tokenizer_close(open_good(TINY "/"));
}
END_TEST

START_TEST(gpt2_gives_golden_ids) {
    if (!gpt2_directory()) return;
    Tokenizer *tokenizer = open_good(gpt2_directory());
    ck_assert_int_eq(tokenizer_vocab(tokenizer), 50257);
    ck_assert_int_eq(tokenizer_end_of_document(tokenizer), 50256);
    json_t *golden = load(FIXTURES "golden_bpe_vectors.json");
    check_golden(tokenizer, json_object_get(golden, "gpt2"), false);
    json_decref(golden);
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(bytes_are_bytes) {
    Tokenizer *tokenizer = open_good("bytes");
    ck_assert_int_eq(tokenizer_vocab(tokenizer), 257);
    ck_assert_int_eq(tokenizer_end_of_document(tokenizer), 256);
    char text[256];
    for (int i = 0; i < 256; i++) text[i] = (char)i;
    Ids ids = encode(tokenizer, text, 256);
    ck_assert_int_eq(ids.n, 256);
    size_t bytes;
    for (int i = 0; i < 256; i++) {
        ck_assert_int_eq(ids.ids[i], i);
        ck_assert_int_eq((unsigned char)*tokenizer_token(tokenizer, i, &bytes), i);
        ck_assert_uint_eq(bytes, 1);
    }
    tokenizer_token(tokenizer, 256, &bytes);
    ck_assert_uint_eq(bytes, 0);
    free(ids.ids);
    tokenizer_close(tokenizer);
}
END_TEST

/* ---- UTF-8 ---- */

START_TEST(utf8_all_characters_and_invalid_parts) {
    int wrong = 0;
    for (int32_t code = 0; code < 0x110000; code++) {
        char text[4];
        int32_t decoded;
        size_t length = utf8_encode(code, text);
        bool surrogate = code >= 0xD800 && code < 0xE000;
        size_t found = utf8_decode(text, length, &decoded);
        wrong += surrogate ? decoded != -1 : decoded != code || found != length;
        for (size_t cut = 1; cut < length && !surrogate; cut++) {
            wrong += utf8_decode(text, cut, &decoded) != cut || decoded != -1;
        }
    }
    ck_assert_int_eq(wrong, 0);
    /* Unicode 15, tables 3-8 to 3-11: how many U+FFFD, then the rest. */
    static const struct {
        const char *text, *repaired;
    } cases[] = {
        {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", "????????A"},
        {"\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", "????????A"},
        {"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", "?????A??B"},
        {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", "????A"},
        {"a\xE2\x82", "a?"},
        {"plain ascii of more than eight \xC3\xA9", "plain ascii of more than eight \xC3\xA9"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char expected[128];
        size_t n = 0;
        int64_t marks = 0, replaced;
        for (const char *p = cases[i].repaired; *p; p++) {
            if (*p == '?') {
                marks++;
                n += utf8_encode(0xFFFD, expected + n);
            } else {
                expected[n++] = *p;
            }
        }
        size_t length;
        char *repaired = utf8_repair(cases[i].text, strlen(cases[i].text), &length, &replaced);
        ck_assert_uint_eq(length, n);
        ck_assert_mem_eq(repaired, expected, n);
        ck_assert_int_eq(replaced, marks);
        free(repaired);
    }
}
END_TEST

/* ---- random text ---- */

/* Characters that the pattern tells apart, and what is rare: digits and letters of other scripts, spaces of
 * all kinds, marks, an emoji of four bytes, the byte order mark, U+180E, and (raw) invalid bytes. */
static const char *const alphabet[] = {"a",
                                       "t",
                                       "h",
                                       "e",
                                       "s",
                                       "l",
                                       "r",
                                       "v",
                                       "d",
                                       "m",
                                       "T",
                                       "'",
                                       "'s",
                                       "'ll",
                                       "'re",
                                       " ",
                                       " ",
                                       "  ",
                                       "\n",
                                       "\t",
                                       "\r\n",
                                       "1",
                                       "27",
                                       ",",
                                       "--",
                                       "!",
                                       "\xC3\xA9",
                                       "\xE6\x97\xA5",
                                       "\xD9\xA1",
                                       "\xC2\xA0",
                                       "\xE3\x80\x80",
                                       "\xE2\x80\xA8",
                                       "\xC2\x85",
                                       "\xCC\x81",
                                       "\xF0\x9F\x99\x82",
                                       "\xEF\xBB\xBF",
                                       "\xE1\xA0\x8E",
                                       "\x1c",
                                       "\x01",
                                       "the",
                                       " and",
                                       "<|endoftext|>",
                                       "\xFF",
                                       "\xE2\x82",
                                       "\x80",
                                       "\xF0\x9F"};
enum { ALPHABET = sizeof alphabet / sizeof *alphabet, INVALID = 4 };

static size_t random_text(char *text, int64_t parts, bool valid) {
    size_t n = 0;
    int64_t kinds = draw(3) == 0 ? 1 + draw(6) : ALPHABET - (valid ? INVALID : 0); /* often only a few: long runs */
    int64_t offset = draw(ALPHABET - (valid ? INVALID : 0));
    for (int64_t i = 0; i < parts; i++) {
        const char *part = alphabet[(offset + draw(kinds)) % (ALPHABET - (valid ? INVALID : 0))];
        memcpy(text + n, part, strlen(part));
        n += strlen(part);
    }
    return n;
}

/* GPT-2's pattern as it was published, with the same white space. */
START_TEST(pieces_are_those_of_the_published_pattern) {
    seed_begin();
    const char *space =
        "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
    char pattern[512];
    snprintf(pattern, sizeof pattern,
             "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^%s\\p{L}\\p{N}]+|[%s]+(?![^%s])|[%s]+", space, space,
             space, space);
    int code;
    size_t at, differing = 0;
    pcre2_code *published = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at,
                                          NULL);
    pcre2_code *ours = pcre2_compile((PCRE2_SPTR)bpe_pattern(), PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code,
                                     &at, NULL);
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    ck_assert(published && ours);
    for (int round = 0; round < 5000; round++) {
        char text[1024];
        size_t n = random_text(text, 1 + draw(30), true);
        for (size_t from = 0; from < n;) {
            pcre2_match(published, (PCRE2_SPTR)text, n, from, 0, match, NULL);
            size_t begin = pcre2_get_ovector_pointer(match)[0], end = pcre2_get_ovector_pointer(match)[1];
            pcre2_match(ours, (PCRE2_SPTR)text, n, from, 0, match, NULL);
            differing += begin != from || pcre2_get_ovector_pointer(match)[0] != from ||
                         pcre2_get_ovector_pointer(match)[1] != end;
            from = end;
        }
    }
    ck_assert_msg(differing == 0, "%zu pieces differ " SEED_FORMAT, differing, SEED_VALUE);
    /* U+180E is no white space any more: with the space before it, it is a piece. */
    const char *mongolian = "  \xE1\xA0\x8E";
    pcre2_match(ours, (PCRE2_SPTR)mongolian, 5, 0, 0, match, NULL);
    ck_assert_uint_eq(pcre2_get_ovector_pointer(match)[1], 1);
    pcre2_match_data_free(match);
    pcre2_code_free(published);
    pcre2_code_free(ours);
}
END_TEST

/* The definition: look at all pairs, merge the lowest, again. Works on texts, from the file's lines. */
typedef struct {
    json_t *vocab;
    char *merges;
} Plain;

static int plain_rank(const Plain *plain, const char *left, const char *right) {
    char line[300];
    snprintf(line, sizeof line, "\n%.64s %.64s\n", left, right);
    const char *at = strstr(plain->merges, line);
    return at ? (int)(at - plain->merges) : -1; /* earlier in the file is lower */
}

static int64_t plain_encode(const Plain *plain, char symbols[][64], int64_t n, int32_t *ids) {
    for (;;) {
        int best = -1, best_rank = INT32_MAX;
        for (int64_t i = 0; i + 1 < n; i++) {
            int rank = plain_rank(plain, symbols[i], symbols[i + 1]);
            if (rank >= 0 && rank < best_rank) {
                best_rank = rank;
                best = (int)i;
            }
        }
        if (best < 0) break;
        char merged[2 * sizeof symbols[0]];
        snprintf(merged, sizeof merged, "%.63s%.63s", symbols[best], symbols[best + 1]);
        memcpy(symbols[best], merged, sizeof symbols[0]);
        memmove(symbols[best + 1], symbols[best + 2], (size_t)(n - best - 2) * sizeof symbols[0]);
        n--;
    }
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)json_integer_value(json_object_get(plain->vocab, symbols[i]));
    return n;
}

START_TEST(merging_follows_the_definition) {
    seed_begin();
    size_t bytes;
    Plain plain = {load(TINY "/vocab.json"), slurp(TINY "/merges.txt", &bytes)};
    Tokenizer *tokenizer = open_good(TINY);
    char *vocab_text = slurp(TINY "/vocab.json", &bytes);
    size_t merges_bytes = strlen(plain.merges);
    Error err;
    Bpe *bpe = bpe_parse(vocab_text, bytes, "v", plain.merges, merges_bytes, "m", &err);
    BpeEncoder *encoder = bpe_encoder_create(bpe);
    for (int round = 0; round < 300; round++) {
        static char symbols[200][64];
        char word[256] = "";
        int64_t n = 1 + draw(round % 4 == 0 ? 180 : 12);
        for (int64_t i = 0; i < n; i++) { /* letters only: one piece, and characters that are bytes */
            snprintf(symbols[i], sizeof symbols[i], "%c", "athendsiolr"[draw(round % 3 == 0 ? 3 : 11)]);
            strcat(word, symbols[i]);
        }
        int32_t expected[200];
        int64_t count = plain_encode(&plain, symbols, n, expected);
        Ids ids = encode(tokenizer, word, (size_t)n), long_ids = {0};
        bpe_encode_long_piece(encoder, word, (size_t)n, &long_ids.ids, &long_ids.n, &long_ids.capacity);
        ck_assert_msg(ids.n == count && long_ids.n == count, "\"%s\" " SEED_FORMAT, word, SEED_VALUE);
        ck_assert_msg(memcmp(ids.ids, expected, (size_t)count * 4) == 0, "\"%s\" " SEED_FORMAT, word, SEED_VALUE);
        ck_assert_msg(memcmp(long_ids.ids, expected, (size_t)count * 4) == 0, "\"%s\" " SEED_FORMAT, word, SEED_VALUE);
        free(ids.ids);
        free(long_ids.ids);
    }
    bpe_encoder_free(encoder);
    bpe_free(bpe);
    tokenizer_close(tokenizer);
    free(vocab_text);
    free(plain.merges);
    json_decref(plain.vocab);
}
END_TEST

static void check_round_trips(const Tokenizer *tokenizer) {
    for (int round = 0; round < 2000; round++) {
        char text[4096], decoded[4096]; /* the longest part has 13 bytes */
        size_t n = random_text(text, 1 + draw(200), true), at = 0, bytes;
        Ids ids = encode(tokenizer, text, n);
        for (int64_t i = 0; i < ids.n; i++) {
            const char *token = tokenizer_token(tokenizer, ids.ids[i], &bytes);
            memcpy(decoded + at, token, bytes);
            at += bytes;
        }
        bool same = at == n && memcmp(text, decoded, n) == 0;
        for (int64_t i = 0; i < ids.n; i++) same &= ids.ids[i] != tokenizer_end_of_document(tokenizer);
        ck_assert_msg(same, SEED_FORMAT, SEED_VALUE);
        free(ids.ids);
    }
}

/* Wherever the tokenizer says that a text may be cut, the tokens of the two sides are those of the whole. */
static void check_cuts(const Tokenizer *tokenizer) {
    Encoder encoder;
    encoder_init(&encoder, tokenizer);
    int64_t found = 0, wrong = 0;
    for (int round = 0; round < 3000; round++) {
        char text[1024];
        size_t n = random_text(text, 1 + draw(40), false);
        Ids whole = encode(tokenizer, text, n);
        for (size_t seen = 1; seen <= n; seen++) {
            size_t cut = encoder_safe_cut(&encoder, text, seen);
            if (cut == 0) continue;
            found++;
            Ids parts = {0};
            encoder_encode(&encoder, text, cut, &parts.ids, &parts.n, &parts.capacity);
            encoder_encode(&encoder, text + cut, n - cut, &parts.ids, &parts.n, &parts.capacity);
            wrong += parts.n != whole.n || memcmp(parts.ids, whole.ids, (size_t)whole.n * 4) != 0;
            free(parts.ids);
        }
        free(whole.ids);
    }
    ck_assert_int_ge(found, 10000);
    ck_assert_msg(wrong == 0, "%lld cuts change tokens " SEED_FORMAT, (long long)wrong, SEED_VALUE);
    encoder_end(&encoder);
}

START_TEST(round_trips_and_cuts_tiny) {
    seed_begin();
    Tokenizer *tokenizer = open_good(TINY);
    check_round_trips(tokenizer);
    check_cuts(tokenizer);
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(round_trips_and_cuts_gpt2) {
    if (!gpt2_directory()) return;
    seed_begin();
    Tokenizer *tokenizer = open_good(gpt2_directory());
    check_round_trips(tokenizer);
    check_cuts(tokenizer);
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(a_megabyte_of_one_letter_takes_no_square_time) {
    Tokenizer *tokenizer = open_good(TINY);
    size_t bytes = 1 << 20, token_bytes, sum = 0;
    char *text = xmalloc(bytes);
    memset(text, 'e', bytes);
    double start = clock_s();
    Ids ids = encode(tokenizer, text, bytes);
    ck_assert(clock_s() - start < 5); /* the square would be 10^12 */
    for (int64_t i = 0; i < ids.n; i++) {
        tokenizer_token(tokenizer, ids.ids[i], &token_bytes);
        sum += token_bytes;
    }
    ck_assert_uint_eq(sum, bytes);
    free(ids.ids);
    free(text);
    tokenizer_close(tokenizer);
}
END_TEST

static void *encode_many(void *argument) {
    Tokenizer *tokenizer = argument;
    int64_t sum = 0;
    for (int i = 0; i < 300; i++) {
        char text[64];
        snprintf(text, sizeof text, "the number %d and the heaven's %d", i, i * i);
        Ids ids = encode(tokenizer, text, strlen(text));
        for (int64_t j = 0; j < ids.n; j++) sum = 31 * sum % 1000003 + ids.ids[j];
        free(ids.ids);
    }
    return (void *)(intptr_t)sum;
}

START_TEST(threads_share_a_tokenizer) {
    Tokenizer *tokenizer = open_good(TINY);
    void *expected = encode_many(tokenizer), *sum;
    pthread_t threads[4];
    for (int t = 0; t < 4; t++) ck_assert_int_eq(pthread_create(&threads[t], NULL, encode_many, tokenizer), 0);
    for (int t = 0; t < 4; t++) {
        pthread_join(threads[t], &sum);
        ck_assert_ptr_eq(sum, expected);
    }
    tokenizer_close(tokenizer);
}
END_TEST

/* ---- damaged files ---- */

/* Text of a file with the first occurrence of `from` replaced, written to the scratch directory. */
static void write_changed(const char *name, const char *from, const char *to) {
    char path[256];
    size_t n;
    snprintf(path, sizeof path, TINY "/%s", name);
    char *text = slurp(path, &n), *at = strstr(text, from);
    ck_assert_msg(at != NULL, "%s has no %s", path, from);
    char *changed = xmalloc(n + strlen(to) + 1);
    size_t before = (size_t)(at - text);
    memcpy(changed, text, before);
    memcpy(changed + before, to, strlen(to));
    strcpy(changed + before + strlen(to), at + strlen(from));
    scratch_write(name, changed, n - strlen(from) + strlen(to));
    free(text);
    free(changed);
}

static void copy_tiny(void) {
    write_changed("vocab.json", "{", "{");
    write_changed("merges.txt", "#", "#");
}

static void expect_refused(const char *spec, const char *part) {
    Error err;
    Tokenizer *tokenizer = tokenizer_open(spec, &err);
    ck_assert_msg(tokenizer == NULL, "%s was accepted (%s)", spec, part);
    ck_assert_int_eq(err.status, EXIT_DATA);
    ck_assert_contains(err.message, part);
}

START_TEST(damaged_files_are_refused_with_a_place) {
    static const struct {
        const char *name, *from, *to, *part;
    } cases[] = {
        {"vocab.json", "\"!\": 0", "\"!\": 512", "token \"!\" has id 512; with 512 tokens, ids are 0 to 511"},
        {"vocab.json", "\"!\": 0", "\"!\": -1", "token \"!\" has id -1"},
        {"vocab.json", "\"!\": 0", "\"!\": 1", "both have id 1"},
        {"vocab.json", "\"!\": 0", "\"!\": \"0\"", "the id of token \"!\" is not a whole number"},
        {"vocab.json", "\"!\": 0", "\"!\": 0.5", "the id of token \"!\" is not a whole number"},
        {"vocab.json", "\"!\": 0", "\"\": 0", "has an empty token"},
        {"vocab.json", "\"!\": 0", "\"!!\": 0", "byte 0x21 has no token"},
        {"vocab.json", "\"!\": 0", "\" \": 0", "token \" \" has the character U+0020, which stands for no byte"},
        {"vocab.json", "\"!\": 0", "\"\xE6\x97\xA5\": 0", "has the character U+65E5, which stands for no byte"},
        {"vocab.json", "\"!\": 0", "\"\\\"\": 0", "duplicate"},
        {"vocab.json", "<|endoftext|>", "<|end|>", "has no token that ends a document (looked for <|endoftext|>"},
        {"vocab.json", "\"!\": 0", "\"!\": 0, 7", "vocab.json:"},
        {"vocab.json", "\"!\": 0", "\"!\xFF\": 0", "not valid JSON"},
        {"merges.txt", "t h\n", "t  h\n", "merges.txt:2: a merge is two tokens with one space between, not \"t  h\""},
        {"merges.txt", "t h\n", "th\n", "merges.txt:2: a merge is two tokens"},
        {"merges.txt", "t h\n", " t h\n", "merges.txt:2: a merge is two tokens"},
        {"merges.txt", "t h\n", "\nt h\n", "merges.txt:2: a merge is two tokens"},
        {"merges.txt", "t h\n", "t qqq\n", "merges.txt:2: \"qqq\" is not in the vocabulary"},
        {"merges.txt", "t h\n", "q z\n", "merges.txt:2: \"qz\" is not in the vocabulary"},
        {"merges.txt", "t h\n", "t h\nt h\n", "merges.txt:3: the same merge as merge 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        copy_tiny();
        write_changed(cases[i].name, cases[i].from, cases[i].to);
        expect_refused(scratch_path, cases[i].part);
    }
    copy_tiny();
    scratch_write("vocab.json", "[1, 2]", 6);
    expect_refused(scratch_path, "should be one JSON object");
    scratch_write("vocab.json", "{\"a\": 0}", 8);
    expect_refused(scratch_path, "has 1 tokens; a byte-level BPE has at least 257");
    scratch_write("vocab.json", "", 0);
    expect_refused(scratch_path, "vocab.json:1: column 0: not valid JSON");
    copy_tiny();
    scratch_write("merges.txt", "#version: 0.2\n", 14);
    expect_refused(scratch_path, "merges.txt: has no merges");
    unlink(scratch("merges.txt"));
    expect_refused(scratch_path, "merges.txt: cannot open");
    unlink(scratch("vocab.json"));
    expect_refused(scratch_path, "vocab.json: cannot open");
    expect_refused(scratch("none"), "there is no such file or directory; give \"bytes\"");
    scratch_write("tokenizer.json", "{}", 2);
    expect_refused(scratch("tokenizer.json"), "other kinds of tokenizer files are not read");
    expect_refused("", "there is no such file");
}
END_TEST

START_TEST(a_merge_must_not_make_the_end_of_a_document) {
    write_changed("vocab.json", "\"<|endoftext|>\"", "\"</s>\"");
    write_changed("merges.txt", "t h\n", "t h\n</s >\n");
    size_t n;
    char *vocab = slurp(scratch("vocab.json"), &n), *token = strstr(vocab, "\"th\"");
    ck_assert_ptr_nonnull(token);
    char *changed = xmalloc(n + 16); /* "th" becomes "</s": a part to merge with ">" */
    size_t before = (size_t)(token - vocab);
    memcpy(changed, vocab, before);
    strcpy(changed + before, "\"</s\"");
    strcat(changed, token + 4);
    scratch_write("vocab.json", changed, strlen(changed));
    write_changed("merges.txt", "t h\n", "</s >\n");
    expect_refused(scratch_path, "merges.txt:2: this merge makes the token that ends a document");
    free(vocab);
    free(changed);
}
END_TEST

START_TEST(windows_line_ends_and_openai_names_are_read) {
    size_t n;
    char *merges = slurp(TINY "/merges.txt", &n), *crlf = xmalloc(2 * n);
    size_t out = 0;
    for (size_t i = 0; i < n; i++) {
        if (merges[i] == '\n') crlf[out++] = '\r';
        crlf[out++] = merges[i];
    }
    scratch_write("vocab.bpe", crlf, out);
    char *vocab = slurp(TINY "/vocab.json", &n);
    scratch_write("encoder.json", vocab, n);
    Tokenizer *a = open_good(TINY), *b = open_good(scratch_path);
    const char *text = "In the beginning God created the heaven and the earth.";
    Ids x = encode(a, text, strlen(text)), y = encode(b, text, strlen(text));
    ck_assert_int_eq(x.n, y.n);
    ck_assert_mem_eq(x.ids, y.ids, (size_t)x.n * 4);
    free(x.ids);
    free(y.ids);
    free(merges);
    free(crlf);
    free(vocab);
    tokenizer_close(a);
    tokenizer_close(b);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("tokenizer");
    TCase *tests = tcase_create("tokenizer");
    tcase_add_checked_fixture(tests, scratch_make, scratch_remove);
    tcase_set_timeout(tests, 60);
    tcase_add_test(tests, tiny_bpe_gives_golden_ids);
    tcase_add_test(tests, gpt2_gives_golden_ids);
    tcase_add_test(tests, bytes_are_bytes);
    tcase_add_test(tests, utf8_all_characters_and_invalid_parts);
    tcase_add_test(tests, pieces_are_those_of_the_published_pattern);
    tcase_add_test(tests, merging_follows_the_definition);
    tcase_add_test(tests, round_trips_and_cuts_tiny);
    tcase_add_test(tests, round_trips_and_cuts_gpt2);
    tcase_add_test(tests, a_megabyte_of_one_letter_takes_no_square_time);
    tcase_add_test(tests, threads_share_a_tokenizer);
    tcase_add_test(tests, damaged_files_are_refused_with_a_place);
    tcase_add_test(tests, a_merge_must_not_make_the_end_of_a_document);
    tcase_add_test(tests, windows_line_ends_and_openai_names_are_read);
    suite_add_tcase(suite, tests);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
