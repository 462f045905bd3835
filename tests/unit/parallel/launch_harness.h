/* launch_harness.h - starts processes as a launcher would, and collects how they end and what they say.
 *
 * Included by the test_launch*.c programs. A process runs `body` with its index; its standard error is
 * kept. Processes that are not done by the limit are killed, and count as a failure (status -9). */
#ifndef TRIDENT_TESTS_LAUNCH_HARNESS_H
#define TRIDENT_TESTS_LAUNCH_HARNESS_H

#include <check.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "parallel/launch.h"

enum { PROCESSES_MAX = 16 };

typedef struct {
    pid_t pid;
    int fd;
    int status;      /* exit status, or minus the signal; valid once ended */
    double ended_s;  /* after the start of the first process */
    char text[8192]; /* standard error */
    size_t bytes;
} Process;

typedef struct {
    int n;
    double start_s;
    Process process[PROCESSES_MAX];
} Processes;

static inline void process_start(Processes *all, int (*body)(int index, void *context), int index, void *context) {
    int ends[2];
    Process *process = &all->process[index];
    ck_assert_int_eq(pipe(ends), 0);
    if (all->n == 0) all->start_s = clock_s();
    fflush(NULL);
    memset(process, 0, sizeof *process);
    process->pid = fork();
    ck_assert_int_ge(process->pid, 0);
    if (process->pid == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        signal(SIGINT, SIG_DFL); /* libcheck's handlers would end the test instead */
        signal(SIGTERM, SIG_DFL);
        signal(SIGALRM, SIG_DFL);
        exit(body(index, context));
    }
    close(ends[1]);
    process->fd = ends[0];
    all->n = index + 1 > all->n ? index + 1 : all->n;
}

/* Reads what is there; false at the end of the stream. */
static inline bool process_read(Process *process) {
    size_t room = sizeof process->text - 1 - process->bytes;
    char rest[512];
    ssize_t n = room ? read(process->fd, process->text + process->bytes, room) : read(process->fd, rest, sizeof rest);
    if (n > 0 && room) process->bytes += (size_t)n;
    process->text[process->bytes] = 0;
    return n > 0;
}

/* Waits until all have closed their standard error and ended. */
static inline void processes_collect(Processes *all, double limit_s) {
    double until = clock_s() + limit_s;
    for (int open = all->n; open > 0;) {
        struct pollfd ready[PROCESSES_MAX];
        for (int i = 0; i < all->n; i++) ready[i] = (struct pollfd){.fd = all->process[i].fd, .events = POLLIN};
        poll(ready, (nfds_t)all->n, 50);
        bool late = clock_s() > until;
        for (int i = 0; i < all->n; i++) {
            Process *process = &all->process[i];
            if (process->fd >= 0 && late) kill(process->pid, SIGKILL);
            if (process->fd < 0 || !(ready[i].revents || late) || (process_read(process) && !late)) continue;
            int how = 0;
            close(process->fd);
            process->fd = -1;
            waitpid(process->pid, &how, 0);
            process->status = WIFEXITED(how) ? WEXITSTATUS(how) : -WTERMSIG(how);
            process->ended_s = clock_s() - all->start_s;
            open--;
        }
    }
    for (int i = 0; i < all->n && getenv("TEST_SHOW"); i++) {
        printf("process %d ended with %d after %.2f s: %s\n", i, all->process[i].status, all->process[i].ended_s,
               all->process[i].text);
    }
}

static inline int count_text(const char *text, const char *part) {
    int n = 0;
    for (const char *at = strstr(text, part); at; at = strstr(at + 1, part)) n++;
    return n;
}

#define CHECK_SAYS(process, part) \
    ck_assert_msg(strstr((process)->text, part) != NULL, "\"%s\" is not in: %.4000s", part, (process)->text)
#define CHECK_STATUS(process, wanted)                                                                           \
    ck_assert_msg((process)->status == (wanted), "status %d instead of %d: %.4000s", (process)->status, wanted, \
                  (process)->text)

/* Variables of other launchers must not leak in from where the tests are started. */
static inline void clear_launch_environment(void) {
    static const char *const names[] = {"RANK",
                                        "WORLD_SIZE",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "LOCAL_RANK",
                                        "PMI_FD",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "PMI_JOBID",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "SLURM_NTASKS",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_PROCID",
                                        "SLURM_LOCALID",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "TRIDENT_JOB_SECRET",
                                        "TRIDENT_TEST_HOSTNAME",
                                        "TRIDENT_INTERFACE"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) unsetenv(names[i]);
}

static inline int run_suite(const char *name, void (*add)(TCase *cases)) {
    clear_launch_environment();
    Suite *suite = suite_create(name);
    TCase *cases = tcase_create(name);
    tcase_set_timeout(cases, 60);
    add(cases);
    suite_add_tcase(suite, cases);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

#endif
