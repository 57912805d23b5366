"""Draws what `bench_storage --benchmark_out=FILE` measured, as `weightlift bench --plot` draws its own figures.

python -m benchmarks.storage FILE FOLDER
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from typing import Any

from weightlift.machine import machine, storage_of

_MILLISECOND = 1e-3


def figures_of(benchmarks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of `read/READER/direct|buffered/cold|warm/huge|small/CHUNK_KiB/DEPTH`, medians of the repetitions."""
    runs: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for benchmark in benchmarks:
        if benchmark["run_type"] == "iteration" and not benchmark.get("error_occurred"):
            runs[benchmark["run_name"]].append(benchmark)
    figures = []
    for name, repetitions in runs.items():
        kind, *way = name.split("/")
        if kind != "read":
            continue
        reader, how, state, pages, kibibytes, depth = way[:6]
        samples = [run["bytes_per_second"] for run in repetitions]
        figures.append(
            {
                "reader": reader,
                "direct": how == "direct",
                "state": state,
                "huge_pages": pages == "huge",
                "chunk_bytes": int(kibibytes) << 10,
                "queue_depth": int(depth),
                "bytes_per_second": statistics.median(samples),
                "samples": samples,
                "latency": {
                    name: statistics.median(run[f"{name}_ms"] * _MILLISECOND for run in repetitions)
                    for name in ("p50", "p90", "p99", "max")
                },
            }
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage", description=__doc__.splitlines()[0])
    parser.add_argument("file", metavar="FILE", help="JSON of bench_storage")
    parser.add_argument("folder", metavar="FOLDER", help="where the PNG files go")
    options = parser.parse_args()
    try:
        from weightlift.storage_plots import draw
    except ImportError:
        print("no plots: matplotlib is not installed")
        return
    with open(options.file, encoding="utf-8") as file:
        document = json.load(file)
    path = document["context"]["path"]
    for plot in draw(
        {
            "path": path,
            "machine": machine(),
            "storage": storage_of(path),
            "figures": figures_of(document["benchmarks"]),
        },
        options.folder,
    ):
        print(f"plot: {plot}")


if __name__ == "__main__":
    main()
