"""Ranks of one node, each a process of its own that loads its part: right values, and storage gives each byte once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from processes import memory_cgroup, run_python

from benchmarks.ranks import make_cold
from weightlift import LoadConfig, LoadReport, fast_load
from weightlift.checkpoint import locate
from weightlift.sharing import SharedTensors

ROOT = Path(__file__).resolve().parents[1]
MiB = 1 << 20
HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 1024, 2816, 4096, 2
STAGING_BYTES = 8 * MiB
RUNS = [("model", 2), ("model", 4), ("columns", 4), ("rows", 2), ("copies", 2)]

# Runs ranks in processes that it forks, away from the threads of a test's process.
LEADER = """
import json, sys
from pathlib import Path
import safetensors.torch
import torch
from benchmarks import ranks
from weightlift import LoadConfig

folder, group, late, runs = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), json.loads(sys.argv[4])
config = LoadConfig(staging_bytes=int(sys.argv[5]))
checkpoint = {}

def wrong(module, rank, cut, size):
    # Names of the parameters that do not hold what whole tensors give.
    for path in folder.glob("*.safetensors"):
        checkpoint.update(safetensors.torch.load_file(path))
    def part(name, dim):
        whole = checkpoint[name]
        if name.endswith("norm.weight") or dim is None:
            return whole
        return whole.chunk(size, dim)[rank]
    expected = {}
    for name, param in module.named_parameters():
        if cut == "model" and ".qkv_proj" in name or ".gate_up_proj" in name:
            kinds = ("q_proj", "k_proj", "v_proj") if "qkv" in name else ("gate_proj", "up_proj")
            stem = name.replace("qkv_proj", "{}").replace("gate_up_proj", "{}")
            expected[name] = torch.cat([part(stem.format(kind), 0) for kind in kinds])
        else:
            row_cut = name.endswith(("o_proj.weight", "down_proj.weight"))
            dim = {"model": 1 if row_cut else 0, "columns": 1, "rows": 0, "copies": None}[cut]
            expected[name] = part(name, dim)
    assert expected
    return [name for name, param in module.named_parameters() if not torch.equal(param, expected[name])]

results = []
for cut, size in runs:
    look = lambda module, rank: wrong(module, rank, cut, size)
    # What else the machine does can only add to what storage is asked for: it drops page cache, and fetches libraries
    # back into it.
    done = [ranks.load_at_once(folder, cut, size, config=config, late_seconds=late, look=look,
                               memory_group=Path(group) if group else None)]
    while len(done) < 3 and done[-1].device_bytes > 1.05 * sum(p.stat().st_size for p in folder.glob("*.safetensors")):
        done.append(ranks.load_at_once(folder, cut, size, config=config, late_seconds=late,
                                       memory_group=Path(group) if group else None))
    best = min(done, key=lambda run: run.device_bytes)
    results.append({"device_bytes": best.device_bytes, "wrong": [rank.looked for rank in done[0].ranks],
                    "host_bytes": best.host_bytes, "reports": [rank.report for rank in best.ranks]})
print(json.dumps(results))
"""


def load_at_once(folder: Path, runs: list[tuple[str, int]], *, group: Path | None = None, late: float = 0.0) -> Any:
    try:
        make_cold(folder)
    except SystemExit as error:
        pytest.skip(f"no cold files here: {error}")
    output = run_python(
        LEADER,
        folder,
        group or "",
        late,
        json.dumps(runs),
        STAGING_BYTES,
        env={"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1},
    )
    return json.loads(output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 67 MiB."""
    folder = tmp_path_factory.mktemp("node")
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 128,
        "num_attention_heads": 8,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[tuple[str, int], Any]:
    return dict(zip(RUNS, load_at_once(folder, RUNS), strict=True))


def require_once(result: Any, folder: Path) -> None:
    """Fails where storage gave more than the checkpoint and a tenth. Skips where its bytes are not counted."""
    checkpoint_bytes = (folder / "model.safetensors").stat().st_size
    if result["device_bytes"] < checkpoint_bytes / 2:
        pytest.skip(f"{folder}: its file system's reads are not counted (tmpfs, or another machine's disk)")
    assert 0.99 * checkpoint_bytes < result["device_bytes"] <= 1.1 * checkpoint_bytes


@pytest.mark.parametrize(("cut", "size"), RUNS)
def test_each_rank_gets_its_part(results: dict[tuple[str, int], Any], cut: str, size: int) -> None:
    assert results[cut, size]["wrong"] == [[]] * size


@pytest.mark.parametrize(("cut", "size"), RUNS)
def test_storage_gives_the_ranks_of_a_node_each_byte_once(
    results: dict[tuple[str, int], Any], folder: Path, cut: str, size: int
) -> None:
    require_once(results[cut, size], folder)


@pytest.mark.parametrize(("cut", "size"), RUNS)
def test_ranks_keep_to_their_memory(results: dict[tuple[str, int], Any], cut: str, size: int) -> None:
    # Less than the checkpoint: nothing is held beside the parameters, but for Python's own objects.
    assert results[cut, size]["host_bytes"] < STAGING_BYTES + 24 * MiB


def test_late_ranks_in_a_small_memory_group_have_storage_give_little_twice(folder: Path) -> None:
    # Their parameters are 67 MiB; four processes, with Python, leave less than the checkpoint to the page cache.
    with memory_cgroup(256 * MiB) as group:
        (result,) = load_at_once(folder, [("model", 4)], group=group, late=0.05)
    assert result["wrong"] == [[]] * 4
    require_once(result, folder)


# ---- which bytes are shared


def report_of(folder: Path, into: dict[str, torch.Tensor], **options: Any) -> LoadReport:
    try:
        make_cold(folder)
    except SystemExit as error:
        pytest.skip(f"no cold files here: {error}")
    return fast_load(into, folder, strict=False, config=LoadConfig(**options))


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def whole(folder: Path) -> dict[str, torch.Tensor]:
    return {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in locate(folder).tensors.items()}


@pytest.mark.direct_io
def test_one_process_reads_past_the_page_cache(folder: Path) -> None:
    report = report_of(folder, whole(folder))
    assert report.buffered_bytes < 4096  # what is left at the file's end
    assert not any("LOCAL_WORLD_SIZE" in note for note in report.strategy_notes)


@pytest.mark.direct_io
@pytest.mark.usefixtures("two_processes")
def test_what_is_needed_whole_is_shared_and_the_report_says_so(folder: Path) -> None:
    report = report_of(folder, whole(folder))
    assert report.direct_bytes == 0
    assert report.files[0].reason == "read by other processes too"
    assert any("2 processes" in note and "storage gives it once" in note for note in report.strategy_notes)


@pytest.mark.direct_io
@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("options", [{"strategy": "direct"}, {"page_cache": "leave"}])
def test_what_the_user_chose_is_not_overruled(folder: Path, options: dict[str, Any]) -> None:
    assert report_of(folder, whole(folder), **options).buffered_bytes < 4096


@pytest.mark.direct_io
@pytest.mark.usefixtures("two_processes")
def test_experts_of_which_others_have_some_are_not_shared(tmp_path: Path) -> None:
    tensors = {f"layers.{layer}.experts.{e}.w": torch.randn(1 << 18) for layer in range(2) for e in range(4)}
    safetensors.torch.save_file({"layers.0.norm": torch.randn(1 << 18), **tensors}, tmp_path / "model.safetensors")
    names = ["layers.0.norm", *(name for name in tensors if name.endswith(("2.w", "3.w")))]
    some = report_of(tmp_path, {name: torch.empty(1 << 18) for name in names})
    assert some.buffered_bytes // MiB == 1  # the norm
    every = report_of(tmp_path, whole(tmp_path))
    assert every.direct_bytes == 0


def test_experts_are_told_by_those_passed_over_so_far(tmp_path: Path) -> None:
    tensors = {f"layers.{layer}.experts.{e}.w": torch.zeros(4) for layer in range(2) for e in range(4)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    files = locate(tmp_path)
    entries = list(files.tensors.values())
    shared = SharedTensors(files)
    shared.note_recorded(entries[:2])
    assert list(shared.among(entries[:2])) == entries[:2]  # the first rank's: nothing has been left out yet
    shared.note_recorded(entries[4:6])
    assert list(shared.among(entries[4:6])) == []


def test_experts_that_a_filter_leaves_out_are_those_of_others(tmp_path: Path) -> None:
    tensors = {f"layers.0.experts.{e}.w": torch.zeros(4) for e in range(4)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    files = locate(tmp_path, filters=[lambda name: "another rank's" if name.endswith("3.w") else None])
    entries = list(files.tensors.values())
    shared = SharedTensors(files)
    shared.note_recorded(entries)
    assert list(shared.among(entries)) == []
