/* comm.c - the interface of communication: checks what is asked, numbers it, queues it.
 *
 * In: buffers and streams of the caller's thread. Out: an Op a call, ticked to its end by that thread or
 * by the progress thread; the tick function says how (comm_shared.c, comm_mixed.c, comm_message.c).
 * Invariants: an operation's number is given here, in the order of issue; ops are reused, so that steady
 * work allocates nothing. */
#include "parallel/comm_internal.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/log.h"

/* ---- words ---- */

const char *comm_op_name(int kind) {
    static const char *const names[OP_COUNT] = {"all_reduce",  "reduce_scatter", "all_gather",
                                                "broadcast",   "all_to_all",     "barrier",
                                                "host_reduce", "host_gather",    "message"};
    return kind >= 0 && kind < OP_COUNT ? names[kind] : "unknown operation";
}

static bool reduces(int kind) { return kind == OP_ALL_REDUCE || kind == OP_REDUCE_SCATTER || kind == OP_HOST_REDUCE; }

static int describe_payload(char *text, size_t capacity, const Descriptor *d) {
    int n = snprintf(text, capacity, "%s", comm_op_name(d->kind));
    if (d->kind == OP_BARRIER) return n;
    n += snprintf(text + n, capacity - (size_t)n, " of %lld %s", (long long)d->count, dtype_name((DType)d->dtype));
    if (reduces(d->kind)) n += snprintf(text + n, capacity - (size_t)n, " (%s)", d->op == COMM_MAX ? "max" : "sum");
    if (d->kind == OP_BROADCAST) n += snprintf(text + n, capacity - (size_t)n, " from member %d", (int)d->root);
    return n;
}

void comm_describe(char *text, size_t capacity, const Group *group, const Descriptor *d) {
    int n = describe_payload(text, capacity, d);
    snprintf(text + n, capacity - (size_t)n, " as operation %llu of group %s", (unsigned long long)d->number,
             group->name);
}

void comm_mismatch(const Group *group, int peer, const Descriptor *mine, const Descriptor *theirs) {
    char own[256], other[256];
    bool message = mine->kind == OP_MESSAGE && theirs->kind == OP_MESSAGE;
    int me = group->ranks[group->rank], them = group->ranks[peer];
    if (message) {
        die(EXIT_INTERNAL,
            "ranks disagree: message %llu of group %s from rank %d to rank %d has %lld %s there, %lld %s here",
            (unsigned long long)mine->number, group->name, mine->root == group->rank ? me : them,
            mine->root == group->rank ? them : me, (long long)theirs->count, dtype_name((DType)theirs->dtype),
            (long long)mine->count, dtype_name((DType)mine->dtype));
    }
    describe_payload(other, sizeof other, theirs);
    comm_describe(own, sizeof own, group, mine);
    die(EXIT_INTERNAL, "ranks disagree: rank %d calls %s, rank %d calls %s", me, own, them, other);
}

/* ---- waiting ---- */

void comm_wake(Comm *comm, int rank, _Atomic uint32_t *sleepers) {
    if (atomic_load(sleepers) == 0) return;
    uint32_t mask = atomic_exchange(sleepers, 0);
    Peer *peer = &comm->peers[rank];
    for (int id = 0; id < BELL_COUNT; id++) {
        if (mask & 1u << id) bell_ring(&peer->bells->bell[id], peer->event_fd);
    }
}

/* "rank 3, rank 5 and 2 more". */
static void list_missing(char *text, size_t capacity, const Op *op, bool (*missing)(const Op *op, int index)) {
    const Group *group = op->group;
    int n = 0;
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < group->size; i++) {
        if (i == group->rank || !missing || !missing(op, i)) continue;
        if (n++ >= 8) continue;
        used += (size_t)snprintf(text + used, capacity - used, "%srank %d on host %s", n > 1 ? ", " : "",
                                 group->ranks[i], group->comm->hosts[group->ranks[i]]);
    }
    if (n > 8) snprintf(text + used, capacity - used, " and %d more", n - 8);
    if (n == 0) snprintf(text, capacity, "this rank's own earlier operations");
}

WorkState comm_blocked(Op *op, bool (*missing)(const Op *op, int index)) {
    const Comm *comm = op->group->comm;
    double limit_s = comm->options.timeout_s;
    if (limit_s <= 0) return WORK_BLOCKED;
    double now = clock_s();
    if (op->work.deadline_s == 0) op->work.deadline_s = now + limit_s;
    if (now < op->work.deadline_s) return WORK_BLOCKED;
    char what[256], who[512];
    list_missing(who, sizeof who, op, missing);
    if (op->d.kind == OP_MESSAGE) {
        const Message *m = &op->message;
        snprintf(what, sizeof what, "%s of %lld %s %s rank %d as message %llu of group %s",
                 m->is_send ? "send" : "recv", (long long)m->d.count, dtype_name((DType)m->d.dtype),
                 m->is_send ? "to" : "from", op->group->ranks[m->peer], (unsigned long long)m->d.number,
                 op->group->name);
    } else {
        comm_describe(what, sizeof what, op->group, &op->d);
    }
    die(EXIT_HANG, "rank %d waited %.1f s in %s: %s has not come", comm->rank, limit_s, what, who);
}

bool comm_has_turn(Op *op, BellId bell) {
    Group *group = op->group;
    if (atomic_load(&group->turn) == op->d.number) return true;
    atomic_fetch_or(&group->turn_sleepers, 1u << bell);
    return atomic_load(&group->turn) == op->d.number;
}

void comm_pass_turn(Op *op) {
    atomic_store(&op->group->turn, op->d.number + 1);
    comm_wake(op->group->comm, op->group->comm->rank, &op->group->turn_sleepers);
}

/* ---- operations ---- */

static void op_release(Work *work) {
    Op *op = (Op *)work;
    Comm *comm = op->group->comm;
    pthread_mutex_lock(&comm->lock);
    while (op) {
        Op *child = op->children;
        if (!child) {
            Op *next = op->next;
            op->next = comm->free_ops;
            comm->free_ops = op;
            op = next;
            continue;
        }
        /* The children's list goes first; its end leads back to the parent. */
        op->children = NULL;
        Op *last = child;
        while (last->next) last = last->next;
        last->next = op;
        op = child;
    }
    pthread_mutex_unlock(&comm->lock);
}

static Op *op_take(Group *group, OpKind kind, int64_t count, DType dtype) {
    Comm *comm = group->comm;
    REQUIRE(count >= 0 && dtype < DT_COUNT);
    pthread_mutex_lock(&comm->lock);
    Op *op = comm->free_ops;
    if (op) comm->free_ops = op->next;
    pthread_mutex_unlock(&comm->lock);
    if (!op) op = xmalloc(sizeof *op);
    *op = (Op){.group = group, .work.release = op_release};
    op->d = (Descriptor){.count = count, .kind = (uint8_t)kind, .dtype = (uint8_t)dtype};
    return op;
}

/* Stands for the buffer of an operation without elements, for which callers may pass NULL: offsets are added to it. */
static char nothing[1];

static Op *collective(Group *group, OpKind kind, void *out, const void *in, int64_t count, DType dtype) {
    REQUIRE(!group->comm->grouping);
    Op *op = op_take(group, kind, count, dtype);
    op->d.number = group->issued++;
    op->in = in ? in : nothing;
    op->out = out ? out : nothing;
    op->work.tick = group->shared ? comm_shared_tick : comm_mixed_tick;
    op->work.uses_sockets = !group->shared;
    return op;
}

static size_t bytes_of(int64_t count, DType dtype) { return (size_t)count * dtype_size(dtype); }

void comm_all_reduce(Group *group, void *buffer, int64_t count, DType dtype, CommOp op, Stream *stream) {
    if (group->size == 1) return;
    Op *o = collective(group, OP_ALL_REDUCE, buffer, buffer, count, dtype);
    o->d.op = (uint8_t)op;
    stream_submit(stream, &o->work);
}

void comm_reduce_scatter(Group *group, void *out, const void *in, int64_t count_per_rank, DType dtype, CommOp op,
                         Stream *stream) {
    if (group->size == 1) {
        device_copy(out, in, bytes_of(count_per_rank, dtype), stream);
        return;
    }
    Op *o = collective(group, OP_REDUCE_SCATTER, out, in, count_per_rank, dtype);
    o->d.op = (uint8_t)op;
    stream_submit(stream, &o->work);
}

void comm_all_gather(Group *group, void *out, const void *in, int64_t count_per_rank, DType dtype, Stream *stream) {
    if (group->size == 1) {
        device_copy(out, in, bytes_of(count_per_rank, dtype), stream);
        return;
    }
    stream_submit(stream, &collective(group, OP_ALL_GATHER, out, in, count_per_rank, dtype)->work);
}

void comm_broadcast(Group *group, void *buffer, int64_t count, DType dtype, int root, Stream *stream) {
    REQUIRE(root >= 0 && root < group->size);
    if (group->size == 1) return;
    Op *o = collective(group, OP_BROADCAST, buffer, buffer, count, dtype);
    o->d.root = root;
    stream_submit(stream, &o->work);
}

void comm_all_to_all(Group *group, void *out, const void *in, int64_t count_per_rank, DType dtype, Stream *stream) {
    REQUIRE(out != in || count_per_rank == 0);
    if (group->size == 1) {
        device_copy(out, in, bytes_of(count_per_rank, dtype), stream);
        return;
    }
    stream_submit(stream, &collective(group, OP_ALL_TO_ALL, out, in, count_per_rank, dtype)->work);
}

void comm_barrier(Group *group, Stream *stream) {
    if (group->size == 1) return;
    stream_submit(stream, &collective(group, OP_BARRIER, NULL, NULL, 0, DT_I32)->work);
}

/* ---- messages ---- */

static void message(Group *group, int peer, bool is_send, void *buffer, int64_t count, DType dtype, Stream *stream) {
    Comm *comm = group->comm;
    REQUIRE(peer >= 0 && peer < group->size && peer != group->rank);
    Op *op = op_take(group, OP_MESSAGE, count, dtype);
    op->d.number = is_send ? group->sent[0][peer]++ : group->received[0][peer]++;
    op->d.root = is_send ? group->rank : peer;
    op->message = (Message){.group = group,
                            .peer = peer,
                            .number = op->d.number,
                            .is_send = is_send,
                            .d = op->d,
                            .data = buffer ? buffer : nothing,
                            .bytes = (int64_t)bytes_of(count, dtype)};
    op->work.tick = comm_message_op_tick;
    op->work.uses_sockets = !comm->peers[group->ranks[peer]].local;
    op->stream = stream;
    if (!comm->grouping) {
        stream_submit(stream, &op->work);
        return;
    }
    *comm->collected_end = op;
    comm->collected_end = &op->next;
}

void comm_send(Group *group, int peer, const void *buffer, int64_t count, DType dtype, Stream *stream) {
    message(group, peer, true, (void *)buffer, count, dtype, stream);
}

void comm_recv(Group *group, int peer, void *buffer, int64_t count, DType dtype, Stream *stream) {
    message(group, peer, false, buffer, count, dtype, stream);
}

void comm_begin(Comm *comm) {
    REQUIRE(!comm->grouping);
    comm->grouping = true;
    comm->collected = NULL;
    comm->collected_end = &comm->collected;
}

/* Takes the messages for the first one's stream off the list, as the children of one operation. */
static Op *gather_children(Comm *comm) {
    Op *first = comm->collected, *parent = op_take(first->group, OP_MESSAGE, 0, DT_I32);
    parent->stream = first->stream;
    parent->work.tick = comm_messages_op_tick;
    Op **end = &parent->children;
    for (Op **at = &comm->collected; *at;) {
        Op *op = *at;
        if (op->stream != parent->stream) {
            at = &op->next;
            continue;
        }
        *at = op->next;
        op->next = NULL;
        *end = op;
        end = &op->next;
        parent->work.uses_sockets |= op->work.uses_sockets;
    }
    return parent;
}

void comm_end(Comm *comm) {
    REQUIRE(comm->grouping);
    comm->grouping = false;
    while (comm->collected) {
        Op *parent = gather_children(comm);
        stream_submit(parent->stream, &parent->work);
    }
}

/* ---- host values ---- */

void comm_host_reduce(Group *group, double *values, int n, CommOp op) {
    if (group->size == 1) return;
    Op *o = collective(group, OP_HOST_REDUCE, values, values, n, DT_F64);
    o->d.op = (uint8_t)op;
    stream_submit(group->comm->inline_stream, &o->work);
}

static void gather_bytes(Group *group, void *out, const void *in, int64_t words) {
    stream_submit(group->comm->inline_stream, &collective(group, OP_HOST_GATHER, out, in, words, DT_I32)->work);
}

/* Values are gathered in pieces of equal size, padded: what a rank does not have is sent as zeros. */
static void gather_pieces(Group *group, char *to, const char *mine, const int64_t *lengths, const int64_t *starts) {
    enum { PIECE_BYTES = 1 << 18 };
    int64_t longest = 0;
    for (int i = 0; i < group->size; i++) longest = max_i64(longest, lengths[i]);
    int64_t piece = round_up(min_i64(longest, PIECE_BYTES), 8);
    char *in = xcalloc(1, (uint64_t)piece), *out = xmalloc((uint64_t)(piece * group->size));
    for (int64_t first = 0; first < longest; first += piece) {
        int64_t own = min_i64(piece, max_i64(0, lengths[group->rank] - first));
        if (own > 0) memcpy(in, mine + first, (size_t)own);
        gather_bytes(group, out, in, piece / 4);
        for (int i = 0; i < group->size; i++) {
            int64_t theirs = min_i64(piece, max_i64(0, lengths[i] - first));
            if (theirs > 0) memcpy(to + starts[i] + first, out + i * piece, (size_t)theirs);
        }
    }
    free(in);
    free(out);
}

void *comm_host_gather(Group *group, const void *mine, int64_t bytes, int64_t *lengths) {
    REQUIRE(bytes >= 0);
    if (group->size == 1) {
        lengths[0] = bytes;
        void *copy = xmalloc((uint64_t)bytes);
        return bytes ? memcpy(copy, mine, (size_t)bytes) : copy;
    }
    gather_bytes(group, lengths, &bytes, (int64_t)(sizeof bytes / 4));
    int64_t *starts = xcalloc((uint64_t)group->size, sizeof *starts), total = 0;
    for (int i = 0; i < group->size; i++) {
        starts[i] = total;
        total += lengths[i];
    }
    char *all = xmalloc((uint64_t)total);
    gather_pieces(group, all, mine, lengths, starts);
    free(starts);
    return all;
}

void comm_reserve(Comm *comm, int n) {
    for (int i = 0; i < n; i++) {
        Op *op = xcalloc(1, sizeof *op);
        pthread_mutex_lock(&comm->lock);
        op->next = comm->free_ops;
        comm->free_ops = op;
        pthread_mutex_unlock(&comm->lock);
    }
}

int64_t comm_held_bytes(const Comm *comm) {
    int64_t bytes = 0;
    for (const Group *group = comm->groups; group; group = group->next) {
        const int64_t members = group->n_local, first = group->block.base ? group->block.members[0].rank : -1;
        if (!group->shared) bytes += group->size * (int64_t)MESSAGE_CHUNK_BYTES;
        /* Both halves of every member's window, as far as what is staged reaches. */
        if (first == comm->rank) bytes += group->block.windows - group->block.base + 2 * members * STAGE_BYTES;
    }
    return bytes;
}

int64_t comm_bytes(const Comm *comm) { return atomic_load(&comm->bytes); }

/* ---- groups ---- */

int group_size(const Group *group) { return group->size; }
int group_rank(const Group *group) { return group->rank; }
Group *comm_world(Comm *comm) { return comm->world; }

/* Equal on all members: the name, the ranks, and how many such groups were made before. */
static uint64_t group_key(const Comm *comm, const Group *group) {
    uint64_t key = XXH3_64bits_withSeed(group->name, strlen(group->name), (uint64_t)comm->generation);
    key = XXH3_64bits_withSeed(group->ranks, (size_t)group->size * sizeof *group->ranks, key);
    bool used = true;
    while (used || key == 0) {
        used = false;
        for (const Group *other = comm->groups; other && !used; other = other->next) used = other->key == key;
        if (used || key == 0) key = XXH3_64bits(&key, sizeof key);
    }
    return key;
}

static uint64_t *numbers(const Group *group) { return xcalloc((uint64_t)group->size, sizeof(uint64_t)); }

Group *comm_group(Comm *comm, const char *name, const int *ranks, int n) {
    Group *group = xcalloc(1, sizeof *group);
    REQUIRE(n >= 1 && n <= comm->size);
    group->comm = comm;
    group->name = xstrdup(name);
    group->size = n;
    group->rank = -1;
    group->ranks = xcalloc((uint64_t)n, sizeof *group->ranks);
    memcpy(group->ranks, ranks, (size_t)n * sizeof *ranks);
    for (int i = 0; i < n; i++) {
        REQUIRE(ranks[i] >= 0 && ranks[i] < comm->size);
        for (int j = 0; j < i; j++) REQUIRE(ranks[j] != ranks[i]);
        if (ranks[i] == comm->rank) group->rank = i;
    }
    REQUIRE(group->rank >= 0);
    group->key = group_key(comm, group);
    comm_open_block(group);
    for (int lane = 0; lane < 2; lane++) {
        group->sent[lane] = numbers(group);
        group->received[lane] = numbers(group);
    }
    group->pointers = xcalloc(2 * (uint64_t)n, sizeof *group->pointers);
    if (!group->shared) {
        group->messages = xcalloc(2 * (uint64_t)n, sizeof *group->messages);
        group->chunks = xmalloc((uint64_t)n * MESSAGE_CHUNK_BYTES);
    }
    group->next = comm->groups;
    comm->groups = group;
    return group;
}

static void group_free(Group *group) {
    if (group->block.base) munmap(group->block.base, (size_t)group->block.bytes);
    for (int lane = 0; lane < 2; lane++) {
        free(group->sent[lane]);
        free(group->received[lane]);
    }
    free(group->pointers);
    free(group->messages);
    free(group->chunks);
    free(group->local_index);
    free(group->ranks);
    free(group->name);
    free(group);
}

/* ---- start and end ---- */

Comm *comm_create(Launch *launch, const CommOptions *options) {
    static int generation; /* all ranks make the same ones: names in the store are used once */
    Comm *comm = xcalloc(1, sizeof *comm);
    comm->options = *options;
    comm->rank = launch_rank(launch);
    comm->size = launch_size(launch);
    comm->generation = generation++;
    pthread_mutex_init(&comm->lock, NULL);
    comm->inline_stream = stream_create("host values", STREAM_COMPUTE);
    comm_connect(comm, launch);
    int *ranks = xcalloc((uint64_t)comm->size, sizeof *ranks);
    for (int rank = 0; rank < comm->size; rank++) ranks[rank] = rank;
    comm->world = comm_group(comm, "world", ranks, comm->size);
    free(ranks);
    return comm;
}

void comm_register(Comm *comm, const DeviceMemory *memory) { comm_share_memory(comm, memory); }

void comm_destroy(Comm *comm) {
    REQUIRE(!comm->grouping);
    device_cpu_rest();
    stream_destroy(comm->inline_stream);
    while (comm->groups) {
        Group *group = comm->groups;
        comm->groups = group->next;
        group_free(group);
    }
    comm_disconnect(comm);
    while (comm->free_ops) {
        Op *op = comm->free_ops;
        comm->free_ops = op->next;
        free(op);
    }
    pthread_mutex_destroy(&comm->lock);
    free(comm);
}
