/* common.h - what all CPU operations share: which path runs, how work is shared out, template names.
 *
 * Paths. Every operation exists in portable C, written once for float and double: OP.c sets REAL and
 * SUFFIX and includes OP_real.h twice. Where it pays, OP_avx2.c holds an fp32 version for AVX2 and
 * FMA; its text stands inside `#ifdef __AVX2__`, so that the file is empty on other machines. OP.c
 * picks at the call: `if (kernels_avx2()) return op_avx2(...)`.
 *
 * Threads. Work is cut into chunks whose size depends on the shape alone, each written by one call,
 * and sums across chunks are added in chunk order: the same bits with any number of threads. With
 * one thread all runs in the caller: eight ranks on two cores are the normal case. */
#ifndef TRIDENT_KERNELS_CPU_COMMON_H
#define TRIDENT_KERNELS_CPU_COMMON_H

#include <stdbool.h>
#include <stdint.h>

#include "base/check.h"
#include "base/types.h"

#if defined(__x86_64__)
#define KERNELS_X86 1
#else
#define KERNELS_X86 0
#endif

/* A macro with a constant in front, so that calls of *_avx2 functions vanish on other machines. */
#define kernels_avx2() (KERNELS_X86 && kernels_avx2_chosen())
bool kernels_avx2_chosen(void);
/* AVX-512 (F, VL, BW, DQ) on top of it: pays in the matrix product. */
#define kernels_avx512() (KERNELS_X86 && kernels_avx512_chosen())
bool kernels_avx512_chosen(void);
/* As given to kernels_init; 1 before. */
int kernels_threads(void);
/* The linked BLAS may not be called by several threads at once. */
bool kernels_one_blas_caller(void);

/* Calls run(args, i) for i in [0, count), shared over the threads in contiguous blocks; who is done helps in
 * the others' blocks. For many chunks of equal cost: element-wise passes, rows of norms. */
typedef void (*ChunkFunction)(void *args, int64_t index);
void share_chunks(int64_t count, ChunkFunction run, void *args);
/* The same, each index going to the next free thread: for few and long pieces (GEMM panels, heads),
 * where a thread that lost its core would keep the others waiting. Bits do not depend on who runs what. */
void share_tasks(int64_t count, ChunkFunction run, void *args);

/* Elements of one chunk of an element-wise pass: 64 KiB of fp32, a fraction of a second-level cache. */
#define CHUNK_ELEMENTS 16384

/* NAME(op) is op_f32 or op_f64, by SUFFIX, inside a template file. */
#define NAME_JOIN2(name, suffix) name##_##suffix
#define NAME_JOIN(name, suffix) NAME_JOIN2(name, suffix)
#define NAME(name) NAME_JOIN(name, SUFFIX)

#endif
