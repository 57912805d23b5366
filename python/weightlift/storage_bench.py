"""Measuring storage: readers, sizes and depths on one file, cold and warm, beside plain reads; what to set then.

The core does the reading (csrc/measure): this file says what is measured, and what follows from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from . import _C
from .config import GiB, KiB, MiB
from .machine import machine, storage_of
from .settings import CHUNK_BYTES, MAX_THREADS, QUEUE_DEPTH

ReaderName = Literal["io_uring", "pread", "reference", "fio"]
State = Literal["cold", "warm"]
_OURS: tuple[ReaderName, ...] = ("io_uring", "pread")

REFERENCE_CHUNK_BYTES = 4 * MiB
_MAX_BUFFER_BYTES = 256 * MiB  # what a load's staging takes by default
_COLD_FRACTION, _WARM_FRACTION = 0.01, 0.99  # of the file in the page cache: at most, at least
_ROUNDS = 3
_QUICK_SECONDS = 20.0
# Settings that differ by less are taken to be equally fast, and the cheaper one is recommended: medians of three rounds
# and more, and of fewer.
_TOLERANCE, _TOLERANCE_OF_FEW = 0.03, 0.1
_WRITE_BYTES = 4 * MiB


@dataclasses.dataclass(frozen=True)
class Point:
    """What is measured: a way to read, and the state of the page cache that it meets."""

    reader: ReaderName
    direct: bool
    state: State
    chunk_bytes: int
    queue_depth: int
    huge_pages: bool = True

    def __str__(self) -> str:
        how = "direct" if self.direct else "buffered"
        size = f"{self.chunk_bytes // MiB} MiB" if self.chunk_bytes >= MiB else f"{self.chunk_bytes // KiB} KiB"
        pages = "" if self.huge_pages else ", small pages"
        return f"{self.reader} {how}, {size} x {self.queue_depth}{pages}"


@dataclasses.dataclass
class Figure:
    """What was measured of a point.

    Attributes:
        samples: bytes per second, one of each round.
        latency: seconds that a read took, of the median round: p50, p90, p99, max.
        cpu_seconds_per_gb: processor time of the process, user and system, for 10^9 bytes, of the median round; None
            for fio, which is another process.
        cached: the fraction of what is read in the page cache before the round that was furthest from what the point's
            state says; None where that can't be told.
        verified: whether that was what the state says: at most 1 % when cold, at least 99 % when warm.
    """

    point: Point
    samples: list[float]
    latency: dict[str, float]
    cpu_seconds_per_gb: float | None
    cached: float | None
    verified: bool

    @property
    def bytes_per_second(self) -> float:
        return statistics.median(self.samples)

    def to_dict(self) -> dict[str, Any]:
        figures = {name: value for name, value in vars(self).items() if name != "point"}
        return {**dataclasses.asdict(self.point), "bytes_per_second": self.bytes_per_second, **figures}


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What to set for loads from this storage.

    Attributes:
        settings: fields of LoadConfig; none: leave all to weightlift.
        bytes_per_second: what was measured with them, cold.
        reason: in words.
    """

    settings: dict[str, Any]
    bytes_per_second: float
    reason: str


@dataclasses.dataclass
class StorageFigures:
    """All that was measured, and on what."""

    path: str
    file_bytes: int
    machine: dict[str, Any]
    storage: dict[str, Any]
    figures: list[Figure]
    notes: list[str]

    def of(self, state: State, *readers: ReaderName) -> list[Figure]:
        """The figures of these readers into huge pages, fastest first, but for those found in another state."""
        found = [
            figure
            for figure in self.figures
            if figure.point.state == state
            and figure.point.reader in readers
            and figure.point.huge_pages
            and (figure.verified or figure.cached is None)
        ]
        return sorted(found, key=lambda figure: -figure.bytes_per_second)

    @property
    def recommendation(self) -> Recommendation | None:
        """None where nothing was read cold."""
        figures = self.of("cold", *_OURS)
        if not figures:
            return None
        best = figures[0]
        tolerance = _TOLERANCE if len(best.samples) >= _ROUNDS else _TOLERANCE_OF_FEW
        within = f"within {tolerance:.0%} of the best"
        good = [f for f in figures if f.bytes_per_second >= (1 - tolerance) * best.bytes_per_second]
        default = next((f for f in good if f.point == DEFAULT_POINT), None)
        if default is not None:
            return Recommendation({}, default.bytes_per_second, f"the defaults are {within}")
        # io_uring before threads, direct before buffered, little memory before much.
        figure = min(
            good, key=lambda f: (f.point.reader, not f.point.direct, f.point.chunk_bytes * f.point.queue_depth)
        )
        point = figure.point
        settings: dict[str, Any] = {"chunk_bytes": point.chunk_bytes}
        if not point.direct:
            settings |= {"strategy": "buffered"}
        if not point.direct or point.reader != "io_uring":
            settings |= {"backend": point.reader}
        threads = point.reader == "pread" and not point.direct
        settings |= {"num_threads" if threads else "queue_depth": point.queue_depth}
        reason = "the best" if figure is best else f"the least memory {within}"
        return Recommendation(settings, figure.bytes_per_second, reason)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that ``json.dumps`` takes. `read_bandwidth` reads it."""
        recommendation, warm = self.recommendation, self.of("warm", *_OURS)
        return {
            "path": self.path,
            "file_bytes": self.file_bytes,
            "machine": self.machine,
            "storage": self.storage,
            "bandwidth": {
                "cold": recommendation.bytes_per_second if recommendation else None,
                "warm": warm[0].bytes_per_second if warm else None,
            },
            "recommendation": dataclasses.asdict(recommendation) if recommendation else None,
            "figures": [figure.to_dict() for figure in self.figures],
            "notes": self.notes,
        }


DEFAULT_POINT = Point("io_uring", True, "cold", CHUNK_BYTES, QUEUE_DEPTH)


def points(*, quick: bool, num_threads: int | None = None) -> list[Point]:
    """What is measured. Buffered reads by threads use `num_threads`, by default as many as a load would."""
    threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    chunks = (
        (512 * KiB, 2 * MiB, 8 * MiB) if quick else (128 * KiB, 512 * KiB, MiB, 2 * MiB, 4 * MiB, 8 * MiB, 16 * MiB)
    )
    depths = (1, 4, 16, 64) if quick else (1, 2, 4, 8, 16, 32, 64, 128)
    reference_depths = (4, 16) if quick else (1, 2, 4, 8, 16, 32)
    grid = [(chunk, depth) for chunk in chunks for depth in depths if chunk * depth <= _MAX_BUFFER_BYTES]
    found = [Point("reference", True, "cold", REFERENCE_CHUNK_BYTES, depth) for depth in reference_depths]
    found += [Point("io_uring", True, "cold", chunk, depth) for chunk, depth in grid]
    few = [(CHUNK_BYTES, depth) for depth in (4, QUEUE_DEPTH)] if quick else grid
    found += [Point("pread", True, "cold", chunk, depth) for chunk, depth in few if depth <= QUEUE_DEPTH]
    found.append(Point("io_uring", True, "cold", CHUNK_BYTES, QUEUE_DEPTH, huge_pages=False))
    found.append(Point("fio", True, "cold", REFERENCE_CHUNK_BYTES, QUEUE_DEPTH, huge_pages=False))
    buffered: list[tuple[ReaderName, int, int]] = [
        ("pread", CHUNK_BYTES, threads),
        ("io_uring", CHUNK_BYTES, QUEUE_DEPTH),
    ]
    if not quick:
        buffered += [("pread", chunk, depth) for chunk in chunks for depth in (1, 2 * threads, 4 * threads)]
        buffered += [("io_uring", chunk, depth) for chunk, depth in grid]
    for state in ("cold", "warm"):
        found += [Point(reader, False, state, chunk, depth) for reader, chunk, depth in buffered]
        found.append(Point("pread", False, state, CHUNK_BYTES, threads, huge_pages=False))
    return list(dict.fromkeys(found))


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
    """
    num_bytes = file_bytes or (GiB // 2 if quick else 2 * GiB)
    seconds = 1.0 if quick else 4.0
    notes: list[str] = []
    with _file_at(path, num_bytes, 12 * seconds) as file:
        num_bytes = min(num_bytes, os.path.getsize(file))
        if not num_bytes:
            raise ValueError(f"{path}: there is nothing to read in an empty file")
        wanted = points(quick=quick)
        runs: dict[Point, list[dict[str, Any]]] = {}
        refused: set[tuple[ReaderName, bool]] = set()
        started, rounds_done = time.monotonic(), 0
        while rounds_done < (rounds or _ROUNDS):
            if quick and rounds is None and time.monotonic() - started > _QUICK_SECONDS:
                break
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
        return StorageFigures(path, num_bytes, machine(), storage_of(file), figures, notes)


def read_bandwidth(path: str) -> float:
    """The bytes per second that a file written by ``weightlift bench --json`` tells: cold, or warm if that is all.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no such file, or it tells none.
    """
    with open(path, encoding="utf-8") as file:
        try:
            measured = json.load(file)["bandwidth"]
            bandwidth = measured["warm"] if measured["cold"] is None else measured["cold"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}: expected what weightlift bench --json writes, found something else") from None
    if not isinstance(bandwidth, (int, float)) or not 0 < bandwidth < float("inf"):
        raise ValueError(f"{path}: expected a bandwidth in bytes per second, found {bandwidth!r}; measure again")
    return float(bandwidth)


@contextlib.contextmanager
def _file_at(path: str, num_bytes: int, max_seconds: float) -> Iterator[str]:
    """A file to read: the one at the path, or one of random bytes in that folder while the block runs."""
    if not os.path.isdir(path):
        yield path
        return
    free = shutil.disk_usage(path).free
    if free < num_bytes + GiB:
        raise OSError(f"{path}: {num_bytes / GiB:.1f} GiB are to be written and 1 GiB kept free; {free / GiB:.1f} are")
    with tempfile.NamedTemporaryFile(prefix=".weightlift-bench-", dir=path, buffering=0) as file:
        # Random, since file systems that compress would make less of it; slow storage gets a smaller file.
        deadline = time.monotonic() + max_seconds
        written = 0
        while written < num_bytes and (time.monotonic() < deadline or written < 64 * MiB):
            written += file.write(os.urandom(min(_WRITE_BYTES, num_bytes - written)))
            if written % (64 * MiB) == 0:
                os.fsync(file.fileno())
        os.fsync(file.fileno())
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
            huge_pages=point.huge_pages,
            max_bytes=num_bytes,
            max_seconds=seconds,
        )
    )
    return {**run, "cached": None if cached < 0 else cached / num_bytes}


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
    done = subprocess.run(command, capture_output=True, text=True)
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
