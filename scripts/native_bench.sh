#!/usr/bin/env bash
# Builds one of the native benchmarks and runs it.
#   scripts/native_bench.sh bench_storage|bench_ops [its arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
program=$1
shift
bin=$PWD/.venv/bin
build=build/bench_native

if ! echo '#include <benchmark/benchmark.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1; then
  echo "$program needs Google Benchmark (Debian: apt-get install libbenchmark-dev)"
  exit 1
fi
"$bin/cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DWEIGHTLIFT_BUILD_BENCHMARKS=ON -DWEIGHTLIFT_CUDA=OFF \
  >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
"$bin/ninja" -C "$build" --quiet "$program"
"$build/benchmarks/native/$program" "$@"
