"""What a measurement was made on: processor, memory, kernel; file system and device of a path."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from . import _C
from ._version import __version__
from .filesystem import mount_of

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def machine() -> dict[str, Any]:
    """The machine, in types that ``json.dumps`` takes. Sizes in bytes."""
    models = [line.split(":", 1)[1].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    return {
        "weightlift": __version__,
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "huge_pages": _chosen(_lines(_HUGE_PAGES)),
    }


def storage_of(path: str) -> dict[str, Any]:
    """The file system that a file lies on, its block device if it has one, and what a probe of direct I/O says."""
    mount = mount_of(path)
    number = os.stat(path).st_dev
    device: dict[str, Any] | None = None
    folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if folder.exists():
        disk = folder if (folder / "queue").exists() else folder.parent  # a partition lies inside of its disk
        device = {
            "name": folder.name,
            "model": " ".join(_lines(disk / "device" / "model")).strip(),
            "rotational": _lines(disk / "queue" / "rotational") == ["1"],
            "scheduler": _chosen(_lines(disk / "queue" / "scheduler")),
        }
    return {
        "mount_point": mount.point,
        "file_system": mount.kind,
        "device": device,
        "direct_io": _C.probe_direct(path),
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _chosen(lines: list[str]) -> str:
    """Of `always [madvise] never`, what is in brackets; of a file that offers no choice, what it says."""
    text = " ".join(lines)
    return text.partition("[")[2].partition("]")[0] or text.strip()
