"""Fuzzes what Python parses: headers of safetensors, and files of torch.save.

    python tests/fuzz/fuzz_headers.py [--seconds 60] [--target safetensors|torch] [--keep]

A file is either refused by a CheckpointError that names it, or read as the format's own library reads it: no other
exception, no hang, no other value. What is run is guided by coverage: a mutant that takes a new path through the parser
is mutated further. Findings are written to the committed corpus, which tests/test_fuzz_corpus.py replays; --keep writes
the inputs with new paths there too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import safetensors
import torch

from weightlift.entries import Shard
from weightlift.errors import CheckpointError
from weightlift.safetensors_file import read_shard, shard_of_bytes
from weightlift.torch_file import read_torch_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import hostile  # beside the tests

CORPUS = Path(__file__).with_name("corpus")
_MAX_BYTES = 1 << 16
_HANG_SECONDS = 20
_MAX_MESSAGE = 2000
_NUMBERS = (0, 1, 2, 7, 8, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 53) + 1, (1 << 63) - 1, 1 << 64)


class Finding(Exception):
    """A file for which the parser did not keep its promise."""


# ---- promises


def check_safetensors(data: bytes, path: Path) -> None:
    """Raises Finding unless the file, and the same bytes in memory, are refused alike, or read as safetensors does."""
    path.write_bytes(data)
    shard = _parsed(read_shard, path, str(path))
    in_memory = _parsed(shard_of_bytes, data, "<bytes>")
    if (shard is None) != (in_memory is None):
        raise Finding("a file is refused, and the same bytes in memory are not, or the other way around")
    if shard is None or in_memory is None:
        return
    found = {entry.name: entry for entry in shard.tensors}
    if [entry.name for entry in in_memory.tensors] != list(found):
        raise Finding("a file and the same bytes in memory have different tensors")
    try:
        expected = dict(safetensors.deserialize(data))
    except safetensors.SafetensorError as error:
        raise Finding(f"safetensors refuses it: {error}") from error
    if found.keys() != expected.keys():
        raise Finding(f"safetensors finds {sorted(expected)}, weightlift {sorted(found)}")
    for name, info in expected.items():
        entry = found[name]
        if data[entry.offset : entry.offset + entry.nbytes] != bytes(info["data"]):
            raise Finding(f"{name}: other bytes than safetensors has")
        is_packed = entry.dtype == torch.float4_e2m1fn_x2
        shape = (*entry.shape[:-1], entry.shape[-1] * 2) if is_packed else entry.shape
        if list(shape) != list(info["shape"]):
            raise Finding(f"{name}: shape {entry.shape}, of safetensors {info['shape']}")


def check_torch(data: bytes, path: Path) -> None:
    """Raises Finding unless the file is refused, or read as torch.load reads it, where that reads it."""
    path.write_bytes(data)
    shard = _parsed(read_torch_shard, path, str(path))
    if shard is None:
        return
    for entry in shard.tensors:
        if entry.offset < 0 or entry.nbytes < 0 or entry.offset + entry.nbytes > len(data):
            raise Finding(f"{entry.name}: bytes [{entry.offset}, +{entry.nbytes}) of a file of {len(data)}")
    try:
        expected = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch minds more, as checksums, and says it in many ways
        return
    if {entry.name for entry in shard.tensors} != set(expected):
        raise Finding(f"torch finds {sorted(expected)}, weightlift {sorted(entry.name for entry in shard.tensors)}")
    for entry in shard.tensors:
        tensor = expected[entry.name]
        if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
            raise Finding(f"{entry.name}: {entry.dtype} {entry.shape}, of torch {tensor.dtype} {tuple(tensor.shape)}")
        if not entry.nbytes:
            continue
        flat = torch.frombuffer(bytearray(data[entry.offset : entry.offset + entry.nbytes]), dtype=entry.dtype)
        strides = entry.strides if entry.strides is not None else torch.empty(entry.shape, device="meta").stride()
        if not _same_bytes(flat.as_strided(entry.shape, strides), tensor):
            raise Finding(f"{entry.name}: other values than torch reads")


def _parsed(read: Callable[[Any], Shard], source: Any, name: str) -> Shard | None:
    """The shard; None where it is refused as it should be."""
    try:
        return read(source)
    except CheckpointError as error:
        message = str(error)
        if name not in message or not error.reason:
            raise Finding(f"the error names no file, or no reason: {message!r}") from error
        if len(message) > _MAX_MESSAGE:
            raise Finding(f"an error of {len(message)} characters") from error
        return None


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)

    return torch.equal(as_bytes(a), as_bytes(b))


# ---- inputs


def safetensors_seeds() -> Iterator[bytes]:
    yield from (data for data in hostile.ACCEPTED.values() if len(data) <= _MAX_BYTES)
    for cases in (hostile.REFUSED, hostile.STRICTER):
        yield from (data for data, _, _ in cases.values() if len(data) <= _MAX_BYTES)


def torch_seeds() -> Iterator[bytes]:
    base = torch.arange(12, dtype=torch.float32)
    contents: list[Any] = [
        {"a": base, "b": base.view(3, 4).t(), "c": base[2:5]},
        {"e": torch.zeros(0, 3), "h": torch.ones(2, dtype=torch.float8_e4m3fn), "s": torch.tensor(1.5)},
        {"state_dict": {"w": torch.nn.Parameter(base)}},
        {"n": None, "x": [1, 2]},
    ]
    for content in contents:
        for use_zip in (True, False):
            buffer = io.BytesIO()
            torch.save(content, buffer, _use_new_zipfile_serialization=use_zip)
            yield buffer.getvalue()
    yield pickle.dumps({"w": 1})


def mutate_bytes(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """A few changes, blind to what the bytes mean."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(7)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at % len(out)] = rng.choice(b'\0\1\x7f\x80\xff{}[]",:0-9eE.\\')
        elif kind == 2:
            del out[at : at + rng.choice((1, 1, 2, 8, 64))]
        elif kind == 3:
            out[at:at] = out[(start := rng.randrange(len(out) + 1)) : start + rng.choice((1, 4, 16, 64))]
        elif kind == 4:
            width = rng.choice((1, 2, 4, 8))
            number = (rng.choice(_NUMBERS) + rng.randrange(-1, 2)) % (1 << 8 * width)
            out[at : at + width] = number.to_bytes(width, "little")
        elif kind == 5:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            out[at : at + rng.randrange(64)] = other[start : start + rng.randrange(64)]
        else:
            out[at:at] = str(rng.choice(_NUMBERS)).encode()
    return bytes(out[:_MAX_BYTES])


def mutate_safetensors(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Mostly changes the JSON text and keeps the length before it true."""
    size = int.from_bytes(data[:8], "little")
    if rng.random() < 0.2 or len(data) < 8 or size > len(data):
        return mutate_bytes(data, rng, others)
    header, rest = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.15:
        rest = mutate_bytes(rest, rng, others)
    else:
        header = mutate_bytes(header, rng, [other[8:] for other in others])
    return len(header).to_bytes(8, "little") + header + rest


def mutate_torch(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Mostly changes one member of the archive and zips it again, so that it is found and its checksum is right."""
    if rng.random() < 0.4 or not data.startswith(b"PK"):
        return mutate_bytes(data, rng, others)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # mutated before; zipfile fails in many ways
        return mutate_bytes(data, rng, others)
    if not members:
        return mutate_bytes(data, rng, others)
    chosen = rng.randrange(len(members)) if rng.random() < 0.3 else 0  # the first one is the pickle
    buffer = io.BytesIO()
    with contextlib.suppress(UserWarning, ValueError), zipfile.ZipFile(buffer, "w") as archive:
        for number, (name, content) in enumerate(members):
            archive.writestr(name, mutate_bytes(content, rng, others) if number == chosen else content)
    return buffer.getvalue()[:_MAX_BYTES]


# ---- the loop


@dataclass(frozen=True)
class Target:
    check: Callable[[bytes, Path], None]
    seeds: Callable[[], Iterator[bytes]]
    mutate: Callable[[bytes, random.Random, list[bytes]], bytes]
    modules: tuple[str, ...]  # whose paths guide


TARGETS = {
    "safetensors": Target(check_safetensors, safetensors_seeds, mutate_safetensors, ("safetensors_file.py",)),
    "torch": Target(check_torch, torch_seeds, mutate_torch, ("torch_file.py", "torch_pickle.py")),
}


def corpus_of(target: str) -> list[Path]:
    """The committed inputs."""
    return sorted((CORPUS / target).iterdir())


def run(target: Target, data: bytes, path: Path) -> None:
    """Checks one input. Raises Finding for whatever else is raised too, and where it takes too long."""

    def on_alarm(_: int, __: FrameType | None) -> None:
        raise Finding(f"not done after {_HANG_SECONDS} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(_HANG_SECONDS)
    try:
        target.check(data, path)
    except Finding:
        raise
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {error}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Paths:
    """Pairs of lines that came one after the other in some modules, and about how often, in all runs of the block."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules
        self._counts: Counter[tuple[str, int, int]] = Counter()
        self.seen: set[tuple[tuple[str, int, int], int]] = set()

    def __enter__(self) -> Paths:
        self._counts.clear()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self.seen.update((pair, count.bit_length()) for pair, count in self._counts.items())

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if os.path.basename(frame.f_code.co_filename) not in self._modules:
            return None
        name, last = frame.f_code.co_name, 0

        def on_line(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            nonlocal last
            if event == "line":
                self._counts[name, last, frame.f_lineno] += 1
                last = frame.f_lineno
            return on_line

        return on_line


def fuzz(name: str, *, seconds: float, seed: int, keep: bool, folder: Path) -> int:
    """Runs mutants of seeds and corpus for a while; returns how many findings were written to the corpus."""
    target, rng = TARGETS[name], random.Random(seed)
    pool: list[bytes] = [*target.seeds(), *(file.read_bytes() for file in corpus_of(name))]
    paths = Paths(target.modules)
    findings: set[str] = set()
    mutants = (target.mutate(rng.choice(pool), rng, pool) for _ in itertools.count())
    count, known, num_seeds, deadline = 0, 0, len(pool), time.monotonic() + seconds
    for data in itertools.chain(list(pool), mutants):
        if count >= num_seeds and time.monotonic() > deadline:
            break
        count += 1
        try:
            with paths:
                run(target, data, folder / "fuzzed")
        except Finding as finding:
            cause = finding.__cause__ or finding
            place = traceback.extract_tb(cause.__traceback__)[-1]
            kind = f"{type(cause).__name__} at {os.path.basename(place.filename)}:{place.lineno}"
            if kind not in findings:
                findings.add(kind)
                file = _write(name, "crash", data)
                print(f"{name}: {kind}: {finding}\n  {file}", flush=True)
        if len(paths.seen) > known:
            if count > num_seeds:
                pool.append(data)
                if keep:
                    _write(name, "path", data)
            known = len(paths.seen)
    print(f"{name}: {count} inputs in {seconds:.0f} s, {known} paths, {len(findings)} findings", flush=True)
    return len(findings)


def _write(target: str, kind: str, data: bytes) -> Path:
    file = CORPUS / target / f"{kind}-{hashlib.sha1(data).hexdigest()[:12]}"
    file.write_bytes(data)
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="of the random choices")
    parser.add_argument("--keep", action="store_true", help="add inputs with new paths to the committed corpus")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        return sum(
            fuzz(name, seconds=options.seconds, seed=options.seed, keep=options.keep, folder=Path(folder))
            for name in options.target or TARGETS
        )


if __name__ == "__main__":
    sys.exit(min(main(), 1))
