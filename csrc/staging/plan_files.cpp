#include "staging/plan_files.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "staging/pages.h"
#include "util/threads.h"

namespace weightlift {
namespace {

constexpr size_t kMaxOpening = 16;

}  // namespace

Fault open_files(std::span<const int32_t> files, Strategy strategy, PageCache page_cache, DirectProbes& probes,
                 const std::function<SourceFile&(int32_t)>& file_at) {
  std::vector<Fault> faults(files.size());
  std::atomic<size_t> next{0};  // only numbers are handed out: no ordering needed
  const auto open = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < files.size();) {
      try {
        faults[i] = file_at(files[i]).open(strategy, page_cache, probes);
      } catch (const std::exception& e) {  // no memory
        faults[i] = {FaultKind::kUnavailable, 0, files[i], -1, -1, e.what()};
      }
    }
  };
  {
    const SignalsBlocked blocked;
    std::vector<std::jthread> others;
    others.reserve(kMaxOpening);
    try {
      while (others.size() + 1 < std::min(files.size(), kMaxOpening)) others.emplace_back(open);
    } catch (const std::system_error&) {  // fewer threads do it too
    }
    open();
  }
  const auto first = std::ranges::find_if(faults, [](const Fault& fault) { return static_cast<bool>(fault); });
  return first == faults.end() ? Fault{} : std::move(*first);
}

Plan plan_files(std::vector<Transfer> transfers, std::optional<SharedReads> shared, const FilePlanOptions& options,
                const std::function<SourceFile&(int32_t)>& file_at) {
  PlanOptions plan_options;
  plan_options.chunk_bytes = options.chunk_bytes;
  plan_options.merge_gap_bytes = options.merge_gap_bytes;
  plan_options.shared = std::move(shared);
  plan_options.mode_of = [&](int32_t file, ByteRange window) {
    return file_at(file).mode_of(options.strategy, window);
  };
  if (options.advise_hugepages) plan_options.can_prepare = pages_untouched;
  Plan plan = plan_reads(std::move(transfers), plan_options);
  // What the kernel reads ahead of shared bytes may be what only one process wants, and reads past the page cache.
  // Where all is shared it may pay, by larger folios: 0.98 GB to each of four ranks, on two busy cores, took 0.9 to 1.5
  // s of system time, and 1.5 s without.
  int32_t last_file = -1;
  for (const Chunk& chunk : plan.chunks) {
    const int32_t file = plan.reads[static_cast<size_t>(chunk.first_read)].file;
    if (plan_options.shared && chunk.direct && std::exchange(last_file, file) != file) file_at(file).stop_read_ahead();
  }
  return plan;
}

void name_transfer(Fault& fault, std::span<const Transfer> transfers) {
  const auto first = std::ranges::find(transfers, fault.file, &Transfer::file);
  if (first != transfers.end()) fault.transfer_id = first->id;
}

std::vector<int32_t> files_of(std::span<const Transfer> transfers) {
  std::vector<int32_t> files;
  for (const Transfer& transfer : transfers) files.push_back(transfer.file);
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

int32_t ReadPlanner::add_file(std::string path, const FileIdentity& identity) {
  const auto index = static_cast<int32_t>(files_.size());
  files_.push_back(std::make_unique<SourceFile>(index, std::move(path), identity));
  file_bytes_.push_back(identity.size);
  stats_.files.emplace_back();
  return index;
}

Fault ReadPlanner::plan(std::vector<Transfer> transfers, Plan* plan, std::optional<SharedReads> shared) {
  const std::vector<int32_t> files = files_of(transfers);
  const auto file_at = [&](int32_t file) -> SourceFile& { return *files_[static_cast<size_t>(file)]; };
  Fault fault = open_files(files, options_.strategy, options_.page_cache, probes_, file_at);
  if (fault) {
    name_transfer(fault, transfers);
  } else {
    *plan = plan_files(std::move(transfers), std::move(shared), options_, file_at);
    count(*plan);
  }
  for (int32_t file : files) file_at(file).close();
  return fault;
}

void ReadPlanner::count(const Plan& plan) {
  stats_.num_transfers += static_cast<int64_t>(plan.transfers.size());
  stats_.bytes_needed += plan.bytes_needed;
  for (const Chunk& chunk : plan.chunks) {
    if (chunk.staging_bytes > 0) ++stats_.num_staged_chunks;
    for (int32_t i = chunk.first_read; i < chunk.first_read + chunk.num_reads; ++i) {
      const Read& read = plan.reads[static_cast<size_t>(i)];
      const auto index = static_cast<size_t>(read.file);
      // Direct reads may reach past the end, where nothing comes.
      const int64_t bytes = std::min(read.length, file_bytes_[index] - read.offset);
      ReadStats::File& file = stats_.files[index];
      ++file.num_reads;
      (chunk.direct ? file.direct_bytes : file.buffered_bytes) += bytes;
      if (chunk.cached) file.cached_bytes += bytes;
      if (read.destination) stats_.in_place_bytes += bytes;
      auto& sizes = chunk.cached ? stats_.cached_sizes : chunk.direct ? stats_.direct_sizes : stats_.buffered_sizes;
      ReadStats::Size& size = sizes[static_cast<size_t>(std::bit_width(static_cast<uint64_t>(bytes)) - 1)];
      ++size.num_reads;
      size.bytes += bytes;
    }
  }
}

}  // namespace weightlift
