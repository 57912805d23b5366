#include "staging/twin_device.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "transform/copy.h"
#include "util/threads.h"

namespace weightlift {
namespace {

constexpr int kNumEngines = 2;
constexpr int kRefused = 1;
constexpr int kFailed = 700;

void expect(bool kept, const char* broken) {
  if (kept) return;
  std::fprintf(stderr, "TwinDevice: the caller broke the contract: %s\n", broken);
  std::abort();
}

ByteRange range_of(const std::byte* begin, int64_t bytes) {
  const auto at = reinterpret_cast<int64_t>(begin);
  return {at, at + bytes};
}

bool overlap(ByteRange a, ByteRange b) { return a.begin < b.end && b.begin < a.end; }
bool holds(ByteRange outer, ByteRange inner) { return outer.begin <= inner.begin && inner.end <= outer.end; }

}  // namespace

TwinDevice::TwinDevice(TwinOptions options)
    : options_(std::move(options)), random_(options_.seed), streams_(static_cast<size_t>(options_.num_streams)) {
  for (int i = 0; i < kNumEngines; ++i) engines_.push_back(start_thread("wl-twin", [this] { run(); }));
}

TwinDevice::~TwinDevice() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    for (int i = 0; i < options_.num_streams; ++i) {
      expect(streams_[static_cast<size_t>(i)].tasks.empty(), "the device ends with work in flight");
    }
    expect(pinned_.empty(), "the device ends, and memory is still pinned");
    expect(recorded_.empty(), "the device ends, and an event was never waited for");
  }
  changed_.notify_all();
  for (std::thread& engine : engines_) engine.join();
}

DeviceStream TwinDevice::make_stream() {
  std::lock_guard lock(mutex_);
  return &streams_.emplace_back();
}

void TwinDevice::enqueue(DeviceStream stream, std::function<void()> work) {
  std::lock_guard lock(mutex_);
  static_cast<Stream*>(stream)->tasks.push_back({nullptr, std::move(work), nullptr});
  changed_.notify_all();
}

void TwinDevice::pause() {
  std::lock_guard lock(mutex_);
  paused_ = true;
}

void TwinDevice::resume() {
  std::lock_guard lock(mutex_);
  paused_ = false;
  changed_.notify_all();
}

int64_t TwinDevice::num_pinned() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(pinned_.size());
}

std::string TwinDevice::describe(int status) const {
  return status == kRefused ? "refused by the twin" : "failed in the twin";
}

int TwinDevice::pin(std::byte* memory, int64_t bytes) {
  if (options_.refuse_pin) return kRefused;
  const ByteRange range = range_of(memory, bytes);
  std::lock_guard lock(mutex_);
  for (ByteRange other : pinned_) expect(!overlap(range, other), "memory is pinned twice");
  pinned_.push_back(range);
  return 0;
}

void TwinDevice::unpin(std::byte* memory) {
  const auto begin = reinterpret_cast<int64_t>(memory);
  std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(pinned_, begin, &ByteRange::begin);
  expect(found != pinned_.end(), "memory is unpinned that was not pinned");
  for (const Stream& stream : streams_) {
    for (const Task& task : stream.tasks) expect(!overlap(task.host, *found), "memory is unpinned that is copied from");
  }
  pinned_.erase(found);
}

int TwinDevice::follow(DeviceStream caller) {
  if (refuses()) return kRefused;
  if (!caller) return 0;
  std::lock_guard lock(mutex_);
  auto event = std::make_shared<Event>();
  static_cast<Stream*>(caller)->tasks.push_back({nullptr, nullptr, event});
  for (int i = 0; i < options_.num_streams; ++i)
    streams_[static_cast<size_t>(i)].tasks.push_back({event, nullptr, nullptr});
  changed_.notify_all();
  return 0;
}

int TwinDevice::copy_to_device(int stream, std::byte* dst, const std::byte* src, int64_t bytes) {
  const ByteRange host = range_of(src, bytes);
  expect(bytes > 0, "a copy of nothing");
  require_memory(range_of(dst, bytes), "a copy goes to what is not memory of the device");
  {
    std::lock_guard lock(mutex_);
    for (ByteRange pinned : pinned_) {
      expect(!overlap(host, pinned) || holds(pinned, host), "a copy crosses the border of pinned memory");
    }
  }
  num_copies_.fetch_add(1, std::memory_order_relaxed);
  return give(stream, {nullptr, [=] { std::memcpy(dst, src, static_cast<size_t>(bytes)); }, nullptr, host});
}

int TwinDevice::copy_elements(int stream, std::span<const DeviceCopy> copies) {
  for (const DeviceCopy& copy : copies) {
    require_memory(range_of(copy.src, 1), "elements are copied from what is not memory of the device");
    require_memory(destination_bounds(*copy.transfer), "elements are copied to what is not memory of the device");
  }
  num_launches_.fetch_add(1, std::memory_order_relaxed);
  const auto work = [held = std::vector(copies.begin(), copies.end())] {
    for (const DeviceCopy& copy : held) {
      weightlift::copy_elements(*copy.transfer, copy.first, copy.last, copy.src, copy.src_file_offset);
    }
  };
  return give(stream, {nullptr, work, nullptr});
}

int TwinDevice::run_op(int stream, const Op& op, const std::byte* src, int64_t src_row_stride, int64_t first_row,
                       int64_t num_rows) {
  require_memory(range_of(src, (num_rows - 1) * src_row_stride + op.source().row_bytes),
                 "an op reads what is not memory of the device");
  num_launches_.fetch_add(1, std::memory_order_relaxed);
  return give(stream, {nullptr, [=, &op] { op.run(src, src_row_stride, first_row, num_rows); }, nullptr});
}

int TwinDevice::record(int stream, DeviceEvent* event) {
  const bool refused = refuses();
  std::unique_lock lock(mutex_);
  if (refused) {
    changed_.wait(lock, [&] { return streams_[static_cast<size_t>(stream)].tasks.empty(); });
    return kRefused;
  }
  auto recorded = std::make_shared<Event>();
  *event = recorded.get();
  recorded_.push_back(recorded);
  streams_[static_cast<size_t>(stream)].tasks.push_back({nullptr, nullptr, std::move(recorded)});
  changed_.notify_all();
  return 0;
}

int TwinDevice::wait(DeviceEvent event) {
  std::unique_lock lock(mutex_);
  const auto found = std::ranges::find(recorded_, event, [](const auto& other) -> DeviceEvent { return other.get(); });
  expect(found != recorded_.end(), "an event is waited for that is none, or twice");
  const std::shared_ptr<Event> recorded = *found;
  recorded_.erase(found);
  changed_.wait(lock, [&] { return recorded->over; });
  return recorded->status;
}

int TwinDevice::give(int stream, Task task) {
  Stream& given = this->stream(stream);
  expect(!given.in_call.test_and_set(), "two threads give a stream work at a time");
  // A call takes its time, in which another thread must not come to the same stream.
  if (options_.max_delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(options_.max_delay_us / 10));
  const bool refused = refuses();
  if (!refused) {
    std::lock_guard lock(mutex_);
    given.tasks.push_back(std::move(task));
    changed_.notify_all();
  }
  given.in_call.clear();
  return refused ? kRefused : 0;
}

TwinDevice::Stream& TwinDevice::stream(int index) {
  std::lock_guard lock(mutex_);
  return streams_[static_cast<size_t>(index)];
}

bool TwinDevice::refuses() { return num_calls_.fetch_add(1, std::memory_order_relaxed) == options_.refuse_call; }

void TwinDevice::require_memory(ByteRange range, const char* what) const {
  expect(
      options_.memory.empty() || std::ranges::any_of(options_.memory, [&](ByteRange own) { return holds(own, range); }),
      what);
}

void TwinDevice::run() {
  std::unique_lock lock(mutex_);
  std::vector<Stream*> able;
  for (;;) {
    const auto find_able = [&] {
      able.clear();
      for (Stream& stream : streams_) {
        if (stream.busy || stream.tasks.empty()) continue;
        const auto& after = stream.tasks.front().after;
        if (!after || after->over) able.push_back(&stream);
      }
      return !paused_ && !able.empty();
    };
    changed_.wait(lock, [&] { return stopping_ || find_able(); });
    if (stopping_) return;
    const auto delay = std::uniform_int_distribution<>(0, options_.max_delay_us)(random_);
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
    lock.lock();
    if (!find_able()) continue;  // meanwhile another did it
    Stream& stream = *able[std::uniform_int_distribution<size_t>(0, able.size() - 1)(random_)];
    Task& task = stream.tasks.front();  // stays there while it is done
    stream.busy = true;
    if (task.work) {
      if (num_done_++ == options_.fail_work) {
        stream.status = kFailed;
      } else {
        lock.unlock();
        task.work();
        lock.lock();
      }
    }
    if (task.event) {
      task.event->over = true;
      task.event->status = std::exchange(stream.status, 0);
    }
    stream.tasks.pop_front();
    stream.busy = false;
    changed_.notify_all();
  }
}

}  // namespace weightlift
