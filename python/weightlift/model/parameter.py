"""Gate 4, parameters: classes that say how a checkpoint's tensor is cut for them; with vLLM's names.

A layer says which rows of the matrix that it stands for a rank holds, a `Cut`. A parameter says along which dimension
that counts for it, and in which unit: rows, packed words or blocks. What follows, `narrow` and `copy_`, is the same for
real tensors and for CheckpointTensors.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import CheckpointMismatchError

if TYPE_CHECKING:
    from typing_extensions import Self

    from .quantization.arrival import MemoryLayout

# The latter since torch 2.7.
_EXPONENTS = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))


class Cut(NamedTuple):
    """What a rank takes of a dimension of a matrix: rows `[start, start + size)` of the `total` that are on disk.

    In rows of the matrix before it was quantised (columns, where a layer is cut along its inputs). They become rows
    `[offset, offset + size)` of the parameter. `block` is how many of them share a block scale, if they do.
    """

    total: int
    start: int
    size: int
    offset: int = 0
    block: int | None = None


class UnfitWeightError(ValueError):
    """A tensor does not have the size that a parameter needs, or can't be cut where it would have to be."""


class BasevLLMParameter(torch.nn.Parameter):
    """A parameter that every rank has whole; base of the others.

    Args:
        data: its memory, of the size that this rank holds.
        weight_loader: its layer's, called as `weight_loader(parameter, loaded_weight)` or, for one part of a fused
            layer, `weight_loader(parameter, loaded_weight, shard_id)`.
        memory_layout: how its memory is laid out, where that is not as on disk. The dimensions that the parameter is
            cut along are those on disk.

    Attributes:
        output_dim, input_dim: along which dimension it is cut in layers that are cut along their outputs, or inputs;
            None: it is whole there.
    """

    output_dim: int | None = None
    input_dim: int | None = None

    def __new__(cls, data: torch.Tensor, **kwargs: Any) -> Self:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(
        self, data: torch.Tensor, weight_loader: Callable[..., None], memory_layout: MemoryLayout | None = None
    ) -> None:
        self.weight_loader = weight_loader
        self.memory_layout = memory_layout

    @property
    def source_shape(self) -> torch.Size:
        """The shape that this rank's part has on disk."""
        return self.shape if self.memory_layout is None else torch.Size(self.memory_layout.source_shape)

    # torch's own would call the class with other arguments.
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        result: Self = torch.Tensor._make_subclass(type(self), self.data.clone(memory_format=torch.preserve_format))
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return result

    def load_whole(self, loaded_weight: torch.Tensor) -> None:
        """Copies a tensor of the parameter's size.

        Raises:
            UnfitWeightError: it has another; a number without dimensions is one with size [1].
        """
        shape = self.source_shape
        if loaded_weight.dim() == 0 and len(shape) == 1:
            loaded_weight = loaded_weight.reshape(1)
        if loaded_weight.shape != shape:
            raise UnfitWeightError(
                f"Tried to load weights of size {loaded_weight.shape} to a parameter of size {shape}"
            )
        self._place(loaded_weight, [0] * len(shape))

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor, cuts: Mapping[int, Cut]) -> None:
        """Loads one or more parts of a layer that is cut along its outputs.

        Args:
            loaded_weight: the parts of all ranks, as they lie on disk.
            cuts: for each part, by its position in the layer, what to take.

        Raises:
            UnfitWeightError: as for `load_cut`.
        """
        if self.output_dim is None:
            self.load_whole(loaded_weight)
            return
        for cut in cuts.values():
            self.load_cut(loaded_weight, self.output_dim, cut)

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor, cut: Cut) -> None:
        """Loads a layer that is cut along its inputs. Raises UnfitWeightError, as `load_cut` does."""
        if self.input_dim is None:
            self.load_whole(loaded_weight)
        else:
            self.load_cut(loaded_weight, self.input_dim, cut)

    def load_cut(self, loaded_weight: torch.Tensor, dim: int, cut: Cut) -> int:
        """Copies what a cut along `dim` takes, and gives where it ends in the parameter.

        Raises:
            UnfitWeightError: the sizes on disk are not those of the cut, or it would go through a word or a block.
        """
        units = self.in_units(dim, cut)
        end = units.offset + units.size
        shape = self.source_shape
        expected = list(shape)
        expected[dim] = units.total
        if list(loaded_weight.shape) != expected or end > shape[dim]:
            raise UnfitWeightError(
                f"Tried to load weights of size {loaded_weight.shape} to a parameter of size {shape}, of which "
                f"this rank takes [{units.start}:{units.start + units.size}] of {units.total} along dimension {dim} "
                f"to [{units.offset}:{end}]; expected size {torch.Size(expected)}"
            )
        begin = [0] * len(shape)
        begin[dim] = units.offset
        self._place(loaded_weight.narrow(dim, units.start, units.size), begin)
        return end

    def _place(self, part: torch.Tensor, begin: Sequence[int]) -> None:
        """Puts a part of what this rank has on disk where it belongs. It begins there in `source_shape`."""
        if self.memory_layout is not None:
            self.memory_layout.place(self.data, part, begin)
            return
        target = self.data
        for dim, (position, size) in enumerate(zip(begin, part.shape, strict=True)):
            target = target.narrow(dim, position, size)
        copy_weight(target, part)

    def clear_from(self, dim: int, begin: int) -> None:
        """Sets what is padding, from there on along a dimension of `source_shape`, to 0."""
        size = self.source_shape[dim] - begin
        if size and self.memory_layout is not None:
            self.memory_layout.clear(self.data, dim, begin)
        elif size:
            self.data.narrow(dim, begin, size).zero_()

    def in_units(self, dim: int, cut: Cut) -> Cut:
        """The cut in elements of the parameter's dimension."""
        if dim != self.input_dim:
            return cut
        # Along the inputs, be these columns or groups, each rank has as many as this one.
        size = self.source_shape[dim]
        return Cut(cut.total // cut.size * size, cut.start // cut.size * size, size)


class ColumnvLLMParameter(BasevLLMParameter):
    """Cut along the outputs, whole in layers that are cut along their inputs: a bias."""

    def __init__(self, *, output_dim: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.output_dim = output_dim


class RowvLLMParameter(BasevLLMParameter):
    """Cut along the inputs, whole in layers that are cut along their outputs."""

    def __init__(self, *, input_dim: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.input_dim = input_dim


class ModelWeightParameter(ColumnvLLMParameter, RowvLLMParameter):
    """A weight; cut along the outputs or along the inputs, as its layer is."""


class GroupQuantScaleParameter(ColumnvLLMParameter, RowvLLMParameter):
    """Scales or zero points of groups along the inputs; cut as the weight is."""


class ChannelQuantScaleParameter(ColumnvLLMParameter):
    """Scales of the outputs; whole in layers that are cut along their inputs."""


class PerTensorScaleParameter(BasevLLMParameter):
    """One scale for each part of a fused layer, `[parts]`; the same on every rank. A layer fused on disk has one."""

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor, cuts: Mapping[int, Cut]) -> None:
        shape = self.source_shape
        if loaded_weight.shape not in ((), (1,)) or len(shape) != 1 or max(cuts) >= shape[0]:
            raise UnfitWeightError(
                f"Tried to load a scale of size {loaded_weight.shape} to element {', '.join(map(str, cuts))} of a "
                f"parameter of size {shape}; expected one number for each part of the layer"
            )
        for slot in cuts:
            self._place(loaded_weight.reshape(1), [slot])


class BlockQuantScaleParameter(ColumnvLLMParameter, RowvLLMParameter):
    """Scales of blocks of `layer.weight_block_size`; cut as the weight is, between blocks.

    Its blocks begin at the rank's first row. Where a part begins inside a block of the checkpoint, or of the parameter,
    no slice of the scales has the right values, and it is refused.
    """

    def in_units(self, dim: int, cut: Cut) -> Cut:
        if cut.block is None:
            raise UnfitWeightError("a block scale needs a layer with weight_block_size")
        if cut.start % cut.block or cut.offset % cut.block:
            raise UnfitWeightError(
                f"{_rows(cut)}: this does not begin at a block of {cut.block} rows, so that no slice of the block "
                "scales belongs to it; use another tp_size, one that divides the parts of this layer into whole blocks"
            )
        return Cut(*(-(-number // cut.block) for number in cut[:4]))


class _PackedParameter(BasevLLMParameter):
    """Several values in one word.

    Args:
        packed_factor: how many; a fraction where they do not fill a word (3 bits: 32/3).
        packed_dim: along which dimension. Along the other it is cut as if it were not packed.
        marlin_tile_size: each word along that dimension stands for so many, in tiles of marlin's layout.
    """

    def __init__(
        self, *, packed_factor: int | Fraction, packed_dim: int, marlin_tile_size: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.packed_factor = packed_factor
        self.packed_dim = packed_dim
        self.marlin_tile_size = marlin_tile_size

    def in_units(self, dim: int, cut: Cut) -> Cut:
        if dim != self.packed_dim:
            return super().in_units(dim, cut)
        factor, end = self.packed_factor, cut.start + cut.size
        if cut.start % factor or cut.offset % factor or (end % factor and end != cut.total):
            raise UnfitWeightError(
                f"{_rows(cut)}: packed {factor} to a word, these are not whole words; use another tp_size, one that "
                "divides the parts of this layer into whole words"
            )
        tile = self.marlin_tile_size or 1
        return Cut(*(int(-(-number // factor)) * tile for number in cut[:4]))


class PackedColumnParameter(_PackedParameter, ColumnvLLMParameter):
    """Packed values of the outputs (zero points without groups); whole in layers that are cut along their inputs."""


class PackedvLLMParameter(_PackedParameter, ModelWeightParameter):
    """A packed weight; cut as a weight is."""


def copy_weight(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`; of uint8 and float8_e8m0fnu, two dtypes for bytes that are exponents, the bytes.

    Raises:
        UnfitWeightError: the dtypes are of two kinds of quantisation: a number of one means nothing in the other.
    """
    if target.dtype in _EXPONENTS and source.dtype in _EXPONENTS:
        source = source.view(target.dtype)
    check_dtype(source, target.dtype)
    target.copy_(source)


def check_dtype(source: torch.Tensor, target: torch.dtype) -> None:
    """Raises UnfitWeightError where the source's numbers are not the same, but for rounding, in the other dtype."""
    found = source.dtype
    # Integers are zero points and sizes.
    widened = target.is_floating_point and target.itemsize > 1
    converts = widened if found.is_floating_point else target in (torch.int32, torch.int64)
    if found != target and not converts:
        raise UnfitWeightError(
            f"Tried to load weights of dtype {found} to a parameter of dtype {target}, in which their numbers mean "
            "something else"
        )


@contextlib.contextmanager
def name_in_errors(layer: torch.nn.Module, param: torch.nn.Parameter) -> Iterator[None]:
    """Makes of an UnfitWeightError a CheckpointMismatchError with the layer's `prefix` and the parameter's name."""
    try:
        yield
    except UnfitWeightError as error:
        names = (name for name, value in layer.named_parameters(remove_duplicate=False) if value is param)
        parts = [getattr(layer, "prefix", ""), next(names, type(param).__name__)]
        clause = f"{'.'.join(filter(None, parts))}: {error}."
        raise CheckpointMismatchError(type(layer).__name__, mismatched=[clause]) from None


def _rows(cut: Cut) -> str:
    return (
        f"this rank takes rows [{cut.start}:{cut.start + cut.size}] of {cut.total} to rows "
        f"[{cut.offset}:{cut.offset + cut.size}]"
    )
