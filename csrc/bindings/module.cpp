// weightlift._C: the core for Python. Arrays of numbers in, statistics out; nothing here decides anything.
//
// Memory is passed as addresses (torch's data_ptr()); who passes one keeps the memory alive, as the core's headers say.

#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <pybind11/typing.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/host.h"
#include "bindings/measure.h"
#include "bindings/ops.h"
#include "plan/geometry.h"
#include "plan/ledger.h"
#include "readers/make_reader.h"
#include "readers/residency.h"
#include "staging/device.h"
#include "staging/pipeline.h"
#include "staging/plan_files.h"
#include "staging/twin_device.h"
#include "transform/convert.h"
#include "util/unique_fd.h"

namespace fs = std::filesystem;  // a path in any encoding, where a std::string takes UTF-8 alone
namespace py = pybind11;

namespace weightlift {
namespace {

using Ints = py::typing::Tuple<py::int_, py::ellipsis>;
using Ranges = py::typing::List<py::typing::Tuple<py::int_, py::int_>>;
using Stats = py::typing::Dict<py::str, py::object>;
// kind, errno, file, offset, transfer id, detail
using FaultTuple = py::typing::Tuple<py::str, py::int_, py::int_, py::int_, py::int_, py::str>;

int64_t to_int(PyObject* number) {
  const int64_t value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// Element types cross the border as their position in the enumeration.
ElementType to_type(int code) {
  if (code < 0 || code >= kNumElementTypes) throw std::invalid_argument("unknown element type");
  return static_cast<ElementType>(code);
}

std::vector<RegionDim> to_region_dims(const Ints& sizes, const Ints& strides, int64_t item_bytes) {
  std::vector<RegionDim> dims(sizes.size());
  if (strides.size() != dims.size()) throw std::invalid_argument("sizes and strides differ in length");
  for (size_t i = 0; i < dims.size(); ++i) {
    dims[i] = {to_int(PyTuple_GET_ITEM(sizes.ptr(), i)), to_int(PyTuple_GET_ITEM(strides.ptr(), i)) * item_bytes};
  }
  return dims;
}

Region to_region(int64_t address, int64_t item_bytes, const Ints& sizes, const Ints& strides) {
  return Region(address, item_bytes, to_region_dims(sizes, strides, item_bytes));
}

Transfer to_transfer(int64_t id, int32_t file, int src_type, int64_t src_offset, const Ints& src_strides, int dst_type,
                     int64_t dst, const Ints& dst_strides, const Ints& sizes, int32_t device) {
  std::vector<Dim> dims(sizes.size());
  if (src_strides.size() != dims.size() || dst_strides.size() != dims.size()) {
    throw std::invalid_argument("sizes and strides differ in length");
  }
  const int64_t src_item = element_bytes(to_type(src_type));
  const int64_t dst_item = element_bytes(to_type(dst_type));
  for (size_t i = 0; i < dims.size(); ++i) {
    dims[i] = {to_int(PyTuple_GET_ITEM(sizes.ptr(), i)), to_int(PyTuple_GET_ITEM(src_strides.ptr(), i)) * src_item,
               to_int(PyTuple_GET_ITEM(dst_strides.ptr(), i)) * dst_item};
    if (dims[i].size <= 0) throw std::invalid_argument("an empty copy is no transfer");
  }
  Transfer transfer = make_transfer(id, file, to_type(src_type), src_offset, to_type(dst_type),
                                    reinterpret_cast<std::byte*>(dst), std::move(dims), device);
  if (!can_convert(transfer.src_type, transfer.dst_type))
    throw std::invalid_argument("no conversion between these types");
  return transfer;
}

Ranges to_pairs(const std::vector<ByteRange>& ranges) {
  Ranges pairs;
  for (const ByteRange& range : ranges) pairs.append(py::make_tuple(range.begin, range.end));
  return pairs;
}

// Of each tensor that other processes read too: file, begin, end.
using SharedTensors = std::optional<std::vector<std::tuple<int32_t, int64_t, int64_t>>>;

std::optional<SharedReads> to_shared(const SharedTensors& tensors) {
  if (!tensors) return std::nullopt;
  SharedReads shared;
  for (const auto& [file, begin, end] : *tensors) shared.tensors.push_back({file, {begin, end}});
  return shared;
}

const char* name_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::kNone:
      return "none";
    case FaultKind::kOpen:
      return "open";
    case FaultKind::kChanged:
      return "changed";
    case FaultKind::kEndOfFile:
      return "end_of_file";
    case FaultKind::kRead:
      return "read";
    case FaultKind::kTimeout:
      return "timeout";
    case FaultKind::kDevice:
      return "device";
    case FaultKind::kUnavailable:
      return "unavailable";
    case FaultKind::kCancelled:
      return "cancelled";
  }
  return "none";
}

Strategy to_strategy(const std::string& name) {
  if (name == "auto") return Strategy::kAuto;
  if (name == "direct") return Strategy::kDirect;
  if (name == "buffered") return Strategy::kBuffered;
  throw std::invalid_argument("unknown strategy: " + name);
}

Backend to_backend(const std::string& name) {
  if (name == "auto") return Backend::kAuto;
  if (name == "io_uring") return Backend::kUring;
  if (name == "pread") return Backend::kPread;
  throw std::invalid_argument("unknown backend: " + name);
}

PageCache to_page_cache(const std::string& name) {
  if (name == "keep") return PageCache::kKeep;
  if (name == "leave") return PageCache::kLeave;
  throw std::invalid_argument("unknown page_cache: " + name);
}

// Of 0 and more; what is more than 0 is not made 0.
std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(std::min(seconds, 1e9) * 1000)));
}

void require_chunk(int64_t chunk_bytes) {
  if (chunk_bytes < 65536 || chunk_bytes % 65536 != 0 || kMaxReadBytes < chunk_bytes) {
    throw std::invalid_argument("chunk_bytes must be a multiple of 64 KiB, at most 1 GiB");
  }
}

// A forked child has a copy of the pipeline without its threads: taking that down would wait for them for ever.
struct DeleteInOwnProcess {
  pid_t pid = getpid();
  void operator()(Pipeline* pipeline) const {
    if (getpid() == pid) delete pipeline;
  }
};
using PipelinePtr = std::unique_ptr<Pipeline, DeleteInOwnProcess>;

PipelinePtr make_pipeline(const std::string& strategy, const std::string& page_cache, const std::string& backend,
                          int queue_depth, int num_threads, int64_t chunk_bytes, int64_t staging_bytes,
                          int64_t merge_gap_bytes, bool advise_hugepages, int open_ahead, int files_at_once,
                          double io_timeout_seconds, int64_t device_staging_bytes, bool twin_devices) {
  require_chunk(chunk_bytes);
  if (staging_bytes < chunk_bytes) throw std::invalid_argument("staging_bytes must hold a chunk");
  PipelineOptions options;
  options.strategy = to_strategy(strategy);
  options.page_cache = to_page_cache(page_cache);
  options.chunk_bytes = chunk_bytes;
  options.staging_bytes = staging_bytes;
  options.merge_gap_bytes = merge_gap_bytes;
  options.num_workers = num_threads;
  options.advise_hugepages = advise_hugepages;
  options.open_ahead = open_ahead;
  options.files_at_once = files_at_once;
  options.io_timeout = to_milliseconds(io_timeout_seconds);
  const ReaderOptions reader_options{to_backend(backend), queue_depth, num_threads};
  options.make_reader = [reader_options](bool direct, std::string* fallback) {
    return make_reader(reader_options, direct, fallback);
  };
  options.devices.scratch_bytes = device_staging_bytes;
  options.devices.make_device = [twin_devices](int32_t index) -> std::shared_ptr<Device> {
    if (!twin_devices) return make_cuda_device(index);
    TwinOptions twin;
    twin.seed = static_cast<uint64_t>(index);
    return std::make_shared<TwinDevice>(twin);
  };
  return PipelinePtr(new Pipeline(std::move(options)));
}

// Asks Python what a DeviceCaller is asked, from inside of a call that has let go of the GIL.
DeviceCaller to_device_caller(const py::object& caller) {
  return {[&caller](int32_t device) {
            const py::gil_scoped_acquire acquire;
            std::vector<DeviceStream> streams;
            for (const auto handle : caller.attr("streams_of")(device).cast<std::vector<uintptr_t>>()) {
              streams.push_back(reinterpret_cast<DeviceStream>(handle));
            }
            return streams;
          },
          [&caller](int32_t device, int64_t bytes) {
            const py::gil_scoped_acquire acquire;
            return reinterpret_cast<std::byte*>(caller.attr("allocate")(device, bytes).cast<uintptr_t>());
          }};
}

py::typing::Optional<FaultTuple> to_tuple(const Fault& fault) {
  if (!fault) return py::none();
  return py::make_tuple(name_of(fault.kind), fault.error, fault.file, fault.offset, fault.transfer_id, fault.detail);
}

// Reads of a plan that bring bytes of some transfer: file, offset, length, whether it is direct, whether it is in
// place.
using PlannedReads = py::typing::List<py::typing::Tuple<py::int_, py::int_, py::int_, py::bool_, py::bool_>>;
using PlannedReadsById = py::typing::Dict<py::int_, PlannedReads>;

PlannedReadsById reads_by_id(const Plan& plan, const std::unordered_set<int64_t>& ids) {
  PlannedReadsById found;
  for (const Transfer& transfer : plan.transfers) {
    if (!ids.contains(transfer.id)) continue;
    const ByteRange source = source_bounds(transfer);
    PlannedReads reads;
    for (const Chunk& chunk : plan.chunks) {
      for (int32_t i = chunk.first_read; i < chunk.first_read + chunk.num_reads; ++i) {
        const Read& read = plan.reads[static_cast<size_t>(i)];
        if (read.file != transfer.file || read.needed_end <= source.begin || source.end <= read.offset) continue;
        reads.append(py::make_tuple(read.file, read.offset, read.length, chunk.direct, read.destination != nullptr));
      }
    }
    found[py::int_(transfer.id)] = reads;
  }
  return found;
}

Stats planned_stats_of(const ReadPlanner& planner) {
  const ReadStats& stats = planner.stats();
  py::list files;
  for (size_t i = 0; i < stats.files.size(); ++i) {
    const ReadStats::File& file = stats.files[i];
    const DirectIo& direct_io = planner.direct_io(static_cast<int32_t>(i));
    files.append(py::dict(py::arg("num_reads") = file.num_reads, py::arg("direct_bytes") = file.direct_bytes,
                          py::arg("buffered_bytes") = file.buffered_bytes, py::arg("cached_bytes") = file.cached_bytes,
                          py::arg("direct_usable") = direct_io.usable, py::arg("direct_proven") = direct_io.proven,
                          py::arg("offset_alignment") = direct_io.offset_alignment,
                          py::arg("direct_reason") = direct_io.reason));
  }
  const auto listed = [](const ReadStats::Sizes& sizes) {
    py::list found;
    for (const ReadStats::Size& size : sizes) found.append(py::make_tuple(size.num_reads, size.bytes));
    return found;
  };
  return py::dict(
      py::arg("num_transfers") = stats.num_transfers, py::arg("bytes_needed") = stats.bytes_needed,
      py::arg("in_place_bytes") = stats.in_place_bytes, py::arg("num_staged_chunks") = stats.num_staged_chunks,
      py::arg("files") = files, py::arg("direct_sizes") = listed(stats.direct_sizes),
      py::arg("buffered_sizes") = listed(stats.buffered_sizes), py::arg("cached_sizes") = listed(stats.cached_sizes));
}

Stats stats_of(const Pipeline& pipeline) {
  const PipelineStats stats = pipeline.stats();
  py::list fallbacks;  // which may name files
  for (const std::string& text : stats.fallbacks) {
    fallbacks.append(py::reinterpret_steal<py::str>(PyUnicode_DecodeFSDefaultAndSize(text.data(), std::ssize(text))));
  }
  py::list files;
  for (size_t i = 0; i < stats.files.size(); ++i) {
    const DirectIo direct_io = pipeline.direct_io(static_cast<int32_t>(i));
    files.append(py::dict(py::arg("direct_bytes") = stats.files[i].direct_bytes,
                          py::arg("buffered_bytes") = stats.files[i].buffered_bytes,
                          py::arg("cached_bytes") = stats.files[i].cached_bytes,
                          py::arg("direct_usable") = direct_io.usable, py::arg("direct_proven") = direct_io.proven,
                          py::arg("offset_alignment") = direct_io.offset_alignment,
                          py::arg("direct_reason") = direct_io.reason));
  }
  return py::dict(py::arg("bytes_needed") = stats.bytes_needed, py::arg("bytes_read") = stats.bytes_read,
                  py::arg("in_place_bytes") = stats.in_place_bytes, py::arg("device_bytes") = stats.device_bytes,
                  py::arg("device_scratch_bytes") = stats.device_scratch_bytes, py::arg("num_reads") = stats.num_reads,
                  py::arg("num_transfers") = stats.num_transfers, py::arg("num_whole_ops") = stats.num_whole_ops,
                  py::arg("whole_op_bytes") = stats.whole_op_bytes, py::arg("buffered_reader") = stats.readers[0],
                  py::arg("direct_reader") = stats.readers[1], py::arg("fallbacks") = fallbacks,
                  py::arg("files") = files);
}

int64_t resident_bytes(const fs::path& path, int64_t offset, int64_t length) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return -errno;
  return Residency(fd.get()).resident_bytes(offset, length);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "weightlift's core: see csrc/README.md";
  using namespace pybind11::literals;  // for "x"_a

  bind_ops(m);
  bind_measure(m);
  bind_host(m);

  py::class_<Batch>(m, "Batch", "Transfers with disjoint destinations, on their way to a Pipeline.")
      .def(py::init<>())
      .def_readonly("label", &Batch::label)
      .def_readonly("level", &Batch::level)
      .def(
          "add",
          [](Batch& batch, int64_t id, int32_t file, int src_type, int64_t src_offset, const Ints& src_strides,
             int dst_type, int64_t dst, const Ints& dst_strides, const Ints& sizes) {
            batch.transfers.push_back(
                to_transfer(id, file, src_type, src_offset, src_strides, dst_type, dst, dst_strides, sizes, kHost));
          },
          "id"_a, "file"_a, "src_type"_a, "src_offset"_a, "src_strides"_a, "dst_type"_a, "dst"_a, "dst_strides"_a,
          "sizes"_a, "Adds a transfer. Strides in elements, offset in bytes.")
      .def(
          "add_op",
          [](Batch& batch, int64_t id, int32_t file, int64_t src_offset, int64_t src_row_stride,
             std::shared_ptr<Op> op) {
            batch.transfers.push_back(make_op_transfer(id, file, src_offset, src_row_stride, std::move(op)));
          },
          "id"_a, "file"_a, "src_offset"_a, "src_row_stride"_a, "op"_a,
          "Adds an op, of rows of the file that lie src_row_stride bytes apart.")
      .def("ids",
           [](const Batch& batch) {
             std::vector<int64_t> ids;
             for (const Transfer& transfer : batch.transfers) ids.push_back(transfer.id);
             return ids;
           })
      .def(
          "take",
          [](Batch& batch, const std::unordered_set<int64_t>& ids) {
            Batch taken;
            const auto kept = std::stable_partition(batch.transfers.begin(), batch.transfers.end(),
                                                    [&](const Transfer& t) { return !ids.contains(t.id); });
            taken.transfers.assign(std::make_move_iterator(kept), std::make_move_iterator(batch.transfers.end()));
            batch.transfers.erase(kept, batch.transfers.end());
            return taken;
          },
          "ids"_a, "Moves the transfers with these ids, as far as they are here, into a batch of their own.")
      .def("__len__", [](const Batch& batch) { return batch.transfers.size(); });

  py::class_<Ledger>(m, "Ledger", "Recorded transfers that have not landed, and the order they must keep.")
      .def(py::init<>())
      .def(
          "record",
          [](Ledger& ledger, int64_t id, int32_t file, int src_type, int64_t src_offset, const Ints& src_strides,
             int dst_type, int64_t dst, const Ints& dst_strides, const Ints& sizes, int32_t device) -> int64_t {
            Transfer transfer =
                to_transfer(id, file, src_type, src_offset, src_strides, dst_type, dst, dst_strides, sizes, device);
            if (!source_is_nested(transfer) || !destination_is_nested(transfer)) return -1;
            ledger.add(std::move(transfer));
            return ledger.waiting_bytes();
          },
          "id"_a, "file"_a, "src_type"_a, "src_offset"_a, "src_strides"_a, "dst_type"_a, "dst"_a, "dst_strides"_a,
          "sizes"_a, "device"_a = kHost,
          "Records a transfer; returns how many bytes are waiting now. -1, and nothing is recorded, when elements "
          "overlap on either side. Strides in elements, offset in bytes. device: the index of the GPU that dst is on.")
      .def(
          "record_op",
          [](Ledger& ledger, int64_t id, int32_t file, int64_t src_offset, int64_t src_row_stride,
             std::shared_ptr<Op> op, int32_t device) {
            ledger.add(make_op_transfer(id, file, src_offset, src_row_stride, std::move(op), device));
            return ledger.waiting_bytes();
          },
          "id"_a, "file"_a, "src_offset"_a, "src_row_stride"_a, "op"_a, "device"_a = kHost,
          "Records an op, of rows of the file that lie src_row_stride bytes apart; returns how many bytes are waiting.")
      .def("track_writes", &Ledger::track_writes, "Remembers writes from here on, for coverage().")
      .def(
          "add_write",
          [](Ledger& ledger, int64_t address, int64_t item_bytes, const Ints& sizes, const Ints& strides) {
            ledger.add_write(to_region(address, item_bytes, sizes, strides));
          },
          "address"_a, "item_bytes"_a, "sizes"_a, "strides"_a, "Notes a write by other means. strides in elements.")
      .def(
          "needed_for",
          [](const Ledger& ledger, int64_t address, int64_t item_bytes, const Ints& sizes, const Ints& strides,
             bool overwrites) { return ledger.needed_for(to_region(address, item_bytes, sizes, strides), overwrites); },
          "address"_a, "item_bytes"_a, "sizes"_a, "strides"_a, py::kw_only(), "overwrites"_a = false,
          "Ids of the pending transfers that must land before the region may be looked at, or replaced unseen.")
      .def(
          "drop_inside",
          [](Ledger& ledger, int64_t address, int64_t item_bytes, const Ints& sizes, const Ints& strides) {
            return ledger.drop_inside(to_region(address, item_bytes, sizes, strides));
          },
          "address"_a, "item_bytes"_a, "sizes"_a, "strides"_a, "Drops waiting transfers that the region covers.")
      .def("start", py::overload_cast<>(&Ledger::start), "All waiting transfers, as batches of ascending level.")
      .def("start_only", py::overload_cast<const std::vector<int64_t>&>(&Ledger::start), "ids"_a,
           "Those of the waiting transfers, as batches of ascending level.")
      .def("batches_of", &Ledger::batches_of, "ids"_a)
      .def("landed", &Ledger::landed, "label"_a)
      .def(
          "coverage",
          [](const Ledger& ledger, int64_t address, int64_t num_bytes) {
            const Ledger::Coverage coverage = ledger.coverage({address, address + num_bytes});
            return std::pair(to_pairs(coverage.gaps), to_pairs(coverage.doubles));
          },
          "address"_a, "num_bytes"_a, "Byte ranges that nobody wrote, and that several transfers wrote.")
      .def_property_readonly("has_pending", &Ledger::has_pending)
      .def("pending_ids", &Ledger::pending_ids)
      .def_property_readonly("num_dropped", &Ledger::num_dropped,
                             "Recorded, and overwritten before they were started.");

  py::class_<OpenedFile>(m, "OpenedFile", "A file, open for the ways it is read in. See csrc/readers/source_file.h.")
      .def(py::init([](const fs::path& path) { return open_both_ways(path.string()); }), "path"_a,
           py::call_guard<py::gil_scoped_release>());

  // Its end waits for reads in flight: not with the GIL held.
  py::class_<Pipeline, PipelinePtr>(m, "Pipeline",
                                    "Runs batches of transfers: reads, copies, converts. See csrc/staging/pipeline.h.",
                                    py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_pipeline), py::kw_only(), "strategy"_a, "page_cache"_a, "backend"_a, "queue_depth"_a,
           "num_threads"_a, "chunk_bytes"_a, "staging_bytes"_a, "merge_gap_bytes"_a, "advise_hugepages"_a,
           "open_ahead"_a, "files_at_once"_a, "io_timeout_seconds"_a, "device_staging_bytes"_a,
           "twin_devices"_a = false, "twin_devices: for tests; see csrc/staging/twin_device.h.")
      .def(
          "add_file",
          [](Pipeline& pipeline, const fs::path& path, int64_t size, uint64_t device, uint64_t inode, int64_t mtime_ns,
             const py::typing::Optional<OpenedFile>& opened) {
            return pipeline.add_file(path.string(), {size, device, inode, mtime_ns},
                                     opened.is_none() ? OpenedFile{} : std::move(opened.cast<OpenedFile&>()));
          },
          "path"_a, "size"_a, "device"_a, "inode"_a, "mtime_ns"_a, "opened"_a = py::none(),
          "Returns the file's index. `opened`, of that path, is empty afterwards.")
      .def(
          "submit",
          [](Pipeline& pipeline, Batch& batch, bool barrier, bool urgent, const SharedTensors& shared,
             const py::object& device_caller) {
            const auto order =
                urgent ? Pipeline::Order::kUrgent : (barrier ? Pipeline::Order::kBarrier : Pipeline::Order::kAppend);
            const DeviceCaller caller = to_device_caller(device_caller);
            py::gil_scoped_release release;
            return pipeline.submit(std::move(batch.transfers), order, caller, to_shared(shared));
          },
          "batch"_a, py::kw_only(), "barrier"_a = false, "urgent"_a = false, "shared"_a = py::none(),
          "device_caller"_a = py::none(),
          "Starts a batch, which is empty afterwards; returns the segment's id. `shared`, where other processes read "
          "along: tensors that they read too, if all of their bytes are needed here: (file, begin, end). "
          "`device_caller` is asked for streams_of(device), handles, and allocate(device, num_bytes), an address, "
          "where "
          "transfers go to GPUs.")
      .def(
          "wait",
          [](Pipeline& pipeline, int64_t segment, double seconds) {
            py::gil_scoped_release release;
            return pipeline.wait(segment, to_milliseconds(seconds));
          },
          "segment"_a, "seconds"_a, "True when the segment has landed, or the pipeline has a fault.")
      .def("take_landed", &Pipeline::take_landed)
      .def(
          "fault", [](const Pipeline& pipeline) { return to_tuple(pipeline.fault()); },
          "None, or (kind, errno, file, offset, transfer id, detail).")
      .def("cancel", &Pipeline::cancel)
      .def(
          "stop",
          [](Pipeline& pipeline, double seconds) {
            py::gil_scoped_release release;
            return pipeline.stop(to_milliseconds(seconds));
          },
          "seconds"_a,
          "Cancels, and waits for reads in flight. True: no memory is written to any more. False: time ran out.")
      .def(
          "destinations_in_flight",
          [](const Pipeline& pipeline) -> py::typing::Optional<Ranges> {
            const auto destinations = pipeline.destinations_in_flight();
            if (!destinations) return py::none();
            return to_pairs(*destinations);
          },
          "Memory, from address to address, that is not staging and that reads in flight may yet write to, after "
          "stop(). None: all destinations.")
      .def_property_readonly("bytes_landed", &Pipeline::bytes_landed)
      .def("stats", &stats_of);

  py::class_<ReadPlanner>(m, "ReadPlanner",
                          "Plans batches of transfers as a Pipeline would, and reads nothing. See "
                          "csrc/staging/plan_files.h.")
      .def(py::init(
               [](const std::string& strategy, int64_t chunk_bytes, int64_t merge_gap_bytes, bool advise_hugepages) {
                 require_chunk(chunk_bytes);
                 return std::make_unique<ReadPlanner>(
                     FilePlanOptions{to_strategy(strategy), chunk_bytes, merge_gap_bytes, advise_hugepages});
               }),
           py::kw_only(), "strategy"_a, "chunk_bytes"_a, "merge_gap_bytes"_a, "advise_hugepages"_a)
      .def(
          "add_file",
          [](ReadPlanner& planner, const fs::path& path, int64_t size, uint64_t device, uint64_t inode,
             int64_t mtime_ns) { return planner.add_file(path.string(), {size, device, inode, mtime_ns}); },
          "path"_a, "size"_a, "device"_a, "inode"_a, "mtime_ns"_a)
      .def(
          "plan",
          [](ReadPlanner& planner, const Batch& batch, const std::unordered_set<int64_t>& ids,
             const SharedTensors& shared) -> py::typing::Tuple<py::typing::Optional<FaultTuple>, PlannedReadsById> {
            Plan plan;
            Fault fault;
            {
              py::gil_scoped_release release;
              fault = planner.plan(batch.transfers, &plan, to_shared(shared));
            }
            return py::make_tuple(to_tuple(fault), reads_by_id(plan, ids));
          },
          "batch"_a, "ids"_a, "shared"_a = py::none(),
          "None, or the fault as of a Pipeline; and the reads that bring these transfers: (file, offset, length, "
          "whether it is direct, whether it is in place).")
      .def("stats", &planned_stats_of,
           "Of all plans. `sizes` are numbers and bytes of reads of 2^i bytes and more, and fewer than 2^(i+1).");

  m.def(
      "can_convert", [](int src_type, int dst_type) { return can_convert(to_type(src_type), to_type(dst_type)); },
      "src_type"_a, "dst_type"_a, "Whether a transfer may convert elements of one type into the other.");
  m.def("resident_bytes", &resident_bytes, "path"_a, "offset"_a, "length"_a,
        "Bytes of the range that are in the page cache, or -errno.");
}

}  // namespace weightlift
