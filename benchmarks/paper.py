"""What loading the largest public models would take, planned on checkpoints that hold no data.

    python -m benchmarks.paper [--models NAME,FILE,...] [--layouts tp8,tp16,ep64] [--ranks first,middle,last | all]
                               [--csv FILE] [--json FILE]

Checkpoints of true size are written with headers and holes (public_models.py), into a folder that is removed again. The
loads of some ranks are planned by `plan_model`, each in a process of its own, and what they read is put against a
loader of which every rank reads everything. Times are those of bytes over stated bandwidths, not measured.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import math
import os
import re
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from weightlift.config import KiB, MiB
from weightlift.cost import LoadCosts
from weightlift.errors import CheckpointError
from weightlift.model.parallel import ParallelConfig
from weightlift.model.planning import plan_model

from .measure import in_child, machine
from .public_models import FOLDER, PublicModel, share_of

# Of a node: what it reads its checkpoint from, in bytes per second; all its ranks share it.
STORAGE = {"NVMe 7 GB/s": 7e9, "NVMe 14 GB/s": 14e9, "NFS 2.5 GB/s": 2.5e9}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is dealt to ranks: "tp8", "ep64", "tp8ep8"."""

    name: str
    tp_size: int
    ep_size: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        match = re.fullmatch(r"(?:tp([1-9]\d*))?(?:ep([1-9]\d*))?", text)
        if not text or match is None:
            raise argparse.ArgumentTypeError(f"layout {text!r}: expected a tp size, an ep size or both, as tp8 or ep64")
        return cls(text, int(match[1] or 1), int(match[2] or 1))

    @property
    def num_ranks(self) -> int:
        return max(self.tp_size, self.ep_size)

    def rank(self, number: int) -> ParallelConfig:
        """In both kinds of parallelism, if there are both, a rank has the same number."""
        return ParallelConfig(
            tp_rank=number % self.tp_size,
            tp_size=self.tp_size,
            ep_rank=number % self.ep_size,
            ep_size=self.ep_size,
        )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a model's checkpoint is made of, in bytes, and what the layout makes of it."""

    num_tensors: int
    num_shards: int
    num_bytes: int
    disk_bytes: int  # taken by its files
    seconds: float  # to write them


@dataclasses.dataclass(frozen=True)
class Expected:
    """What follows from the shapes and from how layers are cut, beside no plan; in bytes.

    Attributes:
        of_rank: that a rank needs.
        of_node: that the ranks of a node need, each byte once.
        unused: that no rank needs.
        replicated: that all ranks together need more than once.
        cut_columns: of the other ranks' parts of what is cut along its rows, which lie between the pieces of a rank.
    """

    of_rank: float
    of_node: float
    unused: int
    replicated: float
    cut_columns: float


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan of one rank, and what planning took."""

    rank: int
    num_transfers: int
    bytes_needed: int
    bytes_read: int
    num_reads: int
    num_forced: int  # of which loaders looked at values
    read_sizes: list[tuple[int, int, int]]  # (bytes from, number, bytes), to twice as many bytes
    strategies: dict[str, int]  # bytes by how they are read
    shared_bytes: int  # of bytes_read, what the plan takes for read by the node's other ranks too
    parameter_bytes: int
    seconds_at: dict[str, float]  # of each of STORAGE, for this rank alone
    plan_seconds: float
    plan_cpu_seconds: float
    plan_peak_bytes: int  # of resident memory, with Python and torch

    @property
    def over_read(self) -> float:
        return self.bytes_read / self.bytes_needed


@dataclasses.dataclass(frozen=True)
class Row:
    """A model in a layout: plans of some of its ranks, and what a node reads."""

    model: str
    layout: Layout
    node_ranks: int
    checkpoint: Checkpoint
    expected: Expected
    ranks: list[Planned]
    device_bandwidth: float

    @property
    def node_bytes(self) -> float:
        """Read by a node whose ranks share nothing."""
        return statistics.mean(rank.bytes_read for rank in self.ranks) * self.node_ranks

    @property
    def storage_bytes(self) -> float:
        """Read from storage by a node whose ranks load at once: what several of them read comes from it once."""
        alone = statistics.mean(rank.bytes_read - rank.shared_bytes for rank in self.ranks)
        return alone * self.node_ranks + max(rank.shared_bytes for rank in self.ranks)

    @property
    def everything_bytes(self) -> int:
        """The same where each of them reads the checkpoint."""
        return self.checkpoint.num_bytes * self.node_ranks

    def seconds(self, storage: str) -> float:
        """Of a node: storage or the copy to devices, each by its own link, whichever takes longer."""
        of_each = statistics.mean(rank.seconds_at[storage] for rank in self.ranks) * self.node_ranks
        return max(of_each * self.storage_bytes / self.node_bytes, self.device_seconds)

    def once_seconds(self, storage: str) -> float:
        return max(self.expected.of_node / STORAGE[storage], self.device_seconds)

    def everything_seconds(self, storage: str) -> float:
        return max(self.everything_bytes / STORAGE[storage], self.device_seconds)

    @property
    def device_seconds(self) -> float:
        return max(rank.bytes_needed for rank in self.ranks) / self.device_bandwidth

    @property
    def deviation(self) -> float:
        """Of what the plans need from what the shapes say, at most; a part of the latter."""
        return max(abs(rank.bytes_needed / self.expected.of_rank - 1) for rank in self.ranks)


def write(model: PublicModel, folder: Path) -> Checkpoint:
    """Writes the checkpoint, and sees that it is what is published, and that it takes no space."""
    started = time.perf_counter()
    shards = model.shards()
    model.write(folder)
    made = {
        "num_tensors": sum(map(len, shards)),
        "num_elements": sum(tensor.num_elements for shard in shards for tensor in shard),
        "num_bytes": sum(tensor.num_bytes for shard in shards for tensor in shard),
        "num_shards": len(shards),
    }
    for what, number in model.published.items():
        if made[what] != number:
            raise SystemExit(f"{model.name}: {what} is {made[what]} here, {number} as published")
    disk_bytes = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    seconds = time.perf_counter() - started
    return Checkpoint(made["num_tensors"], made["num_shards"], made["num_bytes"], disk_bytes, seconds)


def require_holes(folder: Path) -> None:
    """Raises SystemExit where files take the space that they are long."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(64 * MiB)
        if os.fstat(file.fileno()).st_blocks * 512 > MiB:
            raise SystemExit(f"the file system of {folder} has no sparse files; name another folder by --folder")


def expected(model: PublicModel, layout: Layout, node_ranks: int) -> Expected:
    parallel = layout.rank(0)
    of_rank = of_node = replicated = cut_columns = 0.0
    unused = 0
    for group in model.groups():
        for tensor in group:
            size = tensor.num_bytes
            mine = size * share_of(tensor, parallel, num_kv_heads=model.num_kv_heads)
            of_rank += mine
            of_node += size * share_of(tensor, parallel, num_kv_heads=model.num_kv_heads, num_ranks=node_ranks)
            if not mine:
                unused += size
                continue
            replicated += mine * layout.num_ranks - size
            if tensor.cut == "columns" or (tensor.cut == "experts' columns" and layout.ep_size == 1):
                cut_columns += size - mine
    return Expected(of_rank, of_node, unused, replicated, cut_columns)


def plan_rank(folder: Path, layout: Layout, number: int, node_ranks: int) -> Planned:
    """Plans as a process of a node with that many ranks. For a process of its own, whose environment it sets."""
    os.environ |= {"LOCAL_RANK": str(number % node_ranks), "LOCAL_WORLD_SIZE": str(node_ranks)}
    started, cpu_started = time.perf_counter(), time.process_time()
    try:
        plan = plan_model(folder, parallel=layout.rank(number))
    except (CheckpointError, ValueError) as error:
        raise SystemExit(f"{layout.name} rank {number}: {error}") from error
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    report = plan.report
    strategies: dict[str, int] = {}
    for file in plan.files:
        strategies[file.strategy] = strategies.get(file.strategy, 0) + file.bytes_read
    return Planned(
        rank=number,
        num_transfers=report.num_transfers,
        bytes_needed=report.bytes_needed,
        bytes_read=report.bytes_read,
        num_reads=report.num_reads,
        num_forced=report.num_forced,
        read_sizes=[(size.low, size.num_reads, size.bytes) for size in plan.read_sizes],
        strategies=strategies,
        shared_bytes=report.buffered_bytes if node_ranks > 1 else 0,
        parameter_bytes=plan.memory.host_parameters,
        seconds_at={
            name: LoadCosts.of_bandwidth(bandwidth).seconds_of_reads(plan.read_sizes)
            for name, bandwidth in STORAGE.items()
        },
        plan_seconds=seconds,
        plan_cpu_seconds=cpu_seconds,
        plan_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def rows_of(model: PublicModel, layouts: list[Layout], ranks: str, options: argparse.Namespace) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="weightlift-paper-", dir=options.folder) as name:
        folder = Path(name)
        require_holes(folder)
        checkpoint = in_child(lambda: write(model, folder))
        for layout in layouts:
            if layout.ep_size > 1 and not model.num_experts:
                print(f"{model.name} {layout.name}: left out, it has no experts", file=sys.stderr)
                continue
            node_ranks = min(options.node_ranks, layout.num_ranks)
            plans = []
            for number in numbers_of(ranks, layout.num_ranks):
                print(f"planning {model.name} {layout.name} rank {number} ...", file=sys.stderr, flush=True)
                plan = functools.partial(plan_rank, folder, layout, number, node_ranks)
                plans.append(in_child(plan))
            awaited = in_child(lambda layout=layout, size=node_ranks: expected(model, layout, size))  # type: ignore[misc]
            bandwidth = options.device_bandwidth * 1e9
            rows.append(Row(model.name, layout, node_ranks, checkpoint, awaited, plans, bandwidth))
    return rows


def numbers_of(ranks: str, num_ranks: int) -> list[int]:
    if ranks == "all":
        return list(range(num_ranks))
    places = {"first": 0, "middle": num_ranks // 2, "last": num_ranks - 1}
    return sorted({places[name] for name in ranks.split(",")})


# ---- what is shown

_HEADINGS = (
    *("model", "layout", "ranks", "needed", "read", "over-read", "reads", "mean", "plan", "CPU", "peak"),
    *("node reads", "from storage", "once", "everything", *STORAGE, "device"),
)


def summary(rows: list[Row], seconds: float, device_bandwidth: float) -> str:
    ranks = [rank for row in rows for rank in row.ranks]
    peak = max((rank.plan_peak_bytes for rank in ranks), default=0)
    disk = max((row.checkpoint.disk_bytes for row in rows), default=0)
    return (
        f"planned {len(ranks)} ranks in {seconds:.0f} s; a process took {peak / MiB:.0f} MiB at most, a checkpoint "
        f"{disk / MiB:.0f} MiB of disk, which are free again\n"
        "needed, read, reads: of the planned rank that reads most; plan, CPU, peak: seconds and memory of planning, "
        "the most of a rank; GB = 10^9 bytes\n"
        "node reads: its ranks in all; from storage: what several of them read once, as they load at once; once: what "
        "they need, each byte once; everything: by each rank the whole checkpoint, which storage gives once where it "
        "fits into the page cache\n"
        "seconds: from storage / once / everything, of storage that the ranks of a node share, a read costing as much "
        f"as 32 KiB more, or of the copy to each device at {device_bandwidth:g} GB/s where that is longer"
    )


def table(rows: list[Row]) -> str:
    lines = [_HEADINGS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    most = max(row.ranks, key=lambda rank: rank.bytes_read)
    return (
        row.model,
        row.layout.name,
        ",".join(str(rank.rank) for rank in row.ranks) if len(row.ranks) <= 3 else f"{len(row.ranks)} ranks",
        f"{most.bytes_needed / 1e9:.1f} GB",
        f"{most.bytes_read / 1e9:.1f} GB",
        f"{most.over_read:.2f}",
        str(most.num_reads),
        f"{most.bytes_read / most.num_reads / KiB:.0f} KiB",
        f"{max(rank.plan_seconds for rank in row.ranks):.1f} s",
        f"{max(rank.plan_cpu_seconds for rank in row.ranks):.1f} s",
        f"{max(rank.plan_peak_bytes for rank in row.ranks) / MiB:.0f} MiB",
        f"{row.node_bytes / 1e9:.0f} GB",
        f"{row.storage_bytes / 1e9:.0f} GB",
        f"{row.expected.of_node / 1e9:.0f} GB",
        f"{row.everything_bytes / 1e9:.0f} GB",
        *(
            f"{row.seconds(name):.0f} / {row.once_seconds(name):.0f} / {row.everything_seconds(name):.0f} s"
            for name in STORAGE
        ),
        f"{row.device_seconds:.1f} s",
    )


def note(row: Row) -> str:
    """How the sizes of a row come about."""
    awaited, most = row.expected, max(row.ranks, key=lambda rank: rank.bytes_read)
    needed = awaited.of_rank * row.layout.num_ranks
    text = (
        f"{row.model} {row.layout.name}: all ranks need {needed / 1e9:.1f} GB = "
        f"{row.checkpoint.num_bytes / 1e9:.1f} of the checkpoint - {awaited.unused / 1e9:.1f} that no rank uses + "
        f"{awaited.replicated / 1e9:.1f} that several need; the plans differ from that by {row.deviation:.3%}"
    )
    if awaited.cut_columns:
        text += (
            f". Weights cut along their rows: {awaited.cut_columns / 1e9:.1f} GB lie between a rank's pieces; it "
            f"reads {(most.bytes_read - most.bytes_needed) / 1e9:.1f} GB in vain"
        )
    return text


def write_csv(path: str, rows: list[Row]) -> None:
    """One line a planned rank."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                *("model", "layout", "rank", "checkpoint_bytes", "num_tensors", "num_shards", "num_transfers"),
                *("bytes_needed", "bytes_expected", "bytes_read", "num_reads", "parameter_bytes"),
                *("plan_seconds", "plan_cpu_seconds", "plan_peak_bytes"),
                *(
                    "node_ranks",
                    "node_bytes_read",
                    "node_bytes_from_storage",
                    "node_bytes_once",
                    "node_bytes_everything",
                ),
                *(f"node_seconds at {name}" for name in STORAGE),
                *(f"once_seconds at {name}" for name in STORAGE),
                *(f"everything_seconds at {name}" for name in STORAGE),
                "device_seconds",
            ]
        )
        for row in rows:
            checkpoint = row.checkpoint
            for rank in row.ranks:
                writer.writerow(
                    [
                        *(row.model, row.layout.name, rank.rank),
                        *(checkpoint.num_bytes, checkpoint.num_tensors, checkpoint.num_shards, rank.num_transfers),
                        *(rank.bytes_needed, round(row.expected.of_rank), rank.bytes_read, rank.num_reads),
                        rank.parameter_bytes,
                        *(f"{rank.plan_seconds:.3f}", f"{rank.plan_cpu_seconds:.3f}", rank.plan_peak_bytes),
                        *(row.node_ranks, round(row.node_bytes), round(row.storage_bytes)),
                        *(round(row.expected.of_node), row.everything_bytes),
                        *(f"{row.seconds(name):.2f}" for name in STORAGE),
                        *(f"{row.once_seconds(name):.2f}" for name in STORAGE),
                        *(f"{row.everything_seconds(name):.2f}" for name in STORAGE),
                        f"{row.device_seconds:.2f}",
                    ]
                )


def to_dict(rows: list[Row]) -> list[dict[str, Any]]:
    return [
        {
            **dataclasses.asdict(row),
            "node_bytes": row.node_bytes,
            "storage_bytes": row.storage_bytes,
            "everything_bytes": row.everything_bytes,
            "seconds": {name: row.seconds(name) for name in STORAGE},
            "once_seconds": {name: row.once_seconds(name) for name in STORAGE},
            "everything_seconds": {name: row.everything_seconds(name) for name in STORAGE},
            "device_seconds": row.device_seconds,
            "deviation": row.deviation,
            "note": note(row),
        }
        for row in rows
    ]


def model_of(text: str) -> PublicModel:
    """One of models/, by name, or that of another such file.

    Raises:
        SystemExit: there is none, or it can't be planned.
    """
    path = FOLDER / f"{text.lower()}.json"
    if not path.exists():
        path = Path(text)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
        raise SystemExit(f"no model {text!r}: expected one of {known}, or a file like those of {FOLDER}")
    try:
        return PublicModel.of_file(path)
    except (CheckpointError, KeyError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from error


def _ranks(text: str) -> str:
    if text != "all" and not set(text.split(",")) <= {"first", "middle", "last"}:
        raise argparse.ArgumentTypeError(f"ranks {text!r}: expected all, or some of first,middle,last")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, found {text!r}")
    return int(text)


def _bandwidth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of gigabytes per second, found {text!r}")
    return value


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__.splitlines()[0])
    names = ",".join(sorted(path.stem for path in FOLDER.glob("*.json")))
    parser.add_argument("--models", default=names, help=f"names, or files like those of models/ (default: {names})")
    parser.add_argument(
        "--layouts",
        type=lambda text: [Layout.parse(part) for part in text.split(",")],
        default="tp8,tp16,ep64",
        help="sizes of tensor and expert parallelism (default: tp8,tp16,ep64)",
    )
    parser.add_argument("--ranks", type=_ranks, default="first,middle,last", help="which ranks are planned, or all")
    parser.add_argument(
        "--node-ranks",
        type=_count,
        default=8,
        metavar="N",
        help="ranks of a node (default: 8)",
    )
    parser.add_argument(
        "--device-bandwidth",
        type=_bandwidth,
        default=50.0,
        metavar="GB/S",
        help="from host to each device (default: 50)",
    )
    parser.add_argument("--folder", help="for a checkpoint at a time (default: that for temporary files)")
    parser.add_argument("--csv", metavar="FILE", help="write one line a planned rank")
    parser.add_argument("--json", metavar="FILE", help="write everything, sizes of reads too")
    options = parser.parse_args(arguments)
    if options.folder and not os.path.isdir(options.folder):
        parser.error(f"--folder {options.folder}: no such folder")
    for file in filter(None, (options.csv, options.json)):
        if not Path(file).parent.is_dir():
            parser.error(f"{file}: no such folder")
    models = [model_of(text) for text in options.models.split(",")]
    started = time.perf_counter()
    rows = [row for model in models for row in rows_of(model, options.layouts, options.ranks, options)]
    seconds = time.perf_counter() - started
    print(machine(Path(options.folder or tempfile.gettempdir())))
    print(summary(rows, seconds, options.device_bandwidth))
    print(table(rows))
    for row in rows:
        print(note(row))
    if options.csv:
        write_csv(options.csv, rows)
    if options.json:
        Path(options.json).write_text(json.dumps(to_dict(rows), indent=2))


if __name__ == "__main__":
    main()
