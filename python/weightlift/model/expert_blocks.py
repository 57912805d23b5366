"""Scales of blocks of a weight (128 x 128 elements, of FP8), and what becomes of them when experts are cut."""

from __future__ import annotations

import dataclasses
import math

# The smallest blocks that kernels take.
_MIN_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class ExpertBlocks:
    """How the scales of a layer's experts lie on one rank of tensor parallelism.

    Attributes:
        block_shape: rows and columns of a block on this rank.
        scale_refine: how often each scale of the checkpoint is repeated, along rows and columns; None: once.
        intermediate_size_per_partition: what the rank holds of it, padding included.
        tp_shard_with_padding: whether that is padded, so that the last ranks hold less of the checkpoint than others.
    """

    block_shape: tuple[int, int]
    scale_refine: tuple[int, int] | None
    intermediate_size_per_partition: int
    tp_shard_with_padding: bool


def cut_expert_blocks(
    weight_block_size: tuple[int, int],
    *,
    hidden_size: int,
    intermediate_size: int,
    tp_size: int,
    can_refine: bool = True,
) -> ExpertBlocks:
    """Finds a cut that gives each rank the checkpoint's values, though blocks may reach across the borders of ranks.

    There, blocks are made smaller, so that they don't (each scale is repeated); or else ranks hold whole blocks, and
    padding.

    Args:
        weight_block_size: rows and columns of a block in the checkpoint.
        hidden_size, intermediate_size: of the layer.
        tp_size: ranks that share intermediate_size, which it divides.
        can_refine: whether the kernel takes smaller blocks than those of the checkpoint.

    Raises:
        ValueError: there is none; in vLLM's words.
    """
    block_n, block_k = weight_block_size
    per_rank = intermediate_size // tp_size
    if per_rank % block_n == 0 and (tp_size == 1 or per_rank % block_k == 0):
        return ExpertBlocks((block_n, block_k), None, per_rank, False)
    block = math.gcd(block_n, block_k, per_rank, hidden_size)
    if can_refine and block >= _MIN_BLOCK:
        return ExpertBlocks((block, block), (block_n // block, block_k // block), per_rank, False)
    if tp_size > 1 and block_n == block_k and intermediate_size % block_n == hidden_size % block_n == 0:
        return ExpertBlocks((block_n, block_k), None, -(-per_rank // block_n) * block_n, True)
    projection, axis, size = (
        ("The output_size of gate's and up's weight", "n", block_n)
        if per_rank % block_n
        else ("The input_size of down's weight", "k", block_k)
    )
    raise ValueError(
        f"{projection} = {per_rank} is not divisible by weight quantization block_{axis} = {size}. "
        "Choose another tp_size, or expert parallelism, which leaves experts whole."
    )
