"""Whole models with quantised experts: each rank loads its part, and they compute what the dequantised model does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quant_experts import quantize_fp8, quantize_int8, quantize_mx, quantize_packed
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

from weightlift.model.experts import FusedMoE
from weightlift.model.parallel import ParallelConfig
from weightlift.model.skeleton import load_model

COMMON = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {"head_dim": 32, "num_experts": 4, "moe_intermediate_size": 128}),
    "deepseek": (
        transformers.DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 128,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


def compressed_tensors(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "strategy": "group"} | weights, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*layers.0.mlp.(gate|up|down)_proj"],
    }


# What is not one of the routed experts stays as it is.
OTHERS = ["self_attn", "shared_experts", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "lm_head"]
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]]] = {
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": OTHERS},
        lambda weight: quantize_fp8(weight, "tensor"),
    ),
    "fp8_block": (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [64, 64],
            "modules_to_not_convert": OTHERS,
        },
        lambda weight: quantize_fp8(weight, "block", block=(64, 64)),
    ),
    "awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": OTHERS,
        },
        lambda weight: quantize_packed(weight, "awq", num_bits=4, group_size=32, has_zero_points=True),
    ),
    "gptq": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "desc_act": False,
            "modules_in_block_to_quantize": [["experts"]],
            "dynamic": {"-:.*shared_experts": {}},
        },
        lambda weight: quantize_packed(weight, "gptq", num_bits=4, group_size=32, has_zero_points=False),
    ),
    "pack-quantized": (
        compressed_tensors("pack-quantized", num_bits=4, type="int", group_size=32, symmetric=False),
        lambda weight: quantize_packed(weight, "compressed-tensors", num_bits=4, group_size=32, has_zero_points=True),
    ),
    "int8": (
        compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel"),
        quantize_int8,
    ),
    "mxfp4": (
        compressed_tensors("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        lambda weight: quantize_mx(weight, "mxfp4"),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*", "*lm_head*"]},
        lambda weight: quantize_mx(weight, "modelopt"),
    ),
}


@dataclasses.dataclass
class Checkpoint:
    folder: Path
    tokens: Tensor
    logits: Tensor  # of the dequantised model


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Checkpoint]:
    made: dict[tuple[str, str], Checkpoint] = {}

    def make(model: str, form: str) -> Checkpoint:
        if (model, form) not in made:
            made[model, form] = write(tmp_path_factory.mktemp(f"{model}-{form}"), model, form)
        return made[model, form]

    return make


def write(folder: Path, name: str, form: str) -> Checkpoint:
    """A model of random weights, its experts quantised; and beside it, in `dequantized`, what these stand for."""
    make_config, fields = MODELS[name]
    torch.manual_seed(0)
    config = make_config(**COMMON | fields, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    whole = folder / "dequantized"
    model.save_pretrained(whole)
    quantization, quantize = FORMATS[form]
    tensors, numbers = {}, load_file(whole / "model.safetensors")
    for key, tensor in list(numbers.items()):
        module, _, what = key.rpartition(".")
        if ".experts." not in key:
            tensors[key] = tensor
            continue
        assert what == "weight"
        assert tensor.dim() == 2, key
        parts, values = quantize(tensor)
        numbers[key] = values
        tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    save_file(numbers, whole / "model.safetensors", metadata={"format": "pt"})
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    fields = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))
    tokens = torch.randint(0, 64, (2, 12))
    with torch.no_grad():
        return Checkpoint(folder, tokens, load_model(whole)(tokens))


def run_together(checkpoint: Checkpoint, tp_size: int, ep_size: int, target: str, dtype: torch.dtype) -> list[Tensor]:
    def run(thread: ParallelConfig) -> Tensor:
        rank, group = thread.tp_rank, thread.tp_group
        parallel = ParallelConfig(
            tp_rank=rank % tp_size,
            tp_size=tp_size,
            tp_group=group,
            ep_rank=rank % ep_size,
            ep_size=ep_size,
            ep_group=group,
        )
        model = load_model(checkpoint.folder, parallel=parallel, target=target, dtype=dtype)
        assert model.load_report.missing_keys == []
        (method,) = {type(layer.quant_method).__name__ for layer in model.modules() if isinstance(layer, FusedMoE)}
        assert method != "UnquantizedFusedMoEMethod"
        return model(checkpoint.tokens).float()

    return run_ranks(max(tp_size, ep_size), run)


CASES = [
    ("mixtral", "fp8", "plain"),
    ("mixtral", "fp8", "fnuz"),
    ("mixtral", "gptq", "marlin"),
    ("qwen3_moe", "fp8_block", "marlin"),
    ("qwen3_moe", "awq", "marlin"),
    ("qwen3_moe", "pack-quantized", "plain"),
    ("qwen3_moe", "pack-quantized", "marlin"),
    ("deepseek", "fp8_block", "fnuz"),
    ("deepseek", "gptq", "plain"),
    ("mixtral", "int8", "plain"),
    ("mixtral", "mxfp4", "marlin"),
    ("mixtral", "modelopt", "plain"),
]


@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(("model", "form", "target"), CASES)
def test_ranks_compute_the_logits_of_the_dequantised_model(
    checkpoint_of: Callable[[str, str], Checkpoint], model: str, form: str, target: str, tp_size: int, ep_size: int
) -> None:
    checkpoint = checkpoint_of(model, form)
    dtype = torch.bfloat16 if target == "marlin" else torch.float32
    for logits in run_together(checkpoint, tp_size, ep_size, target, dtype):
        if target == "marlin" or form == "fp8":  # what is rounded may send a token to another expert
            error = (logits - checkpoint.logits).norm(dim=-1) / checkpoint.logits.norm(dim=-1)
            assert error.isfinite().all()
            assert error.median() < 0.06
        else:
            torch.testing.assert_close(logits, checkpoint.logits, rtol=1e-4, atol=1e-4)
