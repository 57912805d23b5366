"""How storage is read, and what came of it in words: defaults, reports, failures.

The core decides by what it finds (csrc/readers): this file gives it the settings and explains its decisions.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from . import _C
from .config import MiB, ResolvedConfig
from .errors import CheckpointError, CheckpointReadError, listed
from .report import FileReport

if TYPE_CHECKING:
    from .entries import Shard, TensorEntry

# What the core decides when the user does not. Sequential O_DIRECT reads of 1 GiB into huge-page buffers, on a 2-core
# VM with a virtio disk: 2 MiB at depth 4: 3.4 GB/s, the best; at 16: 3.15; at 32: 3.1; 4 MiB the same.
QUEUE_DEPTH = 16
CHUNK_BYTES = 2 * MiB
CHUNK_UNIT = 64 << 10  # the core cuts chunks in multiples of it
# An additional read costs about as much as 32 KiB of a running one: on the same disk, pieces of 4 KiB at depth 32 take
# 12.8 us each, while 3.05 GB/s move 32 KiB in 11 us. Half of that keeps what is read in vain under 2 % of pieces of
# 1 MiB.
MERGE_GAP_BYTES = 16 << 10
MAX_THREADS = 8
_MAX_OPEN_FILES = 256  # of the checkpoint; each takes two descriptors


def make_pipeline(config: ResolvedConfig, shards: Sequence[Shard], strategy: str) -> _C.Pipeline:
    """A pipeline for these files: what the user decided, and defaults for the rest. `strategy` is the core's."""
    num_threads = config.num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    pipeline = _C.Pipeline(
        strategy=strategy,
        backend=config.backend,
        queue_depth=config.queue_depth or QUEUE_DEPTH,
        num_threads=num_threads,
        chunk_bytes=chunk_bytes_of(config),
        staging_bytes=config.staging_bytes,
        merge_gap_bytes=_merge_gap_bytes_of(config),
        advise_hugepages=config.advise_hugepages,
        io_timeout_seconds=config.io_timeout_seconds,
    )
    _add_files(pipeline, shards)
    return pipeline


def make_planner(config: ResolvedConfig, shards: Sequence[Shard], strategy: str) -> _C.ReadPlanner:
    """What plans as `make_pipeline` would."""
    planner = _C.ReadPlanner(
        strategy=strategy,
        chunk_bytes=chunk_bytes_of(config),
        merge_gap_bytes=_merge_gap_bytes_of(config),
        advise_hugepages=config.advise_hugepages,
    )
    _add_files(planner, shards)
    return planner


def chunk_bytes_of(config: ResolvedConfig) -> int:
    """Bytes of a staging buffer, and the most of one read."""
    return min(config.chunk_bytes or CHUNK_BYTES, config.staging_bytes) // CHUNK_UNIT * CHUNK_UNIT


def _merge_gap_bytes_of(config: ResolvedConfig) -> int:
    return MERGE_GAP_BYTES if config.merge_gap_bytes is None else config.merge_gap_bytes


def _add_files(reader: _C.Pipeline | _C.ReadPlanner, shards: Sequence[Shard]) -> None:
    for shard in shards:
        reader.add_file(shard.path, shard.size, shard.device, shard.inode, shard.mtime_ns)


def max_open_files() -> int:
    """How many files of the checkpoint may be open at a time: of the descriptors that the process may have, half."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_OPEN_FILES if limit == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN_FILES, limit // 4))


def file_report(shard: Shard, file: Mapping[str, object], stats: Mapping[str, object]) -> FileReport:
    """What was read of a file, which way, and why."""
    direct, buffered = file["direct_bytes"], file["buffered_bytes"]
    # Without a buffered reader, what is called buffered is what direct reads left over, at the ends of files.
    if direct and buffered and stats["buffered_reader"]:
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
        bytes_read=int(direct) + int(buffered),  # type: ignore[call-overload]
        reader=reader,
        strategy=strategy,
        reason=reason,
    )


def failure(
    fault: tuple[str, int, int, int, int, str],
    shards: Sequence[Shard],
    sources: Sequence[TensorEntry],
    config: ResolvedConfig,
    incomplete: list[str],
    kept: str | None = None,
) -> Exception:
    """A fault of the core as an exception.

    Args:
        fault: as `_C.Pipeline.fault` gives it: kind, errno, file, offset, transfer, detail.
        shards, sources: what its file and its transfer are numbers of.
        incomplete: names of the tensors whose copies did not all land.
        kept: what is kept because reads are still in flight.
    """
    kind, error, file, offset, transfer, detail = fault
    shard: Shard | None = shards[file] if file >= 0 else None
    entry = sources[transfer] if transfer >= 0 else None
    path = shard.path if shard else None
    name = entry.name if entry else None
    rest = f"; not loaded: {listed(incomplete)}" if incomplete else ""
    if kind == "unavailable":
        if path is not None:
            detail = f'strategy="direct" is not to be had here: {detail}; use strategy="auto" or "buffered"'
        elif config.backend == "io_uring":
            detail = f'backend="io_uring" is not to be had here: {detail}; use backend="auto" or "pread"'
        return CheckpointError(f"{detail}{rest}", reason="Unavailable", path=path)
    if kind == "cancelled":
        return RuntimeError(f"the load was cancelled{rest}")
    if kind == "end_of_file":
        assert shard is not None
        problem = f"the file ended at byte {offset}, its header promises {shard.size}; it was truncated during the load"
    elif kind == "changed":
        problem = f"the file has changed since its header was read ({detail}); load again"
    elif kind == "timeout":
        what = f"a read at byte {offset}" if offset >= 0 else "what it was asked about the file"
        problem = (
            f"storage has not answered {what} for {config.io_timeout_seconds:g} s (io_timeout_seconds); "
            "see whether its device or server is well, and load again"
        )
        if kept is not None:
            problem += f". Its answer may yet come: {kept} is kept until then, and nothing can be loaded into it"
    else:
        what = "opening it" if kind == "open" else f"reading at byte {offset}" if shard else "waiting for reads"
        problem = f"{what} failed: {os.strerror(error)}"
    cause = OSError(error, os.strerror(error)) if error else None
    reasons = {"end_of_file": "FileTruncated", "changed": "FileChanged", "open": "OpenFailed", "timeout": "ReadTimeout"}
    reason = reasons.get(kind, "ReadFailed")
    read_error = CheckpointReadError(f"{problem}{rest}", reason=reason, path=path, tensor=name, cause=cause)
    read_error.incomplete = incomplete
    return read_error
