"""NVFP4 and MXFP4: what lands is what the checkpoint stands for, in each layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import same_bits
from quant_models import (
    INPUTS,
    load_both_ways,
    plain_twin,
    quantized_layers,
    relative_error,
    tensors_of,
    weight_of,
)
from torch import Tensor

from weightlift import ops
from weightlift.errors import CheckpointError
from weightlift.model.linear import MergedColumnParallelLinear
from weightlift.model.parallel import ParallelConfig
from weightlift.model.quantization.base import Target
from weightlift.model.quantization.fp4 import (
    CompressedTensorsMxFp4Method,
    CompressedTensorsNvFp4Method,
    ModelOptNvFp4Method,
    convert_nvfp4_scales,
)
from weightlift.model.skeleton import load_model

RANKS = [ParallelConfig(), ParallelConfig(tp_rank=0, tp_size=2), ParallelConfig(tp_rank=1, tp_size=2)]
RANK_IDS = ["tp1", "tp2-0", "tp2-1"]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def numbers(packed: Tensor) -> Tensor:
    """uint8 (N, K / 2) to float32 (N, K), the lower half of a byte first."""
    values = torch.tensor(E2M1 + [-value for value in E2M1])
    return torch.stack([values[(packed & 15).long()], values[(packed >> 4).long()]], dim=-1).flatten(1)


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    weight, scale = numbers(parts["weight_packed"]), parts["weight_scale"]
    if scale.dtype == torch.uint8:
        return weight * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    # Dividing last would round elsewhere.
    return weight * (scale.float() * (1 / parts["weight_global_scale"])).repeat_interleave(16, 1)


@pytest.mark.parametrize("parallel", RANKS, ids=RANK_IDS)
@pytest.mark.parametrize("target", ["plain", "marlin"])
@pytest.mark.parametrize("name", ["nvfp4a16", "mxfp4a16"])
def test_the_layers_of_a_checkpoint_are_what_it_stands_for(
    shared_checkpoints: Path, name: str, target: Target, parallel: ParallelConfig
) -> None:
    folder = shared_checkpoints / name
    model = load_both_ways(folder, parallel=parallel, target=target)
    twin = plain_twin(folder, dequantize, parallel)
    layers = quantized_layers(model)
    assert len(layers) == 16
    for layer_name, layer in layers.items():
        assert torch.equal(weight_of(layer), twin.get_submodule(layer_name).weight), layer_name  # type: ignore[arg-type]
    if parallel.tp_size == 1:
        with torch.no_grad():
            assert relative_error(model(INPUTS), twin(INPUTS)) < 0.02


def test_marlin_parameters_are_what_the_ops_make_of_the_checkpoint(shared_checkpoints: Path) -> None:
    source = "model.layers.1.mlp.down_proj"
    for name in ("nvfp4a16", "mxfp4a16"):
        tensors = tensors_of(shared_checkpoints / name)
        layer: Any = load_model(shared_checkpoints / name, target="marlin", parallel=RANKS[0]).get_submodule(source)
        assert torch.equal(layer.weight_packed, ops.nk_marlin_repack(tensors[f"{source}.weight_packed"], 512, 256, 4))
        scale = tensors[f"{source}.weight_scale"]
        if name == "mxfp4a16":
            permuted = ops.marlin_permute_scales(scale.view(torch.float8_e8m0fnu).bfloat16().T, 512, 256, 32)
            assert same_bits(layer.weight_scale.data, ops.mxfp4_marlin_process_scales(permuted))
            continue
        permuted = ops.marlin_permute_scales(scale.bfloat16().T, 512, 256, 16)
        expected, factor = ops.nvfp4_marlin_process_scales(permuted, a_dtype=torch.bfloat16)
        assert same_bits(layer.weight_scale.data, expected)
        divisor = tensors[f"{source}.weight_global_scale"]
        expected = ops.nvfp4_marlin_process_global_scale(1 / divisor, torch.bfloat16) / factor
        assert torch.equal(layer.weight_global_scale, expected)


# ---- layers on their own


class Given:
    """A config that gives every layer one method."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return self.method


SIZES = [72, 40]  # parts that are no whole tiles


def merged(method: Any, size_k: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    layer = MergedColumnParallelLinear(
        size_k, SIZES, bias=False, quant_config=Given(method), params_dtype=dtype, prefix="m", parallel=RANKS[0]
    )
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).fill_(0x55)
    return layer


def part(seed: int, size_n: int, size_k: int, group: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (size_n, size_k // 2), generator=generator, dtype=torch.uint8)
    if group == 32:
        scale = torch.randint(110, 140, (size_n, size_k // 32), generator=generator, dtype=torch.uint8)
    else:
        scale = (torch.rand(size_n, size_k // 16, generator=generator) * 448).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": scale}


def load_part(layer: Any, number: int, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        parameter = layer.get_parameter(name)
        parameter.weight_loader(parameter, tensor, number)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("target", ["plain", "marlin"])
def test_parts_of_mxfp4_that_are_no_whole_tiles_share_them(target: Target, order: tuple[int, int]) -> None:
    method = CompressedTensorsMxFp4Method("m", target=target)
    layer = merged(method, 96)
    parts = [part(i, size, 96, 32) for i, size in enumerate(SIZES)]
    for i in order:
        load_part(layer, i, {"weight_packed": parts[i]["weight"], "weight_scale": parts[i]["weight_scale"]})
    expected = [dequantize({"weight_packed": p["weight"], "weight_scale": p["weight_scale"]}) for p in parts]
    assert torch.equal(method.dequantize(layer), torch.cat(expected))


def modelopt_layer(target: Target, global_scales: tuple[float, float], **kwargs: Any) -> tuple[Any, Any, Tensor]:
    """A layer with ModelOpt's NVFP4, loaded, not processed; its method, and the weight that it stands for."""
    method = ModelOptNvFp4Method("m", target=target, has_input_scale=True)
    layer = merged(method, 64, **kwargs)
    expected = []
    for i, (size, global_scale) in enumerate(zip(SIZES, global_scales, strict=True)):
        tensors = part(i, size, 64, 16)
        expected.append(
            numbers(tensors["weight"]) * (tensors["weight_scale"].float() * global_scale).repeat_interleave(16, 1)
        )
        numbers_ = {"weight_scale_2": torch.tensor(global_scale), "input_scale": torch.tensor([0.5])}
        load_part(layer, i, tensors | numbers_)
    return layer, method, torch.cat(expected)


@pytest.mark.parametrize("target", ["plain", "marlin"])
def test_modelopt_has_multipliers(target: Target) -> None:
    layer, method, expected = modelopt_layer(target, (0.25, 0.25))
    method.process_weights_after_loading(layer)
    assert torch.equal(method.dequantize(layer), expected)


def test_plain_parts_have_their_own_scale_of_the_tensor() -> None:
    layer, method, expected = modelopt_layer("plain", (0.25, 0.75))
    method.process_weights_after_loading(layer)
    assert torch.equal(method.dequantize(layer), expected)


def test_marlin_refuses_parts_with_different_scales_of_the_tensor() -> None:
    layer, method, _ = modelopt_layer("marlin", (0.25, 0.75))
    with pytest.raises(
        CheckpointError, match=r"m: the parts .* different weight_scale_2, \[0\.25, 0\.75\], .*='plain'"
    ):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_marlin_refuses_a_scale_of_the_tensor_that_is_none(wrong: float) -> None:
    layer, method, _ = modelopt_layer("marlin", (wrong, wrong))
    with pytest.raises(CheckpointError, match=r"m: expected finite numbers above 0 in weight_scale_2, found \["):
        method.process_weights_after_loading(layer)


def test_marlin_leaves_out_scales_that_its_kernels_cannot_have() -> None:
    layer, method, expected = modelopt_layer("marlin", (1.0, 1.0), dtype=torch.float16)
    small = part(0, SIZES[0], 64, 16)
    small["weight_scale"] = torch.full_like(small["weight_scale"].float(), 2.0**-7).to(torch.float8_e4m3fn)
    load_part(layer, 0, small)
    method.process_weights_after_loading(layer)
    found = method.dequantize(layer)
    assert torch.equal(found[: SIZES[0]], torch.zeros_like(found[: SIZES[0]]))
    assert torch.equal(found[SIZES[0] :], expected[SIZES[0] :])


def test_processing_twice_changes_nothing() -> None:
    layer, method, expected = modelopt_layer("marlin", (0.25, 0.25))
    for _ in range(2):
        method.process_weights_after_loading(layer)
    assert torch.equal(method.dequantize(layer), expected)


def test_a_part_that_is_loaded_again_without_the_others_is_refused() -> None:
    layer, method, _ = modelopt_layer("marlin", (0.25, 0.25))
    method.process_weights_after_loading(layer)
    load_part(layer, 1, part(1, SIZES[1], 64, 16))
    with pytest.raises(CheckpointError, match=r"m: all parts .* together .* weight_scale of part 0, weight_scale_2 of"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("largest", [0x7E, 0x77, 0x38, 0x07, 0x00])
def test_look_up_of_scales_is_the_op_on_each(dtype: torch.dtype, largest: int) -> None:
    codes = torch.arange(128, dtype=torch.uint8).clamp(max=largest).repeat(2, 1)
    codes[1, ::5] = 0x80  # -0
    expected, factor = ops.nvfp4_marlin_process_scales(codes.view(torch.float8_e4m3fn).to(dtype), a_dtype=dtype)
    memory = codes.unflatten(1, (-1, 4))[..., [0, 2, 1, 3]].flatten(1).contiguous().view(torch.float8_e4m3fn)
    assert convert_nvfp4_scales(memory, dtype) == factor
    assert torch.equal(memory.view(torch.uint8), expected.view(torch.uint8))


def test_negative_scales_are_refused_for_marlin() -> None:
    layer, method, _ = modelopt_layer("marlin", (0.25, 0.25))
    wrong = part(0, SIZES[0], 64, 16)
    wrong["weight_scale"] = (-wrong["weight_scale"].float()).to(torch.float8_e4m3fn)
    load_part(layer, 0, wrong)
    with pytest.raises(CheckpointError, match=r"m: weight_scale: scales must not be negative"):
        method.process_weights_after_loading(layer)


# ---- what there is no method for


@pytest.mark.parametrize("cls", [CompressedTensorsNvFp4Method, CompressedTensorsMxFp4Method])
def test_inputs_that_are_no_whole_groups_are_refused(cls: Any) -> None:
    with pytest.raises(
        ValueError, match=f"m: Weight input_size_per_partition=72 is not divisible by group_size={cls.group_size}"
    ):
        merged(cls("m"), 72)


def test_marlin_refuses_activations_that_its_kernels_do_not_have() -> None:
    with pytest.raises(ValueError, match=r"m: Marlin takes activations of float16 and bfloat16, not torch\.float32"):
        merged(CompressedTensorsMxFp4Method("m", target="marlin"), 64, torch.float32)
