"""Weights in floating point that are quantised while they are loaded."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import WriteCheckpoint
from resources import PeakMemory
from torch import Tensor, nn

import weightlift
from weightlift import CheckpointMismatchError, LoadConfig
from weightlift.cli import main
from weightlift.model.experts import FusedMoE
from weightlift.model.formats import StreamModelLoader
from weightlift.model.linear import LinearBase, MergedColumnParallelLinear, ReplicatedLinear
from weightlift.model.loader import plan_load
from weightlift.model.model_config import ConfigError, read_config
from weightlift.model.parallel import ParallelConfig
from weightlift.model.planning import plan_model
from weightlift.model.quantization.online import SCHEMES, OnlineQuantizationConfig
from weightlift.model.quantization.online_layouts import Source
from weightlift.model.skeleton import load_model, make_shell
from weightlift.reserved import ReservedMemory

MiB = 1 << 20
FP8 = torch.float8_e4m3fn

ALL = [name for name in SCHEMES if name != "fp8"]  # another name for one of them


def blocks(weight: Tensor, rows: int, columns: int) -> Tensor:
    """[row of blocks, row, column of blocks, column], filled up with zeros."""
    padded = nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def per_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / 448
    return (weight * (1 / scale)).to(FP8), scale.reshape(1)


def per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return (weight / scale).to(FP8), scale


def per_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    cut = blocks(weight, 128, 128)
    scale = cut.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) / 448
    q = (cut * (1 / scale)).flatten(2).flatten(0, 1)[: weight.shape[0], : weight.shape[1]]
    return q.to(FP8), scale[:, 0, :, 0]


def mxfp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    cut = weight.unflatten(1, (-1, 32))
    exponents = torch.ceil(torch.log2(cut.abs().amax(2, keepdim=True) / 448))
    return (cut * torch.exp2(-exponents)).flatten(1).to(FP8), (exponents[..., 0] + 127).to(torch.uint8)


def int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


REFERENCES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "fp8_per_tensor": per_tensor,
    "fp8_per_channel": per_channel,
    "fp8_per_block": per_block,
    "mxfp8": mxfp8,
    "int8_per_channel_weight_only": int8,
}
# Half a step between the largest numbers, as a part of the largest weight. Powers of two may be twice the scale.
ROUNDING = {**dict.fromkeys(ALL, 16 / 448), "mxfp8": 32 / 448, "int8_per_channel_weight_only": 0.5 / 127}


def ranks(scheme: str) -> list[ParallelConfig]:
    """Keys and values of two ranks are smaller than a block of the small model."""
    two = [] if scheme == "fp8_per_block" else [ParallelConfig(tp_rank=1, tp_size=2)]
    return [ParallelConfig(), *two]


CASES = [pytest.param(scheme, rank, id=f"{scheme}-{rank.tp_size}") for scheme in ALL for rank in ranks(scheme)]


def linears(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LinearBase))


def state_bytes(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.contiguous().view(torch.uint8).clone() for name, tensor in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


@functools.cache
def unquantised(folder: Path, rank: ParallelConfig) -> nn.Module:
    return load_model(folder, parallel=rank)


# ---- values


@pytest.mark.parametrize(("scheme", "rank"), CASES)
def test_layers_are_what_the_formula_makes_of_the_rank_s_weights(
    shared_checkpoints: Path, scheme: str, rank: ParallelConfig
) -> None:
    folder = shared_checkpoints / "llama128"
    plain = dict(linears(unquantised(folder, rank)))
    model = load_model(folder, parallel=rank, quantization=scheme)
    assert not model.load_report.gaps
    layers = dict(linears(model))
    assert layers.keys() == plain.keys()
    for name, layer in layers.items():
        weight = plain[name].weight.float()
        q, scale = REFERENCES[scheme](weight)
        found = layer.get_parameter(SCHEMES[scheme].scale_name)
        assert torch.equal(layer.weight.view(torch.uint8), q.view(torch.uint8)), name
        assert torch.equal(found, scale), name
        error = (layer.quant_method.dequantize(layer) - weight).abs().max()
        assert error <= weight.abs().max() * 1.01 * ROUNDING[scheme], name


@pytest.mark.parametrize("scheme", ALL)
def test_recorded_and_eager_weights_are_the_same_bytes(shared_checkpoints: Path, scheme: str) -> None:
    folder = shared_checkpoints / "llama128"
    rank = ranks(scheme)[-1]

    class Whole(StreamModelLoader):
        def iter_weights(self) -> Iterator[tuple[str, Tensor]]:
            for file in sorted(folder.glob("*.safetensors")):
                yield from safetensors.torch.load_file(file).items()

    model = load_model(folder, parallel=rank, quantization=scheme)
    config = read_config(folder)
    eager = make_shell(config, parallel=rank, dtype=torch.bfloat16, device="cpu", quantization=scheme)
    Whole(weightlift.CheckpointSource(folder), config, parallel=rank).load_weights(eager)
    assert_same(state_bytes(model), state_bytes(eager))


@pytest.mark.parametrize("scheme", ALL)
def test_model_computes_nearly_what_it_computes_unquantised(shared_checkpoints: Path, scheme: str) -> None:
    folder = shared_checkpoints / "llama128"
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = unquantised(folder, ParallelConfig())(tokens)
        found = load_model(folder, quantization=scheme)(tokens)
    assert torch.isfinite(found).all()
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_weights_of_each_floating_dtype_are_quantised(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        folder = write_checkpoint(tmp_path / str(dtype), {"layer.weight": weight.to(dtype)})
        for scheme in ALL:
            model = one_layer(scheme)
            weightlift.fast_load(model, folder)
            q, _ = REFERENCES[scheme](weight.to(dtype).float())
            assert torch.equal(model.layer.weight.view(torch.uint8), q.view(torch.uint8)), (dtype, scheme)


@pytest.mark.parametrize("scheme", ALL)
def test_what_is_on_disk_is_quantised_whatever_the_dtype_of_the_model(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, scheme: str
) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    folder = write_checkpoint(tmp_path, {"layer.weight": weight})
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = one_layer(scheme, dtype=dtype)
        weightlift.fast_load(model, folder)
        assert torch.equal(model.layer.weight.view(torch.uint8), REFERENCES[scheme](weight)[0].view(torch.uint8))


@pytest.mark.parametrize("scheme", ALL)
def test_weights_of_zero_stay_zero(tmp_path: Path, write_checkpoint: WriteCheckpoint, scheme: str) -> None:
    model = one_layer(scheme)
    weightlift.fast_load(model, write_checkpoint(tmp_path, {"layer.weight": torch.zeros(64, 64)}))
    assert torch.equal(model.layer.quant_method.dequantize(model.layer), torch.zeros(64, 64))


@pytest.mark.parametrize(
    "rank", [ParallelConfig(), ParallelConfig(tp_rank=1, tp_size=2), ParallelConfig(ep_rank=1, ep_size=2)], ids=str
)
@pytest.mark.parametrize("scheme", ALL)
def test_experts_are_what_the_formula_makes_of_each(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, scheme: str, rank: ParallelConfig
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (256, 128), "up": (256, 128), "down": (128, 256)}
    tensors = {
        f"{expert}.{name}_proj.weight": torch.randn(shape, generator=generator)
        for expert in range(4)
        for name, shape in shapes.items()
    }
    folder = write_checkpoint(tmp_path, tensors)
    plain, layer = (
        FusedMoE(4, 2, 128, 256, quant_config=config, parallel=rank, prefix="experts")
        for config in (None, OnlineQuantizationConfig(scheme))
    )
    for one in (plain, layer):
        report = weightlift.fast_load(one, folder)
        assert not report.gaps
        assert not report.missing_keys
    scale_name = SCHEMES[scheme].scale_name
    is_whole = SCHEMES[scheme].quantize is None
    for name in ("w13", "w2"):
        weights = plain.get_parameter(f"{name}_weight")
        for position, weight in enumerate(weights):
            # Gate and up projection have blocks of their own, and one scale, where there is one.
            parts = weight.chunk(1 if is_whole or name == "w2" else 2)
            found = [REFERENCES[scheme](part) for part in parts]
            q, scale = (torch.cat(values) for values in zip(*found, strict=True))
            quantized = layer.get_parameter(f"{name}_weight")[position]
            assert torch.equal(quantized.view(torch.uint8), q.view(torch.uint8)), (name, position)
            scales = layer.get_parameter(f"{name}_{scale_name}")[position]
            assert torch.equal(scales, scale.reshape(scales.shape))
    w13, w2 = layer.quant_method.dequantize(layer)
    for found, expected in ((w13, plain.w13_weight), (w2, plain.w2_weight)):
        assert (found - expected).abs().max() <= expected.abs().max() * 1.01 * ROUNDING[scheme]


# ---- what a load does


def one_layer(scheme: str, size: int = 64, dtype: torch.dtype | None = None) -> Any:
    model = nn.Module()
    model.layer = ReplicatedLinear(
        size, size, bias=False, params_dtype=dtype, quant_config=OnlineQuantizationConfig(scheme), prefix="layer"
    )
    return model


@pytest.mark.parametrize("scheme", ALL)
def test_weights_are_loaded_again(tmp_path: Path, write_checkpoint: WriteCheckpoint, scheme: str) -> None:
    model = one_layer(scheme)
    weights = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    for number, weight in enumerate(weights):
        weightlift.fast_load(model, write_checkpoint(tmp_path / str(number), {"layer.weight": weight}))
        assert torch.equal(model.layer.weight.view(torch.uint8), REFERENCES[scheme](weight)[0].view(torch.uint8))


@pytest.mark.parametrize("scheme", ALL)
def test_copy_of_a_model_has_scales_of_its_own(tmp_path: Path, write_checkpoint: WriteCheckpoint, scheme: str) -> None:
    model = one_layer(scheme)
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weightlift.fast_load(model, write_checkpoint(tmp_path / "a", {"layer.weight": weight}))
    before = state_bytes(model)
    again = copy.deepcopy(model)
    weightlift.fast_load(again, write_checkpoint(tmp_path / "b", {"layer.weight": weight * 3}))
    assert_same(state_bytes(model), before)
    scale_name = SCHEMES[scheme].scale_name
    assert not torch.equal(again.layer.get_parameter(scale_name), model.layer.get_parameter(scale_name))


def test_load_that_failed_can_be_done_again(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    model = one_layer("fp8_per_tensor")
    with pytest.raises(CheckpointMismatchError, match=r"unexpected|Unexpected"):
        weightlift.fast_load(model, write_checkpoint(tmp_path / "a", {"layer.weight": weight, "other": weight.clone()}))
    fused = fused_layer("fp8_per_tensor")
    with pytest.raises(CheckpointMismatchError, match=r"layer.weight\[64:128\]"):
        load_parts(fused, write_checkpoint(tmp_path / "b", {"layer.gate.weight": weight}))
    both = {"layer.gate.weight": weight, "layer.up.weight": weight * 2}
    load_parts(fused, write_checkpoint(tmp_path / "c", both))
    q, _ = per_tensor(torch.cat(list(both.values())))
    assert torch.equal(fused.layer.weight.view(torch.uint8), q.view(torch.uint8))


def test_parts_of_a_plain_loop_that_broke_off_are_those_of_the_next() -> None:
    parts = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    model = fused_layer("fp8_per_tensor")
    for shard_ids in ([0], [0, 1]):
        for shard_id in shard_ids:
            model.layer.weight.weight_loader(model.layer.weight, parts[shard_id], shard_id)
    q, scale = per_tensor(parts.flatten(0, 1))
    assert torch.equal(model.layer.weight.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(model.layer.weight_scale, scale)


def test_load_that_failed_leaves_no_source_in_memory(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(one_layer("fp8").layer for _ in range(3)))
    folder = write_checkpoint(tmp_path, {f"{number}.weight": torch.ones(64, 64) for number in range(3)})
    sources: list[weakref.ref[Source]] = []
    start = Source.start
    monkeypatch.setattr(Source, "start", lambda self, empty: (sources.append(weakref.ref(self)), start(self, empty)))

    def fail(module: nn.Module) -> None:
        raise InterruptedError

    with contextlib.suppress(InterruptedError):
        weightlift.fast_load(model, folder, on_module_loaded=fail)
    gc.collect()
    assert sources
    assert [source() for source in sources if source() is not None] == []


def fused_layer(scheme: str, sizes: tuple[int, int] = (64, 64)) -> Any:
    model = nn.Module()
    model.layer = MergedColumnParallelLinear(
        64, sizes, bias=False, quant_config=OnlineQuantizationConfig(scheme), prefix="layer"
    )
    return model


def load_parts(model: nn.Module, folder: Path, **arguments: Any) -> weightlift.LoadReport:
    stacked = {".gate.": (".", 0), ".up.": (".", 1)}
    mapper = weightlift.WeightsMapper(orig_to_new_stacked=stacked)
    return weightlift.fast_load(model, folder, mapper=mapper, **arguments)


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_channel"])
def test_part_that_is_missing_is_a_gap_and_zero_where_that_is_accepted(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, scheme: str
) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    folder = write_checkpoint(tmp_path, {"layer.gate.weight": weight})
    with pytest.raises(CheckpointMismatchError, match=r"layer.weight\[64:128\]"):
        load_parts(fused_layer(scheme), folder)
    model = fused_layer(scheme)
    report = load_parts(model, folder, strict=False)
    assert report.gaps == ["layer.weight[64:128]"]
    assert torch.equal(model.layer.weight[:64].view(torch.uint8), REFERENCES[scheme](weight)[0].view(torch.uint8))


def test_weight_that_is_missing_is_missing(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    for scheme in ALL:
        with pytest.raises(CheckpointMismatchError, match=r'"layer\.weight"') as caught:
            weightlift.fast_load(one_layer(scheme), write_checkpoint(tmp_path / scheme, {}))
        assert "scale" not in str(caught.value)


def test_without_anyone_who_takes_turns_a_weight_is_quantised_when_its_last_part_is_there(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    parts = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    folder = write_checkpoint(tmp_path, {"a": parts[0], "b": parts[1]})
    model = fused_layer("fp8_per_tensor")
    with weightlift.open_checkpoint(folder, watch=False) as checkpoint:
        for shard_id, name in enumerate("ab"):
            model.layer.weight.weight_loader(model.layer.weight, checkpoint[name], shard_id)
    q, scale = per_tensor(parts.flatten(0, 1))
    assert torch.equal(model.layer.weight.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(model.layer.weight_scale, scale)


# ---- memory


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six weights of 32 MiB."""
    folder = tmp_path_factory.mktemp("large")
    weight = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    safetensors.torch.save_file(
        {f"{number}.weight": weight * (number + 1) for number in range(6)}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("scheme", ALL)
def test_memory_beside_the_destination_is_one_layer_s_source_and_staging(large: Path, scheme: str) -> None:
    config = OnlineQuantizationConfig(scheme)
    arguments = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": config}
    model = nn.Sequential(*(ReplicatedLinear(4096, 4096, **arguments) for _ in range(6)))
    for parameter in model.parameters():
        parameter.view(torch.uint8).fill_(1)  # so that its memory is there
    load = LoadConfig(staging_bytes=16 * MiB, chunk_bytes=MiB)
    growths = []
    for _ in range(3):  # the kernel may add huge pages to what is there, once
        with PeakMemory() as memory:
            weightlift.fast_load(model, large, config=load)
        growths.append(memory.growth)
    source = 32 if SCHEMES[scheme].quantize is None else 0
    assert min(growths) < (source + 16 + 4) * MiB  # and what threads, and the core, take


def test_source_of_a_layer_is_read_while_the_one_before_is_quantised_where_both_fit(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [64, 128, 64, 64]
    model = nn.Sequential(
        *(
            ReplicatedLinear(64, size, bias=False, quant_config=OnlineQuantizationConfig("fp8"), prefix=str(number))
            for number, size in enumerate(sizes)
        )
    )
    folder = write_checkpoint(tmp_path, {f"{number}.weight": torch.ones(size, 64) for number, size in enumerate(sizes)})
    events: list[str] = []
    for name in ("start", "finish"):
        monkeypatch.setattr(Source, name, noting(events, name, getattr(Source, name)))
    weightlift.fast_load(model, folder)
    # The second is as large as all in memory may be.
    assert events == ["start 64", "finish 64", "start 128", "finish 128", *["start 64"] * 2, *["finish 64"] * 2]


def noting(events: list[str], name: str, method: Callable[..., None]) -> Callable[..., None]:
    def call(self: Source, *args: Any) -> None:
        events.append(f"{name} {len(self.destinations[0])}")
        method(self, *args)

    return call


def test_memory_of_a_source_is_in_the_plan(large: Path) -> None:
    with ReservedMemory().factories():
        config = OnlineQuantizationConfig("fp8")
        arguments = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": config}
        model = nn.Sequential(*(ReplicatedLinear(4096, 4096, **arguments) for _ in range(6)))
    plan = plan_load(model, large)
    assert plan.memory.transient == 32 * MiB
    assert plan.report.bytes_needed == 6 * 32 * MiB
    assert plan.memory.host_parameters == 6 * (16 * MiB + 4)


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_channel"])
def test_plan_has_the_reads_of_the_load(shared_checkpoints: Path, scheme: str) -> None:
    folder, rank = shared_checkpoints / "llama128", ParallelConfig(tp_rank=1, tp_size=2)
    config = LoadConfig(backend="pread", coverage_wait_seconds=60)
    plan = plan_model(folder, parallel=rank, quantization=scheme, config=config)
    report: Any = load_model(folder, parallel=rank, quantization=scheme, config=config).load_report
    for name in ("bytes_needed", "num_transfers", "num_reads"):
        assert getattr(plan.report, name) == getattr(report, name), name


# ---- what cannot be


def test_scheme_that_is_not_known_is_an_error_that_lists_those_that_are(shared_checkpoints: Path) -> None:
    with pytest.raises(ValueError, match="quantization is 'fp9'; accepted is fp8, fp8_per_block"):
        load_model(shared_checkpoints / "llama128", quantization="fp9")


def test_checkpoint_that_is_quantised_is_not_quantised_again(shared_checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match=r"is quantised \(compressed-tensors\); quantization 'fp8' is for weights in"):
        load_model(shared_checkpoints / "fp8-dynamic", quantization="fp8")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, FP8, torch.float64])
@pytest.mark.parametrize("scheme", ALL)
def test_weights_that_are_not_of_16_or_32_bits_are_refused(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, scheme: str, dtype: torch.dtype
) -> None:
    folder = write_checkpoint(tmp_path, {"layer.weight": torch.ones(64, 64).to(dtype)})
    with pytest.raises(CheckpointMismatchError, match=rf"layer\.weight: Tried to load weights of dtype {dtype}"):
        weightlift.fast_load(one_layer(scheme), folder)


@pytest.mark.parametrize("folder", ["fp8", "fp8-dynamic", "w4a16"])
def test_checkpoint_that_is_quantised_without_saying_so_is_refused_with_the_cause(
    shared_checkpoints: Path, tmp_path: Path, folder: str
) -> None:
    shutil.copytree(shared_checkpoints / folder, tmp_path / folder)
    config = json.loads((tmp_path / folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointMismatchError) as caught:
        load_model(tmp_path / folder, quantization="fp8")
    cause = str(caught.value).splitlines()[-1]
    assert "The checkpoint is quantised: it has model.layers.0.mlp.down_proj." in cause
    assert "`quantization` is for weights in floating point: leave it out" in cause


@pytest.mark.parametrize("scheme", ALL)
def test_scales_that_a_checkpoint_has_are_refused(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, scheme: str
) -> None:
    model = one_layer(scheme)
    name = f"layer.{SCHEMES[scheme].scale_name}"
    scale = torch.empty_like(model.get_parameter(name))
    folder = write_checkpoint(tmp_path, {"layer.weight": torch.ones(64, 64), name: scale})
    with pytest.raises(CheckpointMismatchError, match=rf"{name}: the weight is quantised while it is loaded"):
        weightlift.fast_load(model, folder)


def test_layout_of_weights_that_are_not_quantised_is_refused(shared_checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match="the weights are not quantised: there is no layout 'marlin' for them"):
        load_model(shared_checkpoints / "llama128", target="marlin")


def test_layout_that_there_is_none_of_is_refused_before_anything_is_read(shared_checkpoints: Path) -> None:
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.qkv_proj: OnlineLinearMethod has no layout for"):
        load_model(shared_checkpoints / "llama128", quantization="fp8", target="marlin")


def test_parts_that_would_share_a_block_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match="layer: Weight output_partition_size = 64 is not divisible by weight quantization block_n = 128",
    ):
        fused_layer("fp8_per_block", (64, 128))
    assert fused_layer("fp8_per_block", (128, 64)).layer.weight_scale_inv.shape == (2, 1)


def test_inputs_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer: Weight input_size_per_partition = 48 is not divisible by .* block_k"):
        one_layer("mxfp8", 48)


# ---- the command line


def test_load_verifies_what_it_has_quantised(shared_checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(shared_checkpoints / "llama128")
    assert main(["load", folder, "--quantization", "fp8", "--tp-size", "2", "--tp-rank", "1", "--verify"]) == 0
    assert "every byte as safetensors read it" in capsys.readouterr().out


def test_plan_needs_less_memory_for_quantised_weights(
    shared_checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(shared_checkpoints / "llama128")
    sizes = []
    for arguments in ([], ["--quantization", "mxfp8"]):
        assert main(["plan", folder, "--tp-size", "1", "--json", *arguments]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["memory"]["host_parameters"])
    assert sizes[1] < 0.7 * sizes[0]
