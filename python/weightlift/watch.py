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

from .program import Program, addressable, watched
from .tensor import LOOKS_AT_NOTHING, CheckpointTensor, empty, has_foreign, is_composite, storage_of, untraced

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
        looks, overwrites, writes = _manner_of(func)
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
        result = func(*args, **kwargs)
        if writes and program.tracks_coverage:
            self._note_writes(func, args, kwargs)
        return result

    def _before_read(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._program.before_read(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._before_read(item)

    def _note_writes(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for position, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        self._program.note_write(tensor)


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
def _manner_of(func: Any) -> tuple[bool, bool, bool]:
    """(looks at values of its arguments, replaces all of its first argument, writes to arguments)."""
    overwrites = func in _OVERWRITES
    return not (overwrites or func.is_view or func in LOOKS_AT_NOTHING), overwrites, func._schema.is_mutable


# ---- doors: ways past the dispatcher. While programs exist they are replaced by ones that run what is pending before
# they hand out memory, and that take real values in the place of a CheckpointTensor, where torch would make a tensor
# without memory of it, and crash.

_door_lock = threading.RLock()
_programs_with_doors: set[int] = set()


def keep_doors(owner: object) -> None:
    """Replaces the doors for as long as `owner` exists."""
    with _door_lock:
        if not _programs_with_doors:
            for place, name, door in _DOORS:
                setattr(place, name, door)
        _programs_with_doors.add(id(owner))
    weakref.finalize(owner, _release_doors, id(owner))


def _release_doors(owner: int) -> None:
    with _door_lock:
        _programs_with_doors.discard(owner)
        if not _programs_with_doors:
            for place, name, original in _ORIGINALS:
                if original is None:
                    delattr(place, name)
                else:
                    setattr(place, name, original)


def _real(value: Any) -> Any:
    return value._land() if type(value) is CheckpointTensor else value


def _hands_out(method: Callable[..., Any], *, memory: bool) -> Callable[..., Any]:
    """`method`, whose result holds values of its arguments; with `memory`, through which they may be written too."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_real, args))
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                for program in watched:
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


def _set_data(tensor: torch.Tensor, value: Any) -> None:
    if type(tensor) is CheckpointTensor:
        tensor._keep_geometry(aten.set_.source_Tensor)
    _data.__set__(tensor, _real(value))
    for program in watched:
        program.note_write(tensor)


def _untyped_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    tensor = _real(tensor)
    storage = storage_of(tensor)
    if watched and addressable(tensor):
        whole = empty((0,), (1,), torch.uint8)
        with torch._C._DisableTorchDispatch():
            whole.set_(storage)
        for program in watched:
            program.before_read(whole)
    return storage


_data: Any = torch.Tensor.data
_DOORS: list[tuple[Any, str, Any]] = [
    (torch.Tensor, "data", property(_data.__get__, _set_data)),
    (torch.Tensor, "_make_subclass", staticmethod(_takes_real(torch.Tensor._make_subclass))),
    (torch.nn.Parameter, "__new__", staticmethod(_takes_real(torch.nn.Parameter.__new__))),
    *((torch.Tensor, name, _hands_out(getattr(torch.Tensor, name), memory=False)) for name in ("__repr__", "tolist")),
    *(
        (torch.Tensor, name, _hands_out(getattr(torch.Tensor, name), memory=True))
        for name in ("numpy", "__dlpack__", "apply_", "map_", "map2_")
    ),
    (torch.Tensor, "untyped_storage", _untyped_storage),
    *(
        (place, "to_dlpack", _hands_out(torch.utils.dlpack.to_dlpack, memory=True))  # type: ignore[attr-defined]
        for place in (torch, torch.utils.dlpack)
    ),
]
# What stood there; None: inherited.
_ORIGINALS: list[tuple[Any, str, Any]] = [(place, name, place.__dict__.get(name)) for place, name, _ in _DOORS]
