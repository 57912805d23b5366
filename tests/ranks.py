"""Ranks as threads of one process, for layers that add up or gather what each rank computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from weightlift.model.parallel import ParallelConfig

T = TypeVar("T")


class _Board:
    """Where the threads of a group leave their tensors for each other."""

    def __init__(self, size: int) -> None:
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadGroup:
    """The `Group` of one thread."""

    def __init__(self, board: _Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim)

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._board.tensors[self._rank] = tensor
        self._board.barrier.wait()
        tensors = list(self._board.tensors)
        self._board.barrier.wait()  # before the next exchange begins
        return tensors


def run_ranks(tp_size: int, function: Callable[[ParallelConfig], T]) -> list[T]:
    """What `function` returns on each rank, run at once."""
    board = _Board(tp_size)

    def run(rank: int) -> T:
        parallel = ParallelConfig(tp_rank=rank, tp_size=tp_size, tp_group=ThreadGroup(board, rank))
        try:
            with torch.no_grad():  # a setting of each thread
                return function(parallel)
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(tp_size) as pool:
        return list(pool.map(run, range(tp_size)))
