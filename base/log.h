/* log.h - one logger: time since the program's start, the rank's coordinates, subsystem, text; on standard error.
 * Lines of info level come from rank 0 only unless log_set_all_ranks(true). */
#ifndef TRIDENT_BASE_LOG_H
#define TRIDENT_BASE_LOG_H

#include <stdbool.h>

typedef enum { LOG_MAIN, LOG_LAUNCH, LOG_COMM, LOG_PIPE, LOG_DATA, LOG_CKPT, LOG_MEM, LOG_TRAIN } LogArea;

/* coordinates: short text such as "d0 p1 t3", printed on every line; rank decides who prints info. */
void log_set_rank(int rank, const char *coordinates);
const char *log_coordinates(void);
void log_set_all_ranks(bool all);

void log_info(LogArea area, const char *format, ...) __attribute__((format(printf, 2, 3)));
void log_warn(LogArea area, const char *format, ...) __attribute__((format(printf, 2, 3)));
void log_error(LogArea area, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Seconds on the monotonic clock. */
double clock_s(void);
/* Sleeps; interruptions by signals do not shorten it. */
void sleep_s(double seconds);

#endif
