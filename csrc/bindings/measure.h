// How fast storage is, for `weightlift bench`.
#pragma once

#include <pybind11/pybind11.h>

namespace weightlift {

void bind_measure(pybind11::module_& m);

}  // namespace weightlift
