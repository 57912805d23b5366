"""Fixtures that all tests share, and the skips of what this machine cannot do, each with its reason."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from weightlift import _C

ROOT = Path(__file__).resolve().parents[1]

CHECKPOINTS = Path(os.environ.get("WEIGHTLIFT_TEST_CHECKPOINTS") or ROOT.parent / "shared" / "checkpoints")
NO_CHECKPOINTS = f"no checkpoints at {CHECKPOINTS}; WEIGHTLIFT_TEST_CHECKPOINTS can name another folder"

WriteCheckpoint = Callable[..., Path]


def pytest_configure() -> None:
    # A shell has what it runs in the background ignore Ctrl-C, and so would the processes that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _io_uring_refusal() -> str | None:
    """Why the kernel gives no ring to this process; None: it does."""
    params = ctypes.create_string_buffer(120)  # struct io_uring_params
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(ctypes.c_long(425), ctypes.c_uint(1), params)  # io_uring_setup; the same number everywhere
    if fd < 0:
        return f"io_uring_setup: {errno.errorcode.get(ctypes.get_errno(), '?')}"
    os.close(fd)
    return None


def _direct_io_refusal(folder: Path) -> str | None:
    probe = folder / "direct_io_probe"
    probe.write_bytes(b"")
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        return f"{folder} does not take O_DIRECT: {error.strerror}"
    finally:
        probe.unlink()
    return None


def _gpu_refusal() -> str | None:
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    return None if _C.cuda_info()["built"] else "CUDA is not part of this build"


@pytest.fixture(autouse=True)
def _skip_what_this_machine_lacks(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and (reason := _gpu_refusal()):
        pytest.skip(reason)
    if request.node.get_closest_marker("io_uring") and (reason := _io_uring_refusal()):
        pytest.skip(reason)
    if request.node.get_closest_marker("direct_io") and (
        reason := _direct_io_refusal(request.getfixturevalue("tmp_path"))
    ):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer's environment sets for weightlift must not decide what tests see."""
    for variable in [name for name in os.environ if name.startswith("WEIGHTLIFT_")]:
        monkeypatch.delenv(variable)


@pytest.fixture(scope="session")
def shared_checkpoints() -> Path:
    """Small real checkpoints, one a subfolder: $WEIGHTLIFT_TEST_CHECKPOINTS, or a folder beside the repository."""
    if not CHECKPOINTS.is_dir():
        pytest.skip(NO_CHECKPOINTS)
    return CHECKPOINTS


@pytest.fixture
def write_checkpoint() -> WriteCheckpoint:
    """Gives `write_checkpoint(folder, tensors, shards=1) -> folder`.

    Writes by safetensors, with an index where there is more than one shard. `shards` is a number, or for each shard the
    list of names that it holds.
    """

    def write(folder: Path, tensors: Mapping[str, Tensor], shards: int | list[list[str]] = 1) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        names = list(tensors)
        if isinstance(shards, int):
            per_shard = -(-len(names) // shards)
            shards = [names[i * per_shard : (i + 1) * per_shard] for i in range(shards)]
        if len(shards) == 1:
            safetensors.torch.save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        weight_map = {}
        for number, held in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            safetensors.torch.save_file(
                {name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"}
            )
            weight_map |= dict.fromkeys(held, file)
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        return folder

    return write
