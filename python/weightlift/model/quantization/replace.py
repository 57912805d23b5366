"""Replacing a parameter after loading. The object stays: what holds it, such as a tie or a CUDA graph, keeps it."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import CheckpointMismatchError
from ...tensor import CheckpointTensor

# Attributes that say how a tensor of the checkpoint is cut for the parameter.
_CUT = {"input_dim", "output_dim", "packed_dim", "packed_factor", "marlin_tile_size", "memory_layout"}


class Replaced:
    """The `weight_loader` of a parameter that is no longer as a checkpoint has it. It refuses.

    Args:
        name: of the parameter, with that of its layer.
        before, after: what it was when it was loaded, and what it is now.
    """

    def __init__(self, name: str, before: torch.Tensor, after: torch.Tensor) -> None:
        self.reason = (
            f"{name}: it was {_geometry(before)} when it was loaded, and processing has made it {_geometry(after)}, so "
            "that it can't be loaded again; build the model anew."
        )

    def __call__(self, param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise CheckpointMismatchError("a processed layer", mismatched=[self.reason])


def replace_parameter(layer: torch.nn.Module, name: str, new: torch.Tensor | None) -> None:
    """Gives a parameter of a layer new values, and if need be another size, dtype or device; as vLLM's.

    Where shape, strides, dtype and device are the same, the values are copied into its memory; it is cut as before, and
    can be loaded again. Else it gets the memory of `new`, is cut as `new` says, and refuses to be loaded a second time.
    In both cases it is the same object, and gets all other attributes of `new`. Only where there was none, or one on
    the meta device, is a new one made.

    Args:
        layer: of which it is a parameter, or an attribute.
        name: its name in the layer.
        new: what it becomes; None: the layer has none any more.
    """
    old = getattr(layer, name, None)
    if new is None:
        setattr(layer, name, None)
        return
    if isinstance(new, CheckpointTensor):
        new = new._land()
    attributes = {key: value for key, value in vars(new).items() if key != "weight_loader"}
    if not isinstance(old, torch.nn.Parameter) or old.is_meta:
        if name in vars(layer):  # a plain attribute, which a parameter can't have beside it
            delattr(layer, name)
        parameter = torch.nn.Parameter(new.detach(), requires_grad=False)
        loader = getattr(old, "weight_loader", None)
        vars(parameter).update(attributes, **({} if loader is None else {"weight_loader": loader}))
        layer.register_parameter(name, parameter)
        return
    with torch.no_grad():
        if _geometry_of(old) == _geometry_of(new):
            old.copy_(new)
            vars(old).update((key, value) for key, value in attributes.items() if key not in _CUT)
            return
        label = ".".join(filter(None, [getattr(layer, "prefix", ""), name]))
        refusal = Replaced(label, old.detach(), new)
        old.data = new.detach()
    vars(old).update(attributes)
    old.weight_loader = refusal  # type: ignore[attr-defined]


def _geometry_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _geometry(tensor: torch.Tensor) -> str:
    order = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{order}"
