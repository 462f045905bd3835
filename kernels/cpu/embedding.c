/* embedding.c - token and position tables: look-up, and gradients added in token order.
 * In: ids, table rows. Out: activations, table gradients.
 * Invariant: threads share the columns of a gradient, never its rows: each element is the sum over
 * the tokens in their order. */
#include <string.h>

#include "kernels/cpu/common.h"
#include "kernels/kernels.h"

enum { SCATTER_COLUMNS = 64 };

typedef struct {
    void *x, *dtable;
    const void *table, *dx;
    const int32_t *ids;
    Range rows; /* of the table that are here */
    int64_t N, C, chunk_rows;
} EmbeddingArgs;

#define REAL float
#define SUFFIX f32
#include "kernels/cpu/embedding_real.h"
#undef REAL
#undef SUFFIX

#define REAL double
#define SUFFIX f64
#include "kernels/cpu/embedding_real.h"

static void run_rows(EmbeddingArgs *args, ChunkFunction run) {
    args->chunk_rows = max_i64(1, CHUNK_ELEMENTS / args->C);
    share_chunks(ceil_div(args->N, args->chunk_rows), run, args);
}

void embedding_forward(void *x, const int32_t *tokens, const void *table, Range vocab, int64_t N, int64_t C,
                       DType dtype, Stream *stream) {
    (void)stream; /* compute runs at the call on this platform */
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(N >= 0 && C >= 1);
    EmbeddingArgs args = {.x = x, .table = table, .ids = tokens, .rows = vocab, .N = N, .C = C};
    run_rows(&args, dtype == DT_F64 ? lookup_chunk_f64 : lookup_chunk_f32);
}

static void scatter(EmbeddingArgs *args, DType dtype) {
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(args->N >= 0 && args->C >= 1);
    share_chunks(ceil_div(args->C, SCATTER_COLUMNS), dtype == DT_F64 ? scatter_chunk_f64 : scatter_chunk_f32, args);
}

void embedding_backward(void *dtable, const void *dx, const int32_t *tokens, Range vocab, int64_t N, int64_t C,
                        DType dtype, Stream *stream) {
    (void)stream;
    EmbeddingArgs args = {.dtable = dtable, .dx = dx, .ids = tokens, .rows = vocab, .N = N, .C = C};
    scatter(&args, dtype);
}

void position_forward(void *x, const int32_t *positions, const void *table, int64_t N, int64_t C, DType dtype,
                      Stream *stream) {
    (void)stream;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(N >= 0 && C >= 1);
    EmbeddingArgs args = {.x = x, .table = table, .ids = positions, .N = N, .C = C};
    run_rows(&args, dtype == DT_F64 ? add_position_chunk_f64 : add_position_chunk_f32);
}

void position_backward(void *dtable, const void *dx, const int32_t *positions, int64_t n_positions, int64_t N,
                       int64_t C, DType dtype, Stream *stream) {
    (void)stream;
    EmbeddingArgs args = {.dtable = dtable, .dx = dx, .ids = positions, .rows = {0, n_positions}, .N = N, .C = C};
    scatter(&args, dtype);
}
