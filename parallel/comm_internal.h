/* comm_internal.h - what the files comm*.c of the CPU platform share.
 *
 * comm.c          the interface: checks, numbers and queues operations; host values
 * comm_setup.c    who shares a host; maps the peers' memory; groups find their shared block
 * comm_shared.c   collectives of groups whose ranks share a host
 * comm_message.c  messages between two ranks of a host
 * comm_tcp.c      messages between hosts
 * comm_mixed.c    collectives of groups that span hosts, made of messages
 * comm_reduce.c   sums and maxima in rank order
 *
 * Rank r of a host owns a Control (shared, mapped by its local peers): its list of blocks. The first
 * local member of a group makes the group's Block there: arrival counter, descriptors, windows for
 * buffers that lie outside the registered memory. One collective of a group runs at a time in a rank,
 * in the order of issue; messages from one rank of a group to another likewise. */
#ifndef TRIDENT_PARALLEL_COMM_INTERNAL_H
#define TRIDENT_PARALLEL_COMM_INTERNAL_H

#include <pthread.h>

#include "base/check.h"
#include "base/device_cpu.h"
#include "parallel/comm.h"

enum {
    WINDOW_BYTES = 256 << 10,        /* staging: one half window of a member, for collectives */
    PAIR_WINDOW_BYTES = 64 << 10,    /* staging: from one member to another, for messages */
    ONE_SHOT_BYTES = 16 << 10,       /* all_reduce: up to here one member sums everything, with one wait */
    STAGE_BYTES = 32 << 10,          /* others: up to here staging saves a wait and so beats working in place */
    MESSAGE_CHUNK_BYTES = 256 << 10, /* groups that span hosts: a piece of a slice */
    BLOCKS_MAX = 256                 /* groups that one rank can be the first local member of */
};

typedef enum {
    OP_ALL_REDUCE,
    OP_REDUCE_SCATTER,
    OP_ALL_GATHER,
    OP_BROADCAST,
    OP_ALL_TO_ALL,
    OP_BARRIER,
    OP_HOST_REDUCE,
    OP_HOST_GATHER,
    OP_MESSAGE,
    OP_COUNT
} OpKind;

/* What ranks must agree on. */
typedef struct {
    uint64_t number; /* operation of the group; message from one rank to another */
    int64_t count;   /* elements, of each rank's part where the result has parts */
    uint8_t kind, dtype, op, zero;
    int32_t root;
} Descriptor;

/* ---- in shared memory ---- */

/* One member's words in a block. */
typedef struct {
    _Atomic uint64_t arrived;  /* waits of the group that this member has come to */
    _Atomic uint32_t sleepers; /* bit mask of BellId: threads that wait for the group */
    int32_t rank;
    Descriptor descriptor[2]; /* by the parity of the operation's number */
    int64_t place[2];         /* of the input in the registered memory; -1: elsewhere */
    char rest[128 - 16 - 2 * sizeof(Descriptor) - 16];
} Member;
_Static_assert(sizeof(Member) == 128, "whole pairs of cache lines");

/* Messages from one member to another, one at a time. */
typedef struct {
    _Atomic uint64_t posted, taken, wanted;          /* numbers of messages, plus one */
    _Atomic uint64_t pieces_posted, pieces_taken;    /* through the window */
    _Atomic uint32_t sender_sleeps, receiver_sleeps; /* bit masks of BellId */
    Descriptor sent;
    int64_t place; /* in the sender's registered memory; -1: through the window */
    char rest[128 - 48 - sizeof(Descriptor) - 8];
} Pair;
_Static_assert(sizeof(Pair) == 128, "whole pairs of cache lines");

typedef struct {
    _Atomic uint64_t arrivals; /* of all members, at all waits */
    _Atomic uint64_t released; /* waits that are over */
    char rest[112];
} BlockHead;

typedef struct {
    _Atomic uint64_t key; /* set last; 0: free */
    int64_t offset, bytes;
} BlockEntry;

typedef struct {
    _Atomic uint32_t ended; /* this rank has left in order */
    BlockEntry blocks[BLOCKS_MAX];
} Control; /* the blocks themselves lie behind it */

/* ---- of this process ---- */

typedef struct Connection Connection;
typedef struct Net Net;
typedef struct Message Message;
typedef struct Op Op;

typedef struct {
    bool local; /* on this host */
    int socket; /* local peers: its end shows the peer's */
    Bells *bells;
    int event_fd;
    Control *control;
    int control_fd;
    char *memory; /* registered */
    int64_t memory_bytes;
    Connection *connection; /* remote peers */
} Peer;

struct Comm {
    CommOptions options;
    int rank, size, generation;
    Peer *peers; /* (size), this rank's own too */
    DeviceMemory control;
    int64_t control_used;
    int n_blocks;
    char **hosts; /* (size) names, for messages */
    Group *world, *groups;
    Net *net;             /* NULL: all ranks are on this host */
    pthread_mutex_t lock; /* free_ops */
    Op *free_ops;
    bool grouping; /* between comm_begin and comm_end */
    Op *collected, **collected_end;
    Stream *inline_stream; /* for host values */
    _Atomic int64_t bytes;
};

/* A group's shared block as this process sees it. */
typedef struct {
    char *base;
    int64_t bytes;
    BlockHead *head;
    Member *members;       /* (n_local) */
    Pair *pairs[2];        /* (n_local, n_local) [from][to]; 0: messages of the user, 1: of collectives */
    char *windows;         /* (n_local, 2, WINDOW_BYTES) */
    char *pair_windows[2]; /* (n_local, n_local, PAIR_WINDOW_BYTES) */
} Block;

struct Group {
    Comm *comm;
    Group *next;
    char *name;
    uint64_t key;
    int size, rank, *ranks;
    bool shared;               /* all members are on this host */
    int n_local, *local_index; /* (size), -1: on another host */
    Block block;
    uint64_t issued;       /* collectives */
    _Atomic uint64_t turn; /* collectives done by this rank */
    _Atomic uint32_t turn_sleepers;
    uint64_t waits, rounds;          /* that this rank has come to, of the collective whose turn it is */
    uint64_t *sent[2], *received[2]; /* (size) messages issued; [1]: of collectives */
    void **pointers;                 /* (2 size) scratch of the collective whose turn it is */
    Message *messages;               /* (2 size), where the group spans hosts */
    char *chunks;                    /* (size, MESSAGE_CHUNK_BYTES) */
};

/* A message, on its way from one member to another. */
struct Message {
    Group *group;
    int peer, lane;  /* lane: 0 of the user, 1 of a collective */
    uint64_t number; /* among the messages of the lane from the sender to the receiver */
    bool is_send;
    Descriptor d; /* of the message itself, or of the collective */
    char *data;
    int64_t bytes, done_bytes;
    int state;
    Message *next; /* comm_tcp.c */
};

struct Op {
    Work work;
    Group *group;
    Descriptor d;
    const char *in;
    char *out;
    int state;
    bool staged, checked;
    int64_t first, length; /* elements: done, in this round */
    int n_messages;
    Message message;     /* OP_MESSAGE */
    Op *children, *next; /* messages that proceed together */
    Stream *stream;
};

/* ---- comm.c ---- */
const char *comm_op_name(int kind);
/* "all_reduce of 1000 f32 (sum) as operation 17 of group tensor". */
void comm_describe(char *text, size_t capacity, const Group *group, const Descriptor *d);
void comm_mismatch(const Group *group, int peer, const Descriptor *mine, const Descriptor *theirs)
    __attribute__((noreturn));
/* Called where a tick is blocked: starts the deadline, or dies when it has passed. missing(op, index):
 * does the operation wait for that member? NULL: it waits for earlier operations of this rank. */
WorkState comm_blocked(Op *op, bool (*missing)(const Op *op, int index));
/* The next wait gets a deadline of its own. */
static inline void comm_goes_on(Op *op) { op->work.deadline_s = 0; }
/* The collective's turn among those of its group. */
bool comm_has_turn(Op *op, BellId bell);
void comm_pass_turn(Op *op);
/* Wakes the threads of `rank` in the mask, and clears it. */
void comm_wake(Comm *comm, int rank, _Atomic uint32_t *sleepers);
static inline void comm_count_bytes(Comm *comm, int64_t bytes) {
    atomic_fetch_add_explicit(&comm->bytes, bytes, memory_order_relaxed);
}

/* ---- comm_setup.c ---- */
void comm_connect(Comm *comm, Launch *launch);
void comm_disconnect(Comm *comm);
void comm_share_memory(Comm *comm, const DeviceMemory *memory);
/* Finds or makes the group's block; sets block, n_local, local_index. */
void comm_open_block(Group *group);
/* Offset of [buffer, buffer + bytes) in the registered memory, or -1. */
int64_t comm_place(const Comm *comm, const void *buffer, int64_t bytes);

/* ---- comm_shared.c, comm_mixed.c: tick functions ---- */
WorkState comm_shared_tick(Work *work, BellId bell);
WorkState comm_mixed_tick(Work *work, BellId bell);

/* ---- comm_message.c ---- */
WorkState comm_message_tick(Message *message, BellId bell);
/* Op of kind OP_MESSAGE; and one with children. */
WorkState comm_message_op_tick(Work *work, BellId bell);
WorkState comm_messages_op_tick(Work *work, BellId bell);

/* ---- comm_tcp.c ---- */
Net *net_create(Comm *comm);
void net_free(Net *net);
/* Takes the connected socket over. */
Connection *net_add(Net *net, int rank, int fd);
/* Reads and writes what can be now. Progress thread only. */
void net_pump(Net *net);
WorkState net_message_tick(Message *message);

/* ---- comm_reduce.c ---- */
/* out[j][i] = in[0][i] op in[1][i] op ..., in that order, for i < count; in fp32 (f64: fp64, i32: modulo
 * 2^32). An out may be an in. NaN is larger than any number. */
void comm_reduce(void *const *out, int n_out, const void *const *in, int n_in, int64_t count, DType dtype, CommOp op);

typedef void (*CommReduce)(void *const *out, int n_out, const void *const *in, int n_in, int64_t count);
typedef CommReduce CommReduceTable[DT_COUNT][2]; /* [dtype][op] */
extern const CommReduceTable comm_reduce_portable;
extern const CommReduceTable comm_reduce_avx2; /* x86-64 only; needs AVX2 */

#endif
