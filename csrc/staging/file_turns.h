// FileTurns: what waits for its turn, in order; or that of several files in turn, so that more than one server, or
// stream, is kept busy where each has files of its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

namespace weightlift {

// Threads: none of its own; the caller serialises.
template <typename Item>
class FileTurns {
 public:
  // files_at_once: 1: everything in order, whatever its file.
  explicit FileTurns(int files_at_once) : files_at_once_(static_cast<size_t>(std::max(1, files_at_once))) {}

  // Behind what is there, of its file.
  void push_back(int32_t file, Item item) {
    if (files_at_once_ == 1) file = 0;
    auto found = std::find_if(files_.rbegin(), files_.rend(), [&](const OfFile& other) { return other.file == file; });
    if (found == files_.rend()) {
      files_.push_back({file, {}});
      found = files_.rbegin();
    }
    found->items.push_back(std::move(item));
  }
  // Ahead of everything.
  void push_front(const std::vector<Item>& items) { urgent_.insert(urgent_.begin(), items.begin(), items.end()); }

  // The next that may be taken, of the files that came first; nothing: none of them may.
  template <typename Predicate>
  std::optional<Item> take(Predicate&& may_be_taken) {
    if (!urgent_.empty()) return may_be_taken(urgent_.front()) ? std::optional(pop(urgent_)) : std::nullopt;
    const size_t count = std::min(files_.size(), files_at_once_);
    for (size_t i = 0; i < count; ++i) {
      const size_t at = (turn_ + i) % count;
      if (!may_be_taken(files_[at].items.front())) continue;
      Item item = pop(files_[at].items);
      turn_ = at + 1;
      if (files_[at].items.empty()) {
        files_.erase(files_.begin() + static_cast<std::ptrdiff_t>(at));
        turn_ = at;
      }
      return item;
    }
    return std::nullopt;
  }

 private:
  struct OfFile {
    int32_t file;
    std::deque<Item> items;  // never empty
  };
  static Item pop(std::deque<Item>& items) {
    Item item = std::move(items.front());
    items.pop_front();
    return item;
  }

  const size_t files_at_once_;
  std::deque<Item> urgent_;
  std::deque<OfFile> files_;  // in the order in which they came
  size_t turn_ = 0;           // the file that is next, among those at once
};

}  // namespace weightlift
