// DeviceLane: one GPU of a Pipeline. Chunks that have landed go to its streams; a thread waits for the events behind
// them. See devices.h.
//
// Plain copies of some size go straight from the staging buffer to their destination. What else a chunk brings is
// copied once into scratch, memory of the device, of which each stream has a slice, and taken from there by kernels. So
// the order of the stream is all that makes a slice safe to use again.
//
// Threads: carry_out() on any of the core's, everything else on that which submits. The work of a chunk is given to its
// stream by one thread at a time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "plan/planner.h"
#include "staging/buffer_ring.h"
#include "staging/device.h"
#include "util/fault.h"

namespace weightlift {

class DeviceLane {
 public:
  // `on_ended` is called by the thread of its own, as the last that it does.
  DeviceLane(int32_t index, std::shared_ptr<Device> device, std::function<void()> on_ended);
  ~DeviceLane();  // waits for what is in flight

  const std::shared_ptr<Device>& device() const { return device_; }

  // Scratch that no chunk of the plan takes more of; 0 when none takes any.
  int64_t scratch_needed(const Plan& plan) const;
  int64_t largest_slice() const { return slices_.front().bytes; }
  // Cuts scratch into slices of at least `least_bytes`, for as many streams as that allows.
  void set_scratch(std::byte* memory, int64_t bytes, int64_t least_bytes);
  // A larger slice for the first stream. The one before must stay: work in flight uses it.
  void set_first_slice(std::byte* memory, int64_t bytes);

  // Begins the pieces of a chunk that are this device's. `done` is called once when they are over. Copies do not cross
  // borders between buffers of `buffer_bytes`. Throws only where nothing was begun: `done` is not called then.
  void carry_out(const Plan& plan, const Chunk& chunk, const StagingBuffer& buffer, int64_t buffer_bytes,
                 std::function<void(Fault)> done);

  Fault fault_of(int status, const Transfer& transfer) const;

  // Has the thread end when nothing is in flight. REQUIRES: no carry_out() from here on.
  void stop();

 private:
  struct Slice {
    std::byte* memory = nullptr;
    int64_t bytes = 0;
  };
  struct Work;  // of a chunk
  struct InFlight {
    DeviceEvent event = nullptr;         // none: nothing is in flight
    const Transfer* transfer = nullptr;  // to name what fails later
    Fault fault;                         // what was refused
    std::function<void(Fault)> done;
  };

  Work work_of(const Plan& plan, const Chunk& chunk, std::byte* staging) const;
  // Returns the first status that is not 0. `transfer` is the last that was begun.
  int begin(int stream, const Slice& slice, const Work& work, const StagingBuffer& buffer, int64_t buffer_bytes,
            const Transfer** transfer);
  int copy(int stream, std::byte* dst, const std::byte* src, int64_t bytes, const StagingBuffer& buffer,
           int64_t buffer_bytes);
  void run();

  const int32_t index_;
  const std::shared_ptr<Device> device_;
  const std::function<void()> on_ended_;
  std::vector<std::mutex> stream_mutexes_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Slice> slices_;  // of each stream
  size_t next_stream_ = 0;
  std::list<InFlight> in_flight_;  // in the order in which they are waited for
  bool stopping_ = false;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace weightlift
