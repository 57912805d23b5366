"""Names of tensors: their order, and many of them in few words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

# Names with more numbers than this are listed as they are; none outside an attack has.
_MAX_NUMBERS = 8
# A component that is a number. Not "007": from the folded name it could not be told apart from "7".
_NUMBER = re.compile(r"(?:(?<=\.)|^)(0|[1-9][0-9]{0,17})(?=\.|$)", re.ASCII)

_Numbers = tuple[int, ...]


def natural_key(name: str) -> tuple[list[object], str]:
    """Sorts `layers.2` before `layers.10`."""
    parts: list[object] = list(re.split(r"([0-9]+)", name))
    for index in range(1, len(parts), 2):
        digits = str(parts[index]).lstrip("0")
        parts[index] = (len(digits), digits)  # as int() would compare them, which refuses very long ones
    return parts, name


def fold(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names that differ only in numbers between dots, as one pattern, with how many it stands for; in natural order.

    >>> fold(["norm.weight", "layers.0.w", "layers.1.w", "layers.2.w", "layers.7.w"])
    [('layers.{0-2,7}.w', 4), ('norm.weight', 1)]

    A pattern stands for every combination of its numbers: where layers differ in their experts, they are apart.
    """
    alike: defaultdict[tuple[str, ...], list[_Numbers]] = defaultdict(list)
    for name in dict.fromkeys(names):
        parts = _NUMBER.split(name)  # text, number, text, ...
        alike[tuple(parts[::2])].append(tuple(map(int, parts[1::2])))
    folded = []
    for texts, numbers in alike.items():
        groups = [(tuple(map(str, own)), own, 1) for own in numbers]
        if len(texts) <= _MAX_NUMBERS + 1:
            groups = _fold_numbers(sorted(numbers))
        for shown, first, count in groups:
            folded.append((natural_key(_joined(texts, map(str, first))), _joined(texts, shown), count))
    return [(pattern, count) for _, pattern, count in sorted(folded)]


def _joined(texts: tuple[str, ...], numbers: Iterable[str]) -> str:
    return texts[0] + "".join(number + text for number, text in zip(numbers, texts[1:], strict=True))


def _fold_numbers(numbers: list[_Numbers]) -> list[tuple[tuple[str, ...], _Numbers, int]]:
    """Tuples of numbers, sorted, as few tuples of ranges: (ranges, the first tuple, how many tuples)."""
    # From the innermost number outwards: layers with the same experts become one pattern, the others stay apart.
    groups: list[tuple[tuple[str, ...], _Numbers, int]] = [((), own, 1) for own in numbers]
    for index in reversed(range(len(numbers[0]))):
        same: defaultdict[tuple[_Numbers, tuple[str, ...]], list[tuple[_Numbers, int]]] = defaultdict(list)
        for ranges, first, count in groups:
            same[first[:index], ranges].append((first, count))
        groups = [
            (
                (_ranges([first[index] for first, _ in group]), *ranges),
                group[0][0],
                sum(count for _, count in group),
            )
            for (_, ranges), group in same.items()
        ]
    return groups


def _ranges(numbers: list[int]) -> str:
    """`{0-3,7}` for numbers in ascending order; one alone stays as it is."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs) + "}"
