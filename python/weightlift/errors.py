"""One family of exceptions: whatever is wrong with a checkpoint is a `CheckpointError`.

Texts read `file: tensor: expected, found, remedy`. Every class survives pickling: worker processes may raise it.
"""

from __future__ import annotations

import errno as errnos
from collections.abc import Iterable, Sequence
from typing import Any

from .names import fold

# safetensors is not needed to run.
try:
    from safetensors import SafetensorError
except ImportError:

    class SafetensorError(Exception):  # type: ignore[no-redef]
        """What CheckpointError is derived from where safetensors, whose exception this is, is not installed."""


# A list in a text is cut here; the attributes of the exception hold all of it.
_LISTED = 10


class CheckpointError(ValueError, SafetensorError):
    """A checkpoint cannot be loaded. Where safetensors is installed, code that catches its exception catches this too.

    Args:
        problem: what was expected, what was found, and what to do about it.
        reason: one CamelCase word for programs; safetensors' own where it has one (`InvalidOffset`, `HeaderTooLarge`).
        path: the file or folder at fault, as the user knows it.
        tensor: the tensor at fault.
    """

    path: str | None
    tensor: str | None
    reason: str

    def __init__(self, problem: str, *, reason: str, path: str | None = None, tensor: str | None = None) -> None:
        subjects = [printable(subject) for subject in (path, tensor) if subject is not None]
        super().__init__(": ".join([*subjects, problem]))
        self.path = path
        self.tensor = tensor
        self.reason = reason

    # OSError's own would print `[Errno 2] None`.
    def __str__(self) -> str:
        return str(self.args[0])

    # The default calls the class with `args`, which is not how __init__ is called; and OSError keeps errno and filename
    # outside __dict__.
    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        if isinstance(self, OSError):
            state.update(errno=self.errno, strerror=self.strerror, filename=self.filename)
        return _restore, (type(self), self.args), state


class _OSCheckpointError(CheckpointError, OSError):
    """A CheckpointError with an `errno`, `strerror` and `filename`; all None where the operating system had no part."""

    def __init__(
        self,
        problem: str,
        *,
        reason: str,
        path: str | None = None,
        tensor: str | None = None,
        cause: OSError | None = None,
    ) -> None:
        super().__init__(problem, reason=reason, path=path, tensor=tensor)
        if cause is not None:
            self.errno, self.strerror, self.filename = cause.errno, cause.strerror, path


class CheckpointNotFoundError(_OSCheckpointError, FileNotFoundError):
    """There is nothing to load: no such path, no weights in the folder, or shards of the index are missing."""

    def __init__(self, problem: str, *, reason: str, path: str | None = None, tensor: str | None = None) -> None:
        cause = FileNotFoundError(errnos.ENOENT, "No such file or directory")
        super().__init__(problem, reason=reason, path=path, tensor=tensor, cause=cause)


class CheckpointReadError(_OSCheckpointError):
    """The operating system refused to open or read a file, the file changed or ended during the load, or a GPU failed
    to take in what was read.

    Attributes:
        incomplete: tensors of the checkpoint whose copies had been recorded and did not all land; where they were to
            go, old and new values may be mixed.
    """

    incomplete: Sequence[str] = ()


class CheckpointMismatchError(CheckpointError, RuntimeError):
    """Checkpoint and model do not fit; all differences at once, in the words of `torch.nn.Module.load_state_dict`.

    In the text, the layers of a model are one pattern, `layers.{0-31}.norm.weight`; attributes have every name.

    Args:
        model: the name of the model's class.
        path: the checkpoint, as the user knows it.
        missing_keys: parameters and buffers of the model that the checkpoint lacks.
        unexpected_keys: tensors of the checkpoint that the model lacks.
        mismatched: a clause for each that does not fit: `w: copying a param with shape ... from checkpoint, ...`.
        gaps: regions that nothing fills, as `qkv_proj.weight[512:768]`.
        remedy: what to do about it, a sentence.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    mismatched: list[str]
    gaps: list[str]

    def __init__(
        self,
        model: str,
        *,
        path: str | None = None,
        missing_keys: Iterable[str] = (),
        unexpected_keys: Iterable[str] = (),
        mismatched: Iterable[str] = (),
        gaps: Iterable[str] = (),
        remedy: str = "",
    ) -> None:
        self.missing_keys = list(missing_keys)
        self.unexpected_keys = list(unexpected_keys)
        self.mismatched = list(mismatched)
        self.gaps = list(gaps)
        lines = [f"Error(s) in loading state_dict for {model}:"]
        if self.missing_keys:
            lines.append(f"Missing key(s) in state_dict: {folded(self.missing_keys, quote=True)}.")
        if self.unexpected_keys:
            lines.append(f"Unexpected key(s) in state_dict: {folded(self.unexpected_keys, quote=True)}.")
        clauses = fold(self.mismatched)
        lines += [
            f"size mismatch for {printable(clause)}" + (f" ({count} of these)" if count > 1 else "")
            for clause, count in clauses[:_LISTED]
        ]
        if len(clauses) > _LISTED:
            lines.append(f"and {sum(count for _, count in clauses[_LISTED:])} more size mismatches")
        if self.gaps:
            lines.append(f"Not filled by any transfer: {folded(self.gaps)}.")
        if remedy:
            lines.append(remedy)
        super().__init__("\n\t".join(lines), reason="ModelMismatch", path=path)


def printable(text: str) -> str:
    """`text` for a message: a name out of a hostile file neither moves the cursor nor fills the screen."""
    if len(text) > 1024:
        text = f"{text[:1024]}... ({len(text)} characters)"
    return text if text.isprintable() else ascii(text)


def listed(names: Iterable[str]) -> str:
    """`a, b, c and 7 more`: the first 10 of `names`, and how many there are beyond."""
    names = list(names)
    shown = ", ".join(map(printable, names[:_LISTED]))
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def folded(names: Iterable[str], *, quote: bool = False) -> str:
    """`layers.{0-31}.w (32), b and 7 more`: names of tensors, the layers of a model in one; 10 of these are shown."""
    patterns = fold(names)
    shown = ", ".join(
        (f'"{printable(pattern)}"' if quote else printable(pattern)) + (f" ({count})" if count > 1 else "")
        for pattern, count in patterns[:_LISTED]
    )
    beyond = sum(count for _, count in patterns[_LISTED:])
    return f"{shown} and {beyond} more" if beyond else shown


def _restore(kind: type[CheckpointError], args: tuple[Any, ...]) -> CheckpointError:
    # `kind.__new__` finds ValueError's first, which refuses classes with OSError's layout.
    new = OSError.__new__ if issubclass(kind, OSError) else ValueError.__new__
    error: CheckpointError = new(kind)
    error.args = args
    return error
