"""The kernels of a GPU, each beside a device-to-device copy that moves as many bytes.

    python -m benchmarks.device_ops [--quick] [--only NAMES] [--json FILE]

Needs a GPU. Times are of CUDA events around a launch, warm: the median, and the fastest and the slowest of
the middle half. Sources and results take turns among several buffers, more than the L2 cache holds. The copy is
timed in turn with the kernel, and moves half of the bytes that the kernel reads and writes, so that it reads and writes
as many. `of copy` is what part of the copy's bandwidth the kernel has.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightlift import _C, ops
from weightlift.program import _types

_BUFFER_BYTES = 256 << 20  # of a source; several of them are beyond any L2 cache
_BUFFERS = 3


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel: what it is made of, and what queues it on the current stream."""

    source: Callable[[], Tensor]
    run: Callable[[Tensor, Any], Any]
    result: Callable[[Tensor], Any] = lambda source: None  # memory that `run` writes, where it does not make it
    result_bytes: Callable[[Tensor], int] = lambda source: source.nbytes


def _rows(dtype: torch.dtype, columns: int = 8192) -> Callable[[], Tensor]:
    def make() -> Tensor:
        rows = _BUFFER_BYTES // columns // dtype.itemsize
        if dtype == torch.int32:
            return torch.randint(-(2**31), 2**31, (rows, columns), dtype=dtype, device="cuda")
        if dtype.itemsize == 1:
            return torch.randint(0, 120, (rows, columns), dtype=torch.uint8, device="cuda").view(dtype)
        return torch.randn(rows, columns, device="cuda").to(dtype)

    return make


def _copy(source: Tensor, result: Tensor) -> None:
    types = _types(source.dtype, result.dtype)
    assert types is not None
    _C.launch_copy(
        src_type=types[0],
        src=source.data_ptr(),
        src_strides=source.stride(),
        dst_type=types[1],
        dst=result.data_ptr(),
        dst_strides=result.stride(),
        sizes=source.shape,
        stream=torch.cuda.current_stream().cuda_stream,
    )


def _cast(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "run": _copy,
        "result": lambda source: torch.empty(source.shape, dtype=dtype, device="cuda"),
        "result_bytes": lambda source: source.numel() * dtype.itemsize,
    }


def _half(source: Tensor) -> int:
    return source.nbytes // 2


def _words(source: Tensor) -> tuple[int, int]:
    """K and N of a GPTQ weight of 4 bits in these words."""
    return source.shape[0] * 8, source.shape[1]


_BF16, _FN = torch.bfloat16, torch.float8_e4m3fn

KERNELS: dict[str, Kernel] = {
    "copy, contiguous": Kernel(_rows(_BF16), **_cast(_BF16)),
    "copy, column half": Kernel(
        lambda: _rows(_BF16, 16384)()[:, :8192], _copy, lambda s: torch.empty(s.shape, dtype=_BF16, device="cuda")
    ),
    "copy, at an odd place": Kernel(
        lambda: _rows(_FN)().flatten()[1:-15], _copy, lambda s: torch.empty(s.shape, dtype=_FN, device="cuda")
    ),
    "copy, transposed, 2 bytes": Kernel(lambda: _rows(_BF16)().T, **_cast(_BF16)),
    "copy, transposed, 1 byte": Kernel(lambda: _rows(_FN)().T, **_cast(_FN)),
    "float32 to bfloat16": Kernel(_rows(torch.float32), **_cast(_BF16)),
    "bfloat16 to float32": Kernel(_rows(_BF16), **_cast(torch.float32)),
    "float16 to bfloat16": Kernel(_rows(torch.float16), **_cast(_BF16)),
    "float8_e4m3fn to bfloat16": Kernel(_rows(_FN), **_cast(_BF16)),
    "bfloat16 to float8_e4m3fn": Kernel(_rows(_BF16), **_cast(_FN)),
    "e4m3fn to e4m3fnuz": Kernel(_rows(_FN), lambda w, _: torch.ops.weightlift.e4m3fn_to_e4m3fnuz(w, True)),
    "requantise to the largest scale": Kernel(
        _rows(_FN),
        lambda w, scales: torch.ops.weightlift.requantize_with_max_scale(
            w, scales, [w.shape[0] // 2, w.shape[0] - w.shape[0] // 2], False
        ),
        lambda w: torch.tensor([0.5, 0.25], device="cuda"),
    ),
    "GPTQ to Marlin, 4 bits": Kernel(_rows(torch.int32), lambda w, _: ops.gptq_marlin_repack(w, *_words(w), 4)),
    "GPTQ to Marlin, 4 bits, act-order": Kernel(
        _rows(torch.int32),
        lambda w, perm: ops.gptq_marlin_repack(w, *_words(w), 4, perm=perm),
        lambda w: torch.randperm(_words(w)[0], device="cuda").int(),
    ),
    "GPTQ to Marlin, 8 bits": Kernel(
        _rows(torch.int32), lambda w, _: ops.gptq_marlin_repack(w, w.shape[0] * 4, w.shape[1], 8)
    ),
    "AWQ to Marlin, 4 bits": Kernel(
        _rows(torch.int32), lambda w, _: ops.awq_marlin_repack(w, w.shape[0], w.shape[1] * 8, 4)
    ),
    "FP8 to Marlin": Kernel(_rows(_FN), lambda w, _: ops.nk_marlin_repack(w, w.shape[1], w.shape[0], 8)),
    "largest magnitude": Kernel(_rows(_BF16), lambda w, _: torch.ops.weightlift.amax(w), result_bytes=lambda source: 0),
    "FP8, given scale": Kernel(
        _rows(_BF16),
        lambda w, scale: torch.ops.weightlift.quantize_with(
            w, scale, _FN, w.shape[0], w.shape[1], False, True, 0.0, 0.0, 0.0, False, False
        ),
        lambda w: torch.full((1,), 0.01, device="cuda"),
        _half,
    ),
    "FP8, per channel": Kernel(
        _rows(_BF16), lambda w, _: ops.scaled_fp8_quant(w, use_per_token_if_dynamic=True), result_bytes=_half
    ),
    "FP8, blocks of 128x128": Kernel(_rows(_BF16), lambda w, _: ops.per_block_cast_to_fp8(w), result_bytes=_half),
    "FP8, groups of 128": Kernel(_rows(_BF16), lambda w, _: ops.per_token_group_quant_fp8(w, 128), result_bytes=_half),
    "FP8, float32, blocks of 128x128": Kernel(
        _rows(torch.float32), lambda w, _: ops.per_block_cast_to_fp8(w), result_bytes=lambda w: w.nbytes // 4
    ),
    "MXFP8": Kernel(_rows(_BF16), lambda w, _: ops.mxfp8_e4m3_quantize(w), result_bytes=_half),
    "INT8, per channel": Kernel(_rows(_BF16), lambda w, _: ops.scaled_int8_quant(w), result_bytes=_half),
}


def _seconds(actions: list[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Of each action, the times of all rounds; the actions take turns."""
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in actions]
    for number in range(rounds + 3):
        for action, its_events in zip(actions, events, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            action()
            end.record()
            if number >= 3:  # warm by then
                its_events.append((start, end))
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) / 1e3 for start, end in its_events] for its_events in events]


def measure(kernel: Kernel, rounds: int) -> dict[str, float]:
    """A kernel and its copy: seconds and GB/s, reading and writing counted."""
    sources = [kernel.source() for _ in range(_BUFFERS)]
    results = [kernel.result(source) for source in sources]
    moved = sources[0].numel() * sources[0].itemsize + kernel.result_bytes(sources[0])
    copies = [torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda") for _ in range(_BUFFERS)]
    turns = itertools.cycle(zip(sources, results, strict=True))
    copy_turns = itertools.cycle(copies)

    def run() -> None:
        kernel.run(*next(turns))

    def copy() -> None:
        pair = next(copy_turns)
        pair[0].copy_(pair[1])

    times, copy_times = _seconds([run, copy], rounds)
    median, copy_median = statistics.median(times), statistics.median(copy_times)
    quarters = statistics.quantiles(times, n=4)
    return {
        "bytes": moved,
        "seconds": median,
        "seconds_low": quarters[0],
        "seconds_high": quarters[2],
        "gb_per_s": moved / median / 1e9,
        "copy_gb_per_s": moved / copy_median / 1e9,
        "of_copy": copy_median / median,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_ops", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--only", default="", help="names of kernels, or parts of them, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no GPU: nothing to measure")
    if not _C.cuda_info()["built"]:
        sys.exit(
            "CUDA is not part of this build of weightlift: build it where there is an nvcc, with WEIGHTLIFT_CUDA=ON"
        )
    wanted = [part for part in args.only.split(",") if part]
    figures = {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"{'kernel':36} {'ms':>8} {'(middle half)':>17} {'GB/s':>8} {'of copy':>8}")
    for name, kernel in KERNELS.items():
        if wanted and not any(part in name for part in wanted):
            continue
        figure = figures[name] = measure(kernel, 10 if args.quick else 50)
        torch.cuda.empty_cache()
        span = f"({1e3 * figure['seconds_low']:.3f}-{1e3 * figure['seconds_high']:.3f})"
        print(
            f"{name:36} {1e3 * figure['seconds']:8.3f} {span:>17} {figure['gb_per_s']:8.0f} {figure['of_copy']:8.2f}",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "kernels": figures}, indent=1))


if __name__ == "__main__":
    main()
