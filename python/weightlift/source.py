"""What a user asks gate 1 for, and which of a folder's files that means, told by their names alone.

Local folders and repositories on a hub are chosen from by the same rules.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, NamedTuple, get_args

from .errors import CheckpointError, CheckpointNotFoundError, listed

LoadFormat = Literal["auto", "hf", "safetensors", "mistral", "pt", "sharded_state"]

# Written by `torch.save`.
TORCH_SUFFIXES = (".bin", ".pt", ".pth")

# Formats that are not read: suffix -> (name, what to do).
OTHER_FORMATS = {
    ".gguf": (
        "GGUF",
        "take the safetensors checkpoint that it was made from; from the file alone, transformers' "
        "`from_pretrained(folder, gguf_file=name)` and then `save_pretrained(folder)` write one",
    ),
    ".ckpt": (
        "a training checkpoint of Lightning or TensorFlow",
        "load it with the tool that wrote it and save its weights with `safetensors.torch.save_file`",
    ),
    ".h5": ("Keras HDF5", "convert it with `from_pretrained(folder, from_tf=True)` of transformers 4 and save it"),
    ".msgpack": ("Flax", "convert it with `from_pretrained(folder, from_flax=True)` of transformers 4 and save it"),
    ".onnx": ("ONNX, an exported graph", "take the checkpoint that it was exported from"),
    ".npz": ("NumPy", "save its arrays with `safetensors.numpy.save_file(dict(numpy.load(path)), new_path)`"),
}

# Trainers leave these beside the weights. By the whole name: `my_optimizer.bin` may be a model's.
_TRAINING_STATE = frozenset(
    f"{name}{suffix}"
    for name in ("training_args", "optimizer", "scheduler", "scaler", "sampler")
    for suffix in (".bin", ".pt")
)

# Patterns for an index and, where there is none, for the files themselves.
_SAFETENSORS = ("*.safetensors.index.json", "*.safetensors")
_MISTRAL = ("consolidated*.safetensors.index.json", "consolidated*.safetensors")
_BIN = ("*.bin.index.json", "*.bin")
_PT = ("*.pt.index.json", "*.pt")
_NO_INDEX = ""
_PATTERNS: dict[str, list[tuple[str, str]]] = {
    "hf": [_SAFETENSORS, _BIN, _PT],
    "safetensors": [_SAFETENSORS],
    "mistral": [_MISTRAL],
    "pt": [_PT, _BIN],
    "sharded_state": [(_NO_INDEX, "model-*-part-*.safetensors")],
}
# Which of several indexes is meant.
_PREFERRED_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# What transformers looks for; a folder that has one does without Mistral's files.
_HF_LAYOUT = frozenset({"model.safetensors.index.json", "model.safetensors"})
_ONE_OF_MANY = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})(\.\w+)")
# What vLLM's sharded_state saves, of one rank.
_OF_RANK = re.compile(r"model-(rank-\d+|pp-\d+-tp-\d+)-part-\d+\.safetensors")


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint, or a part of one, with what its path alone does not say.

    Attributes:
        path: a folder; a file; an index (`*.index.json`); a list of files; or the id of a repository on a hub. Only a
            string of the form `org/name` that is no path here is taken for an id.
        load_format: which files of a folder hold the weights, as vLLM's `load_format`. The first pattern with a match
            counts; files of training state (`optimizer.bin`, `training_args.bin`, ...) never do.
            - "hf": `*.safetensors`, else `*.bin`, else `*.pt`. `consolidated*.safetensors` are a second copy under
              other names: taken only where there is no other `*.safetensors`.
            - "safetensors": as "hf", but nothing else than `*.safetensors`.
            - "mistral": `consolidated*.safetensors`.
            - "pt": `*.pt`, else `*.bin`.
            - "sharded_state": `model-rank-R-part-P.safetensors`; where there are several ranks, `allow_patterns` says
              which.
            - "auto": "mistral" where there are such files and neither `model.safetensors` nor its index, else "hf".
        revision: branch, tag or commit of a repository on a hub.
        subfolder: where in the folder or repository the files lie.
        prefix: put before the name of each tensor.
        allow_patterns: instead of those of `load_format`, in order of priority; no index is read then. `*` does not
            match `/`.
        fall_back_to_pt: whether "hf" and "auto" take `*.pt` in the end.
        download_dir: where downloads go; by default the hub's own cache.

    Raises:
        ValueError: a value that is not accepted.
    """

    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    _: KW_ONLY
    load_format: LoadFormat = "auto"
    revision: str | None = None
    subfolder: str | None = None
    prefix: str = ""
    allow_patterns: Sequence[str] | None = None
    fall_back_to_pt: bool = True
    download_dir: str | None = None

    def __post_init__(self) -> None:
        load_format: str = self.load_format
        if load_format not in get_args(LoadFormat):
            accepted = f"accepted is one of {', '.join(get_args(LoadFormat))}"
            if load_format == "dummy":
                accepted = "it stands for random weights and no files; leave the loading out instead"
            raise ValueError(f"load_format is {load_format!r}; {accepted}")
        if isinstance(self.allow_patterns, str) or (self.allow_patterns is not None and not self.allow_patterns):
            raise ValueError(f"allow_patterns is {self.allow_patterns!r}; accepted is a list of patterns, or None")
        if self.subfolder is not None:
            if not isinstance(self.path, (str, bytes, os.PathLike)):
                raise ValueError(
                    f"subfolder is {self.subfolder!r} and path is a list of files; put it into their paths"
                )
            normal = posixpath.normpath(self.subfolder)
            if normal.startswith("/") or ".." in normal.split("/"):
                raise ValueError(f"subfolder is {self.subfolder!r}; accepted is a relative path without '..'")

    @property
    def depth(self) -> int:
        """How many folders deep files are looked for."""
        return max((pattern.count("/") for pattern in self.allow_patterns or ()), default=0)


class Choice(NamedTuple):
    """The files that hold the weights: those that `index_file` names, or else `files`."""

    index_file: str | None
    files: list[str]


def choose_files(names: Iterable[str], source: CheckpointSource, *, where: str) -> Choice:
    """Chooses among the files of a folder; nothing where nothing fits.

    Args:
        names: of files, relative to the folder.
        source: its `load_format`, `allow_patterns` and `fall_back_to_pt` decide.
        where: the folder, for errors.

    Raises:
        CheckpointError: several indexes, or the files of several ranks.
    """
    names = [name for name in names if posixpath.basename(name) not in _TRAINING_STATE]
    if source.allow_patterns is None:
        source, names = _settle_mistral(source, names)
    for index_pattern, pattern in _patterns(source):
        indexes = _matching(names, index_pattern)
        indexes = [name for name in _PREFERRED_INDEXES if name in indexes] or indexes
        if len(indexes) > 1:
            raise CheckpointError(
                f"expected one index, found {listed(indexes)}; pass the path of the one to load",
                path=where,
                reason="AmbiguousIndex",
            )
        if indexes:
            return Choice(indexes[0], [])
        if files := _matching(names, pattern):
            _check_one_rank(files, where)
            return Choice(None, files)
    return Choice(None, [])


def missing_parts(names: Iterable[str]) -> list[str]:
    """What names such as `model-00002-of-00003.safetensors` promise, and is not among them."""
    numbers: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if match := _ONE_OF_MANY.fullmatch(name):
            stem, number, count, suffix = match.groups()
            numbers.setdefault((stem, count, suffix), set()).add(int(number))
    absent = []
    for (stem, count, suffix), present in numbers.items():
        first = 0 if 0 in present else 1
        for number in sorted(set(range(first, first + int(count))) - present):
            absent.append(f"{stem}-{number:0{len(count)}}-of-{count}{suffix}")
    return absent


def nothing_found(names: Iterable[str], source: CheckpointSource, *, where: str) -> CheckpointNotFoundError:
    """The error for a folder of which `choose_files` has chosen nothing; `names` as they are to be shown."""
    names = list(names)
    others = [name for name in names if name.endswith(tuple(OTHER_FORMATS))]
    readable = _matching(names, *(pattern for _, pattern in _PATTERNS["hf"]))
    readable = [name for name in readable if name not in _TRAINING_STATE]
    parts = [name for name in names if name.endswith(".pth")]
    found = listed(others or readable or parts or names) or "an empty folder"
    if others:
        name, remedy = OTHER_FORMATS[posixpath.splitext(others[0])[1]]
        remedy = f"{name} is not read, {remedy}"
    elif readable:
        remedy = "load_format or allow_patterns leave them out"
    elif parts:
        remedy = "files of that name are often parts of tensors, one a rank; if not, pass the path of the file itself"
    else:
        remedy = "pass the folder that holds the weights"
    *first, last = [pattern for _, pattern in _patterns(source)]
    expected = f"{', '.join(first)} or {last}" if first else last
    return CheckpointNotFoundError(f"expected {expected}, found {found}; {remedy}", path=where, reason="NoWeights")


def _settle_mistral(source: CheckpointSource, names: list[str]) -> tuple[CheckpointSource, list[str]]:
    """Decides what "auto" means, and drops Mistral's copy of the weights, under other names, where it is a second."""
    mistral = _matching(names, *_MISTRAL)
    if source.load_format == "auto":
        takes_mistral = mistral and _HF_LAYOUT.isdisjoint(names)
        source = replace(source, load_format="mistral" if takes_mistral else "hf")
    if source.load_format in ("hf", "safetensors"):
        others = [name for name in names if name not in mistral]
        if _matching(others, *_SAFETENSORS):
            return source, others
    return source, names


def _patterns(source: CheckpointSource) -> list[tuple[str, str]]:
    if source.allow_patterns is not None:
        return [(_NO_INDEX, pattern) for pattern in source.allow_patterns]
    if source.load_format in ("auto", "hf") and not source.fall_back_to_pt:
        return [_SAFETENSORS, _BIN]
    return _PATTERNS["hf" if source.load_format == "auto" else source.load_format]


def _matching(names: Iterable[str], *patterns: str) -> list[str]:
    """The names that one of the patterns matches, folder by folder: `*` does not match `/`, as in a shell."""
    split = [pattern.split("/") for pattern in patterns]

    def matches(name: str) -> bool:
        parts = name.split("/")
        return any(len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern)) for pattern in split)

    return [name for name in names if matches(name)]


def _check_one_rank(files: list[str], where: str) -> None:
    ranks = {match[1]: None for file in files if (match := _OF_RANK.fullmatch(file))}
    if len(ranks) > 1:
        numbers = [tuple(map(int, re.findall(r"\d+", rank))) for rank in ranks]
        sizes = zip(("pp", "tp")[-len(numbers[0]) :], numbers[0], map(max, zip(*numbers, strict=False)), strict=False)
        options = " ".join(f"--{kind}-size {last + 1} --{kind}-rank {rank}" for kind, rank, last in sizes)
        raise CheckpointError(
            f"expected the files of one rank, found those of {len(ranks)} ({listed(ranks)}), each with its own part of "
            f"the same tensors; say which one: weightlift load --load-format sharded_state {options}; in Python, "
            f"allow_patterns=['model-{next(iter(ranks))}-part-*']",
            path=where,
            reason="SeveralRanks",
        )
