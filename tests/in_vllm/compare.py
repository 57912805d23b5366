"""Loads models twice, by vLLM's default loader and by weightlift, as one rank of a tensor-parallel group, and compares.

Run once for each rank. Writes a JSON list with one entry a model: what differs after `load_weights` and after
post-processing (names of parameters and buffers), what weightlift reports, and why vLLM itself refuses it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8W8A8BlockScaledMMKernel
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import _has_online_quant, finalize_layerwise_processing
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import PlatformEnum
from vllm.plugins import load_general_plugins
from vllm.utils.torch_utils import set_default_torch_dtype

State = dict[str, torch.Tensor]


def engine_config(path: str, load_format: str, tp_size: int, options: dict[str, Any]) -> VllmConfig:
    return EngineArgs(
        model=path,
        load_format=load_format,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        tensor_parallel_size=tp_size,
        distributed_executor_backend="mp" if tp_size > 1 else None,
        **options,
    ).create_engine_config()


def state_of(model: torch.nn.Module) -> State:
    """Copies of all parameters and buffers, those on the meta device (still to come) left out."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors if tensor.device.type != "meta"}


def load(config: VllmConfig) -> tuple[State, State, str | None, dict[str, Any]]:
    """State after load_weights, state after post-processing, why that is not to be had, and what weightlift reports."""
    loader = get_model_loader(config.load_config)
    with set_default_torch_dtype(config.model_config.dtype):
        with torch.device("cpu"):
            model = loader.create_model(vllm_config=config, model_config=config.model_config)
        loader.load_weights(model, config.model_config)
        loaded = state_of(model)
        refusal = None
        try:
            if _has_online_quant(model):
                finalize_layerwise_processing(model, config.model_config)
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            processed = state_of(model)
        except Exception as error:  # whatever a kernel that is missing here raises
            processed, refusal = {}, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return loaded, processed, refusal, loader.report.to_dict() if config.load_config.load_format == "weightlift" else {}


def differences(expected: State, found: State) -> list[str]:
    """Names of tensors that only one has, or that differ in shape, strides, dtype or any bit."""

    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
            return False
        flat_a, flat_b = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
        return torch.equal(flat_a, flat_b)

    names = expected.keys() | found.keys()
    both = expected.keys() & found.keys()
    return sorted(name for name in names if name not in both or not equal(expected[name], found[name]))


def pretend_supported(kernel: type, kind: str) -> None:
    """Lets vLLM choose a kernel that doesn't run here, so that at least the layers that use it are built and loaded."""
    for question in ("is_supported", "can_implement"):
        setattr(kernel, question, classmethod(lambda *_: (True, None)))
    linear.register_linear_kernel(kernel, PlatformEnum.CPU, kind)


def compare(model: dict[str, Any], tp_size: int) -> dict[str, Any]:
    path, options = model["path"], model["options"]
    with set_current_vllm_config(config := engine_config(path, "auto", tp_size, options)):
        initialize_model_parallel(tp_size)
        try:
            expected = load(config)
        except ValueError as error:
            destroy_model_parallel()
            return {"name": model["name"], "refused": str(error)}
    with set_current_vllm_config(config := engine_config(path, "weightlift", tp_size, options)):
        found = load(config)
    destroy_model_parallel()
    return {
        "name": model["name"],
        "num_loaded": len(expected[0]),
        "num_processed": len(expected[1]),
        "differ_loaded": differences(expected[0], found[0]),
        "differ_processed": differences(expected[1], found[1]),
        "refused_processing": [expected[2], found[2]],
        "report": found[3],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("models", type=Path, help="JSON: a list of {name, path, options}")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    os.environ["VLLM_DIST_IDENT"] = f"weightlift-{arguments.port}"  # names the shared memory of the group's CPUs
    load_general_plugins()
    pretend_supported(CPUFp8W8A8BlockScaledMMKernel, "fp8")
    pretend_supported(linear.MarlinNvFp4LinearKernel, "nvfp4")
    pretend_supported(linear.EmulationMxfp4LinearKernel, "mxfp4")
    torch.set_num_threads(1)
    init_distributed_environment(
        arguments.tp_size, arguments.rank, f"tcp://127.0.0.1:{arguments.port}", arguments.rank, "gloo"
    )
    results = []
    for model in json.loads(arguments.models.read_text()):
        results.append(compare(model, arguments.tp_size))
        gc.collect()
    destroy_distributed_environment()
    arguments.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
