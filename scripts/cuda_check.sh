#!/usr/bin/env bash
# Compiles what host and GPU share as CUDA code, where there is an nvcc. Runs nothing on a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v nvcc >/dev/null; then
  echo "SKIPPED: there is no nvcc; whether the shared code compiles as CUDA code was not checked"
  exit 0
fi
mkdir -p build
nvcc -std=c++20 -Icsrc -arch=sm_80 -Werror all-warnings -c tests/native/shared_code.cu -o build/shared_code.o
echo "compiled as CUDA code: tests/native/shared_code.cu, by nvcc $(nvcc --version | sed -n 's/.*release \([^,]*\),.*/\1/p')"
