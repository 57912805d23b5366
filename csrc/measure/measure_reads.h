// How fast storage gives bytes: one file, each byte read at most once, into a few buffers that are used over and over.
// What `weightlift bench` and the benchmarks ask; no load does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weightlift {

enum class MeasuredReader {
  kUring,      // the core's readers
  kPread,      //
  kReference,  // threads that call pread(2) in a loop, and nothing of the core's: what the others are compared with
};

struct MeasureOptions {
  MeasuredReader reader = MeasuredReader::kUring;
  bool direct = true;       // O_DIRECT
  int64_t chunk_bytes = 0;  // of one read; a multiple of 4096
  int queue_depth = 1;      // reads in flight; for pread and the reference, threads
  bool random = false;      // the pieces of chunk_bytes in an order that no read ahead guesses; else from the start on
  bool huge_pages = true;   // of the buffers, which are touched before the clock starts
  int64_t max_bytes = INT64_MAX;
  double max_seconds = 1e9;  // then no read is started any more
};

struct ReadFigures {
  int64_t bytes = 0;
  double seconds = 0;               // from the first read's start to the last one's end
  double cpu_seconds = 0;           // of the whole process, user and system, meanwhile
  std::vector<double> latencies;    // seconds, of each read from its submission, ascending
  bool registered_buffers = false;  // pinned once, which io_uring alone can do, and a limit may forbid

  // The latency that a fraction of the reads did not exceed. REQUIRES: 0 <= fraction <= 1. 0 if there were no reads.
  double latency(double fraction) const;
};

// Reads the file. A short read counts as what it brought. Throws std::system_error where a call fails, and
// std::runtime_error, with one sentence, where the reader or direct I/O can't be had.
ReadFigures measure_reads(const std::string& path, const MeasureOptions& options);

// Takes the first `bytes` bytes of the file out of the page cache, or reads them into it, and returns how many of them
// lie there afterwards, as Residency tells; -errno where that can't be told. For the former, what posix_fadvise(2)
// leaves behind goes with the page cache of the whole machine, if this process may drop that. Throws std::system_error.
int64_t make_cold(const std::string& path, int64_t bytes);
int64_t make_warm(const std::string& path, int64_t bytes);

}  // namespace weightlift
