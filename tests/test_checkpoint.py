"""Gate 1: which files, and headers that lie."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pickle
import time
from pathlib import Path

import hostile
import pytest
import safetensors
import torch
from conftest import CHECKPOINTS, NO_CHECKPOINTS
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from weightlift import files, safetensors_file
from weightlift.checkpoint import locate
from weightlift.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointReadError,
)
from weightlift.safetensors_file import read_shard

needs_checkpoints = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason=NO_CHECKPOINTS)
not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")


def refusal(source) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        locate(source)
    return caught.value


# ---- one file


@pytest.mark.parametrize("case", hostile.ACCEPTED)
def test_header_that_safetensors_accepts_is_read_alike(case, tmp_path):
    content = hostile.ACCEPTED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    entries = {entry.name: entry for entry in read_shard(path).tensors}
    expected = dict(safetensors.deserialize(content))
    assert entries.keys() == expected.keys()
    for name, info in expected.items():
        entry = entries[name]
        assert content[entry.offset : entry.offset + entry.nbytes] == bytes(info["data"])


@pytest.mark.parametrize("case", hostile.REFUSED)
def test_bad_header_is_refused_as_by_safetensors(case, tmp_path):
    content, reason, text = hostile.REFUSED[case]
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(content)
    path = tmp_path / "model-00003.safetensors"
    path.write_bytes(content)
    begin = time.perf_counter()
    error = refusal(path)
    assert time.perf_counter() - begin < 5
    assert error.reason == reason
    assert str(error).startswith(f"{path}: ")
    assert text in str(error)
    assert error.path == str(path)
    assert len(str(error)) < 1500


@pytest.mark.parametrize("case", hostile.STRICTER)
def test_header_that_only_safetensors_accepts_is_refused(case, tmp_path):
    content, reason, text = hostile.STRICTER[case]
    safetensors.deserialize(content)
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    error = refusal(path)
    assert error.reason == reason
    assert text in str(error)


def test_truncated_file_names_the_tensor_and_both_sizes(tmp_path):
    path = hostile.write_tensors(tmp_path / "model.safetensors", "embed", "lm_head.weight")
    size = path.stat().st_size
    os.truncate(path, size - 3)
    error = refusal(path)
    assert error.tensor == "lm_head.weight"
    assert str(error) == (
        f"{path}: lm_head.weight: data_offsets [4, 8) exceed the file's {size - 3} bytes, the tensors need {size}; "
        "the file is truncated, download it again"
    )


def test_trailing_bytes_are_refused_with_both_sizes(tmp_path):
    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"xyz")
    assert f"trailing bytes: the tensors end at byte {size}, the file has {size + 3} bytes" in str(refusal(path))


@pytest.mark.parametrize(
    ("content", "found", "remedy"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git-lfs pointer", "git lfs pull"),
        (b"<!DOCTYPE html><html>404</html>", "HTML or XML page", "download"),
        (b"\n <html>404</html>", "HTML or XML page", "download"),
        (b'<?xml version="1.0"?><Error/>', "HTML or XML page", "download"),
        (b"PK\x03\x04\x00\x00\x08\x08" + bytes(60), "zip archive", "save it as safetensors"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9", "pickle", "save it as safetensors"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + bytes(99), "gzip", "gunzip"),
        (b"GGUF\x03\0\0\0" + bytes(99), "GGUF", "safetensors"),
        (b'{"error": "not found"}', "JSON text", "download it again"),
        (bytes(4096), "starts with zeros", "download it again"),
    ],
)
def test_other_format_saved_as_a_shard_is_named(content, found, remedy, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    error = refusal(path)
    assert error.reason == "NotSafetensors"
    assert found in str(error)
    assert remedy in str(error)
    assert f"({len(content)} bytes)" in str(error)


def test_truncated_header_is_not_taken_for_json(tmp_path):
    # The length 0x7b20 is " {" in the file.
    path = hostile.write(tmp_path / "model.safetensors", b"{" + b" " * 100, length=0x7B20)
    assert refusal(path).reason == "InvalidHeaderLength"


def test_dtype_newer_than_torch_names_the_torch_it_needs(tmp_path, monkeypatch):
    monkeypatch.delitem(safetensors_file._DTYPES, "F4")
    path = hostile.write(tmp_path / "m.safetensors", {"w": hostile.tensor("F4", [2], [0, 1])}, b"x")
    error = refusal(path)
    assert error.reason == "UnsupportedDtype"
    assert "w: dtype F4 (torch.float4_e2m1fn_x2) needs torch 2.8 or newer" in str(error)


def test_f4_has_torch_shape(tmp_path):
    path = hostile.write(tmp_path / "m.safetensors", {"w": hostile.tensor("F4", [3, 4], [0, 6])}, b"abcdef")
    entry = locate(path).tensors["w"]
    assert (entry.dtype, entry.shape, entry.nbytes) == (torch.float4_e2m1fn_x2, (3, 2), 6)


def test_every_dtype_agrees_with_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    dtypes = [dtype for dtype, _ in safetensors_file._DTYPES.values() if dtype != torch.float4_e2m1fn_x2]
    assert len(dtypes) == 19
    save_file({str(dtype): torch.zeros(2, 3, dtype=torch.uint8).to(dtype) for dtype in dtypes}, path)
    entries = locate(path).tensors
    assert len(entries) == 19
    for name, entry in entries.items():
        assert str(entry.dtype) == name
        assert entry.shape == (2, 3)
        assert entry.nbytes == 6 * entry.dtype.itemsize


def test_shard_tells_what_it_is(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "b": hostile.tensor("U8", [4], [4, 8]),
        "a": hostile.tensor("U8", [4], [0, 4]),
    }
    path = hostile.write(tmp_path / "model.safetensors", header, b"aaaabbbb")
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    shard = read_shard(link)
    status = path.stat()
    assert (shard.path, shard.size) == (str(link), status.st_size)
    assert (shard.device, shard.inode, shard.mtime_ns) == (status.st_dev, status.st_ino, status.st_mtime_ns)
    assert shard.data_offset == status.st_size - 8
    assert shard.metadata == {"format": "pt"}
    assert [(entry.name, entry.offset - shard.data_offset) for entry in shard.tensors] == [("a", 0), ("b", 4)]
    assert all(entry.shard is shard for entry in shard.tensors)
    assert "shard" not in repr(shard.tensors[0])
    restored = pickle.loads(pickle.dumps(shard))
    assert restored.tensors[1].shard is restored


def test_name_that_is_hostile_to_terminals_is_escaped(tmp_path):
    path = hostile.write(tmp_path / "m.safetensors", {"\x1b[2J" + "x" * 5000: hostile.tensor("F9", [1], [0, 1])}, b"x")
    text = str(refusal(path))
    assert "\x1b" not in text
    assert len(text) < 2000


# ---- properties

STRICTER_REASONS = {reason for _, reason, _ in hostile.STRICTER.values()}


@st.composite
def mutated_files(draw) -> bytes:
    """A valid file with a fault or two: in the structure of the header, in its text, in the file's bytes."""
    sizes = st.integers(0, 3)
    header, offset = {}, 0
    for i in range(draw(st.integers(0, 4))):
        dtype, nbytes = draw(st.sampled_from([("U8", 1), ("F32", 4), ("BF16", 2), ("BOOL", 1), ("C64", 8)]))
        shape = draw(st.lists(sizes, max_size=3))
        end = offset + nbytes * torch.Size(shape).numel()
        header[f"t{i}"] = hostile.tensor(dtype, shape, [offset, end])
        offset = end
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))

    numbers = st.integers(-2, 12) | st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 1e3, 0.0])
    values = st.recursive(
        st.none() | st.booleans() | numbers | st.text(max_size=3) | st.sampled_from(["F4", "F6_E2M3", "I64", "u8"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    )
    names = [name for name in header if name != "__metadata__"]
    for _ in range(draw(st.integers(0, 2))):
        if not names:
            break
        info = header[draw(st.sampled_from(names))]
        match draw(st.sampled_from(["dtype", "shape", "data_offsets", "size", "offset", "metadata", "new"])):
            case "size" if isinstance(info.get("shape"), list) and info["shape"]:
                info["shape"][draw(st.integers(0, len(info["shape"]) - 1))] = draw(numbers)
            case "offset" if isinstance(info.get("data_offsets"), list) and info["data_offsets"]:
                info["data_offsets"][draw(st.integers(0, len(info["data_offsets"]) - 1))] = draw(numbers)
            case "metadata":
                header["__metadata__"] = draw(values)
            case "new":
                info[draw(st.text(max_size=2))] = draw(values)
            case part:
                info[part] = draw(values)
    content = bytearray(hostile.encode(header, bytes(offset)))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["set", "insert", "cut", "swap"])):
            case "set" if at < len(content):
                content[at] = draw(st.integers(0, 255))
            case "insert":
                content[at:at] = draw(
                    st.sampled_from([b"0", b"-", b" ", b"]", b"}", b"\0", b"\xff", b"\\ud800", b'"', b"e1", b"NaN"])
                )
                if draw(st.booleans()):
                    content[:8] = (int.from_bytes(content[:8], "little") + 1).to_bytes(9, "little")[:8]
            case "cut":
                del content[at:]
            case "swap":
                content[8:at] = content[8:at].swapcase()
    return bytes(content)


@settings(max_examples=500, deadline=None)
@given(content=mutated_files())
def test_never_accepts_what_safetensors_refuses(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    expected, entries, error = None, None, None
    with contextlib.suppress(safetensors.SafetensorError):
        expected = dict(safetensors.deserialize(content))
    try:
        entries = {entry.name: entry for entry in read_shard(path).tensors}
    except CheckpointError as caught:
        error = caught
    if entries is None:
        assert expected is None or error.reason in STRICTER_REASONS
        assert str(error).startswith(f"{path}: ")
    else:
        assert entries.keys() == expected.keys()
        for name, entry in entries.items():
            assert content[entry.offset : entry.offset + entry.nbytes] == bytes(expected[name]["data"])
            assert torch.empty(entry.shape, dtype=entry.dtype, device="meta").nbytes == entry.nbytes


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=64) | st.binary(max_size=64).map(lambda text: hostile.encode(b"{" + text + b"}")))
def test_garbage_raises_nothing_but_checkpoint_errors(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "garbage.safetensors"
    path.write_bytes(content)
    try:
        read_shard(path)
    except CheckpointError:
        pass
    else:
        safetensors.deserialize(content)


# ---- what cannot be opened


def test_path_that_does_not_exist_is_not_found(tmp_path):
    path = tmp_path / "none.safetensors"
    error = refusal(path)
    assert isinstance(error, CheckpointNotFoundError)
    assert isinstance(error, FileNotFoundError)
    assert (error.errno, error.filename) == (errno.ENOENT, str(path))
    assert str(error) == f"{path}: no such file or folder; check the path"


def test_tilde_that_was_not_expanded_is_named():
    assert "no such file or folder, `~` is not expanded here; check the path" in str(refusal("~/models/llama"))


def test_path_with_a_nul_is_not_found():
    assert isinstance(refusal("a\0b"), CheckpointNotFoundError)


def test_dangling_symlink_is_named(tmp_path):
    link = tmp_path / "model.safetensors"
    link.symlink_to(tmp_path / "gone")
    assert "symlink to a file that does not exist" in str(refusal(link))


@not_as_root
def test_unreadable_file_is_a_read_error(tmp_path):
    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")
    path.chmod(0)
    error = refusal(path)
    assert isinstance(error, CheckpointReadError)
    assert error.errno == errno.EACCES


def test_refusal_of_the_operating_system_keeps_its_errno(tmp_path, monkeypatch):
    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(files.os, "open", refuse)
    error = refusal(path)
    assert isinstance(error, CheckpointReadError)
    assert (error.errno, error.filename, error.reason) == (errno.EACCES, str(path), "IoError")
    assert str(error) == (
        f"{path}: the operating system refused to open it: Permission denied; "
        "check the permissions of the file and of its folders"
    )


def test_read_error_of_the_device_is_a_read_error(tmp_path, monkeypatch):
    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files.os, "pread", fail)
    error = refusal(path)
    assert isinstance(error, CheckpointReadError)
    assert error.errno == errno.EIO
    assert "refused to read it: Input/output error" in str(error)


def test_short_reads_are_continued(tmp_path, monkeypatch):
    path = hostile.write_tensors(tmp_path / "model.safetensors", *(f"layers.{i}" for i in range(20)))
    pread = os.pread
    monkeypatch.setattr(files.os, "pread", lambda fd, length, offset: pread(fd, min(length, 7), offset))
    assert len(locate(path).tensors) == 20


def test_file_that_shrinks_while_its_header_is_read_is_a_read_error(tmp_path, monkeypatch):
    path = hostile.write_tensors(tmp_path / "model.safetensors", *(f"layers.{i}" for i in range(20)))
    pread = os.pread
    monkeypatch.setattr(
        files.os, "pread", lambda fd, length, offset: pread(fd, min(length, max(100 - offset, 0)), offset)
    )
    error = refusal(path)
    assert isinstance(error, CheckpointReadError)
    assert (error.reason, error.errno) == ("UnexpectedEnd", None)
    assert "found 100: the file became shorter" in str(error)


def test_directory_named_like_a_shard_is_refused(tmp_path):
    (tmp_path / "x.safetensors").mkdir()
    error = refusal(tmp_path)
    assert error.reason == "NotRegularFile"
    assert "x.safetensors: expected a regular file, found a directory" in str(error)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["fifo", "device"])
def test_pipe_or_device_is_refused_without_waiting(make, tmp_path):
    path = tmp_path / "model.safetensors"
    make(path)
    assert "found a pipe or device" in str(refusal(path))


def test_no_descriptor_is_left_open(tmp_path):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"{}")
    good = hostile.write_tensors(tmp_path / "good.safetensors", "w")
    before = os.listdir("/proc/self/fd")
    locate(good)
    refusal(bad)
    refusal(tmp_path)
    assert os.listdir("/proc/self/fd") == before


# ---- folders, indexes, lists


def test_folder_without_index_is_all_its_shards_in_natural_order(tmp_path):
    for i in (10, 2, 1):
        hostile.write_tensors(tmp_path / f"model-{i}.safetensors", f"b{i}", f"a{i}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.safetensors").write_bytes(b"bad")
    (tmp_path / "._model-1.safetensors").write_bytes(b"bad")
    files = locate(tmp_path)
    assert [Path(shard.path).name for shard in files.shards] == [f"model-{i}.safetensors" for i in (1, 2, 10)]
    assert list(files.tensors) == ["b1", "a1", "b2", "a2", "b10", "a10"]


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "consolidated.safetensors.index.json"])
def test_shard_that_is_not_in_the_index_is_not_opened(name, tmp_path):
    hostile.write_tensors(tmp_path / "a.safetensors", "w")
    (tmp_path / "b.safetensors").write_bytes(b"bad")
    index = hostile.write_index(tmp_path / name, {"w": "a.safetensors"})
    for source in (tmp_path, str(index)):
        files = locate(source)
        assert [shard.path for shard in files.shards] == [str(tmp_path / "a.safetensors")]


def test_model_index_is_preferred_to_others(tmp_path):
    hostile.write_tensors(tmp_path / "a.safetensors", "w")
    hostile.write_tensors(tmp_path / "b.safetensors", "w")
    hostile.write_index(tmp_path / "consolidated.safetensors.index.json", {"w": "b.safetensors"})
    hostile.write_index(tmp_path / "model.safetensors.index.json", {"w": "a.safetensors"})
    assert locate(tmp_path).tensors["w"].shard.path == str(tmp_path / "a.safetensors")


def test_several_indexes_are_ambiguous(tmp_path):
    for name in ("a", "b"):
        hostile.write_index(tmp_path / f"{name}.safetensors.index.json", {"w": "a.safetensors"})
    error = refusal(tmp_path)
    assert error.reason == "AmbiguousIndex"
    assert "a.safetensors.index.json, b.safetensors.index.json" in str(error)


def test_index_decides_which_copy_of_a_tensor_counts(tmp_path):
    hostile.write_tensors(tmp_path / "a.safetensors", "stale", "x", fill=1)
    hostile.write_tensors(tmp_path / "b.safetensors", "stale", "y", fill=2)
    weight_map = {"stale": "b.safetensors", "x": "a.safetensors", "y": "./b.safetensors"}
    hostile.write_index(tmp_path / "model.safetensors.index.json", weight_map)
    files = locate(tmp_path)
    assert len(files.shards) == 2
    assert list(files.tensors) == ["x", "stale", "y"]
    assert files.tensors["stale"].shard.path == str(tmp_path / "b.safetensors")


def test_tensor_that_the_index_does_not_name_is_kept(tmp_path):
    hostile.write_tensors(tmp_path / "a.safetensors", "w", "unnamed")
    hostile.write_index(tmp_path / "model.safetensors.index.json", {"w": "a.safetensors"})
    assert list(locate(tmp_path).tensors) == ["w", "unnamed"]


def test_tensor_in_two_files_without_index_names_both(tmp_path):
    paths = [hostile.write_tensors(tmp_path / f"{name}.safetensors", "w", name) for name in "ab"]
    for source in (tmp_path, paths):
        error = refusal(source)
        assert (error.reason, error.tensor) == ("DuplicateTensor", "w")
        assert str(error).startswith(f"{paths[1]}: w: also in {paths[0]}; ")


def test_list_of_files_is_read_in_natural_order(tmp_path):
    paths = [hostile.write_tensors(tmp_path / f"m-{i}.safetensors", f"w{i}") for i in (10, 9)]
    assert list(locate(paths).tensors) == ["w9", "w10"]


def test_empty_list_is_not_found():
    assert isinstance(refusal([]), CheckpointNotFoundError)


def test_hub_cache_of_symlinks_is_read_and_named_as_the_user_knows_it(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    hostile.write_tensors(blobs / "00ff", "w")
    (blobs / "11ff").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    for name, blob in (("a", "00ff"), ("b", "11ff")):
        (snapshot / f"{name}.safetensors").symlink_to(f"../../blobs/{blob}")
    index = hostile.write_index(snapshot / "model.safetensors.index.json", {"w": "a.safetensors"})
    assert locate(snapshot).tensors["w"].shard.path == str(snapshot / "a.safetensors")
    hostile.write_index(index, {"w": "a.safetensors", "v": "b.safetensors"})
    assert str(refusal(snapshot)).startswith(
        f"{snapshot / 'b.safetensors'}: expected a safetensors file, found a git-lfs"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"weight_map": ', "malformed: Expecting value"),
        (b"[1]", "expected a JSON object, found [1]"),
        (b"\xff", "expected UTF-8"),
        (b"", "malformed: Expecting value"),
        (b"[" * 200_000, "nested too deeply"),
        (b"{}", '"weight_map" from tensor names to files, found none'),
        (b'{"weight_map": []}', "found []"),
        (b'{"weight_map": {}}', "found {}"),
        (b'{"weight_map": {"w": 3}}', "w: expected the name of a file in the weight_map, found 3"),
        (b'{"weight_map": {"w": "a", "w": "b"}}', 'the key "w" occurs twice'),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "HTML or XML page"),
    ],
)
def test_bad_index_is_refused(text, found, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text)
    error = refusal(tmp_path)
    assert error.reason == "InvalidIndex"
    assert str(error).startswith(f"{index}: ")
    assert found in str(error)


@pytest.mark.parametrize(
    "shard", ["/etc/x.safetensors", "../x.safetensors", "a/../../x.safetensors", "a/../x", "", ".", "a\0b"]
)
def test_index_does_not_lead_out_of_its_folder(shard, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    hostile.write_tensors(tmp_path / "x.safetensors", "w")
    hostile.write_index(folder / "model.safetensors.index.json", {"w": shard})
    error = refusal(folder)
    assert (error.reason, error.tensor) == ("UnsafePath", "w")
    assert repr(shard) in str(error)


def test_index_may_name_shards_in_subfolders(tmp_path):
    (tmp_path / "unet").mkdir()
    hostile.write_tensors(tmp_path / "unet" / "a.safetensors", "w")
    hostile.write_index(tmp_path / "model.safetensors.index.json", {"w": "unet/a.safetensors"})
    assert locate(tmp_path).tensors["w"].shard.path == str(tmp_path / "unet" / "a.safetensors")


def test_index_in_the_working_directory_is_read(tmp_path, monkeypatch):
    hostile.write_tensors(tmp_path / "a.safetensors", "w")
    hostile.write_index(tmp_path / "model.safetensors.index.json", {"w": "a.safetensors"})
    monkeypatch.chdir(tmp_path)
    assert locate("model.safetensors.index.json").shards[0].path == "a.safetensors"


def test_missing_shards_are_listed_at_once(tmp_path):
    hostile.write_tensors(tmp_path / "a.safetensors", "a")
    index = hostile.write_index(
        tmp_path / "model.safetensors.index.json", {name: f"{name}.safetensors" for name in "abc"}
    )
    error = refusal(tmp_path)
    assert isinstance(error, CheckpointNotFoundError)
    assert (error.reason, error.errno, error.path) == ("ShardsMissing", errno.ENOENT, str(index))
    assert "2 of the 3 shards that it names are missing: b.safetensors, c.safetensors; download" in str(error)
    for name in "bc":
        (tmp_path / f"{name}.safetensors").symlink_to("gone")
    assert "missing (symlinks whose file is gone): b.safetensors" in str(refusal(tmp_path))


def test_index_that_names_absent_tensors_lists_ten(tmp_path):
    hostile.write_tensors(tmp_path / "a.safetensors", "w")
    hostile.write_tensors(tmp_path / "b.safetensors", "elsewhere")
    weight_map = {"w": "a.safetensors", "elsewhere": "a.safetensors", "b": "b.safetensors"}
    weight_map |= {f"absent{i}": "a.safetensors" for i in range(10)}
    hostile.write_index(tmp_path / "model.safetensors.index.json", weight_map)
    error = refusal(tmp_path)
    assert error.reason == "TensorNotFound"
    assert "12 of the 13 tensors" in str(error)
    assert "elsewhere (a.safetensors), b (b.safetensors), absent0 (a.safetensors)" in str(error)
    assert "and 2 more" in str(error)


def test_all_faulty_shards_are_told_at_once(tmp_path):
    for i in range(14):
        path = hostile.write_tensors(tmp_path / f"m-{i:02}.safetensors", f"w{i}")
        if i > 1:
            os.truncate(path, path.stat().st_size - 1)
    text = str(refusal(tmp_path))
    assert text.startswith("12 of 14 files cannot be loaded")
    assert text.count("the file is truncated") == 10
    assert "and 2 more" in text


def test_folder_without_weights_says_what_is_there(tmp_path):
    error = refusal(tmp_path)
    assert isinstance(error, CheckpointNotFoundError)
    assert "expected *.safetensors, *.bin or *.pt, found an empty folder" in str(error)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "snapshots").mkdir()
    assert "found config.json, snapshots/; pass the folder that holds the weights" in str(refusal(tmp_path))


# ---- real checkpoints


@needs_checkpoints
@pytest.mark.parametrize("folder", sorted(CHECKPOINTS.glob("*/")), ids=lambda path: path.name)
def test_real_checkpoint_agrees_with_safetensors(folder):
    files = locate(folder)
    names = []
    for shard in files.shards:
        content = Path(shard.path).read_bytes()
        with safetensors.safe_open(shard.path, "pt") as oracle:
            assert shard.metadata == oracle.metadata()
            assert [entry.name for entry in shard.tensors] == oracle.offset_keys()
            names += oracle.keys()
            for entry in shard.tensors:
                expected = oracle.get_tensor(entry.name)
                assert (entry.dtype, entry.shape) == (expected.dtype, tuple(expected.shape))
                raw = expected.reshape(-1).view(torch.uint8).numpy().tobytes()
                assert content[entry.offset : entry.offset + entry.nbytes] == raw
    assert files.tensors.keys() == set(names)


@needs_checkpoints
def test_real_shard_cut_anywhere_is_refused(tmp_path):
    content = (CHECKPOINTS / "w4a16" / "model-00002-of-00002.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    header_end = 8 + int.from_bytes(content[:8], "little")
    for end in (0, 7, 8, 9, header_end - 1, header_end, header_end + 1, len(content) - 1):
        path.write_bytes(content[:end])
        error = refusal(path)
        assert str(path) in str(error)
        assert str(end) in str(error) or end == 0


def test_header_of_91000_tensors_parses_within_a_second(tmp_path):
    names = [f"model.layers.{i // 1500}.mlp.experts.{i % 384}.{i}.down_proj.weight_packed" for i in range(91_000)]
    path = hostile.write_tensors(tmp_path / "model.safetensors", *names)
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        files = locate(path)
        seconds.append(time.process_time() - begin)
    assert len(files.tensors) == 91_000
    assert min(seconds) < 1


# ---- errors


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("problem", path="f", tensor="t", reason="InvalidOffset"),
        CheckpointNotFoundError("problem", path="f", reason="NotFound"),
        CheckpointReadError("problem", path="f", reason="IoError", cause=OSError(errno.EIO, "Input/output error")),
        CheckpointReadError("problem", path="f", tensor="t", reason="UnexpectedEnd"),
        CheckpointMismatchError(
            "Net", path="f", missing_keys=["a"], unexpected_keys=["b"], mismatched=["c: d"], gaps=["e"]
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pickle_and_copy_whole(error):
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error) != ""
        assert vars(other) == vars(error)
        if isinstance(error, OSError):
            assert (other.errno, other.filename) == (error.errno, error.filename)


def test_error_text_is_file_tensor_problem():
    error = CheckpointError("expected, found; remedy", path="f", tensor="t", reason="InvalidOffset")
    assert str(error) == "f: t: expected, found; remedy"
    assert isinstance(error, ValueError)
    assert isinstance(CheckpointReadError("p", reason="IoError"), OSError)
    assert isinstance(CheckpointMismatchError("Net"), RuntimeError)


def test_mismatch_speaks_torch_words_and_lists_ten():
    missing = [f"w{i}" for i in range(12)]
    error = CheckpointMismatchError(
        "Net", path="f", missing_keys=missing, gaps=["q.weight[2:4]"], remedy="Pass strict=False."
    )
    assert str(error) == (
        "f: Error(s) in loading state_dict for Net:\n"
        '\tMissing key(s) in state_dict: "w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8", "w9" and 2 more.\n'
        "\tNot filled by any transfer: q.weight[2:4].\n"
        "\tPass strict=False."
    )
    assert error.missing_keys == missing
    assert error.gaps == ["q.weight[2:4]"]
