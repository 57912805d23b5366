"""``weightlift plan``: what a load would read, and the memory it would take. No weights are read."""

from __future__ import annotations

import argparse
import json
from typing import Any, get_args

from weightlift.available_memory import available_bytes
from weightlift.checkpoint import CheckpointSource
from weightlift.cli import parallel, quantization, source
from weightlift.cli.errors import CommandError
from weightlift.config import LoadConfig, Strategy, parse_size
from weightlift.cost import LoadCosts
from weightlift.errors import CheckpointError
from weightlift.model.planning import plan_model
from weightlift.model.registry import model_class
from weightlift.model.skeleton import config_of
from weightlift.plan import LoadPlan, Slice, measure_bandwidth, plan_checkpoint

NAME = "plan"
HELP = (
    "Show what a load would read: how much, of which files, by how many reads; the memory that it takes, and about how "
    "long. Weights are not read, but for what a model's loaders look at; memory for them is not needed."
)

EXIT_TOO_LARGE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slice",
        action="append",
        default=[],
        metavar="GLOB:DIM:RANK/SIZE",
        help="of these tensors, load one of SIZE equal parts along a dimension, as '*.up_proj.weight:0:3/8'",
    )
    parallel.add_arguments(parser)
    quantization.add_arguments(parser)
    parser.add_argument(
        "--explain",
        action="append",
        default=[],
        metavar="NAME",
        help="show each copy of this tensor, or into this parameter: file and range, what is done, where it goes",
    )
    bandwidth = parser.add_mutually_exclusive_group()
    bandwidth.add_argument("--bandwidth", type=_bandwidth, metavar="GB/S", help="of the storage, to estimate the time")
    bandwidth.add_argument(
        "--bench", metavar="FILE", help="estimate it with what `weightlift bench --json FILE` measured"
    )
    bandwidth.add_argument(
        "--measure", action="store_true", help="read up to 256 MiB of the largest tensors to measure it"
    )
    parser.add_argument(
        "--memory", type=_size, metavar="SIZE", help="that may be taken, as 80GiB (default: what is available here)"
    )
    parser.add_argument(
        "--device-memory",
        type=_size,
        metavar="SIZE",
        help="plan for parameters on a GPU with so much memory, as 80GiB (default: for the CPU)",
    )
    parser.add_argument("--strategy", choices=get_args(Strategy), help="how files are read (default: auto)")


def _bandwidth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of gigabytes per second, found {text!r}")
    return value


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of bytes, KiB, MiB or GiB, found {text!r}") from None


def run(options: argparse.Namespace) -> int:
    costs = None if options.bench is None else LoadCosts.from_bench(options.bench)
    plan = _plan(options)
    if options.device_memory is not None:
        plan.memory = plan.memory.on_device()
    bandwidth = options.bandwidth
    if options.measure:
        config = LoadConfig(strategy=options.strategy)
        bandwidth = measure_bandwidth(source.source_of(options), config=config) / 1e9
    if bandwidth is not None:
        costs = LoadCosts.of_bandwidth(bandwidth * 1e9)
    estimate = None if costs is None else plan.estimate(costs)
    available = available_bytes() if options.memory is None else options.memory
    try:
        plan.require_memory(available, on_device=options.device_memory)
        problem = None
    except MemoryError as error:
        problem = str(error)
    document: dict[str, Any] = plan.to_dict()
    document["memory"]["available"] = available
    document["fits"] = problem is None
    document["bandwidth"] = bandwidth
    document["seconds"] = None if estimate is None else estimate.total
    document["estimate"] = None if estimate is None else estimate.to_dict()
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print(plan)
        if estimate is not None:
            print(f"  time        {estimate}" + ("" if bandwidth is None else f" at {bandwidth:.3g} GB/s"))
        if plan.copies:
            print(plan.explanation())
    if problem is not None:
        if options.json:
            return EXIT_TOO_LARGE
        raise CommandError(problem, exit_code=EXIT_TOO_LARGE)
    return 0


def _plan(options: argparse.Namespace) -> LoadPlan:
    config = LoadConfig(strategy=options.strategy)
    rank = quantization.rank_of(options)
    if rank is not None and options.slice:
        raise CommandError("--slice and the sizes and ranks of a model exclude each other; leave one out", exit_code=2)
    checkpoint = source.source_of(options)
    try:
        config.resolve()
        if rank is None:
            return plan_checkpoint(
                checkpoint, slices=[Slice.parse(text) for text in options.slice], explain=options.explain, config=config
            )
        _require_model(checkpoint)
        layout = quantization.layout_of(options)
        return plan_model(checkpoint, parallel=rank, config=config, explain=options.explain, **layout)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CommandError(str(error), exit_code=2) from error


def _require_model(checkpoint: CheckpointSource) -> None:
    """Raises CommandError where the model of a folder can't be built."""
    try:
        model_class(config_of(checkpoint))
    except CheckpointError as error:
        raise CommandError(
            f"{error}. Without a model: --slice says which tensors are cut, and how", exit_code=1
        ) from error
