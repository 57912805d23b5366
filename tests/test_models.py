"""Reference models: loaded in parts, by ranks, they compute what transformers computes with the whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import WriteCheckpoint
from ranks import run_ranks
from safetensors.torch import load_file

from weightlift import CheckpointNotFoundError
from weightlift.checkpoint import locate
from weightlift.model.model_config import ConfigError
from weightlift.model.parallel import ParallelConfig
from weightlift.model.sharded_state import save_sharded_state
from weightlift.model.skeleton import load_model

# Sums of up to 128 products in another order; logits are of the order of 1.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}

COMMON = {
    "vocab_size": 100,  # no multiple of the padding of 64
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
DEEPSEEK = COMMON | {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
MODELS = {
    "llama": (transformers.LlamaConfig, COMMON),
    "llama_biases": (transformers.LlamaConfig, COMMON | {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": (transformers.LlamaConfig, COMMON | {"tie_word_embeddings": True}),
    "llama_rope_llama3": (transformers.LlamaConfig, COMMON | {"rope_parameters": LLAMA3}),
    "llama_head_dim": (transformers.LlamaConfig, COMMON | {"head_dim": 12}),
    "llama_window_that_it_has_not": (transformers.LlamaConfig, COMMON | {"sliding_window": 5}),
    "mistral_window": (transformers.MistralConfig, COMMON | {"sliding_window": 5}),
    "qwen2": (transformers.Qwen2Config, COMMON),
    "qwen2_window": (
        transformers.Qwen2Config,
        COMMON | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, COMMON | {"head_dim": 16}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        COMMON
        | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3_moe_window": (
        transformers.Qwen3MoeConfig,
        COMMON
        | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "mixtral": (transformers.MixtralConfig, COMMON | {"num_local_experts": 4}),
    "deepseek": (transformers.DeepseekV3Config, DEEPSEEK),
    "deepseek_yarn_no_q_latent": (
        transformers.DeepseekV3Config,
        DEEPSEEK | {"q_lora_rank": None, "rope_parameters": YARN, "rope_interleave": False},
    ),
    "phi3": (transformers.Phi3Config, COMMON),
    "phi3_longrope": (
        transformers.Phi3Config,
        COMMON | {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE | {"partial_rotary_factor": 1.0}},
    ),
}
HAS_EXPERTS = ["qwen3_moe", "mixtral", "deepseek"]


@dataclasses.dataclass
class Reference:
    """A checkpoint, what goes in, and the logits that transformers makes of it."""

    folder: Path
    tokens: torch.Tensor
    logits: torch.Tensor


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def make(name: str) -> Reference:
        if name not in made:
            make_config, fields = MODELS[name]
            folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(len(made))
            model = transformers.AutoModelForCausalLM.from_config(make_config(**fields)).float().eval()
            with torch.no_grad():
                for parameter in [*model.parameters(), *model.buffers()]:
                    # Biases and norms, too: what is 0 or 1 everywhere would hide that it went to a wrong place.
                    if parameter.dim() == 1:
                        parameter.add_(0.2 * torch.randn_like(parameter))
                    elif parameter.is_floating_point():
                        parameter.copy_(0.1 * torch.randn_like(parameter))
            model.save_pretrained(folder)
            # As load_model reads it: with frequencies of rotary embeddings that were not changed above.
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            tokens = torch.randint(0, 100, (2, 24))
            with torch.no_grad():
                made[name] = Reference(folder, tokens, model(tokens).logits)
        return made[name]

    return make


def ranks(tp_size: int, *, ep_size: int = 1, pp_rank: int = 0, pp_size: int = 1) -> list[ParallelConfig]:
    """The ranks of a pipeline stage; those that share experts are those that share layers, as in vLLM."""
    return [
        ParallelConfig(
            tp_rank=rank % tp_size,
            tp_size=tp_size,
            ep_rank=rank % ep_size,
            ep_size=ep_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
        )
        for rank in range(max(tp_size, ep_size))
    ]


def run_together(
    folder: Path, inputs: torch.Tensor, parallels: list[ParallelConfig], load_format: str | None = None
) -> list[torch.Tensor]:
    """What each rank computes, with the model that it has loaded."""

    def run(thread: ParallelConfig) -> torch.Tensor:
        group = thread.tp_group
        parallel = dataclasses.replace(parallels[thread.tp_rank], tp_group=group, ep_group=group)
        return load_model(folder, parallel=parallel, load_format=load_format)(inputs)

    return run_ranks(len(parallels), run)


def assert_all_close(outputs: list[torch.Tensor], expected: torch.Tensor) -> None:
    for output in outputs:
        torch.testing.assert_close(output, expected, **TOLERANCE)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_tensor_parallelism_compute_the_logits_of_transformers(
    reference: Callable[[str], Reference], name: str, tp_size: int
) -> None:
    whole = reference(name)
    assert_all_close(run_together(whole.folder, whole.tokens, ranks(tp_size)), whole.logits)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", HAS_EXPERTS)
def test_ranks_of_expert_parallelism_compute_the_logits_of_transformers(
    reference: Callable[[str], Reference], name: str, tp_size: int
) -> None:
    whole = reference(name)
    assert_all_close(run_together(whole.folder, whole.tokens, ranks(tp_size, ep_size=2)), whole.logits)


@pytest.mark.parametrize("name", MODELS)
def test_stages_of_a_pipeline_compute_the_logits_of_transformers_in_turn(
    reference: Callable[[str], Reference], name: str
) -> None:
    whole = reference(name)
    outputs = [whole.tokens]
    for stage in range(2):
        outputs = run_together(whole.folder, outputs[0], ranks(2, pp_rank=stage, pp_size=2))
    assert_all_close(outputs, whole.logits)


@pytest.mark.parametrize("name", ["llama_rope_llama3", "deepseek_yarn_no_q_latent", "phi3_longrope"])
def test_rotary_embeddings_as_older_configs_spell_them_are_the_same(
    reference: Callable[[str], Reference], tmp_path: Path, name: str
) -> None:
    whole = reference(name)
    config = json.loads((whole.folder / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(whole.folder / "model.safetensors")
    assert_all_close(run_together(tmp_path, whole.tokens, ranks(1)), whole.logits)


def test_a_window_that_is_not_switched_on_is_none(reference: Callable[[str], Reference], tmp_path: Path) -> None:
    whole = reference("qwen2")
    config = json.loads((whole.folder / "config.json").read_text())
    for name in ("use_sliding_window", "max_window_layers", "layer_types"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 5}))
    (tmp_path / "model.safetensors").symlink_to(whole.folder / "model.safetensors")
    assert_all_close(run_together(tmp_path, whole.tokens, ranks(1)), whole.logits)


@pytest.mark.parametrize("name", ["qwen3_moe_window", "mixtral"])
def test_experts_with_another_activation_are_refused(
    reference: Callable[[str], Reference], tmp_path: Path, name: str
) -> None:
    config = json.loads((reference(name).folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match="hidden_act is 'gelu'; the models here have 'silu'"):
        load_model(tmp_path)


def test_an_original_length_beside_the_rope_parameters_goes_before_that_in_them(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    whole = reference("phi3_longrope")
    config = json.loads((whole.folder / "config.json").read_text())
    assert config["original_max_position_embeddings"] == 16
    config["rope_parameters"]["original_max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(whole.folder / "model.safetensors")
    assert_all_close(run_together(tmp_path, whole.tokens, ranks(1)), whole.logits)


def test_draft_layers_behind_the_last_layer_are_left_out(
    reference: Callable[[str], Reference], tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    whole = reference("deepseek")
    tensors = load_file(whole.folder / "model.safetensors")
    draft = {"model.layers.3.eh_proj.weight": torch.ones(2, 2), "model.layers.3.mlp.gate_proj.weight": torch.ones(2, 2)}
    folder = write_checkpoint(tmp_path, tensors | draft)
    shutil.copy(whole.folder / "config.json", folder)
    assert load_model(folder).load_report.skipped == dict.fromkeys(draft, "prefix 'model.layers.3.': None")
    assert_all_close(run_together(folder, whole.tokens, ranks(1)), whole.logits)


def test_shards_with_experts_of_other_ranks_alone_need_not_be_there(
    reference: Callable[[str], Reference], tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    whole = reference("mixtral")
    tensors = load_file(whole.folder / "model.safetensors")
    remote = [name for name in tensors if ".experts.2." in name or ".experts.3." in name]
    folder = write_checkpoint(tmp_path, tensors, [[name for name in tensors if name not in remote], remote])
    shutil.copy(whole.folder / "config.json", folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    here, there = ranks(1, ep_size=2)
    expected = load_model(whole.folder, parallel=here).state_dict()
    torch.testing.assert_close(load_model(folder, parallel=here).state_dict(), expected, rtol=0, atol=0)
    with pytest.raises(CheckpointNotFoundError, match="model-00002-of-00002"):
        load_model(folder, parallel=there)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_slices_of_ranks_that_share_experts_are_saved_and_loaded(
    reference: Callable[[str], Reference], tmp_path: Path, tp_size: int
) -> None:
    whole = reference("qwen3_moe")
    shutil.copy(whole.folder / "config.json", tmp_path)
    for parallel in ranks(tp_size, ep_size=2):
        save_sharded_state(load_model(whole.folder, parallel=parallel), tmp_path, parallel=parallel)
    outputs = run_together(tmp_path, whole.tokens, ranks(tp_size, ep_size=2), load_format="sharded_state")
    assert_all_close(outputs, whole.logits)


# ---- what a rank reads

LARGE = COMMON | {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts whose tensors are large against blocks of the disk."""
    folder = tmp_path_factory.mktemp("large")
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**LARGE)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def sizes_of_files(folder: Path) -> dict[str, int]:
    return {name: entry.nbytes for name, entry in locate(folder).tensors.items()}


def test_a_rank_of_tensor_parallelism_reads_its_share_of_what_is_cut_by_rows(large: Path) -> None:
    expected_bytes = 0.0
    for name, size in sizes_of_files(large).items():
        is_whole = name.endswith(("norm.weight", "gate.weight"))
        # Cut by columns: rows are read whole, of which there is a part for every rank.
        is_whole |= name.endswith(("o_proj.weight", "down_proj.weight"))
        expected_bytes += size if is_whole else size / 4
    for parallel in ranks(4):
        report = load_model(large, parallel=parallel).load_report
        assert report.bytes_needed <= report.bytes_read <= 1.05 * expected_bytes


def test_a_rank_of_expert_parallelism_reads_its_experts_and_no_others(large: Path) -> None:
    sizes = sizes_of_files(large)
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    expected_bytes = sum(sizes.values()) - of_experts + of_experts / 4
    assert of_experts > 0.5 * sum(sizes.values())
    for parallel in ranks(1, ep_size=4):
        report = load_model(large, parallel=parallel).load_report
        assert report.bytes_needed == expected_bytes
        assert report.bytes_read <= 1.05 * expected_bytes
        assert len([name for name in report.skipped if ".experts." in name]) == 2 * 12 * 3


def test_a_pipeline_stage_reads_its_layers_and_no_others(large: Path) -> None:
    sizes = sizes_of_files(large)
    for stage, prefixes in enumerate(
        (("model.embed_tokens.", "model.layers.0."), ("model.layers.1.", "model.norm.", "lm_head."))
    ):
        report = load_model(large, parallel=ParallelConfig(pp_rank=stage, pp_size=2)).load_report
        expected_bytes = sum(size for name, size in sizes.items() if name.startswith(prefixes))
        assert report.bytes_needed == expected_bytes
        assert report.bytes_read <= 1.05 * expected_bytes
