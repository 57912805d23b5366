"""Planning: what a load would read, and the memory it would take, without reading and without that memory."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import _C
from .available_memory import available_bytes
from .collector import collector_paused
from .config import LoadConfig, MiB, ResolvedConfig
from .cost import Estimate, LoadCosts, ReadSize, Way
from .entries import CheckpointFiles
from .errors import listed, printable
from .loading import Checkpoint, config_for_recording, open_checkpoint, open_files, record_all
from .program import Program
from .regions import is_nested
from .report import LoadReport, folded_lines, format_bytes, skipped_lines
from .reserved import ReservedMemory
from .storage import failure, file_report, make_planner
from .tensor import CheckpointTensor, strides_of
from .values import SMALL_BYTES

if TYPE_CHECKING:
    from .entries import Shard
    from .filters import Filter
    from .loading import CheckpointPath

# In the place of a segment of the pipeline, for what is planned alone.
_PLANNED_SEGMENT = -2
# Enough to keep a queue of reads full for a while.
_MEASURED_BYTES = 256 * MiB


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """Which tensors a rank holds a part of: that of `rank`, of `size` equal parts along `dim`.

    Attributes:
        pattern: of names, where `*` stands for any characters, and `?` for one.
        dim: from 0; from -1 backwards.
    """

    pattern: str
    dim: int
    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"{self}: the rank is {self.rank} of {self.size}; ranks count from 0 to the size - 1")

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Of `GLOB:DIM:RANK/SIZE`.

        >>> Slice.parse("*.up_proj.weight:0:3/8").rank
        3
        """
        match = re.fullmatch(r"(.+):(-?\d+):(\d+)/(\d+)", text)
        if match is None:
            raise ValueError(f"slice {text!r}: expected GLOB:DIM:RANK/SIZE, as '*.up_proj.weight:0:3/8'")
        return cls(match[1], int(match[2]), int(match[3]), int(match[4]))

    def __str__(self) -> str:
        return f"{self.pattern}:{self.dim}:{self.rank}/{self.size}"

    def range_in(self, shape: Sequence[int], name: str) -> tuple[int, int, int]:
        """This rank's part of a tensor: dimension, start and length, as `narrow` takes them.

        Raises:
            ValueError: the tensor has no such dimension, or it does not divide.
        """
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(f"{name}: slice {self}: there is no dimension {self.dim} in {list(shape)}")
        length, rest = divmod(shape[self.dim], self.size)
        if rest:
            raise ValueError(
                f"{name}: slice {self}: dimension {self.dim} of {list(shape)} does not divide into {self.size}"
            )
        return self.dim % len(shape), self.rank * length, length


@dataclasses.dataclass(slots=True)
class FilePlan:
    """What would be read of one file."""

    path: str
    num_reads: int
    bytes_read: int
    strategy: str  # "direct", "buffered", "direct (unproven)", or "mixed"
    reason: str  # why this strategy, in one sentence


@dataclasses.dataclass(slots=True)
class MemoryLedger:
    """Memory that a load takes, in bytes, beside that of Python, torch and the code itself.

    Attributes:
        host_parameters, device_parameters: what is loaded, and what else the model has, on the CPU and elsewhere.
        staging: of the buffers that reads go through.
        staging_limit: what `staging` may grow to; it does where parameters are on a GPU: all goes through it.
        device_staging: what copies on a GPU pass through there, where parameters are on one.
        transient: the largest tensor that is held besides, while it is copied or looked at, and the small ones that are
            kept to be looked at again.
        largest: the largest of the parameters.
    """

    host_parameters: int = 0
    device_parameters: int = 0
    staging: int = 0
    staging_limit: int = 0
    device_staging: int = 0
    transient: int = 0
    largest: int = 0

    def add(self, num_bytes: int, *, on_host: bool = True) -> None:
        """Counts a parameter."""
        if on_host:
            self.host_parameters += num_bytes
        else:
            self.device_parameters += num_bytes
        self.largest = max(self.largest, num_bytes)

    def on_device(self) -> MemoryLedger:
        """Of the same load into parameters on a GPU."""
        parameters = self.host_parameters + self.device_parameters
        return dataclasses.replace(
            self,
            host_parameters=0,
            device_parameters=parameters,
            staging=max(self.staging, min(self.staging_limit, parameters)),
        )

    @property
    def host_peak(self) -> int:
        """Most host memory at a time."""
        return self.host_parameters + self.staging + self.transient

    @property
    def device_peak(self) -> int:
        """Most memory of the GPU at a time."""
        return self.device_parameters + self.device_staging if self.device_parameters else 0


@dataclasses.dataclass(slots=True)
class PlannedRead:
    """One read of a file; a direct one may reach past its end."""

    offset: int
    length: int
    direct: bool
    in_place: bool


@dataclasses.dataclass(slots=True)
class PlannedCopy:
    """One copy of a tensor, or of a part of it.

    Attributes:
        tensor: its name.
        path: the file.
        begin, end: from the first byte in the file that it needs to behind the last one.
        num_pieces: how many runs of bytes it needs there.
        source: which part of the tensor, as `name[0:128]`.
        ops: what is done on the way, in order.
        destination: which part of which parameter; or that it has none.
        reads: what brings it. Empty where a later copy overwrites all of it, so that it is never carried out.
    """

    tensor: str
    path: str
    begin: int
    end: int
    num_pieces: int
    source: str
    ops: list[str]
    destination: str
    reads: list[PlannedRead] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class LoadPlan:
    """What a load would do. Sizes are bytes.

    Attributes:
        report: what its LoadReport would say, but for times and files.
        files: one for each file that would be read.
        read_sizes: of all reads, ascending in each way to read; sizes that do not occur are left out.
        read_whole: files that the strategy first reads whole, into the page cache.
        memory: what it would take, of this rank.
        copies: those that were asked for.
        hold_seconds: for so long at most, reading waits for recording to end.
    """

    report: LoadReport
    files: list[FilePlan]
    read_sizes: list[ReadSize]
    read_whole: list[str]
    memory: MemoryLedger
    copies: list[PlannedCopy]
    hold_seconds: float

    def estimate(self, costs: LoadCosts) -> Estimate:
        """The time that the load takes, of a process that was made for it (weightlift/cost.py has the formula).

        Its header is parsed, and its loaders run, in the time that planning took for that.
        """
        report = self.report
        cached = sum(size.bytes for size in self.read_sizes if size.way == "cached")
        record = report.seconds["record"]
        return Estimate(
            header=report.seconds["header"],
            start=costs.start_seconds if self.read_sizes else 0.0,
            record=record,
            hold=min(record, self.hold_seconds),
            read=costs.seconds_of_reads(self.read_sizes),
            memory=costs.seconds_of_memory(
                self.memory.host_parameters, report.bytes_read - report.in_place_bytes + cached
            ),
        )

    def require_memory(self, available: int | None = None, *, on_device: int | None = None) -> None:
        """Raises MemoryError where what would be loaded can't fit.

        Args:
            available: host memory that this rank may take; None: what this process may still take.
            on_device: memory of its device; None: it is not looked at.
        """
        available = available_bytes() if available is None else available
        memory = self.memory
        if memory.host_peak > available:
            raise MemoryError(
                f"the load takes {format_bytes(memory.host_peak)} of host memory "
                f"({format_bytes(memory.host_parameters)} of parameters, {format_bytes(memory.staging)} of staging, "
                f"{format_bytes(memory.transient)} besides), and {format_bytes(available)} are available; cut the "
                "model among more ranks, lower staging_bytes, or free memory"
            )
        if on_device is not None and memory.device_peak > on_device:
            raise MemoryError(
                f"the load takes {format_bytes(memory.device_peak)} of device memory "
                f"({format_bytes(memory.device_parameters)} of parameters, {format_bytes(memory.device_staging)} of "
                f"staging), and {format_bytes(on_device)} are available; cut the model among more ranks, or lower "
                "device_staging_bytes"
            )

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that ``json.dumps`` takes."""
        report = {
            key: value
            for key, value in self.report.to_dict().items()
            if key not in ("files", "seconds", "bytes_per_second", "fallbacks")
        }
        return {
            **report,
            "files": [dataclasses.asdict(file) for file in self.files],
            "read_sizes": [dataclasses.asdict(size) for size in self.read_sizes],
            "read_whole": self.read_whole,
            "memory": {
                **dataclasses.asdict(self.memory),
                "host_peak": self.memory.host_peak,
                "device_peak": self.memory.device_peak,
            },
            "copies": [dataclasses.asdict(copy) for copy in self.copies],
        }

    def __str__(self) -> str:
        report, memory = self.report, self.memory
        lines = [
            f"Plan: {format_bytes(report.bytes_needed)} needed, {format_bytes(report.bytes_read)} read "
            f"(over_read={report.over_read:.3f}) by {_count(report.num_reads, 'read')} of "
            f"{_count(len(self.files), 'file')}",
            f"  tensors     {report.num_tensors} used, {report.num_transfers} transfers, {report.num_dropped} dropped, "
            f"{report.num_forced} forced",
            f"  bytes       {format_bytes(report.direct_bytes)} direct, "
            f"{format_bytes(report.buffered_bytes)} buffered, {format_bytes(report.in_place_bytes)} in place",
        ]
        lines += [
            f"  reads       {size.num_reads} of {_range(size.low)}, {size.way}: {format_bytes(size.bytes)}"
            for size in self.read_sizes
        ]
        lines.append(
            f"  host        {format_bytes(memory.host_peak)} at peak: {format_bytes(memory.host_parameters)} "
            f"parameters, {format_bytes(memory.staging)} staging, {format_bytes(memory.transient)} transient"
        )
        staging = memory.device_peak - memory.device_parameters
        lines.append(
            f"  device      {format_bytes(memory.device_peak)} at peak: {format_bytes(memory.device_parameters)} "
            f"parameters, {format_bytes(staging)} staging"
        )
        lines += [
            f"  file        {printable(f.path)}: {format_bytes(f.bytes_read)} by {_count(f.num_reads, 'read')}, "
            f"{f.strategy}: {f.reason}"
            for f in self.files
        ]
        lines += [f"  strategy    {printable(note)}" for note in report.strategy_notes]
        lines += [f"  read whole  {printable(path)}" for path in self.read_whole]
        for label, names in (
            ("missing", report.missing_keys),
            ("unexpected", report.unexpected_keys),
            ("gap", report.gaps),
            ("twice", report.double_writes),
        ):
            lines += [f"  {label:<11} {line}" for line in folded_lines(names)]
        lines += [f"  skipped     {line}" for line in skipped_lines(report.skipped)]
        return "\n".join(lines)

    def explanation(self) -> str:
        """The copies: file and range, what is done, and where it goes; and by which reads."""
        return "\n".join(line for copy in self.copies for line in _copy_lines(copy))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _range(low: int) -> str:
    return f"{format_bytes(low)} to {format_bytes(2 * low)}"


def _copy_lines(copy: PlannedCopy) -> list[str]:
    pieces = f" in {copy.num_pieces} pieces" if copy.num_pieces > 1 else ""
    lines = [
        f"{printable(os.path.basename(copy.path))}:{copy.begin}-{copy.end}{pieces} ({printable(copy.source)}) -> "
        f"{' -> '.join(copy.ops)} -> {printable(copy.destination)}"
    ]
    if not copy.reads:
        lines.append("  not read: a later copy overwrites all of it, or it has no elements")
    groups: defaultdict[str, list[PlannedRead]] = defaultdict(list)
    for read in copy.reads:
        how = f"{'direct' if read.direct else 'buffered'}, {'in place' if read.in_place else 'through staging'}"
        groups[how].append(read)
    for how, reads in groups.items():
        total = sum(read.length for read in reads)
        lines.append(
            f"  {_count(len(reads), 'read')}, {how}: {format_bytes(total)} in "
            f"{min(read.offset for read in reads)}-{max(read.offset + read.length for read in reads)}"
        )
    return lines


class PlanningProgram(Program):
    """A Program that records as any other, and plans what it would then read.

    Whatever is looked at while recording is read nevertheless, and nothing else: what is recorded may depend on it.

    Args:
        explain: names of tensors, and of parameters, whose copies the plan shall list.
    """

    def __init__(self, files: CheckpointFiles, config: ResolvedConfig, *, explain: Collection[str] = ()) -> None:
        super().__init__(files, config)
        self.memory = MemoryLedger()
        self.reserved = ReservedMemory()  # for destinations
        self._planner: _C.ReadPlanner | None = None
        self._only_plans = False
        self._planned: dict[int, _C.Batch] = {}  # what was handed over and not read, by label
        self._looked_at: set[int] = set()  # ids of transfers that were handed over, and read afterwards
        self._explain = frozenset(explain)
        self._explained: dict[int, PlannedCopy] = {}
        self._destinations: dict[str, torch.Tensor] = {}
        self._hold_seconds = 0.0

    def start_recording(self, *, hold_seconds: float) -> None:
        self._hold_seconds = hold_seconds
        super().start_recording(hold_seconds=hold_seconds)

    def name_destinations(self, names: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._explain:
            self._destinations = dict(names)
            super().name_destinations(self._destinations.items())

    # ---- recording

    def _record_native(self, dst: torch.Tensor, src: CheckpointTensor) -> bool:
        id = len(self._sources)
        if self._explain and src._source.real is None and src._pieces is None:
            self._explained |= self._explanation(id, dst, src)
        if super()._record_native(dst, src):
            return True
        self._explained.pop(id, None)
        return False

    def _copy_by_torch(self, dst: torch.Tensor, src: CheckpointTensor) -> None:
        entry = src._source.entry
        if src._source.real is not None or src._pieces is not None or src.nbytes <= SMALL_BYTES:
            super()._copy_by_torch(dst, src)
            return
        self._used.add(entry.name)
        self.memory.transient = max(self.memory.transient, src.numel() * src._file_dtype.itemsize)
        id = len(self._sources)
        explanation = self._explanation(id, dst, src)
        for copy in explanation.values():
            copy.ops.append("copied by torch")
        self._explained |= explanation
        self.overwrite(dst, lambda: self._plan_to_read(src))

    def _plan_to_read(self, src: CheckpointTensor) -> None:
        """Plans what `read` would do."""
        entry = src._source.entry
        shape, offset, strides, dtype = src._shape, src._file_offset, src._file_strides, src._file_dtype
        if not is_nested(shape, strides):
            shape, offset, strides, dtype = (entry.nbytes,), entry.offset, (1,), torch.uint8
        with self._lock:
            self._only_plans = True
            try:
                self._read_into(self.reserved.empty(shape, dtype=dtype), src._source, offset, strides)
            finally:
                self._only_plans = False

    def read(self, tensor: CheckpointTensor) -> torch.Tensor:
        values = super().read(tensor)
        if tensor._source.entry.nbytes > SMALL_BYTES:
            self.memory.transient = max(self.memory.transient, values.nbytes)
        return values

    # ---- running

    def _submit(self, batch: _C.Batch, *, barrier: bool = False, urgent: bool = False) -> int:
        self._plan(batch)
        if urgent and not self._only_plans:
            return super()._submit(batch, urgent=True)
        if batch.label >= 0:
            self._planned[batch.label] = batch
        self._last_segment = _PLANNED_SEGMENT
        return _PLANNED_SEGMENT

    def _plan(self, batch: _C.Batch) -> None:
        if self._planner is None:
            assert self._read_ahead is not None
            self._planner = make_planner(self.config, self.settings, self.files.shards, self._read_ahead.reader)
        wanted = self._explained.keys() & set(batch.ids()) if self._explained else set()
        fault, reads = self._planner.plan(batch, wanted, self._shared_tensors(batch))
        if fault is not None:
            raise self._end(failure(fault, self.files.shards, self._sources, self.config, []))
        for id, found in reads.items():
            self._explained[id].reads = [PlannedRead(*read[1:]) for read in found]

    def _run_now(self, ids: list[int]) -> None:
        ids = [id for id in ids if id not in self._looked_at]
        for label in self._ledger.batches_of(ids):
            part = self._planned[label].take(set(ids))
            self._looked_at.update(part.ids())
            self._wait(super()._submit(part, urgent=True))
        waiting = [id for id in ids if id not in self._looked_at]
        if waiting:
            super()._run_now(waiting)

    def _wait(self, segment: int) -> None:
        if segment != _PLANNED_SEGMENT:
            super()._wait(segment)

    def _wait_up_to(self, last: int) -> None:
        """Nothing: what is planned is never over, so that one who looks at it later finds it pending."""

    def _before_reading(self, shards: Iterable[Shard]) -> None:
        self._decide(only_decide=True)

    def abort(self) -> str | None:
        self._planned.clear()
        return super().abort()

    # ---- what was planned

    def plan_turns(self) -> None:
        """Plans the turns that are to be taken."""
        self.start()
        for turn in (self.turns or {}).values():
            turn.start(self.reserved.allocate_for)
            self.start()  # as TurnQueue does: each is planned on its own
            self.memory.transient = max(self.memory.transient, turn.source_bytes)

    def fill_report(self, report: LoadReport) -> None:
        report.num_tensors = len(self.used_tensors())
        report.num_dropped = self._num_dropped + self._ledger.num_dropped
        report.num_forced = len(self._forced)
        if self._read_ahead is not None:
            report.strategy_notes += self._notes()
        if self._planner is None:
            return
        stats = self._planner.stats()
        report.num_transfers = stats["num_transfers"]
        report.bytes_needed = stats["bytes_needed"]
        report.in_place_bytes = stats["in_place_bytes"]
        report.num_reads = sum(file["num_reads"] for file in stats["files"])
        report.direct_bytes = sum(file["direct_bytes"] for file in stats["files"])
        report.buffered_bytes = sum(file["buffered_bytes"] for file in stats["files"])
        report.bytes_read = report.direct_bytes + report.buffered_bytes

    def plan(self, report: LoadReport) -> LoadPlan:
        """All of it, beside a report that `fill_report` has filled."""
        files = []
        sizes: list[ReadSize] = []
        if self._planner is not None:
            stats = self._planner.stats()
            ways: tuple[Way, ...] = ("direct", "buffered", "cached")
            sizes = [
                ReadSize(1 << power, number, num_bytes, way)
                for way in ways
                for power, (number, num_bytes) in enumerate(stats[f"{way}_sizes"])
                if number
            ]
            self.memory.staging = min(
                self.settings.staging_bytes, stats["num_staged_chunks"] * self.settings.chunk_bytes
            )
            self.memory.staging_limit = self.settings.staging_bytes
            self.memory.device_staging = self.settings.device_staging_bytes
            names = {"direct_reader": "direct", "buffered_reader": "buffered"}
            for shard, file in zip(self.files.shards, stats["files"], strict=True):
                if file["num_reads"]:
                    told = file_report(shard, file, names)
                    files.append(FilePlan(shard.path, file["num_reads"], told.bytes_read, told.strategy, told.reason))
        return LoadPlan(
            report=report,
            files=files,
            read_sizes=sizes,
            read_whole=[shard.path for shard in self._read_ahead.whole] if self._read_ahead is not None else [],
            memory=dataclasses.replace(self.memory, transient=self.memory.transient + self._small.num_bytes),
            copies=list(self._explained.values()),
            hold_seconds=self._hold_seconds,
        )

    def _explanation(self, id: int, dst: torch.Tensor, src: CheckpointTensor) -> dict[int, PlannedCopy]:
        """The copy, by its id, if it is one of those that were asked for."""
        entry = src._source.entry
        name = self.name_of(dst.data_ptr())
        if entry.name not in self._explain and name not in self._explain:
            return {}
        item = src._file_dtype.itemsize
        dims = [pair for pair in zip(src._shape, src._file_strides, strict=True) if pair[0] > 1 and pair[1]]
        extent = 1 + sum((size - 1) * stride for size, stride in dims)
        run = 1  # elements in a row
        for size, stride in sorted(dims, key=lambda dim: dim[1]):
            if stride != run:
                break
            run *= size
        num_elements = 1
        for size, _ in dims:
            num_elements *= size
        source = region_text(
            entry.name,
            entry.shape,
            strides_of(entry),
            (src._file_offset - entry.offset) // item,
            src._shape,
            src._file_strides,
        )
        ops = ["narrow"] if num_elements * item < entry.nbytes else []
        strides = [stride for _, stride in dims]
        if strides != sorted(strides, reverse=True):
            ops.append("transpose")
        if len(dims) < sum(size > 1 for size in dst.shape):
            ops.append("expand")
        if dst.dtype != src._file_dtype:
            ops.append(f"{_name(src._file_dtype)} to {_name(dst.dtype)}")
        ops.append("copy")
        destination = f"a tensor {list(dst.shape)} of its own"
        if name is not None:
            whole = self._destinations[name]
            offset = (dst.data_ptr() - whole.data_ptr()) // whole.element_size()
            destination = region_text(name, whole.shape, whole.stride(), offset, dst.shape, dst.stride())
        copy = PlannedCopy(
            tensor=entry.name,
            path=entry.shard.path,
            begin=src._file_offset,
            end=src._file_offset + extent * item,
            num_pieces=num_elements // run,
            source=source,
            ops=ops,
            destination=destination,
        )
        return {id: copy}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def region_text(
    name: str,
    whole: Sequence[int],
    whole_strides: Sequence[int],
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> str:
    """Which part of a tensor a view of it is, where it is a box: `name[0:128, 512:1024]`.

    Args:
        whole, whole_strides: of the tensor.
        offset: of the view's first element, from the tensor's; like strides, in elements.
        shape, strides: of the view.
    """
    starts, lengths = [0] * len(whole), [1] * len(whole)
    rest = offset
    order = sorted(range(len(whole)), key=lambda d: (whole_strides[d], whole[d]), reverse=True)
    for d in order:
        if whole[d] > 1 and whole_strides[d]:
            starts[d], rest = divmod(rest, whole_strides[d])
    sizes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1 and stride]
    for size, stride in sizes:
        dims = [d for d in order if whole_strides[d] == stride and whole[d] > 1 and lengths[d] == 1]
        if not dims or starts[dims[0]] + size > whole[dims[0]]:
            return f"{name}: {list(shape)} with strides {list(strides)} from element {offset}"
        lengths[dims[0]] = size
    parts = [
        ":" if length == size else f"{start}:{start + length}"
        for start, length, size in zip(starts, lengths, whole, strict=True)
    ]
    while parts and parts[-1] == ":":
        parts.pop()
    return f"{name}[{', '.join(parts)}]" if parts else name


def open_plan(
    path: CheckpointPath,
    *,
    filters: Sequence[Filter | None] = (),
    config: LoadConfig | None = None,
    explain: Collection[str] = (),
) -> Checkpoint:
    """`open_checkpoint` to plan with: what is recorded is planned, and not read."""
    return open_files(
        path,
        filters=filters,
        config=config_for_recording(config),
        watch=True,
        program_of=functools.partial(PlanningProgram, explain=explain),
    )


def plan_of(checkpoint: Checkpoint, report: LoadReport | None = None) -> LoadPlan:
    """The plan of what was recorded on a checkpoint of `open_plan`."""
    program = checkpoint._program
    assert isinstance(program, PlanningProgram)
    found = checkpoint.report
    if report is None:
        report = found
        report.skipped = checkpoint.files.skipped
    report.seconds = found.seconds
    return program.plan(report)


def plan_checkpoint(
    path: CheckpointPath,
    *,
    slices: Sequence[Slice] = (),
    explain: Collection[str] = (),
    filters: Sequence[Filter | None] = (),
    config: LoadConfig | None = None,
) -> LoadPlan:
    """Plans to load every tensor of a checkpoint, as `load_file` does, or a part of each into memory of its own.

    Args:
        path, filters, config: as for `open_checkpoint`.
        slices: the tensors of which only a part is loaded. Where several apply to one, each cuts what the others left.
        explain: names of tensors whose copies the plan shall list.

    Raises:
        CheckpointError: a file is missing, unreadable or malformed.
        ValueError: a slice that fits no tensor, or that a tensor can't be cut by; a name that no tensor has.

    Example:
        >>> plan = plan_checkpoint(folder, slices=[Slice.parse("*.up_proj.weight:0:3/8")])
        >>> plan.require_memory()
    """
    with (
        collector_paused(),
        open_plan(path, filters=filters, config=config, explain=explain) as checkpoint,
    ):
        require_names(explain, {**checkpoint.files.tensors, **checkpoint.files.skipped})
        program = checkpoint._program
        assert isinstance(program, PlanningProgram)
        state = (
            record_slices(checkpoint, slices, program.reserved.empty)
            if slices
            else record_all(checkpoint, torch.device("cpu"), reserved=program.reserved)
        )
        for tensor in state.values():
            program.memory.add(tensor.nbytes)
        checkpoint.run()
        return plan_of(checkpoint)


def measure_bandwidth(path: CheckpointPath, *, config: LoadConfig | None = None) -> float:
    """Bytes per second at which a checkpoint can be read now: parts of its largest tensors are, up to 256 MiB.

    What is in the page cache counts as the load would find it.

    Raises:
        ValueError: there is nothing to read.
        CheckpointError: as `open_checkpoint`, or storage failed.
    """
    memory, left = ReservedMemory(), _MEASURED_BYTES
    with open_checkpoint(path, config=config, watch=False) as checkpoint:
        entries = sorted(checkpoint.files.tensors.values(), key=lambda entry: entry.nbytes, reverse=True)
        started = time.perf_counter()
        for entry in entries:
            part: Any = CheckpointTensor.of_span(checkpoint[entry.name]._source)
            if entry.nbytes:
                length = max(1, min(part._shape[0], left // 4 // part._dtype.itemsize))
                checkpoint._program.record(memory.empty((length,), dtype=part._dtype), part.narrow(0, 0, length))
                left -= length * part._dtype.itemsize
            if left < _MEASURED_BYTES // 64:
                break
        checkpoint.run()
        seconds = time.perf_counter() - started
        num_bytes = checkpoint.report.bytes_read
    if not num_bytes:
        raise ValueError("the checkpoint has no data, so that no bandwidth can be measured")
    return num_bytes / seconds


def require_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raises ValueError where one is not known."""
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=3)
            raise ValueError(
                f"no tensor is named {printable(name)}" + (f"; nearest: {listed(nearest)}" if nearest else "")
            )


def record_slices(
    checkpoint: Checkpoint, slices: Sequence[Slice], empty: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Records, for every tensor of a checkpoint, the copy of its part into a new tensor of that size.

    Args:
        slices: as for `plan_checkpoint`.
        empty: makes the new ones, as `torch.empty` does.

    Raises:
        ValueError: as `plan_checkpoint`, before anything is recorded.
    """
    rules = [(slice, re.compile(fnmatch.translate(slice.pattern)).match) for slice in slices]
    unused = set(slices)
    ranges: dict[str, list[tuple[int, int, int]]] = {}
    for name, entry in checkpoint.files.tensors.items():
        shape = list(entry.shape)
        for slice, matches in rules:
            if matches(name):
                dim, start, length = slice.range_in(shape, name)
                ranges.setdefault(name, []).append((dim, start, length))
                shape[dim] = length
                unused.discard(slice)
    if unused:
        raise ValueError(f"no tensor fits {listed(sorted(map(str, unused)))}")
    state = {}
    program = checkpoint._program
    for name in checkpoint:
        part = program.tensor(name, ranges.get(name, ()))
        state[name] = empty(part._shape, dtype=part._dtype)
        program.record(state[name], part)
    return state
