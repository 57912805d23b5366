"""Gate 2: a checkpoint as a stream of (name, tensor), for engines that take nothing else.

Read ahead, in bounded memory.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch

from . import devices
from ._logging import logger
from .config import LoadConfig
from .filters import Filter
from .loading import open_files, resolved_config
from .memory import allocate
from .progress import ProgressBar
from .source import CheckpointSource
from .torchao import Assembler

if TYPE_CHECKING:
    from .entries import TensorEntry
    from .loading import Checkpoint, CheckpointPath

Order = Literal["file", "module"]

# What is read ahead goes in so many steps: while the tensors of one are handed out, the others are being read.
_STEPS = 4
# Counted for a tensor beside its bytes, so that not a million scalars are read ahead at once.
_TENSOR_BYTES = 1 << 10


def iter_weights(
    path: CheckpointPath,
    device: str | torch.device | int = "cpu",
    *,
    filters: Sequence[Filter | None] = (),
    order: Order = "file",
    config: LoadConfig | None = None,
    progress: bool = False,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Gives every tensor with its name, while the next ones are being read.

    Beside the tensors that the caller keeps, at most `staging_bytes` (256 MiB) of memory are used: one half for tensors
    that are read ahead, on their device, or a single one that is larger; the other, of the host, for the reads. Ending
    the loop early, also by an exception, ends reading; where the iterator lives on, call its `close()`.

    Args:
        path: as for `open_checkpoint`.
        device: where the tensors go.
        filters: each gives the rule by which a tensor of that name is not wanted, or None; such a tensor is not read.
        order: "file": shard after shard, inside a shard as the data lies. "module": the tensors of a module come
            together, wherever they lie, when its first one has its turn.
        config: how to read; see LoadConfig. With the strategy "torchao", tensors that torchao flattened come put
            together, each when its last part has arrived; until then its other parts are held too.
        progress: shows a bar on stderr.

    Returns:
        An iterator of (name, tensor). The tensors are the caller's; each has memory of its own.

    Raises:
        CheckpointError: as `open_checkpoint`, at once; CheckpointReadError while iterating, where storage fails.
        ImportError: the strategy is "torchao", which is not installed or too old.
        ValueError: a device that holds no values; an unknown order; "torchao" and a prefix; as `open_checkpoint`.

    Example:
        >>> for name, tensor in weightlift.iter_weights(folder):
        ...     parameters[name].copy_(tensor)
    """
    target = torch.empty(0, device=device).device  # torch says now what is wrong with it
    if target.type == "meta":
        raise ValueError("device is 'meta', which holds no values; open_checkpoint() tells shapes and dtypes unread")
    if order not in get_args(Order):
        raise ValueError(f"order is {order!r}; accepted is one of {', '.join(map(repr, get_args(Order)))}")
    resolved = resolved_config(config)
    if resolved.strategy == "torchao":
        _require_no_prefix(path)
    checkpoint = open_files(path, filters=filters, config=resolved, watch=False)
    assembler = Assembler(checkpoint.files, filters) if resolved.strategy == "torchao" else None
    entries = assembler.entries if assembler else list(checkpoint.files.tensors.values())
    if order == "module":
        entries = by_module(entries)
    ahead_bytes = checkpoint._program.settings.staging_bytes // 2
    checkpoint._program.leave_staging(ahead_bytes)
    return _stream(checkpoint, entries, target, assembler, ahead_bytes, progress)


def _require_no_prefix(path: CheckpointPath) -> None:
    for source in path if isinstance(path, Sequence) else (path,):
        if isinstance(source, CheckpointSource) and source.prefix:
            raise ValueError(
                f"strategy is 'torchao' and prefix is {source.prefix!r}: they exclude each other, since the names in "
                "torchao's metadata have none; leave it out, and put it before the names that come"
            )


def by_module(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The tensors of each module together: names that are equal up to their last dot."""
    modules: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        modules.setdefault(entry.name.rpartition(".")[0], []).append(entry)
    return [entry for module in modules.values() for entry in module]


@dataclasses.dataclass
class _Step:
    """Tensors that are read together."""

    num_bytes: int
    entries: collections.deque[TensorEntry]
    tensors: collections.deque[torch.Tensor] = dataclasses.field(default_factory=collections.deque)
    number: int = -1  # of the program, to wait for it

    def start(self, checkpoint: Checkpoint, device: torch.device) -> None:
        program = checkpoint._program
        for entry in self.entries:
            tensor = allocate(entry, device)
            program.record_whole(tensor, entry.name)
            self.tensors.append(tensor)
        self.number = program.start()


def _steps(entries: Iterable[TensorEntry], limit: int) -> Iterator[_Step]:
    """Steps of at most `limit` bytes, or one tensor."""
    step = _Step(0, collections.deque())
    for entry in entries:
        num_bytes = entry.nbytes + _TENSOR_BYTES
        if step.entries and step.num_bytes + num_bytes > limit:
            yield step
            step = _Step(0, collections.deque())
        step.entries.append(entry)
        step.num_bytes += num_bytes
    if step.entries:
        yield step


def _stream(
    checkpoint: Checkpoint,
    entries: Sequence[TensorEntry],
    device: torch.device,
    assembler: Assembler | None,
    ahead_bytes: int,
    progress: bool,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    read_to = device if devices.is_writable(device) else torch.device("cpu")
    total_bytes = sum(entry.nbytes for entry in entries)
    done_bytes = 0
    with checkpoint, ProgressBar(enabled=progress) as bar:
        steps = _steps(entries, ahead_bytes // _STEPS)
        started: collections.deque[_Step] = collections.deque()
        started_bytes = 0
        upcoming = next(steps, None)
        while upcoming or started:
            while upcoming and (not started or started_bytes + upcoming.num_bytes <= ahead_bytes):
                upcoming.start(checkpoint, read_to)
                started.append(upcoming)
                started_bytes += upcoming.num_bytes
                upcoming = next(steps, None)
            step = started.popleft()
            checkpoint._program.finish(step.number)
            while step.entries:
                entry = step.entries.popleft()
                done_bytes += entry.nbytes
                # What is handed out is held by nothing here, so that it is freed when the caller lets go of it.
                if assembler is None:
                    yield entry.name, step.tensors.popleft().to(device)
                elif complete := assembler.add(entry, step.tensors.popleft().to(device)):
                    yield complete.pop()
                bar.update_to(done_bytes, total_bytes)
            started_bytes -= step.num_bytes
    logger.info("%s", checkpoint.report.summary())
