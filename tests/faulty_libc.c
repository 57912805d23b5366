// Preloaded by tests: makes the C library fail on one file, as storage and old kernels do.
//
// FAULT_PATH         the file: every path that ends in this
// FAULT_FROM         reads of it that reach this offset fail or wait (default 0)
// FAULT_READ_ERRNO   with this errno; 0, the default: they succeed
// FAULT_READ_MS      after so many milliseconds
// FAULT_DIRECT_ERRNO open(O_DIRECT) of it fails with this errno
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static long setting(const char* name) {
  const char* value = getenv(name);
  return value ? atol(value) : 0;
}

static int is_faulty(const char* path) {
  const char* suffix = getenv("FAULT_PATH");
  const size_t length = strlen(path);
  return suffix && length >= strlen(suffix) && strcmp(path + length - strlen(suffix), suffix) == 0;
}

static ssize_t faulty_pread(const char* name, int fd, void* buffer, size_t count, off_t offset) {
  char link[64], path[4096];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof(path) - 1);
  path[length < 0 ? 0 : length] = 0;
  if (is_faulty(path) && offset + (off_t)count > setting("FAULT_FROM")) {
    usleep(1000 * setting("FAULT_READ_MS"));
    if (setting("FAULT_READ_ERRNO")) {
      errno = setting("FAULT_READ_ERRNO");
      return -1;
    }
  }
  ssize_t (*real)(int, void*, size_t, off_t) = dlsym(RTLD_NEXT, name);
  return real(fd, buffer, count, offset);
}

ssize_t pread(int fd, void* buffer, size_t count, off_t offset) {
  return faulty_pread("pread", fd, buffer, count, offset);
}

ssize_t pread64(int fd, void* buffer, size_t count, off_t offset) {
  return faulty_pread("pread64", fd, buffer, count, offset);
}

static int faulty_open(const char* name, const char* path, int flags, mode_t mode) {
  if ((flags & O_DIRECT) && setting("FAULT_DIRECT_ERRNO") && is_faulty(path)) {
    errno = setting("FAULT_DIRECT_ERRNO");
    return -1;
  }
  int (*real)(const char*, int, ...) = dlsym(RTLD_NEXT, name);
  return real(path, flags, mode);
}

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return faulty_open("open", path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return faulty_open("open64", path, flags, mode);
}
