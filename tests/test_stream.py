"""iter_weights: safetensors' tensors, in order, owned by the caller, read ahead in bounded memory; ends when told."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resources import PeakMemory, loading_threads, resources
from torch import Tensor

import weightlift
from weightlift import CheckpointError, CheckpointReadError, LoadConfig, open_checkpoint
from weightlift.stream import iter_weights

MiB = 1 << 20
WriteCheckpoint = Callable[..., Path]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert type(actual) is Tensor
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {f"layers.{i}.{part}": noise(17 + i, 33, seed=i) for i in range(12) for part in ("weight", "bias")}


# ---- what comes


def test_tensors_are_those_of_safetensors_in_the_order_of_the_files(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, tensors: dict[str, Tensor]
) -> None:
    folder = write_checkpoint(tmp_path, tensors, shards=3)
    arrived = list(iter_weights(folder))
    assert [name for name, _ in arrived] == list(open_checkpoint(folder))
    assert len(arrived) == len(tensors)
    for name, tensor in arrived:
        assert_same(tensor, tensors[name])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 1000, 65_537, 300_000, MiB, 5 * MiB + 1]), min_size=1, max_size=14),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]),
    staging_bytes=st.sampled_from([MiB, 3 * MiB + 5, 64 * MiB]),
    order=st.sampled_from(["file", "module"]),
    strategy=st.sampled_from(["auto", "buffered", "lazy", "eager", "prefetch"]),
)
def test_any_checkpoint_is_streamed_within_any_bound(
    tmp_path: Path, sizes: list[int], dtype: torch.dtype, staging_bytes: int, **how: Any
) -> None:
    expected = {f"m{i % 3}.w{i}": noise(size // dtype.itemsize, dtype=dtype, seed=i) for i, size in enumerate(sizes)}
    safetensors.torch.save_file(expected, tmp_path / "model.safetensors")
    order = how.pop("order")
    config = LoadConfig(staging_bytes=staging_bytes, **how)
    arrived = list(iter_weights(tmp_path, order=order, config=config))
    assert sorted(name for name, _ in arrived) == sorted(expected)
    for name, tensor in arrived:
        assert_same(tensor, expected[name])


def test_tensors_are_the_callers(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    tensors = {f"w{i}": noise(5 * MiB, dtype=torch.uint8, seed=i) for i in range(4)} | {"s": torch.tensor(2.0)}
    folder = write_checkpoint(tmp_path, tensors)
    kept = {}
    for name, tensor in iter_weights(folder, config=LoadConfig(staging_bytes=8 * MiB)):
        kept[name] = tensor
        if name == "w1":
            tensor.zero_()
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept.values()}) == len(tensors)
    kept["w1"].copy_(tensors["w1"])
    for name, tensor in kept.items():
        assert_same(tensor, tensors[name])
        tensor.add_(1)


def test_module_order_brings_modules_together(tmp_path: Path) -> None:
    # As quantised checkpoints are written: all scales first.
    names = ["a.scale", "b.scale", "c.scale", "b.weight", "a.weight", "c.weight", "top"]
    header = {name: hostile.tensor("U8", [1], [i, i + 1]) for i, name in enumerate(names)}
    path = hostile.write(tmp_path / "model.safetensors", header, bytes(range(len(names))))
    assert [name for name, _ in iter_weights(path)] == names
    arrived = [(name, tensor.item()) for name, tensor in iter_weights(path, order="module")]
    assert [name for name, _ in arrived] == ["a.scale", "a.weight", "b.scale", "b.weight", "c.scale", "c.weight", "top"]
    assert all(names[value] == name for name, value in arrived)


def test_filtered_tensors_are_not_read(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, tensors, shards=3)
    last = sorted(folder.glob("*.safetensors"))[-1]
    held = set(safetensors.torch.load_file(last))
    last.write_bytes(b"not opened, since nothing of it is wanted")

    def unwanted(name: str) -> str | None:
        return "in the last shard" if name in held else "bias" if name.endswith("bias") else None

    arrived = dict(iter_weights(folder, filters=[None, unwanted]))
    assert arrived.keys() == {name for name in tensors if unwanted(name) is None}
    for name, tensor in arrived.items():
        assert_same(tensor, tensors[name])


def test_a_checkpoint_without_tensors_is_an_empty_stream(tmp_path: Path) -> None:
    assert list(iter_weights(hostile.write(tmp_path / "model.safetensors", {}))) == []


def test_files_of_torch_are_streamed_too(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    saved = {"w": base, "transposed": base.t(), "cut": base[1:3, 2:5], "scalar": torch.tensor(3)}
    torch.save(saved, tmp_path / "pytorch_model.bin")
    arrived = dict(iter_weights(tmp_path / "pytorch_model.bin"))
    assert arrived.keys() == saved.keys()
    for name, tensor in arrived.items():
        assert torch.equal(tensor, saved[name])
        assert tensor.stride() == saved[name].stride()


def test_a_million_scalars_do_not_arrive_at_once(tmp_path: Path) -> None:
    steps = list(
        weightlift.stream._steps(
            [weightlift.TensorEntry(f"{i}", torch.float32, (), 4 * i, 4, None) for i in range(5000)],  # type: ignore[arg-type]
            MiB,
        )
    )
    assert [len(step.entries) for step in steps] == [1020, 1020, 1020, 1020, 920]


def test_without_mappings_the_allocator_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")  # as many mappings as the system lets a process have

    expected = {"w": noise(5 * MiB, dtype=torch.uint8)}
    safetensors.torch.save_file(expected, tmp_path / "model.safetensors")
    monkeypatch.setattr("weightlift.memory.mmap.mmap", refuse)
    ((_, tensor),) = iter_weights(tmp_path)
    assert_same(tensor, expected["w"])


# ---- devices


def test_meta_holds_no_values(tmp_path: Path) -> None:
    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")
    with pytest.raises(ValueError, match=r"device is 'meta', which holds no values; open_checkpoint\(\)"):
        iter_weights(path, "meta")


def test_a_device_that_is_not_there_is_torchs_error_at_once(tmp_path: Path) -> None:
    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")
    with pytest.raises(RuntimeError, match="device type"):
        iter_weights(path, "no_such_device")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device here")
def test_tensors_go_to_a_gpu(tmp_path: Path, write_checkpoint: WriteCheckpoint, tensors: dict[str, Tensor]) -> None:
    for name, tensor in iter_weights(write_checkpoint(tmp_path, tensors), "cuda"):
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu().view(torch.uint8), tensors[name].view(torch.uint8))


@pytest.mark.parametrize("size", [100, 5 * MiB])
def test_a_default_device_of_the_caller_is_not_for_the_tensors(tmp_path: Path, size: int) -> None:
    expected = {"w": noise(size, dtype=torch.uint8)}
    safetensors.torch.save_file(expected, tmp_path / "model.safetensors")
    with torch.device("meta"):
        ((_, tensor),) = iter_weights(tmp_path)
    assert_same(tensor, expected["w"])


# ---- memory


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 MiB: one tensor of 96 MiB, some of 16 and of 3 MiB, in two shards."""
    folder = tmp_path_factory.mktemp("large")
    for number in range(2):
        sizes = [96, *[16] * 8, *[3] * 10] if number == 0 else [16] * 12 + [3] * 22
        tensors = {f"{number}.{i}": torch.full((size * MiB,), i, dtype=torch.uint8) for i, size in enumerate(sizes)}
        safetensors.torch.save_file(tensors, folder / f"model-{number}.safetensors")
    return folder


@pytest.mark.parametrize("strategy", ["auto", "buffered", pytest.param("direct", marks=pytest.mark.direct_io)])
def test_memory_is_bounded_whatever_the_size_of_the_checkpoint(large: Path, strategy: Any) -> None:
    config = LoadConfig(strategy=strategy, staging_bytes=64 * MiB)
    next(iter_weights(large, config=config))  # what is loaded and made once
    num_bytes = 0
    with PeakMemory() as memory:
        for name, tensor in iter_weights(large, config=config):
            num_bytes += tensor.nbytes
            assert tensor[-1] == int(name.split(".")[1])
            del tensor
    assert num_bytes > 510 * MiB
    # The one of 96 MiB is read alone, through reads of at most half of the staging memory.
    assert memory.growth < (96 + 32 + 16) * MiB


def test_reading_ahead_is_bounded_while_the_caller_takes_its_time(large: Path) -> None:
    config = LoadConfig(staging_bytes=32 * MiB)
    next(iter_weights(large / "model-1.safetensors", config=config))
    with PeakMemory() as memory:
        stream = iter_weights(large / "model-1.safetensors", config=config)
        next(stream)
        threading.Event().wait(0.3)
        stream.close()
    # The tensor that was handed out, or read ahead alone (16 MiB), and the staging memory.
    assert memory.growth < (16 + 32 + 16) * MiB


def test_what_the_caller_lets_go_of_is_freed(large: Path) -> None:
    with PeakMemory() as memory:
        stream = iter_weights(large / "model-0.safetensors", config=LoadConfig(staging_bytes=4 * MiB))
        name, tensor = next(stream)
        assert tensor.nbytes == 96 * MiB
        del name, tensor
        gc.collect()
        assert memory._now() - memory.first < 64 * MiB
        stream.close()


# ---- the end


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No thread, descriptor or mapping more than before."""

    before = resources()
    yield
    assert resources() == before


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("strategy", ["auto", "prefetch"])
def test_a_finished_stream_leaves_nothing_behind(large: Path, strategy: Any) -> None:
    stream = iter_weights(large, config=LoadConfig(strategy=strategy))
    for _ in stream:
        pass
    assert loading_threads() == []


@pytest.mark.usefixtures("nothing_is_left")
def test_closing_early_ends_reading(large: Path) -> None:
    stream = iter_weights(large, config=LoadConfig(staging_bytes=16 * MiB))
    next(stream)
    assert loading_threads()
    stream.close()
    assert loading_threads() == []
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.usefixtures("nothing_is_left")
def test_an_exception_of_the_consumer_ends_reading(large: Path) -> None:
    def consume() -> None:
        for _ in iter_weights(large):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert loading_threads() == []


@pytest.mark.usefixtures("nothing_is_left")
def test_a_stream_that_is_never_asked_reads_nothing(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlift.storage._C.Pipeline", lambda **_: pytest.fail("the pipeline was started"))
    stream = iter_weights(large)
    del stream


@pytest.mark.usefixtures("nothing_is_left")
def test_a_file_cut_short_under_way_names_file_and_tensor(large: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((large / "model-1.safetensors").read_bytes())
    stream = iter_weights(path, config=LoadConfig(staging_bytes=16 * MiB, strategy="buffered"))
    next(stream)
    os.truncate(path, 150 * MiB)
    with pytest.raises(CheckpointReadError) as caught:
        for _ in stream:
            pass
    assert caught.value.path == str(path)
    assert caught.value.reason in ("FileTruncated", "FileChanged")
    assert caught.value.incomplete
    assert all(name.startswith("1.") for name in caught.value.incomplete)
    assert f"not loaded: {caught.value.incomplete[0]}" in str(caught.value)
    assert loading_threads() == []


def test_errors_of_files_and_settings_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        iter_weights(tmp_path / "missing")
    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")
    with pytest.raises(TypeError, match="config: expected a LoadConfig, found dict"):
        iter_weights(path, config={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="order is 'name'; accepted is one of 'file', 'module'"):
        iter_weights(path, order="name")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exclude each other"):
        iter_weights(path, config=LoadConfig(strategy="lazy", prefetch_num_threads=2))


# ---- telling


def test_summary_is_logged_at_the_end(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="weightlift"):
        for _ in iter_weights(large):
            pass
    assert any("no prefetch" in message for message in caplog.messages)
    assert caplog.messages[-1].startswith("Loaded ")
    assert "tensors=53" in caplog.messages[-1]


def test_progress_counts_what_was_handed_out(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(
        weightlift.progress.ProgressBar, "update_to", lambda self, done, total: told.append((done, total))
    )
    total = sum(tensor.nbytes for _, tensor in iter_weights(large, progress=True))
    assert [entry[0] for entry in told] == sorted(entry[0] for entry in told)
    assert {entry[1] for entry in told} == {total}
    assert told[-1] == (total, total)
