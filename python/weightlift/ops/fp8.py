"""FP8 weights that stay FP8: under another format, or under another scale."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from .. import _C
from ..tensor import CheckpointTensor
from ._library import (
    Bind,
    Compat,
    check_finite,
    compute,
    known,
    place_of,
    register,
    require,
    require_dtype,
    values_of,
)

LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}  # fnuz goes to 240; engines stop at 224
# What a slot holds for which no scale was loaded, and all that engines take for one.
_UNSET = -448.0


# ---- e4m3fn to e4m3fnuz


def _bind_to_fnuz(rows: int, keep_nan: bool) -> Bind:
    return lambda out: _C.e4m3fn_to_e4m3fnuz(keep_nan=keep_nan, output=place_of(out, rows))


def _rows(tensor: torch.Tensor) -> int:
    """Rows that a bytewise op counts: those of the last dimension."""
    return max(1, tensor.numel() // max(1, tensor.shape[-1])) if tensor.dim() else 1


def _to_fnuz_kernel(weight: torch.Tensor, keep_nan: bool) -> torch.Tensor:
    return compute(_bind_to_fnuz(_rows(weight), keep_nan), weight, weight.shape, torch.float8_e4m3fnuz)


def _to_fnuz_fake(weight: torch.Tensor, keep_nan: bool) -> torch.Tensor:
    return weight.new_empty(weight.shape, dtype=torch.float8_e4m3fnuz)


_to_fnuz_op = register("e4m3fn_to_e4m3fnuz(Tensor weight, bool keep_nan) -> Tensor", _to_fnuz_kernel, _to_fnuz_fake)


def normalize_e4m3fn_to_e4m3fnuz(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    *,
    compat: Compat = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Turns an e4m3fn weight into e4m3fnuz, the FP8 format of AMD's MI300, for twice its scale.

    Negative zero becomes zero, NaN stays NaN. Every other byte stays, and is half the number.

    Args:
        weight: float8_e4m3fn, any shape. One of float8_e4m3fnuz is given back as it is, and so are its scales.
        weight_scale: float32, float16 or bfloat16, or the exponents of powers of two: float8_e8m0fnu, or uint8.
        input_scale: of the activations.
        compat: "vllm" leaves the bytes of NaN, which are +-240 in e4m3fnuz, and lets scales overflow: to infinity, or,
            as exponents, to 254, as also NaN does.

    Returns:
        The weight, float8_e4m3fnuz, a new tensor; the weight's scale and the input's, doubled.

    Raises:
        ValueError: a scale that can't be doubled.
        TypeError: a weight of another dtype.

    Example:
        >>> weight, scale, _ = normalize_e4m3fn_to_e4m3fnuz(torch.ones(2).to(torch.float8_e4m3fn), torch.ones(1))
        >>> weight.float() * scale
        tensor([1., 1.])
    """
    name = "normalize_e4m3fn_to_e4m3fnuz"
    require_dtype(f"{name}: weight", weight, *LIMITS)
    if weight.dtype == torch.float8_e4m3fnuz:
        return weight, weight_scale, input_scale
    keep_nan = compat is None
    doubled = _double(f"{name}: weight_scale", weight_scale, compat)
    doubled_input = None if input_scale is None else _double(f"{name}: input_scale", input_scale, compat)
    if isinstance(weight, CheckpointTensor):
        result = weight._with_op(_bind_to_fnuz(_rows(weight), keep_nan), tuple(weight.shape), torch.float8_e4m3fnuz)
    else:
        result = _to_fnuz_op(weight, keep_nan)
    return result, doubled, doubled_input


def _double(name: str, scale: torch.Tensor, compat: Compat) -> torch.Tensor:
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        doubled = scale * 2.0
        if compat is None:
            check_finite(name, doubled, torch.where(scale <= _UNSET, torch.inf, scale))  # an unset one stays one
        return doubled
    bytes_ = scale.view(torch.uint8)
    if compat is not None:
        return (bytes_.clamp(max=253) + 1).view(scale.dtype)
    values = known(bytes_)
    require(values is None or not bool((values == 254).any()), f"{name}: 2^127 is the largest power of two there is")
    return torch.where(bytes_ == 255, bytes_, bytes_ + 1).view(scale.dtype)


# ---- one scale for all parts of a fused weight


def _requantize_parts(
    name: str, weight_scale: torch.Tensor, logical_widths: Sequence[int], compat: Compat
) -> tuple[list[tuple[int, float]], float] | None:
    """The parts as (end row, scale), and the scale to come. None: the weight has one scale already."""
    scales = [float(scale) for scale in weight_scale.reshape(-1).tolist()]
    if weight_scale.dim() == 0 or scales[-1] <= _UNSET:
        return None
    largest = max(scales)
    parts = []
    end = 0
    for part, (scale, width) in enumerate(zip(scales, logical_widths, strict=True)):
        if width == 0:
            continue
        end += width
        require(
            compat is not None or 0 <= scale < float("inf"),
            f"{name}: part {part} has the scale {scale}"
            + (": it was never loaded" if scale <= _UNSET else "; it must be finite and not negative"),
        )
        parts.append((end, scale))
    require(0 < largest < float("inf"), f"{name}: the largest scale is {largest}; it must be finite and above zero")
    return parts, largest


def _bind_requantize(
    format: torch.dtype, parts: list[tuple[int, float]], new_scale: float, rows: int, through_fp16: bool
) -> Bind:
    return lambda out: _C.requantize_fp8(
        format=str(format).removeprefix("torch."),
        parts=parts,
        new_scale=new_scale,
        limit=LIMITS[format],
        through_fp16=through_fp16,
        output=place_of(out, rows),
    )


def _max_scale(weight_scale: torch.Tensor) -> torch.Tensor:
    return weight_scale.max().float()


def _requantize_kernel(
    weight: torch.Tensor, weight_scale: torch.Tensor, logical_widths: list[int], through_fp16: bool
) -> torch.Tensor:
    if weight.is_cuda:
        return _requantize_on_gpu(weight, weight_scale, logical_widths, through_fp16)
    found = _requantize_parts(
        "requantize_with_max_scale", weight_scale, logical_widths, "vllm" if through_fp16 else None
    )
    if found is None:
        return weight.clone()
    bind = _bind_requantize(weight.dtype, *found, weight.shape[0], through_fp16)
    return compute(bind, weight, weight.shape, weight.dtype)


def _requantize_on_gpu(
    weight: torch.Tensor, weight_scale: torch.Tensor, logical_widths: list[int], through_fp16: bool
) -> torch.Tensor:
    """The scales are read there, by the kernel."""
    if weight_scale.dim() == 0:
        return weight.clone()
    scales = weight_scale.to(weight.device, torch.float32).reshape(-1).contiguous()

    def bind(out: torch.Tensor) -> _C.Op:
        op = _C.requantize_fp8_at(
            format=str(weight.dtype).removeprefix("torch."),
            end_rows=list(itertools.accumulate(logical_widths)),
            scales=scales.data_ptr(),
            unset=_UNSET,
            limit=LIMITS[weight.dtype],
            through_fp16=through_fp16,
            output=place_of(out, weight.shape[0]),
        )
        op.hold(scales)
        return op

    return compute(bind, weight, weight.shape, weight.dtype)


def _requantize_fake(
    weight: torch.Tensor, weight_scale: torch.Tensor, logical_widths: list[int], through_fp16: bool
) -> torch.Tensor:
    return weight.new_empty(weight.shape)


_requantize_op = register(
    "requantize_with_max_scale(Tensor weight, Tensor weight_scale, SymInt[] logical_widths, bool through_fp16) "
    "-> Tensor",
    _requantize_kernel,
    _requantize_fake,
)


def requantize_with_max_scale(
    weight: torch.Tensor, weight_scale: torch.Tensor, logical_widths: Sequence[int], *, compat: Compat = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Brings the parts of a fused FP8 weight, each with a scale of its own, to the largest of the scales.

    The weight stays as it is where it has one scale already: `weight_scale` has no dimensions, or its last slot was
    never filled (it holds -448 or less). Numbers are multiplied in float32 and rounded once, to nearest even; NaN stays
    NaN. On a GPU, where nobody waits for the scales, a scale that would raise ValueError makes NaN of its part, and of
    everything where it is the largest, or NaN.

    Args:
        weight: float8_e4m3fn or float8_e4m3fnuz (N, K): the parts' rows, one part below the other.
        weight_scale: float32, one for each part, or none-dimensional.
        logical_widths: how many rows each part has; they may be 0.
        compat: "vllm" rounds the scale and each product to float16 first, where small ones vanish and large ones
            overflow, and turns NaN into the largest number, as its CUDA kernels do.

    Returns:
        The largest scale, float32 without dimensions, and the weight.

    Raises:
        ValueError: parts that don't make up the weight; a scale that is missing, NaN, infinite or negative; all zero.
        TypeError: a weight of another dtype.

    Example:
        >>> weight = torch.full((2, 1), 448.0).to(torch.float8_e4m3fn)
        >>> scale, weight = requantize_with_max_scale(weight, torch.tensor([0.1, 0.2]), [1, 1])
        >>> weight.float().flatten()
        tensor([224., 448.])
    """
    name = "requantize_with_max_scale"
    require_dtype(f"{name}: weight", weight, *LIMITS)
    require(weight.dim() == 2, f"{name}: expected a matrix, found {tuple(weight.shape)}")
    widths = list(logical_widths)
    if weight_scale.dim():
        require(
            weight_scale.numel() == len(widths) and sum(widths) == weight.shape[0],
            f"{name}: {weight_scale.numel()} scales and parts of {widths} rows don't make up a weight of "
            f"{weight.shape[0]} rows",
        )
    if not isinstance(weight, CheckpointTensor):
        return _max_scale(weight_scale), _requantize_op(weight, weight_scale, widths, compat is not None)
    scales = values_of(weight_scale)
    require(scales is not None, f"{name}: the scales of a tensor on disk must be known")
    assert scales is not None
    found = _requantize_parts(name, scales, widths, compat)
    if found is None:
        return _max_scale(scales), weight
    bind = _bind_requantize(weight.dtype, *found, weight.shape[0], compat is not None)
    return _max_scale(scales), weight._with_op(bind, tuple(weight.shape), weight.dtype)
