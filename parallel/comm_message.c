/* comm_message.c - messages between two ranks of a host.
 *
 * One Pair of words in the group's block for each direction. Numbers count the messages of the direction:
 *     sender    waits for taken == number; writes what it has and where; posted = number + 1
 *     receiver  waits for posted == number + 1; copies; taken = number + 1
 *     sender    waits for taken == number + 1: sends have no buffer, the buffer is the sender's own
 * A buffer in registered memory is read where it lies. Others go piece by piece through a window:
 *     sender    waits until all pieces posted are taken; copies one; pieces_posted + 1
 *     receiver  waits for pieces_posted > pieces_taken; copies it out; pieces_taken + 1 */
#include <string.h>

#include "parallel/comm_internal.h"

enum { COPY_BYTES = 1 << 20 }; /* in one go, before the other streams get their turn */

enum { MESSAGE_START, MESSAGE_PIECES, MESSAGE_POSTED, MESSAGE_COPY };

typedef struct {
    Comm *comm;
    Pair *pair;
    char *window;
    int peer_rank;
} Way;

static Way way_of(const Message *m) {
    const Group *group = m->group;
    int me = group->local_index[group->rank], them = group->local_index[m->peer];
    int at = m->is_send ? me * group->n_local + them : them * group->n_local + me;
    return (Way){.comm = group->comm,
                 .pair = &group->block.pairs[m->lane][at],
                 .window = group->block.pair_windows[m->lane] + (int64_t)at * PAIR_WINDOW_BYTES,
                 .peer_rank = group->ranks[m->peer]};
}

/* ---- sending ---- */

static bool wait_taken(Pair *pair, uint64_t wanted, BellId bell) {
    if (atomic_load(&pair->taken) >= wanted) return true;
    atomic_fetch_or(&pair->sender_sleeps, 1u << bell);
    return atomic_load(&pair->taken) >= wanted;
}

static bool window_is_free(Pair *pair, BellId bell) {
    uint64_t posted = atomic_load_explicit(&pair->pieces_posted, memory_order_relaxed);
    if (atomic_load(&pair->pieces_taken) == posted) return true;
    atomic_fetch_or(&pair->sender_sleeps, 1u << bell);
    return atomic_load(&pair->pieces_taken) == posted;
}

static WorkState send_tick(Message *m, const Way *way, BellId bell) {
    Pair *pair = way->pair;
    if (m->state == MESSAGE_START) {
        if (!wait_taken(pair, m->number, bell)) return WORK_BLOCKED;
        pair->sent = m->d;
        pair->place = comm_place(way->comm, m->data, m->bytes);
        m->state = pair->place < 0 && m->bytes > 0 ? MESSAGE_PIECES : MESSAGE_POSTED;
        atomic_store(&pair->posted, m->number + 1);
        comm_wake(way->comm, way->peer_rank, &pair->receiver_sleeps);
        comm_count_bytes(way->comm, m->bytes);
    }
    if (m->state == MESSAGE_PIECES) {
        if (!window_is_free(pair, bell)) return WORK_BLOCKED;
        int64_t n = min_i64(PAIR_WINDOW_BYTES, m->bytes - m->done_bytes);
        memcpy(way->window, m->data + m->done_bytes, (size_t)n);
        m->done_bytes += n;
        if (m->done_bytes == m->bytes) m->state = MESSAGE_POSTED;
        atomic_fetch_add(&pair->pieces_posted, 1);
        comm_wake(way->comm, way->peer_rank, &pair->receiver_sleeps);
        return WORK_AGAIN;
    }
    return wait_taken(pair, m->number + 1, bell) ? WORK_DONE : WORK_BLOCKED;
}

/* ---- receiving ---- */

static bool wait_posted(_Atomic uint64_t *posted, uint64_t wanted, Pair *pair, BellId bell) {
    if (atomic_load(posted) >= wanted) return true;
    atomic_fetch_or(&pair->receiver_sleeps, 1u << bell);
    return atomic_load(posted) >= wanted;
}

static WorkState receive_copy(Message *m, const Way *way, BellId bell) {
    Pair *pair = way->pair;
    int64_t left = m->bytes - m->done_bytes;
    if (pair->place >= 0) {
        int64_t n = min_i64(left, COPY_BYTES);
        if (n > 0)
            memcpy(m->data + m->done_bytes, way->comm->peers[way->peer_rank].memory + pair->place + m->done_bytes,
                   (size_t)n);
        m->done_bytes += n;
    } else if (left > 0) {
        uint64_t taken = atomic_load_explicit(&pair->pieces_taken, memory_order_relaxed);
        if (!wait_posted(&pair->pieces_posted, taken + 1, pair, bell)) return WORK_BLOCKED;
        int64_t n = min_i64(left, PAIR_WINDOW_BYTES);
        memcpy(m->data + m->done_bytes, way->window, (size_t)n);
        m->done_bytes += n;
        atomic_store(&pair->pieces_taken, taken + 1);
        comm_wake(way->comm, way->peer_rank, &pair->sender_sleeps);
    }
    if (m->done_bytes < m->bytes) return WORK_AGAIN;
    comm_count_bytes(way->comm, m->bytes);
    atomic_store(&pair->taken, m->number + 1);
    comm_wake(way->comm, way->peer_rank, &pair->sender_sleeps);
    return WORK_DONE;
}

static WorkState receive_tick(Message *m, const Way *way, BellId bell) {
    Pair *pair = way->pair;
    if (m->state == MESSAGE_COPY) return receive_copy(m, way, bell);
    /* An earlier message of the pair may still be on its way to another stream of this rank. */
    if (!wait_posted(&pair->posted, m->number + 1, pair, bell)) return WORK_BLOCKED;
    if (memcmp(&pair->sent, &m->d, sizeof m->d) != 0) comm_mismatch(m->group, m->peer, &m->d, &pair->sent);
    m->state = MESSAGE_COPY;
    return WORK_AGAIN;
}

WorkState comm_message_tick(Message *m, BellId bell) {
    if (!m->group->comm->peers[m->group->ranks[m->peer]].local) return net_message_tick(m);
    const Way way = way_of(m);
    return m->is_send ? send_tick(m, &way, bell) : receive_tick(m, &way, bell);
}

/* ---- as operations ---- */

static bool is_peer(const Op *op, int index) { return index == op->message.peer; }

WorkState comm_message_op_tick(Work *work, BellId bell) {
    Op *op = (Op *)work;
    if (op->work.uses_sockets) net_pump(op->group->comm->net);
    WorkState state = comm_message_tick(&op->message, bell);
    if (state == WORK_BLOCKED) return comm_blocked(op, is_peer);
    comm_goes_on(op);
    return state;
}

/* Messages that proceed together have one deadline, which starts anew whenever one of them gets on. */
WorkState comm_messages_op_tick(Work *work, BellId bell) {
    Op *op = (Op *)work;
    WorkState state = WORK_DONE;
    const Op *waiting = NULL;
    if (op->work.uses_sockets) net_pump(op->group->comm->net);
    for (Op *child = op->children; child; child = child->next) {
        if (child->checked) continue;
        WorkState one = comm_message_tick(&child->message, bell);
        child->checked = one == WORK_DONE;
        if (one != WORK_BLOCKED) comm_goes_on(op);
        if (one == WORK_BLOCKED && !waiting) waiting = child;
        if (one == WORK_AGAIN || (one == WORK_BLOCKED && state == WORK_DONE)) state = one;
    }
    if (state != WORK_BLOCKED) return state;
    op->message = waiting->message; /* what the words at a deadline are about */
    op->d = waiting->d;
    op->group = waiting->group;
    return comm_blocked(op, is_peer);
}
