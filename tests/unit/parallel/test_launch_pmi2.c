/* test_launch_pmi2.c - the PMI2 launcher through the real libpmi2, against a process manager with faults. */
#include <dlfcn.h>

#include "tests/multi/fake_pmi2.c"
#include "tests/unit/parallel/launch_harness.h"

enum { RANKS = 3 };

typedef struct {
    FakePmi2 server;
    int ends[RANKS][2];
    double timeout_s;
    int config_world;
    bool other_config; /* of the last rank */
    uint64_t other_program;
    int value_bytes;
    int leaves; /* this rank ends after init; -1: none */
    bool missing_key;
    const char *step_tasks;
} Scene;

static int serve(int index, void *context) {
    const Scene *scene = context;
    int fds[RANKS];
    (void)index;
    for (int r = 0; r < scene->server.ranks; r++) {
        fds[r] = scene->ends[r][0];
        close(scene->ends[r][1]);
    }
    fake_pmi2_serve(&scene->server, fds);
    return 0;
}

static uint8_t byte_of(int rank, int i) { return (uint8_t)(31 * rank + 7 * i + i / 256); }

static void exchange_values(Launch *launch, const Scene *scene) {
    int rank = launch_rank(launch), size = launch_size(launch);
    uint8_t *value = xmalloc((uint64_t)scene->value_bytes);
    for (int i = 0; i < scene->value_bytes; i++) value[i] = byte_of(rank, i);
    launch_put(launch, "value", value, (size_t)scene->value_bytes);
    launch_put(launch, "empty", NULL, 0);
    launch_fence(launch, "values");
    for (int r = 0; r < size; r++) {
        size_t bytes;
        uint8_t *other = launch_get(launch, r, "value", &bytes);
        if (bytes != (size_t)scene->value_bytes) die(EXIT_INTERNAL, "%zu bytes", bytes);
        for (int i = 0; i < scene->value_bytes; i++) {
            if (other[i] != byte_of(r, i)) die(EXIT_INTERNAL, "byte %d of rank %d", i, r);
        }
        free(other);
        free(launch_get(launch, r, "empty", &bytes));
        if (bytes != 0) die(EXIT_INTERNAL, "the empty value has %zu bytes", bytes);
    }
    if (scene->missing_key) free(launch_get(launch, 0, "never-put", &(size_t){0}));
    free(value);
}

static int rank_body(int index, void *context) {
    const Scene *scene = context;
    char text[16];
    for (int r = 0; r < scene->server.ranks; r++) {
        close(scene->ends[r][0]);
        if (r != index) close(scene->ends[r][1]);
    }
    snprintf(text, sizeof text, "%d", scene->ends[index][1]);
    setenv("PMI_FD", text, 1);
    snprintf(text, sizeof text, "%d", index);
    setenv("PMI_RANK", text, 1);
    setenv("SLURM_LOCALID", text, 1);
    snprintf(text, sizeof text, "%d", scene->server.ranks);
    setenv("PMI_SIZE", text, 1);
    setenv("PMI_JOBID", "7.0", 1);
    setenv("TRIDENT_TEST_HOSTNAME", "n0,n1,n1", 1);
    if (scene->step_tasks) {
        setenv("SLURM_STEP_ID", "0", 1);
        setenv("SLURM_STEP_NUM_TASKS", scene->step_tasks, 1);
    }
    LaunchOptions options = {.timeout_s = scene->timeout_s, .world_size = scene->config_world};
    options.config_text = "[a]\nb = 1 # here\nc = 2\n\n[d]\ne = 3\n";
    if (index == scene->server.ranks - 1 && scene->other_config) {
        options.config_text = "[a]\nb = 1 # there\nc = 2\n\n[d]\ne = 4\n";
    }
    if (index == scene->server.ranks - 1) options.program_hash = scene->other_program;
    Launch *launch = launch_start(&options);
    bool right = launch_size(launch) == scene->server.ranks && launch_rank(launch) == index &&
                 strcmp(launch_kind(launch), "pmi2") == 0 && launch_local_rank(launch) == index &&
                 strcmp(launch_host(launch), index == 0 ? "n0" : "n1") == 0;
    if (!right) die(EXIT_INTERNAL, "rank %d of %d", launch_rank(launch), launch_size(launch));
    if (scene->leaves == index) return 0;
    launch_watch_start(launch);
    exchange_values(launch, scene);
    launch_finish(launch);
    return 0;
}

static Scene plain_scene(void) {
    Scene scene = {.server = {.ranks = RANKS}, .timeout_s = 10, .value_bytes = 3000, .leaves = -1};
    return scene;
}

/* Runs the ranks under the server. all->process[RANKS] is the server. */
static void play(Scene *scene, Processes *all, double limit_s) {
    all->n = 0;
    for (int r = 0; r < RANKS; r++) ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, scene->ends[r]), 0);
    for (int r = 0; r < RANKS; r++) process_start(all, rank_body, r, scene);
    process_start(all, serve, RANKS, scene);
    for (int r = 0; r < RANKS; r++) {
        close(scene->ends[r][0]);
        close(scene->ends[r][1]);
    }
    processes_collect(all, limit_s);
}

static void check_all(const Processes *all, int status, const char *says) {
    for (int r = 0; r < RANKS; r++) {
        CHECK_STATUS(&all->process[r], status);
        if (says) CHECK_SAYS(&all->process[r], says);
    }
}

/* Slurm's library does not free the answer to a finalize that failed. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:libpmi2.so"; }

static Processes all;

START_TEST(values_of_any_length) {
    static const int lengths[] = {1, 100, 231, 232, 233, 256, 5000, 50000};
    Scene scene = plain_scene();
    scene.value_bytes = lengths[_i];
    scene.config_world = RANKS;
    scene.step_tasks = "3";
    play(&scene, &all, 20);
    check_all(&all, 0, NULL);
    for (int r = 0; r < RANKS; r++) ck_assert_msg(all.process[r].bytes == 0, "%s", all.process[r].text);
}
END_TEST

START_TEST(value_limits) {
    static const int limits[] = {100, 256, 511, 512, 1024};
    Scene scene = plain_scene();
    scene.server.value_max = limits[_i];
    play(&scene, &all, 20);
    check_all(&all, 0, NULL);
}
END_TEST

START_TEST(too_small_limit_is_named) {
    Scene scene = plain_scene();
    scene.server.value_max = 40;
    play(&scene, &all, 20);
    check_all(&all, EXIT_LAUNCH, "PMI2 refused the value of \"launch.card\"");
}
END_TEST

START_TEST(truncation_is_found) {
    static const int cuts[] = {20, 50, 100, 256, 510};
    Scene scene = plain_scene();
    scene.server.truncate_to = cuts[_i];
    scene.timeout_s = 0.3;
    play(&scene, &all, 20);
    for (int r = 0; r < RANKS; r++) ck_assert_int_ne(all.process[r].status, 0);
    int found = 0;
    for (int r = 0; r < RANKS; r++) found += count_text(all.process[r].text, "did not give back the value of key");
    ck_assert_int_ge(found, 1);
}
END_TEST

START_TEST(swapped_values_are_found) {
    Scene scene = plain_scene();
    scene.server.swapped_for = "any";
    scene.timeout_s = 0.3;
    play(&scene, &all, 20);
    CHECK_STATUS(&all.process[0], EXIT_LAUNCH);
    CHECK_SAYS(&all.process[0], "it is the value of another key");
}
END_TEST

START_TEST(errors_of_each_command) {
    static const struct {
        const char *command, *says;
        int after;
    } cases[] = {{"fullinit", "PMI2 init failed", 0},
                 {"kvs-put", "PMI2 refused the value", 0},
                 {"kvs-fence", "PMI2 fence \"start\" failed", 0},
                 {"kvs-get", "is not in the PMI2 store", 0},
                 {"kvs-get", "is not in the PMI2 store", 4}};
    Scene scene = plain_scene();
    scene.server.error_command = cases[_i].command;
    scene.server.error_after = cases[_i].after;
    scene.timeout_s = 0.3;
    play(&scene, &all, 20);
    int found = 0;
    for (int r = 0; r < RANKS; r++) {
        CHECK_STATUS(&all.process[r], EXIT_LAUNCH);
        found += count_text(all.process[r].text, cases[_i].says);
    }
    ck_assert_int_ge(found, 1);
}
END_TEST

START_TEST(an_error_at_the_end_is_only_a_warning) {
    Scene scene = plain_scene();
    scene.server.error_command = "finalize";
    play(&scene, &all, 20);
    check_all(&all, 0, "PMI2 finalize gave error");
}
END_TEST

START_TEST(death_of_the_server) {
    static const char *const commands[] = {"fullinit", "kvs-put", "kvs-fence", "kvs-get"};
    Scene scene = plain_scene();
    scene.server.vanish_at = commands[_i];
    scene.timeout_s = 0.3;
    play(&scene, &all, 20);
    check_all(&all, EXIT_LAUNCH, "PMI2");
    for (int r = 0; r < RANKS; r++) ck_assert(all.process[r].ended_s < 4.0);
}
END_TEST

START_TEST(silence_ends_at_the_deadline) {
    static const char *const commands[] = {"fullinit", "kvs-put", "kvs-fence", "kvs-get"};
    Scene scene = plain_scene();
    scene.server.mute_at = commands[_i];
    scene.timeout_s = 0.3;
    play(&scene, &all, 20);
    check_all(&all, EXIT_LAUNCH, "waited 0.3 s for PMI2");
    for (int r = 0; r < RANKS; r++) ck_assert(all.process[r].ended_s < 4.0);
}
END_TEST

START_TEST(slow_fences) {
    Scene scene = plain_scene();
    scene.server.fence_delay_s = 0.6;
    scene.timeout_s = 0.3;
    play(&scene, &all, 20);
    check_all(&all, EXIT_LAUNCH, "waited 0.3 s for PMI2 (fence start)");

    scene = plain_scene();
    scene.server.fence_delay_s = 0.3;
    play(&scene, &all, 20);
    check_all(&all, 0, NULL);
}
END_TEST

/* A fence of PMI2 has no limit of its own: a rank that left keeps the others there. */
START_TEST(a_rank_that_left_is_noticed) {
    Scene scene = plain_scene();
    scene.leaves = 1;
    scene.timeout_s = 0.3;
    play(&scene, &all, 20);
    CHECK_STATUS(&all.process[0], EXIT_LAUNCH);
    CHECK_SAYS(&all.process[0], "a rank has left");
    CHECK_STATUS(&all.process[2], EXIT_LAUNCH);
}
END_TEST

START_TEST(missing_key) {
    Scene scene = plain_scene();
    scene.missing_key = true;
    play(&scene, &all, 20);
    CHECK_STATUS(&all.process[0], EXIT_LAUNCH);
    CHECK_SAYS(&all.process[0], "key \"never-put\" of rank 0 is not in the PMI2 store");
}
END_TEST

START_TEST(disagreements_are_refused) {
    Scene scene = plain_scene();
    scene.step_tasks = "4";
    play(&scene, &all, 20);
    check_all(&all, EXIT_LAUNCH, "SLURM_STEP_NUM_TASKS=4");

    scene = plain_scene();
    scene.config_world = 8;
    play(&scene, &all, 20);
    check_all(&all, EXIT_LAUNCH, "the config asks for 8 ranks, but the launcher (pmi2) started 3");

    scene = plain_scene();
    scene.other_config = true;
    play(&scene, &all, 20);
    check_all(&all, EXIT_LAUNCH, NULL);
    CHECK_SAYS(&all.process[0], "rank 2 (host n1, pid");
    CHECK_SAYS(&all.process[0], "another config than rank 0");
    CHECK_SAYS(&all.process[2], "[d] here: e = 4; on rank 0: e = 3");

    scene = plain_scene();
    scene.other_program = 1;
    play(&scene, &all, 20);
    check_all(&all, EXIT_LAUNCH, NULL);
    CHECK_SAYS(&all.process[0], "another executable than rank 0");
}
END_TEST

static void add_cases(TCase *cases) {
    tcase_add_loop_test(cases, values_of_any_length, 0, 8);
    tcase_add_loop_test(cases, value_limits, 0, 5);
    tcase_add_test(cases, too_small_limit_is_named);
    tcase_add_loop_test(cases, truncation_is_found, 0, 5);
    tcase_add_test(cases, swapped_values_are_found);
    tcase_add_loop_test(cases, errors_of_each_command, 0, 5);
    tcase_add_test(cases, an_error_at_the_end_is_only_a_warning);
    tcase_add_loop_test(cases, death_of_the_server, 0, 4);
    tcase_add_loop_test(cases, silence_ends_at_the_deadline, 0, 4);
    tcase_add_test(cases, slow_fences);
    tcase_add_test(cases, a_rank_that_left_is_noticed);
    tcase_add_test(cases, missing_key);
    tcase_add_test(cases, disagreements_are_refused);
}

int main(void) {
    if (!dlopen("libpmi2.so.0", RTLD_NOW) && !dlopen("libpmi2.so", RTLD_NOW)) {
        printf("skipped: libpmi2 is not installed (Debian: libpmi2-0): %s\n", dlerror());
        return 77;
    }
    return run_suite("launch_pmi2", add_cases);
}
