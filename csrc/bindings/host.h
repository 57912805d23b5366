// What this host can do, for `weightlift doctor`.
#pragma once

#include <pybind11/pybind11.h>

namespace weightlift {

void bind_host(pybind11::module_& m);

}  // namespace weightlift
