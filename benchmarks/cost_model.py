"""What `weightlift plan --bench` estimates, held against real loads that are cold. See README.md in this folder.

Run it from the root of the repository by `python -m benchmarks.cost_model`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import functools
import gc
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weightlift
from weightlift.cost import Estimate, LoadCosts
from weightlift.model.loader import plan_load
from weightlift.plan import LoadPlan, Slice, open_plan, plan_checkpoint, plan_of, record_slices
from weightlift.reserved import ReservedMemory
from weightlift.storage_bench import measure_storage

from . import data
from .cold import cached_fraction
from .fused import OPS
from .load import entries_of, module_of
from .measure import in_child, machine, stopwatch
from .throttle import throttled

_TOLERANCE = 0.2


@dataclasses.dataclass(frozen=True)
class Case:
    """A load and its plan.

    Attributes:
        prepare: what an engine does before, untimed; gives the load.
    """

    folder: Path
    plan: Callable[[], LoadPlan]
    prepare: Callable[[], Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Row:
    """An estimate, and the seconds of the load, one of each round."""

    name: str
    estimate: Estimate
    seconds: list[float]

    @property
    def ratio(self) -> float:
        """Over the fastest: what noise adds is never negative."""
        return self.estimate.total / min(self.seconds)

    @property
    def cells(self) -> tuple[str, ...]:
        estimate = self.estimate
        parts = (estimate.header, estimate.start, estimate.record, estimate.read, estimate.memory, estimate.total)
        seconds = (min(self.seconds), statistics.median(self.seconds), max(self.seconds))
        return (
            self.name,
            *(f"{value:.3f}" for value in parts),
            estimate.bound_by,
            *(f"{value:.3f}" for value in seconds),
            f"{self.ratio:.2f}",
            "within 20 %" if abs(self.ratio - 1) <= _TOLERANCE else "OFF",
        )


_HEADINGS = (
    *("load", "header", "start", "record", "read", "memory", "estimate", "bound by"),
    *("min", "median", "max", "estimate/min", ""),
)


def of_model(folder: Path) -> Case:
    """`fast_load` into a module whose parameters were never touched."""

    def plan() -> LoadPlan:
        with ReservedMemory().factories():
            module = module_of(entries_of(folder))
        return plan_load(module, folder)

    def prepare() -> Callable[[], object]:
        module = module_of(entries_of(folder))
        return lambda: weightlift.fast_load(module, folder)

    return Case(folder, plan, prepare)


def of_recording(folder: Path, record: Callable[[weightlift.Checkpoint, Callable[..., Tensor]], object]) -> Case:
    """What records copies into tensors that `empty` makes."""

    def plan() -> LoadPlan:
        with open_plan(folder) as checkpoint:
            program: Any = checkpoint._program

            def empty(shape: Any, dtype: torch.dtype) -> Tensor:
                tensor: Tensor = program.reserved.empty(shape, dtype=dtype)
                program.memory.add(tensor.nbytes)
                return tensor

            kept = record(checkpoint, empty)
            checkpoint.run()
            found = plan_of(checkpoint)
            del kept
            return found

    def load() -> object:
        with weightlift.open_checkpoint(folder) as checkpoint:
            return record(checkpoint, torch.empty)

    return Case(folder, plan, lambda: load)


def of_slices(folder: Path, *slices: str) -> Case:
    """What `weightlift plan --slice` describes."""
    parsed = [Slice.parse(text) for text in slices]
    return of_recording(folder, lambda checkpoint, empty: record_slices(checkpoint, parsed, empty))


def of_op(name: str, num_bytes: int) -> Case:
    """An op of benchmarks/fused.py, of every weight of a checkpoint."""
    op = OPS[name]

    def record(checkpoint: weightlift.Checkpoint, empty: Callable[..., Tensor]) -> list[Tensor]:
        params = []
        for tensor in checkpoint.values():
            made = op.fused(tensor)
            params.append(empty(made.shape, dtype=made.dtype))
            params[-1].copy_(made)
        return params

    return of_recording(data.weights(op.dtype, op.shape, num_bytes), record)


def cases(num_bytes: int, num_small: int) -> dict[str, Callable[[], Case]]:
    """Makes each; checkpoints that aren't there are written."""

    def llama() -> Path:
        return data.llama(num_bytes / data.GIB)

    def whole(folder: Path) -> Case:
        return Case(folder, lambda: plan_checkpoint(folder), lambda: lambda: weightlift.load_file(folder))

    return {
        "whole, load_file": lambda: whole(llama()),
        "whole, fast_load": lambda: of_model(llama()),
        "rank of 8, rows": lambda: of_slices(llama(), "*_proj.weight:0:3/8"),
        "rank of 8, columns": lambda: of_slices(llama(), "*_proj.weight:1:3/8"),
        # Of rows of 32 KiB, the gaps between pieces are not worth reading.
        "rank of 8, columns of wide rows": lambda: of_slices(
            data.weights(torch.bfloat16, (4096, 16384), num_bytes), "w.*:1:3/8"
        ),
        "small tensors": lambda: whole(data.experts(num_small)),
        **{name: functools.partial(of_op, name, num_bytes) for name in OPS},
    }


def make_cold(folder: Path) -> None:
    """Takes the files out of the page cache, and leaves that of others alone. Ends the program where some stays."""
    paths = data.shard_paths(folder)
    for _ in range(3):
        for path in paths:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_fraction(paths) == 0:
            return
    raise SystemExit(f"{folder}: {cached_fraction(paths):.2%} of it stays in the page cache: not cold")


def folder_of(make: Callable[[], Case]) -> Path:
    return make().folder


def estimate_of(make: Callable[[], Case], costs: LoadCosts) -> Estimate:
    case = make()
    make_cold(case.folder)
    gc.collect()  # as before a load that is timed
    return case.plan().estimate(costs)


def seconds_of(make: Callable[[], Case]) -> float:
    case = make()
    load = case.prepare()
    make_cold(case.folder)
    kept = []
    with stopwatch() as seconds:
        kept.append(load())
    return seconds[0]


def rows_of(wanted: dict[str, Callable[[], Case]], costs: LoadCosts, rounds: int) -> list[Row]:
    """Each load in turn, every time in a process of its own."""
    estimates: dict[str, list[Estimate]] = {name: [] for name in wanted}
    seconds: dict[str, list[float]] = {name: [] for name in wanted}
    for number in range(rounds):
        for name, make in wanted.items():
            print(f"\r\033[Kround {number + 1}: {name}", end="", file=sys.stderr, flush=True)
            estimates[name].append(in_child(functools.partial(estimate_of, make, costs)))
            seconds[name].append(in_child(functools.partial(seconds_of, make)))
    print(file=sys.stderr)
    # The least of the estimates, too: recording is timed in each.
    return [Row(name, min(estimates[name], key=lambda found: found.total), seconds[name]) for name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=data.BUILD, metavar="DIR", help="where checkpoints are, or go")
    parser.add_argument("--gibibytes", type=float, default=1, help="of each checkpoint (default: 1)")
    parser.add_argument("--small", type=int, default=20_000, help="how many small tensors (default: 20000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each load is made (default: 3)")
    parser.add_argument("--only", help="comma-separated parts of names of loads")
    parser.add_argument("--bench", metavar="FILE", help="what weightlift bench --json wrote (default: measure now)")
    parser.add_argument("--full", action="store_true", help="measure the storage as without --quick")
    parser.add_argument(
        "--throttle",
        type=float,
        metavar="GB/S",
        help="make the disk so slow (root; a control group of the block layer)",
    )
    parser.add_argument("--throttle-reads", type=int, default=0, metavar="N", help="and let it answer N reads a second")
    parser.add_argument("--csv", metavar="FILE", help="write the table, with every sample")
    options = parser.parse_args()

    data.BUILD = options.folder
    data.BUILD.mkdir(parents=True, exist_ok=True)
    found = cases(int(options.gibibytes * data.GIB), options.small)
    wanted = {
        name: make
        for name, make in found.items()
        if not options.only or any(part in name for part in options.only.split(","))
    }
    # Written before the disk is made slow.
    folders = [in_child(functools.partial(folder_of, make)) for make in wanted.values()]
    largest = max(
        (path for folder in folders for path in data.shard_paths(folder)), key=lambda path: path.stat().st_size
    )
    print(machine(data.BUILD) + (f"; reads limited to {options.throttle:g} GB/s" if options.throttle else ""))
    with contextlib.ExitStack() as block:
        if options.throttle:
            block.enter_context(throttled(data.BUILD, int(options.throttle * 1e9), options.throttle_reads))
        if options.bench:
            costs = LoadCosts.from_bench(options.bench)
        else:
            print("measuring the storage", file=sys.stderr, flush=True)
            costs = in_child(lambda: measure_storage(str(largest), quick=not options.full).costs)
        for way, pairs in costs.read_seconds.items():
            print(f"{way}: " + ", ".join(f"{size / 1024:g} KiB {1e6 * seconds:.1f} us" for size, seconds in pairs))
        print(
            f"copies {costs.copy_bytes_per_second / 1e9:.2f} GB/s, "
            f"fresh memory {costs.fresh_bytes_per_second / 1e9:.2f} GB/s; "
            f"start {1e3 * costs.start_seconds:.0f} ms, slowdown {costs.slowdown:.2f}"
        )
        rows = rows_of(wanted, costs, options.rounds)
    lines = [_HEADINGS, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ("load", *(field.name for field in dataclasses.fields(Estimate)), "total", "ratio", "samples")
            )
            for row in rows:
                samples = " ".join(f"{sample:.6g}" for sample in row.seconds)
                writer.writerow((row.name, *dataclasses.astuple(row.estimate), row.estimate.total, row.ratio, samples))


if __name__ == "__main__":
    main()
