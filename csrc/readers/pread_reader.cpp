#include "readers/pread_reader.h"

#include <errno.h>
#include <pthread.h>
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

// Requests that wait for a thread, so that it has the next one at once when it is done: whoever submits may not get a
// processor for a while, when the threads keep them all busy. 2 GiB out of the page cache into fresh small pages, two
// threads on two cores: 0.75 s before this was so, 0.62 s since (`python -m benchmarks.load --only warm`, small pages).
constexpr int kRequestsPerThread = 4;

class PreadReader final : public Reader {
 public:
  explicit PreadReader(int num_threads) : queue_depth_(num_threads * kRequestsPerThread) {
    // With room for all that may be in flight, nothing allocates later.
    queued_.reserve(static_cast<size_t>(queue_depth_));
    done_.reserve(static_cast<size_t>(queue_depth_));
    threads_.reserve(static_cast<size_t>(num_threads));
    const SignalsBlocked blocked;
    for (int i = 0; i < num_threads; ++i) {
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
  void work(const std::stop_token& stop) {
    pthread_setname_np(pthread_self(), "wl-pread");
    for (;;) {
      ReadRequest request;
      {
        std::unique_lock lock(mutex_);
        work_available_.wait(lock, stop, [this] { return !queued_.empty(); });
        if (stop.stop_requested()) return;
        request = queued_.front();
        queued_.erase(queued_.begin());
      }
      const ssize_t n = ::pread(request.fd, request.buffer, static_cast<size_t>(request.length), request.offset);
      const int64_t result = n >= 0 ? n : -errno;
      {
        const std::lock_guard lock(mutex_);
        done_.push_back({.token = request.token, .result = result});
      }
      read_done_.notify_one();
    }
  }

  const int queue_depth_;
  std::mutex mutex_;  // guards the two queues
  std::vector<ReadRequest> queued_;
  std::vector<ReadCompletion> done_;
  std::condition_variable_any work_available_;
  std::condition_variable read_done_;
  std::vector<std::jthread> threads_;  // last: joined before what they use goes
};

}  // namespace

std::unique_ptr<Reader> make_pread_reader(int num_threads) { return std::make_unique<PreadReader>(num_threads); }

}  // namespace weightlift
