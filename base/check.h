/* check.h - exit statuses, the one way to die, and errors that a caller handles.
 *
 * Library code that reads what a user gave returns -1 and fills an Error; code that finds the
 * program itself broken uses REQUIRE; a rank that cannot go on calls die. */
#ifndef TRIDENT_BASE_CHECK_H
#define TRIDENT_BASE_CHECK_H

#include <stdarg.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    EXIT_DONE = 0,
    EXIT_INTERNAL = 1,   /* a broken invariant of the program itself */
    EXIT_CONFIG = 2,     /* config, command line */
    EXIT_DATA = 3,       /* token files, tokenizers */
    EXIT_LAUNCH = 4,     /* launcher, rendezvous, placement, devices */
    EXIT_PEER_LOST = 5,  /* another rank went away */
    EXIT_HANG = 6,       /* a wait passed its deadline */
    EXIT_CHECKPOINT = 7, /* checkpoint refused, or could not be written */
    EXIT_NUMBERS = 8,    /* non-finite numbers, or self-test mismatch */
    EXIT_STOPPED = 75    /* stopped by a signal after saving: run me again */
} ExitStatus;

typedef struct {
    int status; /* an ExitStatus */
    char message[1024];
} Error;

/* Fills err and returns -1, so that `return error_set(err, EXIT_DATA, "...")` reads well. */
int error_set(Error *err, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Called once by die before the process ends (to tell the peers and leave a last word). */
typedef void (*DieHook)(int status, const char *message);
void die_set_hook(DieHook hook);

/* Prints "error: ..." with the rank's coordinates, runs the hook, ends the process with status. */
void die(int status, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));
/* die with err's status and message. */
void die_error(const Error *err) __attribute__((noreturn));
void die_require(const char *file, int line, const char *what) __attribute__((noreturn));

#define REQUIRE(condition)                                             \
    do {                                                               \
        if (!(condition)) die_require(__FILE__, __LINE__, #condition); \
    } while (0)

/* a / b where b must divide a; what names the division in the message. */
static inline int64_t div_exact(int64_t a, int64_t b) {
    REQUIRE(b > 0 && a % b == 0);
    return a / b;
}

/* malloc/calloc/realloc/strdup that die, naming the bytes, where memory is out. */
void *xmalloc(uint64_t bytes);
void *xcalloc(uint64_t count, uint64_t bytes);
void *xrealloc(void *old, uint64_t bytes);
char *xstrdup(const char *text);
/* printf into a new string that the caller frees. */
char *xasprintf(const char *format, ...) __attribute__((format(printf, 1, 2)));

#ifdef __cplusplus
}
#endif
#endif
