"""Pipeline parallelism: which layers a stage has, and what stands in the place of the others."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .model_config import ModelConfig
from .parallel import ParallelConfig


class PPMissingLayer(nn.Identity):
    """In the place of a layer that another stage has. Its tensors in the checkpoint are not wanted here."""


def stage_layers(config: ModelConfig, parallel: ParallelConfig) -> range:
    """The layers of this stage, dealt as in vLLM: as many in each; what is left over goes to the later ones, but not to
    the last, which has the head.

    Raises:
        ConfigError: there are more stages than layers.

    Example:
        >>> config = ModelConfig({"num_hidden_layers": 10})
        >>> [len(stage_layers(config, ParallelConfig(pp_rank=rank, pp_size=4))) for rank in range(4)]
        [2, 3, 3, 2]
    """
    num_layers, num_stages = config.num_hidden_layers, parallel.pp_size
    if num_stages > num_layers:
        raise config.error(f"num_hidden_layers is {num_layers}; pp_size is {num_stages}, which must not be more")
    share, more = divmod(num_layers, num_stages)
    sizes = [share + (num_stages - 1 - more <= stage < num_stages - 1) for stage in range(num_stages)]
    start = sum(sizes[: parallel.pp_rank])
    return range(start, start + sizes[parallel.pp_rank])


def make_layers(config: ModelConfig, parallel: ParallelConfig, make_layer: Callable[[int], nn.Module]) -> nn.ModuleList:
    """All layers of a model by their numbers: this stage's, made by `make_layer(number)`, and PPMissingLayers."""
    here = stage_layers(config, parallel)
    return nn.ModuleList(
        make_layer(number) if number in here else PPMissingLayer() for number in range(config.num_hidden_layers)
    )


def is_first_stage(parallel: ParallelConfig) -> bool:
    return parallel.pp_rank == 0


def is_last_stage(parallel: ParallelConfig) -> bool:
    return parallel.pp_rank == parallel.pp_size - 1
