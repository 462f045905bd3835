/* launch_watch.c - the watchdog: notices lost, dying and stuck ranks, names them, and ends the run.
 *
 * A star of TCP connections, all ranks to rank 0, and one thread a process. Every second each rank
 * tells rank 0 its phase and step, and rank 0 shows the others that it lives. Rank 0 judges:
 *     a connection ends without goodbye        that rank is lost            EXIT_PEER_LOST
 *     a rank's last words (die)                its status and message       its status
 *     last words of status EXIT_PEER_LOST      only a consequence: wait a moment for the cause
 *     a rank's deadline passes                 ask all; who is silent, or furthest behind, is late   EXIT_HANG
 * and sends everyone the verdict. When rank 0 itself goes, all see its connection end.
 * Invariants: only the thread uses the sockets after watch_start; the thread never waits for the main
 * thread; after a verdict the process ends within a second whatever its main thread does. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"
#include "parallel/launch_internal.h"

static const double beat_s = 1.0;
static const double gather_s = 0.1;   /* after the first loss: the others of the same event */
static const double cause_s = 0.5;    /* after a consequence: its cause */
static const double answer_s = 0.7;   /* to a question for the phase */
static const double silence_s = 10.0; /* until a silent rank is worth a warning */
static const double stopped_s = 2.0;  /* this process was stopped, not busy, when a tick is so late */

/* ---- what the main thread is doing: stored at every phase, read by the thread ---- */

static _Atomic(const char *) own_phase;
static _Atomic int64_t own_step, own_phase_since_us, own_deadline_us; /* deadline 0: none */
static _Atomic int64_t own_limit_us;

static int64_t now_us(void) { return (int64_t)(clock_s() * 1e6); }

void launch_watch_phase(const char *phase, int64_t step) {
    atomic_store_explicit(&own_phase, phase, memory_order_relaxed);
    atomic_store_explicit(&own_step, step, memory_order_relaxed);
    atomic_store_explicit(&own_phase_since_us, now_us(), memory_order_relaxed);
}

void launch_watch_deadline(double limit_s) {
    atomic_store(&own_limit_us, (int64_t)(limit_s * 1e6));
    atomic_store(&own_deadline_us, limit_s > 0 ? now_us() + (int64_t)(limit_s * 1e6) : 0);
}

/* ---- messages ---- */

typedef enum {
    WATCH_BEAT = 0x57000001,
    WATCH_ASK,
    WATCH_ANSWER,
    WATCH_LATE,
    WATCH_WORDS,
    WATCH_BYE,
    WATCH_END,
    WATCH_ALL_BYE
} WatchKind;

typedef struct {          // offset  bytes
    uint32_t kind;        //   0     4
    int32_t status;       //   4     4   WORDS, END
    int64_t step;         //   8     8
    int64_t phase_age_us; //  16     8
    int64_t sent_us;      //  24     8   by the sender's clock
    uint32_t text_bytes;  //  32     4   phase, or the message
    uint32_t zero;        //  36     4
} WatchHeader;
_Static_assert(sizeof(WatchHeader) == 40, "size on the wire");

typedef struct {
    int fd; /* -1: gone */
    int rank;
    bool said_bye, said_words, lost, answered, warned;
    double heard_s;
    char phase[64];
    int64_t step;
    double phase_since_s; /* on this host's clock */
    size_t got;
    uint8_t in[sizeof(WatchHeader) + LAUNCH_TEXT_MAX];
} Peer;

/* Why the run ends, as far as rank 0 knows. */
typedef struct {
    enum { CAUSE_NONE, CAUSE_CONSEQUENCE, CAUSE_LATE, CAUSE_FIRST } kind;
    int status, rank;
    double decide_s;
    char text[LAUNCH_TEXT_MAX];
} Cause;

struct Watch {
    Launch *launch;
    pthread_t thread;
    int wake;
    Peer *peers; /* rank 0: one for each other rank; else rank 0 */
    int n_peers, n_bye;
    struct pollfd *ready; /* (1 + n_peers) */
    Cause cause;
    double tick_s, next_beat_s;
    bool sent_bye, asked_verdict;
    double verdict_by_s;  /* after LATE was sent to rank 0 */
    pthread_mutex_t lock; /* the fields below */
    pthread_cond_t changed;
    bool wants_finish, finished, has_words, words_sent;
    int words_status;
    char words[LAUNCH_TEXT_MAX];
};

static void copy_text(char *to, size_t capacity, const char *from, size_t bytes) {
    size_t n = bytes < capacity ? bytes : capacity - 1;
    memcpy(to, from, n);
    to[n] = 0;
}

static void peer_send(Peer *peer, WatchKind kind, int status, const char *text) {
    if (peer->fd < 0) return;
    const char *phase = atomic_load_explicit(&own_phase, memory_order_relaxed);
    bool with_phase = kind == WATCH_BEAT || kind == WATCH_ANSWER;
    if (with_phase) text = phase ? phase : "start";
    size_t bytes = text ? strnlen(text, LAUNCH_TEXT_MAX) : 0;
    if (with_phase && bytes >= sizeof peer->phase) bytes = sizeof peer->phase - 1;
    uint8_t whole[sizeof(WatchHeader) + LAUNCH_TEXT_MAX];
    WatchHeader header = {.kind = kind, .status = status, .text_bytes = (uint32_t)bytes};
    header.step = atomic_load_explicit(&own_step, memory_order_relaxed);
    header.sent_us = now_us();
    header.phase_age_us = header.sent_us - atomic_load_explicit(&own_phase_since_us, memory_order_relaxed);
    memcpy(whole, &header, sizeof header);
    if (bytes) memcpy(whole + sizeof header, text, bytes);
    /* A peer that takes nothing for so long is stuck or gone; its silence or its end will show. */
    net_write(peer->fd, whole, sizeof header + bytes, clock_s() + (kind == WATCH_BEAT ? 0.0 : 0.2));
}

static const char *host_of(const Watch *watch, int rank) {
    return watch->launch->rank == 0 ? watch->launch->hosts[rank] : watch->launch->host_of_rank0;
}

static void send_all(Watch *watch, WatchKind kind, int status, const char *text) {
    for (int i = 0; i < watch->n_peers; i++) peer_send(&watch->peers[i], kind, status, text);
}

/* This process, as one of the ranks to compare. */
static Peer own_state(const Watch *watch) {
    Peer own = {.rank = watch->launch->rank, .answered = true};
    const char *phase = atomic_load(&own_phase);
    snprintf(own.phase, sizeof own.phase, "%s", phase ? phase : "start");
    own.step = atomic_load(&own_step);
    own.phase_since_s = 1e-6 * (double)atomic_load(&own_phase_since_us);
    return own;
}

/* The lost rank's last beat may be a second old. Ranks go through the steps together, so where this rank
 * is further it knows better in which step the loss came, and says both. */
static void describe_loss(const Watch *watch, const Peer *peer, char *text, size_t capacity) {
    Peer own = own_state(watch);
    bool older = peer->step < own.step;
    const Peer *known = older ? &own : peer;
    int used = snprintf(text, capacity, "rank %d on host %s was lost during %s (step %lld)", peer->rank,
                        host_of(watch, peer->rank), known->phase, (long long)known->step);
    if (older) {
        snprintf(text + used, capacity - (size_t)used, "; last heard of in %s (step %lld), %.1f s before", peer->phase,
                 (long long)peer->step, clock_s() - peer->heard_s);
    }
}

/* ---- the end of this process ---- */

/* The peers read what is on its way to them before the connections break. */
static void linger(Watch *watch, double limit_s) {
    double until = clock_s() + limit_s;
    int open = 0;
    for (int i = 0; i < watch->n_peers; i++) {
        if (watch->peers[i].fd >= 0) shutdown(watch->peers[i].fd, SHUT_WR);
    }
    do {
        open = 0;
        for (int i = 0; i < watch->n_peers; i++) {
            uint8_t nothing[512];
            Peer *peer = &watch->peers[i];
            ssize_t n = 1;
            while (peer->fd >= 0 && n > 0) n = recv(peer->fd, nothing, sizeof nothing, MSG_DONTWAIT);
            bool closed = peer->fd >= 0 && (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR));
            if (closed) {
                close(peer->fd);
                peer->fd = -1;
            }
            open += peer->fd >= 0;
        }
        if (open) sleep_s(0.005);
    } while (open && clock_s() < until);
}

/* The main thread may hold any lock: only what cannot block is flushed. Where it is dying by itself,
 * it has printed its own words and ends the process. */
static void watch_exit(Watch *watch, int status) {
    pthread_mutex_lock(&watch->lock);
    bool main_dies = watch->has_words;
    watch->words_sent = true;
    pthread_cond_broadcast(&watch->changed);
    pthread_mutex_unlock(&watch->lock);
    if (main_dies) {
        sleep_s(0.5);
    } else if (ftrylockfile(stdout) == 0) {
        fflush_unlocked(stdout);
        funlockfile(stdout);
    }
    _exit(status);
}

/* ---- rank 0 judges ---- */

static void cause_set(Watch *watch, int kind, int status, int rank, double wait_s, const char *text) {
    Cause *cause = &watch->cause;
    if ((int)cause->kind >= kind) return;
    cause->kind = kind;
    cause->status = status;
    cause->rank = rank;
    cause->decide_s = clock_s() + wait_s;
    copy_text(cause->text, sizeof cause->text, text, strlen(text));
}

static void judge_lost(Watch *watch, Peer *peer) {
    char text[LAUNCH_TEXT_MAX];
    peer->lost = true;
    describe_loss(watch, peer, text, sizeof text);
    cause_set(watch, CAUSE_FIRST, EXIT_PEER_LOST, peer->rank, gather_s, text);
}

static void judge_words(Watch *watch, int rank, int status, const char *words) {
    char text[LAUNCH_TEXT_MAX];
    snprintf(text, sizeof text, "rank %d on host %s ended with status %d (%s): %.700s", rank, host_of(watch, rank),
             status, launch_status_name(status), words);
    bool consequence = status == EXIT_PEER_LOST;
    cause_set(watch, consequence ? CAUSE_CONSEQUENCE : CAUSE_FIRST, status, rank, consequence ? cause_s : gather_s,
              text);
}

static void judge_late(Watch *watch, int rank, const char *words) {
    if (watch->cause.kind >= CAUSE_LATE) return;
    for (int i = 0; i < watch->n_peers; i++) watch->peers[i].answered = false;
    send_all(watch, WATCH_ASK, 0, NULL);
    cause_set(watch, CAUSE_LATE, EXIT_HANG, rank, answer_s, words);
}

/* The others that were lost with the first: " (also lost: ranks 5, 6)". */
static void add_also_lost(const Watch *watch, char *text, size_t capacity) {
    int n = 0;
    size_t used = strlen(text);
    for (int i = 0; i < watch->n_peers && used + 32 < capacity; i++) {
        if (!watch->peers[i].lost || watch->peers[i].rank == watch->cause.rank) continue;
        used += (size_t)snprintf(text + used, capacity - used, "%s%d", n++ ? ", " : " (also lost: rank ",
                                 watch->peers[i].rank);
    }
    if (n) snprintf(text + used, capacity - used, ")");
}

/* Furthest behind: the lowest step; there, the one that has been in its phase for longest. */
static bool is_behind(const Peer *a, const Peer *b) {
    if (a->step != b->step) return a->step < b->step;
    return a->phase_since_s < b->phase_since_s;
}

/* After the answers to the question: who is late? */
static void name_the_late(Watch *watch) {
    char text[LAUNCH_TEXT_MAX];
    int silent = 0;
    double now = clock_s();
    Peer own = own_state(watch), late = own;
    for (int i = 0; i < watch->n_peers; i++) {
        const Peer *peer = &watch->peers[i];
        if (peer->fd < 0) continue;
        if (!peer->answered && silent++ == 0) late = *peer;
        if (silent == 0 && is_behind(peer, &late)) late = *peer;
    }
    if (silent) {
        snprintf(text, sizeof text,
                 "rank %d on host %s does not answer (stopped?); it was in %s (step %lld), heard %.1f s ago", late.rank,
                 host_of(watch, late.rank), late.phase, (long long)late.step, now - late.heard_s);
    } else {
        const double age_s = now - late.phase_since_s, limit_s = 1e-6 * (double)atomic_load(&own_limit_us);
        const char *how = age_s < limit_s / 2 ? "furthest behind, though at work (is train.timeout too short?)"
                                              : "late";
        snprintf(text, sizeof text, "rank %d on host %s is %s: in %s (step %lld) for %.1f s", late.rank,
                 host_of(watch, late.rank), how, late.phase, (long long)late.step, age_s);
    }
    size_t used = strlen(text);
    if (silent > 1) used += (size_t)snprintf(text + used, sizeof text - used, "; %d more do not answer", silent - 1);
    snprintf(text + used, sizeof text - used, "; %.500s", watch->cause.text);
    copy_text(watch->cause.text, sizeof watch->cause.text, text, strlen(text));
}

static bool answers_complete(const Watch *watch) {
    for (int i = 0; i < watch->n_peers; i++) {
        if (watch->peers[i].fd >= 0 && !watch->peers[i].answered) return false;
    }
    return true;
}

static void carry_out_verdict(Watch *watch) {
    Cause *cause = &watch->cause;
    if (cause->kind == CAUSE_LATE && !answers_complete(watch) && clock_s() < cause->decide_s) return;
    if (cause->kind != CAUSE_LATE && clock_s() < cause->decide_s) return;
    if (cause->kind == CAUSE_LATE) name_the_late(watch);
    if (cause->kind == CAUSE_FIRST) add_also_lost(watch, cause->text, sizeof cause->text);
    send_all(watch, WATCH_END, cause->status, cause->text);
    /* This rank's own words are on the screen already. */
    if (cause->rank != 0 || cause->kind == CAUSE_LATE) log_error(LOG_LAUNCH, "%s", cause->text);
    linger(watch, 0.3);
    watch_exit(watch, cause->status);
}

/* ---- messages and ends ---- */

/* By this rank's clock. Ranks of one host share theirs; a message from another one is taken to have come at once. */
static double sent_s(const Watch *watch, int rank, const WatchHeader *header) {
    const bool one_clock = strcmp(host_of(watch, rank), launch_host(watch->launch)) == 0;
    return one_clock ? 1e-6 * (double)header->sent_us : clock_s();
}

static void take_message(Watch *watch, Peer *peer, const WatchHeader *header, const char *text) {
    char words[LAUNCH_TEXT_MAX];
    copy_text(words, sizeof words, text, header->text_bytes);
    switch (header->kind) {
    case WATCH_BEAT:
    case WATCH_ANSWER:
        copy_text(peer->phase, sizeof peer->phase, text, header->text_bytes);
        peer->step = header->step;
        peer->phase_since_s = sent_s(watch, peer->rank, header) - 1e-6 * (double)header->phase_age_us;
        if (header->kind == WATCH_ANSWER) peer->answered = true;
        break;
    case WATCH_ASK: peer_send(peer, WATCH_ANSWER, 0, NULL); break;
    case WATCH_LATE: judge_late(watch, peer->rank, words); break;
    case WATCH_WORDS:
        peer->said_words = true;
        judge_words(watch, peer->rank, header->status, words);
        break;
    case WATCH_BYE:
        watch->n_bye += !peer->said_bye;
        peer->said_bye = true;
        break;
    case WATCH_ALL_BYE: peer->said_bye = true; break;
    case WATCH_END:
        /* One line on the user's screen is enough: where output comes together, rank 0 printed it. */
        if (!watch->launch->prints_for_all) log_error(LOG_LAUNCH, "%s", words);
        watch_exit(watch, header->status);
        break;
    default: break;
    }
}

static void peer_gone(Watch *watch, Peer *peer) {
    close(peer->fd);
    peer->fd = -1;
    if (peer->said_bye || peer->said_words) return;
    if (watch->launch->rank == 0) {
        judge_lost(watch, peer);
        return;
    }
    if (!watch->launch->prints_for_all || watch->launch->rank == 1) {
        char text[LAUNCH_TEXT_MAX];
        describe_loss(watch, peer, text, sizeof text);
        log_error(LOG_LAUNCH, "%s", text);
    }
    watch_exit(watch, EXIT_PEER_LOST);
}

static void peer_read(Watch *watch, Peer *peer) {
    while (peer->fd >= 0) {
        ssize_t n = recv(peer->fd, peer->in + peer->got, sizeof peer->in - peer->got, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (n <= 0) {
            peer_gone(watch, peer);
            return;
        }
        peer->got += (size_t)n;
        peer->heard_s = clock_s();
        size_t done = 0;
        while (peer->got - done >= sizeof(WatchHeader)) {
            WatchHeader header;
            memcpy(&header, peer->in + done, sizeof header);
            REQUIRE(header.text_bytes <= LAUNCH_TEXT_MAX);
            if (peer->got - done < sizeof header + header.text_bytes) break;
            take_message(watch, peer, &header, (const char *)peer->in + done + sizeof header);
            done += sizeof header + header.text_bytes;
        }
        memmove(peer->in, peer->in + done, peer->got - done);
        peer->got -= done;
    }
}

/* ---- the thread ---- */

/* A process that was stopped (Ctrl-Z, a suspended job) was not late: what it waits for begins anew. */
static void forgive_stop(Watch *watch, double now, double expected_s) {
    double gap = now - watch->tick_s - expected_s;
    watch->tick_s = now;
    if (gap < stopped_s) return;
    int64_t deadline = atomic_load(&own_deadline_us);
    if (deadline) atomic_compare_exchange_strong(&own_deadline_us, &deadline, deadline + (int64_t)(gap * 1e6));
    for (int i = 0; i < watch->n_peers; i++) watch->peers[i].heard_s += gap;
}

static void check_own_deadline(Watch *watch) {
    int64_t deadline = atomic_load(&own_deadline_us);
    double now = clock_s();
    if (watch->asked_verdict) {
        if (now < watch->verdict_by_s) return;
        Peer own = own_state(watch);
        log_error(LOG_LAUNCH,
                  "rank 0 on host %s does not answer (stopped?); it was in %s (step %lld); this rank is in %s "
                  "(step %lld), past its limit of %.1f s",
                  host_of(watch, 0), watch->peers[0].phase, (long long)watch->peers[0].step, own.phase,
                  (long long)own.step, 1e-6 * (double)atomic_load(&own_limit_us));
        watch_exit(watch, EXIT_HANG);
    }
    if (!deadline || now_us() < deadline) return;
    Peer own = own_state(watch);
    char text[LAUNCH_TEXT_MAX];
    snprintf(text, sizeof text, "rank %d was in %s (step %lld) when its limit of %.1f s had passed", own.rank,
             own.phase, (long long)own.step, 1e-6 * (double)atomic_load(&own_limit_us));
    if (own.rank == 0) {
        judge_late(watch, 0, text);
        return;
    }
    peer_send(&watch->peers[0], WATCH_LATE, EXIT_HANG, text);
    watch->asked_verdict = true;
    watch->verdict_by_s = now + answer_s + 0.3;
}

static void warn_silent(Watch *watch, double now) {
    for (int i = 0; i < watch->n_peers; i++) {
        Peer *peer = &watch->peers[i];
        bool silent = peer->fd >= 0 && now - peer->heard_s > silence_s;
        if (silent && !peer->warned) {
            log_warn(LOG_LAUNCH, "rank %d on host %s has not answered for %.0f s; it was in %s (step %lld)", peer->rank,
                     host_of(watch, peer->rank), now - peer->heard_s, peer->phase, (long long)peer->step);
        } else if (!silent && peer->warned) {
            log_warn(LOG_LAUNCH, "rank %d on host %s answers again", peer->rank, host_of(watch, peer->rank));
        }
        peer->warned = silent;
    }
}

/* What the main thread wants: last words, or the end. True when the thread is done. */
static bool serve_main(Watch *watch) {
    pthread_mutex_lock(&watch->lock);
    bool words = watch->has_words && !watch->words_sent, finish = watch->wants_finish;
    pthread_mutex_unlock(&watch->lock);
    if (words && watch->launch->rank == 0) {
        judge_words(watch, 0, watch->words_status, watch->words);
    } else if (words) {
        peer_send(&watch->peers[0], WATCH_WORDS, watch->words_status, watch->words);
        linger(watch, 0.0);
        watch_exit(watch, watch->words_status);
    }
    if (!finish) return false;
    if (watch->launch->rank != 0) {
        if (!watch->sent_bye) peer_send(&watch->peers[0], WATCH_BYE, 0, NULL);
        watch->sent_bye = true;
        return watch->peers[0].said_bye;
    }
    if (watch->n_bye < watch->n_peers) return false;
    send_all(watch, WATCH_ALL_BYE, 0, NULL);
    linger(watch, 1.0);
    return true;
}

static double next_tick_s(const Watch *watch, double now) {
    double wait_s = watch->next_beat_s - now;
    int64_t deadline = atomic_load(&own_deadline_us);
    /* A deadline set meanwhile is looked at a tick later: so ticks are short while deadlines are in use. */
    if (deadline && wait_s > 0.1) wait_s = 0.1;
    if (watch->asked_verdict && wait_s > 0.05) wait_s = 0.05;
    if (watch->cause.kind != CAUSE_NONE && wait_s > 0.01) wait_s = 0.01;
    return wait_s > 0 ? wait_s : 0;
}

static void *watch_run(void *argument) {
    Watch *watch = argument;
    for (;;) {
        double wait_s = next_tick_s(watch, clock_s());
        watch->ready[0] = (struct pollfd){.fd = watch->wake, .events = POLLIN};
        for (int i = 0; i < watch->n_peers; i++) {
            watch->ready[1 + i] = (struct pollfd){.fd = watch->peers[i].fd, .events = POLLIN};
        }
        poll(watch->ready, (nfds_t)(1 + watch->n_peers), (int)(wait_s * 1000) + 1);
        double now = clock_s();
        forgive_stop(watch, now, wait_s);
        uint64_t count;
        if (watch->ready[0].revents && read(watch->wake, &count, sizeof count) < 0) continue;
        for (int i = 0; i < watch->n_peers; i++) {
            if (watch->ready[1 + i].revents) peer_read(watch, &watch->peers[i]);
        }
        if (serve_main(watch)) break;
        check_own_deadline(watch);
        if (watch->cause.kind != CAUSE_NONE) carry_out_verdict(watch);
        if (now >= watch->next_beat_s) {
            send_all(watch, WATCH_BEAT, 0, NULL);
            warn_silent(watch, now);
            watch->next_beat_s = now + beat_s;
        }
    }
    pthread_mutex_lock(&watch->lock);
    watch->finished = true;
    pthread_cond_broadcast(&watch->changed);
    pthread_mutex_unlock(&watch->lock);
    return NULL;
}

/* ---- start and end ---- */

static void peer_init(Peer *peer, int fd, int rank) {
    *peer = (Peer){.fd = fd, .rank = rank, .heard_s = clock_s(), .phase_since_s = clock_s()};
    snprintf(peer->phase, sizeof peer->phase, "start");
}

static void check_store(Launch *launch) {
    if (launch->store->check) launch->store->check(launch);
}

/* Rank 0: takes in all others. */
static void accept_all(Launch *launch, Watch *watch, int listener) {
    double deadline = clock_s() + launch->timeout_s;
    int connected = 0;
    while (connected < watch->n_peers) {
        int rank = -1, fd = launch_accept(launch, listener, &rank, 0.5);
        if (fd >= 0 && rank > 0 && rank < launch->size && watch->peers[rank - 1].fd < 0) {
            peer_init(&watch->peers[rank - 1], fd, rank);
            connected++;
        } else if (fd >= 0) {
            close(fd);
        }
        check_store(launch);
        if (clock_s() < deadline) continue;
        int missing = 0;
        while (watch->peers[missing].fd >= 0) missing++;
        die(EXIT_LAUNCH, "waited %.0f s for control connections: %d of %d are there; missing: rank %d on host %s",
            launch->timeout_s, connected, watch->n_peers, missing + 1, launch->hosts[missing + 1]);
    }
    for (int i = 0; i < watch->n_peers; i++) watch->peers[i].heard_s = clock_s();
}

static void connect_to_rank0(Launch *launch, Watch *watch) {
    size_t bytes;
    char *address = launch_get(launch, 0, "watch.address", &bytes), reason[128] = "";
    double deadline = clock_s() + launch->timeout_s;
    int fd = -1;
    while (fd < 0) {
        double left_s = deadline - clock_s();
        if (left_s <= 0) {
            die(EXIT_LAUNCH, "no control connection to rank 0 (host %s) at %s within %.0f s: %s", launch->host_of_rank0,
                address, launch->timeout_s, reason);
        }
        fd = net_connect(launch, address, left_s < 1.0 ? left_s : 1.0, reason);
        check_store(launch);
    }
    free(address);
    peer_init(&watch->peers[0], fd, 0);
}

static void connect_star(Launch *launch, Watch *watch) {
    if (launch->size == 1) return;
    char address[LAUNCH_ADDRESS_MAX];
    int listener = -1;
    if (launch->rank == 0) {
        listener = launch_listen(launch, address);
        launch_put(launch, "watch.address", address, strlen(address) + 1);
    }
    launch_fence(launch, "control connections");
    if (launch->rank == 0) {
        accept_all(launch, watch, listener);
        launch_close_listener(launch, listener);
    } else {
        connect_to_rank0(launch, watch);
    }
}

void launch_watch_start(Launch *launch) {
    REQUIRE(!launch->watch);
    Watch *watch = xcalloc(1, sizeof *watch);
    watch->launch = launch;
    watch->n_peers = launch->rank == 0 ? launch->size - 1 : 1;
    watch->peers = xcalloc((uint64_t)watch->n_peers, sizeof *watch->peers);
    watch->ready = xcalloc((uint64_t)watch->n_peers + 1, sizeof *watch->ready);
    for (int i = 0; i < watch->n_peers; i++) watch->peers[i].fd = -1;
    connect_star(launch, watch);
    watch->wake = eventfd(0, EFD_CLOEXEC);
    if (watch->wake < 0) die(EXIT_LAUNCH, "eventfd: %s", strerror(errno));
    pthread_mutex_init(&watch->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&watch->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    watch->tick_s = watch->next_beat_s = clock_s();
    if (!atomic_load(&own_phase)) launch_watch_phase("start", 0);

    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 * 1024);
    sigset_t all, before; /* signals are the main thread's */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&watch->thread, &small, watch_run, watch);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&small);
    if (status != 0) die(EXIT_LAUNCH, "cannot start the watchdog thread: %s", strerror(status));
    launch->watch = watch;
}

static void wake_thread(Watch *watch) {
    uint64_t one = 1;
    ssize_t n = write(watch->wake, &one, sizeof one);
    (void)n; /* the counter cannot overflow */
}

/* Waits for a flag that the thread sets; false when the time is over. Holds the lock. */
static bool wait_flag(Watch *watch, const bool *flag, double limit_s) {
    double until = clock_s() + limit_s;
    struct timespec at = {(time_t)until, (long)((until - (double)(time_t)until) * 1e9)};
    while (!*flag) {
        if (pthread_cond_timedwait(&watch->changed, &watch->lock, &at) == ETIMEDOUT) return *flag;
    }
    return true;
}

void watch_last_words(Launch *launch, int status, const char *message) {
    Watch *watch = launch->watch;
    if (pthread_equal(pthread_self(), watch->thread)) return;
    pthread_mutex_lock(&watch->lock);
    watch->has_words = true;
    watch->words_status = status;
    copy_text(watch->words, sizeof watch->words, message, strlen(message));
    wake_thread(watch);
    wait_flag(watch, &watch->words_sent, 1.5);
    pthread_mutex_unlock(&watch->lock);
}

void watch_finish(Launch *launch) {
    Watch *watch = launch->watch;
    launch_watch_deadline(0);
    launch_watch_phase("finish", atomic_load(&own_step));
    pthread_mutex_lock(&watch->lock);
    watch->wants_finish = true;
    wake_thread(watch);
    bool finished = wait_flag(watch, &watch->finished, launch->timeout_s);
    pthread_mutex_unlock(&watch->lock);
    if (!finished) {
        die(EXIT_HANG, "this rank is done, but after %.0f s other ranks are still at work", launch->timeout_s);
    }
    pthread_join(watch->thread, NULL);
    for (int i = 0; i < watch->n_peers; i++) {
        if (watch->peers[i].fd >= 0) close(watch->peers[i].fd);
    }
    close(watch->wake);
    pthread_mutex_destroy(&watch->lock);
    pthread_cond_destroy(&watch->changed);
    free(watch->peers);
    free(watch->ready);
    free(watch);
    launch->watch = NULL;
}
