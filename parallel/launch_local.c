/* launch_local.c - the built-in launcher: forks the ranks on this machine and looks after them.
 *
 * The parent serves the store over socket pairs, passes signals on, reaps the ranks and ends with the
 * run's status: that of the first rank that failed (killed by a signal: EXIT_PEER_LOST). The ranks
 * form a process group of their own, so that a Ctrl-C reaches them once, through the parent.
 * When one fails, the others have a short grace (their watchdogs end them), then TERM, then KILL.
 * Invariants: no rank outlives the parent; buffered output is flushed before the fork, so that none
 * of it appears twice. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "parallel/launch_internal.h"

static const double grace_s = 3.0;      /* for the ranks' own watchdogs */
static const double term_grace_s = 3.0; /* from TERM to KILL */
static const int passed_on[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};
enum { PASSED_ON = sizeof passed_on / sizeof passed_on[0] };

typedef struct {
    int ranks, alive, signals;
    pid_t *pids; /* 0: reaped */
    StoreServer *server;
    int status;         /* of the run; 0 so far */
    bool failed;        /* a rank failed: the others are to end */
    bool killed;        /* the first failure was a death by signal: its status stays */
    int end_signal;     /* INT, TERM, HUP or QUIT that the parent was given */
    int dead_by_signal; /* the signal that the first rank died of, 0: none */
    int stage;          /* 0: grace, 1: TERM was sent, 2: KILL was sent */
    double next_stage_s;
    bool said_why; /* the store's reason was printed */
} LocalRun;

static void local_signal_all(const LocalRun *run, int number) {
    for (int r = 0; r < run->ranks; r++) {
        if (run->pids[r] > 0) kill(run->pids[r], number);
    }
}

/* In the child: never outlives its parent, and has the signal state that the program had. */
static void local_become_rank(Launch *launch, const LocalRun *run, int rank, int fd, pid_t parent,
                              const sigset_t *mask) {
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) die(EXIT_LAUNCH, "prctl(PR_SET_PDEATHSIG): %s", strerror(errno));
    if (getppid() != parent) _exit(EXIT_PEER_LOST); /* it died before the line above */
    setpgid(0, rank == 0 ? 0 : run->pids[0]);
    close(run->signals);
    sigprocmask(SIG_SETMASK, mask, NULL);
    launch_set_rank(launch, rank, run->ranks);
    launch->local_rank = rank;
    launch->store_state = store_client_create(fd);
}

static void local_fork_all(Launch *launch, LocalRun *run, const sigset_t *mask, bool *in_rank) {
    pid_t parent = getpid();
    int *ends = xcalloc((uint64_t)run->ranks, sizeof *ends);
    *in_rank = false;
    fflush(NULL);
    for (int r = 0; r < run->ranks && !*in_rank; r++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
            local_signal_all(run, SIGKILL);
            die(EXIT_LAUNCH, "cannot start rank %d of %d: socketpair: %s", r, run->ranks, strerror(errno));
        }
        pid_t pid = fork();
        if (pid < 0) {
            local_signal_all(run, SIGKILL);
            die(EXIT_LAUNCH, "cannot start rank %d of %d: fork: %s", r, run->ranks, strerror(errno));
        }
        if (pid == 0) {
            for (int i = 0; i < r; i++) close(ends[i]);
            close(pair[0]);
            local_become_rank(launch, run, r, pair[1], parent, mask);
            *in_rank = true;
        } else {
            close(pair[1]);
            ends[r] = pair[0];
            run->pids[r] = pid;
            run->alive++;
            setpgid(pid, run->pids[0]); /* both sides do it: whoever comes first */
        }
    }
    for (int r = 0; r < run->ranks && !*in_rank; r++) {
        StoreCard card = {.world_size = run->ranks, .pid = (int32_t)run->pids[r]};
        launch_host_name(r, card.host);
        store_server_add(run->server, ends[r], r, &card);
    }
    free(ends);
}

static void local_next_stage(LocalRun *run) {
    if (!run->failed || run->stage == 2 || clock_s() < run->next_stage_s) return;
    run->stage++;
    run->next_stage_s = clock_s() + term_grace_s;
    local_signal_all(run, run->stage == 1 ? SIGTERM : SIGKILL);
    if (run->stage == 1) local_signal_all(run, SIGCONT); /* a stopped process takes TERM only when it goes on */
}

static void local_rank_failed(LocalRun *run, int rank, pid_t pid, int how) {
    int status = EXIT_PEER_LOST;
    bool by_signal = WIFSIGNALED(how);
    if (by_signal && (!run->failed || run->stage == 0)) {
        log_error(LOG_LAUNCH, "rank %d (pid %d) was killed by signal %d (%s)", rank, (int)pid, WTERMSIG(how),
                  strsignal(WTERMSIG(how)));
    } else if (!by_signal && WEXITSTATUS(how) == 0) {
        log_error(LOG_LAUNCH, "rank %d (pid %d) ended before the run was over", rank, (int)pid);
    } else if (!by_signal) {
        status = WEXITSTATUS(how);
    }
    if (!run->failed) {
        run->failed = true;
        run->killed = by_signal;
        run->dead_by_signal = by_signal ? WTERMSIG(how) : 0;
        run->status = status;
        run->next_stage_s = clock_s() + grace_s;
    } else if (run->status == EXIT_PEER_LOST && !run->killed && run->stage == 0) {
        /* The first one reaped had only noticed the loss; this one is the cause. */
        run->status = status;
        run->killed = by_signal;
    }
}

static void local_reap(LocalRun *run) {
    for (;;) {
        int how = 0;
        pid_t pid = waitpid(-1, &how, WNOHANG);
        if (pid <= 0) return;
        int rank = 0;
        while (rank < run->ranks && run->pids[rank] != pid) rank++;
        if (rank == run->ranks) continue; /* a child that the program had before */
        run->pids[rank] = 0;
        run->alive--;
        store_server_step(run->server); /* its goodbye may not have been read yet */
        if (WIFSIGNALED(how) || !store_server_said_bye(run->server, rank)) {
            local_rank_failed(run, rank, pid, how);
        } else if (WEXITSTATUS(how) != 0 && run->status == 0) {
            run->status = WEXITSTATUS(how); /* an orderly end with a status, such as EXIT_STOPPED */
        }
    }
}

static void local_take_signal(LocalRun *run) {
    struct signalfd_siginfo info;
    if (read(run->signals, &info, sizeof info) != (ssize_t)sizeof info) return;
    int number = (int)info.ssi_signo;
    if (number == SIGCHLD) return;
    if (number == SIGINT || number == SIGTERM || number == SIGHUP || number == SIGQUIT) run->end_signal = number;
    local_signal_all(run, number);
    if (number == SIGTSTP) raise(SIGSTOP); /* SIGCONT comes through the same descriptor afterwards */
}

/* Ends the parent. A run that was told to stop by a signal and died of it dies the same way, so that
 * shells and batch systems see what happened. */
static void local_end(const LocalRun *run) __attribute__((noreturn));
static void local_end(const LocalRun *run) {
    if (run->end_signal && run->dead_by_signal == run->end_signal) {
        sigset_t only;
        sigemptyset(&only);
        sigaddset(&only, run->end_signal);
        signal(run->end_signal, SIG_DFL);
        fflush(NULL);
        raise(run->end_signal);
        sigprocmask(SIG_UNBLOCK, &only, NULL);
    }
    exit(run->status);
}

static void local_say_why(LocalRun *run) {
    int by_rank;
    const char *why = run->said_why ? NULL : store_server_stopped(run->server, &by_rank);
    if (!why) return;
    run->said_why = true;
    if (by_rank < 0) log_error(LOG_LAUNCH, "%s", why); /* else that rank says it, or the line about its death */
}

static void local_parent(LocalRun *run) __attribute__((noreturn));
static void local_parent(LocalRun *run) {
    while (run->alive > 0) {
        struct pollfd ready[2] = {{.fd = run->signals, .events = POLLIN},
                                  {.fd = store_server_fd(run->server), .events = POLLIN}};
        poll(ready, 2, run->failed ? 50 : -1);
        store_server_step(run->server);
        if (ready[0].revents) local_take_signal(run);
        local_reap(run);
        local_say_why(run);
        local_next_stage(run);
    }
    local_end(run);
}

void launch_local_start(Launch *launch, int ranks) {
    sigset_t watched, mask;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    for (int i = 0; i < PASSED_ON; i++) sigaddset(&watched, passed_on[i]);
    sigprocmask(SIG_BLOCK, &watched, &mask);

    launch->kind = "local";
    launch->loopback_only = true;
    launch->prints_for_all = true;
    launch->store = &store_client;
    net_random(launch->secret, sizeof launch->secret);

    LocalRun run = {.ranks = ranks};
    run.signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
    if (run.signals < 0) die(EXIT_LAUNCH, "signalfd: %s", strerror(errno));
    run.pids = xcalloc((uint64_t)ranks, sizeof *run.pids);
    run.server = store_server_create(ranks);
    bool in_rank;
    local_fork_all(launch, &run, &mask, &in_rank);
    if (!in_rank) local_parent(&run);
    free(run.pids);
    store_server_free(run.server); /* the child's copy; nothing was added to it */
}
