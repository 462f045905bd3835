/* comm_agree.c - one outcome of what many ranks did.
 * In: every rank's status and error. Out: the same on all. Uses what comm.h offers only. */
#include <stdlib.h>

#include "parallel/comm.h"

int comm_agree(Group *group, int rc, Error *err) {
    if (!group) return rc;
    const int size = group_size(group);
    int64_t *lengths = xcalloc((uint64_t)size, sizeof *lengths);
    Error *all = comm_host_gather(group, err, rc != 0 ? (int64_t)sizeof *err : 0, lengths);
    bool good = true;
    for (int i = 0; i < size; i++) good &= lengths[i] == 0;
    if (!good) *err = *all;
    free(all);
    free(lengths);
    return good ? 0 : -1;
}
