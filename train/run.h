/* run.h - a training run from its first to its last step: resume, steps, evaluation, saving, stopping. */
#ifndef TRIDENT_TRAIN_RUN_H
#define TRIDENT_TRAIN_RUN_H

#include "data/source.h"
#include "parallel/comm.h"
#include "train/config.h"

/* Everything that a command needs before it touches devices or peers. */
typedef struct {
    Config config;
    DataSource *train, *valid; /* NULL where not opened */
} Prepared;

/* Loads and resolves the config (world and vocabulary included). Prints all errors; dies with EXIT_CONFIG or
 * EXIT_DATA. with_train: opens data.train, which must be set; with_valid: data.valid where it is. */
void prepare(Prepared *prepared, const char *path, char *const *overrides, int n_overrides, bool with_train,
             bool with_valid);
void prepared_free(Prepared *prepared);

/* Starts the ranks: returns in each of them. */
Launch *ranks_start(const Config *config);
/* Threads of this rank: train.threads, else its share of the cores that it may run on. On all ranks at once. */
int rank_threads(const Config *config, Launch *launch);

/* `trident train`, on each rank after ranks_start: exit status. */
int run_training(Prepared *prepared, Launch *launch);

#endif
