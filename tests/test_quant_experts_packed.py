"""Experts of packed integers: what lands in each layout, against plain torch."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_experts import RANKS, Experts, load_both_ways, load_eagerly, make_layer, plain_forward, quantize_packed

from weightlift import CheckpointMismatchError, ops
from weightlift.model.quantization.experts_packed import PackedMoEMethod

FORMATS = ["gptq", "awq", "compressed-tensors"]


@functools.cache
def experts_of(
    layout: str,
    num_bits: int = 4,
    group_size: int = 32,
    has_zero_points: bool = False,
    sizes: tuple[int, int, int] = (4, 128, 256),
) -> Experts:
    return Experts(
        *sizes,
        functools.partial(
            quantize_packed, layout=layout, num_bits=num_bits, group_size=group_size, has_zero_points=has_zero_points
        ),
    )


def method_of(
    layout: str, num_bits: int = 4, group_size: int = 32, has_zero_points: bool = False, target: str = "plain"
) -> Any:
    return lambda layer: PackedMoEMethod(
        layer,
        layout=layout,
        num_bits=num_bits,
        group_size=group_size,
        has_zero_points=has_zero_points,
        target=target,
    )


KINDS = [
    ("gptq", 4, 32, False),
    ("gptq", 8, -1, False),
    ("awq", 4, 128, True),
    ("awq", 4, 64, False),
    ("compressed-tensors", 4, 32, False),
    ("compressed-tensors", 4, -1, True),
    ("compressed-tensors", 8, 64, True),
]


@pytest.mark.parametrize("rank", RANKS[::2])
@pytest.mark.parametrize("target", ["plain", "marlin"])
@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_experts_are_those_of_the_checkpoint(
    tmp_path: Path, kind: tuple[str, int, int, bool], target: str, rank: tuple[int, int, int, int]
) -> None:
    experts = experts_of(*kind)
    make = functools.partial(make_layer, experts.sizes, method_of(*kind, target), rank)
    layer = load_both_ways(make, experts.stored("each"), tmp_path)
    found, expected = layer.quant_method.dequantize(layer), experts.expected(layer)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    x, logits = torch.randn(3, 128), torch.randn(3, 4)
    torch.testing.assert_close(layer(x, logits), plain_forward(layer, found, x, logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", ["plain", "marlin"])
@pytest.mark.parametrize(
    ("layout", "form"),
    [("gptq", "paired"), ("awq", "paired"), ("compressed-tensors", "paired"), ("compressed-tensors", "stacked")],
)
def test_gate_and_up_in_one_tensor_give_the_same_experts(tmp_path: Path, layout: str, form: str, target: str) -> None:
    kind = (layout, 4, 32, layout == "awq")
    experts = experts_of(*kind)
    make = functools.partial(make_layer, experts.sizes, method_of(*kind, target), RANKS[2])
    stored = experts.stored(form, output_dim=0 if layout == "compressed-tensors" else 1)
    layer = load_both_ways(make, stored, tmp_path)
    assert all(map(torch.equal, layer.quant_method.dequantize(layer), experts.expected(layer)))


@pytest.mark.parametrize("layout", FORMATS)
def test_tiles_are_those_that_the_ops_make_of_each_projection(layout: str) -> None:
    experts = experts_of(layout, 4, 32)
    layer = make_layer(experts.sizes, method_of(layout, 4, 32, target="marlin"), RANKS[1])
    load_eagerly(layer, experts.stored("each"))
    gptq = experts_of("gptq", 4, 32)
    name = {"compressed-tensors": "w13_weight_packed"}.get(layout, "w13_qweight")
    for part, shard in enumerate(("w1", "w3")):
        tiles = ops.gptq_marlin_repack(gptq.tensors[2, shard]["qweight"][:, :128].contiguous(), 128, 128, 4)
        assert torch.equal(getattr(layer, name)[2].chunk(2, dim=1)[part], tiles)
    down = ops.gptq_marlin_repack(gptq.tensors[2, "w2"]["qweight"][:16], 128, 128, 4)
    assert torch.equal(getattr(layer, name.replace("w13", "w2"))[2], down)


@pytest.mark.parametrize("kind", [("awq", 4, 32, True), ("gptq", 8, 32, False), ("compressed-tensors", 4, -1, True)])
def test_intermediate_size_is_padded_to_whole_tiles_with_nothing(
    tmp_path: Path, kind: tuple[str, int, int, bool]
) -> None:
    experts = experts_of(*kind, (2, 128, 192))
    make = functools.partial(make_layer, experts.sizes, method_of(*kind, "marlin"), RANKS[2])
    layer = load_both_ways(make, experts.stored("each"), tmp_path)
    assert all(map(torch.equal, layer.quant_method.dequantize(layer), experts.expected(layer)))
    names = {"compressed-tensors": ("w13_weight_packed", "w2_weight_scale")}.get(kind[0], ("w13_qweight", "w2_scales"))
    assert getattr(layer, names[0]).shape == (2, 8, 2 * 128 * 16 * kind[1] // 32)
    assert getattr(layer, names[1]).shape == (2, 1 if kind[2] == -1 else 4, 128)
    if kind[2] == 32:
        assert not getattr(layer, names[1])[:, 3].any()


@pytest.mark.parametrize(
    ("sizes", "rank", "arguments", "problem"),
    [
        ((4, 128, 192), RANKS[1], ("awq", 4, 64, True), r"partition \(96\) is not divisible by group_size \(64\)"),
        ((4, 96, 256), RANKS[0], ("gptq", 4, 64, False), r"hidden_size \(96\) is not divisible by group_size \(64\)"),
        (
            (4, 128, 12),
            RANKS[0],
            ("gptq", 4, -1, False),
            r"partition \(12\) are packed 8 to a word",
        ),
        ((4, 128, 256), RANKS[0], ("gptq", 3, 32, False), "Unsupported num_bits = 3"),
        ((4, 128, 256), RANKS[0], ("gptq", 4, 32, True), "Unsupported quantization config: bits=4, sym=False"),
        ((4, 128, 256), RANKS[0], ("awq", 4, 16, True, "marlin"), "Marlin does not support group_size = 16"),
        ((4, 64, 256), RANKS[0], ("awq", 4, 32, True, "marlin"), "hidden_size 64 is not divisible by 128"),
        ((4, 128, 256), RANKS[0], ("awq", 4, 32, True, "fnuz"), "no layout for target 'fnuz'; it has plain, marlin"),
    ],
)
def test_what_has_no_form_is_refused_with_the_layer(sizes: Any, rank: Any, arguments: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.experts: .*{problem}"):
        make_layer(sizes, method_of(*arguments), rank)


def test_experts_of_another_width_are_refused_with_both_sizes() -> None:
    layer = make_layer((4, 128, 256), method_of("gptq", 4, 32))
    eight_bits = experts_of("gptq", 8, 32).stored("each")
    with pytest.raises(CheckpointMismatchError, match=r"w13_qweight: .*\[32, 256\].*expected size .*\[16, 256\]"):
        load_eagerly(layer, dict(itertools.islice(eight_bits.items(), 1)))
