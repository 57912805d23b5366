"""Memory for tensors that nobody is going to fill: address space alone, to plan with."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .config import GiB, KiB
from .memory import MAP_NORESERVE
from .report import format_bytes

_STEP_BYTES = 16 * GiB
_PAGE = mmap.PAGESIZE
# As malloc places what torch asks for: a large block begins behind the header of a mapping of its own.
_LARGE_BYTES = 128 * KiB
_ALIGNMENT = 64

_aten = torch.ops.aten
_FACTORIES = {
    getattr(getattr(_aten, name), overload)
    for name, overload in (
        ("empty", "memory_format"),
        ("empty_like", "default"),
        ("empty_strided", "default"),
        ("full", "default"),
        ("full_like", "default"),
        ("new_empty", "default"),
        ("new_empty_strided", "default"),
        ("new_full", "default"),
        ("new_ones", "default"),
        ("new_zeros", "default"),
        ("ones", "default"),
        ("ones_like", "default"),
        ("rand", "default"),
        ("randn", "default"),
        ("zeros", "default"),
        ("zeros_like", "default"),
    )
}


class ReservedMemory:
    """Tensors on the CPU that have addresses, and cost memory only where they are written.

    It may be far more than the machine has. The address space is given back with the last of the tensors.
    """

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._next = 0
        self._spans: list[tuple[int, int]] = []  # addresses

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor of zeros, with a storage of its own, placed as torch would place it.

        Raises:
            MemoryError: no address space is to be had.
        """
        if 0 in shape:
            extent = 0
        elif strides is None:
            extent = math.prod(shape)
        else:
            extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        num_bytes = extent * dtype.itemsize
        # Real memory, whatever modes the caller has set.
        with torch._C._DisableTorchDispatch():
            if num_bytes == 0:
                return torch.empty(shape, dtype=dtype, device="cpu")
            mapping, offset = self._place(num_bytes)
            flat = torch.frombuffer(mapping, dtype=dtype, count=extent, offset=offset)
            return flat.view(shape) if strides is None else flat.as_strided(shape, strides)

    def allocate_for(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The same for values that begin at an offset of a file, placed as `memory.allocate_for` would place it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        with torch._C._DisableTorchDispatch():
            if num_bytes == 0 or offset % dtype.itemsize:
                return self.empty(shape, dtype=dtype)
            mapping, start = self._place(num_bytes, offset % _PAGE)
            return torch.frombuffer(mapping, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    def _place(self, num_bytes: int, behind_page: int = _ALIGNMENT) -> tuple[mmap.mmap, int]:
        if self._mapping is None or self._next + num_bytes + 2 * _PAGE > len(self._mapping):
            size = max(_STEP_BYTES, num_bytes + 2 * _PAGE)
            try:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
                self._mapping = mmap.mmap(-1, size, flags=flags)
            except OSError as error:
                raise MemoryError(
                    f"no address space for {format_bytes(size)}: {error.strerror}; planning needs as much of it as the "
                    "load needs memory: see `ulimit -v`, and /proc/sys/vm/overcommit_memory, which must not be 2"
                ) from error
            self._next = 0
            begin = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
            self._spans.append((begin, begin + size))
        # Malloc's marks lie between blocks: neighbours must not look like one run of memory.
        offset = (self._next // _ALIGNMENT + 1) * _ALIGNMENT
        if num_bytes >= _LARGE_BYTES:
            offset = (self._next // _PAGE + 1) * _PAGE + behind_page
        self._next = offset + num_bytes
        return self._mapping, offset

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of these, or a view of one."""
        return tensor.device.type == "cpu" and any(a <= tensor.data_ptr() < b for a, b in self._spans)

    def factories(self) -> TorchDispatchMode:
        """Inside `with`, what torch makes on the CPU of 64 KiB and more is made here, and filling it is left out.

        A model that is built there costs no memory, and looks like one that is waiting to be loaded.
        """
        return _Factories(self)


class _Factories(TorchDispatchMode):  # type: ignore[misc,no-untyped-call,unused-ignore]
    def __init__(self, memory: ReservedMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and _device_of(args, kwargs) == "cpu":
            like = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
            if like.nbytes >= 64 * KiB:
                return self._memory.empty(like.shape, dtype=like.dtype, strides=like.stride())
        elif func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and self._memory.holds(args[0]):
            return args[0]
        return func(*args, **kwargs)


def _device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    device = kwargs.get("device")
    if device is None and args and isinstance(args[0], torch.Tensor):
        device = args[0].device
    return "cpu" if device is None else torch.device(device).type
