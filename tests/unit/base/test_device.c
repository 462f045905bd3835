/* test_device.c - the CPU platform's streams, events and memory: what waits for what, and what does not. */
#include <check.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"
#include "base/device_cpu.h"
#include "base/log.h"

/* ---- work that waits for a gate, and notes when it ran ---- */

static _Atomic int clock_ticks; /* one for each piece of work that is done */

typedef struct {
    Work work;
    _Atomic bool *gate; /* NULL: always open */
    _Atomic int done_at;
    _Atomic int ticks;
    pthread_t thread;
} Gated;

static WorkState gated_tick(Work *work, BellId bell) {
    Gated *gated = (Gated *)work;
    (void)bell;
    atomic_fetch_add(&gated->ticks, 1);
    if (gated->gate && !atomic_load(gated->gate)) return WORK_BLOCKED;
    gated->thread = pthread_self();
    atomic_store(&gated->done_at, 1 + atomic_fetch_add(&clock_ticks, 1));
    return WORK_DONE;
}

static Gated gated_make(_Atomic bool *gate) { return (Gated){.work.tick = gated_tick, .gate = gate}; }

static void open_gate(_Atomic bool *gate) {
    atomic_store(gate, true);
    for (int id = 0; id < BELL_COUNT; id++) bell_ring(&bells_own()->bell[id], bells_event_fd());
}

static Stream *streams[3];

static void set_up(void) {
    atomic_store(&clock_ticks, 0);
    for (int i = 0; i < 3; i++) streams[i] = stream_create("test", STREAM_COMM);
}

static void tear_down(void) {
    for (int i = 0; i < 3; i++) stream_destroy(streams[i]);
}

/* ---- streams ---- */

START_TEST(a_stream_is_a_fifo_and_holds_no_other) {
    _Atomic bool gate = false;
    Gated first = gated_make(&gate), second = gated_make(NULL), other = gated_make(NULL);
    stream_submit(streams[0], &first.work);
    stream_submit(streams[0], &second.work);
    stream_submit(streams[1], &other.work);
    stream_sync(streams[1]);
    ck_assert_int_eq(atomic_load(&other.done_at), 1);
    ck_assert_int_eq(atomic_load(&second.done_at), 0);
    open_gate(&gate);
    stream_sync(streams[0]);
    ck_assert_int_eq(atomic_load(&first.done_at), 2);
    ck_assert_int_eq(atomic_load(&second.done_at), 3);
    ck_assert(!pthread_equal(first.thread, pthread_self()));
}
END_TEST

/* Asks to be called again until the gate opens. */
static WorkState busy_tick(Work *work, BellId bell) {
    WorkState state = gated_tick(work, bell);
    return state == WORK_BLOCKED ? WORK_AGAIN : state;
}

START_TEST(long_work_lets_others_in) {
    _Atomic bool gate = false;
    Gated longer = gated_make(&gate), other = gated_make(NULL);
    longer.work.tick = busy_tick;
    stream_submit(streams[0], &longer.work);
    stream_submit(streams[1], &other.work);
    stream_sync(streams[1]);
    ck_assert_int_eq(atomic_load(&longer.done_at), 0);
    atomic_store(&gate, true);
    stream_sync(streams[0]);
    ck_assert_int_eq(atomic_load(&longer.done_at), 2);
}
END_TEST

static void *open_later(void *gate) {
    sleep_s(0.02);
    open_gate(gate);
    return NULL;
}

START_TEST(compute_work_runs_at_the_call) {
    _Atomic bool gate = false;
    pthread_t thread;
    Stream *compute = stream_create("compute", STREAM_COMPUTE);
    Gated work = gated_make(&gate);
    ck_assert_int_eq(pthread_create(&thread, NULL, open_later, &gate), 0);
    stream_submit(compute, &work.work);
    ck_assert_int_eq(atomic_load(&work.done_at), 1);
    ck_assert(pthread_equal(work.thread, pthread_self()));
    ck_assert_int_le(atomic_load(&work.ticks), 4); /* it slept in between */
    pthread_join(thread, NULL);
    stream_destroy(compute);
}
END_TEST

START_TEST(work_with_sockets_runs_on_the_progress_thread) {
    Gated work = gated_make(NULL);
    work.work.uses_sockets = true;
    work_run(&work.work);
    ck_assert_int_eq(atomic_load(&work.done_at), 1);
    ck_assert(!pthread_equal(work.thread, pthread_self()));
    device_cpu_rest();
}
END_TEST

START_TEST(destroying_a_stream_waits_for_its_work) {
    _Atomic bool gate = false;
    pthread_t thread;
    Stream *stream = stream_create("short-lived", STREAM_COMM);
    Gated work = gated_make(&gate), after = gated_make(NULL);
    stream_submit(stream, &work.work);
    ck_assert_int_eq(pthread_create(&thread, NULL, open_later, &gate), 0);
    stream_destroy(stream);
    ck_assert_int_eq(atomic_load(&work.done_at), 1);
    pthread_join(thread, NULL);
    stream_submit(streams[0], &after.work);
    stream_sync(streams[0]);
    ck_assert_int_eq(atomic_load(&after.done_at), 2);
}
END_TEST

/* ---- a watched descriptor, and deadlines ---- */

typedef struct {
    Work work;
    int fd;
} Reader;

static WorkState reader_tick(Work *work, BellId bell) {
    char byte;
    (void)bell;
    return read(((Reader *)work)->fd, &byte, 1) == 1 ? WORK_DONE : WORK_BLOCKED;
}

START_TEST(blocked_work_waits_for_sockets_and_for_bells) {
    int ends[2];
    _Atomic bool gate = false;
    ck_assert_int_eq(pipe2(ends, O_NONBLOCK), 0);
    progress_watch(ends[0]);
    Reader reader = {.work = {.tick = reader_tick, .uses_sockets = true}, .fd = ends[0]};
    Gated gated = gated_make(&gate);
    stream_submit(streams[0], &reader.work);
    stream_submit(streams[1], &gated.work);
    sleep_s(0.02);
    open_gate(&gate);
    stream_sync(streams[1]);
    ck_assert_int_eq((int)write(ends[1], "x", 1), 1);
    stream_sync(streams[0]);
    progress_watch(-1);
    close(ends[0]);
    close(ends[1]);
}
END_TEST

static WorkState deadline_tick(Work *work, BellId bell) {
    (void)bell;
    if (work->deadline_s == 0) work->deadline_s = clock_s() + 0.05;
    return clock_s() >= work->deadline_s ? WORK_DONE : WORK_BLOCKED;
}

START_TEST(a_deadline_wakes_the_thread) {
    double start_s = clock_s();
    Work queued = {.tick = deadline_tick}, here = {.tick = deadline_tick};
    stream_submit(streams[0], &queued);
    stream_sync(streams[0]);
    work_run(&here);
    ck_assert(clock_s() - start_s >= 0.1);
    ck_assert(clock_s() - start_s < 0.9); /* not only at the end of a slice of sleep */
}
END_TEST

/* A suspended process was not late: what it waits for begins anew when it goes on. */
static WorkState patient_tick(Work *work, BellId bell) {
    if (work->deadline_s == 0) {
        work->deadline_s = clock_s() + 0.5; /* a stop may come right behind: so no look at the clock in this tick */
    } else if (clock_s() >= work->deadline_s) {
        return WORK_DONE; /* done_at stays 0: the deadline has passed */
    }
    return gated_tick(work, bell);
}

static void *open_after_stop(void *gate) {
    sleep_s(2.9);
    open_gate(gate);
    return NULL;
}

START_TEST(a_stopped_process_is_forgiven) {
    _Atomic bool gate = false;
    pthread_t thread;
    Gated queued = gated_make(&gate), here = gated_make(&gate);
    queued.work.tick = here.work.tick = patient_tick;
    ck_assert_int_eq(pthread_create(&thread, NULL, open_after_stop, &gate), 0);
    stream_submit(streams[0], &queued.work);
    if (fork() == 0) {
        kill(getppid(), SIGSTOP);
        sleep_s(2.8);
        kill(getppid(), SIGCONT);
        _exit(0);
    }
    work_run(&here.work);
    stream_sync(streams[0]);
    ck_assert_int_gt(atomic_load(&here.done_at), 0);
    ck_assert_int_gt(atomic_load(&queued.done_at), 0);
    pthread_join(thread, NULL);
}
END_TEST

/* A stop that falls between setting the deadline and going to sleep. */
static WorkState stopped_tick(Work *work, BellId bell) {
    if (work->deadline_s == 0) {
        work->deadline_s = clock_s() + 0.5;
        sleep_s(2.2);
        return WORK_BLOCKED;
    }
    return patient_tick(work, bell);
}

START_TEST(a_stop_before_the_sleep_is_forgiven) {
    _Atomic bool gate = true;
    Gated queued = gated_make(&gate), here = gated_make(&gate);
    queued.work.tick = here.work.tick = stopped_tick;
    stream_submit(streams[0], &queued.work);
    work_run(&here.work);
    stream_sync(streams[0]);
    ck_assert_int_gt(atomic_load(&here.done_at), 0);
    ck_assert_int_gt(atomic_load(&queued.done_at), 0);
}
END_TEST

/* ---- events ---- */

START_TEST(an_event_never_recorded_is_complete) {
    Event *event = event_create("never");
    event_sync(event);
    stream_wait_event(streams[0], event);
    Gated work = gated_make(NULL);
    stream_submit(streams[0], &work.work);
    stream_sync(streams[0]);
    event_destroy(event);
}
END_TEST

START_TEST(a_stream_waits_for_an_event_alone) {
    _Atomic bool gate = false;
    Event *event = event_create("gate");
    Gated before = gated_make(&gate), after = gated_make(NULL), other = gated_make(NULL);
    stream_submit(streams[0], &before.work);
    event_record(event, streams[0]);
    stream_wait_event(streams[1], event);
    stream_submit(streams[1], &after.work);
    stream_submit(streams[2], &other.work);
    stream_sync(streams[2]);
    ck_assert_int_eq(atomic_load(&after.done_at), 0);
    open_gate(&gate);
    stream_sync(streams[1]);
    ck_assert_int_eq(atomic_load(&before.done_at), 2);
    ck_assert_int_eq(atomic_load(&after.done_at), 3);
    event_destroy(event);
}
END_TEST

START_TEST(an_event_covers_what_was_submitted_before_it_only) {
    _Atomic bool gate = false;
    Event *event = event_create("early");
    Gated before = gated_make(NULL), after = gated_make(&gate);
    stream_submit(streams[0], &before.work);
    event_record(event, streams[0]);
    stream_submit(streams[0], &after.work);
    event_sync(event);
    ck_assert_int_eq(atomic_load(&before.done_at), 1);
    ck_assert_int_eq(atomic_load(&after.done_at), 0);
    open_gate(&gate);
    stream_sync(streams[0]);
    event_destroy(event);
}
END_TEST

/* What waits already keeps to the record it saw. */
START_TEST(recording_again_rearms) {
    _Atomic bool first_gate = false, second_gate = false;
    Event *event = event_create("twice");
    Gated first = gated_make(&first_gate), second = gated_make(&second_gate);
    Gated after_first = gated_make(NULL), after_second = gated_make(NULL);
    stream_submit(streams[0], &first.work);
    event_record(event, streams[0]);
    stream_wait_event(streams[2], event);
    stream_submit(streams[2], &after_first.work);
    stream_submit(streams[1], &second.work);
    event_record(event, streams[1]);
    open_gate(&second_gate);
    event_sync(event); /* of the second record: the first is still held */
    ck_assert_int_eq(atomic_load(&second.done_at), 1);
    sleep_s(0.01);
    ck_assert_int_eq(atomic_load(&after_first.done_at), 0);
    open_gate(&first_gate);
    stream_sync(streams[2]);
    ck_assert_int_gt(atomic_load(&after_first.done_at), atomic_load(&first.done_at));
    stream_wait_event(streams[0], event);
    stream_submit(streams[0], &after_second.work);
    stream_sync(streams[0]);
    event_destroy(event);
}
END_TEST

START_TEST(a_compute_stream_waits_at_the_call) {
    _Atomic bool gate = false;
    pthread_t thread;
    Stream *compute = stream_create("compute", STREAM_COMPUTE);
    Event *event = event_create("gate");
    Gated work = gated_make(&gate), after = gated_make(NULL);
    stream_submit(streams[0], &work.work);
    event_record(event, streams[0]);
    ck_assert_int_eq(pthread_create(&thread, NULL, open_later, &gate), 0);
    stream_wait_event(compute, event);
    ck_assert_int_eq(atomic_load(&work.done_at), 1);
    event_record(event, compute); /* complete at once */
    stream_wait_event(streams[1], event);
    stream_submit(streams[1], &after.work);
    stream_sync(streams[1]);
    pthread_join(thread, NULL);
    event_destroy(event);
    stream_destroy(compute);
}
END_TEST

START_TEST(an_event_outlives_its_stream) {
    Stream *stream = stream_create("short-lived", STREAM_COMM);
    Event *event = event_create("survivor");
    Gated work = gated_make(NULL);
    stream_submit(stream, &work.work);
    event_record(event, stream);
    stream_destroy(stream);
    event_sync(event);
    stream_wait_event(streams[0], event);
    event_record(event, streams[0]);
    event_destroy(event);
}
END_TEST

/* ---- copies and memory ---- */

START_TEST(copies_and_zeros_are_work_of_the_stream) {
    _Atomic bool gate = false;
    enum { N = 1000 };
    static char from[N], to[N];
    Gated work = gated_make(&gate);
    memset(from, 7, N);
    memset(to, 1, N);
    stream_submit(streams[0], &work.work);
    device_copy(to, from, N, streams[0]);
    device_zero(to, N / 2, streams[0]);
    device_copy(to, from, 0, streams[0]);
    ck_assert_int_eq(to[0], 1);
    open_gate(&gate);
    stream_sync(streams[0]);
    for (int i = 0; i < N; i++) ck_assert_int_eq(to[i], i < N / 2 ? 0 : 7);
    Stream *compute = stream_create("compute", STREAM_COMPUTE);
    device_copy(to, from, N, compute);
    ck_assert_int_eq(to[0], 7);
    device_zero(to, N, compute);
    ck_assert_int_eq(to[N - 1], 0);
    stream_destroy(compute);
}
END_TEST

static long resident_bytes(void) {
    long pages = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    ck_assert(file && fscanf(file, "%ld %ld", &pages, &resident) == 2);
    fclose(file);
    return resident * sysconf(_SC_PAGESIZE);
}

START_TEST(memory_is_untouched_until_used_and_can_be_mapped) {
    static const size_t sizes[] = {1, 4097, (16 << 20) - 1, (64 << 20) + 12345};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        long before = resident_bytes();
        DeviceMemory memory = device_memory_create(sizes[i]);
        ck_assert(resident_bytes() - before < 4 << 20);
        ck_assert_uint_eq(memory.bytes, sizes[i]);
        unsigned char *mine = memory.base, *peers = device_memory_map(memory.fd, memory.bytes);
        ck_assert_int_eq(peers[sizes[i] - 1], 0);
        mine[sizes[i] - 1] = 200;
        ck_assert_int_eq(peers[sizes[i] - 1], 200);
        ck_assert_int_eq(munmap(peers, memory.bytes), 0);
        device_memory_destroy(&memory);
        ck_assert(!memory.base && memory.fd == -1);
    }
}
END_TEST

/* ---- many streams, many waits, in random order ---- */

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

enum { STEPS = 400 };

typedef struct {
    Work work;
    _Atomic int mark, bad;
    _Atomic int *need[2]; /* marks of work that must be done before; NULL: none */
    int again;
} Checked;

static WorkState checked_tick(Work *work, BellId bell) {
    Checked *checked = (Checked *)work;
    (void)bell;
    if (checked->again-- > 0) return WORK_AGAIN;
    for (int i = 0; i < 2; i++) {
        if (checked->need[i] && !atomic_load(checked->need[i])) atomic_store(&checked->bad, 1);
    }
    atomic_store(&checked->mark, 1);
    return WORK_DONE;
}

START_TEST(random_streams_and_events) {
    const char *text = getenv("TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : (uint64_t)(clock_s() * 1e9), state = seed;
    static Checked work[STEPS];
    Event *events[8];
    _Atomic int *marked[8] = {NULL}, *last[3] = {NULL}, *wanted[3] = {NULL};
    for (int e = 0; e < 8; e++) events[e] = event_create("random");
    for (int i = 0; i < STEPS; i++) {
        int s = (int)(next_random(&state) % 3), e = (int)(next_random(&state) % 8);
        switch (next_random(&state) % 4) {
        case 0:
            stream_wait_event(streams[s], events[e]);
            if (marked[e]) wanted[s] = marked[e];
            break;
        case 1:
            event_record(events[e], streams[s]);
            marked[e] = last[s];
            break;
        case 2:
            if (next_random(&state) % 8) break;
            event_sync(events[e]);
            ck_assert_msg(!marked[e] || atomic_load(marked[e]), "event too early: TEST_SEED=%llu",
                          (unsigned long long)seed);
            break;
        default: break;
        }
        work[i] = (Checked){
            .work.tick = checked_tick, .need = {last[s], wanted[s]}, .again = (int)(next_random(&state) % 4)};
        last[s] = &work[i].mark;
        stream_submit(streams[s], &work[i].work);
    }
    for (int s = 0; s < 3; s++) stream_sync(streams[s]);
    for (int i = 0; i < STEPS; i++) {
        ck_assert_msg(atomic_load(&work[i].mark) && !atomic_load(&work[i].bad), "work %d out of order: TEST_SEED=%llu",
                      i, (unsigned long long)seed);
    }
    for (int e = 0; e < 8; e++) event_destroy(events[e]);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("device");
    TCase *cases = tcase_create("streams, events, memory");
    tcase_set_timeout(cases, 30);
    tcase_add_checked_fixture(cases, set_up, tear_down);
    tcase_add_test(cases, a_stream_is_a_fifo_and_holds_no_other);
    tcase_add_test(cases, long_work_lets_others_in);
    tcase_add_test(cases, compute_work_runs_at_the_call);
    tcase_add_test(cases, work_with_sockets_runs_on_the_progress_thread);
    tcase_add_test(cases, destroying_a_stream_waits_for_its_work);
    tcase_add_test(cases, blocked_work_waits_for_sockets_and_for_bells);
    tcase_add_test(cases, a_deadline_wakes_the_thread);
    tcase_add_test(cases, a_stopped_process_is_forgiven);
    tcase_add_test(cases, a_stop_before_the_sleep_is_forgiven);
    tcase_add_test(cases, an_event_never_recorded_is_complete);
    tcase_add_test(cases, a_stream_waits_for_an_event_alone);
    tcase_add_test(cases, an_event_covers_what_was_submitted_before_it_only);
    tcase_add_test(cases, recording_again_rearms);
    tcase_add_test(cases, a_compute_stream_waits_at_the_call);
    tcase_add_test(cases, an_event_outlives_its_stream);
    tcase_add_test(cases, copies_and_zeros_are_work_of_the_stream);
    tcase_add_test(cases, memory_is_untouched_until_used_and_can_be_mapped);
    tcase_add_loop_test(cases, random_streams_and_events, 0, 20);
    suite_add_tcase(suite, cases);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
