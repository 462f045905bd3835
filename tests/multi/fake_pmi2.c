/* fake_pmi2.c - see fake_pmi2.h. Test programs include this file. */
#include "tests/multi/fake_pmi2.h"

#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PMI_RANKS_MAX = 64, PMI_MESSAGE_MAX = 65536, PMI_VALUES_MAX = 4096 };

typedef struct {
    char *key, *value;
    bool visible; /* put before the last fence */
} PmiValue;

typedef struct {
    const FakePmi2 *options;
    int fds[PMI_RANKS_MAX];
    bool greeted[PMI_RANKS_MAX], fencing[PMI_RANKS_MAX];
    PmiValue values[PMI_VALUES_MAX];
    int n_values, n_fencing, n_errors_seen;
    bool mute;
} PmiServer;

static bool pmi_read(int fd, char *to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = recv(fd, to + done, bytes - done, 0);
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

static void pmi_answer(const PmiServer *server, int rank, const char *body) {
    char message[PMI_MESSAGE_MAX];
    if (server->mute) return;
    int n = snprintf(message, sizeof message, "%6zu%s", strlen(body), body);
    if (send(server->fds[rank], message, (size_t)n, MSG_NOSIGNAL) != n) perror("fake_pmi2: send");
}

/* The value of "name=" in a message, in a static buffer; "" where it is not there. */
static const char *pmi_field(const char *message, const char *name, char field[PMI_MESSAGE_MAX]) {
    char pattern[64];
    snprintf(pattern, sizeof pattern, "%s=", name);
    const char *at = message;
    while (at && strncmp(at, pattern, strlen(pattern)) != 0) {
        at = strchr(at, ';');
        if (at) at++;
    }
    field[0] = 0;
    if (at) snprintf(field, PMI_MESSAGE_MAX, "%.*s", (int)strcspn(at + strlen(pattern), ";"), at + strlen(pattern));
    return field;
}

static void pmi_put(PmiServer *server, int rank, const char *message) {
    static char key[PMI_MESSAGE_MAX], value[PMI_MESSAGE_MAX];
    pmi_field(message, "key", key);
    pmi_field(message, "value", value);
    int value_max = server->options->value_max, cut = server->options->truncate_to;
    if ((value_max && (int)strlen(value) > value_max) || strlen(key) > 63 || server->n_values == PMI_VALUES_MAX) {
        pmi_answer(server, rank, "cmd=kvs-put-response;rc=14;errmsg=too long;");
        return;
    }
    if (cut && (int)strlen(value) > cut) value[cut] = 0;
    server->values[server->n_values++] = (PmiValue){strdup(key), strdup(value), false};
    pmi_answer(server, rank, "cmd=kvs-put-response;rc=0;");
}

static void pmi_get(const PmiServer *server, int rank, const char *message) {
    static char key[PMI_MESSAGE_MAX], answer[PMI_MESSAGE_MAX];
    pmi_field(message, "key", key);
    const char *value = NULL;
    for (int i = 0; i < server->n_values; i++) {
        if (server->values[i].visible && strcmp(server->values[i].key, key) == 0) value = server->values[i].value;
    }
    if (value && server->options->swapped_for) value = server->values[server->n_values - 1].value;
    if (value) {
        snprintf(answer, sizeof answer, "cmd=kvs-get-response;found=TRUE;value=%.60000s;rc=0;", value);
    } else {
        snprintf(answer, sizeof answer, "cmd=kvs-get-response;found=FALSE;rc=0;");
    }
    pmi_answer(server, rank, answer);
}

static void pmi_fence(PmiServer *server, int rank) {
    server->n_fencing += !server->fencing[rank];
    server->fencing[rank] = true;
    if (server->n_fencing < server->options->ranks) return;
    double delay_s = server->options->fence_delay_s;
    struct timespec pause = {(time_t)delay_s, (long)((delay_s - (double)(time_t)delay_s) * 1e9)};
    nanosleep(&pause, NULL);
    for (int i = 0; i < server->n_values; i++) server->values[i].visible = true;
    for (int r = 0; r < server->options->ranks; r++) {
        pmi_answer(server, r, "cmd=kvs-fence-response;rc=0;");
        server->fencing[r] = false;
    }
    server->n_fencing = 0;
}

static void pmi_init(const PmiServer *server, int rank) {
    char answer[256];
    int size = server->options->told_size ? server->options->told_size : server->options->ranks;
    snprintf(answer, sizeof answer,
             "cmd=fullinit-response;pmi-version=2;pmi-subversion=0;rank=%d;size=%d;appnum=0;"
             "debugged=FALSE;pmiverbose=FALSE;rc=0;",
             rank, size);
    pmi_answer(server, rank, answer);
}

/* false: the server vanishes. */
static bool pmi_handle(PmiServer *server, int rank, const char *message) {
    static char command[PMI_MESSAGE_MAX];
    char answer[256];
    const FakePmi2 *options = server->options;
    pmi_field(message, "cmd", command);
    if (options->vanish_at && strcmp(command, options->vanish_at) == 0) return false;
    if (options->mute_at && strcmp(command, options->mute_at) == 0) server->mute = true;
    bool wrong = options->error_command && strcmp(command, options->error_command) == 0;
    if (wrong && server->n_errors_seen++ >= options->error_after) {
        snprintf(answer, sizeof answer, "cmd=%.40s-response;rc=1;errmsg=ordered by the test;", command);
        pmi_answer(server, rank, answer);
    } else if (strcmp(command, "fullinit") == 0) {
        pmi_init(server, rank);
    } else if (strcmp(command, "kvs-put") == 0) {
        pmi_put(server, rank, message);
    } else if (strcmp(command, "kvs-get") == 0) {
        pmi_get(server, rank, message);
    } else if (strcmp(command, "kvs-fence") == 0) {
        pmi_fence(server, rank);
    } else {
        snprintf(answer, sizeof answer, "cmd=%.40s-response;rc=0;", command);
        pmi_answer(server, rank, answer);
    }
    return true;
}

/* One message, or the greeting. false: the rank has closed. */
static bool pmi_take(PmiServer *server, int rank, char message[PMI_MESSAGE_MAX]) {
    static const char welcome[] = "cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=0\n";
    int fd = server->fds[rank], n = 0;
    message[0] = 0;
    if (!server->greeted[rank]) {
        do {
            if (n + 1 >= PMI_MESSAGE_MAX || !pmi_read(fd, message + n, 1)) return false;
        } while (message[n++] != '\n');
        server->greeted[rank] = true;
        message[0] = 0;
        return send(fd, welcome, sizeof welcome - 1, MSG_NOSIGNAL) > 0;
    }
    char length[7] = "";
    if (!pmi_read(fd, length, 6)) return false;
    long bytes = atol(length);
    if (bytes <= 0 || bytes >= PMI_MESSAGE_MAX || !pmi_read(fd, message, (size_t)bytes)) return false;
    message[bytes] = 0;
    return true;
}

void fake_pmi2_serve(const FakePmi2 *options, const int *fds) {
    static PmiServer server;
    static char message[PMI_MESSAGE_MAX];
    server.options = options;
    memcpy(server.fds, fds, (size_t)options->ranks * sizeof *fds);
    for (int open = options->ranks; open > 0;) {
        struct pollfd ready[PMI_RANKS_MAX];
        for (int r = 0; r < options->ranks; r++) ready[r] = (struct pollfd){.fd = server.fds[r], .events = POLLIN};
        poll(ready, (nfds_t)options->ranks, -1);
        for (int r = 0; r < options->ranks; r++) {
            if (!ready[r].revents) continue;
            if (!pmi_take(&server, r, message)) {
                close(server.fds[r]);
                server.fds[r] = -1;
                open--;
            } else if (message[0] && !pmi_handle(&server, r, message)) {
                return;
            }
        }
    }
}
