"""Turns: destinations that are made of a whole source, which has to be in memory first; one after the other."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from .memory import allocate_for

if TYPE_CHECKING:
    from .program import Program


class Turn(Protocol):
    """One such destination.

    Attributes:
        source_bytes: the memory that its source takes.
        destinations: the tensors that are made of it.
    """

    @property
    def source_bytes(self) -> int: ...

    @property
    def destinations(self) -> Sequence[torch.Tensor]: ...

    def start(self, empty: Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor]) -> None:
        """Records the copies of the source.

        Args:
            empty: makes its memory, as `memory.allocate_for` does: given the offset of a file at which it begins, shape
                and dtype.
        """

    def finish(self) -> None:
        """The source has landed: makes the destinations of it, and lets go of it."""


class TurnQueue:
    """Takes the turns of a program, when nothing more is recorded.

    Sources are read ahead of their turn, as long as all that are in memory take no more than the largest.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._waiting = collections.deque((program.turns or {}).values())
        self._started: collections.deque[tuple[Turn, int]] = collections.deque()
        self._limit = max((turn.source_bytes for turn in self._waiting), default=0)
        self._held = 0
        self._start()

    def __len__(self) -> int:
        """How many are not finished."""
        return len(self._waiting) + len(self._started)

    def finish_next(self) -> None:
        """Finishes the next turn."""
        turn, number = self._started.popleft()
        self._program.finish(number)
        turn.finish()
        self._held -= turn.source_bytes
        self._start()

    def _start(self) -> None:
        while self._waiting and self._held + self._waiting[0].source_bytes <= self._limit:
            turn = self._waiting.popleft()
            turn.start(allocate_for)
            self._held += turn.source_bytes
            self._started.append((turn, self._program.start()))
