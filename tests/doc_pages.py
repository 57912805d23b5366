"""The pages of the documentation, their code blocks, and what they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int  # of the page, where its text begins, from 1

    def commands(self) -> Iterator[list[str]]:
        """The words of each command of a `sh` block; comments and line ends with a backslash as a shell has them."""
        for line in self.text.replace("\\\n", " ").splitlines():
            for command in line.split(" && "):
                if words := shlex.split(command, comments=True):
                    yield words


class Page:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(ROOT))
        self.text = path.read_text()

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            Block(match[1], match[2], self.text.count("\n", 0, match.start(2)) + 1)
            for match in _FENCE.finditer(self.text)
        ]

    @cached_property
    def prose(self) -> str:
        return _FENCE.sub("", self.text)

    @cached_property
    def inline_code(self) -> list[str]:
        return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", self.prose)]

    @cached_property
    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)\s]+)\)", self.prose)

    @cached_property
    def anchors(self) -> set[str]:
        """What GitHub makes of the headings: lower case, without punctuation, spaces as dashes."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def all_pages() -> dict[str, Page]:
    """Every page that users and developers are led to, by its path in the repository."""
    paths = [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "csrc/README.md", "benchmarks/README.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    return {page.name: page for page in map(Page, paths)}
