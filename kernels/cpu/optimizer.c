/* optimizer.c - parameter updates, one pass over parameters, gradients and state.
 * In: gradients. Out: parameters, moments. Invariant: elements are independent. */
#include "kernels/cpu/optimizer.h"

#include <math.h>

#define UPDATE_LINKAGE static
#define REAL float
#define SUFFIX f32
#define REAL_SQRT sqrtf
#include "kernels/cpu/optimizer_real.h"
#undef REAL
#undef SUFFIX
#undef REAL_SQRT

#define REAL double
#define SUFFIX f64
#define REAL_SQRT sqrt
#include "kernels/cpu/optimizer_real.h"

void adamw_step(void *p, void *m, void *v, const void *g, const AdamwStep *step, int64_t n, DType dtype,
                Stream *stream) {
    (void)stream; /* compute runs at the call on this platform */
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(n >= 0 && step->bias_correction1 > 0.0 && step->bias_correction2 > 0.0);
    UpdateArgs args = {.p = p, .m = m, .v = v, .g = g, .step = step, .n = n};
    const ChunkFunction fp32 = kernels_avx2() ? adamw_chunk_avx2 : adamw_chunk_f32;
    share_chunks(ceil_div(n, CHUNK_ELEMENTS), dtype == DT_F64 ? adamw_chunk_f64 : fp32, &args);
}

void sgd_step(void *p, void *m, const void *g, double lr, double momentum, double weight_decay, double grad_scale,
              int64_t n, DType dtype, Stream *stream) {
    (void)stream;
    REQUIRE(dtype == DT_F32 || dtype == DT_F64);
    REQUIRE(n >= 0);
    UpdateArgs args = {.p = p,
                       .m = m,
                       .g = g,
                       .lr = lr,
                       .momentum = momentum,
                       .weight_decay = weight_decay,
                       .grad_scale = grad_scale,
                       .n = n};
    const ChunkFunction fp32 = kernels_avx2() ? sgd_chunk_avx2 : sgd_chunk_f32;
    share_chunks(ceil_div(n, CHUNK_ELEMENTS), dtype == DT_F64 ? sgd_chunk_f64 : fp32, &args);
}
