"""The real vLLM, on a CPU: what weightlift loads is what its default loader loads, and each rank reads its part of it.

Needs a virtual environment with vLLM: `make test-vllm`. vLLM itself runs in processes of its own, since its groups of
ranks and its settings are global.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKPOINTS, NO_CHECKPOINTS
from safetensors import safe_open
from table import table

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM, in a virtual environment of its own: make test-vllm", allow_module_level=True)

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

# name -> (what it is, checkpoint, options of the engine). Those of `quantised` are real ones, made by other tools.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {}),
    "llama-bin": ("Llama, files of torch.save", "llama-bin", {}),
    "qwen2": ("Qwen2: biases, tied embeddings", "qwen2", {}),
    "phi3": ("Phi-3: fused on disk", "phi3", {}),
    "qwen3-moe": ("Qwen3-MoE, 8 experts", "qwen3-moe", {}),
    "qwen3-moe-ep": ("Qwen3-MoE, expert parallel", "qwen3-moe", {"enable_expert_parallel": True}),
    "online-fp8": ("Llama, quantised by vLLM: FP8 per channel", "llama", {"quantization": "fp8_per_channel"}),
    "llama128": ("Llama, 4 layers", "quantised/llama128", {}),
    "fp8": ("Llama, FP8 static", "quantised/fp8", {}),
    "fp8-dynamic": ("Llama, FP8_DYNAMIC", "quantised/fp8-dynamic", {}),
    "w8a8": ("Llama, INT8 W8A8", "quantised/w8a8", {}),
    "w4a16": ("Llama, W4A16", "quantised/w4a16", {}),
    "w4a16-gptq": ("Llama, W4A16 by GPTQ", "quantised/w4a16-gptq", {}),
    "fp8-block": ("Llama, FP8 block", "quantised/fp8-block", {}),
    "nvfp4a16": ("Llama, NVFP4A16", "quantised/nvfp4a16", {}),
    "mxfp4a16": ("Llama, MXFP4A16", "quantised/mxfp4a16", {}),
}
# What vLLM's CPU build has no kernels for, compare.py has built nevertheless. It does not run, and of these even
# post-processing needs a kernel.
NOT_PROCESSED = {"fp8", "nvfp4a16"}
# Cut in two, its scales do not fit: vLLM says so itself.
REFUSED = {("fp8-block", 2): "Weight output_partition_size = 64 is not divisible by weight quantization block_n = 128."}
# Expert parallelism loads on a CPU, but does not run there.
NOT_RUN = NOT_PROCESSED | {"fp8-block", "mxfp4a16", "qwen3-moe-ep"}
RUN = [name for name in MODELS if name not in NOT_RUN]
# By two workers, each of which takes a while to start: one of each kind.
RUN_BY_TWO = ["llama", "qwen2", "phi3", "qwen3-moe", "fp8-dynamic", "w8a8"]
RELOADED = {"llama", "qwen3-moe"}
NUM_EXPERTS = 8

Compared = dict[tuple[str, int], list[dict[str, Any]]]


def run(*commands: list[object], seconds: float) -> None:
    """Runs the scripts beside this file, at once; all have to succeed in time."""
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        processes = []
        for script, *arguments in commands:
            command = [sys.executable, str(FOLDER / str(script)), *map(str, arguments)]
            log = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append((process, log))
        for process, log in processes:
            status = process.wait(timeout=end - time.monotonic())
            log.seek(0)
            assert status == 0, f"{process.args}:\n{log.read().decode()[-8000:]}"


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
    checkpoint = MODELS[name][1]
    return folder / (checkpoint if checkpoint.startswith("quantised/") else f"seed0/{checkpoint}")


@pytest.fixture(scope="module")
def compared(folder: Path) -> Compared:
    """(name, tp size) -> for each rank what compare.py found."""
    models = folder / "models.json"
    models.write_text(
        json.dumps([{"name": name, "path": str(path_of(folder, name)), "options": MODELS[name][2]} for name in MODELS])
    )
    found: Compared = {}
    for tp_size in (1, 2):
        port = free_port()
        outputs = [folder / f"compared-{tp_size}-{rank}.json" for rank in range(tp_size)]
        run(
            *(
                ["compare.py", "--rank", rank, "--output", output, *("--tp-size", tp_size, "--port", port), models]
                for rank, output in enumerate(outputs)
            ),
            seconds=600,
        )
        ranks = [json.loads(output.read_text()) for output in outputs]
        for results in zip(*ranks, strict=True):
            found[results[0]["name"], tp_size] = list(results)
    if output := os.environ.get("VLLM_TABLE"):
        Path(output).write_text(table(found, {name: description for name, (description, _, _) in MODELS.items()}))
    return found


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_those_of_the_default_loader(compared: Compared, name: str, tp_size: int) -> None:
    for result in compared[name, tp_size]:
        if (name, tp_size) in REFUSED:
            assert result["refused"] == REFUSED[name, tp_size]
            continue
        assert result["num_loaded"] > 20
        assert result["differ_loaded"] == []
        if name in NOT_PROCESSED:
            assert result["refused_processing"][0] == result["refused_processing"][1] is not None
            continue
        assert result["refused_processing"] == [None, None]
        assert result["num_processed"] > 20
        assert result["differ_processed"] == []


@pytest.mark.parametrize(("name", "tp_size"), [key for key in itertools.product(MODELS, (1, 2)) if key not in REFUSED])
def test_a_rank_reads_its_part(compared: Compared, folder: Path, name: str, tp_size: int) -> None:
    for rank, result in enumerate(compared[name, tp_size]):
        expected = bytes_of_rank(path_of(folder, name), rank, tp_size, is_expert_parallel=name.endswith("-ep"))
        most = 1.2 if "4a16" in name and tp_size > 1 else 1.05  # gaps of 8 KiB between slices are read along
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


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"online-fp8"}))
def test_nothing_is_read_before_its_turn(compared: Compared, name: str) -> None:
    [result] = compared[name, 1]
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
                if name in RELOADED:
                    job["reload"] = str(folder / "seed1" / MODELS[name][1])
                jobs.append({**job, "options": MODELS[name][2]})
    path, output = folder / "jobs.json", folder / "generated.json"
    path.write_text(json.dumps(jobs))
    run(["generate.py", "--jobs", path, "--output", output], seconds=900)
    return dict(zip(keys, json.loads(output.read_text()), strict=True))


@pytest.mark.parametrize(("name", "tp_size"), [*((name, 1) for name in RUN), *((name, 2) for name in RUN_BY_TWO)])
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
