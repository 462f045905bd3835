/* run.c - the loop of `trident train`.
 * In: config, data. Out: a trained model in checkpoints, metrics.
 * Invariants: all ranks take the same decisions at the same step; signals set a flag that the ranks
 * agree on at step boundaries; a non-finite state is never saved. */
#include "train/run.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "kernels/kernels.h"
#include "train/evaluate.h"
#include "train/metrics.h"
#include "train/preflight.h"
#include "train/resume.h"
#include "train/trainer.h"

static volatile sig_atomic_t stop_signal;

static bool tells_user; /* rank 0 */

static void on_signal(int signal_number) {
    static const char told[] = "\nstopping after this step; Ctrl-C again ends the run at once, unsaved\n";
    /* A second Ctrl-C does not wait for the save. */
    if (stop_signal == SIGINT && signal_number == SIGINT) _exit(128 + SIGINT);
    if (signal_number == SIGINT && tells_user && write(STDERR_FILENO, told, sizeof told - 1) < 0) {
        /* the terminal is gone: nobody to tell */
    }
    stop_signal = signal_number;
}

static void catch_signals(int rank) {
    static const int stops[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP};
    tells_user = rank == 0;
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) {
        struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, before;
        sigaction(stops[i], &action, &before);
        /* nohup: the run goes on when the terminal closes. */
        if (stops[i] == SIGHUP && before.sa_handler == SIG_IGN) sigaction(SIGHUP, &before, NULL);
    }
    signal(SIGPIPE, SIG_IGN);
}

typedef struct {
    Trainer trainer;
    Prepared *prepared;
    Launch *launch;
    Loader *loader;
    Metrics *metrics;   /* rank 0 only */
    double peak_flops;  /* of all ranks' cores together */
    int64_t mem_bytes;  /* largest plan of all ranks */
    double data_wait_s; /* of the present step */
} Run;

static const Batch *next_batch(void *context, Error *err) {
    Run *run = context;
    double wait_s = 0.0;
    const Batch *batch = loader_next(run->loader, &wait_s, err);
    run->data_wait_s += wait_s;
    return batch;
}

/* The measured multiply-add peak of the cores that this run keeps busy. One rank of each host measures
 * while the others wait, so that they do not take its time. */
static double measure_peak(Run *run, int threads) {
    const Trainer *t = &run->trainer;
    const LaunchCores cores = launch_cores(run->launch);
    double local = 0.0;
    bool leader = true;
    for (int rank = 0; rank < t->grid.rank; rank++) {
        if (strcmp(t->seats[rank].host, t->seats[t->grid.rank].host) == 0) leader = false;
    }
    if (leader) {
        const double busy = (double)min_i64(cores.host, (int64_t)cores.ranks * threads);
        local = kernels_peak_flops(t->config->dtype) / (double)threads * busy;
    }
    if (t->groups.world) comm_host_reduce(t->groups.world, &local, 1, COMM_SUM);
    return local;
}

static void print_start(const Run *run, int threads) {
    const Trainer *t = &run->trainer;
    const Config *c = t->config;
    if (t->grid.rank != 0) return;
    if (t->grid.world_size > 1) {
        grid_print(&t->grid, t->seats, stderr);
        layer_map_print(&t->model.map, stderr);
    }
    config_print_equation(c, stderr);
    if (c->warmup_steps > c->total_steps) {
        log_warn(LOG_TRAIN,
                 "warmup_steps = %" PRId64 " goes on after the last of %" PRId64 " steps: the rate ends at %.3g of "
                 "lr = %.3g",
                 c->warmup_steps, c->total_steps, learning_rate(c, c->total_steps - 1), c->lr);
    }
    log_info(LOG_TRAIN, "%s, %" PRId64 " parameters, %s, %d rank%s (%s) x %d thread%s, kernels: %s",
             c->arch == ARCH_GPT ? "gpt" : "llama", model_parameters(c), dtype_name(c->dtype), t->grid.world_size,
             t->grid.world_size == 1 ? "" : "s", launch_kind(run->launch), threads, threads == 1 ? "" : "s",
             kernels_path());
    log_info(LOG_MEM,
             "rank 0 holds %zu bytes: parameters %zu, gradients %zu, optimizer %zu, activations %zu, "
             "communication %zu, workspace %zu, data %zu",
             arena_planned_bytes(&t->arena), arena_owner_bytes(&t->arena, OWNER_PARAMETERS),
             arena_owner_bytes(&t->arena, OWNER_GRADIENTS), arena_owner_bytes(&t->arena, OWNER_OPTIMIZER),
             arena_owner_bytes(&t->arena, OWNER_ACTIVATIONS), arena_owner_bytes(&t->arena, OWNER_COMMUNICATION),
             arena_owner_bytes(&t->arena, OWNER_WORKSPACE), arena_owner_bytes(&t->arena, OWNER_DATA));
    log_info(LOG_TRAIN, "sequence parallelism %s; no dropout; peak %.1f GFLOP/s measured, %.3f GFLOP a token",
             c->sequence_parallel_on ? "on" : "off", run->peak_flops * 1e-9, model_flops_per_token(c) * 1e-9);
}

/* After the resume, which says where in its corpora the run is. */
static void print_data(const Run *run) {
    const Trainer *t = &run->trainer;
    const Config *c = t->config;
    if (t->grid.rank != 0) return;
    data_print(run->prepared->train, t->samples + max_i64(c->total_steps - t->step, 0) * c->global_batch);
}

static int64_t windows_to_evaluate(const Run *run) {
    const Config *c = run->trainer.config;
    return min_i64(c->eval_batches * c->global_batch, source_windows(run->prepared->valid));
}

/* What would spoil the run, found before anything of it is written. */
static void look_ahead(Run *run) {
    const Trainer *t = &run->trainer;
    const Config *c = t->config;
    const Prepared *p = run->prepared;
    Error err;
    trainer_require(t, preflight_data(t, p->train, "data.train", c->train_data, &err), &err);
    if (p->valid) trainer_require(t, preflight_data(t, p->valid, "data.valid", c->valid_data, &err), &err);
    trainer_require(t, preflight_disk(t, &err), &err);
    if (c->eval_every && t->grid.rank == 0) warn_of_repeats(p->valid, windows_to_evaluate(run));
}

static void open_metrics(Run *run) {
    const Config *c = run->trainer.config;
    Error err;
    if (run->trainer.grid.rank != 0) return;
    run->metrics = metrics_open(c->log_dir, run->trainer.step, c->log_every, c->tensorboard, &err);
    if (!run->metrics) die(EXIT_CONFIG, "log.dir = %s: %s", c->log_dir, err.message);
    char *text = config_text(c), *path = xasprintf("%s/config.ini", c->log_dir);
    if (file_write_atomic(path, text, strlen(text), &err, EXIT_CONFIG) != 0) die_error(&err);
    free(text);
    free(path);
}

static void note(Run *run, const char *text) {
    if (run->metrics) metrics_note(run->metrics, "%s", text);
}

static void save(Run *run) {
    Trainer *t = &run->trainer;
    Error err;
    const double start_s = clock_s();
    launch_watch_phase("saving", t->step);
    if (save_run(t, run->prepared->train, &err) != 0) launch_die_together(&err);
    if (!run->metrics) return;
    char *text = xasprintf("saved %s/step-%08" PRId64 " in %.2f s", t->config->checkpoint_dir, t->step,
                           clock_s() - start_s);
    note(run, text);
    free(text);
}

static bool asked_to_stop(void) { return stop_signal != 0; }

static bool evaluation_due(const Run *run) {
    const Config *c = run->trainer.config;
    const Trainer *t = &run->trainer;
    if (!run->prepared->valid || !c->eval_every) return false;
    return t->step % c->eval_every == 0 || t->step == c->total_steps;
}

static Evaluation evaluate(Run *run) {
    if (!evaluation_due(run)) return (Evaluation){.loss = NAN};
    return evaluate_windows(&run->trainer, run->prepared->valid, windows_to_evaluate(run), asked_to_stop);
}

/* A step that changed nothing: says so, and stops the run where that goes on and on. */
static void check_skipped(Run *run, const StepResult *r) {
    const Trainer *t = &run->trainer;
    if (!r->skipped) return;
    if (run->metrics) {
        metrics_note(run->metrics,
                     "step %" PRId64 " skipped on all ranks: loss %g, gradient norm %g, %" PRId64 " unmasked tokens",
                     t->step, r->loss, r->grad_norm, r->tokens);
    }
    if (t->skipped_in_row >= t->config->max_skipped) {
        Error err;
        error_set(&err, EXIT_NUMBERS,
                  "%" PRId64 " steps in a row were skipped (last loss %g, gradient norm %g); "
                  "optimizer.max_skipped = %" PRId64 ". The last checkpoint is as it was",
                  t->skipped_in_row, r->loss, r->grad_norm, t->config->max_skipped);
        launch_die_together(&err);
    }
}

static void report(Run *run, const StepResult *r, double step_s, double valid_loss) {
    const Trainer *t = &run->trainer;
    const Config *c = t->config;
    if (!run->metrics) return;
    const double step_tokens = (double)(c->global_batch * c->seq_len);
    const StepMetrics row = {.step = t->step,
                             .total_steps = c->total_steps,
                             .loss = r->loss,
                             .grad_norm = r->grad_norm,
                             .lr = r->lr,
                             .tokens = t->tokens,
                             .tokens_per_s = step_tokens / step_s,
                             .step_ms = 1e3 * step_s,
                             .data_wait_ms = 1e3 * run->data_wait_s,
                             .mfu = model_flops_per_token(c) * step_tokens / step_s / run->peak_flops,
                             .mem_bytes = run->mem_bytes,
                             .skipped = t->skipped,
                             .valid_loss = valid_loss};
    metrics_step(run->metrics, &row);
}

/* True where the run was asked to stop. */
static bool run_one_step(Run *run, const BatchSource *source) {
    Trainer *t = &run->trainer;
    const Config *c = t->config;
    const double start_s = clock_s();
    run->data_wait_s = 0.0;
    launch_watch_deadline(c->timeout_s);
    const StepResult r = trainer_step(t, source, stop_signal != 0);
    const double step_s = clock_s() - start_s;
    check_skipped(run, &r);
    const Evaluation e = r.stop ? (Evaluation){.loss = NAN} : evaluate(run);
    report(run, &r, step_s, e.loss);
    const bool stop = r.stop || e.stopped;
    const bool due = c->checkpoint_every && t->step % c->checkpoint_every == 0;
    launch_watch_deadline(0.0);
    if (stop && isnan(e.loss) && evaluation_due(run)) {
        char *text = xasprintf("asked to stop: the validation loss of step %" PRId64 " is left out", t->step);
        note(run, text);
        free(text);
    }
    if (stop || due || t->step == c->total_steps) save(run);
    return stop && t->step < c->total_steps;
}

static int run_steps(Run *run) {
    Trainer *t = &run->trainer;
    const Config *c = t->config;
    const BatchSource source = {.next = next_batch, .context = run};
    bool stopped = false;
    run->loader = loader_start(run->prepared->train, c->micro_batch, c->global_batch, t->grid.size[DIM_DATA],
                               t->grid.index[DIM_DATA], t->samples);
    while (t->step < c->total_steps && !stopped) stopped = run_one_step(run, &source);
    loader_stop(run->loader);
    if (!stopped) return EXIT_DONE;
    note(run,
         strcmp(c->resume, "auto") == 0
             ? "stopped by a signal after saving; the same command goes on from here"
             : "stopped by a signal after saving; with checkpoint.resume = auto the same command goes on from here");
    return EXIT_STOPPED;
}

static void gather_memory(Run *run) {
    double bytes = (double)arena_planned_bytes(&run->trainer.arena);
    double all = bytes;
    if (run->trainer.groups.world) {
        comm_host_reduce(run->trainer.groups.world, &bytes, 1, COMM_MAX);
        comm_host_reduce(run->trainer.groups.world, &all, 1, COMM_SUM);
    }
    run->mem_bytes = (int64_t)bytes;
    log_info(LOG_MEM, "all ranks together hold %.0f bytes, the largest of them %.0f", all, bytes);
}

/* A length in tokens counts those of before too, whatever batches they came in. */
static void count_steps_left(Run *run) {
    const Trainer *t = &run->trainer;
    Config *c = &run->prepared->config;
    if (!c->tokens) return;
    const int64_t end = t->step + ceil_div(max_i64(c->tokens - t->tokens, 0), c->global_batch * c->seq_len);
    if (end != c->total_steps && end > t->step) {
        log_info(LOG_TRAIN, "with the batches of before, train.tokens = %" PRId64 " is reached after step %" PRId64,
                 c->tokens, end);
    }
    c->total_steps = end;
}

/* Nothing is left to train. A run that was resumed from elsewhere is saved in its own directory, in the
 * present layout. */
static int finished(Run *run) {
    const Config *c = run->trainer.config;
    log_info(LOG_TRAIN, "the run is finished: step %" PRId64 " of %" PRId64 "; raise train.%s to go on",
             run->trainer.step, c->total_steps, c->tokens ? "tokens" : "steps");
    if (strcmp(c->resume, "auto") != 0) {
        look_ahead(run);
        save(run);
        log_info(LOG_CKPT, "saved in this layout in %s", c->checkpoint_dir);
    }
    return EXIT_DONE;
}

static int train(Run *run) {
    look_ahead(run);
    open_metrics(run);
    int status = run_steps(run);
    if (run->metrics) metrics_close(run->metrics);
    return status;
}

int run_training(Prepared *prepared, Launch *launch) {
    const Config *c = &prepared->config;
    Run run = {.prepared = prepared, .launch = launch};
    catch_signals(launch_rank(launch));
    const int threads = rank_threads(c, launch);
    kernels_init(threads);
    const CommOptions options = {.timeout_s = c->timeout_s};
    Comm *comm = comm_create(launch, &options);
    trainer_create(&run.trainer, c, launch, comm, true, false);
    run.peak_flops = measure_peak(&run, threads);
    print_start(&run, threads);
    gather_memory(&run);
    resume_run(&run.trainer, prepared->train);
    count_steps_left(&run);
    print_data(&run);
    int status = run.trainer.step < c->total_steps ? train(&run) : finished(&run);
    launch_finish(launch);
    trainer_destroy(&run.trainer);
    comm_destroy(comm);
    return status;
}
