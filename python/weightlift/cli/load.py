"""``weightlift load``: load a checkpoint, or one rank's part of a model, into fresh memory, and say how that went."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast, get_args

import torch
from torch import Tensor

import weightlift
from weightlift.checkpoint import CheckpointSource, locate
from weightlift.cli import parallel, quantization, source
from weightlift.cli.errors import CommandError
from weightlift.config import Backend, LoadConfig, Strategy
from weightlift.entries import CheckpointFiles
from weightlift.errors import listed, printable
from weightlift.model.formats import DefaultModelLoader, StreamModelLoader
from weightlift.model.model_config import dtype_of
from weightlift.model.packed_image import PackedImage, PackedImageLoader
from weightlift.model.parallel import ParallelConfig
from weightlift.model.postprocess import PostProcessing
from weightlift.model.router import Ties
from weightlift.model.sharded_state import ShardedStateLoader, rank_prefix
from weightlift.model.skeleton import config_of, load_model, make_shell
from weightlift.names import natural_key
from weightlift.report import LoadReport
from weightlift.source import TORCH_SUFFIXES

NAME = "load"
HELP = (
    "Load every tensor of a checkpoint into memory, or, with sizes and ranks, one rank's part of the model; show what "
    "was read, how, and how fast."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verify", action="store_true", help="read again through safetensors, or torch, and compare every byte"
    )
    parallel.add_arguments(parser)
    quantization.add_arguments(parser)
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
    rank = quantization.rank_of(options)
    layout = quantization.layout_of(options)
    image = PackedImage.find(checkpoint)
    if image is not None and rank is None:  # its files are those of ranks, and not tensors without a model
        rank = ParallelConfig()
    is_cut = rank is not None and (image is not None or checkpoint.load_format == "sharded_state")
    if rank is not None and is_cut:
        make_loader = ShardedStateLoader if image is None else PackedImageLoader
        files = make_loader(checkpoint, config_of(checkpoint), parallel=rank).files
    else:
        files = locate(checkpoint)
    if options.verify and not all(_is_of_torch(shard.path) for shard in files.shards):
        _import_safetensors()  # before the load, not after it
    differences: list[str] | None = None
    if rank is None:
        state = {
            entry.name: torch.empty(entry.shape, dtype=entry.dtype, device=device) for entry in files.tensors.values()
        }
        report = weightlift.fast_load(state, checkpoint, config=config, progress=options.progress)
        if options.verify:
            differences = _differences(state, _read_files(files))
    else:
        model = load_model(checkpoint, parallel=rank, device=device, config=config, progress=options.progress, **layout)
        state, report = model.state_dict(), cast(LoadReport, model.load_report)
        if image is not None:
            state = image.states[rank_prefix(rank)].tensors(model)
        if options.verify:
            expected = _read_files(files) if is_cut else _loaded_again(model, checkpoint, rank, files, layout)
            differences = _differences(state, expected)

    if options.json:
        document: dict[str, Any] = report.to_dict()
        if differences is not None:
            document["verify"] = {"num_compared": len(state), "different": differences}
        print(json.dumps(document, indent=2))
    else:
        print(report)
        if differences:
            print(f"verify: {len(differences)} tensors differ: {listed(differences)}")
        elif differences is not None:
            print(f"verify: {len(state)} tensors, every byte as {' and '.join(_readers(files))} read it")
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


def _differences(state: Mapping[str, Tensor], expected: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors whose bytes are not those that are expected; sorted."""
    different = []
    for name, tensor in expected:
        loaded, tensor = state[name].cpu(), tensor.cpu()
        if (
            tensor.dtype != loaded.dtype
            or tensor.shape != loaded.shape
            or not torch.equal(_bytes(tensor), _bytes(loaded))
        ):
            different.append(name)
    return sorted(different, key=natural_key)


def _bytes(tensor: Tensor) -> Tensor:
    # Not only where it is not contiguous: one element, and an expanded one, keep their strides otherwise.
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _read_files(files: CheckpointFiles) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, as safetensors, or torch, reads it."""
    names_by_shard: defaultdict[str, list[str]] = defaultdict(list)
    for entry in files.tensors.values():
        names_by_shard[entry.shard.path].append(entry.name)
    for path, names in names_by_shard.items():
        yield from _read_again(path, names)


def _loaded_again(
    model: torch.nn.Module,
    checkpoint: CheckpointSource,
    rank: ParallelConfig,
    files: CheckpointFiles,
    layout: Mapping[str, Any],
) -> Iterator[tuple[str, Tensor]]:
    """What the same model gets by its own weight loaders from whole tensors that safetensors, or torch, reads."""

    class Reader(StreamModelLoader, DefaultModelLoader):
        def iter_weights(self) -> Iterator[tuple[str, Tensor]]:
            return _read_files(files)

    device = next(model.parameters()).device
    config = config_of(checkpoint)
    loader = Reader(checkpoint, config, parallel=rank)
    dtype = dtype_of(config) or loader.dtype_of_weights() or torch.get_default_dtype()
    if not Ties(model).first_names:  # a head that differs from the embedding was parted from it
        vars(config)["tie_word_embeddings"] = False
    again = make_shell(config, parallel=rank, dtype=dtype, device=device, **layout)
    loader.load_weights(again)
    PostProcessing(device=device).finish(again, dtype)
    yield from again.state_dict().items()


def _read_again(path: str, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    if _is_of_torch(path):
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        yield from ((name, tensors[name]) for name in names)
    else:
        safetensors = _import_safetensors()
        try:
            with safetensors.safe_open(path, framework="pt", device="cpu") as shard:
                yield from ((name, shard.get_tensor(name)) for name in names)
        except safetensors.SafetensorError as error:
            problem = f"{printable(path)}: safetensors, which it is compared with, does not read it: {error}"
            raise CommandError(problem, exit_code=1) from error
