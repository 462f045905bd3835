/* wrong_math.c - a library that is loaded before libm and makes one call of a function give a wrong number.
 *
 *     gcc -shared -fPIC -o wrong_math.so tests/faults/wrong_math.c
 *     LD_PRELOAD=./wrong_math.so WRONG_CALL=exp WRONG_AT=100000 WRONG_VALUE=nan trident train ...
 * WRONG_CALL: exp or pow, of doubles. WRONG_AT=K: the K-th call of this process, from 1. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static double (*libm_exp)(double), (*libm_pow)(double, double);
static const char *wrong_call = "";
static long wrong_at;
static double wrong_value;
static atomic_long calls;

__attribute__((constructor)) static void start(void) {
    *(void **)&libm_exp = dlsym(RTLD_NEXT, "exp");
    *(void **)&libm_pow = dlsym(RTLD_NEXT, "pow");
    if (!libm_exp || !libm_pow) abort();
    if (!getenv("WRONG_CALL") || !getenv("WRONG_AT") || !getenv("WRONG_VALUE")) return;
    wrong_call = getenv("WRONG_CALL");
    wrong_at = strtol(getenv("WRONG_AT"), NULL, 10);
    wrong_value = strtod(getenv("WRONG_VALUE"), NULL);
}

static bool wrong(const char *call) {
    return strcmp(call, wrong_call) == 0 && atomic_fetch_add(&calls, 1) + 1 == wrong_at;
}

double exp(double x);
double exp(double x) { return wrong("exp") ? wrong_value : libm_exp(x); }

double pow(double x, double y);
double pow(double x, double y) { return wrong("pow") ? wrong_value : libm_pow(x, y); }
