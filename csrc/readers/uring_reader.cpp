#include "readers/uring_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <utility>

#include "util/unique_fd.h"

namespace weightlift {
namespace {

// Sizes of the tables of registered buffers and files: empty slots cost the kernel some bytes each. A file table larger
// than RLIMIT_NOFILE is refused.
constexpr int kMaxBuffers = 1024;
constexpr int kMaxFiles = 256;

// How long wait() sleeps at most while requests are left that the kernel had no memory to take.
constexpr auto kSubmitRetry = std::chrono::milliseconds(10);

// Best first. Completions run on the thread that waits for them, and not as interrupts of whatever it does: Linux 6.1;
// 5.19. The ring starts disabled: the kernel takes the thread that enables it for the owner. SQPOLL is not among them,
// since it burns a core, nor IOPOLL, which hangs where a driver has no poll queues.
constexpr unsigned kSetupFlags[] = {
    IORING_SETUP_R_DISABLED | IORING_SETUP_SUBMIT_ALL | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
    IORING_SETUP_R_DISABLED | IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN,
    IORING_SETUP_R_DISABLED,
};

// kernel.io_uring_disabled: '0', '1', '2', or 0 where there is no such sysctl.
char io_uring_disabled() {
  const UniqueFd fd(::open("/proc/sys/kernel/io_uring_disabled", O_RDONLY | O_CLOEXEC));
  char value = 0;
  return fd && ::read(fd.get(), &value, 1) == 1 ? value : 0;
}

std::string setup_refusal(int error) {
  switch (error) {
    case EPERM:
      switch (io_uring_disabled()) {
        case '1':
          return "io_uring is kept for privileged processes (kernel.io_uring_disabled=1; see kernel.io_uring_group)";
        case '2':
          return "io_uring is switched off on this host (kernel.io_uring_disabled=2)";
        default:
          return "io_uring is forbidden to this process, as by a container's seccomp profile (EPERM; the profile must "
                 "allow io_uring_setup, io_uring_enter and io_uring_register)";
      }
    case ENOSYS:
      return "this kernel has no io_uring, or a seccomp profile says so (ENOSYS)";
    case ENOMEM:
      return "no memory for an io_uring ring (ENOMEM; many kernels count rings against RLIMIT_MEMLOCK)";
    case EINVAL:
      return "this kernel's io_uring is too old (EINVAL from io_uring_setup; Linux 5.11 is needed)";
    case EMFILE:
      return "no file descriptor is left for an io_uring ring (EMFILE; RLIMIT_NOFILE)";
    case ENFILE:
      return "no file descriptor is left for an io_uring ring on this host (ENFILE; fs.file-max)";
    default:
      return std::string("io_uring_setup failed: ") + ::strerror(error);
  }
}

// Whether the ring can do what this reader needs; if not, the sentence why.
std::string missing_ability(io_uring* ring) {
  if ((ring->features & IORING_FEAT_EXT_ARG) == 0) {
    return "this kernel's io_uring cannot wait with a timeout (Linux 5.11 is needed)";
  }
  io_uring_probe* probe = io_uring_get_probe_ring(ring);
  if (probe == nullptr) return "io_uring_register is refused, as by a container's seccomp profile";
  const bool reads = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                     io_uring_opcode_supported(probe, IORING_OP_READ_FIXED) != 0;
  io_uring_free_probe(probe);
  if (!reads) return "this kernel's io_uring lacks reads (IORING_OP_READ; Linux 5.11 is needed)";
  return {};
}

class UringReader final : public Reader {
 public:
  // Takes over a ring that was set up disabled.
  UringReader(const io_uring& ring, int queue_depth)
      : ring_(ring),
        queue_depth_(queue_depth),
        buffers_error_(io_uring_register_buffers_sparse(&ring_, kMaxBuffers)),
        files_error_(io_uring_register_files_sparse(&ring_, kMaxFiles)) {
    io_uring_ring_dontfork(&ring_);
  }

  ~UringReader() override {
    // The kernel writes into the caller's memory until the last read has completed. Requests that it has not taken yet
    // go with the ring. Cancelling reaches reads that wait for a kernel worker, not those that a device has.
    if (in_kernel_ > 0) {
      io_uring_sync_cancel_reg every = {};  // a timeout of 0: the waiting is done below
      every.flags = IORING_ASYNC_CANCEL_ANY | IORING_ASYNC_CANCEL_ALL;
      io_uring_register_sync_cancel(&ring_, &every);
    }
    std::array<ReadCompletion, 64> completions;
    while (in_kernel_ > 0) {
      io_uring_cqe* cqe = nullptr;
      const int error = io_uring_wait_cqe(&ring_, &cqe);
      assert(error != -EEXIST && "destroyed on a thread that does not own it");
      if (error == 0) reap(completions);
    }
    io_uring_queue_exit(&ring_);
  }

  std::string_view name() const override { return "io_uring"; }
  int queue_depth() const override { return queue_depth_; }

  int submit(std::span<const ReadRequest> requests) override {
    if (int error = enable(); error < 0) return error;
    if (failure_ < 0) return failure_;
    for (const ReadRequest& request : requests) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      assert(sqe != nullptr && "more reads in flight than queue_depth()");
      const bool fixed_file = request.file_index >= 0;
      const int fd = fixed_file ? request.file_index : request.fd;
      const auto length = static_cast<unsigned>(request.length);
      if (request.buffer_index >= 0) {
        io_uring_prep_read_fixed(sqe, fd, request.buffer, length, request.offset, request.buffer_index);
      } else {
        io_uring_prep_read(sqe, fd, request.buffer, length, request.offset);
      }
      sqe->rw_flags = request.flags;
      if (fixed_file) io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
      io_uring_sqe_set_data64(sqe, request.token);
    }
    // If some did start, they complete, and wait() tells the error after them.
    const int error = submit_queued();
    return io_uring_sq_ready(&ring_) < requests.size() ? 0 : error;
  }

  int wait(std::span<ReadCompletion> out, std::chrono::milliseconds timeout) override {
    using Clock = std::chrono::steady_clock;
    if (out.empty()) return 0;
    if (int error = enable(); error < 0) return error;
    const Clock::time_point deadline = Clock::now() + timeout;
    for (;;) {
      const int submit_error = submit_queued();
      if (int n = reap(out); n > 0) return n;
      if (submit_error < 0 && in_kernel_ == 0) return submit_error;

      Clock::duration left = std::max(deadline - Clock::now(), Clock::duration::zero());
      if (io_uring_sq_ready(&ring_) > 0) left = std::min<Clock::duration>(left, kSubmitRetry);
      __kernel_timespec limit = {.tv_sec = left / std::chrono::seconds(1),
                                 .tv_nsec = (left % std::chrono::seconds(1)) / std::chrono::nanoseconds(1)};
      io_uring_cqe* cqe = nullptr;
      const int error = io_uring_wait_cqe_timeout(&ring_, &cqe, &limit);
      if (int n = reap(out); n > 0) return n;
      if (error < 0 && error != -ETIME && error != -EINTR && error != -EAGAIN) return error;
      if (Clock::now() >= deadline) return 0;
    }
  }

  int register_buffer(std::byte* buffer, size_t length) override {
    if (buffers_error_ < 0) return buffers_error_;
    if (num_buffers_ == kMaxBuffers) return -ENOSPC;
    const iovec memory = {.iov_base = buffer, .iov_len = length};
    const int done = io_uring_register_buffers_update_tag(&ring_, num_buffers_, &memory, nullptr, 1);
    if (done < 1) return done < 0 ? done : -EINVAL;
    return num_buffers_++;
  }

  int register_file(int fd) override {
    if (files_error_ < 0) return files_error_;
    if (fd < 0) return -EBADF;  // to the kernel -1 means: empty the slot
    if (num_files_ == kMaxFiles) return -ENOSPC;
    const int done = io_uring_register_files_update(&ring_, num_files_, &fd, 1);
    if (done < 1) return done < 0 ? done : -EINVAL;
    return num_files_++;
  }

 private:
  // Makes the calling thread the ring's owner, once.
  int enable() {
    if (enabled_) return 0;
    const int error = io_uring_enable_rings(&ring_);
    enabled_ = error == 0;
    if (!enabled_) return error;
    // Where reads can't be started without waiting (FUSE, NFS), the kernel has threads of its own wait: four for each
    // core, unless it is told otherwise. An old kernel (before 5.15) stays with that.
    std::array<unsigned, 2> workers = {static_cast<unsigned>(queue_depth_), 0};
    io_uring_register_iowq_max_workers(&ring_, workers.data());
    return 0;
  }

  // Gives the kernel what is queued. What it has no room for now stays queued for the next call: not an error.
  int submit_queued() {
    while (failure_ == 0 && io_uring_sq_ready(&ring_) > 0) {
      const int taken = io_uring_submit(&ring_);
      if (taken == 0 || taken == -EAGAIN || taken == -EBUSY || taken == -EINTR) return 0;
      if (taken < 0) {
        failure_ = taken;  // what is queued must never start now: the caller has been told that it did not
      } else {
        in_kernel_ += taken;
      }
    }
    return failure_;
  }

  // Takes what has completed, without a system call.
  int reap(std::span<ReadCompletion> out) {
    size_t n = 0;
    unsigned head;
    io_uring_cqe* cqe;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      if (n == out.size()) break;
      out[n++] = {.token = io_uring_cqe_get_data64(cqe), .result = cqe->res};
    }
    io_uring_cq_advance(&ring_, static_cast<unsigned>(n));
    in_kernel_ -= static_cast<int>(n);
    return static_cast<int>(n);
  }

  io_uring ring_;
  const int queue_depth_;
  bool enabled_ = false;
  int in_kernel_ = 0;  // reads taken by the kernel, completion not yet reaped
  int failure_ = 0;    // -errno of a submission that was refused for good

  const int buffers_error_;  // 0, or why there is no table of buffers; the same for files
  const int files_error_;
  int num_buffers_ = 0;
  int num_files_ = 0;
};

}  // namespace

std::unique_ptr<Reader> make_uring_reader(const UringOptions& options, std::string* refusal) {
  if (options.queue_depth < 1 || options.queue_depth > kMaxUringQueueDepth) {
    *refusal = "io_uring queue depth " + std::to_string(options.queue_depth) + " is not between 1 and " +
               std::to_string(kMaxUringQueueDepth);
    return nullptr;
  }
  io_uring ring;
  int error = -EINVAL;
  for (const unsigned flags : kSetupFlags) {
    error = io_uring_queue_init(static_cast<unsigned>(options.queue_depth), &ring, flags);
    if (error != -EINVAL) break;
  }
  if (error < 0) {
    *refusal = setup_refusal(-error);
    return nullptr;
  }
  if (std::string missing = missing_ability(&ring); !missing.empty()) {
    io_uring_queue_exit(&ring);
    *refusal = std::move(missing);
    return nullptr;
  }
  return std::make_unique<UringReader>(ring, options.queue_depth);
}

}  // namespace weightlift
