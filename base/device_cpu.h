/* device_cpu.h - what the CPU platform's communication builds on: work that waits without spinning.
 *
 * A Work is a state machine. tick does what can be done now and says whether it is done, wants to be
 * called again at once (so that other streams get their turn in between), or is blocked. Two threads of
 * a process run work: the caller's (compute streams) and the progress thread (communication streams).
 * Each has a doorbell in memory that other processes may map. Whoever makes a blocked work able to go on
 * rings the doorbell of the thread that runs it:
 *     thread   note rings -> tick: blocked -> announce sleep -> sleep unless rings has changed
 *     ringer   change the state that tick looks at -> rings + 1 -> wake a thread that announced sleep
 * so no wake-up is lost, and a ring that finds its thread awake costs no system call. */
#ifndef TRIDENT_BASE_DEVICE_CPU_H
#define TRIDENT_BASE_DEVICE_CPU_H

#include <stdatomic.h>

#include "base/device.h"

typedef enum { BELL_CALLER, BELL_PROGRESS, BELL_COUNT } BellId;
typedef enum { BELL_AWAKE, BELL_IN_FUTEX, BELL_IN_POLL } BellState;

typedef struct {
    _Atomic uint32_t rings; /* the futex word */
    _Atomic uint32_t state; /* a BellState */
    char rest_of_line[120]; /* two lines: neighbours are fetched in pairs */
} Bell;

typedef struct {
    Bell bell[BELL_COUNT];
} Bells;

typedef enum { WORK_DONE, WORK_AGAIN, WORK_BLOCKED } WorkState;

typedef struct Work Work;
struct Work {
    WorkState (*tick)(Work *work, BellId bell);
    void (*release)(Work *work); /* after it is done; NULL: nothing to do */
    double deadline_s;           /* clock_s at which a blocked work must be ticked again; 0: none */
    bool uses_sockets;           /* runs on the progress thread only, and waits for progress_watch's descriptor too */
    Work *next;
};

/* Queues the work behind the stream's earlier work; on a compute stream runs it to its end. */
void stream_submit(Stream *stream, Work *work);
/* Runs the work to its end, asleep while it is blocked; where it uses sockets, lets the progress thread run it. */
void work_run(Work *work);

/* Ends the stream that work_run made for work that uses sockets. */
void device_cpu_rest(void);

/* Memory of another process, by the descriptor it passed; munmap ends it. Dies like device_memory_create. */
void *device_memory_map(int fd, size_t bytes);

/* This process's doorbells: mapped memory, the memfd to pass to peers, the descriptor that ends a poll. */
Bells *bells_own(void);
int bells_fd(void);
int bells_event_fd(void);
/* event_fd: that of the bell's process, as passed by it; -1 where it never polls. */
void bell_ring(Bell *bell, int event_fd);

/* fd (an epoll descriptor): work that uses sockets waits for it as well; -1: none. One at a time. */
void progress_watch(int fd);
/* Called by a thread that has slept for about a second in vain. NULL: none. */
void progress_set_check(void (*check)(void *context), void *context);
/* Seconds of busy waiting before a sleep; 0 (the default) wherever ranks outnumber cores. */
void progress_set_spin(double seconds);
/* Yields of the core before a sleep, fewer where others compute there; 0 (the default): none. */
void progress_set_yields(int yields);

#endif
