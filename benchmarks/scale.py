"""How long a checkpoint of DeepSeek-V3's size, 91,000 tensors in FP8, takes to be recorded, planned and reconciled.

Headers and index are real, the 640 GiB of data are holes in the files, the model is built in memory that costs none,
and nothing is read: time and memory are those that weightlift itself takes. Run it from the root of the repository by
`python -m benchmarks.scale`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.data import BUILD, GIB
from benchmarks.measure import in_child
from weightlift.model.formats import mapper_of
from weightlift.model.loader import plan_load
from weightlift.model.model_config import ModelConfig
from weightlift.model.parallel import ParallelConfig
from weightlift.model.skeleton import make_shell
from weightlift.reserved import ReservedMemory

LIMIT_SECONDS, LIMIT_BYTES = 30.0, 2 * GIB

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "quantization_config": {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
BLOCK = (128, 128)  # as in quantization_config
NUM_SHARDS = 163
# Of safetensors, and bytes of an element.
FP8, BF16, F32 = ("F8_E4M3", 1), ("BF16", 2), ("F32", 4)

RANKS = {
    "one rank": ParallelConfig(),
    "tp 3 of 8": ParallelConfig(tp_rank=3, tp_size=8),
    "tp and ep 3 of 8": ParallelConfig(tp_rank=3, tp_size=8, ep_rank=3, ep_size=8),
}

Tensor = tuple[str, tuple[str, int], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Result:
    num_tensors: int
    num_transfers: int
    seconds: float
    cpu_seconds: float  # of all threads
    peak_bytes: int  # of resident memory, with Python and torch


def main() -> None:
    folder = checkpoint()
    print(f"{'':<20} {'tensors':>8} {'transfers':>9} {'time':>9} {'CPU time':>9} {'peak memory':>12}")
    for name, parallel in RANKS.items():
        result = in_child(lambda parallel=parallel: measure(folder, parallel))  # type: ignore[misc]
        within = result.seconds <= LIMIT_SECONDS and result.peak_bytes <= LIMIT_BYTES
        print(
            f"{name:<20} {result.num_tensors:>8} {result.num_transfers:>9} {result.seconds:>7.1f} s "
            f"{result.cpu_seconds:>7.1f} s {result.peak_bytes / GIB:>8.2f} GiB{'' if within else '   over the limit'}"
        )
    print(f"limits: {LIMIT_SECONDS:.0f} s, {LIMIT_BYTES / GIB:.0f} GiB")


def measure(folder: Path, parallel: ParallelConfig) -> Result:
    config = ModelConfig(CONFIG)
    started, cpu_started = time.perf_counter(), time.process_time()
    with ReservedMemory().factories():
        model = make_shell(config, parallel=parallel, dtype=torch.bfloat16, device="cpu")
    report = plan_load(model, folder, mapper=mapper_of(model)).report
    assert not report.missing_keys
    assert not report.gaps
    return Result(
        report.num_tensors,
        report.num_transfers,
        time.perf_counter() - started,
        time.process_time() - cpu_started,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


# ---- the checkpoint


def checkpoint() -> Path:
    """A folder with the checkpoint's headers, index and holes."""
    folder = BUILD / "deepseek-v3-sparse"
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    tensors = list(tensors_of_model())
    share = sum(num_bytes(tensor) for tensor in tensors) / NUM_SHARDS
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if filled >= share * len(shards):
            shards.append([])
        shards[-1].append(tensor)
        filled += num_bytes(tensor)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):06}.safetensors"
        write_shard(unfinished / file, shard)
        weight_map |= dict.fromkeys((name for name, _, _ in shard), file)
    index = {"metadata": {"total_size": filled}, "weight_map": weight_map}
    (unfinished / "model.safetensors.index.json").write_text(json.dumps(index))
    unfinished.rename(folder)
    return folder


def num_bytes(tensor: Tensor) -> int:
    _, (_, item_bytes), shape = tensor
    return math.prod(shape) * item_bytes


def write_shard(path: Path, tensors: list[Tensor]) -> None:
    header, offset = {}, 0
    for tensor in tensors:
        name, (dtype, _), shape = tensor
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, offset + num_bytes(tensor))}
        offset += num_bytes(tensor)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + offset)


def tensors_of_model() -> Iterator[Tensor]:
    """What DeepSeek-V3's checkpoint holds, but for its draft layer, in the order of its files."""
    hidden, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    nope, rope, v = CONFIG["qk_nope_head_dim"], CONFIG["qk_rope_head_dim"], CONFIG["v_head_dim"]
    q_rank, kv_rank = CONFIG["q_lora_rank"], CONFIG["kv_lora_rank"]

    def weight(name: str, rows: int, columns: int) -> Iterator[Tensor]:
        yield f"{name}.weight", FP8, (rows, columns)
        yield f"{name}.weight_scale_inv", F32, (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))

    def mlp(name: str, size: int) -> Iterator[Tensor]:
        yield from weight(f"{name}.gate_proj", size, hidden)
        yield from weight(f"{name}.up_proj", size, hidden)
        yield from weight(f"{name}.down_proj", hidden, size)

    yield "model.embed_tokens.weight", BF16, (CONFIG["vocab_size"], hidden)
    for number in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        yield from weight(f"{attention}.q_a_proj", q_rank, hidden)
        yield f"{attention}.q_a_layernorm.weight", BF16, (q_rank,)
        yield from weight(f"{attention}.q_b_proj", heads * (nope + rope), q_rank)
        yield from weight(f"{attention}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
        yield f"{attention}.kv_a_layernorm.weight", BF16, (kv_rank,)
        yield from weight(f"{attention}.kv_b_proj", heads * (nope + v), kv_rank)
        yield from weight(f"{attention}.o_proj", hidden, heads * v)
        if number < CONFIG["first_k_dense_replace"]:
            yield from mlp(f"{layer}.mlp", CONFIG["intermediate_size"])
        else:
            yield f"{layer}.mlp.gate.weight", BF16, (CONFIG["n_routed_experts"], hidden)
            yield f"{layer}.mlp.gate.e_score_correction_bias", F32, (CONFIG["n_routed_experts"],)
            yield from mlp(f"{layer}.mlp.shared_experts", CONFIG["moe_intermediate_size"] * CONFIG["n_shared_experts"])
            for expert in range(CONFIG["n_routed_experts"]):
                yield from mlp(f"{layer}.mlp.experts.{expert}", CONFIG["moe_intermediate_size"])
        yield f"{layer}.input_layernorm.weight", BF16, (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", BF16, (hidden,)
    yield "model.norm.weight", BF16, (hidden,)
    yield "lm_head.weight", BF16, (CONFIG["vocab_size"], hidden)


if __name__ == "__main__":
    main()
