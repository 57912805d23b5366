"""What was measured of storage, and what follows from it: settings to recommend, and what a load costs."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Literal

from .config import KiB, MiB
from .cost import LoadCosts

ReaderName = Literal["io_uring", "pread", "reference", "fio"]
State = Literal["cold", "warm"]

LOAD_READERS: tuple[ReaderName, ...] = ("io_uring", "pread")
# The one that a load takes if nothing is set, and the other.
_READERS: dict[Literal["direct", "buffered"], tuple[ReaderName, ReaderName]] = {
    "direct": ("io_uring", "pread"),
    "buffered": ("pread", "io_uring"),
}
_ROUNDS = 3
# Settings that differ by less are taken to be equally fast, and the cheaper one is recommended: medians of three rounds
# and more, and of fewer.
_TOLERANCE, _TOLERANCE_OF_FEW = 0.03, 0.1


@dataclasses.dataclass(frozen=True)
class Point:
    """What is measured: a way to read, and the state of the page cache that it meets."""

    reader: ReaderName
    direct: bool
    state: State
    chunk_bytes: int
    queue_depth: int
    huge_pages: bool = True
    random: bool = False  # pieces of chunk_bytes from all over the file; else from its start on

    def __str__(self) -> str:
        how = "direct" if self.direct else "buffered"
        size = f"{self.chunk_bytes // MiB} MiB" if self.chunk_bytes >= MiB else f"{self.chunk_bytes // KiB} KiB"
        pages = "" if self.huge_pages else ", small pages"
        order = ", random" if self.random else ""
        return f"{self.reader} {how}, {size} x {self.queue_depth}{pages}{order}"


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
    """All that was measured, and on what.

    Attributes:
        default: how a load reads there what is not in the page cache, if nothing is set.
        fresh_bytes_per_second: at which one thread gets memory, in huge pages, that was not touched before.
        start_seconds, slowdown: of LoadCosts; 0 and 1 where nothing can be read cold.
    """

    path: str
    file_bytes: int
    machine: dict[str, Any]
    storage: dict[str, Any]
    default: Point
    figures: list[Figure]
    fresh_bytes_per_second: float
    notes: list[str]
    start_seconds: float = 0.0
    slowdown: float = 1.0

    def of(self, state: State, *readers: ReaderName, random: bool = False) -> list[Figure]:
        """The figures of these readers into huge pages, fastest first, but for those found in another state.

        Args:
            random: those of pieces from all over the file, and no others.
        """
        found = [
            figure
            for figure in self.figures
            if figure.point.state == state
            and figure.point.reader in readers
            and figure.point.huge_pages
            and figure.point.random == random
            and (figure.verified or figure.cached is None)
        ]
        return sorted(found, key=lambda figure: -figure.bytes_per_second)

    @property
    def recommendation(self) -> Recommendation | None:
        """None where nothing was read cold."""
        figures = self.of("cold", *LOAD_READERS)
        if not figures:
            return None
        best = figures[0]
        tolerance = _TOLERANCE if len(best.samples) >= _ROUNDS else _TOLERANCE_OF_FEW
        good = [f for f in figures if f.bytes_per_second >= (1 - tolerance) * best.bytes_per_second]
        # io_uring before threads, direct before buffered, little memory before much.
        figure = min(
            good, key=lambda f: (f.point.reader, not f.point.direct, f.point.chunk_bytes * f.point.queue_depth)
        )
        default = next((f for f in figures if f.point == self.default), None)
        if default is not None and default.bytes_per_second >= (1 - tolerance) * figure.bytes_per_second:
            how = "the best" if default is best else f"within {tolerance:.0%} of {_with_rate(figure)}"
            return Recommendation({}, default.bytes_per_second, f"the defaults, {self.default}, are {how}")
        reason = "the best" if figure is best else f"the least memory within {tolerance:.0%} of {_with_rate(best)}"
        if default is not None:
            reason += f"; the defaults: {_with_rate(default)}"
        return Recommendation(self._settings(figure.point), figure.bytes_per_second, reason)

    def _settings(self, point: Point) -> dict[str, Any]:
        settings: dict[str, Any] = {"queue_depth": point.queue_depth, "chunk_bytes": point.chunk_bytes}
        way: Literal["direct", "buffered"] = "direct" if point.direct else "buffered"
        if point.direct != self.default.direct:
            settings["strategy"] = way
        if point.reader != _READERS[way][0]:
            settings["backend"] = point.reader
        return settings

    @property
    def costs(self) -> LoadCosts:
        """Of reads as deep as a load's, of every size that was measured; small ones from all over the file."""
        warm = [figure.bytes_per_second for figure in self.of("warm", *LOAD_READERS)]
        return LoadCosts(
            read_seconds={way: self._read_seconds(way) for way in _READERS},
            # Warm files may be read from storage all the same: some servers have them forgotten when they are opened.
            copy_bytes_per_second=max([self.fresh_bytes_per_second, *warm]),
            fresh_bytes_per_second=self.fresh_bytes_per_second,
            start_seconds=self.start_seconds,
            slowdown=self.slowdown,
        )

    def _read_seconds(self, way: Literal["direct", "buffered"]) -> tuple[tuple[float, float], ...]:
        for reader in _READERS[way]:
            figures = [
                figure
                for figure in self.of("cold", reader) + self.of("cold", reader, random=True)
                if figure.point.direct == (way == "direct") and figure.point.queue_depth == self.default.queue_depth
            ]
            if figures:
                return tuple(sorted((f.point.chunk_bytes, f.point.chunk_bytes / f.bytes_per_second) for f in figures))
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that ``json.dumps`` takes. `LoadCosts.from_bench` reads it."""
        recommendation = self.recommendation
        return {
            "path": self.path,
            "file_bytes": self.file_bytes,
            "machine": self.machine,
            "storage": self.storage,
            "default": dataclasses.asdict(self.default),
            "recommendation": dataclasses.asdict(recommendation) if recommendation else None,
            "costs": self.costs.to_dict(),
            "figures": [figure.to_dict() for figure in self.figures],
            "notes": self.notes,
        }


def _with_rate(figure: Figure) -> str:
    return f"{figure.point}, {figure.bytes_per_second / 1e9:.2f} GB/s"
