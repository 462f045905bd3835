/* fuzz_config.c - libFuzzer target for configs: any text gives errors, or a config that prints and reads back.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -I. -o fuzz_config tests/fuzz/fuzz_config.c \
 *       train/config*.c train/ini.c parallel/grid.c data/utf8.c base/check.c base/log.c base/file.c base/rng.c \
 *       base/types.c -lxxhash -lm -lpthread
 *   ./fuzz_config -max_total_time=60 -dict=tests/fuzz/config.dict CORPUS configs configs/models
 *
 * Input: the text; behind a first zero byte, the words of --set, each ended by another. A text that does not begin
 * with a section or comment goes behind one that has no error, so that the fuzzer need not find that first. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "train/config.h"
#include "train/ini.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

enum { OVERRIDES_MAX = 8 };

/* Prints, reads back, and resolves: all must agree. */
static void check_config(Config *config, FILE *sink) {
    Config again;
    char *text = config_text(config);
    REQUIRE(config_load_text(&again, text, "printed", NULL, 0, sink) == 0);
    char *second = config_text(&again);
    REQUIRE(strcmp(text, second) == 0);
    REQUIRE(config_compare_resume(config, text, NULL, sink, sink) == 0);
    free(text);
    free(second);
    config_free(&again);
    config_print_origins(config, sink);
    if (config_resolve_world(config, 0, sink) == 0) {
        REQUIRE(config->accumulation * config->micro_batch * config->data == config->global_batch);
        REQUIRE(config->total_steps > 0);
        config_print_equation(config, sink);
    }
    config_resolve_model(config, 256, sink);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    static FILE *sink;
    if (!sink) sink = fopen("/dev/null", "w");
    REQUIRE(sink);
    Ini ini = {.out = sink}; /* all of it, zero bytes too */
    ini_read_text(&ini, (const char *)bytes, n, "fuzz");
    ini_free(&ini);
    const char *before = n && (bytes[0] == '[' || bytes[0] == '#') ? "" : "[model]\nvocab = 9\n[train]\nsteps = 10\n";
    const size_t first = strlen(before), length = first + n;
    char *text = xcalloc(1, length + 1), *overrides[OVERRIDES_MAX];
    memcpy(text, before, first);
    if (n) memcpy(text + first, bytes, n);
    int n_overrides = 0;
    for (char *p = text; n_overrides < OVERRIDES_MAX && (size_t)(p - text) + strlen(p) < length;) {
        p += strlen(p) + 1;
        overrides[n_overrides++] = p;
    }
    Config config;
    const int errors = config_load_text(&config, text, "fuzz", overrides, n_overrides, sink);
    REQUIRE(errors >= 0);
    if (errors == 0) {
        check_config(&config, sink);
        config_free(&config);
    }
    if (n <= 16) config_help(text + first, sink, sink); /* long names take their time */
    free(text);
    return 0;
}
