"""The command line: ``weightlift inspect``, ``plan``, ``load``, ``save-sharded``, ``pack``, ``verify``, ``bench``,
``doctor``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from weightlift._logging import bad_setting
from weightlift._version import __version__
from weightlift.cli import bench, doctor, inspect, load, pack, plan, save_sharded, source, verify
from weightlift.cli.errors import CommandError

_EXIT_CODES = """\
exit codes:
  0    all is well
  1    the checkpoint cannot be read, is malformed, or verifying found a problem; the doctor found a path broken
  2    wrong usage: arguments, environment variables, a missing optional package
  3    what was planned takes more memory than there is
  130  interrupted

With --json the result is one JSON document on stdout, and so is an error:
{"error": {"type": ..., "message": ..., "reason": ..., "path": ..., "tensor": ...}}
"""


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage as every other error is reported, instead of printing the usage text and leaving."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)", exit_code=2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="weightlift",
        description="Look at checkpoints, check them, and load them as an inference engine would.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"weightlift {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (inspect, plan, load, save_sharded, pack, verify, bench, doctor):
        command = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.HELP,
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module not in (bench, doctor):  # which are about machines, whatever lies there
            source.add_arguments(command)
            command.add_argument("--json", action="store_true", help="print one JSON document")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: arguments without the program's name; None: ``sys.argv[1:]``.

    Returns:
        The exit code; ``weightlift --help`` lists them.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        options = _parser().parse_args(arguments)
        as_json = options.json in (True, "-")  # not where the document goes into a file
        if problem := bad_setting():
            raise CommandError(problem, exit_code=2)
        exit_code: int = options.run(options)
        sys.stdout.flush()  # a closed pipe shows here, where it is handled, and not when the interpreter exits
    except BrokenPipeError:
        # The reader went away, as `| head` does. What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell reports for a program that SIGPIPE ended
    except KeyboardInterrupt:
        print("weightlift: interrupted", file=sys.stderr)
        return 130
    except CommandError as error:
        return _report(error, error.exit_code, as_json=as_json)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        return _report(error, 1, as_json=as_json)
    return exit_code


def _report(error: Exception, exit_code: int, *, as_json: bool) -> int:
    if as_json:
        document: dict[str, str | None] = {"type": type(error).__name__, "message": str(error)}
        document |= {key: getattr(error, key, None) for key in ("reason", "path", "tensor")}
        print(json.dumps({"error": document}))
    else:
        print(f"weightlift: error: {' '.join(str(error).split())}", file=sys.stderr)
    return exit_code
