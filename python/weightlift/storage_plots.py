"""Drawings of what `weightlift bench` measured. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib  # type: ignore[import-not-found,unused-ignore]  # optional

from .config import KiB, MiB

matplotlib.use("Agg")
from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]  # after the choice of backend

_PERCENTILES = ("p50", "p90", "p99", "max")


def draw(document: Mapping[str, Any], folder: str) -> list[str]:
    """Draws throughput by chunk size and queue depth, latency percentiles, and cold beside warm.

    Args:
        document: what ``StorageFigures.to_dict`` gives, or a file of ``weightlift bench --json`` holds.
        folder: where the PNG files go; it is made.

    Returns:
        The paths of the files.
    """
    os.makedirs(folder, exist_ok=True)
    machine, storage = document["machine"], document["storage"]
    title = f"{document['path']}: {storage['file_system']}; {machine['processor']}, Linux {machine['kernel']}"
    drawings: dict[str, Callable[[list[dict[str, Any]], Any], None]] = {
        "throughput": _draw_throughput,
        "latency": _draw_latency,
        "cold_warm": _draw_cold_and_warm,
    }
    paths = []
    for name, drawing in drawings.items():
        figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
        drawing(document["figures"], axes)
        figure.suptitle(title, fontsize="small")
        paths.append(os.path.join(folder, f"{name}.png"))
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths


def _draw_throughput(figures: list[dict[str, Any]], axes: Any) -> None:
    """A line for each queue depth of cold direct reads, over the chunk size."""
    grid = _direct_grid(figures)
    for depth in sorted({f["queue_depth"] for f in grid}):
        line = sorted((f["chunk_bytes"], f["bytes_per_second"] / 1e9) for f in grid if f["queue_depth"] == depth)
        axes.plot([chunk for chunk, _ in line], [rate for _, rate in line], marker="o", label=f"queue depth {depth}")
    reference = _reference(figures)
    if reference:
        axes.axhline(
            reference["bytes_per_second"] / 1e9, color="black", linestyle="--", label="O_DIRECT reference, best depth"
        )
    _set_chunk_axis(axes, grid)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s")
    pieces = sorted({f["chunk_bytes"] for f in grid if f.get("random")})
    axes.set_title("cold direct reads" + (f"; {' and '.join(map(_size, pieces))} in random order" if pieces else ""))
    axes.legend(fontsize="small")


def _draw_latency(figures: list[dict[str, Any]], axes: Any) -> None:
    """Percentiles over the queue depth, at the chunk size that is fastest."""
    grid = _direct_grid(figures)
    if grid:
        chunk = max(grid, key=lambda f: f["bytes_per_second"])["chunk_bytes"]
        line = sorted((f for f in grid if f["chunk_bytes"] == chunk), key=lambda f: f["queue_depth"])
        for name in _PERCENTILES:
            axes.plot(
                [f["queue_depth"] for f in line], [1e3 * f["latency"][name] for f in line], marker="o", label=name
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks([f["queue_depth"] for f in line], [str(f["queue_depth"]) for f in line])
        axes.set_title(f"latency of a read, cold, direct, {_size(chunk)}")
        axes.legend(fontsize="small")
    axes.set_xlabel("reads in flight")
    axes.set_ylabel("ms")
    axes.set_yscale("log")


def _draw_cold_and_warm(figures: list[dict[str, Any]], axes: Any) -> None:
    """A bar for each way to read, at its best settings, beside the reference."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for f in figures:
        pages = "" if f["huge_pages"] else ", small pages"
        key = (f"{f['reader']}, {'direct' if f['direct'] else 'buffered'}{pages}", f["state"])
        if key not in best or f["bytes_per_second"] > best[key]["bytes_per_second"]:
            best[key] = f
    ways = sorted({way for way, _ in best})
    for state, shift, color in (("cold", 0.2, "tab:blue"), ("warm", -0.2, "tab:orange")):
        found = [(place, best[way, state]) for place, way in enumerate(ways) if (way, state) in best]
        rates = [f["bytes_per_second"] / 1e9 for _, f in found]
        bars = axes.barh([place + shift for place, _ in found], rates, 0.4, color=color, label=state)
        axes.bar_label(bars, [f"{rate:.2f}" for rate in rates], padding=3, fontsize="small")
    reference = _reference(figures)
    if reference:
        axes.axvline(reference["bytes_per_second"] / 1e9, color="black", linestyle="--", label="O_DIRECT reference")
    axes.set_yticks(range(len(ways)), ways)
    axes.set_xlabel("GB/s")
    axes.set_title("each way to read, at its fastest settings")
    axes.legend(fontsize="small")


def _direct_grid(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cold direct reads into huge pages, by io_uring, or else by threads."""
    direct = [f for f in figures if f["state"] == "cold" and f["direct"] and f["huge_pages"]]
    return [f for f in direct if f["reader"] == "io_uring"] or [f for f in direct if f["reader"] == "pread"]


def _reference(figures: list[dict[str, Any]]) -> dict[str, Any] | None:
    found = [f for f in figures if f["reader"] == "reference" and f["direct"] and f["huge_pages"]]
    return max(found, key=lambda f: f["bytes_per_second"], default=None)


def _set_chunk_axis(axes: Any, grid: list[dict[str, Any]]) -> None:
    chunks = sorted({f["chunk_bytes"] for f in grid})
    if chunks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(chunks, [_size(chunk) for chunk in chunks])
    axes.set_xlabel("bytes of a read")


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MiB} MiB" if num_bytes >= MiB else f"{num_bytes // KiB} KiB"
