#!/usr/bin/env bash
# Builds the core with its native tests, without Python, and runs them.
#   scripts/native_tests.sh BUILD_FOLDER [cmake options]
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
shift
bin=$PWD/.venv/bin

if ! echo '#include <doctest/doctest.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1; then
  echo "SKIPPED: native tests in $build: doctest is not installed (Debian: apt-get install doctest-dev)"
  exit 0
fi
echo "native tests in $build: $*"
"$bin/cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" \
  -DWEIGHTLIFT_BUILD_TESTS=ON -DWEIGHTLIFT_WERROR=ON -DWEIGHTLIFT_CUDA=OFF "$@" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
"$bin/ninja" -C "$build" --quiet
"$bin/ctest" --test-dir "$build" --output-on-failure
