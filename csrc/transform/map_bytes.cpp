#include "transform/map_bytes.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <utility>

#include "transform/cuda/launch.h"
#include "transform/cuda/map_kernel.h"
#include "transform/simd.h"

#if WEIGHTLIFT_X86
#include <immintrin.h>
#endif

namespace weightlift {
namespace {

// What a table makes of the few bytes that it doesn't leave as they are: `byte` becomes `byte ^ change`. Unused ones
// change nothing.
struct Replacement {
  uint8_t byte;
  uint8_t change;
};
using Replacements = std::array<Replacement, 4>;

std::optional<Replacements> replacements_of(const ByteTable& table) {
  Replacements replacements{};
  size_t count = 0;
  for (size_t byte = 0; byte < table.size(); ++byte) {
    if (table[byte] == byte) continue;
    if (count == replacements.size()) return std::nullopt;
    replacements[count++] = {static_cast<uint8_t>(byte), static_cast<uint8_t>(byte ^ table[byte])};
  }
  return replacements;
}

struct Part;
using MapRow = void (*)(const std::byte* src, std::byte* dst, int64_t count, const Part& part);

struct Part {
  int64_t end_row;
  ByteTable table;
  Replacements replacements;  // of map_row_avx2_few
  MapRow map_row;
};

void map_row_scalar(const std::byte* src, std::byte* dst, int64_t count, const Part& part) {
  for (int64_t i = 0; i < count; ++i) dst[i] = std::byte{part.table[static_cast<size_t>(src[i])]};
}

#if WEIGHTLIFT_X86

// From 2^kBits sixteenths of the table, each looked up by the low nibble, the one that the bits above it name.
template <int kBits>
WEIGHTLIFT_TARGET_AVX2 inline __m256i look_up(const __m256i* sixteenths, __m256i low_nibbles, __m256i bytes) {
  if constexpr (kBits == 0) {
    return _mm256_shuffle_epi8(*sixteenths, low_nibbles);
  } else {
    constexpr int kHalf = 1 << (kBits - 1);
    return _mm256_blendv_epi8(look_up<kBits - 1>(sixteenths, low_nibbles, bytes),
                              look_up<kBits - 1>(sixteenths + kHalf, low_nibbles, bytes),
                              _mm256_slli_epi16(bytes, 4 - kBits));  // it selects by a byte's highest bit
  }
}

WEIGHTLIFT_TARGET_AVX2 void map_row_avx2(const std::byte* src, std::byte* dst, int64_t count, const Part& part) {
  __m256i sixteenths[16];
  for (int i = 0; i < 16; ++i) {
    sixteenths[i] =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(part.table.data() + 16 * i)));
  }
  const __m256i low_nibble = _mm256_set1_epi8(0x0f);
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i mapped = look_up<4>(sixteenths, _mm256_and_si256(bytes, low_nibble), bytes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), mapped);
  }
  map_row_scalar(src + i, dst + i, count - i, part);
}

// For a table with few replacements.
WEIGHTLIFT_TARGET_AVX2 void map_row_avx2_few(const std::byte* src, std::byte* dst, int64_t count, const Part& part) {
  __m256i from[std::tuple_size_v<Replacements>];
  __m256i change[std::tuple_size_v<Replacements>];
  for (size_t k = 0; k < part.replacements.size(); ++k) {
    from[k] = _mm256_set1_epi8(static_cast<char>(part.replacements[k].byte));
    change[k] = _mm256_set1_epi8(static_cast<char>(part.replacements[k].change));
  }
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    __m256i mapped = bytes;
    for (size_t k = 0; k < part.replacements.size(); ++k) {
      mapped = _mm256_xor_si256(mapped, _mm256_and_si256(_mm256_cmpeq_epi8(bytes, from[k]), change[k]));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), mapped);
  }
  map_row_scalar(src + i, dst + i, count - i, part);
}

WEIGHTLIFT_TARGET_AVX512 void map_row_avx512(const std::byte* src, std::byte* dst, int64_t count, const Part& part) {
  const std::byte* table = reinterpret_cast<const std::byte*>(part.table.data());
  const __m512i quarters[4] = {_mm512_loadu_si512(table), _mm512_loadu_si512(table + 64),
                               _mm512_loadu_si512(table + 128), _mm512_loadu_si512(table + 192)};
  for (int64_t i = 0; i < count; i += 64) {
    const __mmask64 present = count - i < 64 ? (uint64_t{1} << (count - i)) - 1 : ~uint64_t{0};
    const __m512i bytes = _mm512_maskz_loadu_epi8(present, src + i);
    const __m512i low = _mm512_permutex2var_epi8(quarters[0], bytes, quarters[1]);
    const __m512i high = _mm512_permutex2var_epi8(quarters[2], bytes, quarters[3]);
    _mm512_mask_storeu_epi8(dst + i, present, _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes), low, high));
  }
}

#endif  // WEIGHTLIFT_X86

Part part_of(const ByteMapPart& part) {
#if WEIGHTLIFT_X86
  if (simd() >= Simd::kAvx512) return {part.end_row, part.table, {}, map_row_avx512};
  if (simd() >= Simd::kAvx2) {
    const std::optional<Replacements> few = replacements_of(part.table);
    return {part.end_row, part.table, few.value_or(Replacements{}), few ? map_row_avx2_few : map_row_avx2};
  }
#endif
  return {part.end_row, part.table, {}, map_row_scalar};
}

template <typename Function>
ByteTable table_of(const Function& function) {
  ByteTable table;
  for (size_t byte = 0; byte < table.size(); ++byte) table[byte] = function(static_cast<uint8_t>(byte));
  return table;
}

// Rows in device memory, from and to their first.
template <typename Table>
int launch_map(const Table& table, const std::byte* src, int64_t src_row_stride, std::byte* dst, int64_t dst_row_stride,
               int64_t rows, int64_t row_bytes, DeviceStream stream) {
  if (src_row_stride == row_bytes && dst_row_stride == row_bytes) {
    row_bytes *= rows;
    src_row_stride = dst_row_stride = row_bytes;
    rows = 1;
  }
  MapKernel<Table> kernel;
  kernel.src = src;
  kernel.dst = dst;
  kernel.src_row_stride = src_row_stride;
  kernel.dst_row_stride = dst_row_stride;
  kernel.row_bytes = row_bytes;
  kernel.tiles_of = RowTiles(rows, (row_bytes + 15) / 16);
  kernel.src_alignment = alignment_of({address_of(src), rows == 1 ? 0 : src_row_stride});
  kernel.dst_alignment = alignment_of({address_of(dst), rows == 1 ? 0 : dst_row_stride});
  kernel.table = table;
  return weightlift::launch(kernel, stream);
}

// Calls visit(part, first row, end row) for the parts that have some of rows [first_row, end_row), until it returns
// other than 0, and returns that.
template <typename Parts, typename EndOf, typename Visit>
int for_each_part(const Parts& parts, const EndOf& end_of, int64_t first_row, int64_t end_row, const Visit& visit) {
  auto part = std::ranges::upper_bound(parts, first_row, {}, end_of);
  for (int64_t row = first_row; row < end_row; ++part) {
    const int64_t end = std::min(end_row, std::invoke(end_of, *part));
    if (end == row) continue;
    if (const int status = visit(*part, row, end); status != 0) return status;
    row = end;
  }
  return 0;
}

class ByteMapOp final : public Op {
 public:
  ByteMapOp(const std::vector<ByteMapPart>& parts, OpSource source, OpOutput output) : Op(source, {output}) {
    std::ranges::transform(parts, std::back_inserter(parts_), part_of);
  }

  const char* name() const override { return "byte_map"; }

  void run(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows) const override {
    const OpOutput& output = outputs().front();
    for_each_part(parts_, &Part::end_row, first_row, first_row + num_rows,
                  [&](const Part& part, int64_t row, int64_t end) {
                    for (; row < end; ++row, src += src_row_stride) {
                      part.map_row(src, output.data + row * output.row_stride, source().row_bytes, part);
                    }
                    return 0;
                  });
  }

  int launch(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows,
             DeviceStream stream) const override {
    const OpOutput& output = outputs().front();
    return for_each_part(parts_, &Part::end_row, first_row, first_row + num_rows,
                         [&](const Part& part, int64_t row, int64_t end) {
                           GivenTable table;
                           std::ranges::copy(part.table, table.bytes);
                           return launch_map(table, src + (row - first_row) * src_row_stride, src_row_stride,
                                             output.data + row * output.row_stride, output.row_stride, end - row,
                                             source().row_bytes, stream);
                         });
  }

 private:
  std::vector<Part> parts_;
};

class RequantizeOp final : public Op {
 public:
  RequantizeOp(const Requantize& requantize, std::vector<int64_t> end_rows, const float* scales, OpSource source,
               OpOutput output)
      : Op(source, {output}), requantize_(requantize), end_rows_(std::move(end_rows)), scales_(scales) {}

  const char* name() const override { return "requantize"; }

  void run(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows) const override {
    const OpOutput& output = outputs().front();
    for_each_part(end_rows_, std::identity{}, first_row, first_row + num_rows,
                  [&](const int64_t& end_row, int64_t row, int64_t end) {
                    const RequantizeRule rule = rule_of(end_row);
                    const Part part =
                        part_of({end_row, table_of([&](uint8_t byte) { return requantized(rule, byte); })});
                    for (; row < end; ++row, src += src_row_stride) {
                      part.map_row(src, output.data + row * output.row_stride, source().row_bytes, part);
                    }
                    return 0;
                  });
  }

  int launch(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows,
             DeviceStream stream) const override {
    const OpOutput& output = outputs().front();
    return for_each_part(end_rows_, std::identity{}, first_row, first_row + num_rows,
                         [&](const int64_t& end_row, int64_t row, int64_t end) {
                           return launch_map(rule_of(end_row), src + (row - first_row) * src_row_stride, src_row_stride,
                                             output.data + row * output.row_stride, output.row_stride, end - row,
                                             source().row_bytes, stream);
                         });
  }

 private:
  RequantizeRule rule_of(const int64_t& end_row) const {
    return {scales_,
            static_cast<int32_t>(end_rows_.size()),
            static_cast<int32_t>(&end_row - end_rows_.data()),
            requantize_.format,
            requantize_.rounding,
            internal::bits_from_float(requantize_.limit),
            requantize_.unset};
  }

  const Requantize requantize_;
  const std::vector<int64_t> end_rows_;
  const float* const scales_;
};

}  // namespace

ByteTable e4m3fn_to_e4m3fnuz_table(bool keep_nan) {
  return table_of([=](uint8_t byte) { return e4m3fn_to_e4m3fnuz(byte, keep_nan); });
}

ByteTable requantize_table(Fp8 format, float scale, float new_scale, float limit, Rounding rounding) {
  if (rounding == Rounding::kExact && scale == new_scale) return table_of([](uint8_t byte) { return byte; });
  const uint32_t limit_bits = internal::bits_from_float(limit);
  const float inverse = 1.0f / new_scale;
  return table_of([=](uint8_t byte) {
    return format == Fp8::kE4M3FN ? requantize_fp8<Fp8::kE4M3FN>(byte, scale, inverse, limit_bits, rounding)
                                  : requantize_fp8<Fp8::kE4M3FNUZ>(byte, scale, inverse, limit_bits, rounding);
  });
}

std::unique_ptr<const Op> make_byte_map(const std::vector<ByteMapPart>& parts, int64_t row_bytes, OpOutput output) {
  int64_t end_row = 0;
  for (const ByteMapPart& part : parts) {
    if (part.end_row <= end_row) throw std::invalid_argument("the parts' rows must ascend");
    end_row = part.end_row;
  }
  if (end_row != output.num_rows || row_bytes != output.row_bytes) {
    throw std::invalid_argument("the output has another size than the source");
  }
  return std::make_unique<ByteMapOp>(parts, OpSource{end_row, row_bytes, 1}, output);
}

std::unique_ptr<const Op> make_requantize(const Requantize& requantize, std::vector<int64_t> end_rows,
                                          const float* scales, int64_t row_bytes, OpOutput output) {
  if (end_rows.empty() || !std::ranges::is_sorted(end_rows) || end_rows.front() < 0) {
    throw std::invalid_argument("the parts' rows must ascend");
  }
  if (end_rows.back() != output.num_rows || row_bytes != output.row_bytes) {
    throw std::invalid_argument("the output has another size than the source");
  }
  const OpSource source{end_rows.back(), row_bytes, 1};
  return std::make_unique<RequantizeOp>(requantize, std::move(end_rows), scales, source, output);
}

}  // namespace weightlift
