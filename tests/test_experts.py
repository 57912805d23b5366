"""Expert layers: what of a checkpoint each rank gets, against plain slices, stored references and transformers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from conftest import WriteCheckpoint
from golden import Golden, golden, parents, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from weightlift import CheckpointError, CheckpointMismatchError, fast_load
from weightlift.model.expert_blocks import cut_expert_blocks
from weightlift.model.expert_methods import FusedMoEMethodBase, UnquantizedFusedMoEMethod
from weightlift.model.expert_placement import _warn_of_linear, determine_expert_map
from weightlift.model.expert_routing import route
from weightlift.model.experts import FusedMoE
from weightlift.model.parallel import ParallelConfig
from weightlift.model.router import AutoWeightsLoader


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)


# ---- a quantised layer, as quantisation methods make one


class Fp8Method(FusedMoEMethodBase):
    """FP8 experts with the scales of one kind."""

    def __init__(self, kind: str, layer: FusedMoE, *, block: tuple[int, int], can_refine: bool) -> None:
        self.kind = kind
        if kind == "block":
            self.weight_block_size = block
            blocks = cut_expert_blocks(
                block,
                hidden_size=layer.unpadded_hidden_size,
                intermediate_size=layer.intermediate_size,
                tp_size=layer.tp_size,
                can_refine=can_refine,
            )
            self.block_shape = blocks.block_shape
            self.weight_scale_refine = blocks.scale_refine
            layer.intermediate_size_per_partition = blocks.intermediate_size_per_partition
            layer.tp_shard_with_padding = blocks.tp_shard_with_padding

    def create_weights(
        self,
        layer: FusedMoE,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        size, hidden = intermediate_size_per_partition, hidden_size

        def add(name: str, dtype: torch.dtype, *shape: int, **attributes: Any) -> None:
            data = torch.full((num_experts, *shape), 0x55, dtype=torch.uint8).to(dtype)
            parameter = nn.Parameter(data, requires_grad=False)
            parameter.__dict__.update(extra_weight_attrs | attributes)
            layer.register_parameter(name, parameter)

        add("w13_weight", torch.float8_e4m3fn, 2 * size, hidden)
        add("w2_weight", torch.float8_e4m3fn, hidden, size)
        if self.kind == "tensor":
            add("w13_weight_scale", torch.float32, 2, quant_method="tensor")
            add("w2_weight_scale", torch.float32, quant_method="tensor")
            add("w13_input_scale", torch.float32)
            add("w2_input_scale", torch.float32)
        elif self.kind == "channel":
            add("w13_weight_scale", torch.float32, 2 * size, 1, quant_method="channel")
            add("w2_weight_scale", torch.float32, hidden, 1, quant_method="channel")
        else:
            n, k = self.block_shape
            rows, columns = -(-size // n), -(-hidden // k)
            add("w13_weight_scale_inv", torch.float32, 2 * rows, columns, quant_method="block")
            add("w2_weight_scale_inv", torch.float32, -(-hidden // n), -(-size // k), quant_method="block")

    def apply(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class Fp8Config:
    def __init__(self, kind: str, *, block: tuple[int, int] = (128, 128), can_refine: bool = True) -> None:
        self.kind, self.arguments = kind, {"block": block, "can_refine": can_refine}

    def get_quant_method(self, layer: FusedMoE, prefix: str) -> Fp8Method:
        return Fp8Method(self.kind, layer, **self.arguments)


def by_expert(stacked: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for each expert, from `w1_scale` and the like of all of them."""
    projections = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    named = {}
    for name, tensor in stacked.items():
        shard, _, what = name.partition("_")
        what = {"": "weight", "scale": "weight_scale", "scale_inv": "weight_scale_inv"}.get(what, what)
        for expert, part in enumerate(tensor):
            named[f"{expert}.{projections[shard]}.{what}"] = part.clone()
    return named


def load_eagerly(layer: FusedMoE, tensors: dict[str, Tensor]) -> set[str]:
    return set(layer.load_weights(tensors.items()))


def load_from_disk(layer: FusedMoE, tensors: dict[str, Tensor], folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    stored = {f"model.experts.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    model = nn.ModuleDict({"model": nn.ModuleDict({"experts": layer})})
    return fast_load(model, folder)


# ---- stored references


@pytest.mark.parametrize("name", parents("moe_expert_map"))
def test_expert_maps_are_those_of_the_reference(name: str) -> None:
    topic = golden("moe_expert_map")
    case = topic.cases[name]
    for rank in range(case["ep"]):
        number, expert_map = determine_expert_map(case["ep"], rank, case["E"], case["placement"])
        assert number == case["local_num_experts"][rank]
        assert same_bits(expert_map, topic.tensor(f"{name}.expert_map_r{rank}"))


def stacked_of(topic: Golden, parent: str) -> dict[str, Tensor]:
    """The checkpoint of a case; each tensor is of all experts."""
    start = f"{parent}.ckpt_"
    return {name[len(start) :]: topic.tensor(name) for name in topic.names if name.startswith(start)}


def layer_of(spec: dict[str, Any], case: dict[str, Any], **arguments: Any) -> FusedMoE:
    return FusedMoE(
        spec["E"],
        1,
        spec["hidden"],
        spec["intermediate"],
        params_dtype=torch.bfloat16,
        num_expert_group=2,  # which dealing experts out needs
        expert_placement_strategy=case.get("placement", "linear"),
        parallel=ParallelConfig(
            tp_rank=case.get("tp_rank", 0),
            tp_size=case.get("tp", 1),
            ep_rank=case.get("ep_rank", 0),
            ep_size=case.get("ep", 1),
        ),
        prefix="model.experts",
        **arguments,
    )


@pytest.mark.parametrize("parent", parents("moe_stack"))
def test_stacked_experts_are_those_of_the_reference(tmp_path: Path, parent: str) -> None:
    topic = golden("moe_stack")
    spec = topic.cases[parent]
    kind = spec["quant"].removeprefix("fp8_")
    stored = by_expert(stacked_of(topic, parent))
    wanted = {"w13_weight": "w13", "w2_weight": "w2"}
    if kind == "bf16":
        arguments: dict[str, Any] = {"has_bias": True}
        wanted |= {"w13_bias": "w13_bias", "w2_bias": "w2_bias"}
    else:
        arguments = {"quant_config": Fp8Config(kind)}
        wanted |= {"w13_weight_scale": "w13_scale_loaded", "w2_weight_scale": "w2_scale"}
    if kind == "tensor":
        projections = [f"{expert}.{name}_proj" for expert in range(spec["E"]) for name in ("gate", "up", "down")]
        stored |= {f"{projection}.input_scale": torch.tensor(0.25) for projection in projections}
    children = list(topic.children(parent))
    assert len(children) == 15
    for name, case in children:
        layers = [layer_of(spec, case, **arguments) for _ in range(2)]
        if "ep_rank" in case:
            assert layers[0].expert_map.tolist() == case["expert_map"]
        load_eagerly(layers[0], stored)
        load_from_disk(layers[1], stored, tmp_path / name)
        expected = topic.expected(name)
        for layer in layers:
            for parameter, suffix in wanted.items():
                assert same_bits(getattr(layer, parameter), expected[suffix]), (name, parameter)


def dequantised(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]


def check_reference(layer: FusedMoE, case: dict[str, Any], expected: dict[str, Tensor]) -> None:
    for part in ("w13", "w2"):
        weight = getattr(layer, f"{part}_weight")
        assert list(weight.shape) == case[f"expected_{part}_shape"]
        values = weight.view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(values).hexdigest() == case[f"expected_{part}_sha256"]
        assert same_bits(getattr(layer, f"{part}_weight_scale_inv"), expected[f"{part}_scale_inv"])


def check_values(layer: FusedMoE, stacked: dict[str, Tensor]) -> None:
    """That a layer of one expert, not padded, has the values of the checkpoint."""
    whole = {i: dequantised(stacked[i][0], stacked[f"{i}_scale_inv"][0], (128, 128)) for i in ("w1", "w2", "w3")}
    size = layer.intermediate_size_per_partition
    rows = slice(layer.tp_rank * size, (layer.tp_rank + 1) * size)
    block = layer.quant_method.block_shape
    halves = zip(layer.w13_weight[0].chunk(2), layer.w13_weight_scale_inv[0].chunk(2), strict=True)
    gate, up = (dequantised(weight, scale, block) for weight, scale in halves)
    assert torch.equal(gate, whole["w1"][rows])
    assert torch.equal(up, whole["w3"][rows])
    assert torch.equal(dequantised(layer.w2_weight[0], layer.w2_weight_scale_inv[0], block), whole["w2"][:, rows])


@pytest.mark.parametrize("parent", parents("moe_block"))
def test_block_scales_are_those_of_the_reference_and_right_where_it_fails(tmp_path: Path, parent: str) -> None:
    topic = golden("moe_block")
    spec, stacked = topic.cases[parent], stacked_of(topic, parent)
    stored = by_expert(stacked)
    for name, case in topic.children(parent):
        config = Fp8Config("block", can_refine=not case["pad_shard"])
        if case.get("error", "").startswith("ValueError"):
            with pytest.raises(ValueError, match="is not divisible by weight quantization block"):
                layer_of(spec, case, quant_config=config)
            continue
        layers = [layer_of(spec, case, quant_config=config) for _ in range(2)]
        load_eagerly(layers[0], stored)
        load_from_disk(layers[1], stored, tmp_path / name)
        for layer in layers:
            if case["ok"]:
                check_reference(layer, case, topic.expected(name))
            else:  # the last block of the checkpoint is not full
                check_values(layer, stacked)


# ---- floating point: every rank's part against plain slices


class PaddedMethod(UnquantizedFusedMoEMethod):
    """Rounds both sizes up, as for kernels."""

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, parallel: ParallelConfig
    ) -> tuple[int, int]:
        sizes = hidden_size, intermediate_size_per_partition
        hidden, intermediate = (-(-size // self.multiple) * self.multiple for size in sizes)
        return hidden, intermediate


class UnevenMethod(UnquantizedFusedMoEMethod):
    """Ranks hold whole blocks of the intermediate size, so that the last have less of the checkpoint than others."""

    def __init__(self, layer: FusedMoE, size: int) -> None:
        layer.tp_shard_with_padding = True
        layer.intermediate_size_per_partition = size


def config_of(method: Callable[[FusedMoE], FusedMoEMethodBase | None]) -> Any:
    return SimpleNamespace(get_quant_method=lambda layer, prefix: method(layer))


def padded(multiple: int) -> Any:
    return config_of(lambda layer: PaddedMethod(multiple))


def make(num_experts: int = 4, hidden: int = 6, intermediate: int = 8, **arguments: Any) -> FusedMoE:
    layer = FusedMoE(
        num_experts, 1, hidden, intermediate, params_dtype=torch.float32, prefix="model.experts", **arguments
    )
    for parameter in layer.parameters():
        parameter.data.fill_(torch.nan if parameter.is_floating_point() else 85)
    return layer


def experts_of(
    num_experts: int = 4, hidden: int = 6, intermediate: int = 8, *, bias: bool = False
) -> dict[str, Tensor]:
    """Of all experts, each number another: w1 and w3 are [experts, intermediate, hidden], w2 turned around."""
    shapes = {
        "w1": (num_experts, intermediate, hidden),
        "w2": (num_experts, hidden, intermediate),
        "w3": (num_experts, intermediate, hidden),
    }
    if bias:
        shapes |= {f"{name}_bias": shape[:2] for name, shape in list(shapes.items())}
    start, tensors = 1, {}
    for name, shape in shapes.items():
        tensors[name] = torch.arange(start, start + math.prod(shape), dtype=torch.float32).view(shape)
        start += math.prod(shape)
    return tensors


def padded_to(tensor: Tensor, *sizes: int) -> Tensor:
    """Zeros behind the end of each dimension but the first."""
    widths = [size - old for size, old in zip(sizes, tensor.shape[1:], strict=True)]
    return F.pad(tensor, [width for new in reversed(widths) for width in (0, new)])


def expected_of(tensors: dict[str, Tensor], layer: FusedMoE) -> dict[str, Tensor]:
    """The parameters of a layer, by plain indexing."""
    held = {name: tensor[[i % layer.num_experts for i in layer.local_experts]] for name, tensor in tensors.items()}
    size = tensors["w1"].shape[1] // layer.tp_size
    rows = slice(layer.tp_rank * size, (layer.tp_rank + 1) * size)
    inner, hidden = layer.intermediate_size_per_partition, layer.hidden_size
    gate_up = [padded_to(held[shard][:, rows], inner, hidden) for shard in ("w1", "w3")]
    expected = {
        "w13_weight": torch.cat(gate_up, dim=1),
        "w2_weight": padded_to(held["w2"][:, :, rows], hidden, inner),
    }
    if "w1_bias" in held:
        biases = [padded_to(held[f"{shard}_bias"][:, rows], inner) for shard in ("w1", "w3")]
        expected |= {"w13_bias": torch.cat(biases, dim=1), "w2_bias": padded_to(held["w2_bias"], hidden)}
    return expected


def on_disk(tensors: dict[str, Tensor], form: str) -> dict[str, Tensor]:
    """The same as files have it: "each" projection of each expert, gate and up "paired", or "stacked" experts."""
    if form == "each":
        return by_expert(tensors)
    stored = {}
    for what, suffix in (("", ""), ("_bias", "_bias")):
        if f"w1{what}" not in tensors:
            continue
        gate_up = torch.cat([tensors[f"w1{what}"], tensors[f"w3{what}"]], dim=1)
        down = tensors[f"w2{what}"]
        if form == "paired":
            kind = "bias" if what else "weight"
            for expert in range(len(down)):
                stored[f"{expert}.gate_up_proj.{kind}"] = gate_up[expert].clone()
                stored[f"{expert}.down_proj.{kind}"] = down[expert].clone()
        else:
            if form == "transposed" and not what:
                gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
            stored[f"gate_up_proj{suffix}"], stored[f"down_proj{suffix}"] = gate_up, down
    return stored


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_recorded_and_eager_loads_give_the_slices_of_every_rank(tmp_path: Path, data: st.DataObject) -> None:
    draw = data.draw
    num_experts, tp_size = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 3]))
    hidden, intermediate = draw(st.integers(1, 9)), draw(st.integers(1, 4)) * tp_size
    ep_size = draw(st.sampled_from([1, 1, 2, 4]))
    form = draw(st.sampled_from(["each", "paired", "stacked", "transposed"]))
    bias = draw(st.booleans())
    multiple = draw(st.sampled_from([1, 4]))
    groups = num_experts if draw(st.booleans()) else None
    tensors = experts_of(num_experts, hidden, intermediate, bias=bias)
    stored = on_disk(tensors, form)
    arguments = {
        "has_bias": bias,
        "num_redundant_experts": draw(st.integers(0, 3)),
        "is_fused_checkpoint_transposed": form == "transposed",
        "num_expert_group": groups,
        "expert_placement_strategy": draw(st.sampled_from(["linear", "round_robin"])),
    }
    rank = draw(st.integers(0, tp_size - 1)), draw(st.integers(0, ep_size - 1))
    parallel = ParallelConfig(tp_rank=rank[0], tp_size=tp_size, ep_rank=rank[1], ep_size=ep_size)
    layers = [
        make(num_experts, hidden, intermediate, quant_config=padded(multiple), parallel=parallel, **arguments)
        for _ in range(2)
    ]
    loaded = load_eagerly(layers[0], stored)
    report = load_from_disk(layers[1], stored, tmp_path)
    expected = expected_of(tensors, layers[0])
    assert loaded == (set(expected) if layers[0].local_experts else set())
    for name, tensor in expected.items():
        assert same_bits(getattr(layers[0], name), tensor), name
        assert same_bits(getattr(layers[1], name), tensor), name
    assert (report.gaps, report.double_writes, report.missing_keys, report.num_forced) == ([], [], [], 0)


def test_row_57_padding_behind_each_half_and_in_both_dimensions_is_zero() -> None:
    tensors = {
        "w1": torch.arange(1.0, 7).view(1, 6, 1),
        "w3": torch.arange(11.0, 17).view(1, 6, 1),
        "w2": torch.arange(12.0).view(1, 2, 6),
    }
    arguments = {"num_experts": 1, "intermediate": 6, "parallel": ParallelConfig(tp_rank=1, tp_size=2)}
    w13 = make(hidden=1, quant_config=padded(4), **arguments)
    list(w13.load_weights(by_expert({name: tensors[name] for name in ("w1", "w3")}).items()))
    assert w13.w13_weight[0, :, 0].tolist() == [4, 5, 6, 0, 14, 15, 16, 0]
    w2 = make(hidden=2, quant_config=padded(4), **arguments)
    list(w2.load_weights(by_expert({"w2": tensors["w2"]}).items()))
    assert w2.w2_weight[0].tolist() == [[3, 4, 5, 0], [9, 10, 11, 0], [0] * 4, [0] * 4]


@pytest.mark.parametrize("intermediate", [8, 12])
def test_row_57_rank_behind_the_end_of_a_padded_layer_holds_padding_alone(intermediate: int) -> None:
    layer = make(
        1,
        2,
        intermediate,
        quant_config=config_of(lambda layer: UnevenMethod(layer, 4)),
        parallel=ParallelConfig(tp_rank=3, tp_size=4),
    )
    load_eagerly(layer, by_expert(experts_of(1, 2, intermediate)))
    assert not layer.w13_weight.any()
    assert not layer.w2_weight.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_row_57_scales_are_one_where_weights_are_padding(dtype: torch.dtype) -> None:
    class Method(UnevenMethod):
        def create_weights(self, layer: FusedMoE, *args: Any, **kwargs: Any) -> None:
            super().create_weights(layer, *args, **kwargs)
            parameter = nn.Parameter(torch.zeros(1, 8, 1, dtype=dtype), requires_grad=False)
            parameter.weight_loader = layer.weight_loader
            parameter.quant_method = "group"
            layer.register_parameter("w13_weight_scale", parameter)

    layer = make(
        1,
        2,
        10,
        quant_config=config_of(lambda layer: Method(layer, 4)),
        parallel=ParallelConfig(tp_rank=2, tp_size=5),
    )
    scale = torch.arange(20, 30, dtype=dtype).view(10, 1)
    for shard in ("w1", "w3"):
        layer.weight_loader(layer.w13_weight_scale, scale, "w13_weight_scale", shard, 0)
    one = 127 if dtype == torch.uint8 else 1
    assert layer.w13_weight_scale.flatten().tolist() == [28, 29, one, one] * 2


def test_row_58_stacked_gate_up_is_halved_before_it_is_cut(tmp_path: Path) -> None:
    gate_up = torch.arange(8.0).view(1, 8, 1)
    stored = {"gate_up_proj": gate_up, "down_proj": torch.ones(1, 1, 4)}
    layer = make(1, 1, 4, parallel=ParallelConfig(tp_rank=1, tp_size=2))
    load_from_disk(layer, stored, tmp_path)
    assert layer.w13_weight.flatten().tolist() == [2, 3, 6, 7]


def test_row_59_expert_of_another_rank_is_neither_written_nor_missing(tmp_path: Path) -> None:
    layer = make(parallel=ParallelConfig(ep_rank=1, ep_size=2))
    before = layer.w13_weight.clone()
    loaded = torch.ones(8, 6)
    name = "model.experts.w13_weight"
    assert layer.weight_loader(layer.w13_weight, loaded, name, "w1", 1, return_success=True) is False
    assert layer.weight_loader(layer.w13_weight, loaded, name, "w1", 1) is None
    assert same_bits(layer.w13_weight, before)
    assert layer.weight_loader(layer.w13_weight, loaded, name, "w1", 2, return_success=True) is True
    report = load_from_disk(layer, by_expert(experts_of()), tmp_path)
    assert (report.missing_keys, report.gaps) == ([], [])
    assert report.skipped["model.experts.1.gate_proj.weight"] == "expert of another rank"
    assert len(report.skipped) == 6


def test_rows_11_and_13_placement_falls_back_to_linear_where_experts_can_not_be_dealt_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _warn_of_linear.cache_clear()
    parallel = ParallelConfig(ep_rank=1, ep_size=4)
    dealt = {"num_experts": 10, "expert_placement_strategy": "round_robin"}
    assert make(num_expert_group=2, parallel=parallel, **dealt).local_experts == [1, 5, 9]
    assert make(**dealt).local_experts == list(range(10))
    assert not caplog.records
    for arguments in (
        {},
        {"num_expert_group": 1},
        {"num_expert_group": 2, "enable_eplb": True},
        {"num_expert_group": 2, "num_redundant_experts": 2},
    ):
        assert make(parallel=parallel, **arguments, **dealt).local_experts == [3, 4, 5]
    (record,) = caplog.records
    assert "experts are placed 'linear'" in record.getMessage()


def test_copies_of_experts_are_loaded_from_the_same_tensor() -> None:
    tensors = experts_of(3)
    layer = make(3, num_redundant_experts=5)
    load_eagerly(layer, by_expert(tensors))
    assert same_bits(layer.w2_weight, tensors["w2"][[0, 1, 2, 0, 1, 2, 0, 1]])


def test_loader_takes_a_tensor_of_all_experts() -> None:
    tensors = experts_of()
    layer = make(parallel=ParallelConfig(ep_rank=1, ep_size=2))
    assert layer.weight_loader(layer.w2_weight, tensors["w2"], "w2_weight", "w2", 0, return_success=True) is True
    assert same_bits(layer.w2_weight, tensors["w2"][2:])


def test_mapping_names_every_expert_and_every_form_on_disk() -> None:
    mapping = FusedMoE.make_expert_params_mapping(
        ckpt_gate_proj_name="w1",
        ckpt_down_proj_name="w2",
        ckpt_up_proj_name="w3",
        num_experts=2,
        num_redundant_experts=1,
    )
    assert mapping == [
        ("experts.w13_", "experts.0.w1.", 0, "w1"),
        ("experts.w2_", "experts.0.w2.", 0, "w2"),
        ("experts.w13_", "experts.0.w3.", 0, "w3"),
        ("experts.w13_", "experts.1.w1.", 1, "w1"),
        ("experts.w2_", "experts.1.w2.", 1, "w2"),
        ("experts.w13_", "experts.1.w3.", 1, "w3"),
        ("experts.w13_", "experts.0.w1.", 2, "w1"),
        ("experts.w2_", "experts.0.w2.", 2, "w2"),
        ("experts.w13_", "experts.0.w3.", 2, "w3"),
    ]
    fused = FusedMoE.make_expert_params_mapping(
        "gate_proj", "down_proj", "up_proj", 1, routed_experts_prefix="routed_experts", include_fused=True
    )
    assert fused[:5] == [
        ("experts.routed_experts.w13_weight", "experts.gate_up_proj", 0, "w1"),
        ("experts.routed_experts.w13_weight", "experts.gate_up_proj", 1, "w3"),
        ("experts.routed_experts.w13_", "experts.0.gate_up_proj.", 0, "w1"),
        ("experts.routed_experts.w13_", "experts.0.gate_up_proj.", 0, "w3"),
        ("experts.routed_experts.w2_weight", "experts.down_proj", 0, "w2"),
    ]


def test_loader_of_a_model_written_for_the_mapping_loads_as_the_layer_itself() -> None:
    tensors = by_expert(experts_of())
    mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", 4)
    layers = [make(parallel=ParallelConfig(ep_rank=1, ep_size=2)) for _ in range(2)]
    load_eagerly(layers[0], tensors)
    parameters = {f"experts.{name}": parameter for name, parameter in layers[1].named_parameters()}
    for name, tensor in tensors.items():
        name = f"experts.{name}"
        for param_name, weight_name, expert_id, shard_id in mapping:
            if weight_name in name:
                mapped = name.replace(weight_name, param_name)
                parameter = parameters[mapped]
                if parameter.weight_loader(
                    parameter, tensor, mapped, shard_id=shard_id, expert_id=expert_id, return_success=True
                ):
                    break
    for name, parameter in layers[0].named_parameters():
        assert same_bits(parameter, getattr(layers[1], name))


def test_experts_without_a_gate_have_one_projection_in_w13(tmp_path: Path) -> None:
    tensors = experts_of()
    stored = {f"{e}.up_proj.weight": tensors["w1"][e].clone() for e in range(4)}
    stored |= {f"{e}.down_proj.weight": tensors["w2"][e].clone() for e in range(4)}
    layer = make(
        activation="relu2_no_mul",
        ckpt_names=("up_proj", "down_proj", None),
        parallel=ParallelConfig(tp_rank=1, tp_size=2),
    )
    load_from_disk(layer, stored, tmp_path)
    assert same_bits(layer.w13_weight, tensors["w1"][:, 4:])
    assert same_bits(layer.w2_weight, tensors["w2"][:, :, 4:])


# ---- what does not fit


def test_missing_projection_of_one_expert_is_a_gap(tmp_path: Path) -> None:
    stored = by_expert(experts_of())
    del stored["3.up_proj.weight"]
    with pytest.raises(CheckpointMismatchError) as caught:
        load_from_disk(make(), stored, tmp_path)
    assert (caught.value.gaps, caught.value.missing_keys) == (["model.experts.w13_weight[3, 8:16]"], [])


def test_missing_expert_of_another_rank_is_no_gap(tmp_path: Path) -> None:
    stored = {name: tensor for name, tensor in by_expert(experts_of()).items() if name[0] in "01"}
    load_from_disk(make(parallel=ParallelConfig(ep_rank=0, ep_size=2)), stored, tmp_path / "a")
    with pytest.raises(CheckpointMismatchError) as caught:
        load_from_disk(make(parallel=ParallelConfig(ep_rank=1, ep_size=2)), stored, tmp_path / "b")
    assert caught.value.missing_keys == ["model.experts.w2_weight", "model.experts.w13_weight"]


@pytest.mark.parametrize(
    "name", ["4.gate_proj.weight", "0.gate_proj.weight_scale", "0.nope.weight", "w13_weightless", "0.up_proj.bias"]
)
def test_tensor_that_stands_for_no_parameter_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointMismatchError, match="4 experts with gate_proj, down_proj, up_proj") as caught:
        load_from_disk(make(), {name: torch.ones(8, 6)}, tmp_path)
    assert caught.value.unexpected_keys == [f"model.experts.{name}"]


def test_biases_that_tools_for_quantisation_write_are_ignored() -> None:
    layer = make(quant_config=config_of(lambda layer: None))
    assert load_eagerly(layer, {"0.up_proj.bias": torch.zeros(8)}) == set()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("0.gate_proj.weight", (4, 6)),  # one rank's part already
        ("0.gate_proj.weight", (16, 6)),
        ("0.gate_proj.weight", (8, 5)),
        ("0.gate_proj.weight", (1, 6)),  # which would be spread over all rows
        ("0.gate_proj.weight", (6,)),
        ("0.gate_proj.weight", (2, 8, 6)),
        ("0.down_proj.weight", (6, 4)),
        ("gate_up_proj", (3, 16, 6)),
        ("gate_up_proj", (4, 15, 6)),
        ("gate_up_proj", (16, 6)),
        ("down_proj", ()),
        ("0.gate_up_proj.weight", (8, 6)),
    ],
)
def test_tensor_of_another_size_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    layer = make(parallel=ParallelConfig(tp_rank=1, tp_size=2))
    before = [parameter.clone() for parameter in layer.parameters()]
    with pytest.raises(CheckpointMismatchError, match=r"model\.experts\.w\d+_weight: .*Tried to load.* size"):
        load_from_disk(layer, {name: torch.ones(shape)}, tmp_path)
    assert all(map(same_bits, layer.parameters(), before))


def test_sizes_that_ranks_can_not_share_are_refused_before_memory_is_taken() -> None:
    with pytest.raises(ValueError, match="intermediate_size 8 is not divisible by tp_size 3; choose another tp_size"):
        make(parallel=ParallelConfig(tp_rank=0, tp_size=3))
    assert make(parallel=ParallelConfig(tp_rank=0, tp_size=3, ep_rank=0, ep_size=3)).w13_weight.shape == (2, 16, 6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"activation": "swish"},
        {"activation": "silu_no_mul"},
        {"ckpt_names": ("up_proj", "down_proj", None)},
        {"use_grouped_topk": True},
        {"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 1},
        {"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 4, "num_experts": 6},
        {"expert_placement_strategy": "nearest"},
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"; (accepted is|experts with a gate|use_grouped_topk needs)"):
        make(**arguments)


def test_unknown_shard_is_refused() -> None:
    layer = make()
    with pytest.raises(ValueError, match="shard_id must be"):
        layer.weight_loader(layer.w2_weight, torch.ones(6, 8), "w2_weight", "w4", 0)


# ---- scales


def with_scales(kind: str, shapes: dict[str, tuple[int, ...]], **arguments: Any) -> FusedMoE:
    """A layer of floating point, with further parameters: scales of one kind, by name without their dimension of
    experts."""

    class Method(UnquantizedFusedMoEMethod):
        use_global_sf = arguments.pop("use_global_sf", False)

        def create_weights(self, layer: FusedMoE, num_experts: int, *args: Any, **kwargs: Any) -> None:
            super().create_weights(layer, num_experts, *args, **kwargs)
            for name, shape in shapes.items():
                held = layer.global_num_experts if self.use_global_sf and "input_scale" in name else num_experts
                parameter = nn.Parameter(torch.zeros(held, *shape), requires_grad=False)
                parameter.weight_loader, parameter.quant_method = layer.weight_loader, kind
                parameter.is_transposed = kind == "group"
                layer.register_parameter(name, parameter)

    return make(quant_config=config_of(lambda layer: Method()), **arguments)


def test_scale_of_a_tensor_has_a_slot_for_each_projection() -> None:
    layer = with_scales("tensor", {"w13_weight_scale": (2,), "w2_weight_scale": ()})
    stored = {
        f"{e}.{p}_proj.weight_scale": torch.tensor([10.0 * e + i])
        for e in range(4)
        for i, p in enumerate(("gate", "up"))
    }
    stored |= {f"{e}.down_proj.weight_scale": torch.tensor(e + 0.5) for e in range(4)}
    assert load_eagerly(layer, stored) == {"w13_weight_scale", "w2_weight_scale"}
    assert layer.w13_weight_scale.tolist() == [[0, 1], [10, 11], [20, 21], [30, 31]]
    assert layer.w2_weight_scale.tolist() == [0.5, 1.5, 2.5, 3.5]
    with pytest.raises(CheckpointMismatchError, match=r"Tried to load a scale of size .*; expected one number"):
        load_eagerly(layer, {"0.gate_proj.weight_scale": torch.ones(2)})


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 1, 1), (4, 2)])
def test_scales_of_stacked_tensors_are_those_of_both_projections_or_one_each(shape: tuple[int, ...]) -> None:
    layer = with_scales("tensor", {"w13_weight_scale": (2,), "w2_weight_scale": ()})
    scale = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    load_eagerly(layer, {"gate_up_proj_scale": scale})
    assert torch.equal(layer.w13_weight_scale, scale.view(4, -1).expand(4, 2))


def test_scale_of_an_expert_s_gate_and_up_projection_is_that_of_both() -> None:
    layer = with_scales("tensor", {"w13_weight_scale": (2,)})
    load_eagerly(layer, {"1.gate_up_proj.weight_scale": torch.tensor(3.0)})
    assert layer.w13_weight_scale[1].tolist() == [3, 3]


def test_input_scales_of_gate_and_up_projection_have_to_be_equal(tmp_path: Path) -> None:
    def stored(gate: float, up: float) -> dict[str, Tensor]:
        each = {"gate_proj": gate, "up_proj": up, "down_proj": 7.0}
        scales = {f"{e}.{name}.input_scale": torch.tensor(each[name]) for e in range(4) for name in each}
        return scales | by_expert(experts_of())

    shapes: dict[str, tuple[int, ...]] = {"w13_input_scale": (), "w2_input_scale": ()}
    # Also where the first is 1, which is what such parameters hold before they are loaded.
    for number, (gate, up) in enumerate([(1.0, 2.0), (1e-6, 2e-6), (0.5, float("nan"))]):
        with pytest.raises(
            CheckpointError, match=r"experts\.w13_input_scale\[0\]: scales of w1 and w3 of a layer must be"
        ):
            load_from_disk(with_scales("tensor", shapes), stored(gate, up), tmp_path / str(number))
    layer = with_scales("tensor", shapes)
    for folder, scale in (("a", 0.25), ("b", 0.5)):  # and again, as after training goes on
        report = load_from_disk(layer, stored(scale, scale * 1.000001), tmp_path / folder)
        assert layer.w13_input_scale.tolist() == [scale] * 4
        assert layer.w2_input_scale.tolist() == [7] * 4
        assert (report.gaps, report.double_writes) == ([], [])
    load_eagerly(layer, dict(reversed(stored(0.125, 0.125).items())))
    assert layer.w13_input_scale.tolist() == [0.125] * 4


def test_input_scales_of_all_ranks_are_held_where_kernels_want_them() -> None:
    layer = with_scales(
        "tensor",
        {"w13_input_scale": (2,)},
        use_global_sf=True,
        parallel=ParallelConfig(ep_rank=1, ep_size=2),
    )
    stored = {
        f"{e}.{p}_proj.input_scale": torch.tensor(10.0 * e + i) for e in range(4) for i, p in enumerate(("gate", "up"))
    }
    assert [layer.unwanted(name) for name in stored] == [None] * 8
    load_eagerly(layer, stored)
    assert layer.w13_input_scale.tolist() == [[0, 1], [10, 11], [20, 21], [30, 31]]


def test_scales_of_groups_are_cut_as_transposed_weights_and_one_group_is_whole() -> None:
    parallel = ParallelConfig(tp_rank=1, tp_size=2)
    layer = with_scales("group", {"w13_scales": (3, 8), "w2_scales": (2, 6)}, parallel=parallel)
    gate, up = torch.rand(3, 8), torch.rand(3, 8)
    down = torch.rand(4, 6)
    load_eagerly(layer, {"0.gate_proj.scales": gate, "0.up_proj.scales": up, "0.down_proj.scales": down})
    assert torch.equal(layer.w13_scales[0], torch.cat([gate[:, 4:], up[:, 4:]], dim=1))
    assert torch.equal(layer.w2_scales[0], down[2:])
    with pytest.raises(CheckpointMismatchError, match="w2 of expert 0: Tried to load weights of size"):
        load_eagerly(layer, {"0.down_proj.scales": torch.rand(3, 6)})
    pair = torch.cat([gate, up], dim=1)
    for name, tensor in (("gate_up_proj.scales", pair.expand(4, 3, 16)), ("0.gate_up_proj.scales", pair)):
        layer = with_scales("group", {"w13_scales": (3, 8)}, parallel=parallel)
        load_eagerly(layer, {name: tensor})
        assert torch.equal(layer.w13_scales[0], torch.cat([gate[:, 4:], up[:, 4:]], dim=1))
    one = with_scales("group", {"w2_scales": (1, 6)}, parallel=parallel)
    load_eagerly(one, {"0.down_proj.scales": down[:1]})
    assert torch.equal(one.w2_scales[0], down[:1])


def test_shape_of_a_packed_weight_is_that_of_gate_and_up_projection(tmp_path: Path) -> None:
    layer = with_scales("tensor", {"w13_weight_shape": (2,), "w2_weight_shape": (2,)})
    stored = by_expert(experts_of())
    for expert in range(4):
        stored |= {f"{expert}.{name}_proj.weight_shape": torch.tensor([8.0, 6.0]) for name in ("gate", "up")}
        stored[f"{expert}.down_proj.weight_shape"] = torch.tensor([6.0, 8.0])
    report = load_from_disk(layer, stored, tmp_path)
    assert layer.w13_weight_shape.tolist() == [[8, 6]] * 4
    assert layer.w2_weight_shape.tolist() == [[6, 8]] * 4
    assert (report.gaps, report.double_writes) == ([], [])


def test_scale_of_channels_that_one_rank_has_already_cut_is_refused() -> None:
    layer = with_scales("channel", {"w13_weight_scale": (8, 1)}, parallel=ParallelConfig(tp_rank=1, tp_size=2))
    with pytest.raises(
        CheckpointMismatchError, match=r"of size torch.Size\(\[4, 1\]\).*expected size torch.Size\(\[8, 1\]\)"
    ):
        load_eagerly(layer, {"0.gate_proj.weight_scale": torch.ones(4, 1)})


def test_scale_whose_parameter_does_not_say_its_kind_is_refused() -> None:
    layer = with_scales("row", {"w2_weight_scale": (6,)})
    with pytest.raises(ValueError, match=r"quant_method 'row'.*accepted is tensor, channel, group, block"):
        load_eagerly(layer, {"0.down_proj.weight_scale": torch.rand(6)})


def block_layer(**arguments: Any) -> FusedMoE:
    sizes = {"hidden": 64, "intermediate": 128} | {
        name: arguments.pop(name) for name in ("hidden", "intermediate") if name in arguments
    }
    return FusedMoE(
        2,
        1,
        sizes["hidden"],
        sizes["intermediate"],
        quant_config=Fp8Config("block", block=(64, 64)),
        prefix="model.experts",
        **arguments,
    )


@pytest.mark.parametrize("is_transposed", [False, True])
def test_block_scales_of_stacked_tensors_are_halved_between_blocks(is_transposed: bool) -> None:
    layer = block_layer(is_fused_checkpoint_transposed=is_transposed, parallel=ParallelConfig(tp_rank=1, tp_size=2))
    gate_up, down = torch.rand(2, 4, 1), torch.rand(2, 1, 2)
    stored = {"gate_up_proj_scale_inv": gate_up, "down_proj.weight_scale_inv": down}
    load_eagerly(layer, {name: tensor.transpose(1, 2) if is_transposed else tensor for name, tensor in stored.items()})
    assert torch.equal(layer.w13_weight_scale_inv, gate_up[:, [1, 3]])
    assert torch.equal(layer.w2_weight_scale_inv, down[:, :, 1:])


def test_block_scales_across_gate_and_up_projection_are_refused() -> None:
    layer = block_layer(intermediate=96)
    with pytest.raises(CheckpointMismatchError, match="the last block of the one is the first of the other"):
        load_eagerly(layer, {"0.gate_up_proj.weight_scale_inv": torch.rand(3, 1)})
    layer = block_layer(hidden=64, intermediate=160)  # of which the number of blocks is even, and they are shared
    with pytest.raises(CheckpointMismatchError, match="the last block of the one is the first of the other"):
        load_eagerly(layer, {"gate_up_proj_scale_inv": torch.rand(2, 6, 1)})


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_blocks_are_cut_so_that_every_rank_has_the_values_of_the_checkpoint(
    tp_size: int, factor: int, hidden_factor: int, can_refine: bool
) -> None:
    block, hidden, size = 128, 32 * hidden_factor, 16 * factor
    try:
        blocks = cut_expert_blocks(
            (block, block), hidden_size=hidden, intermediate_size=size * tp_size, tp_size=tp_size, can_refine=can_refine
        )
    except ValueError:
        assert size % block
        return
    rows = blocks.block_shape[0]
    if blocks.tp_shard_with_padding:
        assert rows == block
        assert blocks.intermediate_size_per_partition % block == 0
        assert blocks.intermediate_size_per_partition * tp_size >= size * tp_size
        return
    assert blocks.intermediate_size_per_partition == size
    assert size % rows == 0
    assert block % rows == 0
    assert blocks.scale_refine in (None, (block // rows, block // rows))


# ---- reading


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize("form", ["each", "paired", "stacked"])
def test_rank_reads_its_experts_alone(tmp_path: Path, form: str, placement: str) -> None:
    tensors = experts_of(8, 128, 256)
    stored = on_disk(tensors, form)
    total = sum(tensor.nbytes for tensor in stored.values())
    for rank in range(4):
        layer = make(
            8,
            128,
            256,
            num_expert_group=2,
            expert_placement_strategy=placement,
            parallel=ParallelConfig(ep_rank=rank, ep_size=4),
        )
        report = load_from_disk(layer, stored, tmp_path)
        assert report.bytes_needed == total // 4
        assert report.bytes_read <= 1.05 * total / 4


def test_file_of_experts_of_other_ranks_is_not_opened(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    stored = {f"experts.{name}": tensor for name, tensor in by_expert(experts_of()).items()}
    shards = [[name for name in stored if name.split(".")[1] in numbers] for numbers in ("01", "23")]
    write_checkpoint(tmp_path, stored, shards)
    other = tmp_path / "model-00002-of-00002.safetensors"
    other.write_bytes(b"not a safetensors file")
    layer = make(parallel=ParallelConfig(ep_rank=0, ep_size=2))
    fast_load(nn.ModuleDict({"experts": layer}), tmp_path)
    assert same_bits(layer.w2_weight, experts_of()["w2"][:2])


def test_auto_weights_loader_reaches_the_layer_in_a_model_that_loads_itself(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.ModuleDict({"experts": make(parallel=ParallelConfig(ep_rank=1, ep_size=2))})

        def load_weights(self, weights: Any) -> set[str]:
            return AutoWeightsLoader(self).load_weights(weights)

    model, tensors = Model(), experts_of()
    stored = {f"model.experts.{name}": tensor for name, tensor in by_expert(tensors).items()}
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    report = fast_load(model, tmp_path)
    assert same_bits(model.model["experts"].w2_weight, tensors["w2"][2:])
    assert report.bytes_needed == sum(tensor.nbytes for tensor in tensors.values()) // 2


# ---- running


def rank_layers(tp_size: int, ep_size: int, **arguments: Any) -> list[FusedMoE]:
    """The layers of all ranks, which do not sum their results."""
    return [
        FusedMoE(
            parallel=ParallelConfig(tp_rank=tp_rank, tp_size=tp_size, ep_rank=ep_rank, ep_size=ep_size),
            reduce_results=False,
            params_dtype=torch.float32,
            prefix="experts",
            **arguments,
        )
        for tp_rank in range(tp_size)
        for ep_rank in range(ep_size)
    ]


RANKS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4)]


@pytest.mark.parametrize(("tp_size", "ep_size"), RANKS)
def test_ranks_of_qwen3_moe_sum_to_the_block_of_transformers(tmp_path: Path, tp_size: int, ep_size: int) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=16, moe_intermediate_size=8, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
    )
    config._experts_implementation = "eager"
    check_block(Qwen3MoeSparseMoeBlock(config), tmp_path, tp_size, ep_size, num_experts=6, renormalize=True)


@pytest.mark.parametrize(("tp_size", "ep_size"), RANKS)
def test_ranks_of_deepseek_v3_sum_to_the_block_of_transformers(tmp_path: Path, tp_size: int, ep_size: int) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=16,
        moe_intermediate_size=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    config._experts_implementation = "eager"
    block = DeepseekV3MoE(config)
    arguments = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "scoring_func": "sigmoid"}
    bias = block.gate.e_score_correction_bias
    with torch.no_grad():
        nn.init.normal_(block.gate.weight)
        nn.init.normal_(bias, mean=-1.0, std=0.1)
        for parameter in block.shared_experts.parameters():
            parameter.zero_()
    check_block(
        block,
        tmp_path,
        tp_size,
        ep_size,
        num_experts=8,
        routed_scaling_factor=2.5,
        e_score_correction_bias=bias,
        num_redundant_experts=2 if ep_size > 1 else 0,
        **arguments,
    )


def check_block(block: nn.Module, folder: Path, tp_size: int, ep_size: int, **arguments: Any) -> None:
    with torch.no_grad():
        for parameter in (*block.experts.parameters(), block.gate.weight):
            nn.init.normal_(parameter, std=0.5)
        x = torch.randn(2, 5, 16)
        expected = block(x)
        logits = F.linear(x, block.gate.weight)
        stored = {name: tensor.clone() for name, tensor in block.experts.state_dict(prefix="experts.").items()}
        safetensors.torch.save_file(stored, folder / "model.safetensors")
        total = torch.zeros_like(x)
        for layer in rank_layers(tp_size, ep_size, top_k=2, hidden_size=16, intermediate_size=8, **arguments):
            fast_load(nn.ModuleDict({"experts": layer}), folder)
            total += layer(x, logits)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2_no_mul": lambda x: F.relu(x) ** 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize(("tp_size", "ep_size", "multiple"), [(1, 1, 1), (2, 1, 1), (2, 1, 5), (1, 3, 1)])
def test_ranks_sum_to_the_plain_experts_with_biases_and_padding(
    activation: str, on_input: bool, tp_size: int, ep_size: int, multiple: int
) -> None:
    is_gated = not activation.endswith("_no_mul")
    names = ("gate_proj", "down_proj", "up_proj") if is_gated else ("up_proj", "down_proj", None)
    weights = {}
    for expert in range(6):
        for name, rows, columns in zip(names, (8, 6, 8), (6, 8, 6), strict=True):
            if name is not None:
                weights[f"{expert}.{name}.weight"] = torch.randn(rows, columns)
                weights[f"{expert}.{name}.bias"] = torch.randn(rows)
    top_k = 1 if on_input else 3
    x, logits = torch.randn(7, 6), torch.randn(7, 6)

    def plain(expert: int, x: Tensor) -> Tensor:
        def project(x: Tensor, name: str) -> Tensor:
            return F.linear(x, weights[f"{expert}.{name}.weight"], weights[f"{expert}.{name}.bias"])

        hidden = ACTIVATIONS[activation](project(x, names[0]))
        return project(hidden * project(x, names[2]) if is_gated else hidden, names[1])

    expected = torch.zeros_like(x)
    for token, scores in enumerate(logits.softmax(-1)):
        for weight, expert in zip(*scores.topk(top_k), strict=True):
            if on_input:
                expected[token] += plain(int(expert), weight * x[token])
            else:
                expected[token] += weight * plain(int(expert), x[token])
    layers = rank_layers(
        tp_size,
        ep_size,
        num_experts=6,
        top_k=top_k,
        hidden_size=6,
        intermediate_size=8,
        renormalize=False,
        activation=activation,
        apply_router_weight_on_input=on_input,
        ckpt_names=names,
        has_bias=True,
        quant_config=padded(multiple),
    )
    for layer in layers:
        load_eagerly(layer, weights)
    torch.testing.assert_close(sum(layer(x, logits) for layer in layers), expected, rtol=1e-4, atol=1e-3)


def test_results_are_summed_over_the_ranks_that_share_the_experts() -> None:
    class Group:
        def all_reduce(self, tensor: Tensor) -> Tensor:
            return tensor + 100

        def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
            raise AssertionError

    x, logits = torch.randn(3, 6), torch.randn(3, 4)
    for parallel in (
        ParallelConfig(tp_size=2, tp_group=Group()),
        ParallelConfig(ep_size=2, ep_group=Group()),
        ParallelConfig(tp_size=2, ep_size=2, ep_group=Group()),
    ):
        alone, summing = (make(parallel=parallel, reduce_results=reduce) for reduce in (False, True))
        for layer in (alone, summing):
            load_eagerly(layer, by_expert(experts_of()))
        assert torch.equal(summing(x, logits), alone(x, logits) + 100)
    with pytest.raises(RuntimeError, match="give ParallelConfig a ep_group"):
        make(parallel=ParallelConfig(ep_size=2))(x, logits)


def test_routing_chooses_the_best_experts_of_the_best_groups() -> None:
    logits = torch.tensor([[5.0, -9, 4, 4, 3, 3, 0, 0]])
    # Groups by their best expert: {0, 1} and {2, 3}; by their best two, with a bias: {2, 3} and {4, 5}.
    weights, experts = route(logits, 2, num_expert_group=4, topk_group=1)
    assert sorted(experts[0].tolist()) == [0, 1]
    assert weights.sum().item() == pytest.approx(1)
    bias = torch.zeros(8)
    _, experts = route(
        logits, 2, num_expert_group=4, topk_group=1, scoring_func="sigmoid", e_score_correction_bias=bias
    )
    assert sorted(experts[0].tolist()) == [2, 3]
    # A bias below all scores does not make experts of other groups the best.
    low = torch.full((8,), -10.0)
    _, experts = route(logits, 2, num_expert_group=4, topk_group=1, scoring_func="sigmoid", e_score_correction_bias=low)
    assert sorted(experts[0].tolist()) == [2, 3]
    weights, _ = route(torch.full((1, 8), -200.0), 2, scoring_func="sigmoid")
    assert not weights.isnan().any()
    with pytest.raises(ValueError, match="scoring_func is 'relu'"):
        route(logits, 2, scoring_func="relu")


def test_custom_routing_function_takes_the_place_of_the_routing() -> None:
    def routing(**arguments: Any) -> tuple[Tensor, Tensor]:
        assert arguments["topk"] == 1
        tokens = len(arguments["hidden_states"])
        return torch.full((tokens, 1), 2.0), torch.full((tokens, 1), 3)

    x, logits = torch.randn(3, 6), torch.randn(3, 4)
    layer, twice = make(), make(custom_routing_function=routing)
    for each in (layer, twice):
        load_eagerly(each, by_expert(experts_of()))
    logits[:, 3] = 100
    torch.testing.assert_close(twice(x, logits), 2 * layer(x, logits))


def test_bias_of_the_choice_stays_a_parameter_of_its_owner_alone() -> None:
    bias = nn.Parameter(torch.zeros(4))
    layer = make(e_score_correction_bias=bias)
    assert layer.e_score_correction_bias is bias
    assert list(layer.state_dict()) == ["w13_weight", "w2_weight"]
