"""Experts in MXFP4, MXFP8 and NVFP4: what lands in each layout, against plain torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import same_bits
from quant_experts import RANKS, Experts, load_both_ways, load_eagerly, make_layer, plain_forward, quantize_mx

from weightlift import CheckpointError
from weightlift.model.quantization.experts_mx import MxFp4MoEMethod, MxFp8MoEMethod, NvFp4MoEMethod

METHODS: dict[str, Any] = {
    "mxfp4": MxFp4MoEMethod,
    "mxfp8": MxFp8MoEMethod,
    "nvfp4": functools.partial(NvFp4MoEMethod, has_input_scale=True),
    "modelopt": functools.partial(NvFp4MoEMethod, is_modelopt=True, has_input_scale=True),
}


@functools.cache
def experts_of(kind: str, intermediate: int = 256, largest: float | None = None) -> Experts:
    return Experts(4, 128, intermediate, functools.partial(quantize_mx, kind=kind, largest=largest))


@pytest.mark.parametrize("rank", RANKS[::2])
@pytest.mark.parametrize(
    ("kind", "target"),
    [(kind, target) for target in ("plain", "marlin") for kind in METHODS],
)
def test_dequantised_experts_are_those_of_the_checkpoint(
    tmp_path: Path, kind: str, target: str, rank: tuple[int, int, int, int]
) -> None:
    experts = experts_of(kind, largest=1.0 if target == "marlin" else None)
    make = functools.partial(make_layer, experts.sizes, functools.partial(METHODS[kind], target=target), rank)
    layer = load_both_ways(make, experts.stored("each"), tmp_path)
    found = layer.quant_method.dequantize(layer)
    if kind in ("nvfp4", "modelopt"):  # two scales are multiplied in another order
        torch.testing.assert_close(found, experts.expected(layer), rtol=1e-6, atol=0)
    else:
        assert all(map(torch.equal, found, experts.expected(layer)))
    x, logits = torch.randn(3, 128), torch.randn(3, 4)
    torch.testing.assert_close(layer(x, logits), plain_forward(layer, found, x, logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", METHODS)
def test_gate_and_up_in_one_tensor_give_the_same_experts(tmp_path: Path, kind: str) -> None:
    experts = experts_of(kind)
    make = functools.partial(make_layer, experts.sizes, METHODS[kind], RANKS[2])
    layer = load_both_ways(make, experts.stored("paired"), tmp_path)
    # Of a scale of the tensor there is then one for both: it is the gate's.
    gate = slice(0, 128)
    for found, expected in zip(layer.quant_method.dequantize(layer)[0], experts.expected(layer)[0], strict=True):
        torch.testing.assert_close(found[gate], expected[gate], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8"])
def test_intermediate_size_is_padded_to_whole_tiles(tmp_path: Path, kind: str) -> None:
    experts = experts_of(kind, 192)
    make = functools.partial(make_layer, experts.sizes, functools.partial(METHODS[kind], target="marlin"), RANKS[1])
    layer = load_both_ways(make, experts.stored("each"), tmp_path)
    assert layer.w2_weight_scale.shape == (4, 4, 128)
    assert all(map(torch.equal, layer.quant_method.dequantize(layer), experts.expected(layer)))


def test_what_has_no_form_is_refused_with_the_layer() -> None:
    with pytest.raises(ValueError, match=r"model\.experts: .*partition \(48\) is not divisible by group_size \(32\)"):
        make_layer((4, 128, 96), METHODS["mxfp4"], RANKS[1])


def test_gate_and_up_with_different_scales_have_no_form_for_marlin() -> None:
    layer = make_layer((4, 128, 256), functools.partial(METHODS["nvfp4"], target="marlin"))
    load_eagerly(layer, experts_of("nvfp4").stored("each"))
    with pytest.raises(CheckpointError, match=r"expert 0 have different weight_global_scale, .*target='plain'"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_scale_of_a_tensor_that_is_no_divisor_has_no_form_for_marlin(value: float) -> None:
    layer = make_layer((4, 128, 256), functools.partial(METHODS["nvfp4"], target="marlin"))
    stored = experts_of("nvfp4", largest=1.0).stored("each")
    load_eagerly(layer, stored | {"2.down_proj.weight_global_scale": torch.tensor(value)})
    with pytest.raises(CheckpointError, match="above 0 in w2_weight_global_scale of expert 2, found"):
        layer.quant_method.process_weights_after_loading(layer)


def test_scales_for_marlin_are_loaded_again_all_or_none() -> None:
    layer = make_layer((4, 128, 256), functools.partial(METHODS["nvfp4"], target="marlin"))
    stored = experts_of("nvfp4", largest=1.0).stored("each")
    load_eagerly(layer, stored)
    process = layer.quant_method.process_weights_after_loading
    process(layer)
    loaded = {name: parameter.data.clone() for name, parameter in layer.named_parameters()}
    process(layer)
    for name, parameter in layer.named_parameters():
        assert same_bits(parameter.data, loaded[name])
    load_eagerly(layer, {name: tensor for name, tensor in stored.items() if name != "3.up_proj.weight_scale"})
    with pytest.raises(CheckpointError, match=r"loaded together .*weight_scale of w3 of expert 3 is missing"):
        process(layer)
