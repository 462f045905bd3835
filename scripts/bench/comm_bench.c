/* comm_bench.c - how long operations between processes of this machine take, with their results checked.
 *
 *     comm_bench [RANKS [ROUNDS]]      default: 2, 4 and 8 ranks, each one's medians over 3 rounds
 *
 * Median, fastest and 95th percentile of a call, as rank 0 sees it; all ranks call in step, since each call
 * needs all of them. "in place": buffers in the memory that ranks share. "staged": buffers elsewhere. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "parallel/comm.h"

enum { LARGEST_BYTES = 64 << 20, CALLS_MAX = 4000 };
static const double limit_s = 1.0; /* for one line of the table */

typedef struct {
    Comm *comm;
    Group *world;
    Stream *stream;
    int rank, size;
    float *shared, *elsewhere;
} Bench;

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Whole numbers, small enough for exact sums. */
static float value(int rank, int64_t i) { return (float)((i * 7 + rank * 13) % 101); }

static void check_sum(const Bench *b, float *x, int64_t n, const char *what) {
    for (int64_t i = 0; i < n; i++) x[i] = value(b->rank, i);
    comm_all_reduce(b->world, x, n, DT_F32, COMM_SUM, b->stream);
    for (int64_t i = 0; i < n; i++) {
        float wanted = 0;
        for (int r = 0; r < b->size; r++) wanted += value(r, i);
        if (x[i] != wanted)
            die(EXIT_NUMBERS, "%s of %lld f32: element %lld is %g, not %g", what, (long long)n, (long long)i, x[i],
                wanted);
    }
    memset(x, 0, (size_t)n * sizeof *x); /* so that repeated sums stay finite */
}

typedef enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, RING, BARRIER } Kind;

static void call(const Bench *b, Kind kind, float *x, int64_t n) {
    const int next = (b->rank + 1) % b->size, before = (b->rank + b->size - 1) % b->size;
    const int64_t each = n / b->size;
    switch (kind) {
    case ALL_REDUCE: comm_all_reduce(b->world, x, n, DT_F32, COMM_SUM, b->stream); break;
    case ALL_GATHER: comm_all_gather(b->world, x, x + b->rank * each, each, DT_F32, b->stream); break;
    case REDUCE_SCATTER: comm_reduce_scatter(b->world, x + b->rank * each, x, each, DT_F32, COMM_SUM, b->stream); break;
    case BARRIER: comm_barrier(b->world, b->stream); break;
    case RING:
        comm_begin(b->comm);
        comm_send(b->world, next, x, n / 2, DT_F32, b->stream);
        comm_recv(b->world, before, x + n / 2, n / 2, DT_F32, b->stream);
        comm_end(b->comm);
    }
}

/* As many calls as fit in the time, the same number in all ranks. */
static void measure(const Bench *b, Kind kind, const char *name, float *x, size_t bytes) {
    static double times[CALLS_MAX];
    const int64_t n = (int64_t)(bytes / sizeof *x);
    if (kind == ALL_REDUCE) check_sum(b, x, n, name);
    double start_s = clock_s();
    for (int i = 0; i < 3; i++) call(b, kind, x, n);
    double calls = 3 * limit_s / (clock_s() - start_s);
    comm_host_reduce(b->world, &calls, 1, COMM_MAX);
    const int count = calls < 10 ? 10 : calls > CALLS_MAX ? CALLS_MAX : (int)calls;
    for (int i = 0; i < count; i++) {
        start_s = clock_s();
        call(b, kind, x, n);
        times[i] = clock_s() - start_s;
    }
    qsort(times, (size_t)count, sizeof *times, by_size);
    if (b->rank != 0) return;
    printf("%d ranks  %-24s %9zu B  median %10.1f us  fastest %10.1f  95%% %10.1f  (%d calls, %.2f GB/s)\n", b->size,
           name, bytes, 1e6 * times[count / 2], 1e6 * times[0], 1e6 * times[count * 95 / 100], count,
           1e-9 * (double)bytes / times[count / 2]);
    fflush(stdout);
}

static void run_ranks(int ranks) {
    static const size_t sizes[] = {8, 4096, 64 << 10, 1 << 20, LARGEST_BYTES};
    LaunchOptions launch_options = {.world_size = ranks, .timeout_s = 30};
    CommOptions options = {.timeout_s = 60};
    Launch *launch = launch_start(&launch_options);
    launch_watch_start(launch);
    Bench b = {.comm = comm_create(launch, &options), .rank = launch_rank(launch), .size = ranks};
    DeviceMemory memory = device_memory_create(LARGEST_BYTES);
    comm_register(b.comm, &memory);
    b.world = comm_world(b.comm);
    b.stream = stream_create("bench", STREAM_COMPUTE);
    b.shared = memory.base;
    b.elsewhere = xmalloc(LARGEST_BYTES);
    measure(&b, BARRIER, "barrier", b.shared, 0);
    for (int s = 0; s < 5; s++) measure(&b, ALL_REDUCE, "all_reduce in place", b.shared, sizes[s]);
    for (int s = 3; s < 5; s++) measure(&b, ALL_REDUCE, "all_reduce staged", b.elsewhere, sizes[s]);
    for (int s = 3; s < 5; s++) measure(&b, ALL_GATHER, "all_gather in place", b.shared, sizes[s]);
    for (int s = 3; s < 5; s++) measure(&b, REDUCE_SCATTER, "reduce_scatter in place", b.shared, sizes[s]);
    for (int s = 1; s < 4; s++) measure(&b, RING, "send and recv in place", b.shared, sizes[s]);
    stream_destroy(b.stream);
    comm_destroy(b.comm);
    device_memory_destroy(&memory);
    free(b.elsewhere);
    launch_finish(launch);
    exit(EXIT_DONE);
}

int main(int argc, char **argv) {
    static const int worlds[] = {2, 4, 8};
    int only = argc > 1 ? atoi(argv[1]) : 0, rounds = argc > 2 ? atoi(argv[2]) : 3;
    if (argc > 1 && (only < 2 || only > 64)) die(EXIT_CONFIG, "RANKS must be from 2 to 64, not %s", argv[1]);
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < 3; i++) {
            if (only && i > 0) break;
            int ranks = only ? only : worlds[i], how = 0;
            fflush(NULL);
            pid_t pid = fork(); /* the launching process ends when its ranks have */
            if (pid < 0) die(EXIT_LAUNCH, "cannot fork");
            if (pid == 0) run_ranks(ranks);
            if (waitpid(pid, &how, 0) != pid || how != 0) die(EXIT_INTERNAL, "a world of %d ranks failed", ranks);
        }
    }
    return EXIT_DONE;
}
