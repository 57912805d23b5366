// A file system that shows one folder, read-only, as if across a network: with a latency, a bandwidth that all reads
// share, and one that each stream has. Everything else about it is as fast as FUSE can be, so that what a loader misses
// of the bandwidth is the loader's.
//
//   slow_link FOLDER MOUNT_POINT -f [--latency-us=N] [--bandwidth=BYTES_PER_SECOND]
//             [--stream-bandwidth=BYTES_PER_SECOND] [--stream=request|handle|file] [options of FUSE]
//
// A read is answered when its latency is over, and its bytes have passed the link and its stream, each a queue. Opening a
// file and listing a folder take their latency; names and attributes come with the list, as on NFS. A stream is a request (a gateway makes one of a GET each), an open
// file (one that reads ahead), or a file (which lies on one server). Pages stay in the page cache when a file is opened
// again, as on NFS. On SIGINT and when it is unmounted it prints what it was asked for, as JSON.
//
// Built with libfuse3 (Debian: apt-get install libfuse3-dev fuse3).
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { kMaxPath = 4096 };

// Requests that wait for their answer, a thread each.
static const char* const kThreads = "-omax_threads=512,max_idle_threads=512";
static const unsigned kMaxBackground = 512;

static struct {
  char* folder;
  double latency_us, bandwidth, stream_bandwidth;  // 0: no limit
  char* stream;  // NULL: a request
} options;

typedef struct Stream {
  double free_at;  // when what was asked of it before has passed
  dev_t device;
  ino_t inode;
  struct Stream* next;
} Stream;

typedef struct {
  int fd;
  Stream own;
  Stream* stream;  // its own, or the file's; NULL: a stream is a request
} Handle;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards all below, and what is in streams
static double link_free_at;
static Stream* files;  // streams of files, kept
static long num_opens, num_reads, num_bytes, num_in_flight, most_in_flight, num_other;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void sleep_until(double end) {
  const struct timespec time = {(time_t)end, (long)((end - (double)(time_t)end) * 1e9)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR) continue;
}

// When the bytes have passed one more queue, in which they are behind what was sent before.
static double pass(double* free_at, double from, double bandwidth, size_t size) {
  if (bandwidth <= 0) return from;
  *free_at = (*free_at > from ? *free_at : from) + (double)size / bandwidth;
  return *free_at;
}

static void wait_for_latency(void) {
  const double end = now() + options.latency_us * 1e-6;
  pthread_mutex_lock(&mutex);
  ++num_other;
  pthread_mutex_unlock(&mutex);
  sleep_until(end);
}

static void wait_for_bytes(Stream* stream, size_t size) {
  const double sent = now() + options.latency_us * 1e-6;
  Stream of_request = {.free_at = 0};
  pthread_mutex_lock(&mutex);
  ++num_reads;
  num_bytes += (long)size;
  if (++num_in_flight > most_in_flight) most_in_flight = num_in_flight;
  const double through_link = pass(&link_free_at, sent, options.bandwidth, size);
  const double through_stream =
      pass(&(stream != NULL ? stream : &of_request)->free_at, sent, options.stream_bandwidth, size);
  pthread_mutex_unlock(&mutex);
  sleep_until(through_link > through_stream ? through_link : through_stream);
  pthread_mutex_lock(&mutex);
  --num_in_flight;
  pthread_mutex_unlock(&mutex);
}

static void path_of(const char* name, char* path) { snprintf(path, kMaxPath, "%s%s", options.folder, name); }

static int link_getattr(const char* name, struct stat* st, struct fuse_file_info* info) {
  (void)info;
  char path[kMaxPath];
  path_of(name, path);
  return lstat(path, st) == 0 ? 0 : -errno;
}

static Stream* stream_of_file(int fd) {
  struct stat st;
  if (fstat(fd, &st) != 0) return NULL;
  Stream* stream = files;
  while (stream != NULL && (stream->device != st.st_dev || stream->inode != st.st_ino)) stream = stream->next;
  if (stream == NULL && (stream = calloc(1, sizeof(*stream))) != NULL) {
    *stream = (Stream){.device = st.st_dev, .inode = st.st_ino, .next = files};
    files = stream;
  }
  return stream;
}

static int link_open(const char* name, struct fuse_file_info* info) {
  char path[kMaxPath];
  path_of(name, path);
  wait_for_latency();
  Handle* handle = calloc(1, sizeof(*handle));
  if (handle == NULL) return -ENOMEM;
  handle->fd = open(path, O_RDONLY | O_CLOEXEC);
  if (handle->fd < 0) {
    free(handle);
    return -errno;
  }
  pthread_mutex_lock(&mutex);
  ++num_opens;
  if (options.stream != NULL && strcmp(options.stream, "handle") == 0) handle->stream = &handle->own;
  if (options.stream != NULL && strcmp(options.stream, "file") == 0) handle->stream = stream_of_file(handle->fd);
  pthread_mutex_unlock(&mutex);
  info->fh = (uint64_t)(uintptr_t)handle;
  info->keep_cache = 1;
  return 0;
}

// The bytes go from the file's pages to the kernel's by splice, without a copy here.
static int link_read_buf(const char* name, struct fuse_bufvec** answer, size_t size, off_t offset,
                         struct fuse_file_info* info) {
  (void)name;
  Handle* handle = (Handle*)(uintptr_t)info->fh;
  struct fuse_bufvec* buffer = malloc(sizeof(*buffer));
  if (buffer == NULL) return -ENOMEM;
  *buffer = FUSE_BUFVEC_INIT(size);
  buffer->buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
  buffer->buf[0].fd = handle->fd;
  buffer->buf[0].pos = offset;
  wait_for_bytes(handle->stream, size);
  *answer = buffer;
  return 0;
}

static int link_release(const char* name, struct fuse_file_info* info) {
  (void)name;
  Handle* handle = (Handle*)(uintptr_t)info->fh;
  close(handle->fd);
  free(handle);
  return 0;
}

static int link_readdir(const char* name, void* entries, fuse_fill_dir_t fill, off_t offset,
                        struct fuse_file_info* info, enum fuse_readdir_flags flags) {
  (void)offset, (void)info, (void)flags;
  char path[kMaxPath];
  path_of(name, path);
  wait_for_latency();
  DIR* folder = opendir(path);
  if (folder == NULL) return -errno;
  for (const struct dirent* entry; (entry = readdir(folder)) != NULL;) fill(entries, entry->d_name, NULL, 0, 0);
  closedir(folder);
  return 0;
}

static void* link_init(struct fuse_conn_info* connection, struct fuse_config* config) {
  connection->max_background = connection->congestion_threshold = kMaxBackground;
  // Attributes are believed for a while, as NFS does.
  config->attr_timeout = config->entry_timeout = 60;
  return NULL;
}

static const struct fuse_operations operations = {
    .init = link_init,
    .getattr = link_getattr,
    .open = link_open,
    .read_buf = link_read_buf,
    .release = link_release,
    .readdir = link_readdir,
};

static const struct fuse_opt kOptions[] = {
    {"--latency-us=%lf", offsetof(__typeof__(options), latency_us), 0},
    {"--bandwidth=%lf", offsetof(__typeof__(options), bandwidth), 0},
    {"--stream-bandwidth=%lf", offsetof(__typeof__(options), stream_bandwidth), 0},
    {"--stream=%s", offsetof(__typeof__(options), stream), 0},
    FUSE_OPT_END,
};

// The first argument that is no option is the folder, not the mount point.
static int take_folder(void* data, const char* argument, int key, struct fuse_args* arguments) {
  (void)data, (void)arguments;
  if (key != FUSE_OPT_KEY_NONOPT || options.folder != NULL) return 1;
  options.folder = realpath(argument, NULL);
  return 0;
}

int main(int argc, char** argv) {
  struct fuse_args arguments = FUSE_ARGS_INIT(argc, argv);
  if (fuse_opt_parse(&arguments, &options, kOptions, take_folder) != 0 || options.folder == NULL) {
    fprintf(stderr, "usage: see the head of slow_link.c\n");
    return 2;
  }
  fuse_opt_add_arg(&arguments, kThreads);
  prctl(PR_SET_TIMERSLACK, 1);  // of the threads too that this one starts
  const int result = fuse_main(arguments.argc, arguments.argv, &operations, NULL);
  printf("{\"opens\": %ld, \"reads\": %ld, \"bytes\": %ld, \"most_in_flight\": %ld, \"other\": %ld}\n", num_opens,
         num_reads, num_bytes, most_in_flight, num_other);
  fuse_opt_free_args(&arguments);
  return result;
}
