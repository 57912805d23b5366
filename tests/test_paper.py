"""The checkpoints of the largest models, without data: what they are made of, and what plans on them say."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import weightlift
from benchmarks import paper
from benchmarks.public_models import FOLDER, PublicModel, share_of
from weightlift.model.parallel import ParallelConfig
from weightlift.model.planning import plan_model
from weightlift.model.skeleton import load_model

MODELS = sorted(path.stem for path in FOLDER.glob("*.json"))
# Sizes that divide by few ranks and blocks, for all architectures.
SMALL = {
    "first_k_dense_replace": 1,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "kv_lora_rank": 128,
    "moe_intermediate_size": 512,
    "n_group": 2,
    "n_routed_experts": 8,
    "num_attention_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 128,
    "topk_group": 1,
    "vocab_size": 512,
}


def fields_of(name: str, **config: Any) -> dict[str, Any]:
    """The description of a model like one of the large ones, in small."""
    fields: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    small = {key: value for key, value in SMALL.items() if key in fields["config"]}
    if fields["config"].get("n_group") == 1:
        small["n_group"] = 1
    shards = {key: value for key, value in fields["shards"].items() if key == "file"}
    del fields["published"]
    return {**fields, "shards": {**shards, "max_elements": 500_000}, "config": {**fields["config"], **small, **config}}


def write_description(path: Path, name: str, **config: Any) -> Path:
    path.write_text(json.dumps(fields_of(name, **config)))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_what_is_published_of_it(name: str) -> None:
    model = PublicModel.of_file(FOLDER / f"{name}.json")
    shards = model.shards()
    made = {
        "num_tensors": sum(map(len, shards)),
        "num_elements": sum(tensor.num_elements for shard in shards for tensor in shard),
        "num_bytes": sum(tensor.num_bytes for shard in shards for tensor in shard),
        "num_shards": len(shards),
    }
    assert model.published == {what: made[what] for what in model.published}
    assert len(model.published) >= 2


def test_the_files_of_deepseek_v3_have_the_published_sizes() -> None:
    sizes = [sum(t.num_bytes for t in shard) for shard in PublicModel.of_file(FOLDER / "deepseek-v3.json").shards()]
    rounded_up = {number: -(-size * 10 // 2**30) / 10 for number, size in enumerate(sizes, start=1)}
    others = {1: 4.9, 12: 1.3, 141: 3.0, 160: 4.9, 163: 6.2} | dict.fromkeys((34, 56, 78, 100, 122), 1.7)
    assert {number: size for number, size in rounded_up.items() if size != 4.1} == others


@pytest.mark.parametrize("name", MODELS)
def test_files_have_their_true_size_and_take_no_space(tmp_path: Path, name: str) -> None:
    model = PublicModel(fields_of(name), "")
    model.write(tmp_path)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == len(model.shards()) > 1
    assert sum(file.stat().st_size for file in files) > sum(t.num_bytes for group in model.groups() for t in group)
    assert sum(file.stat().st_blocks * 512 for file in files) <= len(files) * (64 << 10)
    with weightlift.open_checkpoint(tmp_path) as checkpoint:
        assert {name: tuple(tensor.shape) for name, tensor in checkpoint.items()} == {
            tensor.name: tensor.shape for group in model.groups() for tensor in group
        }


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in MODELS for layout in ("tp1", "tp2", "tp4")]
    + [(name, layout) for name in MODELS if not name.startswith("llama") for layout in ("ep4", "tp2ep4")],
)
def test_a_rank_needs_what_the_shapes_say(tmp_path: Path, name: str, layout: str) -> None:
    model = PublicModel(fields_of(name), "")
    model.write(tmp_path)
    tensors = [tensor for group in model.groups() for tensor in group]
    ranks = paper.Layout.parse(layout)
    for parallel in map(ranks.rank, range(ranks.num_ranks)):
        plan = plan_model(tmp_path, parallel=parallel)
        shares = (tensor.num_bytes * share_of(tensor, parallel, num_kv_heads=model.num_kv_heads) for tensor in tensors)
        assert plan.report.bytes_needed == sum(shares)
        assert plan.report.num_forced == 0  # no loader looks at a value, which would be zero


def test_the_ranks_of_a_node_need_each_byte_once() -> None:
    model = PublicModel(fields_of("qwen3-235b-a22b"), "")
    heads = {tensor.cut: tensor for group in model.groups() for tensor in group}["kv heads"]
    parallel = ParallelConfig(tp_size=8)
    shares = [share_of(heads, parallel, num_kv_heads=2, num_ranks=number) for number in (1, 4, 5, 8)]
    assert shares == [0.5, 0.5, 1.0, 1.0]


def test_a_load_from_holes_gives_zeros_and_reads_what_was_planned(tmp_path: Path) -> None:
    PublicModel(fields_of("deepseek-v3"), "").write(tmp_path)
    parallel = ParallelConfig(tp_rank=1, tp_size=2)
    plan = plan_model(tmp_path, parallel=parallel)
    model = load_model(tmp_path, parallel=parallel)
    report: Any = model.load_report
    assert (report.bytes_needed, report.num_transfers) == (plan.report.bytes_needed, plan.report.num_transfers)
    set_by_the_model = (".attn.k_scale", ".attn.v_scale", ".attn.q_scale", ".attn.prob_scale")
    assert {name for name, parameter in model.named_parameters() if parameter.float().any()} == {
        f"model.layers.{number}.self_attn{name}" for number in range(2) for name in set_by_the_model
    }
    with weightlift.open_checkpoint(tmp_path) as checkpoint:
        scale = checkpoint["model.layers.0.mlp.down_proj.weight_scale_inv"]
        assert torch.equal(scale.float(), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "architecture 'GptOssForCausalLM' is not known"),
        ({"architectures": ["Phi3ForCausalLM"]}, "the tensors of Phi3ForCausalLM's checkpoints are not known here"),
        ({"quantization_config": {"quant_method": "nf5"}}, "quant_method 'nf5' is not known"),
        ({"quantization_config": {"quant_method": "fp8"}}, "in BF16, and in FP8 with a weight_block_size"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    path = write_description(tmp_path / "model.json", "llama-3.1-405b", **config)
    with pytest.raises(SystemExit, match=problem):
        paper.main(["--models", str(path), "--folder", str(tmp_path)])
    assert list(tmp_path.iterdir()) == [path]


def test_ranks_that_a_model_cannot_be_dealt_to_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_description(tmp_path / "model.json", "llama-3.1-405b")
    with pytest.raises(SystemExit, match=r"tp3 rank 0: .*cannot be dealt evenly to 3 ranks"):
        paper.main(["--models", str(path), "--folder", str(tmp_path), "--layouts", "tp3"])
    assert list(tmp_path.iterdir()) == [path]
    assert "Traceback" not in capfd.readouterr().err


def test_a_checkpoint_other_than_the_published_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**fields_of("llama-3.1-405b"), "published": {"num_tensors": 20}}))
    with pytest.raises(SystemExit, match="num_tensors is 21 here, 20 as published"):
        paper.main(["--models", str(path), "--folder", str(tmp_path)])


def test_one_table_says_what_ranks_and_nodes_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_description(tmp_path / "model.json", "deepseek-v3")
    csv_file, json_file = tmp_path / "out.csv", tmp_path / "out.json"
    arguments = ["--models", str(path), "--folder", str(tmp_path), "--layouts", "tp2,ep4", "--node-ranks", "2"]
    paper.main([*arguments, "--csv", str(csv_file), "--json", str(json_file)])
    assert sorted(tmp_path.iterdir()) == sorted([path, csv_file, json_file])
    output = capsys.readouterr().out
    assert "DeepSeek-V3  tp2" in output
    assert "the plans differ from that by 0.000%" in output
    with csv_file.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["layout"], line["rank"]) for line in lines] == [
        *(("tp2", "0"), ("tp2", "1")),
        *(("ep4", "0"), ("ep4", "2"), ("ep4", "3")),
    ]
    tp2, ep4 = json.loads(json_file.read_text())
    whole = tp2["checkpoint"]["num_bytes"]
    assert tp2["everything_bytes"] == 2 * whole
    for row in (tp2, ep4):
        expected, size = row["expected"], row["layout"]["tp_size"] * row["layout"]["ep_size"]
        assert expected["of_rank"] * size == whole - expected["unused"] + expected["replicated"]
        assert expected["of_rank"] <= expected["of_node"] <= row["node_bytes"] <= row["everything_bytes"]
        assert expected["of_node"] <= row["storage_bytes"] < row["node_bytes"]
    assert tp2["expected"]["of_node"] == whole - tp2["expected"]["unused"]
