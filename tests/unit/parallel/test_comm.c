/* test_comm.c - every operation, format, size and transport against results computed in each rank alone; random
 * operations on several streams; the same bits whatever the transport. */
#include <math.h>

#include "tests/unit/parallel/comm_harness.h"

/* ---- one collective, checked ---- */

typedef enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, KINDS } Kind;
static const char *const kind_names[KINDS] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"};

/* A call that is under way: what it was, and where its result will be. */
typedef struct {
    Kind kind;
    DType dtype;
    CommOp op;
    int64_t count;
    int root, n;
    const int *ranks; /* of the group */
    int me;           /* in the group */
    uint64_t salt;
    bool alias; /* reduce_scatter, all_gather: the small buffer is this rank's part of the large one */
    char *in, *out;
} Call;

static int64_t in_elements(const Call *c) {
    return c->count * (c->kind == REDUCE_SCATTER || c->kind == ALL_TO_ALL ? c->n : 1);
}
static int64_t out_elements(const Call *c) {
    return c->count * (c->kind == ALL_GATHER || c->kind == ALL_TO_ALL ? c->n : 1);
}

static void call_buffers(Call *c, World *world) {
    const size_t size = dtype_size(c->dtype), in = (size_t)in_elements(c) * size, out = (size_t)out_elements(c) * size;
    const size_t part = (size_t)(c->me * c->count) * size;
    if (c->kind == ALL_REDUCE || c->kind == BROADCAST) {
        c->in = c->out = world_take(world, in);
    } else if (c->alias && c->kind == REDUCE_SCATTER) {
        c->in = world_take(world, in);
        c->out = c->in + part;
    } else if (c->alias && c->kind == ALL_GATHER) {
        c->out = world_take(world, out);
        c->in = c->out + part;
    } else {
        c->in = world_take(world, in);
        c->out = world_take(world, out);
    }
    if (c->out != c->in && c->kind != REDUCE_SCATTER) memset(c->out, 0xee, out);
    fill_values(c->in, c->dtype, c->ranks[c->me], 0, in_elements(c), c->salt);
}

static void call_issue(const Call *c, Group *group, Stream *stream) {
    switch (c->kind) {
    case ALL_REDUCE: comm_all_reduce(group, c->out, c->count, c->dtype, c->op, stream); break;
    case REDUCE_SCATTER: comm_reduce_scatter(group, c->out, c->in, c->count, c->dtype, c->op, stream); break;
    case ALL_GATHER: comm_all_gather(group, c->out, c->in, c->count, c->dtype, stream); break;
    case BROADCAST: comm_broadcast(group, c->out, c->count, c->dtype, c->root, stream); break;
    default: comm_all_to_all(group, c->out, c->in, c->count, c->dtype, stream);
    }
}

static double expected(const Call *c, int64_t i) {
    switch (c->kind) {
    case ALL_REDUCE: return reduced(c->dtype, c->op, c->ranks, c->n, i, c->salt);
    case REDUCE_SCATTER: return reduced(c->dtype, c->op, c->ranks, c->n, c->me * c->count + i, c->salt);
    case ALL_GATHER: return value_of(c->dtype, c->ranks[i / c->count], i % c->count, c->salt);
    case BROADCAST: return value_of(c->dtype, c->ranks[c->root], i, c->salt);
    default: return value_of(c->dtype, c->ranks[i / c->count], c->me * c->count + i % c->count, c->salt);
    }
}

static void call_check(const Call *c, const World *world, uint64_t seed) {
    const size_t size = dtype_size(c->dtype);
    const int64_t step = out_elements(c) > 20000 ? 5 : 1; /* long results: faults there are longer than that */
    char wanted[8];
    for (int64_t i = (int64_t)(c->salt % (uint64_t)step); i < out_elements(c); i += step) {
        store(wanted, 0, c->dtype, expected(c, i));
        if (memcmp(wanted, c->out + (size_t)i * size, size) == 0) continue;
        die(EXIT_NUMBERS, "%s of %lld %s %s over %s, %d ranks%s: element %lld of rank %d is wrong (seed %llu)",
            kind_names[c->kind], (long long)c->count, dtype_name(c->dtype), c->op == COMM_MAX ? "max" : "sum",
            transport_names[world->transport], c->n, c->alias ? ", aliased" : "", (long long)i, world->rank,
            (unsigned long long)seed);
    }
}

/* ---- all kinds, formats and sizes ---- */

/* Around the limits of one-shot, staged and in-place work, of windows and of messages' pieces. */
static const int64_t sizes[] = {0, 1, 3, 64, 1000, 2047, 4097, 8193, 65536, 70001};
static const int64_t long_sizes[] = {200003, 1 << 20};

static void play_all(World *world, const Scene *scene) {
    int *ranks = xcalloc((uint64_t)world->size, sizeof *ranks);
    uint64_t salt = 1;
    for (int i = 0; i < world->size; i++) ranks[i] = i;
    int n_sizes = (int)(sizeof sizes / sizeof sizes[0]), n_long = getenv("TRIDENT_LONG") ? 2 : 0;
    for (int s = 0; s < n_sizes + n_long; s++) {
        for (int kind = 0; kind < KINDS; kind++) {
            for (DType dtype = 0; dtype < DT_COUNT; dtype++, salt++) {
                int64_t count = s < n_sizes ? sizes[s] : long_sizes[s - n_sizes];
                if (count > 10000 && dtype != DT_F32 && (int)salt % 3 != scene->argument) continue;
                Call call = {.kind = kind,
                             .dtype = dtype,
                             .op = salt % 3 ? COMM_SUM : COMM_MAX,
                             .count = count,
                             .n = world->size,
                             .root = (int)(salt % (uint64_t)world->size),
                             .ranks = ranks,
                             .me = world->rank,
                             .salt = salt,
                             .alias = salt % 2};
                /* Memory is reused at once: a peer that still read it would get wrong numbers. */
                world->used = 0;
                call_buffers(&call, world);
                call_issue(&call, comm_world(world->comm), world->compute);
                call_check(&call, world, 0);
            }
        }
    }
    free(ranks);
}

static void check_good(const Process *process) {
    ck_assert_msg(process->status == 0, "status %d: %s", process->status, process->text);
}

START_TEST(all_kinds_formats_and_sizes) {
    const Scene scene = {.ranks = 4, .transport = (Transport)_i, .play = play_all, .argument = 1};
    check_good(scene_run(&scene));
}
END_TEST

START_TEST(other_worlds) {
    static const int ranks[] = {1, 2, 3, 8};
    const Scene scene = {.ranks = ranks[_i / 3], .transport = (Transport)(_i % 3), .play = play_all, .argument = 3};
    check_good(scene_run(&scene));
}
END_TEST

/* ---- values of the host ---- */

static void play_host(World *world, const Scene *scene) {
    Group *all = comm_world(world->comm);
    double values[3] = {1.0 + world->rank, -world->rank, 0.1};
    double sum = 0.1;
    (void)scene;
    for (int i = 1; i < world->size; i++) sum += 0.1;
    comm_host_reduce(all, values, 3, COMM_SUM);
    if (values[0] != world->size * (world->size + 1) / 2 || values[2] != sum) die(EXIT_NUMBERS, "host_reduce sum");
    values[0] = 5 + world->rank;
    comm_host_reduce(all, values, 1, COMM_MAX);
    if (values[0] != 4 + world->size) die(EXIT_NUMBERS, "host_reduce max");
    static const int64_t shapes[][4] = {{0, 0, 0, 0}, {1, 0, 3, 2}, {0, 100000, 5, 0}, {700001, 1, 300000, 262144}};
    for (int s = 0; s < 4; s++) {
        int64_t lengths[4], bytes = shapes[s][world->rank];
        char *mine = xmalloc((uint64_t)bytes), *whole;
        for (int64_t i = 0; i < bytes; i++) mine[i] = (char)(i * 7 + world->rank);
        char *at = whole = comm_host_gather(all, mine, bytes, lengths);
        for (int r = 0; r < world->size; at += lengths[r++]) {
            if (lengths[r] != shapes[s][r]) die(EXIT_NUMBERS, "host_gather: length of rank %d", r);
            for (int64_t i = 0; i < lengths[r]; i++) {
                if (at[i] != (char)(i * 7 + r)) die(EXIT_NUMBERS, "host_gather: byte %lld of rank %d", (long long)i, r);
            }
        }
        free(whole);
        free(mine);
    }
    if (world->size > 1 && comm_bytes(world->comm) < 700001) die(EXIT_NUMBERS, "comm_bytes");
}

START_TEST(host_values) {
    const Scene scene = {.ranks = 4, .transport = (Transport)_i, .play = play_host};
    check_good(scene_run(&scene));
}
END_TEST

/* ---- messages ---- */

static void check_values(const World *world, const void *got, DType dtype, int from, int64_t n, uint64_t salt) {
    char wanted[8];
    for (int64_t i = 0; i < n; i++) {
        store(wanted, 0, dtype, value_of(dtype, from, i, salt));
        if (memcmp(wanted, (const char *)got + (size_t)i * dtype_size(dtype), dtype_size(dtype)) == 0) continue;
        die(EXIT_NUMBERS, "message from rank %d to rank %d over %s: element %lld", from, world->rank,
            transport_names[world->transport], (long long)i);
    }
}

/* Round the ring, both ways at once, grouped; then down a line and up again without grouping. */
static void play_messages(World *world, const Scene *scene) {
    static const int64_t counts[] = {0, 1, 777, 16384, 16385, 300000};
    Group *all = comm_world(world->comm);
    Stream *forward = stream_create("forward", STREAM_COMM), *backward = stream_create("backward", STREAM_COMM);
    int next = (world->rank + 1) % world->size, before = (world->rank + world->size - 1) % world->size;
    (void)scene;
    for (int c = 0; c < 6; c++) {
        const int64_t n = counts[c];
        const size_t bytes = (size_t)n * 4;
        world->used = 0;
        char *out = world_take(world, bytes), *left = world_take(world, bytes), *right = world_take(world, bytes);
        fill_values(out, DT_F32, world->rank, 0, n, 5);
        comm_begin(world->comm);
        comm_send(all, next, out, n, DT_F32, forward);
        comm_recv(all, before, left, n, DT_F32, forward);
        comm_send(all, before, out, n, DT_F32, backward);
        comm_recv(all, next, right, n, DT_F32, backward);
        comm_end(world->comm);
        stream_sync(forward);
        stream_sync(backward);
        check_values(world, left, DT_F32, before, n, 5);
        check_values(world, right, DT_F32, next, n, 5);
        if (world->rank > 0) comm_recv(all, before, left, n, DT_F32, world->compute);
        if (world->rank > 0) check_values(world, left, DT_F32, before, n, 6);
        fill_values(out, DT_F32, world->rank, 0, n, 6);
        if (next > 0) comm_send(all, next, out, n, DT_F32, forward);
        if (next > 0) comm_recv(all, next, right, n, DT_F32, forward);
        stream_sync(forward);
        if (next > 0) check_values(world, right, DT_F32, next, n, 6);
        if (world->rank > 0) comm_send(all, before, out, n, DT_F32, world->compute);
        comm_barrier(all, world->compute);
    }
    stream_destroy(forward);
    stream_destroy(backward);
}

START_TEST(messages) {
    const Scene scene = {.ranks = 4, .transport = (Transport)_i, .play = play_messages, .options.strict = _i % 2};
    check_good(scene_run(&scene));
}
END_TEST

/* A message that nobody takes yet holds up neither its group's collectives nor other streams' messages. */
static void play_overtaking(World *world, const Scene *scene) {
    Group *all = comm_world(world->comm);
    Stream *slow = stream_create("slow", STREAM_COMM), *fast = stream_create("fast", STREAM_COMM);
    enum { N = 50000 };
    float *held = world_take(world, N * 4), *passing = world_take(world, N * 4);
    (void)scene;
    fill_values(held, DT_F32, world->rank, 0, N, 1);
    fill_values(passing, DT_F32, world->rank, 0, N, 2);
    if (world->rank == 0) comm_send(all, 1, held, N, DT_F32, slow);
    int pair[2] = {0, 1};
    Group *two = world->rank < 2 ? comm_group(world->comm, "two", pair, 2) : NULL;
    for (int i = 0; i < 3; i++) comm_barrier(all, fast);
    stream_sync(fast);
    if (world->rank == 0) comm_send(two, 1, passing, N, DT_F32, fast);
    if (world->rank == 1) comm_recv(two, 0, passing, N, DT_F32, fast);
    stream_sync(fast);
    if (world->rank == 1) check_values(world, passing, DT_F32, 0, N, 2);
    if (world->rank == 1) comm_recv(all, 0, held, N, DT_F32, slow);
    stream_sync(slow);
    if (world->rank == 1) check_values(world, held, DT_F32, 0, N, 1);
    comm_barrier(all, world->compute);
    stream_destroy(slow);
    stream_destroy(fast);
}

START_TEST(streams_overtake) {
    const Scene scene = {.ranks = 4, .transport = (Transport)_i, .play = play_overtaking};
    check_good(scene_run(&scene));
}
END_TEST

/* ---- random operations on several streams ---- */

enum { GROUPS = 5, CALLS = 60 };

typedef struct {
    int ranks[4], n, me; /* me -1: not a member */
    Group *group;
} Team;

static void make_teams(Team teams[GROUPS], World *world) {
    static const int members[GROUPS][5] = {{4, 0, 1, 2, 3}, {2, 1, 0}, {2, 3, 2}, {3, 3, 0, 1}, {2, 0, 2}};
    for (int t = 0; t < GROUPS; t++) {
        teams[t] = (Team){.n = members[t][0], .me = -1};
        for (int i = 0; i < teams[t].n; i++) {
            teams[t].ranks[i] = members[t][1 + i];
            if (teams[t].ranks[i] == world->rank) teams[t].me = i;
        }
        if (teams[t].me < 0) continue;
        teams[t].group = comm_group(world->comm, "team", teams[t].ranks, teams[t].n);
        if (group_size(teams[t].group) != teams[t].n || group_rank(teams[t].group) != teams[t].me)
            die(EXIT_INTERNAL, "group");
    }
}

/* The same calls in every rank, each drawn whether or not the rank takes part. */
static void play_random(World *world, const Scene *scene) {
    uint64_t seed = (uint64_t)scene->argument, state = seed;
    Stream *streams[4] = {NULL};
    Team teams[GROUPS];
    static Call calls[CALLS];
    int n_calls = 0;
    for (int s = 0; s < 3; s++) streams[s] = stream_create("random", STREAM_COMM);
    streams[3] = world->compute;
    make_teams(teams, world);
    for (int i = 0; i < CALLS; i++) {
        const Team *team = &teams[random_next(&state) % GROUPS];
        Call call = {.kind = (Kind)(random_next(&state) % KINDS),
                     .dtype = (DType)(random_next(&state) % DT_COUNT),
                     .op = (CommOp)(random_next(&state) % 2),
                     .n = team->n,
                     .ranks = team->ranks,
                     .me = team->me,
                     .salt = random_next(&state) % 1000};
        uint64_t size = random_next(&state);
        call.count = (int64_t)(size % (size >> 32 & 7 ? 3000 : 60000));
        call.root = (int)(random_next(&state) % (uint64_t)call.n);
        call.alias = random_next(&state) % 2;
        Stream *stream = streams[random_next(&state) % 4];
        if (team->me < 0) continue;
        call_buffers(&call, world);
        call_issue(&call, team->group, stream);
        calls[n_calls++] = call;
    }
    for (int s = 0; s < 3; s++) stream_sync(streams[s]);
    for (int i = 0; i < n_calls; i++) call_check(&calls[i], world, seed);
    comm_barrier(comm_world(world->comm), world->compute);
    for (int s = 0; s < 3; s++) stream_destroy(streams[s]);
}

START_TEST(random_operations) {
    uint64_t seed = getenv("TEST_SEED") ? random_seed() : (random_seed() + (uint64_t)_i) % 1000000;
    const Scene scene = {
        .ranks = 4, .transport = (Transport)(_i % TRANSPORTS), .play = play_random, .argument = (int)seed};
    const Process *process = scene_run(&scene);
    ck_assert_msg(process->status == 0, "status %d, %s, TEST_SEED=%llu: %s", process->status,
                  transport_names[scene.transport], (unsigned long long)seed, process->text);
}
END_TEST

/* ---- results of one stream as input of another ---- */

static void play_chain(World *world, const Scene *scene) {
    enum { N = 20000, ROUNDS = 12 };
    Group *all = comm_world(world->comm);
    Stream *streams[2] = {stream_create("one", STREAM_COMM), stream_create("two", STREAM_COMM)};
    Event *done = event_create("done");
    int32_t *x = world_take(world, N * 4), *own = world_take(world, N * 4), *sums = world_take(world, 4 * N * 4);
    (void)scene;
    for (int i = 0; i < N; i++) x[i] = world->rank + i;
    for (int round = 0; round < ROUNDS; round++) {
        Stream *stream = streams[round % 2];
        stream_wait_event(stream, done);
        comm_all_reduce(all, x, N, DT_I32, COMM_SUM, stream);
        event_record(done, stream);
    }
    stream_wait_event(streams[ROUNDS % 2], done);
    device_copy(own, x, N * 4, streams[ROUNDS % 2]);
    comm_all_gather(all, sums, own, N, DT_I32, streams[ROUNDS % 2]);
    event_record(done, streams[ROUNDS % 2]);
    event_sync(done);
    uint32_t factor = 1;
    for (int round = 1; round < ROUNDS; round++) factor *= 4;
    for (int i = 0; i < 4 * N; i++) {
        if ((uint32_t)sums[i] != factor * (uint32_t)(6 + 4 * (i % N)))
            die(EXIT_NUMBERS, "chain: element %d is %d", i, sums[i]);
    }
    comm_barrier(all, world->compute);
    event_destroy(done);
    for (int s = 0; s < 2; s++) stream_destroy(streams[s]);
}

START_TEST(chains_of_events) {
    const Scene scene = {.ranks = 4, .transport = (Transport)_i, .play = play_chain};
    check_good(scene_run(&scene));
}
END_TEST

/* ---- one launch, several comms ---- */

static void play_again(World *world, const Scene *scene) {
    (void)scene;
    for (int i = 0; i < 3; i++) {
        CommOptions options = {.timeout_s = 20, .force_tcp = i == 1};
        Comm *comm = comm_create(world->launch, &options);
        double one = 1;
        int all[4] = {3, 2, 1, 0};
        Group *first = comm_group(comm, "same", all, 4), *second = comm_group(comm, "same", all, 4);
        comm_host_reduce(first, &one, 1, COMM_SUM);
        comm_host_reduce(second, &one, 1, COMM_SUM);
        if (one != 16) die(EXIT_NUMBERS, "sum %g", one);
        comm_destroy(comm);
    }
}

START_TEST(several_comms_of_one_launch) {
    const Scene scene = {.ranks = 4, .transport = IN_PLACE, .play = play_again};
    check_good(scene_run(&scene));
}
END_TEST

static void add_tests(TCase *cases) {
    tcase_add_loop_test(cases, all_kinds_formats_and_sizes, 0, TRANSPORTS);
    tcase_add_loop_test(cases, other_worlds, 0, 12);
    tcase_add_loop_test(cases, host_values, 0, TRANSPORTS);
    tcase_add_loop_test(cases, messages, 0, TRANSPORTS);
    tcase_add_loop_test(cases, streams_overtake, 0, TRANSPORTS);
    tcase_add_loop_test(cases, random_operations, 0, getenv("TRIDENT_LONG") ? 200 : 10);
    tcase_add_loop_test(cases, chains_of_events, 0, TRANSPORTS);
    tcase_add_test(cases, several_comms_of_one_launch);
}

int main(void) { return run_suite("comm", add_tests); }
