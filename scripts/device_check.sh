#!/usr/bin/env bash
# Builds, tests and measures all that is for GPUs, on any host with one, from the sources and what the host has: without
# network, in less than 8 minutes. A part that fails or hangs costs the others nothing.
#   scripts/device_check.sh [OUT]     OUT: where log.txt, table.txt and results.json go (default: build/device)
# Ends with 0; 1: a part failed; 2: all passed, and a target was missed; 3: the host lacks something that building needs;
# 77: there is no GPU, and nothing was run.
# Variables: PYTHON (an interpreter that has torch, default python3), WEIGHTLIFT_TEST_GOLDEN (a folder with golden data;
# else looked for in shared/golden, ../shared/golden and tests/golden), DEVICE_CHECK_GIB (size of the checkpoint, default 4).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
gib=${DEVICE_CHECK_GIB:-4}
work=$PWD/build/device
mkdir -p "${1:-$work}" "$work"
out=$(cd "${1:-$work}" && pwd)
parts=$work/parts
log=$out/log.txt
rm -rf "$parts"
mkdir -p "$parts" "$work/disk"
: >"$log"

say() { printf 'device check: %s\n' "$*" | tee -a "$log"; }
row() { printf '%s\t%s\t%s\t%s\n' "$@" >>"$parts/parts.tsv"; } # of a part: name, outcome, seconds, detail

PARTS=(build tests loads 'fused loads' kernels memcheck racecheck)
# By when each has to end, in seconds: what the ones before it leave over, it may use.
declare -A ends_by=([build]=150 [tests]=230 [loads]=320 ['fused loads']=370 [kernels]=400 [memcheck]=435 [racecheck]=470)

finish() { # [STATUS]: of the script; else what the table says
  local status=0
  printf '\n'
  "$PYTHON" -m benchmarks.device_report "$parts" "$out" || status=$?
  printf '\n'
  say "took $SECONDS s; log.txt, table.txt and results.json are in $out"
  exit "${1:-$status}"
}
nothing_run() { # STATUS REASON
  say "$2: nothing was run"
  for name in "${PARTS[@]}"; do row "$name" "not run" 0 ""; done
  finish "$1"
}

# 1. What the host has.
has_module() { "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null; }
torch_finds_gpu() { "$PYTHON" -c 'import sys, torch; sys.exit(not (torch.version.cuda and torch.cuda.is_available()))' 2>/dev/null; }

command -v "$PYTHON" >/dev/null || { say "there is no $PYTHON: nothing was run"; exit 3; }
driver_finds_gpu=$(nvidia-smi -L 2>/dev/null || true)
if ! torch_finds_gpu; then
  [[ -n $driver_finds_gpu ]] || nothing_run 77 "there is no GPU"
  nothing_run 3 "there is a GPU, and no torch in $PYTHON that finds it"
fi
for folder in "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")" /usr/local/cuda/bin; do
  [[ -d $folder ]] && PATH=$PATH:$folder
done
missing=()
command -v "${CXX:-c++}" >/dev/null || missing+=("a C++ compiler (g++)")
command -v "${CUDACXX:-nvcc}" >/dev/null || missing+=("nvcc (CUDA 12.8 or later; on PATH, or named by CUDACXX)")
for tool in cmake ninja; do
  command -v "$tool" >/dev/null || has_module "$tool" || missing+=("$tool")
done
for module in pip pybind11 scikit_build_core tqdm; do
  has_module "$module" || missing+=("Python's $module")
done
"$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
  missing+=("Python's headers (python3-dev)")
for name in "${missing[@]}"; do say "missing: $name"; done
((${#missing[@]} == 0)) || nothing_run 3 "missing: $(printf '%s; ' "${missing[@]}")"
for module in pytest hypothesis numpy safetensors; do
  has_module "$module" || say "missing, which tests will fail for: Python's $module"
done
sanitizer=$(command -v compute-sanitizer || true)
say "${driver_finds_gpu:-a GPU that torch finds}"
say "$("${CUDACXX:-nvcc}" --version | grep release), $("$PYTHON" --version), $("$PYTHON" -c 'import torch; print("torch", torch.__version__)')"

# 2. A folder in memory, for a checkpoint and then some: where the machine's is small, one of our own.
free_gib() { df -Pk "$1" 2>/dev/null | awk 'NR == 2 { free = int($4 / 1048576) } END { print free + 0 }'; }
tmpfs=$(mktemp -d /dev/shm/weightlift.XXXXXX) || tmpfs=$(mktemp -d)
# shellcheck disable=SC2317  # called at the end
clean_up() {
  if mountpoint -q "$tmpfs"; then umount "$tmpfs"; fi
  rm -rf "$tmpfs" "$work/disk" "$work/pytest"
}
trap clean_up EXIT
wanted=$((gib + 4))
if (($(free_gib "$tmpfs") < wanted)); then
  mount -t tmpfs -o "size=${wanted}g" weightlift "$tmpfs" 2>>"$log" || true
fi
if (($(free_gib "$tmpfs") < wanted)); then
  gib=$(($(free_gib "$tmpfs") > 6 ? $(free_gib "$tmpfs") - 4 : 2))
  say "$tmpfs has $(free_gib "$tmpfs") GiB free: checkpoints of $gib GiB"
fi

golden="no golden data"
for folder in "${WEIGHTLIFT_TEST_GOLDEN:-}" shared/golden ../shared/golden tests/golden; do
  if [[ -n $folder && -d $folder ]]; then
    WEIGHTLIFT_TEST_GOLDEN=$(cd "$folder" && pwd)
    export WEIGHTLIFT_TEST_GOLDEN # which tests look at
    golden="golden data in $folder"
    break
  fi
done
export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# 3. The parts. run_part NAME PATTERN COMMAND...: the last line of the output that has the pattern is shown; there has to be
# one. False where the part did not pass.
run_part() {
  local name=$1 pattern=$2 start=$SECONDS status=0 limit=$((${ends_by[$1]} - SECONDS)) from outcome detail
  shift 2
  if ((limit < 5)); then
    row "$name" "not run: no time was left" 0 ""
    return 1
  fi
  say "$name, for $limit s at most"
  from=$(($(wc -l <"$log") + 1))
  timeout --kill-after=5 "$limit" "$@" >>"$log" 2>&1 </dev/null || status=$?
  detail=$(tail -n "+$from" "$log" | grep -aE "$pattern" | tail -n 1 | tr '\t' ' ' | cut -c 1-120) || true
  case $status in
    0) outcome=${detail:+passed} ;;
    124 | 137) outcome="STOPPED after $limit s" ;;
    *) outcome="FAILED with $status" ;;
  esac
  [[ $outcome == passed ]] || tail -n "+$from" "$log" | tail -n 40
  row "$name" "${outcome:=FAILED to do anything}" $((SECONDS - start)) "$detail"
  say "$name: $outcome after $((SECONDS - start)) s; $detail"
  [[ $outcome == passed ]]
}

# shellcheck disable=SC2317  # called by run_part
build() {
  rm -rf "$work/site"
  WEIGHTLIFT_CUDA=ON WEIGHTLIFT_CUDA_ARCHITECTURES=native "$PYTHON" -m pip --disable-pip-version-check install --verbose \
    --no-index --no-deps --no-build-isolation --target "$work/site" --config-settings=build-dir="$work/cmake" .
  "$PYTHON" -c '
from weightlift import _C
info = _C.cuda_info()
assert info["built"] and info["devices"], info
print("built for", info["architectures"])'
}
export -f build
export work PYTHON
if ! run_part build '^built for' bash -euo pipefail -c build; then
  for name in "${PARTS[@]:1}"; do row "$name" "not run: there is no build" 0 ""; done
  finish
fi

# Without plugins that the host may have; and a warning of its versions of other packages is no failure.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
tests=(-m pytest -m gpu -W default -p no:cacheprovider --basetemp="$work/pytest")
mapfile -t test_files < <(grep -l 'pytest\.mark\.gpu' tests/test_*.py)
say "tests with $golden"
run_part tests '[0-9]+ passed' "$PYTHON" "${tests[@]}" "${test_files[@]}" || true

bench=("$PYTHON" -m benchmarks.device --tmpfs "$tmpfs" --disk "$work/disk")
run_part loads '^gpu ' "${bench[@]}" --gib "$gib" --only "tmpfs,page cache,disk" --json "$parts/loads.json" || true
run_part "fused loads" '^gpu ' "${bench[@]}" --gib 2 --only fused,memory,synchronisation --json "$parts/fused.json" || true
run_part kernels 'CUDA [0-9]' "$PYTHON" -m benchmarks.device_ops --json "$parts/kernels.json" || true

small_load=("$PYTHON" "${tests[@]}" tests/test_devices.py
  -k "test_a_whole_load or test_views_casts or test_ops_are_carried_out or test_scratch_keeps")
if [[ -z $sanitizer ]]; then
  for name in memcheck racecheck; do row "$name" "left out: there is no compute-sanitizer" 0 ""; done
else
  # What calls of the runtime return is looked at by who calls; torch lets some of them fail.
  run_part memcheck 'ERROR SUMMARY' "$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 9 "${small_load[@]}" || true
  run_part racecheck 'RACECHECK SUMMARY' "$sanitizer" --tool racecheck --error-exitcode 9 "${small_load[@]}" || true
fi
finish
