"""``weightlift bench``: how fast storage is, and what to set for loads from it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator

from weightlift.cli.errors import CommandError
from weightlift.config import MiB, environment_variable, parse_size
from weightlift.report import format_bytes
from weightlift.storage_bench import measure_storage
from weightlift.storage_figures import Figure, Point, StorageFigures

NAME = "bench"
HELP = (
    "Measure storage: readers, read sizes and depths, cold and warm, beside plain O_DIRECT reads; recommend settings "
    "for loads from it. Takes some minutes, or less than one with --quick."
)

_MAX_ROWS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="a folder, where a file is written and removed again; or a file, which is read"
    )
    parser.add_argument("--quick", action="store_true", help="fewer settings, on a file of 512 MiB")
    parser.add_argument("--rounds", type=_rounds, metavar="N", help="how often (default: 3, or what 20 s allow)")
    parser.add_argument("--size", type=_size, metavar="SIZE", help="of the file, as 4GiB (default: 2 GiB)")
    parser.add_argument("--all", action="store_true", help="show every figure, not only the fastest")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write everything as JSON, for `weightlift plan --bench FILE`; without FILE print it, and nothing else",
    )
    parser.add_argument("--plot", metavar="DIR", help="draw the figures there, as PNG (needs matplotlib)")


def _rounds(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 1000, found {text!r}")
    return int(text)


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError:
        size = 0
    if size < 16 * MiB:
        raise argparse.ArgumentTypeError(f"expected a number of bytes, KiB, MiB or GiB, at least 16MiB, found {text!r}")
    return size


def run(options: argparse.Namespace) -> int:
    if options.plot is not None:
        try:
            from weightlift import storage_plots
        except ImportError as error:
            raise CommandError(
                "--plot draws with matplotlib, which is not installed (pip install 'weightlift[bench]')", exit_code=2
            ) from error
        os.makedirs(options.plot, exist_ok=True)
    to_file = options.json not in (None, "-")
    if to_file:
        target = options.json if os.path.exists(options.json) else os.path.dirname(options.json) or "."
        if not os.access(target, os.W_OK):  # better told now than after minutes
            raise CommandError(f"--json {options.json}: it can't be written there; name another file", exit_code=2)
    with _ended_by_signals():
        figures = measure_storage(
            options.path,
            quick=options.quick,
            rounds=options.rounds,
            file_bytes=options.size,
            on_progress=_show_progress,
        )
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    document = figures.to_dict()
    if options.json == "-":
        print(json.dumps(document, indent=2))
    else:
        print("\n".join(_lines(figures, show_all=options.all)))
    if to_file:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
    if options.plot is not None:
        for plot in storage_plots.draw(document, options.plot):
            if options.json != "-":
                print(f"plot: {plot}")
    return 0


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program by an exception, so that the file that was written is removed."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    # Not where one is ignored, as under nohup.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _show_progress(rounds_done: int, done: int, total: int, point: Point) -> None:
    if sys.stderr.isatty():
        text = f"round {rounds_done + 1}, {done + 1} of {total}: {point}, {point.state}"
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _lines(figures: StorageFigures, *, show_all: bool) -> Iterator[str]:
    machine, storage = figures.machine, figures.storage
    yield (
        f"{machine['processor']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}; "
        f"Linux {machine['kernel']}; huge pages: {machine['huge_pages']}; weightlift {machine['weightlift']}"
    )
    device = storage["device"]
    direct = storage["direct_io"]
    yield (
        f"{figures.path}: {storage['file_system']} at {storage['mount_point']}"
        + (f", device {device['name']} {device['model']}".rstrip() if device else "")
        + (
            f"; direct I/O: memory {direct['memory_alignment']} B, offset {direct['offset_alignment']} B"
            if direct["usable"]
            else "; no direct I/O"
        )
        + (f" ({direct['reason']})" if direct["reason"] else "")
    )
    rounds = max((len(figure.samples) for figure in figures.figures), default=0)
    yield f"{format_bytes(figures.file_bytes)} of one file; medians of {rounds}; GB = 10^9 bytes; latencies in ms"
    headings = ("", "GB/s", "p50", "p90", "p99", "max", "CPU s/GB", "")
    for state in ("cold", "warm"):
        of_state = [figure for figure in figures.figures if figure.point.state == state]
        shown = of_state if show_all else _fastest(of_state)
        rows = [(state, *headings[1:]), *(_cells(figure) for figure in shown)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
        for row in rows:
            first, *others, last = row
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=False)]
            yield "  ".join((first.ljust(widths[0]), *cells, last)).rstrip()
        if len(shown) < len(of_state):
            yield f"... and {len(of_state) - len(shown)} slower ones (--all)"
    costs = figures.costs
    yield (
        f"memory: fresh huge pages {costs.fresh_bytes_per_second / 1e9:.2f} GB/s by one thread, "
        f"copies {costs.copy_bytes_per_second / 1e9:.2f} GB/s"
    )
    yield from (f"note: {note}" for note in figures.notes)
    yield from _advice(figures)


def _fastest(figures: list[Figure]) -> list[Figure]:
    """The fastest, the fastest of each way to read, and all of random pieces, of which there are few."""
    by_speed = sorted(figures, key=lambda figure: -figure.bytes_per_second)
    ways: dict[object, Figure] = {}
    for figure in by_speed:
        point = figure.point
        ways.setdefault(point if point.random else (point.reader, point.direct, point.huge_pages), figure)
    others = [figure for figure in by_speed if figure not in ways.values()]
    kept = [*ways.values(), *others[: max(0, _MAX_ROWS - len(ways))]]
    return [figure for figure in by_speed if figure in kept]


def _cells(figure: Figure) -> tuple[str, ...]:
    cpu = "" if figure.cpu_seconds_per_gb is None else f"{figure.cpu_seconds_per_gb:.3f}"
    if figure.verified:
        doubt = ""
    elif figure.cached is None:
        doubt = "unverified"
    else:
        doubt = f"{figure.cached:.0%} was cached"
    return (
        str(figure.point),
        f"{figure.bytes_per_second / 1e9:.2f}",
        *(f"{1e3 * figure.latency[name]:.2f}" for name in ("p50", "p90", "p99", "max")),
        cpu,
        doubt,
    )


def _advice(figures: StorageFigures) -> Iterator[str]:
    recommendation = figures.recommendation
    if recommendation is None:
        yield "no recommendation: nothing was read cold"
        return
    reference = figures.of("cold", "reference")
    rate = recommendation.bytes_per_second
    beside = (
        f", {rate / reference[0].bytes_per_second:.2f} x the O_DIRECT reference at its best depth" if reference else ""
    )
    settings = " ".join(f"{environment_variable(name)}={value}" for name, value in recommendation.settings.items())
    yield f"recommended: {settings or 'no settings'} ({recommendation.reason}): {rate / 1e9:.2f} GB/s{beside}"
