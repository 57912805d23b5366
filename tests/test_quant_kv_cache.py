"""Scales of the KV cache: under all their names, and what they are where a checkpoint has none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from quant_models import tensors_of
from torch import Tensor

from weightlift import fast_load
from weightlift.errors import CheckpointMismatchError
from weightlift.model.postprocess import PostProcessing
from weightlift.model.quantization.base import QuantizationConfig, Target
from weightlift.model.quantization.compressed_tensors import CompressedTensorsConfig
from weightlift.model.quantization.fp8 import Fp8Config
from weightlift.model.quantization.kv_cache import KVCacheScales
from weightlift.model.quantization.modelopt import ModelOptConfig
from weightlift.model.quantization.torchao import TorchAOConfig
from weightlift.model.skeleton import load_model

Values = Mapping[str, float]


def scales_of(layer: Any) -> Values:
    return {name: float(getattr(layer, name)) for name in ("k_scale", "v_scale", "q_scale", "prob_scale")}


def loaded(values: Values, target: Target = "plain") -> Any:
    layer = KVCacheScales(Fp8Config(target=target), "model.layers.0.self_attn.attn")
    load(layer, values)
    return layer


def load(layer: Any, values: Values) -> None:
    for name, value in values.items():
        layer.weight_loader(layer.get_parameter(name), torch.tensor([value], dtype=torch.bfloat16))
    layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("values", "k", "v", "q", "prob"),
    [
        ({}, 1.0, 1.0, 1.0, 1.0),
        ({"k_scale": 0.5}, 0.5, 0.5, 0.5, 1.0),
        ({"k_scale": 0.5, "v_scale": 0.25}, 0.5, 0.25, 0.5, 1.0),
        ({"k_scale": 0.5, "v_scale": 0.25, "q_scale": 2.0, "prob_scale": 4.0}, 0.5, 0.25, 2.0, 4.0),
    ],
)
def test_scales_that_a_checkpoint_does_not_have_get_their_defaults(
    values: Values, k: float, v: float, q: float, prob: float
) -> None:
    assert scales_of(loaded(values)) == {"k_scale": k, "v_scale": v, "q_scale": q, "prob_scale": prob}


def test_scales_of_a_cache_in_e4m3fnuz_are_doubled_and_defaults_are_not() -> None:
    found = scales_of(loaded({"k_scale": 0.5, "v_scale": 0.25}, "fnuz"))
    assert found == {"k_scale": 1.0, "v_scale": 0.5, "q_scale": 1.0, "prob_scale": 1.0}
    assert scales_of(loaded({}, "fnuz")) == dict.fromkeys(found, 1.0)


@pytest.mark.parametrize("target", ["plain", "fnuz"])
def test_a_second_load_sets_what_it_has_and_the_defaults_that_follow(target: Target) -> None:
    layer = loaded({"k_scale": 0.5, "v_scale": 0.25}, target)
    load(layer, {"k_scale": 0.75})
    found, factor = scales_of(layer), 2 if target == "fnuz" else 1
    assert found["k_scale"] == found["q_scale"] == 0.75 * factor
    # Of the first load, as any parameter that a second does not have.
    assert found["v_scale"] == 0.25 * factor


def test_a_default_follows_a_second_load_and_gives_way_to_it() -> None:
    layer = loaded({"k_scale": 0.5})
    load(layer, {"k_scale": 0.75})
    assert scales_of(layer) == {"k_scale": 0.75, "v_scale": 0.75, "q_scale": 0.75, "prob_scale": 1.0}
    load(layer, {"k_scale": 0.75, "v_scale": 0.25})
    assert scales_of(layer)["v_scale"] == 0.25


@pytest.mark.parametrize("values", [{"v_scale": 0.5}, {"v_scale": 0.5, "q_scale": 1.0}])
def test_a_scale_for_values_alone_is_an_error(values: Values) -> None:
    with pytest.raises(ValueError, match=r"self_attn.attn: the checkpoint has v_scale, and no k_scale"):
        loaded(values)


@pytest.mark.parametrize("value", [0.0, -2.0, float("inf"), float("nan")])
def test_a_scale_that_is_no_positive_number_is_an_error(value: float) -> None:
    with pytest.raises(ValueError, match=r"self_attn.attn.k_scale is .*; expected a positive number"):
        loaded({"k_scale": value})


def test_a_scale_of_several_numbers_is_an_error() -> None:
    layer: Any = KVCacheScales(Fp8Config(), "a")
    with pytest.raises(CheckpointMismatchError, match=r"a.k_scale: KV-cache scale expects a scalar weight, got shape"):
        layer.weight_loader(layer.k_scale, torch.ones(2))


@pytest.mark.parametrize("config", [Fp8Config(), CompressedTensorsConfig([]), ModelOptConfig("FP8")])
def test_kinds_whose_checkpoints_may_have_scales_have_a_place_for_them(config: QuantizationConfig) -> None:
    assert set(dict(KVCacheScales(config).named_parameters())) == {"k_scale", "v_scale", "q_scale", "prob_scale"}


def test_without_a_method_there_are_no_scales() -> None:
    assert not list(KVCacheScales(None).parameters())
    assert not list(KVCacheScales(TorchAOConfig({})).parameters())


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.kv_scale",),
    ],
)
def test_each_name_of_a_scale_leads_to_the_attention_layer(
    shared_checkpoints: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    source = shared_checkpoints / "fp8-dynamic"
    scales: dict[str, Tensor] = {}
    for number in range(4):
        for position, name in enumerate(names):
            scales[f"model.layers.{number}.{name}"] = torch.tensor(0.5 * (number + 1) + position)
    safetensors.torch.save_file(tensors_of(source) | scales, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    model: Any = load_model(tmp_path)
    assert model.load_report.unexpected_keys == []
    for number in range(4):
        key = 0.5 * (number + 1)
        value = key + 1 if len(names) > 1 else key
        found = scales_of(model.model.layers[number].self_attn.attn)
        assert found == {"k_scale": key, "v_scale": value, "q_scale": key, "prob_scale": 1.0}
    processing = PostProcessing()
    fast_load(model, tmp_path, mapper=model.hf_to_weightlift_mapper, on_module_loaded=processing.process_layer)
    processing.finish(model, torch.bfloat16)
    assert scales_of(model.model.layers[0].self_attn.attn) == {
        "k_scale": 0.5,
        "v_scale": 1.5 if len(names) > 1 else 0.5,
        "q_scale": 0.5,
        "prob_scale": 1.0,
    }


def test_a_kind_of_cache_that_there_are_no_scales_for_is_refused(shared_checkpoints: Path, tmp_path: Path) -> None:
    config = json.loads((shared_checkpoints / "fp8-dynamic" / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"type": "int", "num_bits": 8, "strategy": "tensor"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(next((shared_checkpoints / "ao-fp8wo").glob("*.safetensors")))
    with pytest.raises(ValueError, match=r"kv_cache_scheme: found \{'type': 'int'\}"):
        load_model(tmp_path)
