"""What the model declares against what the checkpoint fills: by names and by regions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import WriteCheckpoint
from torch import Tensor, nn

import weightlift
from weightlift import CheckpointMismatchError
from weightlift.checkpoint import CheckpointSource
from weightlift.model.reconcile import check_coverage, exempt_names, missing_names, reconcile


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return model.state_dict(keep_vars=True)


# ---- missing


def test_missing_is_what_is_declared_and_not_loaded_in_natural_order() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(11)))
    model[3].register_buffer("cache", torch.zeros(1), persistent=False)
    targets = state_of(model)
    loaded = {name for name in targets if not name.endswith(("10.weight", "2.weight", "0.running_mean"))}
    assert missing_names(targets, loaded) == ["0.running_mean", "2.weight", "10.running_mean", "10.weight"]


def test_a_tied_parameter_is_there_under_either_name() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(4, 2)
    model.head = nn.Linear(2, 4, bias=False)
    model.head.weight = model.embed.weight
    targets = state_of(model)
    assert missing_names(targets, {"embed.weight"}) == []
    assert missing_names(targets, {"head.weight"}) == []
    assert missing_names(targets, ()) == ["embed.weight", "head.weight"]


def test_parameters_of_equal_size_are_not_tied() -> None:
    targets = state_of(nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]))
    assert missing_names(targets, {"0.weight"}) == ["1.weight"]
    empty = {"a": torch.empty(0), "b": torch.empty(0)}
    assert missing_names(empty, {"a"}) == ["b"]


# ---- what quantised layers are exempt from


class Method:
    """Of a layer that is quantised offline: its weights come from the checkpoint."""

    uses_meta_device = False

    def process_weights_after_loading(self, layer: nn.Module) -> None: ...


class OnlineMethod(Method):
    uses_meta_device = True


class BaseKVCacheMethod(Method):
    pass


class Fp8KVCacheMethod(BaseKVCacheMethod):
    pass


class MethodWithoutPostProcessing:
    pass


def layer(method: object, **parameters: Tensor) -> nn.Module:
    module = nn.Module()
    module.quant_method = method
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return module


@pytest.fixture
def quantised() -> nn.Module:
    model = nn.Module()
    model.online = layer(OnlineMethod(), weight=torch.zeros(2), weight_scale=torch.zeros(1))
    model.attn = layer(Fp8KVCacheMethod(), k_scale=torch.zeros(1), v_scale=torch.zeros(1))
    model.linear = layer(
        Method(),
        weight=torch.zeros(2),
        input_scale=torch.zeros(1),
        input_scale_ub=torch.zeros(1),
        qzeros=torch.empty(0),
    )
    model.linear.inner = nn.Linear(1, 1)
    model.plain = layer(MethodWithoutPostProcessing(), input_scale_ub=torch.zeros(1), qzeros=torch.empty(0))
    model.none = layer(None, weight=torch.zeros(1))
    model.norm = nn.LayerNorm(2)
    return model


def test_exactly_four_rules_exempt_parameters_of_quantised_layers(quantised: nn.Module) -> None:
    assert exempt_names(quantised) == {
        "online.weight": "made by online quantization",
        "online.weight_scale": "made by online quantization",
        "attn.k_scale": "has a default",
        "attn.v_scale": "has a default",
        "linear.input_scale_ub": "set by the config",
        "linear.qzeros": "has no elements",
    }


def test_weights_of_linear_layers_are_missing_whether_quantised_or_not(quantised: nn.Module) -> None:
    report = reconcile(quantised, state_of(quantised), {"norm.weight"}, strict=False)
    assert report.missing_keys == [
        "linear.inner.bias",
        "linear.inner.weight",
        "linear.input_scale",
        "linear.weight",
        "none.weight",
        "norm.bias",
        "plain.input_scale_ub",
        "plain.qzeros",
    ]


def test_an_exempt_parameter_is_exempt_under_each_of_its_names() -> None:
    model = nn.Module()
    model.a = layer(OnlineMethod(), weight=torch.zeros(2))
    model.b = model.a
    assert set(exempt_names(model)) == {"a.weight", "b.weight"}
    assert reconcile(model, state_of(model), (), strict=True).missing_keys == []


def test_a_root_with_a_method_and_a_mapping_are_taken() -> None:
    assert exempt_names(layer(OnlineMethod(), weight=torch.zeros(2))) == {"weight": "made by online quantization"}
    assert exempt_names({"weight": torch.zeros(2)}) == {}


# ---- one report, one error


def test_the_report_has_all_three_lists_in_natural_order() -> None:
    targets = {f"layers.{i}.w": torch.zeros(1) for i in range(12)}
    report = reconcile(
        targets,
        targets,
        {"layers.0.w"},
        unexpected=["layers.10.x", "layers.9.x"],
        skipped={"layers.11.inv_freq": "computed", "layers.2.inv_freq": "computed"},
        strict=False,
    )
    assert report.missing_keys == [f"layers.{i}.w" for i in range(1, 12)]
    assert report.unexpected_keys == ["layers.9.x", "layers.10.x"]
    assert list(report.skipped) == ["layers.2.inv_freq", "layers.11.inv_freq"]


def test_the_error_has_missing_unexpected_and_mismatched_at_once() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointMismatchError) as caught:
        reconcile(
            model, state_of(model), {"weight"}, unexpected=["x"], mismatched=["weight: sizes"], path="f", strict=True
        )
    error = caught.value
    assert (error.missing_keys, error.unexpected_keys, error.mismatched, error.path) == (
        ["bias"],
        ["x"],
        ["weight: sizes"],
        "f",
    )
    assert "for Linear:" in str(error)


def test_sizes_are_an_error_where_names_are_not() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointMismatchError) as caught:
        reconcile(model, state_of(model), {"weight"}, mismatched=["weight: sizes"], strict=False)
    assert caught.value.missing_keys == []


def test_skipped_names_are_never_an_error() -> None:
    model = nn.Linear(2, 2)
    report = reconcile(model, state_of(model), {"weight", "bias"}, skipped={"x": "a rule"}, strict=True)
    assert report.skipped == {"x": "a rule"}


def test_a_declared_parameter_that_a_rule_skips_is_missing() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointMismatchError, match=r'Missing key\(s\) in state_dict: "bias"'):
        reconcile(model, state_of(model), {"weight"}, skipped={"bias": "a rule"}, strict=True)


# ---- whole loads


def test_a_missing_norm_of_every_layer_is_one_pattern(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    def block() -> nn.Module:
        return nn.ModuleDict({"q_norm": nn.LayerNorm(4), "proj": nn.Linear(4, 4)})

    model = nn.ModuleDict({"layers": nn.ModuleList([block() for _ in range(12)])})
    saved = {name: value for name, value in model.state_dict().items() if not name.endswith("q_norm.weight")}
    folder = write_checkpoint(tmp_path / "model", saved)
    with pytest.raises(CheckpointMismatchError) as caught:
        weightlift.fast_load(model, folder)
    assert '"layers.{0-11}.q_norm.weight" (12)' in str(caught.value)
    assert caught.value.missing_keys == [f"layers.{i}.q_norm.weight" for i in range(12)]
    report = weightlift.fast_load(model, folder, strict=False)
    assert "missing     layers.{0-11}.q_norm.weight (12)" in str(report)


def test_only_q_of_a_fused_qkv_is_a_gap_of_every_layer(tmp_path: Path) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList()})
    for _ in range(3):
        qkv = nn.Linear(16, 768, bias=False)
        qkv.weight.weight_loader = lambda parameter, loaded: parameter.data[:512].copy_(loaded)
        model["layers"].append(nn.ModuleDict({"qkv_proj": qkv}))
    saved = {f"layers.{i}.qkv_proj.weight": torch.ones(512, 16) for i in range(3)}
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError) as caught:
        weightlift.fast_load(model, tmp_path)
    assert "layers.{0-2}.qkv_proj.weight[512:768] (3)" in str(caught.value)
    assert caught.value.gaps == [f"layers.{i}.qkv_proj.weight[512:768]" for i in range(3)]


def transformers_model(kind: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def test_a_real_tied_model_loads_without_its_head(tmp_path: Path) -> None:
    model = transformers_model("Llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in weightlift.load_file(tmp_path)
    fresh = transformers_model("Llama", tie_word_embeddings=True)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    report = weightlift.fast_load(fresh, tmp_path)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight
    for (name, expected), (_, loaded) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(expected, loaded), name


def test_an_untied_model_misses_the_head_that_a_tied_checkpoint_lacks(tmp_path: Path) -> None:
    transformers_model("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    with pytest.raises(CheckpointMismatchError) as caught:
        weightlift.fast_load(transformers_model("Llama", tie_word_embeddings=False), tmp_path)
    assert caught.value.missing_keys == ["lm_head.weight"]


def test_experts_of_a_module_list_are_told_by_layer_and_expert(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    def mixtral(num_experts: int) -> nn.Module:
        expert = {"w1": (6, 4), "w2": (4, 6), "w3": (6, 4)}

        def experts() -> nn.ModuleList:
            return nn.ModuleList(
                nn.ModuleDict({name: nn.Linear(k, n, bias=False) for name, (n, k) in expert.items()})
                for _ in range(num_experts)
            )

        layers = [nn.ModuleDict({"block_sparse_moe": nn.ModuleDict({"experts": experts()})}) for _ in range(4)]
        return nn.ModuleDict({"layers": nn.ModuleList(layers)})

    folder = write_checkpoint(tmp_path / "model", mixtral(8).state_dict(), shards=3)
    assert weightlift.fast_load(mixtral(8), folder).missing_keys == []
    report = weightlift.fast_load(mixtral(6), folder, strict=False)
    assert len(report.unexpected_keys) == 4 * 2 * 3
    for name in ("w1", "w2", "w3"):
        assert f"  unexpected  layers.{{0-3}}.block_sparse_moe.experts.{{6,7}}.{name}.weight (8)" in str(report)


def test_the_error_names_the_checkpoint_of_a_source(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    folder = write_checkpoint(tmp_path / "model", {"w": torch.zeros(2)})
    with pytest.raises(CheckpointMismatchError) as caught:
        weightlift.fast_load(nn.Linear(2, 2), CheckpointSource(folder))
    assert caught.value.path == str(folder)


def test_a_mapping_of_some_layers_is_checked_for_these_alone(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    saved = {f"layers.{i}.w": torch.full((2,), float(i)) for i in range(6)}
    folder = write_checkpoint(tmp_path / "model", saved)
    wanted = {f"layers.{i}.w": torch.zeros(2) for i in (1, 2)}
    report = weightlift.fast_load(wanted, folder, strict=False)
    assert report.missing_keys == []
    assert "unexpected  layers.{0,3-5}.w (4)" in str(report)
    assert wanted["layers.2.w"].eq(2).all()
    # With a filter, what else differs is still an error.
    filters = [lambda name: None if name in wanted else "not asked for"]
    report = weightlift.fast_load(wanted, folder, filters=filters)
    assert report.unexpected_keys == []
    assert "skipped     layers.{0,3-5}.w (4): not asked for" in str(report)
    with pytest.raises(CheckpointMismatchError, match=r"layers\.6\.w"):
        weightlift.fast_load(wanted | {"layers.6.w": torch.zeros(2)}, folder, filters=filters)


# ---- by regions, with a program that only knows what it covers


def test_names_that_only_recording_knows_and_gaps_are_one_error() -> None:
    targets = {"qkv.weight": torch.zeros(8, 4), "norm.weight": torch.zeros(4)}
    report = reconcile(targets, targets, {"qkv.weight"}, unexpected=["x"], strict=False)
    program: Any = SimpleNamespace(coverage=lambda tensor: ([(64, 128)], []))
    with pytest.raises(CheckpointMismatchError) as caught:
        check_coverage(targets, targets, program, report, path="f", strict=True)
    error = caught.value
    assert (error.missing_keys, error.unexpected_keys, error.gaps) == (["norm.weight"], ["x"], ["qkv.weight[4:8]"])
    assert error.path == "f"
