"""Which modules of a model have all their weights, in the order in which they get them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from ..program import Program
from ..regions import has_storage
from ..tensor import storage_of
from ..turns import TurnQueue


def as_they_land(
    program: Program,
    model: torch.nn.Module | None,
    *,
    one_by_one: bool = True,
    late: Iterable[torch.Tensor] = (),
    settle: Callable[[], object] | None = None,
) -> Iterator[torch.nn.Module]:
    """Carries out all that is recorded, and gives modules meanwhile: each when all that goes into it has landed.

    What goes into its children counts, and they come first; else the order is that of the model. What is behind in the
    program goes on being read while the caller works.

    Args:
        program: when recording has ended.
        model: None: there are no modules to give.
        one_by_one: whether it matters that a module comes as soon as it can.
        late, settle: tensors that are complete when all has landed and `settle()` has been called.

    Raises:
        CheckpointReadError: as `Program.run`.
    """
    last = program.start(in_parts=one_by_one)
    numbers: dict[int, float] = {**program.landing()}
    turns = TurnQueue(program)
    num_turns = len(turns)
    # After what is numbered by the program come the turns.
    for position, turn in enumerate((program.turns or {}).values(), last + 1):
        numbers.update((_place(tensor), position) for tensor in turn.destinations)
    numbers.update((_place(tensor), math.inf) for tensor in late)
    modules = [] if model is None else _in_order(model, numbers)
    num_early = sum(number < math.inf for _, number in modules)
    for module, number in modules[:num_early]:
        while num_turns - len(turns) < number - last:
            turns.finish_next()
        program.finish(min(int(number), last))
        yield module
    while len(turns):
        turns.finish_next()
    program.run()
    if settle is not None:
        settle()
    yield from (module for module, _ in modules[num_early:])


def _in_order(model: torch.nn.Module, numbers: Mapping[int, float]) -> list[tuple[torch.nn.Module, float]]:
    """The modules with the largest number of what is in them; ascending, children before their parents."""
    found: dict[torch.nn.Module, float] = {}
    _find_number(model, numbers, found)
    return sorted(found.items(), key=lambda pair: pair[1])


def _find_number(module: torch.nn.Module, numbers: Mapping[int, float], found: dict[torch.nn.Module, float]) -> float:
    if module not in found:
        places = itertools.chain(module._parameters.values(), module._buffers.values(), vars(module).values())
        own = [numbers.get(_place(value), -1) for value in places if isinstance(value, torch.Tensor)]
        largest = max([-1, *own, *(_find_number(child, numbers, found) for child in module.children())])
        found[module] = largest
    return found[module]


def _place(tensor: torch.Tensor) -> int:
    """What the program knows its memory by; of memory that is not its own, 0."""
    return storage_of(tensor)._cdata if has_storage(tensor) else 0
