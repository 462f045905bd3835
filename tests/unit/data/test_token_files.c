/* test_token_files.c - Megatron and llm.c token files: what is read, and what is refused and how. */
#include "tests/unit/data/scratch.h"

#include <fcntl.h>
#include <sys/resource.h>

#include "data/source.h"
#include "data/token_file.h"

static TokenFile *open_good(const char *path) {
    Error err;
    TokenFile *file = token_file_open(path, &err);
    ck_assert_msg(file != NULL, "%s", err.message);
    return file;
}

static void expect_tokens(const char *path, const int32_t *expected, int64_t n, const int64_t *starts) {
    TokenFile *file = open_good(path);
    ck_assert_int_eq(token_file_tokens(file), n);
    int32_t tokens[256];
    int64_t doc_start[256];
    Error err;
    for (int64_t first = 0; first <= n; first++) {
        for (int64_t count = 0; first + count <= n; count++) {
            ck_assert_msg(token_file_read(file, first, count, 200000, tokens, doc_start, &err) == 0, "%s", err.message);
            for (int64_t i = 0; i < count; i++) {
                ck_assert_int_eq(tokens[i], expected[first + i]);
                ck_assert_int_eq(doc_start[i], starts[first + i]);
            }
        }
    }
    ck_assert_int_eq(token_file_read(file, n, 1, 200000, tokens, NULL, &err), -1);
    ck_assert_int_eq(token_file_read(file, -1, 1, 200000, tokens, NULL, &err), -1);
    ck_assert_int_eq(token_file_read(file, INT64_MAX, INT64_MAX, 200000, tokens, NULL, &err), -1);
    token_file_close(file);
}

/* The .bin's tokens by a plain read, as an independent answer. */
static int64_t plain_tokens(const char *path, int width, int32_t *tokens) {
    size_t n;
    char *bytes = slurp(path, &n);
    for (size_t i = 0; i < n / (size_t)width; i++) {
        uint16_t narrow;
        if (width == 2) {
            memcpy(&narrow, bytes + 2 * i, 2);
            tokens[i] = narrow;
        } else {
            memcpy(&tokens[i], bytes + 4 * i, 4);
        }
    }
    free(bytes);
    return (int64_t)n / width;
}

START_TEST(megatron_samples_are_read) {
    int32_t tokens[256];
    int64_t n = plain_tokens(FIXTURES "mini.bin", 2, tokens);
    int64_t starts[16] = {0, 0, 0, 0, 0, 5, 5, 5, 8, 8, 8, 8, 8, 8, 8, 8}; /* documents of 5, 3, 8 tokens */
    ck_assert_int_eq(n, 16);
    expect_tokens(FIXTURES "mini", tokens, n, starts);
    expect_tokens(FIXTURES "mini.bin", tokens, n, starts);
    expect_tokens(FIXTURES "mini.idx", tokens, n, starts);
    n = plain_tokens(FIXTURES "mini_i32.bin", 4, tokens);
    TokenFile *file = open_good(FIXTURES "mini_i32");
    ck_assert_int_eq(token_file_tokens(file), n);
    ck_assert_str_eq(token_file_format(file), "megatron");
    ck_assert_str_eq(token_file_type(file), "int32");
    token_file_close(file);
    file = open_good(FIXTURES "mini_sentences"); /* 2 documents of 2 + 3 sequences */
    ck_assert_int_eq(token_file_documents(file), 2);
    token_file_close(file);
}
END_TEST

START_TEST(multimodal_files_are_refused_unless_all_text) {
    Error err;
    ck_assert_ptr_null(token_file_open(FIXTURES "mini_mm", &err));
    ck_assert_contains(err.message, "sequence 1 has mode 1");
    ck_assert_int_eq(err.status, EXIT_DATA);
    size_t n, bin_n;
    char *idx = slurp(FIXTURES "mini_mm.idx", &n), *bin = slurp(FIXTURES "mini_mm.bin", &bin_n);
    memset(idx + n - 4, 0, 4);
    scratch_write("mm.idx", idx, n);
    scratch_write("mm.bin", bin, bin_n);
    token_file_close(open_good(scratch("mm")));
    free(idx);
    free(bin);
}
END_TEST

START_TEST(llmc_samples_are_read) {
    int32_t tokens[64];
    int64_t starts[64];
    TokenFile *file = open_good(FIXTURES "llmc_gpt2_val_000000.bin");
    ck_assert_str_eq(token_file_format(file), "llm.c");
    ck_assert_int_eq(token_file_tokens(file), 48);
    Error err;
    ck_assert_int_eq(token_file_read(file, 0, 48, 50257, tokens, starts, &err), 0);
    int64_t documents = 0, start = 0;
    for (int i = 0; i < 48; i++) {
        if (tokens[i] == 50256) {
            documents++;
            start = i;
        }
        ck_assert_int_eq(starts[i], start);
    }
    ck_assert_int_eq(token_file_documents(file), documents);
    int64_t one;
    for (int i = 0; i < 48; i++) { /* found by reading backwards */
        ck_assert_int_eq(token_file_read(file, i, 1, 50257, tokens, &one, &err), 0);
        ck_assert_int_eq(one, starts[i]);
    }
    token_file_close(file);
    file = open_good(FIXTURES "llmc_llama3_train_000001.bin");
    ck_assert_int_eq(token_file_tokens(file), 16);
    ck_assert_str_eq(token_file_type(file), "uint32");
    ck_assert_int_eq(token_file_read(file, 0, 16, 128256, tokens, NULL, &err), 0);
    ck_assert_int_eq(tokens[0], 128000);
    token_file_close(file);
}
END_TEST

/* Tokens 1000 s + i, all below 50256 unless eot. */
static void write_shard(const char *name, int number, int tokens) {
    int32_t header[256] = {20240520, 1, tokens};
    char *bytes = xmalloc(1024 + 2 * (uint64_t)tokens);
    memcpy(bytes, header, 1024);
    for (int i = 0; i < tokens; i++) {
        uint16_t token = (uint16_t)(1000 * number + i);
        memcpy(bytes + 1024 + 2 * i, &token, 2);
    }
    scratch_write(name, bytes, 1024 + 2 * (size_t)tokens);
    free(bytes);
}

START_TEST(shards_of_a_glob_are_one_stream) {
    int sizes[] = {5, 0, 7, 1};
    int32_t expected[13], read[13];
    int64_t starts[13], n = 0;
    for (int s = 0; s < 4; s++) {
        char name[32];
        snprintf(name, sizeof name, "x_train_%06d.bin", s);
        write_shard(name, s, sizes[s]);
        for (int i = 0; i < sizes[s]; i++) expected[n++] = 1000 * s + i;
    }
    memset(starts, 0, sizeof starts);
    expect_tokens(scratch("x_train_*.bin"), expected, n, starts);
    /* A document that runs over the border of shards. */
    size_t bytes;
    char *shard = slurp(scratch("x_train_000000.bin"), &bytes);
    uint16_t end = 50256;
    memcpy(shard + 1024 + 2 * 3, &end, 2);
    scratch_write("x_train_000000.bin", shard, bytes);
    free(shard);
    TokenFile *file = open_good(scratch("x_train_*.bin"));
    Error err;
    ck_assert_int_eq(token_file_read(file, 12, 1, 50257, read, starts, &err), 0);
    ck_assert_int_eq(read[0], 3000);
    ck_assert_int_eq(starts[0], 3);
    ck_assert_int_eq(token_file_documents(file), 2);
    token_file_close(file);
    ck_assert_ptr_null(token_file_open(scratch("y_*.bin"), &err));
    ck_assert_contains(err.message, "no file matches");
    shard = slurp(FIXTURES "llmc_llama3_train_000001.bin", &bytes);
    scratch_write("x_train_000009.bin", shard, bytes);
    free(shard);
    ck_assert_ptr_null(token_file_open(scratch("x_train_*.bin"), &err));
    ck_assert_contains(err.message, "uint32");
}
END_TEST

START_TEST(many_shards_raise_the_limit_of_open_files) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 32;
    setrlimit(RLIMIT_NOFILE, &limit);
    for (int s = 0; s < 60; s++) {
        char name[32];
        snprintf(name, sizeof name, "many_%06d.bin", s);
        write_shard(name, s % 50, 3);
    }
    TokenFile *file = open_good(scratch("many_*.bin"));
    ck_assert_int_eq(token_file_tokens(file), 180);
    token_file_close(file);
    limit.rlim_cur = limit.rlim_max = 32;
    setrlimit(RLIMIT_NOFILE, &limit);
    Error err;
    ck_assert_ptr_null(token_file_open(scratch("many_*.bin"), &err));
    ck_assert_contains(err.message, "ulimit -n");
}
END_TEST

/* ---- refusals ---- */

static void expect_refused(const char *path, const char *part) {
    Error err;
    TokenFile *file = token_file_open(path, &err);
    ck_assert_msg(file == NULL, "%s was accepted", path);
    ck_assert_int_eq(err.status, EXIT_DATA);
    ck_assert_contains(err.message, part);
}

/* Every size: 34 + 12 N + 8 D of an index with given arrays. */
typedef struct {
    uint64_t version, sequences, entries;
    uint8_t type;
    int32_t lengths[4];
    int64_t pointers[4], documents[4];
    size_t bin_bytes;
} Pair;

static void write_pair(const char *prefix, const Pair *pair, int n, int d) {
    char bytes[512] = "MMIDIDX\0", name[64];
    size_t at = 34;
    memcpy(bytes + 9, &pair->version, 8);
    bytes[17] = (char)pair->type;
    memcpy(bytes + 18, &pair->sequences, 8);
    memcpy(bytes + 26, &pair->entries, 8);
    memcpy(bytes + at, pair->lengths, 4 * (size_t)n);
    memcpy(bytes + at + 4 * n, pair->pointers, 8 * (size_t)n);
    memcpy(bytes + at + 12 * n, pair->documents, 8 * (size_t)d);
    snprintf(name, sizeof name, "%s.idx", prefix);
    scratch_write(name, bytes, at + 12 * (size_t)n + 8 * (size_t)d);
    snprintf(name, sizeof name, "%s.bin", prefix);
    char zeros[512] = {0};
    scratch_write(name, zeros, pair->bin_bytes);
}

static const Pair good = {1, 3, 3, TOKEN_U16, {5, 3, 8}, {0, 10, 16}, {0, 1, 3}, 32};

static void expect_pair_refused(Pair pair, const char *part) {
    write_pair("pair", &pair, 3, 3);
    expect_refused(scratch("pair"), part);
}

START_TEST(damaged_indices_are_refused_with_field_and_values) {
    write_pair("pair", &good, 3, 3);
    token_file_close(open_good(scratch("pair")));
    Pair p = good;
    p.version = 2;
    expect_pair_refused(p, "has version 2 (byte 9), version 1 is expected");
    p = good, p.sequences = 4;
    expect_pair_refused(p, "94 bytes; with 4 sequences");
    p = good, p.sequences = UINT64_MAX;
    expect_pair_refused(p, "has room for");
    p = good, p.sequences = (UINT64_C(1) << 62) + 3; /* 12 N wraps to the right size */
    expect_pair_refused(p, "has room for");
    p = good, p.entries = 0;
    expect_pair_refused(p, "0 document entries");
    p = good, p.entries = (UINT64_C(1) << 61) + 3;
    expect_pair_refused(p, "document entries");
    p = good, p.lengths[1] = -3;
    expect_pair_refused(p, "sequence 1 has length -3");
    p = good, p.lengths[1] = 4;
    expect_pair_refused(p, "sequence 2 begins at byte 16 of the .bin, but the ones before end at 18");
    p = good, p.pointers[2] = -16; /* a sum that was kept in 32 bits */
    expect_pair_refused(p, "sequence 2 begins at byte -16");
    p = good, p.documents[0] = 1;
    expect_pair_refused(p, "document entry 0 is 1, expected 0");
    p = good, p.documents[1] = 4;
    expect_pair_refused(p, "document entry 1 is 4");
    p = good, p.documents[1] = -1;
    expect_pair_refused(p, "document entry 1 is -1");
    p = good, p.documents[1] = 2, p.documents[2] = 1;
    expect_pair_refused(p, "entries may not fall (the one before is 2)");
    p = good, p.documents[2] = 2;
    expect_pair_refused(p, "the last document entry is 2, but there are 3 sequences: 1 of them");
    p = good, p.bin_bytes = 30;
    expect_pair_refused(p, "has 30 bytes, but sequence 2");
    p = good, p.bin_bytes = 34;
    expect_pair_refused(p, "describes 32 (16 tokens of type uint16): the two do not belong together");
}
END_TEST

START_TEST(every_type_code_has_a_width_or_a_refusal) {
    for (int code = 0; code < 256; code++) {
        Pair p = good;
        p.type = (uint8_t)code;
        int width = (int[]){0, 1, 1, 2, 4, 8, 0, 0, 2}[code < 9 ? code : 0];
        p.pointers[1] = 5 * width;
        p.pointers[2] = 8 * width;
        p.bin_bytes = (size_t)(16 * width);
        if (width == 0) {
            char part[32];
            snprintf(part, sizeof part, "has token type %d", code);
            expect_pair_refused(p, part);
        } else {
            write_pair("pair", &p, 3, 3);
            TokenFile *file = open_good(scratch("pair"));
            ck_assert_int_eq(token_file_tokens(file), 16);
            token_file_close(file);
        }
    }
}
END_TEST

START_TEST(missing_and_foreign_files_are_named) {
    expect_refused(scratch("nothing"), "there is no such token file");
    expect_refused(scratch("nothing.idx"), "nothing.bin: cannot open");
    write_pair("half", &good, 3, 3);
    unlink(scratch("half.bin"));
    expect_refused(scratch("half"), "half.bin: cannot open");
    scratch_write("text.txt", "once upon a time", 16);
    expect_refused(scratch("text.txt"), "too short for a token file");
    char text[2000];
    memset(text, 'a', sizeof text);
    scratch_write("text.txt", text, sizeof text);
    expect_refused(scratch("text.txt"), "trident tokenize");
    expect_refused(scratch_path, "is not a regular file");
    int32_t header[256] = {20240520, 2, 0};
    scratch_write("v2.bin", header, sizeof header);
    expect_refused(scratch("v2.bin"), "has version 2 (byte 4)");
    header[1] = 1, header[2] = 1;
    scratch_write("v1.bin", header, sizeof header);
    expect_refused(scratch("v1.bin"), "with 1 tokens (byte 8) it should have 1026");
    header[2] = -1;
    scratch_write("v1.bin", header, sizeof header);
    expect_refused(scratch("v1.bin"), "has -1 tokens");
    header[0] = 20240522;
    scratch_write("eval.bin", header, sizeof header);
    expect_refused(scratch("eval.bin"), "evaluation file");
}
END_TEST

/* A damaged file gives a refusal, or the same tokens: no third thing. (Where documents begin has no
 * redundancy in the format: another non-decreasing entry is another, valid, division.) */
static int refused_or_identical(const int32_t *expected, int64_t n) {
    Error err;
    TokenFile *file = token_file_open(scratch("mutant"), &err);
    if (!file) {
        ck_assert_int_eq(err.status, EXIT_DATA);
        ck_assert(strchr(err.message, '\n') == NULL && strlen(err.message) > 20);
        return 1;
    }
    ck_assert_int_eq(token_file_tokens(file), n);
    int32_t tokens[64];
    int64_t starts[64];
    ck_assert_msg(token_file_read(file, 0, n, 200000, tokens, starts, &err) == 0, "%s", err.message);
    ck_assert_mem_eq(tokens, expected, (size_t)n * sizeof *tokens);
    token_file_close(file);
    return 0;
}

START_TEST(every_flipped_bit_and_every_truncation_of_an_index) {
    static const char *const names[] = {"mini", "mini_i32", "mini_sentences"};
    for (int f = 0; f < 3; f++) {
        char path[128];
        snprintf(path, sizeof path, FIXTURES "%s.bin", names[f]);
        int32_t expected[64];
        int64_t n = plain_tokens(path, f == 0 ? 2 : 4, expected);
        size_t bytes, idx_bytes;
        char *bin = slurp(path, &bytes);
        scratch_write("mutant.bin", bin, bytes);
        snprintf(path, sizeof path, FIXTURES "%s.idx", names[f]);
        char *idx = slurp(path, &idx_bytes);
        int refused = 0, bits = 8 * (int)idx_bytes;
        for (int bit = 0; bit < bits; bit++) {
            idx[bit / 8] ^= (char)(1 << bit % 8);
            scratch_write("mutant.idx", idx, idx_bytes);
            refused += refused_or_identical(expected, n);
            idx[bit / 8] ^= (char)(1 << bit % 8);
        }
        ck_assert_int_ge(refused, bits * 95 / 100);
        for (size_t cut = 0; cut < idx_bytes; cut++) {
            scratch_write("mutant.idx", idx, cut);
            ck_assert_int_eq(refused_or_identical(expected, n), 1);
        }
        scratch_write("mutant.idx", idx, idx_bytes);
        for (size_t cut = 0; cut < bytes; cut++) {
            scratch_write("mutant.bin", bin, cut);
            ck_assert_int_eq(refused_or_identical(expected, n), 1);
        }
        free(bin);
        free(idx);
    }
}
END_TEST

START_TEST(flipped_bits_and_truncations_of_a_shard_header) {
    size_t bytes;
    char *shard = slurp(FIXTURES "llmc_gpt2_val_000000.bin", &bytes);
    int32_t expected[64];
    for (int i = 0; i < 48; i++) {
        uint16_t token;
        memcpy(&token, shard + 1024 + 2 * i, 2);
        expected[i] = token;
    }
    for (int bit = 0; bit < 8 * 1024; bit++) {
        shard[bit / 8] ^= (char)(1 << bit % 8);
        scratch_write("mutant.bin", shard, bytes);
        int refused = refused_or_identical(expected, 48);
        if (bit < 96) ck_assert_int_eq(refused, 1); /* magic, version, tokens; the rest is unused */
        shard[bit / 8] ^= (char)(1 << bit % 8);
    }
    for (size_t cut = 0; cut < bytes; cut++) {
        scratch_write("mutant.bin", shard, cut);
        ck_assert_int_eq(refused_or_identical(expected, 48), 1);
    }
    free(shard);
}
END_TEST

/* ---- tokens out of the vocabulary, files that shrink, large files ---- */

START_TEST(a_token_outside_the_vocabulary_is_located) {
    Pair p = good;
    write_pair("pair", &p, 3, 3);
    uint16_t tokens[16] = {0};
    tokens[6] = 1000;
    scratch_write("pair.bin", tokens, sizeof tokens);
    TokenFile *file = open_good(scratch("pair"));
    int32_t out[16];
    Error err;
    ck_assert_int_eq(token_file_read(file, 0, 16, 1001, out, NULL, &err), 0);
    ck_assert_int_eq(token_file_read(file, 0, 16, 1000, out, NULL, &err), -1);
    ck_assert_contains(err.message, "pair.bin: token 6 of the file (in document 1, token 1 of it) is 1000, outside the "
                                    "vocabulary of 1000");
    ck_assert_int_eq(token_file_read(file, 6, 1, 7, out, NULL, &err), -1);
    token_file_close(file);
    p.type = TOKEN_I32;
    p.pointers[1] *= 2, p.pointers[2] *= 2, p.bin_bytes *= 2;
    write_pair("pair", &p, 3, 3);
    int32_t wide[16] = {0};
    wide[15] = -1;
    scratch_write("pair.bin", wide, sizeof wide);
    file = open_good(scratch("pair"));
    ck_assert_int_eq(token_file_read(file, 0, 16, 50257, out, NULL, &err), -1);
    ck_assert_contains(err.message, "token 15 of the file (in document 1, token 10 of it) is -1");
    token_file_close(file);
    file = open_good(FIXTURES "llmc_llama3_train_000001.bin");
    ck_assert_int_eq(token_file_read(file, 0, 16, 128000, out, NULL, &err), -1);
    ck_assert_contains(err.message, "is 128000, outside the vocabulary of 128000");
    token_file_close(file);
}
END_TEST

START_TEST(a_file_that_shrinks_is_an_error_not_a_signal) {
    write_pair("pair", &good, 3, 3);
    TokenFile *file = open_good(scratch("pair"));
    ck_assert_int_eq(truncate(scratch("pair.bin"), 20), 0);
    int32_t out[16];
    Error err;
    ck_assert_int_eq(token_file_read(file, 0, 16, 100, out, NULL, &err), -1);
    ck_assert_contains(err.message, "pair.bin: ends at byte 20");
    token_file_close(file);
}
END_TEST

START_TEST(positions_beyond_32_bits) {
    /* Three sequences of 2^31 - 1 tokens of 4 bytes in a sparse file: documents begin past 2^31 and 2^32
     * tokens, bytes past 2^34. */
    int64_t length = INT32_MAX;
    Pair p = {1, 3, 4, TOKEN_I32, {INT32_MAX, INT32_MAX, INT32_MAX}, {0, 4 * length, 8 * length}, {0, 1, 2, 3}, 0};
    write_pair("big", &p, 3, 4);
    ck_assert_int_eq(truncate(scratch("big.bin"), 12 * length), 0);
    int fd = open(scratch("big.bin"), O_WRONLY);
    for (int64_t i = 0; i < 3; i++) {
        int32_t token = 100 + (int32_t)i;
        ck_assert_int_eq(pwrite(fd, &token, 4, 4 * i * length), 4);
        token += 10;
        ck_assert_int_eq(pwrite(fd, &token, 4, 4 * (i + 1) * length - 4), 4);
    }
    close(fd);
    TokenFile *file = open_good(scratch("big"));
    ck_assert_int_eq(token_file_tokens(file), 3 * length);
    Error err;
    int32_t out[2];
    int64_t starts[2];
    for (int64_t i = 0; i < 3; i++) {
        ck_assert_int_eq(token_file_read(file, i * length, 2, 1000, out, starts, &err), 0);
        ck_assert_int_eq(out[0], 100 + i);
        ck_assert_int_eq(starts[0], i * length);
        ck_assert_int_eq(token_file_read(file, (i + 1) * length - 1, 1, 1000, out, starts, &err), 0);
        ck_assert_int_eq(out[0], 110 + i);
        ck_assert_int_eq(starts[0], i * length);
    }
    token_file_close(file);
    p.pointers[2] = (int32_t)(uint32_t)(8 * length);
    write_pair("big", &p, 3, 4);
    ck_assert_int_eq(truncate(scratch("big.bin"), 12 * length), 0);
    expect_refused(scratch("big"), "sequence 2 begins at byte -8");
}
END_TEST

/* More windows than 2^31, and many epochs of them: sample numbers past 2^32. */
START_TEST(samples_beyond_32_bits) {
    enum { SEQ = 2 };
    int64_t length = INT32_MAX, tokens = 3 * length, windows = (tokens - 1) / SEQ;
    Pair p = {1, 3, 4, TOKEN_U16, {INT32_MAX, INT32_MAX, INT32_MAX}, {0, 2 * length, 4 * length}, {0, 1, 2, 3}, 0};
    int64_t probes[] = {0, 1, INT64_C(1) << 30, INT32_MAX, INT64_C(1) << 31, windows - 1};
    enum { PROBES = sizeof probes / sizeof probes[0] };
    write_pair("big", &p, 3, 4);
    ck_assert_int_eq(truncate(scratch("big.bin"), 2 * tokens), 0);
    int fd = open(scratch("big.bin"), O_WRONLY);
    for (int i = 0; i < PROBES; i++) {
        uint16_t pair[] = {(uint16_t)(100 + i), (uint16_t)(200 + i)};
        ck_assert_int_eq(pwrite(fd, pair, sizeof pair, 2 * SEQ * probes[i]), sizeof pair);
    }
    close(fd);
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        DataOptions options = {.spec = scratch("big"),
                               .seq_len = SEQ,
                               .vocab = 1000,
                               .seed = 7,
                               .mask_documents = true,
                               .shuffle = shuffle};
        Error err;
        DataSource *source = data_open(&options, &err);
        ck_assert_msg(source != NULL, "%s", err.message);
        ck_assert_int_eq(data_corpus_windows(source, 0), windows);
        int32_t read[SEQ], targets[SEQ], positions[SEQ], starts[SEQ];
        for (int64_t epoch = 0; epoch < 1 << 20; epoch = 3 * epoch + 1) {
            for (int i = 0; i < PROBES; i++) {
                int64_t k = epoch * windows + probes[i], drawn;
                ck_assert_int_eq(data_sample(source, k, read, targets, positions, starts, &err), 0);
                data_counters(source, k, &drawn);
                ck_assert_int_eq(drawn, k);
                if (shuffle) continue;
                ck_assert_int_eq(read[0], 100 + i);
                ck_assert_int_eq(read[1], 200 + i);
                ck_assert_int_eq(targets[0], 200 + i);
                ck_assert_int_eq(positions[0], 0);
            }
        }
        data_close(source);
    }
}
END_TEST

START_TEST(document_index_against_a_plain_list) {
    seed_begin();
    for (int round = 0; round < 30; round++) {
        int64_t positions[200], n = 1 + draw(199), position = 0, n_added = 0;
        DocumentIndex index;
        for (int64_t d = 0; d < n; d++) {
            positions[d] = position;
            position += draw(4) == 0 ? 0 : draw(3) == 0 ? draw(INT64_C(1) << 33) : draw(10); /* empty, huge, small */
        }
        int64_t tokens = position + 1;
        document_index_begin(&index, n, tokens);
        for (int64_t d = 0; d < n; d++) document_index_add(&index, &n_added, positions[d]);
        document_index_end(&index, n_added);
        for (int64_t d = 0; d < n; d++) ck_assert_int_eq(document_index_start(&index, d), positions[d]);
        for (int probe = 0; probe < 400; probe++) {
            int64_t at = probe < 200 && probe < n ? positions[probe] + draw(3) - 1 : draw(tokens);
            if (at < 0 || at >= tokens) continue;
            int64_t expected = 0;
            for (int64_t d = 0; d < n; d++) {
                if (positions[d] <= at) expected = d;
            }
            ck_assert_msg(document_index_find(&index, at) == expected, SEED_FORMAT, SEED_VALUE);
        }
        document_index_free(&index);
    }
}
END_TEST

START_TEST(empty_documents_anywhere) {
    /* Entries repeat: documents 0, 2, 3 and 5 are empty. */
    static const int64_t documents[] = {0, 0, 1, 1, 1, 3, 3};
    char bytes[512] = "MMIDIDX\0";
    uint64_t version = 1, n = 3, d = 7;
    memcpy(bytes + 9, &version, 8);
    bytes[17] = TOKEN_U16;
    memcpy(bytes + 18, &n, 8);
    memcpy(bytes + 26, &d, 8);
    memcpy(bytes + 34, good.lengths, 12);
    memcpy(bytes + 46, good.pointers, 24);
    memcpy(bytes + 70, documents, sizeof documents);
    scratch_write("empty.idx", bytes, 70 + sizeof documents);
    char zeros[32] = {0};
    scratch_write("empty.bin", zeros, sizeof zeros);
    TokenFile *file = open_good(scratch("empty"));
    ck_assert_int_eq(token_file_documents(file), 6);
    int32_t tokens[16];
    int64_t starts[16];
    Error err;
    ck_assert_int_eq(token_file_read(file, 0, 16, 10, tokens, starts, &err), 0);
    for (int i = 0; i < 16; i++) ck_assert_int_eq(starts[i], i < 5 ? 0 : 5);
    token_file_close(file);
}
END_TEST

/* Documents of no tokens: first, last, side by side, alone. */
START_TEST(sequences_without_tokens) {
    enum { SEQUENCES = 4, LENGTH = 3 };
    for (int empty = 0; empty < 1 << SEQUENCES; empty++) {
        Pair p = {.version = 1, .sequences = SEQUENCES, .entries = SEQUENCES + 1, .type = TOKEN_U16};
        int64_t expected[SEQUENCES * LENGTH], n = 0; /* where each token's document begins */
        char bytes[34 + 12 * SEQUENCES + 8 * (SEQUENCES + 1)] = "MMIDIDX\0", zeros[2 * SEQUENCES * LENGTH] = {0};
        memcpy(bytes + 9, &p.version, 8);
        bytes[17] = (char)p.type;
        memcpy(bytes + 18, &p.sequences, 8);
        memcpy(bytes + 26, &p.entries, 8);
        for (int64_t s = 0; s <= SEQUENCES; s++) {
            memcpy(bytes + 34 + 12 * SEQUENCES + 8 * s, &s, 8);
            if (s == SEQUENCES) break;
            int32_t length = empty >> s & 1 ? 0 : LENGTH;
            int64_t pointer = 2 * n, start = n;
            memcpy(bytes + 34 + 4 * s, &length, 4);
            memcpy(bytes + 34 + 4 * SEQUENCES + 8 * s, &pointer, 8);
            for (int i = 0; i < length; i++) expected[n++] = start;
        }
        scratch_write("gaps.idx", bytes, sizeof bytes);
        scratch_write("gaps.bin", zeros, 2 * (size_t)n);
        TokenFile *file = open_good(scratch("gaps"));
        ck_assert_int_eq(token_file_tokens(file), n);
        ck_assert_int_eq(token_file_documents(file), SEQUENCES);
        int32_t tokens[SEQUENCES * LENGTH];
        int64_t starts[SEQUENCES * LENGTH];
        Error err;
        ck_assert_int_eq(token_file_read(file, 0, n, 10, tokens, starts, &err), 0);
        ck_assert_mem_eq(starts, expected, (size_t)n * sizeof *starts);
        token_file_close(file);
        DataOptions options = {.spec = scratch("gaps"), .seq_len = 2, .vocab = 10, .mask_documents = true};
        DataSource *source = data_open(&options, &err);
        if (n == 0) {
            ck_assert_ptr_null(source);
            ck_assert_contains(err.message, "has 0 tokens; with model.seq_len = 2 it needs at least 3");
            continue;
        }
        ck_assert_int_eq(data_corpus_windows(source, 0), (n - 1) / 2);
        for (int64_t w = 0; w < (n - 1) / 2; w++) {
            int32_t targets[2], positions[2], doc_start[2];
            ck_assert_int_eq(data_sample(source, w, tokens, targets, positions, doc_start, &err), 0);
            for (int64_t i = 0; i < 2; i++) {
                int64_t at = 2 * w + i;
                ck_assert_int_eq(doc_start[i], expected[at] > 2 * w ? expected[at] - 2 * w : 0);
                ck_assert_int_eq(targets[i], expected[at + 1] == at + 1 ? -1 : 0);
            }
        }
        data_close(source);
    }
}
END_TEST

int main(void) {
    Suite *suite = suite_create("token files");
    TCase *tests = tcase_create("token files");
    tcase_add_checked_fixture(tests, scratch_make, scratch_remove);
    tcase_set_timeout(tests, 60);
    tcase_add_test(tests, megatron_samples_are_read);
    tcase_add_test(tests, multimodal_files_are_refused_unless_all_text);
    tcase_add_test(tests, llmc_samples_are_read);
    tcase_add_test(tests, shards_of_a_glob_are_one_stream);
    tcase_add_test(tests, many_shards_raise_the_limit_of_open_files);
    tcase_add_test(tests, damaged_indices_are_refused_with_field_and_values);
    tcase_add_test(tests, every_type_code_has_a_width_or_a_refusal);
    tcase_add_test(tests, missing_and_foreign_files_are_named);
    tcase_add_test(tests, every_flipped_bit_and_every_truncation_of_an_index);
    tcase_add_test(tests, flipped_bits_and_truncations_of_a_shard_header);
    tcase_add_test(tests, a_token_outside_the_vocabulary_is_located);
    tcase_add_test(tests, a_file_that_shrinks_is_an_error_not_a_signal);
    tcase_add_test(tests, positions_beyond_32_bits);
    tcase_add_test(tests, samples_beyond_32_bits);
    tcase_add_test(tests, document_index_against_a_plain_list);
    tcase_add_test(tests, empty_documents_anywhere);
    tcase_add_test(tests, sequences_without_tokens);
    suite_add_tcase(suite, tests);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
