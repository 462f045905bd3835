/* loader.c - reads a rank's micro-batches ahead, on one thread.
 *
 * In: a DataSource and this rank's place among the data ranks.  Out: micro-batches, in order.
 * Invariants: buffers are made at the start and none later. Micro-batch j lies in slot j % SLOTS; the caller
 * uses taken - 1, those from taken to made - 1 are ready, and the thread writes made, which is kept less
 * than SLOTS away from taken - 1. An error ends the thread and is given to the caller when its turn comes,
 * behind the batches read before it. */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/types.h"
#include "data/source.h"

enum { SLOTS = 4 };
/* A read that takes this long is reported, and this long is given up. */
static const double WARN_S = 20.0, LIMIT_S = 600.0;
/* Waiting for more than this share of the time, over at least this long, is reported. */
static const double SLOW_SHARE = 0.25, SLOW_WINDOW_S = 4.0, SLOW_EVERY_S = 300.0;

struct Loader {
    const DataSource *source;
    int64_t micro_batch, global_batch, seq_len, first_sample;
    int data_size, data_rank;
    Batch slots[SLOTS];
    int32_t *memory;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* any of the fields below */
    int64_t made, taken;    /* micro-batches that the thread finished; that the caller got */
    bool stop, failed;
    Error err;
    double window_start_s, window_wait_s, last_slow_warning_s; /* caller's own */
};

/* Global sample of sequence i of micro-batch j. */
static int64_t sample_of(const Loader *loader, int64_t j, int64_t i) {
    int64_t in_step = loader->global_batch / (loader->micro_batch * loader->data_size);
    int64_t step_first = loader->first_sample + j / in_step * loader->global_batch;
    return step_first + ((j % in_step) * loader->data_size + loader->data_rank) * loader->micro_batch + i;
}

static void *read_ahead(void *argument) {
    Loader *loader = argument;
    Error err;
    int rc = 0;
    pthread_mutex_lock(&loader->mutex);
    while (!loader->stop && rc == 0) {
        /* The caller still uses the batch that it got last. */
        if (loader->made - loader->taken >= SLOTS - 1) {
            pthread_cond_wait(&loader->changed, &loader->mutex);
            continue;
        }
        int64_t j = loader->made;
        pthread_mutex_unlock(&loader->mutex);
        Batch *batch = &loader->slots[j % SLOTS];
        for (int64_t i = 0; rc == 0 && i < loader->micro_batch; i++) {
            int64_t at = i * loader->seq_len;
            rc = data_sample(loader->source, sample_of(loader, j, i), batch->tokens + at, batch->targets + at,
                             batch->positions + at, batch->doc_start + at, &err);
        }
        pthread_mutex_lock(&loader->mutex);
        if (rc == 0) loader->made++;
        pthread_cond_broadcast(&loader->changed);
    }
    if (rc != 0) {
        loader->failed = true;
        loader->err = err;
        pthread_cond_broadcast(&loader->changed);
    }
    pthread_mutex_unlock(&loader->mutex);
    return NULL;
}

/* Signals are for the main thread. */
static int start_thread(Loader *loader) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&loader->thread, NULL, read_ahead, loader);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

int64_t batch_bytes(int64_t micro_batch, int64_t seq_len) {
    return 4 * micro_batch * seq_len * (int64_t)sizeof(int32_t);
}

Batch batch_in(int32_t *memory, int64_t micro_batch, int64_t seq_len) {
    const int64_t elements = micro_batch * seq_len;
    return (Batch){.sequences = micro_batch,
                   .tokens = memory,
                   .targets = memory + elements,
                   .positions = memory + 2 * elements,
                   .doc_start = memory + 3 * elements};
}

int64_t loader_bytes(int64_t micro_batch, int64_t seq_len) { return SLOTS * batch_bytes(micro_batch, seq_len); }

Loader *loader_start(const DataSource *source, int64_t micro_batch, int64_t global_batch, int data_size, int data_rank,
                     int64_t first_sample) {
    REQUIRE(micro_batch > 0 && data_size > 0 && data_rank >= 0 && data_rank < data_size);
    div_exact(global_batch, micro_batch * data_size);
    Loader *loader = xcalloc(1, sizeof *loader);
    *loader = (Loader){.source = source,
                       .micro_batch = micro_batch,
                       .global_batch = global_batch,
                       .seq_len = data_seq_len(source),
                       .first_sample = first_sample,
                       .data_size = data_size,
                       .data_rank = data_rank};
    int64_t elements = micro_batch * loader->seq_len;
    loader->memory = xcalloc(1, (uint64_t)loader_bytes(micro_batch, loader->seq_len));
    for (int s = 0; s < SLOTS; s++) {
        loader->slots[s] = batch_in(loader->memory + s * 4 * elements, micro_batch, loader->seq_len);
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&loader->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&loader->mutex, NULL);
    loader->window_start_s = clock_s();
    loader->last_slow_warning_s = -SLOW_EVERY_S;
    int rc = start_thread(loader);
    if (rc != 0) die(EXIT_LAUNCH, "cannot start the thread that reads data: %s", strerror(rc));
    return loader;
}

/* Waits at most a second. Mutex held. */
static void wait_a_second(Loader *loader) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec++;
    pthread_cond_timedwait(&loader->changed, &loader->mutex, &until);
}

/* A training that is held up by its data says so, rather than looking like a slow network. */
static void note_wait(Loader *loader, double wait_s) {
    double now = clock_s(), window_s = now - loader->window_start_s;
    loader->window_wait_s += wait_s;
    if (window_s < SLOW_WINDOW_S) return;
    if (loader->window_wait_s > SLOW_SHARE * window_s && now - loader->last_slow_warning_s >= SLOW_EVERY_S) {
        log_warn(LOG_DATA,
                 "training waits for the data loader: %.1f of the last %.1f s; the token files (%s%s) are read "
                 "too slowly",
                 loader->window_wait_s, window_s, data_corpus_path(loader->source, 0),
                 data_corpora(loader->source) > 1 ? ", ..." : "");
        loader->last_slow_warning_s = now;
    }
    loader->window_start_s = now;
    loader->window_wait_s = 0;
}

const Batch *loader_next(Loader *loader, double *wait_s, Error *err) {
    double start = clock_s(), warned = start;
    const Batch *batch = NULL;
    pthread_mutex_lock(&loader->mutex);
    while (loader->made == loader->taken && !loader->failed) {
        wait_a_second(loader);
        double now = clock_s();
        if (now - start > LIMIT_S) break;
        if (now - warned > WARN_S) {
            log_warn(LOG_DATA, "the data loader has not answered for %.0f s (reading %s)", now - start,
                     data_corpus_path(loader->source, 0));
            warned = now;
        }
    }
    if (loader->made > loader->taken) {
        batch = &loader->slots[loader->taken++ % SLOTS];
        pthread_cond_broadcast(&loader->changed);
    } else if (loader->failed) {
        *err = loader->err;
    } else {
        error_set(err, EXIT_HANG, "the data loader has not answered for %.0f s (reading %s): the file system hangs",
                  LIMIT_S, data_corpus_path(loader->source, 0));
    }
    pthread_mutex_unlock(&loader->mutex);
    double waited = clock_s() - start;
    if (wait_s) *wait_s = waited;
    /* The first batches are not read ahead of anything. */
    if (batch && loader->taken > SLOTS) note_wait(loader, waited);
    return batch;
}

void loader_stop(Loader *loader) {
    if (!loader) return;
    pthread_mutex_lock(&loader->mutex);
    loader->stop = true;
    pthread_cond_broadcast(&loader->changed);
    pthread_mutex_unlock(&loader->mutex);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 10;
    if (pthread_timedjoin_np(loader->thread, NULL, &until) != 0) {
        /* It sleeps in a read that nothing can interrupt, and still points at all this. */
        log_warn(LOG_DATA, "the data loader does not stop: a read of %s hangs", data_corpus_path(loader->source, 0));
        return;
    }
    pthread_cond_destroy(&loader->changed);
    pthread_mutex_destroy(&loader->mutex);
    free(loader->memory);
    free(loader);
}
