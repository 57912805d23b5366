"""Packed integer weights in plain torch: what the tools of GPTQ, AWQ and compressed-tensors write, and stands for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from quant_models import tensors_of
from torch import Tensor

AWQ_COLUMNS = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}  # of the fields of a word, the lowest first


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """(K, N) to int32 (K * bits / 32, N), the lowest field first."""
    per_word = 32 // bits
    words = sum(values[i::per_word].long() << (bits * i) for i in range(per_word))
    return torch.as_tensor(words).to(torch.int32)  # wraps


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    per_word = 32 // bits
    values = torch.empty(words.shape[0] * per_word, words.shape[1], dtype=torch.long)
    for i in range(per_word):
        values[i::per_word] = (words.long() >> (bits * i)) & (2**bits - 1)
    return values


def pack_awq(values: Tensor, bits: int) -> Tensor:
    """(rows, N) to int32 (rows, N * bits / 32), interleaved."""
    per_word = 32 // bits
    words = sum(values[:, column::per_word].long() << (bits * i) for i, column in enumerate(AWQ_COLUMNS[bits]))
    return torch.as_tensor(words).to(torch.int32)


def unpack_awq(words: Tensor, bits: int) -> Tensor:
    per_word = 32 // bits
    values = torch.empty(words.shape[0], words.shape[1] * per_word, dtype=torch.long)
    for i, column in enumerate(AWQ_COLUMNS[bits]):
        values[:, column::per_word] = (words.long() >> (bits * i)) & (2**bits - 1)
    return values


def quantized(weight: Tensor, bits: int, group_size: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Integers (K, N), scales (G, N) of bfloat16, zero points (G, N) of a weight (N, K)."""
    size = weight.shape[1] if group_size == -1 else group_size
    groups = weight.float().T.reshape(-1, size, weight.shape[0])
    low, high = groups.amin(1), groups.amax(1)
    if symmetric:
        scales = (torch.maximum(high, -low) / (2 ** (bits - 1) - 1)).bfloat16()
        zero_points = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = ((high - low) / (2**bits - 1)).bfloat16()
        zero_points = (-low / scales.float()).round().clamp(0, 2**bits - 1)
    values = (groups / scales.float().unsqueeze(1)).round() + zero_points.float().unsqueeze(1)
    return values.clamp(0, 2**bits - 1).long().flatten(0, 1), scales, zero_points.long()


def expanded(values: Tensor, scales: Tensor, zero_points: Tensor | int) -> Tensor:
    """The weight (N, K) that these stand for, float32."""
    size = values.shape[0] // scales.shape[0]
    if isinstance(zero_points, Tensor):
        zero_points = zero_points.float().repeat_interleave(size, 0)
    return ((values.float() - zero_points) * scales.float().repeat_interleave(size, 0)).T


def quantize_checkpoint(
    source: Path,
    folder: Path,
    config: dict[str, Any],
    quantize: Callable[[Tensor], Mapping[str, Tensor]],
    *,
    vocab_size: int = 1024,
) -> Path:
    """Writes the first layer of a Llama, and what is around it, its projections quantised; so is the head if `config`
    says so."""
    fields = json.loads((source / "config.json").read_text())
    fields |= {"num_hidden_layers": 1, "quantization_config": config, "vocab_size": vocab_size}
    tensors = {}
    for name, tensor in tensors_of(source).items():
        if ".layers." in name and ".layers.0." not in name:
            continue
        if name.endswith("_proj.weight") or (name == "lm_head.weight" and config.get("lm_head")):
            layer = name.removesuffix(".weight")
            tensors |= {
                f"{layer}.{suffix}": part.contiguous() for suffix, part in quantize(tensor[:vocab_size]).items()
            }
        else:
            tensors[name] = tensor[:vocab_size]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
