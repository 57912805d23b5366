"""Arguments that say which part of a model is meant."""

from __future__ import annotations

import argparse

from weightlift.cli.errors import CommandError
from weightlift.model.parallel import ParallelConfig

_KINDS = {"tp": "tensor", "ep": "expert", "pp": "pipeline"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for kind, name in _KINDS.items():
        parser.add_argument(f"--{kind}-size", type=int, metavar="N", help=f"ranks of {name} parallelism")
        parser.add_argument(f"--{kind}-rank", type=int, metavar="R", help=f"which of them (default: 0, of {kind}-size)")


def parallel_of(options: argparse.Namespace) -> ParallelConfig | None:
    """The rank that is meant; None: none of the arguments was given."""
    given = {
        f"{kind}_{what}": value
        for kind in _KINDS
        for what in ("size", "rank")
        if (value := getattr(options, f"{kind}_{what}")) is not None
    }
    if not given:
        return None
    for kind in _KINDS:
        if f"{kind}_rank" in given and f"{kind}_size" not in given:
            raise CommandError(f"--{kind}-rank needs --{kind}-size", exit_code=2)
        if given.get(f"{kind}_size", 1) < 1:
            raise CommandError(f"--{kind}-size is {given[f'{kind}_size']}; expected at least 1", exit_code=2)
    try:
        return ParallelConfig(**given)
    except ValueError as error:
        raise CommandError(str(error), exit_code=2) from error
