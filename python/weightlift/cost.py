"""How long a load takes: a formula over what it reads, and over what storage and memory were measured to give.

    seconds = header + start + max(record, hold + max(read, memory))

header  The files are found and parsed.
start   Files are opened, threads started, queues filled, and in the end emptied.
record  The weight loaders run and the reads are planned; for this and the header counts the time that planning of the
        same load took.
hold    For so long reading waits for recording to end, so that coverage is proven first.
read    Of each read of storage, the seconds that it adds to a stream of such reads, as many in flight as in a load:
        measured for some sizes, and on the line between them for others.
memory  One thread makes the destination's pages ready, while others copy what went through staging and what comes out
        of the page cache. Fused ops count as copies: they run at 0.6 to 1.5 times memcpy's speed
        (benchmarks/README.md).

In a load, reads and memory take longer than alone, since they share the processors: both are multiplied by a slowdown.
That and start are measured, so that the formula is right for a small load and a large one. Of what is busy at the same
time, what takes longest counts. Left out is what the strategies prefetch and eager read beyond the load's own reads,
and what other processes ask of the same storage meanwhile.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from .errors import printable
from .settings import MERGE_GAP_BYTES

Way = Literal["direct", "buffered", "cached"]

# What a read costs on top of its bytes where nothing but a bandwidth is known, as bytes of a running one: see
# MERGE_GAP_BYTES.
_READ_COST_BYTES = 2 * MERGE_GAP_BYTES
_MAX_READ_BYTES = 1 << 30
# Figures of any storage lie between, in bytes, seconds and bytes per second; what is computed from them stays finite.
_LEAST, _MOST = 1e-12, 1e18


@dataclasses.dataclass(slots=True)
class ReadSize:
    """How many reads have `low` bytes or more, and fewer than twice as many.

    Attributes:
        bytes: of all of them.
        way: "direct": past the page cache; "buffered": through it; "cached": out of it.
    """

    low: int
    num_reads: int
    bytes: int
    way: Way


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds that a load takes, and those of its parts, as above.

    Attributes:
        bound_by: the part that decides.
    """

    header: float
    start: float
    record: float
    hold: float
    read: float
    memory: float

    @property
    def total(self) -> float:
        return self.header + self.start + max(self.record, self.hold + max(self.read, self.memory))

    @property
    def bound_by(self) -> Literal["reading", "memory", "recording"]:
        if self.record > self.hold + max(self.read, self.memory):
            return "recording"
        return "reading" if self.read >= self.memory else "memory"

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "total": self.total, "bound_by": self.bound_by}

    def __str__(self) -> str:
        return (
            f"about {self.total:.2f} s, bound by {self.bound_by} (header {self.header:.2f}, "
            f"start {self.start:.2f}, recording {self.record:.2f}, reading {self.read:.2f}, memory {self.memory:.2f})"
        )


@dataclasses.dataclass(frozen=True)
class LoadCosts:
    """What a read, and a byte of memory, costs.

    Attributes:
        read_seconds: for direct and for buffered reads, pairs of a size in bytes and the seconds that one more read of
            it adds, ascending in size. Empty: that was not measured.
        copy_bytes_per_second: out of the page cache or staging, by the threads of a load.
        fresh_bytes_per_second: at which memory comes that was not touched before.
        start_seconds: what each load takes besides.
        slowdown: how many times as long reads and memory take in a load.
    """

    read_seconds: dict[Literal["direct", "buffered"], tuple[tuple[float, float], ...]]
    copy_bytes_per_second: float
    fresh_bytes_per_second: float
    start_seconds: float = 0.0
    slowdown: float = 1.0

    @classmethod
    def of_bandwidth(cls, bytes_per_second: float) -> LoadCosts:
        """Where no more is known than a bandwidth: a read costs as much as 32 KiB more, and memory comes at once."""
        seconds = tuple((size, (size + _READ_COST_BYTES) / bytes_per_second) for size in (1, _MAX_READ_BYTES))
        return cls({"direct": seconds, "buffered": seconds}, bytes_per_second, math.inf)

    @classmethod
    def from_bench(cls, path: str) -> LoadCosts:
        """Of a file that ``weightlift bench --json`` wrote.

        Raises:
            ValueError: it is no such file, or can't be read.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_dict(json.load(file)["costs"])
        except OSError as error:
            found = f"no file that can be read ({error.strerror})"
        except json.JSONDecodeError as error:
            found = f"no JSON ({error})"
        except UnicodeDecodeError:
            found = "no text"
        except (ValueError, TypeError, KeyError, RecursionError):
            found = "other JSON"
        raise ValueError(
            f"{printable(path)}: expected what weightlift bench --json of this version writes, found {found}; "
            "measure: weightlift bench FOLDER --json FILE"
        )

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> LoadCosts:
        """Of what `to_dict` gives. Raises TypeError, KeyError or ValueError for anything else."""
        read_seconds = found["read_seconds"]
        return cls(
            {"direct": _curve(read_seconds["direct"]), "buffered": _curve(read_seconds["buffered"])},
            copy_bytes_per_second=_positive(found["copy_bytes_per_second"]),
            fresh_bytes_per_second=_positive(found["fresh_bytes_per_second"]),
            start_seconds=0.0 if found["start_seconds"] == 0 else _positive(found["start_seconds"]),
            slowdown=_positive(found["slowdown"]),
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def seconds_of_reads(self, sizes: Iterable[ReadSize]) -> float:
        """Of those reads that are of storage, one after the other in a full queue.

        Raises:
            ValueError: there are some, and none were measured.
        """
        return self.slowdown * sum(
            size.num_reads * _between(self._of(size.way), size.bytes / size.num_reads)
            for size in sizes
            if size.way != "cached"
        )

    def seconds_of_memory(self, fresh_bytes: int, copied_bytes: int) -> float:
        """Of so many bytes of a destination that was not touched before, and of so many that are copied there."""
        return self.slowdown * max(fresh_bytes / self.fresh_bytes_per_second, copied_bytes / self.copy_bytes_per_second)

    def _of(self, way: Literal["direct", "buffered"]) -> tuple[tuple[float, float], ...]:
        """The other way's where this one was not measured: nothing is better known."""
        measured = self.read_seconds[way] or self.read_seconds["buffered" if way == "direct" else "direct"]
        if not measured:
            raise ValueError(
                "the load reads from storage, of which nothing was read cold when it was measured; measure the storage "
                "that the checkpoint lies on, or give a bandwidth"
            )
        return measured


def _curve(pairs: Iterable[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    """Pairs of size and seconds, ascending in both. Raises ValueError where one is no figure."""
    found: list[tuple[float, float]] = []
    for size, seconds in sorted((_positive(size), _positive(seconds)) for size, seconds in pairs):
        # A larger read takes no less time: what seems so is noise.
        found.append((size, max(seconds, found[-1][1] if found else 0.0)))
    return tuple(found)


def _positive(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LEAST <= value <= _MOST:
        raise ValueError(value)
    return float(value)


def _between(pairs: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds of a read: on the line between the sizes around it; of a larger one by its bytes, of a smaller one those
    of the smallest."""
    sizes = [size for size, _ in pairs]
    place = bisect.bisect_left(sizes, size)
    if place == 0:
        return pairs[0][1]
    if place == len(pairs):
        return pairs[-1][1] * size / pairs[-1][0]
    (low, least), (high, most) = pairs[place - 1 : place + 1]
    return least + (most - least) * (size - low) / (high - low)
