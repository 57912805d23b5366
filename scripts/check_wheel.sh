#!/usr/bin/env bash
# Builds the wheel that users get, and checks that it holds the package and nothing else, needs no library that a bare
# system lacks, and works where it is the only thing installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
out=$PWD/build/wheel_check
rm -rf "$out"
mkdir -p "$out"
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$out" .
wheel=$(ls "$out"/*.whl)
"$python" -m zipfile -e "$wheel" "$out/unpacked"

foreign=$(cd "$out/unpacked" && find . -type f ! -path './weightlift/*' ! -path './weightlift-*.dist-info/*')
[[ -z $foreign ]] || { echo "files that do not belong into the wheel: $foreign"; exit 1; }
for file in py.typed _C.pyi __init__.py; do
  [[ -f $out/unpacked/weightlift/$file ]] || { echo "the wheel lacks weightlift/$file"; exit 1; }
done
module=$(ls "$out"/unpacked/weightlift/_C.*.so)
needed=$(LC_ALL=C readelf -d "$module" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort)
unwelcome=$(grep -vE '^(libstdc\+\+\.so\.6|libgcc_s\.so\.1|libm\.so\.6|libc\.so\.6|ld-linux-[a-z0-9_-]+\.so\.[0-9]+)$' <<<"$needed" || true)
[[ -z $unwelcome ]] || { echo "_C needs libraries that a bare system may lack: $unwelcome"; exit 1; }
# -S leaves out the import hook of the development install.
torch_home=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
(cd / && "$python" -S -c "
import sys
sys.path[:0] = ['$out/unpacked', '$torch_home']
import weightlift
assert weightlift.__file__.startswith('$out'), weightlift.__file__
print('imported weightlift', weightlift.__version__, 'from the wheel')
")
echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes, _C needs" $needed
