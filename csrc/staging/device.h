// Device: a GPU, as the pipeline uses it. Work is given to streams, and is done later, in the order of its stream.
//
// Status: 0, or what describe() puts into words. A call that fails has given the stream nothing; work that fails later
// shows in wait(). Memory, transfers and ops that work refers to must live until an event behind it is over.
// Threads: pin(), and what gives work to a stream or waits, on threads of the core alone, which belong to the device
// from then on; one at a time for a stream. Everything else, the end too, on any thread, whose current device stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transform/cuda/copy_kernels.h"
#include "transform/op.h"

namespace weightlift {

using DeviceEvent = void*;  // a mark in a stream

class Device {
 public:
  Device() = default;
  virtual ~Device() = default;  // REQUIRES: no work in flight, nothing pinned
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual std::string describe(int status) const = 0;

  // Has host memory stay where it is, so that it is copied from at full speed and in the background; for every device
  // of the process. A copy must not cross the border of what was pinned by one call.
  virtual int pin(std::byte* memory, int64_t bytes) = 0;
  virtual void unpin(std::byte* memory) = 0;

  // Streams of its own, [0, num_streams()): none of them waits for another, or for the caller's, but by follow().
  virtual int num_streams() const = 0;
  // What they are given from here on starts when all is done that a stream of the caller's was given so far. Refused
  // where that records a graph.
  virtual int follow(DeviceStream caller) = 0;

  // Copies from host memory.
  virtual int copy_to_device(int stream, std::byte* dst, const std::byte* src, int64_t bytes) = 0;
  // Moves and converts elements, in as few launches as it takes.
  virtual int copy_elements(int stream, std::span<const DeviceCopy> copies) = 0;
  // As Op::run(), with source and outputs in device memory.
  virtual int run_op(int stream, const Op& op, const std::byte* src, int64_t src_row_stride, int64_t first_row,
                     int64_t num_rows) = 0;

  // An event behind everything that the stream has been given. To be given back by wait(). Where there can be none,
  // waits itself: when it fails, nothing of the stream is in flight.
  virtual int record(int stream, DeviceEvent* event) = 0;
  // Returns when the event is over: what failed before it, if anything did.
  virtual int wait(DeviceEvent event) = 0;
};

// The GPU with that index. Throws std::runtime_error where it can't be used, or the build has no CUDA.
std::shared_ptr<Device> make_cuda_device(int32_t index);

}  // namespace weightlift
