"""Which part of a model this process holds, and how it talks to those that hold the others."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
import torch.distributed


class Group(Protocol):
    """The ranks that share a layer; what the layers' `forward` needs of them."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, on every rank. `tensor` may be overwritten."""

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors, in order of rank, concatenated along `dim`, on every rank."""


class ProcessGroup:
    """A Group of processes: that of `torch.distributed` with this handle; None: all processes."""

    def __init__(self, handle: torch.distributed.ProcessGroup | None = None) -> None:
        self._handle = handle

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(tensor, group=self._handle)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(self._handle))]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=self._handle)
        return torch.cat(parts, dim)


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """This rank, and how many there are, in tensor (tp), expert (ep) and pipeline (pp) parallelism.

    Layers cut their weights by it. Loading needs the numbers only, so that one process can load every rank's part in
    turn. `forward` of a layer that is cut needs the group, too.

    Args:
        tp_rank, tp_size: the part of each layer; from 0, at least 1, as all of these.
        ep_rank, ep_size: the part of the experts.
        pp_rank, pp_size: the pipeline stage, a part of the layers.
        tp_group: the ranks of the same ep_rank and pp_rank.
        ep_group: those of the same tp_rank and pp_rank.

    Raises:
        ValueError: a rank is not below its size.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    tp_group: Group | None = dataclasses.field(default=None, compare=False, repr=False)
    ep_group: Group | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for kind in ("tp", "ep", "pp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if not 0 <= rank < size:
                raise ValueError(f"{kind}_rank is {rank} with {kind}_size {size}; ranks count from 0 to the size - 1")

    @classmethod
    def current(cls) -> ParallelConfig:
        """Tensor parallelism over all processes of `torch.distributed`, if it is initialised; else one rank of one."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls()
        return cls(
            tp_rank=torch.distributed.get_rank(),
            tp_size=torch.distributed.get_world_size(),
            tp_group=ProcessGroup(),
        )

    def without_tp(self) -> ParallelConfig:
        """The same for a layer that every rank of tp holds whole."""
        return dataclasses.replace(self, tp_rank=0, tp_size=1, tp_group=None)

    def tp_all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of tp."""
        return tensor if self.tp_size == 1 else _needed(self.tp_group, "tp").all_reduce(tensor)

    def tp_all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The parts of all ranks of tp, concatenated."""
        return tensor if self.tp_size == 1 else _needed(self.tp_group, "tp").all_gather(tensor, dim)

    def ep_all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of ep."""
        return tensor if self.ep_size == 1 else _needed(self.ep_group, "ep").all_reduce(tensor)


def _needed(group: Group | None, kind: str) -> Group:
    if group is None:
        raise RuntimeError(
            f"forward needs the other ranks of {kind}: give ParallelConfig a {kind}_group, such as ProcessGroup()"
        )
    return group
