"""Quantised layers that vLLM builds on a CPU: its parameters, after its loading and its post-processing, are ours.

One process is every rank in turn. Needs a virtual environment with vLLM: `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import same_bits

from weightlift.model.linear import LinearBase
from weightlift.model.parallel import ParallelConfig
from weightlift.model.skeleton import load_model

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM, in a virtual environment of its own: make test-vllm", allow_module_level=True)


@pytest.fixture(scope="module")
def load_by_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, int, int], torch.nn.Module]]:
    """Gives `load(folder, rank, tp_size)`, the model of that rank, loaded by vLLM's default loader and processed."""
    from vllm import _custom_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(VllmConfig()):
        store = tmp_path_factory.mktemp("vllm") / "store"
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1)
    group = parallel_state.get_tp_group()
    make_handler = _custom_ops.create_onednn_scaled_mm

    def make_handler_that_keeps_weight(weight: torch.Tensor, *args: Any) -> Any:
        handler = make_handler(weight, *args)
        handler.weight = weight
        return handler

    # oneDNN has the weight packed, and the layer gives it up.
    _custom_ops.create_onednn_scaled_mm = make_handler_that_keeps_weight

    def load(folder: Path, rank: int, tp_size: int) -> torch.nn.Module:
        arguments = EngineArgs(model=str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=256)
        config = arguments.create_engine_config()
        group.world_size, group.rank_in_group = tp_size, rank
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            # Not load_model(), which asks for an accelerator.
            loader = get_model_loader(config.load_config)
            model = loader.create_model(vllm_config=config, model_config=config.model_config)
            loader.load_weights(model, config.model_config)
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            return model

    yield load
    _custom_ops.create_onednn_scaled_mm = make_handler
    group.world_size, group.rank_in_group = 1, 0
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def weight_of(layer: Any) -> torch.Tensor:
    """What vLLM's kernels take, [K, N], as it is on disk, [N, K]."""
    weight = layer.scheme.kernel.dnnl_handler.weight if layer.weight is None else layer.weight
    return weight.detach().t()


@pytest.mark.parametrize(("rank", "tp_size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("name", ["fp8-dynamic", "w8a8"])
def test_parameters_are_those_of_vllm_after_its_post_processing(
    shared_checkpoints: Path,
    load_by_vllm: Callable[[Path, int, int], torch.nn.Module],
    name: str,
    rank: int,
    tp_size: int,
) -> None:
    folder = shared_checkpoints / name
    theirs = load_by_vllm(folder, rank, tp_size)
    ours = load_model(folder, parallel=ParallelConfig(tp_rank=rank, tp_size=tp_size), dtype=torch.bfloat16)
    compared = 0
    for layer_name, layer in ours.named_modules():
        if not isinstance(layer, LinearBase):
            continue
        other: Any = theirs.get_submodule(layer_name)
        for parameter_name, parameter in layer.named_parameters():
            value = weight_of(other) if parameter_name == "weight" else getattr(other, parameter_name).detach()
            assert same_bits(value, parameter.data), f"{layer_name}.{parameter_name}"
            compared += 1
    assert compared == 4 * 4 * 2  # layers, projections, and of each a weight and its scales
