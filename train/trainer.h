/* trainer.h - one rank of a run: grid, communication, memory, model, pipeline, optimizer, and the step. */
#ifndef TRIDENT_TRAIN_TRAINER_H
#define TRIDENT_TRAIN_TRAINER_H

#include "base/arena.h"
#include "parallel/comm.h"
#include "parallel/grid.h"
#include "parallel/schedule.h"
#include "train/checkpoint.h"
#include "train/model.h"
#include "train/optimizer.h"
#include "train/pipeline.h"

typedef struct {
    const Config *config;
    Grid grid;
    Seat *seats; /* (world_size), owned; NULL for a trainer of one rank */
    Comm *comm;  /* NULL: one rank */
    Groups groups;
    Stream *lanes[LANE_COUNT];
    Schedule schedule;
    Arena arena;
    Model model;
    Optimizer optimizer;
    Pipeline pipeline;
    int32_t *eval_batch;   /* a micro-batch of held-out windows; NULL: the config names none */
    int64_t step, skipped; /* steps done, and how many of them changed nothing */
    int64_t skipped_in_row;
    int64_t samples, tokens; /* that these steps took: of all sizes that the batch had */
    double last_loss;        /* of the last step that was not skipped; NAN: there was none */
} Trainer;

typedef struct {
    double loss;      /* mean over the unmasked tokens of the global batch */
    double grad_norm; /* of the mean gradient, before clipping */
    double lr;
    int64_t tokens; /* unmasked */
    bool skipped;   /* non-finite, or no unmasked token: nothing was changed, on any rank */
    bool stop;      /* some rank was asked to stop */
} StepResult;

/* Joins the launch's ranks into the grid of the config (placed on the hosts that are there), plans and
 * takes the memory, initialises parameters. comm: NULL for a trainer of one rank beside others
 * (launch is not used then). guarded: canaries in the arena (tests). training: with gradients and
 * optimizer. Dies where it cannot. */
void trainer_create(Trainer *trainer, const Config *config, Launch *launch, Comm *comm, bool training, bool guarded);
void trainer_destroy(Trainer *trainer);

/* What all ranks do at the same point and some may have failed at: where rc is not 0 on one of them, the run ends
 * on all with the error of the first of these, said once. */
void trainer_require(const Trainer *trainer, int rc, Error *err);

/* One optimizer step over the global batch. stop_requested: this rank was asked to stop. */
StepResult trainer_step(Trainer *trainer, const BatchSource *source, bool stop_requested);
typedef struct {
    double loss;    /* mean over the unmasked tokens, NAN where there are none */
    int64_t tokens; /* unmasked */
    bool stopped;   /* some rank was asked to stop: loss is NAN */
} Evaluation;

/* Looks at n micro-batches of every data rank. asked_to_stop (may be NULL): asked after each share of a global
 * batch; train.timeout holds for each of these, not for all of them together. */
Evaluation trainer_evaluate(Trainer *trainer, const BatchSource *source, int64_t n, bool (*asked_to_stop)(void));

/* What this rank holds of the run's state, for checkpoint_save and checkpoint_load. Caller frees the
 * list with trainer_pieces_free. with_optimizer: also moments. */
CheckpointPiece *trainer_pieces(const Trainer *trainer, bool with_optimizer, int *n);
void trainer_pieces_free(CheckpointPiece *pieces, int n);

/* Parameters and optimizer state of all ranks are finite: 0, or -1 on all ranks with err (EXIT_NUMBERS), which names
 * the tensor where it is. */
int trainer_check_finite(const Trainer *trainer, Error *err);

/* Compares what must be the same on several ranks (parameters over data ranks, unsplit tensors over
 * tensor ranks, tied copies) by checksum. -1 with err naming the first tensor and rank that differ. */
int trainer_check_replicas(Trainer *trainer, Error *err);

#endif
