"""What weightlift is measured against: plain reads, written without any of its code, and safetensors."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

CHUNK_BYTES = 4 << 20
_POPULATE_BYTES = 16 << 20
_HUGE_PAGE = 2 << 20
_BLOCK = 4096  # of O_DIRECT
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23

# Called through ctypes, madvise lets other threads run, which mmap.madvise does not.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _madvise(address: int, length: int, advice: int) -> None:
    if _libc.madvise(address, length, advice) != 0:
        raise OSError(ctypes.get_errno(), f"madvise({advice}): {os.strerror(ctypes.get_errno())}")


def _run_threads(num_threads: int, work: Iterable[Any], action: Callable[[Any], None]) -> None:
    """Calls action on each item, from several threads; the first exception comes out."""
    items = iter(list(work))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            while not errors:
                with lock:
                    item = next(items, None)
                if item is None:
                    return
                action(item)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def read_direct(paths: list[Path], queue_depth: int) -> object:
    """The reference R: `read_ranges` of whole files."""
    return read_ranges([(path, 0, path.stat().st_size) for path in paths], queue_depth)


def read_ranges(ranges: list[tuple[Path, int, int]], queue_depth: int, chunk_bytes: int = CHUNK_BYTES) -> object:
    """Parts of files, (path, begin, end), by O_DIRECT, into fresh huge pages that a thread populates ahead.

    Returns what keeps the memory alive.
    """
    ranges = [(path, begin // _BLOCK * _BLOCK, end) for path, begin, end in ranges]
    starts, size = [], 0
    for _, begin, end in ranges:
        starts.append(size)
        size += -(-(end - begin) // _HUGE_PAGE) * _HUGE_PAGE
    mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    skipped = -address % _HUGE_PAGE
    view, address = view[skipped : skipped + size], address + skipped
    _madvise(address, size, _MADV_HUGEPAGE)

    populated, grown = 0, threading.Condition()

    def populate() -> None:
        nonlocal populated
        for begin in range(0, size, _POPULATE_BYTES):
            _madvise(address + begin, min(_POPULATE_BYTES, size - begin), _MADV_POPULATE_WRITE)
            with grown:
                populated = begin + _POPULATE_BYTES
                grown.notify_all()

    fds = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in {path for path, _, _ in ranges}}

    def read(chunk: tuple[int, int, int]) -> None:
        number, offset, length = chunk
        path, first, _ = ranges[number]
        begin = starts[number] + offset
        with grown:
            grown.wait_for(lambda: populated >= begin + length)
        # Lengths are whole blocks: the last read of a file runs past its end, and comes back short.
        target = view[begin : begin + -(-length // _BLOCK) * _BLOCK]
        if os.preadv(fds[path], [target], first + offset) < length:
            raise OSError(f"{path}: short read at {first + offset}")

    ahead = threading.Thread(target=populate)
    ahead.start()
    _run_threads(queue_depth, _chunks([end - begin for _, begin, end in ranges], chunk_bytes), read)
    ahead.join()
    for fd in fds.values():
        os.close(fd)
    return view


def _chunks(sizes: list[int], chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
    for number, size in enumerate(sizes):
        for offset in range(0, size, chunk_bytes):
            yield number, offset, min(chunk_bytes, size - offset)


def advise_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Asks for huge pages for the inner part of each tensor's memory."""
    for tensor in tensors:
        begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
        if begin < end:
            _madvise(begin, end - begin, _MADV_HUGEPAGE)


def read_buffered(pieces: list[tuple[str, int, Tensor]], num_threads: int) -> None:
    """Fills contiguous tensors, each from (path, offset), by plain pread into their memory."""
    fds = {path: os.open(path, os.O_RDONLY) for path, _, _ in pieces}

    def read(piece: tuple[int, int, memoryview]) -> None:
        fd, offset, target = piece
        while target.nbytes:
            count = os.preadv(fd, [target], offset)
            if count == 0:
                raise OSError("end of file inside a tensor")
            target, offset = target[count:], offset + count

    work = []
    for path, offset, tensor in pieces:
        target = memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
        for begin in range(0, tensor.nbytes, CHUNK_BYTES):
            work.append((fds[path], offset + begin, target[begin : begin + CHUNK_BYTES]))
    _run_threads(num_threads, work, read)
    for fd in fds.values():
        os.close(fd)


def safetensors_owned(paths: list[Path]) -> dict[str, Tensor]:
    """Every tensor, through safetensors, in memory of its own (load_file maps the file; the clone reads it)."""
    return {name: tensor.clone() for path in paths for name, tensor in load_file(path).items()}


def safetensors_slices(paths: list[Path], into: Mapping[str, Tensor], rank: int, world_size: int, dim: int = 0) -> None:
    """One rank's part of every tensor that has a place, through safetensors' get_slice."""
    for path in paths:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  # a safe_open is no mapping
                if name not in into:
                    continue
                length, part = into[name].shape[dim], shard.get_slice(name)
                assert part.get_shape()[dim] == length * world_size
                into[name].copy_(part[(slice(None),) * dim + (slice(rank * length, (rank + 1) * length),)])
