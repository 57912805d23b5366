"""torchao's checkpoints in layers: without torchao, from the plain tensors that its own are flattened into."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from quant_models import (
    INPUTS,
    config_of,
    load_both_ways,
    plain_twin,
    quantized_layers,
    relative_error,
    tensors_of,
    weight_of,
)
from torch import Tensor

from weightlift.model.linear import ColumnParallelLinear, MergedColumnParallelLinear, UnquantizedLinearMethod
from weightlift.model.mapping import WeightsMapper
from weightlift.model.model_config import ConfigError
from weightlift.model.parallel import ParallelConfig
from weightlift.model.quantization.base import Target, read_quantization
from weightlift.model.quantization.fp8 import Fp8LinearMethod
from weightlift.model.quantization.int8 import Int8LinearMethod
from weightlift.model.quantization.torchao import TorchAOConfig
from weightlift.model.skeleton import load_model

RANKS = [ParallelConfig(), ParallelConfig(tp_rank=0, tp_size=2), ParallelConfig(tp_rank=1, tp_size=2)]
FP8 = {"_type": "Float8WeightOnlyConfig", "_data": {}}
INT8 = {"_type": "Int8WeightOnlyConfig", "_data": {"granularity": {"_type": "PerRow"}}}


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    return (parts["_weight_qdata"].float() - parts.get("_weight_zero_point", 0)) * parts["_weight_scale"]


def by_name(quant_types: dict[str, Any]) -> TorchAOConfig:
    config = {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": quant_types}}}
    return TorchAOConfig.from_config({"quant_method": "torchao", "quant_type": config})


@pytest.mark.parametrize("parallel", RANKS, ids=["tp1", "tp2-0", "tp2-1"])
@pytest.mark.parametrize(
    ("name", "target"),
    [("ao-fp8wo", "plain"), ("ao-fp8wo", "fnuz"), ("ao-fp8wo", "marlin"), ("ao-int8wo", "plain")],
)
def test_the_layers_of_a_checkpoint_are_what_it_stands_for(
    shared_checkpoints: Path, name: str, target: Target, parallel: ParallelConfig
) -> None:
    folder = shared_checkpoints / name
    model = load_both_ways(folder, parallel=parallel, target=target)
    twin = plain_twin(folder, dequantize, parallel)
    layers = quantized_layers(model)
    assert len(layers) == 16
    for layer_name, layer in layers.items():
        expected = twin.get_submodule(layer_name).weight.data  # type: ignore[union-attr, operator]
        # Marlin's scales are of bfloat16; on disk they are float32.
        tolerance = 2**-8 if target == "marlin" else 0
        torch.testing.assert_close(weight_of(layer), expected, rtol=tolerance, atol=0)
    if parallel.tp_size == 1:
        with torch.no_grad():
            assert relative_error(model(INPUTS), twin(INPUTS)) < 0.02


def test_zero_points_of_weights_are_subtracted(shared_checkpoints: Path, tmp_path: Path) -> None:
    source = shared_checkpoints / "ao-int8wo"
    tensors = tensors_of(source)
    for name, tensor in tensors.items():
        if name.endswith("_zero_point"):
            tensors[name] = torch.randint(-20, 20, tensor.shape, dtype=torch.int8)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    model, twin = load_model(tmp_path), plain_twin(tmp_path, dequantize, RANKS[0])
    for name, layer in quantized_layers(model).items():
        assert torch.equal(weight_of(layer), twin.get_submodule(name).weight), name  # type: ignore[arg-type]


def test_layers_have_the_config_of_their_name() -> None:
    config = by_name({"a.up": INT8, r"re:.*\.down": None, "_default": FP8})

    def method_of(name: str) -> type:
        return type(ColumnParallelLinear(32, 32, quant_config=config, prefix=name).quant_method)

    assert method_of("a.up") is Int8LinearMethod
    assert method_of("b.up") is Fp8LinearMethod
    assert method_of("a.down") is UnquantizedLinearMethod


def test_parts_that_differ_are_refused() -> None:
    config = by_name({"a.up": INT8, "_default": FP8})
    config.apply_mapper(WeightsMapper(orig_to_new_stacked={".gate.": (".gate_up.", 0), ".up.": (".gate_up.", 1)}))
    with pytest.raises(ValueError, match=r"Found different quantization schemes for the shards of a\.gate_up"):
        MergedColumnParallelLinear(32, [32, 32], quant_config=config, prefix="a.gate_up")


@pytest.mark.parametrize(
    ("quant_type", "message"),
    [
        ({"_type": "Int4WeightOnlyConfig"}, "l: torchao's Int4WeightOnlyConfig is not known; known are Float8Weight"),
        (INT8 | {"_data": {"group_size": 32}}, "l: Int8WeightOnlyConfig with granularity PerRow, group_size 32"),
        (
            FP8 | {"_data": {"granularity": [{"_type": "PerTensor"}] * 2}},
            "l: Float8Weight.* with granularity PerTensor",
        ),
    ],
)
def test_what_there_is_no_method_for_is_refused(quant_type: Any, message: str) -> None:
    config = TorchAOConfig.from_config({"quant_type": {"default": quant_type}})
    with pytest.raises(ValueError, match=message):
        ColumnParallelLinear(32, 32, quant_config=config, prefix="l")


def test_a_config_without_a_type_is_refused(shared_checkpoints: Path) -> None:
    config = config_of(shared_checkpoints / "ao-fp8wo", quantization_config={"quant_method": "torchao"})
    with pytest.raises(ConfigError, match="quantization_config: quant_type is None; expected an object 'default'"):
        read_quantization(config)


def test_torchao_is_not_needed(shared_checkpoints: Path) -> None:
    quantization = json.loads((shared_checkpoints / "ao-fp8wo" / "config.json").read_text())["quantization_config"]
    assert TorchAOConfig.from_config(quantization).get_checkpoint_weight_mapper().map_name("l._weight_qdata") == [
        ("l.weight", None)
    ]
