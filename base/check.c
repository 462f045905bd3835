/* check.c - errors, the one way to die, and allocation that cannot fail silently. */
#include "base/check.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

static _Atomic(DieHook) die_hook;
static atomic_flag dying = ATOMIC_FLAG_INIT;

int error_set(Error *err, int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    /* Formatted aside first: an argument may be err->message itself. */
    char text[sizeof err->message];
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    err->status = status;
    memcpy(err->message, text, sizeof text);
    return -1;
}

void die_set_hook(DieHook hook) { atomic_store(&die_hook, hook); }

/* Ends the process without atexit handlers: other threads may be inside anything. */
static void die_now(int status, const char *message) __attribute__((noreturn));
static void die_now(int status, const char *message) {
    if (atomic_flag_test_and_set(&dying)) {
        /* Another thread of this process is on its way out; let it finish its last words. */
        sleep_s(5.0);
        _exit(status);
    }
    fflush(stdout);
    log_error(LOG_MAIN, "%s", message);
    DieHook hook = atomic_load(&die_hook);
    if (hook) hook(status, message);
    fflush(NULL);
    _exit(status);
}

void die(int status, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    die_now(status, text);
}

void die_error(const Error *err) { die_now(err->status, err->message); }

void die_require(const char *file, int line, const char *what) {
    die(EXIT_INTERNAL, "%s:%d: broken invariant: %s (a fault of the program: please report it)", file, line, what);
}

void *xmalloc(uint64_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) die(EXIT_LAUNCH, "out of memory: %llu bytes", (unsigned long long)bytes);
    return memory;
}

void *xcalloc(uint64_t count, uint64_t bytes) {
    void *memory = calloc(count ? count : 1, bytes ? bytes : 1);
    if (!memory) {
        die(EXIT_LAUNCH, "out of memory: %llu x %llu bytes", (unsigned long long)count, (unsigned long long)bytes);
    }
    return memory;
}

void *xrealloc(void *old, uint64_t bytes) {
    void *memory = realloc(old, bytes ? bytes : 1);
    if (!memory) die(EXIT_LAUNCH, "out of memory: %llu bytes", (unsigned long long)bytes);
    return memory;
}

char *xstrdup(const char *text) {
    size_t bytes = strlen(text) + 1;
    return memcpy(xmalloc(bytes), text, bytes);
}

char *xasprintf(const char *format, ...) {
    va_list args;
    va_start(args, format);
    char *text = NULL;
    int n = vasprintf(&text, format, args);
    va_end(args);
    if (n < 0) die(EXIT_LAUNCH, "out of memory while formatting \"%s\"", format);
    return text;
}
