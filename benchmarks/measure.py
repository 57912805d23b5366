"""Measuring: each run in a process of its own, variants taking turns, and the table that comes of it."""

from __future__ import annotations

import csv
import dataclasses
import gc
import os
import pickle
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from weightlift.machine import machine as machine_found
from weightlift.machine import storage_of

Result = TypeVar("Result")


def in_child(action: Callable[[], Result]) -> Result:
    """Runs action in a forked process: fresh memory, nothing left behind. What goes wrong there ends this program too.

    The caller must not have run torch operations that start threads: OpenMP does not survive a fork.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        try:
            outcome: tuple[bool, Any] = (True, action())
        except SystemExit as error:
            outcome = (False, str(error))
        except BaseException as error:
            traceback.print_exc()
            outcome = (False, f"{type(error).__name__}: {error}")
        with os.fdopen(write_end, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not data:
        raise SystemExit(f"the measuring process ended with wait status {status}")
    succeeded, result = pickle.loads(data)
    if not succeeded:
        raise SystemExit(result)
    return result  # type: ignore[no-any-return]


def interleaved(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs every variant once a round, each in a child; the order turns from round to round."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            samples[name].append(in_child(variants[name]))
        print(f"  round {number + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
    print(" " * 30, end="\r", file=sys.stderr, flush=True)
    return samples


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Gives a list that holds the seconds that the block took, once it has ended."""
    seconds: list[float] = []
    gc.collect()
    start = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - start)


class PeakMemory:
    """Watches this process's anonymous memory from a thread while the block runs; `bytes_over` is its peak's growth."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._baseline = self._peak = _anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self._peak = max(self._peak, _anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._peak = max(self._peak, _anonymous_bytes())

    @property
    def bytes_over(self) -> int:
        return self._peak - self._baseline


def _anonymous_bytes() -> int:
    """Anonymous and shared-anonymous memory in use."""
    total = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison. Samples are in `unit`; the figure is what the limit bounds."""

    measurement: str
    unit: str
    ours: list[float]
    against: str = ""
    theirs: list[float] = dataclasses.field(default_factory=list)
    figure: float = 0.0
    figure_unit: str = "x"
    limit: float | None = None
    num_bytes: int = 0

    @classmethod
    def ratio(
        cls,
        measurement: str,
        ours: list[float],
        against: str,
        theirs: list[float],
        *,
        limit: float | None,
        num_bytes: int = 0,
        unit: str = "s",
    ) -> Row:
        """Compares the minima: what noise adds is never negative."""
        return cls(measurement, unit, ours, against, theirs, min(ours) / min(theirs), "x", limit, num_bytes)

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return ""
        return "met" if self.figure <= self.limit else "MISSED"


_HEADINGS = ("measurement", "min", "median", "max", "GB/s", "against", "min", "median", "max", "figure", "limit", "")


_CSV_COLUMNS = (
    *("measurement", "unit", "samples", "against", "against_samples"),
    *("figure", "figure_unit", "limit", "verdict", "bytes"),
)


def table(rows: list[Row]) -> str:
    lines = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    left = {0, 5, 11}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    def number(value: float) -> str:
        return f"{value:.3f}" if row.unit == "s" else f"{value:.1f}"

    def spread(samples: list[float]) -> tuple[str, str, str]:
        if not samples:
            return "", "", ""
        return number(min(samples)), number(statistics.median(samples)), number(max(samples))

    rate = f"{row.num_bytes / min(row.ours) / 1e9:.2f}" if row.num_bytes and row.unit == "s" else ""
    limit = "" if row.limit is None else f"{row.limit:g} {row.figure_unit}"
    return (
        f"{row.measurement} [{row.unit}]",
        *spread(row.ours),
        rate,
        row.against,
        *spread(row.theirs),
        f"{row.figure:.2f} {row.figure_unit}",
        limit,
        row.verdict,
    )


def write_csv(path: str, rows: list[Row]) -> None:
    """One line a row, with every sample (separated by spaces)."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_CSV_COLUMNS)
        for row in rows:
            writer.writerow(
                [
                    row.measurement,
                    row.unit,
                    " ".join(f"{sample:.6g}" for sample in row.ours),
                    row.against,
                    " ".join(f"{sample:.6g}" for sample in row.theirs),
                    f"{row.figure:.4g}",
                    row.figure_unit,
                    "" if row.limit is None else row.limit,
                    row.verdict,
                    row.num_bytes or "",
                ]
            )


def machine(folder: Path) -> str:
    """What the numbers were measured on, in a line."""
    found, storage = machine_found(), storage_of(str(folder))
    return (
        f"{found['processor']}, {found['cores']} cores, {found['memory_bytes'] / (1 << 30):.0f} GiB; "
        f"Linux {found['kernel']}; {storage['file_system']}; huge pages {found['huge_pages']}; "
        f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    )
