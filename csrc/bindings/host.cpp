#include "bindings/host.h"

#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <string>

#include "staging/cuda_info.h"

namespace py = pybind11;

namespace weightlift {

void bind_host(py::module_& m) {
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
