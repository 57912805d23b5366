"""Forking before, during and after a load: it works, or is one clear error; a child ends as any process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from processes import run_python

# The child is ended as an interpreter is: destructors run. A child that hangs there fails by the time limit.
PROGRAM = """
import os, sys, time
import torch, weightlift

torch.set_num_threads(1)  # OpenMP's threads are not in a child either, and it waits for them

def fork(child):
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException as error:
            print("child:", type(error).__name__, error, flush=True)
            sys.exit(1)
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print("status", status, flush=True)

path = sys.argv[1]
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fork") / "model.safetensors"
    tensors = {f"layers.{i}.weight": torch.full((1 << 20,), float(i)) for i in range(24)}  # 96 MiB: several segments
    safetensors.torch.save_file(tensors, path)
    return path


def run(code: str, checkpoint: Path, **env: Any) -> str:
    return run_python(PROGRAM + code, checkpoint, env=env)


def test_a_child_loads_after_its_parent_did(checkpoint: Path) -> None:
    code = """
first = weightlift.load_file(path)
def child():
    again = weightlift.load_file(path)
    assert all(torch.equal(again[name], first[name]) for name in first)
fork(child)
"""
    assert run(code, checkpoint) == "status 0\n"


def test_a_checkpoint_that_is_idle_is_read_by_parent_and_child(checkpoint: Path) -> None:
    code = """
opened = weightlift.open_checkpoint(path)
assert opened["layers.3.weight"][5].item() == 3
def child():
    assert opened["layers.4.weight"][6].item() == 4
fork(child)
assert opened["layers.5.weight"][7].item() == 5
opened.close()
"""
    assert run(code, checkpoint) == "status 0\n"


def test_recorded_copies_that_have_not_begun_run_in_both(checkpoint: Path) -> None:
    code = """
memory = torch.zeros(1 << 20)
with weightlift.open_checkpoint(path) as opened:
    memory.copy_(opened["layers.7.weight"])
    pid = os.fork()
assert bool((memory == 7).all())
if pid == 0:
    sys.exit(0)
print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run(code, checkpoint) == "status 0\n"


def test_a_load_under_way_goes_on_in_the_parent_alone(checkpoint: Path) -> None:
    code = """
memory = {f"layers.{i}.weight": torch.zeros(1 << 20) for i in range(24)}
with weightlift.open_checkpoint(path) as opened:
    for name in list(memory)[:20]:
        memory[name].copy_(opened[name])  # the first 64 MiB are on their way now
    fork(opened.run)
    for name in list(memory)[20:]:
        memory[name].copy_(opened[name])
assert all(bool((tensor == float(name.split(".")[1])).all()) for name, tensor in memory.items())
"""
    out = run(code, checkpoint)
    assert out.startswith("child: RuntimeError this load was under way when the process was forked")
    assert out.endswith("status 1\n")


def test_a_child_whose_parent_streams_ends(checkpoint: Path) -> None:
    code = """
stream = weightlift.iter_weights(path)
next(stream)
fork(lambda: None)
assert len(list(stream)) == 23
"""
    assert run(code, checkpoint) == "status 0\n"
