"""The watch: sees each torch op of its thread while copies gather, so that none can tell that they have not run yet.

It covers what goes through torch's dispatcher, and the few Python methods that hand out values or memory past it. Not
seen: raw pointers and arrays taken before, other threads, CUDA graphs; there the caller runs the program first.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.dlpack
from torch.utils._python_dispatch import TorchDispatchMode

from .program import Program, watched
from .regions import has_storage, whole_storage
from .tensor import LOOKS_AT_NOTHING, CheckpointTensor, has_foreign, is_composite, untraced

aten = torch.ops.aten

# Ops that replace every value of their first argument and look at none of them.
_OVERWRITES = {
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.normal_.default,
    aten.uniform_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
    aten.exponential_.default,
}
# Ops that may replace the memory of their first argument, and of all that shares it. Those with `out` may, too.
_RESIZES = {aten.resize_.default, aten.resize_as_.default}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs what is pending just before an op would miss it."""

    def __init__(self, program: Program) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._program = program

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """`untraced` does it; torch's way would import torch._dynamo."""
        return False

    @untraced
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if has_foreign(types):
            return NotImplemented  # another subclass: its own code comes first, then what it does with what it holds
        if is_composite(func):
            with self:  # torch took the mode off for this call
                return func.decompose(*args, **kwargs)
        program = self._program
        looks, overwrites, writes, resizes = _manner_of(func)
        if overwrites and type(args[0]) is not CheckpointTensor:
            source = args[1] if len(args) > 1 else None
            if func is aten.copy_.default and type(source) is CheckpointTensor:
                if torch._C._len_torch_dispatch_stack():
                    return func(*args, **kwargs)  # the modes outside of this one shall see it too
                return source._source.program.record(args[0], source)
            self._before_read(source)
            return program.overwrite(args[0], lambda: func(*args, **kwargs))
        if looks and program.has_pending:
            self._before_read(args)
            self._before_read(tuple(kwargs.values()))
            if resizes:
                for tensor in _written(func, args, kwargs):
                    if has_storage(tensor):
                        program.before_resize(tensor)
        result = func(*args, **kwargs)
        if writes and program.tracks_coverage:
            for tensor in _written(func, args, kwargs):
                program.note_write(tensor)
        return result

    def _before_read(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._program.before_read(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._before_read(item)


@contextlib.contextmanager
def watching(program: Program) -> Iterator[None]:
    """Watches the ops of this thread for the program."""
    watched.append(program)
    try:
        with Watch(program):
            yield
    finally:
        watched.remove(program)


@functools.cache
def _manner_of(func: Any) -> tuple[bool, bool, bool, bool]:
    """(looks at values of its arguments, replaces all of its first argument, writes to arguments, may resize them)."""
    overwrites = func in _OVERWRITES
    looks = not (overwrites or func.is_view or func in LOOKS_AT_NOTHING)
    resizes = func in _RESIZES or any(argument.is_out for argument in func._schema.arguments)
    return looks, overwrites, func._schema.is_mutable, resizes


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments that the op writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    yield tensor


# ---- doors: ways past the dispatcher. While programs exist they are replaced by ones that run what is pending before
# they hand out memory, and that take real values in the place of a CheckpointTensor, where torch would make a tensor
# without memory of it, and crash.

_door_lock = threading.RLock()
_programs_with_doors: set[int] = set()
_standing: list[tuple[Any, str, Any, Any]] = []  # (place, name, door, what stood there; None: inherited)


def keep_doors(owner: object) -> None:
    """Replaces the doors for as long as `owner` exists."""
    with _door_lock:
        if not _programs_with_doors:
            for place, name, make_door in _DOORS:
                door = make_door(getattr(place, name))
                _standing.append((place, name, door, place.__dict__.get(name)))
                setattr(place, name, door)
        _programs_with_doors.add(id(owner))
    weakref.finalize(owner, _release_doors, id(owner))


def _release_doors(owner: int) -> None:
    with _door_lock:
        _programs_with_doors.discard(owner)
        if not _programs_with_doors:
            for place, name, door, original in _standing:
                if place.__dict__.get(name) is not door:
                    continue  # someone else has put theirs there since
                if original is None:
                    delattr(place, name)
                else:
                    setattr(place, name, original)
            _standing.clear()


def _real(value: Any) -> Any:
    return value._land() if type(value) is CheckpointTensor else value


def _hands_out(method: Callable[..., Any], *, memory: bool) -> Callable[..., Any]:
    """`method`, whose result holds values of its arguments; with `memory`, through which they may be written too."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_real, args))
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                for program in tuple(watched):
                    program.before_read(tensor)
                    if memory:
                        program.note_write(tensor)
        return method(*args, **kwargs)

    return call


def _takes_real(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_real, args), **{name: _real(value) for name, value in kwargs.items()})

    return call


def _data_door(data: Any) -> property:
    def set_data(tensor: torch.Tensor, value: Any) -> None:
        if type(tensor) is CheckpointTensor:
            tensor._keep_geometry(aten.set_.source_Tensor)
        data.__set__(tensor, _real(value))
        for program in tuple(watched):
            program.note_write(tensor)

    return property(data.__get__, set_data)


def _storage_door(method: Callable[[torch.Tensor], torch.UntypedStorage]) -> Callable[..., torch.UntypedStorage]:
    @functools.wraps(method)
    def untyped_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
        tensor = _real(tensor)
        if has_storage(tensor):
            for program in tuple(watched):
                program.before_resize(tensor)
                program.note_write(whole_storage(tensor))
        return method(tensor)

    return untyped_storage


def _static_door(function: Callable[..., Any]) -> Any:
    return staticmethod(_takes_real(function))


_values_door = functools.partial(_hands_out, memory=False)
_memory_door = functools.partial(_hands_out, memory=True)

# Where, and what makes a door of what stands there.
_DOORS: list[tuple[Any, str, Callable[[Any], Any]]] = [
    (torch.Tensor, "data", _data_door),
    (torch.Tensor, "_make_subclass", _static_door),
    (torch.nn.Parameter, "__new__", _static_door),
    *((torch.Tensor, name, _values_door) for name in ("__repr__", "tolist")),
    *((torch.Tensor, name, _memory_door) for name in ("numpy", "__dlpack__", "apply_", "map_", "map2_")),
    (torch.Tensor, "untyped_storage", _storage_door),
    *((place, "to_dlpack", _memory_door) for place in (torch, torch.utils.dlpack)),
]
