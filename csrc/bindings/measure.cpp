#include "bindings/measure.h"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <pybind11/typing.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

#include "measure/measure_reads.h"
#include "readers/probe.h"

namespace py = pybind11;

namespace weightlift {
namespace {

MeasuredReader to_reader(const std::string& name) {
  if (name == "io_uring") return MeasuredReader::kUring;
  if (name == "pread") return MeasuredReader::kPread;
  if (name == "reference") return MeasuredReader::kReference;
  throw std::invalid_argument("unknown reader " + name);
}

// Runs the action on the file without the GIL; a call that failed becomes an OSError with its errno.
template <typename Action>
auto run(const std::filesystem::path& path, const Action& action) {
  try {
    const py::gil_scoped_release release;
    return action();
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
    throw py::error_already_set();
  }
}

}  // namespace

void bind_measure(py::module_& m) {
  using namespace pybind11::literals;
  m.def(
      "measure_reads",
      [](const std::filesystem::path& path, const std::string& reader, bool direct, int64_t chunk_bytes,
         int queue_depth, bool random, bool huge_pages, int64_t max_bytes,
         double max_seconds) -> py::typing::Dict<py::str, py::object> {
        const MeasureOptions options{to_reader(reader), direct,    chunk_bytes, queue_depth, random,
                                     huge_pages,        max_bytes, max_seconds};
        const ReadFigures figures = run(path, [&] { return measure_reads(path, options); });
        py::dict result;
        result["bytes"] = figures.bytes;
        result["seconds"] = figures.seconds;
        result["cpu_seconds"] = figures.cpu_seconds;
        result["num_reads"] = figures.latencies.size();
        result["registered_buffers"] = figures.registered_buffers;
        py::dict latency;
        latency["p50"] = figures.latency(0.5);
        latency["p90"] = figures.latency(0.9);
        latency["p99"] = figures.latency(0.99);
        latency["max"] = figures.latency(1);
        result["latency"] = latency;
        return result;
      },
      "path"_a, py::kw_only(), "reader"_a, "direct"_a, "chunk_bytes"_a, "queue_depth"_a, "random"_a = false,
      "huge_pages"_a, "max_bytes"_a, "max_seconds"_a,
      "Reads a file once, as csrc/measure/measure_reads.h says. Times in seconds.");
  m.def(
      "make_cold",
      [](const std::filesystem::path& path, int64_t bytes) {
        return run(path, [&] { return make_cold(path, bytes); });
      },
      "path"_a, "bytes"_a,
      "Takes the start of a file out of the page cache; returns how many of those bytes are left there, or -errno.");
  m.def(
      "make_warm",
      [](const std::filesystem::path& path, int64_t bytes) {
        return run(path, [&] { return make_warm(path, bytes); });
      },
      "path"_a, "bytes"_a,
      "Reads the start of a file into the page cache; returns how many of those bytes are there, or -errno.");
  m.def(
      "probe_direct",
      [](const std::filesystem::path& path) -> py::typing::Dict<py::str, py::object> {
        const DirectIo direct_io = run(path, [&] { return probe_direct(path.c_str()); });
        py::dict result;
        result["usable"] = direct_io.usable;
        result["proven"] = direct_io.proven;
        result["memory_alignment"] = direct_io.memory_alignment;
        result["offset_alignment"] = direct_io.offset_alignment;
        result["told"] = direct_io.told;
        result["reason"] = direct_io.reason;
        return result;
      },
      "path"_a, "Whether the file can be read past the page cache, as csrc/readers/probe.h says.");
}

}  // namespace weightlift
