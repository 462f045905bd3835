/* fuzz_tokenizer.c - libFuzzer target for vocab.json and merges.txt, and for encoding with what they give.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -I. -o fuzz_tokenizer tests/fuzz/fuzz_tokenizer.c \
 *       data/[a-z]*.c base/check.c base/log.c base/rng.c base/file.c base/types.c -ljansson -lxxhash -lpcre2-8 -lm \
 *       -lpthread
 *   ./fuzz_tokenizer -max_total_time=60 -max_len=16384 CORPUS tests/unit/data/fixtures/tiny_bpe
 *
 * Input: the first byte says what follows: the end of a vocabulary that already has all bytes, then a zero
 * byte and the merges (0), both files whole with a zero byte between (1), or text to encode (2). Text
 * must come back from its tokens; every safe cut must change nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/bpe.h"
#include "data/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

/* The 256 byte tokens and the end of a document, without the closing brace. */
static size_t write_bytes_vocab(char *to) {
    char *p = to + sprintf(to, "{\"<|endoftext|>\": 0");
    int next = 0x100;
    for (int byte = 0; byte < 256; byte++) {
        int code = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174 ? byte : next++;
        p += sprintf(p, ", \"\\u%04x\": %d", (unsigned)code, byte + 1);
    }
    return (size_t)(p - to);
}

typedef struct {
    int32_t *ids;
    int64_t n, capacity;
} Ids;

static void check_text(const Bpe *bpe, const char *text, size_t n) {
    BpeEncoder *encoder = bpe_encoder_create(bpe);
    Ids whole = {0}, parts = {0};
    bpe_encode(encoder, text, n, &whole.ids, &whole.n, &whole.capacity);
    size_t length, at = 0;
    int64_t replaced;
    char *repaired = utf8_repair(text, n, &length, &replaced);
    for (int64_t i = 0; i < whole.n; i++) {
        int32_t id = whole.ids[i];
        REQUIRE(id >= 0 && id < bpe->vocab && id != bpe->end_of_document);
        size_t token = bpe->token_offset[id + 1] - bpe->token_offset[id];
        REQUIRE(at + token <= length && memcmp(repaired + at, bpe->token_text + bpe->token_offset[id], token) == 0);
        at += token;
    }
    REQUIRE(at == length);
    size_t cut = bpe_safe_cut(encoder, text, n);
    if (cut > 0) {
        bpe_encode(encoder, text, cut, &parts.ids, &parts.n, &parts.capacity);
        bpe_encode(encoder, text + cut, n - cut, &parts.ids, &parts.n, &parts.capacity);
        REQUIRE(parts.n == whole.n && memcmp(parts.ids, whole.ids, (size_t)whole.n * 4) == 0);
    }
    free(whole.ids);
    free(parts.ids);
    free(repaired);
    bpe_encoder_free(encoder);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    static const char plain_merges[] = "t h\nth e\nh e\na n\nan d\n";
    static const char plain_tokens[] = ", \"th\": 257, \"the\": 258, \"he\": 259, \"an\": 260, \"and\": 261}";
    if (n == 0) return 0;
    int kind = bytes[0] % 3;
    const char *rest = (const char *)bytes + 1, *merges = plain_merges;
    size_t rest_bytes = n - 1, merges_bytes = sizeof plain_merges - 1, vocab_bytes = 0;
    char *vocab = malloc(8192 + n);
    if (kind != 1) vocab_bytes = write_bytes_vocab(vocab);
    if (kind == 2) {
        memcpy(vocab + vocab_bytes, plain_tokens, sizeof plain_tokens - 1);
        vocab_bytes += sizeof plain_tokens - 1;
    } else {
        const char *zero = memchr(rest, 0, rest_bytes);
        size_t first = zero ? (size_t)(zero - rest) : rest_bytes;
        memcpy(vocab + vocab_bytes, rest, first);
        vocab_bytes += first;
        merges = zero ? zero + 1 : "";
        merges_bytes = zero ? rest_bytes - first - 1 : 0;
    }
    Error err = {0};
    Bpe *bpe = bpe_parse(vocab, vocab_bytes, "vocab.json", merges, merges_bytes, "merges.txt", &err);
    REQUIRE(bpe || (kind != 2 && err.status == EXIT_DATA && err.message[0]));
    if (bpe && kind == 2) check_text(bpe, rest, rest_bytes);
    else if (bpe) check_text(bpe, "In the beginning God created the heaven and the earth.", 54);
    bpe_free(bpe);
    free(vocab);
    return 0;
}
