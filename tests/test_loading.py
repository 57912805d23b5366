"""What users call, end to end on real files: `load_file` and `fast_load` give safetensors' bytes, and say how."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resources import loading_threads, resources
from torch import Tensor, nn

import weightlift
from weightlift import CheckpointError, CheckpointMismatchError, LoadConfig, LoadReport, fast_load, load_file
from weightlift.safetensors_file import _DTYPES as DTYPES

MiB = 1 << 20
WriteCheckpoint = Callable[..., Path]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(actual: Tensor, expected: Tensor, what: str = "") -> None:
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    assert torch.equal(as_bytes(actual), as_bytes(expected)), what


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(actual[name], tensor, name)


def noise(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    """Random bits, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


def write_file(path: Path, tensors: list[tuple[str, str, list[int]]], *, padding: int = 0, seed: int = 0) -> Path:
    """A file of random bytes, laid out as listed: (name, dtype, shape), the header padded with spaces."""
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in tensors:
        bits = DTYPES[dtype][1]
        for size in shape:
            bits *= size
        header[name] = hostile.tensor(dtype, shape, [end, end + bits // 8])
        end += bits // 8
    data = noise(end, seed=seed).numpy()
    for entry in header.values():  # bytes of a bool are 0 or 1
        if entry["dtype"] == "BOOL":
            begin, stop = entry["data_offsets"]
            data[begin:stop] &= 1
    return hostile.write(path, json.dumps(header).encode() + b" " * padding, data.tobytes())


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a load that gets as far as reading fail."""
    monkeypatch.setattr("weightlift.storage._C.Pipeline", lambda **_: pytest.fail("the pipeline was started"))


# ---- load_file


def test_every_dtype_is_loaded_as_by_safetensors(tmp_path: Path) -> None:
    # One element more than a multiple of 64 KiB in all, so that each tensor starts at an odd place for the next.
    tensors = [(name, name, [513, 130] if name == "F4" else [33, 7, 11]) for name in DTYPES]
    path = write_file(tmp_path / "model.safetensors", tensors)
    assert_same_state(load_file(path), safetensors.torch.load_file(path))


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    shapes: list[list[int]] = [[], [0], [3, 0, 2], [1], [1, 1, 1], [0, 0]]
    tensors = [(f"{dtype}{shape}", dtype, shape) for dtype in ("U8", "BF16", "F64") for shape in shapes]
    path = write_file(tmp_path / "model.safetensors", tensors)
    assert_same_state(load_file(path), safetensors.torch.load_file(path))


def test_file_without_tensors(tmp_path: Path) -> None:
    assert load_file(hostile.write(tmp_path / "model.safetensors", {})) == {}


@pytest.mark.parametrize("strategy", ["auto", "buffered", pytest.param("direct", marks=pytest.mark.direct_io)])
def test_data_may_start_and_end_anywhere(tmp_path: Path, strategy: Any) -> None:
    config = LoadConfig(strategy=strategy)
    for padding in range(9):
        # Odd sizes: what follows is misaligned for its dtype. Below, at and above the sizes of a sector and of a page.
        for size in (1, 3, 509 - padding, 4093, 4096, 70_001):
            tensors = [("odd", "U8", [size]), ("f32", "F32", [257]), ("f64", "F64", [3]), ("bf16", "BF16", [5, 5])]
            path = write_file(tmp_path / "model.safetensors", tensors, padding=padding, seed=size)
            assert_same_state(load_file(path, config=config), safetensors.torch.load_file(path))


@pytest.mark.direct_io
def test_file_may_end_at_any_byte_of_a_sector(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for size in [*range(8192, 8192 + 512, 13), *range(8192, 8192 + 4096, 509)]:
        write_file(path, [("w", "U8", [size])])
        assert_same_state(load_file(path, config=LoadConfig(strategy="direct")), safetensors.torch.load_file(path))


def test_large_tensors_are_loaded_as_by_safetensors(tmp_path: Path) -> None:
    # Beyond the sizes at which tensors share a mapping, are read in place, and make several chunks.
    tensors = [("a", "BF16", [3001, 1000]), ("odd", "U8", [7]), ("b", "F32", [2500, 1001]), ("c", "U8", [5 * MiB + 1])]
    path = write_file(tmp_path / "model.safetensors", tensors)
    expected = safetensors.torch.load_file(path)
    for config in (LoadConfig(), LoadConfig(chunk_bytes=65536, staging_bytes=MiB), LoadConfig(advise_hugepages=False)):
        assert_same_state(load_file(path, config=config), expected)


tensor_sets = st.lists(
    st.tuples(
        st.sampled_from(["U8", "BOOL", "F8_E4M3", "I16", "BF16", "F16", "F32", "I64", "C64"]),
        st.lists(st.sampled_from([0, 1, 2, 3, 7, 64, 255, 1000]), max_size=3).filter(
            lambda shape: torch.Size(shape).numel() <= 300_000
        ),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=tensor_sets,
    padding=st.integers(0, 600),
    shards=st.integers(1, 3),
    strategy=st.sampled_from(["auto", "direct", "buffered"]),
    backend=st.sampled_from(["auto", "pread"]),
    chunk_bytes=st.sampled_from([65536, 131072, MiB, None]),
    queue_depth=st.sampled_from([1, 2, 7, 64]),
    merge_gap_bytes=st.sampled_from([0, 100, MiB, None]),
    num_threads=st.sampled_from([1, 3]),
)
@pytest.mark.direct_io
def test_any_checkpoint_is_loaded_as_by_safetensors(
    tmp_path: Path, layout: Any, padding: int, shards: int, **options: Any
) -> None:
    config = LoadConfig(staging_bytes=MiB, **options)
    expected: dict[str, Tensor] = {}
    paths = []
    for shard in range(shards):
        tensors = [(f"{shard}.{i}", dtype, shape) for i, (dtype, shape) in enumerate(layout)]
        paths.append(write_file(tmp_path / f"{shard}.safetensors", tensors, padding=padding * shard, seed=shard))
        expected |= safetensors.torch.load_file(paths[-1])
    assert_same_state(load_file(paths, config=config), expected)
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    fast_load(into, paths, config=config)
    assert_same_state(into, expected)


def test_folder_index_and_list_are_the_same_checkpoint(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    tensors = {f"layers.{i}.weight": torch.randn(40, 30) for i in range(7)}
    folder = write_checkpoint(tmp_path / "model", tensors, shards=3)
    files = sorted(folder.glob("*.safetensors"))
    for path in (folder, str(folder), folder / "model.safetensors.index.json", files, [str(file) for file in files]):
        assert_same_state(load_file(path), tensors)
    assert list(load_file(folder)) == [name for file in files for name in safetensors.torch.load_file(file)]


def test_keys_are_in_the_order_of_the_data(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", [(name, "U8", [3]) for name in ("z", "a", "m")])
    assert list(load_file(path)) == ["z", "a", "m"]
    with weightlift.open_checkpoint(path) as checkpoint:
        assert list(checkpoint) == ["z", "a", "m"]


def test_hub_cache_of_symlinks(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    tensors = {f"w{i}": torch.randn(50) for i in range(4)}
    folder = write_checkpoint(tmp_path / "snapshots" / "abc", tensors, shards=2)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(Path("../../blobs") / str(number))
    assert_same_state(load_file(folder), tensors)


def test_real_checkpoints(shared_checkpoints: Path) -> None:
    folders = [folder for folder in sorted(shared_checkpoints.iterdir()) if folder.is_dir()]
    assert folders
    for folder in folders:
        expected: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            expected |= safetensors.torch.load_file(file)
        assert_same_state(load_file(folder), expected)
        into = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        report = fast_load(into, folder)
        assert_same_state(into, expected)
        assert report.bytes_needed == sum(tensor.nbytes for tensor in expected.values())
        assert report.num_tensors == len(expected)


def test_loaded_tensors_are_the_callers(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", [("a", "F32", [MiB]), ("b", "F32", [MiB])])
    first, second = load_file(path), load_file(path)
    expected = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    path.unlink()
    first["a"].zero_()
    first["b"].requires_grad_()
    assert_same_state(second, expected)
    assert_same(first["b"], expected["b"])
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()


def anonymous_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def test_memory_is_freed_with_the_last_tensor(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", [("a", "F32", [16 * MiB]), ("b", "F32", [4 * MiB])])
    load_file(path)
    before = anonymous_bytes()
    tensors = load_file(path)
    expected = tensors["b"].clone()
    assert anonymous_bytes() - before > 70 * MiB
    del tensors["a"]
    gc.collect()
    assert_same(tensors["b"], expected)
    del tensors, expected
    gc.collect()
    assert anonymous_bytes() - before < 4 * MiB


def test_default_device_of_the_caller_does_not_matter(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", [("a", "F32", [100]), ("b", "BF16", [3, 3])])
    expected = safetensors.torch.load_file(path)
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with torch.device("meta"):
        loaded = load_file(path)
        fast_load(into, path)
    assert_same_state(loaded, expected)
    assert_same_state(into, expected)


def test_load_file_reports_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_file(tmp_path / "model.safetensors", [("a", "F32", [1024])])
    with caplog.at_level(logging.INFO, logger="weightlift"):
        load_file(path)
    how, line = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert how.startswith(("prefetch: ", "no prefetch: "))
    assert line.startswith("Loaded 4.00 KiB in ")
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


# ---- fast_load: destinations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(48, 48)
        self.norm = nn.BatchNorm1d(48)
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        self.bias = None


class Model(nn.Module):
    """Nested modules, buffers of both kinds, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 48)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(48, 100, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("inv_freq", torch.rand(24))
        self.register_buffer("cache", torch.full((3,), 7.0), persistent=False)


@pytest.fixture
def model_and_folder(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> tuple[Model, Path]:
    torch.manual_seed(1)
    saved = {name: tensor.detach().clone() for name, tensor in Model().state_dict().items() if name != "head.weight"}
    for tensor in saved.values():
        if tensor.is_floating_point():
            tensor.normal_()
    return Model(), write_checkpoint(tmp_path / "model", saved, shards=3)


def test_module_is_filled(model_and_folder: tuple[Model, Path]) -> None:
    model, folder = model_and_folder
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    report = fast_load(model, folder)
    expected = load_file(folder)
    for name, tensor in model.state_dict().items():
        assert_same(tensor, expected[name if name != "head.weight" else "embed.weight"], name)
        assert tensor.data_ptr() == addresses[name]
    assert model.head.weight is model.embed.weight
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model.cache, torch.full((3,), 7.0))
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    assert report.num_tensors == len(expected) == report.num_transfers
    assert report.bytes_needed == sum(tensor.nbytes for tensor in expected.values())


def test_tied_weight_may_have_both_names(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    saved = {name: torch.ones_like(tensor) for name, tensor in Model().state_dict().items()}
    model = Model()
    fast_load(model, write_checkpoint(tmp_path, {name: t.clone() for name, t in saved.items()}))
    assert_same_state(dict(model.state_dict()), saved)


def test_loading_twice_into_one_model(model_and_folder: tuple[Model, Path]) -> None:
    model, folder = model_and_folder
    expected = load_file(folder)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.data.zero_()
        fast_load(model, folder)
        assert_same(model.blocks[1].attention.weight, expected["blocks.1.attention.weight"])


def test_loaded_model_trains(model_and_folder: tuple[Model, Path]) -> None:
    model, folder = model_and_folder
    fast_load(model, folder)
    model.blocks[0].attention(model.embed(torch.tensor([1, 2]))).sum().backward()
    assert model.embed.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_destination_decides_dtype(model_and_folder: tuple[Model, Path], dtype: torch.dtype) -> None:
    model, folder = model_and_folder
    model.to(dtype)
    fast_load(model, folder)
    expected = load_file(folder)
    for name, tensor in model.state_dict().items():
        saved = expected[name if name != "head.weight" else "embed.weight"]
        assert_same(tensor, saved.to(tensor.dtype), name)


ALL_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool]


def test_every_conversion_is_torchs(tmp_path: Path) -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -3.25, 65504.0, 1e-8, 3e38, float("inf"), float("nan"), 100.0] * 13)
    saved = {f"{src}": values.nan_to_num().clamp(-100, 100).to(src) for src in ALL_DTYPES if not src.is_floating_point}
    saved |= {f"{src}": values.to(src) for src in ALL_DTYPES if src.is_floating_point}
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    for dtype in ALL_DTYPES:
        names = [
            name for name, tensor in saved.items() if dtype.is_floating_point or not tensor.dtype.is_floating_point
        ]
        into = {name: torch.zeros(saved[name].shape, dtype=dtype) for name in names}
        fast_load(into, tmp_path, strict=False)
        for name in names:  # NaNs may differ in their payload: torch's own code paths do not agree about it
            torch.testing.assert_close(into[name], saved[name].to(dtype), rtol=0, atol=0, equal_nan=True)


def test_destinations_of_any_strides(tmp_path: Path) -> None:
    tensors = {name: torch.randn(shape) for name, shape in {"conv": (8, 6, 5, 5), "linear": (64, 300)}.items()}
    tensors |= {"a": torch.randn(70), "b": torch.randn(9)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    flat = torch.zeros(200)
    wide = torch.zeros(64, 1000)
    targets = {
        "conv": torch.zeros(8, 6, 5, 5).to(memory_format=torch.channels_last),
        "linear": torch.zeros(300, 64).t(),
        "a": flat[100:170],
        "b": torch.zeros(9, 4)[:, 2],
    }
    fast_load(targets, tmp_path)
    assert_same_state(targets, tensors)
    assert flat.count_nonzero() == 70
    targets["linear"] = wide[:, 500:800]
    fast_load(targets, tmp_path)
    assert_same_state(targets, tensors)
    assert wide.count_nonzero() == 64 * 300


def test_channels_last_module(tmp_path: Path) -> None:
    saved = {name: torch.randn_like(t) for name, t in nn.Conv2d(5, 7, 3).state_dict().items()}
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    model = nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)
    fast_load(model, tmp_path)
    assert not model.weight.is_contiguous()
    assert_same_state(dict(model.state_dict()), saved)


def test_empty_module_and_empty_mapping(tmp_path: Path) -> None:
    path = hostile.write(tmp_path / "model.safetensors", {})
    for target in (nn.ReLU(), {}):
        report = fast_load(target, path)
        assert (report.bytes_needed, report.bytes_read, report.files) == (0, 0, [])


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("no checkpoint of tensors has such a thing")


def test_extra_state_of_modules_is_left_alone(tmp_path: Path) -> None:
    saved = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    model = WithExtraState(4, 3)
    assert fast_load(model, tmp_path).missing_keys == []
    assert_same(model.weight, saved["weight"])


@pytest.mark.parametrize("target", [None, 3, {"w": 3}, {"w": None}, ["w"]])
@pytest.mark.usefixtures("nothing_is_read")
def test_what_is_no_model_is_a_type_error(tmp_path: Path, target: Any) -> None:
    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")
    with pytest.raises(TypeError, match=r"module|tensor"):
        fast_load(target, path)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("change", [lambda value: value.clone(), lambda value: value.detach(), lambda value: "text"])
def test_state_dict_of_other_tensors_is_an_error(tmp_path: Path, change: Callable[[Tensor], Any]) -> None:
    safetensors.torch.save_file({"weight": torch.ones(4, 3), "bias": torch.ones(4)}, tmp_path / "model.safetensors")
    model = nn.Linear(3, 4)

    def replace(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["weight"] = change(state["weight"])

    model.register_state_dict_post_hook(replace)
    with pytest.raises(TypeError, match=r"of Linear .*: weight; .*load_state_dict"):
        fast_load(model, tmp_path)


def test_state_dict_may_rename(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(4, 3)}, tmp_path / "model.safetensors")
    model = nn.Linear(3, 4, bias=False)

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["w"] = state.pop("weight")

    model.register_state_dict_post_hook(rename)
    fast_load(model, tmp_path)
    assert model.weight.eq(1).all()


def test_tied_weight_of_a_mapping_needs_one_name(model_and_folder: tuple[Model, Path]) -> None:
    model, folder = model_and_folder
    state = model.state_dict()
    assert state["head.weight"] is not state["embed.weight"]
    assert fast_load(state, folder).missing_keys == []
    assert_same(model.head.weight.data, load_file(folder)["embed.weight"])


@pytest.mark.usefixtures("nothing_is_read")
def test_empty_tensors_are_not_tied(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.empty(0)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load({"a": torch.empty(0), "b": torch.empty(0)}, tmp_path)
    assert caught.value.missing_keys == ["b"]


# ---- fast_load: weight loaders

RANK, RANKS = 1, 4


def cut_rows(parameter: nn.Parameter, loaded: Tensor) -> None:
    size = parameter.shape[0]
    parameter.data.copy_(loaded.narrow(0, RANK * size, size))


def cut_columns(parameter: nn.Parameter, loaded: Tensor) -> None:
    size = parameter.shape[1]
    parameter.data.copy_(loaded.narrow(1, RANK * size, size))


class Rank(nn.Module):
    """One rank of RANKS: a weight cut by rows, one by columns, and a whole norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(256 // RANKS, 512))
        self.down = nn.Parameter(torch.empty(512, 256 // RANKS))
        self.norm = nn.Parameter(torch.empty(512))
        self.up.weight_loader = cut_rows
        self.down.weight_loader = cut_columns


@pytest.fixture
def rank_tensors(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> dict[str, Tensor]:
    tensors = {"up": torch.randn(256, 512), "down": torch.randn(512, 256), "norm": torch.randn(512)}
    write_checkpoint(tmp_path, tensors, shards=2)
    return tensors


@pytest.mark.parametrize("wait_seconds", [0.0, 0.25])
def test_weight_loaders_read_what_they_cut(
    tmp_path: Path, rank_tensors: dict[str, Tensor], wait_seconds: float
) -> None:
    model = Rank()
    config = LoadConfig(coverage_wait_seconds=wait_seconds, merge_gap_bytes=0, strategy="buffered")
    report = fast_load(model, tmp_path, config=config)
    assert torch.equal(model.up, rank_tensors["up"][64:128])
    assert torch.equal(model.down, rank_tensors["down"][:, 64:128])
    assert torch.equal(model.norm, rank_tensors["norm"])
    assert report.bytes_needed == (rank_tensors["up"].nbytes + rank_tensors["down"].nbytes) // RANKS + 512 * 4
    assert report.bytes_read == report.bytes_needed
    assert (report.gaps, report.double_writes, report.num_forced) == ([], [], 0)


def test_fused_weight_is_filled_by_loaders_of_its_parts(tmp_path: Path) -> None:
    saved = {"qkv_proj": torch.randn(3, 64, 32), "gate": torch.randn(32)}
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    model = nn.ParameterDict({"qkv_proj": torch.empty(96, 32), "gate": torch.empty(32)})

    def load_parts(parameter: nn.Parameter, loaded: Tensor) -> None:
        for position, part in enumerate(loaded.unbind(0)):
            parameter.data[position * 32 : (position + 1) * 32].copy_(part.chunk(2, 0)[1])

    model["qkv_proj"].weight_loader = load_parts
    report = fast_load(model, tmp_path)
    assert torch.equal(model["qkv_proj"], saved["qkv_proj"][:, 32:].reshape(96, 32))
    assert (report.gaps, report.double_writes) == ([], [])


def one_parameter(folder: Path, loader: Callable[[nn.Parameter, Tensor], None], rows: int = 768) -> nn.Module:
    """A module with `qkv_proj.weight` of `rows` rows and that loader, and a checkpoint for it in `folder`."""
    safetensors.torch.save_file({"qkv_proj.weight": torch.ones(rows, 16)}, folder / "model.safetensors")
    model = nn.Module()
    model.qkv_proj = nn.Linear(16, rows, bias=False)
    model.qkv_proj.weight.weight_loader = loader
    model.qkv_proj.weight.data.zero_()
    return model


@pytest.mark.usefixtures("nothing_is_read")
def test_gap_is_an_error_before_a_byte_is_read(tmp_path: Path) -> None:
    model = one_parameter(tmp_path, lambda parameter, loaded: parameter.data[:512].copy_(loaded[:512]))
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(model, tmp_path)
    assert caught.value.gaps == ["qkv_proj.weight[512:768]"]
    assert "qkv_proj.weight[512:768]" in str(caught.value)
    assert "strict=False" in str(caught.value)
    assert not model.qkv_proj.weight.any()


def test_late_gap_is_an_error_too(tmp_path: Path) -> None:
    model = one_parameter(tmp_path, lambda parameter, loaded: parameter.data[:512].copy_(loaded[:512]))
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(model, tmp_path, config=LoadConfig(coverage_wait_seconds=0))
    assert caught.value.gaps == ["qkv_proj.weight[512:768]"]


def test_gap_is_reported_where_it_is_accepted(tmp_path: Path) -> None:
    model = one_parameter(tmp_path, lambda parameter, loaded: parameter.data[:512].copy_(loaded[:512]))
    report = fast_load(model, tmp_path, strict=False)
    assert report.gaps == ["qkv_proj.weight[512:768]"]
    assert model.qkv_proj.weight[:512].eq(1).all()
    assert not model.qkv_proj.weight[512:].any()


def test_loader_that_does_nothing_leaves_the_whole_parameter(tmp_path: Path) -> None:
    model = one_parameter(tmp_path, lambda parameter, loaded: None)
    assert fast_load(model, tmp_path, strict=False).gaps == ["qkv_proj.weight[0:768]"]


def test_gap_of_columns_names_its_rows(tmp_path: Path) -> None:
    model = one_parameter(tmp_path, lambda parameter, loaded: parameter.data[:, :8].copy_(loaded[:, :8]))
    assert fast_load(model, tmp_path, strict=False).gaps == ["qkv_proj.weight[0:768]"]


def test_gap_of_a_channels_last_weight_is_found(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(7, 5, 3, 3)}, tmp_path / "model.safetensors")
    model = nn.Conv2d(5, 7, 3, bias=False).to(memory_format=torch.channels_last)
    model.weight.weight_loader = lambda parameter, loaded: parameter.data[:5].copy_(loaded[:5])
    assert fast_load(model, tmp_path, strict=False).gaps == ["weight (360 of 1260 bytes)"]
    model.weight.weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded)
    assert fast_load(model, tmp_path).gaps == []
    assert model.weight.eq(1).all()


def test_double_write_is_reported_and_the_later_one_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def load(parameter: nn.Parameter, loaded: Tensor) -> None:
        parameter.data.copy_(loaded)
        parameter.data[5:10].copy_(loaded[:5])

    model = one_parameter(tmp_path, load)
    report = fast_load(model, tmp_path)
    assert report.double_writes == ["qkv_proj.weight[5:10]"]
    assert model.qkv_proj.weight.eq(1).all()
    assert "qkv_proj.weight[5:10]" in caplog.text


def test_fills_of_the_loader_count_as_coverage(tmp_path: Path) -> None:
    def load(parameter: nn.Parameter, loaded: Tensor) -> None:
        parameter.data[700:].fill_(3)
        parameter.data[:700].copy_(loaded[:700])

    model = one_parameter(tmp_path, load)
    report = fast_load(model, tmp_path)
    assert (report.gaps, report.double_writes) == ([], [])
    assert model.qkv_proj.weight[700:].eq(3).all()


def test_fill_before_a_copy_is_no_double_write(tmp_path: Path) -> None:
    def load(parameter: nn.Parameter, loaded: Tensor) -> None:
        parameter.data.zero_()
        parameter.data[:700].copy_(loaded[:700])

    model = one_parameter(tmp_path, load)
    report = fast_load(model, tmp_path)
    assert (report.gaps, report.double_writes) == ([], [])
    assert not model.qkv_proj.weight[700:].any()


def test_loader_that_looks_at_values_gets_them(tmp_path: Path) -> None:
    seen = []

    def load(parameter: nn.Parameter, loaded: Tensor) -> None:
        parameter.data.copy_(loaded)
        seen.append(float(parameter.sum()))
        seen.append(float(loaded.max()))

    model = one_parameter(tmp_path, load)
    report = fast_load(model, tmp_path)
    assert seen == [768 * 16, 1]
    assert report.num_forced == 1
    assert (report.gaps, report.double_writes) == ([], [])


def test_loader_that_raises_leaves_nothing_running(tmp_path: Path) -> None:
    def load(parameter: nn.Parameter, loaded: Tensor) -> None:
        parameter.data.copy_(loaded)
        raise LookupError("no such expert")

    model = one_parameter(tmp_path, load)
    with pytest.raises(LookupError, match="no such expert"):
        fast_load(model, tmp_path)
    assert not model.qkv_proj.weight.any()
    assert loading_threads() == []


def test_loader_that_keeps_the_tensor_keeps_values(tmp_path: Path) -> None:
    model = one_parameter(tmp_path, lambda parameter, loaded: None)

    def load(parameter: nn.Parameter, loaded: Tensor) -> None:
        parameter.data.copy_(loaded)
        model.qkv_proj.kept = loaded
        model.qkv_proj.part = nn.Parameter(loaded[:384])

    model.qkv_proj.weight.weight_loader = load
    fast_load(model, tmp_path)
    assert type(model.qkv_proj.kept) is Tensor
    assert type(model.qkv_proj.part) is nn.Parameter
    assert_same(model.qkv_proj.kept, torch.ones(768, 16))
    assert_same(model.qkv_proj.part.data, torch.ones(384, 16))


# ---- fast_load: what does not fit


@pytest.mark.usefixtures("nothing_is_read")
def test_all_differences_are_one_error_before_a_byte_is_read(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    saved = {"weight": torch.ones(4, 3), "extra": torch.ones(2), "bias": torch.ones(4)}
    folder = write_checkpoint(tmp_path / "model", saved, shards=2)
    model = nn.Module()
    model.weight, model.bias, model.scale = (nn.Parameter(torch.zeros(n)) for n in (5, 4, 1))
    with pytest.raises(CheckpointMismatchError) as caught:
        fast_load(model, folder)
    assert not any(parameter.any() for parameter in model.parameters())
    error = caught.value
    assert (error.missing_keys, error.unexpected_keys, len(error.mismatched)) == (["scale"], ["extra"], 1)
    with pytest.raises(RuntimeError) as of_torch:
        model.load_state_dict(saved)
    for line in str(of_torch.value).splitlines():
        assert line.strip() in str(error)
    assert error.path == str(folder)
    assert str(folder) in str(error)


def test_not_strict_reports_names_and_loads_the_rest(tmp_path: Path) -> None:
    saved = {"weight": torch.ones(4, 3), "extra": torch.ones(2)}
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    model = nn.Linear(3, 4)
    report = fast_load(model, tmp_path, strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (["bias"], ["extra"])
    assert model.weight.eq(1).all()
    assert report.bytes_needed == 4 * 3 * 4


@pytest.mark.usefixtures("nothing_is_read")
def test_size_mismatch_is_an_error_in_any_case(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(4, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match="size mismatch for weight"):
        fast_load(nn.Linear(4, 4, bias=False), tmp_path, strict=False)


@pytest.mark.usefixtures("nothing_is_read")
def test_weight_loader_of_none_is_none(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(1, 3)}, tmp_path / "model.safetensors")
    model = nn.Linear(3, 4, bias=False)
    model.weight.weight_loader = None
    with pytest.raises(CheckpointMismatchError, match="size mismatch for weight"):
        fast_load(model, tmp_path)


@pytest.mark.usefixtures("nothing_is_read")
def test_meta_parameters_are_an_error_with_both_remedies(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(4, 3)}, tmp_path / "model.safetensors")
    model = nn.Linear(3, 4, bias=False, device="meta")
    with pytest.raises(CheckpointMismatchError, match="meta device") as caught:
        fast_load(model, tmp_path)
    assert 'to_empty(device="cpu")' in str(caught.value)
    assert "assign=True" in str(caught.value)


def test_both_remedies_for_meta_parameters_work(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(4, 3)}, tmp_path / "model.safetensors")
    model = nn.Linear(3, 4, bias=False, device="meta")
    model.load_state_dict(load_file(tmp_path), assign=True)
    assert model.weight.eq(1).all()
    model = nn.Linear(3, 4, bias=False, device="meta").to_empty(device="cpu")
    fast_load(model, tmp_path)
    assert model.weight.eq(1).all()


# ---- the report


def files_of(report: LoadReport) -> int:
    return sum(file.bytes_read for file in report.files)


def test_report_adds_up(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    tensors = {f"experts.{i}": torch.zeros(512, 512) for i in range(24)}
    folder = write_checkpoint(tmp_path / "model", tensors, shards=3)
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    started = time.perf_counter()
    report = fast_load(into, folder)
    elapsed = time.perf_counter() - started
    assert report.bytes_needed == 24 * MiB
    assert report.bytes_read == report.direct_bytes + report.buffered_bytes == files_of(report)
    assert report.in_place_bytes <= report.bytes_read
    assert [Path(file.path).name for file in report.files] == sorted(file.name for file in folder.glob("*.safetensors"))
    assert report.seconds.keys() == {"header", "record", "wait", "total"}
    parts = [report.seconds[phase] for phase in ("header", "record", "wait")]
    assert min(parts) >= 0
    assert sum(parts) <= report.seconds["total"] <= elapsed
    assert (report.num_tensors, report.num_transfers, report.num_dropped, report.num_forced) == (24, 24, 0, 0)


def test_report_of_a_checkpoint_counts_no_second_twice(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", [("w", "F32", [8 * MiB])])
    into = torch.empty(8 * MiB)
    started = time.perf_counter()
    with weightlift.open_checkpoint(path) as checkpoint:
        into.copy_(checkpoint["w"])
        checkpoint.run()
    elapsed = time.perf_counter() - started
    assert checkpoint.report.seconds["total"] <= elapsed
    assert checkpoint.report.seconds["wait"] > 0


def test_report_while_recording_counts_the_time_so_far(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", [("w", "F32", [1024])])
    into = torch.empty(1024)
    started = time.perf_counter()
    with weightlift.open_checkpoint(path) as checkpoint:
        time.sleep(0.02)
        into.copy_(checkpoint["w"])
        checkpoint.run()
        seconds = checkpoint.report.seconds
        elapsed = time.perf_counter() - started
    assert seconds["record"] >= 0.02
    assert seconds["wait"] > 0
    assert seconds["total"] <= elapsed


def test_checkpoints_are_equal_when_they_are_one(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", [("w", "F32", [4])])
    one, other = weightlift.open_checkpoint(path), weightlift.open_checkpoint(path)
    assert len({one, one, other}) == 2
    assert one == one
    assert one != other


def test_files_of_a_checkpoint_are_of_public_types(tmp_path: Path) -> None:
    files = weightlift.open_checkpoint(write_file(tmp_path / "model.safetensors", [("w", "F32", [4])])).files
    assert isinstance(files, weightlift.CheckpointFiles)
    assert isinstance(files.shards[0], weightlift.Shard)
    assert isinstance(files.tensors["w"], weightlift.TensorEntry)


def test_a_bad_log_variable_is_a_warning_of_the_first_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "model.safetensors", [("w", "F32", [4])])
    monkeypatch.setenv("WEIGHTLIFT_LOG_TO_STDERR", "loud")
    with pytest.warns(UserWarning, match="WEIGHTLIFT_LOG_TO_STDERR is 'loud'; accepted is 0 or 1"):
        load_file(path)


@pytest.mark.direct_io
@pytest.mark.parametrize("cut", ["whole", "rows", "experts"])
def test_direct_reads_fetch_little_in_vain(tmp_path: Path, cut: str) -> None:
    tensors = [(f"w{i}", "BF16", [1024, 512]) for i in range(24)]  # 1 MiB each
    path = write_file(tmp_path / "model.safetensors", tensors, padding=3)
    expected = safetensors.torch.load_file(path)
    config = LoadConfig(strategy="direct")
    if cut == "whole":
        into = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        report = fast_load(into, path, config=config)
    elif cut == "experts":
        into = {name: torch.empty_like(tensor) for name, tensor in expected.items() if int(name[1:]) % 4 == 1}
        report = fast_load(into, path, config=config, strict=False)
    else:
        into = {name: nn.Parameter(torch.empty(256, 512, dtype=torch.bfloat16)) for name in expected}
        for parameter in into.values():
            parameter.weight_loader = cut_rows
        report = fast_load(into, path, config=config)
        expected = {name: tensor[256:512] for name, tensor in expected.items()}
    for name, tensor in into.items():
        assert_same(tensor, expected[name])
    assert report.bytes_needed == sum(tensor.nbytes for tensor in into.values())
    assert report.direct_bytes == report.bytes_read
    assert report.over_read <= 1.02


def test_summary_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")
    with caplog.at_level(logging.INFO, logger="weightlift"):
        report = fast_load({"w": torch.empty(4, dtype=torch.uint8)}, path)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert messages == [*report.strategy_notes, report.summary()]


# ---- progress


class Bars:
    """Stands in for tqdm, and keeps what it was told."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, *, total: int, **_: Any) -> Any:
        bars = self

        class Bar:
            def __init__(self) -> None:
                self.total, self.n, self.closed = total, 0, False
                bars.made.append(self)

            def update(self, by: int) -> None:
                assert by > 0
                self.n += by

            def refresh(self) -> None:
                pass

            def close(self) -> None:
                self.closed = True

        return Bar()


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Bars:
    bars = Bars()
    monkeypatch.setattr("tqdm.tqdm", bars)
    return bars


def test_progress_ends_at_what_was_needed(tmp_path: Path, rank_tensors: dict[str, Tensor], bars: Bars) -> None:
    load_file(tmp_path, progress=True)
    report = fast_load(Rank(), tmp_path, progress=True)
    model = nn.ParameterDict({"norm": torch.empty(512)})
    fast_load(model, tmp_path, progress=True, strict=False)
    whole = sum(tensor.nbytes for tensor in rank_tensors.values())
    assert [(bar.n, bar.total) for bar in bars.made] == [
        (whole, whole),
        (report.bytes_needed, report.bytes_needed),
        (512 * 4, 512 * 4),
    ]
    assert all(bar.closed for bar in bars.made)


def test_progress_is_closed_after_a_failure(tmp_path: Path, bars: Bars) -> None:
    model = one_parameter(tmp_path, lambda parameter, loaded: None)
    with pytest.raises(CheckpointMismatchError):
        fast_load(model, tmp_path, progress=True)
    assert [bar.closed for bar in bars.made] == [True]


def test_progress_is_shown_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_file(tmp_path / "model.safetensors", [("w", "F32", [MiB])])
    load_file(path, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "4.19M/4.19M" in captured.err
    assert "B/s" in captured.err


# ---- threads


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No thread, descriptor or mapping more than before, and little memory."""

    threads, fds, mappings = resources()
    memory = anonymous_bytes()
    yield
    assert resources() == (threads, fds, mappings)
    assert threads == []
    assert anonymous_bytes() - memory < 64 * MiB


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("strategy", ["buffered", pytest.param("direct", marks=pytest.mark.direct_io)])
def test_load_leaves_nothing_behind(tmp_path: Path, strategy: Any) -> None:
    paths = [write_file(tmp_path / f"{i}.safetensors", [(f"w{i}", "F32", [5 * MiB])]) for i in range(3)]
    into = {f"w{i}": torch.empty(5 * MiB) for i in range(3)}
    for _ in range(3):
        fast_load(into, paths, config=LoadConfig(strategy=strategy))


@pytest.mark.usefixtures("nothing_is_left")
def test_failed_load_leaves_nothing_behind(tmp_path: Path) -> None:
    paths = [write_file(tmp_path / f"{i}.safetensors", [(f"w{i}", "F32", [5 * MiB])]) for i in range(3)]
    into = {f"w{i}": torch.empty(5 * MiB) for i in range(3)}

    def load() -> None:
        with weightlift.open_checkpoint(paths) as checkpoint:
            os.truncate(paths[2], 8 * MiB)
            for name, tensor in into.items():
                tensor.copy_(checkpoint[name])

    with pytest.raises(CheckpointError, match="has changed"):
        load()
    with pytest.raises(CheckpointError):
        fast_load(into, paths)


def test_failed_load_keeps_no_model_alive(tmp_path: Path) -> None:
    def load(parameter: nn.Parameter, loaded: Tensor) -> None:
        parameter.data.copy_(loaded)
        os.truncate(tmp_path / "model.safetensors", 1000)

    def fail() -> weakref.ref[Tensor]:
        model = one_parameter(tmp_path, load)
        with contextlib.suppress(CheckpointError):
            fast_load(model, tmp_path)
        return weakref.ref(model.qkv_proj.weight)

    gc.collect()
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_loads_in_several_threads_at_once(tmp_path: Path) -> None:
    paths = [write_file(tmp_path / f"{i}.safetensors", [("w", "F32", [3 * MiB + i])], seed=i) for i in range(2)]
    expected = [safetensors.torch.load_file(path)["w"] for path in paths]
    results: dict[int, Tensor] = {}

    def load(i: int) -> None:
        for _ in range(3):
            model = nn.ParameterDict({"w": torch.empty(3 * MiB + i)})
            model["w"].weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded)
            fast_load(model, paths[i])
            results[i] = model["w"].data
            assert torch.equal(as_bytes(load_file(paths[i])["w"]), as_bytes(expected[i]))

    threads = [threading.Thread(target=load, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert_same(results[i], expected[i])


def test_wrong_kinds_of_arguments_are_told(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(TypeError, match="config: expected a LoadConfig, found dict"):
        weightlift.load_file(path, config={"queue_depth": 4})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected the path of a checkpoint, or a list of files, found NoneType"):
        weightlift.load_file(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a module or a mapping from names to tensors, found PosixPath"):
        weightlift.fast_load(path, {"w": torch.zeros(2)})  # type: ignore[arg-type]
