// Op: the contract of the fused operations, between those that compute (here) and those that plan and run them.
//
// A copy with a cast is a Transfer; everything else that happens to a tensor's bytes on their way to memory is an Op.
// An op is a function of *source rows*: row r of the source is the bytes [src + r * src_row_stride, + row_bytes). It
// says which rows have to arrive together (a granule), and it writes what they become to its outputs, wherever those
// lie. An op is bound to its outputs when it is made, as a Transfer is; the source is what run() is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace weightlift {

// A cudaStream_t; null: the default stream.
using DeviceStream = void*;

// What launching returns where there is no kernel, or no CUDA in this build: cudaErrorNotSupported.
inline constexpr int kDeviceNotSupported = 801;

// Memory that an op writes: `num_rows` rows of `row_bytes` bytes, `row_stride` bytes apart (it may be a part of a
// larger tensor, whose other bytes are never touched). All of it has been written when all granules have been run. No
// alignment beyond that of its elements.
struct OpOutput {
  std::byte* data;
  int64_t num_rows;
  int64_t row_bytes;
  int64_t row_stride;
};

// The rows that an op takes.
struct OpSource {
  int64_t num_rows;
  int64_t row_bytes;
  // Rows that have to arrive together: a part given to run() starts at a multiple of it, and ends at one or at
  // num_rows. Between 1 and num_rows; num_rows says that the op needs the whole tensor.
  int64_t granule_rows;
};

// Threads: an op is immutable; run() may be called for different granules by several threads at once, each granule
// exactly once, in any order. Memory: the outputs, and the arrays that a particular op's factory says that it refers
// to, must live until the last run() has returned; everything else was copied when the op was made. Failure: run() has
// none; what can be wrong with sizes and parameters is found when the op is made (std::invalid_argument), and each op
// states what becomes of values that have no right result.
class Op {
 public:
  virtual ~Op() = default;
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;

  virtual const char* name() const = 0;
  const OpSource& source() const { return source_; }
  const std::vector<OpOutput>& outputs() const { return outputs_; }
  bool needs_whole_source() const { return source_.granule_rows >= source_.num_rows; }

  // Carries out source rows [first_row, first_row + num_rows). `src` points at row `first_row`; it needs no alignment,
  // and no byte outside of the rows is read. `src_row_stride` >= row_bytes.
  virtual void run(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows) const = 0;

  // The same with the source and the outputs in the memory of the calling thread's current device, queued on a stream
  // of it: what is given must live until the stream has come that far. Arrays that the factory says that the op refers
  // to lie there too. Returns a status (transform/cuda/launch.h), never throws, waits for nothing.
  virtual int launch(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows,
                     DeviceStream stream) const;

 protected:
  Op(OpSource source, std::vector<OpOutput> outputs) : source_(source), outputs_(std::move(outputs)) {}

 private:
  const OpSource source_;
  const std::vector<OpOutput> outputs_;
};

// Runs all of an op over memory, on up to `num_threads` threads, the caller's included.
void run_op(const Op& op, const std::byte* src, int64_t src_row_stride, int num_threads);

}  // namespace weightlift
