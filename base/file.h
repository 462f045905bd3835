/* file.h - whole reads and writes: short counts and interruptions are handled here and nowhere else. */
#ifndef TRIDENT_BASE_FILE_H
#define TRIDENT_BASE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/check.h"

/* Reads exactly bytes at offset. 0, or -1 with err (a short file names the path, wanted and found). */
int file_read_at(int fd, const char *path, void *to, size_t bytes, int64_t offset, Error *err, int status);
/* Writes all of it at the current position. */
int file_write_all(int fd, const char *path, const void *from, size_t bytes, Error *err, int status);
/* The whole file, with a zero byte behind it; *bytes may be NULL. The caller frees. limit: largest
 * size that is accepted. NULL with err on failure. */
char *file_read(const char *path, size_t *bytes, size_t limit, Error *err, int status);
/* Temporary name in the same directory, write, fsync, rename, fsync of the directory. */
int file_write_atomic(const char *path, const void *from, size_t bytes, Error *err, int status);
/* fsync, again where a signal interrupted it. 0, or -1 with errno. */
int file_sync(int fd);
/* fsync of a directory. */
int directory_sync(const char *path, Error *err, int status);
/* mkdir -p; an existing directory is fine, also one of which a network file system's client knows the name only. */
int directory_make(const char *path, Error *err, int status);
/* Takes the directory for this process until it ends, however it ends; waits some seconds for another that is on its
 * way out. -1 with err where another process has taken it. Some network file systems have no locks: then 0. */
int directory_lock(const char *path, Error *err, int status);

#endif
