"""The checkpoints that benchmarks load: written once, by safetensors, into build/bench."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

BUILD = Path(__file__).resolve().parents[1] / "build" / "bench"
GIB = 1 << 30

_HIDDEN, _INTERMEDIATE, _VOCAB = 2048, 5632, 32000
# Weights of one Llama layer of about 1 B parameters, bfloat16: 98 MiB.
_LAYER = {
    "input_layernorm.weight": (_HIDDEN,),
    "mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
    "mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
    "mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
    "post_attention_layernorm.weight": (_HIDDEN,),
    "self_attn.k_proj.weight": (_HIDDEN, _HIDDEN),
    "self_attn.o_proj.weight": (_HIDDEN, _HIDDEN),
    "self_attn.q_proj.weight": (_HIDDEN, _HIDDEN),
    "self_attn.v_proj.weight": (_HIDDEN, _HIDDEN),
}
_LAYER_BYTES = 2 * sum(math.prod(shape) for shape in _LAYER.values())

# What 91,000 tensors of a mixture of experts in FP8 look like, shrunk so that they fit on a small disk: for each weight
# one small scale. A weight is a little larger than what weightlift keeps as a value.
EXPERT_SHAPE = (132, 256)
SCALE_SHAPE = (2, 2)


def llama(gibibytes: float) -> Path:
    """A folder with a Llama-like checkpoint of about that size, in shards of 5 layers."""
    num_layers = round(gibibytes * GIB / _LAYER_BYTES)
    shards: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = []
    for layer in range(num_layers):
        if layer % 5 == 0:
            shards.append({})
        for name, shape in _LAYER.items():
            shards[-1][f"model.layers.{layer}.{name}"] = (shape, torch.bfloat16)
    return _written(f"llama-{gibibytes:g}GiB", shards)


def llama_model(gibibytes: float, *, fp8: bool = False) -> Path:
    """The same as a model that `load_model` builds, with its config, embedding and head.

    With `fp8`, linear layers are in FP8, each with a scale.
    """
    num_layers = max(1, round(gibibytes * GIB / _LAYER_BYTES * (2 if fp8 else 1)))
    shards: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [
        {
            "model.embed_tokens.weight": ((_VOCAB, _HIDDEN), torch.bfloat16),
            "model.norm.weight": ((_HIDDEN,), torch.bfloat16),
            "lm_head.weight": ((_VOCAB, _HIDDEN), torch.bfloat16),
        }
    ]
    for layer in range(num_layers):
        if layer % 5 == 0:
            shards.append({})
        for name, shape in _LAYER.items():
            is_quantized = fp8 and len(shape) == 2
            shards[-1][f"model.layers.{layer}.{name}"] = (
                shape,
                torch.float8_e4m3fn if is_quantized else torch.bfloat16,
            )
            if is_quantized:
                shards[-1][f"model.layers.{layer}.{name}_scale"] = ((), torch.float32)
    folder = _written(f"llama-model-{'fp8-' if fp8 else ''}{num_layers}-layers", shards)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": _VOCAB,
    }
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def small_pieces(num_tensors: int) -> Path:
    """A folder with tensors of 256 x 256 bfloat16, of which a recording takes a small piece each."""
    return _written(f"pieces-{num_tensors}", [{f"t.{i}": ((256, 256), torch.bfloat16) for i in range(num_tensors)}])


def experts(num_tensors: int) -> Path:
    """A folder with num_tensors / 2 expert weights (bfloat16) and as many scales (float32), in four shards."""
    shards = []
    for first in range(0, num_tensors // 2, -(-num_tensors // 8)):
        shard: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for i in range(first, min(first + -(-num_tensors // 8), num_tensors // 2)):
            shard[f"experts.{i:06}.weight"] = (EXPERT_SHAPE, torch.bfloat16)
            shard[f"experts.{i:06}.weight_scale"] = (SCALE_SHAPE, torch.float32)
        shards.append(shard)
    return _written(f"experts-{num_tensors}", shards)


def weights(dtype: torch.dtype, shape: tuple[int, int], num_bytes: int) -> Path:
    """A folder with weights of one shape, about that many bytes together, in one shard."""
    count = max(1, num_bytes // (math.prod(shape) * dtype.itemsize))
    name = f"weights-{str(dtype).removeprefix('torch.')}-{shape[0]}x{shape[1]}-{count}"
    return _written(name, [{f"w.{i}": (shape, dtype) for i in range(count)}])


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _written(name: str, shards: list[dict[str, tuple[tuple[int, ...], torch.dtype]]]) -> Path:
    folder = BUILD / name
    if folder.exists():
        return folder
    num_bytes = sum(math.prod(shape) * dtype.itemsize for shard in shards for shape, dtype in shard.values())
    BUILD.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(BUILD).free
    if free < num_bytes + GIB:
        sys.exit(f"{BUILD} has {free / GIB:.1f} GiB free; {name} takes {num_bytes / GIB:.1f}, and 1 is kept free")
    print(f"writing {name}, {num_bytes / GIB:.2f} GiB ...", file=sys.stderr, flush=True)
    unfinished = folder.with_name(f"{name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    weight_map: dict[str, str] = {}
    for number, (shard, tensors) in enumerate(zip(shards, _random(shards), strict=True), start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, unfinished / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (unfinished / "model.safetensors.index.json").write_text(json.dumps(index))
    unfinished.rename(folder)
    return folder


def _random(shards: list[dict[str, tuple[tuple[int, ...], torch.dtype]]]) -> Iterator[dict[str, Tensor]]:
    """Random finite values, cheaply: random bits with the exponent's top bits cleared."""
    generator = torch.Generator().manual_seed(0)
    for shard in shards:
        tensors = {}
        for name, (shape, dtype) in shard.items():
            num_words = math.prod(shape) * dtype.itemsize // 2
            words = torch.randint(-(1 << 15), 1 << 15, (num_words,), dtype=torch.int16, generator=generator)
            top_bits = 0x4040 if dtype.itemsize == 1 else 0x4000
            tensors[name] = (words & ~top_bits).view(dtype).view(shape)
            if not shape:  # a scale
                tensors[name] = torch.rand(shape, generator=generator) / 512 + 1 / 512
        yield tensors
