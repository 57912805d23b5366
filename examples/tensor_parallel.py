"""Tensor parallelism as inference engines write it: parameters that hold one rank's part, each with a `weight_loader`.

Nothing in this file knows weightlift. The loaders take whole tensors and cut them, as loaders always did; given
checkpoint tensors whose bytes are still on disk, the same lines make a load read one rank's part alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def cut(module: nn.Module, name: str, dim: int, rank: int, world_size: int) -> None:
    """Replaces a parameter by the part that one rank holds of it: 1 / world_size of dimension `dim`."""
    whole = getattr(module, name)
    size = whole.shape[dim] // world_size

    def weight_loader(param: nn.Parameter, loaded: Tensor) -> None:
        param.data.copy_(loaded.narrow(dim, rank * size, size))

    shape = [*whole.shape[:dim], size, *whole.shape[dim + 1 :]]
    param = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=whole.device), requires_grad=False)
    setattr(param, "weight_loader", weight_loader)  # noqa: B010  # a Parameter has no such attribute for mypy
    setattr(param, "tp_dim", dim)  # noqa: B010
    setattr(module, name, param)


def parallelise(
    model: nn.Module, *, rank: int, world_size: int, column: tuple[str, ...], row: tuple[str, ...]
) -> nn.Module:
    """Cuts the layers whose names end so: `column` ones along their output, `row` ones along their input."""
    for name, module in model.named_modules():
        if name.endswith(column):
            for parameter_name, _ in list(module.named_parameters(recurse=False)):
                cut(module, parameter_name, 0, rank, world_size)
        elif name.endswith(row):
            cut(module, "weight", 1, rank, world_size)  # the bias of a row-cut layer stays whole
    return model
