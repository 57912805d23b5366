"""Storage that fails, is slow, or stops answering: one clear error or all bytes right; nothing hangs or leaks."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from filesystems import Fuse
from resources import loading_threads, resources
from torch import Tensor

import weightlift.unanswered as unanswered
from weightlift import _C, CheckpointReadError, LoadConfig, fast_load, open_checkpoint

MiB = 1 << 20
READERS = [
    pytest.param("io_uring", "buffered", marks=pytest.mark.io_uring),
    pytest.param("io_uring", "direct", marks=pytest.mark.io_uring),
    ("pread", "buffered"),
    ("pread", "direct"),
]
every_reader = pytest.mark.parametrize(("backend", "strategy"), READERS)


def becomes(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return {f"w{i}": torch.arange(MiB // 2, dtype=torch.int32) + i for i in range(8)}  # of 2 MiB


@pytest.fixture(scope="module")
def mounted_fuse(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]) -> Iterator[Fuse]:
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    folder = tmp_path_factory.mktemp("fuse")
    with Fuse(folder / "behind", folder / "mounted") as fuse:
        safetensors.torch.save_file(tensors, fuse.behind / "model.safetensors")
        yield fuse


@pytest.fixture
def fuse(mounted_fuse: Fuse) -> Iterator[Fuse]:
    """No test hangs for ever: what is not answered is, after a while."""
    rescue = threading.Timer(60, mounted_fuse.fails)
    rescue.start()
    yield mounted_fuse
    mounted_fuse.fails()
    rescue.cancel()
    assert becomes(lambda: not unanswered.kept)
    assert becomes(lambda: not loading_threads())


@pytest.fixture
def path(fuse: Fuse) -> Path:
    return fuse.folder / "model.safetensors"


def memory() -> dict[str, Tensor]:
    return {f"w{i}": torch.zeros(MiB // 2, dtype=torch.int32) for i in range(8)}


def config(backend: Any, strategy: Any, **more: Any) -> LoadConfig:
    return LoadConfig(backend=backend, strategy=strategy, chunk_bytes=256 << 10, **more)


# ---- storage that fails


@every_reader
def test_an_error_in_the_middle_names_file_tensor_and_place(
    fuse: Fuse, path: Path, tensors: dict[str, Tensor], backend: str, strategy: str
) -> None:
    before = resources()
    fuse.fails(f"errno {errno.EIO} {9 * MiB}")
    into = memory()
    with pytest.raises(CheckpointReadError, match=r"w[4-7]: reading at byte \d+ failed: Input/output error") as caught:
        fast_load(into, path, config=config(backend, strategy))
    assert caught.value.errno == errno.EIO
    assert caught.value.path == str(path)
    assert set(caught.value.incomplete) == set(tensors)
    fuse.fails()
    fast_load(into, path, config=config(backend, strategy))
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
    del caught
    assert becomes(lambda: resources() == before)


@every_reader
@pytest.mark.parametrize("size", [4095, 4096, 131_072 - 512])
def test_short_reads_are_continued(
    fuse: Fuse, path: Path, tensors: dict[str, Tensor], backend: str, strategy: str, size: int
) -> None:
    fuse.fails(f"short {size}")
    into = memory()
    fast_load(into, path, config=config(backend, strategy))
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())


@every_reader
def test_slow_storage_does_not_run_out_of_time(
    fuse: Fuse, path: Path, tensors: dict[str, Tensor], backend: str, strategy: str
) -> None:
    fuse.fails("delay_ms 100")
    into = memory()
    started = time.monotonic()
    fast_load(into, path, config=config(backend, strategy, io_timeout_seconds=1, num_threads=1, queue_depth=2))
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
    assert time.monotonic() - started > 1


def test_a_change_behind_cached_attributes_is_seen(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with Fuse(tmp_path / "behind", tmp_path / "mounted", "attr_timeout=600,entry_timeout=600,ro") as fuse:
        safetensors.torch.save_file(tensors, fuse.behind / "model.safetensors")
        path = fuse.folder / "model.safetensors"
        into = torch.zeros(MiB // 2, dtype=torch.int32)

        def load() -> None:
            with open_checkpoint(path, config=config("pread", "buffered")) as ckpt:
                into.copy_(ckpt["w0"])
                os.utime(fuse.behind / "model.safetensors", ns=(0, 0))
                assert path.stat().st_mtime_ns != 0  # is what was known

        with pytest.raises(CheckpointReadError, match="it has been written to") as caught:
            load()
        assert caught.value.reason == "FileChanged"


# ---- storage that stops answering


@every_reader
def test_storage_that_stops_answering_is_an_error_within_the_time_out(
    fuse: Fuse, path: Path, tensors: dict[str, Tensor], backend: str, strategy: str, tmp_path: Path
) -> None:
    before = resources()
    fuse.fails(f"hang {9 * MiB}")
    into = memory()
    started = time.monotonic()
    with pytest.raises(CheckpointReadError) as caught:
        fast_load(into, path, config=config(backend, strategy, io_timeout_seconds=1))
    assert time.monotonic() - started < 8
    error = caught.value
    assert (error.reason, error.errno, error.path) == ("ReadTimeout", errno.ETIMEDOUT, str(path))
    # Not only of those that the server holds back: they may keep all of its threads busy.
    assert error.tensor in tensors
    assert f"{path}: {error.tensor}: storage has not answered a read at byte " in str(error)
    assert " for 1 s (io_timeout_seconds)" in str(error)
    assert "its staging memory" in str(error)
    assert "is kept until then" in str(error)

    # Late answers would be written over what is loaded there meanwhile; other memory can be loaded into.
    behind = fuse.behind / "model.safetensors"
    (kept,) = unanswered.kept
    if kept.memory:
        with pytest.raises(RuntimeError, match=r"w\d: reads of an earlier load.*load into new memory"):
            fast_load(into, behind)
    others = memory()
    fast_load(others, behind)
    assert all(torch.equal(others[name], tensor) for name, tensor in tensors.items())

    addresses = {storage.data_ptr() for storage in kept.memory}
    assert addresses <= {tensor.untyped_storage().data_ptr() for tensor in into.values()}
    del kept, into, caught, error
    gc.collect()
    fuse.fails()
    assert becomes(lambda: not unanswered.kept)
    assert becomes(lambda: resources() == before)


@every_reader
def test_what_a_look_reads_into_is_kept_too(
    fuse: Fuse, path: Path, backend: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over: list[int] = []
    end = unanswered.end

    def note(pipeline: Any, memory: Any, ops: Any) -> str | None:
        handed_over.extend(storage.data_ptr() for storage in memory)
        return end(pipeline, memory, ops)

    monkeypatch.setattr(unanswered, "end", note)
    fuse.fails(f"hang {9 * MiB}")
    into = memory()["w6"]
    checkpoint = open_checkpoint(path, config=config(backend, strategy, io_timeout_seconds=0.3))
    with pytest.raises(CheckpointReadError, match="has not answered"), checkpoint:  # noqa: PT012  # in the block
        into.copy_(checkpoint["w6"])
        into.sum()
    assert into.untyped_storage().data_ptr() in handed_over


@every_reader
def test_memory_is_loaded_into_again_when_the_answers_have_come(
    fuse: Fuse, path: Path, tensors: dict[str, Tensor], backend: str, strategy: str
) -> None:
    fuse.fails(f"hang {9 * MiB}")
    into = memory()
    with pytest.raises(CheckpointReadError, match="has not answered"):
        fast_load(into, path, config=config(backend, strategy, io_timeout_seconds=0.3))
    fuse.fails()
    assert becomes(lambda: not unanswered.kept)
    fast_load(into, path, config=config(backend, strategy))
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("backend", ["pread", pytest.param("io_uring", marks=pytest.mark.io_uring)])
def test_what_late_answers_bring_into_the_page_cache_is_dropped_after_them(
    tmp_path: Path, tensors: dict[str, Tensor], backend: str
) -> None:
    # To open a file, as who asks what is cached does, would empty its page cache without kernel_cache.
    with Fuse(tmp_path / "behind", tmp_path / "mounted", "attr_timeout=0,entry_timeout=0,kernel_cache") as fuse:
        path = fuse.folder / "model.safetensors"
        safetensors.torch.save_file(tensors, fuse.behind / path.name)
        fuse.fails(f"hang {9 * MiB}")
        leave = config(backend, "buffered", page_cache="leave", io_timeout_seconds=0.3)
        with pytest.raises(CheckpointReadError, match="has not answered"):
            fast_load(memory(), path, config=leave)
        fuse.fails()
        assert becomes(lambda: not unanswered.kept)
        num_bytes = path.stat().st_size - MiB  # but for what Python has read, the header
        assert becomes(lambda: _C.resident_bytes(str(path), MiB, num_bytes) == 0)


def test_a_file_that_can_not_be_opened_because_storage_is_gone_is_an_error(fuse: Fuse, path: Path) -> None:
    into = torch.zeros(MiB // 2, dtype=torch.int32)
    checkpoint = open_checkpoint(path, config=config("pread", "buffered", io_timeout_seconds=0.5))
    fuse.fails("hang_open")
    unheard = pytest.raises(CheckpointReadError, match="has not answered what it was asked about the file")
    with unheard as caught, checkpoint:
        into.copy_(checkpoint["w5"])
    assert caught.value.path == str(path)
    assert caught.value.incomplete == ["w5"]
    assert not into.any()


@pytest.mark.parametrize("leave", ["close", "exception", "collected"])
def test_leaving_a_load_waits_a_while_for_storage_and_then_keeps_its_memory(
    fuse: Fuse, path: Path, leave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unanswered, "_END_SECONDS", 0.3)
    checkpoint = open_checkpoint(path, config=config("pread", "buffered"))
    fuse.fails(f"hang {9 * MiB}")
    started = time.monotonic()
    if leave == "exception":
        with pytest.raises(ZeroDivisionError), checkpoint:  # noqa: PT012  # it is how the block is left
            memory()["w6"].copy_(checkpoint["w6"])
            checkpoint._program.start()
            time.sleep(0.5)  # by then reads are in flight
            raise ZeroDivisionError
    else:
        checkpoint._program.start_recording(hold_seconds=0)
        memory()["w6"].copy_(checkpoint["w6"])
        checkpoint._program.start()
        time.sleep(0.5)
        if leave == "close":
            checkpoint.close()
        del checkpoint
        gc.collect()
    assert time.monotonic() - started < 8
    assert unanswered.kept
    fuse.fails()
    assert becomes(lambda: not unanswered.kept)


def test_ctrl_c_gets_out_of_a_load_whose_storage_does_not_answer(
    fuse: Fuse, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first lets go of the load when its reads are answered, the second at once."""
    fuse.fails(f"hang {9 * MiB}")
    timers = [threading.Timer(seconds, signal.raise_signal, (signal.SIGINT,)) for seconds in (0.5, 1.0)]
    for timer in timers:
        timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fast_load(memory(), path, config=config("pread", "buffered"))
    assert time.monotonic() - started < 8
    for timer in timers:
        timer.join()
    assert unanswered.kept
