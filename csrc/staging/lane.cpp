#include "staging/lane.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <utility>

#include "util/align.h"
#include "util/threads.h"

namespace weightlift {
namespace {

constexpr int kUnknown = -2;
// A read is tried again this often without progress; by then the system is not just busy.
constexpr int kMaxRetries = 10'000;
// From this many retries in a row on, a pause between them.
constexpr int kRetriesBeforePause = 16;
constexpr std::chrono::milliseconds kPause{1};
// How long a lane waits for reads before it looks for new chunks.
constexpr std::chrono::milliseconds kPollInterval{10};
// A smaller chunk, or one that fills less than half of a buffer, is not worth pinning a whole one for.
constexpr int64_t kMinRegisteredBytes = int64_t{1} << 20;
// So many reads in flight come first; more of them may then take this share of the time to get memory.
constexpr int kReadsBeforeSaving = 4;
constexpr int kGrowthShare = 8;

}  // namespace

Pipeline::Lane::Lane(Pipeline& pipeline, bool direct)
    : pipeline_(pipeline),
      direct_(direct),
      thread_(start_thread(direct ? "wl-direct" : "wl-buffered", [this] { run(); })) {}

void Pipeline::Lane::run() {
  try {
    std::string fallback;
    reader_ = pipeline_.options_.make_reader(direct_, &fallback);
    reads_.resize(static_cast<size_t>(reader_->queue_depth()));
    for (uint64_t token = reads_.size(); token-- > 0;) free_tokens_.push_back(token);
    {
      std::lock_guard lock(pipeline_.mutex_);
      pipeline_.stats_.readers[direct_] = reader_->name();
      if (!fallback.empty()) pipeline_.stats_.fallbacks.push_back(std::move(fallback));
    }
    read_until_stopped();
  } catch (const std::exception& e) {  // no memory, no more threads
    std::lock_guard lock(pipeline_.mutex_);
    pipeline_.fail({FaultKind::kUnavailable, 0, -1, -1, -1, e.what()});
  }
  std::unique_lock lock(pipeline_.mutex_);
  auto& in_flight = pipeline_.in_flight_[direct_];
  in_flight = destinations_in_flight();
  lock.unlock();
  reader_.reset();  // drops reads that have not begun, and waits for the others
  lock.lock();
  in_flight->clear();
  --pipeline_.num_at_storage_;
  pipeline_.waiting_ended_.notify_all();
}

void Pipeline::Lane::read_until_stopped() {
  std::array<ReadCompletion, 64> completions;
  for (;;) {
    collect_requests();
    if (!requests_.empty()) {
      ask();  // before submitting, which may block as reading does
      const int result = reader_->submit(requests_);
      if (result < 0) {
        fail(reads_[requests_.front().token], FaultKind::kRead, -result);
        for (const ReadRequest& request : requests_) release(request.token);
      } else {
        num_in_flight_ += static_cast<int>(requests_.size());
      }
    }
    {
      std::lock_guard lock(pipeline_.mutex_);
      if (pipeline_.stopping_) return;
    }
    if (num_in_flight_ == 0) continue;
    const int count = reader_->wait(completions, has_registered_ ? std::chrono::milliseconds(0) : kPollInterval);
    if (count < 0 && count != -EINTR && count != -EAGAIN) {
      std::lock_guard lock(pipeline_.mutex_);
      pipeline_.fail({FaultKind::kRead, -count});
      return;
    }
    for (int i = 0; i < count; ++i) on_completion(completions[static_cast<size_t>(i)]);
    if (count > 0) ask();
    if (std::exchange(busy_, false)) std::this_thread::sleep_for(kPause);
  }
}

void Pipeline::Lane::ask() {
  const ActiveRead* oldest = nullptr;
  for (const ActiveRead& active : reads_) {
    if (active.chunk && (!oldest || active.number < oldest->number)) oldest = &active;
  }
  std::lock_guard lock(pipeline_.mutex_);
  auto& question = pipeline_.questions_[direct_];
  question.reset();
  if (!oldest) return;
  const Read& read = *oldest->read;
  question = Question{{FaultKind::kTimeout, ETIMEDOUT, read.file, read.offset + oldest->done, read.transfer_id}};
}

void Pipeline::Lane::collect_requests() {
  requests_.clear();
  has_registered_ = false;
  if (pipeline_.failed()) {  // what is in flight comes back, nothing else is started
    for (uint64_t token : again_) release(token);
    again_.clear();
    current_ = nullptr;
  }
  while (!free_tokens_.empty() || !again_.empty()) {
    if (!again_.empty()) {
      requests_.push_back(request_for(again_.back()));
      again_.pop_back();
      continue;
    }
    if (!current_ && !take_chunk(/*wait=*/num_in_flight_ == 0 && requests_.empty())) return;
    const Chunk& chunk = pipeline_.chunk_of(current_->work);
    const Read& read = current_->work.segment->plan.reads[static_cast<size_t>(chunk.first_read + current_->next_read)];
    const uint64_t token = free_tokens_.back();
    free_tokens_.pop_back();
    reads_[token] = {current_, &read, 0, 0, !direct_, num_begun_++};
    requests_.push_back(request_for(token));
    if (++current_->next_read == chunk.num_reads) current_ = nullptr;
    if (!current_ && has_registered_) return;
  }
}

bool Pipeline::Lane::take_chunk(bool wait) {
  std::unique_lock lock(pipeline_.mutex_);
  const auto may_begin = [&](const Work& work) {
    const Chunk& chunk = pipeline_.chunk_of(work);
    if (chunk.staging_bytes > 0) {
      const BufferRing& ring = *pipeline_.ring_;
      return ring.has_room(chunk.staging_bytes) &&
             (!ring.would_grow(chunk.staging_bytes) || may_grow(chunk.staging_bytes));
    }
    const auto& ready_at = work.segment->preparation_done;
    return chunk.preparation < 0 || ready_at.empty() ||
           ready_at[static_cast<size_t>(chunk.preparation)] <= pipeline_.prepared_;
  };
  auto active = std::make_unique<ActiveChunk>();
  const auto take = [&] {
    if (pipeline_.fault_) return false;
    const std::optional<Work> taken = pipeline_.lane_queues_[direct_].take(may_begin);
    if (taken) active->work = *taken;
    return taken.has_value();
  };
  if (wait) {
    bool taken = false;
    pipeline_.lane_changed_.wait(lock, [&] { return pipeline_.stopping_ || (taken = take()); });
    if (!taken) return false;
  } else if (!take()) {
    return false;
  }
  const Chunk& chunk = pipeline_.chunk_of(active->work);
  bool is_new = false;
  if (chunk.staging_bytes > 0) {
    is_new = pipeline_.ring_->would_grow(chunk.staging_bytes);
    active->work.buffer = pipeline_.ring_->take(chunk.staging_bytes);
  }
  const Read& read = active->work.segment->plan.reads[static_cast<size_t>(chunk.first_read)];
  active->file = pipeline_.files_[static_cast<size_t>(read.file)].get();
  lock.unlock();

  if (direct_ && is_new && chunk.staging_bytes >= kMinRegisteredBytes) {
    const auto begin = reinterpret_cast<int64_t>(active->work.buffer.memory);
    if (bytes_grown_ == 0) begun_ = std::chrono::steady_clock::now();
    growing_ += populate({begin, begin + chunk.staging_bytes});
    bytes_grown_ += chunk.staging_bytes;
  }

  // Registration is an offer: where it is refused (RLIMIT_MEMLOCK, an old kernel), reads go on without.
  if (register_files_ && !file_index_.contains(read.file)) {
    const int index = reader_->register_file(direct_ ? active->file->direct_fd() : active->file->buffered_fd());
    register_files_ = index >= 0;
    if (index >= 0) file_index_[read.file] = index;
  }
  // A read lies inside of one registered buffer, so that those across several go without.
  const int buffer = active->work.buffer.first;
  if (register_buffers_ && active->work.buffer.count == 1 && chunk.staging_bytes >= kMinRegisteredBytes &&
      chunk.staging_bytes * 2 >= pipeline_.ring_->buffer_bytes()) {
    if (buffer_index_.size() <= static_cast<size_t>(buffer))
      buffer_index_.resize(static_cast<size_t>(buffer) + 1, kUnknown);
    int& index = buffer_index_[static_cast<size_t>(buffer)];
    if (index == kUnknown) {
      index = reader_->register_buffer(pipeline_.ring_->address(buffer),
                                       static_cast<size_t>(pipeline_.ring_->buffer_bytes()));
      register_buffers_ = has_registered_ = index >= 0;
    }
  }
  current_ = active.get();
  chunks_.push_back(std::move(active));
  return true;
}

// Where memory takes longer to come than a used buffer to come back, a short load is done before the ring has all that
// it may have, and few reads at a time keep storage nearly as busy.
bool Pipeline::Lane::may_grow(int64_t bytes) const {
  if (num_in_flight_ + static_cast<int>(requests_.size()) < kReadsBeforeSaving || bytes_grown_ == 0) return true;
  if (growing_ * kHugePageBytes <= kHugePageAtHand * bytes_grown_) return true;
  const auto elapsed = std::chrono::steady_clock::now() - begun_;
  return growing_ * kGrowthShare <= elapsed || growing_ * bytes / bytes_grown_ <= elapsed / (1 + num_done_);
}

ReadRequest Pipeline::Lane::request_for(uint64_t token) {
  const ActiveRead& active = reads_[token];
  const Read& read = *active.read;
  const StagingBuffer& buffer = active.chunk->work.buffer;
  std::byte* begin = read.destination ? read.destination : buffer.memory + read.staging_offset;
  ReadRequest request;
  request.token = token;
  request.buffer = begin + active.done;
  request.offset = read.offset + active.done;
  request.length = read.length - active.done;
  if (active.buffered) {
    request.fd = active.chunk->file->buffered_fd();
    request.length = read.needed_end - request.offset;
    request.flags = active.chunk->file->buffered_flags();
    request.cached = pipeline_.chunk_of(active.chunk->work).cached;
  } else {
    request.fd = active.chunk->file->direct_fd();
  }
  request.length = std::min(request.length, kMaxReadBytes);
  if (active.buffered != direct_) {  // the way this lane registers files for
    const auto it = file_index_.find(read.file);
    if (it != file_index_.end()) request.file_index = it->second;
  }
  if (buffer.count == 1 && static_cast<size_t>(buffer.first) < buffer_index_.size()) {
    request.buffer_index = std::max(-1, buffer_index_[static_cast<size_t>(buffer.first)]);
  }
  return request;
}

void Pipeline::Lane::on_completion(const ReadCompletion& completion) {
  --num_in_flight_;
  const uint64_t token = completion.token;
  ActiveRead& active = reads_[token];
  const Read& read = *active.read;
  if (completion.result == -EINTR || completion.result == -EAGAIN) {
    if (++active.num_retries > kMaxRetries) {
      fail(active, FaultKind::kRead, static_cast<int>(-completion.result));
    }
    busy_ |= active.num_retries > kRetriesBeforePause;
  } else if (completion.result == -EINVAL && !active.buffered && pipeline_.options_.strategy == Strategy::kAuto) {
    // A file unlike the one that was probed (compressed, encrypted, inline) may refuse direct reads.
    go_on_buffered(active);
  } else if (completion.result < 0) {
    fail(active, FaultKind::kRead, static_cast<int>(-completion.result));
  } else if (completion.result == 0) {
    fail(active, FaultKind::kEndOfFile, 0);
  } else {
    active.num_retries = 0;
    active.done += completion.result;
    auto& bytes = active.buffered ? active.chunk->stats.buffered_bytes : active.chunk->stats.direct_bytes;
    bytes += completion.result;
    if (read.offset + active.done >= read.needed_end) {
      ++num_done_;
      on_read_done(active);
      release(token);
      return;
    }
    // A direct read may stop anywhere; only from an aligned place can it go on directly.
    const DirectIo& direct_io = active.chunk->file->direct_io();
    if (!active.buffered &&
        !is_aligned(active.done, std::max(direct_io.offset_alignment, direct_io.memory_alignment))) {
      active.buffered = true;
    }
  }
  again_.push_back(token);
}

void Pipeline::Lane::on_read_done(ActiveRead& active) {
  ActiveChunk* done = active.chunk;
  if (--done->work.reads_left > 0) return;
  const Chunk& chunk = pipeline_.chunk_of(done->work);
  const Read& first = done->work.segment->plan.reads[static_cast<size_t>(chunk.first_read)];
  std::unique_lock lock(pipeline_.mutex_);
  PipelineStats& stats = pipeline_.stats_;
  FileStats& file = stats.files[static_cast<size_t>(first.file)];
  file.direct_bytes += done->stats.direct_bytes;
  file.buffered_bytes += done->stats.buffered_bytes;
  if (chunk.cached) file.cached_bytes += done->stats.buffered_bytes;
  stats.bytes_read += done->stats.direct_bytes + done->stats.buffered_bytes;
  stats.num_reads += chunk.num_reads;
  if (chunk.num_pieces > 0 && !pipeline_.fault_) {
    pipeline_.ready_.push_back(done->work);
    pipeline_.worker_changed_.notify_one();
  } else {
    if (chunk.num_pieces == 0) {
      stats.in_place_bytes += first.length;
      pipeline_.bytes_landed_.fetch_add(first.length, std::memory_order_relaxed);
    }
    pipeline_.finish(done->work);
  }
  lock.unlock();
  std::erase_if(chunks_, [&](const auto& other) { return other.get() == done; });
}

void Pipeline::Lane::fail(const ActiveRead& active, FaultKind kind, int error) {
  const Read& read = *active.read;
  int64_t offset = read.offset + active.done;
  if (kind == FaultKind::kEndOfFile) {  // of several reads behind the end, any may be the first to tell
    const int64_t size = active.chunk->file->current_size();
    if (size >= 0) offset = std::min(offset, size);
  }
  Fault fault{kind, error, read.file, offset, transfer_at(active, offset), {}};
  if (kind == FaultKind::kRead) {
    if (Fault changed = active.chunk->file->check_in_place()) {
      fault.kind = changed.kind;
      fault.detail = std::move(changed.detail);
    }
  }
  std::lock_guard lock(pipeline_.mutex_);
  pipeline_.fail(std::move(fault));
}

void Pipeline::Lane::go_on_buffered(ActiveRead& active) {
  active.buffered = true;
  if (std::exchange(refused_direct_, true)) return;
  std::lock_guard lock(pipeline_.mutex_);
  pipeline_.stats_.fallbacks.push_back("reading through the page cache: " + active.chunk->file->path() +
                                       " refuses direct reads (EINVAL), though they were found to work");
}

int64_t Pipeline::Lane::transfer_at(const ActiveRead& active, int64_t offset) const {
  const Plan& plan = active.chunk->work.segment->plan;
  const Chunk& chunk = pipeline_.chunk_of(active.chunk->work);
  int64_t id = active.read->transfer_id;
  if (active.read->destination) {  // one read may fill the destinations of several
    for (const Transfer& transfer : plan.transfers) {
      const ByteRange source = source_bounds(transfer);
      if (transfer.file == active.read->file && source.begin <= offset && offset < source.end) id = transfer.id;
    }
  }
  for (int64_t i = chunk.first_piece; i < chunk.first_piece + chunk.num_pieces; ++i) {
    const Piece& piece = plan.pieces[static_cast<size_t>(i)];
    const auto read = static_cast<int32_t>(active.read - plan.reads.data());
    if (read < piece.read || piece.read + piece.num_reads <= read) continue;
    const Transfer& transfer = plan.transfers[static_cast<size_t>(piece.transfer)];
    const int64_t begin = transfer.src_offset + source_byte(transfer, piece.first);
    const int64_t end = transfer.src_offset + source_byte(transfer, piece.last - 1) + element_bytes(transfer.src_type);
    if (begin <= offset && offset < end) id = transfer.id;
  }
  return id;
}

std::vector<ByteRange> Pipeline::Lane::destinations_in_flight() const {
  std::vector<ByteRange> destinations;
  for (const ActiveRead& active : reads_) {
    if (!active.chunk || !active.read->destination) continue;
    const auto begin = reinterpret_cast<int64_t>(active.read->destination);
    destinations.push_back({begin, begin + active.read->length});
  }
  return destinations;
}

void Pipeline::Lane::release(uint64_t token) {
  reads_[token] = {};
  free_tokens_.push_back(token);
}

}  // namespace weightlift
