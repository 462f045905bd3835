/* kernels.h - every operation of a training step, forward and backward. Plain C, no state.
 *
 * Order of arguments: outputs, inputs, sizes, stream. Sizes are int64 and count elements. Matrices are
 * row-major. N is tokens (micro_batch x seq_len, or this rank's share of them), C the hidden size,
 * H query heads, KV key/value heads, D the head size, all of THIS RANK. dtype is that of activations
 * and parameters; "stat" arrays (norm statistics, log-sum-exp, losses) are fp32, or fp64 where dtype
 * is DT_F64. Backward operations ADD into parameter gradients (dw, db) and WRITE activation
 * gradients unless they say otherwise. The same input gives the same bits with any number of threads.
 * CPU platform: DT_F32 (SIMD, and the portable path) and DT_F64 (portable path). */
#ifndef TRIDENT_KERNELS_KERNELS_H
#define TRIDENT_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/device.h"
#include "base/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { NORM_LAYER, NORM_RMS } NormKind;

/* threads: of this process, at least 1. Call once before any operation, from the thread that will call them. */
void kernels_init(int threads);
/* Starts the threads and takes all memory that operations on that type hold beside their arguments, so that none
 * of them allocates later. Returns its bytes; not counted are a BLAS's own buffers, whose use only the BLAS knows. */
int64_t kernels_prepare(DType dtype);
/* "avx512", "avx2" or "portable": what runs now. */
const char *kernels_path(void);
/* What the bits of operations on that type depend on beside the machine's arithmetic: the path, and the versions of
 * the libraries that it calls. Valid until the next call. */
const char *kernels_numerics(DType dtype);
/* For tests and benchmarks: the named path, or the best below it that the CPU has; NULL: no limit. */
void kernels_limit_path(const char *path);
/* Measured multiply-add peak of the threads given to kernels_init, in FLOP/s. Takes about 20 ms;
 * the first call measures. */
double kernels_peak_flops(DType dtype);

static inline DType stat_dtype(DType dtype) { return dtype == DT_F64 ? DT_F64 : DT_F32; }

/* ---- matrix product ---- */
typedef enum {
    EPILOGUE_NONE,
    EPILOGUE_BIAS,      /* C = AB + bias */
    EPILOGUE_BIAS_GELU, /* aux = AB + bias; C = gelu(aux) */
    EPILOGUE_DGELU      /* C = AB * gelu'(aux) */
} Epilogue;

typedef struct {
    Epilogue kind;
    const void *bias; /* (N) or NULL, dtype */
    void *aux;        /* (M, N), leading dimension ldc, dtype: written by BIAS_GELU, read by DGELU */
} MatmulEpilogue;

/* C (M, N) = op(A) (M, K) . op(B) (K, N), plus C where accumulate. op transposes where trans_ is set:
 * A is then stored (K, M), B (N, K). epilogue may be NULL; not together with accumulate. */
void matmul(void *C, int64_t ldc, const void *A, int64_t lda, bool trans_a, const void *B, int64_t ldb, bool trans_b,
            int64_t M, int64_t N, int64_t K, bool accumulate, const MatmulEpilogue *epilogue, DType dtype,
            Stream *stream);

/* ---- norms: Ba et al. 2016 (LayerNorm), Zhang and Sennrich 2019 (RMSNorm) ---- */
/* x_out = x + delta + bias (delta may be NULL, then bias is; x_out may be x, and may be NULL where delta is);
 * y = norm(x_out) * w + b. mean (N) is written for NORM_LAYER only; rstd (N). b is NULL for NORM_RMS. */
void residual_norm_forward(void *x_out, void *y, void *mean, void *rstd, const void *x, const void *delta,
                           const void *bias, const void *w, const void *b, NormKind kind, double eps, int64_t N,
                           int64_t C, DType dtype, Stream *stream);
/* dx += gradient through the norm (dx holds the gradient of the residual path); dw += , db += .
 * x is the x_out of the forward pass. workspace: norm_backward_workspace bytes. */
void norm_backward(void *dx, void *dw, void *db, const void *dy, const void *x, const void *w, const void *mean,
                   const void *rstd, NormKind kind, int64_t N, int64_t C, void *workspace, DType dtype, Stream *stream);
int64_t norm_backward_workspace(NormKind kind, int64_t N, int64_t C, DType dtype);
/* y = a + b + bias over (N, C); b and bias may be NULL; y may be a or b. */
void residual_add(void *y, const void *a, const void *b, const void *bias, int64_t N, int64_t C, DType dtype,
                  Stream *stream);
/* db (C) += sum of the rows of dy (N, C), leading dimension ld. */
void bias_backward(void *db, const void *dy, int64_t ld, int64_t N, int64_t C, DType dtype, Stream *stream);

/* ---- RoPE: Su et al. 2021, half rotation: pair (j, j + D/2), angle position * theta^(-2j/D) ---- */
/* table (positions, D/2, 2): cos, sin, in stat dtype, computed in fp64. */
void rope_table(void *table, int64_t positions, int64_t D, double theta, DType dtype, Stream *stream);
/* Rotates in place the heads of x (N rows, leading dimension ld, heads x D from the start of the row)
 * by positions[row]; inverse for the backward pass. */
void rope(void *x, int64_t ld, const int32_t *positions, const void *table, bool inverse, int64_t N, int64_t heads,
          int64_t D, DType dtype, Stream *stream);

/* ---- attention: causal, grouped-query, blockwise with online softmax (Dao 2023) ---- */
typedef struct {
    int64_t B, T;             /* sequences, queries in each */
    int64_t T_keys;           /* keys in each: T in training; query t sees keys up to T_keys - T + t */
    int64_t H, KV, D;         /* H is a multiple of KV; query head h uses key head h / (H / KV); D 16 to 256 */
    int64_t ld_q, ld_kv;      /* elements between tokens of q (and dq), of k and v (and dk, dv) */
    int64_t ld_out;           /* of out and dout */
    int64_t stride_kv;        /* elements between sequences of k and v; 0: T_keys * ld_kv */
    const int32_t *doc_start; /* (B, T) first key position that query t sees, or NULL: all from 0 */
} AttentionShape;

/* out (B*T, H*D); lse (B, H, T) log-sum-exp of the scaled scores, stat dtype. Scale 1/sqrt(D). */
void attention_forward(void *out, void *lse, const void *q, const void *k, const void *v, const AttentionShape *shape,
                       DType dtype, Stream *stream);
/* dq, dk, dv are written. workspace: attention_backward_workspace bytes. */
void attention_backward(void *dq, void *dk, void *dv, const void *dout, const void *q, const void *k, const void *v,
                        const void *out, const void *lse, const AttentionShape *shape, void *workspace, DType dtype,
                        Stream *stream);
int64_t attention_backward_workspace(const AttentionShape *shape, DType dtype);

/* ---- activations ---- */
/* SwiGLU (Shazeer 2020): y (N, F) = silu(gate) * up, gate_up (N, 2F) = [gate | up] in each row. */
void swiglu_forward(void *y, const void *gate_up, int64_t N, int64_t F, DType dtype, Stream *stream);
/* dgate_up may be gate_up. */
void swiglu_backward(void *dgate_up, const void *dy, const void *gate_up, int64_t N, int64_t F, DType dtype,
                     Stream *stream);

/* ---- embedding, this rank's rows [vocab.first, vocab.first + vocab.count) of the table ---- */
/* x (N, C): row of the table, 0 where the token lies on another rank. */
void embedding_forward(void *x, const int32_t *tokens, const void *table, Range vocab, int64_t N, int64_t C,
                       DType dtype, Stream *stream);
/* dtable += in token order for every row, whatever the number of threads. */
void embedding_backward(void *dtable, const void *dx, const int32_t *tokens, Range vocab, int64_t N, int64_t C,
                        DType dtype, Stream *stream);
/* x += table[positions[row]]; and its gradient (dtable +=). */
void position_forward(void *x, const int32_t *positions, const void *table, int64_t N, int64_t C, DType dtype,
                      Stream *stream);
void position_backward(void *dtable, const void *dx, const int32_t *positions, int64_t n_positions, int64_t N,
                       int64_t C, DType dtype, Stream *stream);

/* ---- vocabulary-parallel cross-entropy over a chunk of n rows ---- */
/* stats (n, 3): maximum of this rank's logits, sum of exp(logit - maximum), logit of the target (0 where
 * it lies elsewhere), over the first V_valid of V columns (padding is not looked at). targets are global
 * ids; -1: masked. vocab_first: global id of column 0. A NaN or inf makes the row's loss NaN; -inf is a weight of 0. */
void cross_entropy_stats(void *stats, const void *logits, const int32_t *targets, int64_t vocab_first, int64_t n,
                         int64_t V_valid, int64_t V, DType dtype, Stream *stream);
/* From the ranks' stats (ranks, n, 3): lse (n), loss (n) = lse - target logit, 0 where masked. */
void cross_entropy_combine(void *loss, void *lse, const void *stats, const int32_t *targets, int64_t ranks, int64_t n,
                           DType dtype, Stream *stream);
/* In place: logits become scale * (softmax - onehot); 0 in masked rows and in padding columns. */
void cross_entropy_backward(void *logits, const void *lse, const int32_t *targets, double scale, int64_t vocab_first,
                            int64_t n, int64_t V_valid, int64_t V, DType dtype, Stream *stream);

/* ---- optimizer and vectors ---- */
typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    double bias_correction1, bias_correction2; /* 1 - beta^t */
    double grad_scale;                         /* gradient is multiplied by this first (clipping, mean) */
} AdamwStep;

/* Loshchilov and Hutter 2019, algorithm 2, decoupled decay; one pass. */
void adamw_step(void *p, void *m, void *v, const void *g, const AdamwStep *step, int64_t n, DType dtype,
                Stream *stream);
/* m = momentum * m + g; p -= lr * (m + weight_decay * p). */
void sgd_step(void *p, void *m, const void *g, double lr, double momentum, double weight_decay, double grad_scale,
              int64_t n, DType dtype, Stream *stream);
/* *sum (host double, valid at return on the CPU platform) += sum of squares, in fp64, in an order that
 * depends on n only. */
void squared_norm(double *sum, const void *x, int64_t n, DType dtype, Stream *stream);
/* x *= factor. */
void scale(void *x, double factor, int64_t n, DType dtype, Stream *stream);
/* *sum (host double) += sum of the stat array x. */
void sum_stats(double *sum, const void *x, int64_t n, DType dtype, Stream *stream);

#ifdef __cplusplus
}
#endif
#endif
