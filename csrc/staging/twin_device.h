// TwinDevice: a Device for machines without a GPU. Its memory is host memory; what it is given is done late, by threads
// of its own, in an order that is random but for that within a stream. So whatever a real GPU might be caught at is
// caught: a staging buffer or scratch that is used again too early, a wait that is missing, an error that is lost.
//
// Aborts when its caller breaks the contract of Device. For tests.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "plan/geometry.h"
#include "staging/device.h"

namespace weightlift {

struct TwinOptions {
  uint64_t seed = 1;
  int num_streams = 3;
  int max_delay_us = 100;         // before each piece of work
  std::vector<ByteRange> memory;  // of the device: work may touch nothing else there. Empty: any
  int64_t refuse_call = -1;       // the call of this number, of those that give work, is refused
  int64_t fail_work = -1;         // the work of this number, in the order in which it is done, fails
  bool refuse_pin = false;
};

class TwinDevice final : public Device {
 public:
  explicit TwinDevice(TwinOptions options);
  ~TwinDevice() override;

  // A stream of a caller, for follow(); null is one that nothing is given to. Its work is done as that of any.
  DeviceStream make_stream();
  void enqueue(DeviceStream stream, std::function<void()> work);
  // Nothing is done from here on, until resume().
  void pause();
  void resume();

  int64_t num_calls() const { return num_calls_; }  // that gave work
  int64_t num_launches() const { return num_launches_; }
  int64_t num_copies() const { return num_copies_; }
  int64_t num_pinned() const;

  std::string describe(int status) const override;
  int pin(std::byte* memory, int64_t bytes) override;
  void unpin(std::byte* memory) override;
  int num_streams() const override { return options_.num_streams; }
  int follow(DeviceStream caller) override;
  int copy_to_device(int stream, std::byte* dst, const std::byte* src, int64_t bytes) override;
  int copy_elements(int stream, std::span<const DeviceCopy> copies) override;
  int run_op(int stream, const Op& op, const std::byte* src, int64_t src_row_stride, int64_t first_row,
             int64_t num_rows) override;
  int record(int stream, DeviceEvent* event) override;
  int wait(DeviceEvent event) override;

 private:
  struct Event {
    bool over = false;
    int status = 0;
  };
  // In this order: wait for an event, work, note an event.
  struct Task {
    std::shared_ptr<Event> after;
    std::function<void()> work;
    std::shared_ptr<Event> event;
    ByteRange host{};  // what it reads there
  };
  struct Stream {
    std::deque<Task> tasks;  // the first may be under way
    bool busy = false;
    int status = 0;  // of what failed since the last event
    std::atomic_flag in_call = ATOMIC_FLAG_INIT;
  };

  // Gives a stream work, by a call that may be refused.
  int give(int stream, Task task);
  Stream& stream(int index);
  bool refuses();
  void require_memory(ByteRange range, const char* what) const;
  void run();

  const TwinOptions options_;
  std::atomic<int64_t> num_calls_{0};
  std::atomic<int64_t> num_launches_{0};
  std::atomic<int64_t> num_copies_{0};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::deque<Stream> streams_;  // its own, then its callers'
  std::vector<ByteRange> pinned_;
  std::vector<std::shared_ptr<Event>> recorded_;  // and not waited for
  int64_t num_done_ = 0;
  bool paused_ = false;
  bool stopping_ = false;
  std::vector<std::thread> engines_;
};

}  // namespace weightlift
