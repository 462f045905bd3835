/* comm.h - collectives and point-to-point messages between ranks.
 *
 * counts are elements, never bytes. An operation on a STREAM_COMPUTE stream runs at the call and
 * is complete at return; on a STREAM_COMM stream it is queued behind the stream's earlier work.
 * Operations of one group must be issued in the same order by all its members: each carries its
 * sequence number, kind, count and dtype, and ranks that disagree stop with both sides named. Every
 * wait has the deadline given to comm_create; a lost peer ends the wait at once (EXIT_PEER_LOST).
 * Reductions are accumulated in rank order, in fp32 (fp64 for DT_F64): the same bits on every rank.
 * Buffers inside the memory registered with comm_register are used in place; others are staged.
 * A group of one rank communicates nothing (reduce_scatter and all_gather copy where buffers differ).
 * An operation that is complete leaves its buffers to the caller: no peer still reads or writes them.
 * Collectives of one group run one after the other, in the order of issue, whatever their streams; so do
 * messages from one rank to another within a group. Messages and collectives do not wait for each other,
 * nor do groups. All calls come from one thread at a time. */
#ifndef TRIDENT_PARALLEL_COMM_H
#define TRIDENT_PARALLEL_COMM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/device.h"
#include "base/types.h"
#include "parallel/launch.h"

typedef struct Comm Comm;
typedef struct Group Group;

typedef enum { COMM_SUM, COMM_MAX } CommOp;

typedef struct {
    double timeout_s; /* deadline of every wait, 0: none */
    bool strict;      /* tests: sends have no buffer at all, they complete when the receiver took them (the CPU
                       * platform never has one) */
    bool force_tcp;   /* tests: TCP also between ranks of one host */
} CommOptions;

/* Collective over all ranks of the launch. */
Comm *comm_create(Launch *launch, const CommOptions *options);
/* The memory whose buffers communicate in place (the arena): read and written by the peers of this host from
 * then on, until comm_destroy. Collective over all ranks; at most once. */
void comm_register(Comm *comm, const DeviceMemory *memory);
/* ranks in group order. Called by the members only; members that share several groups make them in the same
 * order. name shows in errors. Lives until comm_destroy. */
Group *comm_group(Comm *comm, const char *name, const int *ranks, int n);
/* The group of all ranks of the launch. */
Group *comm_world(Comm *comm);
int group_size(const Group *group);
int group_rank(const Group *group);
/* Each rank when all its operations are complete (streams waited for); no communication. The peers may still be
 * at work among themselves. The launch may be finished already. */
void comm_destroy(Comm *comm);

void comm_all_reduce(Group *group, void *buffer, int64_t count, DType dtype, CommOp op, Stream *stream);
/* in: (size, count_per_rank); out: (count_per_rank), may be this rank's part of in. */
void comm_reduce_scatter(Group *group, void *out, const void *in, int64_t count_per_rank, DType dtype, CommOp op,
                         Stream *stream);
/* out: (size, count_per_rank); in may be this rank's part of out. */
void comm_all_gather(Group *group, void *out, const void *in, int64_t count_per_rank, DType dtype, Stream *stream);
void comm_broadcast(Group *group, void *buffer, int64_t count, DType dtype, int root, Stream *stream);
/* in, out: (size, count_per_rank); different buffers. */
void comm_all_to_all(Group *group, void *out, const void *in, int64_t count_per_rank, DType dtype, Stream *stream);
void comm_barrier(Group *group, Stream *stream);
/* peer: index in the group. */
void comm_send(Group *group, int peer, const void *buffer, int64_t count, DType dtype, Stream *stream);
void comm_recv(Group *group, int peer, void *buffer, int64_t count, DType dtype, Stream *stream);
/* Sends and receives between begin and end on one stream proceed together, in any order. No collectives between. */
void comm_begin(Comm *comm);
void comm_end(Comm *comm);

/* Host values, done at return: doubles summed or maximised in rank order over the group. */
void comm_host_reduce(Group *group, double *values, int n, CommOp op);
/* Gathers each rank's bytes to all: result owned by the caller, lengths[size]. Any length. */
void *comm_host_gather(Group *group, const void *mine, int64_t bytes, int64_t *lengths);
/* The outcome of work that all ranks did: 0 where rc is 0 on each of them, else -1 on all, with the error of the first
 * rank that has one in err. group NULL: one rank. */
int comm_agree(Group *group, int rc, Error *err);

/* So many operations may be under way at once without allocation. */
void comm_reserve(Comm *comm, int n);
/* Bytes of windows and buffers that this rank holds for its groups, as far as operations on registered memory use
 * them; to be asked when all groups are made. */
int64_t comm_held_bytes(const Comm *comm);
/* Bytes this rank has sent or read from peers since the start. */
int64_t comm_bytes(const Comm *comm);

#endif
