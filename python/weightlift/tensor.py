"""CheckpointTensor: a tensor whose bytes are still on disk.

It has a shape, a dtype and strides as any tensor has, and knows which bytes of which file it stands for. Views of it
are CheckpointTensors, and so is what an op of `weightlift.ops` makes of it; copying it into a real tensor is recorded
by its `Program`; every other use reads it and goes on with real values. Nothing that torch's dispatcher or Python can
ask of it is wrong, at worst it is slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo import eval_frame
from torch.utils._pytree import tree_map

from .pending import PendingOp, run_op

if TYPE_CHECKING:
    from . import _C
    from .entries import TensorEntry
    from .program import Program

aten = torch.ops.aten
Sizes = tuple[int, ...]
_CPU = torch.device("cpu")


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps torch.compile out of a function and of all that it calls. torch's own decorator for that imports
    torch._dynamo, nearly a second."""
    if hasattr(eval_frame, "set_code_exec_strategy"):  # since torch 2.7
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


class Source:
    """The memory that a CheckpointTensor and its views share, as far as they would share memory if they were real.

    `real` is None until someone writes to one of them, or asks for its address; then it holds all of them, and from
    then on they are views of it.
    """

    __slots__ = ("entry", "file", "program", "real", "root")

    def __init__(self, program: Program, entry: TensorEntry, file: int) -> None:
        self.program = program
        self.entry = entry
        self.file = file
        self.real: torch.Tensor | None = None
        # The whole of it, until that is real; None: the span of the entry.
        self.root: CheckpointTensor | None = None


class CheckpointTensor(torch.Tensor):
    """A `torch.Tensor` with shape and dtype, whose values are bytes of a file. Made by a `Checkpoint`, not by hand.

    Raises, on any use that needs values: CheckpointReadError; RuntimeError when its Checkpoint has been closed.
    """

    # Two geometries of the same elements. What torch sees (strides and offset in elements of `_dtype`), and where they
    # lie in the file (strides in elements of `_file_dtype`, offset in bytes from the start of the file). They part ways
    # at `.contiguous()` and `.to(dtype)`, which change the first alone.
    _source: Source
    _shape: Sizes
    _strides: Sizes
    _offset: int
    _dtype: torch.dtype
    _device: torch.device
    _file_strides: Sizes
    _file_offset: int
    _file_dtype: torch.dtype
    # Of `cat` and `stack`: the parts along `_dim`, in order. The file geometry means nothing then.
    _pieces: list[CheckpointTensor] | None
    _dim: int
    # Of what an op makes: how. Nor has that a geometry in the file.
    _op: PendingOp | None

    # ---- making

    @staticmethod
    def of_entry(source: Source, ranges: Sequence[tuple[int, int, int]] = ()) -> CheckpointTensor:
        """The whole of an entry; or what `narrow` by each of these leaves: dimension, from 0, start and length."""
        entry = source.entry
        shape, strides, start_of_part = entry.shape, strides_of(entry), 0
        for dim, start, length in ranges:
            shape = (*shape[:dim], length, *shape[dim + 1 :])
            start_of_part += start * strides[dim]
        file_offset = entry.offset + start_of_part * entry.dtype.itemsize
        return _make(source, shape, strides, start_of_part, entry.dtype, strides, file_offset, entry.dtype, _CPU)

    @staticmethod
    def of_span(source: Source) -> CheckpointTensor:
        """All elements from the first of an entry to its last, in a row, also those between that are not its own."""
        entry = source.entry
        shape = (entry.nbytes // entry.dtype.itemsize,)
        return _make(source, shape, (1,), 0, entry.dtype, (1,), entry.offset, entry.dtype, _CPU)

    def _view(
        self, shape: Sizes, strides: Sizes, offset: int, file_strides: Sizes, file_offset: int
    ) -> CheckpointTensor:
        return _make(
            self._source, shape, strides, offset, self._dtype, file_strides, file_offset, self._file_dtype, self._device
        )

    def _alias(self) -> CheckpointTensor:
        alias = self._view(self._shape, self._strides, self._offset, self._file_strides, self._file_offset)
        alias._pieces, alias._dim, alias._op = self._pieces, self._dim, self._op
        return alias

    def _copy(self, strides: Sizes, dtype: torch.dtype, device: torch.device) -> CheckpointTensor:
        """What a copy with these strides would be: it shares memory with nothing that exists."""
        source = Source(self._source.program, self._source.entry, self._source.file)
        copy = _make(
            source, self._shape, strides, 0, dtype, self._file_strides, self._file_offset, self._file_dtype, device
        )
        copy._pieces, copy._dim, copy._op = self._pieces, self._dim, self._op
        source.root = copy
        return copy

    def _with_op(self, bind: Callable[[torch.Tensor], _C.Op | None], shape: Sizes, dtype: torch.dtype) -> torch.Tensor:
        """What an op makes of this tensor, as a tensor that shares memory with nothing. See PendingOp.

        Args:
            bind: may be called later and more than once, on any thread. Runs no torch op. What it makes the op of does
                not change any more.
            shape, dtype: of the result.
        """
        if self._is_plain() and self._dtype == self._file_dtype and self._device == _CPU:
            source = Source(self._source.program, self._source.entry, self._source.file)
            result = _make(source, shape, contiguous_strides(shape), 0, dtype, (), 0, dtype, _CPU)
            result._op = PendingOp(self._copy(self._strides, self._dtype, self._device), bind)
            source.root = result
            return result
        values = empty(shape, contiguous_strides(shape), dtype)
        if values.numel():
            op = bind(values)
            assert op is not None
            run_op(op, self._read().to(_CPU))
        return values.to(self._device)

    def _is_plain(self) -> bool:
        """Whether its elements lie in the file, each as one that is."""
        return self._pieces is None and self._op is None and self._source.real is None

    # ---- views, the frequent ones, without a trip through the dispatcher

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:  # type: ignore[override]
        shape = self._shape
        ndim = len(shape)
        if (
            self._is_plain()
            and type(dim) is type(start) is type(length) is int
            and -ndim <= dim < ndim
            and start >= 0
            and length >= 0
            and start + length <= shape[dim]
        ):
            if dim < 0:
                dim += ndim
            return self._view(
                (*shape[:dim], length, *shape[dim + 1 :]),
                self._strides,
                self._offset + start * self._strides[dim],
                self._file_strides,
                self._file_offset + start * self._file_strides[dim] * self._file_dtype.itemsize,
            )
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.narrow(self, dim, start, length)

    def t(self) -> torch.Tensor:
        if len(self._shape) == 2 and self._is_plain():
            (rows, columns), (a, b), (c, d) = self._shape, self._strides, self._file_strides
            return self._view((columns, rows), (b, a), self._offset, (d, c), self._file_offset)
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.t(self)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if type(index) is slice and self._shape and index.step in (None, 1):
            start, stop, _ = index.indices(self._shape[0])
            return self.narrow(0, start, max(0, stop - start))
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.__getitem__(self, index)

    # ---- values

    def _read(self) -> torch.Tensor:
        """The values: to be read only, they may be shared. Of `_shape` and `_dtype`, on `device`."""
        if self._source.real is not None:
            return self._real_view()
        if self._pieces is not None:
            return torch.cat([piece._read().to(self._dtype) for piece in self._pieces], self._dim).to(self._device)
        return self._source.program.read(self).to(self._device)

    def _land(self) -> torch.Tensor:
        """This tensor as a view of real memory, shared with every view of the same source."""
        source = self._source
        if source.real is None:
            root = source.root if source.root is not None else CheckpointTensor.of_span(source)
            real = empty(root._shape, root._strides, root._dtype, root._device)
            source.program.record(real, root)
            source.program.before_look(real)
            source.real, source.root = real, None
        return self._real_view()

    def _real_view(self) -> torch.Tensor:
        """Of the landed memory, which may by now be a parameter's with copies pending."""
        real = self._source.real
        assert real is not None
        view = empty((0,), (1,), self._dtype, real.device)
        with torch._C._DisableTorchDispatch():
            view.set_(storage_of(real), self._offset, self._shape, self._strides)
        self._source.program.before_look(view)
        return view

    # ---- torch

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _BY_FUNCTION.get(func)
        if handler is not None and args and isinstance(args[0], CheckpointTensor):
            return handler(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    @untraced
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Beside another subclass, real values: its own code knows what it holds.
        if func is aten.copy_.default and not isinstance(args[0], CheckpointTensor) and not has_foreign(types):
            return args[1]._source.program.record(args[0], args[1])
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        elif is_composite(func):
            return func.decompose(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], CheckpointTensor):
            return args[0]._keep_geometry(func)
        # Anything else: with real values. Shared memory where the op writes, or where its result may share memory.
        mutates = func._schema.is_mutable
        shares = mutates or any(returned.alias_info is not None for returned in func._schema.returns)

        def real(value: Any) -> Any:
            if not isinstance(value, CheckpointTensor):
                return value
            return value._land() if shares else value._read()

        result = func(*tree_map(real, list(args)), **tree_map(real, kwargs))
        # An in-place op gives back its argument: the object that the caller has, not what stands for it.
        return args[0] if mutates and isinstance(args[0], CheckpointTensor) and result is not None else result

    def _keep_geometry(self, func: Any) -> CheckpointTensor:
        if func is not aten.detach_.default:
            name = func._schema.name.removeprefix("aten::")
            raise RuntimeError(
                f"{self._source.entry.name}: {name}: a tensor of a checkpoint can't change its shape or memory in "
                "place; clone() it first"
            )
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        entry = self._source.entry
        return (
            f"CheckpointTensor({entry.name!r}, shape={tuple(self._shape)}, dtype={self._dtype}, "
            f"file={entry.shard.path!r})"
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self._shape else object.__format__(self, spec)

    # ---- what leaves torch: with real memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._land().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = memo[id(self)] = self._read().clone()
        return copy

    def is_shared(self) -> bool:
        real = self._source.real
        return real is not None and bool(real.is_shared())  # type: ignore[no-untyped-call]


def empty(shape: Sizes, strides: Sizes, dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:
    """Uninitialised memory; real, whatever modes (a default device, fake tensors) the caller has set."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)


# The method of torch itself, not the door that `watch` puts in its place.
storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage


def _make(
    source: Source,
    shape: Sizes,
    strides: Sizes,
    offset: int,
    dtype: torch.dtype,
    file_strides: Sizes,
    file_offset: int,
    file_dtype: torch.dtype,
    device: torch.device,
) -> CheckpointTensor:
    tensor: CheckpointTensor = torch.Tensor._make_wrapper_subclass(
        CheckpointTensor, shape, strides, offset, dtype=dtype, device=device
    )
    tensor._source = source
    tensor._shape = shape
    tensor._strides = strides
    tensor._offset = offset
    tensor._dtype = dtype
    tensor._device = device
    tensor._file_strides = file_strides
    tensor._file_offset = file_offset
    tensor._file_dtype = file_dtype
    tensor._pieces = None
    tensor._dim = 0
    tensor._op = None
    return tensor


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether an op is made of others. Autograd takes such ops apart; in inference mode they arrive whole."""
    return bool(func._can_decompose())


@functools.cache
def has_foreign(types: tuple[type, ...]) -> bool:
    """Whether there is a subclass among them, other than CheckpointTensor, that carries out torch's ops itself."""
    disabled = torch._C._disabled_torch_dispatch_impl
    return any(kind is not CheckpointTensor and kind.__torch_dispatch__ is not disabled for kind in types)  # type: ignore[attr-defined]


def contiguous_strides(shape: Sequence[int]) -> Sizes:
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(1, shape[i])
    return tuple(strides)


def strides_of(entry: TensorEntry) -> Sizes:
    return contiguous_strides(entry.shape) if entry.strides is None else entry.strides


def _concatenate(pieces: list[CheckpointTensor], dim: int) -> CheckpointTensor:
    first = pieces[0]
    shape = list(first._shape)
    shape[dim] = sum(piece._shape[dim] for piece in pieces)
    source = Source(first._source.program, first._source.entry, first._source.file)
    strides = contiguous_strides(shape)
    whole = _make(source, tuple(shape), strides, 0, first._dtype, (), 0, first._dtype, first._device)
    # Copies, which later writes to the tensors they were made of don't reach.
    whole._pieces = [piece._copy(piece._strides, piece._dtype, piece._device) for piece in pieces]
    whole._dim = dim
    source.root = whole
    return whole


# ---- ops that stay recorded; NotImplemented: go on with real values


def _view_op(func: Any, tensor: CheckpointTensor, *args: Any, **kwargs: Any) -> Any:
    """A view op: carried out on the geometry that torch sees, and on that of the file."""
    if tensor._source.real is not None:
        return NotImplemented
    seen = torch.empty_strided((0,), (1,), dtype=tensor._dtype, device="meta").as_strided(
        tensor._shape, tensor._strides, 0
    )
    seen_result = func(seen, *args, **kwargs)  # raises what torch raises
    if not tensor._is_plain():
        return NotImplemented
    filed = torch.empty_strided((0,), (1,), dtype=tensor._file_dtype, device="meta").as_strided(
        tensor._shape, tensor._file_strides, 0
    )
    try:
        filed_result = func(filed, *args, **kwargs)
    except RuntimeError:  # a view of what torch sees, which the elements in the file do not form
        return NotImplemented

    def pair(seen: torch.Tensor, filed: torch.Tensor) -> CheckpointTensor:
        return tensor._view(
            tuple(seen.shape),
            seen.stride(),
            tensor._offset + int(seen.storage_offset()),
            filed.stride(),
            tensor._file_offset + int(filed.storage_offset()) * tensor._file_dtype.itemsize,
        )

    if isinstance(seen_result, torch.Tensor):
        return pair(seen_result, filed_result)
    return [pair(s, f) for s, f in zip(seen_result, filed_result, strict=True)]


def _alias(func: Any, tensor: CheckpointTensor) -> CheckpointTensor:
    return tensor._alias()


def _view_dtype(func: Any, tensor: CheckpointTensor, dtype: torch.dtype) -> Any:
    if not tensor._is_plain() or tensor._dtype != tensor._file_dtype:
        return NotImplemented
    seen = torch.empty_strided(tensor._shape, tensor._strides, dtype=tensor._dtype, device="meta")
    filed = torch.empty_strided(tensor._shape, tensor._file_strides, dtype=tensor._dtype, device="meta")
    new, old = dtype.itemsize, tensor._dtype.itemsize
    if tensor._offset * old % new:
        return NotImplemented
    seen = func(seen, dtype)
    try:
        filed = func(filed, dtype)
    except RuntimeError:
        return NotImplemented
    return _make(
        tensor._source,
        tuple(seen.shape),
        seen.stride(),
        tensor._offset * old // new,
        dtype,
        filed.stride(),
        tensor._file_offset,
        dtype,
        tensor._device,
    )


def _slice(func: Any, tensor: CheckpointTensor, *args: Any, **kwargs: Any) -> Any:
    """A slice of a concatenation is one of the slices of its parts."""
    if tensor._pieces is None or tensor._source.real is not None:
        return _view_op(func, tensor, *args, **kwargs)
    if kwargs or len(args) > 4:
        return NotImplemented
    given: list[Any] = [*args]
    dim, start, end, step = given + [0, None, None, 1][len(given) :]
    dim = dim % len(tensor._shape)
    begin, end, step = slice(start, end, step).indices(tensor._shape[dim])
    if step != 1 or end <= begin:
        return NotImplemented
    shape = (*tensor._shape[:dim], end - begin, *tensor._shape[dim + 1 :])
    result = tensor._view(shape, tensor._strides, tensor._offset + begin * tensor._strides[dim], (), 0)
    result._pieces, result._dim = [], tensor._dim
    for piece in tensor._pieces:
        size = tensor._shape[dim] if dim != tensor._dim else piece._shape[dim]
        if begin < size and end > 0:
            result._pieces.append(_slice(func, piece, dim, max(0, begin), min(size, end)))
        if dim == tensor._dim:
            begin, end = begin - size, end - size
    return result


def _clone(func: Any, tensor: CheckpointTensor, *, memory_format: Any = torch.preserve_format) -> Any:
    if tensor._source.real is not None:
        return NotImplemented
    seen = torch.empty_strided(tensor._shape, tensor._strides, dtype=tensor._dtype, device="meta")
    return tensor._copy(seen.clone(memory_format=memory_format).stride(), tensor._dtype, tensor._device)


def _to_copy(func: Any, tensor: CheckpointTensor, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype") or tensor._dtype
    device = torch.device(kwargs.get("device") or tensor._device)
    # One conversion is recorded; of two in a row the first may lose digits that the second would not have seen.
    second = dtype != tensor._dtype and (tensor._dtype != tensor._file_dtype or tensor._op is not None)
    if tensor._source.real is not None or second or device.type == "meta":
        return func(_stand_in(tensor), **kwargs) if device.type == "meta" else NotImplemented
    if dtype != tensor._dtype and tensor._pieces is not None:
        parts = [func(piece, dtype=dtype) for piece in tensor._pieces]
        if not all(isinstance(part, CheckpointTensor) for part in parts):
            return NotImplemented
        return _concatenate(parts, tensor._dim)
    seen = torch.empty_strided(tensor._shape, tensor._strides, dtype=tensor._dtype, device="meta")
    strides = func(seen, **{**kwargs, "device": None}).stride()
    return tensor._copy(strides, dtype, device)


def _cat(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(tensor, CheckpointTensor) and tensor._source.real is None for tensor in tensors):
        return NotImplemented
    first = tensors[0]
    if any(t._dtype != first._dtype or t._device != first._device or not t._shape for t in tensors):
        return NotImplemented
    if any(t._source.program is not first._source.program for t in tensors):
        return NotImplemented  # a recorded copy has one program, which knows its own files alone
    func([_stand_in(tensor, device="meta") for tensor in tensors], dim)  # raises what torch raises
    pieces = [tensor for tensor in tensors if tensor._shape != (0,)] or [first]
    return _concatenate(pieces, dim % len(pieces[0]._shape))


def _stack(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(tensor, CheckpointTensor) for tensor in tensors):
        return NotImplemented
    func([_stand_in(tensor, device="meta") for tensor in tensors], dim)
    dim = dim % (len(tensors[0]._shape) + 1)
    return _cat(aten.cat.default, [tensor.unsqueeze(dim) for tensor in tensors], dim)


def _without_values(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Ops that look at shape and dtype alone."""

    def stand_in(value: Any) -> Any:
        return _stand_in(value) if isinstance(value, CheckpointTensor) else value

    return func(*tree_map(stand_in, list(args)), **tree_map(stand_in, kwargs))


def _stand_in(tensor: CheckpointTensor, device: Any = None) -> torch.Tensor:
    """A real tensor of the same geometry, its memory never touched."""
    return torch.empty_strided(tensor._shape, tensor._strides, dtype=tensor._dtype, device=device or tensor._device)


# Ops that look at shape and dtype of their arguments alone.
LOOKS_AT_NOTHING = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.is_pinned.default,
    aten.is_same_size.default,
}
_VIEWS = {
    aten.diagonal.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unfold.default,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
}
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_VIEWS, _view_op),
    **dict.fromkeys(LOOKS_AT_NOTHING, _without_values),
    aten.alias.default: _alias,
    aten.detach.default: _alias,
    aten.slice.Tensor: _slice,
    aten.view.dtype: _view_dtype,
    aten._reshape_alias.default: lambda func, tensor, size, strides: _view_op(aten.view.default, tensor, size),
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
}

# Methods that hand out memory, or values to Python: of the landed tensor.
_OF_LANDED = (
    "__array__",
    "__dlpack__",
    "__dlpack_device__",
    "apply_",
    "as_subclass",
    "data_ptr",
    "map2_",
    "map_",
    "numpy",
    "share_memory_",
    "storage",
    "tolist",
    "untyped_storage",
)


def _of_landed(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def call(self: CheckpointTensor, *args: Any, **kwargs: Any) -> Any:
        return method(self._land(), *args, **kwargs)

    call.__name__ = name
    return call


for _name in _OF_LANDED:
    setattr(CheckpointTensor, _name, _of_landed(_name))

# What reaches __torch_function__ (torch.narrow, torch.Tensor.narrow) goes to the same methods.
_BY_FUNCTION: dict[Any, Callable[..., Any]] = {
    getattr(torch.Tensor, name): getattr(CheckpointTensor, name)
    for name in (*_OF_LANDED, "__deepcopy__", "__getitem__", "__reduce_ex__", "__repr__", "is_shared", "narrow", "t")
}
_BY_FUNCTION |= {torch.narrow: CheckpointTensor.narrow, torch.t: CheckpointTensor.t}
