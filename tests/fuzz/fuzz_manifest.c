/* fuzz_manifest.c - libFuzzer target for manifest.json: any bytes give a refusal or a manifest that is consistent,
 * and that is written and read again the same.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -I. -o fuzz_manifest tests/fuzz/fuzz_manifest.c \
 *       train/manifest.c train/checkpoint_piece.c base/check.c base/log.c base/file.c base/types.c \
 *       -ljansson -lxxhash -lm -lpthread
 *   ./fuzz_manifest -max_total_time=60 CORPUS tests/fuzz/corpus/manifest
 *
 * Input: what comes behind the checksum. The checksum itself is put right, which the fuzzer would not guess; an
 * input that begins with '!' stands for itself instead. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "train/manifest.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

static const char prefix[] = "{\n \"checksum\": \"0000000000000000";

/* What the program relies on after reading. */
static void check_consistent(const Manifest *m) {
    REQUIRE(m->state.step >= 0 && m->state.config_text && m->state.n_corpora >= 0);
    for (int i = 0; i < m->n_arrays; i++) {
        REQUIRE(array_name_valid(m->arrays[i].name) && m->arrays[i].dtype < DT_COUNT);
        REQUIRE(manifest_find_array(m, m->arrays[i].name) == i);
    }
    for (int i = 0; i < m->n_sets; i++) {
        for (int k = 0; k < m->sets[i].n; k++) {
            REQUIRE(m->sets[i].arrays[k] >= 0 && m->sets[i].arrays[k] < m->n_arrays);
        }
    }
    for (int i = 0; i < m->n_files; i++) {
        const ManifestFile *file = &m->files[i];
        REQUIRE(!strchr(file->name, '/') && file->name[0] != '.' && file->set >= 0 && file->set < m->n_sets);
        REQUIRE(file->bytes >= 0 && file->header_bytes >= 0 && file->header_bytes <= file->bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    const size_t head = strlen(prefix);
    char *text = xmalloc(head + n + 1);
    memcpy(text, prefix, head);
    if (n) memcpy(text + head, bytes, n);
    n += head;
    text[n] = 0;
    char digits[17];
    snprintf(digits, sizeof digits, "%016llx", (unsigned long long)XXH3_64bits(text, n));
    memcpy(text + head - 16, digits, 16);
    const bool raw = n > head && text[head] == '!';
    Manifest manifest, again;
    Error err = {0};
    if (manifest_from_text("fuzz", raw ? text + head + 1 : text, raw ? n - head - 1 : n, &manifest, &err) != 0) {
        REQUIRE(err.status == EXIT_CHECKPOINT && err.message[0]);
    } else {
        check_consistent(&manifest);
        char *once = manifest_to_text(&manifest, &err);
        REQUIRE(once && manifest_from_text("fuzz", once, strlen(once), &again, &err) == 0);
        char *twice = manifest_to_text(&again, &err);
        REQUIRE(twice && strcmp(once, twice) == 0);
        free(once);
        free(twice);
        manifest_free(&manifest);
        manifest_free(&again);
    }
    free(text);
    return 0;
}
