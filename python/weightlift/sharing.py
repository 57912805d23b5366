"""Which bytes the other processes of this machine read too: where several ranks load from one disk, each its part.

Nobody is asked: each rank decides by what it reads itself. What lies between the columns that it takes of a matrix is
other ranks' columns, as the core sees from the transfers. What it needs whole is taken for what every rank needs
(norms, routers, everything where each rank holds the whole model); but not experts where ranks have some each, which
shows in others of their kind that this load passes over. A slice of rows is taken for this rank's own.

A wrong guess costs time, and can't change what is loaded: bytes wrongly taken for shared go through the page cache, for
which the processor pays; bytes wrongly taken for one's own are read by each.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from .config import ResolvedConfig
from .entries import CheckpointFiles, TensorEntry
from .local_rank import local_rank


def reads_along(config: ResolvedConfig, reader: str) -> bool:
    """Whether other processes read the same files, and it is up to us which way.

    Args:
        reader: the core's strategy, as of ReadAhead. With "buffered" all is shared, with "direct" nothing.
    """
    return local_rank()[1] > 1 and reader == "auto" and config.page_cache == "keep"


class SharedTensors:
    """Tensors that other processes are taken to read as well, by what this one has recorded so far.

    Attributes:
        note: what was decided, and why.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self.note = (
            f"what others of the {local_rank()[1]} processes of this machine (LOCAL_WORLD_SIZE) read too comes through "
            "the page cache, so that storage gives it once: what is needed whole, and rows of which a part is needed"
        )
        self._position = {name: position for position, name in enumerate(files.tensors)}
        self._experts: dict[str, list[int]] = {}  # positions of all of a kind, ascending
        for name, position in self._position.items():
            kind = _expert_kind(name)
            if kind is not None:
                self._experts.setdefault(kind, []).append(position)
        self._divided = set(map(_expert_kind, files.skipped))  # kinds of which a filter leaves some to other ranks
        self._recorded: dict[str, set[int]] = {}  # of _experts
        self._furthest = -1

    def note_recorded(self, entries: Iterable[TensorEntry]) -> None:
        """Takes it for known that this process reads of these."""
        for entry in entries:
            position = self._position[entry.name]
            self._furthest = max(self._furthest, position)
            kind = _expert_kind(entry.name)
            if kind is not None:
                self._recorded.setdefault(kind, set()).add(position)

    def among(self, entries: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
        """Those of the entries, all noted before, that others are taken to read too if they are needed whole."""
        is_divided: dict[str | None, bool] = {None: False}
        for entry in entries:
            kind = _expert_kind(entry.name)
            if kind is not None and kind not in is_divided:
                num_passed = bisect.bisect_right(self._experts[kind], self._furthest)
                is_divided[kind] = kind in self._divided or num_passed > len(self._recorded[kind])
            if not is_divided[kind]:
                yield entry


def _expert_kind(name: str) -> str | None:
    """The name with its numbers left out, if it has those of a layer and of an expert."""
    parts = name.split(".")
    if sum(map(str.isdecimal, parts)) < 2:
        return None
    return ".".join("*" if part.isdecimal() else part for part in parts)
