"""Loads across a slow link: what `auto` makes of networks and gateways, beside what these allow, and other loaders.

    python -m benchmarks.slow_link [--only nfs gateway] [--rounds 3] [--csv FILE]

The link is a file system of our own (slow_link.c, by libfuse3): this needs root, a C compiler, libfuse3-dev and fuse3.
See README.md in this folder.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import torch
from torch import Tensor

import weightlift
from benchmarks import data, reference
from benchmarks.measure import in_child, machine, stopwatch
from benchmarks.rivals import LOADERS, OURS, Checkpoint, Loader
from weightlift.checkpoint import locate

WORLD_SIZE, RANK = 8, 3
GOAL = 0.9  # of what the profile allows
CEILING = "plain reads"
# Of plain reads: threads, and the size of a read, which FUSE and NFS pass on whole.
_DEPTHS, _READ_BYTES = (32, 128), 1 << 20
# One after the other, and nobody can do with fewer: the folder is listed, its index opened and read, a shard opened and
# its header read; then data begins to come.
_ROUND_TRIPS = 6
_SOURCE = Path(__file__).with_name("slow_link.c")
_MEMORY = Path("/dev/shm")  # what lies behind the link has to be faster than the link


@dataclass(frozen=True)
class Profile:
    """A network, by what it does to reads.

    Attributes:
        latency: seconds from a request to its first byte.
        bandwidth: bytes a second, of all together.
        stream_bandwidth: bytes a second of one stream; 0: as for all.
        stream: what is one: a "request", an open file ("handle"), a "file".
    """

    what: str
    latency: float
    bandwidth: float
    stream_bandwidth: float = 0.0
    stream: str = "request"

    @property
    def description(self) -> str:
        limits = f"{self.latency * 1e3:g} ms, {self.bandwidth / 1e9:g} GB/s"
        if self.stream_bandwidth:
            limits += f", {self.stream_bandwidth / 1e9:g} GB/s a {self.stream}"
        return f"{self.what}: {limits}"

    @property
    def arguments(self) -> list[str]:
        return [
            f"--latency-us={self.latency * 1e6:g}",
            f"--bandwidth={self.bandwidth:g}",
            f"--stream-bandwidth={self.stream_bandwidth:g}",
            f"--stream={self.stream}",
        ]

    def slower(self, times: float) -> Profile:
        """The same network in slow motion, in which a processor that is too slow for it, or busy, is fast enough."""
        return replace(
            self,
            latency=self.latency * times,
            bandwidth=self.bandwidth / times,
            stream_bandwidth=self.stream_bandwidth / times,
        )

    def seconds(self, num_bytes: int) -> float:
        """The least that reading so many bytes can take."""
        return num_bytes / self.bandwidth + _ROUND_TRIPS * self.latency


PROFILES = {
    "nfs": Profile("NFS over 25 GbE", 0.5e-3, 3.0e9),
    "nfs-10g": Profile("NFS over 10 GbE", 1e-3, 1.2e9),
    "lustre": Profile("Lustre, each file on one server", 0.5e-3, 2.4e9, 1.2e9, "file"),
    "gateway": Profile("object store behind a gateway, 10 GbE", 20e-3, 1.2e9, 100e6, "request"),
    "bucket": Profile("bucket mounted by FUSE, which streams each open file", 20e-3, 1.2e9, 300e6, "handle"),
}


@dataclass(frozen=True)
class Part:
    """What is loaded: everything (`dim` is None), or one rank's part of each tensor, cut along a dimension."""

    name: str
    dim: int | None

    def of(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """(dimension, start, length), or None where the tensor is not cut: it is left out then."""
        if self.dim is None or len(shape) <= self.dim:
            return None
        length = shape[self.dim] // WORLD_SIZE
        return self.dim, RANK * length, length

    def ranges(self, folder: Path) -> list[tuple[Path, int, int]]:
        """The bytes that it takes, as (file, begin, end). Of columns: the whole tensor, since the pieces of its rows
        are shorter than what passes the link while one of them is asked for."""
        found: list[tuple[Path, int, int]] = []
        for entry in locate(folder).tensors.values():
            begin, end = entry.offset, entry.offset + entry.nbytes
            cut = self.of(entry.shape)
            if self.dim is not None and cut is None:
                continue
            if cut is not None and cut[0] == 0:
                row = entry.nbytes // entry.shape[0]
                begin, end = begin + cut[1] * row, begin + (cut[1] + cut[2]) * row
            path = Path(entry.shard.path)
            if found and found[-1][0] == path and found[-1][2] == begin:
                found[-1] = (path, found[-1][1], end)
            else:
                found.append((path, begin, end))
        return found


PARTS = {
    "whole": Part("whole", None),
    "columns": Part(f"one rank of {WORLD_SIZE}, columns cut (dimension 0)", 0),
    "rows": Part(f"one rank of {WORLD_SIZE}, rows cut (dimension 1)", 1),
}


@contextmanager
def mounted(program: Path, folder: Path, profile: Profile, answer: dict[str, int]) -> Iterator[Path]:
    """The folder across the link, with nothing of it in the page cache. In the end `answer` has what it was asked."""
    point = tempfile.mkdtemp(prefix="weightlift-link-")
    with subprocess.Popen(
        [program, folder, point, "-f", "-oro", *profile.arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        while not os.path.ismount(point):
            if process.poll() is not None:
                raise SystemExit("FUSE can't be mounted (it needs root, /dev/fuse and fuse3)")
            time.sleep(0.01)
        try:
            yield Path(point)
        finally:
            # Lazily: the kernel may hold files of a ring of io_uring for a moment after its end.
            subprocess.run(["umount", "--lazy", point], check=True)
            answer.update(json.loads(process.communicate()[0]))
    os.rmdir(point)


def build(folder: Path) -> Path:
    """Compiles the file system. Ends the program where that can't be."""
    found = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise SystemExit("no libfuse3 (Debian: apt-get install gcc pkg-config libfuse3-dev fuse3)")
    program = folder / "slow_link"
    subprocess.run(["cc", "-O2", str(_SOURCE), "-o", str(program), *found.stdout.split()], check=True)
    return program


def destinations(part: Part, folder: Path) -> dict[str, Tensor]:
    """Fresh tensors for what a rank takes of each."""
    tensors = {}
    for entry in locate(folder).tensors.values():
        cut = part.of(entry.shape)
        if cut is not None:
            shape = list(entry.shape)
            shape[cut[0]] = cut[2]
            tensors[entry.name] = torch.empty(shape, dtype=entry.dtype)
    return tensors


def load(loader: Loader, checkpoint: Checkpoint, part: Part, into: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if part.dim is None:
        return loader.whole(checkpoint)
    assert loader.slices is not None
    loader.slices(checkpoint, into, RANK, WORLD_SIZE, part.dim)
    return into


def seconds_of(loader: Loader, checkpoint: Checkpoint, part: Part, behind: Path) -> float:
    loader.prepare()
    into = {} if part.dim is None else destinations(part, behind)
    kept = []
    with stopwatch() as seconds:
        kept.append(load(loader, checkpoint, part, into))
        for tensor in kept[0].values():  # so that each page has to be there
            int(tensor.view(-1).view(torch.uint8)[::4096].sum())
    return seconds[0]


def seconds_of_plain_reads(ranges: list[tuple[Path, int, int]], depth: int) -> float:
    kept = []
    with stopwatch() as seconds:
        kept.append(reference.read_ranges(ranges, depth, _READ_BYTES))
    return seconds[0]


@dataclass
class Result:
    """One cell of the table."""

    allowed: float
    num_bytes: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    asked: dict[str, dict[str, int]] = field(default_factory=dict)  # of the link, in the last run

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])


def measure(
    program: Path, behind: Path, profile: Profile, part: Part, loaders: Mapping[str, Loader], rounds: int
) -> Result:
    ranges = part.ranges(behind)
    num_bytes = sum(end - begin for _, begin, end in ranges)
    result = Result(profile.seconds(num_bytes), num_bytes)

    def run(name: str, action: Callable[[Path], float]) -> None:
        answer: dict[str, int] = {}
        try:
            with mounted(program, behind, profile, answer) as folder:
                seconds = in_child(partial(action, folder))
        except SystemExit as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            return
        result.samples.setdefault(name, []).append(seconds)
        result.asked[name] = answer

    actions: dict[str, Callable[[Path], float]] = {}
    for depth in _DEPTHS:
        actions[f"{CEILING}, {depth} at a time"] = lambda folder, depth=depth: seconds_of_plain_reads(  # type: ignore[misc]
            [(folder / path.name, begin, end) for path, begin, end in ranges], depth
        )
    for name, loader in loaders.items():
        if part.dim is None or loader.slices is not None:
            actions[name] = lambda folder, loader=loader: seconds_of(  # type: ignore[misc]
                loader, Checkpoint(folder, data.shard_paths(folder), folder / "model.tensors"), part, behind
            )
    names = list(actions)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            print(
                f"\r\033[K{profile.what}, {part.name}, round {number + 1}: {name}", end="", file=sys.stderr, flush=True
            )
            run(name, actions[name])
    print("\r\033[K", end="", file=sys.stderr, flush=True)
    return result


_HEADINGS = (
    "",
    "median s",
    "min",
    "max",
    "GB/s",
    "of the profile",
    "of plain reads",
    "reads",
    "GB read",
    "most in flight",
)


def table(result: Result) -> str:
    fastest = min((result.median(name) for name in result.samples if name.startswith(CEILING)), default=0.0)
    lines = [_HEADINGS]
    for name in sorted(result.samples, key=result.median):
        samples, asked, median = result.samples[name], result.asked[name], result.median(name)
        lines.append(
            (
                name,
                f"{median:.3f}",
                f"{min(samples):.3f}",
                f"{max(samples):.3f}",
                f"{result.num_bytes / median / 1e9:.2f}",
                f"{result.allowed / median:.2f}",
                f"{fastest / median:.2f}",
                str(asked["reads"]),
                f"{asked['bytes'] / 1e9:.3f}",
                str(asked["most_in_flight"]),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def verdict(result: Result) -> str:
    """Whether the goal is met: by minima, what noise adds is never negative. Of what the profile allows, or of plain
    reads where this machine can't do that."""
    if OURS not in result.samples:
        return ""
    fastest = min(min(samples) for name, samples in result.samples.items() if name.startswith(CEILING))
    share = max(result.allowed, fastest) / min(result.samples[OURS])
    met = "met" if share >= GOAL else "MISSED"
    return f"{OURS}: {share:.2f} of what the link and this machine allow (goal {GOAL}): {met}"


def available() -> dict[str, Loader]:
    """The loaders that are installed; not tensorizer, which reads a format of its own."""
    found = {}
    for name, loader in LOADERS.items():
        with contextlib.suppress(PackageNotFoundError):
            if loader.version and loader.package != "tensorizer":
                found[name] = loader
    return found


def write_csv(path: str, results: Mapping[tuple[str, str], Result]) -> None:
    """One line for each profile, part and loader, with every sample (separated by spaces)."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("profile", "part", "loader", "median_s", "samples_s", "allowed_s", "bytes", "reads", "bytes_read")
        )
        for (profile, part), result in results.items():
            for name, samples in result.samples.items():
                times = " ".join(f"{sample:.6g}" for sample in samples)
                asked = result.asked[name]
                seconds = (f"{result.median(name):.6g}", times, f"{result.allowed:.6g}")
                writer.writerow((profile, part, name, *seconds, result.num_bytes, asked["reads"], asked["bytes"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_link", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 GiB, one round: to see that it works")
    parser.add_argument("--rounds", type=int, help="how often each loader runs (default: 3)")
    parser.add_argument("--only", nargs="+", default=list(PROFILES), choices=PROFILES, help="profiles of networks")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what is loaded")
    parser.add_argument(
        "--slower", type=float, default=1.0, metavar="N", help="each network in slow motion, by so much"
    )
    parser.add_argument("--loaders", nargs="+", help="names of loaders (default: all that are installed)")
    parser.add_argument("--csv", metavar="FILE", help="write the table, with every sample, as CSV too")
    options = parser.parse_args()

    # An engine has imported it; the first copy of a CheckpointTensor would, which takes half a second.
    importlib.import_module("torch.distributed.tensor")

    rounds, gibibytes = options.rounds or (1 if options.quick else 3), 1 if options.quick else 2
    loaders = {name: loader for name, loader in available().items() if name in (options.loaders or LOADERS)}
    source = in_child(lambda: data.llama(gibibytes))
    results: dict[tuple[str, str], Result] = {}
    with tempfile.TemporaryDirectory(prefix="weightlift-link-", dir=_MEMORY) as memory:
        behind = Path(shutil.copytree(source, Path(memory, "checkpoint")))
        program = build(Path(memory))
        print(machine(data.BUILD))
        print(
            f"{gibibytes} GiB in {len(data.shard_paths(behind))} shards, in memory behind the link; mounted anew for "
            f"each run; {rounds} rounds, loaders taking turns, each run in a fresh process; weightlift "
            f"{weightlift.__version__}"
        )
        for profile_name in options.only:
            profile = PROFILES[profile_name].slower(options.slower)
            print(f"\n{profile_name}: {profile.description}")
            for part_name in options.parts:
                part = PARTS[part_name]
                result = measure(program, behind, profile, part, loaders, rounds)
                results[profile_name, part_name] = result
                print(f"\n{profile_name}, {part.name}: {result.num_bytes / 1e9:.3f} GB, {result.allowed:.3f} s allowed")
                print(table(result), verdict(result), sep="\n", flush=True)
    if options.csv:
        write_csv(options.csv, results)


if __name__ == "__main__":
    main()
