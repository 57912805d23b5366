#include "transform/marlin_repack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "transform/cuda/launch.h"
#include "transform/cuda/marlin_kernel.h"
#include "transform/simd.h"
#include "util/align.h"

#if WEIGHTLIFT_X86
#include <immintrin.h>
#endif

// A tile takes two steps: the source's words become those of the GPTQ layout (a no-op where they are), and these become
// the tile. So each of the three sources and each of the four tiles exists once.

namespace weightlift {
namespace {

uint32_t load_word(const std::byte* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

void store_word(std::byte* to, uint32_t word) { std::memcpy(to, &word, sizeof(word)); }

// ---- second step: a tile from GPTQ words, `stride` bytes from row to row

using PackTile = void (*)(const std::byte* words, int64_t stride, std::byte* out);

template <int kBits, bool kA8>
void pack_tile_scalar(const std::byte* words, int64_t stride, std::byte* out) {
  const auto word_at = [&](int64_t row, int64_t column) { return load_word(words + row * stride + 4 * column); };
  for (int word = 0; word < MarlinTile<kBits, kA8>::kWords; ++word) {
    store_word(out + 4 * word, MarlinTile<kBits, kA8>::pack(word, [&](int k, int n) {
                 return packed_value<kBits, PackedLayout::kGptq>(word_at, k, n);
               }));
  }
}

#if WEIGHTLIFT_X86

// In all of these a register holds 8 columns of words, of which the 128-bit lanes have 4 each: column `m` (0..3) in the
// lower one, m + 4 in the upper one. The output is indexed [m][quad][...], quad being the thread's number modulo 4.

WEIGHTLIFT_TARGET_AVX2 inline __m256i load8(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// The lanes of a register, 16 bytes each, to their places.
WEIGHTLIFT_TARGET_AVX2 inline void store_lanes(std::byte* low, std::byte* high, __m256i value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm256_castsi256_si128(value));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm256_extracti128_si256(value, 1));
}

// Nibbles of two words that belong together: the even ones of both, the odd ones of both; `a`'s below `b`'s.
struct NibblePairs {
  __m256i even;
  __m256i odd;
};
WEIGHTLIFT_TARGET_AVX2 inline NibblePairs pair_nibbles(__m256i a, __m256i b) {
  const __m256i low = _mm256_set1_epi8(0x0f);
  return {_mm256_or_si256(_mm256_and_si256(a, low), _mm256_slli_epi16(_mm256_and_si256(b, low), 4)),
          _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(a, 4), low), _mm256_andnot_si256(low, b))};
}

// 4x4 words in each lane, transposed: register q gets word q of the four.
WEIGHTLIFT_TARGET_AVX2 inline void transpose4(__m256i& a, __m256i& b, __m256i& c, __m256i& d) {
  const __m256i ab_low = _mm256_unpacklo_epi32(a, b);
  const __m256i ab_high = _mm256_unpackhi_epi32(a, b);
  const __m256i cd_low = _mm256_unpacklo_epi32(c, d);
  const __m256i cd_high = _mm256_unpackhi_epi32(c, d);
  a = _mm256_unpacklo_epi64(ab_low, cd_low);
  b = _mm256_unpackhi_epi64(ab_low, cd_low);
  c = _mm256_unpacklo_epi64(ab_high, cd_high);
  d = _mm256_unpackhi_epi64(ab_high, cd_high);
}

// Rows 0 and 1 of words have k 0..7 and 8..15. A word of the output: byte `quad` of the pairs of column n, of n + 8.
WEIGHTLIFT_TARGET_AVX2 void pack_tile_4bit_avx2(const std::byte* words, int64_t stride, std::byte* out) {
  const __m256i transpose_bytes =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __m256i tile[4][4];  // [m][column]: lanes of four words, by quad
  for (int column = 0; column < 4; ++column) {
    const std::byte* from = words + 64 * column;
    const NibblePairs left = pair_nibbles(load8(from), load8(from + stride));
    const NibblePairs right = pair_nibbles(load8(from + 32), load8(from + stride + 32));
    const __m256i even_low = _mm256_unpacklo_epi32(left.even, right.even);
    const __m256i even_high = _mm256_unpackhi_epi32(left.even, right.even);
    const __m256i odd_low = _mm256_unpacklo_epi32(left.odd, right.odd);
    const __m256i odd_high = _mm256_unpackhi_epi32(left.odd, right.odd);
    tile[0][column] = _mm256_shuffle_epi8(_mm256_unpacklo_epi64(even_low, odd_low), transpose_bytes);
    tile[1][column] = _mm256_shuffle_epi8(_mm256_unpackhi_epi64(even_low, odd_low), transpose_bytes);
    tile[2][column] = _mm256_shuffle_epi8(_mm256_unpacklo_epi64(even_high, odd_high), transpose_bytes);
    tile[3][column] = _mm256_shuffle_epi8(_mm256_unpackhi_epi64(even_high, odd_high), transpose_bytes);
  }
  for (int m = 0; m < 4; ++m) {  // out[m][quad][column]
    transpose4(tile[m][0], tile[m][1], tile[m][2], tile[m][3]);
    for (int quad = 0; quad < 4; ++quad) {
      store_lanes(out + 64 * m + 16 * quad, out + 64 * (m + 4) + 16 * quad, tile[m][quad]);
    }
  }
}

// Rows r and r + 2 of words have what belongs together; quads 2r and 2r + 1 take a half of each word.
WEIGHTLIFT_TARGET_AVX2 void pack_tile_8bit_avx2(const std::byte* words, int64_t stride, std::byte* out) {
  for (int r = 0; r < 2; ++r) {
    for (int pair = 0; pair < 2; ++pair) {  // of columns
      __m256i halves[2][4];                 // [column of the pair]: lanes of [quad][n, n + 8] words, by m
      for (int c = 0; c < 2; ++c) {
        const std::byte* from = words + r * stride + 64 * (2 * pair + c);
        const __m256i left_low = _mm256_unpacklo_epi8(load8(from), load8(from + 2 * stride));
        const __m256i left_high = _mm256_unpackhi_epi8(load8(from), load8(from + 2 * stride));
        const __m256i right_low = _mm256_unpacklo_epi8(load8(from + 32), load8(from + 2 * stride + 32));
        const __m256i right_high = _mm256_unpackhi_epi8(load8(from + 32), load8(from + 2 * stride + 32));
        halves[c][0] = _mm256_unpacklo_epi32(left_low, right_low);
        halves[c][1] = _mm256_unpackhi_epi32(left_low, right_low);
        halves[c][2] = _mm256_unpacklo_epi32(left_high, right_high);
        halves[c][3] = _mm256_unpackhi_epi32(left_high, right_high);
      }
      for (int m = 0; m < 4; ++m) {  // out[m][quad][column][n, n + 8]
        std::byte* to = out + 128 * m + 64 * r + 16 * pair;
        store_lanes(to, to + 512, _mm256_unpacklo_epi64(halves[0][m], halves[1][m]));
        store_lanes(to + 32, to + 512 + 32, _mm256_unpackhi_epi64(halves[0][m], halves[1][m]));
      }
    }
  }
}

// Rows r and r + 2 of words belong together; quads 2r and 2r + 1 take a half of each word, both kinds of nibbles in
// turn.
WEIGHTLIFT_TARGET_AVX2 void pack_tile_4bit_a8_avx2(const std::byte* words, int64_t stride, std::byte* out) {
  for (int r = 0; r < 2; ++r) {
    __m256i low[4];  // [column]: lanes of [m][quad] words, m 0 and 1
    __m256i high[4];
    for (int column = 0; column < 4; ++column) {
      const std::byte* from = words + r * stride + 32 * column;
      const NibblePairs pairs = pair_nibbles(load8(from), load8(from + 2 * stride));
      low[column] = _mm256_unpacklo_epi8(pairs.even, pairs.odd);
      high[column] = _mm256_unpackhi_epi8(pairs.even, pairs.odd);
    }
    transpose4(low[0], low[1], low[2], low[3]);
    transpose4(high[0], high[1], high[2], high[3]);
    for (int i = 0; i < 4; ++i) {  // out[m][quad][column]
      std::byte* to = out + 64 * (i / 2) + 32 * r + 16 * (i % 2);
      store_lanes(to, to + 256, low[i]);
      store_lanes(to + 128, to + 256 + 128, high[i]);
    }
  }
}

// Rows r and r + 4 are whole words of quad r.
WEIGHTLIFT_TARGET_AVX2 void pack_tile_8bit_a8_avx2(const std::byte* words, int64_t stride, std::byte* out) {
  for (int quad = 0; quad < 4; ++quad) {
    for (int pair = 0; pair < 2; ++pair) {  // of columns
      const std::byte* from = words + quad * stride + 64 * pair;
      const __m256i a = load8(from);
      const __m256i b = load8(from + 4 * stride);
      const __m256i c = load8(from + 32);
      const __m256i d = load8(from + 4 * stride + 32);
      const __m256i ab_low = _mm256_unpacklo_epi32(a, b);
      const __m256i ab_high = _mm256_unpackhi_epi32(a, b);
      const __m256i cd_low = _mm256_unpacklo_epi32(c, d);
      const __m256i cd_high = _mm256_unpackhi_epi32(c, d);
      std::byte* to = out + 32 * quad + 16 * pair;  // out[m][quad][column][row]
      store_lanes(to, to + 512, _mm256_unpacklo_epi64(ab_low, cd_low));
      store_lanes(to + 128, to + 512 + 128, _mm256_unpackhi_epi64(ab_low, cd_low));
      store_lanes(to + 256, to + 512 + 256, _mm256_unpacklo_epi64(ab_high, cd_high));
      store_lanes(to + 384, to + 512 + 384, _mm256_unpackhi_epi64(ab_high, cd_high));
    }
  }
}

#endif  // WEIGHTLIFT_X86

PackTile pack_tile_for(int num_bits, bool a8) {
#if WEIGHTLIFT_X86
  if (simd() >= Simd::kAvx2) {
    if (a8) return num_bits == 4 ? pack_tile_4bit_a8_avx2 : pack_tile_8bit_a8_avx2;
    return num_bits == 4 ? pack_tile_4bit_avx2 : pack_tile_8bit_avx2;
  }
#endif
  if (a8) return num_bits == 4 ? pack_tile_scalar<4, true> : pack_tile_scalar<8, true>;
  return num_bits == 4 ? pack_tile_scalar<4, false> : pack_tile_scalar<8, false>;
}

// To memory that nobody reads soon: past the caches, which saves reading it first. The rows of tiles of a transposing
// repack, which lie far apart, come out at more than twice the speed. REQUIRES: whole lines of 64 bytes.
using StreamTile = void (*)(const std::byte* tile, std::byte* out, int64_t bytes);

#if WEIGHTLIFT_X86
WEIGHTLIFT_TARGET_AVX2 void stream_tile_avx2(const std::byte* tile, std::byte* out, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 32) _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), load8(tile + i));
}
#endif

StreamTile stream_tile() {
#if WEIGHTLIFT_X86
  if (simd() >= Simd::kAvx2) return stream_tile_avx2;
#endif
  return nullptr;
}

// Makes what was streamed visible to whom the end of this run is told.
void end_streaming() {
#if WEIGHTLIFT_X86
  _mm_sfence();
#endif
}

// ---- first step: a block of the source as GPTQ words, `words_k` rows of `n` words

// Any block, at any place; what lies beyond it in the tile is not touched.
using LoadBlock = void (*)(const std::byte* src, int64_t src_stride, int64_t words_k, int64_t n, std::byte* out,
                           int64_t out_stride);

template <int kBits, PackedLayout kLayout>
void load_block_scalar(const std::byte* src, int64_t src_stride, int64_t words_k, int64_t n, std::byte* out,
                       int64_t out_stride) {
  constexpr int kValues = 32 / kBits;
  const auto word_at = [&](int64_t row, int64_t column) { return load_word(src + row * src_stride + 4 * column); };
  for (int64_t row = 0; row < words_k; ++row) {
    for (int64_t column = 0; column < n; ++column) {
      uint32_t word = 0;
      for (int i = 0; i < kValues; ++i) {
        word |= packed_value<kBits, kLayout>(word_at, row * kValues + i, column) << (kBits * i);
      }
      store_word(out + row * out_stride + 4 * column, word);
    }
  }
}

void load_block_gptq(const std::byte* src, int64_t src_stride, int64_t words_k, int64_t n, std::byte* out,
                     int64_t out_stride) {
  for (int64_t row = 0; row < words_k; ++row) {
    std::memcpy(out + row * out_stride, src + row * src_stride, static_cast<size_t>(4 * n));
  }
}

#if WEIGHTLIFT_X86

inline __m128i load4(const std::byte* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
inline void store4(std::byte* to, __m128i value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value); }

inline void transpose4(__m128i& a, __m128i& b, __m128i& c, __m128i& d) {
  const __m128i ab_low = _mm_unpacklo_epi32(a, b);
  const __m128i ab_high = _mm_unpackhi_epi32(a, b);
  const __m128i cd_low = _mm_unpacklo_epi32(c, d);
  const __m128i cd_high = _mm_unpackhi_epi32(c, d);
  a = _mm_unpacklo_epi64(ab_low, cd_low);
  b = _mm_unpackhi_epi64(ab_low, cd_low);
  c = _mm_unpacklo_epi64(ab_high, cd_high);
  d = _mm_unpackhi_epi64(ab_high, cd_high);
}

// A transposition of words, whatever the bits.
void load_block_n_major_sse2(const std::byte* src, int64_t src_stride, int64_t words_k, int64_t n, std::byte* out,
                             int64_t out_stride) {
  int64_t column = 0;
  for (; column + 4 <= n; column += 4) {
    const std::byte* from = src + column * src_stride;
    std::byte* to = out + 4 * column;
    int64_t row = 0;
    for (; row + 4 <= words_k; row += 4) {
      __m128i words[4];
      for (int i = 0; i < 4; ++i) words[i] = load4(from + i * src_stride + 4 * row);
      transpose4(words[0], words[1], words[2], words[3]);
      for (int i = 0; i < 4; ++i) store4(to + (row + i) * out_stride, words[i]);
    }
    load_block_scalar<8, PackedLayout::kNMajor>(from + 4 * row, src_stride, words_k - row, 4, to + row * out_stride,
                                                out_stride);
  }
  load_block_scalar<8, PackedLayout::kNMajor>(src + column * src_stride, src_stride, words_k, n - column,
                                              out + 4 * column, out_stride);
}

// The words of four rows of bytes, byte i from row i; each lane for itself.
WEIGHTLIFT_TARGET_AVX2 inline void words_of_bytes(__m256i (&rows)[4]) {
  const __m256i ab_low = _mm256_unpacklo_epi8(rows[0], rows[1]);
  const __m256i ab_high = _mm256_unpackhi_epi8(rows[0], rows[1]);
  const __m256i cd_low = _mm256_unpacklo_epi8(rows[2], rows[3]);
  const __m256i cd_high = _mm256_unpackhi_epi8(rows[2], rows[3]);
  rows[0] = _mm256_unpacklo_epi16(ab_low, cd_low);
  rows[1] = _mm256_unpackhi_epi16(ab_low, cd_low);
  rows[2] = _mm256_unpacklo_epi16(ab_high, cd_high);
  rows[3] = _mm256_unpackhi_epi16(ab_high, cd_high);
}

// 8 rows of k and 64 columns at a time, 32 in a lane: bytes with the values of two k each, then four of them to a word.
WEIGHTLIFT_TARGET_AVX2 void load_block_awq_4bit_avx2(const std::byte* src, int64_t src_stride, int64_t words_k,
                                                     int64_t n, std::byte* out, int64_t out_stride) {
  for (int64_t row = 0; row < words_k; ++row) {
    const std::byte* from = src + 8 * row * src_stride;
    std::byte* to = out + row * out_stride;
    int64_t column = 0;
    for (; column + 64 <= n; column += 64) {
      __m256i even[4];  // nibbles 0 2 4 6 of the words: columns 0 4 1 5 of each eight
      __m256i odd[4];   // columns 2 6 3 7
      for (int i = 0; i < 4; ++i) {
        const NibblePairs pairs = pair_nibbles(load8(from + 2 * i * src_stride + column / 2),
                                               load8(from + (2 * i + 1) * src_stride + column / 2));
        even[i] = pairs.even;
        odd[i] = pairs.odd;
      }
      words_of_bytes(even);
      words_of_bytes(odd);
      for (int i = 0; i < 4; ++i) {
        const __m256 e = _mm256_castsi256_ps(even[i]);
        const __m256 o = _mm256_castsi256_ps(odd[i]);
        std::byte* place = to + 4 * (column + 8 * i);
        store_lanes(place, place + 128, _mm256_castps_si256(_mm256_shuffle_ps(e, o, _MM_SHUFFLE(2, 0, 2, 0))));
        store_lanes(place + 16, place + 16 + 128,
                    _mm256_castps_si256(_mm256_shuffle_ps(e, o, _MM_SHUFFLE(3, 1, 3, 1))));
      }
    }
    load_block_scalar<4, PackedLayout::kAwq>(from + column / 2, src_stride, 1, n - column, to + 4 * column, out_stride);
  }
}

// 4 rows of k and 16 columns at a time: four bytes to a word.
void load_block_awq_8bit_sse2(const std::byte* src, int64_t src_stride, int64_t words_k, int64_t n, std::byte* out,
                              int64_t out_stride) {
  for (int64_t row = 0; row < words_k; ++row) {
    const std::byte* from = src + 4 * row * src_stride;
    std::byte* to = out + row * out_stride;
    int64_t column = 0;
    for (; column + 16 <= n; column += 16) {
      const __m128i a = load4(from + column);
      const __m128i b = load4(from + src_stride + column);
      const __m128i c = load4(from + 2 * src_stride + column);
      const __m128i d = load4(from + 3 * src_stride + column);
      const __m128i ab_low = _mm_unpacklo_epi8(a, b);
      const __m128i ab_high = _mm_unpackhi_epi8(a, b);
      const __m128i cd_low = _mm_unpacklo_epi8(c, d);
      const __m128i cd_high = _mm_unpackhi_epi8(c, d);
      const __m128i words[4] = {_mm_unpacklo_epi16(ab_low, cd_low), _mm_unpackhi_epi16(ab_low, cd_low),
                                _mm_unpacklo_epi16(ab_high, cd_high), _mm_unpackhi_epi16(ab_high, cd_high)};
      for (int i = 0; i < 4; ++i) {  // columns 0 2 1 3 of each four
        store4(to + 4 * (column + 4 * i), _mm_shuffle_epi32(words[i], _MM_SHUFFLE(3, 1, 2, 0)));
      }
    }
    load_block_scalar<8, PackedLayout::kAwq>(from + column, src_stride, 1, n - column, to + 4 * column, out_stride);
  }
}

#endif  // WEIGHTLIFT_X86

LoadBlock load_block_for(PackedLayout layout, int num_bits) {
  switch (layout) {
    case PackedLayout::kGptq:
      return load_block_gptq;
    case PackedLayout::kAwq:
#if WEIGHTLIFT_X86
      if (simd() > Simd::kBaseline) return num_bits == 4 ? load_block_awq_4bit_avx2 : load_block_awq_8bit_sse2;
#endif
      return num_bits == 4 ? load_block_scalar<4, PackedLayout::kAwq> : load_block_scalar<8, PackedLayout::kAwq>;
    case PackedLayout::kNMajor:
#if WEIGHTLIFT_X86
      if (simd() > Simd::kBaseline) return load_block_n_major_sse2;
#endif
      return num_bits == 4 ? load_block_scalar<4, PackedLayout::kNMajor> : load_block_scalar<8, PackedLayout::kNMajor>;
  }
  return nullptr;
}

// ---- gathering: tiles of rows that a perm names

// A strip is kStripColumns columns of the source. A packed row has values for many tiles, so the strip is first brought
// close together, in a form from which any row of k is taken at once; then every row of tiles comes from a cache.
constexpr int64_t kStripColumns = 64;

// `rows` packed rows of `columns` words, a strip or less of it, into as many bytes as a whole strip has.
using LoadStrip = void (*)(const std::byte* src, int64_t src_stride, int64_t rows, int64_t columns, std::byte* strip);
// All tiles of a strip whose rows are perm[0], perm[1] ..., one tile behind the other.
using PackStrip = void (*)(const std::byte* strip, const int32_t* perm, std::byte* out);

struct Gather {
  LoadStrip load;
  PackStrip pack;
};

void load_strip_scalar(const std::byte* src, int64_t src_stride, int64_t rows, int64_t columns, std::byte* strip) {
  load_block_gptq(src, src_stride, rows, columns, strip, 4 * kStripColumns);
}

template <int kBits, bool kA8>
void pack_strip_scalar(const std::byte* strip, const int32_t* perm, std::byte* out) {
  using Tile = MarlinTile<kBits, kA8>;
  const auto word_at = [&](int64_t row, int64_t column) {
    return load_word(strip + 4 * (row * kStripColumns + column));
  };
  for (int64_t first_n = 0; first_n < kStripColumns; first_n += Tile::kColumns) {
    for (int word = 0; word < Tile::kWords; ++word, out += 4) {
      store_word(out, Tile::pack(word, [&](int k, int n) {
                   return packed_value<kBits, PackedLayout::kGptq>(word_at, perm[k], first_n + n);
                 }));
    }
  }
}

#if WEIGHTLIFT_X86

// Here a strip has a row for each k. Columns are 8 * g + m. A row's bytes are in two registers, for m 0 1 | 4 5 and
// 2 3 | 6 7 (lane | lane), in each lane g 0..7 of one m, then of the other. Of 4 bits, the first register's values are
// the low nibbles, and the second one's the high nibbles, of one register. This order is what needs the least shuffling
// on both sides.
template <int kBits>
constexpr int64_t kStripRowBytes = kStripColumns * kBits / 8;

// Words of columns (m, g), (m, g + 1), (m + 1, g), (m + 1, g + 1), for g 0 2 4 6: their bytes, apart, byte t of each in
// register t.
WEIGHTLIFT_TARGET_AVX2 inline void separate_bytes(__m256i (&words)[4]) {
  const __m256i by_byte =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
  for (__m256i& word : words) word = _mm256_shuffle_epi8(word, by_byte);
  const __m256i first_low = _mm256_unpacklo_epi16(words[0], words[1]);  // of m
  const __m256i first_high = _mm256_unpacklo_epi16(words[2], words[3]);
  const __m256i second_low = _mm256_unpackhi_epi16(words[0], words[1]);  // of m + 1
  const __m256i second_high = _mm256_unpackhi_epi16(words[2], words[3]);
  const __m256i first_01 = _mm256_unpacklo_epi32(first_low, first_high);
  const __m256i first_23 = _mm256_unpackhi_epi32(first_low, first_high);
  const __m256i second_01 = _mm256_unpacklo_epi32(second_low, second_high);
  const __m256i second_23 = _mm256_unpackhi_epi32(second_low, second_high);
  words[0] = _mm256_unpacklo_epi64(first_01, second_01);
  words[1] = _mm256_unpackhi_epi64(first_01, second_01);
  words[2] = _mm256_unpacklo_epi64(first_23, second_23);
  words[3] = _mm256_unpackhi_epi64(first_23, second_23);
}

template <int kBits>
WEIGHTLIFT_TARGET_AVX2 void load_strip_avx2(const std::byte* src, int64_t src_stride, int64_t rows, int64_t columns,
                                            std::byte* strip) {
  constexpr int64_t kAhead = 16;  // rows: they lie far apart, no pattern that a processor sees
  alignas(32) std::byte part[4 * kStripColumns] = {};
  for (int64_t row = 0; row < rows; ++row) {
    const std::byte* from = src + row * src_stride;
    if (row + kAhead < rows) {
      for (int64_t at = 0; at < 4 * columns; at += 64) __builtin_prefetch(from + kAhead * src_stride + at, 0, 2);
    }
    if (columns < kStripColumns) {
      std::memcpy(part, from, static_cast<size_t>(4 * columns));
      from = part;
    }
    __m256i first[4];   // of 4 bits: the even values; of 8: those of the first register
    __m256i second[4];  // the odd ones; those of the second one
    for (int i = 0; i < 4; ++i) {
      const __m256i a = load8(from + 64 * i);
      const __m256i b = load8(from + 64 * i + 32);
      first[i] = _mm256_unpacklo_epi32(a, b);
      second[i] = _mm256_unpackhi_epi32(a, b);
      if constexpr (kBits == 4) {
        const NibblePairs pairs = pair_nibbles(first[i], second[i]);
        first[i] = pairs.even;
        second[i] = pairs.odd;
      }
    }
    separate_bytes(first);
    separate_bytes(second);
    for (int i = 0; i < 4; ++i) {
      auto* to = reinterpret_cast<__m256i*>(strip + row * 4 * kStripColumns + 64 * i);
      _mm256_storeu_si256(to, first[i]);
      _mm256_storeu_si256(to + 1, second[i]);
    }
  }
}

// The two registers of a row of bytes. Of 4 bits, a byte is a value of row perm[0] below one of row perm[distance].
struct ByteRow {
  __m256i registers[2];
};
template <int kBits>
WEIGHTLIFT_TARGET_AVX2 inline ByteRow load_row(const std::byte* strip, const int32_t* perm, int distance) {
  const std::byte* row = strip + perm[0] * kStripRowBytes<kBits>;
  if constexpr (kBits == 8) return {{load8(row), load8(row + 32)}};
  const NibblePairs pairs = pair_nibbles(load8(row), load8(strip + perm[distance] * kStripRowBytes<kBits>));
  return {{pairs.even, pairs.odd}};
}

// Words of a byte of each of the rows perm[k[0]] ... perm[k[3]], register by register: of the first m those with g
// 0..3, those with g 4..7; then of the second m.
struct RowWords {
  __m256i registers[2][4];
};
template <int kBits>
WEIGHTLIFT_TARGET_AVX2 inline RowWords load_words(const std::byte* strip, const int32_t* perm, const int (&k)[4],
                                                  int distance) {
  RowWords words;
  for (int i = 0; i < 4; ++i) {
    const ByteRow row = load_row<kBits>(strip, perm + k[i], distance);
    words.registers[0][i] = row.registers[0];
    words.registers[1][i] = row.registers[1];
  }
  words_of_bytes(words.registers[0]);
  words_of_bytes(words.registers[1]);
  return words;
}

// Below, out[m][quad][...]: `to` is the place of (m, quad); m + 4, the upper lane, is half a tile further.

// A word: columns g and g + 1, which are n and n + 8, of both rows.
WEIGHTLIFT_TARGET_AVX2 void pack_strip_4bit_avx2(const std::byte* strip, const int32_t* perm, std::byte* out) {
  for (int quad = 0; quad < 4; ++quad) {
    const ByteRow a = load_row<4>(strip, perm + 2 * quad, 8);
    const ByteRow b = load_row<4>(strip, perm + 2 * quad + 1, 8);
    for (int r = 0; r < 2; ++r) {
      std::byte* to = out + 128 * r + 16 * quad;
      store_lanes(to, to + 256, _mm256_unpacklo_epi16(a.registers[r], b.registers[r]));
      store_lanes(to + 64, to + 64 + 256, _mm256_unpackhi_epi16(a.registers[r], b.registers[r]));
    }
  }
}

WEIGHTLIFT_TARGET_AVX2 void pack_strip_8bit_avx2(const std::byte* strip, const int32_t* perm, std::byte* out) {
  for (int quad = 0; quad < 4; ++quad) {
    const RowWords words = load_words<8>(strip, perm + 2 * quad, {0, 8, 1, 9}, 0);
    for (int r = 0; r < 2; ++r) {
      for (int i = 0; i < 4; ++i) {
        std::byte* to = out + 128 * (2 * r + i / 2) + 32 * quad + 16 * (i % 2);
        store_lanes(to, to + 512, words.registers[r][i]);
      }
    }
  }
}

// Two tiles, as in the next one: g 0..3 and 4..7.
WEIGHTLIFT_TARGET_AVX2 void pack_strip_4bit_a8_avx2(const std::byte* strip, const int32_t* perm, std::byte* out) {
  for (int quad = 0; quad < 4; ++quad) {
    const RowWords words = load_words<4>(strip, perm + 4 * quad, {0, 1, 2, 3}, 16);
    for (int r = 0; r < 2; ++r) {
      for (int i = 0; i < 4; ++i) {
        std::byte* to = out + 64 * (2 * r + i / 2) + 16 * quad + 512 * (i % 2);
        store_lanes(to, to + 256, words.registers[r][i]);
      }
    }
  }
}

// Words of four k, and of those 16 further, in turn.
WEIGHTLIFT_TARGET_AVX2 void pack_strip_8bit_a8_avx2(const std::byte* strip, const int32_t* perm, std::byte* out) {
  for (int quad = 0; quad < 4; ++quad) {
    const RowWords low = load_words<8>(strip, perm + 4 * quad, {0, 1, 2, 3}, 0);
    const RowWords high = load_words<8>(strip, perm + 4 * quad, {16, 17, 18, 19}, 0);
    for (int r = 0; r < 2; ++r) {
      for (int i = 0; i < 4; ++i) {
        std::byte* to = out + 128 * (2 * r + i / 2) + 32 * quad + 1024 * (i % 2);
        store_lanes(to, to + 512, _mm256_unpacklo_epi32(low.registers[r][i], high.registers[r][i]));
        store_lanes(to + 16, to + 16 + 512, _mm256_unpackhi_epi32(low.registers[r][i], high.registers[r][i]));
      }
    }
  }
}

#endif  // WEIGHTLIFT_X86

Gather gather_for(int num_bits, bool a8) {
#if WEIGHTLIFT_X86
  if (simd() >= Simd::kAvx2) {
    if (num_bits == 4) return {load_strip_avx2<4>, a8 ? pack_strip_4bit_a8_avx2 : pack_strip_4bit_avx2};
    return {load_strip_avx2<8>, a8 ? pack_strip_8bit_a8_avx2 : pack_strip_8bit_avx2};
  }
#endif
  if (num_bits == 4) return {load_strip_scalar, a8 ? pack_strip_scalar<4, true> : pack_strip_scalar<4, false>};
  return {load_strip_scalar, a8 ? pack_strip_scalar<8, true> : pack_strip_scalar<8, false>};
}

// ---- the op

class MarlinRepackOp final : public Op {
 public:
  MarlinRepackOp(MarlinRepack repack, OpSource source, OpOutput output)
      : Op(source, {output}),
        repack_(std::move(repack)),
        tile_k_(repack_.is_a_8bit ? 32 : 16),
        tile_n_(repack_.is_a_8bit ? 32 : 64),
        values_per_word_(32 / repack_.num_bits),
        tile_bytes_(4096 / values_per_word_),
        load_block_(load_block_for(repack_.layout, repack_.num_bits)),
        gather_(gather_for(repack_.num_bits, repack_.is_a_8bit)),
        pack_tile_(pack_tile_for(repack_.num_bits, repack_.is_a_8bit)),
        stream_tile_(stream_tile()) {}

  const char* name() const override {
    return repack_.layout == PackedLayout::kAwq ? "awq_marlin_repack" : "gptq_marlin_repack";
  }

  void run(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows) const override {
    const int64_t last_row = first_row + num_rows;
    const bool is_end = last_row == source().num_rows;  // what only fills up comes with the last rows
    if (!repack_.perm.empty()) {
      run_gathered(src, src_row_stride);
    } else if (repack_.layout == PackedLayout::kNMajor) {
      run_columns(src, src_row_stride, first_row, is_end ? repack_.padded_n : last_row);
    } else {
      const int64_t values = repack_.layout == PackedLayout::kGptq ? values_per_word_ : 1;
      const int64_t first_k = first_row * values;
      const int64_t end_k = is_end ? repack_.padded_k : last_row * values;
      for (int64_t k = first_k; k < end_k; k += tile_k_) {
        run_row(src + (k - first_k) / values * src_row_stride, src_row_stride, k / tile_k_);
      }
    }
    if (stream_tile_ != nullptr) end_streaming();
  }

  int launch(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows,
             DeviceStream stream) const override {
    if (!repack_.perm.empty() && repack_.device_perm == nullptr) return kDeviceNotSupported;
    const bool is_last = first_row + num_rows == source().num_rows;
    MarlinTask task{};
    task.src = src;
    task.src_row_stride = src_row_stride;
    task.perm = repack_.device_perm;
    int64_t tile_row = 0;
    int64_t tile_column = 0;
    if (repack_.layout == PackedLayout::kNMajor) {
      task.size_k = repack_.size_k;
      task.size_n = num_rows;
      tile_column = first_row / tile_n_;
      task.tile_rows = repack_.padded_k / tile_k_;
      task.tile_columns = (is_last ? repack_.padded_n - first_row : num_rows) / tile_n_;
    } else {
      const int64_t values = repack_.layout == PackedLayout::kGptq ? values_per_word_ : 1;  // of k, in a row
      task.size_k = num_rows * values;
      task.size_n = repack_.size_n;
      tile_row = first_row * values / tile_k_;
      task.tile_rows = (is_last ? repack_.padded_k - first_row * values : num_rows * values) / tile_k_;
      task.tile_columns = repack_.padded_n / tile_n_;
    }
    task.dst = place(tile_row, tile_column);
    task.dst_row_stride = outputs().front().row_stride;
    task.src_alignment = alignment_of({address_of(src), source().num_rows == 1 ? 0 : src_row_stride});
    task.dst_alignment = alignment_of({address_of(task.dst), task.tile_rows == 1 ? 0 : task.dst_row_stride});
    return repack_.num_bits == 4 ? launch_layout<4>(task, stream) : launch_layout<8>(task, stream);
  }

 private:
  template <int kBits>
  int launch_layout(const MarlinTask& task, DeviceStream stream) const {
    switch (repack_.layout) {
      case PackedLayout::kGptq:
        return task.perm != nullptr ? launch_tile<kBits, PackedLayout::kGptq, true>(task, stream)
                                    : launch_tile<kBits, PackedLayout::kGptq, false>(task, stream);
      case PackedLayout::kAwq:
        return launch_tile<kBits, PackedLayout::kAwq, false>(task, stream);
      case PackedLayout::kNMajor:
        return launch_tile<kBits, PackedLayout::kNMajor, false>(task, stream);
    }
    return kDeviceNotSupported;
  }

  template <int kBits, PackedLayout kLayout, bool kGathered>
  int launch_tile(const MarlinTask& task, DeviceStream stream) const {
    if (repack_.is_a_8bit) {
      MarlinKernel<kBits, true, kLayout, kGathered> kernel;
      kernel.task = task;
      return weightlift::launch(kernel, stream);
    }
    MarlinKernel<kBits, false, kLayout, kGathered> kernel;
    kernel.task = task;
    return weightlift::launch(kernel, stream);
  }

  // The words of the largest block that is loaded at once. It takes whole cache lines from the source: 128
  // columns of AWQ are 64 bytes of 4-bit values.
  static constexpr int64_t kBlockColumns = 128;
  static constexpr int64_t kBlockRows = 16;
  static constexpr int64_t kBlockStride = 4 * kBlockColumns;
  static constexpr int64_t kBlockBytes = kBlockRows * kBlockStride;

  std::byte* place(int64_t tile_row, int64_t tile_column) const {
    const OpOutput& output = outputs().front();
    return output.data + tile_row * output.row_stride + tile_column * tile_bytes_;
  }

  void pack(const std::byte* words, int64_t stride, int64_t tile_row, int64_t tile_column) const {
    std::byte* out = place(tile_row, tile_column);
    if (!may_stream(out)) return pack_tile_(words, stride, out);
    alignas(64) std::byte tile[1024];
    pack_tile_(words, stride, tile);
    stream_tile_(tile, out, tile_bytes_);
  }

  bool may_stream(const std::byte* out) const {
    return stream_tile_ != nullptr && reinterpret_cast<uintptr_t>(out) % 64 == 0;
  }

  // How many of `size` values from `first` on the source has.
  static int64_t present(int64_t first, int64_t size, int64_t end) { return std::clamp<int64_t>(end - first, 0, size); }

  // Tiles of one row, from a source whose rows go along n. `src` points at the first row that they need.
  void run_row(const std::byte* src, int64_t src_stride, int64_t tile_row) const {
    const bool is_gptq = repack_.layout == PackedLayout::kGptq;
    const int64_t packed_rows = tile_k_ / values_per_word_;
    const int64_t rows = present(tile_row * tile_k_, tile_k_, repack_.size_k) / values_per_word_;
    const int64_t column_bits = is_gptq ? 32 : repack_.num_bits;  // what a column takes in a row of the source
    alignas(64) std::byte block[kBlockBytes];
    for (int64_t column = 0; column < repack_.padded_n; column += kBlockColumns) {
      const int64_t padded_columns = std::min(kBlockColumns, repack_.padded_n - column);
      const int64_t columns = present(column, padded_columns, repack_.size_n);
      const bool is_whole = rows == packed_rows && columns == padded_columns;
      const std::byte* words = src + column * column_bits / 8;
      int64_t stride = src_stride;
      if (!is_whole || !is_gptq) {
        if (!is_whole) std::memset(block, 0, sizeof(block));
        if (rows > 0 && columns > 0) load_block_(words, stride, rows, columns, block, kBlockStride);
        words = block;
        stride = kBlockStride;
      }
      for (int64_t n = 0; n < padded_columns; n += tile_n_) {
        pack(words + 4 * n, stride, tile_row, (column + n) / tile_n_);
      }
    }
  }

  // Tiles of columns, from a source whose rows go along k. `src` points at row `first_n`.
  void run_columns(const std::byte* src, int64_t src_stride, int64_t first_n, int64_t end_n) const {
    const int64_t packed_rows = tile_k_ / values_per_word_;
    const int64_t words_k = repack_.size_k / values_per_word_;
    const int64_t padded_words_k = repack_.padded_k / values_per_word_;
    alignas(64) std::byte block[kBlockBytes];
    // Of more rows at a time, the lines would contend for the same places in the cache.
    constexpr int64_t kColumns = 64;
    for (int64_t column = first_n; column < end_n; column += kColumns) {
      const int64_t padded_columns = std::min(kColumns, end_n - column);
      const int64_t columns = present(column, padded_columns, repack_.size_n);
      const std::byte* from = src + (column - first_n) * src_stride;
      for (int64_t row = 0; row < padded_words_k; row += kBlockRows) {
        // The next block is a line from each of many rows: no pattern that a processor sees.
        for (int64_t n = 0; row + kBlockRows < words_k && n < columns; ++n) {
          __builtin_prefetch(from + n * src_stride + 4 * (row + kBlockRows), 0, 2);
        }
        const int64_t padded_rows = std::min(kBlockRows, padded_words_k - row);
        const int64_t rows = present(row, padded_rows, words_k);
        if (rows < padded_rows || columns < padded_columns) std::memset(block, 0, sizeof(block));
        if (rows > 0 && columns > 0) load_block_(from + 4 * row, src_stride, rows, columns, block, kBlockStride);
        for (int64_t i = 0; i < padded_rows; i += packed_rows) {
          for (int64_t n = 0; n < padded_columns; n += tile_n_) {
            pack(block + i * kBlockStride + 4 * n, kBlockStride, (row + i) / packed_rows, (column + n) / tile_n_);
          }
        }
      }
    }
  }

  void run_gathered(const std::byte* src, int64_t src_stride) const {
    const int64_t rows = source().num_rows;
    std::vector<std::byte> strip(static_cast<size_t>(rows * 4 * kStripColumns));
    alignas(64) std::byte tiles[2048];
    for (int64_t column = 0; column < repack_.size_n; column += kStripColumns) {
      const int64_t columns = std::min(kStripColumns, repack_.size_n - column);
      const int64_t bytes = columns / tile_n_ * tile_bytes_;
      gather_.load(src + 4 * column, src_stride, rows, columns, strip.data());
      for (int64_t tile_row = 0; tile_row < repack_.size_k / tile_k_; ++tile_row) {
        gather_.pack(strip.data(), repack_.perm.data() + tile_row * tile_k_, tiles);
        std::byte* out = place(tile_row, column / tile_n_);
        if (may_stream(out)) {
          stream_tile_(tiles, out, bytes);
        } else {
          std::memcpy(out, tiles, static_cast<size_t>(bytes));
        }
      }
    }
  }

  const MarlinRepack repack_;
  const int64_t tile_k_;
  const int64_t tile_n_;
  const int64_t values_per_word_;
  const int64_t tile_bytes_;
  const LoadBlock load_block_;
  const Gather gather_;
  const PackTile pack_tile_;
  const StreamTile stream_tile_;  // null: none
};

}  // namespace

std::unique_ptr<const Op> make_marlin_repack(MarlinRepack repack, OpOutput output) {
  if (repack.num_bits != 4 && repack.num_bits != 8) throw std::invalid_argument("num_bits must be 4 or 8");
  const int64_t tile_k = repack.is_a_8bit ? 32 : 16;
  const int64_t tile_n = repack.is_a_8bit ? 32 : 64;
  const int64_t values = 32 / repack.num_bits;
  if (repack.size_k <= 0 || repack.size_n <= 0 || repack.padded_k < repack.size_k || repack.padded_n < repack.size_n ||
      repack.padded_k % tile_k != 0 || repack.padded_n % tile_n != 0) {
    throw std::invalid_argument("sizes must be positive, and padded ones multiples of the Marlin tile");
  }
  if ((repack.layout == PackedLayout::kAwq ? repack.size_n : repack.size_k) % values != 0 ||
      (repack.layout == PackedLayout::kAwq && repack.size_k % values != 0)) {
    throw std::invalid_argument("sizes must be multiples of the values in a word");
  }
  const bool gathers = !repack.perm.empty() || repack.device_perm != nullptr;
  if (gathers) {
    if (repack.layout != PackedLayout::kGptq || repack.padded_k != repack.size_k || repack.padded_n != repack.size_n ||
        (!repack.perm.empty() && static_cast<int64_t>(repack.perm.size()) != repack.size_k)) {
      throw std::invalid_argument("perm needs the GPTQ layout, no padding, and an entry for each k");
    }
    for (const int32_t k : repack.perm) {
      if (k < 0 || k >= repack.size_k) throw std::invalid_argument("perm has an entry outside of [0, size_k)");
    }
  }
  if (output.num_rows != repack.padded_k / tile_k || output.row_bytes != repack.padded_n / tile_n * (4096 / values)) {
    throw std::invalid_argument("the output has another size");
  }
  OpSource source{};
  switch (repack.layout) {
    case PackedLayout::kGptq:
      source = {repack.size_k / values, 4 * repack.size_n, tile_k / values};
      if (gathers) source.granule_rows = source.num_rows;
      break;
    case PackedLayout::kAwq:
      source = {repack.size_k, 4 * repack.size_n / values, tile_k};
      break;
    case PackedLayout::kNMajor:
      source = {repack.size_n, 4 * repack.size_k / values, tile_n};
      break;
  }
  source.granule_rows = std::min(source.granule_rows, source.num_rows);
  return std::make_unique<MarlinRepackOp>(std::move(repack), source, output);
}

}  // namespace weightlift
