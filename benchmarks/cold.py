"""Making files cold: what was read or written before must not make the next read fast."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from weightlift import _C

_COLD_FRACTION, _WARM_FRACTION = 0.01, 0.99
_ATTEMPTS = 3  # other processes may read the files, or drop the page cache, meanwhile
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def cold_method() -> str:
    """How `drop_page_cache` works here, in words."""
    if _can_drop_caches():
        return "page cache dropped through /proc/sys/vm/drop_caches"
    return "POSIX_FADV_DONTNEED on each file (not root: a few pages may stay cached)"


def drop_page_cache(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Writes the files out and takes them out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if _can_drop_caches():
        _DROP_CACHES.write_text("1\n")


def warm_page_cache(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Reads the files, so that all of their pages are cached (memory permitting)."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(4 << 20)
            while file.readinto(buffer):
                pass


def cached_fraction(paths: Iterable[str | os.PathLike[str]]) -> float:
    """How much of the files is in the page cache. Ends the program where Linux does not tell."""
    total = cached = 0
    for path in paths:
        size = os.path.getsize(path)
        resident = _C.resident_bytes(os.fspath(path), 0, size)
        if resident < 0:
            raise SystemExit(f"{path}: what of it is cached can't be told: {os.strerror(-resident)}")
        total, cached = total + size, cached + resident
    return cached / total


def require_state(paths: Iterable[str | os.PathLike[str]], *, cold: bool) -> None:
    """Drops the files from the page cache, or reads them into it; ends the program where that has not worked."""
    paths = list(paths)
    for _ in range(_ATTEMPTS):
        (drop_page_cache if cold else warm_page_cache)(paths)
        fraction = cached_fraction(paths)
        if fraction <= _COLD_FRACTION if cold else fraction >= _WARM_FRACTION:
            return
    raise SystemExit(f"{fraction:.1%} of the files are in the page cache: not {'cold' if cold else 'warm'}")


def _can_drop_caches() -> bool:
    return os.geteuid() == 0 and os.access(_DROP_CACHES, os.W_OK)
