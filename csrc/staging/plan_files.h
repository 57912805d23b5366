// Planning by what the files themselves allow: for a Pipeline, which then reads, and for those who only want to know.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plan/planner.h"
#include "readers/source_file.h"
#include "util/fault.h"

namespace weightlift {

struct FilePlanOptions {
  Strategy strategy = Strategy::kAuto;
  int64_t chunk_bytes = 0;      // as in PlanOptions
  int64_t merge_gap_bytes = 0;  // as in PlanOptions
  bool advise_hugepages = true;
  PageCache page_cache = PageCache::kKeep;
};

// The files that transfers read from, ascending.
std::vector<int32_t> files_of(std::span<const Transfer> transfers);

// Opens the files, many at a time, since across a network each takes several round trips. `file_at` is called by many
// threads. Returns the fault of the first that can't be opened or is not what it was. Throws std::system_error when
// there can be no more threads.
Fault open_files(std::span<const int32_t> files, Strategy strategy, PageCache page_cache, DirectProbes& probes,
                 const std::function<SourceFile&(int32_t)>& file_at);

// Plans. REQUIRES: the files that the transfers read from are open.
Plan plan_files(std::vector<Transfer> transfers, std::optional<SharedReads> shared, const FilePlanOptions& options,
                const std::function<SourceFile&(int32_t)>& file_at);

// A fault of a whole file names the first of the transfers that read from it.
void name_transfer(Fault& fault, std::span<const Transfer> transfers);

// What plans would read.
struct ReadStats {
  struct File {
    int64_t num_reads = 0;
    int64_t direct_bytes = 0;
    int64_t buffered_bytes = 0;
    int64_t cached_bytes = 0;  // of those, what is in the page cache
  };
  struct Size {
    int64_t num_reads = 0;
    int64_t bytes = 0;
  };
  using Sizes = std::array<Size, 32>;  // [i]: reads of 2^i bytes and more, and of fewer than 2^(i+1)
  int64_t num_transfers = 0;
  int64_t bytes_needed = 0;
  int64_t in_place_bytes = 0;
  int64_t num_staged_chunks = 0;
  std::vector<File> files;
  Sizes direct_sizes, buffered_sizes, cached_sizes;  // of all reads: each in one of them
};

// Plans batches as a Pipeline would, one by one, and reads nothing. Destinations are asked about, and not touched.
// Files are open only while they are planned. Threads: none of its own; the caller serialises.
class ReadPlanner {
 public:
  explicit ReadPlanner(const FilePlanOptions& options) : options_(options) {}

  // Returns the file's index.
  int32_t add_file(std::string path, const FileIdentity& identity);
  // Adds to the stats, unless there is a fault.
  Fault plan(std::vector<Transfer> transfers, Plan* plan, std::optional<SharedReads> shared = {});
  const ReadStats& stats() const { return stats_; }
  // The file's probe of direct I/O, once it was planned.
  const DirectIo& direct_io(int32_t file) const { return files_.at(static_cast<size_t>(file))->direct_io(); }

 private:
  void count(const Plan& plan);

  const FilePlanOptions options_;
  std::vector<std::unique_ptr<SourceFile>> files_;
  std::vector<int64_t> file_bytes_;
  DirectProbes probes_;
  ReadStats stats_;
};

}  // namespace weightlift
