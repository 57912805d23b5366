"""Loading a model: what its parameters' own loaders ask for, recorded and run."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .._logging import logger
from ..config import LoadConfig
from ..errors import listed
from ..loading import Checkpoint, open_checkpoint, progress_bar
from ..report import LoadReport
from ..tensor import CheckpointTensor
from .reconcile import check_coverage, reconcile, weight_loader

if TYPE_CHECKING:
    from ..loading import CheckpointPath


def fast_load(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    path: CheckpointPath,
    *,
    strict: bool = True,
    config: LoadConfig | None = None,
    progress: bool = False,
) -> LoadReport:
    """Fills a model's parameters and buffers from a checkpoint.

    A parameter with a `weight_loader` attribute is handed over to it, `weight_loader(param, tensor)`, which cuts and
    copies what it wants; only that is read. Every other parameter takes its tensor whole, and decides device and dtype.

    Parts that a `weight_loader` left unset, gaps, are looked for in dense parameters in CPU memory; of others, and of
    those that their loader replaced, nothing is known. They are found before a byte is read where recording takes less
    than `coverage_wait_seconds` and no loader looks at values. Else they are found when recording ends: parameters may
    have been partly overwritten by then. Without a `weight_loader` there are none.

    Args:
        model: a module, its parameters allocated (not on the meta device), whose `state_dict(keep_vars=True)` gives its
            own parameters and buffers; or a mapping from names to tensors.
        path: as for `open_checkpoint`.
        strict: whether names that only one side has, and parts of parameters that nothing fills, are errors. Else they
            are in the report. A tensor whose size does not fit is an error in any case.
        config: how to read; see LoadConfig.
        progress: shows a bar on stderr.

    Returns:
        What was done: see LoadReport.

    Raises:
        CheckpointMismatchError: checkpoint and model do not fit. All differences of names and sizes are one error,
            before a byte is read; gaps are another, see above.
        CheckpointError: a file is missing, unreadable or malformed, or storage failed. In the latter case
            `error.incomplete` names what was not loaded.
        TypeError: `model` is neither, or its state dict holds something else than its own tensors.
        Whatever a `weight_loader` raises.

    Example:
        >>> report = weightlift.fast_load(model, folder)
        >>> report.missing_keys
        []
    """
    started = time.perf_counter()
    targets = _targets(model)
    checkpoint = open_checkpoint(path, config=config)
    try:
        report = reconcile(model, targets, checkpoint, path, strict=strict)
        _load(model, targets, checkpoint, report, strict=strict, progress=progress)
    finally:
        checkpoint.close()
    report.seconds["total"] = time.perf_counter() - started
    logger.info("%s", report.summary())
    return report


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
    model: Any,
    targets: dict[str, torch.Tensor],
    checkpoint: Checkpoint,
    report: LoadReport,
    *,
    strict: bool,
    progress: bool,
) -> None:
    program = checkpoint._program
    names = [name for name in checkpoint if name in targets]
    cut = [name for name in names if weight_loader(targets[name]) is not None]
    program.name_destinations(targets.items())
    program.track_coverage()
    # Whole tensors are known to cover their parameters. What weight loaders do is known when they have run: until then,
    # but not for long, reading waits, so that a gap is found before it.
    hold_seconds = program.config.coverage_wait_seconds if cut else 0.0
    with contextlib.ExitStack() as block:
        block.enter_context(progress_bar(checkpoint, progress))
        block.enter_context(torch.no_grad())
        block.enter_context(_recording(checkpoint, hold_seconds, watch=bool(cut)))
        for name in names:
            target, tensor = targets[name], checkpoint[name]
            loader = weight_loader(target)
            if loader is not None:
                loader(target, tensor)
            else:
                # Not `target.copy_(tensor)`: the first op that torch hands to a tensor subclass costs half a second, in
                # which it imports torch.distributed.tensor.
                program.record(target, tensor)
        report.seconds["record"] = checkpoint._seconds_of_recording()
        # One that its loader replaced, `module.weight = Parameter(tensor)`, is as the loader wants it.
        kept = _targets(model) if cut else {}
        filled = {name: targets[name] for name in cut if kept.get(name) is targets[name]}
        check_coverage(model, filled, program, report, strict=strict)
        program.run()
        if isinstance(model, torch.nn.Module):
            _land_leftovers(model)
    report.seconds["header"] = checkpoint._header_seconds
    program.fill_report(report)


@contextlib.contextmanager
def _recording(checkpoint: Checkpoint, hold_seconds: float, *, watch: bool) -> Iterator[None]:
    checkpoint._start(hold_seconds=hold_seconds, watch=watch)
    try:
        yield
    except BaseException:
        checkpoint._program.abort()
        raise
    finally:
        checkpoint._block.close()


def _land_leftovers(model: torch.nn.Module) -> None:
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
