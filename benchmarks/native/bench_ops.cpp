// Speed of the fused ops beside memcpy, all on two threads, counted on source bytes.
//
//   bench_ops                                        every op on one source of 256 MiB, as wide as this machine can
//   bench_ops --benchmark_filter=awq --benchmark_repetitions=5 --benchmark_report_aggregates_only
// A name ends with the instructions used: 0 baseline, 1 AVX2, 2 AVX-512.

#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "transform/map_bytes.h"
#include "transform/marlin_repack.h"
#include "transform/quantize.h"
#include "transform/simd.h"

namespace {

using namespace weightlift;

constexpr int kThreads = 2;
constexpr int64_t kSourceBytes = int64_t{256} << 20;

// Memory on huge pages, touched, as the loader's is. Its contents, as floats of any format, are of common magnitudes.
class Pages {
 public:
  explicit Pages(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    ::madvise(memory, bytes_, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(memory);
    for (size_t i = 0; i < bytes_; i += 2) {
      const auto bits = static_cast<uint16_t>((i * 0x9e3779b97f4a7c15 >> 48 & 0x8fff) | 0x3000);
      std::memcpy(data_ + i, &bits, sizeof(bits));
    }
  }
  ~Pages() { ::munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* data() const { return data_; }

 private:
  size_t bytes_;
  std::byte* data_;
};

const Pages& source() {
  static const Pages pages(kSourceBytes);
  return pages;
}
const Pages& target() {
  static const Pages pages(kSourceBytes + (64 << 20));
  return pages;
}
std::byte* scale_memory() { return target().data() + kSourceBytes; }

void copy(benchmark::State& state) {
  source();
  target();
  for (auto _ : state) {
    const auto copy_half = [](int64_t first) {
      std::memcpy(target().data() + first, source().data() + first, kSourceBytes / kThreads);
    };
    std::thread other(copy_half, kSourceBytes / kThreads);
    copy_half(0);
    other.join();
  }
  state.SetBytesProcessed(state.iterations() * kSourceBytes);
}

// Limits the instructions to the level that a benchmark asks for; false, with its error set, where there are none such.
bool use_level(benchmark::State& state) {
  const auto level = static_cast<Simd>(state.range(0));
  limit_simd(level);
  if (simd() == level) return true;
  state.SkipWithError("this machine has no such instructions");
  return false;
}

using MakeOp = std::function<std::unique_ptr<const Op>()>;

void run(benchmark::State& state, const MakeOp& make) {
  if (!use_level(state)) return;
  const std::unique_ptr<const Op> op = make();
  source();
  target();
  for (auto _ : state) run_op(*op, source().data(), op->source().row_bytes, kThreads);
  state.SetBytesProcessed(state.iterations() * op->source().num_rows * op->source().row_bytes);
}

MarlinRepack repack_of(PackedLayout layout, int num_bits, bool is_a_8bit, int64_t bytes) {
  const int64_t n = 8192;
  const int64_t k = bytes / n * 8 / num_bits;
  return {layout, num_bits, is_a_8bit, k, n, k, n, {}};
}

std::unique_ptr<const Op> make_repack(MarlinRepack repack, std::byte* out) {
  const int64_t tile_rows = repack.padded_k / (repack.is_a_8bit ? 32 : 16);
  const int64_t row_bytes = repack.padded_n * repack.padded_k * repack.num_bits / 8 / tile_rows;
  return make_marlin_repack(std::move(repack), {out, tile_rows, row_bytes, row_bytes});
}

std::unique_ptr<const Op> repack(PackedLayout layout, int num_bits, bool is_a_8bit) {
  return make_repack(repack_of(layout, num_bits, is_a_8bit, kSourceBytes), target().data());
}

// One thread takes all of an op with a perm; so here, as in a loader, each has a tensor of its own at a time: 8192 k.
void run_gathered(benchmark::State& state, int num_bits, bool is_a_8bit) {
  if (!use_level(state)) return;
  constexpr int64_t kBytes = 32 << 20;
  MarlinRepack repack = repack_of(PackedLayout::kGptq, num_bits, is_a_8bit, kBytes);
  for (int64_t i = 0; i < repack.size_k; ++i) {
    repack.perm.push_back(static_cast<int32_t>(i * 12289 % repack.size_k));
  }
  std::vector<std::unique_ptr<const Op>> ops;
  for (int64_t first = 0; first < kSourceBytes; first += kBytes) {
    ops.push_back(make_repack(repack, target().data() + first));
  }
  source();
  for (auto _ : state) {
    const auto run_share = [&](size_t thread) {
      for (size_t i = thread; i < ops.size(); i += kThreads) {
        const OpSource& rows = ops[i]->source();
        ops[i]->run(source().data() + static_cast<int64_t>(i) * kBytes, rows.row_bytes, 0, rows.num_rows);
      }
    };
    std::thread other(run_share, 1);
    run_share(0);
    other.join();
  }
  state.SetBytesProcessed(state.iterations() * kSourceBytes);
}

// FP8 as in a checkpoint: 8192 columns of k.
std::unique_ptr<const Op> repack_n_major(int num_bits, bool is_a_8bit) {
  const int64_t k = 8192;
  const int64_t n = kSourceBytes / k * 8 / num_bits;
  return make_repack({PackedLayout::kNMajor, num_bits, is_a_8bit, k, n, k, n, {}}, target().data());
}

std::unique_ptr<const Op> byte_map(const ByteTable& table) {
  const int64_t columns = 8192;
  const int64_t rows = kSourceBytes / columns;
  return make_byte_map({{rows, table}}, columns, {target().data(), rows, columns, columns});
}

std::unique_ptr<const Op> quantize(ElementType type, int64_t block_rows, int64_t block_columns, Scaling scaling,
                                   QuantizedType to = QuantizedType::kE4M3FN) {
  Quantize quantize;
  quantize.src_type = type;
  quantize.type = to;
  quantize.columns = 8192;
  quantize.rows = kSourceBytes / quantize.columns / element_bytes(type);
  quantize.block_rows = block_rows;
  quantize.block_columns = block_columns;
  quantize.scaling = scaling;
  const int64_t scale_rows = (quantize.rows + block_rows - 1) / block_rows;
  const int64_t scale_bytes = 4 * ((quantize.columns + block_columns - 1) / block_columns);
  return make_quantize(quantize, {448, 1e-4f, 0, 0, false}, false,
                       {target().data(), quantize.rows, quantize.columns, quantize.columns},
                       {scale_memory(), scale_rows, scale_bytes, scale_bytes});
}

std::unique_ptr<const Op> quantize_with(ElementType type) {
  Quantize quantize;
  quantize.src_type = type;
  quantize.columns = 8192;
  quantize.rows = kSourceBytes / quantize.columns / element_bytes(type);
  quantize.block_rows = quantize.rows;
  quantize.block_columns = quantize.columns;
  return make_quantize_with(quantize, {0.01f}, {target().data(), quantize.rows, quantize.columns, quantize.columns});
}

std::unique_ptr<const Op> amax(ElementType type) {
  return make_amax(type, kSourceBytes / 8192, 8192 / element_bytes(type), reinterpret_cast<float*>(scale_memory()));
}

void add_levels(const char* name, const std::function<void(benchmark::State&)>& benchmark) {
  for (int level = 2; level >= 0; --level) {
    benchmark::RegisterBenchmark(name, benchmark)
        ->Arg(level)
        ->UseRealTime()
        ->MeasureProcessCPUTime()
        ->Unit(benchmark::kMillisecond);
  }
}

void add(const char* name, const MakeOp& make) {
  add_levels(name, [make](benchmark::State& state) { run(state, make); });
}

}  // namespace

int main(int argc, char** argv) {
  using enum ElementType;
  benchmark::RegisterBenchmark("memcpy", copy)->UseRealTime()->MeasureProcessCPUTime()->Unit(benchmark::kMillisecond);
  add("gptq_marlin_repack/4bit", [] { return repack(PackedLayout::kGptq, 4, false); });
  add("gptq_marlin_repack/8bit", [] { return repack(PackedLayout::kGptq, 8, false); });
  add("gptq_marlin_repack/4bit_a8", [] { return repack(PackedLayout::kGptq, 4, true); });
  add("gptq_marlin_repack/8bit_a8", [] { return repack(PackedLayout::kGptq, 8, true); });
  add_levels("gptq_marlin_repack/4bit_perm", [](benchmark::State& state) { run_gathered(state, 4, false); });
  add_levels("gptq_marlin_repack/8bit_perm", [](benchmark::State& state) { run_gathered(state, 8, false); });
  add_levels("gptq_marlin_repack/4bit_a8_perm", [](benchmark::State& state) { run_gathered(state, 4, true); });
  add_levels("gptq_marlin_repack/8bit_a8_perm", [](benchmark::State& state) { run_gathered(state, 8, true); });
  add("awq_marlin_repack/4bit", [] { return repack(PackedLayout::kAwq, 4, false); });
  add("awq_marlin_repack/8bit", [] { return repack(PackedLayout::kAwq, 8, false); });
  add("fp8_marlin_repack", [] { return repack_n_major(8, false); });
  add("fp4_marlin_repack", [] { return repack_n_major(4, false); });
  add("normalize_e4m3fn_to_e4m3fnuz", [] { return byte_map(e4m3fn_to_e4m3fnuz_table(true)); });
  add("requantize_with_max_scale",
      [] { return byte_map(requantize_table(Fp8::kE4M3FN, 0.3f, 0.4f, 448, Rounding::kExact)); });
  add("fp8_static/bfloat16", [] { return quantize_with(kBFloat16); });
  add("fp8_static/float16", [] { return quantize_with(kFloat16); });
  add("fp8_static/float32", [] { return quantize_with(kFloat32); });
  add("fp8_amax/bfloat16", [] { return amax(kBFloat16); });
  add("fp8_per_channel/bfloat16", [] { return quantize(kBFloat16, 1, 8192, Scaling::kDivide); });
  add("fp8_per_group/bfloat16", [] { return quantize(kBFloat16, 1, 128, Scaling::kDivide); });
  add("fp8_per_block/bfloat16", [] { return quantize(kBFloat16, 128, 128, Scaling::kMultiply); });
  add("mxfp8/bfloat16", [] { return quantize(kBFloat16, 1, 32, Scaling::kMultiply); });
  add("int8_per_channel/bfloat16", [] { return quantize(kBFloat16, 1, 8192, Scaling::kDivide, QuantizedType::kInt8); });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
