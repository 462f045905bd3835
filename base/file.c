/* file.c - whole reads and writes, atomic replacement, directories. */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"

static const double lock_wait_s = 5.0;

int file_read_at(int fd, const char *path, void *to, size_t bytes, int64_t offset, Error *err, int status) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(fd, (char *)to + done, bytes - done, offset + (int64_t)done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return error_set(err, status, "%s: cannot read: %s", path, strerror(errno));
        if (n == 0) {
            return error_set(err, status,
                             "%s: ends at byte %" PRId64 ", but %zu bytes at offset %" PRId64 " are needed", path,
                             offset + (int64_t)done, bytes, offset);
        }
        done += (size_t)n;
    }
    return 0;
}

int file_write_all(int fd, const char *path, const void *from, size_t bytes, Error *err, int status) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = write(fd, (const char *)from + done, bytes - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            return error_set(err, status, "%s: cannot write %zu bytes: %s", path, bytes - done, strerror(errno));
        }
        done += (size_t)n;
    }
    return 0;
}

char *file_read(const char *path, size_t *bytes, size_t limit, Error *err, int status) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        error_set(err, status, "%s: cannot open: %s", path, strerror(errno));
        return NULL;
    }
    char *text = NULL;
    struct stat facts;
    if (fstat(fd, &facts) != 0) {
        error_set(err, status, "%s: cannot stat: %s", path, strerror(errno));
    } else if (!S_ISREG(facts.st_mode)) {
        error_set(err, status, "%s: is not a regular file", path);
    } else if ((uint64_t)facts.st_size > limit) {
        error_set(err, status, "%s: has %" PRId64 " bytes, at most %zu are accepted", path, (int64_t)facts.st_size,
                  limit);
    } else {
        text = xmalloc((uint64_t)facts.st_size + 1);
        if (file_read_at(fd, path, text, (size_t)facts.st_size, 0, err, status) != 0) {
            free(text);
            text = NULL;
        } else {
            text[facts.st_size] = 0;
            if (bytes) *bytes = (size_t)facts.st_size;
        }
    }
    close(fd);
    return text;
}

/* The directory part of path, "." where there is none. Caller frees. */
static char *directory_of(const char *path) {
    const char *slash = strrchr(path, '/');
    if (!slash) return xstrdup(".");
    if (slash == path) return xstrdup("/");
    char *directory = xstrdup(path);
    directory[slash - path] = 0;
    return directory;
}

int file_sync(int fd) {
    int synced;
    do synced = fsync(fd);
    while (synced != 0 && errno == EINTR);
    return synced;
}

int directory_sync(const char *path, Error *err, int status) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return error_set(err, status, "%s: cannot open the directory: %s", path, strerror(errno));
    int rc = 0, synced = file_sync(fd);
    /* Some file systems do not support fsync on a directory and answer EINVAL. */
    if (synced != 0 && errno != EINVAL) {
        rc = error_set(err, status, "%s: cannot sync the directory: %s", path, strerror(errno));
    }
    close(fd);
    return rc;
}

int file_write_atomic(const char *path, const void *from, size_t bytes, Error *err, int status) {
    char *temporary = xasprintf("%s.tmp.%d", path, (int)getpid());
    char *directory = directory_of(path);
    int rc = -1;
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        error_set(err, status, "%s: cannot create: %s", temporary, strerror(errno));
        goto done;
    }
    if (file_write_all(fd, temporary, from, bytes, err, status) != 0) goto done;
    if (file_sync(fd) != 0) {
        error_set(err, status, "%s: cannot sync: %s", temporary, strerror(errno));
        goto done;
    }
    int closed = close(fd);
    fd = -1;
    if (closed != 0) {
        error_set(err, status, "%s: cannot close: %s", temporary, strerror(errno));
        goto done;
    }
    if (rename(temporary, path) != 0) {
        error_set(err, status, "%s: cannot rename to %s: %s", temporary, path, strerror(errno));
        goto done;
    }
    rc = directory_sync(directory, err, status);
done:
    if (fd >= 0) close(fd);
    if (rc != 0) unlink(temporary);
    free(temporary);
    free(directory);
    return rc;
}

/* Another client of a network file system may have made it: this one can know that the name is taken before it
 * sees the directory itself. */
static bool directory_appears(const char *path) {
    enum { TRIES = 100 };
    for (int try = 0;; try++) {
        struct stat facts;
        if (stat(path, &facts) == 0) return S_ISDIR(facts.st_mode);
        if ((errno != ENOENT && errno != ESTALE) || try == TRIES) return false;
        sleep_s(0.01);
    }
}

int directory_make(const char *path, Error *err, int status) {
    char *partial = xstrdup(path);
    int rc = 0;
    for (char *p = partial + 1; rc == 0; p++) {
        if (*p != '/' && *p != 0) continue;
        char end = *p;
        *p = 0;
        if (mkdir(partial, 0777) != 0 && errno != EEXIST) {
            rc = error_set(err, status, "%s: cannot make the directory: %s", partial, strerror(errno));
        }
        *p = end;
        if (end == 0) break;
    }
    if (rc == 0 && !directory_appears(path)) {
        rc = error_set(err, status, "%s: is not a directory", path);
    }
    free(partial);
    return rc;
}

int directory_lock(const char *path, Error *err, int status) {
    const double until_s = clock_s() + lock_wait_s;
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* stays open, and with it the lock */
    while (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        if (clock_s() < until_s) {
            sleep_s(0.05);
            continue;
        }
        close(fd);
        return error_set(err, status, "%s: another run is writing there; wait for its end, or choose another directory",
                         path);
    }
    return 0;
}
