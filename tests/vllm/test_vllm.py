"""The real vLLM, on a CPU: what weightlift loads is what its default loader loads, and each rank reads its part of it.

Needs a virtual environment with vLLM: `make test-vllm`. vLLM itself runs in processes of its own, since its groups of
ranks and its settings are global.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from conftest import CHECKPOINTS, NO_CHECKPOINTS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM, in a virtual environment of its own: make test-vllm"
)

FOLDER = Path(__file__).parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

# name -> (checkpoint, options of the engine). Those of `quantised` are real checkpoints that other tools made.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bin": ("llama-bin", {}),
    "qwen2": ("qwen2", {}),
    "phi3": ("phi3", {}),
    "qwen3-moe": ("qwen3-moe", {}),
    "qwen3-moe-ep": ("qwen3-moe", {"enable_expert_parallel": True}),
    "online-fp8": ("llama", {"quantization": "fp8_per_channel"}),
    "llama128": ("quantised/llama128", {}),
    "fp8": ("quantised/fp8", {}),
    "fp8-dynamic": ("quantised/fp8-dynamic", {}),
    "w8a8": ("quantised/w8a8", {}),
    "w4a16": ("quantised/w4a16", {}),
    "w4a16-gptq": ("quantised/w4a16-gptq", {}),
    "fp8-block": ("quantised/fp8-block", {}),
    "nvfp4a16": ("quantised/nvfp4a16", {}),
    "mxfp4a16": ("quantised/mxfp4a16", {}),
}
# What vLLM's CPU build has no kernels for: it can't build these at all, or can't post-process them.
NOT_BUILT = {"fp8-block", "nvfp4a16", "mxfp4a16"}
NOT_PROCESSED = {"fp8"}
# Expert parallelism has no kernels on a CPU: it loads, but does not run.
NOT_RUN = NOT_BUILT | NOT_PROCESSED | {"qwen3-moe-ep"}
RUN = [name for name in MODELS if name not in NOT_RUN]
# By two workers, each of which takes a while to start: one of each kind.
RUN_BY_TWO = ["llama", "qwen2", "phi3", "qwen3-moe", "online-fp8", "fp8-dynamic", "w8a8"]
RELOADED = {"llama", "qwen3-moe"}
NUM_EXPERTS = 8

Compared = dict[tuple[str, int], list[dict[str, Any]]]



def run(*commands: list[object], seconds: float) -> None:
    """Runs the scripts beside this file, at once; all have to succeed in time."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(FOLDER / str(script)), *map(str, arguments)],
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for script, *arguments in commands
    ]
    end = time.monotonic() + seconds
    try:
        for process in processes:
            output, _ = process.communicate(timeout=end - time.monotonic())
            assert process.returncode == 0, f"{process.args}:\n{output[-8000:]}"
    finally:
        for process in processes:
            process.kill()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`seed0` and `seed1`: the same models with different weights; `quantised`: what tools for that wrote."""
    if not CHECKPOINTS.is_dir():
        pytest.skip(NO_CHECKPOINTS)
    path = tmp_path_factory.mktemp("models")
    (path / "quantised").symlink_to(CHECKPOINTS.resolve())
    run(*(["models.py", path / f"seed{seed}", "--seed", seed] for seed in (0, 1)), seconds=180)
    return path


def path_of(folder: Path, name: str) -> Path:
    checkpoint = MODELS[name][0]
    return folder / (checkpoint if checkpoint.startswith("quantised/") else f"seed0/{checkpoint}")


@pytest.fixture(scope="module")
def compared(folder: Path) -> Compared:
    """(name, tp size) -> for each rank what compare.py found."""
    models = folder / "models.json"
    models.write_text(
        json.dumps([{"name": name, "path": str(path_of(folder, name)), "options": MODELS[name][1]} for name in MODELS])
    )
    found: Compared = {}
    for tp_size in (1, 2):
        port = free_port()
        outputs = [folder / f"compared-{tp_size}-{rank}.json" for rank in range(tp_size)]
        run(
            *(
                ["compare.py", "--tp-size", tp_size, "--rank", rank, "--port", port]
                + ["--models", models, "--output", output]
                for rank, output in enumerate(outputs)
            ),
            seconds=600,
        )
        ranks = [json.loads(output.read_text()) for output in outputs]
        for results in zip(*ranks, strict=True):
            found[results[0]["name"], tp_size] = list(results)
    return found


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_those_of_the_default_loader(compared: Compared, name: str, tp_size: int) -> None:
    for result in compared[name, tp_size]:
        if name in NOT_BUILT:
            assert result["refused"], "vLLM can build it now: take it off NOT_BUILT"
            continue
        assert "refused" not in result
        assert result["num_loaded"] > 20
        assert result["differ_loaded"] == []
        if name in NOT_PROCESSED:
            assert result["refused_processing"][0] == result["refused_processing"][1] is not None
            continue
        assert result["refused_processing"] == [None, None]
        assert result["num_processed"] > 20
        assert result["differ_processed"] == []


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - NOT_BUILT))
def test_a_rank_reads_its_part(compared: Compared, folder: Path, name: str, tp_size: int) -> None:
    for rank, result in enumerate(compared[name, tp_size]):
        expected = bytes_of_rank(path_of(folder, name), rank, tp_size, is_expert_parallel=name.endswith("-ep"))
        most = 1.15 if name.startswith("w4a16") and tp_size > 1 else 1.05  # gaps of 8 KiB between slices: read along
        assert 0.95 * expected <= result["report"]["bytes_read"] <= most * expected


def bytes_of_rank(checkpoint: Path, rank: int, tp_size: int, *, is_expert_parallel: bool) -> float:
    """What a rank has to read: its rows of what is cut by rows, all of what is cut by columns, and of the rest."""
    total = 0.0
    for name, nbytes in sizes_of(checkpoint).items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert and is_expert_parallel:
            num_local = NUM_EXPERTS // tp_size
            total += nbytes if int(expert[1]) // num_local == rank else 0
        elif re.search(r"(embed_tokens|lm_head|[qkv]_proj|qkv_proj|gate_proj|up_proj|gate_up_proj)\.", name):
            total += nbytes / tp_size
        else:
            total += nbytes
    return total


def sizes_of(checkpoint: Path) -> dict[str, int]:
    sizes = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            sizes |= {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    for path in checkpoint.glob("*.bin"):
        sizes |= {name: tensor.nbytes for name, tensor in torch.load(path, weights_only=True).items()}
    return sizes


@pytest.mark.parametrize("name", sorted(MODELS.keys() - NOT_BUILT - {"online-fp8"}))
def test_nothing_is_read_before_its_turn(compared: Compared, name: str) -> None:
    for tp_size in (1, 2):
        for result in compared[name, tp_size]:
            assert result["report"]["num_forced"] == 0
            assert result["report"]["num_transfers"] > 20


@pytest.fixture(scope="module")
def generated(folder: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """(name, tp size, load format) -> what generate.py found."""
    jobs, keys = [], []
    for tp_size in (1, 2):
        for name in RUN if tp_size == 1 else RUN_BY_TWO:
            for load_format in ("auto", "weightlift"):
                keys.append((name, tp_size, load_format))
                job = {"model": str(path_of(folder, name)), "load_format": load_format, "tp_size": tp_size}
                if MODELS[name][0] in RELOADED:
                    job["reload"] = str(folder / "seed1" / MODELS[name][0])
                jobs.append({**job, "options": MODELS[name][1]})
    path, output = folder / "jobs.json", folder / "generated.json"
    path.write_text(json.dumps(jobs))
    run(["generate.py", "--jobs", path, "--output", output], seconds=900)
    return dict(zip(keys, json.loads(output.read_text()), strict=True))


@pytest.mark.parametrize(
    ("name", "tp_size"), [*((name, 1) for name in RUN), *((name, 2) for name in RUN_BY_TWO)]
)
def test_the_engine_generates_the_same_tokens(generated: Any, name: str, tp_size: int) -> None:
    expected, found = (generated[name, tp_size, load_format] for load_format in ("auto", "weightlift"))
    assert found["tokens"] == expected["tokens"]
    assert len({tuple(tokens) for tokens in found["tokens"]}) > 1, "the same for every prompt proves little"
    if "reload" in found:
        assert found["reloaded_tokens"] == expected["reloaded_tokens"]
        assert found["reloaded_tokens"] != found["tokens"]


def test_each_worker_writes_its_report(folder: Path, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    options = {"model_loader_extra_config": {"report_dir": str(reports), "queue_depth": 4}}
    job = {"model": str(path_of(folder, "llama")), "load_format": "weightlift", "tp_size": 2, "options": options}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    run(["generate.py", "--jobs", tmp_path / "jobs.json", "--output", tmp_path / "out.json"], seconds=300)
    expected = [bytes_of_rank(path_of(folder, "llama"), rank, 2, is_expert_parallel=False) for rank in (0, 1)]
    found = [json.loads((reports / f"rank-{rank}.json").read_text())["bytes_read"] for rank in (0, 1)]
    assert found == [pytest.approx(size, rel=0.05) for size in expected]
