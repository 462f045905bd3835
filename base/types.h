/* types.h - number formats and small integer arithmetic that every folder uses. */
#ifndef TRIDENT_BASE_TYPES_H
#define TRIDENT_BASE_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { DT_F32, DT_F64, DT_BF16, DT_F16, DT_I32, DT_COUNT } DType;

typedef struct {
    int64_t first, count;
} Range;

/* Bytes of one element. */
size_t dtype_size(DType dtype);
/* "f32", "f64", "bf16", "f16", "i32". */
const char *dtype_name(DType dtype);

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
/* a >= 0, b > 0. */
static inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static inline int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

#ifdef __cplusplus
}
#endif
#endif
