/* count_products.c - a library that is loaded before the BLAS and counts what products of matrices in fp64 multiply.
 *
 *     gcc -shared -fPIC -o count_products.so tests/faults/count_products.c
 *     LD_PRELOAD=./count_products.so COUNT_PRODUCTS=/tmp/n trident train ...
 * COUNT_PRODUCTS: where the process writes, at its end, how many floating-point operations there were. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

typedef void Dgemm(int order, int trans_a, int trans_b, int M, int N, int K, double alpha, const double *A, int lda,
                   const double *B, int ldb, double beta, double *C, int ldc);

static atomic_llong operations;
static Dgemm *blas_dgemm;

__attribute__((constructor)) static void start(void) {
    *(void **)&blas_dgemm = dlsym(RTLD_NEXT, "cblas_dgemm");
    if (!blas_dgemm) abort();
}

Dgemm cblas_dgemm;
void cblas_dgemm(int order, int trans_a, int trans_b, int M, int N, int K, double alpha, const double *A, int lda,
                 const double *B, int ldb, double beta, double *C, int ldc) {
    atomic_fetch_add(&operations, 2LL * M * N * K);
    blas_dgemm(order, trans_a, trans_b, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc);
}

__attribute__((destructor)) static void write_count(void) {
    const char *path = getenv("COUNT_PRODUCTS");
    FILE *file = path && atomic_load(&operations) ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%lld\n", atomic_load(&operations));
    fclose(file);
}
