"""Lists of layers in a config: which of them names a layer, and which of them name none."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from ..mapping import WeightsMapper

# How an entry of such a list names layers. "exact": by the whole name. "path": by any run of the name's parts, so that
# `lm_head`, `self_attn` and `model.layers.0` name all layers that end so, begin so, or have it in the middle, and
# `gate` does not name `gate_proj`. "wildcard": as "path"; or, with a `*`, as names of files in a shell.
Match = Literal["exact", "path", "wildcard"]

_REGEX = "re:"


class LayerNames:
    """Entries that name layers; one that begins with `re:` is a regular expression for the beginning of the name.

    Args:
        entries: as in the config.
        match: how the others name a layer.

    Raises:
        ValueError: a regular expression that is none.
    """

    def __init__(self, entries: Iterable[str] = (), match: Match = "exact") -> None:
        self.match = match
        self._tests = {entry: _test_of(entry, match) for entry in entries}
        self._matched: set[str] = set()

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *fields: str, match: Match = "exact") -> LayerNames:
        """Those that the first of these fields of a config has that is there and not empty.

        Raises:
            ValueError: it is no list of texts; a regular expression that is none.
        """
        field = next((field for field in fields if config.get(field)), None)
        entries = () if field is None else config[field]
        # One text, "lm_head", would be a list of letters.
        if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
            raise ValueError(f"{field} is {entries!r}; expected a list of names of layers")
        return cls(entries, match)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tests)

    def first_match(self, name: str) -> str | None:
        """The first entry that names the layer."""
        if self.match == "exact" and name in self._tests:
            found: str | None = name
        else:
            found = next((entry for entry, test in self._tests.items() if test(name)), None)
        if found is not None:
            self._matched.add(found)
        return found

    def __contains__(self, name: str) -> bool:
        return self.first_match(name) is not None

    def renamed(self, mapper: WeightsMapper) -> LayerNames:
        """The same with the names that layers have after a mapper that only renames; patterns stay as they are."""
        return LayerNames((renamed(entry, mapper) for entry in self), self.match)

    def unmatched(self, others: Iterable[str] = ()) -> list[str]:
        """Entries that have named no layer yet, and none of these others."""
        left = [entry for entry in self if entry not in self._matched]
        return [entry for entry in left if not any(map(self._tests[entry], others))] if left else []


def renamed(entry: str, mapper: WeightsMapper) -> str:
    """The name of a module, which may end in `*`, after a mapper that only renames. Others stay as they are."""
    stem = entry.removesuffix("*").removesuffix(".")
    if entry.startswith(_REGEX) or "*" in stem or "." not in stem:
        return entry
    # Rules are for names of tensors, and may want the dot behind the module's.
    suffix = ".weight"
    (name, _), *_ = mapper.map_name(stem + suffix)
    return name.removesuffix(suffix) + entry[len(stem) :]


def _test_of(entry: str, match: Match) -> Callable[[str], bool]:
    if entry.startswith(_REGEX):
        try:
            pattern = re.compile(entry.removeprefix(_REGEX))
        except re.error as error:
            raise ValueError(f"{entry!r} is no regular expression: {error}") from None
        return lambda name: pattern.match(name) is not None
    if match == "exact":
        return lambda name: name == entry
    if match == "wildcard" and "*" in entry:
        return lambda name: fnmatch.fnmatchcase(name, entry)
    return lambda name: f".{entry}." in f".{name}."
