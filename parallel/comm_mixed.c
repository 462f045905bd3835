/* comm_mixed.c - collectives of a group whose members are on several hosts, made of messages.
 *
 *     all_gather, all_to_all   everyone sends to everyone
 *     broadcast                all agree; the root sends to everyone
 *     reduce_scatter           a piece of part k goes to member k, which sums all in rank order; next piece
 *     all_reduce               the same with slices; the owner then sends its sum to everyone
 *     barrier, and no elements all agree: everyone sends an empty message to everyone
 * Messages between members of one host go through shared memory. The bits are those of a group on one
 * host, since there too an owner adds in rank order. */
#include <string.h>

#include "parallel/comm_internal.h"

enum { MIXED_START, MIXED_AGREE, MIXED_SPREAD, MIXED_COLLECT, MIXED_RETURN };

/* ---- messages of the collective ---- */

static void post(Op *op, int peer, bool is_send, const char *data, int64_t bytes) {
    Group *group = op->group;
    uint64_t *numbers = is_send ? group->sent[1] : group->received[1];
    group->messages[op->n_messages++] = (Message){.group = group,
                                                  .peer = peer,
                                                  .lane = 1,
                                                  .number = numbers[peer]++,
                                                  .is_send = is_send,
                                                  .d = op->d,
                                                  .data = (char *)data,
                                                  .bytes = bytes};
}

static bool is_missing(const Op *op, int index) {
    for (int i = 0; i < op->n_messages; i++) {
        const Message *m = &op->group->messages[i];
        if (m->peer == index && m->bytes >= 0) return true;
    }
    return false;
}

/* Ticks the messages that are not done, and forgets those that are. */
static WorkState tick_messages(Op *op, BellId bell) {
    Message *messages = op->group->messages;
    WorkState state = WORK_DONE;
    for (int i = 0; i < op->n_messages; i++) {
        if (messages[i].bytes < 0) continue;
        WorkState one = comm_message_tick(&messages[i], bell);
        if (one != WORK_BLOCKED) comm_goes_on(op);
        if (one == WORK_DONE) messages[i].bytes = -1;
        if (one == WORK_AGAIN || (one == WORK_BLOCKED && state == WORK_DONE)) state = one;
    }
    if (state == WORK_DONE) op->n_messages = 0;
    return state;
}

/* ---- what is sent ---- */

static int64_t element(const Op *op) { return (int64_t)dtype_size((DType)op->d.dtype); }
static bool is_all_reduce(const Op *op) { return op->d.kind == OP_ALL_REDUCE || op->d.kind == OP_HOST_REDUCE; }

static void post_agreement(Op *op) {
    for (int i = 0; i < op->group->size; i++) {
        if (i == op->group->rank) continue;
        post(op, i, true, op->in, 0);
        post(op, i, false, op->out, 0);
    }
}

static void copy_own(char *to, const char *from, int64_t bytes) {
    if (to != from) memcpy(to, from, (size_t)bytes);
}

/* Everyone to everyone, with a part for each (all_to_all) or the same for all (all_gather). */
static void post_exchange(Op *op, bool parts) {
    const Group *group = op->group;
    const int64_t bytes = op->d.count * element(op);
    for (int i = 0; i < group->size; i++) {
        const char *from = op->in + (parts ? i * bytes : 0);
        if (i == group->rank) {
            copy_own(op->out + i * bytes, from, bytes);
        } else {
            post(op, i, true, from, bytes);
            post(op, i, false, op->out + i * bytes, bytes);
        }
    }
}

static void post_broadcast(Op *op) {
    const Group *group = op->group;
    const int64_t bytes = op->d.count * element(op);
    if (group->rank != op->d.root) {
        post(op, op->d.root, false, op->out, bytes);
        return;
    }
    for (int i = 0; i < group->size; i++) {
        if (i != group->rank) post(op, i, true, op->in, bytes);
    }
}

/* Member i's share of a reduction, in elements of the input. */
static Range share_of(const Op *op, int i) {
    if (!is_all_reduce(op)) return (Range){i * op->d.count, op->d.count};
    int64_t each = round_up(ceil_div(op->d.count, op->group->size), 64), first = min_i64(op->d.count, i * each);
    return (Range){first, min_i64(op->d.count - first, each)};
}

/* The piece of it that this round is about. */
static Range piece_of(const Op *op, int i) {
    Range share = share_of(op, i);
    int64_t skip = min_i64(op->first, share.count);
    return (Range){share.first + skip, min_i64(op->length, share.count - skip)};
}

static void post_collect(Op *op) {
    Group *group = op->group;
    op->length = MESSAGE_CHUNK_BYTES / element(op);
    const Range own = piece_of(op, group->rank);
    for (int i = 0; i < group->size; i++) {
        const Range theirs = piece_of(op, i);
        if (i == group->rank) continue;
        if (theirs.count > 0) post(op, i, true, op->in + theirs.first * element(op), theirs.count * element(op));
        if (own.count > 0)
            post(op, i, false, group->chunks + i * (int64_t)MESSAGE_CHUNK_BYTES, own.count * element(op));
    }
}

static void sum_piece(const Op *op) {
    const Group *group = op->group;
    const Range own = piece_of(op, group->rank);
    if (own.count <= 0) return;
    for (int i = 0; i < group->size; i++) {
        group->pointers[i] = i == group->rank ? (char *)op->in + own.first * element(op)
                                              : group->chunks + i * (int64_t)MESSAGE_CHUNK_BYTES;
    }
    void *out = op->out + (is_all_reduce(op) ? own.first : op->first) * element(op);
    comm_reduce(&out, 1, (const void *const *)group->pointers, group->size, own.count, (DType)op->d.dtype,
                (CommOp)op->d.op);
}

static void post_return(Op *op) {
    const Group *group = op->group;
    const Range own = piece_of(op, group->rank);
    for (int i = 0; i < group->size; i++) {
        const Range theirs = piece_of(op, i);
        if (i == group->rank) continue;
        if (own.count > 0) post(op, i, true, op->out + own.first * element(op), own.count * element(op));
        if (theirs.count > 0) post(op, i, false, op->out + theirs.first * element(op), theirs.count * element(op));
    }
}

/* ---- the state machine ---- */

static void begin(Op *op) {
    switch (op->d.kind) {
    case OP_ALL_GATHER:
    case OP_HOST_GATHER: post_exchange(op, false); break;
    case OP_ALL_TO_ALL: post_exchange(op, true); break;
    case OP_BROADCAST: post_broadcast(op); break;
    default:
        op->state = MIXED_COLLECT;
        post_collect(op);
        return;
    }
    op->state = MIXED_SPREAD;
}

static WorkState next_piece(Op *op) {
    op->first += op->length;
    if (op->first >= share_of(op, 0).count) {
        comm_pass_turn(op);
        return WORK_DONE;
    }
    op->state = MIXED_COLLECT;
    post_collect(op);
    return WORK_AGAIN;
}

WorkState comm_mixed_tick(Work *work, BellId bell) {
    Op *op = (Op *)work;
    net_pump(op->group->comm->net);
    if (op->state == MIXED_START) {
        if (!comm_has_turn(op, bell)) return comm_blocked(op, NULL);
        comm_goes_on(op);
        op->state = MIXED_AGREE;
        if (op->d.count == 0 || op->d.kind == OP_BROADCAST) post_agreement(op);
    }
    WorkState state = tick_messages(op, bell);
    if (state == WORK_BLOCKED) return comm_blocked(op, is_missing);
    if (state == WORK_AGAIN) return state;
    switch (op->state) {
    case MIXED_AGREE:
        if (op->d.count == 0) break;
        begin(op);
        return WORK_AGAIN;
    case MIXED_COLLECT:
        sum_piece(op);
        if (!is_all_reduce(op)) return next_piece(op);
        op->state = MIXED_RETURN;
        post_return(op);
        return WORK_AGAIN;
    case MIXED_RETURN: return next_piece(op);
    default: break;
    }
    comm_pass_turn(op);
    return WORK_DONE;
}
