/* fuzz_idx.c - libFuzzer target for Megatron's .idx: any bytes give a refusal or a file that can be read.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -I. -o fuzz_idx tests/fuzz/fuzz_idx.c \
 *       data/[a-z]*.c base/check.c base/log.c base/rng.c base/file.c base/types.c -ljansson -lxxhash -lpcre2-8 -lm \
 *       -lpthread
 *   ./fuzz_idx -max_total_time=60 CORPUS tests/unit/data/fixtures
 *
 * Input: the .idx, whose first two bytes (which the magic overwrites) give the size of the .bin where it is
 * not what the .idx describes. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/types.h"
#include "data/token_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

static int memory_file(const void *bytes, size_t n) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    REQUIRE(fd >= 0 && (n == 0 || write(fd, bytes, n) == (ssize_t)n));
    return fd;
}

/* The size that the sequences of a well-formed index sum to; the fuzzer then needs not guess it. */
static int64_t described_bytes(const uint8_t *idx, size_t n) {
    uint64_t sequences;
    int64_t tokens = 0;
    if (n < 34) return 0;
    memcpy(&sequences, idx + 18, 8);
    for (uint64_t s = 0; s < sequences && 34 + 4 * (s + 1) <= n; s++) {
        int32_t length;
        memcpy(&length, idx + 34 + 4 * s, 4);
        tokens += length;
    }
    return min_i64(max_i64(tokens, 0), INT64_C(1) << 36) * token_type_bytes(idx[17]);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    static uint8_t idx[1 << 16];
    if (n > sizeof idx) return 0;
    memcpy(idx, bytes, n);
    uint16_t bin_bytes = 0;
    if (n >= 9) {
        memcpy(&bin_bytes, bytes, 2);
        memcpy(idx, "MMIDIDX\0\0", 9);
    }
    int bin_fd = memory_file(NULL, 0);
    int64_t size = bin_bytes % 2 ? described_bytes(idx, n) : bin_bytes;
    if (ftruncate(bin_fd, size) != 0) {
        close(bin_fd);
        return 0;
    }
    Error err = {0};
    TokenFile *file = megatron_open(bin_fd, "fuzz.bin", memory_file(idx, n), "fuzz.idx", &err);
    if (!file) {
        REQUIRE(err.status == EXIT_DATA && err.message[0]);
        return 0;
    }
    int64_t tokens = token_file_tokens(file), starts[64];
    int32_t values[64], window[64];
    for (int64_t first = 0; first < tokens; first += max_i64(1, tokens / 16)) {
        int64_t count = min_i64(64, tokens - first);
        REQUIRE(token_file_read(file, first, count, INT32_MAX, values, starts, &err) == 0);
        token_file_window_documents(file, first, count, values, window);
        for (int64_t i = 0; i < count; i++) {
            REQUIRE(starts[i] <= first + i && window[i] == max_i64(0, starts[i] - first));
            REQUIRE(token_file_begins_document(file, first + i, values[i]) == (starts[i] == first + i));
        }
    }
    token_file_close(file);
    return 0;
}
