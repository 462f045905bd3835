/* cores.c - the processor cores that this process may run on.
 * In: the affinity mask. Out: their number. */
#include "base/cores.h"

#include <sched.h>
#include <unistd.h>

int cores_allowed(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
    const long online = sysconf(_SC_NPROCESSORS_ONLN); /* a machine with more cores than the mask has bits */
    return online > 0 ? (int)online : 1;
}
