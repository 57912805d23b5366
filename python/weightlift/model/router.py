"""Gate 3, modules: from a name to the parameter, or to the module that loads itself, which takes the tensor."""

from __future__ import annotations

import difflib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._logging import logger
from ..errors import CheckpointMismatchError, folded, listed
from ..tensor import CheckpointTensor
from .mapping import ROTARY_CACHES, WeightsMapper
from .reconcile import size_mismatch, weight_loader

# What engines put in the place of layers that another pipeline stage has.
_PLACEHOLDERS = {"PPMissingLayer", "StageMissingLayer"}
# Finding the nearest of more names than this takes too long.
_MAX_COMPARED = 1000
# Tensors of quantised checkpoints, which a model that is not quantised has no place for: no misspelt names.
_OF_QUANTISED = ("scale", "scales", "scale_inv", "scale_2", "zero_point", "qweight", "qzeros", "g_idx", "_packed")
# Casts that keep every value.
_WIDENING = {
    (narrow, wide)
    for narrow in (torch.float16, torch.bfloat16, torch.float32)
    for wide in (torch.float32, torch.float64)
} | {(getattr(torch, "float8_e8m0fnu", torch.float16), torch.float32)}


class AutoWeightsLoader:
    """Fills a module from a stream of tensors; with vLLM's name and behaviour.

    A name is followed from module to module. A module with a `load_weights` of its own takes what comes, one call for
    each run of consecutive names, which it gets without its own prefix; what it does not consume goes on below it, and
    tensors that it is not interested in, of which its `unwanted(name)`, if it has one, says why, are left out. A
    parameter takes its tensor by its `weight_loader`, if it has one, as `weight_loader(parameter, tensor)`, or
    `weight_loader(parameter, tensor, tensor.shard_id)` where a mapper has set that; or else whole. Persistent buffers
    are taken as parameters are.

    Ignored are layers of other pipeline stages, rotary caches, unexpected biases, and what the `quant_config` of the
    module or of one of its children says. Its rules (scales of the KV cache) are applied before those of `mapper`.
    Of a parameter or layer that has several names, the first that the module has is loaded, and the others are ignored;
    the names of a shared block of layers are as good as each other.

    Args:
        module: what to fill.
        ignore_unexpected_prefixes, ignore_unexpected_suffixes: of names that may lead nowhere.

    Example:
        >>> class Model(nn.Module):
        ...     def load_weights(self, weights):
        ...         return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        ignore_unexpected_prefixes: Iterable[str] | None = None,
        ignore_unexpected_suffixes: Iterable[str] | None = None,
    ) -> None:
        self.module = module
        self.ignore_unexpected_prefixes = tuple(ignore_unexpected_prefixes or ())
        self.ignore_unexpected_suffixes = tuple(ignore_unexpected_suffixes or ())

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], mapper: WeightsMapper | None = None
    ) -> set[str]:
        """Loads tensors, CheckpointTensors or others, as they come.

        Args:
            weights: (name, tensor) pairs.
            mapper: from their names to those of the module.

        Returns:
            Names of the parameters and buffers that were loaded, wholly or in part.

        Raises:
            CheckpointMismatchError: a name leads nowhere, or a size does not fit; or the first name of a tied parameter
                was not in the stream though another was, or has another size than that. Earlier tensors are loaded.
            Whatever a `load_weights` or `weight_loader` raises.
        """
        quantization, suffixes = quantization_rules(self.module)
        for rules in (quantization, mapper, ROTARY_CACHES):
            if rules is not None:
                weights = rules.apply(weights)
        router = Router(
            self.module,
            ignored_prefixes=self.ignore_unexpected_prefixes,
            ignored_suffixes=(*self.ignore_unexpected_suffixes, ".bias", *suffixes),
        )
        ties = Ties(self.module)
        aliases = {alias: first for alias, first in ties.first_names.items() if not ties.in_shared_block(alias)}
        firsts = set(aliases.values())
        shapes: dict[str, torch.Size] = {}  # in the checkpoint, of tied parameters

        def without_aliases() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name in firsts or name in aliases:
                    shapes[name] = tensor.shape
                if name in aliases:
                    logger.debug("%s is ignored: it is tied to %s", name, aliases[name])
                else:
                    yield name, tensor

        with torch.no_grad():
            loaded = set(router.load(without_aliases()))
        router.log_casts()
        for alias in [alias for alias in aliases if alias in shapes]:
            self._check_alias(alias, aliases[alias], shapes, loaded if router.knows_loaded else None)
        ties.restore()
        return loaded

    def _check_alias(self, alias: str, first: str, shapes: Mapping[str, torch.Size], loaded: set[str] | None) -> None:
        name = type(self.module).__name__
        if loaded is not None and first not in loaded:
            raise CheckpointMismatchError(
                name,
                missing_keys=[first],
                remedy=f"{alias!r} was skipped because it is tied to {first!r} in {name}, but {first!r} was not found "
                "in the checkpoint, so the tied weight is uninitialized.",
            )
        if shapes.get(first, shapes[alias]) != shapes[alias]:
            raise CheckpointMismatchError(name, mismatched=[tied_mismatch(alias, shapes[alias], first, shapes[first])])


class Route(NamedTuple):
    """Where a name leads: to a module, to a tensor, or nowhere, with or without a reason."""

    name: str
    owner: str | None = None  # the name of the module that loads itself
    target: torch.Tensor | None = None
    ignored: str | None = None  # the rule that says so
    stuck: tuple[torch.nn.Module, int] | None = None  # the module where it ends, and how many components lead there


class Router:
    """Follows names through a module, and hands each tensor to what its name leads to.

    Args:
        module: what to fill; its own `load_weights` is not looked at.
        targets: tensors by their names, which are taken without following the name.
        label: what errors call the module.
        ignored_prefixes, ignored_suffixes: of names that may lead nowhere.

    Attributes:
        knows_loaded: whether all modules that loaded themselves have said what they loaded.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        targets: Mapping[str, torch.Tensor] | None = None,
        label: str | None = None,
        ignored_prefixes: Sequence[str] = (),
        ignored_suffixes: Sequence[str] = (),
    ) -> None:
        self._module = module
        self._targets = targets or {}
        self._label = label or type(module).__name__
        self._ignored_prefixes = ignored_prefixes
        self._ignored_suffixes = ignored_suffixes
        self._casts: defaultdict[tuple[torch.dtype, torch.dtype], list[str]] = defaultdict(list)
        self.knows_loaded = True

    def route(self, name: str, *, below: str = "") -> Route:
        """Where a name leads; with `below`, from the module of that name on, whose `load_weights` has had its turn."""
        target = self._targets.get(name)
        if target is not None:
            return Route(name, target=target)
        parts = name.split(".")
        module = self._module.get_submodule(below)
        position = below.count(".") + 1 if below else 0
        while position < len(parts):
            child = module._modules.get(parts[position])
            if child is None:
                break
            if any(kind.__name__ in _PLACEHOLDERS for kind in type(child).__mro__):
                return Route(name, ignored="of another pipeline stage")
            if loads_itself(child):
                rule = unwanted_by(child, ".".join(parts[position + 1 :]))
                return Route(name, owner=".".join(parts[: position + 1]) if rule is None else None, ignored=rule)
            module = child
            position += 1
        target = _tensor_of(module, parts[position]) if position < len(parts) else None
        if target is not None and position == len(parts) - 1:
            return Route(name, target=target)
        rule = self._ignored_by(name if target is not None else ".".join(parts[: position + 1]))
        return Route(name, ignored=rule, stuck=(module, position) if rule is None else None)

    def problem(self, route: Route) -> str:
        """Why a name leads nowhere, and what is there."""
        assert route.stuck is not None
        module, position = route.stuck
        parts = route.name.split(".")
        reached = ".".join(parts[: position + 1])
        if position < len(parts) and _tensor_of(module, parts[position]) is not None:
            return f"Attempted to load nested weight {route.name!r} into a single parameter {reached!r}."
        parent = ".".join(parts[:position])
        place = f"{parent} ({type(module).__name__})" if parent else self._label
        nearest = self.nearest(route)
        return (
            f"There is no module or parameter named {reached!r} in {self._label}. "
            + (f"Is it {'.'.join([*parts[:position], nearest[1]])!r}? " if nearest is not None else "")
            + f"The available parameters belonging to {place} are: "
            + (listed(name for name, _ in module.named_parameters(prefix=parent)) or "none")
            + "."
        )

    def nearest(self, route: Route) -> tuple[str, str] | None:
        """The component at which a name leads nowhere, and the one most like it that is there, if one is."""
        assert route.stuck is not None
        module, position = route.stuck
        parameters = [name for name, parameter in module._parameters.items() if parameter is not None]
        there = [*module._modules, *parameters, *(module._buffers.keys() - module._non_persistent_buffers_set)]
        parts = route.name.split(".")
        part = ".".join(parts[position : position + 1])
        if len(there) > _MAX_COMPARED or part.endswith(_OF_QUANTISED):
            return None
        for near in difflib.get_close_matches(part, there, n=1):
            # Only if the whole name is right then.
            if self.route(".".join([*parts[:position], near, *parts[position + 1 :]])).stuck is None:
                return part, near
        return None

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], *, below: str = "") -> Iterator[str]:
        """Loads tensors as they come, and gives the names of the parameters and buffers that were loaded."""
        return self.load_routed((self.route(name, below=below), tensor) for name, tensor in weights)

    def load_routed(self, weights: Iterable[tuple[Route, torch.Tensor]]) -> Iterator[str]:
        """The same, of names that have been followed."""
        for owner, group in itertools.groupby(weights, key=lambda pair: pair[0].owner):
            if owner is not None:
                yield from self._hand_over(owner, group)
                continue
            for route, tensor in group:
                if route.stuck is not None:
                    raise CheckpointMismatchError(self._label, unexpected_keys=[route.name], remedy=self.problem(route))
                if route.target is None:
                    logger.debug("%s is ignored: %s", route.name, route.ignored)
                else:
                    self._fill(route.name, route.target, tensor)
                    yield route.name

    def log_casts(self) -> None:
        """Says which tensors were converted on the way; where that may have cost digits, as a warning."""
        for (found, wanted), names in self._casts.items():
            log = logger.debug if (found, wanted) in _WIDENING else logger.warning
            log("converted from %s of the checkpoint to %s of the parameter: %s", found, wanted, folded(names))
        self._casts.clear()

    def _hand_over(self, owner: str, group: Iterable[tuple[Route, torch.Tensor]]) -> Iterator[str]:
        module: Any = self._module.get_submodule(owner)
        weights = ((route.name[len(owner) + 1 :], tensor) for route, tensor in group)
        loaded: Iterable[str] | None = module.load_weights(weights)
        if loaded is None:
            logger.warning("%s: load_weights of %s does not say what it loaded", owner, type(module).__name__)
            self.knows_loaded = False
        else:
            yield from (f"{owner}.{name}" if name else owner for name in loaded)
        yield from self.load(((f"{owner}.{name}", tensor) for name, tensor in weights), below=owner)

    def _fill(self, name: str, target: torch.Tensor, tensor: torch.Tensor) -> None:
        on_disk = tensor if isinstance(tensor, CheckpointTensor) else None
        # Of those on disk without torch's properties, each of which is a call of __torch_function__.
        shape, dtype = (tensor.shape, tensor.dtype) if on_disk is None else (on_disk._shape, on_disk._dtype)
        # A parameter of another layout is made of what is on disk, not cast.
        if target.dtype != dtype and getattr(target, "memory_layout", None) is None:
            self._casts[dtype, target.dtype].append(name)
        loader = weight_loader(target)
        shard_id = getattr(tensor, "shard_id", None)
        if loader is not None:
            try:
                if shard_id is None:
                    loader(target, tensor)
                else:
                    loader(target, tensor, shard_id)
            except Exception as error:
                if hasattr(error, "add_note"):  # since Python 3.11
                    part = "" if shard_id is None else f", shard id {shard_id!r}"
                    error.add_note(f"while {name} {list(shape)} was loaded into {list(target.shape)}{part}")
                raise
        elif shard_id is not None:
            raise CheckpointMismatchError(self._label, mismatched=[part_without_loader(name, shard_id)])
        elif target.shape != shape:
            if target.numel() != 1 or tensor.numel() != 1:
                raise CheckpointMismatchError(self._label, mismatched=[size_mismatch(name, target, shape)])
            target.copy_(tensor.reshape(target.shape))
        elif on_disk is None:
            target.copy_(tensor)
        else:
            # Not `target.copy_(tensor)`: the first op that torch hands to a tensor subclass costs half a second, in
            # which it imports torch.distributed.tensor.
            on_disk._source.program.record(target, on_disk)

    def _ignored_by(self, name: str) -> str | None:
        for prefix in self._ignored_prefixes:
            if f"{name}.".startswith(prefix):
                return f"unexpected, and ignored as {prefix!r}"
        for suffix in self._ignored_suffixes:
            if name.endswith(suffix):
                return f"unexpected, and ignored as {suffix!r}"
        return None


class Ties:
    """Parameters that are one object under several names, as they are tied now.

    Args:
        preferred: what names start with that come before others: those of modules that load themselves, where nothing
            can be put in the place of a parameter.

    Attributes:
        first_names: for each further name of a parameter, the first that the module has for it.
        parameters: by the further names.
    """

    def __init__(self, module: torch.nn.Module, *, preferred: tuple[str, ...] = ()) -> None:
        self._module = module
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.first_names: dict[str, str] = {}
        groups: dict[int, list[tuple[str, torch.nn.Parameter]]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append((name, parameter))
        for group in groups.values():
            first = next((name for name, _ in group if name.startswith(preferred)), group[0][0])
            for name, parameter in group:
                if name != first:
                    self.first_names[name] = first
                    self.parameters[name] = parameter

    def restore(self) -> None:
        """Ties again what came apart because a loader has put another parameter in the place of the first."""
        for alias, first in self.first_names.items():
            place, name = self._place(alias)
            first_place, first_name = self._place(first)
            is_first = first_place._parameters.get(first_name)
            if place._parameters.get(name) is self.parameters[alias] and is_first is not None:
                place._parameters[name] = is_first

    def part(self, alias: str, parameter: torch.nn.Parameter) -> bool:
        """Gives an alias a parameter of its own; False: its module is that of the first name, too."""
        place, name = self._place(alias)
        if (place, name) == self._place(self.first_names[alias]):
            return False
        place._parameters[name] = parameter
        return True

    def in_shared_block(self, alias: str) -> bool:
        """Whether it is not the parameter that has several names, or its layer, but a block of layers around it."""
        layer, first_layer = (name.rpartition(".")[0] for name in (alias, self.first_names[alias]))
        return bool(layer and first_layer) and self._place(layer) == self._place(first_layer)

    def _place(self, name: str) -> tuple[torch.nn.Module, str]:
        prefix, _, last = name.rpartition(".")
        return self._module.get_submodule(prefix), last


def _tensor_of(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """A parameter or persistent buffer that a module holds itself."""
    parameter = module._parameters.get(name)
    if parameter is None and name not in module._non_persistent_buffers_set:
        return module._buffers.get(name)
    return parameter


def loads_itself(module: torch.nn.Module) -> bool:
    """Whether a module's class has a `load_weights` of its own."""
    return callable(getattr(type(module), "load_weights", None))


def unwanted_by(module: torch.nn.Module, name: str) -> str | None:
    """The rule by which a module that loads itself does not want the tensor of that name below it, or None: what its
    `unwanted(name)` says, if it has one."""
    unwanted: Callable[[str], str | None] | None = getattr(module, "unwanted", None)
    return None if unwanted is None else unwanted(name)


def quantization_rules(module: torch.nn.Module) -> tuple[WeightsMapper | None, tuple[str, ...]]:
    """The rules for names, and suffixes of names that may lead nowhere, of the first `quant_config` that the module or
    one of its children has."""
    for place in (module, *module.children()):
        config = getattr(place, "quant_config", None)
        if config is not None:
            rules = WeightsMapper()
            for getter in ("get_cache_scale_mapper", "get_checkpoint_weight_mapper"):
                if hasattr(config, getter):
                    rules |= getattr(config, getter)()
            return rules, tuple(getattr(config, "_ignore_unexpected_suffixes", ()))
    return None, ()


def tied_mismatch(alias: str, alias_shape: torch.Size, first: str, first_shape: torch.Size) -> str:
    """The clause of an error for tied parameters that have two sizes in the checkpoint."""
    return (
        f"{alias}: its shape in the checkpoint is {alias_shape}; it is tied to {first}, which is {first_shape} there."
    )


def part_without_loader(name: str, shard_id: object) -> str:
    """The clause of an error for a part that no weight loader puts into its place."""
    return (
        f"{name}: a tensor is mapped to its shard {shard_id!r}, but it has no weight_loader, which knows where that is."
    )
