"""Gate 1: which of a folder's files hold the weights, filters before anything is opened, several sources."""

from __future__ import annotations

import hostile
import pytest
import torch
from safetensors.torch import save_file

import weightlift
from weightlift.checkpoint import CheckpointSource, locate
from weightlift.errors import CheckpointError, CheckpointNotFoundError

BAD = b"opened, which was not to be"


def refusal(source, **options) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        locate(source, **options)
    return caught.value


def write_folder(folder, *names):
    """Files of these names, each with one tensor of the name of the file; safetensors or torch by the suffix."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file({name: torch.ones(2)}, path)
        elif name.endswith((".bin", ".pt", ".pth")):
            torch.save({name: torch.ones(2)}, path)
        else:
            path.touch()
    return folder


def located(folder, **options) -> list[str]:
    return list(locate(CheckpointSource(folder, **options)).tensors)


# ---- which files


@pytest.mark.parametrize(
    ("names", "load_format", "expected"),
    [
        # Safetensors first, then .bin, then .pt.
        (["model.safetensors", "pytorch_model.bin"], "auto", ["model.safetensors"]),
        (["model.safetensors", "pytorch_model.bin"], "pt", ["pytorch_model.bin"]),
        (["pytorch_model.bin", "x.pt"], "auto", ["pytorch_model.bin"]),
        (["pytorch_model.bin", "x.pt"], "pt", ["x.pt"]),
        (["x.pt"], "hf", ["x.pt"]),
        (
            ["model-1.safetensors", "adapter_model.safetensors"],
            "hf",
            ["adapter_model.safetensors", "model-1.safetensors"],
        ),
        # Training state is left out before the pattern is chosen: vLLM's `*.bin` would win here, and find nothing.
        (["training_args.bin", "x.pt"], "hf", ["x.pt"]),
        (["optimizer.bin", "scheduler.pt", "pytorch_model.bin"], "auto", ["pytorch_model.bin"]),
        (["my_optimizer.bin"], "auto", ["my_optimizer.bin"]),
        # Mistral's files are a second copy under other names. vLLM's hf would read both.
        (["consolidated.safetensors", "model-1.safetensors"], "auto", ["consolidated.safetensors"]),
        (["consolidated.safetensors", "model-1.safetensors"], "hf", ["model-1.safetensors"]),
        (["consolidated.safetensors", "model-1.safetensors"], "safetensors", ["model-1.safetensors"]),
        (["consolidated.safetensors", "model.safetensors"], "auto", ["model.safetensors"]),
        (["consolidated.safetensors", "model.safetensors"], "mistral", ["consolidated.safetensors"]),
        (["consolidated.safetensors"], "hf", ["consolidated.safetensors"]),
        (["sub/consolidated.safetensors", "model-1.safetensors"], "auto", ["model-1.safetensors"]),
        (["consolidated-2.safetensors", "consolidated-10.safetensors"], "auto", None),
        (["model-rank-0-part-1.safetensors", "x.safetensors"], "sharded_state", ["model-rank-0-part-1.safetensors"]),
    ],
)
def test_files_are_chosen_by_format_and_priority(names, load_format, expected, tmp_path):
    write_folder(tmp_path, *names)
    assert located(tmp_path, load_format=load_format) == (names if expected is None else expected)


def test_torch_files_are_read(tmp_path):
    torch.save({"w": torch.arange(6.0).view(2, 3)}, tmp_path / "pytorch_model.bin")
    assert torch.equal(weightlift.load_file(tmp_path)["w"], torch.arange(6.0).view(2, 3))


def test_pt_is_not_fallen_back_to_unless_wanted(tmp_path):
    write_folder(tmp_path, "x.pt")
    error = refusal(CheckpointSource(tmp_path, fall_back_to_pt=False))
    assert str(error) == (
        f"{tmp_path}: expected *.safetensors or *.bin, found x.pt; load_format or allow_patterns leave them out"
    )
    assert located(tmp_path, load_format="pt", fall_back_to_pt=False) == ["x.pt"]


def test_mistral_has_its_own_index(tmp_path):
    write_folder(tmp_path, "consolidated-1.safetensors", "model-1.safetensors")
    (tmp_path / "consolidated-2.safetensors").write_bytes(BAD)
    for prefix in ("consolidated", "model"):
        name = f"{prefix}-1.safetensors"
        hostile.write_index(tmp_path / f"{prefix}.safetensors.index.json", {name: name})
    assert located(tmp_path, load_format="mistral") == ["consolidated-1.safetensors"]
    assert located(tmp_path) == ["model-1.safetensors"]
    (tmp_path / "model.safetensors.index.json").unlink()
    assert located(tmp_path) == ["consolidated-1.safetensors"]
    assert located(tmp_path, load_format="hf") == ["model-1.safetensors"]


def test_index_of_torch_files_is_respected(tmp_path):
    write_folder(tmp_path, "pytorch_model-1.bin")
    (tmp_path / "extra.bin").write_bytes(BAD)
    index = hostile.write_index(
        tmp_path / "pytorch_model.bin.index.json", {"pytorch_model-1.bin": "pytorch_model-1.bin"}
    )
    assert located(tmp_path) == located(index) == ["pytorch_model-1.bin"]


def test_allowed_patterns_replace_those_of_the_format_and_the_index(tmp_path):
    write_folder(tmp_path, "a.safetensors", "b.safetensors", "x.pt", "visual/c.safetensors", "vision/d.safetensors")
    hostile.write_index(tmp_path / "model.safetensors.index.json", {"a.safetensors": "a.safetensors"})
    assert located(tmp_path, allow_patterns=["none*", "b.*", "*.pt"]) == ["b.safetensors"]
    assert located(tmp_path, allow_patterns=["vis*/*.safetensors"]) == ["visual/c.safetensors", "vision/d.safetensors"]
    error = refusal(CheckpointSource(tmp_path, allow_patterns=["y.*", "*.bin"]))
    assert "expected y.* or *.bin, found a.safetensors, b.safetensors, x.pt; load_format or" in str(error)


def test_subfolder_is_joined(tmp_path):
    write_folder(tmp_path, "model.safetensors", "text_encoder/model.safetensors")
    files = locate(CheckpointSource(tmp_path, subfolder="text_encoder/"))
    assert files.shards[0].path == str(tmp_path / "text_encoder" / "model.safetensors")
    error = refusal(CheckpointSource(tmp_path, subfolder="unet"))
    assert str(error) == f"{tmp_path / 'unet'}: no such file or folder; check the path"


def test_ranks_of_a_sharded_state_are_not_mixed(tmp_path):
    for rank in range(2):
        for part in range(2):
            hostile.write_tensors(tmp_path / f"model-rank-{rank}-part-{part}.safetensors", f"w{part}", fill=rank)
    for load_format in ("auto", "sharded_state"):
        error = refusal(CheckpointSource(tmp_path, load_format=load_format))
        assert error.reason == "SeveralRanks"
        assert "found those of 2 (rank-0, rank-1)" in str(error)
        assert "weightlift load --load-format sharded_state --tp-size 2 --tp-rank 0; in Python, " in str(error)
        assert str(error).endswith("allow_patterns=['model-rank-0-part-*']")
    files = locate(CheckpointSource(tmp_path, allow_patterns=["model-rank-1-part-*"]))
    assert {entry.shard.path for entry in files.tensors.values()} == {
        str(tmp_path / f"model-rank-1-part-{part}.safetensors") for part in range(2)
    }


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"load_format": "gguf"}, "load_format is 'gguf'; accepted is one of auto, hf, safetensors, mistral, pt,"),
        ({"load_format": "dummy"}, "load_format is 'dummy'; it stands for random weights and no files"),
        ({"allow_patterns": "*.bin"}, "allow_patterns is '*.bin'; accepted is a list of patterns"),
        ({"allow_patterns": []}, "allow_patterns is []"),
        ({"subfolder": "a/../../b"}, "subfolder is 'a/../../b'; accepted is a relative path"),
        ({"subfolder": "/a"}, "subfolder is '/a'"),
    ],
)
def test_setting_of_a_source_that_is_not_accepted_is_named(options, told):
    with pytest.raises(ValueError, match=r".") as caught:
        CheckpointSource("folder", **options)
    assert told in str(caught.value)


def test_a_list_of_files_has_no_subfolder():
    """It would be left out, and the files taken that are beside the folder."""
    with pytest.raises(ValueError, match=r"subfolder is 'vae' and path is a list of files"):
        CheckpointSource(["model.safetensors"], subfolder="vae")


# ---- nothing there


@pytest.mark.parametrize(
    ("name", "format_name", "remedy"),
    [
        ("q4.gguf", "GGUF", "gguf_file="),
        ("last.ckpt", "Lightning", "save_file"),
        ("tf_model.h5", "Keras HDF5", "from_tf=True"),
        ("flax_model.msgpack", "Flax", "from_flax=True"),
        ("model.onnx", "ONNX", "exported from"),
        ("weights.npz", "NumPy", "safetensors.numpy.save_file"),
    ],
)
def test_format_that_is_not_read_is_named_with_its_remedy(name, format_name, remedy, tmp_path):
    (tmp_path / name).touch()
    (tmp_path / "config.json").touch()
    for source in (tmp_path, tmp_path / name):
        text = str(refusal(source))
        assert format_name in text
        assert "is not read" in text
        assert remedy in text
    error = refusal(tmp_path)
    assert isinstance(error, CheckpointNotFoundError)
    assert f"expected *.safetensors, *.bin or *.pt, found {name}; " in str(error)


def test_folder_of_training_state_alone_has_no_weights(tmp_path):
    write_folder(tmp_path, "training_args.bin")
    assert "found training_args.bin; pass the folder that holds the weights" in str(refusal(tmp_path))


def test_pth_files_are_read_by_their_own_path_only(tmp_path):
    write_folder(tmp_path, "consolidated.00.pth")
    assert "found consolidated.00.pth; files of that name are often parts" in str(refusal(tmp_path))
    assert located(tmp_path / "consolidated.00.pth") == ["consolidated.00.pth"]


# ---- filters


def not_wanted(*parts):
    return lambda name: next((f"has {part}" for part in parts if part in name), None)


def test_tensor_that_a_filter_does_not_want_is_skipped_with_its_rule(tmp_path):
    hostile.write_tensors(tmp_path / "a.safetensors", "a.x", "a.y")
    hostile.write_tensors(tmp_path / "b.safetensors", "b.x")
    files = locate(tmp_path, filters=[None, not_wanted("x"), not_wanted("x", "y")])
    assert files.tensors == {}
    assert files.skipped == {"a.x": "has x", "a.y": "has y", "b.x": "has x"}
    files = locate(tmp_path, filters=[not_wanted("b", "y")])
    assert list(files.tensors) == ["a.x"]
    assert [shard.path for shard in files.shards] == [str(tmp_path / "a.safetensors")]
    assert files.skipped == {"a.y": "has y", "b.x": "has b"}


@pytest.mark.parametrize("unwanted_shard", ["absent", "garbage"])
def test_shard_of_an_index_that_nobody_wants_is_not_opened(unwanted_shard, tmp_path):
    hostile.write_tensors(tmp_path / "1.safetensors", "layers.0", "layers.1", "unnamed")
    if unwanted_shard == "garbage":
        (tmp_path / "2.safetensors").write_bytes(BAD)
    weight_map = {f"layers.{i}": f"{1 + i // 2}.safetensors" for i in range(4)}
    hostile.write_index(tmp_path / "model.safetensors.index.json", weight_map)
    files = locate(tmp_path, filters=[not_wanted("1", "2", "3")])
    assert list(files.tensors) == ["layers.0", "unnamed"]
    assert len(files.shards) == 1
    assert files.skipped == {"layers.1": "has 1", "layers.2": "has 2", "layers.3": "has 3"}
    refusal(tmp_path, filters=[not_wanted("1", "2")])
    refusal(tmp_path)


def test_filters_do_not_hide_that_an_index_is_wrong(tmp_path):
    hostile.write_tensors(tmp_path / "1.safetensors", "w")
    weight_map = {"w": "1.safetensors", "absent": "1.safetensors"}
    hostile.write_index(tmp_path / "model.safetensors.index.json", weight_map)
    error = refusal(tmp_path, filters=[not_wanted("absent")])
    assert error.reason == "TensorNotFound"


def test_skipped_tensor_in_two_files_is_no_error(tmp_path):
    for name in "ab":
        hostile.write_tensors(tmp_path / f"{name}.safetensors", "twice", name)
    assert list(locate(tmp_path, filters=[not_wanted("twice")]).tensors) == ["a", "b"]


# ---- several sources


def test_sources_are_joined_in_order_with_their_prefixes(tmp_path):
    save_file({"w": torch.ones(3), "v": torch.zeros(3)}, tmp_path / "z.safetensors")
    save_file({"w": torch.full((3,), 2.0)}, tmp_path / "a.safetensors")
    sources = [
        tmp_path / "z.safetensors",
        CheckpointSource([tmp_path / "a.safetensors"], prefix="draft."),
    ]
    assert list(locate(sources).tensors) == ["v", "w", "draft.w"]
    state = weightlift.load_file(sources)
    assert state["w"].tolist() == [1, 1, 1]
    assert state["draft.w"].tolist() == [2, 2, 2]


def test_prefix_applies_before_filters_and_to_the_index(tmp_path):
    hostile.write_tensors(tmp_path / "1.safetensors", "a", "b", "unnamed")
    (tmp_path / "2.safetensors").write_bytes(BAD)
    weight_map = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    hostile.write_index(tmp_path / "model.safetensors.index.json", weight_map)
    files = locate(CheckpointSource(tmp_path, prefix="p."), filters=[not_wanted("p.b", "p.c")])
    assert list(files.tensors) == ["p.a", "p.unnamed"]
    assert files.skipped == {"p.b": "has p.b", "p.c": "has p.c"}


def test_tensor_of_two_sources_is_refused(tmp_path):
    paths = [hostile.write_tensors(tmp_path / f"{name}.safetensors", "w") for name in "ab"]
    error = refusal([CheckpointSource(path) for path in paths])
    assert (error.reason, error.tensor) == ("DuplicateTensor", "w")
