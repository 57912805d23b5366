"""Block scales of a weight that is cut: which scales belong to a slice, whatever the blocks and wherever the cut.

A weight (N, K) has a scale for each block of (block_n, block_k), from its first row and column on: (ceil(N / block_n),
ceil(K / block_k)). A slice that starts inside a block takes that block's scale along; how that is laid out, a kernel
decides. Nothing here changes a value: the slice's numbers are the checkpoint's own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from ._library import require

_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)  # scales that are exponents of powers of two, biased by 127


@dataclasses.dataclass(frozen=True)
class BlockSlice:
    """A part of a weight (N, K) of a checkpoint, with all of that weight's scales.

    Attributes:
        scale: of the whole weight.
        shape: (N, K) of the whole weight.
        rows, columns: [first, last) of the part. They may reach beyond the weight: what is there is padding.
    """

    scale: torch.Tensor
    shape: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class AlignedScales:
    """Scales in the plain layout: block (i, j) starts at row i * block_size[0] and column j * block_size[1].

    Attributes:
        scale: (ceil(rows / block_size[0]), ceil(columns / block_size[1])).
        block_size: that of the checkpoint, or a part of it.
    """

    scale: torch.Tensor
    block_size: tuple[int, int]


def align_block_scales(
    parts: Sequence[BlockSlice],
    block_size: Sequence[int],
    *,
    allowed_blocks: Sequence[tuple[int, int]] | None = None,
) -> AlignedScales:
    """The scales of parts that are put one below the other, in the plain layout of one weight.

    Where parts start or end inside blocks, the blocks are made smaller, and scales are repeated: the values stay what
    they are, exactly. Padding has no scale; it gets 1.

    Args:
        parts: in order: one for a plain weight, several for a merged one (gate and up; q, k and v).
        block_size: (block_n, block_k) of the checkpoint.
        allowed_blocks: the block sizes that the kernel can take; None: all.

    Returns:
        The scales, in their dtype, for the largest blocks that are possible, or the first possible ones of
        `allowed_blocks`.

    Raises:
        ValueError: no allowed block fits the cut; scales that don't fit their weight; parts that don't fit each other.

    Example:
        >>> part = BlockSlice(torch.tensor([[1.0], [2.0]]), (256, 128), rows=(64, 192), columns=(0, 128))
        >>> align_block_scales([part], (128, 128))
        AlignedScales(scale=tensor([[1.],
                [2.]]), block_size=(64, 128))
    """
    block_n, block_k = block_size
    _check_parts(parts, block_n, block_k)
    finest_n, finest_k = block_n, block_k
    start = 0  # of the part, in the rows put together
    for part in parts:
        first, last = part.rows
        if first == last:
            continue
        finest_n = _common_block(finest_n, block_n, start, first, last)
        finest_k = _common_block(finest_k, block_k, 0, *part.columns)
        start += last - first
    chosen = (finest_n, finest_k)
    if allowed_blocks is not None:
        fitting = [block for block in allowed_blocks if finest_n % block[0] == 0 and finest_k % block[1] == 0]
        if not fitting:
            cuts = ", ".join(f"rows {p.rows} and columns {p.columns} of {p.shape}" for p in parts)
            raise ValueError(
                f"align_block_scales: {cuts}, with scales for blocks of {(block_n, block_k)}, need blocks of "
                f"{(finest_n, finest_k)} or parts of them; the kernel takes {', '.join(map(str, allowed_blocks))}"
            )
        chosen = fitting[0]
    return AlignedScales(torch.cat(_aligned_rows(parts, (block_n, block_k), chosen)), chosen)


def _check_parts(parts: Sequence[BlockSlice], block_n: int, block_k: int) -> None:
    name = "align_block_scales"
    require(block_n > 0 and block_k > 0, f"{name}: block sizes must be positive, found {(block_n, block_k)}")
    require(any(p.rows[0] < p.rows[1] for p in parts), f"{name}: there are no rows")
    for part in parts:
        expected = (-(-part.shape[0] // block_n), -(-part.shape[1] // block_k))
        require(
            tuple(part.scale.shape) == expected,
            f"{name}: expected scales of shape {expected} for a weight of {part.shape} in blocks of "
            f"{(block_n, block_k)}, found {tuple(part.scale.shape)}",
        )
        require(
            0 <= part.rows[0] <= part.rows[1] and 0 <= part.columns[0] < part.columns[1],
            f"{name}: rows {part.rows} and columns {part.columns} are no part of a weight",
        )
        width, first_width = (p.columns[1] - p.columns[0] for p in (part, parts[0]))
        require(width == first_width, f"{name}: parts of {first_width} and {width} columns don't make one weight")


def _common_block(finest: int, block: int, start: int, first: int, last: int) -> int:
    """The largest block, of those that `finest` is a multiple of, whose edges meet the part's start and its blocks'."""
    finest = math.gcd(finest, start)
    if first // block != (last - 1) // block:  # an edge inside the part
        finest = math.gcd(finest, first - start)
    return finest


def _aligned_rows(
    parts: Sequence[BlockSlice], block_size: tuple[int, int], chosen: tuple[int, int]
) -> list[torch.Tensor]:
    rows = []
    for part in parts:
        first, last = part.rows
        if first == last:
            continue
        # Each block lies in one of the checkpoint's; its first row and column say in which.
        i = [row // block_size[0] for row in range(first, last, chosen[0])]
        j = [column // block_size[1] for column in range(*part.columns, chosen[1])]
        held = part.scale.view(torch.uint8) if part.scale.dtype in _EXPONENTS else part.scale
        padding = (0, max(0, j[-1] + 1 - held.shape[1]), 0, max(0, i[-1] + 1 - held.shape[0]))
        one = 127 if part.scale.dtype in _EXPONENTS else 1.0
        held = torch.nn.functional.pad(held, padding, value=one)
        index = [torch.tensor(x, device=held.device) for x in (i, j)]
        rows.append(held.index_select(0, index[0]).index_select(1, index[1]).view(part.scale.dtype))
    return rows


def slice_block_scales(
    scale: torch.Tensor, block_size: Sequence[int], rows: tuple[int, int], columns: tuple[int, int]
) -> tuple[torch.Tensor, tuple[int, int]]:
    """The scales of the blocks that a slice touches, and its phase: how far inside the first block it starts.

    Args:
        scale: of the whole weight, (ceil(N / block_n), ceil(K / block_k)).
        block_size: (block_n, block_k).
        rows, columns: [first, last) of the slice.

    Returns:
        A view of the scales, and (phase_n, phase_k): element (r, c) of the slice has the scale
        [(r + phase_n) // block_n, (c + phase_k) // block_k].

    Raises:
        ValueError: a slice that is empty, or reaches beyond the scales.
    """
    cut = []
    for (first, last), block, size in zip((rows, columns), block_size, scale.shape, strict=True):
        end = -(-last // block)
        require(
            0 <= first < last and end <= size,
            f"slice_block_scales: [{first}, {last}) is no part of {size} blocks of {block}",
        )
        cut.append(slice(first // block, end))
    return scale[cut[0], cut[1]], (rows[0] % block_size[0], columns[0] % block_size[1])


def dequantize_blocks(
    weight: torch.Tensor, scale: torch.Tensor, block_size: Sequence[int], phase: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """The numbers that a block-scaled weight stands for, in float32.

    Args:
        weight: FP8 (rows, columns).
        scale: float, float8_e8m0fnu or exponents in uint8, one for each block that the weight touches.
        block_size: (block_n, block_k).
        phase: how far inside the first block the weight starts; see slice_block_scales().

    Raises:
        ValueError: another number of scales.
    """
    expected = [-(-(size + start) // block) for size, start, block in zip(weight.shape, phase, block_size, strict=True)]
    require(
        list(scale.shape) == expected,
        f"dequantize_blocks: expected scales of shape {tuple(expected)}, found {tuple(scale.shape)}",
    )
    values = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    values = values.float()
    for dim in (0, 1):
        values = values.repeat_interleave(block_size[dim], dim).narrow(dim, phase[dim], weight.shape[dim])
    return weight.float() * values
