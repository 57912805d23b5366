"""What a load takes of this process, and what it may not leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def loading_threads() -> list[str]:
    """Names of the core's threads, and of those that prefetch."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # it has ended
            continue
    return [name for name in names if name.startswith("wl-")]


def resources() -> tuple[list[str], list[str], int]:
    """Threads, descriptors, and mappings of files and rings."""
    gc.collect()
    fds = sorted(map(os.readlink, filter(os.path.islink, Path("/proc/self/fd").iterdir())))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return loading_threads(), fds, sum("safetensors" in line or "io_uring" in line for line in maps)


class PeakMemory:
    """The growth of this process's anonymous memory, looked at often from a thread."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self.first = self.peak = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

    @property
    def growth(self) -> int:
        return self.peak - self.first


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A memory cgroup, of version 1 or 2: its file of processes. Skips the test where none can be made."""
    version_1 = Path("/sys/fs/cgroup/memory")
    root = version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    group = root / f"weightlift-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup: {error.strerror}")
    try:
        try:
            (group / ("memory.limit_in_bytes" if root == version_1 else "memory.max")).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no memory cgroup: {error.strerror}")
        yield group / "cgroup.procs"
    finally:
        for _ in range(100):  # its last process may still be ending
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)
