/* comm_tcp.c - messages between ranks of different hosts: one TCP connection a pair of ranks.
 *
 *     receiver -> sender   WANT: a message's key, what is expected
 *     sender -> receiver   DATA: the same words, then the bytes
 * Data is sent only after it was asked for, so it always has a place to go: messages of different streams
 * do not block one another, and sends have no buffer. The key is (group, lane, number).
 * Invariants: all is done by the progress thread; buffers are the user's own, read and written in place;
 * every connection is non-blocking, and the epoll descriptor waits for room only where bytes are queued. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"
#include "parallel/comm_internal.h"

enum { EVENTS_MAX = 64, BUDGET_BYTES = 4 << 20 }; /* of one connection, before the others get their turn */

enum { NET_START, NET_POSTED, NET_DONE };

typedef enum { FRAME_WANT = 0x54430001, FRAME_DATA } FrameKind;

typedef struct {     // offset  bytes
    uint32_t kind;   //   0     4
    uint32_t lane;   //   4     4
    uint64_t key;    //   8     8   of the group
    uint64_t number; //  16     8
    Descriptor d;    //  24    24
} Frame;
_Static_assert(sizeof(Frame) == 48, "size on the wire");

typedef struct {
    Message *first, **end;
} Queue;

struct Connection {
    Net *net;
    int rank, fd; /* fd -1: closed by the peer */
    bool waits_for_room;
    Queue sends, receives; /* posted: not asked for yet; not complete */
    Queue outgoing;        /* asked for; the first is being sent */
    Frame *wants;          /* of the peer, not posted here yet */
    int n_wants, wants_capacity;
    char *control; /* WANT frames to be sent */
    size_t control_bytes, control_sent, control_capacity;
    size_t header_sent; /* of the first outgoing message */
    Frame header;
    Frame in; /* being received */
    size_t in_bytes;
    Message *incoming; /* whose bytes follow; NULL: a frame is being received */
};

struct Net {
    Comm *comm;
    int epoll;
    Connection **connections;
    int n_connections;
};

/* ---- queues ---- */

static void queue_init(Queue *queue) {
    queue->first = NULL;
    queue->end = &queue->first;
}

static void queue_add(Queue *queue, Message *message) {
    message->next = NULL;
    *queue->end = message;
    queue->end = &message->next;
}

static void queue_remove(Queue *queue, Message *message) {
    Message **at = &queue->first;
    while (*at != message) at = &(*at)->next;
    *at = message->next;
    if (!*at) queue->end = at;
}

static bool is_of(const Message *m, const Frame *frame) {
    return m->group->key == frame->key && (uint32_t)m->lane == frame->lane && m->number == frame->number;
}

static Message *queue_find(const Queue *queue, const Frame *frame) {
    Message *m = queue->first;
    while (m && !is_of(m, frame)) m = m->next;
    return m;
}

static Frame frame_of(const Message *m, FrameKind kind) {
    return (Frame){.kind = kind, .lane = (uint32_t)m->lane, .key = m->group->key, .number = m->number, .d = m->d};
}

static void check_frame(const Message *m, const Frame *frame) {
    if (memcmp(&m->d, &frame->d, sizeof m->d) != 0) comm_mismatch(m->group, m->peer, &m->d, &frame->d);
}

/* Another stream's work may have become able to go on: its head is ticked before the thread sleeps. */
static void complete(Message *m) {
    m->state = NET_DONE;
    bell_ring(&bells_own()->bell[BELL_PROGRESS], -1);
}

/* ---- loss ---- */

static bool is_needed(const Connection *c) { return c->sends.first || c->receives.first || c->outgoing.first; }

static void die_lost(const Connection *c) {
    const Comm *comm = c->net->comm;
    die(EXIT_PEER_LOST, "rank %d on host %s was lost: its connection ended while this rank communicates with it",
        c->rank, comm->hosts[c->rank]);
}

/* A peer that has all it needs may leave first. */
static void closed(Connection *c) {
    close(c->fd);
    c->fd = -1;
    if (is_needed(c)) die_lost(c);
}

/* ---- writing ---- */

static void wait_for_room(Connection *c, bool wanted) {
    if (c->fd < 0 || c->waits_for_room == wanted) return;
    struct epoll_event event = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(c->net->epoll, EPOLL_CTL_MOD, c->fd, &event) != 0) die(EXIT_INTERNAL, "epoll: %s", strerror(errno));
    c->waits_for_room = wanted;
}

/* Bytes written, 0: no room, -1: closed. */
static ssize_t write_some(const Connection *c, struct iovec *parts, int n_parts) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)n_parts};
    ssize_t n;
    do {
        n = sendmsg(c->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : n;
}

static ssize_t write_control(Connection *c) {
    struct iovec part = {c->control + c->control_sent, c->control_bytes - c->control_sent};
    ssize_t n = write_some(c, &part, 1);
    if (n > 0) c->control_sent += (size_t)n;
    if (c->control_sent == c->control_bytes) c->control_bytes = c->control_sent = 0;
    return n;
}

static ssize_t write_message(Connection *c, Message *m) {
    if (c->header_sent == 0) c->header = frame_of(m, FRAME_DATA);
    int64_t left = min_i64(m->bytes - m->done_bytes, BUDGET_BYTES);
    struct iovec parts[2] = {{(char *)&c->header + c->header_sent, sizeof c->header - c->header_sent},
                             {m->data + m->done_bytes, (size_t)left}};
    ssize_t n = write_some(c, parts, 2);
    if (n <= 0) return n;
    int64_t of_header = min_i64(n, (int64_t)(sizeof c->header - c->header_sent));
    c->header_sent += (size_t)of_header;
    m->done_bytes += n - of_header;
    if (c->header_sent < sizeof c->header || m->done_bytes < m->bytes) return n;
    queue_remove(&c->outgoing, m);
    c->header_sent = 0;
    comm_count_bytes(c->net->comm, m->bytes);
    complete(m);
    return n;
}

static void flush(Connection *c) {
    int64_t budget = BUDGET_BYTES;
    ssize_t n = 1;
    while (c->fd >= 0 && n > 0 && budget > 0) {
        if (c->control_bytes > 0 && c->header_sent == 0) {
            n = write_control(c);
        } else if (c->outgoing.first) {
            n = write_message(c, c->outgoing.first);
        } else {
            break;
        }
        if (n < 0) closed(c);
        budget -= n;
    }
    wait_for_room(c, c->control_bytes > 0 || c->outgoing.first);
}

/* ---- reading ---- */

static void take_want(Connection *c, const Frame *frame) {
    Message *m = queue_find(&c->sends, frame);
    if (m) {
        check_frame(m, frame);
        queue_remove(&c->sends, m);
        queue_add(&c->outgoing, m);
        flush(c);
        return;
    }
    if (c->n_wants == c->wants_capacity) {
        c->wants_capacity = c->wants_capacity ? 2 * c->wants_capacity : 16;
        c->wants = xrealloc(c->wants, (uint64_t)c->wants_capacity * sizeof *c->wants);
    }
    c->wants[c->n_wants++] = *frame;
}

static void received(Connection *c) {
    Message *m = c->incoming;
    queue_remove(&c->receives, m);
    c->incoming = NULL;
    comm_count_bytes(c->net->comm, m->bytes);
    complete(m);
}

static void take_frame(Connection *c) {
    const Frame *frame = &c->in;
    c->in_bytes = 0;
    if (frame->kind == FRAME_WANT) {
        take_want(c, frame);
        return;
    }
    Message *m = queue_find(&c->receives, frame);
    if (frame->kind != FRAME_DATA || !m) {
        die(EXIT_INTERNAL, "rank %d on host %s sent something that was not asked for", c->rank,
            c->net->comm->hosts[c->rank]);
    }
    check_frame(m, frame);
    c->incoming = m;
    if (m->bytes == 0) received(c);
}

/* Bytes read, 0: nothing there, -1: closed. */
static ssize_t read_some(const Connection *c, void *to, size_t bytes) {
    ssize_t n;
    do {
        n = recv(c->fd, to, bytes, MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n == 0) return -1;
    return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : n;
}

static void read_connection(Connection *c) {
    int64_t budget = BUDGET_BYTES;
    while (c->fd >= 0 && budget > 0) {
        Message *m = c->incoming;
        ssize_t n = m ? read_some(c, m->data + m->done_bytes, (size_t)min_i64(m->bytes - m->done_bytes, budget))
                      : read_some(c, (char *)&c->in + c->in_bytes, sizeof c->in - c->in_bytes);
        if (n < 0) closed(c);
        if (n <= 0) return;
        budget -= n;
        if (m) {
            m->done_bytes += n;
            if (m->done_bytes == m->bytes) received(c);
        } else {
            c->in_bytes += (size_t)n;
            if (c->in_bytes == sizeof c->in) take_frame(c);
        }
    }
}

void net_pump(Net *net) {
    struct epoll_event events[EVENTS_MAX];
    int n = epoll_wait(net->epoll, events, EVENTS_MAX, 0);
    for (int i = 0; i < n; i++) {
        Connection *c = events[i].data.ptr;
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_connection(c);
        if (events[i].events & EPOLLOUT) flush(c);
    }
}

/* ---- messages ---- */

static void post_receive(Connection *c, Message *m) {
    Frame frame = frame_of(m, FRAME_WANT);
    queue_add(&c->receives, m);
    if (c->control_bytes + sizeof frame > c->control_capacity) {
        c->control_capacity = 2 * (c->control_capacity + sizeof frame);
        c->control = xrealloc(c->control, c->control_capacity);
    }
    memcpy(c->control + c->control_bytes, &frame, sizeof frame);
    c->control_bytes += sizeof frame;
}

static void post_send(Connection *c, Message *m) {
    for (int i = 0; i < c->n_wants; i++) {
        if (!is_of(m, &c->wants[i])) continue;
        check_frame(m, &c->wants[i]);
        c->wants[i] = c->wants[--c->n_wants];
        queue_add(&c->outgoing, m);
        return;
    }
    queue_add(&c->sends, m);
}

WorkState net_message_tick(Message *m) {
    Connection *c = m->group->comm->peers[m->group->ranks[m->peer]].connection;
    if (m->state == NET_START) {
        m->state = NET_POSTED;
        if (m->is_send) {
            post_send(c, m);
        } else {
            post_receive(c, m);
        }
        if (c->fd < 0) die_lost(c);
        flush(c);
    }
    return m->state == NET_DONE ? WORK_DONE : WORK_BLOCKED;
}

/* ---- start and end ---- */

Net *net_create(Comm *comm) {
    Net *net = xcalloc(1, sizeof *net);
    net->comm = comm;
    net->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (net->epoll < 0) die(EXIT_LAUNCH, "epoll: %s", strerror(errno));
    progress_watch(net->epoll);
    return net;
}

Connection *net_add(Net *net, int rank, int fd) {
    Connection *c = xcalloc(1, sizeof *c);
    *c = (Connection){.net = net, .rank = rank, .fd = fd};
    queue_init(&c->sends);
    queue_init(&c->receives);
    queue_init(&c->outgoing);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(net->epoll, EPOLL_CTL_ADD, fd, &event) != 0) die(EXIT_LAUNCH, "epoll: %s", strerror(errno));
    net->connections = xrealloc(net->connections, (uint64_t)(net->n_connections + 1) * sizeof(Connection *));
    net->connections[net->n_connections++] = c;
    return c;
}

void net_free(Net *net) {
    progress_watch(-1);
    for (int i = 0; i < net->n_connections; i++) {
        Connection *c = net->connections[i];
        if (c->fd >= 0) close(c->fd);
        free(c->wants);
        free(c->control);
        free(c);
    }
    close(net->epoll);
    free(net->connections);
    free(net);
}
