#include "bindings/ops.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "transform/convert.h"
#include "transform/cuda/copy_kernels.h"
#include "transform/cuda/launch.h"
#include "transform/map_bytes.h"
#include "transform/marlin_repack.h"
#include "transform/op.h"
#include "transform/quantize.h"

namespace py = pybind11;

namespace weightlift {
namespace {

// address, number of rows, bytes of a row, bytes from one row to the next
using Output = std::tuple<int64_t, int64_t, int64_t, int64_t>;

OpOutput to_output(const Output& output) {
  const auto& [address, num_rows, row_bytes, row_stride] = output;
  return {reinterpret_cast<std::byte*>(address), num_rows, row_bytes, row_stride};
}

OpOutput to_output(const std::optional<Output>& output) { return output ? to_output(*output) : OpOutput{}; }

// What Python holds. Ops are immutable; pybind11 knows no holder of what is const.
std::shared_ptr<Op> to_python(std::unique_ptr<const Op> op) {
  return std::const_pointer_cast<Op>(std::shared_ptr<const Op>(std::move(op)));
}

template <typename Type>
Type named(const std::string& name, const std::vector<std::pair<const char*, Type>>& names) {
  for (const auto& [known, type] : names) {
    if (name == known) return type;
  }
  throw std::invalid_argument("unknown name: " + name);
}

ElementType to_source_type(const std::string& name) {
  return named<ElementType>(
      name,
      {{"float32", ElementType::kFloat32}, {"float16", ElementType::kFloat16}, {"bfloat16", ElementType::kBFloat16}});
}

Fp8 to_fp8(const std::string& name) {
  return named<Fp8>(name, {{"float8_e4m3fn", Fp8::kE4M3FN}, {"float8_e4m3fnuz", Fp8::kE4M3FNUZ}});
}

Quantize to_quantize(const std::string& src_type, const std::string& type, int64_t rows, int64_t columns,
                     int64_t block_rows, int64_t block_columns, bool divide, float limit, bool keep_nan) {
  Quantize quantize;
  quantize.src_type = to_source_type(src_type);
  quantize.type = named<QuantizedType>(type, {{"float8_e4m3fn", QuantizedType::kE4M3FN},
                                              {"float8_e4m3fnuz", QuantizedType::kE4M3FNUZ},
                                              {"int8", QuantizedType::kInt8}});
  quantize.rows = rows;
  quantize.columns = columns;
  quantize.block_rows = block_rows;
  quantize.block_columns = block_columns;
  quantize.scaling = divide ? Scaling::kDivide : Scaling::kMultiply;
  quantize.limit = limit;
  quantize.keep_nan = keep_nan;
  return quantize;
}

std::shared_ptr<Op> marlin_repack(const std::string& layout, int num_bits, bool is_a_8bit, int64_t size_k,
                                  int64_t size_n, int64_t padded_k, int64_t padded_n, std::vector<int32_t> perm,
                                  int64_t device_perm, const Output& output) {
  const auto packed = named<PackedLayout>(
      layout, {{"gptq", PackedLayout::kGptq}, {"awq", PackedLayout::kAwq}, {"nk", PackedLayout::kNMajor}});
  return to_python(make_marlin_repack({packed, num_bits, is_a_8bit, size_k, size_n, padded_k, padded_n, std::move(perm),
                                       reinterpret_cast<const int32_t*>(device_perm)},
                                      to_output(output)));
}

std::shared_ptr<Op> to_fnuz(bool keep_nan, const Output& output) {
  const OpOutput to = to_output(output);
  return to_python(make_byte_map({{to.num_rows, e4m3fn_to_e4m3fnuz_table(keep_nan)}}, to.row_bytes, to));
}

std::shared_ptr<Op> requantize(const std::string& format, const std::vector<std::pair<int64_t, float>>& parts,
                               float new_scale, float limit, bool through_fp16, const Output& output) {
  const OpOutput to = to_output(output);
  const Rounding rounding = through_fp16 ? Rounding::kThroughFp16 : Rounding::kExact;
  std::vector<ByteMapPart> maps;
  for (const auto& [end_row, scale] : parts) {
    maps.push_back({end_row, requantize_table(to_fp8(format), scale, new_scale, limit, rounding)});
  }
  return to_python(make_byte_map(maps, to.row_bytes, to));
}

std::shared_ptr<Op> requantize_at(const std::string& format, std::vector<int64_t> end_rows, int64_t scales, float unset,
                                  float limit, bool through_fp16, const Output& output) {
  const OpOutput to = to_output(output);
  const Rounding rounding = through_fp16 ? Rounding::kThroughFp16 : Rounding::kExact;
  return to_python(make_requantize({to_fp8(format), rounding, limit, unset}, std::move(end_rows),
                                   reinterpret_cast<const float*>(scales), to.row_bytes, to));
}

void check_launched(const char* name, int status) {
  if (status != 0) throw std::runtime_error(std::string(name) + ": " + describe_device_status(status));
}

void launch_copy(int src_type, int64_t src, const std::vector<int64_t>& src_strides, int dst_type, int64_t dst,
                 const std::vector<int64_t>& dst_strides, const std::vector<int64_t>& sizes, int64_t stream) {
  if (std::min(src_type, dst_type) < 0 || std::max(src_type, dst_type) >= kNumElementTypes ||
      !can_convert(static_cast<ElementType>(src_type), static_cast<ElementType>(dst_type))) {
    throw std::invalid_argument("no conversion between these types");
  }
  const auto from = static_cast<ElementType>(src_type);
  const auto to = static_cast<ElementType>(dst_type);
  if (src_strides.size() != sizes.size() || dst_strides.size() != sizes.size()) {
    throw std::invalid_argument("sizes and strides differ in length");
  }
  std::vector<Dim> dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] <= 0) throw std::invalid_argument("an empty copy is no transfer");
    dims.push_back({sizes[i], src_strides[i] * element_bytes(from), dst_strides[i] * element_bytes(to)});
  }
  const Transfer transfer = make_transfer(0, 0, from, 0, to, reinterpret_cast<std::byte*>(dst), std::move(dims));
  const DeviceCopy copy{&transfer, 0, transfer.num_elements(), reinterpret_cast<const std::byte*>(src), 0};
  check_launched("copy", launch_copies({&copy, 1}, reinterpret_cast<DeviceStream>(stream)));
}

}  // namespace

void bind_ops(py::module_& m) {
  using namespace py::literals;

  py::class_<Op, std::shared_ptr<Op>>(m, "Op", "A fused op, bound to its outputs. See csrc/transform/op.h.")
      .def_property_readonly("name", &Op::name)
      .def_property_readonly("num_rows", [](const Op& op) { return op.source().num_rows; })
      .def_property_readonly("row_bytes", [](const Op& op) { return op.source().row_bytes; })
      .def_property_readonly("granule_rows", [](const Op& op) { return op.source().granule_rows; })
      .def_property_readonly("needs_whole_source", &Op::needs_whole_source)
      .def(
          "run",
          [](const Op& op, int64_t address, int64_t row_stride, int num_threads) {
            if (row_stride < op.source().row_bytes) throw std::invalid_argument("the rows of the source overlap");
            py::gil_scoped_release release;
            run_op(op, reinterpret_cast<const std::byte*>(address), row_stride, num_threads);
          },
          "address"_a, "row_stride"_a, "num_threads"_a, "Carries out all of it, over rows in memory.")
      .def(
          "launch",
          [](const Op& op, int64_t address, int64_t row_stride, int64_t stream) {
            if (row_stride < op.source().row_bytes) throw std::invalid_argument("the rows of the source overlap");
            int status = 0;
            {
              const py::gil_scoped_release release;
              status = op.launch(reinterpret_cast<const std::byte*>(address), row_stride, 0, op.source().num_rows,
                                 reinterpret_cast<DeviceStream>(stream));
            }
            check_launched(op.name(), status);
          },
          "address"_a, "row_stride"_a, "stream"_a,
          "Queues all of it on a cudaStream_t of the current device, over rows in its memory.")
      .def(
          "hold", [](const Op&, const py::object&) {}, py::keep_alive<1, 2>(), "kept"_a,
          "Keeps a tensor that the op refers to alive, for as long as this object is.");

  m.def("launch_copy", &launch_copy, py::kw_only(), "src_type"_a, "src"_a, "src_strides"_a, "dst_type"_a, "dst"_a,
        "dst_strides"_a, "sizes"_a, "stream"_a, py::call_guard<py::gil_scoped_release>(),
        "Queues a strided copy in the memory of the current device, as loads into it do. Strides in elements.");
  // Outputs are (address, number of rows, bytes of a row, bytes from one row to the next).
  m.def("marlin_repack", &marlin_repack, py::kw_only(), "layout"_a, "num_bits"_a, "is_a_8bit"_a, "size_k"_a, "size_n"_a,
        "padded_k"_a, "padded_n"_a, "perm"_a, "device_perm"_a, "output"_a,
        "device_perm: the address of the same in the memory of a GPU, for launch(); or 0.");
  m.def("e4m3fn_to_e4m3fnuz", &to_fnuz, py::kw_only(), "keep_nan"_a, "output"_a);
  m.def("requantize_fp8", &requantize, py::kw_only(), "format"_a, "parts"_a, "new_scale"_a, "limit"_a, "through_fp16"_a,
        "output"_a, "parts: (end row, scale), ascending.");
  m.def("requantize_fp8_at", &requantize_at, py::kw_only(), "format"_a, "end_rows"_a, "scales"_a, "unset"_a, "limit"_a,
        "through_fp16"_a, "output"_a,
        "scales: the address of a float32 for each part, in the memory of the output. Their largest is the new scale.");
  m.def(
      "quantize",
      [](const std::string& src_type, const std::string& type, int64_t rows, int64_t columns, int64_t block_rows,
         int64_t block_columns, bool divide, float limit, bool keep_nan, float min_amax, float max_amax,
         float min_scale, bool power_of_two, bool e8m0_scales, const std::optional<Output>& weight,
         const std::optional<Output>& scales, int64_t device_amaxes) {
        return to_python(make_quantize(
            to_quantize(src_type, type, rows, columns, block_rows, block_columns, divide, limit, keep_nan),
            {limit, min_amax, min_scale, max_amax, power_of_two}, e8m0_scales, to_output(weight), to_output(scales),
            reinterpret_cast<float*>(device_amaxes)));
      },
      py::kw_only(), "src_type"_a, "type"_a, "rows"_a, "columns"_a, "block_rows"_a, "block_columns"_a, "divide"_a,
      "limit"_a, "keep_nan"_a, "min_amax"_a, "max_amax"_a, "min_scale"_a, "power_of_two"_a, "e8m0_scales"_a, "weight"_a,
      "scales"_a, "device_amaxes"_a,
      "device_amaxes: the address of a float32 for each block in the memory of a GPU, for launch() with large blocks; "
      "or 0.");
  m.def(
      "quantize_with",
      [](const std::string& src_type, const std::string& type, int64_t rows, int64_t columns, int64_t block_rows,
         int64_t block_columns, bool divide, float limit, bool keep_nan, std::vector<float> scales,
         const Output& weight) {
        return to_python(make_quantize_with(
            to_quantize(src_type, type, rows, columns, block_rows, block_columns, divide, limit, keep_nan),
            std::move(scales), to_output(weight)));
      },
      py::kw_only(), "src_type"_a, "type"_a, "rows"_a, "columns"_a, "block_rows"_a, "block_columns"_a, "divide"_a,
      "limit"_a, "keep_nan"_a, "scales"_a, "weight"_a);
  m.def(
      "quantize_with_scales_at",
      [](const std::string& src_type, const std::string& type, int64_t rows, int64_t columns, int64_t block_rows,
         int64_t block_columns, bool divide, float limit, bool keep_nan, int64_t scales, const Output& weight) {
        return to_python(make_quantize_with(
            to_quantize(src_type, type, rows, columns, block_rows, block_columns, divide, limit, keep_nan),
            reinterpret_cast<const float*>(scales), to_output(weight)));
      },
      py::kw_only(), "src_type"_a, "type"_a, "rows"_a, "columns"_a, "block_rows"_a, "block_columns"_a, "divide"_a,
      "limit"_a, "keep_nan"_a, "scales"_a, "weight"_a,
      "scales: the address of a float32 for each block, in the memory of the weight.");
  m.def(
      "amax",
      [](const std::string& src_type, int64_t rows, int64_t columns, int64_t amax) {
        return to_python(make_amax(to_source_type(src_type), rows, columns, reinterpret_cast<float*>(amax)));
      },
      py::kw_only(), "src_type"_a, "rows"_a, "columns"_a, "amax"_a,
      "amax: the address of a float32, which is raised to the largest finite magnitude.");
}

}  // namespace weightlift
