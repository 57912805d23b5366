// Lane: the thread that keeps one Reader's queue full. Part of Pipeline, see there.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "staging/pipeline.h"

namespace weightlift {

class Pipeline::Lane {
 public:
  Lane(Pipeline& pipeline, bool direct);
  // REQUIRES: the pipeline is stopping, and its mutex is not held. Waits for the reads in flight, however long.
  ~Lane() { thread_.join(); }

 private:
  struct ActiveChunk {
    Work work;
    const SourceFile* file;
    int32_t next_read = 0;  // first not submitted, counted within the chunk
    FileStats stats;
  };
  // A read that has been handed to the Reader, or waits to be handed over again.
  struct ActiveRead {
    ActiveChunk* chunk = nullptr;
    const Read* read = nullptr;
    int64_t done = 0;       // bytes that have arrived
    int num_retries = 0;    // in a row, without progress
    bool buffered = false;  // a direct read that came back short at an odd place goes on through the page cache
    int64_t number = 0;     // ascends, read by read
  };

  void run();
  void read_until_stopped();
  // Notes which read the system is being asked for, the oldest in flight, and that it has just answered others.
  void ask();
  // Collects what can be submitted now; only up to a buffer that had to be registered, since that takes its time: its
  // pages are made. Waits for work only when nothing is in flight.
  void collect_requests();
  bool take_chunk(bool wait);
  // Whether reads shall go into so much memory that nobody has used yet, now.
  bool may_grow(int64_t bytes) const;
  ReadRequest request_for(uint64_t token);
  void on_completion(const ReadCompletion& completion);
  void on_read_done(ActiveRead& read);
  void fail(const ActiveRead& read, FaultKind kind, int error);
  void go_on_buffered(ActiveRead& read);
  // The transfer that needs the byte at `offset`, or the read's first one.
  int64_t transfer_at(const ActiveRead& read, int64_t offset) const;
  void release(uint64_t token);
  std::vector<ByteRange> destinations_in_flight() const;

  Pipeline& pipeline_;
  const bool direct_;
  std::unique_ptr<Reader> reader_;

  std::vector<std::unique_ptr<ActiveChunk>> chunks_;
  ActiveChunk* current_ = nullptr;  // the chunk whose reads are being submitted
  std::vector<ActiveRead> reads_;   // position: token
  std::vector<uint64_t> free_tokens_;
  std::vector<uint64_t> again_;  // tokens to submit again
  std::vector<ReadRequest> requests_;
  int num_in_flight_ = 0;
  int64_t num_begun_ = 0;
  Silence silence_;  // of storage, while reads are in flight
  // Of memory new to the ring, where direct reads need it: how long it took to come, how much it was, and since when;
  // and the reads that were done.
  std::chrono::nanoseconds growing_{};
  int64_t bytes_grown_ = 0;
  std::chrono::steady_clock::time_point begun_;
  int64_t num_done_ = 0;
  bool busy_ = false;  // the system keeps saying "again": a pause is due

  std::vector<int> buffer_index_;  // of each staging buffer with the reader; kUnknown: not offered yet
  bool register_buffers_ = true;
  bool has_registered_ = false;  // while requests were collected: to be submitted before the next buffer is registered
  bool refused_direct_ = false;  // has been told of
  std::unordered_map<int32_t, int> file_index_;
  bool register_files_ = true;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace weightlift
