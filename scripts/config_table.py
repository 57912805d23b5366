"""Prints the table of settings, made from LoadConfig; with --write, puts it into docs/settings.md."""

from __future__ import annotations

import sys
from pathlib import Path

from weightlift.config import OPTIONS, environment_variable

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
BEGIN, END = "<!-- settings: made by scripts/config_table.py -->\n", "<!-- end of settings -->\n"


def table() -> str:
    lines = ["| field | variable | automatic | effect | when to change it |", "|---|---|---|---|---|"]
    lines += [
        f"| `{name}` | `{environment_variable(name)}` | {option.automatic} | {option.effect} | {option.when} |"
        for name, option in OPTIONS.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    if "--write" in sys.argv[1:]:
        before, rest = PAGE.read_text().split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(before + BEGIN + table() + END + after)
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
