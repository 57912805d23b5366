"""Measuring storage: readers, sizes and depths on one file, cold and warm, beside plain reads; what to set then.

The core does the reading (csrc/measure): this file says what is measured, and what follows from it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import stat
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import _C
from .config import GiB, KiB, LoadConfig, MiB
from .cost import LoadCosts, ReadSize
from .entries import CheckpointFiles, Shard, TensorEntry
from .filesystem import Mount, mount_of
from .loading import Checkpoint
from .machine import machine, storage_of
from .plan import PlanningProgram, plan_of, record_slices
from .program import Program
from .report import format_bytes
from .settings import CHUNK_BYTES, MAX_THREADS, NETWORK_CHUNK_BYTES, NETWORK_QUEUE_DEPTH, QUEUE_DEPTH
from .storage_figures import LOAD_READERS, Figure, Point, ReaderName, StorageFigures

REFERENCE_CHUNK_BYTES = 4 * MiB
_PIECE_BYTES, _LARGE_PIECE_BYTES, _LARGE_CHUNK_BYTES = 4 * KiB, 64 * KiB, 8 * MiB
_MAX_BUFFER_BYTES = 256 * MiB  # what a load's staging takes by default
_COLD_FRACTION, _WARM_FRACTION = 0.01, 0.99  # of the file in the page cache: at most, at least
_ROUNDS = 3
_QUICK_SECONDS = 20.0
_WRITE_BYTES = 4 * MiB
_FRESH_BYTES = 256 * MiB
_SMALL_LOAD_BYTES, _LARGE_LOAD_BYTES, _TENSOR_BYTES = 64 * MiB, 512 * MiB, 2 * MiB
_LOAD_SECONDS = 2.0  # of the large one, on slow storage
_MAX_SLOWDOWN = 4.0  # more is none of the loads'
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it


def default_point(mount: Mount) -> Point:
    """How a load reads there what is not in the page cache, if nothing is set (settings.py, prefetch.py)."""
    if mount.is_network:
        return Point("pread", False, "cold", NETWORK_CHUNK_BYTES, NETWORK_QUEUE_DEPTH)
    return Point("io_uring", True, "cold", CHUNK_BYTES, QUEUE_DEPTH)


def points(default: Point, *, quick: bool, num_threads: int | None = None) -> list[Point]:
    """What is measured where a load reads as `default` says.

    Args:
        num_threads: that read out of the page cache; by default as many as of a load.
    """
    threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    depth = default.queue_depth
    coarse = _grid((512 * KiB, 2 * MiB, 8 * MiB), (1, 4, depth, 64))
    fine = _grid((128 * KiB, 512 * KiB, MiB, 2 * MiB, 4 * MiB, 8 * MiB, 16 * MiB), (1, 2, 4, 8, 16, 32, 64, 128))
    # Direct reads, which are what a load makes where it can.
    reference_depths = (4, 16) if quick else (1, 2, 4, 8, 16, 32)
    found = [Point("reference", True, "cold", REFERENCE_CHUNK_BYTES, d) for d in reference_depths]
    found += [Point("io_uring", True, "cold", chunk, d) for chunk, d in (coarse if quick else coarse + fine)]
    found += [Point("pread", True, "cold", chunk, d) for chunk, d in ([(CHUNK_BYTES, 4)] if quick else coarse)]
    found += [Point("pread", True, "cold", chunk, depth) for chunk in (CHUNK_BYTES, _LARGE_CHUNK_BYTES)]
    found.append(Point("io_uring", True, "cold", CHUNK_BYTES, depth, huge_pages=False))
    found.append(Point("fio", True, "cold", REFERENCE_CHUNK_BYTES, depth, huge_pages=False))
    # Pieces: what one costs when it is waited for, and in a full queue.
    found.append(Point("io_uring", True, "cold", _PIECE_BYTES, 1, random=True))
    for size in (_PIECE_BYTES, _LARGE_PIECE_BYTES):
        found += [Point(reader, True, "cold", size, depth, random=True) for reader in LOAD_READERS]
        found.append(Point("pread", False, "cold", size, depth, random=True))
    # Through the page cache, and out of it.
    found += [Point("pread", False, "cold", chunk, depth) for chunk in (CHUNK_BYTES, _LARGE_CHUNK_BYTES)]
    found.append(Point("io_uring", False, "cold", CHUNK_BYTES, depth))
    found += [Point("pread", False, "warm", CHUNK_BYTES, threads, huge_pages=huge) for huge in (True, False)]
    found.append(Point("io_uring", False, "warm", CHUNK_BYTES, depth))
    if not quick:
        found += [Point(reader, False, "cold", chunk, d) for reader in LOAD_READERS for chunk, d in coarse]
        found += [Point("io_uring", False, "warm", chunk, d) for chunk, d in coarse]
        found += [Point("pread", False, "warm", chunk, d) for chunk, _ in coarse for d in (1, 2 * threads, 4 * threads)]
    return list(dict.fromkeys(found))


def _grid(chunks: Sequence[int], depths: Sequence[int]) -> list[tuple[int, int]]:
    return [(chunk, depth) for chunk in chunks for depth in depths if chunk * depth <= _MAX_BUFFER_BYTES]


def measure_storage(
    path: str,
    *,
    quick: bool = False,
    rounds: int | None = None,
    file_bytes: int | None = None,
    on_progress: Callable[[int, int, int, Point], None] = lambda *_: None,
) -> StorageFigures:
    """Measures the storage under a path.

    To read cold, the file is taken out of the page cache; if some of it stays, root drops that of the whole machine.

    Args:
        path: a folder, in which a file is written and removed again; or a file, which is only read.
        quick: fewer settings, a file of 512 MiB instead of 2 GiB, and no new round after 20 seconds.
        rounds: how often each setting is measured; the settings take turns. None: three times.
        file_bytes: the file's size; of a file that is there, as much of it is read.
        on_progress: called before each reading with the round, its readings that were done, all of them, and what
            comes now.

    Raises:
        OSError: the file can't be written or read.
        ValueError: it is empty, or the path is that of something else.
    """
    num_bytes = file_bytes or (GiB // 2 if quick else 2 * GiB)
    seconds = 1.0 if quick else 4.0
    notes: list[str] = []
    with _file_at(path, num_bytes, 12 * seconds) as file:
        num_bytes = min(num_bytes, os.path.getsize(file))
        if not num_bytes:
            raise ValueError(f"{path}: there is nothing to read in an empty file")
        default = default_point(mount_of(file))
        wanted = points(default, quick=quick)
        runs: dict[Point, list[dict[str, Any]]] = {}
        refused: set[tuple[ReaderName, bool]] = set()
        fresh: list[float] = []
        started, rounds_done = time.monotonic(), 0
        while rounds_done < (rounds or _ROUNDS):
            if quick and rounds is None and time.monotonic() - started > _QUICK_SECONDS:
                break
            fresh.append(_fresh_bytes_per_second())
            for number, point in enumerate(wanted):
                if (point.reader, point.direct) in refused:
                    continue
                on_progress(rounds_done, number, len(wanted), point)
                try:
                    runs.setdefault(point, []).append(_measure(file, point, num_bytes, seconds))
                except RuntimeError as error:  # the reader, or direct I/O, is not to be had here
                    refused.add((point.reader, point.direct))
                    note = str(error).removeprefix(f"{file}: ")
                    if note not in notes:
                        notes.append(note)
            rounds_done += 1
        figures = [_figure_of(point, samples) for point, samples in runs.items() if samples]
        found = StorageFigures(
            path, num_bytes, machine(), storage_of(file), default, figures, statistics.median(fresh), notes
        )
        try:
            found.start_seconds, found.slowdown = _beyond_reads(file, num_bytes, found.costs)
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            found.notes.append(f"what a load takes beyond its reads is not known: {error}")
        return found


@contextlib.contextmanager
def _file_at(path: str, num_bytes: int, max_seconds: float) -> Iterator[str]:
    """A file to read: the one at the path, or one of random bytes in that folder while the block runs."""
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: no such file or folder; check the path") from error
    if stat.S_ISREG(kind):
        yield path
        return
    if not stat.S_ISDIR(kind):
        raise ValueError(f"{path}: expected a folder or a file; found neither")
    free = shutil.disk_usage(path).free
    if free < num_bytes + GiB:
        raise OSError(
            f"{path}: {format_bytes(num_bytes)} are to be written there and 1 GiB kept free, and {format_bytes(free)} "
            "are free; measure less, or a file that is there"
        )
    with tempfile.NamedTemporaryFile(prefix=".weightlift-bench-", dir=path, buffering=0) as file:
        # Random, since file systems that compress would make less of it; slow storage gets a smaller file.
        deadline = time.monotonic() + max_seconds
        written = 0
        try:
            while written < num_bytes and (time.monotonic() < deadline or written < 64 * MiB):
                written += file.write(os.urandom(min(_WRITE_BYTES, num_bytes - written)))
                if written % (64 * MiB) == 0:
                    os.fsync(file.fileno())
            os.fsync(file.fileno())
        except OSError as error:
            problem = f"{error.strerror}, after {format_bytes(written)} of a file to measure by"
            raise OSError(error.errno, problem, path) from None
        yield file.name


def _measure(file: str, point: Point, num_bytes: int, seconds: float) -> dict[str, Any]:
    prepare = _C.make_cold if point.state == "cold" else _C.make_warm
    cached = prepare(file, num_bytes)
    run = (
        _run_fio(file, point, num_bytes, seconds)
        if point.reader == "fio"
        else _C.measure_reads(
            file,
            reader=point.reader,
            direct=point.direct,
            chunk_bytes=point.chunk_bytes,
            queue_depth=point.queue_depth,
            random=point.random,
            huge_pages=point.huge_pages,
            max_bytes=num_bytes,
            max_seconds=seconds,
        )
    )
    return {**run, "cached": None if cached < 0 else cached / num_bytes}


def _fresh_bytes_per_second() -> float:
    """How fast memory comes that is asked for as a load's destination is: huge pages, by one thread; at its best.

    In a virtual machine the first of several may take ten times as long, while the host finds memory for it.
    """
    return _FRESH_BYTES / min(_seconds_of_fresh_memory() for _ in range(3))


def _seconds_of_fresh_memory() -> float:
    with mmap.mmap(-1, _FRESH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        started = time.perf_counter()
        try:
            memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:  # an old kernel
            memory[:: mmap.PAGESIZE] = bytes(_FRESH_BYTES // mmap.PAGESIZE)
        return time.perf_counter() - started


def _beyond_reads(file: str, num_bytes: int, costs: LoadCosts) -> tuple[float, float]:
    """`start_seconds` and `slowdown` of LoadCosts, by a small cold load and a large one.

    Raises:
        ValueError: nothing was read cold; or, like CheckpointReadError and MemoryError, a load failed.
    """
    seconds = costs.seconds_of_reads([ReadSize(_TENSOR_BYTES, 1, _TENSOR_BYTES, "direct")])
    most = max(4, int(_LOAD_SECONDS / seconds)) * _TENSOR_BYTES
    sizes = [min(num_bytes, _SMALL_LOAD_BYTES, most // 4), min(num_bytes, _LARGE_LOAD_BYTES, most)]
    (small, small_estimate), (large, large_estimate) = (_measured_and_estimated(file, size, costs) for size in sizes)
    slowdown = 1.0
    if sizes[1] > 2 * sizes[0]:
        slowdown = min(max(1.0, (large - small) / (large_estimate - small_estimate)), _MAX_SLOWDOWN)
    return max(0.0, small - slowdown * small_estimate), slowdown


def _measured_and_estimated(file: str, num_bytes: int, costs: LoadCosts) -> tuple[float, float]:
    """Seconds of cold loads of a file's first bytes, as tensors of 2 MiB, the median; and what is estimated of reads.

    Raises:
        ValueError: as `LoadPlan.estimate`.
    """
    shard = Shard.of_file(file, os.stat(file))
    sizes = {at: min(_TENSOR_BYTES, num_bytes - at) for at in range(0, num_bytes, _TENSOR_BYTES)}
    shard.tensors = tuple(TensorEntry(str(at), torch.uint8, (size,), at, size, shard) for at, size in sizes.items())
    files = CheckpointFiles((shard,), {entry.name: entry for entry in shard.tensors})
    config = LoadConfig().resolve()
    _C.make_cold(file, num_bytes)
    planning = PlanningProgram(files, config)  # which also imports what a first load would
    with Checkpoint(files, planning, watch=False, header_seconds=0.0) as checkpoint:
        tensors = record_slices(checkpoint, (), planning.reserved.empty)
        planning.memory.add(num_bytes)
        checkpoint.run()
        estimate = plan_of(checkpoint).estimate(costs)
    samples = []
    for _ in range(_ROUNDS):
        _C.make_cold(file, num_bytes)
        started = time.perf_counter()
        with Checkpoint(files, Program(files, config), watch=False, header_seconds=0.0) as checkpoint:
            tensors = record_slices(checkpoint, (), torch.empty)
        samples.append(time.perf_counter() - started)
        del tensors
    return statistics.median(samples), max(estimate.read, estimate.memory)


def _run_fio(file: str, point: Point, num_bytes: int, seconds: float) -> dict[str, Any]:
    """The same by fio, in a process of its own; its buffers are on small pages."""
    program = shutil.which("fio")
    if program is None:
        raise RuntimeError("fio is not installed: no figures of it")
    command = [
        *(program, "--name=weightlift", f"--filename={file}", "--rw=read", "--readonly", "--ioengine=io_uring"),
        *(f"--direct={int(point.direct)}", f"--bs={point.chunk_bytes}", f"--iodepth={point.queue_depth}"),
        *(f"--size={num_bytes}", f"--runtime={max(1, round(seconds))}", "--invalidate=0", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    try:
        read = json.loads(done.stdout)["jobs"][0]["read"]
        percentiles = read["clat_ns"]["percentile"]
        return {
            "bytes": read["io_bytes"],
            "seconds": read["io_bytes"] / read["bw_bytes"],
            "cpu_seconds": None,
            "latency": {
                "p50": percentiles["50.000000"] / 1e9,
                "p90": percentiles["90.000000"] / 1e9,
                "p99": percentiles["99.000000"] / 1e9,
                "max": read["clat_ns"]["max"] / 1e9,
            },
        }
    except (ValueError, LookupError, TypeError, ZeroDivisionError):
        problem = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"fio ended with {done.returncode}: {problem[-1] if problem else 'no output'}") from None


def _figure_of(point: Point, runs: list[dict[str, Any]]) -> Figure:
    by_speed = sorted(runs, key=lambda run: run["bytes"] / run["seconds"])
    median = by_speed[(len(by_speed) - 1) // 2]
    fractions = [run["cached"] for run in runs]
    cached: float | None = None
    if None not in fractions:
        cached = max(fractions) if point.state == "cold" else min(fractions)
    verified = cached is not None and (cached <= _COLD_FRACTION if point.state == "cold" else cached >= _WARM_FRACTION)
    return Figure(
        point,
        [run["bytes"] / run["seconds"] for run in runs],
        dict(median["latency"]),
        None if median["cpu_seconds"] is None else median["cpu_seconds"] / (median["bytes"] / 1e9),
        cached,
        verified,
    )
