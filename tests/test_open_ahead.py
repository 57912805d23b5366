"""Files opened ahead of their load."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import safetensors.torch
import torch

from weightlift import _C, CheckpointError, LoadConfig, load_file
from weightlift.checkpoint import locate
from weightlift.loading import Checkpoint, read_all
from weightlift.open_ahead import OpenAhead
from weightlift.program import Program


def test_a_file_that_could_not_be_opened_ahead_is_tried_again(tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    expected = {"w": torch.arange(1 << 20, dtype=torch.float32)}
    safetensors.torch.save_file(expected, path)
    if not _C.probe_direct(path)["usable"]:
        pytest.skip("no direct reads here")
    config = LoadConfig(strategy="direct").resolve()
    files = locate(path)
    ahead = OpenAhead(config)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))  # for a moment, no descriptor is left
    try:
        ahead.open(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with Checkpoint(files, Program(files, config, ahead), watch=False, header_seconds=0.0) as checkpoint:
        tensors = read_all(checkpoint, torch.device("cpu"))
    assert torch.equal(tensors["w"], expected["w"])


def test_an_error_keeps_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlift.open_ahead.files_ahead", lambda mount: 8)
    safetensors.torch.save_file({"w": torch.zeros(8)}, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 100)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as error:
        load_file(tmp_path)
    assert error.value is not None  # its traceback is alive
    assert len(os.listdir("/proc/self/fd")) == before
