/* test_launch_local.c - the built-in launcher and the watchdog: values, deaths, hangs, signals, goodbye. */
#include <sched.h>
#include <sys/resource.h>

#include "tests/unit/parallel/launch_harness.h"

typedef enum {
    FAULT_NONE,
    FAULT_KILL,
    FAULT_SEGV,
    FAULT_ABORT,
    FAULT_DIE,
    FAULT_EXIT_0,
    FAULT_EXIT_3,
    FAULT_STOP,
    FAULT_LATE,
    FAULT_DIE_PEER_LOST
} Fault;

typedef struct {
    int ranks;
    Fault fault;
    int at;            /* the rank that it happens to */
    int and_at;        /* and a second and third one at the same time; 0: none */
    bool before_watch; /* during start-up */
    double deadline_s, run_s;
    bool stops_on_signal; /* TERM and USR1 end the run in order, with EXIT_STOPPED */
} Scene;

static volatile sig_atomic_t signalled;
static void on_signal(int number) { signalled = number; }

static void commit_fault(Fault fault) {
    switch (fault) {
    case FAULT_KILL: raise(SIGKILL); break;
    case FAULT_SEGV:
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
        break;
    case FAULT_ABORT: signal(SIGABRT, SIG_DFL); abort();
    case FAULT_DIE: die(EXIT_NUMBERS, "the loss is not finite");
    case FAULT_DIE_PEER_LOST: die(EXIT_PEER_LOST, "rank 2 closed its connection");
    case FAULT_EXIT_0: exit(0);
    case FAULT_EXIT_3: exit(3);
    case FAULT_STOP: raise(SIGSTOP); break;
    default: break;
    }
}

/* The launching process: its children are the ranks. */
static int local_body(int index, void *context) {
    const Scene *scene = context;
    struct rlimit no_core = {0, 0};
    (void)index;
    setrlimit(RLIMIT_CORE, &no_core);
    if (scene->stops_on_signal) {
        signal(SIGTERM, on_signal);
        signal(SIGUSR1, on_signal);
    }
    LaunchOptions options = {.world_size = scene->ranks, .timeout_s = 10};
    Launch *launch = launch_start(&options);
    int rank = launch_rank(launch);
    bool faulty = rank == scene->at || (scene->and_at && (rank == scene->and_at || rank == scene->and_at + 1));
    if (scene->before_watch && faulty) commit_fault(scene->fault);
    launch_watch_start(launch);
    launch_watch_phase("forward", 12);
    launch_watch_deadline(scene->deadline_s);
    launch_fence(launch, "all in the step");
    if (faulty) commit_fault(scene->fault);
    double until = clock_s() + scene->run_s;
    if (!faulty && scene->fault == FAULT_LATE) launch_watch_phase("all-reduce", 12);
    while (clock_s() < until && !signalled) sleep_s(0.01);
    launch_finish(launch);
    return signalled ? EXIT_STOPPED : 0;
}

static Processes all;

static Process *play(Scene *scene) {
    all.n = 0;
    process_start(&all, local_body, 0, scene);
    processes_collect(&all, 20);
    return &all.process[0];
}

/* ---- the store ---- */

static int store_body(int index, void *context) {
    static char buffer[4096];
    (void)context;
    setvbuf(stderr, buffer, _IOFBF, sizeof buffer);
    fprintf(stderr, "before the fork\n");
    setenv("TRIDENT_TEST_HOSTNAME", "n0,n0,n1", 1);
    LaunchOptions options = {.world_size = 3, .timeout_s = 10};
    Launch *launch = launch_start(&options);
    int rank = launch_rank(launch);
    if (strcmp(launch_host(launch), rank < 2 ? "n0" : "n1") != 0) die(EXIT_INTERNAL, "host %s", launch_host(launch));
    size_t bytes = 3000000, got;
    uint8_t *value = xmalloc(bytes), secret[16];
    for (int round = 0; round < 3; round++) {
        char key[16];
        snprintf(key, sizeof key, "big-%d", round);
        memset(value, 10 * round + rank, bytes);
        launch_put(launch, key, value, bytes);
        launch_fence(launch, key);
        for (int r = 0; r < 3; r++) {
            uint8_t *other = launch_get(launch, r, key, &got);
            if (got != bytes || other[0] != 10 * round + r || other[bytes - 1] != 10 * round + r)
                die(EXIT_INTERNAL, "value");
            free(other);
        }
    }
    launch_secret(launch, secret);
    launch_put(launch, "secret", secret, sizeof secret);
    launch_fence(launch, "secrets");
    for (int r = 0; r < 3; r++) {
        uint8_t *other = launch_get(launch, r, "secret", &got);
        if (got != sizeof secret || memcmp(other, secret, sizeof secret) != 0) die(EXIT_INTERNAL, "secrets differ");
        free(other);
    }
    free(value);
    if (index == 1) launch_get(launch, 0, "never-put", &got);
    if (index == 2) launch_put(launch, "secret", secret, sizeof secret), launch_fence(launch, "again");
    if (index == 3) launch_fence(launch, rank == 1 ? "here" : "there");
    launch_finish(launch);
    return 0;
}

START_TEST(store_of_local_ranks) {
    static const int statuses[] = {0, EXIT_LAUNCH, EXIT_INTERNAL, EXIT_INTERNAL};
    static const char *const says[] = {"before the fork", "key \"never-put\" of rank 0 is not in the store",
                                       "put the key \"secret\" twice", "waits at \"here\""};
    all.n = 0;
    process_start(&all, store_body, 0, NULL);
    for (int i = 1; i < 4; i++) process_start(&all, store_body, i, NULL);
    processes_collect(&all, 20);
    for (int i = 0; i < 4; i++) {
        CHECK_STATUS(&all.process[i], statuses[i]);
        CHECK_SAYS(&all.process[i], says[i]);
    }
    ck_assert_int_eq(count_text(all.process[0].text, "before the fork"), 1);
}
END_TEST

static void bind_to(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    REQUIRE(sched_setaffinity(0, sizeof set, &set) == 0);
}

/* Ranks 0 to 2 are on one host, rank 3 on another. bind: the cores of each; -1: all. */
static int cores_body(int index, void *context) {
    static const int bind[][4] = {{-1, -1, -1, -1}, {0, 1, 1, 1}, {0, 0, -1, 1}};
    static const int allowed[][4] = {{2, 2, 2, 2}, {1, 1, 1, 1}, {1, 1, 2, 1}};
    static const int sharers[][4] = {{3, 3, 3, 1}, {1, 2, 2, 1}, {3, 3, 3, 1}};
    static const int host[][4] = {{2, 2, 2, 2}, {2, 2, 2, 1}, {2, 2, 2, 1}};
    (void)context;
    setenv("TRIDENT_TEST_HOSTNAME", "n0,n0,n0,n1", 1);
    LaunchOptions options = {.world_size = 4, .timeout_s = 10};
    Launch *launch = launch_start(&options);
    int rank = launch_rank(launch);
    if (bind[index][rank] >= 0) bind_to(bind[index][rank]);
    for (int again = 0; again < 2; again++) {
        LaunchCores cores = launch_cores(launch);
        if (cores.allowed != allowed[index][rank] || cores.sharers != sharers[index][rank] ||
            cores.host != host[index][rank] || cores.ranks != (rank < 3 ? 3 : 1)) {
            die(EXIT_INTERNAL, "case %d: %d allowed, %d sharers, %d of the host, %d ranks", index, cores.allowed,
                cores.sharers, cores.host, cores.ranks);
        }
    }
    launch_finish(launch);
    return 0;
}

/* On two cores of this machine; where there is one only, the masks cannot be made. */
START_TEST(cores_of_a_host_and_who_shares_them) {
    cpu_set_t before, two;
    ck_assert_int_eq(sched_getaffinity(0, sizeof before, &before), 0);
    if (!CPU_ISSET(0, &before) || !CPU_ISSET(1, &before)) return;
    CPU_ZERO(&two);
    CPU_SET(0, &two);
    CPU_SET(1, &two);
    ck_assert_int_eq(sched_setaffinity(0, sizeof two, &two), 0);
    all.n = 0;
    for (int i = 0; i < 3; i++) process_start(&all, cores_body, i, NULL);
    processes_collect(&all, 20);
    for (int i = 0; i < 3; i++) CHECK_STATUS(&all.process[i], 0);
    sched_setaffinity(0, sizeof before, &before);
}
END_TEST

START_TEST(single_process) {
    LaunchOptions options = {.timeout_s = 1};
    Launch *launch = launch_start(&options);
    size_t bytes;
    ck_assert_str_eq(launch_kind(launch), "single");
    launch_put(launch, "key", "text", 5);
    launch_fence(launch, "alone");
    char *text = launch_get(launch, 0, "key", &bytes);
    ck_assert_str_eq(text, "text");
    free(text);
    launch_watch_start(launch);
    launch_watch_phase("forward", 1);
    launch_finish(launch);
}
END_TEST

/* ---- deaths ---- */

static const struct {
    Fault fault;
    int status;
    const char *says;
} deaths[] = {
    {FAULT_KILL, EXIT_PEER_LOST, "was killed by signal 9 (Killed)"},
    {FAULT_SEGV, EXIT_PEER_LOST, "was killed by signal 11 (Segmentation fault)"},
    {FAULT_ABORT, EXIT_PEER_LOST, "was killed by signal 6 (Aborted)"},
    {FAULT_DIE, EXIT_NUMBERS, "the loss is not finite"},
    {FAULT_EXIT_0, EXIT_PEER_LOST, "ended before the run was over"},
    {FAULT_EXIT_3, EXIT_DATA, "was lost during forward (step 12)"},
};
static const int ranks_hit[] = {0, 2, 4};

START_TEST(death_of_one_rank) {
    Scene scene = {.ranks = 5, .fault = deaths[_i / 3].fault, .at = ranks_hit[_i % 3], .run_s = 15};
    Process *parent = play(&scene);
    CHECK_STATUS(parent, deaths[_i / 3].status);
    /* Rank 0 prints what it knows of the others; of its own end, the next rank does, as far as it goes. */
    CHECK_SAYS(parent, deaths[_i / 3].says);
    char name[32];
    snprintf(name, sizeof name, "rank %d", scene.at);
    CHECK_SAYS(parent, name);
    if (scene.at != 0 && scene.fault != FAULT_DIE) CHECK_SAYS(parent, "was lost during forward (step 12)");
    ck_assert_msg(parent->ended_s < 2.0, "%.2f s", parent->ended_s);
}
END_TEST

START_TEST(death_during_start) {
    Scene scene = {
        .ranks = 5, .fault = deaths[_i / 3].fault, .at = ranks_hit[_i % 3], .run_s = 15, .before_watch = true};
    Process *parent = play(&scene);
    CHECK_STATUS(parent, deaths[_i / 3].status);
    if (scene.fault != FAULT_EXIT_3) CHECK_SAYS(parent, deaths[_i / 3].says);
    ck_assert_msg(parent->ended_s < 2.0, "%.2f s", parent->ended_s);
}
END_TEST

START_TEST(many_die_at_once) {
    Scene scene = {.ranks = 8, .fault = FAULT_KILL, .at = 2, .and_at = 5, .run_s = 15};
    Process *parent = play(&scene);
    CHECK_STATUS(parent, EXIT_PEER_LOST);
    CHECK_SAYS(parent, "rank 2 (pid");
    CHECK_SAYS(parent, "rank 5 (pid");
    CHECK_SAYS(parent, "rank 6 (pid");
    CHECK_SAYS(parent, "also lost: rank");
    ck_assert_int_eq(count_text(parent->text, "was lost during"), 1);
    ck_assert_msg(parent->ended_s < 2.0, "%.2f s", parent->ended_s);
}
END_TEST

/* Last words that only report the loss of another rank: nothing was lost here, so they stand in the end. */
START_TEST(consequence_without_cause) {
    Scene scene = {.ranks = 4, .fault = FAULT_DIE_PEER_LOST, .at = 3, .run_s = 15};
    Process *parent = play(&scene);
    CHECK_STATUS(parent, EXIT_PEER_LOST);
    CHECK_SAYS(parent, "rank 3 on host");
    CHECK_SAYS(parent, "rank 2 closed its connection");
    ck_assert_msg(parent->ended_s < 2.0, "%.2f s", parent->ended_s);
}
END_TEST

/* ---- hangs ---- */

START_TEST(stopped_rank_is_named) {
    Scene scene = {.ranks = 4, .fault = FAULT_STOP, .at = _i == 0 ? 2 : 0, .deadline_s = 0.5, .run_s = 15};
    Process *parent = play(&scene);
    CHECK_STATUS(parent, EXIT_HANG);
    char name[80];
    snprintf(name, sizeof name, "rank %d on host", scene.at);
    CHECK_SAYS(parent, name);
    CHECK_SAYS(parent, "does not answer (stopped?)");
    CHECK_SAYS(parent, "limit of 0.5 s");
}
END_TEST

START_TEST(late_rank_is_named) {
    Scene scene = {.ranks = 4, .fault = FAULT_LATE, .at = _i == 0 ? 2 : 0, .deadline_s = 0.5, .run_s = 15};
    Process *parent = play(&scene);
    CHECK_STATUS(parent, EXIT_HANG);
    char name[80];
    snprintf(name, sizeof name, "rank %d on host", scene.at);
    CHECK_SAYS(parent, name);
    CHECK_SAYS(parent, "is late: in forward (step 12)");
    ck_assert_msg(parent->ended_s < 2.0, "%.2f s", parent->ended_s);
}
END_TEST

START_TEST(deadline_of_a_single_process) {
    Scene scene = {.ranks = 1, .deadline_s = 0.3, .run_s = 15};
    Process *parent = play(&scene);
    CHECK_STATUS(parent, EXIT_HANG);
    CHECK_SAYS(parent, "forward (step 12)");
}
END_TEST

/* Ctrl-Z and fg: the time that all were stopped counts for nobody. */
START_TEST(stop_and_go_is_no_hang) {
    Scene scene = {.ranks = 3, .deadline_s = 1.5, .run_s = 0.9, .at = -1};
    all.n = 0;
    process_start(&all, local_body, 0, &scene);
    sleep_s(0.3);
    kill(all.process[0].pid, SIGTSTP);
    sleep_s(3.8);
    kill(all.process[0].pid, SIGCONT);
    processes_collect(&all, 20);
    CHECK_STATUS(&all.process[0], 0);
    ck_assert_str_eq(all.process[0].text, "");
}
END_TEST

/* ---- signals ---- */

START_TEST(signals_are_passed_on) {
    static const int numbers[] = {SIGTERM, SIGUSR1};
    Scene scene = {.ranks = 4, .at = -1, .run_s = 15, .stops_on_signal = true};
    all.n = 0;
    process_start(&all, local_body, 0, &scene);
    sleep_s(0.3);
    kill(all.process[0].pid, numbers[_i]);
    processes_collect(&all, 20);
    CHECK_STATUS(&all.process[0], EXIT_STOPPED);
    ck_assert_str_eq(all.process[0].text, "");
}
END_TEST

START_TEST(interrupted_run_dies_of_the_signal) {
    Scene scene = {.ranks = 4, .at = -1, .run_s = 15};
    all.n = 0;
    process_start(&all, local_body, 0, &scene);
    sleep_s(0.3);
    kill(all.process[0].pid, SIGINT);
    processes_collect(&all, 20);
    CHECK_STATUS(&all.process[0], -SIGINT);
}
END_TEST

/* The ranks hold the pipe open: its end shows that they are gone. */
START_TEST(ranks_die_with_their_parent) {
    Scene scene = {.ranks = 4, .at = -1, .run_s = 15};
    all.n = 0;
    process_start(&all, local_body, 0, &scene);
    sleep_s(0.3);
    kill(all.process[0].pid, SIGKILL);
    processes_collect(&all, 20);
    ck_assert_msg(all.process[0].ended_s < 1.5, "%.2f s", all.process[0].ended_s);
}
END_TEST

static int uneven_finish_body(int index, void *context) {
    (void)index;
    (void)context;
    LaunchOptions options = {.world_size = 4, .timeout_s = 10};
    Launch *launch = launch_start(&options);
    launch_watch_start(launch);
    sleep_s(0.15 * launch_rank(launch));
    launch_finish(launch);
    return 0;
}

START_TEST(goodbye_at_different_times) {
    all.n = 0;
    process_start(&all, uneven_finish_body, 0, NULL);
    processes_collect(&all, 20);
    CHECK_STATUS(&all.process[0], 0);
    ck_assert_str_eq(all.process[0].text, "");
}
END_TEST

/* ---- launchers that cannot be talked to ---- */

static int refuse_body(int index, void *context) {
    static const char *const environments[][2] = {
        {"SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=2", "0"},
        {"SLURM_NTASKS=4 SLURM_PROCID=0", "0"},
        {"SLURM_NTASKS=4 SLURM_PROCID=1", "4"},
        {"OMPI_COMM_WORLD_SIZE=4", "0"},
        {"RANK=1", "0"},
        {"WORLD_SIZE=2", "0"},
        {"SLURM_NTASKS=4 SLURM_PROCID=0", "2"}}; /* the batch script's own process: the local launcher is right */
    (void)context;
    char text[256];
    snprintf(text, sizeof text, "%s", environments[index][0]);
    for (char *part = strtok(text, " "); part; part = strtok(NULL, " ")) putenv(part);
    LaunchOptions options = {.world_size = atoi(environments[index][1]), .timeout_s = 5};
    launch_finish(launch_start(&options));
    return 0;
}

START_TEST(foreign_launchers_are_refused) {
    static const char *const says[] = {"task 2 of a Slurm step of 4 tasks",
                                       "SLURM_NTASKS=4",
                                       "SLURM_NTASKS=4",
                                       "mpirun with 4 processes",
                                       "RANK is set, but WORLD_SIZE is not",
                                       "WORLD_SIZE is set, but RANK is not"};
    all.n = 0;
    for (int i = 0; i < 7; i++) process_start(&all, refuse_body, i, NULL);
    processes_collect(&all, 20);
    for (int i = 0; i < 6; i++) {
        CHECK_STATUS(&all.process[i], EXIT_LAUNCH);
        CHECK_SAYS(&all.process[i], says[i]);
    }
    for (int i = 0; i < 2; i++) CHECK_SAYS(&all.process[i], "srun --mpi=pmi2");
    CHECK_STATUS(&all.process[6], 0);
}
END_TEST

static void add_cases(TCase *cases) {
    tcase_add_test(cases, store_of_local_ranks);
    tcase_add_test(cases, cores_of_a_host_and_who_shares_them);
    tcase_add_test(cases, single_process);
    tcase_add_loop_test(cases, death_of_one_rank, 0, 18);
    tcase_add_loop_test(cases, death_during_start, 0, 18);
    tcase_add_test(cases, many_die_at_once);
    tcase_add_test(cases, consequence_without_cause);
    tcase_add_loop_test(cases, stopped_rank_is_named, 0, 2);
    tcase_add_loop_test(cases, late_rank_is_named, 0, 2);
    tcase_add_test(cases, deadline_of_a_single_process);
    tcase_add_test(cases, stop_and_go_is_no_hang);
    tcase_add_loop_test(cases, signals_are_passed_on, 0, 2);
    tcase_add_test(cases, interrupted_run_dies_of_the_signal);
    tcase_add_test(cases, ranks_die_with_their_parent);
    tcase_add_test(cases, goodbye_at_different_times);
    tcase_add_test(cases, foreign_launchers_are_refused);
}

int main(void) { return run_suite("launch_local", add_cases); }
