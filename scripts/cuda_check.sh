#!/usr/bin/env bash
# Compiles all that is for GPUs, for those that the wheel is for, with warnings as errors, where there is an nvcc; shows what
# registers the kernels take, and which of them spill. Runs nothing on a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/cuda
bin=$PWD/.venv/bin
nvcc=${CUDACXX:-nvcc}
if ! command -v "$nvcc" >/dev/null; then
  echo "SKIPPED: there is no nvcc; whether what is for GPUs compiles was not checked"
  exit 0
fi
mkdir -p build
"$bin/cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DWEIGHTLIFT_CUDA=ON -DWEIGHTLIFT_WERROR=ON \
  -DWEIGHTLIFT_CUDA_ARCHITECTURES= -DCMAKE_CUDA_FLAGS=-Xptxas=-v >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
find "$build" -name '*.cu.o' -delete  # what was compiled before would not be told of again
"$bin/ninja" -C "$build" weightlift_core >"$build.log" 2>&1 ||
  { grep -v "^ptxas info\|bytes stack frame" "$build.log"; exit 1; }

# ptxas: "Compiling entry function 'NAME' for 'sm_80'", then "... bytes spill stores, ...", then "Used 32 registers, ...".
awk -v q="'" '
  /Compiling entry function/ { split($0, part, q); kernel = part[2]; gpu = part[4] }
  /bytes spill stores/ { for (i = 2; i <= NF; ++i) if ($i == "bytes" && $(i + 1) == "spill") spilt += $(i - 1) }
  /Used [0-9]+ registers/ {
    match($0, /Used [0-9]+/); used = substr($0, RSTART + 5, RLENGTH - 5) + 0
    ++kernels[gpu]
    if (used > most[gpu]) most[gpu] = used
    if (spilt) { ++spilling[gpu]; print "  spills " spilt " bytes on " gpu ": " kernel | "c++filt" }
    spilt = 0
  }
  END {
    close("c++filt")
    for (gpu in kernels)
      printf "%s: %d kernels, at most %d registers, %d spill\n", gpu, kernels[gpu], most[gpu], spilling[gpu] | "sort"
  }' "$build.log"
echo "compiled for sm_80, sm_90, sm_100 and PTX by nvcc $("$nvcc" --version | sed -n 's/.*release \([^,]*\),.*/\1/p')"
