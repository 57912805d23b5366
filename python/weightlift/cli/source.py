"""Arguments that say which checkpoint is meant."""

from __future__ import annotations

import argparse
from typing import get_args

from weightlift.checkpoint import CheckpointSource
from weightlift.cli.errors import CommandError
from weightlift.source import LoadFormat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a folder, a file, an index json, or ORG/NAME on a hub")
    parser.add_argument("--load-format", choices=get_args(LoadFormat), default="auto", help="which files of a folder")
    parser.add_argument("--revision", help="branch, tag or commit, on a hub")
    parser.add_argument("--subfolder", help="where in the folder or repository the files lie")


def source_of(options: argparse.Namespace) -> CheckpointSource:
    try:
        return CheckpointSource(
            options.path,
            load_format=options.load_format,
            revision=options.revision,
            subfolder=options.subfolder,
        )
    except ValueError as error:
        raise CommandError(str(error), exit_code=2) from error
