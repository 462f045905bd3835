/* fuzz_safetensors.c - libFuzzer target for safetensors headers and the notes in them: any bytes give a refusal or
 * entries that cover the file, each once.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -I. -o fuzz_safetensors \
 *       tests/fuzz/fuzz_safetensors.c train/safetensors.c train/checkpoint_piece.c base/check.c base/log.c \
 *       base/file.c base/types.c -ljansson -lxxhash -lm -lpthread
 *   ./fuzz_safetensors -max_total_time=60 CORPUS tests/fuzz/corpus/safetensors
 *
 * Input: two bytes, the number of data bytes behind the header; then the header's JSON. With 0xffff in front, the
 * rest is the file as it is. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "train/checkpoint_piece.h"
#include "train/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

static void check_piece(const SafetensorsEntry *entry) {
    CheckpointPiece piece = {0};
    uint64_t xxh3;
    if (!entry->note || !piece_from_note(entry->note, &piece, &xxh3)) return;
    Box boxes[PIECE_BOXES_MAX];
    int64_t elements = 0;
    const int n = piece_boxes(&piece, boxes);
    for (int i = 0; i < n; i++) {
        REQUIRE(boxes[i].count[0] > 0 && boxes[i].count[1] > 0 && boxes[i].at == elements);
        elements += boxes[i].count[0] * boxes[i].count[1];
    }
    REQUIRE(elements == piece.flat_count);
    char *note = piece_note(&piece, xxh3);
    CheckpointPiece again = {0};
    uint64_t sum;
    REQUIRE(piece_from_note(note, &again, &sum) && sum == xxh3 && strcmp(again.name, piece.name) == 0);
    REQUIRE(again.flat_first == piece.flat_first && again.flat_count == piece.flat_count && again.dims == piece.dims);
    free(note);
}

/* What was read is written and read again. */
static void check_again(const Safetensors *file, int64_t data_bytes) {
    Error err = {0};
    int64_t bytes;
    char *header = safetensors_header(file->entries, file->n, 64, &bytes, &err);
    /* The writer wants the note of an entry called "format" for itself. */
    for (int i = 0; i < file->n; i++) {
        if (strcmp(file->entries[i].name, "format") == 0) {
            free(header);
            return;
        }
    }
    Safetensors again;
    REQUIRE(header && bytes % 64 == 0);
    REQUIRE(safetensors_parse("fuzz", header, bytes, bytes + data_bytes, &again, &err) == 0 && again.n == file->n);
    for (int i = 0; i < again.n; i++) {
        REQUIRE(again.entries[i].bytes == file->entries[i].bytes && again.entries[i].dims == file->entries[i].dims);
    }
    safetensors_free(&again);
    free(header);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    uint16_t data_bytes;
    if (n < 2) return 0;
    memcpy(&data_bytes, bytes, 2);
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    REQUIRE(fd >= 0);
    const uint64_t length = n - 2;
    int64_t file_bytes = (int64_t)length;
    if (data_bytes != 0xffff) {
        REQUIRE(write(fd, &length, 8) == 8);
        file_bytes += 8 + data_bytes;
    }
    REQUIRE(write(fd, bytes + 2, n - 2) == (ssize_t)(n - 2) && ftruncate(fd, file_bytes) == 0);
    Error err = {0};
    int64_t header_bytes = 0;
    char *header = safetensors_read_header(fd, "fuzz", file_bytes, &header_bytes, &err);
    Safetensors file;
    if (!header || safetensors_parse("fuzz", header, header_bytes, file_bytes, &file, &err) != 0) {
        REQUIRE(err.status == EXIT_CHECKPOINT && err.message[0]);
    } else {
        int64_t at = header_bytes;
        for (int i = 0; i < file.n; i++) {
            REQUIRE(file.entries[i].first_byte == at && file.entries[i].bytes >= 0);
            at += file.entries[i].bytes;
            check_piece(&file.entries[i]);
        }
        REQUIRE(at == file_bytes);
        check_again(&file, file_bytes - header_bytes);
        safetensors_free(&file);
    }
    free(header);
    close(fd);
    return 0;
}
