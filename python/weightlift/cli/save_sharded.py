"""``weightlift save-sharded``: cut a model for its ranks once, so that each loads its own files from end to end."""

from __future__ import annotations

import argparse
import json
import os
import time

from weightlift.cli import source
from weightlift.cli.errors import CommandError
from weightlift.config import parse_size
from weightlift.model.sharded_state import MAX_FILE_BYTES, all_ranks, copy_others, require_unsaved, save_sharded_state
from weightlift.model.skeleton import load_model
from weightlift.report import format_bytes

NAME = "save-sharded"
HELP = "Load a model rank by rank and save what each holds, as files that load_format sharded_state reads."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="the folder to write to; with config.json and the like, as PATH has")
    add_size_arguments(parser)
    parser.add_argument("--progress", action="store_true", help="show a bar on stderr")


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that say for how many ranks files are made, and how large these may be."""
    parser.add_argument("--tp-size", type=_size, default=1, help="ranks that share each layer (default: 1)")
    parser.add_argument("--ep-size", type=_size, default=1, help="ranks that share experts: 1, or those of --tp-size")
    parser.add_argument("--pp-size", type=_size, default=1, help="stages that share the layers (default: 1)")
    parser.add_argument(
        "--max-file-bytes",
        type=_bytes,
        default=MAX_FILE_BYTES,
        metavar="SIZE",
        help=f"of data in a file (default: {format_bytes(MAX_FILE_BYTES)})",
    )


def run(options: argparse.Namespace) -> int:
    checkpoint = source.source_of(options)
    if not os.path.isdir(options.path):
        raise CommandError(f"{options.path}: expected the folder of a model, which has a config.json", exit_code=2)
    if os.path.realpath(options.out) == os.path.realpath(options.path):
        raise CommandError(f"{options.out} is the model's own folder; name another to write to", exit_code=2)
    require_one_rank_of_experts(options)
    started = time.perf_counter()
    files: list[str] = []
    ranks = list(all_ranks(options.tp_size, options.ep_size, options.pp_size))
    for parallel in ranks:
        require_unsaved(options.out, parallel)
    for parallel in ranks:
        model = load_model(checkpoint, parallel=parallel, progress=options.progress)
        files += save_sharded_state(model, options.out, parallel=parallel, max_file_bytes=options.max_file_bytes)
        del model  # before the next one is made
    copied = copy_others(os.path.join(options.path, options.subfolder or ""), options.out)
    document = {
        "path": options.path,
        "out": options.out,
        "files": files,
        "copied": copied,
        "bytes": sum(os.path.getsize(file) for file in files),
        "seconds": time.perf_counter() - started,
    }
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print(
            f"{options.out}: {len(files)} files, {format_bytes(document['bytes'])}, and {len(copied)} copied, "
            f"in {document['seconds']:.2f} s"
        )
    return 0


def require_one_rank_of_experts(options: argparse.Namespace) -> None:
    """Raises CommandError where files could not be told apart by one number."""
    if options.ep_size not in (1, options.tp_size) and options.tp_size != 1:
        raise CommandError(
            f"--ep-size is {options.ep_size}; expected 1, or that of --tp-size, {options.tp_size}", exit_code=2
        )


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found {text!r}")
    return int(text)


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of bytes, KiB, MiB or GiB, found {text!r}") from None
