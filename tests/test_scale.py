"""Large checkpoints: many shards, and more bytes than the machine has memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch

from weightlift import LoadConfig, open_checkpoint
from weightlift.plan import Slice, plan_checkpoint, record_slices
from weightlift.reserved import ReservedMemory

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


def write_sparse(path: Path, name: str, num_tensors: int, shape: list[int], dtype: str, num_bytes: int) -> None:
    """A file whose data are holes."""
    header = {
        f"{name}.{i}": hostile.tensor(dtype, shape, [i * num_bytes, (i + 1) * num_bytes]) for i in range(num_tensors)
    }
    hostile.write(path, header)
    os.truncate(path, path.stat().st_size + num_tensors * num_bytes)


@pytest.mark.slow
def test_one_rank_of_64_is_planned_and_loaded_from_10_000_shards(tmp_path: Path) -> None:
    for i in range(10_000):
        write_sparse(tmp_path / f"{i}.safetensors", f"w{i}", 1, [640, 16], "BF16", 640 * 16 * 2)
    slices, config = [Slice.parse("*:0:17/64")], LoadConfig(strategy="buffered")
    plan = plan_checkpoint(tmp_path, slices=slices, config=config)
    with open_checkpoint(tmp_path, config=config) as checkpoint:
        state = record_slices(checkpoint, slices, ReservedMemory().empty)
        checkpoint.run()
        report = checkpoint.report
    assert len(report.files) == len(state) == 10_000
    assert plan.report.num_reads == report.num_reads == 10_000
    assert plan.report.bytes_read == report.bytes_read == 10_000 * 320
    assert not any(tensor.any() for tensor in state.values())


class AliasedMemory:
    """Addresses for `num_bytes` that all lead to the same 64 MiB, so that a large destination costs no memory."""

    WINDOW = 64 * MiB

    def __init__(self, num_bytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc, self._size, self._next = libc, num_bytes, 0
        fd = os.memfd_create("destination")
        os.ftruncate(fd, self.WINDOW)
        self._begin = libc.mmap(None, num_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        map_fixed = 0x10
        for at in range(0, num_bytes, self.WINDOW):
            both = mmap.PROT_READ | mmap.PROT_WRITE
            placed = libc.mmap(self._begin + at, self.WINDOW, both, mmap.MAP_SHARED | map_fixed, fd, 0)
            assert placed == self._begin + at, ctypes.get_errno()
        os.close(fd)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer: Any = (ctypes.c_uint8 * num_bytes).from_address(self._begin + self._next)
        self._next += num_bytes
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def close(self) -> None:
        self._libc.munmap(self._begin, self._size)


class PeakAnonymous:
    """The most anonymous memory that this process had more than at the start, looked at often from a thread."""

    def __enter__(self) -> PeakAnonymous:
        self._ended = threading.Event()
        self._first = self._peak = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._peak - self._first

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self._peak = max(self._peak, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * KiB for line in lines if line.startswith("RssAnon:"))


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[Path]:
    """8 GiB in two files."""
    for i in range(2):
        write_sparse(tmp_path / f"{i}.safetensors", f"w{i}", 64, [4096, 4096], "F32", 64 * MiB)
    yield tmp_path
    for i in range(2):  # out of the page cache as well
        (tmp_path / f"{i}.safetensors").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["buffered", pytest.param("direct", marks=pytest.mark.direct_io)])
def test_memory_beyond_the_destination_does_not_grow_with_the_checkpoint(sparse: Path, strategy: Any) -> None:
    config = LoadConfig(strategy=strategy, staging_bytes=64 * MiB)
    growths = []
    for num_files in (1, 2):
        files = [sparse / f"{i}.safetensors" for i in range(num_files)]
        memory = AliasedMemory(num_files * 4 * GiB)
        with PeakAnonymous() as peak, open_checkpoint(files, config=config, watch=False) as checkpoint:
            for i, tensor in enumerate(checkpoint.values()):  # three of four are read in place, one is converted
                dtype = torch.bfloat16 if i % 4 == 0 else torch.float32
                memory.empty(tuple(tensor.shape), dtype).copy_(tensor)
            checkpoint.run()
            assert checkpoint.report.bytes_read >= num_files * 4 * GiB
        memory.close()
        growths.append(peak.growth)
    four, eight = growths
    assert eight <= four + 8 * MiB
    assert eight <= 64 * MiB + 32 * MiB
