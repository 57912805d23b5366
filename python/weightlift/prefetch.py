"""Files brought into the page cache before their tensors are asked for: when that pays, and the threads that do it.

Nothing here can change what is loaded: a file that cannot be read ahead is a warning, and the load reads it itself.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ._logging import logger
from .available_memory import available_bytes
from .config import MiB, ResolvedConfig
from .errors import printable
from .filesystem import Mount, mount_of
from .local_rank import local_rank
from .report import format_bytes

if TYPE_CHECKING:
    from .entries import Shard

# Of the memory that is available, a checkpoint may take this part of the page cache without driving itself out.
_CACHED_SHARE = 0.9
# A block is read into the same memory again and again, in one call. A cold file of 0.9 GiB in blocks of 16 MiB, on a
# 2-core VM with a virtio disk: 0.37 s; into 16 MiB of memory 0.40 s or more; after POSIX_FADV_WILLNEED 0.45 s or more.
_PIECE_BYTES = MiB
_EAGER_BLOCK_BYTES = 16 * MiB
# How long closing waits for reads that are under way. A server that is gone may never answer them.
_JOIN_SECONDS = 10.0


def prefetch_pays(
    strategy: str, mount: Mount, total_bytes: int, available: int, *, processes: int
) -> tuple[bool, int, str]:
    """Whether to read whole files into the page cache ahead of the load.

    Args:
        strategy: of LoadConfig. "prefetch" always does. "auto" does it across a network, for several processes of this
            machine, who share the page cache, where all fits into memory. Whoever loads alone reads faster what it
            needs, and nothing else, past the page cache: the kernel reads ahead into that by 128 KiB, which is little
            where an answer takes milliseconds.
        mount: where the files are.
        total_bytes: of the files.
        available: bytes of memory.
        processes: of this machine, that load too.

    Returns:
        Whether; how loud to say it (a level of `logging`); and what to say.
    """
    fits = total_bytes <= _CACHED_SHARE * available
    room = (
        f"its {format_bytes(total_bytes)} {'fit' if fits else 'do not fit'} into {_CACHED_SHARE:.0%} of the "
        f"{format_bytes(available)} of memory available"
    )
    where = f"{printable(mount.point)} is {mount.kind}"
    if strategy == "prefetch":
        if fits:
            return True, logging.INFO, "prefetch: as configured"
        return True, logging.WARNING, f"prefetch: as configured, though {room}: it may drive itself out of the cache"
    if strategy != "auto":
        return False, logging.INFO, f"no prefetch: the strategy is {strategy}"
    if not mount.is_network:
        return False, logging.INFO, f"no prefetch: {where}, not a network file system"
    if processes == 1:
        return False, logging.INFO, f"no prefetch: {where}, a network file system, and no other process loads from it"
    if not fits:
        return False, logging.WARNING, f"no prefetch: {where}, a network file system, but {room}"
    return True, logging.INFO, f"prefetch: {where}, a network file system, and {room}"


class ReadAhead:
    """What a strategy brings into the page cache before tensors are read: all files, each before its turn, or none.

    Attributes:
        reader: the strategy of the core, which reads the tensors: "auto", "direct" or "buffered".
        notes: what was decided and why, also in the log.
        whole: the shards that are read whole.
    """

    def __init__(self, config: ResolvedConfig, shards: Sequence[Shard], *, only_decide: bool = False) -> None:
        """Decides, and starts to prefetch where it is so decided. `shards` are those that hold wanted tensors."""
        strategy = config.strategy
        prefetched, self.notes = _to_prefetch(config, shards)
        self.whole = list(shards) if strategy == "eager" else prefetched
        self._prefetch: Prefetch | None = None
        if prefetched and not only_decide:
            self._prefetch = Prefetch(
                [shard.path for shard in prefetched],
                num_threads=config.prefetch_num_threads,
                block_bytes=config.prefetch_block_bytes,
            )
        if strategy in ("auto", "torchao"):
            # Past the cache, what is on its way into it would be fetched twice.
            self.reader = "buffered" if prefetched else "auto"
        else:
            self.reader = "direct" if strategy == "direct" else "buffered"
        self._unread = {shard.path for shard in shards} if strategy == "eager" and not only_decide else set()

    def before(self, shards: Iterable[Shard]) -> None:
        """Called before tensors of these shards are read. Where the strategy is "eager", reads those whole that were
        not yet, and returns when they are cached."""
        for shard in shards if self._unread else ():
            if shard.path in self._unread:
                self._unread.remove(shard.path)
                _try_to_read(shard.path, block_bytes=_EAGER_BLOCK_BYTES)

    def close(self) -> None:
        """Ends the threads. May be called twice."""
        if self._prefetch is not None:
            self._prefetch.close()


class Prefetch:
    """Threads that read files into the page cache, a file each at a time, from its start to its end."""

    def __init__(self, paths: Sequence[str], *, num_threads: int, block_bytes: int) -> None:
        """Starts to read. Processes of one machine share the files among them, and the page cache."""
        rank, size = local_rank()
        mine = list(paths[rank::size])
        self._cancelled = threading.Event()
        self._paths = iter(mine)
        self._lock = threading.Lock()
        self._block_bytes = block_bytes
        self._threads = [
            threading.Thread(target=self._run, name=f"wl-prefetch-{number}", daemon=True)
            for number in range(min(num_threads, len(mine)))
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._cancelled.is_set():
            with self._lock:
                path = next(self._paths, None)
            if path is None:
                return
            _try_to_read(path, block_bytes=self._block_bytes, is_cancelled=self._cancelled.is_set)

    def wait(self) -> None:
        """Returns when all has been read."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Reads no more, and returns when no read is under way: after a while also where storage does not answer."""
        self._cancelled.set()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in self._threads)
        if stuck:
            logger.warning(
                "prefetch: %d reads were not answered within %g s; they are left behind", stuck, _JOIN_SECONDS
            )
        self._threads.clear()


def _to_prefetch(config: ResolvedConfig, shards: Sequence[Shard]) -> tuple[list[Shard], list[str]]:
    """The shards to prefetch, and the notes of why or why not."""
    strategy = config.strategy
    if not shards:
        return [], []
    if strategy == "auto" and config.page_cache == "leave":
        return [], ["no prefetch: the page cache is to be left as it was found"]
    mounts = {shard.device: mount_of(shard.path) for shard in {shard.device: shard for shard in shards}.values()}
    candidates = list(shards)
    if strategy == "auto":
        across = [shard for shard in shards if mounts[shard.device].is_network]
        candidates = across or candidates
    total_bytes = sum(shard.size for shard in candidates)
    mount, (_, processes) = mounts[candidates[0].device], local_rank()
    pays, level, note = prefetch_pays(strategy, mount, total_bytes, available_bytes(), processes=processes)
    logger.log(level, "%s", note)
    return candidates if pays else [], [note]


def _try_to_read(path: str, *, block_bytes: int, is_cancelled: Callable[[], bool] = lambda: False) -> None:
    try:
        read_into_cache(path, block_bytes=block_bytes, is_cancelled=is_cancelled)
    except OSError as error:
        logger.warning("%s: it could not be read ahead: %s", printable(path), error.strerror)


def read_into_cache(path: str, *, block_bytes: int, is_cancelled: Callable[[], bool] = lambda: False) -> None:
    """Reads a file from its start to its end, and keeps nothing of it but what the page cache keeps.

    Args:
        block_bytes: how much is asked for at a time.
        is_cancelled: asked before each block whether to stop.

    Raises:
        OSError: it can't be opened or read.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        whole, rest = divmod(block_bytes, _PIECE_BYTES)
        with mmap.mmap(-1, _PIECE_BYTES) as memory, memoryview(memory) as buffer, buffer[:rest] as last:
            pieces = [buffer] * whole + [last] * bool(rest)  # 1024 at most, as the kernel takes
            for offset in range(0, size, block_bytes):
                if is_cancelled():
                    return
                os.preadv(fd, pieces, offset)
    finally:
        os.close(fd)
