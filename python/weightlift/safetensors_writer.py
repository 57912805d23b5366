"""Writing a safetensors file whose tensors lie where direct I/O wants them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .files import refused
from .safetensors_file import FORMAT_NAMES

# Direct I/O asks for no more; a page of memory, too.
_ALIGNMENT = 4096
_BLOCK_BYTES = 16 << 20


def write_safetensors(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    *,
    on_block: Callable[[memoryview], None] | None = None,
) -> None:
    """Writes tensors to a file that gets its name when it is whole, and on the disk.

    The format has no holes between tensors. So the header is padded with spaces until the data begin at a multiple of
    4096, and the tensors are ordered by the largest power of two, up to 4096, that divides their size in bytes: each
    then begins at a multiple of its own. Nearly all weights are whole pages; what is not, norms and scales, comes last
    and is aligned to its elements at least.

    Args:
        tensors: by name, on any device, dense or not.
        metadata: of the file, `__metadata__`.
        on_block: called with every stretch of bytes in the order in which they lie in the file.

    Raises:
        CheckpointReadError: the operating system refused, as when the disk is full; nothing is left behind.
    """
    names = sorted(tensors, key=lambda name: -_alignment_of(tensors[name].nbytes))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        shape = list(tensor.shape)
        if FORMAT_NAMES[tensor.dtype] == "F4":  # two of the format's values in one of torch's
            shape[-1] *= 2
        header[name] = {
            "dtype": FORMAT_NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    unfinished = f"{path}.unfinished"
    try:
        with open(unfinished, "wb", buffering=0) as file:
            for block in _blocks(text, [tensors[name] for name in names]):
                begin = 0
                while begin < len(block):  # a signal, or the end of the disk's room, cuts a write short
                    begin += file.write(block[begin:])
                if on_block is not None:
                    on_block(block)
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        if isinstance(error, OSError):
            raise refused("write", path, error) from error
        raise


def _alignment_of(nbytes: int) -> int:
    """The largest power of two, up to 4096, that divides it; of no bytes, 0."""
    return min(nbytes & -nbytes, _ALIGNMENT)


def _blocks(header: bytes, tensors: list[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of the file, a few at a time."""
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
        for begin in range(0, tensor.nbytes, _BLOCK_BYTES):
            yield memory[begin : begin + _BLOCK_BYTES]
