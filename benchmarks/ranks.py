"""Ranks of one node that load at once, each its part: what storage gives them in all, how long it takes, and in how
much memory.

    python -m benchmarks.ranks [--quick] [--ranks 2,4] [--cuts model,rows,columns,copies] [--rounds N] [--json FILE]

Each rank is a process with LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun starts them, and nothing else in common with
the others. Beside them, one process loads the whole checkpoint. All is cold: the files, and no others, are written out
and taken out of the page cache before each run. What is read is counted by the block layer, for these processes alone,
where a blkio control group can be made (as root); else by /proc/PID/io.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import weightlift
from benchmarks import data
from benchmarks.cold import cached_fraction
from benchmarks.measure import in_child, machine
from weightlift.config import DEFAULT_STAGING_BYTES
from weightlift.model import ParallelConfig, load_model
from weightlift.model.planning import plan_model
from weightlift.report import LoadReport

MIB = 1 << 20
_BLKIO = Path("/sys/fs/cgroup/blkio")
_COLD_FRACTION = 0.005
_RESET_PEAK = Path("/proc/self/clear_refs")  # proc(5): 5 takes the peak of resident memory back to what is resident
# How a rank takes its part of a checkpoint.
CUTS = {
    "model": "a Llama for tensor parallelism, by load_model",
    "columns": "every matrix along dim 1: pieces of rows",
    "rows": "every matrix along dim 0: a contiguous part",
    "copies": "everything, in each rank",
}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What one process did. Sizes in bytes; times in seconds on the clock that processes share.

    Attributes:
        host_bytes: resident memory at its peak, beyond what was there before and the parameters.
        storage_bytes: that this process had storage read, by /proc/PID/io.
        looked: what `look` gave.
    """

    started: float
    ended: float
    parameter_bytes: int
    host_bytes: int
    storage_bytes: int
    report: dict[str, Any]
    looked: Any


@dataclasses.dataclass(frozen=True)
class Run:
    """Processes that loaded at once.

    Attributes:
        device_bytes: read from block devices in all.
        counted_by: how these were counted.
    """

    device_bytes: int
    counted_by: str
    ranks: list[Loaded]

    @property
    def seconds(self) -> float:
        """From the first one's start to the last one's end."""
        return max(rank.ended for rank in self.ranks) - min(rank.started for rank in self.ranks)

    @property
    def host_bytes(self) -> int:
        return max(rank.host_bytes for rank in self.ranks)


def make_cold(folder: Path) -> None:
    """Takes these files, and no others, out of the page cache. Ends the program where they stay."""
    paths = data.shard_paths(folder)
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    fraction = cached_fraction(paths)
    if fraction > _COLD_FRACTION:
        raise SystemExit(f"{fraction:.1%} of {folder} stays in the page cache: somebody else reads it")


def load_at_once(
    folder: Path,
    cut: str,
    num_ranks: int,
    *,
    config: weightlift.LoadConfig | None = None,
    late_seconds: float = 0.0,
    memory_group: Path | None = None,
    look: Callable[[nn.Module, int], Any] | None = None,
) -> Run:
    """Loads a checkpoint in that many processes at once, from storage.

    Args:
        cut: one of CUTS.
        late_seconds: by which each rank starts later than the one before.
        memory_group: `cgroup.procs` of a control group that they are to run in.
        look: called in each process when it has loaded, with the module and the rank.
    """
    plan_model(folder)  # imports what a first load makes torch import, which is a matter of each process, not of ranks
    context = ForkContext()
    with _counting() as (group, counted), contextlib.ExitStack() as ranks:
        pipes = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            arguments = (there, folder, cut, rank, num_ranks, config, [group, memory_group], look)
            process = context.Process(target=_run_rank, args=arguments)
            process.start()
            ranks.callback(process.join)
            ranks.callback(process.kill)  # those that wait for one that has failed
            there.close()
            pipes.append(here)
        for pipe in pipes:
            _receive(pipe)  # it is ready
        make_cold(folder)
        for pipe in pipes:
            pipe.send(None)
            time.sleep(late_seconds)
        results = [_receive(pipe) for pipe in pipes]
        device_bytes = counted()
    if device_bytes is None:
        return Run(sum(result.storage_bytes for result in results), "/proc/PID/io", results)
    return Run(device_bytes, "block layer", results)


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit("a rank has failed") from None


@contextlib.contextmanager
def _counting() -> Iterator[tuple[Path | None, Callable[[], int | None]]]:
    """A control group whose reads the block layer counts, as its `cgroup.procs`, and how to ask for the bytes; or
    neither."""
    group = _BLKIO / f"weightlift-ranks-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None, lambda: None
        return
    try:
        yield group / "cgroup.procs", lambda: _bytes_read(group / "blkio.throttle.io_service_bytes")
    finally:
        group.rmdir()


def _bytes_read(table: Path) -> int:
    lines = (line.split() for line in table.read_text().splitlines())
    # A loop device's reads are counted again on the disk that its file lies on, for a thread of the kernel's.
    return sum(int(fields[2]) for fields in lines if len(fields) == 3 and fields[1] == "Read")


def _run_rank(
    pipe: Connection,
    folder: Path,
    cut: str,
    rank: int,
    num_ranks: int,
    config: weightlift.LoadConfig | None,
    groups: list[Path | None],
    look: Callable[[nn.Module, int], Any] | None,
) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
    for group in filter(None, groups):
        group.write_text(str(os.getpid()))
    module = nn.Module() if cut == "model" else _module_of(folder, cut, rank, num_ranks)
    pipe.send(None)
    pipe.recv()
    storage_before, memory_before = _storage_bytes(), _memory_bytes("VmRSS")
    _RESET_PEAK.write_text("5")
    started = time.monotonic()
    if cut == "model":
        module = load_model(folder, parallel=ParallelConfig(tp_rank=rank, tp_size=num_ranks), config=config)
        report = cast(LoadReport, module.load_report)
    else:
        report = weightlift.fast_load(module, folder, config=config)
    ended = time.monotonic()
    peak = _memory_bytes("VmHWM") - memory_before
    parameter_bytes = sum(param.nbytes for param in module.parameters())
    pipe.send(
        Loaded(
            started=started,
            ended=ended,
            parameter_bytes=parameter_bytes,
            host_bytes=peak - parameter_bytes,
            storage_bytes=_storage_bytes() - storage_before,
            report=dataclasses.asdict(report),
            looked=None if look is None else look(module, rank),
        )
    )


def _module_of(folder: Path, cut: str, rank: int, num_ranks: int) -> nn.Module:
    """A parameter for what a rank takes of each tensor, from torch.empty: untouched memory."""
    root = nn.Module()
    with weightlift.open_checkpoint(folder) as checkpoint:
        for name, tensor in checkpoint.items():
            shape, dim = list(tensor.shape), {"rows": 0, "columns": 1}.get(cut)
            param = nn.Parameter(torch.empty(shape, dtype=tensor.dtype, device="meta"), requires_grad=False)
            if dim is not None and len(shape) == 2:
                shape[dim] //= num_ranks

                def load_part(param: nn.Parameter, loaded: Tensor, dim: int = dim) -> None:
                    size = param.shape[dim]
                    param.data.copy_(loaded.narrow(dim, rank * size, size))

            *path, last = name.split(".")
            owner = root
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            param = nn.Parameter(torch.empty(shape, dtype=tensor.dtype), requires_grad=False)
            if dim is not None and len(shape) == 2:
                setattr(param, "weight_loader", load_part)  # noqa: B010  # a Parameter has no such attribute for mypy
            owner.register_parameter(last, param)
    return root


def _storage_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def _memory_bytes(field: str) -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


# ---- what is shown


@dataclasses.dataclass(frozen=True)
class Row:
    cut: str
    num_ranks: int
    checkpoint_bytes: int
    runs: list[Run]
    alone: list[Run]  # one process that loads everything

    @property
    def device_ratio(self) -> float:
        return max(run.device_bytes for run in self.runs) / self.checkpoint_bytes

    @property
    def time_ratio(self) -> float:
        return min(run.seconds for run in self.runs) / min(run.seconds for run in self.alone)


_HEADINGS = ("cut", "ranks", "from device", "of checkpoint", "limit", "seconds", "alone", "ratio", "limit")
_MEMORY_HEADINGS = ("memory", "budget", "buffered", "counted by")
_DEVICE_LIMIT, _TIME_LIMIT = 1.1, 1.3


def table(rows: list[Row]) -> str:
    lines = [(*_HEADINGS, *_MEMORY_HEADINGS), *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    most = max(row.runs, key=lambda run: run.device_bytes)
    reports = [rank.report for rank in most.ranks]
    buffered = sum(report["buffered_bytes"] for report in reports) / sum(report["bytes_read"] for report in reports)
    return (
        row.cut,
        str(row.num_ranks),
        f"{most.device_bytes / 1e9:.2f} GB",
        f"{row.device_ratio:.3f}",
        f"{_DEVICE_LIMIT} {'met' if row.device_ratio <= _DEVICE_LIMIT else 'MISSED'}",
        f"{min(run.seconds for run in row.runs):.2f}",
        f"{min(run.seconds for run in row.alone):.2f}",
        f"{row.time_ratio:.2f}",
        f"{_TIME_LIMIT} {'met' if row.time_ratio <= _TIME_LIMIT else 'MISSED'}",
        f"{max(run.host_bytes for run in row.runs) / MIB:.0f} MiB",
        f"{DEFAULT_STAGING_BYTES / row.num_ranks / MIB:.0f} MiB",
        f"{buffered:.0%}",
        most.counted_by,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small checkpoint, one round: to see that it works")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint (default: 2)")
    parser.add_argument("--ranks", default="2,4", help="numbers of processes (default: 2,4)")
    cuts_help = "; ".join(f"{cut}: {what}" for cut, what in CUTS.items())
    parser.add_argument("--cuts", default=",".join(CUTS), help=cuts_help)
    parser.add_argument("--rounds", type=int, default=5, help="figures of time are the least of them (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write every run")
    options = parser.parse_args(arguments)
    cuts = options.cuts.split(",")
    if unknown := set(cuts) - set(CUTS):
        parser.error(f"--cuts: expected some of {', '.join(CUTS)}, found {', '.join(sorted(unknown))}")
    if options.quick:
        options.gib, options.rounds = 0.1, 1
    folder = in_child(lambda: data.llama_model(options.gib))
    checkpoint_bytes = sum(path.stat().st_size for path in data.shard_paths(folder))
    variants: dict[tuple[str, int], list[Run]] = {
        (cut, size): [] for cut in cuts for size in (1, *map(int, options.ranks.split(",")))
    }
    for number in range(options.rounds):
        for (cut, size), runs in variants.items():
            print(f"  round {number + 1}: {cut}, {size} ranks  ", end="\r", file=sys.stderr, flush=True)
            runs.append(load_at_once(folder, cut, size))
    rows = [
        Row(cut, size, checkpoint_bytes, runs, variants[cut, 1]) for (cut, size), runs in variants.items() if size > 1
    ]
    print(machine(folder))
    print(
        f"a checkpoint of {checkpoint_bytes / 1e9:.2f} GB, cold; {options.rounds} rounds: bytes and memory are the "
        "most, times the\nleast. alone: one process that loads everything; memory: of the rank that took most, beyond "
        "its parameters;\nbudget: staging_bytes; buffered: of what is read, through the page cache"
    )
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
