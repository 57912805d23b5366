"""How a weight in floating point becomes a quantised parameter while it is loaded.

What needs only some rows for a scale is quantised as it arrives, `Blocks`: the op is recorded with the copy. One scale
for all of a weight needs all of it, `WholeWeight`: its source is in memory until it is quantised, in a turn of its own
(see `weightlift.turns`). The scales are another parameter, which the layout fills with the weight.

A parameter may be a stack of such weights, one for each expert, each of one projection or of several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import ops
from ...tensor import CheckpointTensor
from ..parameter import UnfitWeightError
from .arrival import MemoryLayout


@dataclass(frozen=True)
class Scheme:
    """How a weight [N, K] is quantised.

    Attributes:
        block: rows and columns that share a scale; None stands for all of that dimension.
        dtype: of the quantised weight.
        scale_dtype: torch.uint8 are exponents of powers of two, biased by 127.
        scale_name: what layers call the scales.
        quantize: from floating point, of part of the weight, to that part and its scales. On a CheckpointTensor it is
            recorded. None: the weight has one scale, and is quantised to FP8.
    """

    block: tuple[int | None, int | None]
    dtype: torch.dtype
    scale_dtype: torch.dtype
    scale_name: str
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None

    def block_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of a block of a weight of that shape."""
        rows, columns = self.block
        return rows or shape[0], columns or shape[1]

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Of the scales of such a weight."""
        block_n, block_k = self.block_of(shape)
        return -(-shape[0] // block_n), -(-shape[1] // block_k)


class OnlineLayout(MemoryLayout):
    """Base of both.

    Args:
        source_shape: (N, K), of this rank's part of a weight, or of one projection of an expert.
        scheme: how it is quantised.
    """

    weight: torch.nn.Parameter
    scale: torch.nn.Parameter

    def __init__(self, source_shape: tuple[int, int], scheme: Scheme) -> None:
        self.source_shape = self.shape = source_shape
        self.dtype = scheme.dtype
        self.scheme = scheme

    def connect(self, weight: torch.nn.Parameter, scale: torch.nn.Parameter) -> None:
        """Says which parameters these are: one or several weights, and their scales."""
        self.weight, self.scale = weight, scale
        scale.made_of = "weight"  # type: ignore[attr-defined]

    def _number_of(self, target: torch.Tensor) -> int:
        """Which of the weights in the parameter it is."""
        rows, columns = self.source_shape
        return (target.storage_offset() - self.weight.storage_offset()) // (rows * columns)


class Blocks(OnlineLayout):
    """Weights that are quantised as they arrive; the scales go where their blocks are."""

    def place(self, target: torch.Tensor, part: torch.Tensor, begin: Sequence[int]) -> None:
        assert self.scheme.quantize is not None
        _require_floating(part)
        values, found = self.scheme.quantize(part)
        blocks = [start // block for start, block in zip(begin, self.scheme.block_of(self.shape), strict=True)]
        scales = self.scale.data.view(-1, *self.scheme.scale_shape(self.shape))[self._number_of(target)]
        _window(target, begin, values.shape).copy_(values)
        _window(scales, blocks, found.shape).copy_(found)


class WholeWeight(OnlineLayout):
    """Weights that are quantised when all parts of them are there.

    Args:
        source_shape, scheme: as for OnlineLayout.
        count: how many of these make one weight: gate and up projection of an expert.
    """

    def __init__(self, source_shape: tuple[int, int], scheme: Scheme, *, count: int = 1) -> None:
        super().__init__(source_shape, scheme)
        self._count = count
        self._sources: dict[int, Source] = {}  # of weights whose parts come one by one, with nobody who takes turns

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_sources": {}}  # a load under way is not copied

    def place(self, target: torch.Tensor, part: torch.Tensor, begin: Sequence[int]) -> None:
        _require_floating(part)
        if target.is_meta:
            return
        number, position = divmod(self._number_of(target), self._count)
        begin = (position * self.source_shape[0] + begin[0], begin[1])
        turns = part._source.program.turns if isinstance(part, CheckpointTensor) else None
        if turns is not None:
            turn = turns.setdefault((self, number), self._source_of(number))
            assert isinstance(turn, Source)
            turn.record(part, begin)
            return
        source = self._sources.setdefault(number, self._source_of(number))
        source.add(part, begin)
        if source.is_complete:
            self._sources.pop(number).finish()

    def _source_of(self, number: int) -> Source:
        rows, columns = self.source_shape
        weight = self.weight.data.view(-1, self._count * rows, columns)[number]
        return Source(weight, self.scale.data.view(-1)[number : number + 1])

    def finish(self) -> None:
        """Quantises what is in memory and has parts missing; they are 0 then."""
        while self._sources:
            self._sources.popitem()[1].finish()


class Source:
    """A weight before it is quantised, in the widest dtype that its parts have. A Turn, if its parts are recorded.

    Args:
        weight, scale: what is made of it: FP8 [N, K], and float32 [1].
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self.destinations = (weight, scale)
        self._sizes: dict[Sequence[int], int] = {}  # of the parts, by where they begin
        self._dtype: torch.dtype | None = None
        self._parts: list[tuple[CheckpointTensor, Sequence[int]]] = []
        self._memory: torch.Tensor | None = None

    @property
    def source_bytes(self) -> int:
        assert self._dtype is not None
        return self.destinations[0].numel() * self._dtype.itemsize

    @property
    def is_complete(self) -> bool:
        return sum(self._sizes.values()) == self.destinations[0].numel()

    def record(self, part: torch.Tensor, begin: Sequence[int]) -> None:
        """Takes a part, which begins there and is on disk until `start`."""
        assert isinstance(part, CheckpointTensor)
        self._note(part, begin)
        self._parts.append((part, begin))
        part._source.program.note_copy(_window(self.destinations[0], begin, part.shape), part)

    def add(self, part: torch.Tensor, begin: Sequence[int]) -> None:
        """Takes a part, which begins there, and copies it now."""
        self._note(part, begin)
        if self._memory is None:
            self._memory = torch.zeros(self.destinations[0].shape, dtype=self._dtype)
        self._memory = self._memory.to(self._dtype)
        _window(self._memory, begin, part.shape).copy_(part)
        if isinstance(part, CheckpointTensor):
            part._source.program.before_look(self._memory)  # which need not be watched

    def _note(self, part: torch.Tensor, begin: Sequence[int]) -> None:
        self._sizes[begin] = part.numel()
        self._dtype = part.dtype if self._dtype is None else torch.promote_types(self._dtype, part.dtype)

    def start(self, empty: Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor]) -> None:
        assert self._dtype is not None
        part, begin = self._parts[0]
        rows, columns = self.destinations[0].shape
        offset = part._file_offset - (begin[0] * columns + begin[1]) * self._dtype.itemsize
        self._memory = empty(max(0, offset), (rows, columns), self._dtype)
        if not self.is_complete:
            self._memory.zero_()
        for part, begin in self._parts:
            _window(self._memory, begin, part.shape).copy_(part)
        self._parts.clear()

    def finish(self) -> None:
        assert self._memory is not None
        weight, scale = self.destinations
        _, found = ops.scaled_fp8_quant(self._memory, output=weight)
        scale.copy_(found)
        self._memory = None


class MadeOfWeight(MemoryLayout):
    """Scales that are made while their weight is quantised. Those of a checkpoint have no place here."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.source_shape = self.shape = tuple(shape)
        self.dtype = dtype

    def place(self, target: torch.Tensor, part: torch.Tensor, begin: Sequence[int]) -> None:
        raise UnfitWeightError(
            "the weight is quantised while it is loaded, and its scales are made of it; the checkpoint has some, as if "
            "it were quantised already: load it without quantization="
        )


def _require_floating(part: torch.Tensor) -> None:
    if part.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnfitWeightError(
            f"Tried to load weights of dtype {part.dtype}; what is quantised while it is loaded is float32, float16 or "
            "bfloat16"
        )


def _window(tensor: torch.Tensor, begin: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(begin, shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
