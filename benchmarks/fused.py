"""Fused ops: a load that transforms on arrival, beside the plain load, and beside one that torch transforms afterwards.

    python -m benchmarks.fused [--quick] [--rounds N] [--only NAMES] [--csv FILE] [--plot FILE]

Each op has a checkpoint of its own: the plain load has the same bytes to bring. Destinations are fresh memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import weightlift
from weightlift import ops

from . import data
from .cold import cold_method
from .load import nothing, timed
from .measure import Row, in_child, interleaved, machine, table, write_csv

_ROWS, _COLUMNS = 8192, 8192


@dataclasses.dataclass(frozen=True)
class Fused:
    """One op: what a model would do with each weight of a checkpoint."""

    dtype: torch.dtype  # of the checkpoint's weights
    shape: tuple[int, int]
    fused: Callable[[Tensor], Tensor]  # the recorded op
    in_torch: Callable[[Tensor], Tensor]  # the same by torch's ops, on what has been loaded


def to_fnuz_in_torch(weight: Tensor) -> Tensor:
    bits = weight.view(torch.int8)
    bits[bits == -128] = 0
    return bits.view(torch.float8_e4m3fnuz)


def repack_gptq_in_torch(packed: Tensor) -> Tensor:
    """Words of eight 4-bit values along k into tiles of 16 x 64: row 8 h + 2 q + low, column 16 w + 8 r + p."""
    rows, columns = packed.shape
    words = packed.view(rows // 2, 2, columns // 64, 4, 2, 8)  # k tile, h, n tile, w, r, p
    result = torch.zeros(rows // 2, columns // 64, 8, 4, 4, dtype=torch.int32)  # k tile, n tile, p, q, w
    q = torch.arange(4, dtype=torch.int32).view(4, 1)
    for place, (low, r, h) in enumerate(itertools.product((0, 1), repeat=3)):
        values = words[:, h, :, :, r].transpose(2, 3).unsqueeze(3) >> 4 * (2 * q + low) & 15
        result |= values << 4 * place
    return result.view(rows // 2, -1)


def quantize_blocks_in_torch(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    blocks = weight.view(rows // 128, 128, columns // 128, 128).float()
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(1e-4) / 448
    return (blocks * (1 / scales)).to(torch.float8_e4m3fn).view(rows, columns)


def quantize_channels_in_torch(weight: Tensor) -> Tensor:
    weight = weight.float()
    scales = (weight.abs().amax(1, keepdim=True) / 448).clamp(1 / (448 * 512))
    return (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)


_ONE = torch.ones(1)
OPS = {
    "e4m3fn to e4m3fnuz": Fused(
        torch.float8_e4m3fn,
        (_ROWS, _COLUMNS),
        lambda w: ops.normalize_e4m3fn_to_e4m3fnuz(w, _ONE)[0],
        to_fnuz_in_torch,
    ),
    "GPTQ to Marlin, 4 bits": Fused(
        torch.int32,
        (_ROWS // 8, 2 * _COLUMNS),
        lambda w: ops.gptq_marlin_repack(w, w.shape[0] * 8, w.shape[1], 4),
        repack_gptq_in_torch,
    ),
    "BF16 to FP8, blocks": Fused(
        torch.bfloat16,
        (_ROWS, _COLUMNS),
        lambda w: ops.per_block_cast_to_fp8(w)[0],
        quantize_blocks_in_torch,
    ),
    "BF16 to FP8, channels": Fused(
        torch.bfloat16,
        (_ROWS, _COLUMNS),
        lambda w: ops.scaled_fp8_quant(w, use_per_token_if_dynamic=True)[0],
        quantize_channels_in_torch,
    ),
}


def load_fused(folder: Path, op: Fused) -> list[Tensor]:
    with weightlift.open_checkpoint(folder) as checkpoint:
        recorded = [op.fused(tensor) for tensor in checkpoint.values()]
        params = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in recorded]
        for param, tensor in zip(params, recorded, strict=True):
            param.copy_(tensor)
    return params


def load_plain(folder: Path) -> list[Tensor]:
    with weightlift.open_checkpoint(folder) as checkpoint:
        params = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in checkpoint.values()]
        for param, tensor in zip(params, checkpoint.values(), strict=True):
            param.copy_(tensor)
    return params


def load_then_transform(folder: Path, op: Fused) -> list[Tensor]:
    params = load_plain(folder)
    for i in range(len(params)):
        params[i] = op.in_torch(params[i])
    return params


def rows_of(name: str, op: Fused, num_bytes: int, rounds: int) -> list[Row]:
    folder = in_child(lambda: data.weights(op.dtype, op.shape, num_bytes))
    paths = data.shard_paths(folder)

    def same() -> float:
        """That both ways give the same bytes, but for rounding at the last place."""
        fused, then = load_fused(folder, op)[0], load_then_transform(folder, op)[0]
        return (fused.view(torch.uint8) != then.view(torch.uint8)).double().mean().item()

    if (different := in_child(same)) > 1e-3:
        raise SystemExit(f"{name}: {different:.2%} of the bytes are not what torch makes of them")
    cold = interleaved(
        {
            "plain": lambda: timed(nothing, lambda _: load_plain(folder), paths, cold=True),
            "fused": lambda: timed(nothing, lambda _: load_fused(folder, op), paths, cold=True),
        },
        rounds,
    )
    warm = interleaved(
        {
            "plain": lambda: timed(nothing, lambda _: load_plain(folder), paths, cold=False),
            "fused": lambda: timed(nothing, lambda _: load_fused(folder, op), paths, cold=False),
            "then": lambda: timed(nothing, lambda _: load_then_transform(folder, op), paths, cold=False),
        },
        rounds,
    )
    size = sum(path.stat().st_size for path in paths)
    return [
        Row.ratio(f"{name}, cold", cold["fused"], "plain load", cold["plain"], limit=1.15, num_bytes=size),
        Row.ratio(f"{name}, warm", warm["fused"], "plain load", warm["plain"], limit=None, num_bytes=size),
        Row.ratio(f"{name}, warm", warm["fused"], "load, then torch", warm["then"], limit=0.67, num_bytes=size),
    ]


def plot(path: str, rows: list[Row]) -> None:
    """Bars of the minima, fused beside what it is compared with."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]  # of this option alone

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 0.6 * len(rows) + 1.5), layout="constrained")
    places = range(len(rows))
    axes.barh([place - 0.2 for place in places], [min(row.ours) for row in rows], 0.4, label="fused")
    axes.barh([place + 0.2 for place in places], [min(row.theirs) for row in rows], 0.4, label="against")
    axes.set_yticks(list(places), [f"{row.measurement}\nagainst {row.against}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds, least of all rounds")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small files, 3 rounds: to see that it works")
    parser.add_argument("--rounds", type=int, help="how often each variant runs (default: 7)")
    parser.add_argument("--only", help=f"comma-separated: {', '.join(name.replace(',', '') for name in OPS)}")
    parser.add_argument("--csv", metavar="FILE", help="write the table, with every sample, as CSV too")
    parser.add_argument("--plot", metavar="FILE", help="draw it too (needs matplotlib)")
    options = parser.parse_args()

    rounds = options.rounds or (3 if options.quick else 7)
    num_bytes = data.GIB // 8 if options.quick else data.GIB
    by_name = {name.replace(",", ""): (name, op) for name, op in OPS.items()}
    wanted = options.only.split(",") if options.only else list(by_name)
    if unknown := set(wanted) - set(by_name):
        parser.error(f"--only: no such op: {', '.join(sorted(unknown))}")

    data.BUILD.mkdir(parents=True, exist_ok=True)
    print(machine(data.BUILD))
    print(
        f"cold: {cold_method()}; {rounds} rounds, variants taking turns, each run in a fresh process; GB = 10^9 bytes "
        "of the checkpoint"
    )
    rows: list[Row] = []
    for name, op in (by_name[key] for key in wanted):
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        rows += rows_of(name, op, num_bytes, rounds)
    print(table(rows))
    if options.csv:
        write_csv(options.csv, rows)
    if options.plot:
        plot(options.plot, rows)


if __name__ == "__main__":
    main()
