"""The check on a GPU host: its table, from figures that are made up; and its script, on a host that is made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from benchmarks import device, device_report
from benchmarks.device_report import FIGURES, NOTHING_RUN, PASSED, Figure, Part, measured

FUSED = "fused load, of the plain one's time: "
KERNEL = "kernel, of a copy within the GPU: "


def write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document))


def verdicts(folder: Path) -> dict[str, str]:
    return {figure.name: figure.verdict for figure in device_report.figures_of(folder)}


# ---- figures and their table


def test_what_was_not_measured_is_not_run(tmp_path: Path) -> None:
    figures = device_report.figures_of(tmp_path)
    assert figures == list(FIGURES)
    assert {figure.verdict for figure in figures} == {"not run"}
    assert device_report.table([], figures).count("not run") == len(FIGURES)


def test_figures_are_held_against_their_targets_whatever_document_they_come_from(tmp_path: Path) -> None:
    ratio, plain = "tmpfs: load, of the slower of copy and read", "GPU memory beyond the parameters: plain load"
    write(tmp_path / "loads.json", {"host": {"gpu": "G"}, "figures": [vars(measured(ratio, 0.9))]})
    figures = [measured(FUSED + "a", 1.06), measured(FUSED + "b", 1.05), measured(plain, 256.5)]
    write(tmp_path / "fused.json", {"figures": [vars(figure) for figure in figures]})
    kernel = {"gb_per_s": 1.0, "copy_gb_per_s": 2.0}
    kernels = {"fast": 0.8, "slow": 0.79, "copy, transposed, 1 byte": 0.1, "GPTQ, act-order": 0.1}
    write(tmp_path / "kernels.json", {"kernels": {name: {**kernel, "of_copy": of} for name, of in kernels.items()}})
    found = verdicts(tmp_path)
    assert found[ratio] == "met"
    assert (found[FUSED + "a"], found[FUSED + "b"], found[plain]) == ("MISSED", "met", "MISSED")
    assert (found[KERNEL + "fast"], found[KERNEL + "slow"]) == ("met", "MISSED")
    assert found[KERNEL + "copy, transposed, 1 byte"] == found[KERNEL + "GPTQ, act-order"] == ""
    # In the order of FIGURES; what several documents lack is not run.
    assert list(found)[:3] == [figure.name for figure in FIGURES[:3]]
    assert FUSED + "*" not in found
    assert found["disk: load into the GPU"] == found["synchronising calls in the middle of a load"] == "not run"


def test_a_figure_that_nobody_expects_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such figure: tmpfs: lod"):
        measured("tmpfs: lod", 1.0)


@pytest.mark.parametrize(
    ("outcomes", "value", "status"),
    [
        ([PASSED, PASSED], 1.0, 0),
        ([PASSED, "left out: there is no compute-sanitizer"], 1.0, 0),
        ([PASSED, PASSED], 1.1, 2),
        ([PASSED, "FAILED with 1"], 1.1, 1),
        ([PASSED, "not run: no time was left"], 1.0, 1),
        (["STOPPED after 9 s", "not run: there is no build"], 1.0, 1),
        (["not run", "not run"], None, NOTHING_RUN),
    ],
)
def test_the_status_says_what_came_of_it(outcomes: list[str], value: float | None, status: int) -> None:
    parts = [Part(str(number), outcome, 1, "") for number, outcome in enumerate(outcomes)]
    assert device_report.exit_status(parts, [Figure("f", "x", at_most=1.05, value=value)]) == status


def test_the_report_is_a_table_and_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parts.tsv").write_text("build\tpassed\t42\tbuilt for 90\ntests\tFAILED with 1\t7\t\n")
    figure = measured("disk: load into the GPU", 3.25, {"load, GB/s": [3.0, 3.25]}, "pread, direct")
    write(tmp_path / "loads.json", {"host": {"gpu": "G"}, "figures": [vars(figure)]})
    monkeypatch.setattr(sys, "argv", ["device_report", str(tmp_path), str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        device_report.main()
    assert ended.value.code == 1
    text = capsys.readouterr().out
    assert (tmp_path / "table.txt").read_text() == text
    lines = [line.split() for line in text.splitlines()]
    assert ["build", "passed", "42", "built", "for", "90"] in lines
    assert ["disk:", "load", "into", "the", "GPU", "3.25", "GB/s", "pread,", "direct"] in lines
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["host"] == {"gpu": "G"}
    assert document["parts"][1] == {"name": "tests", "outcome": "FAILED with 1", "seconds": 7, "detail": ""}
    found = next(one for one in document["figures"] if one["name"] == figure.name)
    assert (found["value"], found["samples"], found["verdict"]) == (3.25, {"load, GB/s": [3.0, 3.25]}, "")


def test_calls_that_wait_count_between_the_first_work_and_the_last() -> None:
    def call(name: str, at: float, category: str = "cuda_runtime") -> dict[str, Any]:
        return {"name": name, "cat": category, "ts": at}

    events = [
        {"name": "cudaStreamSynchronize", "ph": "M"},  # no call
        call("cudaDeviceSynchronize", 1),
        call("cudaMemcpyAsync", 2),
        call("cudaStreamSynchronize", 3),
        call("cudaEventSynchronize", 4),  # by a thread of the core, which has nothing else to do
        call("cudaFree", 5),
        call("cuStreamSynchronize", 6, "cuda_driver"),
        call("cudaStreamSynchronize", 6, "user_annotation"),
        call("cudaMemcpyAsync", 6),
        call("cudaLaunchKernel", 7),
        call("cudaHostUnregister", 8),
    ]
    assert device.synchronising_calls(events) == (
        {"cudaStreamSynchronize": 1, "cudaFree": 1, "cuStreamSynchronize": 1},
        2,
    )
    assert device.synchronising_calls([]) == ({}, 0)


def test_without_a_gpu_the_benchmark_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["device"])
    with pytest.raises(SystemExit) as ended:
        device.main()
    assert ended.value.code == NOTHING_RUN
    assert "finds no GPU: not run" in capsys.readouterr().out


# ---- the script

HOST = """#!/bin/bash
# Stands for Python on a GPU host: what it is asked for is told, and what the parts print.
case "$*" in
  *benchmarks.device_report*) exec {python} "$@" ;;
  *"import importlib.util"*{lacking}*) exit 1 ;;
  *"import sys, torch"*) exit {torch_finds_gpu} ;;
  *" pip "*) echo "$WEIGHTLIFT_CUDA $WEIGHTLIFT_CUDA_ARCHITECTURES: installed"; exit {pip} ;;
  *"print(\\"built for\\""*) echo built for 90 ;;
  *" pytest "*test_devices.py*-k*) echo RACECHECK SUMMARY, ERROR SUMMARY: 0 errors ;;
  *" pytest "*) echo "2 failed, 3 passed"; exit 1 ;;
  *benchmarks.device_ops*) echo "gpu, torch 2, CUDA 13" ;;
  *fused*) sleep 60 ;;
esac
"""


def program(host: Path, name: str, text: str) -> None:
    path = host / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder with the script, what it takes of the repository, and programs of a host."""
    for name in ("scripts/device_check.sh", "benchmarks/__init__.py", "benchmarks/device_report.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("gpu = pytest.mark.gpu\n")
    (tmp_path / "bin").mkdir()
    program(tmp_path, "mount", "#!/bin/sh\nexit 1\n")
    return tmp_path


def run_script(host: Path, **answers: Any) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Runs the script; also gives what came of each part. answers: of HOST."""
    defaults = {"python": sys.executable, "lacking": "nothing", "torch_finds_gpu": 0, "pip": 0}
    program(host, "python", HOST.format(**{**defaults, **answers}))
    environment = {**os.environ, "PATH": f"{host}/bin:{os.environ['PATH']}", "PYTHON": str(host / "bin" / "python")}
    done = subprocess.run(
        ["bash", host / "scripts" / "device_check.sh", host / "out"], env=environment, capture_output=True, text=True
    )
    document = json.loads((host / "out" / "results.json").read_text())
    return done, {part["name"]: part["outcome"] for part in document["parts"]}


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_costs_the_others_nothing(host: Path) -> None:
    script = host / "scripts" / "device_check.sh"
    text = script.read_text()
    assert "['fused loads']=370" in text
    script.write_text(text.replace("['fused loads']=370", "['fused loads']=9"))
    program(host, "nvidia-smi", "#!/bin/sh\necho GPU 0: of the test\n")
    program(host, "nvcc", "#!/bin/sh\necho release 13.0\n")
    program(host, "compute-sanitizer", '#!/bin/bash\nwhile [[ $1 != */python ]]; do shift; done\nexec "$@"\n')
    done, outcomes = run_script(host)
    assert outcomes == {
        "build": "passed",
        "tests": "FAILED with 1",
        "loads": "FAILED to do anything",
        "fused loads": outcomes["fused loads"],
        "kernels": "passed",
        "memcheck": "passed",
        "racecheck": "passed",
    }
    assert outcomes["fused loads"].startswith("STOPPED after")
    assert done.returncode == 1
    assert "2 failed, 3 passed" in done.stdout
    assert "ON native: installed" in (host / "out" / "log.txt").read_text()


def test_without_a_build_nothing_else_is_run(host: Path) -> None:
    program(host, "nvcc", "#!/bin/sh\necho release 13.0\n")
    done, outcomes = run_script(host, pip=1)
    assert outcomes.pop("build") == "FAILED with 1"
    assert set(outcomes.values()) == {"not run: there is no build"}
    assert done.returncode == 1


def test_what_the_host_lacks_is_told(host: Path) -> None:
    program(host, "nvcc", "#!/bin/sh\necho release 13.0\n")
    done, outcomes = run_script(host, lacking="pybind11")
    assert "missing: Python's pybind11" in done.stdout
    assert set(outcomes.values()) == {"not run"}
    assert done.returncode == 3


@pytest.mark.parametrize(("driver_finds_gpu", "status"), [(False, NOTHING_RUN), (True, 3)])
def test_without_a_gpu_nothing_is_run(host: Path, driver_finds_gpu: bool, status: int) -> None:
    program(host, "nvidia-smi", f"#!/bin/sh\n{'echo GPU 0' if driver_finds_gpu else 'exit 9'}\n")
    done, outcomes = run_script(host, torch_finds_gpu=1)
    assert "nothing was run" in done.stdout
    assert set(outcomes.values()) == {"not run"}
    assert done.returncode == status
