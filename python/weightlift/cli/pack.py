"""``weightlift pack``: load and process a model for its ranks once, so that each reads its part from end to end."""

from __future__ import annotations

import argparse
import json
import time

import torch

from weightlift.cli import quantization, source
from weightlift.cli.save_sharded import add_size_arguments, require_one_rank_of_experts
from weightlift.model.packing import pack_model
from weightlift.report import format_bytes

NAME = "pack"
HELP = "Load and process a model rank by rank and write what each holds, as an image that load reads from end to end."

_DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="the folder to make; with config.json and the like, as PATH has")
    add_size_arguments(parser)
    quantization.add_arguments(parser)
    parser.add_argument("--dtype", choices=_DTYPES, help="of what is not quantised (default: that of the model)")
    parser.add_argument("--no-verify", action="store_true", help="do not read back what was written")
    parser.add_argument("--progress", action="store_true", help="show bars on stderr")


def run(options: argparse.Namespace) -> int:
    checkpoint = source.source_of(options)
    require_one_rank_of_experts(options)
    started = time.perf_counter()
    image = pack_model(
        checkpoint,
        options.out,
        tp_size=options.tp_size,
        ep_size=options.ep_size,
        pp_size=options.pp_size,
        target=options.target or "plain",
        quantization=options.quantization,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        max_file_bytes=options.max_file_bytes,
        verify=not options.no_verify,
        progress=options.progress,
    )
    document = {
        "path": options.path,
        "out": options.out,
        "fingerprint": vars(image.fingerprint),
        "files": list(image.manifest.files),
        "bytes": sum(record.bytes for record in image.manifest.files.values()),
        "verified": not options.no_verify,
        "seconds": time.perf_counter() - started,
    }
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        ranks = "1 rank" if len(image.states) == 1 else f"{len(image.states)} ranks"
        print(
            f"{options.out}: {ranks}, {len(image.manifest.files)} files, "
            f"{format_bytes(document['bytes'])}, in {document['seconds']:.2f} s"
        )
    return 0
