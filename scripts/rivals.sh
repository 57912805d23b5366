#!/usr/bin/env bash
# Compares weightlift with other loaders, in a virtual environment of its own: .venv-rivals (about 1.3 GB; made once).
#   scripts/rivals.sh [arguments of benchmarks/compare.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}
# The versions that the figures in benchmarks/README.md were measured with.
rivals=(fastsafetensors==0.5.0 runai-model-streamer==0.17.1 tensorizer==2.12.1 safetensors-streaming==0.1.1)
venv=.venv-rivals
export PIP_DISABLE_PIP_VERSION_CHECK=1
export WEIGHTLIFT_CUDA=OFF  # all load into memory of the CPU

say() { printf 'rivals: %s\n' "$*"; }
pip() { "$venv/bin/python" -m pip "$@"; }

key="$TORCH ${rivals[*]}"
if [[ ! -f $venv/.setup || $(<"$venv/.setup") != "$key" ]]; then
  say "making $venv"
  rm -rf "$venv"
  "$PYTHON" -m venv "$venv"
  pip install -qq "$TORCH" numpy "safetensors>=0.8" matplotlib tqdm
  for rival in "${rivals[@]}"; do  # torch is named again, so that none of them moves it
    pip install -qq "$TORCH" "$rival" || say "$rival can't be installed here; the comparison goes on without it"
  done
  printf '%s' "$key" >"$venv/.setup"
fi

# A wheel, as users install it.
say "building and installing the wheel"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
pip wheel -qq --no-deps -w "$wheels" .
pip install -qq --no-deps --force-reinstall "$wheels"/*.whl
"$venv/bin/python" -m benchmarks.compare "$@"
