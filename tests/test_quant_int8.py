"""INT8 weights: what lands is what the checkpoint stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from quant_models import INPUTS, load_both_ways, plain_twin, quantized_layers, relative_error, tensors_of, weight_of
from torch import Tensor

from weightlift.model.linear import MergedColumnParallelLinear
from weightlift.model.parallel import ParallelConfig
from weightlift.model.quantization.int8 import Int8LinearMethod
from weightlift.model.skeleton import load_model

RANKS = [ParallelConfig(), ParallelConfig(tp_rank=0, tp_size=2), ParallelConfig(tp_rank=1, tp_size=2)]


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    return parts["weight"].float() * parts["weight_scale"].float()


def merged(method: Any) -> Any:
    config: Any = SimpleNamespace(get_quant_method=lambda layer, prefix: method)
    return MergedColumnParallelLinear(8, [4, 2], bias=False, quant_config=config, prefix="m", parallel=RANKS[0])


def fill(layer: Any, **parts: list[Any]) -> None:
    for name, values in parts.items():
        for part, value in enumerate(values):
            layer.weight_loader(layer.get_parameter(name), torch.as_tensor(value), part)


@pytest.mark.parametrize("parallel", RANKS, ids=["tp1", "tp2-0", "tp2-1"])
def test_the_layers_of_a_checkpoint_are_what_it_stands_for(shared_checkpoints: Path, parallel: ParallelConfig) -> None:
    folder = shared_checkpoints / "w8a8"
    model = load_both_ways(folder, parallel=parallel)
    twin = plain_twin(folder, dequantize, parallel)
    layers = quantized_layers(model)
    assert len(layers) == 16
    for name, layer in layers.items():
        assert torch.equal(weight_of(layer), twin.get_submodule(name).weight), name  # type: ignore[arg-type]
    if parallel.tp_size == 1:
        with torch.no_grad():
            assert relative_error(model(INPUTS), twin(INPUTS)) < 0.02


def test_parts_with_a_scale_each_keep_theirs() -> None:
    layer = merged(Int8LinearMethod("m", strategy="tensor"))
    weights = [torch.randint(-128, 128, (rows, 8), dtype=torch.int8) for rows in (4, 2)]
    fill(layer, weight=weights, weight_scale=[0.5, 0.25])
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(weight_of(layer), torch.cat([weights[0].float() * 0.5, weights[1].float() * 0.25]))


def test_parts_get_the_largest_input_scale() -> None:
    layer = merged(Int8LinearMethod("m", strategy="channel", is_static=True))
    fill(layer, input_scale=[0.5, 0.75])
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.input_scale.tolist() == [0.75, 0.75]
    assert not hasattr(layer, "input_zero_point")


def test_asymmetric_inputs_get_the_range_that_holds_those_of_all_parts() -> None:
    layer = merged(Int8LinearMethod("m", strategy="channel", is_static=True, is_input_symmetric=False))
    scales, zero_points = [0.5, 0.25], [10, -100]
    for _ in range(2):  # a second load into the processed layer
        fill(
            layer,
            input_scale=scales,
            input_zero_point=[torch.tensor(zero_point, dtype=torch.int8) for zero_point in zero_points],
        )
        for _ in range(2):
            layer.quant_method.process_weights_after_loading(layer)
        scale, zero_point = layer.input_scale.tolist()[0], layer.input_zero_point.tolist()[0]
        assert layer.input_scale.tolist() == [scale] * 2
        assert layer.input_zero_point.tolist() == [zero_point] * 2
        # The first part: -69 to 58.5; the second: -7 to 56.75.
        assert scale == pytest.approx(127.5 / 255)
        assert scale * (-128 - zero_point) == pytest.approx(-69, abs=scale)
        assert scale * (127 - zero_point) == pytest.approx(58.5, abs=scale)
    assert layer.input_zero_point.dtype == torch.int32


@pytest.mark.parametrize("parallel", RANKS, ids=["tp1", "tp2-0", "tp2-1"])
def test_a_checkpoint_with_static_asymmetric_activations(
    shared_checkpoints: Path, tmp_path: Path, parallel: ParallelConfig
) -> None:
    source = shared_checkpoints / "w8a8"
    tensors = tensors_of(source)
    for name in [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]:
        tensors[f"{name}.input_scale"] = torch.tensor([0.25], dtype=torch.bfloat16)
        tensors[f"{name}.input_zero_point"] = torch.tensor([-28], dtype=torch.int8)
    config = json.loads((source / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] |= {"dynamic": False, "strategy": "tensor", "symmetric": False}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = quantized_layers(load_both_ways(tmp_path, parallel=parallel))
    assert len(layers) == 16
    for layer in layers.values():
        assert set(layer.input_scale.tolist()) == {0.25}
        assert set(layer.input_zero_point.tolist()) == {-28}


@pytest.mark.parametrize("name", ["weight_scale", "input_scale"])
def test_a_missing_scale_of_one_part_is_an_error(name: str) -> None:
    layer = merged(Int8LinearMethod("m", strategy="tensor", is_static=True))
    other = {"weight_scale": "input_scale", "input_scale": "weight_scale"}[name]
    fill(layer, **{other: [0.5, 0.5], name: [0.5]})
    with pytest.raises(ValueError, match=f"m: {name}: the checkpoint has no scale for part 1 of 2"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("target", ["marlin", "fnuz"])
def test_there_is_no_other_layout(shared_checkpoints: Path, target: Any) -> None:
    with pytest.raises(ValueError, match=f"Int8LinearMethod has no layout for target '{target}'; it has plain"):
        load_model(shared_checkpoints / "w8a8", target=target)
