"""Gate 3, whole checkpoints: which tensor goes where in a model, by names and headers, before anything is read."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._logging import logger
from ..errors import listed
from ..stream import Order
from .mapping import ROTARY_CACHES, ShardId, WeightsMapper, map_in_turn
from .quantization.replace import Replaced
from .reconcile import size_mismatches, weight_loader
from .router import Route, Router, Ties, loads_itself, part_without_loader, quantization_rules, tied_mismatch

if TYPE_CHECKING:
    from ..entries import TensorEntry
    from ..loading import Checkpoint

# Of so many kinds of unexpected names the nearest names are looked for.
_MAX_HINTS = 20


class Step(NamedTuple):
    """One tensor of the checkpoint on its way."""

    source: str  # its name there
    route: Route
    shard_id: ShardId | None


class _Spare(NamedTuple):
    """For the tensor that the checkpoint has under a further name of a tied parameter."""

    source: str
    parameter: torch.nn.Parameter
    tied: torch.nn.Parameter


class Placement:
    """Where in a model each tensor of a checkpoint goes.

    Args:
        model: a module, or a mapping.
        targets: what of it can be loaded, by name.
        mapper: from names of the checkpoint to those of the model.

    Attributes:
        steps: in the order in which they are to be taken.
        unexpected: tensors that have no place, by their names in the checkpoint.
        skipped: tensors that are not wanted, with the rule that says so.
        mismatched: clauses of an error: sizes that do not fit, and the like.
        hint: what to do about unexpected names.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        mapper: WeightsMapper | None,
    ) -> None:
        self._model = model
        self._targets = targets
        module = model if isinstance(model, torch.nn.Module) else torch.nn.Module()
        self._loads_itself = loads_itself(module)
        quantization, suffixes = (None, ()) if self._loads_itself else quantization_rules(module)
        self._mappers = [rules for rules in (quantization, mapper) if rules is not None]
        owners = tuple(
            f"{name}." for name, child in module.named_modules(remove_duplicate=False) if name and loads_itself(child)
        )
        # What is below no module that loads itself: names that need not be followed.
        self._direct = {
            name: target for name, target in targets.items() if not (self._loads_itself or name.startswith(owners))
        }
        self._router = Router(
            module,
            targets=self._direct,
            label=type(model).__name__,
            # Unexpected biases are what tools for GPTQ write.
            ignored_suffixes=() if quantization is None else (".bias", *suffixes),
        )
        self._ties = Ties(module, preferred=owners)
        self._spares: dict[str, _Spare] = {}  # by the alias
        self._routes: dict[str, tuple[list[tuple[Route, ShardId | None]], str | None]] = {}
        self.steps: list[Step] = []
        self.unexpected: list[str] = []
        self.skipped: dict[str, str] = {}
        self.mismatched: list[str] = []
        self.hint = ""

    # ---- deciding

    def rule_of(self, source: str) -> str | None:
        """The rule by which a tensor of the checkpoint is not wanted, or None. A filter."""
        if not self._mappers and source in self._direct:
            return None  # as most are; nothing needs to be kept
        return self._follow(source)[1]

    def settle(self, checkpoint: Checkpoint, order: Order) -> None:
        """Decides about all tensors of a checkpoint that was opened with `rule_of` as a filter."""
        entries = checkpoint.files.tensors
        self.skipped.update(checkpoint.files.skipped)
        problems: list[Route] = []
        for source in entries:
            routes, _ = self._follow(source)
            stuck = [route for route, _ in routes if route.stuck is not None]
            if stuck:
                problems += stuck
                self.unexpected.append(source)
            self.steps += [
                Step(source, route, shard_id)
                for route, shard_id in routes
                if route.target is not None or route.owner is not None
            ]
        self._routes.clear()
        if problems and isinstance(self._model, torch.nn.Module):
            self.hint = self._hint_for(problems)
        if order == "module":
            position = _positions(self._targets)
            self.steps.sort(key=lambda step: position(step.route.name))
        self._check_sizes(entries)
        self._part_ties(entries)

    def _follow(self, source: str) -> tuple[list[tuple[Route, ShardId | None]], str | None]:
        """Where a tensor goes, or the rule by which it is not wanted."""
        found = self._routes.get(source)
        if found is None:
            places, rule = map_in_turn(self._mappers, source)
            routes = [(self._route(name), shard_id) for name, shard_id in places]
            if routes and all(route.ignored is not None for route, _ in routes):
                rule = routes[0][0].ignored
            found = self._routes[source] = routes, rule
        return found

    def _route(self, name: str) -> Route:
        if self._loads_itself:
            return Route(name, owner="")
        route = self._router.route(name)
        rule = ROTARY_CACHES.drop_rule(name) if route.stuck is not None else None
        if route.target is not None and name not in self._targets:
            rule = "not in the state dict of the model"  # a hook has taken it out
        return route if rule is None else Route(name, ignored=rule)

    def _check_sizes(self, entries: Mapping[str, TensorEntry]) -> None:
        whole: dict[str, Step] = {}
        for step in self.steps:
            name, target = step.route.name, step.route.target
            loader = None if target is None else weight_loader(target)
            if isinstance(loader, Replaced):
                self.mismatched.append(loader.reason)
            if target is None or loader is not None:
                continue
            if step.shard_id is not None:
                self.mismatched.append(part_without_loader(name, step.shard_id))
            elif whole.setdefault(name, step) is not step:
                first = whole[name].source
                self.mismatched.append(f"{name}: both {first} and {step.source} of the checkpoint are mapped to it.")
        self.mismatched += size_mismatches(
            (name, step.route.target, entries[step.source])
            for name, step in whole.items()
            if step.route.target is not None
        )

    def _hint_for(self, problems: list[Route]) -> str:
        """What to do about names that lead nowhere: the line that would map them, where something near is there."""
        # One of those that are stuck at the same component, whichever layer it is in.
        kinds = {tuple(part for part in route.name.split(".") if not part.isdigit()): route for route in problems}
        found = [self._router.nearest(route) for route in itertools.islice(kinds.values(), _MAX_HINTS)]
        pairs = list(dict.fromkeys(pair for pair in found if pair is not None))
        if not pairs:
            return self._router.problem(problems[0])
        text = f"Not in the model, and the nearest that it has there: {listed(f'{a} ({b})' for a, b in pairs)}."
        numbers = collections.Counter(nearest for _, nearest in pairs)
        renamed = next((pair for pair in pairs if numbers[pair[1]] == 1), None)
        if renamed is not None:
            text += (
                f" If they are the same: mapper=WeightsMapper(orig_to_new_substr={{{renamed[0]!r}: {renamed[1]!r}}})."
            )
        part = next((pair for pair in pairs if numbers[pair[1]] > 1), None)
        if part is not None:
            text += (
                f" If several are parts of one: mapper=WeightsMapper(orig_to_new_stacked={{{part[0]!r}: ({part[1]!r}, "
                "shard_id)}), and a weight_loader of the parameter that puts the part of that shard_id into its place."
            )
        return text

    # ---- tied parameters

    def _part_ties(self, entries: Mapping[str, TensorEntry]) -> None:
        """Where the checkpoint has several names of one parameter, the first is its. The others get spares, until it is
        known whether they are equal."""
        sources = {step.route.name: step.source for step in self.steps}
        first_there: dict[str, str] = {}
        for name in (*self._ties.first_names.values(), *self._ties.first_names):
            if name in sources:
                first_there.setdefault(self._ties.first_names.get(name, name), name)
        for alias, canonical in self._ties.first_names.items():
            first = first_there.get(canonical, alias)
            parameter = self._ties.parameters[alias]
            if first == alias or alias not in sources or alias not in self._direct or parameter.is_meta:
                continue
            shapes = [torch.Size(entries[sources[name]].shape) for name in (alias, first)]
            if shapes[0] != shapes[1]:
                self.mismatched.append(tied_mismatch(alias, shapes[0], first, shapes[1]))
            else:
                self._spares[alias] = _Spare(sources[alias], _spare(parameter), parameter)
        if self._spares:
            self.steps = [
                step._replace(route=step.route._replace(target=self._spares[step.route.name].parameter))
                if step.route.name in self._spares
                else step
                for step in self.steps
            ]

    @property
    def tied(self) -> list[torch.nn.Parameter]:
        """Parameters that have several names, and are settled last."""
        return list(self._ties.parameters.values())

    def settle_ties(self) -> None:
        """When all has landed: drops what is equal, and parts what is not."""
        for alias, spare in self._spares.items():
            first = self._ties.first_names[alias]
            if torch.equal(_bits(spare.parameter), _bits(spare.tied)):
                self.skipped[spare.source] = f"equal to {first}, to which it is tied"
            elif self._ties.part(alias, spare.parameter):
                logger.warning("%s is tied to %s, but they differ in the checkpoint: both are kept", alias, first)
            else:
                logger.warning(
                    "%s and %s are one module, but differ in the checkpoint: the latter is kept", alias, first
                )
        self._ties.restore()

    # ---- modules that load themselves

    @property
    def owners(self) -> set[str]:
        """Names of the modules that load themselves and get tensors; "" is the model."""
        return {step.route.owner for step in self.steps if step.route.owner is not None}

    @property
    def owned(self) -> set[str]:
        """Names of the targets that are theirs."""
        prefixes = tuple(f"{owner}." if owner else "" for owner in self.owners)
        return {name for name in self._targets if prefixes and name.startswith(prefixes)}

    def load(self, weights: Iterator[tuple[Step, torch.Tensor]]) -> set[str] | None:
        """Takes the steps, with their tensors. Gives the names that were loaded, if all modules say so."""
        if self._loads_itself:
            model: Any = self._model
            loaded: Iterable[str] | None = model.load_weights((step.route.name, tensor) for step, tensor in weights)
            return None if loaded is None else set(loaded)
        names = set(self._router.load_routed((step.route, tensor) for step, tensor in weights))
        self._router.log_casts()
        return names if self._router.knows_loaded else None


def _positions(names: Iterable[str]) -> Callable[[str], int]:
    """Gives the position of a name among `names`; of others, that of the first that shares most of its components."""
    first = {"": 0}
    for position, name in enumerate(names):
        while name not in first:
            first[name] = position
            name = name.rpartition(".")[0]

    def position_of(name: str) -> int:
        while name not in first:
            name = name.rpartition(".")[0]
        return first[name]

    return position_of


def _spare(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """A parameter like that one, with its attributes, in memory of its own."""
    # What a weight loader does not set, padding, is as it was.
    values = torch.empty_like(parameter) if weight_loader(parameter) is None else parameter.detach().clone()
    spare = torch.Tensor._make_subclass(type(parameter), values.detach(), parameter.requires_grad)
    spare.__dict__.update(parameter.__dict__)
    return spare


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
