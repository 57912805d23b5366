#!/usr/bin/env bash
# Fuzzes plans (C++, libFuzzer) and headers (Python), each for a while. What is found is written to the corpus in
# tests/fuzz, where the tests replay it from then on.
#   scripts/fuzz.sh [seconds of each target, default 60]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
bin=$PWD/.venv/bin
build=build/fuzz

fuzzer_of() { echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
  "$1" -fsanitize=fuzzer -x c++ - -o /dev/null 2>/dev/null; }
compiler=
for candidate in clang++ clang++-{22..16}; do
  if command -v "$candidate" >/dev/null && fuzzer_of "$candidate"; then compiler=$candidate && break; fi
done
if [[ -z $compiler ]]; then
  echo "SKIPPED: plans are not fuzzed: no clang++ with libFuzzer (Debian: apt-get install clang-19 libclang-rt-19-dev)"
else
  "$bin/cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DCMAKE_CXX_COMPILER="$compiler" \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DWEIGHTLIFT_SANITIZE=address,undefined -DWEIGHTLIFT_BUILD_FUZZERS=ON -DWEIGHTLIFT_CUDA=OFF \
    >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
  "$bin/ninja" -C "$build" --quiet
  mkdir -p "$build/corpus/plan"
  # New inputs stay in the build folder; `-merge=1 tests/fuzz/corpus/plan build/fuzz/corpus/plan` takes over what counts.
  "$build/tests/fuzz/fuzz_plan" -max_total_time="$seconds" -max_len=400 -len_control=0 -print_final_stats=1 \
    -artifact_prefix=tests/fuzz/corpus/plan/ "$build/corpus/plan" tests/fuzz/corpus/plan
fi
"$bin/python" tests/fuzz/fuzz_headers.py --seconds "$seconds"
