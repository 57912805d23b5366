// IntervalIndex: finds, among many byte ranges that may overlap, those that meet a given one.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <map>

#include "plan/geometry.h"

namespace weightlift {

// Ranges are kept by size class (powers of two), each class ordered by its beginning, so that one huge range among many
// small ones does not make every question walk over all of them.
class IntervalIndex {
 public:
  // REQUIRES: range is not empty.
  void insert(ByteRange range, int64_t value) {
    classes_[size_class(range)].emplace(range.begin, Item{range.end, value});
    ++size_;
  }

  // Removes one item that was inserted with these arguments.
  void erase(ByteRange range, int64_t value) {
    auto& items = classes_[size_class(range)];
    for (auto [it, last] = items.equal_range(range.begin); it != last; ++it) {
      if (it->second.value == value) {
        items.erase(it);
        --size_;
        return;
      }
    }
  }

  bool empty() const { return size_ == 0; }

  // Calls visit(value) for each range that shares a byte with `range`.
  template <typename Visit>
  void visit_overlapping(ByteRange range, Visit visit) const {
    if (size_ == 0) return;
    for (size_t c = 0; c < classes_.size(); ++c) {
      const auto& items = classes_[c];
      if (items.empty()) continue;
      const int64_t longest = static_cast<int64_t>((uint64_t{1} << c) - 1);  // of this class
      for (auto it = items.upper_bound(range.begin - longest); it != items.end() && it->first < range.end; ++it) {
        if (it->second.end > range.begin) visit(it->second.value);
      }
    }
  }

 private:
  struct Item {
    int64_t end;
    int64_t value;
  };
  static size_t size_class(ByteRange range) { return std::bit_width(static_cast<uint64_t>(range.size())); }

  std::array<std::multimap<int64_t, Item>, 63> classes_;
  int64_t size_ = 0;
};

}  // namespace weightlift
