"""`fast_load` of what transformers writes, into its models and into ones whose author has named things differently."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from weightlift import CheckpointMismatchError, fast_load
from weightlift.model.mapping import WeightsMapper
from weightlift.model.router import AutoWeightsLoader

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NUM_EXPERTS = 4


def make(kind: str, seed: int, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()  # type: ignore[no-any-return]


def save(model: Any, folder: Path) -> dict[str, Tensor]:
    """Writes it in several shards, and gives what is on disk."""
    model.save_pretrained(folder, max_shard_size="20KB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


def assert_same_model(actual: nn.Module, expected: nn.Module) -> None:
    state = actual.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
    tokens = torch.arange(2, 20)[None]
    with torch.no_grad():
        assert torch.equal(actual(tokens).logits, expected(tokens).logits)


@pytest.mark.parametrize("order", ["file", "module"])
@pytest.mark.parametrize(("kind", "options"), [("Llama", {"tie_word_embeddings": True}), ("Llama", {}), ("Phi3", {})])
def test_model_of_transformers_is_filled(tmp_path: Path, kind: str, options: dict[str, Any], order: Any) -> None:
    saved_model, model = make(kind, 1, **options), make(kind, 2, **options)
    saved = save(saved_model, tmp_path)
    report = fast_load(model, tmp_path, order=order)
    assert_same_model(model, saved_model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == bool(options)
    assert ("lm_head.weight" in saved) != bool(options)
    assert (report.missing_keys, report.unexpected_keys, report.skipped) == ([], [], {})
    assert report.bytes_needed == sum(tensor.nbytes for tensor in saved.values())


def test_stream_into_a_model_of_transformers(tmp_path: Path) -> None:
    saved_model, model = make("Llama", 1, tie_word_embeddings=True), make("Llama", 2, tie_word_embeddings=True)
    saved = save(saved_model, tmp_path)
    assert AutoWeightsLoader(model).load_weights(saved.items()) == set(saved)
    assert_same_model(model, saved_model)


def test_untied_head_under_a_tied_config_is_kept(tmp_path: Path) -> None:
    saved_model, model = make("Llama", 1, tie_word_embeddings=False), make("Llama", 2, tie_word_embeddings=True)
    save(saved_model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fast_load(model, tmp_path)
    assert_same_model(model, saved_model)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_head_that_equals_the_embedding_stays_tied(tmp_path: Path) -> None:
    saved_model, model = make("Llama", 1, tie_word_embeddings=False), make("Llama", 2, tie_word_embeddings=True)
    saved_model.lm_head.weight.data.copy_(saved_model.model.embed_tokens.weight)
    save(saved_model, tmp_path)
    fast_load(model, tmp_path)
    assert_same_model(model, saved_model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_mixtral_of_transformers_keeps_all_experts_in_one(tmp_path: Path) -> None:
    saved_model, model = (make("Mixtral", seed, num_local_experts=NUM_EXPERTS) for seed in (1, 2))
    save(saved_model, tmp_path)
    experts = {
        f".block_sparse_moe.experts.{i}.{part}.weight": (f".mlp.experts.{name}", (i, half))
        for i in range(NUM_EXPERTS)
        for part, name, half in (("w1", "gate_up_proj", 0), ("w3", "gate_up_proj", 1), ("w2", "down_proj", 0))
    }
    mapper = WeightsMapper(orig_to_new_stacked=experts, orig_to_new_substr={".block_sparse_moe.gate.": ".mlp.gate."})

    def load_expert(parameter: nn.Parameter, loaded: Tensor, shard_id: tuple[int, int]) -> None:
        expert, half = shard_id
        rows = loaded.shape[0]
        parameter.data[expert].narrow(0, half * rows, rows).copy_(loaded)

    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.weight_loader = load_expert
    report = fast_load(model, tmp_path, mapper=mapper)
    assert_same_model(model, saved_model)
    assert (report.num_forced, report.gaps, report.double_writes) == (0, [], [])


def test_parts_of_a_fused_model_are_told_with_what_would_do(tmp_path: Path) -> None:
    save(make("Llama", 1), tmp_path)
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(make("Phi3", 2), tmp_path)
    text = str(caught.value)
    for part in ("k_proj (qkv_proj)", "q_proj (qkv_proj)", "up_proj (gate_up_proj)"):
        assert part in text
    assert "mapper=WeightsMapper(orig_to_new_stacked={'k_proj': ('qkv_proj', shard_id)})" in text


def test_other_architecture_is_told_with_what_is_there(tmp_path: Path) -> None:
    save(make("Mixtral", 1, num_local_experts=NUM_EXPERTS), tmp_path)
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(make("Llama", 2), tmp_path)
    assert (
        "There is no module or parameter named 'model.layers.0.block_sparse_moe' in LlamaForCausalLM. The available "
        "parameters belonging to model.layers.0 (LlamaDecoderLayer) are: model.layers.0.self_attn.q_proj.weight, "
        in str(caught.value)
    )


# ---- a model whose author has named things differently


def house_model(saved: dict[str, Tensor], mapper: WeightsMapper, loaders: dict[str, Any]) -> nn.Module:
    """Modules with the names that the mapper gives; fused parameters are as large as their parts together."""
    rows: dict[str, int] = {}
    shapes: dict[str, torch.Size] = {}
    for name, tensor in saved.items():
        for new, _ in mapper.map_name(name):
            rows[new] = rows.get(new, 0) + tensor.shape[0]
            shapes[new] = tensor.shape
    root = nn.Module()
    for name, shape in shapes.items():
        module = root
        *path, last = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(last, nn.Parameter(torch.zeros(rows[name], *shape[1:])))
        loader = next((loader for part, loader in loaders.items() if part in name), None)
        if loader is not None:
            module._parameters[last].weight_loader = loader  # type: ignore[union-attr]
    return root


def test_llama_into_a_house_engine(tmp_path: Path) -> None:
    saved = save(make("Llama", 1), tmp_path)
    mapper = WeightsMapper(
        orig_to_new_regex={re.compile(r"^model\.layers\.(\d+)\."): r"blocks.\1."},
        orig_to_new_substr={".self_attn.": ".attention.", ".input_layernorm.": ".norm_1.", "rotary": None},
        orig_to_new_stacked={
            ".q_proj": (".qkv", "q"),
            ".k_proj": (".qkv", "k"),
            ".v_proj": (".qkv", "v"),
            ".gate_proj": (".gate_up", 0),
            ".up_proj": (".gate_up", 1),
        },
        orig_to_new_prefix={"model.embed_tokens": "embedding", "model.": "", "lm_head.": None},
    )
    heads = {"q": (0, 32), "k": (32, 16), "v": (48, 16)}

    def load_heads(parameter: nn.Parameter, loaded: Tensor, shard_id: str) -> None:
        parameter.data.narrow(0, *heads[shard_id]).copy_(loaded)

    def load_half(parameter: nn.Parameter, loaded: Tensor, shard_id: int) -> None:
        parameter.data.chunk(2, 0)[shard_id].copy_(loaded)

    model = house_model(saved, mapper, {"qkv": load_heads, "gate_up": load_half})
    report = fast_load(model, tmp_path, mapper=mapper)
    state = model.state_dict()
    assert set(state) >= {"embedding.weight", "norm.weight", "blocks.1.attention.qkv.weight", "blocks.0.norm_1.weight"}
    for i in range(2):
        parts = [saved[f"model.layers.{i}.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(state[f"blocks.{i}.attention.qkv.weight"], torch.cat(parts))
        halves = [saved[f"model.layers.{i}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(state[f"blocks.{i}.mlp.gate_up.weight"], torch.cat(halves))
        assert torch.equal(state[f"blocks.{i}.norm_1.weight"], saved[f"model.layers.{i}.input_layernorm.weight"])
    assert report.skipped == {"lm_head.weight": "prefix 'lm_head.': None"}
    assert (report.num_forced, report.gaps, report.double_writes) == (0, [], [])


@pytest.mark.parametrize("kind", ["Llama", "Phi3"])
def test_one_map_without_dots_for_parts_and_for_what_is_fused_on_disk(tmp_path: Path, kind: str) -> None:
    saved = save(make(kind, 1), tmp_path)
    mapper = WeightsMapper(orig_to_new_stacked={f"{part}_proj": ("qkv_proj", part) for part in "qkv"})
    heads = {None: (0, 64), "q": (0, 32), "k": (32, 16), "v": (48, 16)}

    def load_heads(parameter: nn.Parameter, loaded: Tensor, shard_id: str | None = None) -> None:
        parameter.data.narrow(0, *heads[shard_id]).copy_(loaded)

    model = house_model(saved, mapper, {"qkv_proj": load_heads})
    fast_load(model, tmp_path, mapper=mapper)
    for i in range(2):
        prefix = f"model.layers.{i}.self_attn"
        names = [f"{prefix}.qkv_proj.weight"] if kind == "Phi3" else [f"{prefix}.{p}_proj.weight" for p in "qkv"]
        assert torch.equal(model.state_dict()[f"{prefix}.qkv_proj.weight"], torch.cat([saved[n] for n in names]))
