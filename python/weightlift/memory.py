"""Memory for tensors that weightlift itself allocates: placed so that storage can write straight into it."""

from __future__ import annotations

import ctypes
import mmap

import torch

from .config import MiB
from .entries import CheckpointFiles, Shard
from .report import format_bytes

# Direct reads need file offset and address to agree modulo this; no device asks for more.
_ALIGNMENT = 4096
_HUGE_PAGE = 2 * MiB
# Smaller shards are not worth an allocation of whole huge pages.
_MIN_SHARED_BYTES = 4 * MiB


def allocate_like(files: CheckpointFiles, device: torch.device) -> dict[str, torch.Tensor]:
    """An uninitialised tensor for every tensor of a checkpoint, in the order of the files.

    On the CPU, those of a large shard lie in one mapping as they lie in the file, each address as far from a multiple
    of 4096 as its offset: O_DIRECT can then read into them. The mapping lives as long as one of its tensors.

    Raises:
        MemoryError: there is no room for such a mapping.
        RuntimeError: torch has no memory for the other tensors.
    """
    if device.type != "cpu":
        return {e.name: torch.empty(e.shape, dtype=e.dtype, device=device) for e in files.tensors.values()}
    wanted = {id(entry) for entry in files.tensors.values()}
    tensors = {}
    for shard in files.shards:
        mapping, base = _map_like(shard)
        for entry in shard.tensors:
            if id(entry) not in wanted:
                continue
            address = base + entry.offset
            # torch wants elements at multiples of their size, which a file need not give.
            if mapping is None or entry.nbytes == 0 or address % entry.dtype.itemsize:
                tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype, device=device)
                continue
            memory = (ctypes.c_uint8 * entry.nbytes).from_buffer(mapping, address - _address_of(mapping))
            tensors[entry.name] = torch.frombuffer(memory, dtype=entry.dtype).view(entry.shape)
    return tensors


def _map_like(shard: Shard) -> tuple[mmap.mmap | None, int]:
    """A mapping for the shard's data, and the address that its byte 0 would have."""
    data_bytes = shard.size - shard.data_offset
    if data_bytes < _MIN_SHARED_BYTES:
        return None, 0
    try:
        mapping = mmap.mmap(-1, data_bytes + _HUGE_PAGE + _ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{shard.path}: no memory for its {format_bytes(data_bytes)}: {error.strerror}") from error
    start = _address_of(mapping)
    first_huge = -(-start // _HUGE_PAGE) * _HUGE_PAGE
    return mapping, first_huge + shard.data_offset % _ALIGNMENT - shard.data_offset


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_uint8.from_buffer(mapping))
