"""What a load says of quantised checkpoints that do not fit: real ones, each with one thing broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor

import weightlift
from weightlift.model.parallel import ParallelConfig
from weightlift.model.skeleton import load_model
from weightlift.program import Program

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]

DOWN = "model.layers.0.mlp.down_proj"
QKV = "model.layers.0.self_attn.qkv_proj"
Q, K, V = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")


def kept(tensors: Tensors) -> Tensors:
    return tensors


def without(pattern: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {re.sub(old, new, name): tensor for name, tensor in tensors.items()}


def changed(pattern: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: {
        name: change(tensor) if re.search(pattern, name) else tensor for name, tensor in tensors.items()
    }


def added(more: Callable[[str, Tensor], Tensors]) -> Change:
    return lambda tensors: (
        tensors | {new: made for name, old in tensors.items() for new, made in more(name, old).items()}
    )


def activation_order(name: str, tensor: Tensor) -> Tensors:
    if not name.endswith("weight_packed"):
        return {}
    return {name.replace("weight_packed", "weight_g_idx"): torch.zeros(8 * tensor.shape[1], dtype=torch.int32)}


def plain_layer(tensors: Tensors) -> Tensors:
    return without(DOWN)(tensors) | {f"{DOWN}.weight": torch.zeros(256, 512, dtype=torch.bfloat16)}


def as_gptq(tensors: Tensors) -> Tensors:
    """Names and shapes of GPTQ, made of compressed-tensors' of 4 bits."""
    result = without("weight_(shape|packed|scale)$")(tensors)
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            result[f"{layer}.qweight"] = torch.zeros(tensor.shape[1], tensor.shape[0], dtype=torch.int32)
        elif leaf == "weight_scale":
            result[f"{layer}.scales"] = tensor.t().contiguous()
            result[f"{layer}.qzeros"] = torch.zeros(tensor.shape[1], tensor.shape[0] // 8, dtype=torch.int32)
    return result


def quantization(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(quantization_config=fields)


def weights(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Changes what the groups of compressed-tensors say of weights."""

    def change(config: dict[str, Any]) -> None:
        for group in config["quantization_config"]["config_groups"].values():
            group["weights"].update(fields)

    return change


def of(checkpoint: str) -> Callable[[dict[str, Any], Path], None]:
    """Takes the quantization_config of another checkpoint."""

    def change(config: dict[str, Any], folder: Path) -> None:
        other = json.loads((folder.parent / checkpoint / "config.json").read_text())
        config["quantization_config"] = other["quantization_config"]

    return change


class Case(NamedTuple):
    checkpoint: str
    text: str  # what the error says of the cause, but for the path of the file
    tensors: Change = kept
    config: Callable[..., None] | None = None
    error: type[Exception] = weightlift.CheckpointMismatchError
    tp_size: int = 1


WRONG = "It does not belong to these weights."

CASES = {
    "scale of a part is missing": Case(
        "fp8-dynamic",
        f"{QKV}.weight_scale is made of 3 tensors, and the checkpoint has no {Q}.weight_scale; it has "
        f"{K}.weight_scale, "
        f"{V}.weight_scale. A shard is missing, or the tensor was lost when the checkpoint was written.",
        without(re.escape(f"{Q}.weight_scale")),
    ),
    "one scale of a fused layer with one for each part is missing": Case(
        "fp8",
        f"{QKV}.weight_scale is made of 3 tensors, and the checkpoint has no {K}.weight_scale",
        without(re.escape(f"{K}.weight_scale")),
    ),
    "scale of a layer is missing": Case(
        "fp8-dynamic",
        f"{DOWN}.weight_scale: {DOWN}.weight is quantised (float8_e4m3fn), and its scale is not in the checkpoint",
        without(re.escape(f"{DOWN}.weight_scale")),
    ),
    "part of a fused weight is missing": Case(
        "w4a16",
        f"{QKV}.weight_packed is made of 3 tensors, and the checkpoint has no {K}.weight_packed; it has ",
        without(re.escape(K)),
    ),
    "part of a fused weight that is not quantised is missing": Case(
        "llama128",
        f"{QKV}.weight is made of 3 tensors, and the checkpoint has no {K}.weight; it has {Q}.weight, {V}.weight.",
        without(re.escape(K)),
    ),
    "config says nothing of scales": Case(
        "fp8-dynamic",
        f"The checkpoint is quantised, the model is not: {DOWN}.weight_scale and other tensors (weight_scale) are "
        "those of quantised layers. The model was built without a quantization_config: take the config.json that "
        "belongs to "
        "the weights.",
        config=lambda config: config.pop("quantization_config"),
    ),
    "config says nothing of packed weights": Case(
        "w4a16",
        f"{DOWN}.weight_packed and other tensors (weight_packed, weight_scale, weight_shape) are those of quantised",
        config=lambda config: config.pop("quantization_config"),
    ),
    "checkpoint has no scales": Case(
        "llama128",
        f"The config says compressed-tensors, and no tensor of the checkpoint is quantised: {DOWN}.weight is bfloat16, "
        "and there are no scales. Remove quantization_config from config.json, or take the weights that belong to it.",
        config=of("w4a16"),
    ),
    "layer is not quantised and the config does not say so": Case(
        "fp8-dynamic",
        f"{DOWN} is not quantised in the checkpoint: {DOWN}.weight is bfloat16 and has no scale. The config does not "
        "name "
        "it among the layers that are not (ignore, ignored_layers, modules_to_not_convert): add it there.",
        plain_layer,
    ),
    "names of ignored layers are those of another scheme of names": Case(
        "fp8-dynamic",
        "Of the layers that the config says are not quantised, these name none, neither of the model nor of the "
        "checkpoint: transformer.h.0.mlp.c_proj. They may be written for another naming of the layers.",
        plain_layer,
        lambda config: config["quantization_config"].update(ignore=["lm_head", "transformer.h.0.mlp.c_proj"]),
    ),
    "scale has the name of its inverse": Case(
        "fp8-dynamic",
        f"{DOWN}: expected weight_scale, scales of compressed-tensors, of ModelOpt, and of FP8 without blocks, found "
        "weight_scale_inv, scales of blocks of quant_method fp8 with weight_block_size (factors, in spite of the "
        "name). "
        "The config says compressed-tensors (",
        renamed("weight_scale", "weight_scale_inv"),
    ),
    "scale of blocks has not the name of its inverse": Case(
        "fp8-block",
        f"{DOWN}: expected weight_scale_inv, scales of blocks of quant_method fp8 with weight_block_size (factors, in "
        "spite of the name), found weight_scale, scales of compressed-tensors",
        config=quantization(
            quant_method="fp8",
            activation_scheme="dynamic",
            weight_block_size=[128, 128],
            ignored_layers=["lm_head"],
        ),
    ),
    "packed weights are those of another method": Case(
        "w4a16",
        f"{DOWN}: expected weight_packed, packed weights of compressed-tensors, found qweight, packed weights of GPTQ "
        "and "
        "AWQ. The config says compressed-tensors (",
        as_gptq,
    ),
    "blocks are larger than the config says": Case(
        "fp8-block",
        f"{DOWN}.weight_scale: [2, 4] is a scale for each block of 128 x 128; the config says compressed-tensors "
        f"(Fp8LinearMethod), with a scale for each block of 64 x 64. {WRONG}",
        config=weights(block_structure=[64, 64]),
    ),
    "blocks are smaller than the config says": Case(
        "fp8-block",
        f"{DOWN}.weight_scale: [4, 4] is a scale for each block of 64 x 128; the config says compressed-tensors "
        f"(Fp8LinearMethod), with a scale for each block of 128 x 128. {WRONG}",
        changed("weight_scale", lambda scale: scale.repeat_interleave(2, 0)),
    ),
    "scales are of channels and not of blocks": Case(
        "fp8-dynamic",
        f"{DOWN}.weight_scale: [256, 1] is one scale for each output; the config says compressed-tensors "
        f"(Fp8LinearMethod), with a scale for each block of 128 x 128. {WRONG}",
        config=of("fp8-block"),
    ),
    "block does not divide": Case(
        "fp8-block",
        f"{QKV}: Weight output_partition_size = 64 is not divisible by weight quantization block_n = 128.",
        error=ValueError,
        tp_size=2,
    ),
    "groups are larger than the config says": Case(
        "w4a16",
        f"{DOWN}.weight_scale: [256, 4] is a scale for each group of 128 inputs; the config says compressed-tensors "
        f"(CompressedTensorsWNA16Method), with a scale for each group of 64 inputs. {WRONG}",
        config=weights(group_size=64),
    ),
    "group does not divide": Case(
        "w4a16",
        f"{QKV}: Weight input_size_per_partition=256 is not divisible by group_size=96.",
        config=weights(group_size=96),
        error=ValueError,
    ),
    "words hold fewer bits than the config says": Case(
        "w4a16",
        f"{DOWN}.weight_packed: [256, 64] int32 is 4 bits for each of 512 inputs; the config says compressed-tensors "
        f"(CompressedTensorsWNA16Method), with 8 bits for each of 512 inputs. {WRONG}",
        config=weights(num_bits=8),
    ),
    "words are packed along the other dimension": Case(
        "w4a16",
        f"{DOWN}.qweight: [64, 256] int32 is 4 bits for each of 512 inputs, packed along the inputs, as GPTQ does; the "
        f"config says awq (AWQLinearMethod). {WRONG}",
        as_gptq,
        quantization(quant_method="awq", bits=4, group_size=128, zero_point=True),
    ),
    "groups are in the order of activations, by the tensors": Case(
        "w4a16",
        f"{DOWN}.weight_g_idx: the groups of these weights are in the order of activations (act-order), which is not "
        "supported: quantise with static groups",
        added(activation_order),
    ),
    "groups are in the order of activations, by the config": Case(
        "w4a16",
        "GPTQ group activation ordering (desc_act=True) is no longer supported.",
        as_gptq,
        quantization(quant_method="gptq", bits=4, group_size=128, desc_act=True, sym=True),
        ValueError,
    ),
    "scales of activations are static and the config says dynamic": Case(
        "fp8",
        f"{DOWN}.input_scale: scales of activations, which are static on disk; the config says that they are dynamic",
        config=lambda config: [
            group["input_activations"].update(dynamic=True)
            for group in config["quantization_config"]["config_groups"].values()
        ],
    ),
    "scales of activations are dynamic and the config says static": Case(
        "fp8",
        f"{DOWN}.input_scale: the config says that scales of activations are static, and the checkpoint has none",
        without("input_scale"),
    ),
    "weights are integers and the config says FP8": Case(
        "w8a8",
        f"{DOWN}.weight is int8; the config says compressed-tensors (Fp8LinearMethod). {WRONG}",
        config=of("fp8-dynamic"),
    ),
    "weights are FP8 and the config says integers": Case(
        "fp8-dynamic",
        f"{DOWN}.weight is float8_e4m3fn; the config says compressed-tensors (Int8LinearMethod). {WRONG}",
        config=of("w8a8"),
    ),
    "scales are bare exponents": Case(
        "fp8-block",
        f"{DOWN}.weight_scale is uint8, exponents as those of MX formats; the config says compressed-tensors",
        changed("weight_scale", lambda scale: scale.float().to(torch.float8_e8m0fnu).view(torch.uint8)),
    ),
    "scales are those of another format of 4 bits": Case(
        "nvfp4a16",
        f"{DOWN}.weight_global_scale: scales of NVFP4 of compressed-tensors; the config says compressed-tensors (",
        config=of("mxfp4a16"),
    ),
}


def break_checkpoint(folder: Path, out: Path, case: Case) -> Path:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(file)
    config = json.loads((folder / "config.json").read_text())
    if case.config is not None:
        wants_folder = case.config.__code__.co_argcount == 2
        case.config(config, folder) if wants_folder else case.config(config)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(case.tensors(tensors), out / "model.safetensors")
    return out


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What loads have begun to read."""
    begun: list[object] = []
    start = Program._start_segment

    def noting(program: Program, *args: Any, **kwargs: Any) -> None:
        begun.append(program)
        start(program, *args, **kwargs)

    monkeypatch.setattr(Program, "_start_segment", noting)
    return begun


@pytest.mark.parametrize("name", CASES)
def test_error_tells_the_tensor_what_was_expected_and_the_cause_before_weights_are_read(
    tmp_path: Path, shared_checkpoints: Path, segments: list[object], name: str
) -> None:
    case = CASES[name]
    folder = break_checkpoint(shared_checkpoints / case.checkpoint, tmp_path / "broken", case)
    with pytest.raises(case.error) as caught:
        load_model(
            folder,
            parallel=ParallelConfig(tp_size=case.tp_size),
            config=weightlift.LoadConfig(coverage_wait_seconds=60),
        )
    assert case.text in str(caught.value)
    assert not segments


@pytest.mark.parametrize("checkpoint", sorted({case.checkpoint for case in CASES.values()}))
def test_checkpoint_that_is_not_broken_is_read(
    tmp_path: Path, shared_checkpoints: Path, segments: list[object], checkpoint: str
) -> None:
    load_model(break_checkpoint(shared_checkpoints / checkpoint, tmp_path / "whole", Case(checkpoint, "")))
    assert segments
