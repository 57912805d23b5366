// Device by the CUDA runtime.

#include <cuda_runtime_api.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "staging/device.h"
#include "transform/cuda/launch.h"

namespace weightlift {
namespace {

// While one stream copies, the kernels of others run; more than that, so that short ones leave no gap.
constexpr int kNumStreams = 4;

class CudaGpu final : public Device {
 public:
  explicit CudaGpu(int32_t index) : index_(index) {
    const int status = beside_the_caller([this] {
      for (cudaStream_t& stream : streams_) {
        // Non-blocking: not ordered with the default stream.
        if (auto error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return error;
      }
      return cudaEventCreateWithFlags(&followed_, cudaEventDisableTiming);
    });
    if (status == 0) return;
    const std::string problem = "GPU " + std::to_string(index_) + ": " + describe(status);
    destroy();
    throw std::runtime_error(problem);
  }
  ~CudaGpu() override { destroy(); }

  std::string describe(int status) const override { return describe_device_status(status); }

  int pin(std::byte* memory, int64_t bytes) override {
    cudaSetDevice(index_);
    return forgotten(cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterPortable));
  }
  void unpin(std::byte* memory) override {
    beside_the_caller([memory] { return cudaHostUnregister(memory); });
  }

  int num_streams() const override { return kNumStreams; }
  int follow(DeviceStream caller) override {
    return beside_the_caller([this, stream = static_cast<cudaStream_t>(caller)] {
      // Whoever waits for a stream that is being captured becomes part of the graph.
      auto capture = cudaStreamCaptureStatusNone;
      if (auto error = cudaStreamIsCapturing(stream, &capture)) return error;
      if (capture != cudaStreamCaptureStatusNone) return cudaErrorStreamCaptureUnsupported;
      if (auto error = cudaEventRecord(followed_, stream)) return error;
      for (cudaStream_t own : streams_) {
        if (auto error = cudaStreamWaitEvent(own, followed_, 0)) return error;
      }
      return cudaSuccess;
    });
  }

  int copy_to_device(int stream, std::byte* dst, const std::byte* src, int64_t bytes) override {
    cudaSetDevice(index_);
    return forgotten(cudaMemcpyAsync(dst, src, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, streams_[stream]));
  }
  int copy_elements(int stream, std::span<const DeviceCopy> copies) override {
    cudaSetDevice(index_);
    return launch_copies(copies, streams_[stream]);
  }
  int run_op(int stream, const Op& op, const std::byte* src, int64_t src_row_stride, int64_t first_row,
             int64_t num_rows) override {
    cudaSetDevice(index_);
    return op.launch(src, src_row_stride, first_row, num_rows, streams_[stream]);
  }

  int record(int stream, DeviceEvent* event) override {
    cudaSetDevice(index_);
    cudaEvent_t recorded = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (!events_.empty()) {
        recorded = events_.back();
        events_.pop_back();
      }
    }
    if (!recorded) {
      // Who waits sleeps, and leaves the processor to those who read.
      const auto flags = cudaEventDisableTiming | cudaEventBlockingSync;
      if (int status = forgotten(cudaEventCreateWithFlags(&recorded, flags))) {
        forgotten(cudaStreamSynchronize(streams_[stream]));
        return status;
      }
    }
    const int status = forgotten(cudaEventRecord(recorded, streams_[stream]));
    if (status == 0) {
      *event = recorded;
    } else {
      forgotten(cudaStreamSynchronize(streams_[stream]));
      give_back(recorded);
    }
    return status;
  }
  int wait(DeviceEvent event) override {
    cudaSetDevice(index_);
    const int status = forgotten(cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
    give_back(static_cast<cudaEvent_t>(event));
    return status;
  }

 private:
  // The runtime keeps the last error for whoever asks next, which may be torch.
  static int forgotten(cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();
    return static_cast<int>(error);
  }

  // Runs f with this device current, and the caller's left as it was. Setting that again could make a context on a GPU
  // that nobody uses, so that where another one is current, a thread of its own does it.
  template <typename Function>
  int beside_the_caller(Function f) const {
    int current = -1;
    if (cudaGetDevice(&current) == cudaSuccess && current == index_) return forgotten(f());
    int status = 0;
    std::thread([&] {
      status = forgotten(cudaSetDevice(index_));
      if (status == 0) status = forgotten(f());
    }).join();
    return status;
  }

  void give_back(cudaEvent_t event) {
    std::lock_guard lock(mutex_);
    events_.push_back(event);
  }

  void destroy() {
    beside_the_caller([this] {
      for (cudaEvent_t event : events_) cudaEventDestroy(event);
      if (followed_) cudaEventDestroy(followed_);
      for (cudaStream_t stream : streams_) {
        if (stream) cudaStreamDestroy(stream);
      }
      return cudaSuccess;
    });
  }

  const int32_t index_;
  cudaStream_t streams_[kNumStreams] = {};
  cudaEvent_t followed_ = nullptr;  // recorded again by each follow(): those who wait for it keep what they wait for
  std::mutex mutex_;
  std::vector<cudaEvent_t> events_;  // not in use
};

}  // namespace

std::shared_ptr<Device> make_cuda_device(int32_t index) { return std::make_shared<CudaGpu>(index); }

}  // namespace weightlift
