// A Reader for tests that behaves as badly as the contract allows, by a seeded plan, and aborts when its caller breaks
// the contract. Reads are done on the calling thread, when their completion is taken and not before: memory that is
// looked at early holds a filler, memory that is freed early is written to (which ASan sees).
#pragma once

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "readers/reader.h"

namespace weightlift {

// Nothing goes wrong by default. Chances are from 0 to 1, of one read.
struct FaultPlan {
  uint64_t seed = 1;
  double short_chance = 0;      // fewer bytes than asked for and available, at least one...
  int64_t short_block = 1;      // ...and a multiple of this, as of direct reads; reads of one block are never short
  double interrupt_chance = 0;  // -EINTR or -EAGAIN; below 1, or it never ends
  int64_t fail_read = -1;       // the read of this number, counted from 0, gives -error
  int64_t fail_offset = -1;     // so does every read of this byte of a file
  int error = EIO;              // of all the failures here
  int64_t end_of_file = -1;     // every file seems to end here
  bool out_of_order = false;    // completions come in random order
  int max_delay = 0;            // a completion is held back for up to so many calls of wait()
  int64_t fail_submit = -1;     // the submit() of this number gives -error and starts nothing
  int64_t fail_wait = -1;       // the wait() of this number gives -error
};

class FaultyReader : public Reader {
 public:
  FaultyReader(int queue_depth, const FaultPlan& plan) : queue_depth_(queue_depth), plan_(plan), random_(plan.seed) {}

  // As a real one would: what is in flight still writes its memory.
  ~FaultyReader() override {
    for (const Held& held : held_) complete(held.request);
  }

  std::string_view name() const override { return "faulty"; }
  int queue_depth() const override { return queue_depth_; }

  int submit(std::span<const ReadRequest> requests) override {
    if (num_submits_++ == plan_.fail_submit) return -plan_.error;
    expect(in_flight() + static_cast<int64_t>(requests.size()) <= queue_depth_, "more in flight than queue_depth()");
    for (const ReadRequest& request : requests) {
      expect(request.length > 0 && request.length <= kMaxReadBytes, "length is not in (0, kMaxReadBytes]");
      expect(request.buffer != nullptr && request.offset >= 0, "null buffer or negative offset");
      std::memset(request.buffer, 0xA5, static_cast<size_t>(request.length));
      held_.push_back({request, plan_.max_delay > 0 ? below(plan_.max_delay + 1) : 0});
    }
    max_in_flight_ = std::max(max_in_flight_, in_flight());
    return 0;
  }

  // Never sleeps: 0 comes at once where every completion is held back.
  int wait(std::span<ReadCompletion> out, std::chrono::milliseconds) override {
    if (num_waits_++ == plan_.fail_wait) return -plan_.error;
    if (plan_.out_of_order) std::shuffle(held_.begin(), held_.end(), random_);
    std::vector<Held> later;
    size_t n = 0;
    for (Held& held : held_) {
      if (held.delay > 0 || n == out.size()) {
        held.delay = std::max<int64_t>(held.delay - 1, 0);
        later.push_back(held);
      } else {
        out[n++] = {.token = held.request.token, .result = complete(held.request)};
      }
    }
    held_ = std::move(later);
    return static_cast<int>(n);
  }

  int64_t in_flight() const { return static_cast<int64_t>(held_.size()); }
  int64_t max_in_flight() const { return max_in_flight_; }
  int64_t num_reads() const { return num_reads_; }  // completed, well or not
  int64_t num_bytes() const { return num_bytes_; }  // read

 private:
  struct Held {
    ReadRequest request;
    int64_t delay;
  };

  static void expect(bool kept, const char* broken) {
    if (kept) return;
    std::fprintf(stderr, "FaultyReader: the caller broke the contract: %s\n", broken);
    std::abort();
  }

  bool chance(double probability) { return std::uniform_real_distribution<>()(random_) < probability; }
  int64_t below(int64_t bound) { return std::uniform_int_distribution<int64_t>(0, bound - 1)(random_); }

  int64_t complete(const ReadRequest& request) {
    if (num_reads_++ == plan_.fail_read) return -plan_.error;
    if (plan_.fail_offset >= request.offset && plan_.fail_offset < request.offset + request.length) {
      return -plan_.error;
    }
    if (chance(plan_.interrupt_chance)) return chance(0.5) ? -EINTR : -EAGAIN;

    int64_t length = request.length;
    if (plan_.end_of_file >= 0) length = std::clamp<int64_t>(plan_.end_of_file - request.offset, 0, length);
    const int64_t blocks = length / plan_.short_block;
    if (blocks > 1 && chance(plan_.short_chance)) length = (1 + below(blocks - 1)) * plan_.short_block;
    if (length == 0) return 0;
    const ssize_t n = ::pread(request.fd, request.buffer, static_cast<size_t>(length), request.offset);
    if (n < 0) return -errno;
    num_bytes_ += n;
    return n;
  }

  const int queue_depth_;
  const FaultPlan plan_;
  std::mt19937_64 random_;
  std::vector<Held> held_;  // in flight
  int64_t max_in_flight_ = 0;
  int64_t num_reads_ = 0;
  int64_t num_bytes_ = 0;
  int64_t num_submits_ = 0;
  int64_t num_waits_ = 0;
};

}  // namespace weightlift
