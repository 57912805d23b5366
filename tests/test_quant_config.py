"""Which method each layer gets, by what a `quantization_config` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from quant_models import config_of, tensors_of

from weightlift.model.experts import FusedMoE
from weightlift.model.linear import ColumnParallelLinear, MergedColumnParallelLinear, UnquantizedLinearMethod
from weightlift.model.mapping import WeightsMapper
from weightlift.model.mixtral import MixtralForCausalLM
from weightlift.model.model_config import ConfigError, ModelConfig
from weightlift.model.parallel import ParallelConfig
from weightlift.model.quantization import base
from weightlift.model.quantization.base import (
    QuantizationConfig,
    read_quantization,
    register_quantization_config,
    registered_quantization_configs,
)
from weightlift.model.quantization.compressed_tensors import CompressedTensorsConfig
from weightlift.model.quantization.fbgemm_fp8 import FBGEMMFp8Config
from weightlift.model.quantization.fp8 import Fp8Config, Fp8LinearMethod
from weightlift.model.quantization.int8 import Int8LinearMethod
from weightlift.model.quantization.layer_names import LayerNames
from weightlift.model.quantization.mxfp8 import Mxfp8LinearMethod
from weightlift.model.skeleton import load_model
from weightlift.model.vocab import ParallelLMHead

FLOAT8: dict[str, Any] = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
FLOAT8_CHANNEL = FLOAT8 | {"strategy": "channel"}
INT8: dict[str, Any] = FLOAT8_CHANNEL | {"type": "int"}
DYNAMIC: dict[str, Any] = {"num_bits": 8, "strategy": "token", "dynamic": True}
STACKS = WeightsMapper(orig_to_new_stacked={".gate_proj.": (".gate_up_proj.", 0), ".up_proj.": (".gate_up_proj.", 1)})


def compressed_tensors(*groups: tuple[list[str], dict[str, Any]], **more: Any) -> CompressedTensorsConfig:
    """A config with these targets and weights."""
    fields = {
        "config_groups": {
            f"group_{number}": {"targets": targets, "weights": weights, "input_activations": DYNAMIC}
            for number, (targets, weights) in enumerate(groups)
        },
        "format": "float-quantized",
    }
    return CompressedTensorsConfig.from_config(fields | more)


def method_of(config: QuantizationConfig, name: str, *parts: int) -> Any:
    """Of a column-parallel layer, or of one of these parts."""
    if parts:
        return MergedColumnParallelLinear(128, parts, quant_config=config, prefix=name).quant_method
    return ColumnParallelLinear(128, 128, quant_config=config, prefix=name).quant_method


def is_ignored(config: QuantizationConfig, name: str, *parts: int) -> bool:
    return isinstance(method_of(config, name, *parts), UnquantizedLinearMethod)


# ---- which config


def test_a_kind_that_is_not_known_is_refused_with_those_that_are(shared_checkpoints: Path) -> None:
    config = config_of(shared_checkpoints / "fp8", quantization_config={"quant_method": "quip"})
    with pytest.raises(
        ConfigError, match=r"quant_method 'quip' is not known; known are awq, compressed-tensors, .*fp8"
    ):
        read_quantization(config)


@pytest.mark.parametrize("value", ["fp8", 3, ["fp8"]])
def test_a_config_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"quantization_config is .*; expected an object"):
        read_quantization(ModelConfig({"quantization_config": value}))


def test_without_a_config_weights_are_not_quantised() -> None:
    assert read_quantization(ModelConfig({})) is None
    assert read_quantization(ModelConfig({"quantization_config": None})) is None


@pytest.mark.parametrize("name", ["compressed-tensors", "compressed_tensors", "Compressed-Tensors"])
def test_the_name_of_a_kind_may_be_written_otherwise(name: str) -> None:
    found = read_quantization(ModelConfig({"quantization_config": {"quant_method": name}}))
    assert isinstance(found, CompressedTensorsConfig)


def test_a_kind_of_ones_own_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_configs", dict(base._configs))

    @register_quantization_config("mine")
    class Mine(Fp8Config):
        name = "mine"

    assert "mine" in registered_quantization_configs()
    assert isinstance(read_quantization(ModelConfig({"quantization_config": {"quant_method": "mine"}})), Mine)


def test_a_layout_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="target is 'cutlass'; accepted is plain, marlin, fnuz"):
        read_quantization(ModelConfig({"quantization_config": {"quant_method": "fp8"}}), target="cutlass")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_scheme": "sometimes"}, "Unsupported activation scheme sometimes"),
        ({"weight_block_size": [128]}, "must have 2 dimensions, but got 1 dimensions"),
        ({"weight_block_size": [128, 0]}, r"must be positive, but got \[128, 0\]"),
        (
            {"weight_block_size": [128, 128], "activation_scheme": "static"},
            "block-wise quantization only supports dynamic activation scheme for now, but got static",
        ),
        ({"ignored_layers": ["re:("]}, r"'re:\(' is no regular expression"),
    ],
)
def test_an_fp8_config_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_quantization(ModelConfig({"quantization_config": {"quant_method": "fp8"} | fields}))


GROUP = {"targets": ["Linear"], "weights": FLOAT8}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("fp8", {"ignored_layers": "lm_head"}, "ignored_layers is 'lm_head'; expected a list of names of layers"),
        ("fp8", {"modules_to_not_convert": [3]}, r"modules_to_not_convert is \[3\]; expected a list of names"),
        ("compressed-tensors", {"ignore": 3}, "ignore is 3; expected a list of names"),
        ("compressed-tensors", {"config_groups": [1]}, r"config_groups is \[1\]; expected an object"),
        ("compressed-tensors", {"config_groups": {"g": 1}}, "g is 1; expected an object"),
        ("compressed-tensors", {"config_groups": {"g": GROUP | {"targets": "Linear"}}}, "config_groups: g: targets is"),
        (
            "compressed-tensors",
            {"config_groups": {"g": GROUP | {"input_activations": "x"}}},
            "config_groups: g: input_activations is 'x'; expected an object",
        ),
        (
            "compressed-tensors",
            {"config_groups": {"g": GROUP | {"weights": FLOAT8 | {"num_bits": "eight"}}}},
            "config_groups: g: num_bits is 'eight'; expected int",
        ),
        (
            "compressed-tensors",
            {"config_groups": {"g": GROUP | {"weights": FLOAT8 | {"strategy": "block"}}}},
            "config_groups: g: block_structure is missing",
        ),
        ("compressed-tensors", {"kv_cache_scheme": "fp8"}, "kv_cache_scheme is 'fp8'; expected an object"),
        ("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": ["x"]}, "quantized_layers is .*an object"),
        (
            "modelopt",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}},
            "a is 'FP8'; expected an obj",
        ),
        (
            "modelopt",
            {"quant_algo": "FP8", "exclude_modules": "lm_head"},
            "exclude_modules is 'lm_head'; expected a li",
        ),
        ("torchao", {"quant_type": {"default": {"_type": ["x"]}}}, "quant_type is .*; expected an object 'default'"),
        (
            "torchao",
            {"quant_type": {"default": {"_type": "FqnToConfig", "_data": "x"}}},
            "_data is 'x'; expected an obj",
        ),
        ("fbgemm_fp8", {"activation_scale_ub": float("nan")}, "activation_scale_ub is nan; expected a number above 0"),
    ],
)
def test_a_config_with_fields_of_other_types_is_refused(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_quantization(ModelConfig({"quantization_config": {"quant_method": kind} | fields}))


# ---- names of layers


@pytest.mark.parametrize(
    ("match", "entry", "names", "others"),
    [
        ("exact", "a.b", ["a.b"], ["a.b.c", "x.a.b", "a"]),
        ("exact", r"re:.*\.gate$", ["m.gate"], ["m.gate_proj", "m.gate.x"]),
        ("path", "gate", ["gate", "m.gate", "m.gate.x"], ["m.gate_proj", "m.up_gate"]),
        ("path", "layers.0", ["model.layers.0.mlp"], ["model.layers.01.mlp", "model.layers.1.mlp"]),
        ("wildcard", "lm_head", ["lm_head", "m.lm_head"], ["lm_head2"]),
        ("wildcard", "*.self_attn*", ["l.0.self_attn.q_proj"], ["l.0.mlp.up_proj"]),
        ("wildcard", "vision.*", ["vision.x.y"], ["visions.x", "a.vision.x"]),
    ],
)
def test_an_entry_names_layers(match: Any, entry: str, names: list[str], others: list[str]) -> None:
    listed = LayerNames([entry], match)
    assert [name for name in names + others if name in listed] == names


def test_entries_that_name_nothing_are_known() -> None:
    config = Fp8Config.from_config({"modules_to_not_convert": ["lm_head", "re:.*visual.*", "mlp.router", "other"]})
    assert is_ignored(config, "model.mlp.router")
    assert config.unmatched_ignore_names() == ["lm_head", "re:.*visual.*", "other"]
    assert config.unmatched_ignore_names(["model.visual.0.fc", "lm_head"]) == ["other"]


def test_names_of_the_config_are_those_of_the_model_after_its_mapper() -> None:
    name = "model.layers.0.block_sparse_moe"
    config = compressed_tensors(([f"{name}.shared"], INT8), (["Linear"], FLOAT8_CHANNEL), ignore=[f"{name}.gate"])
    config.apply_mapper(MixtralForCausalLM.hf_to_weightlift_mapper)
    assert is_ignored(config, "model.layers.0.mlp.gate")
    assert isinstance(method_of(config, "model.layers.0.mlp.shared"), Int8LinearMethod)
    assert isinstance(method_of(config, "model.layers.0.mlp.other"), Fp8LinearMethod)


@pytest.mark.parametrize("ignored", [["m.gate_proj", "m.up_proj"], ["m.gate_up_proj"], [r"re:m\.(gate|up)_proj"]])
def test_a_fused_layer_is_ignored_by_its_parts_or_by_its_own_name(ignored: list[str]) -> None:
    config = compressed_tensors((["Linear"], FLOAT8), ignore=ignored)
    config.apply_mapper(STACKS)
    assert is_ignored(config, "m.gate_up_proj", 128, 128)
    assert not is_ignored(config, "n.gate_up_proj", 128, 128)


def test_a_fused_layer_with_some_parts_ignored_is_refused() -> None:
    config = Fp8Config.from_config({"ignored_layers": ["m.up_proj"]})
    config.apply_mapper(STACKS)
    with pytest.raises(
        ValueError,
        match=r"Detected some but not all shards of m\.gate_up_proj are quantized\. All shards of fused layers to have "
        r"the same precision\..*: m\.gate_proj",
    ):
        method_of(config, "m.gate_up_proj", 128, 128)


def test_a_layer_that_is_fused_on_disk_has_no_parts() -> None:
    config = Fp8Config.from_config({"ignored_layers": ["m.qkv_proj"]})
    config.apply_mapper(WeightsMapper())
    assert is_ignored(config, "m.qkv_proj")


def experts(config: Any, num_experts: int = 2) -> FusedMoE:
    return FusedMoE(num_experts, 1, 128, 128, quant_config=config, prefix="m.experts", parallel=ParallelConfig())


def test_experts_are_ignored_all_together() -> None:
    names = [f"m.experts.{expert}.{part}_proj" for expert in range(2) for part in ("gate", "up", "down")]
    for ignored in (names, ["m.experts"], [r"re:m\.experts.*"]):
        layer = experts(compressed_tensors((["Linear"], FLOAT8), ignore=ignored))
        assert layer.w13_weight.dtype == torch.get_default_dtype()
    with pytest.raises(ValueError, match=r"Detected some but not all shards of m\.experts are quantized"):
        experts(compressed_tensors((["Linear"], FLOAT8), ignore=names[1:]))


def test_experts_are_linear_layers_of_the_config() -> None:
    layer = experts(compressed_tensors((["Linear"], FLOAT8)))
    assert layer.w13_weight.dtype == torch.float8_e4m3fn


def test_a_kind_without_a_method_for_experts_says_so() -> None:
    with pytest.raises(ValueError, match=r"m\.experts: fbgemm_fp8 has no method for experts"):
        experts(FBGEMMFp8Config.from_config({"activation_scale_ub": 1200.0}))


def test_the_head_is_quantised_where_a_group_names_it() -> None:
    def head(config: Any) -> Any:
        return ParallelLMHead(100, 128, quant_config=config, prefix="lm_head", parallel=ParallelConfig())

    layer = head(compressed_tensors((["Linear", "lm_head"], FLOAT8_CHANNEL)))
    weight, scale = torch.randn(100, 128).to(torch.float8_e4m3fn), torch.rand(100, 1)
    layer.weight_loader(layer.weight, weight)
    layer.weight_loader(layer.weight_scale, scale)
    x = torch.randn(3, 128)
    torch.testing.assert_close(layer(x), x @ (weight.float() * scale).T)
    for config in (
        compressed_tensors((["Linear"], FLOAT8_CHANNEL)),
        compressed_tensors((["lm_head"], FLOAT8_CHANNEL), ignore=["lm_head"]),
        Fp8Config(),
    ):
        assert head(config).weight.dtype == torch.get_default_dtype()


# ---- schemes of compressed-tensors


@pytest.mark.parametrize(
    ("weights", "more", "kind", "attributes"),
    [
        (FLOAT8, {}, Fp8LinearMethod, {"strategy": "tensor"}),
        (FLOAT8_CHANNEL, {"format": "naive-quantized"}, Fp8LinearMethod, {"strategy": "channel"}),
        (
            FLOAT8 | {"strategy": "block", "block_structure": [64, 128]},
            {},
            Fp8LinearMethod,
            {"strategy": "block", "block_size": (64, 128)},
        ),
        (FLOAT8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}, {}, Mxfp8LinearMethod, {}),
        (INT8, {"format": "int-quantized"}, Int8LinearMethod, {"strategy": "channel"}),
        (INT8 | {"strategy": "tensor"}, {"format": "int-quantized"}, Int8LinearMethod, {"strategy": "tensor"}),
    ],
)
def test_a_scheme_has_its_method(
    weights: dict[str, Any], more: dict[str, Any], kind: type, attributes: dict[str, Any]
) -> None:
    method = method_of(compressed_tensors((["Linear"], weights), **more), "l")
    assert type(method) is kind
    assert {name: getattr(method, name) for name in attributes} == attributes


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_activations_have_scales(symmetric: bool) -> None:
    group = {
        "targets": ["Linear"],
        "weights": INT8,
        "input_activations": {"strategy": "tensor", "dynamic": False, "symmetric": symmetric},
        "format": "int-quantized",
    }
    config = CompressedTensorsConfig.from_config({"config_groups": {"group_0": group}})
    layer = ColumnParallelLinear(128, 128, bias=False, quant_config=config)
    names = {name for name, _ in layer.named_parameters()}
    assert names == {"weight", "weight_scale", "input_scale"} | (set() if symmetric else {"input_zero_point"})


def test_a_group_that_names_a_layer_comes_before_one_that_names_its_class() -> None:
    config = compressed_tensors((["Linear"], FLOAT8), ([r"re:.*\.down$"], INT8), (["a.up"], FLOAT8_CHANNEL))
    assert isinstance(method_of(config, "a.down"), Int8LinearMethod)
    assert method_of(config, "a.up").strategy == "channel"
    assert method_of(config, "b.up").strategy == "tensor"


def test_a_layer_that_no_group_names_is_not_quantised() -> None:
    assert is_ignored(compressed_tensors((["a.up"], FLOAT8)), "a.down")


@pytest.mark.parametrize("groups", [[(["m.up_proj"], FLOAT8)], [(["m.up_proj"], INT8), (["Linear"], FLOAT8)]])
def test_parts_with_different_schemes_are_refused(groups: list[Any]) -> None:
    config = compressed_tensors(*groups)
    config.apply_mapper(STACKS)
    with pytest.raises(
        ValueError, match=r"different quantization schemes for the shards of m\.gate_up_proj\..*m.up_pro"
    ):
        method_of(config, "m.gate_up_proj", 128, 128)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (FLOAT8 | {"num_bits": 6}, "l: No compressed-tensors compatible scheme was found: float of 6 bits by tensor"),
        (INT8 | {"symmetric": False}, "No compressed-tensors compatible scheme .* int of 8 bits .*asymmetric"),
        (INT8 | {"actorder": "group"}, r"activation ordering \(actorder='group'\) is no longer supported"),
        (FLOAT8 | {"dynamic": True}, "weights are quantised as the model runs"),
        (3, "group_0: weights is 3; expected an object"),
    ],
)
def test_a_scheme_that_there_is_no_method_for_is_refused(weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method_of(compressed_tensors((["Linear"], weights)), "l")


@pytest.mark.parametrize(
    "more",
    [{"sparsity_config": {"format": "24", "targets": ["Linear"]}}, {"transform_config": {"config_groups": {"r1": {}}}}],
)
def test_weights_that_are_sparse_or_transformed_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(more))}: weights that are sparse, or transformed"):
        compressed_tensors((["Linear"], FLOAT8), **more)


# ---- FBGEMM


def test_fbgemm_has_scales_by_channel_and_a_limit_from_the_config(shared_checkpoints: Path, tmp_path: Path) -> None:
    source = shared_checkpoints / "fp8-dynamic"
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head"],
    }
    safetensors.torch.save_file(tensors_of(source), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    model: Any = load_model(tmp_path)
    layer = model.model.layers[0].mlp.down_proj
    assert layer.input_scale_ub.tolist() == [1200.0]
    assert model.load_report.missing_keys == []
    expected: Any = load_model(source)
    assert torch.equal(layer.weight_scale, expected.model.layers[0].mlp.down_proj.weight_scale)


def test_fbgemm_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="activation_scale_ub is None; expected a number"):
        FBGEMMFp8Config.from_config({"quant_method": "fbgemm_fp8"})
