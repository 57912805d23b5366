// Devices: the GPUs that a Pipeline writes to. They carry out what has landed in staging buffers, each by a DeviceLane.
//
// A chunk is over when the host has seen the event behind its last copy or kernel: then its buffer may be used again,
// and its bytes are where they belong, so that nobody has to wait for anything more.
//
// Memory: a scratch of `scratch_bytes` a device, from the first segment on that needs one, by the caller's allocator; a
// chunk that is larger than a slice of it (an op's granule) has it make a larger one. Staging buffers are pinned by
// whoever first copies out of them, while reads go on; where that is refused, copies go on without.
// Failure: of a chunk, told with it; what a device was given before is waited for all the same.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "plan/planner.h"
#include "staging/buffer_ring.h"
#include "staging/device.h"
#include "staging/device_lane.h"
#include "util/fault.h"

namespace weightlift {

// What a segment needs of its caller, on the thread that submits it, where transfers go to devices.
struct DeviceCaller {
  // The streams that destinations, and what ops refer to, were last written on, and that `allocate` gives memory for.
  std::function<std::vector<DeviceStream>(int32_t device)> streams_of;
  // Memory of a device, aligned to 256 bytes, until the Pipeline has ended. May throw.
  std::function<std::byte*(int32_t device, int64_t bytes)> allocate;
};

struct DeviceOptions {
  int64_t scratch_bytes = 0;                                           // of each device
  std::function<std::shared_ptr<Device>(int32_t device)> make_device;  // throws where there can be none
};

class Devices {
 public:
  // `on_ended` is called when num_running() has fallen, `on_fallback` when something was not to be had: by threads of
  // this, and by those that call carry_out(). `ring` must outlive this.
  Devices(DeviceOptions options, const BufferRing& ring, std::function<void()> on_ended,
          std::function<void(std::string)> on_fallback);
  // Waits for what is in flight, and lets go of the staging buffers.
  ~Devices();
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;

  // Makes ready for a plan: starts the devices that it writes to, sees to their scratch, and has them follow the
  // caller. On the thread of submit(). Throws what the caller's functions throw, and where a device can't be used.
  Fault prepare(const Plan& plan, const DeviceCaller& caller);

  // Has the devices carry out their pieces of a chunk that has landed in `buffer`. `done` is called once, when they
  // have, by a thread of this or by the caller's. Any thread of the core, one at a time for a buffer.
  void carry_out(const Plan& plan, const Chunk& chunk, const StagingBuffer& buffer, std::function<void(Fault)> done);

  // Has the devices end when they have nothing in flight. REQUIRES: nothing is carried out from here on.
  void stop();
  int num_running() const { return num_running_.load(std::memory_order_acquire); }  // pairs with the release at an end
  int64_t scratch_bytes() const { return scratch_bytes_.load(std::memory_order_relaxed); }  // of all devices

 private:
  DeviceLane& start(int32_t device);  // unless it runs
  DeviceLane& lane_of(int32_t device) const;
  void provide_scratch(DeviceLane& lane, int32_t device, int64_t bytes, const DeviceCaller& caller);
  void pin(Device& device, const StagingBuffer& buffer);

  const DeviceOptions options_;
  const BufferRing& ring_;
  const std::function<void()> on_ended_;
  const std::function<void(std::string)> on_fallback_;
  std::atomic<int> num_running_{0};
  std::atomic<int64_t> scratch_bytes_{0};
  // Of each staging buffer, the device that it was pinned by. Who has the buffer reads and writes it.
  std::vector<Device*> pinned_by_;
  std::atomic<bool> may_pin_{true};
  mutable std::mutex mutex_;
  std::map<int32_t, std::unique_ptr<DeviceLane>> lanes_;
};

}  // namespace weightlift
