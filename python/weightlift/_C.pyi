"""
weightlift's core: see csrc/README.md
"""
from __future__ import annotations
import collections.abc
import os
import typing
__all__: list[str] = ['Batch', 'Ledger', 'Op', 'OpenedFile', 'Pipeline', 'ReadPlanner', 'amax', 'can_convert', 'cuda_info', 'e4m3fn_to_e4m3fnuz', 'launch_copy', 'make_cold', 'make_warm', 'marlin_repack', 'measure_reads', 'probe_direct', 'probe_uring', 'quantize', 'quantize_with', 'quantize_with_scales_at', 'requantize_fp8', 'requantize_fp8_at', 'residency_method', 'resident_bytes', 'simd']
class Op:
    """
    A fused op, bound to its outputs. See csrc/transform/op.h.
    """
    def hold(self, kept: typing.Any) -> None:
        """
        Keeps a tensor that the op refers to alive, for as long as this object is.
        """
    def launch(self, address: typing.SupportsInt | typing.SupportsIndex, row_stride: typing.SupportsInt | typing.SupportsIndex, stream: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Queues all of it on a cudaStream_t of the current device, over rows in its memory.
        """
    def run(self, address: typing.SupportsInt | typing.SupportsIndex, row_stride: typing.SupportsInt | typing.SupportsIndex, num_threads: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Carries out all of it, over rows in memory.
        """
    @property
    def granule_rows(self) -> int:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def needs_whole_source(self) -> bool:
        ...
    @property
    def num_rows(self) -> int:
        ...
    @property
    def row_bytes(self) -> int:
        ...
class Batch:
    """
    Transfers with disjoint destinations, on their way to a Pipeline.
    """
    def __init__(self) -> None:
        ...
    def __len__(self) -> int:
        ...
    def add(self, id: typing.SupportsInt | typing.SupportsIndex, file: typing.SupportsInt | typing.SupportsIndex, src_type: typing.SupportsInt | typing.SupportsIndex, src_offset: typing.SupportsInt | typing.SupportsIndex, src_strides: tuple[int, ...], dst_type: typing.SupportsInt | typing.SupportsIndex, dst: typing.SupportsInt | typing.SupportsIndex, dst_strides: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """
        Adds a transfer. Strides in elements, offset in bytes.
        """
    def add_op(self, id: typing.SupportsInt | typing.SupportsIndex, file: typing.SupportsInt | typing.SupportsIndex, src_offset: typing.SupportsInt | typing.SupportsIndex, src_row_stride: typing.SupportsInt | typing.SupportsIndex, op: Op) -> None:
        """
        Adds an op, of rows of the file that lie src_row_stride bytes apart.
        """
    def ids(self) -> list[int]:
        ...
    def take(self, ids: collections.abc.Set[typing.SupportsInt | typing.SupportsIndex]) -> Batch:
        """
        Moves the transfers with these ids, as far as they are here, into a batch of their own.
        """
    @property
    def label(self) -> int:
        ...
    @property
    def level(self) -> int:
        ...
class Ledger:
    """
    Recorded transfers that have not landed, and the order they must keep.
    """
    def __init__(self) -> None:
        ...
    def add_write(self, address: typing.SupportsInt | typing.SupportsIndex, item_bytes: typing.SupportsInt | typing.SupportsIndex, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """
        Notes a write by other means. strides in elements.
        """
    def batches_of(self, ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> list[int]:
        ...
    def coverage(self, address: typing.SupportsInt | typing.SupportsIndex, num_bytes: typing.SupportsInt | typing.SupportsIndex) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """
        Byte ranges that nobody wrote, and that several transfers wrote.
        """
    def drop_inside(self, address: typing.SupportsInt | typing.SupportsIndex, item_bytes: typing.SupportsInt | typing.SupportsIndex, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """
        Drops waiting transfers that the region covers.
        """
    def landed(self, label: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def needed_for(self, address: typing.SupportsInt | typing.SupportsIndex, item_bytes: typing.SupportsInt | typing.SupportsIndex, sizes: tuple[int, ...], strides: tuple[int, ...], *, overwrites: bool = False) -> list[int]:
        """
        Ids of the pending transfers that must land before the region may be looked at, or replaced unseen.
        """
    def pending_ids(self) -> list[int]:
        ...
    def record(self, id: typing.SupportsInt | typing.SupportsIndex, file: typing.SupportsInt | typing.SupportsIndex, src_type: typing.SupportsInt | typing.SupportsIndex, src_offset: typing.SupportsInt | typing.SupportsIndex, src_strides: tuple[int, ...], dst_type: typing.SupportsInt | typing.SupportsIndex, dst: typing.SupportsInt | typing.SupportsIndex, dst_strides: tuple[int, ...], sizes: tuple[int, ...], device: typing.SupportsInt | typing.SupportsIndex = -1) -> int:
        """
        Records a transfer; returns how many bytes are waiting now. -1, and nothing is recorded, when elements overlap on either side. Strides in elements, offset in bytes. device: the index of the GPU that dst is on.
        """
    def record_op(self, id: typing.SupportsInt | typing.SupportsIndex, file: typing.SupportsInt | typing.SupportsIndex, src_offset: typing.SupportsInt | typing.SupportsIndex, src_row_stride: typing.SupportsInt | typing.SupportsIndex, op: Op, device: typing.SupportsInt | typing.SupportsIndex = -1) -> int:
        """
        Records an op, of rows of the file that lie src_row_stride bytes apart; returns how many bytes are waiting.
        """
    def start(self) -> list[Batch]:
        """
        All waiting transfers, as batches of ascending level.
        """
    def start_only(self, ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> list[Batch]:
        """
        Those of the waiting transfers, as batches of ascending level.
        """
    def track_writes(self) -> None:
        """
        Remembers writes from here on, for coverage().
        """
    @property
    def has_pending(self) -> bool:
        ...
    @property
    def num_dropped(self) -> int:
        """
        Recorded, and overwritten before they were started.
        """
class OpenedFile:
    """
    A file, open for the ways it is read in. See csrc/readers/source_file.h.
    """
    def __init__(self, path: os.PathLike | str | bytes) -> None:
        ...
class Pipeline:
    """
    Runs batches of transfers: reads, copies, converts. See csrc/staging/pipeline.h.
    """
    def __init__(self, *, strategy: str, page_cache: str, backend: str, queue_depth: typing.SupportsInt | typing.SupportsIndex, num_threads: typing.SupportsInt | typing.SupportsIndex, chunk_bytes: typing.SupportsInt | typing.SupportsIndex, staging_bytes: typing.SupportsInt | typing.SupportsIndex, merge_gap_bytes: typing.SupportsInt | typing.SupportsIndex, advise_hugepages: bool, open_ahead: typing.SupportsInt | typing.SupportsIndex, files_at_once: typing.SupportsInt | typing.SupportsIndex, io_timeout_seconds: typing.SupportsFloat | typing.SupportsIndex, device_staging_bytes: typing.SupportsInt | typing.SupportsIndex, twin_devices: bool = False) -> None:
        """
        twin_devices: for tests; see csrc/staging/twin_device.h.
        """
    def add_file(self, path: os.PathLike | str | bytes, size: typing.SupportsInt | typing.SupportsIndex, device: typing.SupportsInt | typing.SupportsIndex, inode: typing.SupportsInt | typing.SupportsIndex, mtime_ns: typing.SupportsInt | typing.SupportsIndex, opened: OpenedFile | None = None) -> int:
        """
        Returns the file's index. `opened`, of that path, is empty afterwards.
        """
    def cancel(self) -> None:
        ...
    def destinations_in_flight(self) -> list[tuple[int, int]] | None:
        """
        Memory, from address to address, that is not staging and that reads in flight may yet write to, after stop(). None: all destinations.
        """
    def fault(self) -> tuple[str, int, int, int, int, str] | None:
        """
        None, or (kind, errno, file, offset, transfer id, detail).
        """
    def stats(self) -> dict[str, typing.Any]:
        ...
    def stop(self, seconds: typing.SupportsFloat | typing.SupportsIndex) -> bool:
        """
        Cancels, and waits for reads in flight. True: no memory is written to any more. False: time ran out.
        """
    def submit(self, batch: Batch, *, barrier: bool = False, urgent: bool = False, shared: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]] | None = None, device_caller: typing.Any = None) -> int:
        """
        Starts a batch, which is empty afterwards; returns the segment's id. `shared`, where other processes read along: tensors that they read too, if all of their bytes are needed here: (file, begin, end). `device_caller` is asked for streams_of(device), handles, and allocate(device, num_bytes), an address, where transfers go to GPUs.
        """
    def take_landed(self) -> list[int]:
        ...
    def wait(self, segment: typing.SupportsInt | typing.SupportsIndex, seconds: typing.SupportsFloat | typing.SupportsIndex) -> bool:
        """
        True when the segment has landed, or the pipeline has a fault.
        """
    @property
    def bytes_landed(self) -> int:
        ...
class ReadPlanner:
    """
    Plans batches of transfers as a Pipeline would, and reads nothing. See csrc/staging/plan_files.h.
    """
    def __init__(self, *, strategy: str, chunk_bytes: typing.SupportsInt | typing.SupportsIndex, merge_gap_bytes: typing.SupportsInt | typing.SupportsIndex, advise_hugepages: bool) -> None:
        ...
    def add_file(self, path: os.PathLike | str | bytes, size: typing.SupportsInt | typing.SupportsIndex, device: typing.SupportsInt | typing.SupportsIndex, inode: typing.SupportsInt | typing.SupportsIndex, mtime_ns: typing.SupportsInt | typing.SupportsIndex) -> int:
        ...
    def plan(self, batch: Batch, ids: collections.abc.Set[typing.SupportsInt | typing.SupportsIndex], shared: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]] | None = None) -> tuple[tuple[str, int, int, int, int, str] | None, dict[int, list[tuple[int, int, int, bool, bool]]]]:
        """
        None, or the fault as of a Pipeline; and the reads that bring these transfers: (file, offset, length, whether it is direct, whether it is in place).
        """
    def stats(self) -> dict[str, typing.Any]:
        """
        Of all plans. `sizes` are numbers and bytes of reads of 2^i bytes and more, and fewer than 2^(i+1).
        """
def amax(*, src_type: str, rows: typing.SupportsInt | typing.SupportsIndex, columns: typing.SupportsInt | typing.SupportsIndex, amax: typing.SupportsInt | typing.SupportsIndex) -> Op:
    """
    amax: the address of a float32, which is raised to the largest finite magnitude.
    """
def can_convert(src_type: typing.SupportsInt | typing.SupportsIndex, dst_type: typing.SupportsInt | typing.SupportsIndex) -> bool:
    """
    Whether a transfer may convert elements of one type into the other.
    """
def cuda_info() -> dict[str, typing.Any]:
    """
    Whether CUDA is part of this build, and what it finds here, as csrc/staging/cuda_info.h says.
    """
def e4m3fn_to_e4m3fnuz(*, keep_nan: bool, output: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]) -> Op:
    ...
def launch_copy(*, src_type: typing.SupportsInt | typing.SupportsIndex, src: typing.SupportsInt | typing.SupportsIndex, src_strides: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], dst_type: typing.SupportsInt | typing.SupportsIndex, dst: typing.SupportsInt | typing.SupportsIndex, dst_strides: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], sizes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], stream: typing.SupportsInt | typing.SupportsIndex) -> None:
    """
    Queues a strided copy in the memory of the current device, as loads into it do. Strides in elements.
    """
def make_cold(path: os.PathLike | str | bytes, bytes: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    Takes the start of a file out of the page cache; returns how many of those bytes are left there, or -errno.
    """
def make_warm(path: os.PathLike | str | bytes, bytes: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    Reads the start of a file into the page cache; returns how many of those bytes are there, or -errno.
    """
def marlin_repack(*, layout: str, num_bits: typing.SupportsInt | typing.SupportsIndex, is_a_8bit: bool, size_k: typing.SupportsInt | typing.SupportsIndex, size_n: typing.SupportsInt | typing.SupportsIndex, padded_k: typing.SupportsInt | typing.SupportsIndex, padded_n: typing.SupportsInt | typing.SupportsIndex, perm: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], device_perm: typing.SupportsInt | typing.SupportsIndex, output: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]) -> Op:
    """
    device_perm: the address of the same in the memory of a GPU, for launch(); or 0.
    """
def measure_reads(path: os.PathLike | str | bytes, *, reader: str, direct: bool, chunk_bytes: typing.SupportsInt | typing.SupportsIndex, queue_depth: typing.SupportsInt | typing.SupportsIndex, random: bool = False, huge_pages: bool, max_bytes: typing.SupportsInt | typing.SupportsIndex, max_seconds: typing.SupportsFloat | typing.SupportsIndex) -> dict[str, typing.Any]:
    """
    Reads a file once, as csrc/measure/measure_reads.h says. Times in seconds.
    """
def probe_direct(path: os.PathLike | str | bytes) -> dict[str, typing.Any]:
    """
    Whether the file can be read past the page cache, as csrc/readers/probe.h says.
    """
def probe_uring(*, queue_depth: typing.SupportsInt | typing.SupportsIndex, buffer_bytes: typing.SupportsInt | typing.SupportsIndex, num_buffers: typing.SupportsInt | typing.SupportsIndex) -> dict[str, typing.Any]:
    """
    Whether io_uring can be had, and staging registered with it, as csrc/measure/probe_uring.h says.
    """
def quantize(*, src_type: str, type: str, rows: typing.SupportsInt | typing.SupportsIndex, columns: typing.SupportsInt | typing.SupportsIndex, block_rows: typing.SupportsInt | typing.SupportsIndex, block_columns: typing.SupportsInt | typing.SupportsIndex, divide: bool, limit: typing.SupportsFloat | typing.SupportsIndex, keep_nan: bool, min_amax: typing.SupportsFloat | typing.SupportsIndex, max_amax: typing.SupportsFloat | typing.SupportsIndex, min_scale: typing.SupportsFloat | typing.SupportsIndex, power_of_two: bool, e8m0_scales: bool, weight: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex] | None, scales: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex] | None, device_amaxes: typing.SupportsInt | typing.SupportsIndex) -> Op:
    """
    device_amaxes: the address of a float32 for each block in the memory of a GPU, for launch() with large blocks; or 0.
    """
def quantize_with(*, src_type: str, type: str, rows: typing.SupportsInt | typing.SupportsIndex, columns: typing.SupportsInt | typing.SupportsIndex, block_rows: typing.SupportsInt | typing.SupportsIndex, block_columns: typing.SupportsInt | typing.SupportsIndex, divide: bool, limit: typing.SupportsFloat | typing.SupportsIndex, keep_nan: bool, scales: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], weight: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]) -> Op:
    ...
def quantize_with_scales_at(*, src_type: str, type: str, rows: typing.SupportsInt | typing.SupportsIndex, columns: typing.SupportsInt | typing.SupportsIndex, block_rows: typing.SupportsInt | typing.SupportsIndex, block_columns: typing.SupportsInt | typing.SupportsIndex, divide: bool, limit: typing.SupportsFloat | typing.SupportsIndex, keep_nan: bool, scales: typing.SupportsInt | typing.SupportsIndex, weight: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]) -> Op:
    """
    scales: the address of a float32 for each block, in the memory of the weight.
    """
def requantize_fp8(*, format: str, parts: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]], new_scale: typing.SupportsFloat | typing.SupportsIndex, limit: typing.SupportsFloat | typing.SupportsIndex, through_fp16: bool, output: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]) -> Op:
    """
    parts: (end row, scale), ascending.
    """
def requantize_fp8_at(*, format: str, end_rows: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], scales: typing.SupportsInt | typing.SupportsIndex, unset: typing.SupportsFloat | typing.SupportsIndex, limit: typing.SupportsFloat | typing.SupportsIndex, through_fp16: bool, output: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]) -> Op:
    """
    scales: the address of a float32 for each part, in the memory of the output. Their largest is the new scale.
    """
def residency_method(path: os.PathLike | str | bytes) -> str:
    """
    By which system call it is told what of the file is in the page cache: cachestat, mincore or unknown.
    """
def resident_bytes(path: os.PathLike | str | bytes, offset: typing.SupportsInt | typing.SupportsIndex, length: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    Bytes of the range that are in the page cache, or -errno.
    """
def simd() -> str:
    """
    The vector instructions that ops run with on this machine.
    """
