"""Loads into GPU memory: beside copies from pinned memory, reads of the same storage, and safetensors. Needs a GPU.

    python -m benchmarks.device [--only NAMES] [--gib N] [--tmpfs FOLDER] [--disk FOLDER] [--json FILE]

Checkpoints are written into the folders, which are left as they were found. Everything is timed in one process, warm,
variants taking turns; a figure is of the fastest rounds, as what noise adds is never negative. Rates are of the bytes
of the checkpoint, 10^9 to a GB. Parts:

- tmpfs, page cache, disk: a load of a Llama-like checkpoint from there, beside safetensors; a copy of as many bytes
  from pinned memory to the GPU; and a plain read of the files into host memory that is used over and over, by threads
  of `pread`, at the best of a few numbers of threads. From disk: the files are taken out of the page cache before each
  run, and read past it.
- fused: loads from tmpfs that transform what they load by ops, beside loads of the same bytes as they are; and the peak
  of GPU memory beyond what they give.
- memory: the same of a load from tmpfs as it is.
- synchronisation: calls of the CUDA runtime that wait for the GPU, between a load's first copy and its last.

Ends with 0; 1: something could not be measured; 77: there is no GPU, or no CUDA in this build.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

import weightlift
from weightlift import _C
from weightlift.machine import machine, storage_of
from weightlift.report import LoadReport

from . import data, fused
from .cold import cached_fraction, require_state
from .device_report import NOTHING_RUN, Figure, measured

MIB = 1 << 20
_PINNED_BYTES = 1 << 30
_READ_BYTES = 8 * MIB  # of one read of the plain reader
_THREADS = (4, 8, 16)
_ROUNDS, _COLD_ROUNDS = 7, 3
_MAX_SECONDS = 20.0  # of a comparison: no new round after it

# What has the CPU wait until the GPU has done what it was given; those of the last line while they give memory back.
_SYNCHRONISING = {
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMemcpy", "cudaMemcpy2D", "cudaMemset"),
    *("cuCtxSynchronize", "cuStreamSynchronize"),
    *("cudaFree", "cudaFreeHost", "cudaHostUnregister"),
}
_COPY = "cudaMemcpyAsync"
_WORK = {_COPY, "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}


def load(folder: Path, op: fused.Fused | None = None) -> tuple[dict[str, Tensor], LoadReport]:
    """All tensors of a checkpoint, on the GPU, transformed by the op if there is one."""
    with weightlift.open_checkpoint(folder) as checkpoint:
        recorded = {name: op.fused(tensor) if op else tensor for name, tensor in checkpoint.items()}
        params = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for name, tensor in recorded.items()
        }
        for name, param in params.items():
            param.copy_(recorded[name])
        checkpoint.run()
    return params, checkpoint.report


def load_by_safetensors(paths: list[Path]) -> dict[str, Tensor]:
    return {name: tensor for path in paths for name, tensor in safetensors.torch.load_file(path, device="cuda").items()}


def seconds_of(action: Callable[[], object]) -> float:
    """Until all bytes are in GPU memory. Giving the result back is not timed."""
    gc.collect()
    torch.cuda.synchronize()
    start = time.perf_counter()
    kept = action()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    del kept
    return seconds


def in_turns(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each variant gives, round by round, as far as time allows."""
    started = time.monotonic()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        if number > 0 and time.monotonic() - started > _MAX_SECONDS:
            break
        for name in names[number % len(names) :] + names[: number % len(names)]:
            samples[name].append(variants[name]())
    return samples


def read_rate(paths: list[Path], threads: int, *, direct: bool) -> float:
    """Bytes a second of plain reads of files into host memory."""
    num_bytes = seconds = 0.0
    for path in paths:
        figures = _C.measure_reads(
            str(path),
            reader="reference",
            direct=direct,
            chunk_bytes=_READ_BYTES,
            queue_depth=threads,
            huge_pages=True,
            max_bytes=path.stat().st_size,
            max_seconds=2.0,
        )
        num_bytes, seconds = num_bytes + figures["bytes"], seconds + figures["seconds"]
    return num_bytes / seconds


def require_same(folder: Path, paths: list[Path]) -> LoadReport:
    """Ends the program unless a load gives the bytes that safetensors gives."""
    loaded, report = load(folder)
    expected = load_by_safetensors(paths)
    if loaded.keys() != expected.keys():
        raise SystemExit(f"{folder}: the load gives other tensors than safetensors")
    for name, tensor in expected.items():
        if not torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)):
            raise SystemExit(f"{folder}: {name}: the load gives other bytes than safetensors")
    return report


def source_figures(source: str, folder: Path) -> Iterator[Figure]:
    """Loads from a folder that lies where the source's name says."""
    paths = data.shard_paths(folder)
    num_bytes = sum(path.stat().st_size for path in paths)
    cold = source == "disk"
    report = require_same(folder, paths)
    direct = cold and bool(_C.probe_direct(str(paths[0]))["usable"])

    def prepared(action: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            if cold or (source == "page cache" and cached_fraction(paths) < 0.99):
                require_state(paths, cold=cold)
            return action()

        return run

    pinned = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        for begin in range(0, num_bytes, _PINNED_BYTES):
            part = min(_PINNED_BYTES, num_bytes - begin)
            on_gpu[:part].copy_(pinned[:part], non_blocking=True)

    samples = in_turns(
        {
            "copy": lambda: num_bytes / seconds_of(copy),
            "load": prepared(lambda: num_bytes / seconds_of(lambda: load(folder))),
            "safetensors": prepared(lambda: num_bytes / seconds_of(lambda: load_by_safetensors(paths))),
            **{
                f"read by {threads}": prepared(lambda threads=threads: read_rate(paths[:2], threads, direct=direct))  # type: ignore[misc]
                for threads in _THREADS
            },
        },
        _COLD_ROUNDS if cold else _ROUNDS,
    )
    copy_rate, load_rate, theirs = (max(samples[name]) for name in ("copy", "load", "safetensors"))
    reads = {name: max(rates) for name, rates in samples.items() if name.startswith("read")}
    best = max(reads, key=lambda name: reads[name])
    slower = min(copy_rate, reads[best])

    def gigabytes(name: str) -> dict[str, list[float]]:
        return {f"{name}, GB/s": [rate / 1e9 for rate in samples[name]]}

    yield measured(f"{source}: copy from pinned memory to the GPU", copy_rate / 1e9, gigabytes("copy"))
    note = f"{best.removeprefix('read ')} threads, {'O_DIRECT' if direct else 'buffered'}"
    yield measured(f"{source}: read into host memory", reads[best] / 1e9, gigabytes(best), note)
    note = "; ".join([f"{report.files[0].reader}, {report.files[0].strategy}", *report.fallbacks])
    yield measured(f"{source}: load into the GPU", load_rate / 1e9, gigabytes("load"), note)
    note = f"that is the {'copy' if slower == copy_rate else 'read'}"
    yield measured(f"{source}: load, of the slower of copy and read", load_rate / slower, note=note)
    note = f"{theirs / 1e9:.2f} GB/s"
    yield measured(f"{source}: safetensors' time, of the load's", load_rate / theirs, gigabytes("safetensors"), note)


def fused_figures(gibibytes: float) -> Iterator[Figure]:
    for name, op in fused.OPS.items():
        folder = data.weights(op.dtype, op.shape, int(gibibytes * data.GIB))
        yield memory_figure(name, lambda folder=folder, op=op: load(folder, op))  # type: ignore[misc]
        samples = in_turns(
            {
                "plain": lambda folder=folder: seconds_of(lambda: load(folder)),  # type: ignore[misc]
                "fused": lambda folder=folder, op=op: seconds_of(lambda: load(folder, op)),  # type: ignore[misc]
            },
            _ROUNDS,
        )
        plain, transformed = (min(samples[variant]) for variant in ("plain", "fused"))
        note = f"{1e3 * transformed:.1f} ms beside {1e3 * plain:.1f}"
        seconds = {f"{variant}, s": samples[variant] for variant in samples}
        yield measured(f"fused load, of the plain one's time: {name}", transformed / plain, seconds, note)
        shutil.rmtree(folder)


def memory_figure(name: str, action: Callable[[], tuple[dict[str, Tensor], LoadReport]]) -> Figure:
    """What torch's allocator gave out at the peak, beside what is left in the end: the parameters."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    kept, report = action()
    beyond = (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) / MIB
    del kept
    note = f"the report says {report.device_scratch_bytes / MIB:.1f}"
    return measured(f"GPU memory beyond the parameters: {name}", beyond, note=note)


def synchronising_calls(events: list[dict[str, Any]]) -> tuple[Counter[str], int]:
    """What a trace of torch's profiler has.

    Returns:
        Calls that wait for the GPU, made after the first work was given to it and before the last was; and the number
        of all copies.
    """
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    work = [event["ts"] for event in calls if event["name"] in _WORK]
    waiting = Counter(
        event["name"]
        for event in calls
        if event["name"] in _SYNCHRONISING and work and min(work) <= event["ts"] <= max(work)
    )
    return waiting, sum(event["name"] == _COPY for event in calls)


def synchronisation_figure(folder: Path) -> Figure:
    load(folder)  # torch's allocator has memory for the next one
    with tempfile.TemporaryDirectory() as temporary:
        trace = Path(temporary) / "trace.json"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            params, _ = load(folder)
        profiler.export_chrome_trace(str(trace))
        waiting, num_copies = synchronising_calls(json.loads(trace.read_text())["traceEvents"])
    if num_copies < sum(param.nbytes >= MIB for param in params.values()):
        raise SystemExit(
            f"the profiler saw {num_copies} copies, fewer than there are parameters: it doesn't see them all"
        )
    note = ", ".join(f"{name} {count}" for name, count in sorted(waiting.items())) or f"{num_copies} copies were seen"
    return measured("synchronising calls in the middle of a load", waiting.total(), note=note)


def no_gpu() -> str:
    """Why nothing can be measured here; empty where it can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU: not run"
    if not _C.cuda_info()["built"]:
        return "CUDA is not part of this build of weightlift; build it with WEIGHTLIFT_CUDA=ON: not run"
    return ""


PARTS = ("tmpfs", "page cache", "disk", "fused", "memory", "synchronisation")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"comma-separated: {', '.join(PARTS)}")
    parser.add_argument("--gib", type=float, default=4, help="size of the checkpoint, in GiB (default: 4)")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory (default: /dev/shm)")
    parser.add_argument("--disk", type=Path, default=data.BUILD, help="a folder on a disk (default: build/bench)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, as they come")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only: no such part: {', '.join(sorted(unknown))}")
    if reason := no_gpu():
        print(reason)
        sys.exit(NOTHING_RUN)

    options.disk.mkdir(parents=True, exist_ok=True)
    host = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **machine(),
        "tmpfs": storage_of(str(options.tmpfs)),
        "disk": storage_of(str(options.disk)),
    }
    print(", ".join(f"{key} {host[key]}" for key in ("gpu", "torch", "cuda", "processor", "cores", "kernel")))
    figures: list[Figure] = []
    failed = False
    with contextlib.ExitStack() as stack:
        in_memory, on_disk = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightlift-device-", dir=folder)))
            for folder in (options.tmpfs, options.disk)
        )
        data.BUILD = in_memory

        def folder() -> Path:
            return data.llama(options.gib)

        def copied() -> Path:
            copy = on_disk / folder().name
            return copy if copy.exists() else Path(shutil.copytree(folder(), copy))

        run: dict[str, Callable[[], Iterable[Figure]]] = {
            "tmpfs": lambda: source_figures("tmpfs", folder()),
            "page cache": lambda: source_figures("page cache", copied()),
            "disk": lambda: source_figures("disk", copied()),
            "fused": lambda: fused_figures(options.gib / 2),
            "memory": lambda: [memory_figure("plain load", lambda: load(folder()))],
            "synchronisation": lambda: [synchronisation_figure(folder())],
        }
        for name in wanted:
            print(f"measuring: {name}", file=sys.stderr, flush=True)
            try:
                for figure in run[name]():
                    figures.append(figure)
                    print(f"{figure.name}: {figure.value:.2f} {figure.unit}", flush=True)
                    if options.json:
                        _write(options.json, host, figures)
            except (Exception, SystemExit):  # the other parts can still be measured
                traceback.print_exc()
                print(f"{name}: not run to its end", flush=True)
                failed = True
            gc.collect()
            torch.cuda.empty_cache()
    sys.exit(int(failed))


def _write(path: Path, host: dict[str, Any], figures: list[Figure]) -> None:
    """In one step: who looks meanwhile, or after this program was stopped, finds a whole document."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps({"host": host, "figures": [dataclasses.asdict(figure) for figure in figures]}))
    os.replace(unfinished, path)


if __name__ == "__main__":
    main()
