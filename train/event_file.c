/* event_file.c - writes TensorBoard's event files by hand: three kinds of fields are all that scalars need.
 * In: scalars. Out: records: u64 length, masked CRC of it, data, masked CRC of it; little-endian. */
#include "train/event_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"

enum { RECORD_MAX = 4096 };

typedef struct {
    uint8_t bytes[RECORD_MAX];
    size_t n;
} Buffer;

static uint32_t crc32c(const uint8_t *data, size_t bytes) {
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

uint32_t masked_crc32c(const void *data, size_t bytes) {
    const uint32_t crc = crc32c(data, bytes);
    return (crc >> 15 | crc << 17) + 0xA282EAD8u;
}

static void put(Buffer *b, const void *data, size_t bytes) {
    REQUIRE(b->n + bytes <= sizeof b->bytes);
    memcpy(b->bytes + b->n, data, bytes);
    b->n += bytes;
}

/* Little-endian, `bytes` long. */
static void put_fixed(Buffer *b, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) {
        const uint8_t byte = (uint8_t)(value >> 8 * i);
        put(b, &byte, 1);
    }
}

static void put_varint(Buffer *b, uint64_t value) {
    do {
        const uint8_t byte = (uint8_t)((value & 127) | (value > 127 ? 128 : 0));
        put(b, &byte, 1);
        value >>= 7;
    } while (value);
}

/* Field numbers and wire types of protobuf: 0 varint, 1 fixed64, 2 length-delimited, 5 fixed32. */
static void put_tag(Buffer *b, int field, int wire) { put_varint(b, (uint64_t)(field << 3 | wire)); }

static void put_message(Buffer *b, int field, const void *data, size_t bytes) {
    put_tag(b, field, 2);
    put_varint(b, bytes);
    put(b, data, bytes);
}

static uint64_t double_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static int write_record(int fd, const Buffer *data, Error *err) {
    Buffer frame = {.n = 0};
    put_fixed(&frame, data->n, 8);
    put_fixed(&frame, masked_crc32c(frame.bytes, 8), 4);
    put(&frame, data->bytes, data->n);
    put_fixed(&frame, masked_crc32c(data->bytes, data->n), 4);
    return file_write_all(fd, "TensorBoard event file", frame.bytes, frame.n, err, EXIT_DATA);
}

int event_file_open(const char *dir, Error *err) {
    char host[256] = "localhost";
    gethostname(host, sizeof host - 1);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    char *path = xasprintf("%s/events.out.tfevents.%010" PRId64 ".%s.%d.%09ld", dir, (int64_t)now.tv_sec, host,
                           (int)getpid(), now.tv_nsec);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        error_set(err, EXIT_DATA, "%s: cannot create: %s", path, strerror(errno));
    } else {
        static const char version[] = "brain.Event:2";
        Buffer event = {.n = 0};
        put_tag(&event, 1, 1);
        put_fixed(&event, double_bits((double)now.tv_sec), 8);
        put_message(&event, 3, version, sizeof version - 1);
        if (write_record(fd, &event, err) != 0) {
            close(fd);
            fd = -1;
        }
    }
    free(path);
    return fd;
}

int event_file_write(int fd, int64_t step, double wall_time_s, const EventScalar *scalars, int n, Error *err) {
    Buffer summary = {.n = 0}, event = {.n = 0};
    for (int i = 0; i < n; i++) {
        Buffer value = {.n = 0};
        const float number = (float)scalars[i].value;
        uint32_t bits;
        memcpy(&bits, &number, sizeof bits);
        put_message(&value, 1, scalars[i].tag, strlen(scalars[i].tag));
        put_tag(&value, 2, 5);
        put_fixed(&value, bits, 4);
        put_message(&summary, 1, value.bytes, value.n);
    }
    put_tag(&event, 1, 1);
    put_fixed(&event, double_bits(wall_time_s), 8);
    put_tag(&event, 2, 0);
    put_varint(&event, (uint64_t)step);
    put_message(&event, 5, summary.bytes, summary.n);
    return write_record(fd, &event, err);
}
