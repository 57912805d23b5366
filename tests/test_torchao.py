"""torchao's checkpoints through iter_weights: flattened subclasses are put together, across shards, by torchao."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from weightlift import CheckpointError, CheckpointSource, LoadConfig, torchao
from weightlift.filters import unused
from weightlift.stream import iter_weights

CONFIG = LoadConfig(strategy="torchao")
NAMES = [f"m.{i}.weight" for i in range(3)]


def flat(name: str, part: str) -> str:
    module, _, attribute = name.rpartition(".")
    return f"{module}._{attribute}_{part}"


def metadata(names: list[str]) -> dict[str, str]:
    """As torchao writes it, in every shard."""
    quantised = json.dumps({"_type": "Float8Tensor", "_data": {}, "_tensor_data_names": ["qdata", "scale"]})
    plain = json.dumps({"_type": "Tensor"})
    return {
        "format": "pt",
        "tensor_names": json.dumps([*names, "m.bias"]),
        **dict.fromkeys(names, quantised),
        "m.bias": plain,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All scales in the first shard, as files are written: largest elements first."""
    first = {flat(name, "scale"): torch.full((4,), float(i)) for i, name in enumerate(NAMES)}
    second = {flat(name, "qdata"): torch.full((4, 8), i, dtype=torch.int8) for i, name in enumerate(NAMES)}
    first["m.bias"] = torch.ones(3)
    safetensors.torch.save_file(first, tmp_path / "model-1.safetensors", metadata=metadata(NAMES))
    safetensors.torch.save_file(second, tmp_path / "model-2.safetensors", metadata=metadata(NAMES))
    return tmp_path


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchao whose subclasses are their data times their scale."""

    def unflatten_tensor_state_dict(parts: dict[str, Tensor], metadata: dict[str, str]) -> Any:
        made = {}
        for name in json.loads(metadata["tensor_names"]):
            description = json.loads(metadata[name])
            assert parts.keys() == {flat(name, part) for part in description["_tensor_data_names"]}
            if description["_type"] != "Float8Tensor":
                raise ValueError(f"Unsupported tensor type: {description['_type']}")
            made[name] = parts[flat(name, "qdata")] * parts[flat(name, "scale")][:, None]
        return made, {}

    module = types.ModuleType("torchao.prototype.safetensors.safetensors_support")
    module.unflatten_tensor_state_dict = unflatten_tensor_state_dict  # type: ignore[attr-defined]
    for name in ("torchao", "torchao.prototype", "torchao.prototype.safetensors"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    install(monkeypatch, "0.18.0+cpu")


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    real = importlib.metadata.version

    def of(name: str) -> str:
        if name != "torchao":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(torchao.importlib.metadata, "version", of)


@pytest.mark.usefixtures("stand_in")
def test_parts_are_put_together_across_shards(folder: Path) -> None:
    arrived = dict(iter_weights(folder, config=CONFIG))
    assert arrived.keys() == {*NAMES, "m.bias"}
    assert torch.equal(arrived["m.bias"], torch.ones(3))
    for i, name in enumerate(NAMES):
        assert torch.equal(arrived[name], torch.full((4, 8), float(i * i)))


@pytest.mark.usefixtures("stand_in")
def test_a_prefix_is_refused(folder: Path) -> None:
    """The names in the metadata have none: no part would be found."""
    source = CheckpointSource(folder, prefix="x.")
    for path in (source, [folder, source]):
        with pytest.raises(ValueError, match=r"strategy is 'torchao' and prefix is 'x\.': they exclude each other"):
            iter_weights(path, config=CONFIG)


@pytest.mark.usefixtures("stand_in")
def test_tensors_come_when_their_last_part_has_arrived(folder: Path) -> None:
    assert [name for name, _ in iter_weights(folder, config=CONFIG)] == ["m.bias", *NAMES]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", ["m.1.weight", "m.1._weight_qdata", "m.1._weight_scale"])
def test_a_tensor_is_left_out_with_all_its_parts(folder: Path, name: str) -> None:
    """By the name in the model, and by each in the files."""
    unwanted = unused(lambda other: other == name)
    assert dict(iter_weights(folder, filters=[unwanted], config=CONFIG)).keys() == {NAMES[0], NAMES[2], "m.bias"}


@pytest.mark.usefixtures("stand_in")
def test_a_missing_part_is_an_error_before_reading(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        iter_weights(folder, config=CONFIG)
    assert caught.value.tensor == "m.0.weight"
    assert "m.0._weight_qdata" in str(caught.value)
    assert "download it again" in str(caught.value)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "change",
    [
        {"tensor_names": "["},
        {"tensor_names": "7"},
        {"tensor_names": "[7]"},
        {"tensor_names": '["w"]', "w": "{}"},
        {"tensor_names": '["w"]', "w": "[]"},
        {"tensor_names": '["w"]', "w": '{"_type": "Float8Tensor"}'},
        {"tensor_names": '["w"]', "w": '{"_type": "Float8Tensor", "_tensor_data_names": 3}'},
        {"tensor_names": '["missing"]'},
    ],
)
def test_broken_metadata_is_an_error_that_names_the_file(tmp_path: Path, change: dict[str, str]) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(1)}, path, metadata={"format": "pt", **change})
    with pytest.raises(CheckpointError, match="expected metadata as torchao writes it") as caught:
        iter_weights(path, config=CONFIG)
    assert caught.value.path == str(path)


@pytest.mark.usefixtures("stand_in")
def test_shards_that_contradict_each_other_are_refused(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model-2.safetensors")
    other = metadata(NAMES) | {NAMES[2]: json.dumps({"_type": "Int8Tensor", "_tensor_data_names": ["qdata", "scale"]})}
    safetensors.torch.save_file(tensors, folder / "model-2.safetensors", metadata=other)
    with pytest.raises(CheckpointError, match="its metadata is another in another shard") as caught:
        iter_weights(folder, config=CONFIG)
    assert caught.value.tensor == NAMES[2]


@pytest.mark.usefixtures("stand_in")
def test_what_torchao_can_not_make_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    description = json.dumps({"_type": "NoSuchTensor", "_tensor_data_names": ["qdata"]})
    path = tmp_path / "model.safetensors"
    names = {"tensor_names": '["m.weight"]', "m.weight": description}
    safetensors.torch.save_file({"m._weight_qdata": torch.zeros(1)}, path, metadata=names)
    with pytest.raises(CheckpointError, match="Unsupported tensor type: NoSuchTensor") as caught:
        list(iter_weights(path, config=CONFIG))
    assert (caught.value.path, caught.value.tensor) == (str(path), "m.weight")


@pytest.mark.usefixtures("stand_in")
def test_files_that_torchao_did_not_write_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"tensor_names.*use another strategy"):
        iter_weights(path, config=CONFIG)


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (None, "needs torchao 0.15 or newer, which is not installed: pip install torchao"),
        ("0.9.0", "needs torchao 0.15 or newer; installed is 0.9.0: pip install --upgrade torchao"),
        ("0.14.1+git", r"needs torchao 0.15 or newer; installed is 0.14.1\+git"),
    ],
)
def test_without_torchao_the_error_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, text: str
) -> None:
    install(monkeypatch, version)
    with pytest.raises(ImportError, match=text):
        iter_weights(folder, config=CONFIG)


def test_a_torchao_that_can_not_be_imported_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.17.0")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ImportError, match=r"installed is 0\.17\.0, which can't be imported"):
        iter_weights(folder, config=CONFIG)


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize("name", ["ao-fp8wo", "ao-int8wo"])
def test_real_checkpoints_are_put_together_as_by_torchao(shared_checkpoints: Path, name: str) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    path = shared_checkpoints / name
    with safe_open(path / "model.safetensors", "pt") as file:
        plain = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        expected, left = unflatten_tensor_state_dict(plain, file.metadata())
    assert not left
    arrived = dict(iter_weights(path, config=CONFIG))
    assert arrived.keys() == expected.keys()
    assert len({type(tensor) for tensor in expected.values()}) == 2
    for key, tensor in expected.items():
        assert type(arrived[key]) is type(tensor)
        assert arrived[key].dtype == tensor.dtype
        assert arrived[key].shape == tensor.shape
        if type(tensor) is not Tensor:
            assert torch.equal(arrived[key].qdata.view(torch.int8), tensor.qdata.view(torch.int8))
            assert torch.equal(arrived[key].scale, tensor.scale)
            assert torch.equal(arrived[key].dequantize(), tensor.dequantize())
        else:
            assert torch.equal(arrived[key], tensor)
