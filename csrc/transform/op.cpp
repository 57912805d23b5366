#include "transform/op.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "util/threads.h"

namespace weightlift {

int Op::launch(const std::byte*, int64_t, int64_t, int64_t, DeviceStream) const { return kDeviceNotSupported; }

void run_op(const Op& op, const std::byte* src, int64_t src_row_stride, int num_threads) {
  const OpSource& source = op.source();
  if (source.num_rows == 0) return;
  // Parts of about 1 MiB: enough to make a thread worth while, few enough for all threads to end together.
  constexpr int64_t kPartBytes = 1 << 20;
  const int64_t granule_bytes = std::max<int64_t>(1, source.granule_rows * source.row_bytes);
  const int64_t part_rows = source.granule_rows * std::max<int64_t>(1, kPartBytes / granule_bytes);
  const int64_t num_parts = (source.num_rows + part_rows - 1) / part_rows;

  std::atomic<int64_t> next_part{0};
  const auto run_parts = [&] {
    // Relaxed: the number is all that is shared. Joining the threads publishes what they wrote.
    for (int64_t part; (part = next_part.fetch_add(1, std::memory_order_relaxed)) < num_parts;) {
      const int64_t first = part * part_rows;
      op.run(src + first * src_row_stride, src_row_stride, first, std::min(part_rows, source.num_rows - first));
    }
  };
  std::vector<std::thread> threads;
  try {
    for (int64_t i = 1; i < std::min<int64_t>(num_threads, num_parts); ++i) {
      threads.push_back(start_thread("weightlift-op", run_parts));
    }
  } catch (const std::system_error&) {  // fewer threads do it too
  }
  run_parts();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace weightlift
