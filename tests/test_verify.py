"""`weightlift verify` and its manifests: everything that is wrong, at once, and never a false alarm."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch

from weightlift import CheckpointError
from weightlift.audit import audit
from weightlift.checkpoint import CheckpointSource, locate
from weightlift.cli import main
from weightlift.manifest import ALGORITHMS, FileDigest, Manifest, compare, digest_files

Output = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.safetensors").write_bytes(b"a" * 5_000_000)
    (folder / "b.safetensors").write_bytes(b"")
    (folder / "sub" / "c.json").write_bytes(b"{}")
    return folder


NAMES = ("a.safetensors", "b.safetensors", "sub/c.json")

# ---- manifests


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_digests_are_those_of_the_whole_files(folder: Path, algorithm: str) -> None:
    seen: list[tuple[int, int]] = []
    digests, faults = digest_files(str(folder), NAMES, algorithm, lambda *progress: seen.append(progress))
    assert faults == []
    assert list(digests) == list(NAMES)
    for name, found in digests.items():
        data = (folder / name).read_bytes()
        assert found == FileDigest(len(data), hashlib.new(algorithm, data).hexdigest())
    assert seen[-1] == (5_000_002, 5_000_002)


def test_a_manifest_comes_back_as_it_was_written(folder: Path, tmp_path: Path) -> None:
    written = Manifest("sha256", digest_files(str(folder), NAMES, "sha256")[0])
    path = tmp_path / "manifest.json"
    written.write(path)
    assert Manifest.read(path) == written
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["manifest.json"]


def test_a_manifest_holds_no_path_of_this_machine_and_moves_with_the_folder(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    Manifest("sha256", digest_files(str(folder), NAMES, "sha256")[0]).write(path)
    assert str(tmp_path) not in path.read_text()
    moved = folder.rename(tmp_path / "moved")
    assert compare(Manifest.read(path), str(moved), NAMES) == []


def test_every_difference_is_told_at_once(folder: Path) -> None:
    digests, _ = digest_files(str(folder), NAMES, "sha256")
    manifest = Manifest("sha256", {**digests, "gone.safetensors": FileDigest(1, "0" * 64)})
    with open(folder / "a.safetensors", "r+b") as file:
        file.seek(4_900_000)
        file.write(b"b")
    (folder / "b.safetensors").write_bytes(b"longer")
    (folder / "new.safetensors").write_bytes(b"")
    faults = compare(manifest, str(folder), [*NAMES, "gone.safetensors", "new.safetensors"])
    assert {Path(fault.path or "").name: fault.reason for fault in faults} == {
        "a.safetensors": "DigestMismatch",
        "b.safetensors": "SizeMismatch",
        "gone.safetensors": "FileMissing",
        "new.safetensors": "NotInManifest",
    }


def test_a_file_of_another_size_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest("sha256", {"a.safetensors": FileDigest(1, "0" * 64)})
    monkeypatch.setattr("weightlift.manifest.open_regular", lambda path: pytest.fail("read"))
    (fault,) = compare(manifest, str(folder), ["a.safetensors"])
    assert fault.reason == "SizeMismatch"


def test_a_file_that_cannot_be_read_is_one_fault_among_others(folder: Path) -> None:
    digests, _ = digest_files(str(folder), NAMES, "sha256")
    (folder / "sub" / "c.json").unlink()
    found, faults = digest_files(str(folder), NAMES, "sha256")
    assert list(found) == ["a.safetensors", "b.safetensors"]
    assert [fault.reason for fault in faults] == ["NotFound"]
    assert found["a.safetensors"] == digests["a.safetensors"]


def test_ctrl_c_does_not_wait_for_the_rest_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlift.manifest._BLOCK_BYTES", 1)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        digest_files(str(folder), NAMES, "sha256", interrupt)
    assert time.perf_counter() - started < 2


GOOD: dict[str, Any] = {
    "version": 1,
    "algorithm": "sha256",
    "files": {"a.safetensors": {"bytes": 1, "digest": "ab" * 32}},
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, "version 1, found 2"),
        ({"algorithm": "md5"}, "sha256, blake2b, found 'md5'"),
        ({"algorithm": ["sha256"]}, "found \\['sha256'\\]"),
        ({"files": []}, '"files"'),
        ({"files": {"../x": {"bytes": 1, "digest": "ab" * 32}}}, "inside the checkpoint's folder"),
        ({"files": {"/etc/passwd": {"bytes": 1, "digest": "ab" * 32}}}, "inside the checkpoint's folder"),
        ({"files": {"a/../../x": {"bytes": 1, "digest": "ab" * 32}}}, "inside the checkpoint's folder"),
        ({"files": {"": {"bytes": 1, "digest": "ab" * 32}}}, "inside the checkpoint's folder"),
        ({"files": {"a\0b": {"bytes": 1, "digest": "ab" * 32}}}, "inside the checkpoint's folder"),
        ({"files": {"a": {"bytes": True, "digest": "ab" * 32}}}, "expected bytes and sha256"),
        ({"files": {"a": {"bytes": 1, "digest": "ab" * 31}}}, "expected bytes and sha256"),
        ({"files": {"a": {"bytes": 1, "digest": "AB" * 32}}}, "expected bytes and sha256"),
        ({"files": {"a": {"bytes": 1}}}, "expected bytes and sha256"),
        ({"files": {"a": 7}}, "expected bytes and sha256"),
    ],
)
def test_a_malformed_manifest_is_refused(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(CheckpointError, match=expected) as caught:
        Manifest.read(path)
    assert caught.value.reason == "InvalidManifest"
    assert caught.value.path == str(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1, "version": 1}', "\xff", "[" * 100_000])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError):
        Manifest.read(path)


def test_a_manifest_that_cannot_be_written_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(CheckpointError, match="refused to write"):
        Manifest("sha256", {}).write(taken)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["files", "taken"]


# ---- the audit


def model(folder: Path) -> Path:
    """Two shards of two tensors each, with an index."""
    folder.mkdir()
    hostile.write_tensors(folder / "model-00001-of-00002.safetensors", "a", "b")
    hostile.write_tensors(folder / "model-00002-of-00002.safetensors", "c", "d")
    files = {"a": 1, "b": 1, "c": 2, "d": 2}
    hostile.write_index(
        folder / "model.safetensors.index.json",
        {name: f"model-0000{number}-of-00002.safetensors" for name, number in files.items()},
    )
    return folder


def truncate(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def swap(folder: Path) -> None:
    hostile.write_tensors(folder / "model-00001-of-00002.safetensors", "a", "x")


def dangle(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.unlink()
    path.symlink_to("../blobs/gone")


def add_stale_copy(folder: Path) -> None:
    hostile.write_tensors(folder / "model-00002-of-00002.safetensors", "c", "d", "a")


def add_unnamed(folder: Path) -> None:
    hostile.write_tensors(folder / "model-00002-of-00002.safetensors", "c", "d", "e")


def add_unnamed_twice(folder: Path) -> None:
    hostile.write_tensors(folder / "model-00001-of-00002.safetensors", "a", "b", "e", "f")
    hostile.write_tensors(folder / "model-00002-of-00002.safetensors", "c", "d", "e", "f")


def spoil_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")
    hostile.write_tensors(folder / "model-00002-of-00002.safetensors", "a")


def remove_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def copy_without_index(folder: Path) -> None:
    remove_index(folder)
    hostile.write_tensors(folder / "z.safetensors", "a", "b", "y")


def remove_index_and_shard(folder: Path) -> None:
    remove_index(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def replace_by_pointer(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def use_unknown_dtype(folder: Path) -> None:
    hostile.write(folder / "model-00001-of-00002.safetensors", {"a": hostile.tensor("F6_E2M3", [4], [0, 3])}, b"abc")


def add_files_of_ranks(folder: Path) -> None:
    for rank in range(2):
        hostile.write_tensors(folder / f"model-rank-{rank}-part-0.safetensors", "a")


FAULTS: dict[str, tuple[Callable[[Path], None], list[str], list[str]]] = {
    "nothing": (lambda folder: None, [], []),
    "truncated shard": (truncate, ["MetadataIncompleteBuffer"], []),
    "names not in their shard": (swap, ["TensorNotFound"], ["NotInIndex"]),
    "symlink whose file is gone": (dangle, ["ShardsMissing"], []),
    "stale copy": (add_stale_copy, [], ["StaleCopy"]),
    "tensor that the index does not name": (add_unnamed, [], ["NotInIndex"]),
    "the same in two shards": (add_unnamed_twice, ["DuplicateTensor"], ["NotInIndex", "NotInIndex"]),
    "broken index, and a duplicate": (spoil_index, ["InvalidIndex", "DuplicateTensor"], []),
    "no index": (remove_index, [], []),
    "a copy without an index": (copy_without_index, ["DuplicateTensor"], []),
    "no index and a shard missing": (remove_index_and_shard, ["ShardsMissing"], []),
    "git-lfs pointer": (replace_by_pointer, ["NotSafetensors"], []),
    "beside it, the files of several ranks": (add_files_of_ranks, [], []),
    "unknown dtype": (use_unknown_dtype, ["UnsupportedDtype"], []),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_audit_finds(tmp_path: Path, fault: str) -> None:
    spoil, problems, warnings = FAULTS[fault]
    folder = model(tmp_path / "model")
    spoil(folder)
    result = audit(CheckpointSource(folder))
    assert [problem.reason for problem in result.problems] == problems
    assert [warning.reason for warning in result.warnings] == warnings
    # It agrees with what loading says.
    if problems:
        with pytest.raises(CheckpointError) as caught:
            locate(folder)
        assert caught.value.reason in problems
    else:
        assert locate(folder).tensors.keys() == result.tensors.keys()


@pytest.mark.parametrize("name", hostile.REFUSED)
def test_the_audit_refuses_every_header_that_loading_refuses(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(hostile.REFUSED[name][0])
    (problem,) = audit(CheckpointSource(path)).problems
    with pytest.raises(CheckpointError) as caught:
        locate(path)
    assert (problem.reason, str(problem)) == (caught.value.reason, str(caught.value))


def test_all_problems_are_listed_and_not_the_first_alone(tmp_path: Path, capsys: Output) -> None:
    folder = model(tmp_path / "model")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    hostile.write_index(folder / "model.safetensors.index.json", index | {"e": "gone.safetensors", "b2": index["b"]})
    truncate(folder)
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "3 problems; 2 tensors" in out[0]
    assert out[1] == "  dtypes      uint8 2"
    assert [line.split(":")[0] for line in out[2:5]] == [
        f"  problem     {folder / name}"
        for name in ("gone.safetensors", "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors")
    ]
    assert main(["verify", "--json", str(folder)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [entry["reason"] for entry in document["problems"]] == [
        "ShardsMissing",
        "MetadataIncompleteBuffer",
        "TensorNotFound",
    ]
    assert document["ok"] is False


def test_files_of_torch_are_audited_too(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model-00001-of-00003.bin")
    (tmp_path / "pytorch_model-00002-of-00003.bin").write_bytes(b"PK\3\4 cut short")
    weight_map = {name: f"pytorch_model-0000{i}-of-00003.bin" for i, name in enumerate("abc", start=1)}
    hostile.write_index(tmp_path / "pytorch_model.bin.index.json", weight_map)
    result = audit(CheckpointSource(tmp_path))
    assert list(result.tensors) == ["a"]
    assert [Path(problem.path or "").name for problem in result.problems] == [
        "pytorch_model-00003-of-00003.bin",
        "pytorch_model-00002-of-00003.bin",
    ]


def test_missing_layers_are_folded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    hostile.write_tensors(folder / "m.safetensors", "norm.w")
    weight_map = {"norm.w": "m.safetensors"} | {f"layers.{i}.w": "m.safetensors" for i in range(32)}
    hostile.write_index(folder / "model.safetensors.index.json", weight_map)
    (problem,) = audit(CheckpointSource(folder)).problems
    assert "lacks 32 tensors that the index has in it: layers.{0-31}.w (32);" in str(problem)


def test_names_that_promise_many_files_are_not_believed_for_long(tmp_path: Path) -> None:
    hostile.write_tensors(tmp_path / "model-00001-of-999999.safetensors", "a")
    (problem,) = audit(CheckpointSource(tmp_path)).problems
    assert "999998 are missing" in str(problem)
    assert len(str(problem)) < 1000


def test_shards_numbered_from_zero_are_complete(tmp_path: Path) -> None:
    hostile.write_tensors(tmp_path / "model-00000-of-00002.safetensors", "a")
    hostile.write_tensors(tmp_path / "model-00001-of-00002.safetensors", "b")
    assert audit(CheckpointSource(tmp_path)).problems == []


# ---- the command


def test_a_manifest_is_written_and_compared(tmp_path: Path, capsys: Output) -> None:
    folder, manifest = model(tmp_path / "model"), tmp_path / "manifest.json"
    assert main(["verify", str(folder), "--write-manifest", str(manifest), "--progress"]) == 0
    captured = capsys.readouterr()
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert f"sha256 of 3 files, {size} B, written to {manifest}" in captured.out
    assert "Checking files" in captured.err
    assert main(["verify", str(folder.rename(tmp_path / "moved")), "--manifest", str(manifest)]) == 0
    assert "no problem found" in capsys.readouterr().out
    path = tmp_path / "moved" / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")  # a valid file
    assert main(["verify", str(tmp_path / "moved")]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "moved"), "--json", "--manifest", str(manifest)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [(entry["reason"], entry["path"]) for entry in document["problems"]] == [("DigestMismatch", str(path))]
    assert document["checksums"]["num_files"] == 3


def test_no_manifest_is_written_of_a_broken_checkpoint(tmp_path: Path, capsys: Output) -> None:
    folder, manifest = model(tmp_path / "model"), tmp_path / "manifest.json"
    truncate(folder)
    assert main(["verify", str(folder), "--write-manifest", str(manifest)]) == 1
    assert f"{manifest} is not written" in capsys.readouterr().out
    assert not manifest.exists()


def test_nothing_but_a_manifest_is_written_over(tmp_path: Path, capsys: Output) -> None:
    folder, manifest = model(tmp_path / "model"), tmp_path / "manifest.json"
    for path in (folder / "model-00001-of-00002.safetensors", folder / "model.safetensors.index.json"):
        before = path.read_bytes()
        assert main(["verify", str(folder), "--write-manifest", str(path)]) == 2
        assert f"{path}: it is there and is no manifest" in capsys.readouterr().err
        assert path.read_bytes() == before
    for _ in range(2):
        assert main(["verify", str(folder), "--write-manifest", str(manifest)]) == 0


def test_a_shard_that_is_missing_is_told_once(tmp_path: Path, capsys: Output) -> None:
    folder, manifest = model(tmp_path / "model"), tmp_path / "manifest.json"
    main(["verify", str(folder), "--write-manifest", str(manifest)])
    capsys.readouterr()
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert main(["verify", str(folder), "--json", "--manifest", str(manifest)]) == 1
    assert [entry["reason"] for entry in json.loads(capsys.readouterr().out)["problems"]] == ["ShardsMissing"]


def test_a_file_of_the_manifest_that_is_gone_is_a_problem(tmp_path: Path, capsys: Output) -> None:
    folder, manifest = model(tmp_path / "model"), tmp_path / "manifest.json"
    main(["verify", str(folder), "--write-manifest", str(manifest)])
    capsys.readouterr()
    (folder / "model.safetensors.index.json").unlink()
    assert main(["verify", str(folder), "--json", "--manifest", str(manifest)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [entry["reason"] for entry in document["problems"]] == ["FileMissing"]
    assert document["checksums"]["num_files"] == 2


def test_one_file_is_compared_with_its_part_of_a_manifest(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, manifest = model(tmp_path / "model"), tmp_path / "manifest.json"
    main(["verify", str(folder), "--write-manifest", str(manifest)])
    capsys.readouterr()
    (folder / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.chdir(folder)
    assert main(["verify", "model-00001-of-00002.safetensors", "--json", "--manifest", str(manifest)]) == 0
    assert json.loads(capsys.readouterr().out)["checksums"]["num_files"] == 1


def test_a_malformed_manifest_is_one_line_and_code_1(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "manifest.json").write_text("[]")
    assert main(["verify", str(model(tmp_path / "model")), "--manifest", str(tmp_path / "manifest.json")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("weightlift: error: ")
    assert captured.err.count("\n") == 1


def test_hostile_names_are_shown_harmlessly(tmp_path: Path, capsys: Output) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    hostile.write_tensors(folder / "a\x1b[2J.safetensors", "w\x1b[1A")
    hostile.write_tensors(folder / "b.safetensors", "w\x1b[1A")
    for command in ("verify", "inspect"):
        assert main([command, str(folder)]) == 1
        out = capsys.readouterr().out
        assert r"w\x1b[1A" in out
        assert all(line.isprintable() for line in out.splitlines())


def test_real_checkpoints_have_no_problems(shared_checkpoints: Path, tmp_path: Path, capsys: Output) -> None:
    folders = [path for path in sorted(shared_checkpoints.iterdir()) if path.is_dir()]
    assert folders
    for folder in folders:
        manifest = tmp_path / f"{folder.name}.json"
        assert main(["verify", str(folder), "--write-manifest", str(manifest)]) == 0
        assert main(["verify", str(folder), "--json", "--manifest", str(manifest)]) == 0
        capsys.readouterr()
