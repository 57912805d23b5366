"""The router: which module or parameter a name leads to, and who copies what, as engines are used to."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import weightlift
from weightlift import CheckpointMismatchError
from weightlift.model.mapping import ACTIVATION_ORDER, KV_CACHE_SCALES, WeightsMapper
from weightlift.model.router import AutoWeightsLoader

Weights = Iterable[tuple[str, Tensor]]


class Attention(nn.Module):
    """A fused projection of heads q, k and v, 4 rows each, whose loader puts a part into its place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(3, 12, bias=False)
        self.qkv_proj.weight.weight_loader = self.load_part
        self.o_proj = nn.Linear(4, 3, bias=False)

    @staticmethod
    def load_part(parameter: nn.Parameter, loaded: Tensor, shard_id: str) -> None:
        parameter.data.narrow(0, 4 * "qkv".index(shard_id), 4).copy_(loaded)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(6, 3)
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("offset", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.model = Inner()
        self.lm_head = nn.Linear(3, 6, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


STACKED = WeightsMapper(orig_to_new_stacked={f".{i}_proj": (".qkv_proj", i) for i in "qkv"})


def saved_by_parts(*, seed: int = 0) -> dict[str, Tensor]:
    """What a checkpoint for Model has, q, k and v apart."""
    generator = torch.Generator().manual_seed(seed)
    saved = {}
    for name, tensor in Model().state_dict().items():
        values = torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
        if "qkv_proj" in name:
            saved |= {name.replace("qkv", part): values[4 * i : 4 * i + 4] for i, part in enumerate("qkv")}
        else:
            saved[name] = values
    return saved


def assert_loaded(model: nn.Module, saved: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        if "qkv_proj" in name:
            assert torch.equal(tensor, torch.cat([saved[name.replace("qkv", part)] for part in "qkv"])), name
        else:
            assert torch.equal(tensor, saved[name]), name


def cleared(model: nn.Module) -> nn.Module:
    for tensor in model.state_dict().values():
        tensor.zero_()
    return model


# ---- parameters and buffers


def test_tensors_go_where_their_names_lead() -> None:
    model, saved = cleared(Model()), saved_by_parts()
    loaded = AutoWeightsLoader(model).load_weights(saved.items(), mapper=STACKED)
    assert loaded == set(model.state_dict())
    assert_loaded(model, saved)


def test_tensors_on_disk_are_recorded(tmp_path: Path) -> None:
    model, saved = cleared(Model()), saved_by_parts()
    safetensors.torch.save_file({k: v.contiguous() for k, v in saved.items()}, tmp_path / "model.safetensors")
    with weightlift.open_checkpoint(tmp_path) as checkpoint:
        AutoWeightsLoader(model).load_weights(checkpoint.items(), mapper=STACKED)
    assert_loaded(model, saved)
    assert checkpoint.report.num_forced == 0


def test_buffer_that_is_not_persistent_is_not_there() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"no module or parameter named 'model\.cache'"):
        AutoWeightsLoader(Model()).load_weights([("model.cache", torch.ones(2))])


def test_statistics_of_batch_norm_are_loaded() -> None:
    model = Model()
    AutoWeightsLoader(model).load_weights(
        [("model.norm.running_var", torch.full((3,), 5.0)), ("model.norm.num_batches_tracked", torch.tensor(7))]
    )
    assert model.model.norm.running_var.tolist() == [5, 5, 5]
    assert model.model.norm.num_batches_tracked.item() == 7


def test_weight_loader_without_shard_id_is_called_with_two() -> None:
    model = nn.Linear(2, 2, bias=False)
    calls: list[tuple[Any, ...]] = []
    model.weight.weight_loader = lambda *args: calls.append(args)
    tensor = torch.ones(5)
    assert AutoWeightsLoader(model).load_weights([("weight", tensor)]) == {"weight"}
    ((parameter, loaded),) = calls
    assert parameter is model.weight
    assert loaded is tensor


def test_one_element_fits_whatever_its_dimensions() -> None:
    model = nn.ParameterDict({"scale": torch.zeros(1), "other": torch.zeros(())})
    AutoWeightsLoader(model).load_weights([("scale", torch.tensor(3.0)), ("other", torch.tensor([[4.0]]))])
    assert (model["scale"].item(), model["other"].item()) == (3, 4)


def test_sizes_that_do_not_fit_are_an_error_with_both() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"size mismatch for lm_head.weight: .*\[7, 3\].*\[6, 3\]"):
        AutoWeightsLoader(Model()).load_weights([("lm_head.weight", torch.ones(7, 3))])


def test_part_of_a_parameter_without_loader_is_an_error() -> None:
    mapper = WeightsMapper(orig_to_new_stacked={"q_head": ("lm_head", "q")})
    with pytest.raises(CheckpointMismatchError, match=r"lm_head.weight.*shard 'q'.*no weight_loader"):
        AutoWeightsLoader(Model()).load_weights([("q_head.weight", torch.ones(6, 3))], mapper=mapper)


def test_casts_are_told_once_and_those_that_widen_only_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ParameterDict({name: torch.zeros(2) for name in ("a", "b", "c", "d")})
    model["c"] = model["c"].half()
    model["d"] = model["d"].half()
    ones = torch.ones(2)
    with caplog.at_level(logging.DEBUG, logger="weightlift"):
        AutoWeightsLoader(model).load_weights(
            [("a", ones.bfloat16()), ("b", ones.half()), ("c", ones), ("d", ones.float())]
        )
    told = {record.getMessage(): record.levelno for record in caplog.records if "converted" in record.getMessage()}
    assert told == {
        "converted from torch.bfloat16 of the checkpoint to torch.float32 of the parameter: a": logging.DEBUG,
        "converted from torch.float16 of the checkpoint to torch.float32 of the parameter: b": logging.DEBUG,
        "converted from torch.float32 of the checkpoint to torch.float16 of the parameter: c, d": logging.WARNING,
    }
    assert all(parameter.eq(1).all() for parameter in model.values())


# ---- names that lead nowhere


def test_row_22_unexpected_bias_is_ignored_where_its_module_is_there() -> None:
    model = Model()
    name = "model.layers.0.o_proj.bias"
    assert AutoWeightsLoader(model).load_weights([(name, torch.ones(3))]) == set()
    with pytest.raises(CheckpointMismatchError, match=r"no module or parameter named 'model\.nope' in Model"):
        AutoWeightsLoader(model).load_weights([("model.nope.bias", torch.ones(3))])


def test_row_21_order_of_activations_is_dropped_by_the_config() -> None:
    model = Model()
    model.quant_config = SimpleNamespace(get_checkpoint_weight_mapper=lambda: ACTIVATION_ORDER)
    assert AutoWeightsLoader(model).load_weights([("model.layers.0.o_proj.g_idx", torch.ones(4))]) == set()
    with pytest.raises(CheckpointMismatchError, match="weight_g_idx"):
        AutoWeightsLoader(model).load_weights([("model.layers.0.o_proj.weight_g_idx", torch.ones(4))])


def test_error_lists_what_is_there_and_the_nearest() -> None:
    with pytest.raises(CheckpointMismatchError) as caught:
        AutoWeightsLoader(Model()).load_weights([("model.layers.1.out_proj.weight", torch.ones(3, 4))])
    assert caught.value.unexpected_keys == ["model.layers.1.out_proj.weight"]
    text = str(caught.value)
    assert "There is no module or parameter named 'model.layers.1.out_proj' in Model." in text
    assert "Is it 'model.layers.1.o_proj'?" in text
    assert (
        "The available parameters belonging to model.layers.1 (Attention) are: "
        "model.layers.1.qkv_proj.weight, model.layers.1.o_proj.weight." in text
    )


def test_name_below_a_parameter_is_an_error() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"nested weight 'lm_head.weight.x' into a single parameter"):
        AutoWeightsLoader(Model()).load_weights([("lm_head.weight.x", torch.ones(3))])


@pytest.mark.parametrize("name", ["model", "model.layers", ""])
def test_name_of_a_module_is_an_error(name: str) -> None:
    with pytest.raises(CheckpointMismatchError, match="no module or parameter named"):
        AutoWeightsLoader(Model()).load_weights([(name, torch.ones(3))])


def test_unexpected_prefixes_and_suffixes_may_be_ignored() -> None:
    loader = AutoWeightsLoader(
        Model(), ignore_unexpected_prefixes=["mtp.", "model.extra."], ignore_unexpected_suffixes=[".k_scale"]
    )
    names = ["mtp.0.weight", "model.extra.x", "model.layers.0.k_scale", "model.layers.1.o_proj.k_scale"]
    assert loader.load_weights((name, torch.ones(3)) for name in names) == set()
    with pytest.raises(CheckpointMismatchError, match=r"model\.more"):
        loader.load_weights([("model.more.extra.x", torch.ones(3))])


def test_ignored_prefixes_do_not_hide_what_is_there() -> None:
    model = cleared(Model())
    loader = AutoWeightsLoader(model, ignore_unexpected_prefixes=["lm_head."])
    assert loader.load_weights([("lm_head.weight", torch.ones(6, 3))]) == {"lm_head.weight"}
    assert model.lm_head.weight.eq(1).all()


def test_rotary_caches_are_dropped() -> None:
    names = ["model.layers.0.rotary_emb.inv_freq", "model.rotary_emb.cos_cached"]
    assert AutoWeightsLoader(Model()).load_weights((name, torch.ones(3)) for name in names) == set()


class PPMissingLayer(nn.Identity):
    pass


class StageMissingLayer(nn.Module):
    pass


def test_layers_of_other_pipeline_stages_are_dropped() -> None:
    model = cleared(Model())
    model.model.layers[0] = PPMissingLayer()
    model.lm_head = StageMissingLayer()
    saved = saved_by_parts()
    loaded = AutoWeightsLoader(model).load_weights(saved.items(), mapper=STACKED)
    assert loaded == set(model.state_dict())
    assert_loaded(model, saved)


# ---- the quantisation config


class QuantConfig:
    _ignore_unexpected_suffixes = (".k_scale", ".v_scale")

    def get_cache_scale_mapper(self) -> WeightsMapper:
        return KV_CACHE_SCALES


def test_row_20_scales_of_the_kv_cache_come_before_rules_that_stack() -> None:
    model = Model()
    layer = model.model.layers[0]
    layer.attn = nn.Module()
    layer.attn.k_scale = nn.Parameter(torch.zeros(()))
    model.model.quant_config = QuantConfig()  # of a child, as in engines
    names = [f"model.layers.{i}.k_proj.output_scale" for i in range(2)]
    weights = [(name, torch.tensor(0.5)) for name in names]
    with pytest.raises(CheckpointMismatchError, match=r"model\.layers\.1\.attn"):
        AutoWeightsLoader(model).load_weights(weights, mapper=STACKED)
    assert layer.attn.k_scale.item() == 0.5


def test_scales_that_no_layer_has_are_ignored() -> None:
    model = Model()
    model.model.layers[1].attn = nn.Module()
    model.model.quant_config = QuantConfig()
    weights = [("model.layers.1.attn.v_scale", torch.tensor(0.5))]
    assert AutoWeightsLoader(model).load_weights(weights) == set()


# ---- modules that load themselves


class Experts(nn.Module):
    """Mixtral's w1, w3 and w2 of all experts in two parameters."""

    num_calls = 0

    def __init__(self, num_experts: int, size: int, hidden: int) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(num_experts, 2 * size, hidden))
        self.w2_weight = nn.Parameter(torch.zeros(num_experts, hidden, size))
        self.gate_scale = nn.Parameter(torch.zeros(1))

    def load_weights(self, weights: Weights) -> Iterator[str]:
        self.num_calls += 1
        for name, loaded in weights:
            expert, weight, _ = name.split(".")
            if weight == "w2":
                self.w2_weight.data[int(expert)].copy_(loaded)
                yield "w2_weight"
            else:
                self.w13_weight.data[int(expert)].chunk(2)[weight == "w3"].copy_(loaded)
                yield "w13_weight"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2, bias=False)
        self.experts = Experts(2, size=3, hidden=4)


def expert_tensors() -> dict[str, Tensor]:
    tensors = {"gate.weight": torch.rand(2, 4)}
    for i in range(2):
        tensors |= {f"experts.{i}.{w}.weight": torch.rand(3, 4) for w in ("w1", "w3")}
        tensors[f"experts.{i}.w2.weight"] = torch.rand(4, 3)
    return tensors


def test_module_with_load_weights_gets_names_without_its_prefix() -> None:
    model, saved = Layer(), expert_tensors()
    loaded = AutoWeightsLoader(model).load_weights(saved.items())
    assert loaded == {"gate.weight", "experts.w13_weight", "experts.w2_weight"}
    for i in range(2):
        assert torch.equal(model.experts.w13_weight[i, :3], saved[f"experts.{i}.w1.weight"])
        assert torch.equal(model.experts.w13_weight[i, 3:], saved[f"experts.{i}.w3.weight"])
        assert torch.equal(model.experts.w2_weight[i], saved[f"experts.{i}.w2.weight"])
    assert model.experts.num_calls == 1


def test_row_25_interleaved_names_are_several_calls() -> None:
    model, saved = Layer(), expert_tensors()
    order = ["experts.0.w1.weight", "gate.weight", "experts.0.w3.weight"]
    AutoWeightsLoader(model).load_weights((name, saved[name]) for name in order)
    assert model.experts.num_calls == 2
    assert model.experts.w13_weight[0].ne(0).all()


class Choosy(nn.Module):
    """Takes its first tensor by itself, and leaves the rest to others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2))
        self.second = nn.Parameter(torch.zeros(2))
        self.experts = Experts(1, size=1, hidden=1)

    def load_weights(self, weights: Weights) -> set[str]:
        for _, loaded in weights:
            self.first.data.copy_(loaded)
            break
        return {"first"}


def test_what_load_weights_does_not_consume_goes_on_below_it() -> None:
    model = nn.ModuleDict({"choosy": Choosy()})
    loaded = AutoWeightsLoader(model).load_weights(
        [
            ("choosy.a", torch.ones(2)),
            ("choosy.second", torch.full((2,), 2.0)),
            ("choosy.experts.0.w2.weight", torch.full((1, 1), 3.0)),
        ]
    )
    assert loaded == {"choosy.first", "choosy.second", "choosy.experts.w2_weight"}
    assert (model["choosy"].first[0], model["choosy"].second[0]) == (1, 2)
    assert model["choosy"].experts.w2_weight.item() == 3


class Silent(Experts):
    def load_weights(self, weights: Weights) -> None:  # type: ignore[override]
        list(super().load_weights(weights))


def test_load_weights_that_says_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Layer()
    model.experts = Silent(2, size=3, hidden=4)
    loaded = AutoWeightsLoader(model).load_weights(expert_tensors().items())
    assert loaded == {"gate.weight"}
    assert "experts: load_weights of Silent does not say what it loaded" in caplog.text
    assert model.experts.w2_weight.ne(0).all()


def test_load_weights_may_be_made_of_the_loader() -> None:
    class Outer(Model):
        def load_weights(self, weights: Weights) -> set[str]:
            return AutoWeightsLoader(self).load_weights(weights, mapper=STACKED)

    model, saved = cleared(Outer()), saved_by_parts()
    assert model.load_weights(saved.items()) == set(model.state_dict())
    assert_loaded(model, saved)


# ---- tied parameters


def test_tied_alias_is_ignored_and_the_first_name_loaded() -> None:
    model = Model(tied=True)
    weights = [("model.embed_tokens.weight", torch.ones(6, 3)), ("lm_head.weight", torch.zeros(6, 3))]
    for order in (weights, weights[::-1]):
        cleared(model)
        assert AutoWeightsLoader(model).load_weights(order) == {"model.embed_tokens.weight"}
        assert model.lm_head.weight.eq(1).all()


def test_row_23_alias_alone_is_an_error_of_a_stream() -> None:
    text = (
        "'lm_head.weight' was skipped because it is tied to 'model.embed_tokens.weight' in Model, but "
        "'model.embed_tokens.weight' was not found in the checkpoint, so the tied weight is uninitialized."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        AutoWeightsLoader(Model(tied=True)).load_weights([("lm_head.weight", torch.ones(6, 3))])


def test_tied_parameters_of_two_sizes_are_an_error_with_both() -> None:
    weights = [("model.embed_tokens.weight", torch.ones(6, 3)), ("lm_head.weight", torch.zeros(8, 3))]
    with pytest.raises(
        CheckpointMismatchError, match=r"lm_head.weight: .*\[8, 3\]\); it is tied to model.embed_tokens.*\[6, 3\]\)"
    ):
        AutoWeightsLoader(Model(tied=True)).load_weights(weights)


def test_alias_of_a_module_that_says_nothing_is_not_checked() -> None:
    model = nn.ModuleDict({"experts": Silent(1, size=1, hidden=1), "head": nn.Linear(1, 1, bias=False)})
    model["head"].weight = model["experts"].gate_scale
    assert (
        AutoWeightsLoader(model).load_weights(
            [("experts.0.w2.weight", torch.ones(1, 1)), ("head.weight", torch.ones(1))]
        )
        == set()
    )


def test_layer_under_two_names_is_tied() -> None:
    model = Model()
    model.lm_head = model.model.embed_tokens
    with pytest.raises(CheckpointMismatchError, match="uninitialized"):
        AutoWeightsLoader(model).load_weights([("lm_head.weight", torch.ones(6, 3))])


def test_names_of_a_shared_block_are_as_good_as_each_other() -> None:
    model = Model()
    model.model.layers[1] = model.model.layers[0]
    name = "model.layers.1.o_proj.weight"
    assert AutoWeightsLoader(model).load_weights([(name, torch.ones(3, 4))]) == {name}
    assert model.model.layers[0].o_proj.weight.eq(1).all()


def test_loader_that_replaces_the_first_leaves_the_others_tied() -> None:
    model = Model(tied=True)

    def replace(parameter: nn.Parameter, loaded: Tensor) -> None:
        model.model.embed_tokens.weight = nn.Parameter(loaded.clone())

    model.model.embed_tokens.weight.weight_loader = replace
    AutoWeightsLoader(model).load_weights([("model.embed_tokens.weight", torch.ones(6, 3))])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.eq(1).all()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes since Python 3.11")
def test_an_error_of_a_weight_loader_says_for_which_tensor() -> None:
    module = torch.nn.Linear(4, 2, bias=False)

    def fail(param: torch.Tensor, loaded: torch.Tensor) -> None:
        raise KeyError("kk")

    module.weight.weight_loader = fail  # type: ignore[attr-defined]
    with pytest.raises(KeyError) as caught:
        AutoWeightsLoader(module).load_weights([("weight", torch.zeros(8, 4))])
    assert caught.value.__notes__ == ["while weight [8, 4] was loaded into [2, 4]"]


def test_no_rename_is_proposed_that_leads_nowhere_or_is_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"attn": torch.nn.ModuleDict({"wqkv": torch.nn.Linear(4, 4, bias=False)})})
    tensors = {"attn.wqkv.weight": torch.zeros(4, 4), "attn.wqkv.weight_scale": torch.zeros(4, 1)}
    for extra in ({}, {"self_attn.k_proj.weight": torch.zeros(4, 4)}):
        safetensors.torch.save_file({**tensors, **extra}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointMismatchError) as caught:
            weightlift.fast_load(model, tmp_path)
        assert "WeightsMapper" not in str(caught.value)
