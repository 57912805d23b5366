// A file system for tests that shows one folder, read-only, and fails on command: by what the file `control` of that
// folder says at the time of each read. No such file: nothing fails.
//
//   delay_ms N      a read takes so long
//   short N         a read brings N bytes at most
//   errno N FROM    a read that reaches this offset fails with this errno
//   hang FROM       a read that reaches this offset is answered when `control` says so no more
//   hang_open       so is opening a file
//
// Built with libfuse3 (Debian: apt-get install libfuse3-dev fuse3). Usage: faulty_fuse FOLDER MOUNT_POINT -f -o OPTIONS
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char* folder;

struct faults {
  long delay_ms, most, error, error_from, hang_from, hang_open;
};

static void path_of(const char* name, char* path) { snprintf(path, 4096, "%s%s", folder, name); }

static struct faults faults_now(void) {
  struct faults faults = {.most = -1, .error_from = -1, .hang_from = -1};
  char path[4096], word[32];
  path_of("/control", path);
  FILE* control = fopen(path, "r");
  if (control == NULL) return faults;
  while (fscanf(control, "%31s", word) == 1) {
    if (strcmp(word, "delay_ms") == 0) (void)!fscanf(control, "%ld", &faults.delay_ms);
    if (strcmp(word, "short") == 0) (void)!fscanf(control, "%ld", &faults.most);
    if (strcmp(word, "errno") == 0) (void)!fscanf(control, "%ld %ld", &faults.error, &faults.error_from);
    if (strcmp(word, "hang") == 0) (void)!fscanf(control, "%ld", &faults.hang_from);
    if (strcmp(word, "hang_open") == 0) faults.hang_open = 1;
  }
  fclose(control);
  return faults;
}

static int faulty_getattr(const char* name, struct stat* st, struct fuse_file_info* info) {
  (void)info;
  char path[4096];
  path_of(name, path);
  return lstat(path, st) == 0 ? 0 : -errno;
}

static int faulty_open(const char* name, struct fuse_file_info* info) {
  char path[4096];
  path_of(name, path);
  while (faults_now().hang_open) usleep(10000);
  // Through its page cache the kernel would take a short answer for the end of the file, and put zeros behind it.
  info->direct_io = faults_now().most >= 0;
  const int fd = open(path, info->flags & ~O_DIRECT);
  if (fd < 0) return -errno;
  info->fh = (uint64_t)fd;
  return 0;
}

static int faulty_read(const char* name, char* buffer, size_t size, off_t offset, struct fuse_file_info* info) {
  (void)name;
  struct faults faults = faults_now();
  while (faults.hang_from >= 0 && offset + (off_t)size > faults.hang_from) {
    usleep(10000);
    faults = faults_now();
  }
  usleep((useconds_t)faults.delay_ms * 1000);
  if (faults.error_from >= 0 && offset + (off_t)size > faults.error_from) return -(int)faults.error;
  if (faults.most >= 0 && size > (size_t)faults.most) size = (size_t)faults.most;
  const ssize_t n = pread((int)info->fh, buffer, size, offset);
  return n < 0 ? -errno : (int)n;
}

static int faulty_release(const char* name, struct fuse_file_info* info) {
  (void)name;
  close((int)info->fh);
  return 0;
}

static int faulty_readdir(const char* name, void* entries, fuse_fill_dir_t fill, off_t offset,
                          struct fuse_file_info* info, enum fuse_readdir_flags flags) {
  (void)name, (void)offset, (void)info, (void)flags;
  char command[4200], line[4096];
  snprintf(command, sizeof(command), "ls '%s'", folder);
  FILE* list = popen(command, "r");
  while (list && fgets(line, sizeof(line), list)) {
    line[strcspn(line, "\n")] = 0;
    fill(entries, line, NULL, 0, 0);
  }
  if (list) pclose(list);
  return 0;
}

static const struct fuse_operations operations = {
    .getattr = faulty_getattr,
    .open = faulty_open,
    .read = faulty_read,
    .release = faulty_release,
    .readdir = faulty_readdir,
};

int main(int argc, char** argv) {
  folder = argv[1];
  argv[1] = argv[0];
  return fuse_main(argc - 1, argv + 1, &operations, NULL);
}
