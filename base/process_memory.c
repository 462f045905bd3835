/* process_memory.c - what this process holds.
 * In: /proc/self/smaps_rollup. Out: bytes. */
#include "base/process_memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Without stdio, which would take memory for its buffer. */
int64_t process_bytes(void) {
    static const char name[] = "\nPss:";
    char text[4096];
    const int fd = open("/proc/self/smaps_rollup", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    const ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    const char *line = strstr(text, name);
    return line ? 1024 * (int64_t)strtoll(line + sizeof name - 1, NULL, 10) : -1;
}
