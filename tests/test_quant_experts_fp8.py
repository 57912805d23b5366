"""FP8 and INT8 experts: what lands in each layout, against plain torch and stored references."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import Golden, golden, parents, same_bits
from quant_experts import (
    RANKS,
    Experts,
    load_both_ways,
    load_eagerly,
    load_recorded,
    make_layer,
    plain_forward,
    quantize_fp8,
    quantize_int8,
)
from torch import Tensor

from weightlift import CheckpointError, CheckpointMismatchError
from weightlift.model.quantization.experts_fp8 import Fp8MoEMethod, Int8MoEMethod

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@functools.cache
def experts_of(strategy: str, hidden: int = 128, intermediate: int = 256, **arguments: Any) -> Experts:
    return Experts(4, hidden, intermediate, functools.partial(quantize_fp8, strategy=strategy, **arguments))


def method_of(strategy: str, target: str = "plain", **arguments: Any) -> Any:
    if strategy == "block":
        arguments.setdefault("block_size", (128, 128))
    return lambda layer: Fp8MoEMethod(layer, strategy, target=target, **arguments)


def rounded(scale: Tensor, numbers: Tensor) -> Tensor:
    return numbers / scale * scale.to(torch.bfloat16).float()


# ---- stored references


def by_expert(topic: Golden, parent: str) -> dict[str, Tensor]:
    projections = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    named = {}
    for shard, projection in projections.items():
        for suffix, what in (("", "weight"), ("_scale", "weight_scale")):
            for expert, part in enumerate(topic.tensor(f"{parent}.ckpt_{shard}{suffix}")):
                named[f"{expert}.{projection}.{what}"] = part.clone()
    return named


@pytest.mark.parametrize("target", ["plain", "fnuz"])
@pytest.mark.parametrize("parent", [name for name in parents("moe_stack") if "fp8" in str(name)])
def test_experts_with_one_scale_for_gate_and_up_are_those_of_the_reference(parent: str, target: str) -> None:
    topic = golden("moe_stack")
    spec, stored = topic.cases[parent], by_expert(topic, parent)
    strategy = spec["quant"].removeprefix("fp8_")
    sizes = (spec["E"], spec["hidden"], spec["intermediate"])
    for name, case in topic.children(parent):
        if case.get("placement", "linear") != "linear":
            continue
        expected = topic.expected(name)
        rank = tuple(case.get(key, default) for key, default in (("tp_rank", 0), ("tp", 1), ("ep_rank", 0), ("ep", 1)))
        layer = make_layer(sizes, method_of(strategy, target), rank)
        load_eagerly(layer, stored)
        if target == "plain":
            assert same_bits(layer.w13_weight_scale.data, expected["w13_scale_loaded"])
            assert same_bits(layer.w13_weight.data, expected["w13"])
            assert same_bits(layer.w2_weight.data, expected["w2"])
            assert same_bits(layer.w2_weight_scale.data, expected["w2_scale"])
        layer.quant_method.process_weights_after_loading(layer)
        if strategy == "channel":
            continue
        start = "fnuz_" if target == "fnuz" and "fnuz_w2" in expected else ""
        if target == "fnuz" and not start:
            continue
        merged = expected[f"{start}w13_scale_merged"]
        assert same_bits(layer.w13_weight_scale.data, torch.stack([merged, merged], dim=1))
        if target == "plain":
            assert same_bits(layer.w13_weight.data, expected["w13_requant_exact"])
        else:
            assert same_bits(layer.w2_weight.data.view(torch.uint8), expected["fnuz_w2"])
            assert same_bits(layer.w2_weight_scale.data, expected["fnuz_w2_scale"])


# ---- each layout, for each rank


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_dequantised_experts_are_those_of_the_checkpoint(
    tmp_path: Path, strategy: str, target: str, rank: tuple[int, int, int, int]
) -> None:
    experts = experts_of(strategy)
    make = functools.partial(make_layer, experts.sizes, method_of(strategy, target), rank)
    layer = load_both_ways(make, experts.stored("each"), tmp_path)
    expected = experts.expected(layer)
    found = layer.quant_method.dequantize(layer)
    if target == "marlin":  # scales are bfloat16
        torch.testing.assert_close(found, expected, rtol=2**-8, atol=0)
    elif strategy == "tensor":  # gate or up is rounded once more; the down projection is not
        torch.testing.assert_close(found[0], expected[0], rtol=2**-4, atol=float(layer.w13_weight_scale.max()) * 2**-9)
        assert torch.equal(found[1], expected[1])
        assert bool((layer.w13_weight_scale[:, 0] == layer.w13_weight_scale[:, 1]).all())
    else:
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    x, logits = torch.randn(5, 128), torch.randn(5, 4)
    torch.testing.assert_close(layer(x, logits), plain_forward(layer, found, x, logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["paired", "stacked"])
@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
@pytest.mark.parametrize("strategy", ["channel", "block"])
def test_fused_tensors_give_the_same_experts(tmp_path: Path, strategy: str, target: str, form: str) -> None:
    experts = experts_of(strategy)
    make = functools.partial(make_layer, experts.sizes, method_of(strategy, target), RANKS[2])
    load_both_ways(make, experts.stored(form), tmp_path)
    layers = [make(), make()]
    for layer, stored in zip(layers, (experts.stored(form), experts.stored("each")), strict=True):
        load_eagerly(layer, stored)
    for name, parameter in layers[0].named_parameters():
        assert same_bits(parameter.data, getattr(layers[1], name).data), name


@pytest.mark.parametrize("rank", RANKS[:3])
@pytest.mark.parametrize("target", ["plain", "fnuz"])
@pytest.mark.parametrize("intermediate", [192, 384])
def test_blocks_across_the_borders_of_ranks_keep_their_scales(
    tmp_path: Path, target: str, rank: tuple[int, int, int, int], intermediate: int
) -> None:
    experts = experts_of("block", 128, intermediate)
    make = functools.partial(make_layer, experts.sizes, method_of("block", target), rank)
    layer = load_both_ways(make, experts.stored("each"), tmp_path)
    assert all(map(torch.equal, layer.quant_method.dequantize(layer), experts.expected(layer)))


@pytest.mark.parametrize("target", ["plain", "fnuz"])
def test_blocks_that_can_not_be_refined_are_padded(tmp_path: Path, target: str) -> None:
    block = (24, 24)
    experts = experts_of("block", 48, 144, block=block)
    for rank in ((0, 4, 0, 1), (2, 4, 0, 1), (3, 4, 0, 1)):
        make = functools.partial(make_layer, experts.sizes, method_of("block", target, block_size=block), rank)
        layer = load_both_ways(make, experts.stored("each"), tmp_path)
        assert layer.intermediate_size_per_partition == 48  # the last rank has none of the checkpoint's 144
        gate_up, down = layer.quant_method.dequantize(layer)
        rows = slice(48 * rank[0], 48 * rank[0] + 48)
        for expert in range(4):
            for part, shard in enumerate(("w1", "w3")):
                whole = experts.numbers[expert, shard][rows]
                assert torch.equal(gate_up[expert].chunk(2)[part][: len(whole)], whole)
                assert not gate_up[expert].chunk(2)[part][len(whole) :].any()
            assert torch.equal(down[expert][:, : len(whole)], experts.numbers[expert, "w2"][:, rows])


def test_scales_of_inputs_become_the_largest_of_all_experts(tmp_path: Path) -> None:
    experts = experts_of("tensor", static=True)
    stored = experts.stored("each")
    for expert in range(4):  # gate and up projection have one input
        stored[f"{expert}.up_proj.input_scale"] = stored[f"{expert}.gate_proj.input_scale"].clone()
    make = functools.partial(make_layer, experts.sizes, method_of("tensor", static_input=True))
    layer = load_both_ways(make, stored, tmp_path)
    largest = max(float(stored[f"{expert}.gate_proj.input_scale"]) for expert in range(4))
    assert layer.w13_input_scale.tolist() == [largest] * 4
    assert layer.w2_input_scale.unique().numel() == 1
    doubled = make_layer(experts.sizes, method_of("tensor", "fnuz", static_input=True))
    load_eagerly(doubled, stored)
    doubled.quant_method.process_weights_after_loading(doubled)
    assert torch.equal(doubled.w13_input_scale, 2 * layer.w13_input_scale)
    stored["2.up_proj.input_scale"] = torch.tensor(99.0)
    with pytest.raises(CheckpointError, match="scales of w1 and w3 of a layer must be equal"):
        load_eagerly(make(), stored)
    apart = make_layer(experts.sizes, method_of("tensor", static_input=True, is_modelopt=True))
    load_eagerly(apart, stored)
    assert apart.w13_input_scale.shape == (4, 2)
    assert float(apart.w13_input_scale[2, 1]) == 99


@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
def test_block_scales_with_four_dimensions_are_the_same(tmp_path: Path, target: str) -> None:
    experts = experts_of("block")
    stored = experts.stored("each")
    make = functools.partial(make_layer, experts.sizes, rank=RANKS[2])
    expected = make(method_of("block", target))
    load_eagerly(expected, stored)
    four = {name: tensor[:, None, :, None] if "scale" in name else tensor for name, tensor in stored.items()}
    layer = load_both_ways(lambda: make(method_of("block", target, is_modelopt=True)), four, tmp_path)
    for name, parameter in expected.named_parameters():
        assert same_bits(parameter.data, getattr(layer, name).data), name


def test_int8_experts_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    experts = Experts(4, 32, 64, quantize_int8)
    for rank in RANKS:
        make = functools.partial(make_layer, experts.sizes, Int8MoEMethod, rank)
        layer = load_both_ways(make, experts.stored("each"), tmp_path)
        assert all(map(torch.equal, layer.quant_method.dequantize(layer), experts.expected(layer)))


@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
def test_rank_without_experts_has_nothing_to_load_and_nothing_to_add(tmp_path: Path, target: str) -> None:
    experts = experts_of("tensor")
    make = functools.partial(make_layer, experts.sizes, method_of("tensor", target, static_input=True), (0, 1, 5, 6))
    layer = load_both_ways(make, experts.stored("each"), tmp_path)
    w13, w2 = layer.quant_method.dequantize(layer)
    assert (tuple(w13.shape), tuple(w2.shape)) == ((0, 512, 128), (0, 128, 256))
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    assert torch.equal(layer(x, torch.zeros(3, 4)), torch.zeros_like(x))


def test_missing_scale_is_a_gap_of_the_parameter(tmp_path: Path) -> None:
    stored = experts_of("tensor").stored("each")
    del stored["1.up_proj.weight_scale"]
    with pytest.raises(CheckpointMismatchError) as caught:
        load_recorded(make_layer((4, 128, 256), method_of("tensor")), stored, tmp_path)
    assert caught.value.gaps == ["model.experts.w13_weight_scale[1:2]"]


def test_scale_that_is_no_number_is_refused_with_the_expert() -> None:
    stored = experts_of("tensor").stored("each")
    stored["1.up_proj.weight_scale"] = torch.tensor(float("inf"))
    layer = make_layer((4, 128, 256), method_of("tensor"))
    load_eagerly(layer, stored)
    with pytest.raises(CheckpointError, match=r"model\.experts\.w13_weight_scale\[1\]: "):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("sizes", "rank", "method", "arguments", "problem"),
    [
        ((4, 16, 256), (0, 4, 0, 1), method_of("block"), {}, "is not divisible by weight quantization block_n = 128"),
        ((4, 128, 192), RANKS[1], method_of("block", "marlin"), {}, "weight quantization block_k = 128 into groups"),
        ((4, 64, 256), RANKS[0], method_of("channel", "marlin"), {}, "hidden_size 64 is not divisible by 128"),
        ((4, 128, 256), RANKS[0], method_of("channel", "marlin"), {"has_bias": True}, "experts without a bias"),
        (
            (4, 128, 256),
            RANKS[0],
            method_of("channel", "marlin"),
            {"dtype": torch.float32},
            "activations of float16 and bfloat16",
        ),
        ((4, 128, 256), RANKS[0], lambda layer: Int8MoEMethod(layer, target="fnuz"), {}, "no layout for target 'fnuz'"),
    ],
)
def test_what_has_no_form_is_refused_with_the_layer(
    sizes: Any, rank: Any, method: Any, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=rf"model\.experts: .*{problem}"):
        make_layer(sizes, method, rank, **arguments)
