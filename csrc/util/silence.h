// Silence: how long storage has answered nothing.
#pragma once

#include <algorithm>
#include <chrono>

namespace weightlift {

// Adds up the time between looks. A look counts for little, however long ago the one before was: a process that was
// stopped, or did not get the processor, has heard nothing because it did not listen. Threads: the caller serialises.
class Silence {
 public:
  using Clock = std::chrono::steady_clock;

  void end() {
    lasted_ = {};
    looked_ = Clock::now();
  }
  // A look, at which nothing was heard. Returns how long it has lasted.
  Clock::duration look() {
    const Clock::time_point now = Clock::now();
    lasted_ += std::min(now - looked_, kMostPerLook);
    looked_ = now;
    return lasted_;
  }

 private:
  static constexpr Clock::duration kMostPerLook = std::chrono::milliseconds(200);

  Clock::time_point looked_ = Clock::now();
  Clock::duration lasted_{};
};

}  // namespace weightlift
