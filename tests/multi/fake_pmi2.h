/* fake_pmi2.h - a small PMI2 process manager for tests, with faults to order.
 *
 * Serves one end of a socket pair for each rank; the other end goes to the rank as PMI_FD, with PMI_RANK,
 * PMI_SIZE and PMI_JOBID. The protocol is the one that libpmi2 speaks: a first line of text, then
 * messages "LENGTH cmd=NAME;key=value;...;" with the length in 6 characters. */
#ifndef TRIDENT_TESTS_FAKE_PMI2_H
#define TRIDENT_TESTS_FAKE_PMI2_H

typedef struct {
    int ranks;
    int told_size;             /* what init answers; 0: the truth */
    int value_max;             /* longer values are refused with error 14; 0: no limit */
    int truncate_to;           /* longer values are silently cut; 0: never */
    double fence_delay_s;      /* each fence takes that much longer */
    const char *error_command; /* "fullinit", "kvs-put", "kvs-get", "kvs-fence", "finalize": answered with an error */
    int error_after;           /* that many calls of it go well first (counted over all ranks) */
    const char *vanish_at;     /* the server closes all connections at that command */
    const char *mute_at;       /* the server stops answering at that command */
    const char *swapped_for;   /* not NULL: kvs-get answers with the value that was put last */
} FakePmi2;

/* Serves until all ranks have closed their end (or as the faults say). fds: (ranks) server ends. */
void fake_pmi2_serve(const FakePmi2 *options, const int *fds);

#endif
