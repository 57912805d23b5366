"""The watch: sees each torch op of its thread while copies gather, so that none can tell that they have not run yet.

It covers what goes through torch's dispatcher, and the few Python methods that hand out values or memory past it. Not
seen: raw pointers and arrays taken before, other threads, CUDA graphs; there the caller runs the program first.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.dlpack
from torch.utils._python_dispatch import TorchDispatchMode

from .program import Program
from .tensor import CheckpointTensor, is_composite

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
# Ops that look at shape and dtype of their arguments alone.
_LOOKS_AT_NOTHING = {
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


class Watch(TorchDispatchMode):
    """Runs what is pending just before an op would miss it."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import torch._dynamo, nearly a second, to keep it from compiling the method below; it never does."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:  # torch took the mode off for this call
                return func.decompose(*args, **kwargs)
        looks, overwrites = _manner_of(func)
        if looks or overwrites:
            program = self._program
            if overwrites:
                source = args[1] if len(args) > 1 else None
                if type(source) is CheckpointTensor and func is aten.copy_.default and type(args[0]) is not CheckpointTensor:
                    return source._source.program.record(args[0], source)
                if isinstance(source, torch.Tensor):
                    self._before_read(source)
                if type(args[0]) is not CheckpointTensor:
                    return program.overwrite(args[0], lambda: func(*args, **kwargs))
            elif program.has_pending:
                for value in args:
                    self._before_read(value)
                for value in kwargs.values():
                    self._before_read(value)
        return func(*args, **kwargs)

    def _before_read(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if type(value) is not CheckpointTensor:
                self._program.before_read(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._before_read(item)


# Programs that are watched now; of all threads.
_watched: list[Program] = []


@contextlib.contextmanager
def watching(program: Program) -> Iterator[None]:
    """Watches the ops of this thread for the program."""
    _watched.append(program)
    try:
        with Watch(program):
            yield
    finally:
        _watched.remove(program)


@functools.cache
def _manner_of(func: Any) -> tuple[bool, bool]:
    """(looks at values of its arguments, replaces all of its first argument)."""
    if func in _OVERWRITES:
        return False, True
    return not (func.is_view or func in _LOOKS_AT_NOTHING), False


# ---- doors: ways past the dispatcher. While a checkpoint exists they are replaced by ones that run what is pending, or that
# put real values in the place of a CheckpointTensor (`param.data = t` would leave a tensor without memory, and crash).

_door_users = 0


def keep_doors(owner: object) -> None:
    """Replaces the doors for as long as `owner` exists."""
    global _door_users
    if _door_users == 0:
        for place, name, door in _DOORS:
            setattr(place, name, door)
    _door_users += 1
    weakref.finalize(owner, _release_doors)


def _release_doors() -> None:
    global _door_users
    _door_users -= 1
    if _door_users == 0:
        for place, name, original in _ORIGINALS:
            if original is None:
                delattr(place, name)
            else:
                setattr(place, name, original)


def _run_before(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is CheckpointTensor:
            tensor = tensor._land()
        else:
            for program in _watched:
                program.before_read(tensor)
        return method(tensor, *args, **kwargs)

    return call


def _set_data(tensor: torch.Tensor, value: Any) -> None:
    _data.__set__(tensor, value._land() if type(value) is CheckpointTensor else value)


_data = torch.Tensor.data
_DOORS: list[tuple[Any, str, Any]] = [
    (torch.Tensor, "data", property(_data.__get__, _set_data)),
    *((torch.Tensor, name, _run_before(getattr(torch.Tensor, name))) for name in ("numpy", "tolist", "__dlpack__")),
    (torch.utils.dlpack, "to_dlpack", _run_before(torch.utils.dlpack.to_dlpack)),
]
# What stood there; None: inherited.
_ORIGINALS: list[tuple[Any, str, Any]] = [(place, name, place.__dict__.get(name)) for place, name, _ in _DOORS]
