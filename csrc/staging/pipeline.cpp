#include "staging/pipeline.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <iterator>
#include <span>
#include <utility>

#include "staging/carry_out.h"
#include "staging/lane.h"
#include "staging/plan_files.h"
#include "util/threads.h"

namespace weightlift {
namespace {

// How often who waits looks whether storage still answers.
constexpr std::chrono::milliseconds kWatchInterval{100};

}  // namespace

Pipeline::Pipeline(PipelineOptions options)
    : options_(std::move(options)),
      lane_queues_{FileTurns<Work>(options_.files_at_once), FileTurns<Work>(options_.files_at_once)} {
  const int64_t num_buffers = std::max<int64_t>(1, options_.staging_bytes / options_.chunk_bytes);
  ring_ = std::make_unique<BufferRing>(options_.chunk_bytes, static_cast<int>(num_buffers));
  devices_ = std::make_unique<Devices>(
      options_.devices, *ring_,
      [this] {
        std::lock_guard lock(mutex_);
        waiting_ended_.notify_all();
      },
      [this](std::string fallback) {
        std::lock_guard lock(mutex_);
        stats_.fallbacks.push_back(std::move(fallback));
      });
}

Pipeline::~Pipeline() {
  stop(std::chrono::milliseconds(0));
  lanes_ = {};  // each waits for its reads in flight
  devices_.reset();
  if (file_thread_.joinable()) file_thread_.join();
}

bool Pipeline::stop(std::chrono::milliseconds timeout) {
  cancel();
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  lane_changed_.notify_all();
  worker_changed_.notify_all();
  file_changed_.notify_all();
  // These don't wait for storage.
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  preparer_.reset();
  devices_->stop();
  std::unique_lock lock(mutex_);
  return waiting_ended_.wait_for(lock, timeout, [&] { return num_at_storage_ == 0 && devices_->num_running() == 0; });
}

std::optional<std::vector<ByteRange>> Pipeline::destinations_in_flight() const {
  std::lock_guard lock(mutex_);
  if (devices_->num_running() > 0) return std::nullopt;
  std::vector<ByteRange> destinations;
  for (size_t direct : {0, 1}) {
    if (!lanes_[direct]) continue;
    if (!in_flight_[direct]) return std::nullopt;
    destinations.insert(destinations.end(), in_flight_[direct]->begin(), in_flight_[direct]->end());
  }
  return destinations;
}

int32_t Pipeline::add_file(std::string path, const FileIdentity& identity, OpenedFile opened) {
  std::lock_guard lock(mutex_);
  const auto index = static_cast<int32_t>(files_.size());
  if (opened.buffered || opened.direct) ahead_.push_back(index);
  files_.push_back(std::make_unique<SourceFile>(index, std::move(path), identity, std::move(opened)));
  file_users_.push_back(0);
  direct_io_.emplace_back();
  stats_.files.emplace_back();
  return index;
}

DirectIo Pipeline::direct_io(int32_t file) const {
  std::lock_guard lock(mutex_);
  return direct_io_.at(static_cast<size_t>(file));
}

SourceFile& Pipeline::ask_about(int32_t file) {
  std::lock_guard lock(mutex_);
  questions_[kFiles] = Question{{FaultKind::kTimeout, ETIMEDOUT, file}};
  return *files_[static_cast<size_t>(file)];
}

SourceFile& Pipeline::source_file(int32_t file) const {
  std::lock_guard lock(mutex_);  // another thread may be adding files
  return *files_[static_cast<size_t>(file)];
}

Fault Pipeline::ask_to_open(std::vector<int32_t> files, Order order, std::unique_lock<std::mutex>& lock) {
  struct Opening {  // shared, since nobody may be waiting for it any more
    Fault fault;
    bool done = false;
  };
  auto opening = std::make_shared<Opening>();
  std::erase_if(ahead_, [&](int32_t file) { return std::ranges::count(files, file) > 0; });
  std::vector<int32_t> next;
  std::vector<int32_t> passed;
  if (order != Order::kUrgent) {
    const auto num_files = static_cast<int32_t>(files_.size());
    const auto max_ahead = static_cast<size_t>(options_.open_ahead);
    for (int32_t file = files.back() + 1; file < num_files; ++file) {
      if (file_users_[static_cast<size_t>(file)] > 0 || std::ranges::count(ahead_, file) > 0) continue;
      if (ahead_.size() >= max_ahead) {
        // Loads go in the order of the files: those before will hardly be asked for (other ranks' layers), and make
        // room.
        const auto before = std::ranges::find_if(ahead_, [&](int32_t other) { return other < files.front(); });
        if (before == ahead_.end()) break;
        passed.push_back(*before);
        ahead_.erase(before);
      }
      ahead_.push_back(file);
      next.push_back(file);
    }
  }
  const auto open = [this](const std::vector<int32_t>& asked) {
    return open_files(asked, options_.strategy, options_.page_cache, probes_,
                      [this](int32_t file) -> SourceFile& { return ask_about(file); });
  };
  post([this, opening, open, files = std::move(files)] {
    Fault fault = open(files);
    std::lock_guard guard(mutex_);
    opening->fault = std::move(fault);
    opening->done = true;
    segment_changed_.notify_all();
  });
  if (!next.empty() || !passed.empty()) {
    post([this, open, next = std::move(next), passed = std::move(passed)] {
      for (int32_t file : passed) ask_about(file).close();
      open(next);  // what is wrong with one of these is told when its turn comes
    });
  }
  while (!opening->done && !fault_) {
    segment_changed_.wait_for(lock, kWatchInterval);
    watch();
  }
  return opening->fault;
}

int64_t Pipeline::submit(std::vector<Transfer> transfers, Order order, const DeviceCaller& caller,
                         std::optional<SharedReads> shared) {
  auto segment = std::make_unique<Segment>();
  segment->order = order;
  segment->files = files_of(transfers);

  std::unique_lock lock(mutex_);
  segment->id = next_segment_++;
  const int64_t id = segment->id;
  if (fault_) return id;  // over before it began, as wait() will tell
  if (!file_thread_.joinable()) {
    file_thread_ = start_thread("wl-files", [this] { run_files(); });
    ++num_at_storage_;
  }
  std::vector<int32_t> closed;
  for (int32_t file : segment->files) {
    if (file_users_[static_cast<size_t>(file)]++ == 0) closed.push_back(file);
  }
  if (!closed.empty()) {
    if (Fault fault = ask_to_open(std::move(closed), order, lock)) {
      name_transfer(fault, transfers);
      fail(std::move(fault));
    }
  }
  if (fault_) return id;
  lock.unlock();

  // Planning takes a while and needs no lock: files stay open while they have users.
  const FilePlanOptions plan_options{options_.strategy, options_.chunk_bytes, options_.merge_gap_bytes,
                                     options_.advise_hugepages, options_.page_cache};
  segment->plan = plan_files(std::move(transfers), std::move(shared), plan_options,
                             [this](int32_t file) -> SourceFile& { return source_file(file); });
  segment->chunks_left = static_cast<int64_t>(segment->plan.chunks.size());
  // Once they have come late, they are expected to.
  if (!huge_pages_come_late_) huge_pages_come_late_ = !huge_pages_come_sooner(segment->plan.advised);
  if (!huge_pages_come_late_) advise_huge_pages(segment->plan.advised);
  Fault device_fault = devices_->prepare(segment->plan, caller);

  lock.lock();
  if (device_fault) fail(std::move(device_fault));
  for (int32_t file : segment->files) {
    direct_io_[static_cast<size_t>(file)] = files_[static_cast<size_t>(file)]->direct_io();
  }
  if (fault_) return id;
  start_threads(segment->plan);
  stats_.bytes_needed += segment->plan.bytes_needed;
  stats_.num_whole_ops += segment->plan.num_whole_ops;
  stats_.whole_op_bytes = std::max(stats_.whole_op_bytes, segment->plan.whole_op_bytes);
  stats_.num_transfers += static_cast<int64_t>(segment->plan.transfers.size());
  Segment* added = segment.get();
  segments_.push_back(std::move(segment));
  if (order == Order::kUrgent) {
    start(*added);
  } else {
    waiting_.push_back(added);
    dispatch();
  }
  return id;
}

void Pipeline::start_threads(const Plan& plan) {
  if (!preparer_) preparer_ = std::make_unique<PagePreparer>([this](int64_t count) { on_prepared(count); });
  const auto num_workers = static_cast<size_t>(std::max(1, options_.num_workers));
  workers_.reserve(num_workers);
  while (workers_.size() < num_workers) workers_.push_back(start_thread("wl-worker", [this] { run_worker(); }));
  for (const Chunk& chunk : plan.chunks) {
    auto& lane = lanes_[chunk.direct];
    if (lane) continue;
    lane = std::make_unique<Lane>(*this, chunk.direct);
    ++num_at_storage_;
  }
}

void Pipeline::post(std::function<void()> task) {
  file_tasks_.push_back(std::move(task));
  file_changed_.notify_one();
}

void Pipeline::run_files() {
  std::unique_lock lock(mutex_);
  for (;;) {
    file_changed_.wait(lock, [&] { return stopping_ || !file_tasks_.empty(); });
    if (stopping_) break;
    const std::function<void()> task = std::move(file_tasks_.front());
    file_tasks_.pop_front();
    lock.unlock();
    std::string failure;
    try {
      task();
    } catch (const std::exception& e) {  // no memory
      failure = e.what();
    }
    lock.lock();
    questions_[kFiles].reset();
    if (!failure.empty()) fail({FaultKind::kUnavailable, 0, -1, -1, -1, failure});
  }
  --num_at_storage_;
  waiting_ended_.notify_all();
}

void Pipeline::watch() {
  if (options_.io_timeout.count() == 0) return;
  for (auto& question : questions_) {
    if (question && question->silence.look() >= options_.io_timeout) fail(question->if_silent);
  }
}

void Pipeline::dispatch() {
  while (!fault_ && !waiting_.empty() && !(waiting_.front()->order == Order::kBarrier && num_active_ > 0)) {
    Segment* segment = waiting_.front();
    waiting_.pop_front();
    start(*segment);
  }
}

void Pipeline::start(Segment& segment) {
  ++num_active_;
  const bool urgent = segment.order == Order::kUrgent;
  if (!urgent) {
    for (ByteRange memory : segment.plan.preparations) segment.preparation_done.push_back(preparer_->queue(memory));
  }
  std::array<std::vector<Work>, 2> ahead;
  for (size_t i = 0; i < segment.plan.chunks.size(); ++i) {
    const Chunk& chunk = segment.plan.chunks[i];
    const Work work{&segment, static_cast<int32_t>(i), {}, chunk.num_reads, chunk.direct};
    if (urgent) {
      ahead[chunk.direct].push_back(work);
    } else {
      lane_queues_[chunk.direct].push_back(segment.plan.reads[static_cast<size_t>(chunk.first_read)].file, work);
    }
  }
  for (size_t direct : {0, 1}) lane_queues_[direct].push_front(ahead[direct]);
  lane_changed_.notify_all();
  land_if_complete(segment);
}

void Pipeline::finish(const Work& work) {
  if (work.buffer.memory) {
    ring_->give_back(work.buffer);
    lane_changed_.notify_all();
  }
  --work.segment->chunks_left;
  land_if_complete(*work.segment);
}

void Pipeline::on_prepared(int64_t count) {
  std::lock_guard lock(mutex_);
  prepared_ = count;
  lane_changed_.notify_all();
  const auto it = std::find_if(segments_.begin(), segments_.end(), [&](const auto& segment) {
    return !segment->preparation_done.empty() && segment->preparation_done.back() == count;
  });
  if (it != segments_.end()) land_if_complete(**it);
}

void Pipeline::land_if_complete(Segment& segment) {
  if (fault_ || segment.landing || segment.chunks_left > 0) return;
  // While pages are still being made ready, the memory must not be freed.
  if (!segment.preparation_done.empty() && segment.preparation_done.back() > prepared_) return;
  segment.landing = true;
  post([this, &segment] { land(segment); });
}

void Pipeline::land(Segment& segment) {
  for (int32_t file : segment.files) {
    if (Fault fault = ask_about(file).check_unchanged()) {
      std::lock_guard lock(mutex_);
      return fail(std::move(fault));
    }
  }
  std::unique_lock lock(mutex_);
  if (fault_) return;
  // Closed when nobody needs them: a checkpoint may have more shards than a process may have open files. But one small
  // read is often followed by another of the same file.
  std::vector<int32_t> leaving = segment.files;
  if (segment.order == Order::kUrgent && leaving.size() == 1 && options_.page_cache == PageCache::kKeep) {
    std::swap(leaving, lingering_);
  }
  std::vector<int32_t> unused;
  for (int32_t file : leaving) {
    if (--file_users_[static_cast<size_t>(file)] == 0) unused.push_back(file);
  }
  lock.unlock();
  for (int32_t file : unused) ask_about(file).close();
  lock.lock();
  landed_.push_back(segment.id);
  --num_active_;
  std::erase_if(segments_, [&](const auto& other) { return other.get() == &segment; });
  segment_changed_.notify_all();
  dispatch();
}

void Pipeline::fail(Fault fault) {
  if (fault_) return;
  fault_ = std::move(fault);
  lane_changed_.notify_all();
  segment_changed_.notify_all();
}

void Pipeline::run_worker() {
  std::unique_lock lock(mutex_);
  for (;;) {
    worker_changed_.wait(lock, [&] { return stopping_ || !ready_.empty(); });
    if (ready_.empty()) return;  // stopping
    const Work work = ready_.front();
    ready_.pop_front();
    const bool wanted = !fault_;
    lock.unlock();
    bool is_over = true;
    std::string failure;
    try {
      if (wanted) is_over = transform(work);
    } catch (const std::exception& e) {  // no memory
      failure = e.what();
    }
    lock.lock();
    if (!failure.empty()) fail({FaultKind::kUnavailable, 0, -1, -1, -1, failure});
    if (is_over) finish(work);
  }
}

bool Pipeline::transform(const Work& work) {
  const Plan& plan = work.segment->plan;
  const Chunk& chunk = chunk_of(work);
  int64_t bytes = 0;
  int64_t device_bytes = 0;
  for (int64_t i = chunk.first_piece; i < chunk.first_piece + chunk.num_pieces; ++i) {
    const Piece& piece = plan.pieces[static_cast<size_t>(i)];
    const Transfer& transfer = plan.transfers[static_cast<size_t>(piece.transfer)];
    if (transfer.device == kHost) carry_out(plan, piece, work.buffer.memory);
    (transfer.device == kHost ? bytes : device_bytes) += (piece.last - piece.first) * element_bytes(transfer.src_type);
  }
  bytes_landed_.fetch_add(bytes, std::memory_order_relaxed);
  if (device_bytes == 0) return true;
  devices_->carry_out(plan, chunk, work.buffer, [this, work, device_bytes](Fault fault) {
    std::lock_guard lock(mutex_);
    if (fault) {
      fail(std::move(fault));
    } else {
      bytes_landed_.fetch_add(device_bytes, std::memory_order_relaxed);
      stats_.device_bytes += device_bytes;
    }
    finish(work);
  });
  return false;
}

bool Pipeline::wait(int64_t segment, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (fault_ || std::ranges::none_of(segments_, [&](const auto& s) { return s->id == segment; })) return true;
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) return false;
    segment_changed_.wait_until(lock, std::min(deadline, now + kWatchInterval));
    watch();
  }
}

std::vector<int64_t> Pipeline::take_landed() {
  std::lock_guard lock(mutex_);
  return std::exchange(landed_, {});
}

Fault Pipeline::fault() const {
  std::lock_guard lock(mutex_);
  return fault_;
}

bool Pipeline::failed() const {
  std::lock_guard lock(mutex_);
  return static_cast<bool>(fault_);
}

void Pipeline::cancel() {
  std::lock_guard lock(mutex_);
  fail({FaultKind::kCancelled, ECANCELED});
}

PipelineStats Pipeline::stats() const {
  std::lock_guard lock(mutex_);
  PipelineStats stats = stats_;
  stats.device_scratch_bytes = devices_->scratch_bytes();
  return stats;
}

}  // namespace weightlift
