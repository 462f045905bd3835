/* launch_store.c - the key-value store: table, server and client.
 *
 * The server never blocks: it reads what has come, answers into a queue for each client, and is
 * driven by whoever owns it (the local launcher's parent, or a thread of rank 0). A fence ends when
 * every rank has reached it; ranks at fences of different names are told so. When a rank is lost,
 * or says its last words, every request from then on is answered by STOP with the reason.
 * Invariant: a value is complete in the table before any later message of its rank is looked at. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/log.h"
#include "parallel/launch_internal.h"

/* ---- table ---- */

typedef struct {
    int rank;
    char key[LAUNCH_KEY_MAX + 1];
    uint8_t *value; /* NULL: the place is free */
    size_t bytes;
} StoreEntry;

struct StoreTable {
    StoreEntry *entries; /* open addressing; at most half full */
    size_t capacity, used;
};

static StoreEntry *table_place(const StoreTable *table, int rank, const char *key) {
    size_t mask = table->capacity - 1;
    size_t at = (size_t)XXH3_64bits_withSeed(key, strlen(key), (uint64_t)(int64_t)rank) & mask;
    while (table->entries[at].value && (table->entries[at].rank != rank || strcmp(table->entries[at].key, key) != 0)) {
        at = (at + 1) & mask;
    }
    return &table->entries[at];
}

StoreTable *store_table_create(void) {
    StoreTable *table = xcalloc(1, sizeof *table);
    table->capacity = 64;
    table->entries = xcalloc(table->capacity, sizeof *table->entries);
    return table;
}

static void table_grow(StoreTable *table) {
    StoreTable bigger = {xcalloc(table->capacity * 2, sizeof *table->entries), table->capacity * 2, table->used};
    for (size_t i = 0; i < table->capacity; i++) {
        StoreEntry *old = &table->entries[i];
        if (old->value) *table_place(&bigger, old->rank, old->key) = *old;
    }
    free(table->entries);
    *table = bigger;
}

bool store_table_put(StoreTable *table, int rank, const char *key, const void *value, size_t bytes) {
    if (2 * (table->used + 1) > table->capacity) table_grow(table);
    StoreEntry *entry = table_place(table, rank, key);
    if (entry->value) return false;
    entry->rank = rank;
    snprintf(entry->key, sizeof entry->key, "%s", key);
    entry->value = xmalloc(bytes);
    entry->bytes = bytes;
    if (bytes) memcpy(entry->value, value, bytes);
    table->used++;
    return true;
}

const void *store_table_get(const StoreTable *table, int rank, const char *key, size_t *bytes) {
    const StoreEntry *entry = table_place(table, rank, key);
    if (entry->value) *bytes = entry->bytes;
    return entry->value;
}

void store_table_free(StoreTable *table) {
    if (!table) return;
    for (size_t i = 0; i < table->capacity; i++) free(table->entries[i].value);
    free(table->entries);
    free(table);
}

/* ---- messages: a header, the key, the value; all hosts of a job have the same byte order ---- */

typedef enum {
    STORE_JOIN = 0x54520001, /* a number of its own, so that a stray byte stream is noticed */
    STORE_PUT,
    STORE_GET,
    STORE_FENCE,
    STORE_WHO, /* who is missing at the fence? */
    STORE_BYE,
    STORE_LAST_WORDS,
    STORE_VALUE,
    STORE_MISSING,
    STORE_PASSED,
    STORE_WAITING,
    STORE_STOP,
} StoreKind;

typedef struct {        // offset  bytes
    uint32_t kind;      //   0     4
    int32_t rank;       //   4     4   GET: whose key
    int32_t status;     //   8     4   LAST_WORDS, STOP
    uint32_t key_bytes; //  12     4
    uint64_t bytes;     //  16     8
} StoreHeader;
_Static_assert(sizeof(StoreHeader) == 24, "size on the wire");

enum { STORE_VALUE_MAX = 1 << 30 };

/* ---- server ---- */

typedef struct {
    uint8_t *data;
    size_t bytes, done, capacity;
} Queue;

typedef struct {
    int fd, rank;     /* rank -1: has not sent its card yet; fd -1: gone */
    int claimed_rank; /* what the handshake said */
    bool fencing, told_stop, said_bye;
    char fence[LAUNCH_KEY_MAX + 1];
    Queue in, out;
    StoreCard card;
} StoreClient;

struct StoreServer {
    int size, epoll, n_clients, n_joined, n_gone, n_fencing;
    StoreClient **clients;
    StoreClient **by_rank; /* (size) */
    StoreTable *table;
    bool stopped;
    int stop_status, stop_rank;
    char stop_text[LAUNCH_TEXT_MAX];
};

static void queue_add(Queue *queue, const void *from, size_t bytes) {
    if (queue->bytes + bytes > queue->capacity) {
        queue->capacity = 2 * (queue->bytes + bytes);
        queue->data = xrealloc(queue->data, queue->capacity);
    }
    if (bytes) memcpy(queue->data + queue->bytes, from, bytes);
    queue->bytes += bytes;
}

StoreServer *store_server_create(int size) {
    StoreServer *server = xcalloc(1, sizeof *server);
    server->size = size;
    server->stop_rank = -1;
    server->by_rank = xcalloc((uint64_t)size, sizeof *server->by_rank);
    server->table = store_table_create();
    server->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (server->epoll < 0) die(EXIT_LAUNCH, "epoll_create: %s", strerror(errno));
    return server;
}

static void server_want(const StoreServer *server, StoreClient *client, int operation) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = client};
    if (client->out.done < client->out.bytes) event.events |= EPOLLOUT;
    if (epoll_ctl(server->epoll, operation, client->fd, &event) != 0) die(EXIT_LAUNCH, "epoll: %s", strerror(errno));
}

void store_server_add(StoreServer *server, int fd, int rank, const StoreCard *card) {
    StoreClient *client = xcalloc(1, sizeof *client);
    client->fd = fd;
    client->rank = card ? rank : -1;
    client->claimed_rank = rank;
    server->clients = xrealloc(server->clients, (uint64_t)(server->n_clients + 1) * sizeof *server->clients);
    server->clients[server->n_clients++] = client;
    if (card) {
        client->card = *card;
        REQUIRE(rank >= 0 && rank < server->size && !server->by_rank[rank]);
        server->by_rank[rank] = client;
        server->n_joined++;
    }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    server_want(server, client, EPOLL_CTL_ADD);
}

int store_server_fd(const StoreServer *server) { return server->epoll; }

/* Sends what the socket takes; the rest waits for EPOLLOUT. Errors show as end of file at the next read. */
static void client_flush(StoreServer *server, StoreClient *client) {
    Queue *out = &client->out;
    while (out->done < out->bytes) {
        ssize_t n = send(client->fd, out->data + out->done, out->bytes - out->done, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        out->done += (size_t)n;
    }
    if (out->done == out->bytes) out->done = out->bytes = 0;
    server_want(server, client, EPOLL_CTL_MOD);
}

static void client_send(StoreServer *server, StoreClient *client, StoreKind kind, int status, const void *value,
                        size_t bytes) {
    if (client->fd < 0) return;
    StoreHeader header = {.kind = kind, .rank = client->rank, .status = status, .bytes = bytes};
    queue_add(&client->out, &header, sizeof header);
    queue_add(&client->out, value, bytes);
    client_flush(server, client);
}

/* Unasked and once: a client finds it where it next looks for an answer. */
static void client_tell_stop(StoreServer *server, StoreClient *client) {
    if (client->told_stop) return;
    client->told_stop = true;
    client_send(server, client, STORE_STOP, server->stop_status, server->stop_text, strlen(server->stop_text));
}

void store_server_stop(StoreServer *server, int status, const char *format, ...) {
    if (server->stopped) return;
    server->stopped = true;
    server->stop_status = status;
    va_list args;
    va_start(args, format);
    vsnprintf(server->stop_text, sizeof server->stop_text, format, args);
    va_end(args);
    for (int i = 0; i < server->n_clients; i++) client_tell_stop(server, server->clients[i]);
}

const char *store_server_stopped(const StoreServer *server, int *by_rank) {
    *by_rank = server->stop_rank;
    return server->stopped ? server->stop_text : NULL;
}

bool store_server_said_bye(const StoreServer *server, int rank) {
    return server->by_rank[rank] && server->by_rank[rank]->said_bye;
}

bool store_server_done(const StoreServer *server) {
    return server->n_gone == server->n_clients && (server->stopped || server->n_joined == server->size);
}

static void server_pass_fence(StoreServer *server) {
    server->n_fencing = 0;
    for (int r = 0; r < server->size; r++) {
        server->by_rank[r]->fencing = false;
        client_send(server, server->by_rank[r], STORE_PASSED, 0, NULL, 0);
    }
}

static void server_fence(StoreServer *server, StoreClient *client, const char *what) {
    client->fencing = true;
    snprintf(client->fence, sizeof client->fence, "%s", what);
    server->n_fencing++;
    for (int r = 0; r < server->size; r++) {
        const StoreClient *other = server->by_rank[r];
        if (!other || other == client) continue;
        if (other->fencing && strcmp(other->fence, what) != 0) {
            store_server_stop(server, EXIT_INTERNAL, "rank %d waits at \"%s\" while rank %d waits at \"%s\"", r,
                              other->fence, client->rank, what);
            return;
        }
        if (other->said_bye || other->fd < 0) {
            store_server_stop(server, EXIT_PEER_LOST, "rank %d waits at \"%s\", but rank %d on host %s has left",
                              client->rank, what, r, other->card.host[0] ? other->card.host : "here");
            return;
        }
    }
    if (server->n_fencing == server->size) server_pass_fence(server);
}

/* "ranks 3, 5 and 2 more". */
static void server_list_missing(const StoreServer *server, char text[LAUNCH_TEXT_MAX]) {
    int missing = 0, used = 0;
    for (int r = 0; r < server->size; r++) {
        const StoreClient *client = server->by_rank[r];
        if (client && client->fencing) continue;
        missing++;
        if (missing > 16) continue;
        used += snprintf(text + used, (size_t)(LAUNCH_TEXT_MAX - used), "%s%d%s", missing == 1 ? "" : ", ", r,
                         client ? "" : " (not connected yet)");
    }
    if (missing > 16) snprintf(text + used, (size_t)(LAUNCH_TEXT_MAX - used), " and %d more", missing - 16);
}

/* A wrong one stops the start for all; one that comes when all are there is only sent away, so that it
 * does no harm to a run that has begun. */
static void server_refuse(StoreServer *server, StoreClient *client, const char *reason) {
    if (server->n_joined < server->size) {
        store_server_stop(server, EXIT_LAUNCH, "%s", reason);
        client_tell_stop(server, client);
    } else {
        log_warn(LOG_LAUNCH, "refused a process: %s", reason);
        client->told_stop = true;
        client_send(server, client, STORE_STOP, EXIT_LAUNCH, reason, strlen(reason));
    }
}

static void server_join(StoreServer *server, StoreClient *client, const StoreCard *card) {
    int rank = client->claimed_rank;
    char reason[LAUNCH_TEXT_MAX];
    client->card = *card;
    client->card.host[LAUNCH_HOST_MAX - 1] = 0;
    card = &client->card;
    if (card->world_size != server->size || rank >= server->size) {
        snprintf(reason, sizeof reason, "rank %d (host %s, pid %d) has WORLD_SIZE=%d, rank 0 has WORLD_SIZE=%d", rank,
                 card->host, card->pid, card->world_size, server->size);
        server_refuse(server, client, reason);
    } else if (server->by_rank[rank]) {
        const StoreCard *first = &server->by_rank[rank]->card;
        snprintf(reason, sizeof reason, "two processes were started with RANK=%d: host %s, pid %d, and host %s, pid %d",
                 rank, first->host, first->pid, card->host, card->pid);
        server_refuse(server, client, reason);
    } else {
        client->rank = rank;
        server->by_rank[rank] = client;
        server->n_joined++;
        if (server->stopped) client_tell_stop(server, client);
    }
}

static void server_put(StoreServer *server, StoreClient *client, const char *key, const void *value, size_t bytes) {
    if (!store_table_put(server->table, client->rank, key, value, bytes)) {
        store_server_stop(server, EXIT_INTERNAL, "rank %d put the key \"%s\" twice", client->rank, key);
    }
}

static void server_last_words(StoreServer *server, StoreClient *client, int status, const char *text, size_t bytes) {
    if (server->stopped) return;
    server->stop_rank = client->rank;
    store_server_stop(server, status, "rank %d: %.*s", client->rank, (int)bytes, text);
}

/* One whole message. */
static void server_handle(StoreServer *server, StoreClient *client, const StoreHeader *header, const char *key,
                          const uint8_t *value) {
    size_t bytes = (size_t)header->bytes;
    if (header->kind == STORE_JOIN && client->rank < 0 && bytes == sizeof(StoreCard)) {
        StoreCard card;
        memcpy(&card, value, sizeof card);
        server_join(server, client, &card);
        return;
    }
    if (client->rank < 0) return;
    if (header->kind == STORE_BYE) client->said_bye = true;
    if (header->kind == STORE_PUT) server_put(server, client, key, value, bytes);
    if (header->kind == STORE_LAST_WORDS) server_last_words(server, client, header->status, (const char *)value, bytes);
    bool question = header->kind == STORE_GET || header->kind == STORE_FENCE || header->kind == STORE_WHO;
    if (!question || server->stopped) return;
    if (header->kind == STORE_GET) {
        size_t found_bytes = 0;
        const void *found = store_table_get(server->table, header->rank, key, &found_bytes);
        client_send(server, client, found ? STORE_VALUE : STORE_MISSING, 0, found, found_bytes);
    } else if (header->kind == STORE_FENCE) {
        server_fence(server, client, key);
    } else if (client->fencing) { /* otherwise the fence was passed meanwhile, and PASSED is on its way */
        char text[LAUNCH_TEXT_MAX] = "";
        server_list_missing(server, text);
        client_send(server, client, STORE_WAITING, 0, text, strlen(text));
    }
}

static void client_lost(StoreServer *server, StoreClient *client) {
    epoll_ctl(server->epoll, EPOLL_CTL_DEL, client->fd, NULL);
    close(client->fd);
    client->fd = -1;
    server->n_gone++;
    if (client->said_bye || client->rank < 0 || server->stopped) return;
    server->stop_rank = client->rank;
    store_server_stop(server, EXIT_PEER_LOST, "rank %d%s%s was lost while the ranks were starting", client->rank,
                      client->card.host[0] ? " on host " : "", client->card.host);
}

/* false where the stream holds something that is no message. */
static bool client_take_messages(StoreServer *server, StoreClient *client) {
    Queue *in = &client->in;
    while (in->bytes - in->done >= sizeof(StoreHeader)) {
        StoreHeader header;
        memcpy(&header, in->data + in->done, sizeof header);
        if (header.kind < STORE_JOIN || header.kind > STORE_LAST_WORDS || header.key_bytes > LAUNCH_KEY_MAX ||
            header.bytes > STORE_VALUE_MAX) {
            return false;
        }
        size_t whole = sizeof header + header.key_bytes + header.bytes;
        if (in->bytes - in->done < whole) break;
        char key[LAUNCH_KEY_MAX + 1] = "";
        memcpy(key, in->data + in->done + sizeof header, header.key_bytes);
        server_handle(server, client, &header, key, in->data + in->done + sizeof header + header.key_bytes);
        in->done += whole;
    }
    memmove(in->data, in->data + in->done, in->bytes - in->done);
    in->bytes -= in->done;
    in->done = 0;
    return true;
}

static void client_read(StoreServer *server, StoreClient *client) {
    static const size_t piece = 65536;
    Queue *in = &client->in;
    for (;;) {
        if (in->capacity - in->bytes < piece) {
            in->capacity = 2 * in->capacity + piece;
            in->data = xrealloc(in->data, in->capacity);
        }
        ssize_t n = recv(client->fd, in->data + in->bytes, in->capacity - in->bytes, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (n <= 0) break;
        in->bytes += (size_t)n;
        if (!client_take_messages(server, client)) break;
    }
    client_lost(server, client);
}

void store_server_step(StoreServer *server) {
    struct epoll_event events[64];
    int n = epoll_wait(server->epoll, events, 64, 0);
    for (int i = 0; i < n; i++) {
        StoreClient *client = events[i].data.ptr;
        if (client->fd >= 0 && (events[i].events & EPOLLOUT)) client_flush(server, client);
        if (client->fd >= 0 && (events[i].events & ~(uint32_t)EPOLLOUT)) client_read(server, client);
    }
}

void store_server_free(StoreServer *server) {
    for (int i = 0; i < server->n_clients; i++) {
        StoreClient *client = server->clients[i];
        if (client->fd >= 0) close(client->fd);
        free(client->in.data);
        free(client->out.data);
        free(client);
    }
    close(server->epoll);
    store_table_free(server->table);
    free(server->clients);
    free(server->by_rank);
    free(server);
}

/* ---- client ---- */

typedef struct {
    int fd;
} StoreEnd;

void *store_client_create(int fd) {
    StoreEnd *end = xcalloc(1, sizeof *end);
    end->fd = fd;
    return end;
}

static void end_lost(const Launch *launch, const char *doing) {
    launch_stop(launch, EXIT_PEER_LOST, "%s was lost while this rank was waiting for \"%s\"",
                strcmp(launch->kind, "local") == 0 ? "the launching process" : "rank 0, which keeps the job's store,",
                doing);
}

static void end_send(Launch *launch, StoreHeader header, const char *key, const void *value, size_t bytes) {
    const StoreEnd *end = launch->store_state;
    header.key_bytes = key ? (uint32_t)strlen(key) : 0;
    header.bytes = bytes;
    double deadline = clock_s() + launch->timeout_s;
    if (net_write(end->fd, &header, sizeof header, deadline) != 0 ||
        net_write(end->fd, key, header.key_bytes, deadline) != 0 || net_write(end->fd, value, bytes, deadline) != 0) {
        /* The server may have said why before it closed. */
        StoreHeader answer;
        while (net_read(end->fd, &answer, sizeof answer, clock_s() + 1.0) == 0 && answer.bytes < LAUNCH_TEXT_MAX) {
            char text[LAUNCH_TEXT_MAX] = "";
            if (net_read(end->fd, text, answer.bytes, clock_s() + 1.0) != 0) break;
            if (answer.kind == STORE_STOP) launch_stop(launch, answer.status, "%s", text);
        }
        end_lost(launch, key ? key : "the store");
    }
}

/* The next answer; its value is returned, owned by the caller. NULL where none came by the deadline. */
static uint8_t *end_answer(Launch *launch, StoreHeader *header, const char *doing, double deadline) {
    const StoreEnd *end = launch->store_state;
    struct pollfd ready = {.fd = end->fd, .events = POLLIN};
    for (;;) {
        double left_s = deadline - clock_s();
        int n = poll(&ready, 1, left_s > 0 ? (int)(left_s * 1000) + 1 : 0);
        if (n > 0) break;
        if (left_s <= 0) return NULL;
    }
    deadline = clock_s() + launch->timeout_s;
    if (net_read(end->fd, header, sizeof *header, deadline) != 0 || header->bytes > STORE_VALUE_MAX) {
        end_lost(launch, doing);
    }
    uint8_t *value = xmalloc(header->bytes + 1);
    if (net_read(end->fd, value, header->bytes, deadline) != 0) end_lost(launch, doing);
    value[header->bytes] = 0;
    if (header->kind == STORE_STOP) launch_stop(launch, header->status, "%s", (char *)value);
    return value;
}

static void client_put(Launch *launch, const char *key, const void *value, size_t bytes) {
    end_send(launch, (StoreHeader){.kind = STORE_PUT, .rank = launch->rank}, key, value, bytes);
}

static void *client_get(Launch *launch, int from_rank, const char *key, size_t *bytes) {
    end_send(launch, (StoreHeader){.kind = STORE_GET, .rank = from_rank}, key, NULL, 0);
    StoreHeader answer;
    uint8_t *value = end_answer(launch, &answer, key, clock_s() + launch->timeout_s);
    if (!value) {
        launch_stop(launch, EXIT_LAUNCH, "the store gave no answer for key \"%s\" of rank %d within %.0f s", key,
                    from_rank, launch->timeout_s);
    }
    if (answer.kind != STORE_VALUE) {
        die(EXIT_LAUNCH, "key \"%s\" of rank %d is not in the store (no fence since it was put, or never put)", key,
            from_rank);
    }
    *bytes = (size_t)answer.bytes;
    return value;
}

static void client_fence(Launch *launch, const char *what) {
    static const double ask_every_s = 5.0;
    double start = clock_s(), end = start + launch->timeout_s;
    bool late = false; /* past the deadline, and asked once more who is missing */
    char missing[LAUNCH_TEXT_MAX] = "(the store does not answer)";
    end_send(launch, (StoreHeader){.kind = STORE_FENCE, .rank = launch->rank}, what, NULL, 0);
    for (;;) {
        double now = clock_s();
        StoreHeader answer;
        uint8_t *value = end_answer(launch, &answer, what, end < now + ask_every_s ? end : now + ask_every_s);
        bool passed = value && answer.kind == STORE_PASSED, waiting = value && answer.kind == STORE_WAITING;
        if (waiting) snprintf(missing, sizeof missing, "%s", (char *)value);
        bool answered = value != NULL, over = clock_s() >= end;
        free(value);
        if (passed) return;
        if (late && (waiting || over)) {
            launch_stop(launch, EXIT_LAUNCH, "waited %.0f s at \"%s\" for rank %s", launch->timeout_s, what, missing);
        }
        if (waiting) log_info(LOG_LAUNCH, "waiting at \"%s\" for rank %s, %.0f s", what, missing, clock_s() - start);
        if (!answered) {
            end_send(launch, (StoreHeader){.kind = STORE_WHO, .rank = launch->rank}, NULL, NULL, 0);
            if (over) {
                late = true;
                end = clock_s() + 1.0;
            }
        }
    }
}

void store_client_join(Launch *launch, const StoreCard *card) {
    end_send(launch, (StoreHeader){.kind = STORE_JOIN, .rank = launch->rank}, NULL, card, sizeof *card);
}

/* Called by a dying process, perhaps not by the main thread: writes at once, waits for nothing. */
static void client_end_words(Launch *launch, int status, const char *message) {
    const StoreEnd *end = launch->store_state;
    size_t bytes = message ? strlen(message) : 0;
    StoreHeader header = {
        .kind = message ? STORE_LAST_WORDS : STORE_BYE, .rank = launch->rank, .status = status, .bytes = bytes};
    uint8_t whole[sizeof header + LAUNCH_TEXT_MAX];
    if (bytes > LAUNCH_TEXT_MAX) header.bytes = bytes = LAUNCH_TEXT_MAX;
    memcpy(whole, &header, sizeof header);
    if (bytes) memcpy(whole + sizeof header, message, bytes);
    net_write(end->fd, whole, sizeof header + bytes, clock_s() + 0.2);
    shutdown(end->fd, SHUT_WR);
}

static void client_check(Launch *launch) {
    const StoreEnd *end = launch->store_state;
    struct pollfd ready = {.fd = end->fd, .events = POLLIN};
    StoreHeader header;
    /* Nothing was asked, so only STOP (which does not return) or the end of the store can be there. */
    if (poll(&ready, 1, 0) > 0) free(end_answer(launch, &header, "the start of the peers", clock_s()));
}

static void client_finish(Launch *launch) {
    StoreEnd *end = launch->store_state;
    StoreHeader header = {.kind = STORE_BYE, .rank = launch->rank};
    net_write(end->fd, &header, sizeof header, clock_s() + 1.0); /* a server that is gone needs no goodbye */
    close(end->fd);
    free(end);
    launch->store_state = NULL;
}

const LaunchStore store_client = {client_put, client_get, client_fence, client_check, client_end_words, client_finish};
