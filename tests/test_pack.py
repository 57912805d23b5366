"""Packed images: what is written, that it is loaded as it was, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from test_models import Reference, assert_all_close, ranks, run_together
from test_models import reference as reference  # a fixture
from test_skeleton import CONFIG, tensors_of, write_model
from torch import nn

import weightlift
from weightlift.cli import main
from weightlift.model import packing
from weightlift.model.linear import UnquantizedLinearMethod
from weightlift.model.packed_image import IMAGE_FILE, PackedImage
from weightlift.model.packing import pack_model
from weightlift.model.parallel import ParallelConfig
from weightlift.model.planning import plan_model
from weightlift.model.postprocess import PostProcessing, is_weights_pre_processed
from weightlift.model.processed_state import ProcessedState
from weightlift.model.skeleton import config_of, load_model, make_shell
from weightlift.safetensors_file import read_shard

TP2 = [ParallelConfig(tp_rank=rank, tp_size=2) for rank in range(2)]
# Its weights are whole pages, its norms are not.
LARGE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "num_attention_heads": 4,
    "dtype": "bfloat16",
}


def bytes_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    return {
        name: (tensor.dtype, tensor.shape, tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, tensor in tensors.items()
    }


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    assert bytes_of(found.state_dict()) == bytes_of(expected.state_dict())


def description(folder: Path) -> Any:
    return json.loads((folder / IMAGE_FILE).read_text())["image"]


def describe(folder: Path, change: Any) -> None:
    """Changes what IMAGE_FILE says."""
    document = json.loads((folder / IMAGE_FILE).read_text())
    change(document["image"])
    (folder / IMAGE_FILE).write_text(json.dumps(document))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def image(tmp_path: Path, model_folder: Path) -> Path:
    """Packed for two ranks."""
    pack_model(model_folder, tmp_path / "image", tp_size=2)
    return tmp_path / "image"


# ---- what is loaded is what was packed


@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_loads_what_was_packed(tmp_path: Path, tied: bool) -> None:
    folder = write_model(tmp_path / "model", tie_word_embeddings=tied)
    (folder / "tokenizer.json").write_text("{}")
    pack_model(folder, tmp_path / "image", tp_size=2, pp_size=2, max_file_bytes=20_000)
    assert (tmp_path / "image" / "tokenizer.json").exists()
    assert len(list((tmp_path / "image").glob("model-pp-1-tp-0-part-*.safetensors"))) > 1
    for stage in range(2):
        for rank in range(2):
            parallel = ParallelConfig(tp_rank=rank, tp_size=2, pp_rank=stage, pp_size=2)
            model = load_model(tmp_path / "image", parallel=parallel)
            assert_same(model, load_model(folder, parallel=parallel))
            assert model.load_report.bytes_read <= 1.05 * model.load_report.bytes_needed


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    pack_model(write_model(tmp_path / "model", tie_word_embeddings=True), tmp_path / "image")
    model = load_model(tmp_path / "image")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_head_that_differs_from_the_embedding_is_kept_though_the_config_ties_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tensors_of(CONFIG), tie_word_embeddings=True)
    pack_model(folder, tmp_path / "image")
    assert_same(load_model(tmp_path / "image"), load_model(folder))


def test_model_that_is_loaded_from_an_image_is_loaded_again_from_the_checkpoint_and_from_the_image(
    tmp_path: Path, model_folder: Path
) -> None:
    pack_model(model_folder, tmp_path / "image")
    model = load_model(tmp_path / "image")
    expected = bytes_of(model.state_dict())
    for path in (model_folder, tmp_path / "image"):
        addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        weightlift.fast_load(model, path, mapper=getattr(model, "hf_to_weightlift_mapper", None))
        assert bytes_of(model.state_dict()) == expected
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == addresses


def test_dtype_is_that_of_the_image(tmp_path: Path, model_folder: Path) -> None:
    pack_model(model_folder, tmp_path / "image", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in load_model(tmp_path / "image").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("checkpoint", "target"),
    [
        ("w4a16", "plain"),
        ("w4a16", "marlin"),
        ("fp8", "plain"),
        ("fp8", "marlin"),
        ("fp8", "fnuz"),
        ("fp8-dynamic", "marlin"),
        ("w8a8", "plain"),
    ],
)
def test_quantised_checkpoint_is_loaded_as_it_was_packed(
    tmp_path: Path, shared_checkpoints: Path, checkpoint: str, target: Any
) -> None:
    folder = shared_checkpoints / checkpoint
    pack_model(folder, tmp_path / "image", tp_size=2, target=target)
    tokens = torch.arange(8).unsqueeze(0)
    for parallel in TP2:
        assert_same(
            load_model(tmp_path / "image", parallel=parallel), load_model(folder, parallel=parallel, target=target)
        )
    pack_model(folder, tmp_path / "whole", target=target)
    with torch.no_grad():
        outputs = [load_model(tmp_path / "whole")(tokens), load_model(folder, target=target)(tokens)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek"])
def test_ranks_with_experts_and_latent_attention_compute_what_they_did(
    tmp_path: Path, request: pytest.FixtureRequest, name: str
) -> None:
    whole: Reference = request.getfixturevalue("reference")(name)
    pack_model(whole.folder, tmp_path / "image", tp_size=2, ep_size=2)
    assert_all_close(run_together(tmp_path / "image", whole.tokens, ranks(2, ep_size=2)), whole.logits)


def test_weights_that_are_quantised_while_loading_are_packed_so(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **LARGE)
    pack_model(folder, tmp_path / "image", tp_size=2, quantization="fp8")
    for parallel in TP2:
        model = load_model(tmp_path / "image", parallel=parallel)
        assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.float8_e4m3fn
        assert_same(model, load_model(folder, parallel=parallel, quantization="fp8"))


# ---- the files


def test_every_tensor_lies_at_a_multiple_of_the_largest_power_of_two_that_divides_its_size(tmp_path: Path) -> None:
    pack_model(write_model(tmp_path / "model", **LARGE), tmp_path / "image")
    path = tmp_path / "image" / "model-rank-0-part-0.safetensors"
    shard = read_shard(str(path))
    assert shard.data_offset % 4096 == 0
    for entry in shard.tensors:
        assert entry.offset % min(entry.nbytes & -entry.nbytes, 4096) == 0, entry
        if entry.nbytes >= 4096:
            assert entry.offset % 4096 == 0
    model = load_model(tmp_path / "image")
    assert bytes_of(safetensors.torch.load_file(path)) == bytes_of(model.state_dict())


@pytest.mark.direct_io
def test_direct_reads_land_in_the_parameters(tmp_path: Path) -> None:
    config = {**LARGE, "vocab_size": 65536}  # large enough that huge pages pay
    pack_model(write_model(tmp_path / "model", **config), tmp_path / "image")
    loaded = load_model(tmp_path / "image", config=weightlift.LoadConfig(strategy="direct"))
    report = loaded.load_report
    assert report.in_place_bytes > 0.9 * report.bytes_read
    for name, tensor in loaded.state_dict().items():
        entry = next(e for e in read_shard(report.files[0].path).tensors if e.name == name)
        assert (tensor.data_ptr() - entry.offset) % 4096 == 0


def test_file_of_an_image_is_a_manifest_of_all_others(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = json.loads((image / IMAGE_FILE).read_text())["files"]
    assert set(files) == {path.name for path in image.iterdir()} - {IMAGE_FILE}
    assert main(["verify", str(image)]) == 0
    assert "sha256 of 3 files" in capsys.readouterr().out
    path = image / "model-rank-1-part-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(image), "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [(problem["reason"], problem["path"]) for problem in problems] == [("DigestMismatch", str(path))]


# ---- what does not match is refused


@pytest.mark.parametrize(
    ("options", "differences"),
    [
        ({"parallel": ParallelConfig()}, "expected tp_size 1, found 2"),
        (
            {"parallel": ParallelConfig(tp_size=2, pp_size=2), "dtype": torch.bfloat16},
            "expected pp_size 2, found 1; expected dtype bfloat16, found float32",
        ),
        ({"parallel": TP2[0], "target": "marlin"}, "expected target marlin, found plain"),
        ({"parallel": TP2[0], "quantization": "fp8"}, "expected quantization fp8, found None"),
    ],
)
def test_image_of_something_else_is_refused(image: Path, options: Any, differences: str) -> None:
    with pytest.raises(weightlift.CheckpointError) as caught:
        load_model(image, **options)
    assert str(caught.value) == (
        f"{image / IMAGE_FILE}: this image was packed for something else: {differences}. Load it with what it was "
        "packed for, or pack the model anew with `weightlift pack`"
    )
    assert caught.value.reason == "ImageMismatch"


def test_fast_load_refuses_an_image_of_other_ranks(image: Path, model_folder: Path) -> None:
    with pytest.raises(weightlift.CheckpointError, match="expected tp_size 1, found 2"):
        weightlift.fast_load(load_model(model_folder), image)


def test_image_of_another_version_is_refused(image: Path) -> None:
    describe(image, lambda image: image["fingerprint"].update(format_version=0, weightlift_version="0.0.1"))
    with pytest.raises(weightlift.CheckpointError, match=r"version 1, .* found one of version 0, packed .*'0\.0\.1'"):
        load_model(image, parallel=TP2[0])


def test_image_whose_config_is_of_another_architecture_is_refused(image: Path) -> None:
    config = json.loads((image / "config.json").read_text())
    (image / "config.json").write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"]}))
    with pytest.raises(weightlift.CheckpointError, match=r"expected architecture Mistral.*, found LlamaForCausalLM"):
        load_model(image, parallel=TP2[0])


def test_file_of_another_image_is_refused(tmp_path: Path, image: Path) -> None:
    other = write_model(tmp_path / "other", num_hidden_layers=3)
    pack_model(other, tmp_path / "image2", tp_size=2)
    name = "model-rank-0-part-0.safetensors"
    shutil.copyfile(tmp_path / "image2" / name, image / name)
    with pytest.raises(weightlift.CheckpointError, match=f"{name}: this file is not of the image that"):
        load_model(image, parallel=TP2[0])
    load_model(image, parallel=TP2[1])


def test_file_that_is_missing_is_named(tmp_path: Path, model_folder: Path) -> None:
    pack_model(model_folder, tmp_path / "image", max_file_bytes=20_000)
    (tmp_path / "image" / "model-rank-0-part-1.safetensors").unlink()
    with pytest.raises(weightlift.CheckpointNotFoundError, match=r"of this rank are missing: model-rank-0-part-1\.saf"):
        load_model(tmp_path / "image")


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.clear(),
        lambda image: image["fingerprint"].update(tp_size="2"),
        lambda image: image["fingerprint"].update(more=1),
        lambda image: image.update(ranks=[]),
        lambda image: image["ranks"].update({"model-rank-0": {"removed": ["lm_head.__class__"]}}),
        lambda image: image["ranks"].update({"model-rank-0": {"made": {"lm_head.weight": "module"}}}),
        lambda image: image["ranks"].update({"model-rank-0": {"values": {"lm_head": {"x": {"dtype": "save"}}}}}),
        lambda image: image["ranks"].update({"model-rank-0": {"permuted": {"lm_head.weight": [0, 2]}}}),
    ],
)
def test_description_that_is_malformed_is_one_error(image: Path, change: Any) -> None:
    describe(image, change)
    with pytest.raises(weightlift.CheckpointError, match="the description of the image is malformed"):
        load_model(image, parallel=TP2[0])


# ---- packing


def test_image_is_not_written_over_what_is_there(tmp_path: Path, model_folder: Path, image: Path) -> None:
    with pytest.raises(FileExistsError, match="is there already; remove it, or name another folder"):
        pack_model(model_folder, image)
    (tmp_path / "empty").mkdir()
    pack_model(model_folder, tmp_path / "empty")
    assert load_model(tmp_path / "empty")


def test_image_is_not_packed_again_and_not_planned(tmp_path: Path, image: Path) -> None:
    with pytest.raises(ValueError, match="is a packed image, whose loads are not planned; load it"):
        plan_model(image, parallel=TP2[0])
    with pytest.raises(ValueError, match="is a packed image; pack the model that it was made of"):
        pack_model(image, tmp_path / "again", tp_size=2)


def test_disk_that_is_too_small_is_an_error_before_anything_is_loaded(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1000))
    monkeypatch.setattr(packing, "load_model", None)
    with pytest.raises(weightlift.CheckpointReadError, match=r"expected room for .* KiB there, found 1000 B") as caught:
        pack_model(model_folder, tmp_path / "new" / "image")
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "new").exists()


def test_disk_that_is_full_leaves_nothing_behind(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def full(fd: int) -> None:
        synced.append(fd)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(weightlift.CheckpointReadError, match=r"refused to write it: No space left on device"):
        pack_model(model_folder, tmp_path / "image", tp_size=2)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_files_that_are_not_read_back_as_written_are_no_image(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = packing.write_rank

    def write_badly(*args: Any, **kwargs: Any) -> list[str]:
        paths = write(*args, **kwargs)
        with open(paths[0], "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xaa")
        return paths

    monkeypatch.setattr(packing, "write_rank", write_badly)
    with pytest.raises(weightlift.CheckpointError) as caught:
        pack_model(model_folder, tmp_path / "image")
    assert caught.value.reason == "DigestMismatch"
    assert not (tmp_path / "image").exists()
    pack_model(model_folder, tmp_path / "image", verify=False)


def test_command_packs_what_load_reads_and_verifies(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "image"
    assert main(["pack", str(model_folder), str(out), "--tp-size", "2", "--dtype", "bfloat16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fingerprint"] == description(out)["fingerprint"]
    assert document["fingerprint"]["dtype"] == "bfloat16"
    assert main(["load", str(out), "--tp-size", "2", "--tp-rank", "1", "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verify"]["different"] == []
    assert main(["load", str(out)]) == 1
    assert "expected tp_size 1, found 2" in capsys.readouterr().err
    assert main(["pack", str(model_folder), str(out), "--tp-size", "2"]) == 1
    assert "is there already" in capsys.readouterr().err


# ---- layers that are processed


def doubled(self: UnquantizedLinearMethod, layer: Any) -> None:
    layer.calls = getattr(layer, "calls", 0) + 1
    if not is_weights_pre_processed():
        layer.weight.data.mul_(2)


def test_layers_are_processed_once_and_their_methods_told_so(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", doubled)
    monkeypatch.setattr(UnquantizedLinearMethod, "supports_pre_processed_weights", True)
    pack_model(model_folder, tmp_path / "image")
    model = load_model(tmp_path / "image")
    expected = tensors_of(CONFIG)["model.layers.0.mlp.down_proj.weight"] * 2
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, expected)
    assert model.model.layers[0].mlp.down_proj.calls == 2  # once before packing

    shell = make_shell(
        config_of(weightlift.CheckpointSource(model_folder)),
        parallel=ParallelConfig(),
        dtype=torch.float32,
        device="cpu",
    )
    weightlift.fast_load(shell, tmp_path / "image")
    PostProcessing(pre_processed=True).finish(shell, torch.float32)
    assert torch.equal(shell.model.layers[0].mlp.down_proj.weight, expected)
    with pytest.raises(ValueError, match="those of a packed image have it"):
        weightlift.fast_load(shell, tmp_path / "image", on_module_loaded=PostProcessing().process_layer)


def test_method_without_support_is_refused_before_anything_is_loaded(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", doubled)
    monkeypatch.setattr(packing, "load_model", None)
    with pytest.raises(
        RuntimeError,
        match=r"layer model\.embed_tokens: UnquantizedEmbeddingMethod does not support pre-processed weights",
    ):
        pack_model(model_folder, tmp_path / "image")
    assert not (tmp_path / "image").exists()


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = object()
        self.sizes = [2, 4]
        self.same_again = (torch.bfloat16, 1.5)
        self.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.weight.weight_loader = print  # type: ignore[attr-defined]
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.input_scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.gone = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("kept", torch.zeros(3), persistent=False)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _Layer()


def _processed() -> _Model:
    model = _Model()
    layer: Any = model.layer
    layer.weight.data = torch.arange(24, dtype=torch.int8).view(6, 4).t()
    layer.scale.data = torch.tensor(3.0)
    layer.input_scale = None
    del layer.gone
    layer.workspace = torch.arange(5)
    layer.workspace_again = layer.workspace
    layer.register_buffer("table", torch.arange(8).view(2, 4).t(), persistent=False)
    layer.zero_point = nn.Parameter(torch.arange(6.0), requires_grad=False)
    layer.kernel = object()
    layer.sizes = [2, 4]
    layer.shape = (torch.Size([2, 4]), torch.float8_e4m3fn, None, "name", float("inf"))
    return model


def test_what_processing_makes_of_layers_is_kept(tmp_path: Path) -> None:
    model = _processed()
    state, tensors = ProcessedState.of(model, _Model().to("meta"))
    assert set(tensors) == {f"layer.{name}" for name in ("weight", "scale", "workspace", "table", "zero_point")}
    assert state.values == {"layer": {"input_scale": None, "shape": state.values["layer"]["shape"]}}
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    state = ProcessedState.from_json(json.loads(json.dumps(state.to_json())))

    for on_disk in (True, False):
        restored = _Model()
        weight = restored.layer.weight
        files = weightlift.checkpoint.locate(tmp_path)
        targets = state.place(restored, files, as_on_disk=on_disk)
        weightlift.fast_load(targets, tmp_path)
        layer: Any = restored.layer
        assert layer.weight is weight
        assert layer.weight.weight_loader is print
        assert layer.weight.stride() == (1, 4)
        assert layer.weight.tolist() == torch.arange(24).view(6, 4).t().tolist()
        assert layer.scale.item() == 3
        assert layer.input_scale is None
        assert not hasattr(layer, "gone")
        assert layer.workspace is layer.workspace_again
        assert layer.workspace.tolist() == [0, 1, 2, 3, 4]
        assert "table" in layer._non_persistent_buffers_set
        assert layer.table.tolist() == torch.arange(8).view(2, 4).t().tolist()
        assert isinstance(layer.zero_point, nn.Parameter)
        assert layer.shape == model.layer.shape
        assert layer.kept.tolist() == [0, 0, 0]

        places = {name: tensor.data_ptr() for name, tensor in targets.items()}
        again = state.place(restored, files, as_on_disk=False)
        assert {name: tensor.data_ptr() for name, tensor in again.items()} == places


def test_image_is_read_as_it_was_written(image: Path) -> None:
    found = PackedImage.read(image)
    assert found.fingerprint.tp_size == 2
    assert list(found.states) == ["model-rank-0", "model-rank-1"]
    assert PackedImage.find(weightlift.CheckpointSource(image, load_format="sharded_state")) is None
    load_model(image, parallel=TP2[0], load_format="sharded_state")
