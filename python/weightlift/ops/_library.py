"""How an op of the core meets torch: its registration, its outputs, and the values that it is run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch

from .. import _C
from ..pending import run_op
from ..tensor import CheckpointTensor

Compat: TypeAlias = Literal["vllm"] | None
Bind: TypeAlias = Callable[[torch.Tensor], _C.Op | None]  # see PendingOp.bind
Place: TypeAlias = tuple[int, int, int, int]  # address, rows, bytes of a row, bytes from one row to the next

_library = torch.library.Library("weightlift", "DEF")  # type: ignore[no-untyped-call]


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Registers an op for CPU and CUDA tensors. Returns what calls it through the dispatcher."""
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"weightlift::{name}", fake, lib=_library)
    return getattr(torch.ops.weightlift, name).default


def place_of(out: torch.Tensor, rows: int) -> Place:
    """Where an op of `rows` output rows finds its output. Of a matrix, rows may lie apart; all else is contiguous."""
    stride = out.stride(0) * out.itemsize if out.dim() == 2 and out.shape[0] == rows else out.nbytes // rows
    return out.data_ptr(), rows, out.nbytes // rows, stride


def compute(bind: Bind, values: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What an op makes of real values."""
    out = torch.empty(shape, dtype=dtype, device=values.device)
    if out.numel():
        op = bind(out)
        assert op is not None  # into what is contiguous it can write
        run_op(op, values)
    return out


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a small tensor, such as scales; None where there are none, as on meta or in a trace."""
    if isinstance(tensor, CheckpointTensor):
        return tensor._read()
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return None
    return tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same for checks, which nobody shall wait for: None also for a tensor on a GPU."""
    return None if tensor.is_cuda else values_of(tensor)


def check_scales(name: str, scale: torch.Tensor) -> None:
    """Raises ValueError where a scale, as far as its value is known, is NaN, infinite, zero or negative."""
    values = known(scale)
    if values is None:
        return
    wrong = values.float()
    wrong = wrong[~((wrong > 0) & (wrong < float("inf")))]
    if wrong.numel():
        raise ValueError(f"{name}: scales must be finite and above zero, found {wrong.flatten()[0].item()}")


def check_finite(name: str, result: torch.Tensor, source: torch.Tensor) -> None:
    """Raises ValueError where a number became infinite."""
    after, before = known(result), known(source)
    if after is None or before is None:
        return
    overflowed = (after.float().isinf() & before.float().isfinite()).nonzero()
    if overflowed.numel():
        value = before.float()[tuple(overflowed[0])].item()
        raise ValueError(f"{name}: the scale {value} is too large for {result.dtype}: it becomes infinite")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def require_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(str(dtype) for dtype in dtypes)}, found {tensor.dtype}")
