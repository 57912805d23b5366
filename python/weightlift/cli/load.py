"""``weightlift load``: load a checkpoint whole into fresh memory, and say how that went."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

import weightlift
from weightlift.checkpoint import locate
from weightlift.cli import source
from weightlift.cli.errors import CommandError
from weightlift.config import Backend, LoadConfig, Strategy
from weightlift.entries import CheckpointFiles
from weightlift.errors import listed
from weightlift.names import natural_key
from weightlift.source import TORCH_SUFFIXES

NAME = "load"
HELP = "Load every tensor of a checkpoint into memory; show what was read, how, and how fast."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verify", action="store_true", help="read again through safetensors, or torch, and compare every byte"
    )
    parser.add_argument("--device", default="cpu", help="where the tensors go (default: cpu)")
    parser.add_argument("--strategy", choices=get_args(Strategy), help="how files are read (default: auto)")
    parser.add_argument("--backend", choices=get_args(Backend), help="who reads (default: auto)")
    parser.add_argument("--progress", action="store_true", help="show a bar on stderr")


def run(options: argparse.Namespace) -> int:
    config = LoadConfig(strategy=options.strategy, backend=options.backend)
    try:
        config.resolve()
        device = torch.device(options.device)
        torch.empty(0, device=device)
    except (ValueError, RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise CommandError(str(error), exit_code=2) from error
    checkpoint = source.source_of(options)
    files = locate(checkpoint)
    if options.verify and not all(_is_of_torch(shard.path) for shard in files.shards):
        _import_safetensors()  # before the load, not after it
    state = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device=device) for entry in files.tensors.values()}
    report = weightlift.fast_load(state, checkpoint, config=config, progress=options.progress)
    differences = _differences(files, state) if options.verify else None

    if options.json:
        document: dict[str, Any] = report.to_dict()
        if differences is not None:
            document["verify"] = {"num_compared": len(files.tensors), "different": differences}
        print(json.dumps(document, indent=2))
    else:
        print(report)
        if differences:
            print(f"verify: {len(differences)} tensors differ: {listed(differences)}")
        elif differences is not None:
            print(f"verify: {len(files.tensors)} tensors, every byte as {' and '.join(_readers(files))} read it")
    return 1 if differences else 0


def _is_of_torch(path: str) -> bool:
    return path.lower().endswith(TORCH_SUFFIXES)


def _readers(files: CheckpointFiles) -> list[str]:
    return sorted({"torch.load" if _is_of_torch(shard.path) else "safetensors" for shard in files.shards})


def _import_safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise CommandError(
            "--verify compares with the safetensors package, which is not installed (pip install safetensors)",
            exit_code=2,
        ) from error
    return safetensors


def _differences(files: CheckpointFiles, state: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors whose bytes are not those that safetensors, or torch, reads; sorted."""
    names_by_shard: defaultdict[str, list[str]] = defaultdict(list)
    for entry in files.tensors.values():
        names_by_shard[entry.shard.path].append(entry.name)
    different = []
    for path, names in names_by_shard.items():
        for name, expected in _read_again(path, names):
            loaded = state[name].cpu()
            if (
                expected.dtype != loaded.dtype
                or expected.shape != loaded.shape
                or not torch.equal(expected.reshape(-1).view(torch.uint8), loaded.reshape(-1).view(torch.uint8))
            ):
                different.append(name)
    return sorted(different, key=natural_key)


def _read_again(path: str, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    if _is_of_torch(path):
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        yield from ((name, tensors[name]) for name in names)
    else:
        with _import_safetensors().safe_open(path, framework="pt", device="cpu") as shard:
            yield from ((name, shard.get_tensor(name)) for name in names)
