"""Small tensors are values: scales, shapes, norms. The first that is looked at brings its small neighbours along."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .config import MiB
from .tensor import empty

if TYPE_CHECKING:
    from .entries import TensorEntry

# Up to this size a tensor is a value.
SMALL_BYTES = 64 << 10
# Neighbours are read together up to this size, and the latest runs are kept.
_RUN_BYTES = 4 * MiB
_KEPT_BYTES = 64 * MiB


class SmallValues:
    """The bytes of small tensors, read in runs: writers of checkpoints place small tensors together.

    Attributes:
        num_bytes: kept now.
    """

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}
        self._runs: collections.deque[tuple[Sequence[TensorEntry], int]] = collections.deque()  # with their bytes
        self.num_bytes = 0

    def bytes_of(self, entry: TensorEntry, read: Callable[[torch.Tensor, TensorEntry, int], None]) -> torch.Tensor:
        """The bytes of an entry of at most SMALL_BYTES. To be read only: they are kept for others.

        Args:
            read: fills memory with the bytes of an entry's file from an offset on, now.
        """
        flat = self._values.get(id(entry))
        if flat is not None:
            return flat
        run = _run_around(entry)
        begin = run[0].offset
        memory = empty((max(small.offset + small.nbytes for small in run) - begin,), (1,), torch.uint8)
        read(memory, entry, begin)
        for small in run:
            self._values[id(small)] = memory[small.offset - begin : small.offset - begin + small.nbytes]
        flat = self._values[id(entry)]
        self._runs.append((run, memory.nbytes))
        self.num_bytes += memory.nbytes
        while self.num_bytes > _KEPT_BYTES:
            oldest, num_bytes = self._runs.popleft()
            self.num_bytes -= num_bytes
            for small in oldest:
                self._values.pop(id(small), None)  # runs may overlap
        return flat

    def clear(self) -> None:
        self._values.clear()
        self._runs.clear()
        self.num_bytes = 0


def _run_around(entry: TensorEntry) -> Sequence[TensorEntry]:
    """The entry and the small tensors before and behind it in its file, up to a bound."""
    tensors = entry.shard.tensors
    position = bisect.bisect_left(tensors, (entry.offset, entry.nbytes), key=lambda e: (e.offset, e.nbytes))
    while tensors[position] is not entry:
        position += 1
    first = last = position
    begin, end = entry.offset, entry.offset + entry.nbytes
    while first > 0 and _extends(tensors[first - 1], begin, end):
        first -= 1
        begin, end = tensors[first].offset, max(end, tensors[first].offset + tensors[first].nbytes)
    while last + 1 < len(tensors) and _extends(tensors[last + 1], begin, end):
        last += 1
        end = max(end, tensors[last].offset + tensors[last].nbytes)
    return tensors[first : last + 1]


def _extends(entry: TensorEntry, begin: int, end: int) -> bool:
    """Whether a run [begin, end) of the file may take in the entry: tensors may overlap, and leave holes."""
    entry_end = entry.offset + entry.nbytes
    hole = max(entry.offset - end, begin - entry_end)
    return (
        entry.nbytes <= SMALL_BYTES
        and hole <= SMALL_BYTES
        and max(end, entry_end) - min(begin, entry.offset) <= _RUN_BYTES
    )
