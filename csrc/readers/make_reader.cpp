#include "readers/make_reader.h"

#include <algorithm>
#include <stdexcept>

#include "readers/pread_reader.h"
#include "readers/uring_reader.h"

namespace weightlift {
namespace {

// Threads that wait for storage sleep nearly all the time; more than so many are no better than a deep queue.
constexpr int kMaxWaiting = 64;

}  // namespace

std::unique_ptr<Reader> make_reader(const ReaderOptions& options, bool direct, std::string* fallback) {
  const bool wants_uring = options.backend == Backend::kUring || (options.backend == Backend::kAuto && direct);
  if (wants_uring) {
    std::string refusal;
    if (auto reader = make_uring_reader({options.queue_depth}, &refusal)) return reader;
    if (options.backend == Backend::kUring) throw std::runtime_error(refusal);
    *fallback = "reading with threads instead of io_uring: " + refusal;
  }
  return make_pread_reader(
      {.num_waiting = std::min(options.queue_depth, kMaxWaiting), .num_copying = direct ? 0 : options.num_threads});
}

}  // namespace weightlift
