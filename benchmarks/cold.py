"""Making files cold: what was read or written before must not make the next read fast."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

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


def _can_drop_caches() -> bool:
    return os.geteuid() == 0 and os.access(_DROP_CACHES, os.W_OK)
