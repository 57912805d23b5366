#include "bindings/host.h"

#include <fcntl.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <pybind11/typing.h>

#include <cerrno>
#include <filesystem>
#include <string>

#include "measure/probe_uring.h"
#include "readers/residency.h"
#include "staging/cuda_info.h"
#include "transform/simd.h"
#include "util/unique_fd.h"

namespace py = pybind11;

namespace weightlift {

void bind_host(py::module_& m) {
  using namespace pybind11::literals;
  m.def(
      "probe_uring",
      [](int queue_depth, int64_t buffer_bytes, int num_buffers) -> py::typing::Dict<py::str, py::object> {
        UringProbe probe;
        {
          const py::gil_scoped_release release;
          probe = probe_uring(queue_depth, buffer_bytes, num_buffers);
        }
        py::dict result;
        result["refusal"] = probe.refusal;
        result["registered_buffers"] = probe.registered_buffers;
        result["error"] = probe.error;
        return result;
      },
      py::kw_only(), "queue_depth"_a, "buffer_bytes"_a, "num_buffers"_a,
      "Whether io_uring can be had, and staging registered with it, as csrc/measure/probe_uring.h says.");
  m.def(
      "residency_method",
      [](const std::filesystem::path& path) -> std::string {
        const py::gil_scoped_release release;
        const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
        if (!fd) {
          const py::gil_scoped_acquire acquire;
          PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
          throw py::error_already_set();
        }
        return std::string(Residency(fd.get()).method());
      },
      "path"_a,
      "By which system call it is told what of the file is in the page cache: cachestat, mincore or unknown.");
  m.def(
      "simd",
      [] {
        switch (simd()) {
          case Simd::kAvx512:
            return "AVX-512";
          case Simd::kAvx2:
            return "AVX2";
          default:
            return "baseline";
        }
      },
      "The vector instructions that ops run with on this machine.");
  m.def(
      "cuda_info",
      []() -> py::typing::Dict<py::str, py::object> {
        CudaInfo info;
        {
          const py::gil_scoped_release release;
          info = cuda_info();
        }
        py::list devices;
        for (const CudaDevice& device : info.devices) {
          py::dict entry;
          entry["name"] = device.name;
          entry["pci_bus_id"] = device.pci_bus_id;
          entry["compute_capability"] = py::make_tuple(device.major, device.minor);
          entry["memory_bytes"] = device.memory_bytes;
          devices.append(entry);
        }
        py::dict result;
        result["built"] = info.built;
        result["architectures"] = info.architectures;
        result["runtime_version"] = info.runtime_version;
        result["driver_version"] = info.driver_version;
        result["error"] = info.error;
        result["devices"] = devices;
        return result;
      },
      "Whether CUDA is part of this build, and what it finds here, as csrc/staging/cuda_info.h says.");
}

}  // namespace weightlift
