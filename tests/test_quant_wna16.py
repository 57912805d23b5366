"""Packed weights of compressed-tensors: what lands is what the checkpoint stands for, in each layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_models import INPUTS, load_both_ways, plain_twin, quantized_layers, relative_error, weight_of
from quant_packed import expanded, pack_rows, quantize_checkpoint, quantized, unpack_rows
from torch import Tensor

from weightlift import ops
from weightlift.model.linear import ReplicatedLinear
from weightlift.model.parallel import ParallelConfig
from weightlift.model.quantization.base import Target
from weightlift.model.quantization.wna16 import CompressedTensorsWNA16Method
from weightlift.model.skeleton import load_model

RANKS = [ParallelConfig(), ParallelConfig(tp_rank=0, tp_size=2), ParallelConfig(tp_rank=1, tp_size=2)]
RANK_IDS = ["tp1", "tp2-0", "tp2-1"]


def ct_config(bits: int, group_size: int, *, symmetric: bool, actorder: str | None = None) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "actorder": actorder,
        "dynamic": False,
    }
    group = {"weights": weights, "targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def as_packed(weight: Tensor, bits: int, group_size: int, *, symmetric: bool) -> dict[str, Tensor]:
    values, scales, zero_points = quantized(weight, bits, group_size, symmetric=symmetric)
    tensors = {
        "weight_packed": pack_rows(values, bits).T,
        "weight_scale": scales.T,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors if symmetric else tensors | {"weight_zero_point": pack_rows(zero_points.T, bits)}


def from_packed(parts: Mapping[str, Tensor], bits: int = 4) -> Tensor:
    zero_points: Tensor | int = 2 ** (bits - 1)
    if "weight_zero_point" in parts:
        zero_points = unpack_rows(parts["weight_zero_point"], bits).T
    return expanded(unpack_rows(parts["weight_packed"].T, bits), parts["weight_scale"].T, zero_points)


def assert_stands_for_its_checkpoint(
    folder: Path, *, bits: int, target: Target, parallel: ParallelConfig, num_layers: int
) -> None:
    model = load_both_ways(folder, parallel=parallel, target=target)
    twin = plain_twin(folder, lambda parts: from_packed(parts, bits), parallel)
    layers = quantized_layers(model)
    assert len(layers) == num_layers
    for name, layer in layers.items():
        assert torch.equal(weight_of(layer), twin.get_submodule(name).weight), name  # type: ignore[arg-type]
    if parallel.tp_size == 1:
        with torch.no_grad():
            assert relative_error(model(INPUTS), twin(INPUTS)) < 0.02


@pytest.mark.parametrize("parallel", RANKS, ids=RANK_IDS)
@pytest.mark.parametrize("target", ["plain", "marlin"])
@pytest.mark.parametrize("name", ["w4a16", "w4a16-gptq"])
def test_the_layers_of_a_real_checkpoint_are_what_it_stands_for(
    shared_checkpoints: Path, name: str, target: Target, parallel: ParallelConfig
) -> None:
    assert_stands_for_its_checkpoint(shared_checkpoints / name, bits=4, target=target, parallel=parallel, num_layers=16)


@pytest.mark.parametrize("parallel", [RANKS[0], RANKS[2]], ids=["tp1", "tp2-1"])
@pytest.mark.parametrize("target", ["plain", "marlin"])
@pytest.mark.parametrize(("bits", "group_size", "symmetric"), [(4, 32, False), (8, 64, True), (8, -1, False)])
def test_the_layers_of_other_kinds_are_what_the_checkpoint_stands_for(
    shared_checkpoints: Path,
    tmp_path: Path,
    bits: int,
    group_size: int,
    symmetric: bool,
    target: Target,
    parallel: ParallelConfig,
) -> None:
    folder = quantize_checkpoint(
        shared_checkpoints / "llama128",
        tmp_path,
        ct_config(bits, group_size, symmetric=symmetric),
        lambda weight: as_packed(weight, bits, group_size, symmetric=symmetric),
    )
    assert_stands_for_its_checkpoint(folder, bits=bits, target=target, parallel=parallel, num_layers=4)


def test_marlin_parameters_are_what_the_ops_make_of_the_checkpoint(shared_checkpoints: Path) -> None:
    from quant_models import tensors_of

    folder = shared_checkpoints / "w4a16"
    tensors = tensors_of(folder)
    layer: Any = load_model(folder, target="marlin", parallel=RANKS[0]).get_submodule("model.layers.1.mlp.down_proj")
    source = "model.layers.1.mlp.down_proj"
    words = tensors[f"{source}.weight_packed"].T.contiguous()
    assert torch.equal(layer.weight_packed, ops.gptq_marlin_repack(words, 512, 256, 4))
    scales = tensors[f"{source}.weight_scale"].T.contiguous()
    assert torch.equal(layer.weight_scale, ops.marlin_permute_scales(scales, 512, 256, 128))


def test_a_layer_that_does_not_fill_tiles_is_padded_with_zeros() -> None:
    weight = torch.randn(100, 160, generator=torch.Generator().manual_seed(1))
    values, scales, _ = quantized(weight, 4, 32, symmetric=True)
    method = CompressedTensorsWNA16Method("m", target="marlin", num_bits=4, group_size=32)
    layer: Any = ReplicatedLinear(
        160, 100, bias=False, quant_config=Given(method), params_dtype=torch.bfloat16, parallel=RANKS[0]
    )
    assert layer.weight_packed.shape == (192 // 16, 128 * 2)
    assert layer.weight_scale.shape == (192 // 32, 128)
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).fill_(0x55)
    layer.weight_loader(layer.weight_packed, pack_rows(values, 4).T)
    layer.weight_loader(layer.weight_scale, scales.T)
    padded = torch.zeros(192, 128, dtype=torch.long)
    padded[:160, :100] = values
    assert torch.equal(layer.weight_packed, ops.gptq_marlin_repack(pack_rows(padded, 4), 192, 128, 4))
    assert torch.equal(method.dequantize(layer), expanded(values, scales, 8))
    x = torch.randn(3, 160, dtype=torch.bfloat16)
    assert torch.equal(layer(x)[0], torch.nn.functional.linear(x, expanded(values, scales, 8).bfloat16()))


class Given:
    """A config that gives every layer one method."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return self.method


# ---- what there is no method for


@pytest.mark.parametrize("actorder", ["group", "dynamic"])
def test_an_order_of_inputs_is_refused(actorder: str) -> None:
    with pytest.raises(ValueError, match=rf"m: Compressed-tensors .* \(actorder='{actorder}'\) is no longer supported"):
        CompressedTensorsWNA16Method("m", num_bits=4, group_size=32, actorder=actorder)


def test_an_order_that_leaves_no_trace_is_taken() -> None:
    CompressedTensorsWNA16Method("m", num_bits=4, group_size=32, actorder="static")


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"m: Unsupported num_bits = 3\. Supported num_bits = \[4, 8\]"):
        CompressedTensorsWNA16Method("m", num_bits=3, group_size=32)


def test_a_target_without_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="m: CompressedTensorsWNA16Method has no layout for target 'fnuz'"):
        CompressedTensorsWNA16Method("m", target="fnuz", num_bits=4, group_size=32)


def test_ranks_that_would_share_a_group_are_refused(shared_checkpoints: Path) -> None:
    with pytest.raises(
        ValueError, match="o_proj: Weight input_size_per_partition=64 is not divisible by group_size=128"
    ):
        load_model(shared_checkpoints / "w4a16", parallel=ParallelConfig(tp_rank=0, tp_size=4))
