"""The largest public models as checkpoints that hold no data: true names, shapes, dtypes and shards, over holes.

Each file of models/ has a model's public config.json, how its checkpoint is dealt to files, and what is published of
that checkpoint, which the one made here has to agree with.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from weightlift.model.model_config import ModelConfig, architecture_of
from weightlift.model.parallel import ParallelConfig
from weightlift.model.quantization.base import read_quantization
from weightlift.model.registry import model_class

FOLDER = Path(__file__).resolve().parent / "models"

Cut = Literal["rows", "columns", "kv heads", "experts' rows", "experts' columns", "none", "unused"]

_ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
# In which order safetensors writes them to a file: by dtype, then by name.
_FILE_ORDER = ("F32", "BF16", "F8_E4M3")


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        dtype: with safetensors' name.
        cut: how the ranks share it, told from what the layer is and not from how it is loaded. "rows": dimension 0
            among those of tensor parallelism; "columns": dimension 1; "kv heads": as rows, as long as there are heads;
            of experts: in expert parallelism each rank has some of them, whole. "none": every rank has it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    cut: Cut

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * _ITEM_BYTES[self.dtype]


class PublicModel:
    """A model that models/ or another such file describes.

    Raises:
        ConfigError: no class builds it, its kind of quantisation is not known, or its checkpoint can't be made here.
    """

    def __init__(self, fields: dict[str, Any], path: str) -> None:
        self.name: str = fields["name"]
        self.config_fields: dict[str, Any] = fields["config"]
        self.published: dict[str, int] = fields.get("published", {})
        self._shards: dict[str, Any] = fields["shards"]
        self._layer_tensors: dict[str, Any] = fields.get("layer_tensors", {})
        self.config = ModelConfig(self.config_fields, path=path)
        model_class(self.config)
        read_quantization(self.config)
        architecture = architecture_of(self.config)
        if architecture not in _LAYERS:
            raise self.config.error(
                f"the tensors of {architecture}'s checkpoints are not known here; known are {', '.join(_LAYERS)}"
            )
        self._make_layer = _LAYERS[architecture]
        self._block = _block_of(self.config)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> PublicModel:
        return cls(json.loads(Path(path).read_text()), os.fspath(path))

    @property
    def num_experts(self) -> int:
        """Of a layer; 0: the model has none."""
        return getattr(self.config, "n_routed_experts", None) or getattr(self.config, "num_experts", None) or 0

    @property
    def num_kv_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads)

    def groups(self) -> Iterator[list[Tensor]]:
        """The tensors by layer, the first with the embedding and the last with norm and head, in the model's order."""
        config = self.config
        vocab = (config.vocab_size, config.hidden_size)
        for number in range(config.num_hidden_layers):
            name = f"model.layers.{number}"
            layer = [Tensor("model.embed_tokens.weight", "BF16", vocab, "rows")] if number == 0 else []
            layer += self._make_layer(self, name, number)
            layer += (
                Tensor(f"{name}.{suffix}", dtype, tuple(shape), "unused")
                for suffix, (dtype, shape) in self._layer_tensors.items()
            )
            if number == config.num_hidden_layers - 1:
                layer.append(Tensor("model.norm.weight", "BF16", (config.hidden_size,), "none"))
                layer.append(Tensor("lm_head.weight", "BF16", vocab, "rows"))
            yield layer
        for number in range(getattr(config, "num_nextn_predict_layers", None) or 0):
            yield self._draft_layer(config.num_hidden_layers + number)

    def _draft_layer(self, number: int) -> list[Tensor]:
        """DeepSeek's layer that predicts one more token. The model here does without."""
        name, hidden = f"model.layers.{number}", self.config.hidden_size
        vocab = (self.config.vocab_size, hidden)
        more: tuple[tuple[str, tuple[int, ...]], ...] = (
            ("embed_tokens", vocab),
            ("enorm", (hidden,)),
            ("hnorm", (hidden,)),
            ("eh_proj", (hidden, 2 * hidden)),
            ("shared_head.norm", (hidden,)),
            ("shared_head.head", vocab),
        )
        layer = list(self._make_layer(self, name, number))
        layer += (Tensor(f"{name}.{part}.weight", "BF16", shape, "none") for part, shape in more)
        return [dataclasses.replace(tensor, cut="unused") for tensor in layer]

    def shards(self) -> list[list[Tensor]]:
        """The tensors of each file. It ends when it holds `shards.full_at_elements`, before it holds more than
        `shards.max_elements`, and behind each group of as many layers as `shards.layers` says; whichever there is."""
        groups = list(self.groups())
        full = self._shards.get("full_at_elements", math.inf)
        limit = self._shards.get("max_elements", math.inf)
        shards: list[list[Tensor]] = []
        first = 0
        for size in self._shards.get("layers", [len(groups)]):
            shards.append([])
            filled = 0
            for tensor in (tensor for group in groups[first : first + size] for tensor in group):
                if shards[-1] and (filled >= full or filled + tensor.num_elements > limit):
                    shards.append([])
                    filled = 0
                shards[-1].append(tensor)
                filled += tensor.num_elements
            first += size
        if first != len(groups):
            raise self.config.error(f"shards.layers are of {first} layers; the checkpoint has {len(groups)}")
        return shards

    def write(self, folder: Path) -> None:
        """Writes the checkpoint: files of true size, of which headers and index alone take space."""
        shards = self.shards()
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = self._shards["file"].format(number=number, count=len(shards))
            _write_shard(folder / file, sorted(shard, key=lambda t: (_FILE_ORDER.index(t.dtype), t.name)))
            weight_map |= dict.fromkeys((tensor.name for tensor in shard), file)
        total = sum(tensor.num_bytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(self.config_fields))

    # ---- what layers are made of

    def weight(self, name: str, rows: int, columns: int, cut: Cut) -> Iterator[Tensor]:
        """That of a linear layer, quantised if the model is: with a scale for each block."""
        if self._block is None:
            yield Tensor(f"{name}.weight", "BF16", (rows, columns), cut)
            return
        yield Tensor(f"{name}.weight", "F8_E4M3", (rows, columns), cut)
        scales = (-(-rows // self._block[0]), -(-columns // self._block[1]))
        yield Tensor(f"{name}.weight_scale_inv", "F32", scales, cut)

    def mlp(self, name: str, size: int, *, of_expert: bool = False) -> Iterator[Tensor]:
        hidden = self.config.hidden_size
        rows, columns = ("experts' rows", "experts' columns") if of_expert else ("rows", "columns")
        yield from self.weight(f"{name}.gate_proj", size, hidden, rows)  # type: ignore[arg-type]
        yield from self.weight(f"{name}.up_proj", size, hidden, rows)  # type: ignore[arg-type]
        yield from self.weight(f"{name}.down_proj", hidden, size, columns)  # type: ignore[arg-type]

    def experts(self, name: str) -> Iterator[Tensor]:
        for number in range(self.num_experts):
            yield from self.mlp(f"{name}.experts.{number}", self.config.moe_intermediate_size, of_expert=True)

    def norms(self, name: str) -> Iterator[Tensor]:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(f"{name}.{norm}.weight", "BF16", (self.config.hidden_size,), "none")


def share_of(tensor: Tensor, parallel: ParallelConfig, *, num_kv_heads: int, num_ranks: int = 1) -> float:
    """Which part of a tensor some neighbouring ranks need together, from 0 to 1."""
    tp_size, ep_size = parallel.tp_size, parallel.ep_size
    if tensor.cut == "unused":
        return 0.0
    if tensor.cut == "kv heads":
        num_parts, ranks_per_part = min(tp_size, num_kv_heads), max(1, tp_size // num_kv_heads)
        return min(1.0, -(-num_ranks // ranks_per_part) / num_parts)
    if tensor.cut.startswith("experts'") and ep_size > 1:
        return min(1.0, num_ranks / ep_size)
    return 1.0 if tensor.cut == "none" else min(1.0, num_ranks / tp_size)


def _deepseek_layer(model: PublicModel, name: str, number: int) -> Iterator[Tensor]:
    config = model.config
    hidden, heads, attention = config.hidden_size, config.num_attention_heads, f"{name}.self_attn"
    nope, rope, v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
    yield from model.weight(f"{attention}.q_a_proj", q_rank, hidden, "none")
    yield Tensor(f"{attention}.q_a_layernorm.weight", "BF16", (q_rank,), "none")
    yield from model.weight(f"{attention}.q_b_proj", heads * (nope + rope), q_rank, "rows")
    yield from model.weight(f"{attention}.kv_a_proj_with_mqa", kv_rank + rope, hidden, "none")
    yield Tensor(f"{attention}.kv_a_layernorm.weight", "BF16", (kv_rank,), "none")
    yield from model.weight(f"{attention}.kv_b_proj", heads * (nope + v), kv_rank, "rows")
    yield from model.weight(f"{attention}.o_proj", hidden, heads * v, "columns")
    mlp = f"{name}.mlp"
    if number < config.first_k_dense_replace:
        yield from model.mlp(mlp, config.intermediate_size)
    else:
        yield Tensor(f"{mlp}.gate.weight", "BF16", (model.num_experts, hidden), "none")
        yield Tensor(f"{mlp}.gate.e_score_correction_bias", "F32", (model.num_experts,), "none")
        yield from model.mlp(f"{mlp}.shared_experts", config.moe_intermediate_size * config.n_shared_experts)
        yield from model.experts(mlp)
    yield from model.norms(name)


def _attention(model: PublicModel, name: str) -> Iterator[Tensor]:
    config = model.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    yield from model.weight(f"{name}.q_proj", heads * size, hidden, "rows")
    yield from model.weight(f"{name}.k_proj", model.num_kv_heads * size, hidden, "kv heads")
    yield from model.weight(f"{name}.v_proj", model.num_kv_heads * size, hidden, "kv heads")
    yield from model.weight(f"{name}.o_proj", hidden, heads * size, "columns")


def _llama_layer(model: PublicModel, name: str, number: int) -> Iterator[Tensor]:
    yield from _attention(model, f"{name}.self_attn")
    yield from model.mlp(f"{name}.mlp", model.config.intermediate_size)
    yield from model.norms(name)


def _qwen3_moe_layer(model: PublicModel, name: str, number: int) -> Iterator[Tensor]:
    config = model.config
    yield from _attention(model, f"{name}.self_attn")
    for part in ("q_norm", "k_norm"):
        yield Tensor(f"{name}.self_attn.{part}.weight", "BF16", (config.head_dim,), "none")
    yield from model.experts(f"{name}.mlp")
    yield Tensor(f"{name}.mlp.gate.weight", "BF16", (config.num_experts, config.hidden_size), "none")
    yield from model.norms(name)


_LAYERS: dict[str, Callable[[PublicModel, str, int], Iterator[Tensor]]] = {
    "DeepseekV3ForCausalLM": _deepseek_layer,
    "LlamaForCausalLM": _llama_layer,
    "Qwen3MoeForCausalLM": _qwen3_moe_layer,
}


def _block_of(config: ModelConfig) -> tuple[int, int] | None:
    """The block that has a scale of its own; None: weights are in BF16."""
    fields = getattr(config, "quantization_config", None)
    if fields is None:
        return None
    block = fields.get("weight_block_size")
    if fields.get("quant_method") != "fp8" or not block:
        raise config.error(
            f"quantization_config is {fields!r}; checkpoints are made here in BF16, and in FP8 with a weight_block_size"
        )
    return block[0], block[1]


def _write_shard(path: Path, tensors: list[Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + offset)
