"""Where the scales of FP8 weights go, when they are not kept as they are on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ... import ops
from ..parameter import UnfitWeightError, check_dtype
from .arrival import Converted, MarlinScales, MemoryLayout


def doubled_scales(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Converted:
    """The layout of scales of weights that become float8_e4m3fnuz: as the same bytes, their numbers are halved.

    Args:
        shape: of the scales.
        dtype: float32, or uint8 for exponents of powers of two.
    """
    return Converted(shape, dtype, _double_numbers if dtype == torch.float32 else _double_exponents)


def exponents(shape: Sequence[int]) -> Converted:
    """The layout of scales that are exponents of powers of two, uint8 or float8_e8m0fnu on disk: uint8."""
    return Converted(shape, torch.uint8, _as_exponents)


def _double_numbers(scales: torch.Tensor) -> torch.Tensor:
    check_dtype(scales, torch.float32)
    return _double(scales)


def _double_exponents(scales: torch.Tensor) -> torch.Tensor:
    return _double(_as_exponents(scales))


def _double(scales: torch.Tensor) -> torch.Tensor:
    weight = torch.zeros(1, dtype=torch.float8_e4m3fn, device="cpu")
    try:
        return ops.normalize_e4m3fn_to_e4m3fnuz(weight, scales)[1]
    except ValueError as error:
        raise UnfitWeightError(str(error)) from None


def _as_exponents(scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise UnfitWeightError(f"expected exponents, uint8 or float8_e8m0fnu, found {scales.dtype}")
    return scales.view(torch.uint8)


@dataclass(frozen=True)
class ModelOptBlockScales(MemoryLayout):
    """Block scales that are [rows, 1, columns, 1] on disk, and a matrix in memory.

    Attributes:
        layout: of the matrix.
    """

    layout: MemoryLayout

    @property
    def source_shape(self) -> Sequence[int]:  # type: ignore[override]
        rows, columns = self.layout.source_shape
        return rows, 1, columns, 1

    @property
    def shape(self) -> Sequence[int]:  # type: ignore[override]
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.layout.dtype

    def place(self, target: torch.Tensor, part: torch.Tensor, begin: Sequence[int]) -> None:
        self.layout.place(target, part[:, 0, :, 0], (begin[0], begin[2]))


@dataclass(frozen=True)
class MarlinFp8Scales(MemoryLayout):
    """Scales as Marlin's FP8 kernels take them: one for each output and group of inputs, with the bias of exponents
    multiplied in, as `ops.fp8_marlin_process_scales` says. On disk there are fewer.

    Attributes:
        logical_widths: the outputs of each part of the layer.
        size_k: its inputs.
        dtype: of activations, float16 or bfloat16.
        strategy: the scales on disk are those of a "tensor", [parts], of a "channel", [N, 1], or of a "block",
            [ceil(N / block_n), ceil(K / block_k)].
        block_size: (block_n, block_k).
    """

    logical_widths: Sequence[int]
    size_k: int
    dtype: torch.dtype
    strategy: str
    block_size: tuple[int, int] | None = None

    @property
    def source_shape(self) -> Sequence[int]:  # type: ignore[override]
        if self.strategy == "tensor":
            return (len(self.logical_widths),)
        if self.block_size is None:
            return sum(self.logical_widths), 1
        return -(-sum(self.logical_widths) // self.block_size[0]), -(-self.size_k // self.block_size[1])

    @property
    def shape(self) -> Sequence[int]:  # type: ignore[override]
        return self._marlin.shape

    def place(self, target: torch.Tensor, part: torch.Tensor, begin: Sequence[int]) -> None:
        check_dtype(part, self.dtype)
        row, size_n = begin[0], sum(self.logical_widths)
        try:
            scales = ops.fp8_fused_exponent_bias_into_scales(part.to(self.dtype))
        except ValueError as error:
            raise UnfitWeightError(str(error)) from None
        if self.strategy == "tensor":
            row = sum(self.logical_widths[: begin[0]])
            scales = scales.reshape(1, 1).expand(self.logical_widths[begin[0]], 1)
        elif self.block_size is not None:
            row *= self.block_size[0]
            scales = scales.repeat_interleave(self.block_size[0], 0)[: size_n - row]
        self._marlin.place(target, scales, (row, 0))

    def clear(self, target: torch.Tensor, dim: int, begin: int) -> None:
        # Blocks end behind the outputs that they are for; the weights there are 0.
        row = begin if self.block_size is None else begin * self.block_size[0]
        if row < sum(self.logical_widths):
            self._marlin.clear(target, dim, row)

    def decode(self, memory: torch.Tensor) -> torch.Tensor:
        """The scale of each weight: float32 [N, K]."""
        bias = ops.fp8_fused_exponent_bias_into_scales(torch.ones((), dtype=self.dtype)).float()
        scales = self._marlin.decode(memory).T.float() / bias
        group = self.size_k if self.block_size is None else self.block_size[1]
        return scales.repeat_interleave(group, 1)[:, : self.size_k]

    @property
    def _marlin(self) -> MarlinScales:
        return MarlinScales(
            size_n=sum(self.logical_widths),
            size_k=self.size_k,
            group_size=-1 if self.block_size is None else self.block_size[1],
            dtype=self.dtype,
            is_transposed=True,
        )
