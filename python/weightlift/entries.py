"""What a checkpoint consists of: shards, and where in them each tensor lies."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch


@dataclass(slots=True, eq=False)
class TensorEntry:
    """Where one tensor lies. Not to be modified (not frozen: that would double the time to parse a large header).

    Attributes:
        name: as in the file, behind the prefix of its CheckpointSource.
        dtype: torch's; F4 is `float4_e2m1fn_x2`, two values in a byte.
        shape: torch's; for F4 the last dimension is half of the file's.
        offset: of the first byte, from the start of the file.
        nbytes: bytes from the first element to the end of the last, whatever lies between them.
        shard: the file.
        strides: of the dimensions, in elements; None where the elements are contiguous, row-major.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    shard: Shard = field(repr=False)
    strides: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class Shard:
    """One file of tensors, as it was when its header was read. Not to be modified.

    Attributes:
        path: as the user knows it; symlinks are not resolved.
        size: bytes of the file.
        device, inode, mtime_ns: of the file itself, behind symlinks; they tell whether it has changed since.
        data_offset: where the data starts, in bytes from the start of the file.
        metadata: the header's `__metadata__`; None: it has none.
        tensors: all of the file, in the order of their data.
    """

    path: str
    size: int
    device: int
    inode: int
    mtime_ns: int
    data_offset: int
    metadata: dict[str, str] | None
    tensors: tuple[TensorEntry, ...] = field(repr=False)

    @classmethod
    def of_file(cls, path: str, status: os.stat_result) -> Shard:
        """One whose header is yet to be read."""
        return cls(path, status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns, 0, None, ())


@dataclass(slots=True, eq=False)
class CheckpointFiles:
    """The files of a checkpoint. Not to be modified.

    Attributes:
        shards: in natural order of their names (`model-2` before `model-10`).
        tensors: by name; shard after shard, inside a shard in the order of the data.
        skipped: the tensors that a filter left out, by name, each with the rule by which it is not wanted.
    """

    shards: tuple[Shard, ...]
    tensors: dict[str, TensorEntry]
    skipped: dict[str, str] = field(default_factory=dict)
