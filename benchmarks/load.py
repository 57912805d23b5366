"""Speed and memory of loading, beside plain reads and safetensors. See README.md in this folder.

Run it by `make bench`, or from the root of the repository by `python -m benchmarks.load`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import weightlift
from benchmarks import data, reference
from benchmarks.cold import cold_method, drop_page_cache, warm_page_cache
from benchmarks.measure import PeakMemory, Row, in_child, interleaved, machine, stopwatch, table, write_csv
from weightlift.checkpoint import locate
from weightlift.config import DEFAULT_STAGING_BYTES
from weightlift.entries import TensorEntry

WORLD_SIZE, RANK = 8, 3
MIB = 1 << 20
_QUEUE_DEPTHS = (2, 4, 8, 16)


def entries_of(folder: Path) -> list[TensorEntry]:
    return list(locate(folder).tensors.values())


def module_of(entries: list[TensorEntry], world_size: int = 1, rank: int = 0) -> nn.Module:
    """A module with a parameter for each tensor, or for one rank's rows of it, from torch.empty: untouched memory."""

    def load_rows(param: nn.Parameter, loaded: Tensor) -> None:
        param.data.copy_(loaded.narrow(0, rank * param.shape[0], param.shape[0]))

    root = nn.Module()
    for entry in entries:
        *path, last = entry.name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        shape = (entry.shape[0] // world_size, *entry.shape[1:])
        param = nn.Parameter(torch.empty(shape, dtype=entry.dtype), requires_grad=False)
        if world_size > 1:
            setattr(param, "weight_loader", load_rows)  # noqa: B010  # a Parameter has no such attribute for mypy
        module.register_parameter(last, param)
    return root


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.data for name, param in module.named_parameters()}


def timed(prepare: Callable[[], Any], run: Callable[[Any], object], paths: list[Path], *, cold: bool) -> float:
    """Seconds of run(prepare()), with the files cold or warm. What it makes is kept until the clock has stopped."""
    prepared = prepare()
    (drop_page_cache if cold else warm_page_cache)(paths)
    kept = []
    with stopwatch() as seconds:
        kept.append(run(prepared))
    return seconds[0]


def nothing() -> None:
    return None


def best_queue_depth(paths: list[Path], rounds: int) -> int:
    samples = interleaved(
        {
            str(depth): lambda depth=depth: timed(  # type: ignore[misc]
                nothing, lambda _: reference.read_direct(paths, depth), paths, cold=True
            )
            for depth in _QUEUE_DEPTHS
        },
        rounds,
    )
    return int(min(samples, key=lambda depth: min(samples[depth])))


def cold_rows(gibibytes: int, rounds: int) -> list[Row]:
    folder = in_child(lambda: data.llama(gibibytes))
    paths, entries = data.shard_paths(folder), entries_of(folder)
    num_bytes = sum(entry.nbytes for entry in entries)
    depth = best_queue_depth(paths, min(rounds, 3))
    samples = interleaved(
        {
            "R": lambda: timed(nothing, lambda _: reference.read_direct(paths, depth), paths, cold=True),
            "load_file": lambda: timed(nothing, lambda _: weightlift.load_file(folder), paths, cold=True),
            "safetensors": lambda: timed(nothing, lambda _: reference.safetensors_owned(paths), paths, cold=True),
            "fast_load": lambda: timed(
                lambda: module_of(entries), lambda module: weightlift.fast_load(module, folder), paths, cold=True
            ),
        },
        rounds,
    )
    size = f"{gibibytes} GiB, cold"
    r, owned = samples["R"], samples["safetensors"]
    r_name = f"R (O_DIRECT, depth {depth})"
    return [
        Row.ratio(f"load_file, {size}", samples["load_file"], r_name, r, limit=1.15, num_bytes=num_bytes),
        Row.ratio(
            f"load_file, {size}", samples["load_file"], "safetensors, owned", owned, limit=0.6, num_bytes=num_bytes
        ),
        Row.ratio(f"fast_load, module, {size}", samples["fast_load"], r_name, r, limit=1.3, num_bytes=num_bytes),
    ]


def warm_rows(gibibytes: int, rounds: int) -> list[Row]:
    folder = in_child(lambda: data.llama(gibibytes))
    paths, entries = data.shard_paths(folder), entries_of(folder)
    num_bytes = sum(entry.nbytes for entry in entries)

    def read_plainly(module: nn.Module, *, huge_pages: bool) -> nn.Module:
        params = parameters_of(module)
        if huge_pages:
            reference.advise_huge_pages(params.values())
        reference.read_buffered([(entry.shard.path, entry.offset, params[entry.name]) for entry in entries], 2)
        return module

    def plain(*, huge_pages: bool) -> float:
        return timed(
            lambda: module_of(entries), lambda module: read_plainly(module, huge_pages=huge_pages), paths, cold=False
        )

    def fast(config: weightlift.LoadConfig) -> float:
        return timed(
            lambda: module_of(entries),
            lambda module: weightlift.fast_load(module, folder, config=config),
            paths,
            cold=False,
        )

    samples = interleaved(
        {
            "pread, huge": lambda: plain(huge_pages=True),
            "fast_load": lambda: fast(weightlift.LoadConfig()),
            "pread, small": lambda: plain(huge_pages=False),
            "fast_load, small": lambda: fast(weightlift.LoadConfig(advise_hugepages=False)),
            "load_file": lambda: timed(nothing, lambda _: weightlift.load_file(folder), paths, cold=False),
            "safetensors": lambda: timed(nothing, lambda _: reference.safetensors_owned(paths), paths, cold=False),
        },
        rounds,
    )
    size = f"{gibibytes} GiB, warm"
    return [
        Row.ratio(
            f"fast_load, module, {pages} pages, {size}",
            samples[ours],
            "pread, 2 threads",
            samples[theirs],
            limit=1.3,
            num_bytes=num_bytes,
        )
        for pages, ours, theirs in (
            ("huge", "fast_load", "pread, huge"),
            ("small", "fast_load, small", "pread, small"),
        )
    ] + [
        Row.ratio(
            f"load_file, {size}",
            samples["load_file"],
            "safetensors, owned",
            samples["safetensors"],
            limit=None,
            num_bytes=num_bytes,
        ),
    ]


def rank_rows(gibibytes: int, rounds: int) -> list[Row]:
    folder = in_child(lambda: data.llama(gibibytes))
    paths, entries = data.shard_paths(folder), entries_of(folder)

    def read_slices(module: nn.Module) -> nn.Module:
        reference.safetensors_slices(paths, parameters_of(module), RANK, WORLD_SIZE)
        return module

    samples = interleaved(
        {
            "fast_load": lambda: timed(
                lambda: module_of(entries, WORLD_SIZE, RANK),
                lambda module: weightlift.fast_load(module, folder),
                paths,
                cold=True,
            ),
            "safetensors": lambda: timed(lambda: module_of(entries, WORLD_SIZE), read_slices, paths, cold=True),
        },
        rounds,
    )
    return [
        Row.ratio(
            f"one rank of {WORLD_SIZE} of {gibibytes} GiB, cold",
            samples["fast_load"],
            "safetensors, get_slice",
            samples["safetensors"],
            limit=0.6,
            num_bytes=sum(entry.nbytes for entry in entries) // WORLD_SIZE,
        )
    ]


def memory_rows(gibibytes: int, rounds: int) -> list[Row]:
    """Peak of anonymous memory beyond the destination. Its pages are touched before, or counted and subtracted."""
    folder = in_child(lambda: data.llama(gibibytes))
    paths, entries = data.shard_paths(folder), entries_of(folder)
    staging = DEFAULT_STAGING_BYTES
    limit = staging / MIB + 64

    def through_load_file() -> float:
        drop_page_cache(paths)
        with PeakMemory() as peak:
            state = weightlift.load_file(folder)
        destination: int = sum(tensor.nbytes for tensor in state.values())
        return (peak.bytes_over - destination) / MIB

    def into_module(*, touched: bool) -> float:
        module = module_of(entries)
        if touched:
            for param in module.parameters():
                param.data.zero_()
        drop_page_cache(paths)
        with PeakMemory() as peak:
            weightlift.fast_load(module, folder)
        destination = 0 if touched else sum(param.nbytes for param in module.parameters())
        return (peak.bytes_over - destination) / MIB

    rows = []
    for name, action in (
        ("load_file", through_load_file),
        ("fast_load", lambda: into_module(touched=False)),
        ("fast_load, touched", lambda: into_module(touched=True)),
    ):
        samples = [in_child(action) for _ in range(min(rounds, 3))]
        rows.append(
            Row(
                f"memory beyond {gibibytes} GiB, {name}",
                "MiB",
                samples,
                figure=max(samples),
                figure_unit="MiB",
                limit=limit,
            )
        )
    return rows


class _Enough(Exception):
    """Leaves a recording without running it."""


def recording_rows(num_tensors: int, rounds: int) -> list[Row]:
    """Three narrows and a copy of a small piece of each tensor, as weight loaders make them: microseconds a tensor."""
    folder = in_child(lambda: data.small_pieces(num_tensors))

    def run(sources: Any) -> float:
        names = list(sources)
        params = {name: torch.empty(32, 8, dtype=torch.bfloat16) for name in names}
        with stopwatch() as seconds:
            for name in names:
                piece = sources[name].narrow(0, 64, 16).narrow(1, 8, 8)
                params[name].narrow(0, 16, 16).copy_(piece)
        return seconds[0] / num_tensors * 1e6

    def plain() -> float:
        return run({f"t.{i}": torch.zeros(256, 256, dtype=torch.bfloat16) for i in range(num_tensors)})

    def recorded(*, watch: bool) -> float:
        figure = 0.0
        try:
            with weightlift.open_checkpoint(folder, watch=watch) as checkpoint:
                # The first operation on a tensor subclass makes torch import a part of itself: no cost of a tensor.
                torch.empty(1, 1, dtype=torch.bfloat16).copy_(checkpoint["t.0"].narrow(0, 0, 1).narrow(1, 0, 1))
                figure = run(checkpoint)
                raise _Enough
        except _Enough:
            return figure

    samples = interleaved(
        {"plain": plain, "bare": lambda: recorded(watch=False), "watched": lambda: recorded(watch=True)}, rounds
    )
    return [
        Row(
            f"recording a tensor, {how}",
            "us",
            samples[name],
            "plain torch",
            samples["plain"],
            min(samples[name]) - min(samples["plain"]),
            "us more",
            limit,
        )
        for how, name, limit in (("without the watch", "bare", 40.0), ("with the watch", "watched", 120.0))
    ]


def many_rows(num_tensors: int, rounds: int) -> list[Row]:
    """Recording and reading of very many tensors: each alone, and together."""
    folder = in_child(lambda: data.experts(num_tensors))
    paths = data.shard_paths(folder)
    experts_per_layer = 256

    def destinations(*, touched: bool) -> list[tuple[Tensor, Tensor]]:
        layers = [
            (
                torch.empty((experts_per_layer, *data.EXPERT_SHAPE), dtype=torch.bfloat16),
                torch.empty((experts_per_layer, *data.SCALE_SHAPE)),
            )
            for _ in range(-(-num_tensors // 2 // experts_per_layer))
        ]
        if touched:
            for weights, scales in layers:
                weights.zero_()
                scales.zero_()
        return layers

    def record(checkpoint: Any, layers: list[tuple[Tensor, Tensor]]) -> None:
        for i in range(num_tensors // 2):
            weights, scales = layers[i // experts_per_layer]
            weights[i % experts_per_layer].copy_(checkpoint[f"experts.{i:06}.weight"])
            scales[i % experts_per_layer].copy_(checkpoint[f"experts.{i:06}.weight_scale"])

    def alone(what: str, *, touched: bool) -> float:
        layers = destinations(touched=touched)
        drop_page_cache(paths)
        seconds: list[float] = []
        try:
            with weightlift.open_checkpoint(folder) as checkpoint:
                # As it is while coverage is to be proven: nothing is read before recording ends. Not for users.
                checkpoint._program.start_recording(hold_seconds=3600)
                with stopwatch() as recording:
                    record(checkpoint, layers)
                if what == "recording":
                    seconds = recording
                    raise _Enough
                with stopwatch() as seconds:
                    checkpoint.run()
        except _Enough:
            pass
        return seconds[0]

    def together(*, touched: bool) -> float:
        layers = destinations(touched=touched)
        drop_page_cache(paths)
        with weightlift.open_checkpoint(folder) as checkpoint, stopwatch() as seconds:
            record(checkpoint, layers)
            checkpoint.run()
        return seconds[0]

    rows = []
    num_bytes = sum(entry.nbytes for entry in entries_of(folder))
    for memory, touched in (("touched", True), ("fresh", False)):
        samples = interleaved(
            {
                "recording": lambda: alone("recording", touched=touched),  # noqa: B023  # called before it changes
                "reading": lambda: alone("reading", touched=touched),  # noqa: B023
                "together": lambda: together(touched=touched),  # noqa: B023
            },
            rounds,
        )
        longer = max(("recording", "reading"), key=lambda name: min(samples[name]))
        rows += [
            Row.ratio(
                f"{num_tensors} tensors into {memory} memory, record and read",
                samples["together"],
                f"{name} alone",
                samples[name],
                # Fresh memory costs a core's time too, for zeroing; then it is the cores that are fully used.
                limit=1.1 if name == longer and touched else None,
                num_bytes=num_bytes,
            )
            for name in ("recording", "reading")
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small files, 3 rounds: to see that it works")
    parser.add_argument("--rounds", type=int, help="how often each variant runs (default: 7)")
    parser.add_argument("--only", help="comma-separated: cold, warm, rank, memory, recording, many")
    parser.add_argument("--csv", metavar="FILE", help="write the table, with every sample, as CSV too")
    options = parser.parse_args()

    rounds = options.rounds or (3 if options.quick else 7)
    gibibytes = 1 if options.quick else 2
    parts: dict[str, Callable[[], list[Row]]] = {
        "cold": lambda: cold_rows(gibibytes, rounds),
        "warm": lambda: warm_rows(gibibytes, rounds),
        "rank": lambda: rank_rows(gibibytes, rounds),
        "memory": lambda: [row for size in ((1,) if options.quick else (1, 4)) for row in memory_rows(size, rounds)],
        "recording": lambda: recording_rows(500 if options.quick else 2000, rounds),
        "many": lambda: many_rows(9_000 if options.quick else 91_000, rounds),
    }
    wanted = options.only.split(",") if options.only else list(parts)
    if unknown := set(wanted) - set(parts):
        parser.error(f"--only: no such part: {', '.join(sorted(unknown))}")

    data.BUILD.mkdir(parents=True, exist_ok=True)
    print(machine(data.BUILD))
    print(
        f"cold: {cold_method()}; {rounds} rounds, variants taking turns, each run in a fresh process; GB = 10^9 bytes"
    )
    rows: list[Row] = []
    for name in wanted:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        rows += parts[name]()
    print(table(rows))
    if options.csv:
        write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
