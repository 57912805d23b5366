// Whether a file can be read past the page cache, found out by trying.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "util/unique_fd.h"

namespace weightlift {

struct DirectIo {
  bool usable = false;           // O_DIRECT reads work, at these alignments
  bool proven = false;           // they do bypass the page cache; some file systems accept the flag and don't
  bool told = false;             // the file system says so of each file; else it was found out by reading this one
  int64_t memory_alignment = 0;  // bytes, a power of two; of the buffer's address
  int64_t offset_alignment = 0;  // bytes, a power of two; of the offset and the length of a read
  std::string reason;            // one sentence: why not usable, or "direct (unproven): ..."; else empty
};

// Tries direct reads of a regular file: one block, or two where the file system does not tell its alignment. The answer
// holds for the files of one file system alike, save for odd ones (encrypted, compressed, inline). Never throws.
// `opened`, if given, is the descriptor that the file was opened by (O_DIRECT), where it can be used: across a network,
// opening it again takes as long as reading.
DirectIo probe_direct(const char* path, UniqueFd* opened = nullptr);

// Probes files of one load. What was proven by reading one file is not tried again with others of its device: across a
// network an answer takes its time, and there are hundreds of files. Threads: any, also at once.
class DirectProbes {
 public:
  // `opened` as above; it is left as it was where nothing had to be tried.
  DirectIo of(const char* path, uint64_t device, UniqueFd* opened);
  // What one of its files was found to be like elsewhere.
  void note(uint64_t device, const DirectIo& found);

 private:
  std::mutex mutex_;
  std::map<uint64_t, DirectIo> proven_;  // by device
};

}  // namespace weightlift
