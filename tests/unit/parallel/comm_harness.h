/* comm_harness.h - runs a function in every rank of a small world, with a Comm of one of five transports. */
#ifndef TRIDENT_TESTS_COMM_HARNESS_H
#define TRIDENT_TESTS_COMM_HARNESS_H

#include <math.h>

#include "parallel/comm.h"
#include "tests/unit/parallel/launch_harness.h"

typedef enum { IN_PLACE, STAGED, TCP, TWO_HOSTS, UNEVEN_HOSTS, TRANSPORTS } Transport;

static const char *const transport_names[TRANSPORTS] = {"in place", "staged", "TCP", "2 + 2 hosts", "3 + 1 hosts"};

enum { ARENA_BYTES = 32 << 20 };

/* What a rank works with. */
typedef struct {
    Launch *launch;
    Comm *comm;
    int rank, size;
    Transport transport;
    DeviceMemory arena;
    char *elsewhere; /* memory that is not registered */
    size_t used;     /* of the arena, or of elsewhere */
    Stream *compute;
} World;

typedef struct Scene {
    int ranks;
    Transport transport;
    CommOptions options;
    bool no_watch; /* without the watchdog */
    void (*play)(World *world, const struct Scene *scene);
    int argument;
} Scene;

/* Memory for n bytes: in the registered memory where the transport has such, else elsewhere. */
static inline void *world_take(World *world, size_t bytes) {
    size_t at = world->used;
    world->used += (bytes + 63) / 64 * 64;
    if (world->used > ARENA_BYTES) die(EXIT_INTERNAL, "the test's arena is too small");
    return (world->transport == STAGED ? world->elsewhere : (char *)world->arena.base) + at;
}

static inline int scene_body(int index, void *context) {
    const Scene *scene = context;
    (void)index;
    LaunchOptions launch_options = {.world_size = scene->ranks, .timeout_s = 20};
    if (scene->transport == TWO_HOSTS) setenv("TRIDENT_TEST_HOSTNAME", "n0,n0,n1,n1", 1);
    if (scene->transport == UNEVEN_HOSTS) setenv("TRIDENT_TEST_HOSTNAME", "n0,n0,n0,n1", 1);
    World world = {.launch = launch_start(&launch_options), .transport = scene->transport};
    if (!scene->no_watch) launch_watch_start(world.launch);
    CommOptions options = scene->options;
    options.force_tcp |= scene->transport == TCP;
    if (options.timeout_s == 0) options.timeout_s = 20;
    world.rank = launch_rank(world.launch);
    world.size = launch_size(world.launch);
    world.comm = comm_create(world.launch, &options);
    world.arena = device_memory_create(ARENA_BYTES);
    if (scene->transport != STAGED) comm_register(world.comm, &world.arena);
    world.elsewhere = xmalloc(ARENA_BYTES);
    world.compute = stream_create("compute", STREAM_COMPUTE);
    scene->play(&world, scene);
    stream_destroy(world.compute);
    comm_destroy(world.comm);
    device_memory_destroy(&world.arena);
    free(world.elsewhere);
    launch_finish(world.launch);
    return 0;
}

static Processes scene_processes;

/* Runs the scene; the launching process's status and words are those of the run. */
static inline Process *scene_run(const Scene *scene) {
    scene_processes.n = 0;
    process_start(&scene_processes, scene_body, 0, (void *)scene);
    processes_collect(&scene_processes, 50);
    return &scene_processes.process[0];
}

static inline uint64_t random_seed(void) {
    const char *text = getenv("TEST_SEED");
    return text ? strtoull(text, NULL, 10) : (uint64_t)(clock_s() * 1e9);
}

static inline uint64_t random_next(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15u;
    uint64_t x = *state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* ---- values, and what reducing them must give, bit for bit ---- */

/* The nearest number with `digits` binary digits and no unit in the last place below 2^lowest; ties to even. */
static inline double round_to(double x, int digits, int lowest, double largest) {
    if (x == 0 || !isfinite(x)) return x;
    int exponent = ilogb(x) + 1 - digits;
    if (exponent < lowest) exponent = lowest;
    double rounded = ldexp(nearbyint(ldexp(x, -exponent)), exponent);
    if (rounded > largest) return INFINITY;
    if (rounded < -largest) return -INFINITY;
    return rounded;
}

static inline double round_for(DType dtype, double x) {
    if (dtype == DT_BF16) return round_to(x, 8, -133, 0x1.fep127);
    if (dtype == DT_F16) return round_to(x, 11, -24, 65504.0);
    return dtype == DT_F32 ? (float)x : x;
}

/* Writes a number that the format has. */
static inline void store(void *to, int64_t i, DType dtype, double x) {
    float single = (float)x;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    switch (dtype) {
    case DT_F32: ((float *)to)[i] = single; break;
    case DT_F64: ((double *)to)[i] = x; break;
    case DT_I32: ((int32_t *)to)[i] = (int32_t)x; break;
    case DT_BF16: ((uint16_t *)to)[i] = (uint16_t)(bits >> 16); break;
    default: {
        double size = fabs(x);
        int sign = signbit(x) ? 0x8000 : 0, exponent = x == 0 ? -99 : ilogb(x);
        if (isinf(x)) {
            ((uint16_t *)to)[i] = (uint16_t)(sign | 0x7c00);
        } else if (exponent < -14) {
            ((uint16_t *)to)[i] = (uint16_t)(sign | (int)ldexp(size, 24));
        } else {
            ((uint16_t *)to)[i] = (uint16_t)(sign | ((exponent + 15) << 10) | ((int)ldexp(size, 10 - exponent) - 1024));
        }
    }
    }
}

/* Element i of what `rank` gives to operation `salt`: different sizes, so that the order of a sum shows. */
static inline double value_of(DType dtype, int rank, int64_t i, uint64_t salt) {
    uint64_t state = salt * 1000003 + (uint64_t)rank * 7919 + (uint64_t)i * 131;
    uint64_t bits = random_next(&state);
    if (dtype == DT_I32) return (double)(int32_t)bits;
    double x = ((double)(bits >> 40) / (1 << 24) - 0.5) * ldexp(1.0, (int)(bits & 7));
    return round_for(dtype, x);
}

static inline void fill_values(void *to, DType dtype, int rank, int64_t first, int64_t n, uint64_t salt) {
    for (int64_t i = 0; i < n; i++) store(to, i, dtype, value_of(dtype, rank, first + i, salt));
}

/* The sum or maximum of element i over `ranks`, in that order: fp32 (f64: fp64; i32: modulo 2^32). */
static inline double reduced(DType dtype, CommOp op, const int *ranks, int n, int64_t i, uint64_t salt) {
    double whole = value_of(dtype, ranks[0], i, salt);
    for (int k = 1; k < n; k++) {
        double one = value_of(dtype, ranks[k], i, salt);
        if (op == COMM_MAX) {
            whole = one > whole ? one : whole;
        } else if (dtype == DT_I32) {
            whole = (double)(int32_t)(uint32_t)((int64_t)whole + (int64_t)one);
        } else if (dtype == DT_F64) {
            whole += one;
        } else {
            whole = (float)whole + (float)one;
        }
    }
    return round_for(dtype, whole);
}

#endif
