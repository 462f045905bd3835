/* fuzz_llmc.c - libFuzzer target for llm.c's token shards: any bytes give a refusal or a file that can be read.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -I. -o fuzz_llmc tests/fuzz/fuzz_llmc.c \
 *       data/[a-z]*.c base/check.c base/log.c base/rng.c base/file.c base/types.c -ljansson -lxxhash -lpcre2-8 -lm \
 *       -lpthread
 *   ./fuzz_llmc -max_total_time=60 -max_len=4096 CORPUS tests/unit/data/fixtures
 *
 * Input: one shard, which is also put behind itself as a second one. */
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

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    Error err = {0};
    TokenFile *file = llmc_append(NULL, memory_file(bytes, n), "first.bin", &err);
    if (file) file = llmc_append(file, memory_file(bytes, n), "second.bin", &err);
    if (!file) {
        REQUIRE(err.status == EXIT_DATA && err.message[0]);
        return 0;
    }
    int64_t tokens = token_file_tokens(file);
    REQUIRE(tokens == 2 * ((int64_t)(n - 1024) / token_type_bytes(file->type)));
    for (int64_t first = 0; first < tokens; first += max_i64(1, tokens / 8)) {
        int32_t values[64], window[64];
        int64_t starts[64], count = min_i64(64, tokens - first);
        if (token_file_read(file, first, count, 128256, values, starts, &err) != 0) {
            REQUIRE(err.status == EXIT_DATA && strstr(err.message, "outside the vocabulary"));
            continue;
        }
        token_file_window_documents(file, first, count, values, window);
        for (int64_t i = 0; i < count; i++) REQUIRE(window[i] == max_i64(0, starts[i] - first));
    }
    token_file_documents(file);
    token_file_close(file);
    return 0;
}
