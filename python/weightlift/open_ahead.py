"""Files opened for a load while their headers are read."""

from __future__ import annotations

import os
from collections.abc import Sequence

from . import _C
from .config import ResolvedConfig
from .filesystem import mount_of
from .local_rank import local_rank
from .names import natural_key
from .settings import files_ahead


class OpenAhead:
    """The first files of a checkpoint across a network, opened for both ways to read, and direct reads tried out, while
    their headers are read: afterwards, that would take three round trips before data begins to come.

    Each stays open until the load takes it, or this is closed.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        # The other strategies, and several processes that share the page cache, hardly read past it.
        self._is_wanted = config.strategy in ("auto", "torchao", "direct") and local_rank()[1] == 1
        self._opened: dict[str, _C.OpenedFile] = {}

    def choose(self, paths: Sequence[str]) -> list[str]:
        """Those that are to be opened: the first in the order in which shards are loaded."""
        if not self._is_wanted or not paths:
            return []
        number = files_ahead(mount_of(paths[0])) - len(self._opened)
        return sorted(paths, key=lambda path: (natural_key(os.path.basename(path)), path))[: max(0, number)]

    def open(self, path: str) -> None:
        """Opens one. Raises nothing: what is wrong with the file, who reads it is told."""
        self._opened[path] = _C.OpenedFile(path)

    def take(self, path: str) -> _C.OpenedFile | None:
        """The file of that path, for the caller, if it was opened."""
        return self._opened.pop(path, None)

    def close(self) -> None:
        """Closes what was not taken."""
        self._opened.clear()
