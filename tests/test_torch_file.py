"""Files of `torch.save`: they load as by `torch.load(weights_only=True)`, and nothing in them is run or trusted."""

from __future__ import annotations

import collections
import io
import json
import math
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import weightlift
from weightlift import CheckpointError, CheckpointNotFoundError
from weightlift.torch_file import read_torch_shard
from weightlift.torch_pickle import _STORAGE_TYPES, _YOUNGER_DTYPES

MiB = 1 << 20
FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
TYPED = sorted(set(_STORAGE_TYPES.values()), key=str)
UNTYPED = [getattr(torch, name) for name in _YOUNGER_DTYPES if hasattr(torch, name)]


def save(content: Any, path: Path, *, zipped: bool = True) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random bits; bools are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """Bits of the elements, in row-major order, by means that work for every dtype."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
    size = tensor.dtype.itemsize
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return whole.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size).clone()


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    assert torch.equal(as_bytes(actual), as_bytes(expected))


def assert_loads_like_torch(path: Path) -> None:
    expected = torch.load(path, weights_only=True)
    loaded = weightlift.load_file(path)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(loaded[name], tensor)


def assert_refused(path: Path, reason: str, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_torch_shard(path)
    assert caught.value.reason == reason
    assert caught.value.path == str(path)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(autouse=True)
def _torch_warns_of_nothing() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        yield


# ---- values


@FORMATS
@pytest.mark.parametrize("dtype", TYPED, ids=str)
def test_every_dtype_loads(tmp_path: Path, dtype: torch.dtype, zipped: bool) -> None:
    tensors = {"a": noise(5, 7, dtype=dtype), "scalar": noise(dtype=dtype, seed=1), "empty": noise(0, 3, dtype=dtype)}
    assert_loads_like_torch(save(tensors, tmp_path / "model.bin", zipped=zipped))


@pytest.mark.parametrize("dtype", UNTYPED, ids=str)
def test_dtypes_without_a_storage_type_load(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": noise(5, 8, dtype=dtype),
        "view": noise(6, 8, dtype=dtype)[1:, ::2],
        "empty": noise(0, 3, dtype=dtype),
    }
    assert_loads_like_torch(save(tensors, tmp_path / "model.bin"))


def test_the_older_format_with_an_untyped_storage_is_refused_as_torch_does(tmp_path: Path) -> None:
    path = save({"a": noise(3, dtype=torch.uint16)}, tmp_path / "model.bin", zipped=False)
    with pytest.raises(AttributeError):
        torch.load(path, weights_only=True)
    assert_refused(path, "UnsupportedPickle", "untyped storage")


def view_of(base: Tensor, kind: str, a: int, b: int) -> Tensor:
    dim = a % base.dim() if base.dim() else 0
    if not base.dim():
        return base
    size = base.shape[dim]
    match kind:
        case "t":
            return base.transpose(dim, b % base.dim())
        case "narrow":
            start = b % (size + 1)
            return base.narrow(dim, start, size - start)
        case "step":
            return base[(slice(None),) * dim + (slice(None, None, 1 + b % 3),)]
        case "expand":
            return base.unsqueeze(0).expand(b % 4, *base.shape)
        case "unfold":
            return base.unfold(dim, min(2, size), 1)
        case "select":
            return base.select(dim, b % size) if size else base
        case "diagonal":
            return base.diagonal() if base.dim() >= 2 else base
        case "ones":
            return base.as_strided((1, *base.shape), (b, *base.stride()))
        case "parameter":
            return nn.Parameter(base, requires_grad=base.is_floating_point())
        case _:
            return base


VIEWS = ["t", "narrow", "step", "expand", "unfold", "select", "diagonal", "ones", "parameter", "whole"]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
view_chains = st.lists(st.tuples(st.sampled_from(VIEWS), st.integers(0, 3), st.integers(0, 5)), max_size=3)
state_dicts = st.lists(
    st.tuples(shapes, st.sampled_from(TYPED), st.lists(view_chains, min_size=1, max_size=3)), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bases=state_dicts, zipped=st.booleans(), ordered=st.booleans())
def test_any_views_that_share_any_storages_load(
    tmp_path: Path, bases: list[tuple[tuple[int, ...], torch.dtype, list[Any]]], zipped: bool, ordered: bool
) -> None:
    tensors: dict[str, Tensor] = collections.OrderedDict() if ordered else {}
    for i, (shape, dtype, chains) in enumerate(bases):
        base = noise(*shape, dtype=dtype, seed=i)
        for j, chain in enumerate(chains):
            tensor = base
            for kind, a, b in chain:
                tensor = view_of(tensor, kind, a, b)
            tensors[f"{i}.{j}"] = tensor
    path = save(tensors, tmp_path / "model.bin", zipped=zipped)
    assert_loads_like_torch(path)
    expected = torch.load(path, weights_only=True)
    with weightlift.open_checkpoint(path) as checkpoint:
        copies = {
            name: torch.empty_like(tensor, memory_format=torch.contiguous_format) for name, tensor in expected.items()
        }
        for name, tensor in expected.items():
            on_disk = checkpoint[name]
            assert on_disk.stride() == tensor.stride()
            copies[name].copy_(on_disk)
        for name, tensor in expected.items():
            assert_same(checkpoint[name].as_subclass(Tensor), tensor)
    for name, tensor in expected.items():
        assert torch.equal(as_bytes(copies[name]), as_bytes(tensor))


@FORMATS
@pytest.mark.parametrize("size", [100, 3000])  # small tensors are kept as values, large ones are not
def test_strided_tensors_are_read_sliced_and_written_to_as_real_ones(tmp_path: Path, size: int, zipped: bool) -> None:
    base = noise(size, 40, dtype=torch.int32)
    tensors = {"t": base.t(), "columns": base[:, 3:30:2], "expanded": base[5].expand(9, 40), "rows": base[7:]}
    checkpoint = weightlift.open_checkpoint(save(tensors, tmp_path / "model.bin", zipped=zipped))
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint[name] + 1, tensor + 1)
        assert torch.equal(checkpoint[name][3:8].t(), tensor[3:8].t())
        assert torch.equal(checkpoint[name].float(), tensor.float())
        assert torch.equal(checkpoint[name].contiguous().view(-1), tensor.reshape(-1))
        assert checkpoint[name].is_contiguous() == tensor.is_contiguous()
    written = checkpoint["t"]
    written[2].zero_()
    assert torch.equal(written, torch.cat([base.t()[:2], torch.zeros(1, size, dtype=torch.int32), base.t()[3:]]))
    with pytest.raises(RuntimeError, match="more than one element"):
        checkpoint["expanded"].add_(1)


def test_tensors_of_the_same_bytes_share_memory_and_are_read_once(tmp_path: Path) -> None:
    base = noise(1024, 1536)  # 6 MiB: in a mapping
    small = noise(8, 8)
    tensors = {"embed": base, "head": base, "t": base.t(), "rows": base[:512], "s": small, "s2": small, "s3": small.t()}
    path = save(tensors, tmp_path / "model.bin")
    assert_loads_like_torch(path)
    loaded = weightlift.load_file(path)
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr() == loaded["t"].data_ptr()
    assert loaded["s"].data_ptr() == loaded["s2"].data_ptr() == loaded["s3"].data_ptr()
    loaded["rows"].zero_()
    assert torch.equal(as_bytes(loaded["embed"]), as_bytes(base))
    with weightlift.open_checkpoint(path) as checkpoint:
        torch.empty(1024, 1536).copy_(checkpoint["embed"])
        torch.empty(1024, 1536).copy_(checkpoint["head"])
    assert checkpoint.report.bytes_read < 1.1 * base.nbytes


@FORMATS
def test_small_neighbours_with_holes_and_overlaps_keep_their_values(tmp_path: Path, zipped: bool) -> None:
    large, small = noise(3 * MiB // 4), noise(1000)
    tensors = {
        "a": small,
        "first": large[:4],
        "next": large[2:7],
        "inside": large[3:5],
        "far": large[-3:],
        "b": small[100:],
        "c": small[50:60],
    }
    path = save(tensors, tmp_path / "model.bin", zipped=zipped)
    checkpoint = weightlift.open_checkpoint(path)
    for name, tensor in tensors.items():
        assert torch.equal(as_bytes(checkpoint[name] + 0), as_bytes(tensor + 0))
    assert checkpoint.report.bytes_read < 100_000  # not the 3 MiB between


@FORMATS
def test_a_large_file_whose_elements_are_not_aligned_loads(tmp_path: Path, zipped: bool) -> None:
    tensors = {
        "a": noise(MiB, dtype=torch.float64),
        "odd": noise(3, dtype=torch.uint8),
        "b": noise(MiB),
        "t": noise(9, 9).t(),
    }
    assert_loads_like_torch(save(tensors, tmp_path / "model.bin", zipped=zipped))


# ---- what is read


def bytes_read_by_this_process() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar


def test_the_header_of_a_large_file_is_read_without_its_data(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    with torch.serialization.skip_data():  # leaves holes in the place of storages
        torch.save({"large": torch.empty(1 << 31), "b": torch.empty(3)}, path)
    assert path.stat().st_size > 8 << 30
    before = bytes_read_by_this_process()
    shard = read_torch_shard(path)
    assert bytes_read_by_this_process() - before < 4096
    assert [entry.name for entry in shard.tensors] == ["large", "b"]
    assert [entry.nbytes for entry in shard.tensors] == [8 << 30, 12]
    assert shard.tensors[1].offset > 8 << 30  # beyond what 32 bits of a zip archive hold


def test_the_header_of_the_older_format_takes_at_most_a_buffer_of_data(tmp_path: Path) -> None:
    path = save({"a": noise(MiB), "b": noise(MiB)}, tmp_path / "model.bin", zipped=False)
    before = bytes_read_by_this_process()
    read_torch_shard(path)
    assert bytes_read_by_this_process() - before < 16384


@FORMATS
def test_a_slice_reads_its_rows_alone(tmp_path: Path, zipped: bool) -> None:
    weight = noise(1024, 1024)
    path = save({"weight": weight, "other": noise(1024, 1024, seed=1)}, tmp_path / "model.bin", zipped=zipped)
    rows = torch.empty(128, 1024)
    with weightlift.open_checkpoint(path) as checkpoint:
        rows.copy_(checkpoint["weight"][256:384])
    assert torch.equal(as_bytes(rows), as_bytes(weight[256:384]))
    assert checkpoint.report.bytes_needed == rows.nbytes
    assert checkpoint.report.bytes_read <= rows.nbytes + 2 * 4096


def test_a_row_slice_of_a_transposed_weight_is_right(tmp_path: Path) -> None:
    weight = noise(512, 1024)
    path = save({"weight": weight.t()}, tmp_path / "model.bin")
    part = torch.empty(128, 512)
    with weightlift.open_checkpoint(path) as checkpoint:
        part.copy_(checkpoint["weight"][256:384])
    assert torch.equal(as_bytes(part), as_bytes(weight.t()[256:384]))


# ---- whole checkpoints


def test_fast_load_fills_a_model_from_a_bin_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved, model = (nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)) for _ in range(2))
    report = weightlift.fast_load(model, save(saved.state_dict(), tmp_path / "pytorch_model.bin"))
    assert report.missing_keys == report.unexpected_keys == []
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_a_folder_of_bin_shards_loads_by_its_index(tmp_path: Path, shared_checkpoints: Path) -> None:
    """As transformers wrote checkpoints before safetensors."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    names = list(state)
    weight_map = {}
    for number, held in enumerate((names[::2], names[1::2]), start=1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: state[name] for name in held}, tmp_path / file)
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(config.to_json_string())
    torch.save({"optimizer": 1}, tmp_path / "training_args.bin")

    loaded = weightlift.load_file(tmp_path)
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor)

    fresh = transformers.LlamaForCausalLM(config)
    weightlift.fast_load(fresh, tmp_path)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(fresh(tokens).logits, model(tokens).logits)


# ---- what is not a dictionary of plain tensors


@FORMATS
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (7, ["int"]),
        (None, ["None"]),
        ([torch.ones(2)], ["a list of 1"]),
        (torch.ones(2), ["found a tensor"]),
        ({"w": torch.ones(2), "epoch": 3, "lr": 0.5, "name": "x"}, ["epoch (int), lr (float), name (str)"]),
        ({"model": {"w": torch.ones(2)}}, ["model (a dictionary with 1 tensors)", "['model'], other)"]),
        ({"state_dict": {"w": torch.ones(2)}, "epoch": 1}, ["epoch (int)", "['state_dict'], other)"]),
        ({"state": {0: {"step": 1}}, "param_groups": [{"lr": 1}]}, ["state (a dictionary with 1 keys)", "a list of 1"]),
        ({0: torch.ones(2)}, ["key 0"]),
        ({None: torch.ones(2)}, ["key None"]),
    ],
    ids=str,
)
def test_content_that_is_no_state_dict_is_named(tmp_path: Path, content: Any, words: list[str], zipped: bool) -> None:
    path = save(content, tmp_path / "model.bin", zipped=zipped)
    torch.load(path, weights_only=True)
    assert_refused(path, "NotStateDict", *words)


def test_an_optimizer_state_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert_refused(save(optimizer.state_dict(), tmp_path / "optimizer.bin"), "NotStateDict", "state (a dictionary")


class WithAttribute(Tensor):
    pass


def odd_tensors() -> dict[str, Callable[[], Tensor]]:
    def with_attribute() -> Tensor:
        tensor = torch.ones(2)
        tensor.note = 1  # type: ignore[attr-defined]
        return tensor

    return {
        "a sparse tensor": lambda: torch.eye(3).to_sparse(),
        "a quantised tensor": lambda: torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8),
        "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
        "on the meta device": lambda: torch.ones(2, device="meta"),
        "with attributes": with_attribute,
        "subclass": lambda: torch.ones(2).as_subclass(WithAttribute),
    }


@pytest.mark.parametrize("kind", odd_tensors())
def test_tensors_that_are_not_plain_are_refused_by_kind(tmp_path: Path, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are deprecated
        path = save({"w": odd_tensors()[kind]()}, tmp_path / "model.bin")
    assert_refused(path, "UnsupportedPickle", kind, "save_file")


@FORMATS
def test_a_whole_module_is_refused(tmp_path: Path, zipped: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = save(nn.Linear(2, 2), tmp_path / "model.bin", zipped=zipped)
    assert_refused(path, "UnsupportedPickle", "torch.nn.modules.linear.Linear")


# ---- other files


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "an empty file"),
        (b"P", "starts with b'P'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
        (b"<!DOCTYPE html>", "HTML"),
        (bytes(100), "zeros"),
        (pickle.dumps({"a": 1}, protocol=2), "a pickle"),
        (struct.pack("<Q", 8) + b"{}      ", "safetensors"),
        (b"\x1f\x8b\x08", "gzip"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    assert_refused(path, "NotTorchFile", word)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        read_torch_shard(tmp_path / "model.bin")


# ---- hostile files


class Attack:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


@FORMATS
@pytest.mark.parametrize(
    "attack",
    [
        lambda marker: Attack(os.system, f"touch {marker}"),
        lambda marker: Attack(exec, f"open({str(marker)!r}, 'w')"),
        lambda marker: Attack(open, str(marker), "w"),
        lambda marker: Attack(torch.load, str(marker)),
        lambda marker: Attack(bytearray, 1 << 45),
        lambda marker: Attack(torch.empty, 1 << 45),
    ],
)
def test_no_call_of_a_file_is_carried_out(tmp_path: Path, attack: Callable[[Path], Attack], zipped: bool) -> None:
    marker = tmp_path / "marker"
    path = save({"w": torch.ones(2), "x": attack(marker)}, tmp_path / "model.bin", zipped=zipped)
    assert_refused(path, "UnsupportedPickle", "a reference to")
    assert not marker.exists()


ARCHIVE = {"version": b"3\n", "byteorder": b"little", "data/0": bytes(range(96))}


def write_archive(path: Path, members: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"model/{name}", content)
    return path


def pickled_tensor(
    *,
    shape: tuple[int, ...] = (4, 6),
    strides: tuple[int, ...] = (6, 1),
    offset: int = 0,
    numel: int = 24,
    key: str = "0",
    storage: bytes = b"ctorch\nFloatStorage\n",
    location: str = "cpu",
    requires_grad: bool = False,
) -> bytes:
    """The pickle of {"w": a tensor}, of protocol 2, by hand."""

    def plain(value: Any) -> bytes:
        return pickle.dumps(value, protocol=2)[2:-1]

    return b"".join(
        [
            b"\x80\x02}",
            plain("w"),
            b"ctorch._utils\n_rebuild_tensor_v2\n((",
            plain("storage"),
            storage,
            plain(key),
            plain(location),
            plain(numel),
            b"tQ",
            plain(offset),
            plain(shape),
            plain(strides),
            plain(requires_grad),
            b"ccollections\nOrderedDict\n)RtRs.",
        ]
    )


def test_an_archive_by_another_zip_writer_loads(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "model.bin", {"data.pkl": pickled_tensor(location="cuda:3"), **ARCHIVE})
    loaded = weightlift.load_file(path)
    assert torch.equal(loaded["w"], torch.load(path, weights_only=True, map_location="cpu")["w"])


@pytest.mark.parametrize(
    ("tensor", "reason", "word"),
    [
        ({"shape": (5, 6)}, "InvalidTensor", "ends at byte 120 of its storage, which has 96"),
        ({"offset": 1}, "InvalidTensor", "ends at byte 100"),
        ({"offset": 2**62}, "InvalidTensor", "of its storage"),
        ({"strides": (7, 1)}, "InvalidTensor", "ends at byte 108"),
        ({"shape": (2**62, 2**62), "strides": (0, 0)}, "InvalidTensor", "2**63 - 1"),
        ({"shape": (1, 1), "strides": (2**70, 0)}, "InvalidTensor", "2**63 - 1"),
        ({"shape": (0, 2**70), "strides": (0, 0)}, "InvalidTensor", "2**63 - 1"),
        ({"shape": (1,) * 65, "strides": (0,) * 65}, "InvalidTensor", "64 dimensions"),
        ({"shape": (-1, 6)}, "InvalidPickle", "negative"),
        ({"strides": (-6, 1)}, "InvalidPickle", "negative"),
        ({"offset": -1}, "InvalidPickle", "negative"),
        ({"shape": (24,)}, "InvalidPickle", "strides"),
        ({"shape": [4, 6]}, "InvalidPickle", "shape"),
        ({"shape": (4.0, 6)}, "InvalidPickle", "size"),
        ({"numel": 25}, "InvalidPickle", "storage of 100 bytes in a member of 96"),
        ({"numel": 2**61}, "InvalidPickle", "in a member of 96"),
        ({"numel": -1}, "InvalidPickle", "storage"),
        ({"key": "1"}, "InvalidArchive", "no member data/1"),
        ({"key": "../version"}, "InvalidArchive", "no member"),
        ({"storage": b"ctorch\nQInt8Storage\n"}, "UnsupportedPickle", "torch.QInt8Storage"),
        ({"storage": b"ctorch\nLongStorage\n", "numel": 12, "requires_grad": True}, "InvalidPickle", "gradient"),
    ],
    ids=str,
)
def test_a_tensor_that_does_not_fit_its_storage_is_refused(
    tmp_path: Path, tensor: dict[str, Any], reason: str, word: str
) -> None:
    path = write_archive(tmp_path / "model.bin", {"data.pkl": pickled_tensor(**tensor), **ARCHIVE})
    assert_refused(path, reason, word)


def test_a_tensor_expanded_to_more_than_memory_takes_the_memory_of_its_elements(tmp_path: Path) -> None:
    pickled = pickled_tensor(shape=(2**40, 6), strides=(0, 1))
    path = write_archive(tmp_path / "model.bin", {"data.pkl": pickled, **ARCHIVE})
    loaded = weightlift.load_file(path)["w"]
    assert loaded.shape == (2**40, 6)
    assert torch.equal(loaded[2**39], torch.load(path, weights_only=True)["w"][7])


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02}s.",
        b"\x80\x02h\x05.",
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x02X\x01\x00\x00\x00\xff.",
        b"\x80\x02t.",
        b"\x80\x02}})s.",  # a dictionary for a key
        b"\x80\x02]" + b"\x85" * 100_000 + b"]Ns.",
        b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns.",  # a key whose hash would end the process
        b"\x80\x02c" + b"a" * 5000 + b"\n\n.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))\x89Nt" + b"R.",
        b"\x80\x02ccollections\nOrderedDict\n]R.",
        b"\x80\x02)Q.",
        b"\x80\x02K\x00Q.",
        b"\x80\x02}}b.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02\x8c\x01a.",  # an opcode of protocol 4, which torch refuses too
        b"\x80\x02ctorch\nuint16\n)\x81.",
        b"\x80\x02(ios\nsystem\n.",
    ],
    ids=lambda pickled: repr(pickled[:24]),
)
def test_a_malformed_pickle_is_one_error(tmp_path: Path, pickled: bytes) -> None:
    path = write_archive(tmp_path / "model.bin", {"data.pkl": pickled, **ARCHIVE})
    assert_refused(path, "InvalidPickle", "malformed")


def test_pickles_of_other_protocols_are_refused_as_torch_does(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"w": torch.ones(2)}, path, pickle_protocol=4)
    with pytest.warns(UserWarning, match="protocol 4"), pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    assert_refused(path, "UnsupportedPickle", "protocol 4")


def test_a_compressed_archive_is_refused_without_unpacking_it(tmp_path: Path) -> None:
    bomb = {"data.pkl": pickled_tensor() + bytes(64 * MiB), **ARCHIVE}
    path = write_archive(tmp_path / "model.bin", bomb, compression=zipfile.ZIP_DEFLATED)
    before = bytes_read_by_this_process()
    assert_refused(path, "CompressedArchive", "torch.save(torch.load(")
    assert bytes_read_by_this_process() - before < 16384


@pytest.mark.parametrize(
    ("members", "reason", "word"),
    [
        ({"constants.pkl": b""}, "TorchScript", "torch.jit.load"),
        ({"byteorder": b"big"}, "UnsupportedByteOrder", "byte order b'big'"),
        ({"byteorder": b"?" * 1000}, "UnsupportedByteOrder", "byte order"),
        ({"version": b"11\n"}, "UnsupportedVersion", "update weightlift"),
        ({"version": b"x"}, "UnsupportedVersion", "b'x'"),
        ({"Data/0": b""}, "InvalidArchive", "two members"),
    ],
)
def test_an_archive_that_torch_refuses_or_takes_otherwise_is_refused(
    tmp_path: Path, members: dict[str, bytes], reason: str, word: str
) -> None:
    path = write_archive(tmp_path / "model.bin", {"data.pkl": pickled_tensor(), **ARCHIVE, **members})
    assert_refused(path, reason, word)


@pytest.mark.parametrize("missing", ["data.pkl", "version", "data/0"])
def test_an_archive_without_a_member_is_refused(tmp_path: Path, missing: str) -> None:
    members = {"data.pkl": pickled_tensor(), **ARCHIVE}
    del members[missing]
    assert_refused(write_archive(tmp_path / "model.bin", members), "InvalidArchive", f"no member {missing}")


def directory_entry(archive: bytes, name: str) -> int:
    return archive.rindex(b"PK\x01\x02", 0, archive.rindex(f"model/{name}".encode()))


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        (42, 10**6, "corrupt"),  # offset of the local header, beyond the file
        (42, 7, "corrupt"),  # inside another member
        (42, 0, "overlaps"),  # that of another member
        (42, 0xFFFFFFFF, "malformed"),  # in a zip64 field that is not there
        (20, 97, "compressed"),
        (28, 60000, "malformed"),  # length of the name
        (30, 60000, "malformed"),  # of extra fields
        (34, 1, "malformed"),  # disk
        (38, 0x10, "malformed"),  # attributes of a folder
    ],
)
def test_a_directory_that_lies_is_refused(tmp_path: Path, field: int, value: int, word: str) -> None:
    path = write_archive(tmp_path / "model.bin", {"data.pkl": pickled_tensor(), **ARCHIVE})
    archive = bytearray(path.read_bytes())
    struct.pack_into(
        "<H" if field in (28, 30, 34) else "<L", archive, directory_entry(archive, "data/0") + field, value
    )
    path.write_bytes(archive)
    with pytest.raises(CheckpointError, match=word):
        read_torch_shard(path)


def test_members_that_overlap_are_refused(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "model.bin", {"data.pkl": pickled_tensor(), **ARCHIVE})
    archive = bytearray(path.read_bytes())
    entry = directory_entry(archive, "version")  # before byteorder
    struct.pack_into("<2L", archive, entry + 20, 50, 50)
    path.write_bytes(archive)
    assert_refused(path, "InvalidArchive", "version overlaps the next member")


@FORMATS
def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, zipped: bool) -> None:
    whole = save({"a": noise(3, 4), "b": noise(5)}, tmp_path / "whole.bin", zipped=zipped).read_bytes()
    path = tmp_path / "model.bin"
    for length in (*range(0, len(whole), 7), *range(len(whole) - 100, len(whole))):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_torch_shard(path)


@pytest.fixture(scope="module", params=[True, False], ids=["zip", "legacy"])
def valid_file(request: pytest.FixtureRequest) -> bytes:
    buffer = io.BytesIO()
    base = noise(4, 6, dtype=torch.int32)
    tensors = collections.OrderedDict(a=base, t=base.t(), e=base[0].expand(3, 6), p=nn.Parameter(noise(3).abs()))
    torch.save(tensors, buffer, _use_new_zipfile_serialization=request.param)
    return buffer.getvalue()


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_file_with_changed_bytes_is_refused_or_consistent(
    tmp_path: Path, valid_file: bytes, changes: list[tuple[float, int]]
) -> None:
    changed = bytearray(valid_file)
    for position, value in changes:
        changed[int(position * len(changed))] = value
    path = tmp_path / "model.bin"
    path.write_bytes(changed)
    try:
        shard = read_torch_shard(path)
    except CheckpointError:
        return
    for entry in shard.tensors:
        assert 0 <= entry.offset <= entry.offset + entry.nbytes <= len(changed)
    if all(math.prod(entry.shape) < MiB for entry in shard.tensors):
        weightlift.load_file(path)


@FORMATS
def test_a_legacy_or_zip_file_that_lies_about_a_storage_is_refused(tmp_path: Path, zipped: bool) -> None:
    path = save({"a": noise(1000)}, tmp_path / "model.bin", zipped=zipped)
    content = path.read_bytes()
    number = b"M" + struct.pack("<H", 1000)
    position = content.index(number)
    path.write_bytes(content[: position + 1] + struct.pack("<H", 999) + content[position + 3 :])
    assert_refused(
        path, "InvalidPickle" if zipped else "InvalidStorages", "expected a storage" if not zipped else "3996"
    )
