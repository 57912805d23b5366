"""Program: one load, recorded transfer by transfer and run by the native pipeline.

Recording fills a ledger. From time to time what has gathered there, a segment, is handed to the pipeline, which reads it
while recording goes on. Whatever someone wants to look at before its turn is run at once, that and nothing else.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import _C
from ._logging import logger
from .config import MiB, ResolvedConfig
from .errors import CheckpointError, CheckpointReadError, listed
from .report import FileReport, LoadReport
from .tensor import CheckpointTensor, Source

if TYPE_CHECKING:
    from .checkpoint import CheckpointFiles, Shard, TensorEntry

# A segment is handed over when it holds this many bytes, or fewer when the stream of tensors leaves a shard.
_SEGMENT_BYTES = 256 * MiB
_SHARD_SEGMENT_BYTES = 32 * MiB
# Tensors up to this size are values: they are read together with their small neighbours, and kept.
_SMALL_BYTES = 64 << 10
_SMALL_RUN_BYTES = 4 * MiB
# How often waiting looks up, for Ctrl-C and for progress.
_POLL_SECONDS = 0.05

# What the core decides when the user does not, measured by benchmarks/load.py and csrc/readers.
_QUEUE_DEPTH = 16
_CHUNK_BYTES = 2 * MiB
# An additional read costs about as much as 32 KiB of a running one; half of that keeps what is read in vain under 2 % of
# pieces of 1 MiB.
_MERGE_GAP_BYTES = 16 << 10
_MAX_THREADS = 8

# How the core knows element types: by size, or by name where numbers may be converted (csrc/transform/element.h).
_TYPE_BY_SIZE = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
_TYPE_BY_DTYPE = {torch.float32: 5, torch.float16: 6, torch.bfloat16: 7}


def _types(src: torch.dtype, dst: torch.dtype) -> tuple[int, int] | None:
    """The core's types for a copy, or None where it can't convert."""
    if src == dst:
        code = _TYPE_BY_SIZE[src.itemsize]
        return code, code
    if src in _TYPE_BY_DTYPE and dst in _TYPE_BY_DTYPE:
        return _TYPE_BY_DTYPE[src], _TYPE_BY_DTYPE[dst]
    return None


_TYPES: dict[tuple[torch.dtype, torch.dtype], tuple[int, int] | None] = {}


class Program:
    """Records the copies of one load, and runs them.

    While it is `recording`, copies gather; else each is carried out at once. Any thread may record: order is the order in
    which calls arrive.
    """

    def __init__(self, files: CheckpointFiles, config: ResolvedConfig) -> None:
        self.files = files
        self.config = config
        self.recording = False
        self.closed = False
        self.on_progress: Callable[[int], None] | None = None
        self.tracks_coverage = False
        self._file_of = {id(shard): index for index, shard in enumerate(files.shards)}
        self._ledger = _C.Ledger()
        self._pipeline: _C.Pipeline | None = None
        self._lock = threading.RLock()
        self._sources: list[TensorEntry] = []  # of each transfer, by id
        # The memory of destinations, by address. Held until all has landed, so that it can't be freed or used again.
        self._waiting_memory: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._started_memory: list[dict[int, tuple[torch.UntypedStorage, int]]] = []
        self._labels: dict[int, int] = {}  # segment -> its batch in the ledger
        self._last_file = -1
        self._hold_until = 0.0
        self._small: dict[int, torch.Tensor] = {}
        self._names: list[tuple[int, int, str]] = []
        self._forced: set[str] = set()
        self._used: set[str] = set()
        self._num_dropped = 0
        self._wait_seconds = 0.0
        self._past: list[dict[str, object]] = []

    # ---- recording

    def tensor(self, name: str) -> CheckpointTensor:
        """The whole tensor of that name. Raises KeyError."""
        entry = self.files.tensors[name]
        return CheckpointTensor.of_entry(Source(self, entry, self._file_of[id(entry.shard)]))

    def start_recording(self, *, hold_seconds: float) -> None:
        """From here on copies gather. Nothing is read for up to `hold_seconds`, unless someone needs values."""
        self.recording = True
        self._hold_until = time.monotonic() + hold_seconds

    def name_destinations(self, names: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Says what errors and coverage shall call these tensors."""
        spans = []
        for name, tensor in names:
            if tensor.numel() and tensor.device.type == "cpu":
                begin, end = _span(tensor)
                spans.append((begin, end, name))
        self._names = sorted(spans)

    def record(self, dst: torch.Tensor, src: CheckpointTensor) -> torch.Tensor:
        """`dst.copy_(src)`.

        Raises:
            RuntimeError: shapes do not fit, in torch's words; the program is closed.
        """
        shape = src._shape
        if dst.device.type == "meta" or dst.shape != shape or dst.numel() == 0:
            _check_copy(dst, src)  # raises what torch raises
            if dst.device.type == "meta" or dst.numel() == 0:
                return dst
        with self._lock:
            self._require_open(src)
            if src._pieces is not None and dst.shape == shape and src._source.real is None:
                start = 0
                for piece in src._pieces:
                    size = piece._shape[src._dim]
                    if size:
                        self.record(dst.narrow(src._dim, start, size), piece)
                    start += size
                return dst
            if not self._record_native(dst, src):
                # What the core can't do yet (other devices, other conversions, odd geometries): torch does it, now.
                self.overwrite(dst, lambda: dst.copy_(src._read()))
                self._used.add(src._source.entry.name)
        return dst

    def _record_native(self, dst: torch.Tensor, src: CheckpointTensor) -> bool:
        source = src._source
        strides = src._file_strides
        if dst.device.type != "cpu" or source.real is not None or src._pieces is not None or dst.is_neg() or dst.is_conj():
            return False
        seen, filed, wanted = src._dtype, src._file_dtype, dst.dtype
        if seen != filed and seen != wanted:
            return False  # two conversions in a row
        key = (filed, wanted)
        types = _TYPES.get(key, ())
        if types == ():
            types = _TYPES[key] = _types(filed, wanted)
        if types is None:
            return False
        shape = src._shape
        if shape != dst.shape:
            strides = (0,) * (dst.dim() - len(shape)) + tuple(
                0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)
            )
            shape = tuple(dst.shape)
        storage = dst.untyped_storage()
        address = storage.data_ptr()
        if address not in self._waiting_memory:
            self._waiting_memory[address] = (storage, storage.nbytes())
        waiting = self._ledger.record(
            len(self._sources),
            source.file,
            types[0],
            src._file_offset,
            strides,
            types[1],
            dst.data_ptr(),
            dst.stride(),
            shape,
        )
        if waiting < 0:
            return False  # overlapping windows, on either side
        self._sources.append(source.entry)
        if not self.recording:
            self.run()
        elif waiting >= _SHARD_SEGMENT_BYTES and (waiting >= _SEGMENT_BYTES or source.file != self._last_file):
            if self._hold_until and time.monotonic() >= self._hold_until:
                self._hold_until = 0.0
            if not self._hold_until:
                self._start_segment()
        self._last_file = source.file
        return True

    # ---- looking at destinations before their turn

    @property
    def has_pending(self) -> bool:
        return bool(self._ledger.has_pending)

    def before_read(self, tensor: torch.Tensor) -> None:
        """Runs what has to land before the values of a real tensor may be looked at."""
        if self._ledger.has_pending and _addressable(tensor):
            with self._lock:
                ids = self._ledger.needed_for(*_region(tensor))
                if ids:
                    self._run_now(ids)

    def overwrite(self, tensor: torch.Tensor, write: Callable[[], Any]) -> Any:
        """Does a write that replaces every value of a real tensor, and looks at none of them."""
        if not (self.tracks_coverage or self._ledger.has_pending) or not _addressable(tensor):
            return write()
        with self._lock:
            region = _region(tensor)
            ids = self._ledger.needed_for(*region, overwrites=True)
            if ids:
                self._run_now(ids)
            result = write()
            self._ledger.drop_inside(*region)
            if self.tracks_coverage:
                self._ledger.add_write(*region)
        return result

    def _run_now(self, ids: list[int]) -> None:
        self._check_destinations()
        for label in self._ledger.batches_of(ids):
            self._wait_for_label(label)
        for batch in self._ledger.start_only(ids):
            self._forced.update(self._sources[id].name for id in batch.ids())
            self._wait(self._submit(batch, urgent=True))

    # ---- values of checkpoint tensors

    def read(self, tensor: CheckpointTensor) -> torch.Tensor:
        """The values of a checkpoint tensor that is backed by its file, read now."""
        self._require_open(tensor)
        source = tensor._source
        shape, strides = tensor._shape, tensor._file_strides
        if 0 in shape:
            return torch.empty(shape, dtype=tensor._dtype)
        with self._lock:
            if self.recording:
                self._forced.add(source.entry.name)
            self._used.add(source.entry.name)
            if source.entry.nbytes <= _SMALL_BYTES:
                flat = self._small_values(source.entry)
                values = _view_of_bytes(flat, tensor, tensor._file_offset - source.entry.offset)
            elif _is_nested(shape, strides):
                values = torch.empty(shape, dtype=tensor._file_dtype)
                self._read_into(
                    [(source, tensor._file_dtype, tensor._file_offset, strides, values.data_ptr(), values.stride(), shape)]
                )
            else:  # overlapping windows: of the whole
                entry = source.entry
                flat = torch.empty(entry.nbytes, dtype=torch.uint8)
                self._read_into([(source, torch.uint8, entry.offset, (1,), flat.data_ptr(), (1,), (entry.nbytes,))])
                values = _view_of_bytes(flat, tensor, tensor._file_offset - entry.offset)
        return values.to(tensor._dtype)

    def _read_into(
        self, reads: Sequence[tuple[Source, torch.dtype, int, Sequence[int], int, Sequence[int], Sequence[int]]]
    ) -> None:
        batch = _C.Batch()
        for source, dtype, offset, src_strides, address, dst_strides, shape in reads:
            code = _TYPE_BY_SIZE[dtype.itemsize]
            batch.add(
                len(self._sources),
                source.file,
                code,
                offset,
                tuple(src_strides),
                code,
                address,
                tuple(dst_strides),
                tuple(shape),
            )
            self._sources.append(source.entry)
        self._wait(self._submit(batch, urgent=True))

    def _small_values(self, entry: TensorEntry) -> torch.Tensor:
        """The bytes of a small tensor, out of one read of the run of small tensors around it."""
        flat = self._small.get(id(entry))
        if flat is not None:
            return flat
        tensors = entry.shard.tensors
        position = bisect.bisect_left(tensors, (entry.offset, entry.nbytes), key=lambda e: (e.offset, e.nbytes))
        while tensors[position] is not entry:
            position += 1
        first = last = position
        while first > 0 and _extends(tensors[first - 1], entry.offset + entry.nbytes - tensors[first - 1].offset):
            first -= 1
        begin = tensors[first].offset
        while last + 1 < len(tensors) and _extends(
            tensors[last + 1], tensors[last + 1].offset + tensors[last + 1].nbytes - begin
        ):
            last += 1
        run = tensors[first : last + 1]
        memory = torch.empty(run[-1].offset + run[-1].nbytes - begin, dtype=torch.uint8)
        source = Source(self, entry, self._file_of[id(entry.shard)])
        self._read_into([(source, torch.uint8, begin, (1,), memory.data_ptr(), (1,), (memory.numel(),))])
        for small in run:
            self._small[id(small)] = memory[small.offset - begin : small.offset - begin + small.nbytes]
        return self._small[id(entry)]

    # ---- running

    def run(self) -> None:
        """Carries out all that is recorded, and returns when it has landed.

        Raises:
            CheckpointReadError: storage failed, or a file has changed; nothing more is read then.
        """
        with self._lock:
            started = time.perf_counter()
            self._start_segment()
            for segment in list(self._labels):
                self._wait(segment)
            self._started_memory.clear()
            self._wait_seconds += time.perf_counter() - started

    def _start_segment(self) -> None:
        self._check_destinations()
        for batch in self._ledger.start():
            self._submit(batch, barrier=batch.level > 0)
        self._started_memory.append(self._waiting_memory)
        self._waiting_memory = {}

    def _submit(self, batch: _C.Batch, *, barrier: bool = False, urgent: bool = False) -> int:
        if self._pipeline is None:
            self._pipeline = self._make_pipeline()
        segment = self._pipeline.submit(batch, barrier=barrier, urgent=urgent)
        if batch.label >= 0:
            self._labels[segment] = batch.label
        self._note_landed()
        return segment

    def _wait_for_label(self, label: int) -> None:
        for segment, other in list(self._labels.items()):
            if other == label:
                self._wait(segment)

    def _wait(self, segment: int) -> None:
        pipeline = self._pipeline
        assert pipeline is not None
        while not pipeline.wait(segment, _POLL_SECONDS):
            if self.on_progress is not None:
                self.on_progress(pipeline.bytes_landed)
        self._note_landed()
        if pipeline.fault() is not None:
            raise self._failure()
        if self.on_progress is not None:
            self.on_progress(pipeline.bytes_landed)

    def _note_landed(self) -> None:
        assert self._pipeline is not None
        for segment in self._pipeline.take_landed():
            label = self._labels.pop(segment, -1)
            if label >= 0:
                self._ledger.landed(label)

    def _make_pipeline(self) -> _C.Pipeline:
        config = self.config
        num_threads = config.num_threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        chunk_bytes = config.chunk_bytes or min(_CHUNK_BYTES, config.staging_bytes // (64 << 10) * (64 << 10))
        pipeline = _C.Pipeline(
            strategy=config.strategy,
            backend=config.backend,
            queue_depth=config.queue_depth or _QUEUE_DEPTH,
            num_threads=num_threads,
            chunk_bytes=chunk_bytes,
            staging_bytes=config.staging_bytes,
            merge_gap_bytes=_MERGE_GAP_BYTES if config.merge_gap_bytes is None else config.merge_gap_bytes,
            advise_hugepages=config.advise_hugepages,
        )
        for shard in self.files.shards:
            pipeline.add_file(shard.path, shard.size, shard.device, shard.inode, shard.mtime_ns)
        return pipeline

    def _check_destinations(self) -> None:
        for address, (storage, num_bytes) in self._waiting_memory.items():
            if storage.data_ptr() != address or storage.nbytes() != num_bytes:
                name = self.name_of(address) or f"a destination of {num_bytes} bytes"
                self.abort()
                raise RuntimeError(
                    f"{name}: its memory was replaced or resized after a copy into it was recorded; "
                    "call run() before changing the memory of parameters"
                )

    # ---- ending

    def abort(self) -> None:
        """Drops what has not landed, and reads nothing more. Returns when no read is in flight."""
        self.recording = False
        if self._pipeline is not None:
            self._pipeline.cancel()
            self._end_pipeline()
        self._num_dropped += self._ledger.num_dropped
        self._ledger = _C.Ledger()
        self._labels.clear()
        self._waiting_memory = {}
        self._started_memory.clear()

    def close(self) -> None:
        """Ends threads, closes files, lets go of destinations. What was not run is dropped."""
        if not self.closed:
            self.abort()
            self.closed = True
            self._small.clear()

    def _end_pipeline(self) -> None:
        if self._pipeline is not None:
            self._past.append(self._pipeline.stats())
            self._pipeline = None

    def _require_open(self, tensor: CheckpointTensor) -> None:
        if self.closed:
            name = tensor._source.entry.name
            raise RuntimeError(f"{name}: its checkpoint has been closed; copy what you need before closing it")

    def _failure(self) -> Exception:
        """The pipeline's fault as an exception; nothing is pending afterwards."""
        pipeline = self._pipeline
        assert pipeline is not None
        kind, error, file, offset, transfer, detail = pipeline.fault()
        incomplete = sorted({self._sources[id].name for id in self._ledger.pending_ids()})
        self.abort()
        shard: Shard | None = self.files.shards[file] if file >= 0 else None
        entry = self._sources[transfer] if transfer >= 0 else None
        path = shard.path if shard else None
        name = entry.name if entry else None
        rest = f"; not loaded: {listed(incomplete)}" if incomplete else ""
        if kind == "unavailable":
            return CheckpointError(f"{detail}{rest}", reason="Unavailable", path=path)
        if kind == "cancelled":
            return RuntimeError(f"the load was cancelled{rest}")
        if kind == "end_of_file":
            assert shard is not None
            problem = f"the file ended at byte {offset}, its header promises {shard.size}; it was truncated during the load"
        elif kind == "changed":
            problem = f"the file has changed since its header was read ({detail}); load again"
        else:
            what = "opening it" if kind == "open" else f"reading at byte {offset}"
            problem = f"{what} failed: {os.strerror(error)}"
        cause = OSError(error, os.strerror(error)) if error else None
        reason = {"end_of_file": "FileTruncated", "changed": "FileChanged", "open": "OpenFailed"}.get(kind, "ReadFailed")
        failure = CheckpointReadError(f"{problem}{rest}", reason=reason, path=path, tensor=name, cause=cause)
        failure.incomplete = incomplete
        return failure

    # ---- what was done

    def name_of(self, address: int) -> str | None:
        """The name given to the destination that holds the address."""
        position = bisect.bisect_right(self._names, address, key=lambda span: span[0]) - 1
        if position >= 0 and self._names[position][0] <= address < self._names[position][1]:
            return self._names[position][2]
        return None

    def coverage(self, tensor: torch.Tensor) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Byte ranges, from the first byte of a contiguous tensor, that nothing writes; and that transfers write twice."""
        begin, end = _span(tensor)
        gaps, doubles = self._ledger.coverage(begin, end - begin)
        return [(a - begin, b - begin) for a, b in gaps], [(a - begin, b - begin) for a, b in doubles]

    def fill_report(self, report: LoadReport) -> None:
        """Adds what the program did."""
        runs = [*self._past, *([self._pipeline.stats()] if self._pipeline is not None else [])]
        report.num_tensors = len(self._used.union(entry.name for entry in self._sources))
        report.num_dropped = self._num_dropped + self._ledger.num_dropped
        report.num_forced = len(self._forced)
        report.seconds["wait"] = self._wait_seconds
        for stats in runs:
            for field in ("num_transfers", "bytes_needed", "bytes_read", "in_place_bytes"):
                setattr(report, field, getattr(report, field) + stats[field])
            report.fallbacks += [text for text in stats["fallbacks"] if text not in report.fallbacks]
            for shard, file in zip(self.files.shards, stats["files"], strict=True):
                report.direct_bytes += file["direct_bytes"]
                report.buffered_bytes += file["buffered_bytes"]
                if file["direct_bytes"] + file["buffered_bytes"]:
                    report.files.append(_file_report(shard, file, stats))
        for text in report.fallbacks:
            logger.warning("%s", text)


def _file_report(shard: Shard, file: dict[str, object], stats: dict[str, object]) -> FileReport:
    direct, buffered = file["direct_bytes"], file["buffered_bytes"]
    if direct and buffered:
        strategy, reader = "mixed", f"{stats['direct_reader']} + {stats['buffered_reader']}"
        reason = "partly in the page cache"
    elif direct:
        strategy = "direct" if file["direct_proven"] else "direct (unproven)"
        reader = str(stats["direct_reader"])
        reason = str(file["direct_reason"]) or f"O_DIRECT works here, aligned to {file['offset_alignment']} bytes"
    else:
        strategy, reader = "buffered", str(stats["buffered_reader"])
        reason = "in the page cache" if file["direct_usable"] else str(file["direct_reason"]) or "as configured"
    return FileReport(
        path=shard.path,
        bytes_needed=0,
        bytes_read=int(direct) + int(buffered),  # type: ignore[call-overload]
        reader=reader,
        strategy=strategy,
        reason=reason,
    )


def _check_copy(dst: torch.Tensor, src: CheckpointTensor) -> None:
    """Raises what torch raises where a copy's shapes do not fit."""
    torch.empty(dst.shape, device="meta").copy_(torch.empty(src._shape, device="meta"))


def _addressable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() > 0


def _region(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and behind the last one. Not for empty tensors."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


def _view_of_bytes(flat: torch.Tensor, tensor: CheckpointTensor, offset: int) -> torch.Tensor:
    """A copy of the tensor's elements out of the bytes of its entry; any alignment."""
    item = tensor._file_dtype.itemsize
    shape = (*tensor._shape, item)
    strides = (*(stride * item for stride in tensor._file_strides), 1)
    values = flat.as_strided(shape, strides, flat.storage_offset() + offset).contiguous()
    return values.view(tensor._file_dtype).view(tensor._shape)


def _is_nested(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements can be walked in the order of the file; the core's source_is_nested()."""
    extent = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda dim: dim[1]):
        if size > 1 and stride:
            if stride < extent:
                return False
            extent = stride * (size - 1) + extent
    return True


def _extends(entry: TensorEntry, run_bytes: int) -> bool:
    return entry.nbytes <= _SMALL_BYTES and run_bytes <= _SMALL_RUN_BYTES
