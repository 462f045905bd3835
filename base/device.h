/* device.h - memory, copies, streams and events of the compute device. One file a platform.
 *
 * The CPU platform: a STREAM_COMPUTE stream runs its work at the call, on the calling thread.
 * A STREAM_COMM stream is a FIFO of operations; one progress thread serves the heads of all FIFOs,
 * so that a waiting send does not block a gradient bucket behind it. Events and waits are real:
 * a compute stream that waits for an event blocks the calling thread (asleep, never spinning); a
 * communication stream that waits for an event holds its own FIFO only. Streams and events are used by
 * one thread at a time. */
#ifndef TRIDENT_BASE_DEVICE_H
#define TRIDENT_BASE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { STREAM_COMPUTE, STREAM_COMM } StreamKind;
typedef struct Stream Stream;
typedef struct Event Event;

/* One allocation that communicates in place. CPU: a memfd mapping (fd is passed to local peers),
 * pages untouched until used. */
typedef struct {
    void *base;
    size_t bytes;
    int fd; /* CPU: the memfd; -1 elsewhere */
} DeviceMemory;

/* bytes > 0. Dies with EXIT_LAUNCH and the size where it is not to be had. */
DeviceMemory device_memory_create(size_t bytes);
void device_memory_destroy(DeviceMemory *memory);

/* name: static text, shows in traces and error messages. */
Stream *stream_create(const char *name, StreamKind kind);
/* Waits for all work, then frees. */
void stream_destroy(Stream *stream);
void stream_sync(Stream *stream);

Event *event_create(const char *name);
void event_destroy(Event *event);
/* The event is complete when all work now in the stream is. Recording again re-arms it.
 * An event that was never recorded counts as complete. */
void event_record(Event *event, Stream *stream);
void stream_wait_event(Stream *stream, Event *event);
void event_sync(Event *event);

void device_copy(void *to, const void *from, size_t bytes, Stream *stream);
void device_zero(void *to, size_t bytes, Stream *stream);

#ifdef __cplusplus
}
#endif
#endif
