"""What a loaded and processed model has that its shell has not: saved beside the tensors, and put back without them."""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ..entries import CheckpointFiles
from ..memory import allocate_like
from .sharded_state import without_aliases


@dataclass(frozen=True)
class ProcessedState:
    """How a model differs from its shell, beyond the values of tensors. Made of what JSON has.

    Of layers with a `quant_method`, attributes count: tensors, and plain values (None, bool, int, float, str,
    torch.dtype, and lists and tuples of them). Others, such as kernels, `process_weights_after_loading` makes again,
    which is called for weights that are processed already, too.

    Attributes:
        made: tensors that the shell lacks or has in another shape or dtype, by name: "parameter", "buffer",
            "temporary buffer" (not persistent) or "attribute".
        permuted: for tensors whose strides are not in the order of their dimensions, the order in which the file has
            these.
        same: names of tensors that are saved under another name only, by which the shell does not know them.
        removed: names of tensors, and of attributes, that only the shell has.
        values: plain attributes, by the name of the layer and their own.
    """

    made: dict[str, str] = field(default_factory=dict)
    permuted: dict[str, list[int]] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, shell: nn.Module) -> tuple[ProcessedState, dict[str, torch.Tensor]]:
        """Compares a model that is loaded with a shell of it, which may be on the meta device.

        Returns:
            The differences; and the tensors to save, each dense and contiguous, those that are one once.
        """
        state = cls()
        for name, kind in state._compare_layers(model, shell):
            state.made[name] = kind
        before = shell.state_dict()
        for name, tensor in model.state_dict().items():
            if name not in before or _geometry(before[name]) != _geometry(tensor):
                layer, key = _place_of(model, name)
                state.made[name] = "parameter" if key in layer._parameters else "buffer"
        for name in dict.fromkeys([*model.state_dict(), *state.made]):
            tensor = state._as_saved(model, name)
            order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
            if not tensor.is_contiguous() and tensor.permute(order).is_contiguous():
                state.permuted[name] = order
        saved = state.tensors(model)
        names = {_key(tensor): name for name, tensor in saved.items()}
        for name in state.made.keys() - saved.keys():
            state.same[name] = names[_key(state._as_saved(model, name))]
        return state, saved

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """What is saved of a model, as it is saved; each tensor shares memory with the model."""
        own = model.state_dict()
        # The shell knows one that has several names by those in the state dict.
        saved = without_aliases({name: self._as_saved(model, name) for name in own if name not in self.same})
        known = {_key(tensor) for tensor in saved.values() if tensor.numel()}
        made = {name: self._as_saved(model, name) for name in self.made if name not in own and name not in self.same}
        return saved | {name: tensor for name, tensor in without_aliases(made).items() if _key(tensor) not in known}

    def _as_saved(self, model: nn.Module, name: str) -> torch.Tensor:
        layer, key = _place_of(model, name)
        tensor: torch.Tensor = getattr(layer, key).detach()
        return _permuted(tensor, self.permuted.get(name))

    def _compare_layers(self, model: nn.Module, shell: nn.Module) -> Iterator[tuple[str, str]]:
        """Fills `removed` and `values`. Gives the names and kinds of tensors that are in no state dict."""
        shells = dict(shell.named_modules(remove_duplicate=False))
        parameters = {id(parameter) for parameter in shell.parameters()}
        for prefix, layer in model.named_modules():
            if getattr(layer, "quant_method", None) is None:
                continue
            path = f"{prefix}." if prefix else ""
            before, after = _attributes(shells[prefix]), _attributes(layer)
            self.removed.extend(path + key for key in before if key not in after)
            for key, value in after.items():
                if not isinstance(value, torch.Tensor):
                    if _is_plain(value) and not (key in before and _same_value(before[key], value)):
                        self.values.setdefault(prefix, {})[key] = _encoded(value)
                elif key in layer._non_persistent_buffers_set:
                    if key not in before:
                        yield path + key, "temporary buffer"
                elif (
                    key not in layer._parameters and key not in layer._buffers and id(before.get(key)) not in parameters
                ):
                    yield path + key, "attribute"

    def place(self, model: nn.Module, files: CheckpointFiles, *, as_on_disk: bool) -> dict[str, torch.Tensor]:
        """Makes a shell what the model was, but for the values of tensors. Parameters stay the objects that they are.

        Args:
            files: those of the rank.
            as_on_disk: on the CPU, gives all tensors memory that lies as the files do, so that they can be read into it
                from end to end. Else only those that the model lacks, or has in another shape or dtype, get memory.

        Returns:
            The tensors to fill, as `tensors` has them.
        """
        for name in self.removed:
            layer, key = _place_of(model, name)
            if hasattr(layer, key):
                delattr(layer, key)
        for prefix, values in self.values.items():
            for key, value in values.items():
                setattr(model.get_submodule(prefix), key, _decoded(value))
        memory = allocate_like(files, torch.device("cpu")) if as_on_disk else {}
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        for name, entry in files.tensors.items():
            kind = self.made.get(name)
            try:
                layer, key = _place_of(model, name)
            except AttributeError:
                continue  # what loading says of it
            current = getattr(layer, key, None)
            where = device if current is None or current.device.type == "meta" else current.device
            order = self.permuted.get(name)
            tensor = memory.pop(name, None) if where.type == "cpu" else None
            if tensor is None:
                if current is not None and _geometry(_permuted(current, order)) == (entry.shape, entry.dtype):
                    continue  # there is memory for it
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device=where)
            if order:
                tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
            if kind is not None or (current is not None and _geometry(current) == _geometry(tensor)):
                _set(layer, key, current, tensor, kind)
        for name, saved in self.same.items():
            layer, key = _place_of(model, name)
            saved_layer, saved_key = _place_of(model, saved)
            _set(layer, key, None, getattr(saved_layer, saved_key), self.made[name])
        return self.tensors(model)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ProcessedState:
        """Raises TypeError, ValueError or KeyError where it is not what `to_json` gives."""
        state = cls(**document)
        names = [*state.made, *state.permuted, *state.same, *state.removed]
        names += [f"{prefix}.{key}" for prefix, values in state.values.items() for key in values]
        for name in names:
            key = name.rpartition(".")[2]
            if key.startswith("_") or not key.isidentifier() or keyword.iskeyword(key):
                raise ValueError(f"{name!r} names no attribute of a layer")
        if not set(state.made.values()) <= {"parameter", "buffer", "temporary buffer", "attribute"}:
            raise ValueError("a tensor of no known kind")
        for order in state.permuted.values():
            if sorted(order) != list(range(len(order))):
                raise ValueError(f"{order} is no order of dimensions")
        for values in state.values.values():
            for value in values.values():
                _decoded(value)
        return state


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and attributes of its own; not its submodules."""
    own = {key: value for key, value in vars(layer).items() if not key.startswith("_") and key != "training"}
    return {**own, **layer._parameters, **layer._buffers}


def _set(layer: nn.Module, key: str, current: torch.Tensor | None, tensor: torch.Tensor, kind: str | None) -> None:
    """Puts a tensor in its place; where there is a parameter or buffer that stays one, into the same object."""
    if kind == "attribute" and current is not None:
        delattr(layer, key)
        current = None
    if current is not None and current.device.type != "meta":
        current.data = tensor
    elif isinstance(current, nn.Parameter):  # of the class that knows how it is cut
        parameter = torch.Tensor._make_subclass(type(current), tensor, False)
        parameter.__dict__.update(vars(current))
        layer._parameters[key] = parameter
    elif kind == "parameter":
        layer.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
    elif kind == "attribute":
        setattr(layer, key, tensor)
    else:
        layer.register_buffer(key, tensor, persistent=kind == "buffer")


def _place_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, key = name.rpartition(".")
    return model.get_submodule(prefix), key


def _permuted(tensor: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    return tensor.permute(order) if order and len(order) == tensor.dim() else tensor


def _geometry(tensor: torch.Tensor) -> object:
    return tensor.shape, tensor.dtype


def _key(tensor: torch.Tensor) -> object:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple, torch.Size) and all(map(_is_plain, value))
    return value is None or isinstance(value, torch.dtype) or type(value) in (bool, int, float, str)


def _same_value(one: Any, other: Any) -> bool:
    return _is_plain(one) and _encoded(one) == _encoded(other)


def _encoded(value: Any) -> Any:
    """A plain value, in what JSON has."""
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_encoded(item) for item in value]}
    return {"dtype": str(value).removeprefix("torch.")} if isinstance(value, torch.dtype) else value


def _decoded(value: Any) -> Any:
    """What `_encoded` was given. Raises TypeError or ValueError where it is not its result."""
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        if kind == "tuple":
            return tuple(_decoded(item) for item in inner)
        dtype = getattr(torch, inner, None) if kind == "dtype" else None
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value!r} is no value")
        return dtype
    return value
