#include "staging/device_lane.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "plan/geometry.h"
#include "staging/carry_out.h"
#include "util/align.h"
#include "util/threads.h"

namespace weightlift {
namespace {

// A plain copy from this size on has a call of its own: its bytes take longer across the bus than the call takes the
// processor. Smaller ones share a copy into scratch and a launch, unless they are few.
constexpr int64_t kMinOwnCopyBytes = int64_t{64} << 10;
constexpr size_t kFewCopies = 4;
// Slices begin at multiples of it; and bytes lie as far behind one in scratch as in the file, so that what is aligned
// in the file is aligned there.
constexpr int64_t kScratchAlignment = 256;

}  // namespace

struct DeviceLane::Work {
  struct OwnCopy {
    const Transfer* transfer;
    std::byte* dst;
    const std::byte* src;
    int64_t bytes;
  };
  // A piece that kernels take out of scratch: elements, or rows of an op.
  struct Part {
    const Transfer* transfer;
    int64_t first;
    int64_t last;
    int64_t file_offset;  // of its first byte
    std::byte* begin;     // of its bytes, in the staging buffer
    std::byte* end;
    OpRows rows;
  };
  std::vector<OwnCopy> own_copies;
  std::vector<Part> parts;  // ascending; neighbours are copied into scratch together
};

DeviceLane::DeviceLane(int32_t index, std::shared_ptr<Device> device, std::function<void()> on_ended)
    : index_(index),
      device_(std::move(device)),
      on_ended_(std::move(on_ended)),
      stream_mutexes_(static_cast<size_t>(device_->num_streams())),
      slices_(static_cast<size_t>(device_->num_streams())),
      thread_(start_thread("wl-device", [this] { run(); })) {}

DeviceLane::~DeviceLane() {
  stop();
  thread_.join();
}

void DeviceLane::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
}

int64_t DeviceLane::scratch_needed(const Plan& plan) const {
  int64_t needed = 0;
  for (const Chunk& chunk : plan.chunks) {
    for (int64_t i = chunk.first_piece; i < chunk.first_piece + chunk.num_pieces; ++i) {
      const Piece& piece = plan.pieces[static_cast<size_t>(i)];
      const Transfer& transfer = plan.transfers[static_cast<size_t>(piece.transfer)];
      if (transfer.device != index_ || (transfer.is_plain() && piece.last - piece.first >= kMinOwnCopyBytes)) continue;
      // What aligning the parts adds is less than the gaps that part them, but for the first.
      needed = std::max(needed, chunk.staging_bytes + 2 * kScratchAlignment);
      break;
    }
  }
  return needed;
}

void DeviceLane::set_scratch(std::byte* memory, int64_t bytes, int64_t least_bytes) {
  const auto num_streams = static_cast<int64_t>(slices_.size());
  const int64_t num_slices = std::clamp<int64_t>(bytes / least_bytes, 1, num_streams);
  const int64_t slice_bytes = align_down(bytes / num_slices, kScratchAlignment);
  std::lock_guard lock(mutex_);
  for (int64_t i = 0; i < num_slices; ++i) slices_[static_cast<size_t>(i)] = {memory + i * slice_bytes, slice_bytes};
}

void DeviceLane::set_first_slice(std::byte* memory, int64_t bytes) {
  std::lock_guard lock(mutex_);
  slices_.front() = {memory, bytes};
}

DeviceLane::Work DeviceLane::work_of(const Plan& plan, const Chunk& chunk, std::byte* staging) const {
  Work work;
  std::vector<Work::OwnCopy> small;
  for (int64_t i = chunk.first_piece; i < chunk.first_piece + chunk.num_pieces; ++i) {
    const Piece& piece = plan.pieces[static_cast<size_t>(i)];
    const Transfer& transfer = plan.transfers[static_cast<size_t>(piece.transfer)];
    if (transfer.device != index_) continue;
    const Read& read = plan.reads[static_cast<size_t>(piece.read)];
    const int64_t file_offset = transfer.src_offset + source_byte(transfer, piece.first);
    Work::Part part{&transfer, piece.first, piece.last, file_offset, nullptr, nullptr, {}};
    if (transfer.op) {
      part.rows = rows_of(plan, piece, staging);
      part.begin = part.rows.data;
      part.end = part.begin + (part.rows.count - 1) * part.rows.stride + transfer.op->source().row_bytes;
    } else {
      const int64_t end =
          transfer.src_offset + source_byte(transfer, piece.last - 1) + element_bytes(transfer.src_type);
      part.begin = staging + read.staging_offset + (file_offset - read.offset);
      part.end = part.begin + (end - file_offset);
    }
    const Work::OwnCopy own{&transfer, transfer.dst + piece.first, part.begin, piece.last - piece.first};
    if (transfer.is_plain() && own.bytes >= kMinOwnCopyBytes) {
      work.own_copies.push_back(own);
      continue;
    }
    if (transfer.is_plain()) small.push_back(own);
    work.parts.push_back(part);
  }
  if (small.size() == work.parts.size() && small.size() <= kFewCopies) {
    work.own_copies.insert(work.own_copies.end(), small.begin(), small.end());
    work.parts.clear();
  }
  std::ranges::sort(work.parts, {}, &Work::Part::begin);
  return work;
}

void DeviceLane::carry_out(const Plan& plan, const Chunk& chunk, const StagingBuffer& buffer, int64_t buffer_bytes,
                           std::function<void(Fault)> done) {
  Work work = work_of(plan, chunk, buffer.memory);
  std::list<InFlight> entry(1);  // so that nothing can fail once the device has work
  entry.front().done = std::move(done);
  const int64_t scratch = work.parts.empty() ? 0 : chunk.staging_bytes + 2 * kScratchAlignment;

  std::unique_lock lock(mutex_);
  while (slices_[next_stream_].bytes < scratch) next_stream_ = (next_stream_ + 1) % slices_.size();
  const size_t stream = next_stream_;
  const Slice slice = slices_[stream];
  next_stream_ = (next_stream_ + 1) % slices_.size();
  lock.unlock();

  const std::lock_guard stream_lock(stream_mutexes_[stream]);
  InFlight& in_flight = entry.front();
  in_flight.transfer = work.parts.empty() ? work.own_copies.front().transfer : work.parts.front().transfer;
  try {
    const Transfer* transfer = in_flight.transfer;
    const int status = begin(static_cast<int>(stream), slice, work, buffer, buffer_bytes, &transfer);
    if (status != 0) in_flight.fault = fault_of(status, *transfer);
  } catch (const std::exception& e) {  // no memory
    in_flight.fault = {FaultKind::kUnavailable, 0, -1, -1, -1, e.what()};
  }
  // Also behind what was refused: some of it may have begun.
  const int status = device_->record(static_cast<int>(stream), &in_flight.event);
  if (status != 0) {
    in_flight.event = nullptr;
    if (!in_flight.fault) in_flight.fault = fault_of(status, *in_flight.transfer);
  }
  lock.lock();
  in_flight_.splice(in_flight_.end(), entry);
  changed_.notify_all();
}

int DeviceLane::begin(int stream, const Slice& slice, const Work& work, const StagingBuffer& buffer,
                      int64_t buffer_bytes, const Transfer** transfer) {
  for (const Work::OwnCopy& own : work.own_copies) {
    *transfer = own.transfer;
    if (int status = copy(stream, own.dst, own.src, own.bytes, buffer, buffer_bytes)) return status;
  }
  std::vector<DeviceCopy> copies;
  std::vector<std::pair<const Work::Part*, const std::byte*>> ops;
  int64_t used = 0;
  for (auto part = work.parts.begin(); part != work.parts.end();) {
    // This one, and those behind it that no great gap parts from it.
    std::byte* const begin = part->begin;
    std::byte* end = part->end;
    *transfer = part->transfer;
    std::byte* const at = slice.memory + align_up(used, kScratchAlignment) + part->file_offset % kScratchAlignment;
    for (; part != work.parts.end() && part->begin - end <= kMinOwnCopyBytes; ++part) {
      end = std::max(end, part->end);
      const std::byte* src = at + (part->begin - begin);
      if (part->transfer->op) {
        ops.emplace_back(&*part, src);
      } else {
        copies.push_back({part->transfer, part->first, part->last, src, part->file_offset});
      }
    }
    if (int status = copy(stream, at, begin, end - begin, buffer, buffer_bytes)) return status;
    used = at + (end - begin) - slice.memory;
  }
  if (!copies.empty()) {
    *transfer = copies.front().transfer;
    if (int status = device_->copy_elements(stream, copies)) return status;
  }
  for (const auto& [part, src] : ops) {
    *transfer = part->transfer;
    const OpRows& rows = part->rows;
    if (int status = device_->run_op(stream, *part->transfer->op, src, rows.stride, rows.first, rows.count)) {
      return status;
    }
  }
  return 0;
}

int DeviceLane::copy(int stream, std::byte* dst, const std::byte* src, int64_t bytes, const StagingBuffer& buffer,
                     int64_t buffer_bytes) {
  while (bytes > 0) {
    int64_t part = bytes;
    if (buffer.count > 1) part = std::min(part, buffer_bytes - (src - buffer.memory) % buffer_bytes);
    if (int status = device_->copy_to_device(stream, dst, src, part)) return status;
    dst += part;
    src += part;
    bytes -= part;
  }
  return 0;
}

Fault DeviceLane::fault_of(int status, const Transfer& transfer) const {
  return {FaultKind::kDevice, 0,
          transfer.file,      -1,
          transfer.id,        "GPU " + std::to_string(index_) + ": " + device_->describe(status)};
}

void DeviceLane::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !in_flight_.empty(); });
    if (in_flight_.empty()) break;
    InFlight oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    lock.unlock();
    const int status = oldest.event ? device_->wait(oldest.event) : 0;
    if (status != 0 && !oldest.fault) oldest.fault = fault_of(status, *oldest.transfer);
    oldest.done(std::move(oldest.fault));
    lock.lock();
  }
  lock.unlock();
  on_ended_();
}

}  // namespace weightlift
