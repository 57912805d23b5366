"""How storage is read, and what came of it in words: defaults, reports, failures.

The core decides by what it finds (csrc/readers): this file gives it the settings and explains its decisions.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from . import _C, devices
from .config import ResolvedConfig
from .errors import CheckpointError, CheckpointReadError, listed
from .local_rank import local_rank
from .report import FileReport

if TYPE_CHECKING:
    from .entries import Shard, TensorEntry
    from .open_ahead import OpenAhead
    from .settings import Settings

MAX_OPEN_FILES = 256  # of the checkpoint; each takes two descriptors


def make_pipeline(
    config: ResolvedConfig, settings: Settings, shards: Sequence[Shard], strategy: str, ahead: OpenAhead | None = None
) -> _C.Pipeline:
    """A pipeline for these files, with those that `ahead` has opened. `strategy` is the core's."""
    pipeline = _C.Pipeline(
        strategy=strategy,
        page_cache=config.page_cache,
        backend=config.backend,
        queue_depth=settings.queue_depth,
        num_threads=settings.num_threads,
        chunk_bytes=settings.chunk_bytes,
        staging_bytes=settings.staging_bytes,
        merge_gap_bytes=settings.merge_gap_bytes,
        advise_hugepages=config.advise_hugepages,
        open_ahead=settings.open_ahead,
        files_at_once=settings.files_at_once,
        io_timeout_seconds=config.io_timeout_seconds,
        device_staging_bytes=settings.device_staging_bytes,
        twin_devices=devices.are_twins,
    )
    for shard in shards:
        opened = None if ahead is None else ahead.take(shard.path)
        pipeline.add_file(shard.path, shard.size, shard.device, shard.inode, shard.mtime_ns, opened)
    return pipeline


def make_planner(config: ResolvedConfig, settings: Settings, shards: Sequence[Shard], strategy: str) -> _C.ReadPlanner:
    """What plans as `make_pipeline` would."""
    planner = _C.ReadPlanner(
        strategy=strategy,
        chunk_bytes=settings.chunk_bytes,
        merge_gap_bytes=settings.merge_gap_bytes,
        advise_hugepages=config.advise_hugepages,
    )
    for shard in shards:
        planner.add_file(shard.path, shard.size, shard.device, shard.inode, shard.mtime_ns)
    return planner


def max_open_files() -> int:
    """How many files of the checkpoint may be open at a time: of the descriptors that the process may have, half."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_OPEN_FILES if limit == resource.RLIM_INFINITY else max(1, min(MAX_OPEN_FILES, limit // 4))


def file_report(shard: Shard, file: Mapping[str, object], stats: Mapping[str, object]) -> FileReport:
    """What was read of a file, which way, and why."""
    direct, buffered = int(file["direct_bytes"]), int(file["buffered_bytes"])  # type: ignore[call-overload]
    # Without a buffered reader, what is called buffered is what direct reads left over, at the ends of files.
    if direct and buffered and stats["buffered_reader"]:
        strategy, reader = "mixed", f"{stats['direct_reader']} + {stats['buffered_reader']}"
        reason = _why_buffered(file, direct + buffered)
    elif direct:
        strategy = "direct" if file["direct_proven"] else "direct (unproven)"
        reader = str(stats["direct_reader"])
        reason = str(file["direct_reason"]) or f"O_DIRECT works here, aligned to {file['offset_alignment']} bytes"
    else:
        strategy, reader = "buffered", str(stats["buffered_reader"])
        whys = [] if file["direct_usable"] else [str(file["direct_reason"]) or "as configured"]
        if file["cached_bytes"] or not whys:
            whys.append(_why_buffered(file, buffered))
        reason = "; ".join(whys)
    return FileReport(
        path=shard.path,
        bytes_read=direct + buffered,
        reader=reader,
        strategy=strategy,
        reason=reason,
    )


def _why_buffered(file: Mapping[str, object], total: int) -> str:
    """Why a file that could be read past the page cache was read through it; `total` bytes either way."""
    cached, buffered = int(file["cached_bytes"]), int(file["buffered_bytes"])  # type: ignore[call-overload]
    is_shared = cached < buffered and local_rank()[1] > 1
    whys = ["read by other processes too"] if is_shared else []
    if cached or not is_shared:
        whys.insert(0, "in the page cache" if cached == total else "partly in the page cache")
    return "; ".join(whys)


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
            choice, remedy = 'strategy="direct"', 'strategy="auto" or "buffered"'
            if config.strategy != "direct":
                choice, remedy = 'page_cache="leave"', 'page_cache="keep"'
            detail = f"{choice} is not to be had here: {detail}; use {remedy}"
        elif config.backend == "io_uring":
            detail = f'backend="io_uring" is not to be had here: {detail}; use backend="auto" or "pread"'
        return CheckpointError(f"{detail}{rest}", reason="Unavailable", path=path)
    if kind == "device":
        problem = f"copying it to where it belongs failed: {detail}"
        device_error = CheckpointReadError(f"{problem}{rest}", reason="DeviceFailed", path=path, tensor=name)
        device_error.incomplete = incomplete
        return device_error
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
