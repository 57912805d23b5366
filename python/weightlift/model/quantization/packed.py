"""Packed values in plain torch: fields of words, and Marlin's tiles of them.

The same as `weightlift.ops` does on the way into memory, forwards and backwards, for what is there already.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

# Of the values of a word, from the lowest bits up, which column each is, in AWQ's words.
AWQ_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}

TILE_K, TILE_N = 16, 64  # of Marlin's tiles


def unpack_words(words: torch.Tensor, num_bits: int, dim: int) -> torch.Tensor:
    """The fields of words (int32, or uint8), the lowest first, along a dimension: uint8."""
    words = words.movedim(dim, -1)
    per_word = words.itemsize * 8 // num_bits
    fields = torch.empty(*words.shape, per_word, dtype=torch.uint8, device=words.device)
    for i in range(per_word):
        fields[..., i] = (words >> (i * num_bits)) & ((1 << num_bits) - 1)
    return fields.flatten(-2).movedim(-1, dim)


def pack_words(values: torch.Tensor, num_bits: int, dim: int) -> torch.Tensor:
    """The other way round, into int32. The dimension holds whole words."""
    per_word = 32 // num_bits
    fields = torch.unflatten(values.movedim(dim, -1), -1, (-1, per_word))
    words = fields[..., 0].to(torch.int32)
    for i in range(1, per_word):
        words |= fields[..., i].to(torch.int32) << (i * num_bits)
    return words.movedim(-1, dim).contiguous()


def in_each(values: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Puts columns in another order, alike in each run of `len(order)` of them: the i-th becomes what order[i] was."""
    return torch.unflatten(values, -1, (-1, len(order)))[..., list(order)].flatten(-2)


def inverse(order: Sequence[int]) -> list[int]:
    """The order that undoes another."""
    return sorted(range(len(order)), key=order.__getitem__)


def unpack_awq(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The values of AWQ's words (rows, columns / values of a word): uint8 (rows, columns)."""
    return in_each(unpack_words(words, num_bits, 1), inverse(AWQ_ORDER[num_bits]))


def marlin_unpack(tiles: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The values in Marlin's layout of a weight, int32 (K / 16, N * num_bits / 2): uint8 (K, N).

    The layout: IST-DASLab/marlin, `marlin/__init__.py:_get_perms`; for 8 bits vLLM's `gptq_marlin_repack.cu`.
    """
    fields = torch.unflatten(unpack_words(tiles, num_bits, 1), 1, (-1, TILE_K * TILE_N))
    values = torch.empty_like(fields)
    values[..., _tile_order(num_bits).to(fields.device)] = fields
    return torch.unflatten(values, -1, (TILE_K, TILE_N)).transpose(1, 2).flatten(2).flatten(0, 1)


def marlin_pack(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The other way round: of (K, N), multiples of 16 and 64."""
    rows = torch.unflatten(values, 0, (-1, TILE_K))
    tiles = torch.unflatten(rows, 2, (-1, TILE_N)).transpose(1, 2).flatten(2)
    return pack_words(tiles[..., _tile_order(num_bits).to(tiles.device)].flatten(1), num_bits, 1)


@functools.cache
def _tile_order(num_bits: int) -> torch.Tensor:
    """Of the fields of a tile one after the other, which of its elements, counted row by row, each is: (1024,)."""
    lane, warp, number = torch.meshgrid(*(torch.arange(size, device="cpu") for size in (32, 4, 8)), indexing="ij")
    value = torch.tensor({4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3, 4, 6, 5, 7)}[num_bits], device="cpu")[number]
    row = 2 * (lane % 4) + torch.tensor((0, 1, 8, 9), device="cpu")[value % 4]
    column = 16 * warp + lane // 4 + 8 * (value // 4)
    return (row * TILE_N + column).flatten()
