/* comm_shared.c - collectives of a group whose members all share a host.
 *
 * Every member reads the others' input where it lies: in their registered memory, or in their windows of
 * the group's block, into which buffers from elsewhere are copied piece by piece.
 *
 *     in place:  publish the input's place | wait | work on the peers' memory          | wait
 *     staged:    copy a piece to my window | wait | read the windows     (next piece: the other half)
 *       all_reduce to ONE_SHOT_BYTES:      | wait | read the sum, which the last to arrive has made
 *       all_reduce of more:                | wait | sum my slice into all windows      | wait | copy out
 *
 * One wait is: count up the group's arrivals, sleep until the last to arrive lets all go on. That one wakes
 * those that sleep. A half window is filled anew two pieces later: by then its writer has passed a wait that
 * every reader came to after it had read. Descriptors are kept by the parity of the operation's number for
 * the same reason.
 * Invariants: all members take the same branches, since they decide by what all have published; every
 * element is reduced by one member, in rank order, and given to all. */
#include <string.h>

#include "parallel/comm_internal.h"

enum { PIECE_BYTES = 1 << 20 }; /* of work in place, before the other streams get their turn */

enum { SHARED_START, SHARED_PLACES, SHARED_IN_PLACE, SHARED_LEAVE, SHARED_FILL, SHARED_FILLED, SHARED_SUMMED };

/* ---- waits ---- */

static bool is_missing(const Op *op, int index) {
    const Group *group = op->group;
    return atomic_load(&group->block.members[index].arrived) < group->waits;
}

static bool is_released(const Group *group) { return atomic_load(&group->block.head->released) >= group->waits; }

static bool all_arrived(const Op *op, BellId bell) {
    const Group *group = op->group;
    if (is_released(group)) return true;
    atomic_fetch_or(&group->block.members[group->rank].sleepers, 1u << bell);
    return is_released(group);
}

/* ---- what the members published ---- */

static void publish(const Op *op, int64_t place) {
    Member *mine = &op->group->block.members[op->group->rank];
    mine->descriptor[op->d.number & 1] = op->d;
    mine->place[op->d.number & 1] = place;
}

static void check_agreement(const Op *op) {
    const Group *group = op->group;
    for (int i = 0; i < group->size; i++) {
        const Descriptor *theirs = &group->block.members[i].descriptor[op->d.number & 1];
        if (memcmp(theirs, &op->d, sizeof *theirs) != 0) comm_mismatch(group, i, &op->d, theirs);
    }
}

/* Does this kind read member i's input? */
static bool is_source(const Op *op, int i) { return op->d.kind != OP_BROADCAST || i == op->d.root; }

/* Fills group->pointers with every member's input; false where one lies outside registered memory. */
static bool find_inputs(Op *op) {
    Group *group = op->group;
    for (int i = 0; i < group->size; i++) {
        const Member *member = &group->block.members[i];
        int64_t place = member->place[op->d.number & 1];
        if (is_source(op, i) && place < 0) return false;
        /* An input that is not read has a pointer too, for offsets are added to all. */
        group->pointers[i] = place < 0 ? (void *)op->in : group->comm->peers[group->ranks[i]].memory + place;
    }
    return true;
}

/* ---- the work: on vectors whose parts lie `stride` elements apart ---- */

static bool has_parts_in(const Op *op) { return op->d.kind == OP_REDUCE_SCATTER || op->d.kind == OP_ALL_TO_ALL; }
static bool is_all_reduce(const Op *op) { return op->d.kind == OP_ALL_REDUCE || op->d.kind == OP_HOST_REDUCE; }
static size_t element(const Op *op) { return dtype_size((DType)op->d.dtype); }

/* Elements of input and of the whole operation's input. */
static int64_t input_bytes(const Op *op) {
    return op->d.count * (int64_t)element(op) * (has_parts_in(op) ? op->group->size : 1);
}

/* Slice of `rank` among n elements; whole cache lines, so that two owners never write one. */
static Range slice_of(int64_t n, int size, int rank) {
    int64_t each = round_up(ceil_div(n, size), 64), first = min_i64(n, each * rank);
    return (Range){first, min_i64(n - first, each)};
}

static void offset_pointers(void **to, void *const *from, int n, int64_t bytes) {
    for (int i = 0; i < n; i++) to[i] = (char *)from[i] + bytes;
}

static void copy_counted(const Op *op, char *to, const char *from, int64_t n, int source) {
    size_t bytes = (size_t)n * element(op);
    if (to != from && bytes) memcpy(to, from, bytes);
    if (source != op->group->rank) comm_count_bytes(op->group->comm, (int64_t)bytes);
}

/* Elements [first, first + n) of all inputs' range, summed and written to all of out. */
static void reduce_range(const Op *op, void **out, int n_out, int64_t first, int64_t n) {
    const Group *group = op->group;
    void **in = group->pointers + group->size;
    if (n <= 0) return;
    offset_pointers(in, group->pointers, group->size, first * (int64_t)element(op));
    comm_reduce(out, n_out, (const void *const *)in, group->size, n, (DType)op->d.dtype, (CommOp)op->d.op);
    comm_count_bytes(group->comm, (group->size - 1) * n * (int64_t)element(op));
}

/* Reads [at, at + n) of what every member has at group->pointers, into out + first. For kinds with parts, part
 * k of an input begins at k * stride. */
static void read_inputs(const Op *op, int64_t at, int64_t n, int64_t stride, int64_t first) {
    const Group *group = op->group;
    const int64_t size = (int64_t)element(op), count = op->d.count;
    char *out = op->out + first * size;
    switch (op->d.kind) {
    case OP_ALL_GATHER:
    case OP_HOST_GATHER:
        for (int i = 0; i < group->size; i++) {
            copy_counted(op, out + i * count * size, (char *)group->pointers[i] + at * size, n, i);
        }
        break;
    case OP_ALL_TO_ALL:
        for (int i = 0; i < group->size; i++) {
            const char *part = (char *)group->pointers[i] + (group->rank * stride + at) * size;
            copy_counted(op, out + i * count * size, part, n, i);
        }
        break;
    case OP_BROADCAST:
        if (group->rank != op->d.root)
            copy_counted(op, out, (char *)group->pointers[op->d.root] + at * size, n, op->d.root);
        break;
    case OP_REDUCE_SCATTER: {
        void *to = out;
        reduce_range(op, &to, 1, group->rank * stride + at, n);
        break;
    }
    case OP_ALL_REDUCE:
    case OP_HOST_REDUCE: copy_counted(op, out, (char *)group->pointers[0] + at * size, n, 0); break;
    default: break; /* a barrier reads nothing */
    }
}

/* ---- in place ---- */

/* One piece of the work; true when none is left. */
static bool work_in_place(Op *op) {
    const Group *group = op->group;
    const int64_t piece = round_up(PIECE_BYTES / (int64_t)element(op) / group->size, 64);
    Range mine = {0, op->d.count};
    if (is_all_reduce(op)) mine = slice_of(op->d.count, group->size, group->rank);
    int64_t n = min_i64(piece, mine.count - op->first), at = mine.first + op->first;
    if (n <= 0) return true;
    if (is_all_reduce(op)) {
        /* The owner writes the result into all members' buffers: each line is read and written once. */
        void **out = group->pointers + group->size;
        offset_pointers(out, group->pointers, group->size, at * (int64_t)element(op));
        comm_reduce(out, group->size, (const void *const *)out, group->size, n, (DType)op->d.dtype, (CommOp)op->d.op);
        comm_count_bytes(group->comm, 2 * (group->size - 1) * n * (int64_t)element(op));
    } else {
        read_inputs(op, at, n, op->d.count, at);
    }
    op->first += n;
    return op->first >= mine.count;
}

/* ---- staged ---- */

static char *half_window(const Group *group, int member) {
    return group->block.windows + (2 * member + (int)(group->rounds & 1)) * (int64_t)WINDOW_BYTES;
}

static void find_windows(Op *op) {
    Group *group = op->group;
    for (int i = 0; i < group->size; i++) group->pointers[i] = half_window(group, i);
}

static void fill_window(Op *op) {
    const Group *group = op->group;
    const int64_t size = (int64_t)element(op);
    const int64_t parts = has_parts_in(op) ? group->size : 1;
    int64_t room = WINDOW_BYTES / size / parts;
    if (room > 64) room = room / 64 * 64;
    op->length = min_i64(room, op->d.count - op->first);
    char *window = half_window(group, group->rank);
    if (op->length == 0 || !is_source(op, group->rank)) return;
    for (int64_t k = 0; k < parts; k++) {
        memcpy(window + k * op->length * size, op->in + (k * op->d.count + op->first) * size,
               (size_t)(op->length * size));
    }
}

static bool sums_in_one_shot(const Op *op) {
    return is_all_reduce(op) && op->d.count * (int64_t)element(op) <= ONE_SHOT_BYTES;
}

static void sum_slice(Op *op) {
    const Group *group = op->group;
    Range mine = slice_of(op->length, group->size, group->rank);
    void **out = group->pointers + group->size;
    if (mine.count <= 0) return;
    offset_pointers(out, group->pointers, group->size, mine.first * (int64_t)element(op));
    comm_reduce(out, group->size, (const void *const *)out, group->size, mine.count, (DType)op->d.dtype,
                (CommOp)op->d.op);
    comm_count_bytes(group->comm, 2 * (group->size - 1) * mine.count * (int64_t)element(op));
}

/* ---- waits, the other half: to arrive ---- */

/* Where ranks outnumber cores the sum of a small vector is best made once, by whoever is at work anyway. */
static void sum_for_all(Op *op) {
    const Group *group = op->group;
    check_agreement(op);
    find_windows(op);
    void *out = group->pointers[0];
    reduce_range(op, &out, 1, 0, op->length);
}

static void arrive(Op *op) {
    Group *group = op->group;
    Member *members = group->block.members;
    BlockHead *head = group->block.head;
    group->waits++;
    comm_goes_on(op);
    atomic_store_explicit(&members[group->rank].arrived, group->waits, memory_order_release);
    uint64_t before = atomic_fetch_add(&head->arrivals, 1);
    if (before + 1 < group->waits * (uint64_t)group->size) return;
    if (sums_in_one_shot(op)) sum_for_all(op);
    atomic_store(&head->released, group->waits);
    for (int i = 0; i < group->size; i++) {
        if (i != group->rank) comm_wake(group->comm, group->ranks[i], &members[i].sleepers);
    }
}

/* ---- the state machine ---- */

static void start(Op *op) {
    int64_t bytes = input_bytes(op);
    op->first = 0;
    op->staged = bytes <= (is_all_reduce(op) ? ONE_SHOT_BYTES : STAGE_BYTES);
    bool needed = !op->staged && is_source(op, op->group->rank);
    publish(op, needed ? comm_place(op->group->comm, op->in, bytes) : -1);
    op->state = op->staged ? SHARED_FILL : SHARED_PLACES;
    if (!op->staged) arrive(op);
}

/* After a piece has been read: the next one, or the end. */
static WorkState next_piece(Op *op) {
    op->first += op->length;
    op->group->rounds++;
    op->state = SHARED_FILL;
    if (op->first < op->d.count) return WORK_AGAIN;
    comm_pass_turn(op);
    return WORK_DONE;
}

static WorkState filled(Op *op) {
    if (!op->checked) check_agreement(op);
    op->checked = true;
    find_windows(op);
    if (sums_in_one_shot(op) || !is_all_reduce(op)) {
        read_inputs(op, 0, op->length, op->length, op->first);
        return next_piece(op);
    }
    sum_slice(op);
    arrive(op);
    op->state = SHARED_SUMMED;
    return WORK_AGAIN;
}

WorkState comm_shared_tick(Work *work, BellId bell) {
    Op *op = (Op *)work;
    Group *group = op->group;
    if (op->state == SHARED_START) {
        if (!comm_has_turn(op, bell)) return comm_blocked(op, NULL);
        comm_goes_on(op);
        start(op);
    }
    if (op->state == SHARED_FILL) {
        fill_window(op);
        arrive(op);
        op->state = SHARED_FILLED;
    }
    if (op->state == SHARED_IN_PLACE) {
        if (!work_in_place(op)) return WORK_AGAIN;
        arrive(op);
        op->state = SHARED_LEAVE;
    }
    if (!all_arrived(op, bell)) return comm_blocked(op, is_missing);
    switch (op->state) {
    case SHARED_PLACES:
        check_agreement(op);
        op->checked = true;
        op->staged = !find_inputs(op);
        op->state = op->staged ? SHARED_FILL : SHARED_IN_PLACE;
        return WORK_AGAIN;
    case SHARED_FILLED: return filled(op);
    case SHARED_SUMMED:
        memcpy(op->out + op->first * (int64_t)element(op), half_window(group, group->rank),
               (size_t)op->length * element(op));
        return next_piece(op);
    default: /* SHARED_LEAVE */ comm_pass_turn(op); return WORK_DONE;
    }
}
