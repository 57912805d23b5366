"""How files are read: by what the page cache holds, or as told; and that the report says it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from weightlift import _C as core
from weightlift import LoadConfig, LoadReport, fast_load, load_file, open_checkpoint
from weightlift.memory import allocate_like

MiB = 1 << 20
NUM_BYTES = 64 * MiB


def make_cold(path: Path) -> None:
    """Writes back and drops the file from the page cache; skips the test where that does not work."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    left = core.resident_bytes(str(path), 0, path.stat().st_size)
    if not 0 <= left <= 4 * MiB:
        pytest.skip(f"{left} bytes of the file stay in the page cache")


def make_warm(path: Path, num_bytes: int = -1) -> None:
    """Reads the first bytes into the page cache, and no others ahead of need."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        end = path.stat().st_size if num_bytes < 0 else num_bytes
        for offset in range(0, end, MiB):
            os.pread(fd, min(MiB, end - offset), offset)
    finally:
        os.close(fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {f"w{i}": torch.arange(4 * MiB, dtype=torch.int32) + i for i in range(4)}  # of 16 MiB
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def load(path: Path, *, touched: bool = False, **options: Any) -> LoadReport:
    into = {f"w{i}": torch.empty(4 * MiB, dtype=torch.int32) for i in range(4)}
    if touched:
        for tensor in into.values():
            tensor.zero_()
    report = fast_load(into, path, config=LoadConfig(**options))
    for i in range(4):
        assert torch.equal(into[f"w{i}"], torch.arange(4 * MiB, dtype=torch.int32) + i)
    assert report.bytes_needed == NUM_BYTES
    return report


@pytest.mark.parametrize("touched", [False, True])
def test_auto_reads_what_is_cached_through_the_cache_and_in_place(path: Path, touched: bool) -> None:
    make_warm(path)
    report = load(path, touched=touched)
    assert report.buffered_bytes == report.bytes_read == NUM_BYTES
    assert report.in_place_bytes >= 0.99 * NUM_BYTES
    (file,) = report.files
    assert (file.strategy, file.reader, file.reason) == ("buffered", "pread", "in the page cache")


@pytest.mark.direct_io
def test_auto_reads_what_is_not_cached_past_the_cache(path: Path) -> None:
    make_cold(path)
    report = load(path)
    (file,) = report.files
    # The page cache may hold a part: the header, and what the kernel read ahead with it.
    assert report.direct_bytes >= NUM_BYTES - 8 * MiB
    assert file.strategy in ("direct", "mixed")
    assert core.resident_bytes(str(path), 0, path.stat().st_size) <= 12 * MiB
    assert report.over_read <= 1.02


@pytest.mark.direct_io
def test_auto_reads_each_part_by_what_is_cached_of_it(path: Path) -> None:
    make_cold(path)
    make_warm(path, 24 * MiB)
    report = load(path)
    assert report.buffered_bytes == pytest.approx(24 * MiB, abs=MiB)
    assert report.direct_bytes == pytest.approx(40 * MiB, abs=MiB)
    (file,) = report.files
    assert file.strategy == "mixed"
    assert file.reason == "partly in the page cache"


@pytest.mark.direct_io
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("backend", [pytest.param("io_uring", marks=pytest.mark.io_uring), "pread"])
def test_direct_is_direct_whatever_is_cached(path: Path, backend: Any, warm: bool) -> None:
    (make_warm if warm else make_cold)(path)
    report = load(path, strategy="direct", backend=backend)
    assert report.direct_bytes == report.bytes_read
    (file,) = report.files
    assert file.strategy.startswith("direct")  # on tmpfs, where nothing can prove it: "direct (unproven)"
    assert file.reader == backend
    assert file.reason


@pytest.mark.parametrize("backend", [pytest.param("io_uring", marks=pytest.mark.io_uring), "pread"])
def test_buffered_is_buffered_whatever_is_cached(path: Path, backend: Any) -> None:
    make_cold(path)
    report = load(path, strategy="buffered", backend=backend)
    assert report.buffered_bytes == report.bytes_read
    (file,) = report.files
    assert (file.strategy, file.reader) == ("buffered", backend)
    assert core.resident_bytes(str(path), 0, path.stat().st_size) >= 0.9 * NUM_BYTES


@pytest.mark.direct_io
def test_direct_reads_go_in_place_into_memory_that_can_have_huge_pages(path: Path) -> None:
    assert load(path, strategy="direct", touched=True).in_place_bytes == 0
    assert load(path, strategy="direct", advise_hugepages=False).in_place_bytes == 0
    # Where direct I/O can go: offset and address agree modulo its alignment.
    with open_checkpoint(path, config=LoadConfig(strategy="direct")) as checkpoint:
        tensors = allocate_like(checkpoint.files, torch.device("cpu"))
        for name, tensor in tensors.items():
            tensor.copy_(checkpoint[name])
    assert checkpoint.report.in_place_bytes >= 0.99 * NUM_BYTES


@pytest.mark.parametrize("strategy", ["auto", "buffered", pytest.param("direct", marks=pytest.mark.direct_io)])
def test_strategy_comes_from_the_environment_too(path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTLIFT_STRATEGY", strategy)
    make_warm(path)
    (file,) = load(path).files
    assert file.strategy.partition(" ")[0] == ("direct" if strategy == "direct" else "buffered")


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system whose pages are the files: nothing to be read past them."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    folder = tmp_path / "ramfs"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "ramfs", "none", folder], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no ramfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("strategy", ["auto", "buffered"])
def test_file_system_in_memory(ramfs: Path, strategy: Any) -> None:
    expected = {"w": torch.arange(2 * MiB, dtype=torch.int32)}
    safetensors.torch.save_file(expected, ramfs / "model.safetensors")
    assert torch.equal(load_file(ramfs, config=LoadConfig(strategy=strategy))["w"], expected["w"])
    report = fast_load({"w": torch.empty(2 * MiB, dtype=torch.int32)}, ramfs, config=LoadConfig(strategy=strategy))
    assert report.bytes_needed == 8 * MiB
    assert report.files[0].reason


@pytest.mark.direct_io
def test_queue_of_one_and_of_many(path: Path) -> None:
    for depth in (1, 3, 256):
        for backend in ("auto", "pread"):
            report = load(path, strategy="direct", queue_depth=depth, backend=backend, chunk_bytes=192 << 10)
            assert report.direct_bytes == report.bytes_read
