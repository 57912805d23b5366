"""Whole quantised models, and what they must be like: the same model with the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from golden import same_bits
from torch import Tensor, nn

from weightlift import fast_load
from weightlift.model.linear import LinearBase
from weightlift.model.model_config import ModelConfig
from weightlift.model.parallel import ParallelConfig
from weightlift.model.postprocess import PostProcessing
from weightlift.model.quantization.base import QuantizedLinearMethod, Target
from weightlift.model.router import AutoWeightsLoader
from weightlift.model.skeleton import load_model, make_shell

# The tensors of one layer of a checkpoint, by the last part of their names, to its weight, float32 [N, K].
Dequantize = Callable[[Mapping[str, Tensor]], Tensor]

INPUTS = torch.arange(1, 25).reshape(2, 12) * 37 % 1000


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(path).items()
    }


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    """Changes to None leave the field out."""
    fields = json.loads((folder / "config.json").read_text()) | changes
    return ModelConfig({name: value for name, value in fields.items() if value is not None})


def dequantized(tensors: Mapping[str, Tensor], dequantize: Dequantize) -> dict[str, Tensor]:
    """The checkpoint before it was quantised, as far as it says; float32."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        layers.setdefault(layer, {})[part] = tensor
    weights = {}
    for layer, parts in layers.items():
        weights[f"{layer}.weight"] = dequantize(parts) if len(parts) > 1 else parts["weight"].float()
    return weights


def plain_twin(folder: Path, dequantize: Dequantize, parallel: ParallelConfig) -> nn.Module:
    """The model, not quantised and in float32."""
    config = config_of(folder, quantization_config=None)
    model = make_shell(config, parallel=parallel, dtype=torch.float32, device="cpu")
    weights = dequantized(tensors_of(folder), dequantize)
    AutoWeightsLoader(model).load_weights(weights.items(), mapper=model.hf_to_weightlift_mapper)  # type: ignore[arg-type]
    return model.eval()


def quantized_layers(model: nn.Module) -> dict[str, LinearBase]:
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, LinearBase) and isinstance(layer.quant_method, QuantizedLinearMethod)
    }


def weight_of(layer: Any) -> Tensor:
    return layer.quant_method.dequantize(layer)


def load_both_ways(
    folder: Path, *, parallel: ParallelConfig, target: Target = "plain", dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """The model, loaded and processed; that recording and plain loops give the same bytes, and so does a second load,
    is checked."""
    model = load_model(folder, parallel=parallel, target=target, dtype=dtype)
    report: Any = model.load_report
    assert (report.missing_keys, report.unexpected_keys, report.gaps, report.double_writes) == ([], [], [], [])
    # Scales may be values; weights are not read before their turn.
    assert report.num_forced <= sum("weight" not in name or "_scale" in name for name in tensors_of(folder))

    eager = make_shell(config_of(folder), parallel=parallel, target=target, dtype=dtype, device="cpu")
    for name, parameter in eager.named_parameters():
        if not name.endswith(("attn.k_scale", "attn.v_scale", "attn.q_scale", "attn.prob_scale")):
            parameter.data.view(torch.uint8).fill_(0x55)
    mapper: Any = eager.hf_to_weightlift_mapper
    AutoWeightsLoader(eager).load_weights(tensors_of(folder).items(), mapper=mapper)
    PostProcessing().finish(eager, dtype)
    assert_same_parameters(model, eager)

    again = PostProcessing()
    fast_load(model, folder, mapper=mapper, on_module_loaded=again.process_layer)
    again.finish(model, dtype)
    assert_same_parameters(model, eager)
    return model


def assert_same_parameters(model: nn.Module, other: nn.Module) -> None:
    expected = dict(other.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert same_bits(found[name].data, parameter.data), name


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
