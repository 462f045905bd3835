/* test_comm_faults.c - ranks that disagree, come too late, are lost, or wait for one another for ever: the run ends
 * soon, with the right status, and the words name ranks and operation. Nothing stays behind on the machine. */
#include <dirent.h>

#include "tests/unit/parallel/comm_harness.h"

static const Transport both[] = {IN_PLACE, TCP};

/* ---- disagreement ---- */

typedef enum {
    OTHER_KIND,
    OTHER_COUNT,
    OTHER_DTYPE,
    OTHER_OP,
    OTHER_ROOT,
    NO_ELEMENTS,
    OTHER_MESSAGE,
    DISAGREEMENTS
} Disagreement;

static void play_disagreement(World *world, const Scene *scene) {
    Group *all = comm_world(world->comm);
    float *x = world_take(world, 4096 * 4), *y = world_take(world, 4 * 4096 * 4);
    bool odd = world->rank == 2;
    memset(x, 0, 4096 * 4);
    for (int i = 0; i < 3; i++) comm_barrier(all, world->compute);
    switch ((Disagreement)scene->argument) {
    case OTHER_KIND:
        if (odd) comm_all_gather(all, y, x, 1000, DT_F32, world->compute);
        if (!odd) comm_all_reduce(all, x, 1000, DT_F32, COMM_SUM, world->compute);
        break;
    case OTHER_COUNT: comm_all_reduce(all, x, odd ? 4001 : 4000, DT_F32, COMM_SUM, world->compute); break;
    case OTHER_DTYPE: comm_all_to_all(all, y, y + 8192, 10, odd ? DT_I32 : DT_F32, world->compute); break;
    case OTHER_OP: comm_reduce_scatter(all, x, y, 4096, DT_F32, odd ? COMM_MAX : COMM_SUM, world->compute); break;
    case OTHER_ROOT: comm_broadcast(all, x, 100, DT_F32, odd ? 1 : 0, world->compute); break;
    case NO_ELEMENTS: comm_all_reduce(all, x, odd ? 0 : 500, DT_F32, COMM_SUM, world->compute); break;
    default:
        if (world->rank == 0) comm_send(all, 2, x, 100, DT_F32, world->compute);
        if (odd) comm_recv(all, 0, x, 101, DT_F32, world->compute);
    }
    comm_barrier(all, world->compute);
}

static const char *const disagreement_words[DISAGREEMENTS][2] = {
    {"all_gather of 1000 f32", "all_reduce of 1000 f32 (sum)"},
    {"all_reduce of 4001 f32 (sum)", "all_reduce of 4000 f32 (sum)"},
    {"all_to_all of 10 i32", "all_to_all of 10 f32"},
    {"reduce_scatter of 4096 f32 (max)", "reduce_scatter of 4096 f32 (sum)"},
    {"broadcast of 100 f32 from member 1", "broadcast of 100 f32 from member 0"},
    {"all_reduce of 0 f32", "all_reduce of 500 f32"},
    {"101 f32", "100 f32"},
};

START_TEST(disagreement_names_both_sides) {
    const Scene scene = {
        .ranks = 4, .transport = both[_i / DISAGREEMENTS], .play = play_disagreement, .argument = _i % DISAGREEMENTS};
    const Process *process = scene_run(&scene);
    CHECK_STATUS(process, EXIT_INTERNAL);
    CHECK_SAYS(process, "ranks disagree: ");
    CHECK_SAYS(process, "rank 2");
    CHECK_SAYS(process, scene.argument == OTHER_MESSAGE ? "message 0 of group world" : "as operation 3 of group world");
    for (int side = 0; side < 2; side++) CHECK_SAYS(process, disagreement_words[scene.argument][side]);
    ck_assert(process->ended_s < 9); /* before anything else would have ended it */
}
END_TEST

/* ---- deadlines ---- */

static void play_late(World *world, const Scene *scene) {
    Group *all = comm_world(world->comm);
    Stream *stream = stream_create("data", STREAM_COMM);
    float *x = world_take(world, 100000 * 4);
    memset(x, 0, 100000 * 4);
    comm_all_reduce(all, x, 100000, DT_F32, COMM_SUM, stream);
    stream_sync(stream);
    if (world->rank == 1) sleep_s(10);
    switch (scene->argument) {
    case 0: comm_all_reduce(all, x, 100000, DT_F32, COMM_SUM, world->compute); break;
    case 1:
        comm_all_reduce(all, x, 100000, DT_F32, COMM_SUM, stream);
        stream_sync(stream);
        break;
    case 2:
        if (world->rank == 0) comm_send(all, 1, x, 77, DT_F32, world->compute);
        if (world->rank > 1) sleep_s(10);
        break;
    default:
        comm_begin(world->comm);
        if (world->rank == 0) comm_recv(all, 1, x, 77, DT_F32, stream);
        if (world->rank == 0) comm_send(all, 3, x + 100, 66, DT_F32, stream);
        if (world->rank == 3) comm_recv(all, 0, x + 100, 66, DT_F32, stream);
        comm_end(world->comm);
        stream_sync(stream);
        if (world->rank > 1) sleep_s(10);
    }
}

START_TEST(a_deadline_names_the_operation_and_who_is_missing) {
    static const char *const words[] = {"all_reduce of 100000 f32 (sum) as operation 1 of group world",
                                        "all_reduce of 100000 f32 (sum) as operation 1 of group world",
                                        "send of 77 f32 to rank 1 as message 0 of group world",
                                        "recv of 77 f32 from rank 1 as message 0 of group world"};
    const Scene scene = {
        .ranks = 4, .transport = both[_i / 4], .play = play_late, .argument = _i % 4, .options.timeout_s = 0.5};
    const Process *process = scene_run(&scene);
    CHECK_STATUS(process, EXIT_HANG);
    CHECK_SAYS(process, words[scene.argument]);
    CHECK_SAYS(process, "waited 0.5 s");
    CHECK_SAYS(process, ": rank 1 on host");
    CHECK_SAYS(process, "has not come");
    ck_assert(process->ended_s < 9); /* before anything else would have ended it */
}
END_TEST

/* Both send first: without buffers neither gets on. */
static void play_deadlock(World *world, const Scene *scene) {
    Group *all = comm_world(world->comm);
    char *x = world_take(world, 64), *y = world_take(world, 64);
    int peer = 1 - world->rank;
    if (scene->argument) comm_begin(world->comm);
    comm_send(all, peer, x, 4, DT_F32, world->compute);
    comm_recv(all, peer, y, 4, DT_F32, world->compute);
    if (scene->argument) comm_end(world->comm);
}

START_TEST(sends_without_buffers_deadlock_and_are_named) {
    Scene scene = {
        .ranks = 2, .transport = both[_i], .play = play_deadlock, .options = {.timeout_s = 0.5, .strict = true}};
    const Process *process = scene_run(&scene);
    CHECK_STATUS(process, EXIT_HANG);
    CHECK_SAYS(process, "send of 4 f32 to rank ");
    scene.argument = 1;
    CHECK_STATUS(scene_run(&scene), 0);
}
END_TEST

static void play_missing_member(World *world, const Scene *scene) {
    int ranks[2] = {0, 1};
    (void)scene;
    if (world->rank == 1) comm_group(world->comm, "halves", ranks, 2);
    if (world->rank != 1) sleep_s(5);
}

START_TEST(a_group_that_its_first_rank_does_not_make) {
    const Scene scene = {.ranks = 2, .transport = IN_PLACE, .play = play_missing_member, .options.timeout_s = 0.5};
    const Process *process = scene_run(&scene);
    CHECK_STATUS(process, EXIT_HANG);
    CHECK_SAYS(process, "group halves of 2 ranks: rank 0 has not come");
}
END_TEST

/* ---- loss ---- */

/* A rank dies while the others are in the middle of operations with it. */
static void play_loss(World *world, const Scene *scene) {
    Group *all = comm_world(world->comm);
    Stream *stream = stream_create("data", STREAM_COMM);
    float *x = world_take(world, 300000 * 4);
    memset(x, 0, 300000 * 4);
    launch_watch_phase("all-reduce", 3);
    for (int i = 0;; i++) {
        if (i == 20 && world->rank == scene->argument) raise(SIGKILL);
        comm_all_reduce(all, x, 300000, DT_F32, COMM_SUM, i % 2 ? stream : world->compute);
    }
}

static int entries_of(const char *path) {
    int n = 0;
    DIR *directory = opendir(path);
    for (const struct dirent *e; directory && (e = readdir(directory));) n += strstr(e->d_name, "trident") != NULL;
    if (directory) closedir(directory);
    return n;
}

START_TEST(a_lost_peer_is_named_at_once_and_nothing_stays) {
    static const Transport transports[] = {IN_PLACE, STAGED, TCP, TWO_HOSTS};
    const Scene scene = {.ranks = 4,
                         .transport = transports[_i % 4],
                         .play = play_loss,
                         .argument = _i < 4 ? 2 : 0,
                         .no_watch = _i >= 8};
    int entries = entries_of("/dev/shm");
    const Process *process = scene_run(&scene);
    CHECK_STATUS(process, EXIT_PEER_LOST);
    CHECK_SAYS(process, scene.argument ? "rank 2 on host" : "rank 0 on host");
    CHECK_SAYS(process, "was lost");
    ck_assert_msg(process->ended_s < 15, "after %.1f s", process->ended_s);
    ck_assert_int_le(entries_of("/dev/shm"), entries);
}
END_TEST

static void add_tests(TCase *cases) {
    tcase_add_loop_test(cases, disagreement_names_both_sides, 0, 2 * DISAGREEMENTS);
    tcase_add_loop_test(cases, a_deadline_names_the_operation_and_who_is_missing, 0, 8);
    tcase_add_loop_test(cases, sends_without_buffers_deadlock_and_are_named, 0, 2);
    tcase_add_test(cases, a_group_that_its_first_rank_does_not_make);
    tcase_add_loop_test(cases, a_lost_peer_is_named_at_once_and_nothing_stays, 0, 12);
}

int main(void) { return run_suite("comm faults", add_tests); }
