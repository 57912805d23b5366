// Memory as the kernels reach it: 16 bytes at a time where addresses allow, fewer where not.
//
// An access that is not aligned is an error on a GPU. How addresses are aligned is worked out at launch, for all
// accesses of it (alignment_of), and all threads branch alike. The host's versions check what they are told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "transform/cast.h"

// Before loops whose every turn is to have its own instructions, so that arrays that they index stay in registers; and
// before those that are to have them once.
#ifdef __CUDA_ARCH__
#define WEIGHTLIFT_UNROLL _Pragma("unroll")
#define WEIGHTLIFT_NO_UNROLL _Pragma("unroll 1")
#else
#define WEIGHTLIFT_UNROLL
#define WEIGHTLIFT_NO_UNROLL
#endif

namespace weightlift {

// The largest power of two up to 16 of which all are multiples.
inline int alignment_of(std::initializer_list<int64_t> numbers) {
  int64_t bits = 16;
  for (const int64_t number : numbers) bits |= number;
  return static_cast<int>(bits & -bits);
}
inline int64_t address_of(const void* memory) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory)); }

namespace internal {

template <typename Word>
WEIGHTLIFT_HOST_DEVICE Word load_word(const std::byte* from) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const Word*>(from);
#else
  if (address_of(from) % static_cast<int64_t>(sizeof(Word)) != 0) {
    std::fprintf(stderr, "a kernel reads %zu bytes at an address that is no multiple of it\n", sizeof(Word));
    std::abort();
  }
  Word word;
  std::memcpy(&word, from, sizeof(word));
  return word;
#endif
}

template <typename Word>
WEIGHTLIFT_HOST_DEVICE void store_word(std::byte* to, Word word) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<Word*>(to) = word;
#else
  if (address_of(to) % static_cast<int64_t>(sizeof(Word)) != 0) {
    std::fprintf(stderr, "a kernel writes %zu bytes at an address that is no multiple of it\n", sizeof(Word));
    std::abort();
  }
  std::memcpy(to, &word, sizeof(word));
#endif
}

struct alignas(8) Words2 {
  uint32_t words[2];
};
struct alignas(16) Words4 {
  uint32_t words[4];
};

}  // namespace internal

// 16 bytes from memory aligned to `alignment`, 1 to 16.
WEIGHTLIFT_HOST_DEVICE inline void load16(const std::byte* from, int alignment, uint32_t* words) {
  using namespace internal;
  if (alignment == 16) {
    const auto all = load_word<Words4>(from);
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 4; ++i) words[i] = all.words[i];
  } else if (alignment == 8) {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 2; ++i) {
      const auto half = load_word<Words2>(from + 8 * i);
      words[2 * i] = half.words[0];
      words[2 * i + 1] = half.words[1];
    }
  } else if (alignment == 4) {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 4; ++i) words[i] = load_word<uint32_t>(from + 4 * i);
  } else if (alignment == 2) {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 4; ++i) {
      words[i] = load_word<uint16_t>(from + 4 * i) | uint32_t{load_word<uint16_t>(from + 4 * i + 2)} << 16;
    }
  } else {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 4; ++i) {
      words[i] = 0;
      WEIGHTLIFT_UNROLL
      for (int byte = 0; byte < 4; ++byte) {
        words[i] |= uint32_t{load_word<uint8_t>(from + 4 * i + byte)} << (8 * byte);
      }
    }
  }
}

WEIGHTLIFT_HOST_DEVICE inline void load8(const std::byte* from, int alignment, uint32_t* words) {
  using namespace internal;
  if (alignment >= 8) {
    const auto both = load_word<Words2>(from);
    words[0] = both.words[0];
    words[1] = both.words[1];
  } else {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (alignment == 4) {
        words[i] = load_word<uint32_t>(from + 4 * i);
      } else {
        words[i] = 0;
        WEIGHTLIFT_UNROLL
        for (int byte = 0; byte < 4; ++byte) {
          words[i] |= uint32_t{load_word<uint8_t>(from + 4 * i + byte)} << (8 * byte);
        }
      }
    }
  }
}

WEIGHTLIFT_HOST_DEVICE inline void store8(std::byte* to, int alignment, const uint32_t* words) {
  using namespace internal;
  if (alignment >= 8) {
    store_word(to, Words2{{words[0], words[1]}});
  } else {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (alignment == 4) {
        store_word(to + 4 * i, words[i]);
      } else {
        WEIGHTLIFT_UNROLL
        for (int byte = 0; byte < 4; ++byte) {
          store_word(to + 4 * i + byte, static_cast<uint8_t>(words[i] >> (8 * byte)));
        }
      }
    }
  }
}

WEIGHTLIFT_HOST_DEVICE inline void store16(std::byte* to, int alignment, const uint32_t* words) {
  using namespace internal;
  if (alignment == 16) {
    store_word(to, Words4{{words[0], words[1], words[2], words[3]}});
  } else if (alignment == 8) {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 2; ++i) store_word(to + 8 * i, Words2{{words[2 * i], words[2 * i + 1]}});
  } else if (alignment == 4) {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 4; ++i) store_word(to + 4 * i, words[i]);
  } else if (alignment == 2) {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 8; ++i) store_word(to + 2 * i, static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))));
  } else {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 16; ++i) store_word(to + i, static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4))));
  }
}

// `bytes` of them, byte by byte: what is left over at the end of a row. The others read as zeros.
WEIGHTLIFT_HOST_DEVICE inline void load_some(const std::byte* from, int64_t bytes, uint32_t* words) {
  WEIGHTLIFT_UNROLL
  for (int i = 0; i < 4; ++i) {
    words[i] = 0;
    WEIGHTLIFT_UNROLL
    for (int byte = 0; byte < 4; ++byte) {
      if (4 * i + byte < bytes) words[i] |= uint32_t{internal::load_word<uint8_t>(from + 4 * i + byte)} << (8 * byte);
    }
  }
}

WEIGHTLIFT_HOST_DEVICE inline void store_some(std::byte* to, int64_t bytes, const uint32_t* words) {
  WEIGHTLIFT_UNROLL
  for (int i = 0; i < 16; ++i) {
    if (i < bytes) internal::store_word(to + i, static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4))));
  }
}

// Up to 4 * kWords bytes.
template <int kWords>
WEIGHTLIFT_HOST_DEVICE void load_up_to(const std::byte* from, int alignment, int64_t bytes, uint32_t (&words)[kWords]) {
  WEIGHTLIFT_UNROLL
  for (int i = 0; i < kWords; i += 4) {
    if (4 * i + 16 <= bytes) {
      load16(from + 4 * i, alignment, words + i);
    } else {
      load_some(from + 4 * i, bytes - 4 * i, words + i);
    }
  }
}

template <int kWords>
WEIGHTLIFT_HOST_DEVICE void store_up_to(std::byte* to, int alignment, int64_t bytes, const uint32_t (&words)[kWords]) {
  WEIGHTLIFT_UNROLL
  for (int i = 0; i < kWords; i += 4) {
    if (4 * i + 16 <= bytes) {
      store16(to + 4 * i, alignment, words + i);
    } else {
      store_some(to + 4 * i, bytes - 4 * i, words + i);
    }
  }
}

// An element of 1, 2, 4, 8 or 16 bytes.
WEIGHTLIFT_HOST_DEVICE inline void load_element(const std::byte* from, int bytes, int alignment, uint32_t* words) {
  using namespace internal;
  if (bytes == 16) {
    load16(from, alignment, words);
  } else if (bytes == 8) {
    load8(from, alignment, words);
  } else if (bytes > alignment) {
    load_some(from, bytes, words);
  } else {
    words[0] = bytes == 4   ? load_word<uint32_t>(from)
               : bytes == 2 ? uint32_t{load_word<uint16_t>(from)}
                            : uint32_t{load_word<uint8_t>(from)};
  }
}

WEIGHTLIFT_HOST_DEVICE inline void store_element(std::byte* to, int bytes, int alignment, const uint32_t* words) {
  using namespace internal;
  if (bytes == 16) {
    store16(to, alignment, words);
  } else if (bytes == 8) {
    store8(to, alignment, words);
  } else if (bytes > alignment) {
    store_some(to, bytes, words);
  } else if (bytes == 4) {
    store_word(to, words[0]);
  } else if (bytes == 2) {
    store_word(to, static_cast<uint16_t>(words[0]));
  } else {
    store_word(to, static_cast<uint8_t>(words[0]));
  }
}

}  // namespace weightlift
