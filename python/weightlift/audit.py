"""All that is wrong with the files of a checkpoint. `locate` refuses what it cannot load; this goes on and lists it."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import hub
from .checkpoint import CheckpointSource, read_header
from .entries import Shard, TensorEntry
from .errors import CheckpointError, CheckpointNotFoundError, folded, listed, printable
from .files import DOWNLOAD_AGAIN, is_folder, list_names
from .index_file import read_index
from .names import natural_key
from .source import OTHER_FORMATS, TORCH_SUFFIXES, choose_files, missing_parts, nothing_found


@dataclass
class Audit:
    """What was found.

    Attributes:
        folder: that the paths of a manifest are relative to.
        index: the path of the index that says which files are read; None: there is none.
        ignored: the other files of the folder, by name, each with why it is not read.
        shards: those with a valid header, in natural order.
        tensors: that would be loaded, by name.
        problems: each a reason to download or to repair something. Where there is none, `locate` succeeds.
        warnings: what is odd, and loads nevertheless.
    """

    folder: str
    index: str | None = None
    ignored: dict[str, str] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    problems: list[CheckpointError] = field(default_factory=list)
    warnings: list[CheckpointError] = field(default_factory=list)


def audit(source: CheckpointSource) -> Audit:
    """Looks at everything that names and headers tell; no data of tensors is read.

    Args:
        source: whose path is one: a folder, a file, an index, or the id of a repository on a hub.

    Raises:
        CheckpointError: it cannot be told which files make up the checkpoint: no such path, no weights, two indexes.
    """
    path = hub.download(source)
    if not is_folder(path):
        result = Audit(os.path.dirname(path) or ".")
        if path.endswith(".json"):
            result.index = path
            _audit_index(result, path, [])
        else:
            _audit_shards(result, [path], {})
        return result
    result = Audit(path)
    names = list_names(path, source.depth)
    index, files = choose_files(names, source, where=path)
    if index is not None:
        result.index = os.path.join(path, index)
        others = [name for name in names if not name.endswith(".index.json")]
        beside: list[str] = []
        with contextlib.suppress(CheckpointError):  # of several ranks; with the index, none of them is read
            _, beside = choose_files(others, source, where=path)
        read = _audit_index(result, result.index, [os.path.join(path, name) for name in beside])
        read.append(result.index)
    elif files:
        read = [os.path.join(path, name) for name in files]
        if absent := missing_parts(files):
            problem = (
                f"there is no index, and of the files that their names promise {len(absent)} are missing: "
                f"{listed(absent)}; {DOWNLOAD_AGAIN}"
            )
            result.problems.append(CheckpointNotFoundError(problem, path=result.folder, reason="ShardsMissing"))
        _audit_shards(result, read, {})
    else:
        shown = [name + "/" if is_folder(os.path.join(path, name)) else name for name in names]
        raise nothing_found(shown, source, where=path)
    read_names = {os.path.relpath(file, path) for file in read}
    result.ignored = {
        name: _why_ignored(name, path, source, index or files[0]) for name in names if name not in read_names
    }
    return result


def _why_ignored(name: str, folder: str, source: CheckpointSource, chosen: str) -> str:
    """`chosen` is the index that is read, or one of the files."""
    suffix = posixpath.splitext(name)[1].lower()
    if is_folder(os.path.join(folder, name)):
        return "a subfolder"
    if suffix in OTHER_FORMATS:
        return f"{OTHER_FORMATS[suffix][0]}, is not read"
    if name.endswith(".index.json"):
        return f"{chosen} comes first"
    if suffix != ".safetensors" and suffix not in TORCH_SUFFIXES:
        return "not weights"
    if not any(choose_files([name], CheckpointSource(folder, allow_patterns=["*"]), where=folder)):
        return "state of training"
    if chosen.endswith(f"{suffix}.index.json"):
        return f"not named by {chosen}"
    if any(choose_files([name], source, where=folder)):
        return f"{chosen} comes first"
    return f"load_format={source.load_format!r} does not ask for it"


def _audit_index(result: Audit, index: str, beside: list[str]) -> list[str]:
    """Gives the shards that the index names. Where it cannot be read, looks at least at the files `beside` it."""
    try:
        weight_map = read_index(index)
    except CheckpointError as fault:
        result.problems.append(fault)
        _audit_shards(result, beside, {})
        return beside
    folder = os.path.dirname(index)
    assigned = {name: os.path.join(folder, shard) for name, shard in weight_map.items()}
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in assigned.items():
        names_of[path].append(name)
    present = []
    for path, names in names_of.items():
        if os.path.exists(path):
            present.append(path)
            continue
        link = "a symlink to a file that does not exist" if os.path.islink(path) else "no such file"
        problem = f"{link}, and the index has {len(names)} tensors in it; {DOWNLOAD_AGAIN}"
        result.problems.append(CheckpointNotFoundError(problem, path=path, reason="ShardsMissing"))
    _audit_shards(result, present, assigned)
    for shard in result.shards:
        held = {entry.name for entry in shard.tensors}
        absent = [name for name in names_of[shard.path] if name not in held]
        if absent:
            problem = (
                f"lacks {len(absent)} tensors that the index has in it: {folded(absent)}; "
                "index and shards belong to different checkpoints, download both again"
            )
            result.problems.append(CheckpointError(problem, path=shard.path, reason="TensorNotFound"))
        unnamed = sorted(held - assigned.keys(), key=natural_key)
        if unnamed:
            problem = f"holds {len(unnamed)} tensors that the index does not name; they are loaded: {folded(unnamed)}"
            result.warnings.append(CheckpointError(problem, path=shard.path, reason="NotInIndex"))
        stale = sorted((name for name in held & assigned.keys() if assigned[name] != shard.path), key=natural_key)
        if stale:
            problem = (
                f"holds copies of {len(stale)} tensors that the index has in other files; "
                f"they are not loaded: {folded(stale)}"
            )
            result.warnings.append(CheckpointError(problem, path=shard.path, reason="StaleCopy"))
    return list(names_of)


def _audit_shards(result: Audit, paths: list[str], assigned: Mapping[str, str]) -> None:
    """Reads headers, and finds tensors that are in two files; those in `assigned` count only in that one."""
    for path in paths:
        try:
            result.shards.append(read_header(path))
        except CheckpointError as fault:
            result.problems.append(fault)
    result.shards.sort(key=lambda shard: (natural_key(os.path.basename(shard.path)), shard.path))
    twice: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for shard in result.shards:
        for entry in shard.tensors:
            if assigned.get(entry.name, shard.path) != shard.path:
                continue
            other = result.tensors.setdefault(entry.name, entry)
            if other is not entry:
                twice[shard.path, other.shard.path].append(entry.name)
    for (path, other_path), names in twice.items():
        problem = (
            f"{len(names)} of its tensors are also in {printable(other_path)}: {folded(names)}; expected a tensor in "
            "one file only, pass the files that belong together, or their index"
        )
        result.problems.append(CheckpointError(problem, path=path, reason="DuplicateTensor"))
