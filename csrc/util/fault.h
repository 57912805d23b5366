// Fault: why a load failed, in terms of files and offsets. Whoever knows names (Python) makes the message of it.
#pragma once

#include <cstdint>
#include <string>

namespace weightlift {

enum class FaultKind {
  kNone,
  kOpen,         // the file could not be opened: error
  kChanged,      // the file is not the one whose header was parsed: detail
  kEndOfFile,    // the file ended at `offset`, inside data that is needed
  kRead,         // a read at `offset` failed: error
  kTimeout,      // storage has not answered a read at `offset`, or (negative) about the file, within the time-out
  kDevice,       // a GPU refused or failed to take in what was read: detail
  kUnavailable,  // what the user demanded can't be had: detail says why
  kCancelled,    // the caller gave up
};

struct Fault {
  FaultKind kind = FaultKind::kNone;
  int error = 0;             // errno, where the system said one
  int32_t file = -1;         // index
  int64_t offset = -1;       // in the file
  int64_t transfer_id = -1;  // what was being read
  std::string detail{};

  explicit operator bool() const { return kind != FaultKind::kNone; }
};

}  // namespace weightlift
