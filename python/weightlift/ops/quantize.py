"""Quantising on arrival: float weights to FP8, MXFP8 and INT8.

Scales come from the largest finite magnitude. Infinity becomes the largest number, NaN stays NaN (in int8: zero), and
an all-zero tensor whose scale is zero stays zero. All arithmetic is float32, rounded to nearest even.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import _C
from ..pending import has_rows, run_op
from ..tensor import CheckpointTensor
from ._library import Compat, check_scales, compute, place_of, register, require, require_dtype, values_of
from .fp8 import LIMITS

# Blocks from this many bytes on are worth a whole GPU each, one after the other.
_LARGE_BLOCK_BYTES = 1 << 20
_SOURCES = (torch.float32, torch.float16, torch.bfloat16)
_LIMITS = {**LIMITS, torch.int8: 127.0}


@dataclasses.dataclass(frozen=True)
class _Scheme:
    """Which elements share a scale, how it is found, and what it does. See csrc/transform/quantize_rules.h."""

    dtype: torch.dtype
    block_rows: int
    block_columns: int
    divide: bool = False  # by the scale, or multiply with its inverse
    keep_nan: bool = True
    min_amax: float = 0.0
    max_amax: float = 0.0  # 0: no bound
    min_scale: float = 0.0
    power_of_two: bool = False
    e8m0_scales: bool = False

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.uint8 if self.e8m0_scales else torch.float32

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.block_rows), -(-columns // self.block_columns)

    def _common(self, source: torch.dtype, rows: int, columns: int) -> dict[str, Any]:
        return {
            "src_type": str(source).removeprefix("torch."),
            "type": str(self.dtype).removeprefix("torch."),
            "rows": rows,
            "columns": columns,
            "block_rows": self.block_rows,
            "block_columns": self.block_columns,
            "divide": self.divide,
            "limit": _LIMITS[self.dtype],
            "keep_nan": self.keep_nan,
        }

    def op(
        self,
        source: torch.dtype,
        rows: int,
        columns: int,
        weight: torch.Tensor | None,
        scales: torch.Tensor | None,
    ) -> _C.Op:
        amaxes = None
        out = scales if weight is None else weight
        block_bytes = min(self.block_rows, rows) * min(self.block_columns, columns) * source.itemsize
        if out is not None and out.is_cuda and block_bytes >= _LARGE_BLOCK_BYTES:
            amaxes = torch.empty(self.scale_shape(rows, columns), dtype=torch.float32, device=out.device)
        op = _C.quantize(
            **self._common(source, rows, columns),
            min_amax=self.min_amax,
            max_amax=self.max_amax,
            min_scale=self.min_scale,
            power_of_two=self.power_of_two,
            e8m0_scales=self.e8m0_scales,
            weight=None if weight is None else place_of(weight, rows),
            scales=None if scales is None else place_of(scales, self.scale_shape(rows, columns)[0]),
            device_amaxes=0 if amaxes is None else amaxes.data_ptr(),
        )
        if amaxes is not None:
            op.hold(amaxes)
        return op

    def op_with(
        self, source: torch.dtype, rows: int, columns: int, scales: list[float] | torch.Tensor, weight: torch.Tensor
    ) -> _C.Op:
        """scales: by block; of a weight on a GPU also a tensor there."""
        common = self._common(source, rows, columns)
        place = place_of(weight, rows)
        if not weight.is_cuda:
            return _C.quantize_with(**common, scales=list(scales), weight=place)
        scales = torch.as_tensor(scales, dtype=torch.float32, device=weight.device).contiguous()
        op = _C.quantize_with_scales_at(**common, scales=scales.data_ptr(), weight=place)
        op.hold(scales)
        return op


# ---- registered ops. A scheme crosses the dispatcher as its fields.

_SCHEME = (
    "ScalarType dtype, SymInt block_rows, SymInt block_columns, bool divide, bool keep_nan, float min_amax, "
    "float max_amax, float min_scale, bool power_of_two, bool e8m0_scales"
)


def _fields(scheme: _Scheme) -> tuple[Any, ...]:
    return tuple(getattr(scheme, field.name) for field in dataclasses.fields(scheme))


def _matrix(tensor: torch.Tensor) -> tuple[int, int]:
    return math.prod(tensor.shape[:-1]), tensor.shape[-1]


def _quantize_kernel(input: torch.Tensor, *fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scheme = _Scheme(*fields)
    rows, columns = _matrix(input)
    weight = torch.empty(input.shape, dtype=scheme.dtype, device=input.device)
    scales = torch.empty(scheme.scale_shape(rows, columns), dtype=scheme.scale_dtype, device=input.device)
    if input.numel():
        run_op(scheme.op(input.dtype, rows, columns, weight, scales), input)
    return weight, scales


def _quantize_fake(input: torch.Tensor, *fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scheme = _Scheme(*fields)
    scales = input.new_empty(scheme.scale_shape(*_matrix(input)), dtype=scheme.scale_dtype)
    return input.new_empty(input.shape, dtype=scheme.dtype), scales


def _scales_for(input: torch.Tensor, scale: torch.Tensor) -> list[float] | torch.Tensor:
    scales: list[float] | torch.Tensor = scale.reshape(-1)
    return scales if input.is_cuda else scale.reshape(-1).tolist()


def _quantize_with_kernel(input: torch.Tensor, scale: torch.Tensor, *fields: Any) -> torch.Tensor:
    scheme = _Scheme(*fields)
    rows, columns = _matrix(input)
    scales = _scales_for(input, scale)
    return compute(
        lambda out: scheme.op_with(input.dtype, rows, columns, scales, out), input, input.shape, scheme.dtype
    )


def _quantize_with_fake(input: torch.Tensor, scale: torch.Tensor, *fields: Any) -> torch.Tensor:
    return input.new_empty(input.shape, dtype=_Scheme(*fields).dtype)


def _quantize_into_kernel(input: torch.Tensor, scale: torch.Tensor, output: torch.Tensor, *fields: Any) -> None:
    rows, columns = _matrix(input)
    if input.numel():
        run_op(_Scheme(*fields).op_with(input.dtype, rows, columns, _scales_for(input, scale), output), input)


def _quantize_into_fake(input: torch.Tensor, scale: torch.Tensor, output: torch.Tensor, *fields: Any) -> None:
    return


def _amax_kernel(input: torch.Tensor) -> torch.Tensor:
    rows, columns = _matrix(input)
    amax = torch.zeros(1, dtype=torch.float32, device=input.device)
    if input.numel():
        op = _C.amax(src_type=str(input.dtype).removeprefix("torch."), rows=rows, columns=columns, amax=amax.data_ptr())
        run_op(op, input)
    return amax


def _amax_fake(input: torch.Tensor) -> torch.Tensor:
    return input.new_empty(1, dtype=torch.float32)


_quantize_op = register(f"quantize(Tensor input, {_SCHEME}) -> (Tensor, Tensor)", _quantize_kernel, _quantize_fake)
_quantize_with_op = register(
    f"quantize_with(Tensor input, Tensor scale, {_SCHEME}) -> Tensor", _quantize_with_kernel, _quantize_with_fake
)
_quantize_into_op = register(
    f"quantize_into(Tensor input, Tensor scale, Tensor(a!) output, {_SCHEME}) -> ()",
    _quantize_into_kernel,
    _quantize_into_fake,
)
_amax_op = register("amax(Tensor input) -> Tensor", _amax_kernel, _amax_fake)


# ---- on real tensors and on those of a checkpoint


def _quantize(
    input: torch.Tensor, scheme: _Scheme, scale_shape: tuple[int, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantised tensor, and the scales: a row for each row of blocks, or in another shape."""
    rows, columns = _matrix(input)
    if scale_shape is None:
        scale_shape = scheme.scale_shape(rows, columns)
    if not isinstance(input, CheckpointTensor):
        weight, scales = _quantize_op(input, *_fields(scheme))
        return weight, scales.reshape(scale_shape)
    dtype = input.dtype

    def bind_weight(out: torch.Tensor) -> _C.Op:
        return scheme.op(dtype, rows, columns, out, None)

    def bind_scales(out: torch.Tensor) -> _C.Op:
        return scheme.op(dtype, rows, columns, None, out)

    weight = input._with_op(bind_weight, tuple(input.shape), scheme.dtype)
    return weight, input._with_op(bind_scales, scale_shape, scheme.scale_dtype)


def _quantize_with(
    input: torch.Tensor, scale: torch.Tensor, scheme: _Scheme, output: torch.Tensor | None = None
) -> torch.Tensor:
    """With given scales; straight into `output`, where it can be written so: the result is that then."""
    scale = scale.float()
    if not isinstance(input, CheckpointTensor):
        if output is not None and output.shape == input.shape and output.device == input.device and has_rows(output):
            _quantize_into_op(input, scale, output, *_fields(scheme))
            return output
        result: torch.Tensor = _quantize_with_op(input, scale, *_fields(scheme))
        return result
    values = values_of(scale)
    require(values is not None, "the scales of a tensor on disk must be known")
    assert values is not None
    rows, columns = _matrix(input)
    dtype = input.dtype
    scales = values.reshape(-1).tolist()
    return input._with_op(
        lambda out: scheme.op_with(dtype, rows, columns, scales, out), tuple(input.shape), scheme.dtype
    )


def _shared(scales: torch.Tensor, group: Any) -> torch.Tensor:
    """The largest of the ranks' scales, which is that of the largest magnitude: scales grow with magnitudes."""
    scales = scales.clone()
    torch.distributed.all_reduce(scales, torch.distributed.ReduceOp.MAX, group)
    return scales


def _check_input(name: str, input: torch.Tensor, dtype: torch.dtype, dims: int | None = 2) -> None:
    require_dtype(f"{name}: input", input, *_SOURCES)
    if dtype not in _LIMITS:
        raise TypeError(f"{name}: can't quantise to {dtype}")
    require(
        input.dim() == dims if dims is not None else input.dim() >= 1,
        f"{name}: expected {dims or 'one or more'} dimensions, found shape {tuple(input.shape)}",
    )


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: Any = None,
    compat: Compat = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises a matrix to FP8: with given scales, with one scale found, or with one for each row (channel, token).

    Given and per tensor: numbers are multiplied with the inverse of the scale. Per row: divided by it.

    Args:
        input: float32, float16 or bfloat16 (M, N).
        scale: None to find it. Otherwise one scale; or one for each block: a matrix, whose shape says which (it divides
            that of the input), or any shape with `group_shape`.
        num_token_padding: the result gets at least so many rows, filled up with zeros.
        scale_ub: when scales are found per row, a bound: magnitudes above count as this one.
        use_per_token_if_dynamic: when scales are found, one for each row: max(amax / max, 1 / (512 max)), max being
            448, or 224 for e4m3fnuz. Otherwise one, amax / max: on a tensor of a checkpoint, this needs it whole.
        output: where to put the result. Not with num_token_padding.
        group_shape: (rows, columns) that share a given scale; -1 stands for all.
        dtype: float8_e4m3fn, or float8_e4m3fnuz.
        group: a process group whose ranks have parts of one weight: all use the largest scale. One all-reduce; every
            rank has to come here, in the same order.
        compat: "vllm" makes the largest number of NaN, also of the 0 / 0 of an all-zero tensor, as its CUDA kernel
            does.

    Returns:
        The quantised matrix, and its scale: the given one, or float32 (1,) or (M, 1).

    Raises:
        ValueError: scales that are NaN, infinite, zero or negative, or that don't fit the shape.
        TypeError: another dtype.

    Example:
        >>> q, scale = scaled_fp8_quant(torch.tensor([[1.0, -2.0]]))
        >>> q.float() * scale
        tensor([[ 1., -2.]])
    """
    name = "scaled_fp8_quant"
    _check_input(name, input, dtype)
    require(dtype in LIMITS, f"{name}: {dtype} is no FP8 type")
    require(output is None or num_token_padding is None, f"{name}: padding is not supported when output is given")
    if output is not None:
        require_dtype(f"{name}: output", output, dtype)
    rows, columns = input.shape
    keep_nan = compat is None
    if scale is not None:
        if keep_nan:
            check_scales(name, scale)
        block_rows, block_columns = _given_blocks(name, input, scale, group_shape)
        q = _quantize_with(input, scale, _Scheme(dtype, block_rows, block_columns, keep_nan=keep_nan), output)
    elif use_per_token_if_dynamic:
        bound = 0.0 if scale_ub is None else float(scale_ub)
        require(scale_ub is None or bound > 0, f"{name}: scale_ub must be above zero, found {bound}")
        scheme = _Scheme(dtype, 1, max(1, columns), True, keep_nan, max_amax=bound, min_scale=1 / (LIMITS[dtype] * 512))
        q, scale = _quantize(input, scheme)
        if group is not None:
            scale = _shared(scale, group)
            q = _quantize_with(input, scale, scheme)
    else:
        scheme = _Scheme(dtype, max(1, rows), max(1, columns), False, keep_nan)
        if isinstance(input, CheckpointTensor) and group is None:
            q, scale = _quantize(input, scheme, (1,))
        else:
            scale = shared_fp8_scale(input, dtype=dtype, group=group)
            q = _quantize_with(input, scale, scheme, output)
    if num_token_padding is not None and num_token_padding > rows:
        padded = torch.zeros((num_token_padding, columns), dtype=dtype, device=input.device)
        padded[:rows].copy_(q)
        q = padded
    if output is not None and q is not output:
        q = output.copy_(q)
    return q, scale


def shared_fp8_scale(*parts: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, group: Any = None) -> torch.Tensor:
    """The one scale of a weight that comes in parts, such as q, k and v: the largest magnitude of all / max.

    Parts that are on disk are read whole for it, one after the other.

    Args:
        parts: float32, float16 or bfloat16, any shapes.
        dtype: float8_e4m3fn, whose max is 448, or float8_e4m3fnuz, 224.
        group: as for scaled_fp8_quant.

    Returns:
        float32 (1,), for scaled_fp8_quant(part, scale).
    """
    require(bool(parts), "shared_fp8_scale: there are no parts")
    for part in parts:
        _check_input("shared_fp8_scale", part, dtype, None)
    amaxes = [_amax_op(part._read() if isinstance(part, CheckpointTensor) else part) for part in parts]
    amax = torch.cat(amaxes).amax(0, keepdim=True)
    # By a tensor: instead of dividing by a number, torch on a GPU multiplies with its inverse, which rounds twice.
    scale = amax / torch.full_like(amax, LIMITS[dtype])
    return scale if group is None else _shared(scale, group)


def _given_blocks(
    name: str, input: torch.Tensor, scale: torch.Tensor, group_shape: tuple[int, int] | None
) -> tuple[int, int]:
    """Rows and columns of a block that shares a scale."""
    rows, columns = input.shape
    if group_shape is None:
        if scale.numel() == 1:
            return max(1, rows), max(1, columns)
        require(scale.dim() == 2, f"{name}: scales of shape {tuple(scale.shape)} need a group_shape")
        require(
            rows % scale.shape[0] == 0 and columns % scale.shape[1] == 0,
            f"{name}: scales of shape {tuple(scale.shape)} don't divide an input of shape {(rows, columns)}",
        )
        return rows // scale.shape[0], columns // scale.shape[1]
    block_rows = rows if group_shape[0] == -1 else group_shape[0]
    block_columns = columns if group_shape[1] == -1 else group_shape[1]
    require(block_rows > 0 and block_columns > 0, f"{name}: group_shape must be positive or -1, found {group_shape}")
    num = -(-rows // block_rows) * -(-columns // block_columns)
    require(
        scale.numel() == num,
        f"{name}: {num} scales are needed for groups of {group_shape} in {(rows, columns)}, found {scale.numel()}",
    )
    return block_rows, block_columns


def per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype = torch.float8_e4m3fn,
    column_major_scales: bool = False,
    use_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises to FP8 with a scale for each `group_size` neighbours in a row: max(amax, eps) / max, by division.

    Args:
        x: float32, float16 or bfloat16 (..., K), K a multiple of group_size.
        eps: magnitudes below count as this one.
        dtype: float8_e4m3fn, or float8_e4m3fnuz.
        column_major_scales: neighbours in memory are the scales of one column.
        use_ue8m0: the scales are the next powers of two up.

    Returns:
        `dtype` (..., K), and float32 scales (..., K / group_size).
    """
    name = "per_token_group_quant_fp8"
    _check_input(name, x, dtype, None)
    require(
        group_size > 0 and x.shape[-1] % group_size == 0,
        f"{name}: the last dimension, {x.shape[-1]}, is not a multiple of group_size = {group_size}",
    )
    scheme = _Scheme(dtype, 1, group_size, True, min_amax=eps, power_of_two=use_ue8m0)
    q, scales = _quantize(x, scheme, (*x.shape[:-1], x.shape[-1] // group_size))
    if column_major_scales:
        scales = scales.transpose(-1, -2).contiguous().transpose(-1, -2)
    return q, scales


def per_block_cast_to_fp8(
    x: torch.Tensor,
    block_size: Sequence[int] = (128, 128),
    use_ue8m0: bool = False,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises a matrix to FP8 with a scale for each block: max(amax, 1e-4) / max, multiplied with its inverse.

    Args:
        x: float32, float16 or bfloat16 (M, N); blocks at the edges may be cut.
        block_size: rows and columns of a block.
        use_ue8m0: the scales are the next powers of two up.
        dtype: float8_e4m3fn, or float8_e4m3fnuz.

    Returns:
        `dtype` (M, N), and float32 scales (ceil(M / rows), ceil(N / columns)).

    Example:
        >>> q, scale = per_block_cast_to_fp8(torch.full((2, 2), 3.0))
        >>> q.float() * scale
        tensor([[3., 3.],
                [3., 3.]])
    """
    name = "per_block_cast_to_fp8"
    _check_input(name, x, dtype)
    block_rows, block_columns = block_size
    require(block_rows > 0 and block_columns > 0, f"{name}: block_size must be positive, found {tuple(block_size)}")
    return _quantize(x, _Scheme(dtype, block_rows, block_columns, min_amax=1e-4, power_of_two=use_ue8m0))


def requant_weight_ue8m0(
    weight: torch.Tensor, weight_scale: torch.Tensor, block_size: Sequence[int] = (128, 128)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Requantises an FP8 weight with block scales so that the scales are powers of two.

    Args:
        weight: float8_e4m3fn (M, N).
        weight_scale: float32 (ceil(M / rows), ceil(N / columns)).
        block_size: rows and columns of a block.

    Returns:
        New tensors of the same shapes and dtypes.
    """
    from .blocks import dequantize_blocks

    require_dtype("requant_weight_ue8m0: weight", weight, torch.float8_e4m3fn)
    check_scales("requant_weight_ue8m0", weight_scale)
    values = dequantize_blocks(weight, weight_scale, (block_size[0], block_size[1]))
    return per_block_cast_to_fp8(values, block_size, use_ue8m0=True)


def mxfp8_e4m3_quantize(x: torch.Tensor, is_sf_swizzled_layout: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises to MXFP8: e4m3 with a power of two for each 32 neighbours in a row, ceil(log2(amax / 448)).

    Args:
        x: float32, float16 or bfloat16 (..., K), K a multiple of 32.
        is_sf_swizzled_layout: the scales in the order of CUTLASS's 128x4 tiles, see swizzle_blockscale(), flat.

    Returns:
        float8_e4m3fn (..., K), and the exponents of the scales, biased by 127: uint8 (..., K / 32). Of zeros, 0.
    """
    name = "mxfp8_e4m3_quantize"
    _check_input(name, x, torch.float8_e4m3fn, None)
    require(x.shape[-1] % 32 == 0, f"{name}: the last dimension, {x.shape[-1]}, is not a multiple of 32")
    tiny = torch.finfo(torch.float32).tiny
    scheme = _Scheme(torch.float8_e4m3fn, 1, 32, min_amax=tiny, power_of_two=True, e8m0_scales=True)
    q, scales = _quantize(x, scheme, (*x.shape[:-1], x.shape[-1] // 32))
    if is_sf_swizzled_layout:
        from .marlin import swizzle_blockscale

        scales = swizzle_blockscale(scales).flatten()
    return q, scales


def scaled_int8_quant(
    input: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Quantises a matrix to INT8, symmetrically: a scale for each row, amax / 127, and nearest integers, ties to even.

    Args:
        input: float32, float16 or bfloat16 (M, N).
        scale: None to find it; or one for all, or one for each row. Results stay within +-127.

    Returns:
        int8 (M, N); the scales, float32 (M, 1), or the given ones; None, where vLLM has the zero points.
    """
    name = "scaled_int8_quant"
    _check_input(name, input, torch.int8)
    rows, columns = input.shape
    if scale is None:
        return *_quantize(input, _Scheme(torch.int8, 1, max(1, columns), True)), None
    check_scales(name, scale)
    require(scale.numel() in (1, rows), f"{name}: expected 1 scale or {rows}, found {scale.numel()}")
    block_rows = 1 if scale.numel() == rows else max(1, rows)
    return _quantize_with(input, scale, _Scheme(torch.int8, block_rows, max(1, columns), True)), scale, None
