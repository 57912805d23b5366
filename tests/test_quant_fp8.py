"""FP8 weights: what lands is what the checkpoint stands for, in each layout, and as upstream's functions have it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import WriteCheckpoint
from golden import same_bits
from golden_data import Case, cases
from quant_models import (
    INPUTS,
    load_both_ways,
    plain_twin,
    quantized_layers,
    relative_error,
    tensors_of,
    weight_of,
)
from torch import Tensor, nn

import weightlift
from weightlift.errors import CheckpointMismatchError
from weightlift.model.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from weightlift.model.parallel import ParallelConfig
from weightlift.model.quantization.base import Target
from weightlift.model.quantization.fp8 import Fp8Config, Fp8LinearMethod
from weightlift.model.quantization.mxfp8 import Mxfp8LinearMethod
from weightlift.model.skeleton import load_model
from weightlift.model.vocab import ParallelLMHead

FP8 = torch.float8_e4m3fn
RANKS = [ParallelConfig(), ParallelConfig(tp_rank=0, tp_size=2), ParallelConfig(tp_rank=1, tp_size=2)]
OF_MODELS = pytest.mark.parametrize("parallel", [RANKS[0], RANKS[2]], ids=["tp1", "tp2-1"])
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    """A weight by tensor, channel or block of 128."""
    weight, scale = parts["weight"].float(), parts["weight_scale"].float()
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return weight * scale


class Given:
    """A config that gives every layer one method."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return self.method


def single(method: Any, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> ReplicatedLinear:
    layer = ReplicatedLinear(
        columns, rows, bias=False, params_dtype=dtype, quant_config=Given(method), prefix="m", parallel=RANKS[0]
    )
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).fill_(0x55)
    return layer


def fill(layer: Any, tensors: Mapping[str, Tensor], shard_id: Any = None) -> None:
    for name, tensor in tensors.items():
        parameter = layer.get_parameter(name)
        layer.weight_loader(parameter, tensor, *(() if shard_id is None else (shard_id,)))


# ---- real checkpoints


@OF_MODELS
@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
@pytest.mark.parametrize("name", ["fp8", "fp8-dynamic", "fp8-block"])
def test_the_layers_of_a_checkpoint_are_what_it_stands_for(
    shared_checkpoints: Path, name: str, target: Target, parallel: ParallelConfig
) -> None:
    folder = shared_checkpoints / name
    if name == "fp8-block" and parallel.tp_size > 1:
        with pytest.raises(ValueError, match=r"output_partition_size = 64 is not divisible by .* block_n = 128"):
            load_model(folder, parallel=parallel, target=target)
        return
    model = load_both_ways(folder, parallel=parallel, target=target)
    twin = plain_twin(folder, dequantize, parallel)
    layers = quantized_layers(model)
    assert len(layers) == 16
    for layer_name, layer in layers.items():
        expected = twin.get_submodule(layer_name).weight.data  # type: ignore[union-attr, operator]
        found = weight_of(layer)
        if target == "marlin":
            # Its scales are of bfloat16, as those of the checkpoint are.
            assert torch.equal(found, expected), layer_name
        elif name == "fp8" and len(layer.output_partition_sizes) > 1:
            spacing = (expected.abs() * 2**-3).clamp(min=float(layer.weight_scale.max()) * 2**-9)
            assert bool(((found - expected).abs() <= spacing / 2).all()), layer_name
        else:
            assert torch.equal(found, expected), layer_name
    if parallel.tp_size == 1:
        with torch.no_grad():
            logits, expected = model(INPUTS), twin(INPUTS)
        assert relative_error(logits, expected) < (0.06 if name == "fp8" else 0.02)


def test_a_fused_layer_is_requantised_to_the_largest_scale(shared_checkpoints: Path) -> None:
    folder = shared_checkpoints / "fp8"
    model = load_model(folder)
    with weightlift.open_checkpoint(folder) as checkpoint:
        for number in range(4):
            prefix = f"model.layers.{number}.self_attn"
            weights = [checkpoint[f"{prefix}.{part}_proj.weight"].clone() for part in "qkv"]
            scales = torch.cat([checkpoint[f"{prefix}.{part}_proj.weight_scale"].float() for part in "qkv"])
            inputs = torch.cat([checkpoint[f"{prefix}.{part}_proj.input_scale"].float() for part in "qkv"])
            layer: Any = model.get_submodule(f"{prefix}.qkv_proj")
            assert layer.weight_scale.tolist() == [float(scales.max())] * 3
            assert layer.input_scale.tolist() == [float(inputs.max())] * 3
            expected = [weight.float() * scale / scales.max() for weight, scale in zip(weights, scales, strict=True)]
            differ = (layer.weight.float() != torch.cat(expected).to(FP8).float()).float().mean()
            assert differ < 1e-3  # at ties of rounding: there it is multiplied by a quotient


# ---- upstream's own results


def cases_where(fits: Callable[[Case], bool], *topics: str) -> list[Any]:
    found = [case for topic in topics for case in cases(topic)]
    return [case for case in found if case.values[0] is None or fits(case.values[0])]


def has_scale_of_each_part(case: Case) -> bool:
    """Others are of layers that are fused on disk."""
    scale = case["weight_scale"]
    return scale.dim() > 0 and float(scale[-1]) > -448


@pytest.mark.parametrize("case", cases_where(has_scale_of_each_part, "fp8_requant_max_scale"))
def test_requantised_weights_are_the_reference_ones(case: Case) -> None:
    target: Target = "plain" if "expected_exact" in case else "fnuz"
    suffix = "expected_exact" if target == "plain" else "expected_fnuz_bytes_exact"
    widths = case.parameters["logical_widths"]
    is_static = "input_scale" in case
    method = Fp8LinearMethod("m", strategy="tensor", is_static=is_static, target=target)
    columns = case["weight"].shape[1]
    layer = MergedColumnParallelLinear(
        columns, widths, bias=False, quant_config=Given(method), prefix="m", parallel=RANKS[0]
    )
    begin = 0
    for part, width in enumerate(widths):
        tensors = {"weight": case["weight"][begin : begin + width], "weight_scale": case["weight_scale"][part]}
        if is_static:
            tensors["input_scale"] = case["input_scale"][part]
        fill(layer, tensors, part)
        begin += width
    method.process_weights_after_loading(layer)
    # Upstream makes numbers of NaN in e4m3fnuz; here it stays.
    is_nan = case["weight"].float().isnan()
    found, expected = layer.weight.data.view(torch.uint8), case[suffix].view(torch.uint8)
    assert torch.equal(layer.weight.float().isnan(), is_nan)
    assert torch.equal(found[~is_nan], expected[~is_nan])
    assert layer.weight_scale.tolist() == [float(case["expected_scale"])] * len(widths)
    if is_static:
        assert layer.input_scale.tolist() == [float(case["expected_input_scale"].max())] * len(widths)


@pytest.mark.parametrize("case", cases_where(lambda case: "expected_weight" in case, "fp8_marlin", "mxfp8_marlin"))
def test_marlins_form_is_the_reference_one(case: Case) -> None:
    kind = case.parameters["kind"]
    weight = case["weight"]
    method: Any
    if kind == "mxfp8_marlin":
        method, dtype = Mxfp8LinearMethod("m", target="marlin"), torch.bfloat16
        scale, expected = case["weight_scale_e8m0"], case["expected_scale_e8m0"].view(torch.float8_e8m0fnu)
    else:
        block = tuple(case.parameters["block"]) if "block" in case.parameters else None
        strategy: Any = "block" if block else "channel" if "channel" in kind else "tensor"
        method, dtype = Fp8LinearMethod("m", strategy=strategy, block_size=block, target="marlin"), torch.bfloat16
        dtype = DTYPES[case.parameters["orig_dtype"]]
        scale, expected = case["weight_scale_inv" if block else "weight_scale"], case["expected_scale"]
    widths = case.parameters.get("logical_widths", [weight.shape[0]])
    layer = MergedColumnParallelLinear(
        weight.shape[1],
        widths,
        bias=False,
        params_dtype=dtype,
        quant_config=Given(method),
        prefix="m",
        parallel=RANKS[0],
    )
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).fill_(0x55)
    if len(widths) == 1:
        fill(layer, {"weight": weight, "weight_scale": scale})
    else:
        for part, rows in enumerate(weight.split(widths)):
            fill(layer, {"weight": rows, "weight_scale": scale[part]}, part)
    assert same_bits(layer.weight.data, case["expected_weight"])
    assert same_bits(layer.weight_scale.data, expected)


# ---- blocks


def quantize_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    rows, columns = (-(-size // of) for size, of in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    quantized = torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[place].abs().max() / 448
            quantized[place] = weight[place] / scales[i, j]
    return quantized.to(FP8), scales


def from_blocks(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * wide[: weight.shape[0], : weight.shape[1]]


@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(192, 160, (128, 128)), (96, 128, (64, 32)), (64, 64, (16, 64))]
)
def test_blocks_of_any_size_keep_their_scales(rows: int, columns: int, block: tuple[int, int], target: Target) -> None:
    weight, scales = quantize_blocks(torch.randn(rows, columns), block)
    scales = scales.bfloat16().float()  # what marlin rounds to
    method = Fp8LinearMethod("m", strategy="block", block_size=block, scale_name="weight_scale_inv", target=target)
    layer = single(method, rows, columns)
    fill(layer, {"weight": weight, "weight_scale_inv": scales})
    method.process_weights_after_loading(layer)
    assert torch.equal(weight_of(layer), from_blocks(weight, scales, block))


@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
@pytest.mark.parametrize("is_fused_on_disk", [False, True])
def test_blocks_of_the_parts_of_a_layer_keep_their_scales(target: Target, is_fused_on_disk: bool) -> None:
    block, widths = (64, 32), [128, 64, 80]
    weight, scales = quantize_blocks(torch.randn(sum(widths), 96), block)
    scales = scales.bfloat16().float()
    method = Fp8LinearMethod("m", strategy="block", block_size=block, target=target)
    layer = MergedColumnParallelLinear(
        96, widths, bias=False, params_dtype=torch.bfloat16, quant_config=Given(method), parallel=RANKS[0]
    )
    if is_fused_on_disk:
        fill(layer, {"weight": weight, "weight_scale": scales})
    else:
        parts = zip(weight.split(widths), scales.split([2, 1, 2]), strict=True)
        for part, (rows, of_rows) in enumerate(parts):
            fill(layer, {"weight": rows, "weight_scale": of_rows}, part)
    assert torch.equal(weight_of(layer), from_blocks(weight, scales, block))


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.bfloat16])
def test_block_scales_of_other_dtypes_become_float32(dtype: torch.dtype) -> None:
    weight, _ = quantize_blocks(torch.randn(64, 64), (32, 32))
    scales = torch.tensor([[0.5, 2.0], [1.0, 2.0**-20]])
    method = Fp8LinearMethod("m", strategy="block", block_size=(32, 32))
    layer = single(method, 64, 64)
    fill(layer, {"weight": weight, "weight_scale": scales.to(dtype)})
    assert layer.weight_scale.dtype == torch.float32
    assert torch.equal(weight_of(layer), from_blocks(weight, scales, (32, 32)))


@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
@pytest.mark.parametrize("parallel", RANKS, ids=["tp1", "tp2-0", "tp2-1"])
def test_block_scales_of_modelopt_have_two_dimensions_more(parallel: ParallelConfig, target: Target) -> None:
    weight, scales = quantize_blocks(torch.randn(128, 512), (128, 128))
    scales = scales.bfloat16().float()
    method = Fp8LinearMethod("m", strategy="block", block_size=(128, 128), is_modelopt=True, target=target)
    layer = RowParallelLinear(
        512,
        128,
        bias=False,
        params_dtype=torch.bfloat16,
        reduce_results=False,
        quant_config=Given(method),
        prefix="m",
        parallel=parallel,
    )
    fill(layer, {"weight": weight, "weight_scale": scales.reshape(1, 1, 4, 1)})
    size = 512 // parallel.tp_size
    expected = from_blocks(weight, scales, (128, 128)).narrow(1, parallel.tp_rank * size, size)
    assert torch.equal(weight_of(layer), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda config: RowParallelLinear(384, 128, quant_config=config, prefix="l", parallel=RANKS[1]),
            "l: Weight input_size_per_partition = 192 is not divisible by weight quantization block_k = 128.",
        ),
        (
            lambda config: MergedColumnParallelLinear(
                128, [256, 384], quant_config=config, prefix="l", parallel=RANKS[1]
            ),
            "l: Weight output_partition_size = 192 is not divisible by weight quantization block_n = 128.",
        ),
        (
            lambda config: MergedColumnParallelLinear(
                128, [576, 2048], quant_config=config, prefix="l", parallel=RANKS[0]
            ),
            "l: Weight output_partition_size = 576 is not divisible by weight quantization block_n = 128.",
        ),
    ],
)
def test_blocks_that_ranks_or_parts_would_cut_are_refused(make: Any, message: str) -> None:
    config = Fp8Config.from_config({"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        make(config)


def test_the_last_block_of_a_layer_may_be_a_part_of_one() -> None:
    config = Fp8Config.from_config({"quant_method": "fp8", "weight_block_size": [128, 128]})
    layer = MergedColumnParallelLinear(128, [2048, 576], quant_config=config, prefix="l", parallel=RANKS[0])
    assert layer.weight_scale_inv.shape == (21, 1)
    assert ReplicatedLinear(128, 576, quant_config=config, prefix="l").weight_scale_inv.shape == (5, 1)


# ---- MXFP8


@pytest.mark.parametrize("exponents", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
@pytest.mark.parametrize("parallel", RANKS, ids=["tp1", "tp2-0", "tp2-1"])
def test_mxfp8_stands_for_its_numbers(parallel: ParallelConfig, target: Target, exponents: torch.dtype) -> None:
    method = Mxfp8LinearMethod("m", target=target)
    layer = QKVParallelLinear(
        64, 32, 4, 2, bias=False, params_dtype=torch.bfloat16, quant_config=Given(method), prefix="m", parallel=parallel
    )
    expected = []
    for shard, heads in {"q": 4, "k": 2, "v": 2}.items():
        weight = torch.randn(heads * 32, 64).to(FP8)
        powers = torch.randint(100, 140, (heads * 32, 2), dtype=torch.uint8)
        fill(layer, {"weight": weight, "weight_scale": powers.view(exponents)}, shard)
        values = weight.float() * torch.exp2(powers.float() - 127).repeat_interleave(32, 1)
        expected.append(values.chunk(parallel.tp_size)[parallel.tp_rank])
    method.process_weights_after_loading(layer)
    assert torch.equal(weight_of(layer), torch.cat(expected))


def from_mxfp8(parts: Mapping[str, Tensor]) -> Tensor:
    return parts["weight"].float() * torch.exp2(parts["weight_scale"].float() - 127).repeat_interleave(32, 1)


@pytest.fixture(scope="module")
def mxfp8_checkpoint(shared_checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As llm-compressor writes it, of a model in bfloat16."""
    source, folder = shared_checkpoints / "llama128", tmp_path_factory.mktemp("mxfp8")
    tensors = tensors_of(source)
    for name in [name for name in tensors if "_proj" in name]:
        groups = tensors[name].float().unflatten(1, (-1, 32))
        powers = (groups.abs().amax(-1, keepdim=True) / 448).log2().ceil()
        tensors[name] = (groups / torch.exp2(powers)).flatten(1).to(FP8)
        tensors[f"{name}_scale"] = (powers.squeeze(-1) + 127).to(torch.uint8)
    weights = {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@OF_MODELS
@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
def test_the_layers_of_a_checkpoint_in_mxfp8_are_what_it_stands_for(
    mxfp8_checkpoint: Path, target: Target, parallel: ParallelConfig
) -> None:
    model = load_both_ways(mxfp8_checkpoint, parallel=parallel, target=target)
    twin = plain_twin(mxfp8_checkpoint, from_mxfp8, parallel)
    layers = quantized_layers(model)
    assert len(layers) == 16
    for name, layer in layers.items():
        assert torch.equal(weight_of(layer), twin.get_submodule(name).weight), name  # type: ignore[arg-type]
    if parallel.tp_size == 1:
        with torch.no_grad():
            assert relative_error(model(INPUTS), twin(INPUTS)) < 0.02


def test_mxfp8_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match="m: MXFP8 requires 32 inputs to a scale; this rank has 48 inputs"):
        single(Mxfp8LinearMethod("m"), 64, 48)


def test_exponents_that_are_none_are_refused() -> None:
    layer = single(Mxfp8LinearMethod("m"), 64, 64)
    with pytest.raises(CheckpointMismatchError, match=r"m.weight_scale: expected exponents, .* found torch.float32"):
        fill(layer, {"weight_scale": torch.ones(64, 2)})


# ---- scales that are missing, or can't be


def test_a_missing_scale_of_one_part_is_an_error(shared_checkpoints: Path, tmp_path: Path) -> None:
    folder = copy_without(shared_checkpoints / "fp8", tmp_path, "model.layers.2.self_attn.k_proj.weight_scale")
    with pytest.raises(CheckpointMismatchError, match=r"layers.2.self_attn.qkv_proj.weight_scale\[1:2\]"):
        load_model(folder)
    with pytest.raises(ValueError, match=r"layers.2.self_attn.qkv_proj: weight_scale: .* no scale for part 1 of 3"):
        load_model(folder, strict=False)


def copy_without(source: Path, folder: Path, name: str) -> Path:
    tensors = tensors_of(source)
    del tensors[name]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def test_a_scale_of_a_fused_layer_that_is_one_on_disk_is_that_of_all_parts() -> None:
    method = Fp8LinearMethod("m", strategy="tensor")
    layer = MergedColumnParallelLinear(32, [64, 64], bias=False, quant_config=Given(method), parallel=RANKS[0])
    weight = torch.randn(128, 32).to(FP8)
    fill(layer, {"weight": weight, "weight_scale": torch.tensor(0.25)})
    method.process_weights_after_loading(layer)
    assert same_bits(layer.weight.data, weight)
    assert torch.equal(weight_of(layer), weight.float() * 0.25)


@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
@pytest.mark.parametrize("first", [1.0, None])
@pytest.mark.parametrize("scale", [float("nan"), -1.0, float("inf")])
def test_a_scale_that_is_no_positive_number_is_an_error(scale: float, first: float | None, target: Target) -> None:
    method = Fp8LinearMethod("m", strategy="tensor", target=target)
    layer = MergedColumnParallelLinear(
        32, [64, 64], bias=False, params_dtype=torch.bfloat16, quant_config=Given(method), parallel=RANKS[0]
    )
    for part, value in enumerate((scale if first is None else first, scale)):
        fill(layer, {"weight": torch.ones(64, 32).to(FP8), "weight_scale": torch.tensor(value)}, part)
    with pytest.raises(ValueError, match=r"m: weight_scale: a scale is .*; it must be finite and not negative"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("scale", [float("nan"), -1.0, float("inf")])
def test_an_input_scale_that_is_no_positive_number_is_an_error(scale: float) -> None:
    method = Fp8LinearMethod("m", strategy="channel", is_static=True)
    layer = single(method, 64, 64)
    fill(layer, {"input_scale": torch.tensor(scale)})
    with pytest.raises(ValueError, match=r"m: input_scale: a scale is .*; it must be finite and not negative"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_weights_of_another_dtype_are_refused(target: Target, dtype: torch.dtype) -> None:
    layer = single(Fp8LinearMethod("m", strategy="channel", target=target), 64, 64)
    with pytest.raises(CheckpointMismatchError, match=f"m.weight: Tried to load weights of dtype {dtype} to a param"):
        fill(layer, {"weight": torch.ones(64, 64).to(dtype)})


@pytest.mark.parametrize("target", ["plain", "fnuz", "marlin"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_scales_that_are_no_floating_point_numbers_are_refused(
    strategy: Any, target: Target, dtype: torch.dtype
) -> None:
    layer = single(Fp8LinearMethod("m", strategy=strategy, target=target), 64, 64)
    scale = torch.ones(()) if strategy == "tensor" else torch.ones(64, 1)
    with pytest.raises(CheckpointMismatchError, match=f"m.weight_scale: Tried to load weights of dtype {dtype}"):
        fill(layer, {"weight_scale": scale.to(dtype)})


def test_a_scale_beyond_what_marlin_can_hold_is_refused() -> None:
    layer = single(Fp8LinearMethod("m", strategy="channel", target="marlin"), 64, 64, torch.float16)
    with pytest.raises(CheckpointMismatchError, match=r"m.weight_scale: .*fp8_fused_exponent_bias_into_scales"):
        fill(layer, {"weight_scale": torch.full((64, 1), 256.0)})


def test_marlin_is_for_activations_of_16_bits() -> None:
    with pytest.raises(ValueError, match=r"m: scales of Marlin are float16 or bfloat16, .* found torch.float32"):
        single(Fp8LinearMethod("m", strategy="tensor", target="marlin"), 64, 64, torch.float32)


def test_marlin_has_no_groups_of_other_sizes() -> None:
    with pytest.raises(
        ValueError, match="m: weight quantization block_k = 256 is not one that Marlin has: 32, 64, 128"
    ):
        Fp8LinearMethod("m", strategy="block", block_size=(128, 256), target="marlin")


@pytest.mark.parametrize(("strategy", "block_size"), [("tensor", None), ("channel", None), ("block", (32, 64))])
def test_padding_of_a_head_for_marlin_stands_for_nothing(strategy: Any, block_size: Any) -> None:
    method = Fp8LinearMethod("lm_head", strategy=strategy, block_size=block_size, target="marlin")
    head: Any = ParallelLMHead(
        100, 64, params_dtype=torch.bfloat16, quant_config=Given(method), prefix="lm_head", parallel=RANKS[2]
    )
    weight, shape = torch.randn(100, 64).to(FP8), {"tensor": (1,), "channel": (100, 1), "block": (4, 1)}[strategy]
    scale = torch.rand(shape).bfloat16()
    for parameter, tensor in ((head.weight, weight), (head.weight_scale, scale)):
        parameter.data.view(torch.uint8).fill_(0x55)
        parameter.weight_loader(parameter, tensor)
    spread = scale.repeat_interleave(32, 0)[:100] if strategy == "block" else scale
    expected = torch.zeros(64, 64)
    expected[:36] = (weight.float() * spread.float())[64:]
    assert torch.equal(weight_of(head), expected)


def test_a_whole_model_with_inverse_block_scales(
    shared_checkpoints: Path, tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    """As DeepSeek's: `weight_scale_inv`, and quant_method "fp8"."""
    source = shared_checkpoints / "fp8-block"
    tensors = {name.replace("weight_scale", "weight_scale_inv"): value for name, value in tensors_of(source).items()}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    folder = write_checkpoint(tmp_path, tensors, shards=2)
    (folder / "config.json").write_text(json.dumps(config))
    found, expected = load_model(folder), load_model(source)
    with torch.no_grad():
        assert torch.equal(found(INPUTS), expected(INPUTS))
