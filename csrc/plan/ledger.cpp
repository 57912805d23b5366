#include "plan/ledger.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace weightlift {

void Ledger::add(Transfer transfer) {
  Region region = Region::destination_of(transfer);
  int level = 0;
  std::vector<int64_t> overwritten;
  index_.visit_overlapping(region.bounds(), [&](int64_t id) {
    const Pending& earlier = pending_.at(id);
    if (!region.overlaps(earlier.region)) return;
    if (earlier.batch == kWaiting && region.covers(earlier.region)) {
      overwritten.push_back(id);
    } else {
      level = std::max(level, earlier.level + 1);
    }
  });
  drop(overwritten);

  remember_write(region, true);
  waiting_bytes_ += destination_bytes(transfer);
  index_.insert(region.bounds(), transfer.id);
  const int64_t id = transfer.id;
  pending_.emplace(id, Pending{std::move(transfer), std::move(region), level, kWaiting});
  recorded_.push_back(id);
}

void Ledger::add_write(const Region& region) { remember_write(region, false); }

void Ledger::remember_write(const Region& region, bool is_transfer) {
  if (!tracks_writes_ || region.empty()) return;
  write_index_.insert(region.bounds(), static_cast<int64_t>(writes_.size()));
  writes_.push_back({region, is_transfer});
}

std::vector<int64_t> Ledger::needed_for(const Region& region, bool overwrites) const {
  std::vector<int64_t> needed;
  if (region.empty() || index_.empty()) return needed;
  std::unordered_set<int64_t> seen;
  const auto collect = [&](const Region& looked_at, int64_t before) {
    index_.visit_overlapping(looked_at.bounds(), [&](int64_t id) {
      if (id >= before || seen.contains(id)) return;
      const Pending& pending = pending_.at(id);
      if (!looked_at.overlaps(pending.region)) return;
      if (overwrites && pending.batch == kWaiting && region.covers(pending.region)) return;
      seen.insert(id);
      needed.push_back(id);
    });
  };
  collect(region, INT64_MAX);
  for (size_t i = 0; i < needed.size(); ++i) {  // grows: what those overlap and what came before them
    const int64_t id = needed[i];
    collect(pending_.at(id).region, id);
  }
  return needed;
}

void Ledger::drop_inside(const Region& region) {
  if (region.empty()) return;
  std::vector<int64_t> inside;
  index_.visit_overlapping(region.bounds(), [&](int64_t id) {
    const Pending& pending = pending_.at(id);
    if (pending.batch == kWaiting && region.covers(pending.region)) inside.push_back(id);
  });
  drop(inside);
}

std::vector<Batch> Ledger::start() { return start(std::exchange(recorded_, {})); }

std::vector<Batch> Ledger::start(const std::vector<int64_t>& ids) {
  std::vector<int64_t> waiting;
  for (int64_t id : ids) {
    const auto it = pending_.find(id);
    if (it != pending_.end() && it->second.batch == kWaiting) waiting.push_back(id);
  }
  return start_sorted(waiting);
}

std::vector<Batch> Ledger::start_sorted(const std::vector<int64_t>& ids) {
  std::vector<std::pair<int, int64_t>> order;  // level, id
  order.reserve(ids.size());
  for (int64_t id : ids) order.emplace_back(pending_.at(id).level, id);
  std::sort(order.begin(), order.end());
  std::vector<Batch> batches;
  std::vector<int64_t>* started = nullptr;
  for (const auto& [level, id] : order) {
    if (batches.empty() || batches.back().level != level) {
      batches.push_back({next_label_++, level, {}});
      started = &started_[batches.back().label];
    }
    Pending& pending = pending_.at(id);
    waiting_bytes_ -= destination_bytes(pending.transfer);
    pending.batch = batches.back().label;
    batches.back().transfers.push_back(std::move(pending.transfer));
    started->push_back(id);
  }
  return batches;
}

std::vector<int64_t> Ledger::batches_of(const std::vector<int64_t>& ids) const {
  std::vector<int64_t> labels;
  for (int64_t id : ids) {
    const auto it = pending_.find(id);
    if (it != pending_.end() && it->second.batch != kWaiting) labels.push_back(it->second.batch);
  }
  std::sort(labels.begin(), labels.end());
  labels.erase(std::unique(labels.begin(), labels.end()), labels.end());
  return labels;
}

void Ledger::landed(int64_t label) {
  const auto it = started_.find(label);
  if (it == started_.end()) return;
  for (int64_t id : it->second) forget(id);
  started_.erase(it);
}

Ledger::Coverage Ledger::coverage(ByteRange whole) const {
  std::vector<ByteRange> written;
  std::vector<ByteRange> transferred;
  write_index_.visit_overlapping(whole, [&](int64_t position) {
    const Write& write = writes_[static_cast<size_t>(position)];
    write.region.visit_runs([&](ByteRange run) {
      run = {std::max(run.begin, whole.begin), std::min(run.end, whole.end)};
      if (run.size() > 0) {
        written.push_back(run);
        if (write.is_transfer) transferred.push_back(run);
      }
      return true;
    });
  });
  Coverage result;
  unite(std::move(transferred), &result.doubles);
  result.gaps = gaps(whole, unite(std::move(written)));
  return result;
}

std::vector<int64_t> Ledger::pending_ids() const {
  std::vector<int64_t> ids;
  for (const auto& [id, pending] : pending_) ids.push_back(id);
  return ids;
}

void Ledger::drop(const std::vector<int64_t>& ids) {
  for (int64_t id : ids) forget(id);
  num_dropped_ += static_cast<int64_t>(ids.size());
}

void Ledger::forget(int64_t id) {
  const auto it = pending_.find(id);
  if (it->second.batch == kWaiting) {
    waiting_bytes_ -= destination_bytes(it->second.transfer);
  }
  index_.erase(it->second.region.bounds(), id);
  pending_.erase(it);
}

}  // namespace weightlift
