"""Memory that is laid out another way than the checkpoint: what is cut for a rank is converted as it arrives.

A `MemoryLayout` is given to a parameter of `model.parameter`'s classes, whose loader cuts the tensor on disk as ever.
Where an op of `weightlift.ops`, or a view, does all of the conversion, it is recorded with the copy: nothing is read
before its turn. K is the input size of a layer, N its output size, G the number of groups along K with scales of their
own; all as this rank holds them.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch

from ... import ops
from ..parameter import UnfitWeightError, check_dtype, copy_weight
from .packed import AWQ_ORDER, TILE_K, TILE_N, in_each, inverse, marlin_pack, marlin_unpack, unpack_awq, unpack_words

# How a weight's values lie in words: along K, (K / values of a word, N); along N, interleaved, (K, N / values of a
# word); along K, (N, K / values of a word), which is compressed-tensors', and with whole bytes that of FP8.
Packing: TypeAlias = Literal["gptq", "awq", "nk"]


class MemoryLayout(abc.ABC):
    """How the memory of a parameter is laid out.

    Attributes:
        source_shape: of this rank's part as it lies on disk: what parameters cut and check sizes by.
        shape, dtype: of the memory.
    """

    source_shape: Sequence[int]
    shape: Sequence[int]
    dtype: torch.dtype

    def empty(self) -> torch.Tensor:
        """Memory of this layout, not yet set. Placing all parts of the source sets all of it, padding too."""
        return torch.empty(tuple(self.shape), dtype=self.dtype)

    @abc.abstractmethod
    def place(self, target: torch.Tensor, part: torch.Tensor, begin: Sequence[int]) -> None:
        """Puts a part where it belongs.

        Args:
            target: memory of this layout.
            part: a slice of the source, real or a CheckpointTensor.
            begin: the position of its first element in `source_shape`.

        Raises:
            UnfitWeightError: there is no such form of these values.
        """

    def clear(self, target: torch.Tensor, dim: int, begin: int) -> None:
        """Sets outputs that no part fills, from a position along a dimension of `source_shape` on, to 0.

        Raises:
            UnfitWeightError: the layout has no place for such outputs.
        """
        if tuple(self.shape) != tuple(self.source_shape):
            raise UnfitWeightError(f"{type(self).__name__} has no padding of outputs; load with target='plain'")
        target.narrow(dim, begin, self.source_shape[dim] - begin).zero_()


class Converted(MemoryLayout):
    """Elements where they are on disk, each converted on its own: `convert` keeps the shape, and makes `dtype`."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.source_shape = self.shape = tuple(shape)
        self.dtype = dtype
        self.convert = convert

    def place(self, target: torch.Tensor, part: torch.Tensor, begin: Sequence[int]) -> None:
        for dim, (position, size) in enumerate(zip(begin, part.shape, strict=True)):
            target = target.narrow(dim, position, size)
        copy_weight(target, self.convert(part))


def fnuz_weight(shape: Sequence[int]) -> Converted:
    """The layout of an FP8 weight for AMD's MI300, whose scales are to be doubled."""
    return Converted(shape, torch.float8_e4m3fnuz, _to_fnuz)


def _to_fnuz(weight: torch.Tensor) -> torch.Tensor:
    check_dtype(weight, torch.float8_e4m3fn)  # one in e4m3fnuz would stay as it is, and its scales be doubled
    return ops.normalize_e4m3fn_to_e4m3fnuz(weight, torch.ones((), device="cpu"))[0]


class Unused(MemoryLayout):
    """No memory: the tensor on disk belongs to the format, and this layout does without it."""

    def __init__(self, source_shape: Sequence[int], dtype: torch.dtype) -> None:
        self.source_shape, self.shape, self.dtype = tuple(source_shape), (0,), dtype

    def place(self, target: torch.Tensor, part: torch.Tensor, begin: Sequence[int]) -> None:
        return

    def clear(self, target: torch.Tensor, dim: int, begin: int) -> None:
        return


class MarlinLayout(MemoryLayout):
    """Base of what Marlin's kernels read: columns are outputs, in blocks of 64; sizes are padded, with zeros.

    What fills whole blocks is converted on its own. What is left of parts of a fused layer, where their sizes are no
    multiples of 64, is put into blocks that are there already, by value: right in any order, and slower.

    Args:
        size_n, size_k: N and K, not padded.
        group_size: how many inputs share a scale; -1: all.
        rows: of values: K for a weight; None: G, for what groups have.
        output_dim: of the source; with so many outputs in an element.

    Attributes:
        padded_nk: N and K as they are in memory.
    """

    def __init__(
        self,
        *,
        size_n: int,
        size_k: int,
        group_size: int,
        rows: int | None = None,
        output_dim: int,
        outputs_per_item: int = 1,
    ) -> None:
        self._output_dim, self._outputs_per_item = output_dim, outputs_per_item
        self.size_n, self.size_k, self.group_size = size_n, size_k, group_size
        self.padded_nk = ops.marlin_padded_nk(size_n, size_k, group_size)
        groups, padded_groups = (-(-k // group_size) if group_size > 0 else 1 for k in (size_k, self.padded_nk[1]))
        self._rows, self._padded_rows = (groups, padded_groups) if rows is None else (rows, self.padded_nk[1])

    def decode(self, memory: torch.Tensor) -> torch.Tensor:
        """The values that memory of this layout holds: (rows, N), without padding."""
        return self._decode(memory)[: self._rows, : self.size_n]

    def place(self, target: torch.Tensor, part: torch.Tensor, begin: Sequence[int]) -> None:
        dim, per = self._output_dim, self._outputs_per_item
        first = begin[dim] * per
        last = first + part.shape[dim] * per
        # Whole blocks; the last part has the padding behind it.
        start = -(-first // TILE_N) * TILE_N
        stop = last if last == self.size_n else last // TILE_N * TILE_N
        bounds = [first, start, stop, last] if start < stop else [first, min(start, last), last]
        for i, j in itertools.pairwise(bounds):
            if i == j:
                continue
            piece = part.narrow(dim, (i - first) // per, (j - i) // per)
            if i % TILE_N == 0 and (j % TILE_N == 0 or j == self.size_n):
                end = self.padded_nk[0] if j == self.size_n else j
                self._fill(self._window(target, i, end), piece, end - i)
            else:
                self._insert(target, piece, i, j)

    def clear(self, target: torch.Tensor, dim: int, begin: int) -> None:
        first = begin * self._outputs_per_item
        start, more = first // TILE_N * TILE_N, first % TILE_N
        if more:
            window = self._window(target, start, start + TILE_N)
            values = self._decode(window)
            values[:, more:] = 0
            window.copy_(self._encode(values))
            start += TILE_N
        self._window(target, start, self.padded_nk[0]).zero_()

    def _insert(self, target: torch.Tensor, part: torch.Tensor, first: int, last: int) -> None:
        """Sets columns that don't fill a block, or blocks, and what is there of others stays."""
        end = self.padded_nk[0] if last == self.size_n else last
        start = first // TILE_N * TILE_N
        window = self._window(target, start, -(-end // TILE_N) * TILE_N)
        values = self._decode(window)
        values[:, first - start : end - start] = 0
        values[: self._rows, first - start : last - start] = self._values(part)
        window.copy_(self._encode(values))

    def _window(self, memory: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The memory of columns from one multiple of 64 to another."""
        return memory.narrow(1, self._position(start), self._position(stop - start))

    @abc.abstractmethod
    def _position(self, column: int) -> int:
        """Where a column that is a multiple of 64 begins in memory."""

    @abc.abstractmethod
    def _values(self, part: torch.Tensor) -> torch.Tensor:
        """A part of the source as (rows, columns)."""

    @abc.abstractmethod
    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        """What memory holds for padded values, whole blocks of them."""

    @abc.abstractmethod
    def _decode(self, memory: torch.Tensor) -> torch.Tensor:
        """The padded values that a part of memory holds, whole blocks of them, as a new tensor."""

    def _fill(self, window: torch.Tensor, part: torch.Tensor, width: int) -> None:
        """Sets a part of memory of that many columns to a part of the source, and what is beyond it to zeros."""
        values = self._values(part)
        padded = values.new_zeros(self._padded_rows, width)
        padded[: values.shape[0], : values.shape[1]] = values
        window.copy_(self._encode(padded))


class MarlinWeight(MarlinLayout):
    """A weight in tiles: int32 (padded K / 16, padded N * num_bits / 2). `decode` gives uint8 (K, N).

    Args:
        packing: how its values lie on disk.
        num_bits: of a value, 4 or 8.
        source_dtype: on disk: int32 words, or with "nk" uint8 or float8_e4m3fn.
        others: as for MarlinLayout.
    """

    def __init__(
        self,
        packing: Packing,
        *,
        num_bits: int,
        size_n: int,
        size_k: int,
        group_size: int = -1,
        source_dtype: torch.dtype = torch.int32,
    ) -> None:
        per_item = source_dtype.itemsize * 8 // num_bits
        super().__init__(
            size_n=size_n,
            size_k=size_k,
            group_size=group_size,
            rows=size_k,
            output_dim=0 if packing == "nk" else 1,
            outputs_per_item=per_item if packing == "awq" else 1,
        )
        self.packing, self.num_bits, self.source_dtype = packing, num_bits, source_dtype
        self.source_shape = {
            "gptq": (size_k // per_item, size_n),
            "awq": (size_k, size_n // per_item),
            "nk": (size_n, size_k // per_item),
        }[packing]
        padded_n, padded_k = self.padded_nk
        self.shape = (padded_k // TILE_K, self._position(padded_n))
        self.dtype = torch.int32

    def _position(self, column: int) -> int:
        return column * self.num_bits // 2

    def _fill(self, window: torch.Tensor, part: torch.Tensor, width: int) -> None:
        window.copy_(self._repack(part, width))

    def _repack(self, part: torch.Tensor, width: int) -> torch.Tensor:
        check_dtype(part, self.source_dtype)
        repack = {
            "gptq": ops.gptq_marlin_repack,
            "awq": ops.awq_marlin_repack,
            "nk": ops.nk_marlin_repack,
        }[self.packing]
        size = part.shape[self._output_dim] * self._outputs_per_item
        result: torch.Tensor = repack(part, self.size_k, size, self.num_bits, padded_nk=(width, self.padded_nk[1]))
        return result

    def _values(self, part: torch.Tensor) -> torch.Tensor:
        size = part.shape[self._output_dim] * self._outputs_per_item
        tiles = self._repack(part, -(-size // TILE_N) * TILE_N)
        return marlin_unpack(tiles[:], self.num_bits)[: self.size_k, :size]

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        return marlin_pack(values, self.num_bits)

    def _decode(self, memory: torch.Tensor) -> torch.Tensor:
        return marlin_unpack(memory, self.num_bits)


class MarlinScales(MarlinLayout):
    """Scales in the order in which Marlin's threads read them: (padded G, padded N). `decode` keeps their dtype.

    Args:
        dtype: in memory; what is on disk is converted, or, where that is of one byte, taken as it is.
        is_transposed: they are (N, G) on disk, not (G, N).
        is_interleaved: in runs of four, the second and the third are exchanged at last: FP4 and MXFP8.
        others: as for MarlinLayout.
    """

    def __init__(
        self,
        *,
        size_n: int,
        size_k: int,
        group_size: int,
        dtype: torch.dtype,
        is_transposed: bool = False,
        is_interleaved: bool = False,
    ) -> None:
        super().__init__(size_n=size_n, size_k=size_k, group_size=group_size, output_dim=0 if is_transposed else 1)
        self.dtype = dtype
        self.is_transposed = is_transposed
        self.source_shape = (size_n, self._rows) if is_transposed else (self._rows, size_n)
        self.shape = (self._padded_rows, self.padded_nk[0])
        # The order that the kernels' threads want is a transposition, of dimensions that columns are split into: the
        # 64 columns i + 8 * j become 8 * i + j where scales are those of groups, and of 32, a with one for all of K,
        # those 8 * b + 2 * a + c become 8 * a + 2 * b + c.
        self._sizes: tuple[int, ...]
        self._permutation: tuple[int, ...]
        if self._padded_rows > 1:
            self._sizes, self._permutation = ((2, 2, 2, 8), (3, 0, 2, 1)) if is_interleaved else ((8, 8), (1, 0))
        else:
            self._sizes, self._permutation = ((2, 2, 4, 2), (2, 0, 3, 1)) if is_interleaved else ((4, 4, 2), (1, 0, 2))

    def decode(self, memory: torch.Tensor) -> torch.Tensor:
        return super().decode(memory).view(memory.dtype)

    def _position(self, column: int) -> int:
        return column

    def _values(self, part: torch.Tensor) -> torch.Tensor:
        values = part.T if self.is_transposed else part
        if self.dtype.itemsize == 1:
            return values.view(torch.uint8)
        check_dtype(values, self.dtype)
        return values.to(self.dtype)

    def _fill(self, window: torch.Tensor, part: torch.Tensor, width: int) -> None:
        rows = part.T if self.is_transposed else part
        if rows.shape[1] < width:
            super()._fill(window, part, width)
            return
        # Nothing but views, so that a CheckpointTensor is not read now, however large.
        copy_weight(self._split(window[: rows.shape[0]]), self._permuted(rows))
        if rows.shape[0] < window.shape[0]:
            window[rows.shape[0] :].zero_()

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        return self._permuted(values).flatten(1).view(self.dtype)

    def _decode(self, memory: torch.Tensor) -> torch.Tensor:
        if memory.itemsize == 1:
            memory = memory.view(torch.uint8)
        back = [0, 1, *(position + 2 for position in inverse(self._permutation))]
        return self._split(memory).permute(back).flatten(1)

    def _permuted(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, columns) as a view (rows, blocks, *memory's order)."""
        split = torch.unflatten(rows, 1, (-1, *self._sizes))
        return split.permute(0, 1, *(dim + 2 for dim in self._permutation))

    def _split(self, memory: torch.Tensor) -> torch.Tensor:
        """Memory as a view of that shape."""
        return torch.unflatten(memory, 1, (-1, *(self._sizes[dim] for dim in self._permutation)))


class MarlinZeroPoints(MarlinLayout):
    """Zero points as Marlin's threads read them: int32 (padded G, padded N * num_bits / 32).

    `decode` gives uint8 (G, N). Arguments as for MarlinWeight; on disk they are packed along N: with "gptq" and "awq"
    (G, N / values of a word), with "nk" (N / values of a word, G).
    """

    def __init__(self, packing: Packing, *, num_bits: int, size_n: int, size_k: int, group_size: int) -> None:
        super().__init__(
            size_n=size_n,
            size_k=size_k,
            group_size=group_size,
            output_dim=0 if packing == "nk" else 1,
            outputs_per_item=32 // num_bits,
        )
        self.packing, self.num_bits = packing, num_bits
        words = size_n * num_bits // 32
        self.source_shape = (words, self._rows) if packing == "nk" else (self._rows, words)
        self.shape = (self._padded_rows, self._position(self.padded_nk[0]))
        self.dtype = torch.int32

    def _position(self, column: int) -> int:
        return column * self.num_bits // 32

    def _values(self, part: torch.Tensor) -> torch.Tensor:
        if self.packing == "awq":
            return unpack_awq(part, self.num_bits)
        if self.packing == "gptq":
            return unpack_words(part, self.num_bits, 1)
        return unpack_words(part, self.num_bits, 0).T

    def _fill(self, window: torch.Tensor, part: torch.Tensor, width: int) -> None:
        words = part.T if self.packing == "nk" else part
        rows, columns = self._padded_rows, self._position(width)
        words = torch.nn.functional.pad(words, (0, columns - words.shape[1], 0, rows - words.shape[0]))
        convert = ops.awq_to_marlin_zero_points if self.packing == "awq" else ops.gptq_to_marlin_zero_points
        window.copy_(convert(words, rows, width, self.num_bits))

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        return ops.marlin_zero_points(values, values.shape[0], values.shape[1], self.num_bits)

    def _decode(self, memory: torch.Tensor) -> torch.Tensor:
        values = in_each(unpack_words(memory, self.num_bits, 1), inverse(AWQ_ORDER[self.num_bits]))
        return torch.unflatten(values, 1, (-1, 8, 8)).transpose(-1, -2).flatten(1)
