/* launch.c - which launcher started us, who is there, and the store's front.
 *
 * In: the environment and the world size of the config. Out: a Launch.
 * Every launcher ends its start in the same exchange: each rank puts a card (world size, config hash,
 * host, pid); rank 0 compares them and answers with the job's secret or with the refusal that all
 * ranks then give. So a rank with another config, executable or world size is refused by name. */
#include <ctype.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/cores.h"
#include "base/log.h"
#include "base/types.h"
#include "parallel/launch_internal.h"

/* What rank 0 answers to the cards. Only the used part of the text travels: PMI2 stores are slow. */
typedef struct {
    uint8_t secret[16];
    uint32_t refused;
    char text[LAUNCH_TEXT_MAX]; /* why; or the host of rank 0 */
} LaunchPlan;

/* The die hook is given no context: the one launch of this process. */
static Launch *hooked;

int64_t launch_env_number(const char *name, const char *text, int64_t min, int64_t max) {
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno != 0 || isspace((unsigned char)text[0]) || value < min || value > max) {
        die(EXIT_LAUNCH, "%s=\"%s\" is not a whole number from %lld to %lld", name, text, (long long)min,
            (long long)max);
    }
    return value;
}

void launch_stop(const Launch *launch, int status, const char *format, ...) {
    char text[LAUNCH_TEXT_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (strcmp(launch->kind, "local") != 0) die(status, "%s", text);
    fflush(NULL);
    _exit(status); /* the launching process prints the reason, once */
}

const char *launch_status_name(int status) {
    static const struct {
        int status;
        const char *name;
    } names[] = {{EXIT_INTERNAL, "a fault of the program"},
                 {EXIT_CONFIG, "config"},
                 {EXIT_DATA, "data"},
                 {EXIT_LAUNCH, "launch"},
                 {EXIT_PEER_LOST, "peer lost"},
                 {EXIT_HANG, "hang"},
                 {EXIT_CHECKPOINT, "checkpoint"},
                 {EXIT_NUMBERS, "numbers"},
                 {EXIT_STOPPED, "stopped by a signal"}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (names[i].status == status) return names[i].name;
    }
    return "error";
}

/* ---- the environment ---- */

const char *launch_env_text(const char *name) {
    const char *text = getenv(name);
    return text && text[0] ? text : NULL;
}

/* RANK and WORLD_SIZE: both or neither. */
static bool env_has_ranks(void) {
    const char *rank = launch_env_text("RANK"), *size = launch_env_text("WORLD_SIZE");
    if (!rank != !size) {
        die(EXIT_LAUNCH, "%s is set, but %s is not: set both (and MASTER_ADDR, MASTER_PORT), or neither",
            rank ? "RANK" : "WORLD_SIZE", rank ? "WORLD_SIZE" : "RANK");
    }
    return rank != NULL;
}

/* Tasks of the Slurm step that this process is one of; 0: it was not started by srun. */
static int slurm_step_tasks(void) {
    const char *step = launch_env_text("SLURM_STEP_ID"), *tasks = launch_env_text("SLURM_STEP_NUM_TASKS");
    if (!step || !tasks) return 0;
    return (int)launch_env_number("SLURM_STEP_NUM_TASKS", tasks, 1, LAUNCH_RANKS_MAX);
}

int launch_detect_world_size(void) {
    if (env_has_ranks()) return (int)launch_env_number("WORLD_SIZE", getenv("WORLD_SIZE"), 1, LAUNCH_RANKS_MAX);
    if (launch_env_text("PMI_FD") && launch_env_text("PMI_SIZE")) {
        return (int)launch_env_number("PMI_SIZE", getenv("PMI_SIZE"), 1, LAUNCH_RANKS_MAX);
    }
    return slurm_step_tasks();
}

/* Started by a launcher that we cannot talk to: as many single processes would be started as there are
 * tasks, each believing that it is alone. */
static void refuse_unknown_launchers(int world_size) {
    int step_tasks = slurm_step_tasks();
    if (step_tasks > 1) {
        die(EXIT_LAUNCH,
            "this is task %s of a Slurm step of %d tasks, but Slurm offers no PMI2 (PMI_FD is not set): "
            "start with srun --mpi=pmi2",
            launch_env_text("SLURM_PROCID") ? getenv("SLURM_PROCID") : "?", step_tasks);
    }
    const char *tasks = launch_env_text("SLURM_NTASKS"), *task = launch_env_text("SLURM_PROCID");
    if (step_tasks == 0 && tasks && task) {
        long n = launch_env_number("SLURM_NTASKS", tasks, 1, LAUNCH_RANKS_MAX);
        long id = launch_env_number("SLURM_PROCID", task, 0, LAUNCH_RANKS_MAX);
        if (n > 1 && (id > 0 || world_size <= 1)) {
            die(EXIT_LAUNCH,
                "SLURM_NTASKS=%ld, but this process was not started by srun with PMI2 and would run alone: start with "
                "srun --mpi=pmi2 (or set parallel.ranks, to run that many ranks on this machine)",
                n);
        }
    }
    const char *ompi = launch_env_text("OMPI_COMM_WORLD_SIZE");
    if (ompi && launch_env_number("OMPI_COMM_WORLD_SIZE", ompi, 1, LAUNCH_RANKS_MAX) > 1) {
        die(EXIT_LAUNCH,
            "started by mpirun with %s processes; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each, for "
            "example: mpirun sh -c 'RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE MASTER_ADDR=HOST "
            "trident ...'",
            ompi);
    }
}

void launch_host_name(int rank, char host[LAUNCH_HOST_MAX]) {
    const char *names = launch_env_text("TRIDENT_TEST_HOSTNAME");
    if (!names) {
        if (gethostname(host, LAUNCH_HOST_MAX) != 0) die(EXIT_LAUNCH, "gethostname: %s", strerror(errno));
        host[LAUNCH_HOST_MAX - 1] = 0;
        return;
    }
    const char *at = names;
    int index = strchr(names, ',') ? rank : 0;
    for (int i = 0; i < index && at; i++) {
        at = strchr(at, ',');
        if (at) at++;
    }
    size_t length = at ? strcspn(at, ",") : 0;
    if (length == 0 || length >= LAUNCH_HOST_MAX) {
        die(EXIT_LAUNCH, "TRIDENT_TEST_HOSTNAME=\"%s\" has no name for rank %d", names, rank);
    }
    memcpy(host, at, length);
    host[length] = 0;
}

void launch_set_rank(Launch *launch, int rank, int size) {
    char coordinates[32] = "";
    launch->rank = rank;
    launch->size = size;
    if (size > 1) snprintf(coordinates, sizeof coordinates, "rank %d", rank);
    log_set_rank(rank, coordinates);
    launch_host_name(rank, launch->host);
}

/* ---- one process: the store is a table of its own ---- */

static void single_put(Launch *launch, const char *key, const void *value, size_t bytes) {
    if (!store_table_put(launch->store_state, launch->rank, key, value, bytes)) {
        die(EXIT_INTERNAL, "the key \"%s\" was put twice", key);
    }
}

static void *single_get(Launch *launch, int from_rank, const char *key, size_t *bytes) {
    const void *found = store_table_get(launch->store_state, from_rank, key, bytes);
    if (!found) die(EXIT_LAUNCH, "key \"%s\" of rank %d is not in the store", key, from_rank);
    return memcpy(xmalloc(*bytes), found, *bytes);
}

static void single_fence(Launch *launch, const char *what) {
    (void)launch;
    (void)what;
}

static void single_finish(Launch *launch) {
    store_table_free(launch->store_state);
    launch->store_state = NULL;
}

static const LaunchStore single_store = {single_put, single_get, single_fence, NULL, NULL, single_finish};

void launch_use_single_store(Launch *launch) {
    launch->store = &single_store;
    launch->store_state = store_table_create();
}

/* ---- start ---- */

/* Reads what was put as a struct that ends in text, into `to`; dies where it is none. */
static void get_struct(Launch *launch, int rank, const char *key, void *to, size_t text_offset, size_t capacity) {
    size_t bytes;
    char *value = launch_get(launch, rank, key, &bytes);
    if (bytes <= text_offset || bytes > capacity || value[bytes - 1] != 0) {
        die(EXIT_LAUNCH, "rank %d is of another version of this program", rank);
    }
    memset(to, 0, capacity);
    memcpy(to, value, bytes);
    free(value);
}

/* Rank 0: reads all cards; says in the plan what does not fit, with the ranks. */
static void compare_cards(Launch *launch, const StoreCard *own, LaunchPlan *plan) {
    int others = 0, configs = 0, programs = 0;
    char list[512] = "";
    launch->hosts = xcalloc((uint64_t)launch->size, sizeof *launch->hosts);
    for (int r = 0; r < launch->size; r++) {
        StoreCard card;
        get_struct(launch, r, "launch.card", &card, offsetof(StoreCard, host), sizeof card);
        memcpy(launch->hosts[r], card.host, LAUNCH_HOST_MAX);
        const bool other_config = card.config_hash != own->config_hash;
        const bool other_program = card.program_hash != own->program_hash;
        configs += other_config;
        programs += other_program;
        if (card.world_size != own->world_size && !plan->refused) {
            plan->refused = true;
            snprintf(plan->text, sizeof plan->text, "rank %d (host %s, pid %d) has a world of %d ranks, rank 0 of %d",
                     r, card.host, card.pid, card.world_size, own->world_size);
        } else if ((other_config || other_program) && ++others <= 4) {
            size_t used = strlen(list);
            snprintf(list + used, sizeof list - used, "%srank %d (host %.80s, pid %d)", used ? ", " : "", r, card.host,
                     card.pid);
        }
    }
    if (others == 0 || plan->refused) return;
    plan->refused = true;
    snprintf(plan->text, sizeof plan->text, "%s%s: another %s than rank 0 has (host %s, pid %d)", list,
             others > 4 ? " and more" : "",
             !programs  ? "config"
             : !configs ? "executable"
                        : "config and executable",
             own->host, own->pid);
}

/* The next line of *text, without white space before a comment or the end; *text moves behind it. Length in bytes. */
static int next_line(const char **text, const char **line) {
    const char *end = *text + strcspn(*text, "\n");
    *line = *text;
    *text = *end ? end + 1 : end;
    int bytes = (int)strcspn(*line, "#\n");
    while (bytes > 0 && (*line)[bytes - 1] == ' ') bytes--;
    return bytes;
}

/* Adds to what is said the first line in which two configs differ, and the section it is in. */
static void add_difference(char *said, size_t capacity, const char *mine, const char *first) {
    const char *section = "", *line, *other;
    int section_bytes = 0, bytes, other_bytes;
    do {
        if (!*mine || !*first) return;
        bytes = next_line(&mine, &line);
        other_bytes = next_line(&first, &other);
        if (line[0] == '[') {
            section = line;
            section_bytes = bytes;
        }
    } while (bytes == other_bytes && memcmp(line, other, (size_t)bytes) == 0);
    const size_t used = strlen(said);
    snprintf(said + used, capacity - used, "; %.*s here: %.*s; on rank 0: %.*s", section_bytes, section, bytes, line,
             other_bytes, other);
}

static void refuse_start(Launch *launch, const LaunchOptions *options, const StoreCard *own, LaunchPlan *plan) {
    StoreCard first;
    get_struct(launch, 0, "launch.card", &first, offsetof(StoreCard, host), sizeof first);
    const bool other_config = own->config_hash != first.config_hash;
    if (other_config && options->config_text) {
        size_t bytes;
        char *text = launch_get(launch, 0, "launch.config", &bytes);
        if (bytes > 0 && text[bytes - 1] == 0)
            add_difference(plan->text, sizeof plan->text, options->config_text, text);
        free(text);
    } else if (launch->prints_for_all && launch->rank != 0) {
        _exit(EXIT_LAUNCH);
    }
    launch->all_know = true;
    die(EXIT_LAUNCH, "%s", plan->text);
}

static void exchange_cards(Launch *launch, const LaunchOptions *options) {
    const char *config = options->config_text ? options->config_text : "";
    StoreCard card = {.world_size = launch->size,
                      .pid = (int32_t)getpid(),
                      .config_hash = XXH3_64bits(config, strlen(config)),
                      .program_hash = options->program_hash};
    LaunchPlan plan = {.refused = false};
    memcpy(card.host, launch->host, sizeof card.host);
    launch_put(launch, "launch.card", &card, offsetof(StoreCard, host) + strlen(card.host) + 1);
    launch_fence(launch, "start");
    if (launch->rank == 0) {
        net_random(plan.secret, sizeof plan.secret);
        compare_cards(launch, &card, &plan);
        if (plan.refused) launch_put(launch, "launch.config", config, strlen(config) + 1);
        else snprintf(plan.text, sizeof plan.text, "%s", launch->host);
        launch_put(launch, "launch.plan", &plan, offsetof(LaunchPlan, text) + strlen(plan.text) + 1);
    }
    launch_fence(launch, "who is there");
    get_struct(launch, 0, "launch.plan", &plan, offsetof(LaunchPlan, text), sizeof plan);
    if (plan.refused) refuse_start(launch, options, &card, &plan);
    memcpy(launch->secret, plan.secret, sizeof launch->secret);
    snprintf(launch->host_of_rank0, sizeof launch->host_of_rank0, "%.255s", plan.text);
}

static void last_words(int status, const char *message) {
    Launch *launch = hooked;
    if (!launch) return;
    if (launch->watch) {
        watch_last_words(launch, status, message);
    } else if (launch->store_state && launch->store->end_words) {
        launch->store->end_words(launch, status, launch->all_know ? NULL : message);
    }
    if (!launch->watch && launch->launcher_linger) launch->launcher_linger(launch);
}

/* Rank 0 holds two connections a rank, the others a few. */
static void raise_descriptor_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max < 65536 ? limit.rlim_max : 65536;
    setrlimit(RLIMIT_NOFILE, &limit);
}

Launch *launch_start(const LaunchOptions *options) {
    Launch *launch = xcalloc(1, sizeof *launch);
    launch->timeout_s = options->timeout_s > 0 ? options->timeout_s : 600.0;
    launch->local_rank = -1;
    raise_descriptor_limit();
    if (env_has_ranks()) {
        launch_env_start(launch);
    } else if (launch_env_text("PMI_FD")) {
        launch_pmi2_start(launch);
    } else {
        refuse_unknown_launchers(options->world_size);
        if (options->world_size > 1) {
            launch_local_start(launch, options->world_size);
        } else {
            launch->kind = "single";
            launch->loopback_only = true;
            launch_set_rank(launch, 0, 1);
            launch_use_single_store(launch);
        }
    }
    if (options->world_size > 0 && options->world_size != launch->size) {
        die(EXIT_LAUNCH, "the config asks for %d ranks, but the launcher (%s) started %d", options->world_size,
            launch->kind, launch->size);
    }
    hooked = launch;
    die_set_hook(last_words);
    exchange_cards(launch, options);
    return launch;
}

/* ---- the rest of the interface ---- */

void launch_die_together(const Error *err) {
    /* The watchdog ends this process with rank 0's word; where that doesn't come, this rank has its own. */
    if (hooked && hooked->watch && hooked->rank != 0) sleep_s(10.0);
    die_error(err);
}

int launch_rank(const Launch *launch) { return launch->rank; }
int launch_size(const Launch *launch) { return launch->size; }
const char *launch_kind(const Launch *launch) { return launch->kind; }
const char *launch_host(const Launch *launch) { return launch->host; }
int launch_local_rank(const Launch *launch) { return launch->local_rank; }

void launch_secret(const Launch *launch, uint8_t secret[16]) { memcpy(secret, launch->secret, sizeof launch->secret); }

static void check_key(const char *key) {
    size_t length = strlen(key);
    REQUIRE(length > 0 && length <= LAUNCH_KEY_MAX);
    for (size_t i = 0; i < length; i++) REQUIRE(isgraph((unsigned char)key[i]) && key[i] != ';' && key[i] != '=');
}

void launch_put(Launch *launch, const char *key, const void *value, size_t bytes) {
    check_key(key);
    launch->store->put(launch, key, value, bytes);
}

void *launch_get(Launch *launch, int from_rank, const char *key, size_t *bytes) {
    check_key(key);
    REQUIRE(from_rank >= 0 && from_rank < launch->size);
    return launch->store->get(launch, from_rank, key, bytes);
}

void launch_fence(Launch *launch, const char *what) { launch->store->fence(launch, what); }

/* What a rank tells about its cores. */
typedef struct {
    int32_t allowed;
    cpu_set_t set; /* empty where the system does not say */
    char host[LAUNCH_HOST_MAX];
} CoreCard;

static void add_cores(LaunchCores *cores, cpu_set_t *all, const CoreCard *mine, const CoreCard *other) {
    cpu_set_t both;
    CPU_AND(&both, &mine->set, &other->set);
    CPU_OR(all, all, &other->set);
    cores->sharers += CPU_COUNT(&both) > 0 || CPU_COUNT(&mine->set) == 0 || CPU_COUNT(&other->set) == 0;
    cores->host = (int)max_i64(cores->host, max_i64(CPU_COUNT(all), other->allowed));
    cores->ranks++;
}

LaunchCores launch_cores(Launch *launch) {
    if (launch->cores.ranks > 0) return launch->cores;
    CoreCard mine = {.allowed = cores_allowed()};
    if (sched_getaffinity(0, sizeof mine.set, &mine.set) != 0) CPU_ZERO(&mine.set);
    memcpy(mine.host, launch->host, sizeof mine.host);
    launch_put(launch, "launch.cores", &mine, offsetof(CoreCard, host) + strlen(mine.host) + 1);
    launch_fence(launch, "cores");
    LaunchCores cores = {.allowed = mine.allowed};
    cpu_set_t all;
    CPU_ZERO(&all);
    for (int rank = 0; rank < launch->size; rank++) {
        CoreCard other;
        get_struct(launch, rank, "launch.cores", &other, offsetof(CoreCard, host), sizeof other);
        if (strcmp(other.host, mine.host) == 0) add_cores(&cores, &all, &mine, &other);
    }
    launch->cores = cores;
    return cores;
}

void launch_finish(Launch *launch) {
    if (launch->watch) watch_finish(launch);
    hooked = NULL;
    die_set_hook(NULL);
    launch->store->finish(launch);
    if (launch->launcher_finish) launch->launcher_finish(launch);
    net_doors_free(launch);
    free(launch->hosts);
    free(launch);
}
