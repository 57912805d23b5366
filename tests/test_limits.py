"""Loads where descriptors, memory or rights are short, where signals come, and where files change meanwhile."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from processes import REFUSE_IO_URING, command, environment, faulty_libc, memory_cgroup, run_python

from weightlift import LoadConfig, fast_load, open_checkpoint

__all__ = ["faulty_libc"]  # a fixture

MiB = 1 << 20
STRATEGIES: tuple[Any, ...] = ("buffered", "auto")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("limits") / "model.safetensors"
    safetensors.torch.save_file({f"w{i}": torch.full((MiB,), i, dtype=torch.int32) for i in range(6)}, path)
    return path


def slow(path: Path, read_ms: int) -> dict[str, object]:
    """Variables for tests/faulty_libc.c: each read of 1 MiB takes so long, and there is one at a time."""
    return {
        "FAULT_PATH": path.name,
        "FAULT_FROM": 1 << 16,
        "FAULT_READ_MS": read_ms,
        "WEIGHTLIFT_BACKEND": "pread",
        "WEIGHTLIFT_STRATEGY": "buffered",
        "WEIGHTLIFT_QUEUE_DEPTH": 1,
        "WEIGHTLIFT_NUM_THREADS": 1,
        "WEIGHTLIFT_CHUNK_BYTES": MiB,
    }


def test_few_descriptors_are_enough_or_one_error(path: Path) -> None:
    code = """
    import errno, os, resource, sys
    import torch, weightlift
    weightlift.load_file(sys.argv[1])  # what is imported late is there
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for left in range(12):
        try:
            tensors = weightlift.load_file(sys.argv[1])
            assert all((tensors[f"w{i}"] == i).all() for i in range(6))
            print("loaded")
        except OSError as error:
            assert error.errno == errno.EMFILE, error
            assert sys.argv[1] in str(error), error
            print("refused")
        os.close(taken.pop())
    """
    outcomes = run_python(code, path).split()
    assert outcomes == sorted(outcomes, reverse=True)  # refused, until there are enough
    assert outcomes[0] == "refused"
    assert outcomes[-1] == "loaded"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become a user with no process yet")
def test_without_a_thread_to_be_had_headers_are_read_and_a_load_is_one_error(tmp_path: Path) -> None:
    for i in range(40):
        safetensors.torch.save_file({f"w{i}": torch.ones(2)}, tmp_path / f"{i}.safetensors")
    code = """
    import os, resource, sys
    import weightlift
    folder = os.open(sys.argv[1], os.O_RDONLY)
    os.fchmod(folder, 0o755)
    for name in os.listdir(folder):
        os.chmod(name, 0o644, dir_fd=folder)
    weightlift.load_file(sys.argv[1])  # what is imported late is there
    os.fchdir(folder)
    os.setuid(54321)
    outcomes = []
    for most in (1, 4, 8, 16, 64, 128):  # threads
        resource.setrlimit(resource.RLIMIT_NPROC, (most, 128))
        assert len(weightlift.open_checkpoint(".")) == 40
        try:
            assert all((tensor == 1).all() for tensor in weightlift.load_file(".").values())
            outcomes.append("loaded")
        except RuntimeError as error:
            assert "no further thread can be started" in str(error), error
            outcomes.append("refused")
    print(*outcomes)
    """
    outcomes = run_python(code, tmp_path).split()
    assert outcomes == sorted(outcomes, reverse=True)  # refused, until there are enough
    assert (outcomes[0], outcomes[-1]) == ("refused", "loaded")


@pytest.mark.parametrize("how", ["replaced", "overwritten"])
def test_a_file_that_changes_during_the_load_is_an_error_or_the_file_that_was_opened(
    tmp_path: Path, how: str, faulty_libc: dict[str, object]
) -> None:
    path, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    for file, value in ((path, 1), (other, 2)):
        safetensors.torch.save_file({f"w{i}": torch.full((MiB,), value, dtype=torch.int32) for i in range(6)}, file)
    code = """
    import os, shutil, sys, threading, torch, weightlift
    path, other, how = sys.argv[1:]
    def overwrite():  # in place: its size stays
        with open(other, "rb") as new, open(path, "r+b") as file:
            shutil.copyfileobj(new, file)
    threading.Timer(0.2, overwrite if how == "overwritten" else lambda: os.rename(other, path)).start()
    try:
        tensors = weightlift.load_file(path)
        assert all((tensor == 1).all() for tensor in tensors.values())
        print("as it was")
    except weightlift.CheckpointReadError as error:
        print(error.reason)
    """
    out = run_python(code, path, other, how, env={**faulty_libc, **slow(path, 30)}).strip()
    assert out == {"replaced": "as it was", "overwritten": "FileChanged"}[how]


def test_a_storm_of_signals_disturbs_nothing(path: Path) -> None:
    count = 0

    def on_alarm(*_: object) -> None:
        nonlocal count
        count += 1

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for strategy in STRATEGIES:
            with open_checkpoint(path) as checkpoint:
                into = {name: torch.empty(MiB, dtype=torch.int32) for name in checkpoint}
            fast_load(into, path, config=LoadConfig(strategy=strategy))
            assert all(bool((into[f"w{i}"] == i).all()) for i in range(6))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert count > 0


def test_sigterm_ends_a_process_that_loads(path: Path, faulty_libc: dict[str, object]) -> None:
    code = """
    import sys, weightlift, torch
    print("loading", flush=True)
    weightlift.load_file(sys.argv[1])
    """
    env = environment({**faulty_libc, **slow(path, 3_600_000)})
    with subprocess.Popen(command(code, path), env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == -signal.SIGTERM


def test_a_destination_that_nobody_else_holds_lives_until_it_is_written(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        for i in range(6):
            gone = torch.empty(MiB, dtype=torch.int32)
            gone.copy_(checkpoint[f"w{i}"])
            view = gone[10:20]
            del gone
            gc.collect()
            others = [torch.zeros(MiB, dtype=torch.int32) for _ in range(3)]  # would be given the same memory
    assert view.tolist() == [5] * 10
    assert not any(tensor.any() for tensor in others)


def test_the_sysctl_that_forbids_io_uring_is_named(tmp_path: Path, path: Path) -> None:
    """In a mount namespace of its own, where the sysctl reads as if it were set."""
    sysctl, value = "/proc/sys/kernel/io_uring_disabled", tmp_path / "value"
    value.write_text("2\n")
    mount = f"mount --bind {value} {sysctl}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace, or no kernel.io_uring_disabled")
    code = (
        REFUSE_IO_URING
        + """
import torch, weightlift
refuse_io_uring(errno.EPERM)
try:
    weightlift.load_file(sys.argv[1], config=weightlift.LoadConfig(backend="io_uring"))
except weightlift.CheckpointError as error:
    print(error)
"""
    )
    arguments = command(code, path)
    script = f'{mount} && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *arguments], capture_output=True, text=True, check=True
    )
    assert "io_uring is switched off on this host (kernel.io_uring_disabled=2)" in done.stdout


@pytest.mark.parametrize("strategy", ["buffered", pytest.param("direct", marks=pytest.mark.direct_io)])
def test_a_checkpoint_larger_than_the_cgroup_is_streamed_through_it(tmp_path: Path, strategy: Any) -> None:
    path = tmp_path / "model.safetensors"

    safetensors.torch.save_file({f"w{i}": torch.zeros(16 * MiB, dtype=torch.uint8) for i in range(48)}, path)
    code = """
    import sys, weightlift, torch
    with open(sys.argv[2], "w") as processes:
        processes.write("0")
    config = weightlift.LoadConfig(strategy=sys.argv[3], staging_bytes=32 << 20)
    print(sum(tensor.nbytes for _, tensor in weightlift.iter_weights(sys.argv[1], config=config)) >> 20)
    """
    with memory_cgroup(512 * MiB) as processes:
        assert run_python(code, path, processes, strategy) == "768\n"
