"""``weightlift doctor``: what this host can do, why not what it can't, and how to change that."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterator

import torch

from weightlift._version import __version__
from weightlift.cli.errors import CommandError
from weightlift.config import LoadConfig
from weightlift.doctor import Examination, examine
from weightlift.errors import printable
from weightlift.report import format_bytes

NAME = "doctor"
HELP = (
    "Look at this host, at the storage under some paths and at CUDA, by trying what loads do: what works, what each "
    "missing thing would bring, and how to get it."
)
_WIDTH = 118


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="*",
        help="files or folders to load from (default: the working folder, the hub's cache, the temporary folder)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    try:
        config = LoadConfig().resolve()
    except ValueError as error:
        raise CommandError(str(error), exit_code=2) from error
    examination = examine(options.paths, config)
    if options.json:
        findings = [dataclasses.asdict(finding) for finding in examination.findings]
        print(json.dumps({"machine": examination.machine, "findings": findings}, indent=2))
    else:
        print("\n".join(_lines(examination)))
    return 1 if examination.is_broken else 0


def _lines(examination: Examination) -> Iterator[str]:
    machine = examination.machine
    yield (
        f"weightlift {__version__}, torch {torch.__version__}, Linux {machine['kernel']}; {machine['processor']} "
        f"({machine['instructions']}), {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}"
    )
    width = max(len(finding.subject) for finding in examination.findings)
    group = ""
    for finding in examination.findings:
        if finding.group != group:
            group = finding.group
            yield f"\n{printable(group)}"
        yield f"  {finding.status:7}  {finding.subject:{width}}  {printable(finding.summary)}"
        wrapped = textwrap.TextWrapper(
            _WIDTH,
            initial_indent=" " * (13 + width),
            subsequent_indent=" " * (15 + width),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for label, text in (("effect", finding.effect), ("remedy", finding.remedy)):
            if text:
                yield from wrapped.wrap(f"{label}: {printable(text)}")
