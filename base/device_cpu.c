/* device_cpu.c - the CPU platform: memory that peers can map, streams, events, and the progress thread.
 *
 * Streams are used by one thread at a time (the caller's). Every communication stream is a FIFO of work;
 * the progress thread, which lives as long as there are such streams, ticks the heads of all of them in
 * turn. An event is a mark in a stream: the number of pieces of work submitted when it was recorded; it is
 * complete when as many are done.
 * Invariants: only the progress thread ticks and pops heads; `lock` guards the list of streams and the
 * links of the FIFOs, and is never held while work is ticked. */
#include "base/device_cpu.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"

static const double sleep_slice_s = 1.0; /* longest sleep: then the peers' health is looked at */
static const double stopped_s = 2.0;     /* a look that comes so late: this process was stopped, not idle */
/* Longest yield that passes the core on among waiting ranks; a longer one found somebody who computes. */
static const double yield_limit_s = 100e-6;
enum { YIELD_PAUSE = 31 }; /* sleeps without a yield after such a one */

/* ---- memory ---- */

enum { HUGE_PAGE_BYTES = 2 << 20, HUGE_FROM_BYTES = 16 << 20 };

/* A mapping of fd at a multiple of the huge page size, so that the kernel can use huge pages. */
static void *map_shared(int fd, size_t bytes) {
    if (bytes < HUGE_FROM_BYTES) return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    size_t whole = bytes + HUGE_PAGE_BYTES;
    char *room = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return MAP_FAILED;
    size_t skip = HUGE_PAGE_BYTES - (uintptr_t)room % HUGE_PAGE_BYTES;
    char *base = room + skip;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), used = (bytes + page - 1) / page * page;
    void *mapped = mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    munmap(room, skip);
    if (skip + used < whole) munmap(base + used, whole - skip - used);
    /* Refused where the kernel is set so: then pages are small, and all else is the same. */
    if (mapped != MAP_FAILED) madvise(base, bytes, MADV_HUGEPAGE);
    return mapped;
}

void *device_memory_map(int fd, size_t bytes) {
    void *base = map_shared(fd, bytes);
    if (base == MAP_FAILED) die(EXIT_LAUNCH, "cannot map %zu bytes of shared memory: %s", bytes, strerror(errno));
    return base;
}

DeviceMemory device_memory_create(size_t bytes) {
    REQUIRE(bytes > 0);
    DeviceMemory memory = {.bytes = bytes, .fd = memfd_create("trident", MFD_CLOEXEC)};
    if (memory.fd < 0 || ftruncate(memory.fd, (off_t)bytes) != 0) {
        die(EXIT_LAUNCH, "cannot get %zu bytes of shared memory: %s", bytes, strerror(errno));
    }
    memory.base = device_memory_map(memory.fd, bytes);
    return memory;
}

void device_memory_destroy(DeviceMemory *memory) {
    if (memory->base) munmap(memory->base, memory->bytes);
    if (memory->fd >= 0) close(memory->fd);
    *memory = (DeviceMemory){.fd = -1};
}

/* ---- doorbells ---- */

static struct {
    DeviceMemory memory;
    Bells *bells;
    int event_fd;
    pid_t pid; /* a forked child needs doorbells of its own */
    _Atomic int watched_fd;
    _Atomic double spin_s;
    _Atomic int yields;
    int pause[BELL_COUNT]; /* each used by the bell's own thread only */
    void (*check)(void *context);
    void *check_context;
    pthread_mutex_t check_lock;
} own = {.event_fd = -1, .watched_fd = -1, .check_lock = PTHREAD_MUTEX_INITIALIZER};

Bells *bells_own(void) {
    if (own.bells && own.pid == getpid()) return own.bells;
    own.memory = device_memory_create(sizeof *own.bells);
    own.bells = own.memory.base;
    own.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (own.event_fd < 0) die(EXIT_LAUNCH, "eventfd: %s", strerror(errno));
    own.pid = getpid();
    return own.bells;
}

int bells_fd(void) { return bells_own() ? own.memory.fd : -1; }

int bells_event_fd(void) { return bells_own() ? own.event_fd : -1; }

void progress_watch(int fd) { atomic_store(&own.watched_fd, fd); }

void progress_set_spin(double seconds) { atomic_store(&own.spin_s, seconds); }

void progress_set_yields(int yields) { atomic_store(&own.yields, yields); }

void progress_set_check(void (*check)(void *context), void *context) {
    pthread_mutex_lock(&own.check_lock);
    own.check = check;
    own.check_context = context;
    pthread_mutex_unlock(&own.check_lock);
}

static long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

void bell_ring(Bell *bell, int event_fd) {
    atomic_fetch_add(&bell->rings, 1);
    if (atomic_load(&bell->state) == BELL_AWAKE) return;
    uint32_t state = atomic_exchange(&bell->state, BELL_AWAKE);
    if (state == BELL_IN_FUTEX) {
        futex(&bell->rings, FUTEX_WAKE, 1, NULL);
    } else if (state == BELL_IN_POLL && event_fd >= 0) {
        uint64_t one = 1;
        ssize_t n = write(event_fd, &one, sizeof one);
        (void)n; /* a full counter ends the poll as well */
    }
}

static void ring_own(BellId id) { bell_ring(&own.bells->bell[id], own.event_fd); }

static void sleep_in_poll(double seconds) {
    struct pollfd ready[2] = {{.fd = own.event_fd, .events = POLLIN},
                              {.fd = atomic_load(&own.watched_fd), .events = POLLIN}};
    uint64_t count;
    poll(ready, 2, (int)(seconds * 1000) + 1);
    if (ready[0].revents & POLLIN) {
        ssize_t n = read(own.event_fd, &count, sizeof count);
        (void)n;
    }
}

static void sleep_in_futex(Bell *bell, uint32_t seen, double seconds) {
    struct timespec limit = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    futex(&bell->rings, FUTEX_WAIT, seen, &limit);
}

static bool spin(Bell *bell, uint32_t seen) {
    double limit_s = atomic_load_explicit(&own.spin_s, memory_order_relaxed);
    if (limit_s <= 0) return false;
    double until = clock_s() + limit_s;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(&bell->rings, memory_order_acquire) != seen) return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    } while (clock_s() < until);
    return false;
}

/* Gives the core to whoever else can run there, a few times: ranks that share a core come to the same operation one
 * after the other, and a yield costs less than a sleep and its wake-up. A yield puts this thread behind all who
 * compute, so after one that took long it sleeps, and does not yield for some time. */
static bool yield(BellId id, uint32_t seen) {
    const Bell *bell = &own.bells->bell[id];
    int left = atomic_load_explicit(&own.yields, memory_order_relaxed);
    if (left <= 0) return false;
    if (own.pause[id] > 0) {
        own.pause[id]--;
        return false;
    }
    double before_s = clock_s();
    bool rung = false;
    for (; left > 0 && !rung && own.pause[id] == 0; left--) {
        sched_yield();
        rung = atomic_load_explicit(&bell->rings, memory_order_acquire) != seen;
        double now = clock_s();
        if (now - before_s > yield_limit_s) own.pause[id] = YIELD_PAUSE;
        before_s = now;
    }
    return rung;
}

/* When a thread that waits last looked at its work, and how long it meant to sleep since. */
typedef struct {
    double at_s, sleep_s;
} Look;

/* Comes before each look. Returns 0, or the time since the last one where that is far more than was slept: the process
 * was stopped, and its deadlines are to be moved by that. */
static double stopped_for(Look *look) {
    const double now = clock_s(), passed_s = now - look->at_s;
    const bool stopped = look->at_s > 0 && passed_s > look->sleep_s + stopped_s;
    *look = (Look){.at_s = now};
    return stopped ? passed_s : 0;
}

/* Sleeps until the bell rings, the deadline (0: none) or a slice has passed. Returns how long it would have slept. */
static double bell_sleep(BellId id, uint32_t seen, double deadline_s, bool sockets) {
    Bell *bell = &own.bells->bell[id];
    double start_s = clock_s(), limit_s = sleep_slice_s;
    if (deadline_s > 0 && deadline_s - start_s < limit_s) limit_s = deadline_s > start_s ? deadline_s - start_s : 0;
    bool rung = !sockets && (spin(bell, seen) || yield(id, seen));
    if (!rung) {
        atomic_store(&bell->state, sockets ? BELL_IN_POLL : BELL_IN_FUTEX);
        if (atomic_load(&bell->rings) == seen) {
            if (sockets) {
                sleep_in_poll(limit_s);
            } else {
                sleep_in_futex(bell, seen, limit_s);
            }
        }
        atomic_store(&bell->state, BELL_AWAKE);
    }
    double slept_s = clock_s() - start_s;
    if (slept_s >= sleep_slice_s && atomic_load(&bell->rings) == seen) {
        pthread_mutex_lock(&own.check_lock);
        if (own.check) own.check(own.check_context);
        pthread_mutex_unlock(&own.check_lock);
    }
    return limit_s;
}

/* ---- streams ---- */

struct Stream {
    const char *name;
    StreamKind kind;
    int references; /* the owner and the events that mark it; guarded by lock */
    uint64_t submitted;
    _Atomic uint64_t done;
    Work *head, *tail;
    Stream *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams;
static Stream *caller_stream; /* work of the caller's thread that uses sockets */
static int n_comm_streams;
static pthread_t progress_thread;
static _Atomic bool progress_ends;
/* Some caller sleeps until a stream has done something: then, and only then, its bell is rung. */
static _Atomic bool caller_waits;

static Work *stream_head(Stream *stream) {
    pthread_mutex_lock(&lock);
    Work *head = stream->head;
    pthread_mutex_unlock(&lock);
    return head;
}

static Stream *next_stream(Stream *stream) {
    pthread_mutex_lock(&lock);
    Stream *next = stream ? stream->next : streams;
    pthread_mutex_unlock(&lock);
    return next;
}

static void stream_pop(Stream *stream, Work *work) {
    pthread_mutex_lock(&lock);
    stream->head = work->next;
    if (!stream->head) stream->tail = NULL;
    pthread_mutex_unlock(&lock);
    if (work->release) work->release(work);
    atomic_fetch_add(&stream->done, 1);
    if (atomic_load(&caller_waits)) ring_own(BELL_CALLER);
}

/* One tick for every head. True where all heads are blocked (or there is none). */
static bool tick_heads(double *deadline_s, bool *sockets) {
    bool blocked = true;
    *deadline_s = 0;
    *sockets = false;
    for (Stream *stream = next_stream(NULL); stream; stream = next_stream(stream)) {
        Work *work = stream_head(stream);
        if (!work) continue;
        switch (work->tick(work, BELL_PROGRESS)) {
        case WORK_DONE:
            stream_pop(stream, work);
            blocked = false;
            break;
        case WORK_AGAIN: blocked = false; break;
        case WORK_BLOCKED:
            if (work->deadline_s > 0 && (*deadline_s == 0 || work->deadline_s < *deadline_s))
                *deadline_s = work->deadline_s;
            *sockets |= work->uses_sockets;
        }
    }
    return blocked;
}

static void forgive_heads(double stopped_for_s) {
    if (stopped_for_s == 0) return;
    pthread_mutex_lock(&lock);
    for (Stream *stream = streams; stream; stream = stream->next) {
        if (stream->head && stream->head->deadline_s > 0) stream->head->deadline_s += stopped_for_s;
    }
    pthread_mutex_unlock(&lock);
}

static void *progress_run(void *unused) {
    Bell *bell = &own.bells->bell[BELL_PROGRESS];
    Look look = {0};
    while (!atomic_load(&progress_ends)) {
        forgive_heads(stopped_for(&look));
        double deadline_s;
        bool sockets;
        uint32_t seen = atomic_load(&bell->rings);
        if (!tick_heads(&deadline_s, &sockets) || atomic_load(&progress_ends)) continue;
        look.sleep_s = bell_sleep(BELL_PROGRESS, seen, deadline_s, sockets);
    }
    return unused;
}

static void progress_start(void) {
    sigset_t all, before; /* signals are the main thread's */
    bells_own();
    atomic_store(&progress_ends, false);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&progress_thread, NULL, progress_run, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0) die(EXIT_LAUNCH, "cannot start the progress thread: %s", strerror(status));
}

static void progress_stop(void) {
    atomic_store(&progress_ends, true);
    ring_own(BELL_PROGRESS);
    pthread_join(progress_thread, NULL);
}

static void stream_unref(Stream *stream) {
    pthread_mutex_lock(&lock);
    bool last = --stream->references == 0;
    pthread_mutex_unlock(&lock);
    if (last) free(stream);
}

Stream *stream_create(const char *name, StreamKind kind) {
    Stream *stream = xcalloc(1, sizeof *stream);
    stream->name = name;
    stream->kind = kind;
    stream->references = 1;
    if (kind == STREAM_COMPUTE) return stream;
    pthread_mutex_lock(&lock);
    Stream **end = &streams;
    while (*end) end = &(*end)->next;
    *end = stream;
    bool first = n_comm_streams++ == 0;
    pthread_mutex_unlock(&lock);
    if (first) progress_start();
    return stream;
}

static void unlink_stream(Stream *stream) {
    pthread_mutex_lock(&lock);
    Stream **at = &streams;
    while (*at != stream) at = &(*at)->next;
    *at = stream->next;
    pthread_mutex_unlock(&lock);
}

void stream_destroy(Stream *stream) {
    if (!stream) return;
    stream_sync(stream);
    if (stream->kind == STREAM_COMM) {
        /* The thread rests while the list changes: streams end rarely. */
        progress_stop();
        unlink_stream(stream);
        pthread_mutex_lock(&lock);
        bool last = --n_comm_streams == 0;
        pthread_mutex_unlock(&lock);
        if (!last) progress_start();
    }
    stream_unref(stream);
}

/* ---- waiting for streams ---- */

static bool is_done(const Stream *stream, uint64_t position) { return atomic_load(&stream->done) >= position; }

/* The caller sleeps until the progress thread has done so much of the stream. Deadlines are those of the
 * work that is waited for. */
static void wait_for(const Stream *stream, uint64_t position) {
    if (is_done(stream, position)) return;
    atomic_store(&caller_waits, true);
    for (;;) {
        uint32_t seen = atomic_load(&own.bells->bell[BELL_CALLER].rings);
        if (is_done(stream, position)) break;
        bell_sleep(BELL_CALLER, seen, 0, false);
    }
    atomic_store(&caller_waits, false);
}

static void run_here(Work *work) {
    Bell *bell = &bells_own()->bell[BELL_CALLER];
    Look look = {0};
    for (;;) {
        double stopped_for_s = stopped_for(&look);
        if (work->deadline_s > 0) work->deadline_s += stopped_for_s;
        uint32_t seen = atomic_load(&bell->rings);
        WorkState state = work->tick(work, BELL_CALLER);
        if (state == WORK_DONE) break;
        if (state == WORK_AGAIN) continue;
        look.sleep_s = bell_sleep(BELL_CALLER, seen, work->deadline_s, false);
    }
    if (work->release) work->release(work);
}

static void submit(Stream *stream, Work *work) {
    work->next = NULL;
    pthread_mutex_lock(&lock);
    if (stream->tail) {
        stream->tail->next = work;
    } else {
        stream->head = work;
    }
    stream->tail = work;
    pthread_mutex_unlock(&lock);
    stream->submitted++;
    ring_own(BELL_PROGRESS);
}

void stream_submit(Stream *stream, Work *work) {
    if (stream->kind == STREAM_COMPUTE) {
        work_run(work);
    } else {
        submit(stream, work);
    }
}

void work_run(Work *work) {
    if (!work->uses_sockets) {
        run_here(work);
        return;
    }
    if (!caller_stream) caller_stream = stream_create("caller", STREAM_COMM);
    submit(caller_stream, work);
    stream_sync(caller_stream);
}

void device_cpu_rest(void) {
    stream_destroy(caller_stream);
    caller_stream = NULL;
}

void stream_sync(Stream *stream) {
    if (stream->kind == STREAM_COMM) wait_for(stream, stream->submitted);
}

/* ---- events ---- */

struct Event {
    const char *name;
    Stream *stream; /* NULL: complete */
    uint64_t position;
};

Event *event_create(const char *name) {
    Event *event = xcalloc(1, sizeof *event);
    event->name = name;
    return event;
}

static void event_forget(Event *event) {
    if (event->stream) stream_unref(event->stream);
    event->stream = NULL;
}

void event_destroy(Event *event) {
    if (!event) return;
    event_forget(event);
    free(event);
}

static void stream_ref(Stream *stream) {
    pthread_mutex_lock(&lock);
    stream->references++;
    pthread_mutex_unlock(&lock);
}

void event_record(Event *event, Stream *stream) {
    event_forget(event);
    if (stream->kind == STREAM_COMPUTE) return; /* its work is done at the call */
    stream_ref(stream);
    event->stream = stream;
    event->position = stream->submitted;
}

void event_sync(Event *event) {
    if (event->stream) wait_for(event->stream, event->position);
}

/* ---- the platform's own work: waits, copies, zeros ---- */

typedef struct Chore Chore;
struct Chore {
    Work work;
    Stream *stream; /* a wait: until it has done `position` */
    uint64_t position;
    void *to; /* else: copy, or zero where from is NULL, `bytes` */
    const void *from;
    size_t bytes;
    Chore *next_free;
};

static Chore *free_chores; /* guarded by lock; kept for reuse, so that steady work allocates nothing */

static void chore_release(Work *work) {
    Chore *chore = (Chore *)work;
    if (chore->stream) stream_unref(chore->stream);
    pthread_mutex_lock(&lock);
    chore->next_free = free_chores;
    free_chores = chore;
    pthread_mutex_unlock(&lock);
}

static Chore *chore_take(WorkState (*tick)(Work *work, BellId bell)) {
    pthread_mutex_lock(&lock);
    Chore *chore = free_chores;
    if (chore) free_chores = chore->next_free;
    pthread_mutex_unlock(&lock);
    if (!chore) chore = xmalloc(sizeof *chore);
    *chore = (Chore){.work = {.tick = tick, .release = chore_release}};
    return chore;
}

/* The streams that it may wait for are of the same progress thread: nobody needs to ring. */
static WorkState wait_tick(Work *work, BellId bell) {
    const Chore *chore = (const Chore *)work;
    (void)bell;
    return is_done(chore->stream, chore->position) ? WORK_DONE : WORK_BLOCKED;
}

static WorkState move_tick(Work *work, BellId bell) {
    const Chore *chore = (const Chore *)work;
    (void)bell;
    if (chore->from) {
        memmove(chore->to, chore->from, chore->bytes);
    } else {
        memset(chore->to, 0, chore->bytes);
    }
    return WORK_DONE;
}

void stream_wait_event(Stream *stream, Event *event) {
    if (!event->stream || is_done(event->stream, event->position)) return;
    if (stream->kind == STREAM_COMPUTE) {
        wait_for(event->stream, event->position);
        return;
    }
    if (event->stream == stream) return; /* earlier work of the same FIFO */
    Chore *chore = chore_take(wait_tick);
    stream_ref(event->stream);
    chore->stream = event->stream;
    chore->position = event->position;
    submit(stream, &chore->work);
}

static void move(void *to, const void *from, size_t bytes, Stream *stream) {
    if (bytes == 0) return;
    Chore *chore = chore_take(move_tick);
    chore->to = to;
    chore->from = from;
    chore->bytes = bytes;
    stream_submit(stream, &chore->work); /* a compute stream runs it at once */
}

void device_copy(void *to, const void *from, size_t bytes, Stream *stream) {
    if (to != from) move(to, from, bytes, stream);
}

void device_zero(void *to, size_t bytes, Stream *stream) { move(to, NULL, bytes, stream); }
