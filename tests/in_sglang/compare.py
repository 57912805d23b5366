"""Loads a model twice, by SGLang's default loader and by weightlift, as one rank of a tensor-parallel group.

    python compare.py FOLDER RANK WORLD_SIZE PORT

Prints a JSON object: which parameters and buffers differ, after a first load and after one into the same model, as
`update_weights_from_disk` does it; and what weightlift reports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

from weightlift.engines.sglang import register


def start_rank(rank: int, world_size: int, port: int) -> None:
    init_distributed_environment(
        world_size=world_size,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    world_group = get_parallel().world_group
    publish(
        ServerArgs(model_path="none", device="cpu", tp_size=world_size),
        role="test",
        ranks=SpawnRanks(world_rank=rank),
    )
    get_parallel().override_permanently(world_group=world_group)
    initialize_model_parallel(backend="gloo")


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def different(model: torch.nn.Module, expected: torch.nn.Module) -> list[str]:
    found, wanted = state_of(model), state_of(expected)
    equal = {
        name
        for name in found.keys() & wanted.keys()
        if torch.equal(found[name].reshape(-1).view(torch.uint8), wanted[name].reshape(-1).view(torch.uint8))
    }
    return sorted((found.keys() | wanted.keys()) - equal)


def main(folder: str, rank: int, world_size: int, port: int) -> None:
    register()
    HookRegistry.apply_hooks()
    start_rank(rank, world_size, port)
    model_config = ModelConfig(folder, dtype="bfloat16")

    def load(load_format: str) -> tuple[Any, torch.nn.Module]:
        loader = get_model_loader(LoadConfig(load_format=load_format), model_config)
        return loader, loader.load_model(model_config=model_config, device_config=DeviceConfig("cpu"))

    _, expected = load("auto")
    loader, model = load("weightlift")
    [report] = loader.reports
    result = {
        "loaded": different(model, expected),
        "forced": report.num_forced,
        "bytes_read": report.bytes_read,
        "bytes_there": sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")),
    }
    for parameter in model.parameters():
        parameter.data.zero_()
    weights = loader._get_weights_iterator(DefaultModelLoader.Source.init_new(model_config, model))
    loader.load_weights_and_postprocess(model, weights, torch.device("cpu"))
    result["reloaded"] = different(model, expected)
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
