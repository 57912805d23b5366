"""weightlift beside other loaders of safetensors: a whole checkpoint and one rank of 8, cold and warm.

Run it by `make bench-rivals`, which makes a virtual environment with all of them. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError
from typing import Any

import torch
from torch import Tensor

import weightlift
from benchmarks import data, reference
from benchmarks.cold import cold_method, require_state
from benchmarks.measure import PeakMemory, in_child, machine, stopwatch
from benchmarks.rivals import LOADERS, OURS, Checkpoint, Loader, write_tensorizer_file
from weightlift.checkpoint import locate

WORLD_SIZE, RANK = 8, 3
MIB = 1 << 20
REFERENCE = "O_DIRECT reference"
_QUEUE_DEPTHS = (2, 4, 8, 16)
_PAGE = 4096
# Of medians: the goals of this project on its reference host.
WHOLE_COLD, WHOLE_WARM, RANK_COLD = 0.6, 0.9, 0.2


@dataclass
class Part:
    """One comparison: seconds of each loader, one of each round."""

    name: str
    num_bytes: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)  # MiB of anonymous memory, what was loaded included

    def median(self, loader: str) -> float:
        return statistics.median(self.samples[loader])


def checkpoint_of(gibibytes: int) -> Checkpoint:
    folder = in_child(lambda: data.llama(gibibytes))
    shards = data.shard_paths(folder)
    tensorizer_file = data.BUILD / f"{folder.name}.tensors"
    if not tensorizer_file.exists():
        in_child(lambda: write_tensorizer_file(shards, tensorizer_file))
    return Checkpoint(folder, shards, tensorizer_file)


def rows_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Fresh tensors for one rank's rows, in the order of the files."""
    return {
        entry.name: torch.empty((entry.shape[0] // WORLD_SIZE, *entry.shape[1:]), dtype=entry.dtype)
        for entry in locate(checkpoint.folder).tensors.values()
    }


def touch(tensors: Mapping[str, Tensor]) -> None:
    """Looks at each page, so that all of it has to be in memory."""
    for tensor in tensors.values():
        int(tensor.view(-1).view(torch.uint8)[::_PAGE].sum())


def load(loader: Loader, checkpoint: Checkpoint, *, whole: bool, into: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Everything, or one rank's rows of it, in memory when this returns."""
    if whole:
        tensors = loader.whole(checkpoint)
    else:
        assert loader.slices is not None
        loader.slices(checkpoint, into, RANK, WORLD_SIZE, 0)
        tensors = into
    touch(tensors)
    return tensors


def check(loader: Loader, checkpoint: Checkpoint, *, whole: bool) -> None:
    """Ends the program, which is a child, where a byte is not as safetensors reads it."""
    into = {} if whole else rows_of(checkpoint)
    loader.prepare()
    tensors = load(loader, checkpoint, whole=whole, into=into)
    expected = LOADERS["safetensors"].whole(checkpoint)
    if tensors.keys() != expected.keys():
        raise SystemExit("its tensors have other names")
    for name, tensor in expected.items():
        if not whole:
            rows = into[name].shape[0]
            tensor = tensor[RANK * rows : (RANK + 1) * rows]
        if tensors[name].shape != tensor.shape or not torch.equal(
            tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ):
            raise SystemExit(f"{name}: other bytes than safetensors reads")


def seconds_of(loader: Loader, checkpoint: Checkpoint, *, whole: bool, cold: bool) -> float:
    loader.prepare()
    into = {} if whole else rows_of(checkpoint)
    require_state(_files_of(loader, checkpoint), cold=cold)
    kept = []
    with stopwatch() as seconds:
        kept.append(load(loader, checkpoint, whole=whole, into=into))
    return seconds[0]


def peak_of(loader: Loader, checkpoint: Checkpoint, *, whole: bool, cold: bool) -> float:
    """MiB; measured apart, since the watching thread takes time from the loader."""
    loader.prepare()
    into = {} if whole else rows_of(checkpoint)
    require_state(_files_of(loader, checkpoint), cold=cold)
    with PeakMemory() as peak:
        load(loader, checkpoint, whole=whole, into=into)
    return peak.bytes_over / MIB


def reference_seconds(checkpoint: Checkpoint, queue_depth: int) -> float:
    require_state(checkpoint.shards, cold=True)
    kept = []
    with stopwatch() as seconds:
        kept.append(reference.read_direct(checkpoint.shards, queue_depth))
    return seconds[0]


def _files_of(loader: Loader, checkpoint: Checkpoint) -> list[str]:
    return [str(checkpoint.tensorizer_file)] if loader.package == "tensorizer" else checkpoint.files


def measure(parts: Mapping[tuple[bool, bool], Part], checkpoint: Checkpoint, rounds: int) -> dict[str, str]:
    """Fills the parts, by (whole, cold). Returns the loaders that are not to be had, with the reason."""
    failures: dict[str, str] = {}

    def attempt(name: str, action: Callable[[], Any]) -> Any:
        try:
            return in_child(action)
        except SystemExit as error:
            failures[name] = str(error)
            return None

    for name, loader in LOADERS.items():
        try:
            version = loader.version
        except PackageNotFoundError:
            failures[name] = "not installed"
            continue
        print(f"checking {name} {version}", file=sys.stderr, flush=True)
        for whole in (True, False):
            if name not in failures and (whole or loader.slices):
                attempt(name, partial(check, loader, checkpoint, whole=whole))
    for (whole, cold), part in parts.items():
        actions: dict[str, Callable[[], float]] = {
            name: partial(seconds_of, loader, checkpoint, whole=whole, cold=cold)
            for name, loader in LOADERS.items()
            if whole or loader.slices
        }
        if whole and cold:
            depths = {depth: in_child(partial(reference_seconds, checkpoint, depth)) for depth in _QUEUE_DEPTHS}
            depth = min(depths, key=depths.__getitem__)
            actions[f"{REFERENCE}, depth {depth}"] = partial(reference_seconds, checkpoint, depth)
        names = list(actions)
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                if name in failures:
                    continue
                print(
                    f"\r\033[K{part.name}, round {number + 1} of {rounds}: {name}", end="", file=sys.stderr, flush=True
                )
                seconds = attempt(name, actions[name])
                if seconds is not None:
                    part.samples.setdefault(name, []).append(seconds)
        for name, loader in LOADERS.items():
            if name in part.samples and name not in failures:
                peak = attempt(name, partial(peak_of, loader, checkpoint, whole=whole, cold=cold))
                if peak is not None:
                    part.peaks[name] = peak
        for name in failures:
            part.samples.pop(name, None)
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return failures


def table(part: Part) -> str:
    headings = (part.name, "version", "median s", "min", "max", "GB/s", "peak MiB", f"/ {OURS}")
    lines: list[tuple[str, ...]] = [headings]
    for name in sorted(part.samples, key=part.median):
        samples, peak = part.samples[name], part.peaks.get(name)
        lines.append(
            (
                name,
                LOADERS[name].version if name in LOADERS else "",
                f"{part.median(name):.3f}",
                f"{min(samples):.3f}",
                f"{max(samples):.3f}",
                f"{part.num_bytes / part.median(name) / 1e9:.2f}",
                "" if peak is None else f"{peak:.0f}",
                f"{part.median(name) / part.median(OURS):.2f}" if OURS in part.samples else "",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def verdicts(parts: Mapping[tuple[bool, bool], Part]) -> list[str]:
    """The goals, and who is faster than weightlift."""
    lines = []
    owned = [name for name, loader in LOADERS.items() if loader.is_owned and name != OURS]
    streamers = [name for name, loader in LOADERS.items() if loader.is_streamer]
    for key, limit, kind, names in (
        ((True, True), WHOLE_COLD, "rival with owned tensors", owned),
        ((True, False), WHOLE_WARM, "rival with owned tensors", owned),
        ((False, True), RANK_COLD, "streamer", streamers),
    ):
        part = parts[key]
        rivals = [name for name in names if name in part.samples]
        if OURS in part.samples and rivals:
            fastest = min(rivals, key=part.median)
            ratio = part.median(OURS) / part.median(fastest)
            verdict = "met" if ratio <= limit else "MISSED"
            lines.append(f"{part.name}: {ratio:.2f} x the fastest {kind}, {fastest} (goal {limit:g}): {verdict}")
    for part in parts.values():
        for name in sorted(part.samples, key=part.median):
            if name in LOADERS and name != OURS and OURS in part.samples and part.median(name) < part.median(OURS):
                why = "" if LOADERS[name].is_owned else ", whose tensors are the pages of the file"
                lines.append(f"{part.name}: {name}{why}, is faster: {part.median(name) / part.median(OURS):.2f} x")
    return lines


def write_csv(path: str, parts: Mapping[tuple[bool, bool], Part], failures: Mapping[str, str]) -> None:
    """One line for each part and loader, with every sample (separated by spaces)."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("part", "loader", "version", "median_s", "samples_s", "bytes", "peak_MiB", "failure"))
        for part in parts.values():
            for name, samples in part.samples.items():
                version = LOADERS[name].version if name in LOADERS else ""
                peak = f"{part.peaks[name]:.1f}" if name in part.peaks else ""
                times = " ".join(f"{sample:.6g}" for sample in samples)
                writer.writerow((part.name, name, version, f"{part.median(name):.6g}", times, part.num_bytes, peak, ""))
        for name, reason in failures.items():
            writer.writerow(("", name, "", "", "", "", "", reason))


def plot(path: str, parts: Mapping[tuple[bool, bool], Part]) -> None:
    """Bars of the medians, with the spread from least to most."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]  # of this option alone

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 2
    figure, all_axes = pyplot.subplots(
        math.ceil(len(parts) / columns),
        columns,
        figsize=(13, 3.4 * math.ceil(len(parts) / columns)),
        layout="constrained",
        squeeze=False,
    )
    for axes, part in zip(all_axes.flat, parts.values(), strict=False):
        names = sorted(part.samples, key=part.median)
        medians = [part.median(name) for name in names]
        spread = [
            [part.median(name) - min(part.samples[name]) for name in names],
            [max(part.samples[name]) - part.median(name) for name in names],
        ]
        colors = ["tab:orange" if name == OURS else "gray" if name not in LOADERS else "tab:blue" for name in names]
        bars = axes.barh(range(len(names)), medians, xerr=spread, color=colors, capsize=3)
        axes.bar_label(bars, [f"{seconds:.2f}" for seconds in medians], padding=6)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.margins(x=0.12)
        axes.set_title(part.name)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 GiB, 3 rounds: to see that it works")
    parser.add_argument("--rounds", type=int, help="how often each loader runs (default: 7)")
    parser.add_argument("--csv", metavar="FILE", help="write the tables, with every sample, as CSV too")
    parser.add_argument("--plot", metavar="FILE", help="draw them too (needs matplotlib)")
    options = parser.parse_args()

    rounds, gibibytes = options.rounds or (3 if options.quick else 7), 1 if options.quick else 2
    data.BUILD.mkdir(parents=True, exist_ok=True)
    checkpoint = checkpoint_of(gibibytes)
    num_bytes = sum(entry.nbytes for entry in locate(checkpoint.folder).tensors.values())
    parts = {
        (whole, cold): Part(
            f"{'whole' if whole else f'one rank of {WORLD_SIZE}'}, {'cold' if cold else 'warm'}",
            num_bytes if whole else num_bytes // WORLD_SIZE,
        )
        for whole in (True, False)
        for cold in (True, False)
    }
    print(machine(data.BUILD))
    print(
        f"{num_bytes / 1e9:.3f} GB in {len(checkpoint.shards)} shards; {cold_method()}, and found so; {rounds} rounds, "
        f"loaders taking turns, each run in a fresh process; weightlift {weightlift.__version__}"
    )
    failures = measure(parts, checkpoint, rounds)
    for part in parts.values():
        print(f"\n{table(part)}")
    print()
    for line in (*(f"{name}: {reason}" for name, reason in failures.items()), *verdicts(parts)):
        print(line)
    if options.csv:
        write_csv(options.csv, parts, failures)
    if options.plot:
        plot(options.plot, parts)


if __name__ == "__main__":
    main()
