/* types.c - sizes and names of the number formats. */
#include "base/types.h"

static const struct {
    const char *name;
    size_t bytes;
} formats[DT_COUNT] = {
    [DT_F32] = {"f32", 4}, [DT_F64] = {"f64", 8}, [DT_BF16] = {"bf16", 2}, [DT_F16] = {"f16", 2}, [DT_I32] = {"i32", 4},
};

size_t dtype_size(DType dtype) { return formats[dtype].bytes; }

const char *dtype_name(DType dtype) { return dtype < DT_COUNT ? formats[dtype].name : "unknown"; }
