"""Gate 1: which files make up a checkpoint. Only headers are read, no tensor data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from . import hub
from .entries import CheckpointFiles, Shard, TensorEntry
from .errors import CheckpointError, CheckpointNotFoundError, listed, printable
from .files import DOWNLOAD_AGAIN, is_folder, list_names
from .filters import Filter, checked, first_rule
from .index_file import read_index
from .names import natural_key
from .open_ahead import OpenAhead
from .safetensors_file import read_shard
from .source import OTHER_FORMATS, TORCH_SUFFIXES, CheckpointSource, choose_files, missing_parts, nothing_found
from .storage import max_open_files
from .torch_file import read_torch_shard

PathLike = str | os.PathLike[str]
# What is accepted wherever a checkpoint is asked for.
CheckpointPath = PathLike | CheckpointSource | Sequence[PathLike | CheckpointSource]

# Files that are asked about at a time. Across a network each answer takes up to tens of milliseconds, and there are
# hundreds of files.
_MAX_ASKING = 32

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

__all__ = ["CheckpointPath", "CheckpointSource", "locate", "read_header"]


def locate(
    source: CheckpointPath, *, filters: Sequence[Filter | None] = (), ahead: OpenAhead | None = None
) -> CheckpointFiles:
    """Finds the files of a checkpoint and reads their headers.

    Args:
        source: a file, safetensors or of `torch.save`; a folder; an index (`*.index.json`); a list of files; the id of
            a repository on a hub, whose weights are downloaded where they are not in the cache; a CheckpointSource,
            which can say more; or a list of those, of which no two may hold the same tensor.
            In a folder, the files are those of `CheckpointSource.load_format`. Where there is an index for them,
            `model.safetensors.index.json` or else the only one, it says which are read, and no other is opened.
        filters: each gives the rule by which a tensor of that name is not wanted, or None. With an index, shards of
            which no tensor is wanted are neither opened nor downloaded, and may be absent. A filter sees names with
            the source's prefix.
        ahead: opens the files that it chooses meanwhile.

    With an index, a tensor that several shards hold is taken from the one that the index names. A tensor that the index
    does not name, in a shard that it does, belongs to the checkpoint (as for safetensors and vLLM): indexes go stale,
    and a tensor too many is reported against the model, whereas a dropped one would be lost without a word.
    Without one, a tensor in two files is an error.

    Returns:
        The shards and their tensors. No file is left open, but by `ahead`.

    Raises:
        CheckpointNotFoundError: no such path, no weights there, or shards of the index are missing.
        CheckpointReadError: a file cannot be opened or read, or a hub cannot be reached.
        CheckpointError: a file is not valid, or of a format that is not read; the index is not valid or names tensors
            that its shards lack; two files hold the same tensor.
    """
    filters = checked(filters)
    if isinstance(source, CheckpointSource):
        return _locate_source(source, filters, ahead)
    if isinstance(source, (str, bytes, os.PathLike)):
        return _locate_source(CheckpointSource(source), filters, ahead)
    if not isinstance(source, Iterable):
        raise TypeError(f"expected the path of a checkpoint, or a list of files, found {type(source).__name__}")
    items = list(source)
    paths = [item for item in items if not isinstance(item, CheckpointSource)]
    if len(paths) == len(items):
        return _locate_source(CheckpointSource(paths), filters, ahead)
    parts = [locate(item, filters=filters, ahead=ahead) for item in items]
    shards = [shard for part in parts for shard in part.shards]
    skipped = {name: rule for part in parts for name, rule in part.skipped.items()}
    return CheckpointFiles(tuple(shards), _merge(entry for part in parts for entry in part.tensors.values()), skipped)


def _locate_source(
    source: CheckpointSource, filters: Sequence[Filter | None], ahead: OpenAhead | None
) -> CheckpointFiles:
    if not isinstance(source.path, (str, bytes, os.PathLike)):
        paths = [os.fsdecode(path) for path in source.path]
        if not paths:
            raise CheckpointNotFoundError("the list of files is empty; name at least one", reason="NoWeights")
        return _assemble(paths, {}, source, filters, ahead)
    path = hub.download(source, filters=filters)
    if is_folder(path):
        return _locate_folder(path, source, filters, ahead)
    if path.endswith(".json"):
        return _locate_index(path, source, filters, ahead)
    return _assemble([path], {}, source, filters, ahead)


def _locate_folder(
    folder: str, source: CheckpointSource, filters: Sequence[Filter | None], ahead: OpenAhead | None
) -> CheckpointFiles:
    names = list_names(folder, source.depth)
    index, files = choose_files(names, source, where=folder)
    if index is not None:
        return _locate_index(os.path.join(folder, index), source, filters, ahead)
    if not files:
        shown = [name + "/" if is_folder(os.path.join(folder, name)) else name for name in names]
        raise nothing_found(shown, source, where=folder)
    if source.allow_patterns is None and (absent := missing_parts(files)):
        raise CheckpointNotFoundError(
            f"there is no index, and of the files that their names promise {len(absent)} are missing: "
            f"{listed(absent)}; {DOWNLOAD_AGAIN}, or pass the files to load as a list",
            path=folder,
            reason="ShardsMissing",
        )
    return _assemble([os.path.join(folder, name) for name in files], {}, source, filters, ahead)


def _locate_index(
    index: str, source: CheckpointSource, filters: Sequence[Filter | None], ahead: OpenAhead | None
) -> CheckpointFiles:
    folder = os.path.dirname(index)
    assigned = {source.prefix + name: os.path.join(folder, shard) for name, shard in read_index(index).items()}
    rules = {name: first_rule(filters, name) for name in assigned} if filters else {}
    skipped = {name: rule for name, rule in rules.items() if rule is not None}
    opened = {path for name, path in assigned.items() if name not in skipped}
    paths = sorted(opened)
    missing = [path for path, exists in zip(paths, _ask(os.path.exists, paths), strict=True) if not exists]
    if missing:
        links = " (symlinks whose file is gone)" if all(os.path.islink(path) for path in missing) else ""
        names = [os.path.relpath(path, folder or ".") for path in missing]
        raise CheckpointNotFoundError(
            f"{len(missing)} of the {len(paths)} shards that it names are missing{links}: {listed(names)}; "
            f"{DOWNLOAD_AGAIN}",
            path=index,
            reason="ShardsMissing",
        )
    files = _assemble(paths, assigned, source, filters, ahead)
    absent = [
        name
        for name, path in assigned.items()
        if path in opened and name not in files.tensors and name not in files.skipped
    ]
    if absent:
        names = [f"{printable(name)} ({os.path.basename(assigned[name])})" for name in absent]
        raise CheckpointError(
            f"{len(absent)} of the {len(assigned)} tensors that it names are not in their shards: {listed(names)}; "
            "index and shards belong to different checkpoints, download both again",
            path=index,
            reason="TensorNotFound",
        )
    files.skipped.update(skipped)
    return files


def _assemble(
    paths: list[str],
    assigned: dict[str, str],
    source: CheckpointSource,
    filters: Sequence[Filter | None],
    ahead: OpenAhead | None,
) -> CheckpointFiles:
    """Reads the shards at `paths`; a tensor that is in `assigned` counts only in the shard of that path."""
    shards = _read_shards(paths, ahead)
    shards.sort(key=lambda shard: (natural_key(os.path.basename(shard.path)), shard.path))
    skipped: dict[str, str] = {}
    wanted: list[TensorEntry] = []
    for shard in shards:
        for entry in shard.tensors:
            if source.prefix:  # nobody else has seen the entry yet
                entry.name = source.prefix + entry.name
            if assigned.get(entry.name, shard.path) != shard.path:
                continue
            rule = first_rule(filters, entry.name) if filters else None
            if rule is None:
                wanted.append(entry)
            else:
                skipped[entry.name] = rule
    if skipped:
        used = {id(entry.shard) for entry in wanted}
        shards = [shard for shard in shards if id(shard) in used]
    return CheckpointFiles(tuple(shards), _merge(wanted), skipped)


def _merge(entries: Iterable[TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors by name, no name twice."""
    tensors: dict[str, TensorEntry] = {}
    for entry in entries:
        other = tensors.setdefault(entry.name, entry)
        if other is not entry:
            raise CheckpointError(
                f"also in {printable(other.shard.path)}; expected a tensor in one file only, "
                "pass the files that belong together, or their index",
                path=entry.shard.path,
                tensor=entry.name,
                reason="DuplicateTensor",
            )
    return tensors


def _read_shards(paths: list[str], ahead: OpenAhead | None) -> list[Shard]:
    """All shards, or one error that tells of each that is at fault."""
    tasks: list[Callable[[], Shard | CheckpointError | None]] = [partial(_header_or_fault, path) for path in paths]
    if ahead is not None:  # in front, so that they go with the first headers
        tasks = [*(partial(ahead.open, path) for path in ahead.choose(paths)), *tasks]
    found = _ask(lambda task: task(), tasks)
    shards = [shard for shard in found if isinstance(shard, Shard)]
    faults = [fault for fault in found if isinstance(fault, CheckpointError)]
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


def _header_or_fault(path: str) -> Shard | CheckpointError:
    try:
        return read_header(path)
    except CheckpointError as fault:
        return fault


def _ask(question: Callable[[_Item], _Answer], items: list[_Item]) -> list[_Answer]:
    """The answer for each item, many asked for at a time."""
    num_threads = min(len(items), _MAX_ASKING, max_open_files())
    if num_threads < 2:
        return [question(item) for item in items]

    def ask(first: int) -> list[_Answer]:
        # Of thousands of small files on a local disk, a task for each would cost more than its answer.
        return [question(item) for item in items[first::num_threads]]

    try:
        with ThreadPoolExecutor(num_threads, "wl-header") as threads:
            parts = list(threads.map(ask, range(num_threads)))
    except RuntimeError:  # no new thread can be had (RLIMIT_NPROC, a control group's pids.max)
        return [question(item) for item in items]
    return [parts[i % num_threads][i // num_threads] for i in range(len(items))]


def read_header(path: str) -> Shard:
    """Reads the header of one file: of torch's format by its suffix, refused if of another one, else safetensors."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in TORCH_SUFFIXES:
        return read_torch_shard(path)
    if suffix in OTHER_FORMATS and os.path.isfile(path):
        name, remedy = OTHER_FORMATS[suffix]
        raise CheckpointError(f"{name} is not read; {remedy}", path=path, reason="NotSafetensors")
    return read_shard(path)
