"""Packed images: a cold load of one, beside plain direct reads of the same files.

python -m benchmarks.image [--quick] [--rounds N] [--csv FILE]
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from weightlift.model.packing import pack_model
from weightlift.model.skeleton import load_model

from . import data, reference
from .cold import cold_method
from .load import best_queue_depth, nothing, timed
from .measure import Row, in_child, interleaved, machine, table, write_csv


def packed(gibibytes: float) -> Path:
    """The folder of an image; made anew, so that it is what this weightlift writes."""
    folder = data.llama_model(gibibytes)
    image = folder.with_name(f"{folder.name}-image")
    shutil.rmtree(image, ignore_errors=True)
    pack_model(folder, image)
    return image


def import_all(image: Path) -> None:
    """Makes torch import what the first model on its meta device wants, which takes seconds from a cold disk."""
    load_model(image)


def rows_of(gibibytes: float, rounds: int) -> list[Row]:
    image = in_child(lambda: packed(gibibytes))
    paths = data.shard_paths(image)
    depth = best_queue_depth(paths, min(rounds, 3))
    samples = interleaved(
        {
            "R": lambda: timed(nothing, lambda _: reference.read_direct(paths, depth), paths, cold=True),
            "image": lambda: timed(lambda: import_all(image), lambda _: load_model(image), paths, cold=True),
        },
        rounds,
    )
    num_bytes = sum(path.stat().st_size for path in paths)
    reference_name = f"R (O_DIRECT, depth {depth})"
    return [
        Row.ratio(
            "image, load_model, cold", samples["image"], reference_name, samples["R"], limit=1.15, num_bytes=num_bytes
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, 3 rounds: to see that it works")
    parser.add_argument("--rounds", type=int, help="how often each variant runs (default: 7)")
    parser.add_argument("--csv", metavar="FILE", help="write the table, with every sample, as CSV too")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 7)
    data.BUILD.mkdir(parents=True, exist_ok=True)
    print(machine(data.BUILD))
    print(f"cold: {cold_method()}; {rounds} rounds, variants taking turns, each run in a fresh process")
    rows = rows_of(0.25 if options.quick else 2, rounds)
    print(table(rows))
    if options.csv:
        write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
