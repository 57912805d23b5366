"""What users call: open a checkpoint and record, load a file, load a model."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ._logging import bad_setting, logger
from .checkpoint import CheckpointFiles, locate
from .config import LoadConfig
from .errors import CheckpointMismatchError, listed
from .memory import allocate_like
from .program import Program
from .progress import ProgressBar
from .regions import is_dense
from .report import LoadReport
from .tensor import CheckpointTensor
from .watch import keep_doors, watching

if TYPE_CHECKING:
    PathLike = str | os.PathLike[str]
    CheckpointPath = PathLike | Sequence[PathLike]


class Checkpoint(Mapping[str, CheckpointTensor]):
    """A checkpoint, opened: a mapping from names to tensors whose bytes are still on disk.

    Inside a `with` block copies out of them are recorded, and carried out together when the block ends or at `run()`.
    Outside of one, each copy is carried out at once. A block that is left through an exception drops what has not run.
    Leaving a block closes the checkpoint: its tensors can't be read any more.
    Made by `open_checkpoint`.
    """

    def __init__(self, files: CheckpointFiles, program: Program, *, watch: bool, header_seconds: float) -> None:
        self._files = files
        self._program = program
        self._watches = watch
        self._block = contextlib.ExitStack()
        self._header_seconds = header_seconds
        self._started = 0.0
        self._waited = 0.0  # seconds of waiting for storage before
        self._recorded = 0.0  # seconds of recording alone
        keep_doors(program)

    # ---- mapping

    def __getitem__(self, name: str) -> CheckpointTensor:
        return self._program.tensor(name)

    def __iter__(self) -> Iterator[str]:
        """Names in the order of the files: shard after shard, inside a shard as the data lies."""
        return iter(self._files.tensors)

    def __len__(self) -> int:
        return len(self._files.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._files.tensors

    # Two are equal when they are one: Mapping would compare the values of all tensors.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Checkpoint({len(self)} tensors in {len(self._files.shards)} shards)"

    @property
    def files(self) -> CheckpointFiles:
        """Shards and tensors, as their headers say."""
        return self._files

    # ---- recording

    def __enter__(self) -> Checkpoint:
        if self._program.recording:
            raise RuntimeError("this checkpoint is recording already; its `with` blocks cannot be nested")
        if self._program.closed:
            raise RuntimeError("this checkpoint has been closed; open it again")
        self._start(hold_seconds=0.0, watch=self._watches)
        return self

    def _start(self, *, hold_seconds: float, watch: bool) -> None:
        self._started = time.perf_counter()
        self._waited = self._program.wait_seconds
        self._program.start_recording(hold_seconds=hold_seconds)
        if watch:
            self._block.enter_context(watching(self._program))

    def run(self) -> None:
        """Carries out what is recorded, and returns when it has landed.

        Raises:
            CheckpointReadError: storage failed, or a file has changed.
            RuntimeError: the memory of a destination was replaced after a copy into it was recorded.
        """
        self._program.run()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._recorded = self._seconds_of_recording()
            if kind is None:
                self.run()
        finally:
            self._block.close()
            self._program.recording = False
            if kind is not None:
                self._program.abort()
            self.close()

    def _seconds_of_recording(self) -> float:
        return time.perf_counter() - self._started - (self._program.wait_seconds - self._waited)

    def close(self) -> None:
        """Lets go of files, threads and memory: its tensors can't be read any more. May be called twice."""
        self._program.close()

    @property
    def report(self) -> LoadReport:
        """What was done so far."""
        report = LoadReport()
        recorded = self._seconds_of_recording() if self._program.recording else self._recorded
        report.seconds = {"header": self._header_seconds, "record": recorded}
        self._program.fill_report(report)
        report.seconds["total"] = sum(report.seconds.values())
        return report


def open_checkpoint(path: CheckpointPath, *, config: LoadConfig | None = None, watch: bool = True) -> Checkpoint:
    """Opens a checkpoint for recording.

    Args:
        path: a safetensors file, a folder of shards (its index is respected), an index json, or a list of files.
        config: how to read; see LoadConfig.
        watch: whether, inside `with`, every torch op of the thread is looked at, so that none can see a parameter whose
            copy has not run yet. False is cheaper: the caller then promises not to look before `run()`.

    Returns:
        A mapping from names to CheckpointTensors.

    Raises:
        CheckpointError: a file is missing, unreadable or malformed; the text names it.
        ValueError: a setting, in the environment too, that is not accepted.

    Example:
        >>> with weightlift.open_checkpoint(folder) as checkpoint:
        ...     head.copy_(checkpoint["lm_head.weight"][:16])
    """
    if config is not None and not isinstance(config, LoadConfig):
        raise TypeError(f"config: expected a LoadConfig, found {type(config).__name__}")
    resolved = (config or LoadConfig()).resolve()
    if problem := bad_setting():
        warnings.warn(problem, stacklevel=2)
    started = time.perf_counter()
    files = locate(path)
    program = Program(files, resolved)
    return Checkpoint(files, program, watch=watch, header_seconds=time.perf_counter() - started)


def load_file(
    path: CheckpointPath,
    device: str | torch.device | int = "cpu",
    *,
    config: LoadConfig | None = None,
    progress: bool = False,
) -> dict[str, torch.Tensor]:
    """Loads every tensor; `safetensors.torch.load_file` for files, folders and indexes.

    Args:
        path: as for `open_checkpoint`.
        device: where the tensors go.
        config: how to read; see LoadConfig.
        progress: shows a bar on stderr.

    Returns:
        Name to tensor, in the order of the files. The tensors are the caller's. Large ones of one shard share one
        allocation, which is freed with the last of them.

    Raises:
        CheckpointError: as `open_checkpoint`.
        MemoryError: the tensors do not fit; of small ones and on other devices, torch's RuntimeError.
    """
    target = torch.device(device)
    with open_checkpoint(path, config=config, watch=False) as checkpoint:
        tensors = allocate_like(checkpoint.files, target)
        with _progress_bar(checkpoint, progress):
            for name, tensor in tensors.items():
                checkpoint._program.record(tensor, checkpoint[name])
            checkpoint.run()
    logger.info("%s", checkpoint.report.summary())
    return tensors


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
        report = _reconcile(model, targets, checkpoint, path, strict=strict)
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


def _weight_loader(target: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], object] | None:
    return getattr(target, "weight_loader", None)


def _place(tensor: torch.Tensor) -> object:
    """The same for tensors that are one: tied parameters, which `state_dict()` gives as an alias for each name."""
    address = tensor.data_ptr() if tensor.layout == torch.strided else 0
    if not address:  # empty, or without memory of its own
        return id(tensor)
    return tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype


def _reconcile(
    model: Any, targets: dict[str, torch.Tensor], checkpoint: Checkpoint, path: Any, *, strict: bool
) -> LoadReport:
    """Compares names and sizes. Raises with all differences, or returns a report that has them."""
    entries = checkpoint.files.tensors
    loaded = {_place(targets[name]) for name in entries if name in targets}
    # A tied parameter is there when one of its names is.
    missing = [name for name, target in targets.items() if name not in entries and _place(target) not in loaded]
    unexpected = [name for name in entries if name not in targets]
    mismatched = []
    on_meta = []
    for name, entry in entries.items():
        target = targets.get(name)
        if target is None:
            continue
        if target.device.type == "meta":
            on_meta.append(name)
        if _weight_loader(target) is None and tuple(target.shape) != entry.shape:
            mismatched.append(
                f"{name}: copying a param with shape {torch.Size(entry.shape)} from checkpoint, "
                f"the shape in current model is {target.shape}."
            )
    remedy = ""
    if on_meta:
        remedy = (
            f"{len(on_meta)} parameters are on the meta device and have no memory, {on_meta[0]} is one: "
            'allocate them with model.to_empty(device="cpu") first, or use '
            "model.load_state_dict(weightlift.load_file(path), assign=True). Either way, buffers that are not "
            "persistent (rotary frequencies) are in no checkpoint: the model has to make them again."
        )
    if mismatched or on_meta or (strict and (missing or unexpected)):
        raise CheckpointMismatchError(
            type(model).__name__,
            path=os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else None,
            missing_keys=missing if strict else (),
            unexpected_keys=unexpected if strict else (),
            mismatched=mismatched,
            remedy=remedy,
        )
    return LoadReport(missing_keys=missing, unexpected_keys=unexpected)


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
    cut = [name for name in names if _weight_loader(targets[name]) is not None]
    program.name_destinations(targets.items())
    program.track_coverage()
    # Whole tensors are known to cover their parameters. What weight loaders do is known when they have run: until then,
    # but not for long, reading waits, so that a gap is found before it.
    hold_seconds = program.config.coverage_wait_seconds if cut else 0.0
    with contextlib.ExitStack() as block:
        block.enter_context(_progress_bar(checkpoint, progress))
        block.enter_context(torch.no_grad())
        block.enter_context(_recording(checkpoint, hold_seconds, watch=bool(cut)))
        for name in names:
            target, tensor = targets[name], checkpoint[name]
            loader = _weight_loader(target)
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
        _check_coverage(model, filled, program, report, strict=strict)
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


def _check_coverage(
    model: Any, targets: dict[str, torch.Tensor], program: Program, report: LoadReport, *, strict: bool
) -> None:
    """Every byte of every parameter that a weight loader fills is written, and by one transfer."""
    for name, target in targets.items():
        if target.device.type != "cpu" or not target.numel() or not is_dense(target):
            continue
        gaps, doubles = program.coverage(target)
        report.gaps += _regions(name, target, gaps)
        report.double_writes += _regions(name, target, doubles)
    if report.double_writes:
        logger.warning("written by more than one tensor of the checkpoint: %s", listed(report.double_writes))
    if report.gaps and strict:
        raise CheckpointMismatchError(
            type(model).__name__,
            gaps=report.gaps,
            remedy="The weight loaders of these parameters left parts of them unset; pass strict=False to accept that.",
        )


def _regions(name: str, target: torch.Tensor, ranges: list[tuple[int, int]]) -> list[str]:
    """What to call these ranges of the bytes: by rows, `weight[512:768]`, where rows lie one after the other."""
    if ranges and not target.is_contiguous():
        return [f"{name} ({sum(end - begin for begin, end in ranges)} of {target.nbytes} bytes)"]
    return [f"{name}[{_rows(target, begin, end)}]" for begin, end in _merge_rows(target, ranges)]


def _merge_rows(target: torch.Tensor, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ranges of bytes, where all lie in different places of consecutive rows, as one."""
    row = _row_bytes(target)
    merged: list[tuple[int, int]] = []
    for begin, end in ranges:
        if merged and begin // row <= (merged[-1][1] - 1) // row + 1:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def _rows(target: torch.Tensor, begin: int, end: int) -> str:
    row = _row_bytes(target)
    return f"{begin // row}:{-(-end // row)}"


def _row_bytes(target: torch.Tensor) -> int:
    rows = target.shape[0] if target.dim() else 1
    return target.numel() // rows * target.element_size()


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


@contextlib.contextmanager
def _progress_bar(checkpoint: Checkpoint, enabled: bool) -> Iterator[None]:
    with ProgressBar(enabled=enabled) as bar:
        if enabled:
            checkpoint._program.on_progress = bar.update_to
        try:
            yield
        finally:
            checkpoint._program.on_progress = None
