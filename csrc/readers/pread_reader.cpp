#include "readers/pread_reader.h"

#include <errno.h>
#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "util/threads.h"

namespace weightlift {
namespace {

// Copies that wait for a thread, so that it has the next one at once when it is done: whoever submits may not get a
// processor for a while, when the threads keep them all busy. 2 GiB out of the page cache into fresh small pages, two
// threads on two cores: 0.75 s before this was so, 0.62 s since (`python -m benchmarks.load --only warm`, small pages).
constexpr int kCopiesPerThread = 4;

class PreadReader final : public Reader {
 public:
  explicit PreadReader(const PreadOptions& options)
      : options_(options), queue_depth_(num_threads() + options.num_copying * (kCopiesPerThread - 1)) {
    // With room for all that may be in flight, nothing allocates later.
    queued_.reserve(static_cast<size_t>(queue_depth_));
    done_.reserve(static_cast<size_t>(queue_depth_));
    threads_.reserve(static_cast<size_t>(num_threads()));
    const SignalsBlocked blocked;
    for (int i = 0; i < num_threads(); ++i) {
      threads_.emplace_back([this](const std::stop_token& stop) { work(stop); });
    }
  }

  ~PreadReader() override {
    // All at once, before the first is joined.
    for (std::jthread& thread : threads_) thread.request_stop();
  }

  std::string_view name() const override { return "pread"; }
  int queue_depth() const override { return queue_depth_; }

  int submit(std::span<const ReadRequest> requests) override {
    {
      const std::lock_guard lock(mutex_);
      queued_.insert(queued_.end(), requests.begin(), requests.end());
    }
    for (size_t i = 0; i < requests.size(); ++i) work_available_.notify_one();
    return 0;
  }

  int wait(std::span<ReadCompletion> out, std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    read_done_.wait_for(lock, timeout, [this] { return !done_.empty(); });
    const size_t n = std::min(out.size(), done_.size());
    const auto taken = done_.begin() + static_cast<std::ptrdiff_t>(n);
    std::copy(done_.begin(), taken, out.begin());
    done_.erase(done_.begin(), taken);
    return static_cast<int>(n);
  }

 private:
  int num_threads() const { return std::max(options_.num_waiting, options_.num_copying); }

  // The first request that may begin now. REQUIRES the lock.
  std::vector<ReadRequest>::iterator next() {
    return std::find_if(queued_.begin(), queued_.end(), [this](const ReadRequest& request) {
      return request.cached ? num_copying_ < options_.num_copying : num_waiting_ < options_.num_waiting;
    });
  }

  void work(const std::stop_token& stop) {
    pthread_setname_np(pthread_self(), "wl-pread");
    for (;;) {
      ReadRequest request;
      {
        std::unique_lock lock(mutex_);
        work_available_.wait(lock, stop, [this] { return next() != queued_.end(); });
        if (stop.stop_requested()) return;
        const auto taken = next();
        request = *taken;
        queued_.erase(taken);
        ++(request.cached ? num_copying_ : num_waiting_);
      }
      const int64_t result = read(request);
      {
        const std::lock_guard lock(mutex_);
        --(request.cached ? num_copying_ : num_waiting_);
        done_.push_back({.token = request.token, .result = result});
      }
      read_done_.notify_one();
      work_available_.notify_one();  // this thread may take one of the other kind now
    }
  }

  static int64_t read(const ReadRequest& request) {
    const iovec memory = {.iov_base = request.buffer, .iov_len = static_cast<size_t>(request.length)};
    const ssize_t n = request.flags == 0 ? ::pread(request.fd, memory.iov_base, memory.iov_len, request.offset)
                                         : ::preadv2(request.fd, &memory, 1, request.offset, request.flags);
    return n >= 0 ? n : -errno;
  }

  const PreadOptions options_;
  const int queue_depth_;
  int num_waiting_ = 0;  // reads that have begun, of either kind
  int num_copying_ = 0;
  std::mutex mutex_;  // guards the numbers and the two queues
  std::vector<ReadRequest> queued_;
  std::vector<ReadCompletion> done_;
  std::condition_variable_any work_available_;
  std::condition_variable read_done_;
  std::vector<std::jthread> threads_;  // last: joined before what they use goes
};

}  // namespace

std::unique_ptr<Reader> make_pread_reader(const PreadOptions& options) {
  return std::make_unique<PreadReader>(options);
}

}  // namespace weightlift
