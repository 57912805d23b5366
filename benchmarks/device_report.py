"""The figures of a check on a GPU host, their targets, and the table of all of them. See scripts/device_check.sh.

    python -m benchmarks.device_report FOLDER OUT

FOLDER has what the parts of the check left, as far as they got: `parts.tsv`, a line a part (its name, what came of it,
seconds, details), and the documents of `benchmarks.device` and `benchmarks.device_ops`, `*.json`. The table is printed,
and goes to OUT/table.txt; everything goes to OUT/results.json. Ends with 0; 1: a part did not pass; 2: all passed, and
a target was missed; 77: nothing was run. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PASSED, NOT_RUN, LEFT_OUT = "passed", "not run", "left out"
SOURCES = ("tmpfs", "page cache", "disk")
NOTHING_RUN = 77  # ctest and automake take it for a skipped test


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure; without a value it was not measured. `*` in a name stands for what is known when it is measured.

    Attributes:
        at_least, at_most: the target.
        samples: what was measured, in the order of the rounds, by what it is, with its unit.
        note: what else is to be known of it.
    """

    name: str
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    value: float | None = None
    samples: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def verdict(self) -> str:
        if self.value is None:
            return NOT_RUN
        if self.at_least is not None:
            return "met" if self.value >= self.at_least else "MISSED"
        if self.at_most is not None:
            return "met" if self.value <= self.at_most else "MISSED"
        return ""


FIGURES: tuple[Figure, ...] = (
    *(
        figure
        for source in SOURCES
        for figure in (
            Figure(f"{source}: copy from pinned memory to the GPU", "GB/s"),
            Figure(f"{source}: read into host memory", "GB/s"),
            Figure(f"{source}: load into the GPU", "GB/s"),
            Figure(f"{source}: load, of the slower of copy and read", "x", at_least=0.9 if source == "tmpfs" else None),
            Figure(f"{source}: safetensors' time, of the load's", "x"),
        )
    ),
    Figure("fused load, of the plain one's time: *", "x", at_most=1.05),
    Figure("GPU memory beyond the parameters: plain load", "MiB", at_most=256),
    Figure("GPU memory beyond the parameters: *", "MiB", at_most=256),
    Figure("synchronising calls in the middle of a load", "calls", at_most=0),
    # Those that don't read and write in order.
    Figure("kernel, of a copy within the GPU: *transposed*", "x"),
    Figure("kernel, of a copy within the GPU: *act-order*", "x"),
    Figure("kernel, of a copy within the GPU: *", "x", at_least=0.8),
)


def measured(name: str, value: float, samples: Mapping[str, list[float]] | None = None, note: str = "") -> Figure:
    """The figure of that name, with its value."""
    for figure in FIGURES:
        if fnmatch.fnmatchcase(name, figure.name):
            return dataclasses.replace(figure, name=name, value=value, samples=samples or {}, note=note)
    raise ValueError(f"no such figure: {name}")


def figures_of(folder: Path) -> list[Figure]:
    """All figures, in the order of FIGURES: those that were measured, and those that were not."""
    found: list[Figure] = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        found += [Figure(**figure) for figure in document.get("figures", [])]
        for name, kernel in document.get("kernels", {}).items():
            note = f"{kernel['gb_per_s']:.0f} GB/s beside {kernel['copy_gb_per_s']:.0f}, read and written"
            found.append(measured(f"kernel, of a copy within the GPU: {name}", kernel["of_copy"], note=note))
    figures = []
    for expected in FIGURES:
        matching = [figure for figure in found if fnmatch.fnmatchcase(figure.name, expected.name)]
        found = [figure for figure in found if figure not in matching]
        figures += matching or [expected]
    return figures


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        outcome: PASSED; begins with LEFT_OUT, which is no fault, or with NOT_RUN; or says how it failed.
        detail: a line of its output.
    """

    name: str
    outcome: str
    seconds: int
    detail: str


def parts_of(folder: Path) -> list[Part]:
    path = folder / "parts.tsv"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        Part(name, outcome, int(seconds), detail)
        for name, outcome, seconds, detail in (line.split("\t") for line in lines)
    ]


def exit_status(parts: list[Part], figures: list[Figure]) -> int:
    if all(part.outcome.startswith(NOT_RUN) for part in parts):
        return NOTHING_RUN
    if not all(part.outcome.startswith((PASSED, LEFT_OUT)) for part in parts):
        return 1
    return 2 if any(figure.verdict == "MISSED" for figure in figures) else 0


def table(parts: list[Part], figures: list[Figure]) -> str:
    lines = [("part", "outcome", "s", "")]
    lines += [(part.name, part.outcome, str(part.seconds), part.detail) for part in parts]
    figure_lines = [("figure", "value", "", "target", "", "")]
    for figure in figures:
        value = "" if figure.value is None else f"{figure.value:.2f}"
        figure_lines.append((figure.name, value, figure.unit, figure.target, figure.verdict, figure.note))
    return f"{_columns(lines, right=2)}\n\n{_columns(figure_lines, right=1)}"


def _columns(lines: Sequence[tuple[str, ...]], right: int) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number == right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def results(folder: Path, parts: list[Part], figures: list[Figure]) -> dict[str, Any]:
    """Everything, in types that ``json.dumps`` takes; of the host, what the documents in the folder say."""
    host: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        host |= json.loads(path.read_text()).get("host", {})
    return {
        "host": host,
        "parts": [dataclasses.asdict(part) for part in parts],
        "figures": [
            {**dataclasses.asdict(figure), "target": figure.target, "verdict": figure.verdict} for figure in figures
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what the parts left")
    parser.add_argument("out", metavar="OUT", type=Path, help="where table.txt and results.json go")
    options = parser.parse_args()
    parts, figures = parts_of(options.folder), figures_of(options.folder)
    text = table(parts, figures)
    print(text)
    (options.out / "table.txt").write_text(text + "\n")
    document = results(options.folder, parts, figures)
    (options.out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(exit_status(parts, figures))


if __name__ == "__main__":
    main()
