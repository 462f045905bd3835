/* safetensors.h - headers of safetensors files: 8 bytes of length, a JSON object, then the tensors' bytes.
 * Format: https://github.com/huggingface/safetensors (README, "Format"). */
#ifndef TRIDENT_TRAIN_SAFETENSORS_H
#define TRIDENT_TRAIN_SAFETENSORS_H

#include <stdint.h>

#include "base/check.h"
#include "base/types.h"

enum { SAFETENSORS_DIMS_MAX = 8 };

typedef struct {
    char *name;
    char *note;       /* what __metadata__ says under the entry's name, or NULL */
    const char *type; /* "F32", ...; static text */
    int dims;
    int64_t shape[SAFETENSORS_DIMS_MAX];
    int64_t first_byte, bytes; /* where in the file */
} SafetensorsEntry;

typedef struct {
    SafetensorsEntry *entries; /* in the order of their bytes */
    int n;
} Safetensors;

/* "F32" and so on; NULL where the format has none. */
const char *safetensors_type(DType dtype);
/* DT_COUNT where no DType corresponds. */
DType safetensors_dtype(const char *type);

/* The bytes before the tensors, its own length included; a multiple of alignment, for whole-page reads.
 * Entries lie one behind the other in the order given (first_byte is not looked at). Caller frees. NULL with
 * err (a name that is not UTF-8 or comes twice, a header beyond the format's 100,000,000 bytes). */
char *safetensors_header(const SafetensorsEntry *entries, int n, int64_t alignment, int64_t *header_bytes, Error *err);

/* Reads the bytes before the tensors. NULL with err (EXIT_CHECKPOINT). Caller frees. */
char *safetensors_read_header(int fd, const char *path, int64_t file_bytes, int64_t *header_bytes, Error *err);
/* header: header_bytes bytes as safetensors_read_header gives them. Refuses everything that the format forbids:
 * holes, overlaps, trailing bytes, sizes that do not follow from shape and type, names that come twice. -1 with
 * err (EXIT_CHECKPOINT), nothing to free then. */
int safetensors_parse(const char *path, const char *header, int64_t header_bytes, int64_t file_bytes, Safetensors *file,
                      Error *err);
void safetensors_free(Safetensors *file);

#endif
