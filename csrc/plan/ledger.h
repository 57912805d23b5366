// Ledger: the transfers that have been recorded and have not landed, the order they must keep, and what has been
// written.
//
// Contract of recording: the result is as if every copy had happened at once, in program order. So transfers whose
// destinations share bytes keep their order, by levels: a transfer's level is one more than the highest level among the
// pending transfers it overlaps. Transfers of one level are disjoint and may run in any order; a level runs when the
// one below has landed. A transfer whose destination is wholly overwritten by a later one before it was started is
// dropped.
//
// Threads: none of its own; the caller serialises (the recording thread).
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/geometry.h"
#include "plan/interval_index.h"
#include "plan/transfer.h"

namespace weightlift {

struct Batch {
  int64_t label = -1;               // for landed()
  int level = 0;                    // 0: overlaps nothing that is still pending elsewhere
  std::vector<Transfer> transfers;  // disjoint destinations
};

class Ledger {
 public:
  // From here on writes are remembered, for coverage().
  void track_writes() { tracks_writes_ = true; }

  // Records a transfer. REQUIRES: canonical; id larger than every id before.
  void add(Transfer transfer);

  // Notes bytes written by other means (a fill), if writes are tracked.
  void add_write(const Region& region);

  // Recorded and not landed.
  bool has_pending() const { return !pending_.empty(); }
  std::vector<int64_t> pending_ids() const;
  // Bytes that the transfers write which are recorded and not started.
  int64_t waiting_bytes() const { return waiting_bytes_; }
  // How many transfers were dropped because they were overwritten.
  int64_t num_dropped() const { return num_dropped_; }

  // Ids of the pending transfers (waiting or started) that write a byte of `region`, and with them every earlier one
  // that they overlap, directly or through others: what has to land, in order, before someone may look at the region.
  // With `overwrites`, someone is going to replace all of the region unseen: waiting transfers that write nothing else
  // are not needed then, and are for drop_inside() when that has been done.
  std::vector<int64_t> needed_for(const Region& region, bool overwrites = false) const;

  // Drops the waiting transfers that write only inside `region`.
  void drop_inside(const Region& region);

  // Hands out waiting transfers, marked as started, as batches of ascending level: all of them, or those among the ids.
  std::vector<Batch> start();
  std::vector<Batch> start(const std::vector<int64_t>& ids);

  // Labels of the batches in which any of these pending transfers was started.
  std::vector<int64_t> batches_of(const std::vector<int64_t>& ids) const;
  // Everything that was handed out in the batch has landed.
  void landed(int64_t label);

  // Which parts of `whole` nobody wrote, and which were the destination of more than one transfer, since
  // track_writes().
  struct Coverage {
    std::vector<ByteRange> gaps;
    std::vector<ByteRange> doubles;
  };
  Coverage coverage(ByteRange whole) const;

 private:
  struct Pending {
    Transfer transfer;  // moved out when it is started
    Region region;
    int level;
    int64_t batch;  // kWaiting, or the label of the batch it was started in
  };
  static constexpr int64_t kWaiting = -1;

  void forget(int64_t id);
  void drop(const std::vector<int64_t>& ids);
  void remember_write(const Region& region, bool is_transfer);
  std::vector<Batch> start_sorted(const std::vector<int64_t>& ids);

  std::unordered_map<int64_t, Pending> pending_;
  IntervalIndex index_;            // bounds of pending destinations -> id
  std::vector<int64_t> recorded_;  // since all was started; some may be dropped, or started
  std::unordered_map<int64_t, std::vector<int64_t>> started_;
  int64_t next_label_ = 0;
  int64_t num_dropped_ = 0;
  int64_t waiting_bytes_ = 0;

  struct Write {
    Region region;
    bool is_transfer;
  };
  bool tracks_writes_ = false;
  std::vector<Write> writes_;
  IntervalIndex write_index_;  // bounds -> position in writes_
};

}  // namespace weightlift
