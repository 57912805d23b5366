#include "staging/devices.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "staging/carry_out.h"

namespace weightlift {

Devices::Devices(DeviceOptions options, const BufferRing& ring, std::function<void()> on_ended,
                 std::function<void(std::string)> on_fallback)
    : options_(std::move(options)),
      ring_(ring),
      on_ended_(std::move(on_ended)),
      on_fallback_(std::move(on_fallback)),
      pinned_by_(static_cast<size_t>(ring.num_buffers()), nullptr) {}

Devices::~Devices() {
  std::vector<std::shared_ptr<Device>> devices;
  for (const auto& [index, lane] : lanes_) devices.push_back(lane->device());
  stop();
  lanes_.clear();
  for (size_t i = 0; i < pinned_by_.size(); ++i) {
    if (pinned_by_[i]) pinned_by_[i]->unpin(ring_.address(static_cast<int>(i)));
  }
}

void Devices::stop() {
  std::lock_guard lock(mutex_);
  for (const auto& [index, lane] : lanes_) lane->stop();
}

DeviceLane& Devices::lane_of(int32_t device) const {
  std::lock_guard lock(mutex_);
  return *lanes_.at(device);
}

DeviceLane& Devices::start(int32_t device) {
  std::lock_guard lock(mutex_);
  const auto found = lanes_.find(device);
  if (found != lanes_.end()) return *found->second;
  auto lane = std::make_unique<DeviceLane>(device, options_.make_device(device), [this] {
    num_running_.fetch_sub(1, std::memory_order_release);
    on_ended_();
  });
  num_running_.fetch_add(1, std::memory_order_relaxed);
  return *(lanes_[device] = std::move(lane));
}

Fault Devices::prepare(const Plan& plan, const DeviceCaller& caller) {
  std::map<int32_t, const Transfer*> first_of;
  for (const Transfer& transfer : plan.transfers) {
    if (transfer.device != kHost) first_of.try_emplace(transfer.device, &transfer);
  }
  for (const auto& [device, first] : first_of) {
    DeviceLane& lane = start(device);
    if (const int64_t bytes = lane.scratch_needed(plan)) provide_scratch(lane, device, bytes, caller);
    // Last: the caller's allocator may give out memory that its stream still uses.
    for (DeviceStream stream : caller.streams_of(device)) {
      if (const int status = lane.device()->follow(stream)) return lane.fault_of(status, *first);
    }
  }
  return {};
}

void Devices::provide_scratch(DeviceLane& lane, int32_t device, int64_t bytes, const DeviceCaller& caller) {
  const auto allocate = [&](int64_t wanted) {
    std::byte* memory = caller.allocate(device, wanted);
    scratch_bytes_.fetch_add(wanted, std::memory_order_relaxed);
    return memory;
  };
  if (lane.largest_slice() == 0) {
    const int64_t wanted = std::max(options_.scratch_bytes, bytes);
    lane.set_scratch(allocate(wanted), wanted, bytes);
  } else if (lane.largest_slice() < bytes) {
    lane.set_first_slice(allocate(bytes), bytes);
  }
}

void Devices::pin(Device& device, const StagingBuffer& buffer) {
  for (int i = buffer.first; i < buffer.first + buffer.count; ++i) {
    Device*& pinned_by = pinned_by_[static_cast<size_t>(i)];
    if (pinned_by || !may_pin_) continue;
    const int status = device.pin(ring_.address(i), ring_.buffer_bytes());
    if (status == 0) {
      pinned_by = &device;
    } else if (may_pin_.exchange(false)) {
      on_fallback_("copying to GPUs out of memory that is not pinned, which is slower: " + device.describe(status));
    }
  }
}

void Devices::carry_out(const Plan& plan, const Chunk& chunk, const StagingBuffer& buffer,
                        std::function<void(Fault)> done) {
  std::vector<int32_t> devices;
  for (int64_t i = chunk.first_piece; i < chunk.first_piece + chunk.num_pieces; ++i) {
    const Piece& piece = plan.pieces[static_cast<size_t>(i)];
    const Transfer& transfer = plan.transfers[static_cast<size_t>(piece.transfer)];
    if (transfer.device == kHost) continue;
    if (transfer.op) align_rows(plan, piece, buffer.memory);
    if (std::ranges::find(devices, transfer.device) == devices.end()) devices.push_back(transfer.device);
  }
  if (devices.size() > 1) {
    // The last of them tells, with the first fault.
    struct Left {
      std::mutex mutex;
      size_t count;
      Fault fault{};
      std::function<void(Fault)> done;
    };
    auto left = std::make_shared<Left>();
    left->count = devices.size();
    left->done = std::move(done);
    done = [left](Fault fault) {
      std::unique_lock lock(left->mutex);
      if (!left->fault) left->fault = std::move(fault);
      if (--left->count > 0) return;
      lock.unlock();
      left->done(std::move(left->fault));
    };
  }
  for (int32_t device : devices) {
    try {
      DeviceLane& lane = lane_of(device);
      pin(*lane.device(), buffer);
      lane.carry_out(plan, chunk, buffer, ring_.buffer_bytes(), done);
    } catch (const std::exception& e) {  // no memory; another device may be at work already
      done({FaultKind::kUnavailable, 0, -1, -1, -1, e.what()});
    }
  }
}

}  // namespace weightlift
