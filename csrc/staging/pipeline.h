// Pipeline: runs plans. read -> ready -> transform -> free.
//
// A segment is one plan. Its chunks go to lanes: the direct lane and the buffered lane, each a thread with a Reader of
// its own that keeps its queue full. A chunk that has landed in a staging buffer is carried out by a worker (its pieces
// are copied, cast, ... to their destinations) and the buffer is free again; a chunk read in place is done when it has
// landed. Pieces that go to a GPU are begun by the worker; the buffer is free when the GPU is done with it (Devices).
//
// Back-pressure: a lane takes no new chunk without a free buffer, so host memory stays within staging_bytes; but for an
// op's granule that is larger than that, whose chunk gets memory of its own, one at a time.
// Faults: the first one wins. Nothing new is started after it, what is in flight is waited for, every segment that has
// not landed fails with it, and so does every later submit. Storage that answers nothing for `io_timeout` is a fault.
// Threads: all methods may be called from any thread, one at a time for submit() and stop(). Threads start with the
// first segment and end with the Pipeline. No static state. Destructor: as stop(), however long that takes: what reads
// in flight write to is somebody's memory. Memory named by a segment's transfers must live until the segment has landed
// or the Pipeline has stopped; who can't wait for storage that does not answer keeps both.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "plan/planner.h"
#include "readers/reader.h"
#include "readers/source_file.h"
#include "staging/buffer_ring.h"
#include "staging/devices.h"
#include "staging/file_turns.h"
#include "staging/pages.h"
#include "util/fault.h"
#include "util/silence.h"

namespace weightlift {

struct PipelineOptions {
  Strategy strategy = Strategy::kAuto;
  PageCache page_cache = PageCache::kKeep;
  int64_t chunk_bytes = 0;    // one read, and one staging buffer; a multiple of 64 KiB
  int64_t staging_bytes = 0;  // at least chunk_bytes
  int64_t merge_gap_bytes = 0;
  int num_workers = 1;
  bool advise_hugepages = true;
  int open_ahead = 0;                       // files that are opened before their turn
  int files_at_once = 1;                    // whose chunks take turns
  std::chrono::milliseconds io_timeout{0};  // 0: none
  DeviceOptions devices;
  // Makes the Reader of a lane, on the lane's own thread; `fallback` takes a sentence when it is not the best one.
  // Throws std::exception when there can be none.
  std::function<std::unique_ptr<Reader>(bool direct, std::string* fallback)> make_reader;
};

struct FileStats {
  int64_t direct_bytes = 0;    // read past the page cache
  int64_t buffered_bytes = 0;  // read through it
  int64_t cached_bytes = 0;    // of those, what was in it before
};

struct PipelineStats {
  int64_t bytes_needed = 0;
  int64_t bytes_read = 0;  // what arrived; what was fetched again after short direct reads included
  int64_t in_place_bytes = 0;
  int64_t device_bytes = 0;          // that were copied to GPUs
  int64_t device_scratch_bytes = 0;  // memory that this took there, beside destinations
  int64_t num_reads = 0;
  int64_t num_transfers = 0;
  int64_t num_whole_ops = 0;           // see Plan
  int64_t whole_op_bytes = 0;          // of the largest
  std::array<std::string, 2> readers;  // names of the buffered and the direct lane's reader; empty: not used
  std::vector<std::string> fallbacks;  // what was not to be had, and why
  std::vector<FileStats> files;
};

class Pipeline {
 public:
  explicit Pipeline(PipelineOptions options);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Returns the file's index. One that comes opened is among those that are open ahead of their turn.
  int32_t add_file(std::string path, const FileIdentity& identity, OpenedFile opened = {});
  // The file's probe of direct I/O, once a segment has read from it.
  DirectIo direct_io(int32_t file) const;

  enum class Order {
    kAppend,   // behind what was submitted before
    kBarrier,  // starts when everything submitted before has landed
    kUrgent,   // ahead of everything that has not started
  };
  // Plans the transfers and starts reading. Returns the segment's id (ids ascend). A file that can't be opened makes
  // the segment fail, which wait() tells. Throws std::system_error when threads can't be started, and what Devices
  // throws when it prepares; nothing is submitted then. `caller` is for transfers to GPUs, `shared` as in PlanOptions.
  int64_t submit(std::vector<Transfer> transfers, Order order, const DeviceCaller& caller = {},
                 std::optional<SharedReads> shared = {});

  // Waits until the segment has landed or failed, at most `timeout`. True: it is over; then fault() tells how.
  bool wait(int64_t segment, std::chrono::milliseconds timeout);
  // Segments that have landed since the last call.
  std::vector<int64_t> take_landed();

  Fault fault() const;
  // Fails all that has not landed with kCancelled, and returns without waiting.
  void cancel();
  // Cancels, ends the threads, and waits for what is in flight, at most `timeout`. True: no memory is written to any
  // more. False: storage has not answered; it may be asked again.
  bool stop(std::chrono::milliseconds timeout);
  // Destinations that may yet be written to, after stop(). Nothing when that can't be told: all then.
  std::optional<std::vector<ByteRange>> destinations_in_flight() const;

  int64_t bytes_landed() const { return bytes_landed_.load(std::memory_order_relaxed); }  // for progress only
  PipelineStats stats() const;

 private:
  struct Segment {
    int64_t id;
    Plan plan;
    Order order;
    int64_t chunks_left;
    std::vector<int32_t> files;             // open for it
    std::vector<int64_t> preparation_done;  // preparer's count at which each preparation is ready
    bool landing = false;                   // all is done but a last look at the files
  };
  struct Work {  // a chunk, and where it is
    Segment* segment = nullptr;
    int32_t chunk = -1;
    StagingBuffer buffer;  // no memory: in place
    int32_t reads_left = 0;
    bool direct = false;
  };
  class Lane;

  // For the thread of files, which asks the system about this one next.
  SourceFile& ask_about(int32_t file);
  SourceFile& source_file(int32_t file) const;
  bool failed() const;
  void run_files();
  void land(Segment& segment);  // on the thread of files
  void run_worker();
  // Carries out the pieces of a chunk that has landed. False: GPUs do, and finish it.
  bool transform(const Work& work);

  // REQUIRE the lock:
  // Has them opened, and waits for it, with the lock let go of; and behind them, unless they are urgent, some that may
  // be next.
  Fault ask_to_open(std::vector<int32_t> files, Order order, std::unique_lock<std::mutex>& lock);
  void post(std::function<void()> task);    // to the thread of files
  void watch();                             // fails when a question is not answered
  void start_threads(const Plan& plan);     // those that it needs and that do not run yet
  void dispatch();                          // moves segments that may start to the lanes
  void start(Segment& segment);             // may end the segment, when it is empty
  void finish(const Work& work);            // the chunk has landed, or is given up; may end its segment
  void land_if_complete(Segment& segment);  // may have it end
  void on_prepared(int64_t count);
  void fail(Fault fault);
  const Chunk& chunk_of(const Work& work) const { return work.segment->plan.chunks[static_cast<size_t>(work.chunk)]; }

  const PipelineOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable lane_changed_;    // chunks, buffers, prepared pages, stop
  std::condition_variable worker_changed_;  // ready chunks, stop
  std::condition_variable segment_changed_;
  std::condition_variable file_changed_;   // tasks, stop
  std::condition_variable waiting_ended_;  // a thread that waits for storage, or for a GPU, has ended

  std::vector<std::unique_ptr<SourceFile>> files_;
  DirectProbes probes_;                            // of the thread of files
  std::vector<int> file_users_;                    // segments that need it open, and lingering_
  std::vector<int32_t> ahead_;                     // opened before their turn, which has not come yet
  std::vector<int32_t> lingering_;                 // left open by an urgent segment of one file: that file
  std::vector<DirectIo> direct_io_;                // of each file, as known to others than submit()
  std::deque<std::unique_ptr<Segment>> segments_;  // not over, in the order of submission; waiting ones included
  std::deque<Segment*> waiting_;                   // not dispatched
  int64_t num_active_ = 0;                         // dispatched and not over
  int64_t next_segment_ = 0;
  bool huge_pages_come_late_ = false;  // submit() alone asks
  std::vector<int64_t> landed_;

  std::unique_ptr<BufferRing> ring_;
  std::unique_ptr<Devices> devices_;
  std::array<FileTurns<Work>, 2> lane_queues_;  // [direct]
  std::deque<Work> ready_;
  std::deque<std::function<void()>> file_tasks_;
  // What a lane, or the thread of files, is asking the system. Who waits for a segment looks whether it is answered.
  struct Question {
    Fault if_silent;
    Silence silence{};  // since the last answer
  };
  static constexpr size_t kFiles = 2;
  std::array<std::optional<Question>, 3> questions_;  // [direct], [kFiles]
  int num_at_storage_ = 0;                            // threads that wait for it: lanes, and that of files
  // Of a lane that has stopped, destinations of reads in flight; nothing: it has not stopped.
  std::array<std::optional<std::vector<ByteRange>>, 2> in_flight_;
  int64_t prepared_ = 0;
  Fault fault_;
  bool stopping_ = false;
  PipelineStats stats_;
  std::atomic<int64_t> bytes_landed_{0};

  std::unique_ptr<PagePreparer> preparer_;
  std::array<std::unique_ptr<Lane>, 2> lanes_;
  std::vector<std::thread> workers_;
  std::thread file_thread_;  // opens, compares and closes: calls that a dead server answers as little as reads
};

}  // namespace weightlift
