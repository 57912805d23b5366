"""Memory for tensors that weightlift itself allocates: placed so that storage can write straight into it."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import TYPE_CHECKING

import torch

from .config import MiB
from .entries import CheckpointFiles, Shard, TensorEntry
from .report import format_bytes
from .tensor import contiguous_strides, empty, strides_of

if TYPE_CHECKING:
    from .reserved import ReservedMemory

# Direct reads need file offset and address to agree modulo this; no device asks for more.
_ALIGNMENT = 4096
_HUGE_PAGE = 2 * MiB
MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE, which Python has from 3.13 on
# Less is not worth an allocation of whole huge pages.
_MIN_MAPPED_BYTES = 4 * MiB


def allocate_like(
    files: CheckpointFiles, device: torch.device, *, reserved: ReservedMemory | None = None
) -> dict[str, torch.Tensor]:
    """An uninitialised tensor for every tensor of a checkpoint, with its strides, in the order of the files.

    On the CPU, those of a large shard lie in one mapping as they lie in the file, each address as far from a multiple
    of 4096 as its offset: O_DIRECT can then read into them. The mapping lives as long as one of its tensors.
    Tensors that are the same bytes of a file share memory; those that overlap otherwise do not.

    Args:
        reserved: where tensors on the CPU shall come from that nobody is going to fill.

    Raises:
        MemoryError: there is no room for such a mapping.
        RuntimeError: torch has no memory for the other tensors.
    """
    wanted = {id(entry) for entry in files.tensors.values()}
    tensors = {}
    for shard in files.shards:
        mapping, base = _map_like(shard, reserved is not None) if device.type == "cpu" else (None, 0)
        mapped_end = 0
        same_bytes: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        for entry in shard.tensors:
            if id(entry) not in wanted:
                continue
            strides = strides_of(entry)
            address = base + entry.offset
            twin = same_bytes.get((entry.offset, entry.nbytes, entry.dtype)) if entry.nbytes else None
            if twin is not None:
                tensor = torch.empty(0, dtype=entry.dtype, device=device)
                tensor.set_(twin.untyped_storage(), twin.storage_offset(), entry.shape, strides)
            # torch wants elements at multiples of their size, which a file need not give.
            elif mapping is None or entry.nbytes == 0 or address % entry.dtype.itemsize or entry.offset < mapped_end:
                tensor = (
                    torch.empty_strided(entry.shape, strides, dtype=entry.dtype, device=device)
                    if reserved is None
                    else reserved.empty(entry.shape, dtype=entry.dtype, strides=strides)
                )
            else:
                memory = (ctypes.c_uint8 * entry.nbytes).from_buffer(mapping, address - _address_of(mapping))
                tensor = torch.frombuffer(memory, dtype=entry.dtype).as_strided(entry.shape, strides)
                mapped_end = entry.offset + entry.nbytes
            same_bytes[entry.offset, entry.nbytes, entry.dtype] = tensors[entry.name] = tensor
    return tensors


def allocate(entry: TensorEntry, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor for a tensor of a checkpoint, with its strides, in memory of its own.

    Real memory, whatever modes the caller has set. On the CPU, that of a large one is a mapping placed as in
    `allocate_like`.

    Raises:
        RuntimeError: torch has no memory for it.
    """
    if device.type != "cpu":
        return empty(entry.shape, strides_of(entry), entry.dtype, device)
    return _allocate(entry.offset, entry.shape, strides_of(entry), entry.dtype, entry.nbytes)


def allocate_for(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The same for contiguous values that begin at an offset of a file. Freed, large ones go back to the system."""
    return _allocate(offset, shape, contiguous_strides(shape), dtype, math.prod(shape) * dtype.itemsize)


def _allocate(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, num_bytes: int
) -> torch.Tensor:
    if num_bytes < _MIN_MAPPED_BYTES or offset % dtype.itemsize:
        return empty(shape, strides, dtype)
    try:
        mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE + _ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # as many mappings as a process may have, or no memory
        return empty(shape, strides, dtype)
    start = _address_of(mapping)
    # Huge pages begin where the first whole page of the file goes.
    first_huge = -(-(start + _ALIGNMENT) // _HUGE_PAGE) * _HUGE_PAGE
    memory = (ctypes.c_uint8 * num_bytes).from_buffer(mapping, first_huge - -offset % _ALIGNMENT - start)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def _map_like(shard: Shard, reserve: bool) -> tuple[mmap.mmap | None, int]:
    """A mapping for the shard's data, and the address that its byte 0 would have."""
    data_bytes = shard.size - shard.data_offset
    if data_bytes < _MIN_MAPPED_BYTES:
        return None, 0
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (MAP_NORESERVE if reserve else 0)
        mapping = mmap.mmap(-1, data_bytes + _HUGE_PAGE + _ALIGNMENT, flags=flags)
    except OSError as error:
        raise MemoryError(f"{shard.path}: no memory for its {format_bytes(data_bytes)}: {error.strerror}") from error
    start = _address_of(mapping)
    first_huge = -(-start // _HUGE_PAGE) * _HUGE_PAGE
    return mapping, first_huge + shard.data_offset % _ALIGNMENT - shard.data_offset


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_uint8.from_buffer(mapping))
