/* resume.h - which checkpoint a run continues from, and whether it may. */
#ifndef TRIDENT_TRAIN_RESUME_H
#define TRIDENT_TRAIN_RESUME_H

#include "data/source.h"
#include "parallel/comm.h"
#include "train/config.h"
#include "train/trainer.h"

/* Where the present blend of corpora began: what data_set_base was given last. */
typedef struct {
    int64_t first_sample;
    int n;              /* corpora */
    int64_t *counters;  /* owned */
} BlendBase;

/* Continues from what checkpoint.resume says: fills the trainer's state and steps, the data source's
 * position and the blend's base. Rank 0 looks for the checkpoint, all ranks use what it found. Prints what
 * it does. Dies with EXIT_CHECKPOINT where the checkpoint is damaged or the config may not continue it. */
void resume_run(Trainer *trainer, DataSource *source, BlendBase *base);

/* Saves step trainer->step; on all ranks. 0, or -1 with err. */
int save_run(Trainer *trainer, const DataSource *source, const BlendBase *base, double last_loss, Error *err);

void blend_base_free(BlendBase *base);

#endif
