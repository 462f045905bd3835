/* event_file.h - TensorBoard event files: TFRecord frames of Event messages with scalars. */
#ifndef TRIDENT_TRAIN_EVENT_FILE_H
#define TRIDENT_TRAIN_EVENT_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/check.h"

typedef struct {
    const char *tag;
    double value;
} EventScalar;

/* A new file in dir; its first record names the format's version. Descriptor, or -1 with err. */
int event_file_open(const char *dir, Error *err);
/* One event with n scalars. wall_time_s: Unix time. -1 with err. */
int event_file_write(int fd, int64_t step, double wall_time_s, const EventScalar *scalars, int n, Error *err);
/* CRC-32C (Castagnoli), as TFRecord masks it. */
uint32_t masked_crc32c(const void *data, size_t bytes);

#endif
