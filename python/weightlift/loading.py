"""What users call: open a checkpoint and record; load files whole."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from ._logging import bad_setting, logger
from .checkpoint import locate
from .collector import collector_paused
from .config import LoadConfig, ResolvedConfig, misspelt_variables
from .entries import CheckpointFiles
from .memory import allocate_like
from .open_ahead import OpenAhead
from .program import Program
from .progress import ProgressBar
from .report import LoadReport
from .tensor import CheckpointTensor
from .watch import keep_doors, watching

if TYPE_CHECKING:
    from .checkpoint import CheckpointPath as CheckpointPath
    from .filters import Filter
    from .reserved import ReservedMemory


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
        self._block.enter_context(self.recording())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._block.__exit__(kind, error, traceback)
        finally:
            self.close()

    @contextlib.contextmanager
    def recording(self, *, hold_seconds: float = 0.0, watch: bool | None = None) -> Iterator[None]:
        """A block like that of the checkpoint itself, which leaves it open: its tensors can be used afterwards.

        Args:
            hold_seconds: for so long nothing is read, unless someone needs values.
            watch: instead of what the checkpoint was opened with.

        Raises:
            RuntimeError: it is recording already, or closed.
        """
        program = self._program
        if program.recording:
            raise RuntimeError("this checkpoint is recording already; its `with` blocks cannot be nested")
        if program.closed:
            raise RuntimeError("this checkpoint has been closed; open it again")
        self._started = time.perf_counter()
        self._waited = program.wait_seconds
        program.start_recording(hold_seconds=hold_seconds)
        try:
            with watching(program) if (self._watches if watch is None else watch) else contextlib.nullcontext():
                try:
                    yield
                finally:
                    self._recorded = self.seconds_of_recording()
                self.run()
        except BaseException:
            program.abort()
            raise
        finally:
            program.recording = False

    def run(self) -> None:
        """Carries out what is recorded, and returns when it has landed.

        Raises:
            CheckpointReadError: storage failed, or a file has changed.
            RuntimeError: the memory of a destination was replaced after a copy into it was recorded.
        """
        self._program.run()

    def seconds_of_recording(self) -> float:
        return time.perf_counter() - self._started - (self._program.wait_seconds - self._waited)

    def close(self) -> None:
        """Lets go of files, threads and memory: its tensors can't be read any more. May be called twice."""
        self._program.close()

    @property
    def report(self) -> LoadReport:
        """What was done so far."""
        report = LoadReport()
        recorded = self.seconds_of_recording() if self._program.recording else self._recorded
        report.seconds = {"header": self._header_seconds, "record": recorded}
        self._program.fill_report(report)
        report.seconds["total"] = sum(report.seconds.values())
        return report


def open_checkpoint(
    path: CheckpointPath,
    *,
    filters: Sequence[Filter | None] = (),
    config: LoadConfig | None = None,
    watch: bool = True,
) -> Checkpoint:
    """Opens a checkpoint for recording.

    Args:
        path: as for `locate`: a file, a folder of shards (its index is respected), an index json, a list of files, the
            id of a repository on a hub, or a CheckpointSource, which can say more.
        filters: each gives the rule by which a tensor of that name is not wanted, or None; such a tensor is not there.
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
    return open_files(path, filters=filters, config=config_for_recording(config), watch=watch)


def config_for_recording(config: LoadConfig | None) -> ResolvedConfig:
    """`resolved_config` for recording. Raises ValueError for a strategy that can't do that."""
    resolved = resolved_config(config)
    if resolved.strategy == "torchao":
        raise ValueError(
            "strategy is 'torchao', with which tensors are put together from several of the files: only iter_weights() "
            "does that; use it, or another strategy"
        )
    return resolved


def resolved_config(config: LoadConfig | None) -> ResolvedConfig:
    """The settings in force. Raises TypeError, and ValueError as `LoadConfig.resolve`."""
    if config is not None and not isinstance(config, LoadConfig):
        raise TypeError(f"config: expected a LoadConfig, found {type(config).__name__}")
    return (config or LoadConfig()).resolve()


def open_files(
    path: CheckpointPath,
    *,
    filters: Sequence[Filter | None],
    config: ResolvedConfig,
    watch: bool,
    program_of: Callable[[CheckpointFiles, ResolvedConfig], Program] | None = None,
) -> Checkpoint:
    """`open_checkpoint` for those who have settled how to read, or bring a Program of their own."""
    for problem in filter(None, [bad_setting(), *misspelt_variables(os.environ)]):
        warnings.warn(problem, stacklevel=3)
    started = time.perf_counter()
    ahead = OpenAhead(config) if program_of is None else None
    try:
        files = locate(path, filters=filters, ahead=ahead)
        program = Program(files, config, ahead) if program_of is None else program_of(files, config)
    except BaseException:
        if ahead is not None:
            ahead.close()  # the traceback keeps this frame
        raise
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
        allocation, which is freed with the last of them. Tensors that a file of `torch.save` holds once under several
        names share memory, as after `torch.load`; views that overlap otherwise are copies of their own.

    Raises:
        CheckpointError: as `open_checkpoint`.
        MemoryError: the tensors do not fit; of small ones and on other devices, torch's RuntimeError.
    """
    target = torch.device(device)
    with open_checkpoint(path, config=config, watch=False) as checkpoint:
        tensors = read_all(checkpoint, target, progress=progress)
    logger.info("%s", checkpoint.report.summary())
    return tensors


def read_all(checkpoint: Checkpoint, device: torch.device, *, progress: bool = False) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint that is recording, as `load_file` returns them."""
    with progress_bar(checkpoint, progress):
        tensors = record_all(checkpoint, device)
        checkpoint.run()
    return tensors


def record_all(
    checkpoint: Checkpoint, device: torch.device, *, reserved: ReservedMemory | None = None
) -> dict[str, torch.Tensor]:
    """Allocates every tensor of a checkpoint, as `allocate_like`, and records the copies into them."""
    with collector_paused():
        tensors = allocate_like(checkpoint.files, device, reserved=reserved)
        for name, tensor in tensors.items():
            checkpoint._program.record_whole(tensor, name)
    return tensors


@contextlib.contextmanager
def progress_bar(checkpoint: Checkpoint, enabled: bool) -> Iterator[None]:
    with ProgressBar(enabled=enabled) as bar:
        if enabled:
            checkpoint._program.on_progress = bar.update_to
        try:
            yield
        finally:
            checkpoint._program.on_progress = None
