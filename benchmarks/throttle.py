"""A disk that is exactly as slow as it is told to be: this process, and those that it starts, in a control group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def throttled(folder: Path, bytes_per_second: int, reads_per_second: int = 0) -> Iterator[None]:
    """Limits what is read of the device under a folder while the block runs, by the block layer's controller.

    Args:
        reads_per_second: 0: as many as there are.

    Raises:
        OSError: not root, no such controller, or no device that it knows.
    """
    number = os.stat(folder).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    is_v1 = (_CGROUPS / "blkio").is_dir()
    parent = _CGROUPS / "blkio" if is_v1 else _CGROUPS
    # Where this process is now; the line of version 2 begins with `0::`.
    name = ":blkio:" if is_v1 else "0::"
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    home = parent / next(line.split(name, 1)[1].lstrip("/") for line in lines if name in line)
    group = parent / f"weightlift-{os.getpid()}"
    group.mkdir()
    try:
        if is_v1:
            (group / "blkio.throttle.read_bps_device").write_text(f"{device} {bytes_per_second}")
            (group / "blkio.throttle.read_iops_device").write_text(f"{device} {reads_per_second}")
        else:
            (group / "io.max").write_text(f"{device} rbps={bytes_per_second} riops={reads_per_second or 'max'}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
