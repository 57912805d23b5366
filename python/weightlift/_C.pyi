"""
weightlift's core: see csrc/README.md
"""
from __future__ import annotations
import collections.abc
import typing
__all__: list[str] = ['Batch', 'Ledger', 'Pipeline', 'ReadPlanner', 'resident_bytes']
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
    def record(self, id: typing.SupportsInt | typing.SupportsIndex, file: typing.SupportsInt | typing.SupportsIndex, src_type: typing.SupportsInt | typing.SupportsIndex, src_offset: typing.SupportsInt | typing.SupportsIndex, src_strides: tuple[int, ...], dst_type: typing.SupportsInt | typing.SupportsIndex, dst: typing.SupportsInt | typing.SupportsIndex, dst_strides: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        """
        Records a transfer; returns how many bytes are waiting now. -1, and nothing is recorded, when elements overlap on either side. Strides in elements, offset in bytes.
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
class Pipeline:
    """
    Runs batches of transfers: reads, copies, converts. See csrc/staging/pipeline.h.
    """
    def __init__(self, *, strategy: str, backend: str, queue_depth: typing.SupportsInt | typing.SupportsIndex, num_threads: typing.SupportsInt | typing.SupportsIndex, chunk_bytes: typing.SupportsInt | typing.SupportsIndex, staging_bytes: typing.SupportsInt | typing.SupportsIndex, merge_gap_bytes: typing.SupportsInt | typing.SupportsIndex, advise_hugepages: bool) -> None:
        ...
    def add_file(self, path: str, size: typing.SupportsInt | typing.SupportsIndex, device: typing.SupportsInt | typing.SupportsIndex, inode: typing.SupportsInt | typing.SupportsIndex, mtime_ns: typing.SupportsInt | typing.SupportsIndex) -> int:
        ...
    def cancel(self) -> None:
        ...
    def fault(self) -> tuple[str, int, int, int, int, str] | None:
        """
        None, or (kind, errno, file, offset, transfer id, detail).
        """
    def stats(self) -> dict[str, typing.Any]:
        ...
    def submit(self, batch: Batch, *, barrier: bool = False, urgent: bool = False) -> int:
        """
        Starts a batch, which is empty afterwards; returns the segment's id.
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
    def add_file(self, path: str, size: typing.SupportsInt | typing.SupportsIndex, device: typing.SupportsInt | typing.SupportsIndex, inode: typing.SupportsInt | typing.SupportsIndex, mtime_ns: typing.SupportsInt | typing.SupportsIndex) -> int:
        ...
    def plan(self, batch: Batch, ids: collections.abc.Set[typing.SupportsInt | typing.SupportsIndex]) -> tuple[tuple[str, int, int, int, int, str] | None, dict[int, list[tuple[int, int, int, bool, bool]]]]:
        """
        None, or the fault as of a Pipeline; and the reads that bring these transfers: (file, offset, length, whether it is direct, whether it is in place).
        """
    def stats(self) -> dict[str, typing.Any]:
        """
        Of all plans. `sizes` are numbers and bytes of reads of 2^i bytes and more, and fewer than 2^(i+1).
        """
def resident_bytes(path: str, offset: typing.SupportsInt | typing.SupportsIndex, length: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    Bytes of the range that are in the page cache, or -errno.
    """
