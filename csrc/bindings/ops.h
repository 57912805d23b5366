// The fused ops for Python: the class Op, and functions that make each of them.
#pragma once

#include <pybind11/pybind11.h>

namespace weightlift {

void bind_ops(pybind11::module_& m);

}  // namespace weightlift
