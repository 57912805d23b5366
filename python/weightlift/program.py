"""Program: one load, recorded transfer by transfer and run by the native pipeline.

Recording fills a ledger. From time to time what has gathered there, a segment, is handed to the pipeline, which reads
it while recording goes on. Whatever someone wants to look at before its turn is run at once, that and nothing else.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from . import _C, devices, unanswered
from ._logging import logger
from .config import MiB, ResolvedConfig
from .pending import PendingOp, has_rows, run_op
from .prefetch import ReadAhead
from .regions import addressable, is_nested, region_of, span_of, whole_storage
from .report import FileReport, LoadReport
from .settings import CHUNK_UNIT, Settings, settle
from .sharing import SharedTensors, reads_along
from .storage import failure, file_report, make_pipeline, max_open_files
from .tensor import CheckpointTensor, Source, contiguous_strides, empty, storage_of
from .turns import Turn
from .values import SMALL_BYTES, SmallValues

if TYPE_CHECKING:
    from .entries import CheckpointFiles, Shard, TensorEntry
    from .open_ahead import OpenAhead

_Error = TypeVar("_Error", bound=BaseException)

# A segment is handed over when it holds this many bytes, or fewer when the stream of tensors leaves a shard.
_SEGMENT_BYTES = 64 * MiB
_SHARD_SEGMENT_BYTES = 16 * MiB
# Into so many parts is cut what is handed over late, and is to land bit by bit: each costs some milliseconds.
_MAX_PARTS = 16
# How often waiting looks up, for Ctrl-C and for progress.
_POLL_SECONDS = 0.05

# How the core knows element types (csrc/transform/element.h): by size where elements are moved, by format where numbers
# are converted.
_TYPE_BY_SIZE = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
_FORMATS = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    getattr(torch, "float8_e8m0fnu", None),  # since torch 2.7
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)
_TYPE_BY_DTYPE = {dtype: code for code, dtype in enumerate(_FORMATS, len(_TYPE_BY_SIZE)) if dtype is not None}


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _types(src: torch.dtype, dst: torch.dtype) -> tuple[int, int] | None:
    """The core's types for a copy, or None where it can't convert."""
    if src == dst or (src.itemsize == dst.itemsize and _is_integer(src) and _is_integer(dst)):
        code = _TYPE_BY_SIZE[src.itemsize]
        return code, code
    types = (_TYPE_BY_DTYPE.get(src, -1), _TYPE_BY_DTYPE.get(dst, -1))
    return types if min(types) >= 0 and _C.can_convert(*types) else None


_TYPES: dict[tuple[torch.dtype, torch.dtype], tuple[int, int] | None] = {}

# Programs that are watched now; of all threads, so that only a copy of it can be iterated over.
watched: list[Program] = []

# Order of locks: whoever holds the lock of a program may ask for that of another only when it took this one before.
_overwriting = threading.RLock()

_programs: weakref.WeakSet[Program] = weakref.WeakSet()


class Program:
    """Records the copies of one load, and runs them.

    While it is `recording`, copies gather; else each is carried out at once. Any thread may record: order is the order
    in which calls arrive.
    """

    def __init__(self, files: CheckpointFiles, config: ResolvedConfig, ahead: OpenAhead | None = None) -> None:
        """`ahead` has opened some of the files."""
        self.files = files
        self.config = config
        self.recording = False
        self.closed = False
        # Called with the bytes that have landed, and those that are needed as far as known.
        self.on_progress: Callable[[int, int], None] | None = None
        self.tracks_coverage = False
        # What is to be done when recording has ended, one after the other, by a key of whoever made it; None: there is
        # nobody who will.
        self.turns: dict[object, Turn] | None = None
        self._file_of = {id(shard): index for index, shard in enumerate(files.shards)}
        self._ledger = _C.Ledger()
        self._pipeline: _C.Pipeline | None = None
        self._lock = threading.RLock()
        self._sources: list[TensorEntry] = []  # of each transfer, by id
        # The memory of destinations, with its address and size. Held until all has landed, so that it can't be freed or
        # used again.
        self._waiting_memory: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
        # Of what has been started, with the last segment that writes to it.
        self._started_memory: list[tuple[int, dict[int, tuple[torch.UntypedStorage, int, int]]]] = []
        # Ops into GPUs' memory, and what they hold there: until all has landed.
        self._waiting_ops: list[_C.Op] = []
        self._started_ops: list[tuple[int, list[_C.Op]]] = []
        self._device_caller = devices.DeviceCaller()
        self._last_segment = -1
        # The last transfer into each storage; and of those started in parts, the last segment of their part.
        self._last_write: dict[int, int] = {}
        self._part_of: dict[int, int] = {}
        # Tensors that are being read into on the spot. One stays here when Ctrl-C ends the wait for it.
        self._reading: dict[int, torch.Tensor] = {}
        self._labels: dict[int, int] = {}  # segment -> its batch in the ledger
        self._max_open_files = max_open_files()
        self._waiting_files: set[int] = set()  # of what has not been started
        self._open_files: dict[int, int] = {}  # segment -> how many files are open for it
        self._last_file = -1
        self._hold_until = 0.0
        self._ahead = ahead  # until the first read
        self._read_ahead: ReadAhead | None = None  # from the first read on
        self._settings: Settings | None = None  # the same
        self._shared: SharedTensors | None = None  # where other processes read along
        self._num_noted = 0  # of _sources, in _shared
        self._small = SmallValues()
        self._names: list[tuple[int, int, str]] = []
        self._forced: set[str] = set()
        self._used: set[str] = set()
        self._num_dropped = 0
        self._num_whole_ops = 0
        self._whole_op_bytes = 0
        self.wait_seconds = 0.0
        self._past: list[dict[str, object]] = []
        self._fallbacks: dict[str, None] = {}  # an ordered set
        self._failed: BaseException | None = None  # what ended a recording; nothing is recorded or run after it
        _programs.add(self)

    @property
    def settings(self) -> Settings:
        """What was decided for this load, now at the latest."""
        if self._settings is None:
            self._settings = settle(self.config, self.files.shards)
        return self._settings

    def leave_staging(self, num_bytes: int) -> None:
        """Takes that much of its staging memory away. To be called before anything is read."""
        left = self.settings.staging_bytes - num_bytes
        chunk_bytes = min(self.settings.chunk_bytes, left // CHUNK_UNIT * CHUNK_UNIT)
        self._settings = replace(self.settings, staging_bytes=left, chunk_bytes=chunk_bytes)

    # ---- recording

    def tensor(self, name: str, ranges: Sequence[tuple[int, int, int]] = ()) -> CheckpointTensor:
        """The whole tensor of that name, or a part, as of `CheckpointTensor.of_entry`. Raises KeyError."""
        entry = self.files.tensors[name]
        return CheckpointTensor.of_entry(Source(self, entry, self._file_of[id(entry.shard)]), ranges)

    def start_recording(self, *, hold_seconds: float) -> None:
        """From here on copies gather. Nothing is read for up to `hold_seconds`, unless someone needs values."""
        self.recording = True
        self._hold_until = time.monotonic() + hold_seconds

    def track_coverage(self) -> None:
        """From here on writes are remembered, for `coverage`."""
        self.tracks_coverage = True
        self._ledger.track_writes()

    def name_destinations(self, names: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Says what errors and coverage shall call these tensors."""
        spans = []
        for name, tensor in names:
            if tensor.numel() and devices.index_of(tensor) is not None:
                begin, end = span_of(tensor)
                spans.append((begin, end, name))
        self._names = sorted(spans)

    def record(self, dst: torch.Tensor, src: CheckpointTensor) -> torch.Tensor:
        """`dst.copy_(src)`.

        Raises:
            RuntimeError: shapes do not fit, in torch's words; the program is closed.
        """
        if dst.shape != src._shape or dst.is_meta or dst.numel() == 0:
            _check_copy(dst, src)
            if dst.is_meta or dst.numel() == 0:
                return dst
        for program in tuple(watched):
            if program is not self:
                program.before_read(dst)  # order among programs: what the others have pending there is first
        self._record(dst, src)
        return dst

    def record_whole(self, dst: torch.Tensor, name: str) -> None:
        """Copies a tensor of the checkpoint into one of the same shape and strides, which nobody else uses yet.

        Unlike `record`, also into tensors that overlap themselves; the memory between their elements is written too.
        """
        entry = self.files.tensors[name]
        src = self.tensor(name)
        if entry.strides is not None:
            src = CheckpointTensor.of_span(src._source)
            dst = dst.as_strided(src._shape, (1,))
        self.record(dst, src)

    def _record(self, dst: torch.Tensor, src: CheckpointTensor) -> None:
        if src._pieces is not None and dst.shape == src._shape and src._source.real is None and not _repeats(dst):
            start = 0
            for piece in src._pieces:
                size = piece._shape[src._dim]
                if size:
                    self._record(dst.narrow(src._dim, start, size), piece)
                start += size
            return
        with self._lock:
            self._require_open(src)
            is_recorded = self._record_native(dst, src)
        if not is_recorded:
            self._copy_by_torch(dst, src)

    def _copy_by_torch(self, dst: torch.Tensor, src: CheckpointTensor) -> None:
        """What the core can't do (other devices, other conversions, odd geometries), now."""
        if dst.device.type == "cuda" and (reason := devices.refusal(dst.device.index)):
            self._fallbacks[f"copying to {dst.device} by torch, tensor by tensor, which is slower: {reason}"] = None
        self.overwrite(dst, lambda: dst.copy_(src._read()))
        self._used.add(src._source.entry.name)

    def _record_native(self, dst: torch.Tensor, src: CheckpointTensor) -> bool:
        source = src._source
        strides = src._file_strides
        if source.real is not None or src._pieces is not None or not addressable(dst) or dst.is_neg() or dst.is_conj():
            return False
        if src._op is not None:
            return self._record_op(dst, src, src._op)
        seen, filed, wanted = src._dtype, src._file_dtype, dst.dtype
        if seen != filed and seen != wanted:
            return False  # two conversions in a row
        key = (filed, wanted)
        if key not in _TYPES:
            _TYPES[key] = _types(filed, wanted)
        types = _TYPES[key]
        if types is None:
            return False
        shape = src._shape
        if shape != dst.shape:
            strides = (0,) * (dst.dim() - len(shape)) + tuple(
                0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)
            )
            shape = tuple(dst.shape)
        device = self._hold(dst)
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
            device,
        )
        if waiting < 0:
            return False  # overlapping windows, on either side
        self._after_recording(source, waiting)
        return True

    def _record_op(self, dst: torch.Tensor, src: CheckpointTensor, pending: PendingOp) -> bool:
        if dst.shape != src._shape or dst.dtype != src._dtype or not has_rows(dst):
            return False
        op = pending.bind(dst)
        row_stride = None if op is None else pending.row_stride(op)
        if op is None or row_stride is None:
            return False
        device = self._hold(dst)
        if device != devices.HOST:
            self._waiting_ops.append(op)
        source = pending.source._source
        waiting = self._ledger.record_op(
            len(self._sources), source.file, pending.source._file_offset, row_stride, op, device
        )
        self._after_recording(source, waiting)
        return True

    def _hold(self, dst: torch.Tensor) -> int:
        """Keeps the memory of a destination until what is recorded now has landed. Returns whose it is."""
        if unanswered.kept and unanswered.may_be_written(span_of(dst)):
            raise RuntimeError(
                f"{self.name_of(dst.data_ptr()) or 'a destination'}: reads of an earlier load, which storage has not "
                "answered, may yet write to its memory; load into new memory"
            )
        storage = storage_of(dst)
        key, memory = storage._cdata, (storage, storage.data_ptr(), storage.nbytes())
        self._last_write[key] = len(self._sources)
        if self._waiting_memory.setdefault(key, memory)[1:] != memory[1:]:
            self._check_destinations()  # raises where copies into the old memory are pending
            self._waiting_memory[key] = memory
        device = devices.index_of(dst)
        assert device is not None  # it is addressable
        if device != devices.HOST:
            self._device_caller.note_stream(device)
        return device

    def _after_recording(self, source: Source, waiting: int) -> None:
        """Runs what was just recorded, or hands over what has gathered where that is enough."""
        self._sources.append(source.entry)
        self._waiting_files.add(source.file)
        if not self.recording:
            self.run()
        elif len(self._waiting_files) == self._max_open_files:
            self._start_segment()
        elif waiting >= _SHARD_SEGMENT_BYTES and (waiting >= _SEGMENT_BYTES or source.file != self._last_file):
            if self._hold_until and time.monotonic() >= self._hold_until:
                self._hold_until = 0.0
            if not self._hold_until:
                self._start_segment()
        self._last_file = source.file

    def note_copy(self, dst: torch.Tensor, src: CheckpointTensor) -> None:
        """Takes `dst` for written, with what is made of `src` in a later turn."""
        self._used.add(src._source.entry.name)
        self.note_write(dst)

    # ---- looking at destinations before their turn

    @property
    def has_pending(self) -> bool:
        return bool(self._ledger.has_pending)

    def before_read(self, tensor: torch.Tensor) -> None:
        """Runs what has to land before the values of a real tensor may be looked at."""
        # The ledger is asked without the lock, under the GIL: nobody waits for a load that has nothing pending here.
        if self._ledger.has_pending and addressable(tensor) and self._ledger.needed_for(*region_of(tensor)):
            with self._lock:
                self._run_now(self._ledger.needed_for(*region_of(tensor)))

    def before_look(self, tensor: torch.Tensor) -> None:
        """`before_read`, for this program and every other that is watched."""
        for program in dict.fromkeys((self, *watched)):
            program.before_read(tensor)

    def before_resize(self, tensor: torch.Tensor) -> None:
        """Runs what writes to any part of a real tensor's storage, before its memory may be replaced."""
        whole = whole_storage(tensor)
        key = storage_of(tensor)._cdata
        if key not in self._waiting_memory:
            self.before_read(whole)
            return
        with self._lock:
            self.before_read(whole)
            self._waiting_memory.pop(key, None)  # its address may soon be another's

    def note_write(self, tensor: torch.Tensor) -> None:
        """Takes all of a real tensor for written, by other means than a copy."""
        if self.tracks_coverage and addressable(tensor):
            with self._lock:
                self._ledger.add_write(*region_of(tensor))

    def overwrite(self, tensor: torch.Tensor, write: Callable[[], Any]) -> Any:
        """Does a write that replaces every value of a real tensor, and looks at none of them."""
        if not (self.tracks_coverage or self._ledger.has_pending) or not addressable(tensor):
            return write()
        region = region_of(tensor)
        if self._ledger.needed_for(*region):
            with _overwriting, self._lock:  # `write` may come to the locks of other programs
                ids = self._ledger.needed_for(*region, overwrites=True)
                if ids:
                    self._run_now(ids)
                result = write()
                self._ledger.drop_inside(*region)
        else:
            result = write()
        self.note_write(tensor)
        return result

    def _run_now(self, ids: list[int]) -> None:
        self._check_destinations()
        for label in self._ledger.batches_of(ids):
            self._wait_for_label(label)
        self._before_reading(self._sources[id].shard for id in ids)
        for batch in self._ledger.start_only(ids):
            self._forced.update(self._sources[id].name for id in batch.ids())
            self._wait(self._submit(batch, urgent=True))

    # ---- values of checkpoint tensors

    def read(self, tensor: CheckpointTensor) -> torch.Tensor:
        """The values of a checkpoint tensor that is backed by its file, read now."""
        self._require_open(tensor)
        source = tensor._source
        shape, strides = tensor._shape, tensor._file_strides
        entry = source.entry
        # Real memory, whatever modes the caller has set: some of it is kept for others.
        with self._lock, torch._C._DisableTorchDispatch():
            if self.recording:
                self._forced.add(entry.name)
            self._used.add(entry.name)
            if tensor._op is not None:
                return self._read_op(tensor, tensor._op)
            if 0 in shape or (entry.nbytes > SMALL_BYTES and is_nested(shape, strides)):
                values = empty(shape, contiguous_strides(shape), tensor._file_dtype)
                self._read_into(values, source, tensor._file_offset, strides)
            else:
                if entry.nbytes <= SMALL_BYTES:
                    flat = self._small.bytes_of(entry, self._read_bytes)
                else:  # overlapping windows: of the whole
                    flat = empty((entry.nbytes,), (1,), torch.uint8)
                    self._read_bytes(flat, entry, entry.offset)
                values = _copy_of_bytes(flat, tensor, tensor._file_offset - entry.offset)
            return values.to(tensor._dtype)

    def _read_into(self, values: torch.Tensor, source: Source, offset: int, strides: Sequence[int]) -> None:
        """Fills a contiguous tensor with the elements at a byte offset of the file, now."""
        if not values.numel():
            return
        code = _TYPE_BY_SIZE[values.dtype.itemsize]
        batch = _C.Batch()
        batch.add(
            len(self._sources),
            source.file,
            code,
            offset,
            tuple(strides),
            code,
            values.data_ptr(),
            values.stride(),
            tuple(values.shape),
        )
        self._fill(values, batch, source)

    def _fill(self, values: torch.Tensor, batch: _C.Batch, source: Source) -> None:
        """Runs one transfer into a tensor, now."""
        self._before_reading((source.entry.shard,))
        self._sources.append(source.entry)
        self._reading[id(values)] = values
        self._wait(self._submit(batch, urgent=True))
        del self._reading[id(values)]

    def _read_op(self, tensor: CheckpointTensor, pending: PendingOp) -> torch.Tensor:
        """What an op makes of a tensor, now."""
        source = pending.source
        values = empty(tensor._shape, contiguous_strides(tensor._shape), tensor._dtype)
        if not values.numel():
            return values
        op = pending.bind(values)
        assert op is not None
        row_stride = pending.row_stride(op)
        held = values.nbytes
        if row_stride is None:
            held += source.nbytes
            run_op(op, source._read())
        else:
            batch = _C.Batch()
            batch.add_op(len(self._sources), source._source.file, source._file_offset, row_stride, op)
            self._fill(values, batch, source._source)
        if held > self.settings.chunk_bytes:
            self._num_whole_ops += 1
            self._whole_op_bytes = max(self._whole_op_bytes, held)
        return values

    def _read_bytes(self, memory: torch.Tensor, entry: TensorEntry, offset: int) -> None:
        self._read_into(memory, Source(self, entry, self._file_of[id(entry.shard)]), offset, (1,))

    # ---- running

    def run(self) -> None:
        """Carries out all that is recorded, and returns when it has landed.

        Raises:
            CheckpointReadError: storage failed, or a file has changed; nothing more is read then.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            started = time.perf_counter()
            self._start_segment()
            self._wait_up_to(self._last_segment)
            self.wait_seconds += time.perf_counter() - started

    def start(self, *, in_parts: bool = False) -> int:
        """Starts to carry out all that is recorded, and returns at once: a number for `finish`.

        Args:
            in_parts: what was recorded first is to land before the rest does; see `landing`.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            self._start_segment(in_parts=in_parts)
            return self._last_segment

    def finish(self, started: int) -> None:
        """Returns when what `start` gave this number for has landed, and all that was started before.

        Raises:
            CheckpointReadError: as `run`.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            begun = time.perf_counter()
            self._wait_up_to(started)
            self.wait_seconds += time.perf_counter() - begun

    def landing(self) -> dict[int, int]:
        """When copies that have been started will have landed: the number for `finish`, by the storage's `_cdata`."""
        with self._lock:
            numbers = {key: segment for segment, memory in self._started_memory for key in memory}
            parts = ((key, self._part_of.get(last)) for key, last in self._last_write.items() if key in numbers)
            return numbers | {key: part for key, part in parts if part is not None}

    def _wait_up_to(self, last: int) -> None:
        for segment in list(self._labels):
            if segment <= last:
                self._wait(segment)
        self._started_memory = [(segment, memory) for segment, memory in self._started_memory if segment > last]
        self._started_ops = [(segment, ops) for segment, ops in self._started_ops if segment > last]

    def _before_reading(self, shards: Iterable[Shard]) -> None:
        """What the strategy does before tensors of these are read."""
        self._decide().before(shards)

    def _decide(self, *, only_decide: bool = False) -> ReadAhead:
        """What the strategy comes to, from here on; `only_decide`: nothing is read yet."""
        if self._read_ahead is None:
            wanted = {id(entry.shard) for entry in self.files.tensors.values()}
            shards = [shard for shard in self.files.shards if id(shard) in wanted]
            self._read_ahead = ReadAhead(self.config, shards, only_decide=only_decide)
            if reads_along(self.config, self._read_ahead.reader):
                self._shared = SharedTensors(self.files)
        return self._read_ahead

    def _shared_tensors(self, batch: _C.Batch) -> list[tuple[int, int, int]] | None:
        """What the core is to know about those of a batch: file, begin and end."""
        if self._shared is None:
            return None
        self._shared.note_recorded(self._sources[self._num_noted :])
        self._num_noted = len(self._sources)
        entries = {id(entry): entry for entry in (self._sources[id_] for id_ in batch.ids())}.values()
        return [
            (self._file_of[id(entry.shard)], entry.offset, entry.offset + entry.nbytes)
            for entry in self._shared.among(entries)
        ]

    def _start_segment(self, *, in_parts: bool = False) -> None:
        self._check_destinations()
        if self._waiting_files:
            self._before_reading(self.files.shards[file] for file in sorted(self._waiting_files))
        while self._open_files and sum(self._open_files.values()) + len(self._waiting_files) > self._max_open_files:
            self._wait(next(iter(self._open_files)))
        if in_parts:
            ids = self._ledger.pending_ids()
            num_bytes = sum(self._sources[id_].nbytes for id_ in ids)
            step = -(-len(ids) // max(1, min(_MAX_PARTS, num_bytes // _SEGMENT_BYTES))) or 1
            for first in range(0, len(ids), step):
                batches = self._ledger.start_only(ids[first : first + step])
                started = [id_ for batch in batches for id_ in batch.ids()]
                self._start_batches(batches)
                self._part_of.update(dict.fromkeys(started, self._last_segment))
        self._start_batches(self._ledger.start())
        self._waiting_files.clear()
        self._started_memory.append((self._last_segment, self._waiting_memory))
        self._waiting_memory = {}
        if self._waiting_ops:
            self._started_ops.append((self._last_segment, self._waiting_ops))
            self._waiting_ops = []

    def _start_batches(self, batches: Iterable[_C.Batch]) -> None:
        for batch in batches:
            num_files = len({id(self._sources[id_].shard) for id_ in batch.ids()})
            segment = self._submit(batch, barrier=batch.level > 0)
            if segment in self._labels:
                self._open_files[segment] = num_files

    def _submit(self, batch: _C.Batch, *, barrier: bool = False, urgent: bool = False) -> int:
        try:
            if self._pipeline is None:
                assert self._read_ahead is not None
                self._pipeline = make_pipeline(
                    self.config, self.settings, self.files.shards, self._read_ahead.reader, self._ahead
                )
            segment = self._pipeline.submit(
                batch,
                barrier=barrier,
                urgent=urgent,
                shared=self._shared_tensors(batch),
                device_caller=self._device_caller,
            )
            self._last_segment = segment
            if batch.label >= 0:
                self._labels[segment] = batch.label
        except BaseException as error:  # no memory, no threads, Ctrl-C: the ledger has let go of what will never land
            self._end(error)
            raise
        self._note_landed()
        return segment

    def _wait_for_label(self, label: int) -> None:
        for segment, other in list(self._labels.items()):
            if other == label:
                self._wait(segment)

    def _wait(self, segment: int) -> None:
        # No second reference to the pipeline: an exception keeps the frame, which would keep the pipeline, and its
        # threads, after abort().
        assert self._pipeline is not None
        while not self._pipeline.wait(segment, _POLL_SECONDS):
            self._tell_progress()
        self._note_landed()
        fault = self._pipeline.fault()
        if fault is not None:
            raise self._end_by(fault)
        self._tell_progress()

    def _tell_progress(self) -> None:
        if self.on_progress is not None and self._pipeline is not None:
            needed = self._pipeline.stats()["bytes_needed"]
            # What two transfers need is read once and lands twice.
            self.on_progress(min(self._pipeline.bytes_landed, needed), needed)

    def _note_landed(self) -> None:
        assert self._pipeline is not None
        for segment in self._pipeline.take_landed():
            self._open_files.pop(segment, None)
            label = self._labels.pop(segment, -1)
            if label >= 0:
                self._ledger.landed(label)

    def _check_destinations(self) -> None:
        for storage, address, num_bytes in self._waiting_memory.values():
            changed = storage.data_ptr() != address or storage.nbytes() != num_bytes
            if changed and self._ledger.needed_for(address, 1, (num_bytes,), (1,)):
                name = self.name_of(address) or f"a destination of {num_bytes} bytes"
                raise self._end(
                    RuntimeError(
                        f"{name}: its memory was replaced or resized after a copy into it was recorded; "
                        "call run() before changing the memory of parameters"
                    )
                )

    # ---- ending

    def abort(self) -> str | None:
        """Drops what has not landed, and reads nothing more. Returns when no read is in flight; or after a while, where
        storage does not answer, with what is kept until it does."""
        self.recording = False
        pipeline = self._pipeline
        if pipeline is not None:
            pipeline.cancel()  # so that a thread that waits for it lets go of the lock
            del pipeline
        with self._lock:
            try:
                return self._end_pipeline()
            finally:
                self._drop()

    def __del__(self) -> None:
        # Before the destinations go.
        if getattr(self, "_pipeline", None) is not None:
            self.abort()

    def _drop(self) -> None:
        self._num_dropped += self._ledger.num_dropped
        self._ledger = _C.Ledger()
        self._labels.clear()
        self._open_files.clear()
        self._waiting_files.clear()
        self._waiting_memory = {}
        self._started_memory.clear()
        self._waiting_ops = []
        self._started_ops.clear()
        self._device_caller = devices.DeviceCaller()
        self._last_segment = -1
        self._reading.clear()

    def _part_from_parent(self) -> None:
        """In a forked child, where no thread of the parent is, and what they read does not arrive. What has not begun
        yet can go on."""
        self._lock = threading.RLock()
        if self._pipeline is not None:
            self._pipeline = None
            if self._ledger.has_pending:
                self._failed = RuntimeError(
                    "this load was under way when the process was forked: it goes on in the parent, and not here; fork "
                    "before it or after it, or open the checkpoint again"
                )
            self._drop()

    def _end_by(self, fault: tuple[str, int, int, int, int, str]) -> Exception:
        """`_end` because of the pipeline's fault."""
        incomplete = sorted({self._sources[id].name for id in self._ledger.pending_ids()})
        was_recording = self.recording
        kept = self.abort()
        error = failure(fault, self.files.shards, self._sources, self.config, incomplete, kept)
        if was_recording:
            self._failed = error
        return error

    def _end(self, failure: _Error) -> _Error:
        """Drops what is pending because of a failure. Whoever catches that inside the block can't end it as if all were
        well."""
        if self.recording:
            self._failed = failure
        self.abort()
        return failure

    def close(self) -> None:
        """Ends threads, closes files, lets go of destinations. What was not run is dropped."""
        if not self.closed:
            self.abort()
            if self._ahead is not None:
                self._ahead.close()
            if self._read_ahead is not None:
                self._read_ahead.close()
            self.closed = True
            self._small.clear()
            self.turns = None
            self._failed = None  # its traceback holds the frames of the caller, and so the model

    def _end_pipeline(self) -> str | None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is None:
            return None
        # Of what waits, some may be on its way: what someone looked at, or a part of what was being started.
        memory = [self._waiting_memory, *(started for _, started in self._started_memory)]
        storages = [storage for held in memory for storage, _, _ in held.values()]
        storages += map(storage_of, (*self._reading.values(), *self._device_caller.scratch))
        try:
            ops = [*self._waiting_ops, *(op for _, started in self._started_ops for op in started)]
            return unanswered.end(pipeline, storages, ops)
        finally:
            stats = pipeline.stats()
            del pipeline  # an exception keeps the frame, which would keep it
            for text in stats["fallbacks"]:
                logger.warning("%s", text)
            self._past.append(stats)

    def _require_open(self, tensor: CheckpointTensor) -> None:
        if tensor._source.real is not None:
            return  # it has landed, and needs its file no more
        if self.closed:
            name = tensor._source.entry.name
            raise RuntimeError(
                f"{name}: its checkpoint has been closed, and its bytes are still on disk; before closing it copy_() "
                "what you need into tensors of your own (clone(), to() and cat() stay on disk too), or use load_file()"
            )
        if self._failed is not None:
            raise self._failed

    # ---- what was done

    def name_of(self, address: int) -> str | None:
        """The name given to the destination that holds the address."""
        position = bisect.bisect_right(self._names, address, key=lambda span: span[0]) - 1
        if position >= 0 and self._names[position][0] <= address < self._names[position][1]:
            return self._names[position][2]
        return None

    def coverage(self, tensor: torch.Tensor) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Byte ranges, from the first byte of a dense tensor, that nothing writes; and that transfers write twice."""
        begin, end = span_of(tensor)
        gaps, doubles = self._ledger.coverage(begin, end - begin)
        return [(a - begin, b - begin) for a, b in gaps], [(a - begin, b - begin) for a, b in doubles]

    def used_tensors(self) -> set[str]:
        """Names of the checkpoint's tensors that were copied from or looked at."""
        return self._used.union(entry.name for entry in self._sources)

    def _notes(self) -> list[str]:
        """What was decided before reading, and why."""
        assert self._read_ahead is not None
        shared = [self._shared.note] if self._shared is not None else []
        return [*self._read_ahead.notes, *self.settings.notes, *shared]

    def fill_report(self, report: LoadReport) -> None:
        """Adds what the program did."""
        files: dict[str, FileReport] = {}
        runs = [*self._past, *([self._pipeline.stats()] if self._pipeline is not None else [])]
        report.num_tensors = len(self.used_tensors())
        report.num_dropped = self._num_dropped + self._ledger.num_dropped
        report.num_forced = len(self._forced)
        report.seconds["wait"] = self.wait_seconds
        if self._read_ahead is not None:
            report.strategy_notes += self._notes()
        report.fallbacks += self._fallbacks
        report.num_whole_tensor_ops = self._num_whole_ops
        report.whole_tensor_bytes = self._whole_op_bytes
        for stats in runs:
            report.num_whole_tensor_ops += stats["num_whole_ops"]
            report.whole_tensor_bytes = max(report.whole_tensor_bytes, stats["whole_op_bytes"])
            report.device_scratch_bytes = max(report.device_scratch_bytes, stats["device_scratch_bytes"])
            for field in ("num_transfers", "bytes_needed", "bytes_read", "num_reads", "in_place_bytes", "device_bytes"):
                setattr(report, field, getattr(report, field) + stats[field])
            report.fallbacks += [text for text in stats["fallbacks"] if text not in report.fallbacks]
            for shard, file in zip(self.files.shards, stats["files"], strict=True):
                report.direct_bytes += file["direct_bytes"]
                report.buffered_bytes += file["buffered_bytes"]
                if file["direct_bytes"] + file["buffered_bytes"]:
                    part = file_report(shard, file, stats)
                    if files.setdefault(shard.path, part) is not part:  # a pipeline was aborted, another went on
                        files[shard.path].bytes_read += part.bytes_read
        report.files += files.values()


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether elements are the same memory, as torch sees that: such a tensor can't be written."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_copy(dst: torch.Tensor, src: CheckpointTensor) -> None:
    """Raises what torch raises where a copy's shapes do not fit; a note says which tensor it is."""
    try:
        torch.empty(dst.shape, device="meta").copy_(torch.empty(src._shape, device="meta"))
    except RuntimeError as error:
        if hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(f"while copying {src._source.entry.name} of {src._source.entry.shard.path}")
        raise


def _copy_of_bytes(flat: torch.Tensor, tensor: CheckpointTensor, offset: int) -> torch.Tensor:
    """A copy of the tensor's elements out of the bytes of its entry; any alignment."""
    item = tensor._file_dtype.itemsize
    shape = (*tensor._shape, item)
    strides = (*(stride * item for stride in tensor._file_strides), 1)
    values = flat.as_strided(shape, strides, flat.storage_offset() + offset)
    return values.clone(memory_format=torch.contiguous_format).view(tensor._file_dtype).view(tensor._shape)


def _part_from_parent() -> None:
    global _overwriting
    _overwriting = threading.RLock()
    for program in _programs:
        program._part_from_parent()


os.register_at_fork(after_in_child=_part_from_parent)
