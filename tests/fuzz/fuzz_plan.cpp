// Fuzzes what lies between recording and reading: copies and ops, in any shape, are recorded in a Ledger, planned, and
// carried out over virtual files, chunk by chunk, with poison wherever nothing was read to. The same, element by
// element in program order, must give the same memory: at the end, and wherever somebody looks at a part of it before.
//
// A libFuzzer target; replay.cpp runs it over the committed corpus where there is no libFuzzer.

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "plan/ledger.h"
#include "plan/planner.h"
#include "staging/carry_out.h"
#include "transform/convert.h"
#include "transform/copy.h"
#include "util/align.h"

namespace weightlift {
namespace {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
constexpr int64_t kMemoryBytes = 16 * kMiB;
constexpr int64_t kSmallBytes = 64 * kKiB;  // where small transfers lie, so that they overlap
constexpr int64_t kFileBytes = 2 * kModeWindow + 12'345;
constexpr int kMaxTransfers = 24;
constexpr int64_t kMaxElements = 4096;

void require(bool kept, const char* promise) {
  if (kept) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

// The fuzzer's bytes, as numbers; zeros when they are used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), end_(data + size) {}
  bool empty() const { return data_ == end_; }
  int64_t byte() { return empty() ? 0 : *data_++; }
  int64_t below(int64_t bound) {
    int64_t value = byte();
    for (int64_t reach = 256; reach < bound; reach *= 256) value = value * 256 + byte();
    return value % bound;
  }
  template <size_t N>
  int64_t one_of(const int64_t (&choices)[N]) {
    return choices[byte() % static_cast<int64_t>(N)];
  }

 private:
  const uint8_t* data_;
  const uint8_t* end_;
};

// Files of random bytes, repeated with a period that is no multiple of anything, shifted from file to file.
void read_file(int32_t file, int64_t offset, int64_t length, std::byte* out) {
  constexpr int64_t kPeriod = 65'537;
  static const auto pattern = [] {
    std::vector<std::byte> bytes(static_cast<size_t>(kPeriod));
    uint64_t state = 42;
    for (std::byte& byte : bytes) byte = static_cast<std::byte>((state = state * 6364136223846793005 + 1) >> 56);
    return bytes;
  }();
  int64_t at = (offset + file * 7001) % kPeriod;
  while (length > 0) {
    const int64_t n = std::min(length, kPeriod - at);
    std::memcpy(out, pattern.data() + at, static_cast<size_t>(n));
    out += n;
    length -= n;
    at = 0;
  }
}

// Of each granule one row: byte j is added up over its rows, row i times 2 i + 1.
class SumOp final : public Op {
 public:
  SumOp(OpSource source, std::byte* data, int64_t row_stride)
      : Op(source,
           {{data, (source.num_rows + source.granule_rows - 1) / source.granule_rows, source.row_bytes, row_stride}}) {}

  const char* name() const override { return "sum"; }

  void run(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows) const override {
    const int64_t granule = source().granule_rows;
    const int64_t end = first_row + num_rows;
    require(first_row % granule == 0 && num_rows > 0, "a part starts with a granule");
    require(end % granule == 0 || end == source().num_rows, "a part ends with a granule");
    for (int64_t first = 0; first < num_rows; first += granule) {
      std::byte* out = outputs().front().data + (first_row + first) / granule * outputs().front().row_stride;
      for (int64_t j = 0; j < source().row_bytes; ++j) {
        int64_t sum = 0;
        for (int64_t i = 0; i < std::min(granule, num_rows - first); ++i) {
          sum += (2 * i + 1) * static_cast<int64_t>(src[(first + i) * src_row_stride + j]);
        }
        out[j] = static_cast<std::byte>(sum);
      }
    }
  }
};

struct Arena {
  std::byte* data = static_cast<std::byte*>(
      ::mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
};

// What happens in memory, as it is planned, and as it should be.
class Run {
 public:
  explicit Run(Input& input) : input_(input) {
    options_.chunk_bytes = 4 * kKiB * (1 + input.below(16));
    const int64_t gaps[] = {0, 1, 100, 512, 4096, 16 * kKiB};
    options_.merge_gap_bytes = input.one_of(gaps);
    const int64_t alignments[] = {512, 4096};
    const int64_t offset_alignment = input.one_of(alignments);
    const int64_t memory_alignment = int64_t{4} << input.below(11);
    const int64_t direct_windows = input.byte();  // one bit for each of some windows
    options_.mode_of = [=](int32_t file, ByteRange window) {
      require(window.begin % kModeWindow == 0 && window.size() == kModeWindow, "modes are asked for by windows");
      const bool direct = (direct_windows >> ((window.begin / kModeWindow + 3 * file) % 8) & 1) != 0;
      return direct ? ReadMode{true, offset_alignment, memory_alignment} : ReadMode{};
    };
    if (input.below(3) != 0) options_.can_prepare = [](ByteRange) { return true; };
  }

  ~Run() {
    std::memset(planned().data, 0, static_cast<size_t>(used_));
    std::memset(expected().data, 0, static_cast<size_t>(used_));
  }

  void run() {
    for (int64_t id = 0; id < kMaxTransfers && !input_.empty(); ++id) {
      record(id);
      const int64_t what = input_.below(8);
      if (what == 0) carry_out_batches(ledger_.start());
      if (what == 1) look();
      if (what == 2) share(0);
      if (what == 3) share(100);
    }
    carry_out_batches(ledger_.start());
    require(!ledger_.has_pending(), "everything has landed");
    require(std::memcmp(planned().data, expected().data, static_cast<size_t>(used_)) == 0, "the bytes of naive copies");
  }

 private:
  static Arena& planned() {
    static Arena arena;
    return arena;
  }
  static Arena& expected() {
    static Arena arena;
    return arena;
  }

  // Near the edge of a window, near the end of the file, or at its start.
  int64_t source_offset(int64_t extent) {
    const int64_t bases[] = {0, kModeWindow - 16 * kKiB, kFileBytes - 64 * kKiB};
    int64_t offset = input_.one_of(bases) + input_.below(64 * kKiB);
    if (input_.below(2) == 0) offset = align_down(offset, 512);
    return std::clamp<int64_t>(offset, 0, kFileBytes - extent);
  }

  void record(int64_t id) {
    switch (input_.below(8)) {
      case 0:
        record_large(id);
        break;
      case 1:
      case 2:
        record_op(id);
        break;
      default:
        record_copy(id);
    }
  }

  // Contiguous, of a size that may be read in place; for direct reads if it is very large.
  void record_large(int64_t id) {
    if (++num_large_ > 2) return;  // they take most of the time
    const bool very_large = num_large_ == 1 && input_.below(16) == 0;
    const int64_t bytes = very_large ? 4 * kMiB + input_.below(kMiB) : 64 * kKiB + input_.below(128 * kKiB);
    const int64_t offset = source_offset(bytes);
    int64_t at = kSmallBytes + input_.below(64 * kKiB);
    if (input_.below(2) == 0) at = align_down(at, 4096) + offset % 4096;  // as reads in place need it
    add(make_transfer(id, file(), ElementType::kBytes1, offset, ElementType::kBytes1, planned().data + at,
                      {{bytes, 1, 1}}));
  }

  void record_op(int64_t id) {
    const int64_t num_rows = 1 + input_.below(40);
    const int64_t row_bytes = 1 + input_.below(600);
    const OpSource source{num_rows, row_bytes, 1 + input_.below(num_rows)};
    const int64_t gaps[] = {0, 0, 1, 300, 5000};
    const int64_t src_row_stride = row_bytes + input_.one_of(gaps);
    const int64_t dst_row_stride = row_bytes + input_.below(50);
    const int64_t at = input_.below(kSmallBytes - num_rows * dst_row_stride);
    auto op = std::make_shared<SumOp>(source, planned().data + at, dst_row_stride);
    add(make_op_transfer(id, file(), source_offset(num_rows * src_row_stride), src_row_stride, std::move(op)));
  }

  void record_copy(int64_t id) {
    using enum ElementType;
    constexpr ElementType kTypes[] = {kBytes1, kBytes2, kBytes4, kBytes8, kBytes16, kFloat32, kFloat16, kBFloat16};
    const ElementType src_type = kTypes[input_.below(8)];
    ElementType dst_type = src_type;
    if (input_.below(2) != 0 && can_convert(src_type, kTypes[5])) dst_type = kTypes[5 + input_.below(3)];
    const int64_t src_item = element_bytes(src_type);
    const int64_t dst_item = element_bytes(dst_type);

    // A view of a tensor in the file, sometimes expanded.
    std::vector<Dim> dims;
    int64_t count = 1;
    int64_t src_extent = src_item;
    for (int64_t d = input_.below(4); d > 0; --d) {
      const int64_t size = 1 + input_.below(std::max<int64_t>(1, std::min<int64_t>(60, kMaxElements / count)));
      const int64_t stride = src_extent + src_item * input_.one_of({0, 0, 0, 1, 37, 900});
      dims.push_back({size, stride, 0});
      src_extent += (size - 1) * stride;
      count *= size;
    }
    if (input_.below(6) == 0 && count * 5 <= kMaxElements) dims.push_back({2 + input_.below(4), 0, 0});
    if (src_extent > kModeWindow) return;

    // Its place in memory, its dimensions in any order.
    for (size_t i = dims.size(); i > 1; --i) {
      std::swap(dims[i - 1], dims[static_cast<size_t>(input_.below(static_cast<int64_t>(i)))]);
    }
    int64_t dst_extent = dst_item;
    for (Dim& dim : dims) {
      dim.dst_stride = dst_extent + input_.one_of({0, 0, 0, 1, 20});
      dst_extent += (dim.size - 1) * dim.dst_stride;
    }
    if (dst_extent >= kSmallBytes) return;
    std::byte* dst = planned().data + input_.below(kSmallBytes - dst_extent);
    add(make_transfer(id, file(), src_type, source_offset(src_extent), dst_type, dst, std::move(dims)));
  }

  int32_t file() { return static_cast<int32_t>(input_.below(3)); }

  void add(const Transfer& transfer) {
    // What the core is never given (csrc/plan/geometry.h): the bindings refuse it.
    if (!source_is_nested(transfer) || !destination_is_nested(transfer)) return;
    const int64_t begin = reinterpret_cast<int64_t>(planned().data);
    const ByteRange bounds = destination_bounds(transfer);
    require(bounds.begin >= begin && bounds.end <= begin + kMemoryBytes, "a destination lies in memory");
    used_ = std::max(used_, bounds.end - begin);
    run_naively(transfer);
    last_ = {transfer.file, source_bounds(transfer)};
    ledger_.add(transfer);
  }

  // Other processes read a tensor too: what was recorded last of the file, and `more` bytes that nobody here may need.
  void share(int64_t more) {
    if (!options_.shared) options_.shared.emplace();
    const int64_t end = std::min(last_.bytes.end + more, kFileBytes);
    if (last_.bytes.size() > 0) options_.shared->tensors.push_back({last_.file, {last_.bytes.begin, end}});
  }

  // Somebody reads some bytes: what is needed for them lands, and they are right.
  void look() {
    const int64_t begin = input_.below(std::max<int64_t>(1, used_));
    const int64_t bytes = std::min(1 + input_.below(3000), used_ - begin);
    if (bytes <= 0) return;
    const Region region(reinterpret_cast<int64_t>(planned().data) + begin, 1, {{bytes, 1}});
    carry_out_batches(ledger_.start(ledger_.needed_for(region)));
    require(std::memcmp(planned().data + begin, expected().data + begin, static_cast<size_t>(bytes)) == 0,
            "what is looked at has landed");
  }

  void carry_out_batches(std::vector<Batch> batches) {
    for (Batch& batch : batches) {
      const Plan plan = plan_reads(std::move(batch.transfers), options_);
      for (const Chunk& chunk : plan.chunks) carry_out_chunk(plan, chunk);
      ledger_.landed(batch.label);
    }
  }

  void carry_out_chunk(const Plan& plan, const Chunk& chunk) {
    staging_.assign(static_cast<size_t>(chunk.staging_bytes), std::byte{0xA5});
    for (int32_t r = chunk.first_read; r < chunk.first_read + chunk.num_reads; ++r) {
      const Read& read = plan.reads[static_cast<size_t>(r)];
      const ReadMode mode = options_.mode_of(read.file, window_of(read.offset));
      require(read.length > 0 && read.length <= options_.chunk_bytes, "a read is no larger than a chunk");
      require(read.offset >= 0 && read.needed_end <= read.offset + read.length && read.needed_end <= kFileBytes,
              "what is needed is read, and is in the file");
      if (chunk.direct && mode.direct) {
        require(is_aligned(read.offset, mode.offset_alignment) && is_aligned(read.length, mode.offset_alignment),
                "direct reads are aligned");
      }
      const int64_t length = std::min(read.length, kFileBytes - read.offset);  // short at the end of the file
      if (read.destination == nullptr) {
        require(read.staging_offset + read.length <= chunk.staging_bytes, "a read fits its staging buffer");
        read_file(read.file, read.offset, length, staging_.data() + read.staging_offset);
      } else {
        require(chunk.num_pieces == 0 && length == read.length, "in place, nothing but what is needed is read");
        require(!chunk.direct || is_aligned(reinterpret_cast<int64_t>(read.destination), mode.memory_alignment),
                "direct destinations are aligned");
        read_file(read.file, read.offset, length, read.destination);
      }
    }
    for (int64_t p = chunk.first_piece; p < chunk.first_piece + chunk.num_pieces; ++p) {
      carry_out(plan, plan.pieces[static_cast<size_t>(p)], staging_.data());
    }
  }

  static ByteRange window_of(int64_t offset) {
    const int64_t begin = align_down(offset, kModeWindow);
    return {begin, begin + kModeWindow};
  }

  void run_naively(const Transfer& transfer) {
    std::byte* dst = expected().data + (transfer.dst - planned().data);
    const ByteRange bounds = source_bounds(transfer);
    source_.resize(static_cast<size_t>(bounds.size()));
    read_file(transfer.file, bounds.begin, bounds.size(), source_.data());
    if (transfer.op) {
      const OpSource& rows = transfer.op->source();
      const int64_t row_stride = rows.num_rows > 1 ? (bounds.size() - rows.row_bytes) / (rows.num_rows - 1) : 0;
      const SumOp op(rows, dst, transfer.op->outputs().front().row_stride);
      op.run(source_.data(), row_stride, 0, rows.num_rows);
      return;
    }
    const auto item = static_cast<size_t>(element_bytes(transfer.src_type));
    if (transfer.dims == std::vector<Dim>{{bounds.size(), 1, 1}}) {  // of bytes, many of them
      std::memcpy(dst, source_.data(), source_.size());
      return;
    }
    for (int64_t i = 0; i < transfer.num_elements(); ++i) {
      int64_t from = 0;
      int64_t to = 0;
      int64_t rest = i;
      for (auto dim = transfer.dims.rbegin(); dim != transfer.dims.rend(); ++dim) {
        from += rest % dim->size * dim->src_stride;
        to += rest % dim->size * dim->dst_stride;
        rest /= dim->size;
      }
      if (transfer.src_type == transfer.dst_type) {
        std::memcpy(dst + to, source_.data() + from, item);
      } else {
        const Transfer one{0, 0, transfer.src_type, transfer.dst_type, 0, dst + to, {}};
        copy_elements(one, 0, 1, source_.data() + from, 0);
      }
    }
  }

  Input& input_;
  PlanOptions options_;
  Ledger ledger_;
  SharedReads::Tensor last_{};
  int num_large_ = 0;
  int64_t used_ = 0;  // bytes of memory that may have been written
  std::vector<std::byte> staging_;
  std::vector<std::byte> source_;
};

}  // namespace
}  // namespace weightlift

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  weightlift::Input input(data, size);
  weightlift::Run(input).run();
  return 0;
}
