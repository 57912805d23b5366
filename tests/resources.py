"""What a load may not leave behind in this process."""

from __future__ import annotations

import gc
import os
from pathlib import Path


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
