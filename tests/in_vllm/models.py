"""Tiny models of the kinds that differ in how they are loaded, written by transformers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _configs() -> dict[str, PreTrainedConfig]:
    return {
        "llama": LlamaConfig(**_SIZES),
        "llama-bin": LlamaConfig(**_SIZES),
        "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
        "qwen3-moe": Qwen3MoeConfig(
            **_SIZES,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=256,
            decoder_sparse_step=1,
            norm_topk_prob=True,
        ),
        "phi3": Phi3Config(**_SIZES),
    }


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    text = ["the quick brown fox jumps over the lazy dog", "weights are lifted from storage into parameters"]
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=1000, special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )


def write_models(folder: Path, *, seed: int) -> None:
    """One checkpoint a subfolder, in shards with an index."""
    tokenizer = _tokenizer()
    for name, config in _configs().items():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 or parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.05)
        path = folder / name
        model.save_pretrained(path, max_shard_size="2MB")
        tokenizer.save_pretrained(path)
        if name.endswith("-bin"):
            _as_pickles(path, model)


def _as_pickles(path: Path, model: torch.nn.Module) -> None:
    """The same checkpoint as older versions of transformers wrote it."""
    for shard in path.glob("*.safetensors*"):
        shard.unlink()
    state = model.state_dict()
    names = list(state)
    weight_map = {}
    for number, held in enumerate((names[::2], names[1::2]), start=1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: state[name] for name in held}, path / file)
        weight_map |= dict.fromkeys(held, file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_models(arguments.folder, seed=arguments.seed)
