#!/usr/bin/env bash
# Checks the wheel that scripts/wheel.sh has made: that it holds the package and nothing else, needs no library that a bare
# system lacks, none of a GPU's among them, and works where it is installed beside torch alone, away from the sources.
#   TORCH=torch==2.9.1 scripts/check_wheel.sh     another torch
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(ls "$PWD"/dist/*.whl)
bare=$(mktemp -d)
trap 'rm -rf "$bare"' EXIT
.venv/bin/python -m zipfile -e "$wheel" "$bare/unpacked"

foreign=$(cd "$bare/unpacked" && find . -type f ! -path './weightlift/*' ! -path './weightlift-*.dist-info/*')
[[ -z $foreign ]] || { echo "files that do not belong into the wheel: $foreign"; exit 1; }
for file in py.typed _C.pyi __init__.py; do
  [[ -f $bare/unpacked/weightlift/$file ]] || { echo "the wheel lacks weightlift/$file"; exit 1; }
done
module=$(ls "$bare"/unpacked/weightlift/_C.*.so)
needed=$(LC_ALL=C readelf -d "$module" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort)
unwelcome=$(grep -vE '^(libstdc\+\+\.so\.6|libgcc_s\.so\.1|libm\.so\.6|libc\.so\.6|ld-linux-[a-z0-9_-]+\.so\.[0-9]+)$' <<<"$needed" || true)
[[ -z $unwelcome ]] || { echo "_C needs libraries that a bare system may lack: $unwelcome"; exit 1; }

.venv/bin/python -m venv "$bare/venv"
"$bare/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel" "${TORCH:-torch==2.13.0}"
cd "$bare"
# Nothing but what the wheel asks for is there: torch misses numpy, and says so.
venv/bin/python -W "ignore:Failed to initialize NumPy:UserWarning" - <<'PYTHON'
import json
import re
import struct
from pathlib import Path

import torch

import weightlift

loaded = re.findall(r"lib(?:cuda|cudart)\.so\S*", Path("/proc/self/maps").read_text())
assert torch.version.cuda or not loaded, f"importing weightlift loads {set(loaded)}"

data = torch.randn(1000, 300)
header = json.dumps({"w": {"dtype": "F32", "shape": [1000, 300], "data_offsets": [0, data.nbytes]}}).encode()
raw = bytes(data.untyped_storage())
Path("model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + raw)
model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(1000, 300))})
report = weightlift.fast_load(model, "model.safetensors")
assert torch.equal(model["w"], data)
folder = Path(weightlift.__file__).parent
assert folder.is_relative_to(Path.cwd()), folder
print(f"weightlift {weightlift.__version__}, installed: {report.files[0].reader} read {report.bytes_read} bytes")
PYTHON
status=0
venv/bin/weightlift doctor --json . >doctor.json || status=$?
((status == 0)) || { echo "weightlift doctor ended with $status"; cat doctor.json; exit 1; }
venv/bin/python - <<'PYTHON'
import json

findings = {(found["group"], found["subject"]): found for found in json.load(open("doctor.json"))["findings"]}
for key in (("host", "io_uring"), ("CUDA", "build"), ("CUDA", "driver")):
    print(f"doctor: {' '.join(key)}: {findings[key]['status']}: {findings[key]['summary']}")
PYTHON
echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes, _C $(stat -c %s "$module"), needs" $needed
