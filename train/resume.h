/* resume.h - which checkpoint a run continues from, and whether it may. */
#ifndef TRIDENT_TRAIN_RESUME_H
#define TRIDENT_TRAIN_RESUME_H

#include "data/source.h"
#include "parallel/comm.h"
#include "train/config.h"
#include "train/trainer.h"

/* Continues from what checkpoint.resume says: fills the trainer's state and steps, and the data source's
 * position. Rank 0 looks for the checkpoint, all ranks use what it found. Prints what
 * it does. Dies with EXIT_CHECKPOINT where the checkpoint is damaged or the config may not continue it. */
void resume_run(Trainer *trainer, DataSource *source);

/* The newest checkpoint in dir, or dir where it is one, on all ranks; rank 0 looks, as a run may be writing there. NULL
 * where there is none; dies instead where it is `named`: words before dir in the message. Caller frees. */
char *resume_find(const Trainer *trainer, const char *dir, const char *named);

/* Dies where the checkpoint's model has other settings than the config's: a model of other heads or another base of
 * RoPE would take the same arrays and compute something else. */
void resume_check_model(const Trainer *trainer, const CheckpointState *state, const char *step_dir);

/* Saves step trainer->step; on all ranks. 0, or -1 with err. */
int save_run(Trainer *trainer, const DataSource *source, Error *err);

#endif
