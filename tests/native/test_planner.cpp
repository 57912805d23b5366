#include "plan/planner.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include "granule_op.h"
#include "staging/carry_out.h"
#include "transform/copy.h"
#include "util/align.h"

namespace weightlift {
namespace {

using Random = std::mt19937_64;

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;

int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Files of any size: a pattern of prime length, shifted from file to file.
class VirtualFiles {
 public:
  VirtualFiles() : pattern_(1048583) {
    Random random(42);
    for (auto& byte : pattern_) byte = static_cast<std::byte>(random());
  }

  void read(int32_t file, int64_t offset, int64_t length, std::byte* out) const {
    const auto period = static_cast<int64_t>(pattern_.size());
    int64_t at = (offset + file * 70001) % period;
    while (length > 0) {
      const int64_t n = std::min(length, period - at);
      std::memcpy(out, pattern_.data() + at, static_cast<size_t>(n));
      out += n;
      length -= n;
      at = 0;
    }
  }

 private:
  std::vector<std::byte> pattern_;
};

// Address space, zeroed, that costs memory only where it is written to.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    data_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(data_ != MAP_FAILED);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { ::munmap(data_, bytes_); }

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

constexpr ReadMode direct_mode(int64_t offset_alignment, int64_t memory_alignment) {
  return {true, offset_alignment, memory_alignment};
}

struct Setting {
  int64_t chunk_bytes = 64 * kKiB;
  int64_t merge_gap_bytes = 0;
  std::function<ReadMode(int32_t file, int64_t window)> mode;
  std::function<bool(ByteRange)> can_prepare;
  std::optional<SharedReads> shared;

  PlanOptions options() const {
    PlanOptions options;
    options.chunk_bytes = chunk_bytes;
    options.merge_gap_bytes = merge_gap_bytes;
    options.mode_of = [this](int32_t file, ByteRange window) {
      CHECK(window.begin % kModeWindow == 0);
      CHECK(window.size() == kModeWindow);
      return mode(file, window.begin / kModeWindow);
    };
    options.can_prepare = can_prepare;
    options.shared = shared;
    return options;
  }
};

Setting always(const ReadMode& mode) {
  Setting setting;
  setting.mode = [mode](int32_t, int64_t) { return mode; };
  return setting;
}

Transfer contiguous(int64_t id, int64_t offset, int64_t bytes, std::byte* dst, int32_t file = 0) {
  return make_transfer(id, file, ElementType::kBytes1, offset, ElementType::kBytes1, dst, {{bytes, 1, 1}});
}

// Cheaper than CHECK, which would take most of the time where there are millions of them.
void expect(bool kept, const char* promise) {
  if (!kept) FAIL(std::string(promise));
}

// Whether a chunk may be larger than others, or a read cross into a window of another mode: it holds one granule alone.
bool holds_one_granule(const Plan& plan, const Chunk& chunk) {
  for (int64_t p = chunk.first_piece; p < chunk.first_piece + chunk.num_pieces; ++p) {
    const Piece& piece = plan.pieces[static_cast<size_t>(p)];
    if (piece.last - piece.first <= plan.transfers[static_cast<size_t>(piece.transfer)].granule() &&
        plan.transfers[static_cast<size_t>(piece.transfer)].op) {
      return true;
    }
  }
  return false;
}

// Everything that planner.h promises of any plan, short of the values.
void check_structure(const Plan& plan, const Setting& setting) {
  std::map<int32_t, int64_t> file_end;
  for (const Transfer& transfer : plan.transfers) {
    file_end[transfer.file] = std::max(file_end[transfer.file], source_bounds(transfer).end);
  }

  int32_t next_read = 0;
  int64_t next_piece = 0;
  int64_t bytes_read = 0;
  for (const Chunk& chunk : plan.chunks) {
    expect(chunk.num_reads > 0 && chunk.first_read == next_read, "chunks divide the reads");
    expect(chunk.first_piece == next_piece, "chunks divide the pieces");
    next_read += chunk.num_reads;
    next_piece += chunk.num_pieces;
    expect(next_read <= static_cast<int32_t>(plan.reads.size()), "reads of chunks exist");
    expect(next_piece <= static_cast<int64_t>(plan.pieces.size()), "pieces of chunks exist");
    const bool in_place = chunk.num_pieces == 0;
    expect(in_place == (chunk.staging_bytes == 0), "a chunk in place needs no staging, another does");
    const bool one_granule = holds_one_granule(plan, chunk);
    expect(chunk.staging_bytes <= setting.chunk_bytes || one_granule, "a chunk fits a staging buffer");
    expect(in_place ? chunk.num_reads == 1 : chunk.preparation == -1, "in place: one read; else: no preparation");

    const int32_t file = plan.reads[static_cast<size_t>(chunk.first_read)].file;
    int64_t staged = 0;
    for (int32_t r = chunk.first_read; r < next_read; ++r) {
      const Read& read = plan.reads[static_cast<size_t>(r)];
      const int64_t end = read.offset + read.length;
      bytes_read += read.length;
      expect(read.file == file, "a chunk reads one file");
      expect(read.offset >= 0 && read.length > 0, "a read has bytes");
      expect(read.offset < read.needed_end && read.needed_end <= end, "what is needed is read");
      expect(read.needed_end <= file_end[file], "nothing behind the last transfer is needed");
      expect((read.destination != nullptr) == in_place, "a destination means in place");
      expect(read.length <= setting.chunk_bytes, "a read is no larger than a chunk");
      const ReadMode window = setting.mode(file, read.offset / kModeWindow);
      const ReadMode mode = setting.shared && !chunk.direct ? ReadMode{} : window;
      if (one_granule && chunk.direct != mode.direct) continue;  // read the way its beginning is
      expect(chunk.direct == mode.direct, "a chunk is read as its windows are");
      // An element that straddles a border of windows may be read the way its beginning is.
      const int64_t last = std::max(read.offset, read.needed_end - 16) / kModeWindow;
      expect(setting.mode(file, last) == window || one_granule || setting.shared,
             "a read crosses into no window of another mode");
      if (mode.direct) {
        expect(read.offset % mode.offset_alignment == 0, "direct offsets are aligned");
        expect(read.length % mode.offset_alignment == 0, "direct lengths are aligned");
      } else {
        expect(read.needed_end == end, "buffered reads are not widened");
      }
      if (in_place) {
        expect(read.needed_end == end, "reads in place are not widened");
        expect(reinterpret_cast<int64_t>(read.destination) % mode.memory_alignment == 0, "destinations are aligned");
      } else {
        expect(read.staging_offset >= staged, "staged reads are disjoint");
        expect(read.staging_offset % 4096 == 0, "staged reads are aligned");
        staged = read.staging_offset + read.length;
      }
    }
    expect(staged <= chunk.staging_bytes, "staging_bytes hold the staged reads");
  }
  CHECK(next_read == static_cast<int32_t>(plan.reads.size()));
  CHECK(next_piece == static_cast<int64_t>(plan.pieces.size()));
  CHECK(bytes_read == plan.bytes_read);
  CHECK(plan.bytes_needed <= plan.bytes_read);

  std::vector<ByteRange> prepared = plan.preparations;
  for (const ByteRange& range : prepared) {
    expect(range.size() > 0 && range.begin / kPrepareStep == (range.end - 1) / kPrepareStep, "preparations are steps");
  }
  for (const ByteRange& range : plan.advised) {
    expect(range.size() > 0 && range.begin / kPrepareStep == (range.end - 1) / kPrepareStep, "advised are steps");
  }
  std::vector<ByteRange> twice;
  prepared = unite(std::move(prepared), &twice);
  CHECK(twice.empty());
  for (const Chunk& chunk : plan.chunks) {
    const Read& read = plan.reads[static_cast<size_t>(chunk.first_read)];
    if (!read.destination) continue;
    const auto begin = reinterpret_cast<int64_t>(read.destination);
    const ByteRange written{begin, begin + read.length};
    const bool is_prepared = gaps(written, prepared).empty();
    expect(chunk.direct == (chunk.preparation >= 0), "direct reads wait for the preparation of their memory");
    expect(is_prepared || !chunk.direct, "direct reads in place go to prepared memory");
    if (!chunk.direct) continue;
    // Preparations are done in order, so the last one is the one to wait for.
    for (size_t i = 0; i < plan.preparations.size(); ++i) {
      const ByteRange& step = plan.preparations[i];
      if (step.end <= written.begin || step.begin >= written.end) continue;
      expect(static_cast<int32_t>(i) <= chunk.preparation, "a chunk waits for the last step that it needs");
    }
  }
}

// Carries the plan out, with poison wherever no byte has been read to, and checks that each element is written once.
void run_plan(const Plan& plan, const Setting& setting, const VirtualFiles& files) {
  std::vector<std::vector<ByteRange>> written(plan.transfers.size());  // in elements
  std::vector<std::byte> staging;
  for (const Chunk& chunk : plan.chunks) {
    staging.assign(static_cast<size_t>(std::max(setting.chunk_bytes, chunk.staging_bytes)), std::byte{0xA5});
    for (int32_t r = chunk.first_read; r < chunk.first_read + chunk.num_reads; ++r) {
      const Read& read = plan.reads[static_cast<size_t>(r)];
      std::byte* out = read.destination ? read.destination : staging.data() + read.staging_offset;
      files.read(read.file, read.offset, read.needed_end - read.offset, out);
      if (!read.destination) continue;
      const auto owner = std::ranges::find(plan.transfers, read.transfer_id, &Transfer::id);
      expect(owner != plan.transfers.end() && owner->file == read.file, "a read in place names its transfer");
      expect(owner->src_offset + (read.destination - owner->dst) == read.offset,
             "a read in place lies where its bytes belong");
      int64_t num_filled = 0;
      for (size_t i = 0; i < plan.transfers.size(); ++i) {  // it may fill the destinations of several
        const Transfer& transfer = plan.transfers[i];
        if (transfer.file != read.file || !transfer.is_plain()) continue;
        const int64_t first = std::max<int64_t>(read.offset - transfer.src_offset, 0);
        const int64_t last = std::min(read.needed_end - transfer.src_offset, transfer.num_elements());
        if (first >= last || transfer.src_offset + (read.destination - transfer.dst) != read.offset) continue;
        written[i].push_back({first, last});
        num_filled += last - first;
      }
      expect(num_filled == read.length, "a read in place fills destinations alone");
    }
    for (int64_t p = chunk.first_piece; p < chunk.first_piece + chunk.num_pieces; ++p) {
      const Piece& piece = plan.pieces[static_cast<size_t>(p)];
      expect(chunk.first_read <= piece.read && piece.num_reads > 0 &&
                 piece.read + piece.num_reads <= chunk.first_read + chunk.num_reads,
             "a piece arrives with reads of its chunk");
      expect(piece.first < piece.last, "a piece has elements");
      const Read& read = plan.reads[static_cast<size_t>(piece.read)];
      const Read& last_read = plan.reads[static_cast<size_t>(piece.read + piece.num_reads - 1)];
      const Transfer& transfer = plan.transfers[static_cast<size_t>(piece.transfer)];
      expect(transfer.file == read.file, "a piece is of the file that is read");
      const int64_t begin = transfer.src_offset + source_byte(transfer, piece.first);
      const int64_t end =
          transfer.src_offset + source_byte(transfer, piece.last - 1) + element_bytes(transfer.src_type);
      expect(begin >= read.offset && end <= last_read.needed_end, "a piece lies inside its reads");
      carry_out(plan, piece, staging.data());
      written[static_cast<size_t>(piece.transfer)].push_back({piece.first, piece.last});
    }
  }
  for (size_t i = 0; i < plan.transfers.size(); ++i) {
    std::vector<ByteRange> twice;
    const auto united = unite(std::move(written[i]), &twice);
    CHECK(twice.empty());
    CHECK(united == std::vector<ByteRange>{{0, plan.transfers[i].num_elements()}});
  }
}

// Element by element, without a plan.
void run_naively(const Transfer& transfer, const VirtualFiles& files) {
  const ByteRange bounds = source_bounds(transfer);
  std::vector<std::byte> source(static_cast<size_t>(bounds.size()));
  files.read(transfer.file, bounds.begin, bounds.size(), source.data());
  if (transfer.op) {
    const auto& op = dynamic_cast<const GranuleOp&>(*transfer.op);
    const OpSource& rows = op.source();
    const int64_t row_stride = rows.num_rows > 1 ? (bounds.size() - rows.row_bytes) / (rows.num_rows - 1) : 0;
    op.onto(transfer.dst)->run(source.data(), row_stride, 0, rows.num_rows);
    return;
  }
  const int64_t item = element_bytes(transfer.src_type);
  for (int64_t i = 0; i < transfer.num_elements(); ++i) {
    int64_t src = 0;
    int64_t dst = 0;
    int64_t rest = i;
    for (auto dim = transfer.dims.rbegin(); dim != transfer.dims.rend(); ++dim) {
      src += rest % dim->size * dim->src_stride;
      dst += rest % dim->size * dim->dst_stride;
      rest /= dim->size;
    }
    if (transfer.src_type == transfer.dst_type) {
      std::memcpy(transfer.dst + dst, source.data() + src, static_cast<size_t>(item));
    } else {
      const Transfer one{0, 0, transfer.src_type, transfer.dst_type, 0, transfer.dst + dst, {}};
      copy_elements(one, 0, 1, source.data() + src, 0);
    }
  }
}

// Random transfers with destinations one behind the other.
class Generator {
 public:
  Generator(uint64_t seed, std::byte* memory) : random_(seed), memory_(memory) {}

  std::vector<Transfer> transfers(int64_t count, bool large) {
    std::vector<Transfer> all;
    for (int64_t id = 0; id < count; ++id) all.push_back(one(id, large && id == 0));
    return all;
  }
  int64_t memory_used() const { return used_; }

 private:
  // Granules from much smaller to larger than a chunk, rows from side by side to far apart.
  Transfer one_op(int64_t id) {
    const bool large = uniform(random_, 0, 4) == 0;
    const int64_t num_rows = uniform(random_, 1, large ? 300 : 40);
    const int64_t row_bytes = uniform(random_, 1, large ? 6000 : 900);
    constexpr int64_t kGranules[] = {1, 2, 4, 7, 64, 1000};
    const OpSource source{num_rows, row_bytes, std::min(num_rows, kGranules[uniform(random_, 0, 5)])};
    constexpr int64_t kGaps[] = {0, 0, 1, 300, 5000, 20'000};
    const int64_t src_row_stride = row_bytes + kGaps[uniform(random_, 0, 5)];
    const int64_t dst_row_stride = row_bytes + uniform(random_, 0, 1) * uniform(random_, 0, 50);
    used_ += uniform(random_, 0, 1) * uniform(random_, 0, 5000);
    auto op = std::make_shared<GranuleOp>(source, memory_ + used_, dst_row_stride);
    used_ += op->outputs().front().num_rows * dst_row_stride;
    return make_op_transfer(id, static_cast<int32_t>(uniform(random_, 0, 2)), source_offset(), src_row_stride,
                            std::move(op));
  }

  Transfer one(int64_t id, bool large) {
    if (!large && uniform(random_, 0, 3) == 0) return one_op(id);
    constexpr ElementType kTypes[] = {ElementType::kBytes1, ElementType::kBytes2, ElementType::kBytes4,
                                      ElementType::kBytes8, ElementType::kBytes16};
    constexpr ElementType kFloats[] = {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16};
    ElementType src_type = kTypes[uniform(random_, 0, 4)];
    ElementType dst_type = src_type;
    if (uniform(random_, 0, 3) == 0) {
      src_type = kFloats[uniform(random_, 0, 2)];
      dst_type = kFloats[uniform(random_, 0, 2)];
    }
    const int64_t src_item = element_bytes(src_type);
    const int64_t dst_item = element_bytes(dst_type);

    // A tensor in the file, and a view of it.
    std::vector<Dim> dims;
    int64_t src_stride = src_item;
    const int64_t rank = uniform(random_, 0, 3);
    for (int64_t d = 0; d < rank; ++d) {
      const int64_t longest = rank == 1 ? 30'000 : rank == 2 ? 160 : 28;
      const int64_t full = uniform(random_, 1, longest);
      const int64_t step = uniform(random_, 0, 4) == 0 ? uniform(random_, 2, 4) : 1;
      int64_t taken = uniform(random_, 0, 2) == 0 ? full : uniform(random_, 1, full);
      taken = std::max<int64_t>(1, taken / step);
      dims.push_back({taken, src_stride * step, 0});
      src_stride *= full;
      if (uniform(random_, 0, 3) == 0) src_stride += uniform(random_, 0, 3000) * src_item;
    }
    if (rank < 3 && uniform(random_, 0, 5) == 0) dims.push_back({uniform(random_, 2, 5), 0, 0});  // expand
    if (large) {
      src_type = dst_type = ElementType::kBytes1;
      dims = {{uniform(random_, 5 * kMiB, 12 * kMiB), 1, 1}};
    }

    // Its place in memory, sometimes transposed, sometimes with room between the rows.
    if (uniform(random_, 0, 2) == 0) std::ranges::shuffle(dims, random_);
    int64_t extent = large ? 1 : dst_item;
    for (Dim& dim : dims) {
      dim.dst_stride = extent;
      if (!large && uniform(random_, 0, 5) == 0) dim.dst_stride += uniform(random_, 0, 20);
      extent += (dim.size - 1) * dim.dst_stride;
    }
    used_ += uniform(random_, 0, 1) * uniform(random_, 0, 5000);
    // Often such that memory and file are aligned alike, as in-place reads need.
    const int64_t offset = source_offset();
    if (uniform(random_, 0, 1) == 0) used_ = align_up(used_, 4096) + offset % 4096;
    std::byte* dst = memory_ + used_;
    used_ += extent;
    return make_transfer(id, static_cast<int32_t>(uniform(random_, 0, 2)), src_type, offset, dst_type, dst,
                         std::move(dims));
  }

  // Near others, so that they share bytes and touch; around the edge of a window; or the very same.
  int64_t source_offset() {
    if (!offsets_.empty() && uniform(random_, 0, 4) == 0) {
      return offsets_[static_cast<size_t>(uniform(random_, 0, static_cast<int64_t>(offsets_.size()) - 1))];
    }
    constexpr int64_t kBases[] = {0, 1000, kModeWindow - 100'000, 5 * kModeWindow - 20'000};
    int64_t offset = kBases[uniform(random_, 0, 3)] + uniform(random_, 0, 200'000);
    if (uniform(random_, 0, 2) == 0) offset = align_down(offset, 512);
    offsets_.push_back(offset);
    return offset;
  }

  Random random_;
  std::byte* const memory_;
  int64_t used_ = 0;
  std::vector<int64_t> offsets_;
};

Setting random_setting(Random& random) {
  Setting setting;
  constexpr int64_t kGaps[] = {0, 1, 100, 512, 4096, 16 * kKiB};
  setting.merge_gap_bytes = kGaps[uniform(random, 0, 5)];
  setting.chunk_bytes = 64 * kKiB * uniform(random, 1, 3);
  const int64_t offset_alignment = uniform(random, 0, 1) == 0 ? 512 : 4096;
  const int64_t memory_alignment = int64_t{4} << (uniform(random, 0, 10));  // 4 to 4096
  const int64_t kind = uniform(random, 0, 2);                               // buffered, direct, mixed
  const auto salt = static_cast<int64_t>(random() % 1000);
  setting.mode = [=](int32_t file, int64_t window) {
    const bool direct = kind == 1 || (kind == 2 && (window * 7 + file * 3 + salt) % 3 != 0);
    return direct ? direct_mode(offset_alignment, memory_alignment) : ReadMode{};
  };
  if (uniform(random, 0, 2) != 0) setting.can_prepare = [](ByteRange) { return true; };
  return setting;
}

}  // namespace

TEST_CASE("random plans give the bytes of naive copies") {
  const VirtualFiles files;
  int64_t num_in_place = 0;
  int64_t num_direct_in_place = 0;
  int64_t num_grown = 0;
  int64_t num_of_rows_apart = 0;
  for (uint64_t seed = 0; seed < 320; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Setting setting = random_setting(random);
    const bool large = seed % 16 == 0;
    const int64_t space = 160 * kMiB;
    const Memory planned(space);
    Generator generator(seed, planned.data());
    const std::vector<Transfer> transfers = generator.transfers(uniform(random, 1, 25), large);
    REQUIRE(generator.memory_used() < space);
    if (seed % 3 == 0) {
      setting.shared.emplace();
      for (size_t i = 0; i < transfers.size(); i += 2)
        setting.shared->tensors.push_back({transfers[i].file, source_bounds(transfers[i])});
    }

    const Plan plan = plan_reads(transfers, setting.options());
    check_structure(plan, setting);
    run_plan(plan, setting, files);

    const Memory naive(generator.memory_used());
    for (Transfer transfer : transfers) {
      transfer.dst = naive.data() + (transfer.dst - planned.data());
      run_naively(transfer, files);
    }
    // Bytes between the destinations are zero in both.
    CHECK(std::memcmp(planned.data(), naive.data(), static_cast<size_t>(generator.memory_used())) == 0);
    for (const Chunk& chunk : plan.chunks) {
      num_in_place += chunk.num_pieces == 0;
      num_direct_in_place += chunk.num_pieces == 0 && chunk.direct;
      num_grown += chunk.staging_bytes > setting.chunk_bytes;
    }
    for (const Piece& piece : plan.pieces) {
      const Read& first = plan.reads[static_cast<size_t>(piece.read)];
      const Read& last = plan.reads[static_cast<size_t>(piece.read + piece.num_reads - 1)];
      num_of_rows_apart += last.staging_offset - first.staging_offset != last.offset - first.offset;
    }
  }
  CHECK(num_grown > 100);
  CHECK(num_of_rows_apart > 100);
  CHECK(num_in_place > 1000);
  CHECK(num_direct_in_place > 100);
}

TEST_CASE("a row longer than a chunk, far from the next, is read by several reads") {
  const VirtualFiles files;
  const int64_t row_bytes = 3 * 64 * kKiB + 77;
  for (const ReadMode& mode : {ReadMode{}, direct_mode(4096, 512)}) {
    const Setting setting = always(mode);
    const Memory planned(row_bytes);
    auto op = std::make_shared<GranuleOp>(OpSource{3, row_bytes, 3}, planned.data(), row_bytes);
    const Transfer transfer = make_op_transfer(0, 0, 1001, row_bytes + 20'000, std::move(op));
    const Plan plan = plan_reads({transfer}, setting.options());
    CHECK(plan.reads.size() >= 12);
    check_structure(plan, setting);
    run_plan(plan, setting, files);
    const Memory naive(row_bytes);
    Transfer alone = transfer;
    alone.dst = naive.data();
    run_naively(alone, files);
    CHECK(std::memcmp(planned.data(), naive.data(), static_cast<size_t>(row_bytes)) == 0);
  }
}

TEST_CASE("bytes needed are counted once, whoever needs them") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const Setting setting = random_setting(random);
    const Memory memory(256 * kMiB);
    std::vector<Transfer> transfers;
    std::vector<ByteRange> sources;
    int64_t used = 0;
    for (int64_t id = 0, count = uniform(random, 1, 20); id < count; ++id) {
      const int64_t bytes = uniform(random, 1, uniform(random, 0, 3) == 0 ? 6 * kMiB : 150'000);
      const int64_t offset = uniform(random, 0, uniform(random, 0, 1) == 0 ? 100'000 : 3 * kModeWindow);
      transfers.push_back(contiguous(id, offset, bytes, memory.data() + used));
      sources.push_back({offset, offset + bytes});
      used += bytes;
    }
    REQUIRE(used < 256 * kMiB);
    int64_t distinct = 0;
    for (const ByteRange& range : unite(std::move(sources))) distinct += range.size();
    const Plan plan = plan_reads(transfers, setting.options());
    check_structure(plan, setting);
    CHECK(plan.bytes_needed == distinct);
    // And read once, but for what gaps, alignment and borders of windows add.
    const auto num_reads = static_cast<int64_t>(plan.reads.size());
    CHECK(plan.bytes_read <= distinct + num_reads * 2 * 4096 + static_cast<int64_t>(transfers.size()) * 16 * kKiB);
  }
}

TEST_CASE("bytes needed by strided sources that do not overlap are exact") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const Setting setting = random_setting(random);
    const Memory memory(64 * kMiB);
    std::vector<Transfer> transfers;
    int64_t offset = uniform(random, 0, 5000);
    int64_t used = 0;
    int64_t occupied = 0;
    for (int64_t id = 0, count = uniform(random, 1, 12); id < count; ++id) {
      const int64_t rows = uniform(random, 1, 50);
      const int64_t columns = uniform(random, 1, 500);
      const int64_t pitch = columns + uniform(random, 0, 3000);
      const int64_t repeats = uniform(random, 1, 3);
      transfers.push_back(
          make_transfer(id, 0, ElementType::kBytes4, offset, ElementType::kBytes4, memory.data() + used,
                        {{rows, pitch * 4, repeats * columns * 4}, {repeats, 0, columns * 4}, {columns, 4, 4}}));
      occupied += rows * columns * 4;
      used += rows * columns * repeats * 4;
      offset = source_bounds(transfers.back()).end + uniform(random, 0, 1) * uniform(random, 0, 30'000);
    }
    const Plan plan = plan_reads(transfers, setting.options());
    check_structure(plan, setting);
    CHECK(plan.bytes_needed == occupied);
  }
}

TEST_CASE("whole tensors, slices of rows and experts are read with little excess") {
  const Memory memory(int64_t{8} << 30);
  for (const int64_t alignment : {512, 4096}) {
    CAPTURE(alignment);
    Setting setting = always(direct_mode(alignment, alignment));
    setting.chunk_bytes = 2 * kMiB;
    setting.merge_gap_bytes = 16 * kKiB;
    for (const bool huge_pages : {false, true}) {
      CAPTURE(huge_pages);
      setting.can_prepare = [=](ByteRange) { return huge_pages; };
      std::vector<Transfer> transfers;
      int64_t used = 0;
      const auto add = [&](int64_t offset, int64_t bytes) {
        transfers.push_back(contiguous(static_cast<int64_t>(transfers.size()), offset, bytes, memory.data() + used));
        used += bytes;
      };
      SUBCASE("whole tensors, small ones among them") {
        int64_t offset = 8 + 12'345;
        for (int layer = 0; layer < 40; ++layer) {
          for (const int64_t bytes : {8 * kMiB, 2 * kMiB, 7168 * int64_t{2}, 2 * kMiB, 8 * kMiB, 128 * int64_t{2}}) {
            add(offset, bytes);
            offset += bytes;
          }
        }
      }
      SUBCASE("the second quarter of the rows") {
        int64_t offset = 8 + 54'321;
        for (int layer = 0; layer < 60; ++layer) {
          const int64_t bytes = (int64_t{3} << layer % 4) * kMiB;
          add(offset + bytes / 4, bytes / 4);
          offset += bytes;
        }
      }
      SUBCASE("every eighth expert of 1 MiB") {
        for (int expert = 0; expert < 256; expert += 8) add(8 + 777 + expert * kMiB, kMiB);
      }
      const Plan plan = plan_reads(transfers, setting.options());
      check_structure(plan, setting);
      CHECK(plan.bytes_needed == used);
      CHECK(static_cast<double>(plan.bytes_read) <= 1.02 * static_cast<double>(plan.bytes_needed));
    }
  }
}

TEST_CASE("a whole file is read with no byte in excess when nothing must be aligned") {
  const Memory memory(int64_t{1} << 30);
  Setting setting = always(ReadMode{});
  setting.chunk_bytes = 2 * kMiB;
  std::vector<Transfer> transfers;
  int64_t offset = 12'345;
  for (int64_t id = 0; id < 100; ++id) {
    const int64_t bytes = 1 + id * id * 307;
    transfers.push_back(contiguous(id, offset, bytes, memory.data() + offset));
    offset += bytes;
  }
  const Plan plan = plan_reads(transfers, setting.options());
  check_structure(plan, setting);
  CHECK(plan.bytes_read == offset - 12'345);
  CHECK(plan.bytes_needed == plan.bytes_read);
}

TEST_CASE("rows with narrow gaps are read whole, with wide gaps piece by piece") {
  const Memory memory(64 * kMiB);
  Setting setting = always(ReadMode{});
  setting.chunk_bytes = 2 * kMiB;
  setting.merge_gap_bytes = 4096;
  const auto plan_columns = [&](int64_t taken, int64_t row, int64_t rows) {
    Plan plan = plan_reads({make_transfer(0, 0, ElementType::kBytes2, 100, ElementType::kBytes2, memory.data(),
                                          {{rows, row * 2, taken * 2}, {taken, 2, 2}})},
                           setting.options());
    check_structure(plan, setting);
    CHECK(plan.bytes_needed == taken * 2 * rows);
    return plan;
  };
  // A gap of exactly the bound.
  const Plan narrow = plan_columns(2048, 4096, 64);
  CHECK(narrow.reads.size() == 1);
  CHECK(narrow.bytes_read == (63 * 4096 + 2048) * 2);
  const Plan wide = plan_columns(2048, 4097, 64);
  CHECK(wide.reads.size() == 64);
  CHECK(wide.bytes_read == wide.bytes_needed);
  CHECK(wide.chunks.size() == 1);                           // small reads share a buffer
  CHECK(plan_columns(100, 8192, 1000).chunks.size() == 4);  // but not without end: 256 reads each
}

TEST_CASE("what other processes read too goes through the page cache, all else past it") {
  const Memory memory(64 * kMiB);
  Setting setting = always(direct_mode(512, 512));
  setting.chunk_bytes = 4 * kMiB;
  setting.merge_gap_bytes = 16 * kKiB;
  constexpr int64_t kTensor = 3 * kMiB + 100;  // of tensors side by side, ends within blocks
  const auto tensor = [&](int32_t number) { return ByteRange{number * kTensor, (number + 1) * kTensor}; };
  const std::vector<Transfer> transfers = {
      contiguous(0, 0, kTensor, memory.data()),                                     // whole
      contiguous(1, kTensor + kMiB, kMiB, memory.data() + 4 * kMiB),                // a part
      contiguous(2, 2 * kTensor, kTensor, memory.data() + 8 * kMiB),                // whole, but not others'
      make_transfer(3, 0, ElementType::kBytes1, 3 * kTensor, ElementType::kBytes1,  // pieces of rows
                    memory.data() + 12 * kMiB, {{768, 4096, 1024}, {1024, 1, 1}}),
      contiguous(4, 4 * kTensor, kMiB, memory.data() + 16 * kMiB),  // whole, in two transfers
      contiguous(5, 4 * kTensor + kMiB, kTensor - kMiB, memory.data() + 20 * kMiB),
  };
  const auto buffered_ranges = [&] {
    const Plan plan = plan_reads(transfers, setting.options());
    check_structure(plan, setting);
    std::vector<ByteRange> ranges;
    for (const Chunk& chunk : plan.chunks) {
      for (int32_t i = chunk.first_read; i < chunk.first_read + chunk.num_reads; ++i) {
        const Read& read = plan.reads[static_cast<size_t>(i)];
        if (!chunk.direct) ranges.push_back({read.offset, read.offset + read.length});
      }
    }
    return unite(ranges);
  };
  CHECK(buffered_ranges().empty());
  setting.shared = SharedReads{{{0, tensor(0)}, {0, tensor(1)}, {1, tensor(2)}, {0, tensor(4)}}};
  const ByteRange rows{3 * kTensor, 3 * kTensor + 767 * 4096 + 1024};
  CHECK(buffered_ranges() == std::vector<ByteRange>{tensor(0), rows, tensor(4)});
}

TEST_CASE("the cost of gaps is weighed dimension by dimension, from the inside") {
  const Memory memory(16 * kMiB);
  Setting setting = always(ReadMode{});
  setting.merge_gap_bytes = 1000;
  // Blocks far apart, of rows close together.
  const Plan plan = plan_reads({make_transfer(0, 0, ElementType::kBytes1, 0, ElementType::kBytes1, memory.data(),
                                              {{5, 100'000, 10 * 200}, {10, 1000, 200}, {200, 1, 1}})},
                               setting.options());
  check_structure(plan, setting);
  CHECK(plan.reads.size() == 5);
  CHECK(plan.bytes_read == 5 * (9 * 1000 + 200));
  CHECK(plan.bytes_needed == 5 * 10 * 200);
}

TEST_CASE("a gap is merged up to the bound, between transfers too") {
  const Memory memory(kMiB);
  Setting setting = always(ReadMode{});
  setting.merge_gap_bytes = 100;
  const auto reads = [&](int64_t gap) {
    const Plan plan = plan_reads(
        {contiguous(0, 0, 500, memory.data()), contiguous(1, 500 + gap, 500, memory.data() + 500)}, setting.options());
    check_structure(plan, setting);
    CHECK(plan.bytes_needed == 1000);
    return plan.reads.size();
  };
  CHECK(reads(100) == 1);
  CHECK(reads(101) == 2);
}

TEST_CASE("bytes that are staged for one transfer are not read again in place for another") {
  const Memory memory(64 * kMiB);
  Setting setting = always(ReadMode{});
  setting.chunk_bytes = 2 * kMiB;
  // In either order: a short one that begins earlier, and a long one that begins inside it.
  const Plan plan = plan_reads({contiguous(0, 4 * kMiB + 100, 9 * kMiB, memory.data()),
                                contiguous(1, 3 * kMiB, 2 * kMiB, memory.data() + 9 * kMiB)},
                               setting.options());
  check_structure(plan, setting);
  CHECK(plan.bytes_needed == 10 * kMiB + 100);
  CHECK(plan.bytes_read == plan.bytes_needed);
}

TEST_CASE("memory stays aligned behind each cut of an in-place read") {
  // The file is aligned to less than memory must be.
  Setting setting = always(direct_mode(512, 4096));
  setting.can_prepare = [](ByteRange) { return true; };
  const Memory memory(64 * kMiB);
  const auto in_place_chunks = [&](std::byte* dst) {
    const Plan plan = plan_reads({contiguous(0, 512, 8 * kMiB, dst)}, setting.options());
    check_structure(plan, setting);
    return std::ranges::count_if(plan.chunks, [](const Chunk& chunk) { return chunk.num_pieces == 0; });
  };
  CHECK(in_place_chunks(memory.data() + 512) == 128);
  CHECK(in_place_chunks(memory.data()) == 0);  // aligned at the beginning, not where the file is cut
}

TEST_CASE("large plain destinations are prepared in steps, each before the first read into it") {
  const Memory memory(256 * kMiB);
  Setting setting = always(direct_mode(4096, 4096));
  setting.chunk_bytes = 2 * kMiB;
  auto* const base = memory.data() + (-reinterpret_cast<int64_t>(memory.data()) & (kPrepareStep - 1));
  int64_t asked = 0;
  setting.can_prepare = [&](ByteRange range) {
    ++asked;
    return range.begin != reinterpret_cast<int64_t>(base + 60 * kMiB);
  };
  const std::vector<Transfer> transfers = {
      contiguous(0, 0, 40 * kMiB, base + 5 * kMiB),
      contiguous(1, 40 * kMiB, kMinPrepareBytes - 4096, base + 50 * kMiB),  // too small
      contiguous(2, 48 * kMiB, 20 * kMiB, base + 60 * kMiB),                // small pages there
      contiguous(3, 70 * kMiB, 20 * kMiB, base + 100 * kMiB),
      contiguous(4, 90 * kMiB + 1, 20 * kMiB, base + 130 * kMiB),  // not aligned as the file is: staged, yet prepared
  };
  const Plan plan = plan_reads(transfers, setting.options());
  check_structure(plan, setting);
  CHECK(asked == 4);
  const auto at = [&](int64_t begin, int64_t end) {
    const auto address = reinterpret_cast<int64_t>(base);
    return ByteRange{address + begin * kMiB, address + end * kMiB};
  };
  CHECK(plan.preparations == std::vector<ByteRange>{at(5, 16), at(16, 32), at(32, 45), at(100, 112), at(112, 120),
                                                    at(130, 144), at(144, 150)});
  std::set<int64_t> in_place;
  for (const Chunk& chunk : plan.chunks) {
    if (chunk.num_pieces == 0) in_place.insert(plan.reads[static_cast<size_t>(chunk.first_read)].transfer_id);
  }
  CHECK(in_place == std::set<int64_t>{0, 3});
}

TEST_CASE("small destinations that lie side by side are prepared together") {
  const Memory memory(64 * kMiB);
  Setting setting = always(direct_mode(512, 512));
  setting.can_prepare = [](ByteRange) { return true; };
  auto* const base = memory.data() + (-reinterpret_cast<int64_t>(memory.data()) & (kPrepareStep - 1));
  const auto address = reinterpret_cast<int64_t>(base);
  std::vector<Transfer> transfers;
  for (int64_t id = 0; id < 80; ++id) {  // experts of a fused parameter, last first
    transfers.push_back(contiguous(id, id * 100 * kKiB, 100 * kKiB, base + (79 - id) * 100 * kKiB));
  }
  // A few columns of a wide matrix don't make it a destination.
  transfers.push_back(make_transfer(80, 0, ElementType::kBytes1, 9'000 * kKiB, ElementType::kBytes1, base + 16 * kMiB,
                                    {{1024, 64, 16 * kKiB}, {64, 1, 1}}));
  const Plan plan = plan_reads(transfers, setting.options());
  check_structure(plan, setting);
  CHECK(plan.preparations == std::vector<ByteRange>{{address, address + 8'000 * kKiB}});
}

TEST_CASE("destinations that lie as in the file are read into as one") {
  const Memory memory(64 * kMiB);
  auto* const base = memory.data() + (-reinterpret_cast<int64_t>(memory.data()) & (kPrepareStep - 1));
  Setting setting = always(direct_mode(512, 512));
  setting.chunk_bytes = 2 * kMiB;
  setting.can_prepare = [](ByteRange) { return true; };
  std::vector<Transfer> transfers;
  int64_t at = 1000;  // in the file, whose first byte would lie at `base`
  for (int64_t id = 0; at < 8 * kMiB; ++id) {
    const int64_t bytes = id % 3 == 0 ? 16 : 40'000;
    transfers.push_back(contiguous(id, at, bytes, base + at));
    at += bytes;
  }
  const auto in_place = [&](const std::vector<Transfer>& wanted) {
    const Plan plan = plan_reads(wanted, setting.options());
    check_structure(plan, setting);
    run_plan(plan, setting, VirtualFiles());
    int64_t bytes = 0;
    for (const Read& read : plan.reads) {
      if (!read.destination) continue;
      bytes += read.length;
      const Transfer& first = transfers[static_cast<size_t>(read.transfer_id)];  // in which the read begins
      CHECK((first.src_offset <= read.offset && read.offset < source_bounds(first).end));
    }
    return std::pair(bytes, plan.reads.size());
  };
  // All but what lies before and behind the first and last multiple of 512; in as many reads as chunks.
  const auto [all, num_all] = in_place(transfers);
  CHECK(all == align_down(at, 512) - 1024);
  CHECK(num_all == 7);

  // One that lies elsewhere, or whose bytes another one needs too, is no part of it, and those around it are.
  std::vector<Transfer> moved = transfers;
  moved[120].dst = base + 32 * kMiB;
  const auto [bytes, num_reads] = in_place(moved);
  CHECK(align_down(at, 512) - 1024 - bytes < 16 + 2 * 512 + 1);
  CHECK(num_reads < 14);
  std::vector<Transfer> twice = transfers;
  twice.push_back(
      contiguous(static_cast<int64_t>(transfers.size()), transfers[121].src_offset + 100, 200, base + 32 * kMiB));
  const auto [bytes_once, num_reads_then] = in_place(twice);
  CHECK(align_down(at, 512) - 1024 - bytes_once < 40'000 + 2 * 512);
  CHECK(num_reads_then < 14);
}

TEST_CASE("very many tiny destinations that lie as in the file are planned in a moment") {
  const Memory memory(64 * kMiB);
  auto* const base = memory.data() + (-reinterpret_cast<int64_t>(memory.data()) & (kPrepareStep - 1));
  Setting setting = always(direct_mode(4096, 4096));
  setting.chunk_bytes = 2 * kMiB;
  setting.can_prepare = [](ByteRange) { return true; };
  std::vector<Transfer> transfers;
  for (int64_t id = 0; id < 300'000; ++id) {  // with gaps that end runs before they are worth a read of their own
    const int64_t gap = id / 3'000 * 16;
    transfers.push_back(contiguous(id, gap + id * 16 + 16, 16, base + gap + id * 16 + 16));
  }
  check_structure(plan_reads(std::move(transfers), setting.options()), setting);
}

TEST_CASE("tiny destinations are planned in a moment where another transfer needs their bytes too") {
  const Memory memory(64 * kMiB);
  auto* const base = memory.data() + (-reinterpret_cast<int64_t>(memory.data()) & (kPrepareStep - 1));
  constexpr int64_t kRow = 16;
  constexpr int64_t kRows = 300'000;
  for (const ReadMode& mode : {ReadMode{}, direct_mode(4096, 4096)}) {
    Setting setting = always(mode);
    setting.chunk_bytes = 2 * kMiB;
    setting.can_prepare = [](ByteRange) { return true; };
    std::vector<Transfer> transfers = {contiguous(0, 0, kRows * kRow, base + 32 * kMiB)};
    for (int64_t i = 0; i < kRows; ++i) transfers.push_back(contiguous(i + 1, i * kRow, kRow, base + i * kRow));
    check_structure(plan_reads(std::move(transfers), setting.options()), setting);
  }
}

TEST_CASE("a sparse destination that begins on a page of a dense one is not taken for a part of it") {
  const Memory memory(256 * kMiB);
  Setting setting = always(direct_mode(512, 512));
  setting.can_prepare = [](ByteRange) { return true; };
  std::byte* const base = memory.data() + 64;  // as torch.empty lies in its pages
  const std::vector<Transfer> transfers = {
      contiguous(0, 0, 20 * kMiB, base),
      make_transfer(1, 0, ElementType::kBytes1, 20 * kMiB, ElementType::kBytes1, base + 20 * kMiB,
                    {{4096, 64, 32 * kKiB}, {64, 1, 1}}),
  };
  const Plan plan = plan_reads(transfers, setting.options());
  check_structure(plan, setting);
  const auto begin = reinterpret_cast<int64_t>(memory.data());
  for (const ByteRange& step : plan.preparations) CHECK(step.end <= begin + 20 * kMiB + 4096);
}

TEST_CASE("files are read one after the other, each forwards") {
  const Memory memory(64 * kMiB);
  const Setting setting = always(direct_mode(4096, 512));
  std::vector<Transfer> transfers;
  for (int64_t id = 0; id < 60; ++id) {
    transfers.push_back(
        contiguous(id, (60 - id) * 100'000, 30'000, memory.data() + id * 30'000, static_cast<int32_t>(id * 7 % 3)));
  }
  const Plan plan = plan_reads(transfers, setting.options());
  check_structure(plan, setting);
  for (size_t i = 1; i < plan.reads.size(); ++i) {
    const Read& before = plan.reads[i - 1];
    const Read& read = plan.reads[i];
    CHECK(std::pair(before.file, before.offset) < std::pair(read.file, read.offset));
  }
}

TEST_CASE("nothing to do is an empty plan") {
  const Setting setting = always(ReadMode{});
  const Plan plan = plan_reads({}, setting.options());
  check_structure(plan, setting);
  CHECK(plan.chunks.empty());
}

}  // namespace weightlift
