"""Gate 1: which files make up a checkpoint. Only headers are read, no tensor data."""

from __future__ import annotations

import os
import posixpath
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .entries import CheckpointFiles, Shard, TensorEntry
from .errors import CheckpointError, CheckpointNotFoundError, listed, printable
from .files import DOWNLOAD_AGAIN, is_folder, open_regular, read_at, refused
from .safetensors_file import CONVERT, IMPOSTORS, MAX_JSON_BYTES, parse_json, read_shard

_MODEL_INDEX = "model.safetensors.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"
_SUFFIX = ".safetensors"

# Names that tell a folder of another format.
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")


def locate(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> CheckpointFiles:
    """Finds the files of a checkpoint and reads their headers.

    Args:
        source: a safetensors file; a folder; an index (`*.index.json`); or a list of safetensors files.
            In a folder, `model.safetensors.index.json` or else its only `*.safetensors.index.json` says which files are
            read, and no other is opened. A folder without an index is all its `*.safetensors`, not of subfolders.

    With an index, a tensor that several shards hold is taken from the one that the index names. A tensor that the index
    does not name, in a shard that it does, belongs to the checkpoint (as for safetensors and vLLM): indexes go stale,
    and a tensor too many is reported against the model, whereas a dropped one would be lost without a word.

    Returns:
        The shards and their tensors. No file is left open.

    Raises:
        CheckpointNotFoundError: no such path, no weights there, or shards of the index are missing.
        CheckpointReadError: a file cannot be opened or read.
        CheckpointError: a file is not a valid safetensors file; the index is not valid or names tensors that its shards
            lack; two files hold the same tensor.
    """
    if not isinstance(source, (str, bytes, os.PathLike)):
        if not isinstance(source, Iterable):
            raise TypeError(f"expected the path of a checkpoint, or a list of files, found {type(source).__name__}")
        paths = [os.fsdecode(path) for path in source]
        if not paths:
            raise CheckpointNotFoundError("the list of files is empty; name at least one", reason="NoWeights")
        return _assemble(paths, assigned={})
    path = os.fsdecode(source)
    if is_folder(path):
        return _locate_folder(path)
    return _locate_index(path) if path.endswith(".json") else _assemble([path], assigned={})


def _locate_folder(folder: str) -> CheckpointFiles:
    try:
        # Hidden files are not weights: macOS leaves `._model.safetensors` on foreign disks.
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise refused("list", folder, error) from error
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if _MODEL_INDEX in indexes:
        indexes = [_MODEL_INDEX]
    if len(indexes) > 1:
        raise CheckpointError(
            f"expected one index, found {listed(indexes)}; pass the path of the one to load",
            path=folder,
            reason="AmbiguousIndex",
        )
    if indexes:
        return _locate_index(os.path.join(folder, indexes[0]))
    shards = [name for name in names if name.endswith(_SUFFIX)]
    if not shards:
        raise _no_weights(folder, names)
    return _assemble([os.path.join(folder, name) for name in shards], assigned={})


def _no_weights(folder: str, names: list[str]) -> CheckpointNotFoundError:
    problem = f"expected {_MODEL_INDEX} or *{_SUFFIX}, found "
    others = [name for name in names if name.endswith(_OTHER_FORMATS)]
    if others:
        problem += f"{listed(others)}; formats other than safetensors are not supported, {CONVERT}"
    else:
        shown = [name + "/" if is_folder(os.path.join(folder, name)) else name for name in names]
        problem += f"{listed(shown) or 'an empty folder'}; pass the folder that holds the weights"
    return CheckpointNotFoundError(problem, path=folder, reason="NoWeights")


def _locate_index(index: str) -> CheckpointFiles:
    folder = os.path.dirname(index)
    assigned = {name: os.path.join(folder, shard) for name, shard in _read_index(index).items()}
    paths = sorted(set(assigned.values()))
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        links = " (symlinks whose file is gone)" if all(os.path.islink(path) for path in missing) else ""
        names = [os.path.relpath(path, folder or ".") for path in missing]
        raise CheckpointNotFoundError(
            f"{len(missing)} of the {len(paths)} shards that it names are missing{links}: {listed(names)}; "
            f"{DOWNLOAD_AGAIN}",
            path=index,
            reason="ShardsMissing",
        )
    files = _assemble(paths, assigned)
    absent = [
        name for name in assigned if name not in files.tensors or files.tensors[name].shard.path != assigned[name]
    ]
    if absent:
        names = [f"{printable(name)} ({os.path.basename(assigned[name])})" for name in absent]
        raise CheckpointError(
            f"{len(absent)} of the {len(assigned)} tensors that it names are not in their shards: {listed(names)}; "
            "index and shards belong to different checkpoints, download both again",
            path=index,
            reason="TensorNotFound",
        )
    return files


def _read_index(index: str) -> dict[str, str]:
    """The weight map of an index, with shards as normalised paths relative to its folder."""
    fd, status = open_regular(index)
    try:
        if status.st_size > MAX_JSON_BYTES:
            problem = f"expected an index of {MAX_JSON_BYTES} bytes at most, found {status.st_size}"
            raise CheckpointError(problem, path=index, reason="InvalidIndex")
        text = read_at(fd, index, 0, status.st_size)
    finally:
        os.close(fd)
    for pattern, kind, remedy in IMPOSTORS[:2]:  # a pointer or a page
        if pattern.match(text):
            raise CheckpointError(f"expected an index, found {kind}; {remedy}", path=index, reason="InvalidIndex")
    weight_map = parse_json(text, index, "index", ("InvalidIndex", "InvalidIndex")).get("weight_map")
    if type(weight_map) is not dict or not weight_map:
        found = "none" if weight_map is None else reprlib.repr(weight_map)
        problem = f'expected a "weight_map" from tensor names to files, found {found}'
        raise CheckpointError(problem, path=index, reason="InvalidIndex")
    shards: dict[Any, str] = {}
    for name, shard in weight_map.items():
        if type(shard) is not str:
            problem = f"expected the name of a file in the weight_map, found {reprlib.repr(shard)}"
            raise CheckpointError(problem, path=index, tensor=name, reason="InvalidIndex")
        if shard not in shards:
            normal = posixpath.normpath(shard)
            # By the text, not by where symlinks lead: in a hub cache each shard is a symlink out of the folder.
            if not shard or "\0" in shard or normal == "." or normal.startswith("/") or ".." in shard.split("/"):
                problem = (
                    f"expected a file inside the index's folder, found {reprlib.repr(shard)}; this is not safe to open"
                )
                raise CheckpointError(problem, path=index, tensor=name, reason="UnsafePath")
            shards[shard] = normal
    return {name: shards[shard] for name, shard in weight_map.items()}


def _assemble(paths: list[str], assigned: dict[str, str]) -> CheckpointFiles:
    """Reads the shards at `paths`; a tensor that is in `assigned` counts only in the shard of that path."""
    shards = _read_shards(paths)
    shards.sort(key=lambda shard: _natural_key(shard.path))
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for entry in shard.tensors:
            if assigned.get(entry.name, shard.path) != shard.path:
                continue
            other = tensors.setdefault(entry.name, entry)
            if other is not entry:
                raise CheckpointError(
                    f"also in {printable(other.shard.path)}; expected a tensor in one file only, "
                    "pass the files that belong together, or their index",
                    path=shard.path,
                    tensor=entry.name,
                    reason="DuplicateTensor",
                )
    return CheckpointFiles(tuple(shards), tensors)


def _read_shards(paths: list[str]) -> list[Shard]:
    """All shards, or one error that tells of each that is at fault."""
    shards, faults = [], []
    for path in paths:
        try:
            shards.append(read_shard(path))
        except CheckpointError as fault:
            faults.append(fault)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        kinds = {type(fault) for fault in faults}
        kind: Callable[..., CheckpointError] = kinds.pop() if len(kinds) == 1 else CheckpointError
        lines = [f"{len(faults)} of {len(paths)} files cannot be loaded", *map(str, faults[:10])]
        if len(faults) > 10:
            lines.append(f"and {len(faults) - 10} more")
        raise kind("\n\t".join(lines), reason=faults[0].reason)
    return shards


def _natural_key(path: str) -> tuple[list[str | int], str]:
    """By file name, digits compared as numbers; by path where names are equal."""
    parts: list[str | int] = list(re.split(r"([0-9]+)", os.path.basename(path)))
    parts[1::2] = [int(digits) for digits in parts[1::2]]
    return parts, path
