"""Quantised models: what processing costs beside the load, and what quantising on arrival takes of memory.

    python -m benchmarks.quantized [--quick] [--rounds N] [--csv FILE]

Layers are processed as they land, while the rest is read: a load with that beside the same load without it, and beside
one that processes all layers in the end. Destinations are fresh memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import weightlift
from weightlift.config import MiB
from weightlift.model.formats import mapper_of
from weightlift.model.model_config import read_config
from weightlift.model.parallel import ParallelConfig
from weightlift.model.postprocess import PostProcessing
from weightlift.model.quantization.online import SCHEMES
from weightlift.model.skeleton import make_shell

from . import data
from .cold import cold_method, drop_page_cache
from .load import timed
from .measure import PeakMemory, Row, in_child, interleaved, machine, table, write_csv

_DTYPE = torch.bfloat16
_STAGING_BYTES = 64 * MiB
_REST_BYTES = 4 * MiB  # threads, and what is written down of the load


def shell(folder: Path, quantization: str | None = None) -> nn.Module:
    return make_shell(
        read_config(folder), parallel=ParallelConfig(), dtype=_DTYPE, device="cpu", quantization=quantization
    )


def load(model: nn.Module, folder: Path) -> None:
    weightlift.fast_load(model, folder, mapper=mapper_of(model))


def load_and_process(model: nn.Module, folder: Path) -> None:
    processing = PostProcessing()
    weightlift.fast_load(model, folder, mapper=mapper_of(model), on_module_loaded=processing.process_layer)
    processing.finish(model, _DTYPE)


def load_then_process(model: nn.Module, folder: Path) -> None:
    load(model, folder)
    PostProcessing().finish(model, _DTYPE)


def ready(folder: Path, quantization: str | None = None) -> nn.Module:
    """A shell, when torch has imported what its first ops want, which takes seconds from a cold disk."""
    load_and_process(shell(folder, quantization), folder)
    return shell(folder, quantization)


def processing_rows(gibibytes: float, rounds: int) -> list[Row]:
    folder = in_child(lambda: data.llama_model(gibibytes, fp8=True))
    paths = data.shard_paths(folder)
    ways = {"load": load, "processed": load_and_process, "then processed": load_then_process}
    samples = interleaved(
        {
            name: lambda way=way: timed(  # type: ignore[misc]
                lambda: ready(folder), lambda model: way(model, folder), paths, cold=True
            )
            for name, way in ways.items()
        },
        rounds,
    )
    size = sum(path.stat().st_size for path in paths)
    name, ours = "FP8 per tensor, processed, cold", samples["processed"]
    return [
        Row.ratio(name, ours, "load alone", samples["load"], limit=1.15, num_bytes=size),
        Row.ratio(name, ours, "load, then process", samples["then processed"], limit=None, num_bytes=size),
    ]


def online_rows(scheme: str, gibibytes: float, rounds: int) -> list[Row]:
    folder = in_child(lambda: data.llama_model(gibibytes))
    paths = data.shard_paths(folder)
    samples = interleaved(
        {
            "plain": lambda: timed(
                lambda: ready(folder), lambda model: load_and_process(model, folder), paths, cold=True
            ),
            "online": lambda: timed(
                lambda: ready(folder, scheme), lambda model: load_and_process(model, folder), paths, cold=True
            ),
            "memory": lambda: memory_over(folder, scheme),
        },
        rounds,
    )
    size = sum(path.stat().st_size for path in paths)
    limit = (source_bytes(shell(folder, scheme), scheme) + _STAGING_BYTES + _REST_BYTES) / MiB
    over = samples["memory"]
    return [
        Row.ratio(
            f"{scheme} online, cold", samples["online"], "unquantised", samples["plain"], limit=None, num_bytes=size
        ),
        Row(f"{scheme} online, memory", "MiB", over, "beside the model", [], min(over), "MiB", limit),
    ]


def source_bytes(model: nn.Module, scheme: str) -> int:
    """Of the largest layer, if it has to be in memory before it is quantised."""
    if SCHEMES[scheme].quantize is not None:
        return 0
    quantized = (p for p in model.parameters() if p.dtype == SCHEMES[scheme].dtype)
    return max(p.numel() for p in quantized) * _DTYPE.itemsize


def memory_over(folder: Path, scheme: str) -> float:
    """The peak of a load's memory in MiB, beside a model whose memory is there."""
    model = ready(folder, scheme)
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(1)
    drop_page_cache(data.shard_paths(folder))
    config = weightlift.LoadConfig(staging_bytes=_STAGING_BYTES)
    with PeakMemory() as memory:
        weightlift.fast_load(model, folder, mapper=mapper_of(model), config=config)
    return memory.bytes_over / MiB


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, 3 rounds: to see that it works")
    parser.add_argument("--rounds", type=int, help="how often each variant runs (default: 7)")
    parser.add_argument("--csv", metavar="FILE", help="write the table, with every sample, as CSV too")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 7)
    gibibytes = 0.25 if options.quick else 2
    data.BUILD.mkdir(parents=True, exist_ok=True)
    print(machine(data.BUILD))
    print(
        f"cold: {cold_method()}; {rounds} rounds, variants taking turns, each run in a fresh process; GB = 10^9 bytes "
        "of the checkpoint"
    )
    print("measuring: processing", file=sys.stderr, flush=True)
    rows = processing_rows(gibibytes, rounds)
    for scheme in (name for name in SCHEMES if name != "fp8"):  # another name for one of them
        print(f"measuring: {scheme}", file=sys.stderr, flush=True)
        rows += online_rows(scheme, gibibytes, rounds)
    print(table(rows))
    if options.csv:
        write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
