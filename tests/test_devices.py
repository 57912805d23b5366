"""Loads into GPU memory: through a twin of a GPU that is slow and late, on any machine; and on GPUs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import WriteCheckpoint
from torch import Tensor

import weightlift
from weightlift import LoadConfig, devices
from weightlift.storage import failure
from weightlift.tensor import storage_of

FN = torch.float8_e4m3fn
gpu = pytest.mark.gpu


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every destination is memory of one of two GPUs, whose twins the core has."""

    def index_of(tensor: Tensor) -> int | None:
        return (storage_of(tensor).data_ptr() >> 6) % 2 if tensor.device.type == "cpu" else None

    def allocate(self: devices.DeviceCaller, device: int, num_bytes: int) -> int:
        self.scratch.append(torch.full((num_bytes,), 0xA5, dtype=torch.uint8))
        return self.scratch[-1].data_ptr()

    monkeypatch.setattr(devices, "are_twins", True)
    monkeypatch.setattr(devices, "index_of", index_of)
    monkeypatch.setattr(devices, "current_stream", lambda device: 0)
    monkeypatch.setattr(devices.DeviceCaller, "allocate", allocate)


@pytest.fixture(params=["twins", pytest.param("cuda", marks=gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where tensors go that are to be on a GPU."""
    if request.param == "twins":
        request.getfixturevalue("twins")
        return "cpu"
    return "cuda"


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        "large": torch.randn(1024, 1536, generator=generator),
        "bf16": torch.randn(700, 333, generator=generator).to(torch.bfloat16),
        "fp8": torch.randn(512, 256, generator=generator).to(FN),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }
    return made | {f"norm.{i}": torch.randn(33 + i, generator=generator) for i in range(60)}


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, Tensor], write_checkpoint: WriteCheckpoint) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", tensors, shards=2)


def same(got: Tensor, expected: Tensor) -> bool:
    return (got.dtype, got.shape) == (expected.dtype, expected.shape) and torch.equal(
        got.cpu().reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
    )


def test_a_whole_load_gives_every_tensor(folder: Path, tensors: dict[str, Tensor], device: str) -> None:
    with weightlift.open_checkpoint(folder) as checkpoint:
        loaded = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in tensors.items()}
        for name, tensor in loaded.items():
            tensor.copy_(checkpoint[name])
        assert checkpoint.report.num_forced == 0
        checkpoint.run()
        report = checkpoint.report
    assert all(same(loaded[name], tensors[name]) for name in tensors)
    assert report.device_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.in_place_bytes == 0
    assert report.fallbacks == []
    assert "copied to GPUs" in str(report)


def test_load_file_and_iter_weights_give_every_tensor(folder: Path, tensors: dict[str, Tensor], device: str) -> None:
    for loaded in (weightlift.load_file(folder, device=device), dict(weightlift.iter_weights(folder, device))):
        assert loaded.keys() == tensors.keys()
        assert all(same(loaded[name], tensors[name]) for name in tensors)


def test_views_casts_and_broadcasts_land_as_torch_would_copy_them(
    folder: Path, tensors: dict[str, Tensor], device: str
) -> None:
    large, half = tensors["large"], tensors["bf16"]

    def parts(source: Any) -> list[Tensor]:
        return [
            source["large"][:, 256:512],
            source["large"].t(),
            source["large"][::3, 5:1000:7],
            source["bf16"].to(torch.float32),
            source["norm.7"].expand(9, -1),
        ]

    expected = parts(tensors)
    got = [torch.full(t.shape, 7, dtype=t.dtype, device=device) for t in expected]
    wide = torch.zeros(700, 1000, dtype=torch.float16, device=device)
    fused = torch.zeros(2048, 768, device=device)
    with weightlift.open_checkpoint(folder) as checkpoint:
        for destination, source in zip(got, parts(checkpoint), strict=True):
            destination.copy_(source)
        wide[:, 100:433] = checkpoint["bf16"]
        for rank in range(2):
            fused.narrow(0, rank * 1024, 1024).copy_(checkpoint["large"].narrow(1, rank * 768, 768))
        assert checkpoint.report.num_forced == 0
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    assert same(wide[:, 100:433], half.to(torch.float16))
    assert not wide[:, :100].any()
    assert not wide[:, 433:].any()
    assert same(fused, torch.cat([large[:, :768], large[:, 768:]]))


def test_ops_are_carried_out_on_the_way(folder: Path, tensors: dict[str, Tensor], device: str) -> None:
    expected, expected_scale = weightlift.ops.normalize_e4m3fn_to_e4m3fnuz(tensors["fp8"], torch.ones(1))[:2]
    got = torch.empty(512, 256, dtype=torch.float8_e4m3fnuz, device=device)
    with weightlift.open_checkpoint(folder) as checkpoint:
        weight, scale = weightlift.ops.normalize_e4m3fn_to_e4m3fnuz(checkpoint["fp8"], torch.ones(1))[:2]
        got.copy_(weight)
    assert same(got, expected)
    assert torch.equal(scale, expected_scale)
    assert checkpoint.report.device_bytes == expected.nbytes


def test_what_is_looked_at_early_has_landed(folder: Path, tensors: dict[str, Tensor], device: str) -> None:
    first, second = (torch.zeros(1024, 1536, device=device) for _ in range(2))
    with weightlift.open_checkpoint(folder) as checkpoint:
        first.copy_(checkpoint["large"])
        second.copy_(first)  # reads it
        first.mul_(2)
        first[:512].copy_(checkpoint["large"][:512])
        second[512:].zero_()
    assert same(first, torch.cat([tensors["large"][:512], 2 * tensors["large"][512:]]))
    assert same(second, torch.cat([tensors["large"][:512], torch.zeros(512, 1536)]))


def test_a_model_is_loaded_and_its_coverage_proven(folder: Path, tensors: dict[str, Tensor], device: str) -> None:
    large = torch.nn.Parameter(torch.zeros(1024, 1536, device=device))
    bf16 = torch.nn.Parameter(torch.zeros(700, 333, device=device))
    model = torch.nn.ParameterDict({"large": large, "bf16": bf16})
    report = weightlift.fast_load(model, folder, strict=False)
    assert same(large.data, tensors["large"])
    assert same(bf16.data, tensors["bf16"].float())
    assert report.gaps == []
    assert report.device_bytes == tensors["large"].nbytes + tensors["bf16"].nbytes

    def load_half_of_it(parameter: Tensor, loaded: Tensor) -> None:
        parameter[:512].copy_(loaded[:512])

    large.weight_loader = load_half_of_it  # type: ignore[attr-defined]
    assert weightlift.fast_load(model, folder, strict=False).gaps == ["large[512:1024]"]


def test_two_loads_at_a_time_do_not_mind_each_other(folder: Path, tensors: dict[str, Tensor], device: str) -> None:
    a, b = torch.zeros(1024, 1536, device=device), torch.zeros(1536, 1024, device=device)
    with weightlift.open_checkpoint(folder) as one, weightlift.open_checkpoint(folder) as other:
        a.copy_(one["large"])
        b.copy_(other["large"].t())
    assert same(a, tensors["large"])
    assert same(b, tensors["large"].t())


def test_scratch_keeps_to_its_budget_and_is_given_back(folder: Path, tensors: dict[str, Tensor], device: str) -> None:
    config = LoadConfig(device_staging_bytes=1 << 20, chunk_bytes=1 << 16)
    destination = torch.zeros(1536, 1024, device=device)
    with weightlift.open_checkpoint(folder, config=config) as checkpoint:
        destination.copy_(checkpoint["large"].t())
        checkpoint.run()
        scratch = checkpoint._program._device_caller.scratch
        assert sum(tensor.nbytes for tensor in scratch) == checkpoint.report.device_scratch_bytes <= 2 << 20
    assert checkpoint._program._device_caller.scratch == []
    assert same(destination, tensors["large"].t())


def test_copies_come_behind_the_streams_on_which_they_were_recorded(
    folder: Path, twins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = {"current": 0}
    followed: list[set[int]] = []
    streams_of = devices.DeviceCaller.streams_of

    def note(self: devices.DeviceCaller, device: int) -> list[int]:
        followed.append(set(streams_of(self, device)))
        return [0]

    monkeypatch.setattr(devices, "index_of", lambda tensor: 0)
    monkeypatch.setattr(devices, "current_stream", lambda device: stream["current"])
    monkeypatch.setattr(devices.DeviceCaller, "streams_of", note)
    with weightlift.open_checkpoint(folder) as checkpoint:
        for stream["current"] in (1, 2):
            torch.zeros(1024, 1536).copy_(checkpoint["large"])
        stream["current"] = 3
        checkpoint.run()
        torch.zeros(700, 333).copy_(checkpoint["bf16"])
    assert followed == [{1, 2, 3}, {3}]


def test_a_failing_allocation_ends_the_load(folder: Path, twins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: devices.DeviceCaller, device: int, num_bytes: int) -> int:
        raise torch.OutOfMemoryError(f"no {num_bytes} bytes")

    monkeypatch.setattr(devices.DeviceCaller, "allocate", refuse)
    destination = torch.zeros(1536, 1024)
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"no \d+ bytes"),
        weightlift.open_checkpoint(folder) as checkpoint,
    ):
        destination.copy_(checkpoint["large"].t())
    assert not destination.any()


def test_ctrl_c_while_a_segment_is_submitted_ends_the_load(
    folder: Path, twins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: devices.DeviceCaller, device: int) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(devices.DeviceCaller, "streams_of", interrupt)
    left_as_if_all_were_well = pytest.raises(KeyboardInterrupt)
    with left_as_if_all_were_well, weightlift.open_checkpoint(folder) as checkpoint:
        torch.zeros(1024, 1536).copy_(checkpoint["large"])
        with contextlib.suppress(KeyboardInterrupt):
            checkpoint.run()


def test_a_fault_of_a_device_names_file_and_tensor() -> None:
    shards: Any = [SimpleNamespace(path="model.safetensors", size=9)]
    sources: Any = [SimpleNamespace(name="w")]
    fault = ("device", 0, 0, -1, 0, "GPU 1: out of memory")
    error = failure(fault, shards, sources, LoadConfig().resolve({}), ["w"])
    assert str(error) == (
        "model.safetensors: w: copying it to where it belongs failed: GPU 1: out of memory; not loaded: w"
    )
    assert isinstance(error, weightlift.CheckpointReadError)
    assert (error.reason, error.incomplete) == ("DeviceFailed", ["w"])


@pytest.mark.parametrize(
    ("version", "info", "expected"),
    [
        (None, {}, "torch is not built for CUDA"),
        ("13.0", {"built": False}, "this build of weightlift has no CUDA"),
        ("13.0", {"error": "CUDA driver version is insufficient"}, "CUDA driver version is insufficient; see"),
        ("13.0", {"devices": []}, "the CUDA runtime does not find it"),
        ("13.0", {"devices": [{"compute_capability": (7, 5)}]}, "its compute capability is 7.5"),
        ("13.0", {"devices": [{"compute_capability": (8, 0)}]}, ""),
    ],
)
def test_why_a_gpu_is_left_to_torch_is_told(
    monkeypatch: pytest.MonkeyPatch, version: str | None, info: dict[str, Any], expected: str
) -> None:
    found = {"built": True, "error": "", "devices": [], **info}
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(devices, "_C", SimpleNamespace(cuda_info=lambda: found))
    devices.refusal.cache_clear()
    try:
        refusal = devices.refusal(0)
    finally:
        devices.refusal.cache_clear()
    assert refusal.startswith(expected)
    assert bool(refusal) == bool(expected)


@gpu
def test_copies_wait_for_the_callers_side_stream(folder: Path, tensors: dict[str, Tensor]) -> None:
    destination = torch.empty(1024, 1536, device="cuda")
    cuda: Any = torch.cuda
    # What is recorded on the stream is submitted on another.
    with weightlift.open_checkpoint(folder) as checkpoint, cuda.stream(cuda.Stream()):
        cuda._sleep(50_000_000)
        destination.fill_(-1)
        destination.copy_(checkpoint["large"])
    assert same(destination, tensors["large"])


@gpu
def test_no_context_is_made_on_another_gpu(folder: Path, tensors: dict[str, Tensor]) -> None:
    last = torch.cuda.device_count() - 1
    if last == 0:
        pytest.skip("there is one GPU")
    loaded = weightlift.load_file(folder, device=f"cuda:{last}")
    assert all(tensor.device.index == last for tensor in loaded.values())
    assert all(same(loaded[name], tensors[name]) for name in tensors)
    assert torch.cuda.current_device() == 0


@gpu
def test_memory_beyond_the_parameters_stays_within_the_budget(folder: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = weightlift.load_file(folder, device="cuda", config=LoadConfig(device_staging_bytes=4 << 20))
    parameters = sum(tensor.untyped_storage().nbytes() for tensor in loaded.values())
    # Each tensor is rounded up to 512 bytes.
    assert torch.cuda.max_memory_allocated() - before <= parameters + len(loaded) * 512 + (4 << 20)


@gpu
def test_a_load_is_what_safetensors_loads(folder: Path) -> None:
    loaded = weightlift.load_file(folder, device="cuda")
    for shard in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(shard, device="cuda").items():
            assert same(loaded[name], tensor.cpu())
