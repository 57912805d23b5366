"""Loading a model: what its parameters' own loaders ask for, recorded and run."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch

from .. import devices
from .._logging import logger
from ..config import LoadConfig
from ..errors import listed
from ..loading import Checkpoint, open_checkpoint, progress_bar
from ..names import natural_key
from ..plan import LoadPlan, PlanningProgram, open_plan, plan_of, require_names
from ..program import Program
from ..regions import is_dense
from ..report import LoadReport
from ..stream import Order
from ..tensor import CheckpointTensor
from .landing import as_they_land
from .mapping import WeightsMapper
from .placement import Placement, Step
from .quantization.diagnosis import explained
from .reconcile import check_coverage, reconcile, weight_loader

if TYPE_CHECKING:
    from ..filters import Filter
    from ..loading import CheckpointPath


def fast_load(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    path: CheckpointPath,
    *,
    mapper: WeightsMapper | None = None,
    filters: Sequence[Filter | None] = (),
    order: Order = "file",
    strict: bool = True,
    config: LoadConfig | None = None,
    progress: bool = False,
    on_module_loaded: Callable[[torch.nn.Module], object] | None = None,
) -> LoadReport:
    """Fills a model's parameters and buffers from a checkpoint.

    A parameter with a `weight_loader` attribute is handed over to it, `weight_loader(param, tensor)`, which cuts and
    copies what it wants; only that is read. Every other parameter takes its tensor whole, and decides device and dtype.
    A module whose class has a `load_weights(weights)`, the model too, is given the (name, tensor) pairs, and says by
    what it returns which of its parameters it loaded.

    Parts that a `weight_loader` or `load_weights` left unset, gaps, are looked for in dense parameters in CPU memory;
    of others, and of those that their loader replaced, nothing is known. They are found before a byte is read where
    recording takes less than `coverage_wait_seconds` and no loader looks at values. Else they are found when recording
    ends: parameters may have been partly overwritten by then. Without such loaders there are none.

    The folder of a packed image (`pack_model`) is read from end to end: the part of the rank that
    `ParallelConfig.current()` says, under the names of the model itself. Layers have their final form then:
    `PostProcessing(pre_processed=True)` does the rest.

    Of a tied parameter, which a module has under several names, the checkpoint needs one. Where it has more, and they
    differ, each name gets a parameter of its own, and a warning says so.

    Args:
        model: a module, its parameters allocated (not on the meta device), whose `state_dict(keep_vars=True)` gives its
            own parameters and buffers; or a mapping from names to tensors.
        path: as for `open_checkpoint`.
        mapper: from the checkpoint's names to the model's. Where it gives a shard id, the loader is called as
            `weight_loader(param, tensor, shard_id)`. The rules of the model's `quant_config` come before it.
        filters: as for `open_checkpoint`.
        order: in which order loaders are called: "file", as the tensors lie in the files, which reads fastest; or
            "module", that of the model's parameters.
        strict: whether names that only one side has, and parts of parameters that nothing fills, are errors. Else they
            are in the report. A tensor whose size does not fit is an error in any case.
        config: how to read; see LoadConfig.
        progress: shows a bar on stderr.
        on_module_loaded: called once for each module of the model, on this thread, when all that goes into it and its
            children has landed; what goes into other modules is read meanwhile. It may change the module, its
            parameters too. Children come before their parents, and modules with tied parameters last. Of others it sees
            what is on disk, which is read when it looks; but not yet weights that are quantised whole while loading.
            `PostProcessing().process_layer` is one.

    Returns:
        What was done: see LoadReport. What is not wanted (by filters, rules to None, another pipeline stage, a
        `load_weights` that does not use it) is in `report.skipped`.

    Raises:
        CheckpointMismatchError: checkpoint and model do not fit. All differences of names and sizes are one error,
            before a byte is read; gaps, and what a `load_weights` did not load, are another, see above.
        CheckpointError: a file is missing, unreadable or malformed, or storage failed. In the latter case
            `error.incomplete` names what was not loaded.
        TypeError: `model` is neither, or its state dict holds something else than its own tensors; or it has no modules
            for `on_module_loaded`.
        ValueError: `order` is neither; `on_module_loaded` with a packed image.
        Whatever a `weight_loader`, `load_weights` or `on_module_loaded` raises; nothing more is read then, and the
            model is not to be used.

    Example:
        >>> report = weightlift.fast_load(model, folder)
        >>> report.missing_keys
        []
    """
    _require_order(order)
    if on_module_loaded is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"on_module_loaded is for the modules of a module, found {type(model).__name__}")
    from .packed_image import open_image

    started = time.perf_counter()
    if image := open_image(model, path):
        if on_module_loaded is not None:
            raise ValueError(
                "on_module_loaded is for layers that get their final form; those of a packed image have it"
            )
        (model, path), mapper = image, None
    targets = _targets(model)
    placement = Placement(model, targets, mapper)
    checkpoint = open_checkpoint(path, filters=(*filters, placement.rule_of), config=config)
    try:
        placement.settle(checkpoint, order)
        with explained(model, checkpoint.files.tensors, mapper):
            report = _load(
                model,
                targets,
                placement,
                checkpoint,
                path,
                strict=strict,
                progress=progress,
                on_module_loaded=on_module_loaded,
            )
    finally:
        checkpoint.close()
    report.seconds["total"] = time.perf_counter() - started
    logger.info("%s", report.summary())
    return report


def plan_load(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    path: CheckpointPath,
    *,
    mapper: WeightsMapper | None = None,
    filters: Sequence[Filter | None] = (),
    order: Order = "file",
    strict: bool = True,
    config: LoadConfig | None = None,
    explain: Collection[str] = (),
) -> LoadPlan:
    """Plans what `fast_load` would do with these arguments, which it describes, and leaves the parameters as they are.

    Weight loaders run. What they look at is read, and nothing else. The numbers are those of the load; but where
    recording takes longer than `coverage_wait_seconds`, reads are grouped by how fast it is, and may differ a little.

    Args:
        model: its parameters may lie in a `ReservedMemory`, which costs none.
        explain: names of the checkpoint's tensors, and of the model's, whose copies the plan shall list.

    Raises:
        ValueError: a name to explain that neither side has; and as `fast_load`, as are all others.
    """
    _require_order(order)
    targets = _targets(model)
    placement = Placement(model, targets, mapper)
    checkpoint = open_plan(path, filters=(*filters, placement.rule_of), config=config, explain=explain)
    try:
        require_names(explain, {**targets, **checkpoint.files.tensors, **checkpoint.files.skipped})
        placement.settle(checkpoint, order)
        report = _load(model, targets, placement, checkpoint, path, strict=strict, progress=False)
        plan = plan_of(checkpoint, report)
    finally:
        checkpoint.close()
    # Of tied parameters that the checkpoint has several times, each has memory of its own until they are compared.
    placed = [step.route.target for step in placement.steps if step.route.target is not None]
    tensors = [*targets.values(), *placed, *(model.buffers() if isinstance(model, torch.nn.Module) else ())]
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    for tensor in storages.values():
        plan.memory.add(tensor.untyped_storage().nbytes(), on_host=tensor.device.type == "cpu")
    return plan


def _require_order(order: Order) -> None:
    if order not in get_args(Order):
        raise ValueError(f"order is {order!r}; accepted is {' or '.join(map(repr, get_args(Order)))}")


def _targets(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What can be loaded, by name: parameters and persistent buffers, tied ones under each of their names."""
    if isinstance(model, torch.nn.Module):
        # Without the extra state of modules, which is not made of tensors.
        state = {name: value for name, value in model.state_dict(keep_vars=True).items() if not _is_extra_state(name)}
        own = {id(tensor) for tensor in itertools.chain(model.parameters(), model.buffers())}
        foreign = [name for name, value in state.items() if id(value) not in own]
        if foreign:
            raise TypeError(
                f"state_dict(keep_vars=True) of {type(model).__name__} has entries that are not the model's own "
                f"parameters and buffers, so that filling them would leave the model as it is: {listed(foreign)}; "
                "use model.load_state_dict(weightlift.load_file(path))"
            )
        return state
    if not isinstance(model, Mapping):
        raise TypeError(f"expected a module or a mapping from names to tensors, found {type(model).__name__}")
    for name, value in model.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor to load into, found {type(value).__name__}")
    return dict(model)


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def _load(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
    placement: Placement,
    checkpoint: Checkpoint,
    path: CheckpointPath,
    *,
    strict: bool,
    progress: bool,
    on_module_loaded: Callable[[torch.nn.Module], object] | None = None,
) -> LoadReport:
    program, steps = checkpoint._program, placement.steps
    direct = {step.route.name: step.route.target for step in steps if step.route.target is not None}
    cut = {name for name, target in direct.items() if weight_loader(target) is not None}
    owned, has_owners = placement.owned, bool(placement.owners)

    def compare(loaded: Collection[str], *, strict: bool) -> LoadReport:
        return reconcile(
            model,
            targets,
            loaded,
            unexpected=placement.unexpected,
            skipped=placement.skipped,
            mismatched=placement.mismatched,
            path=path,
            hint=placement.hint,
            strict=strict,
        )

    # What modules that load themselves will not have loaded is known afterwards.
    report = compare(direct.keys() | owned, strict=strict)
    program.name_destinations({**targets, **direct}.items())
    program.track_coverage()
    program.turns = {}
    # Whole tensors are known to cover their parameters. What other loaders do is known when they have run: until then,
    # but not for long, reading waits, so that a gap is found before it.
    looks = bool(cut) or has_owners
    with contextlib.ExitStack() as block:
        block.enter_context(progress_bar(checkpoint, progress))
        block.enter_context(torch.no_grad())
        hold_seconds = program.config.coverage_wait_seconds if looks else 0.0
        # A hook may look at more than its module.
        watch = looks or on_module_loaded is not None
        block.enter_context(checkpoint.recording(hold_seconds=hold_seconds, watch=watch))
        waiting = iter(steps)
        told = placement.load((step, _tensor(checkpoint, step)) for step in waiting)
        seconds = checkpoint.seconds_of_recording()
        if has_owners:
            placement.unexpected += [step.source for step in waiting]  # what the model's own loader did not ask for
            _note_unused(placement, program)
            loaded = _written(targets, owned, program) if told is None else told & owned
            # As in engines, whose own buffers need not be in a checkpoint.
            buffers = {name for name in owned if not isinstance(targets[name], torch.nn.Parameter)}
            report = compare(direct.keys() | loaded | buffers, strict=False)
            cut |= loaded
        report.seconds["record"] = seconds
        # One that its loader replaced, `module.weight = Parameter(tensor)`, is as the loader wants it.
        kept = _targets(model) if cut else {}
        filled: dict[int, str] = {}  # tied parameters once
        for name, target in targets.items():
            if name in cut and kept.get(name) is target:
                filled.setdefault(id(target), name)
        check_coverage(
            model, {name: targets[name] for name in filled.values()}, program, report, path=path, strict=strict
        )
        if isinstance(program, PlanningProgram):
            program.plan_turns()
            program.run()
        else:
            _finish(program, model if isinstance(model, torch.nn.Module) else None, placement, on_module_loaded)
    report.skipped = {name: placement.skipped[name] for name in sorted(placement.skipped, key=natural_key)}
    report.seconds["header"] = checkpoint._header_seconds
    program.fill_report(report)
    return report


def _finish(
    program: Program,
    model: torch.nn.Module | None,
    placement: Placement,
    on_module_loaded: Callable[[torch.nn.Module], object] | None,
) -> None:
    """Carries out what is recorded, and hands modules over as they get complete."""
    if model is not None:
        land_leftovers(model)
    names = {module: name for name, module in model.named_modules()} if model is not None else {}
    wanted = on_module_loaded is not None
    for module in as_they_land(program, model, one_by_one=wanted, late=placement.tied, settle=placement.settle_ties):
        if on_module_loaded is None:
            continue
        try:
            on_module_loaded(module)
        except Exception as error:
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(f"in on_module_loaded of {names[module] or 'the model'} ({type(module).__name__})")
            raise


def _tensor(checkpoint: Checkpoint, step: Step) -> CheckpointTensor:
    tensor = checkpoint[step.source]
    if step.shard_id is not None:
        tensor.shard_id = step.shard_id  # type: ignore[attr-defined]
    return tensor


def _note_unused(placement: Placement, program: Program) -> None:
    """Reports what modules that load themselves were given and did not use."""
    used = program.used_tensors().union(placement.unexpected)
    for step in placement.steps:
        if step.route.owner is not None and step.source not in used:
            placement.skipped[step.source] = "not used by load_weights"


def _written(targets: Mapping[str, torch.Tensor], names: Iterable[str], program: Program) -> set[str]:
    """Those of which a part is written, as far as can be known."""
    written = set()
    for name in names:
        target = targets[name]
        known = devices.index_of(target) is not None and target.numel() and is_dense(target)
        if not known or program.coverage(target)[0] != [(0, target.nbytes)]:
            written.add(name)
    return written


def land_leftovers(model: torch.nn.Module) -> None:
    """Puts real tensors in the place of CheckpointTensors that a loader left in the model."""
    for module in model.modules():
        places: list[dict[str, Any]] = [module._parameters, module._buffers, module.__dict__]
        for place in places:
            for name, value in list(place.items()):
                if isinstance(value, CheckpointTensor):
                    real: torch.Tensor = value._land()
                    if place is module._parameters:
                        real = torch.nn.Parameter(real, requires_grad=value.requires_grad)
                    place[name] = real
