"""Sizes and digests of a checkpoint's files, written down to be compared with later."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import posixpath
import re
import reprlib
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError, CheckpointNotFoundError
from .files import DOWNLOAD_AGAIN, open_regular, read_at, refused
from .safetensors_file import MAX_JSON_BYTES, parse_json

# The first is the default: what hubs publish of their files, `sha256sum` prints, and processors have instructions for.
ALGORITHMS = ("sha256", "blake2b")

_VERSION = 1
_BLOCK_BYTES = 4 << 20
_MAX_THREADS = 8
_DIGEST = re.compile(r"[0-9a-f]+")
_SECONDS_BETWEEN_UPDATES = 0.1


@dataclass(frozen=True)
class FileDigest:
    """One whole file: `digest` is in hexadecimal digits."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What the files of a checkpoint were when it was written down.

    Of whole files, not of tensors: it covers headers and the index, and other tools can check it.

    Attributes:
        algorithm: one of ALGORITHMS.
        files: by path relative to the checkpoint's folder, with `/`; so that the checkpoint can move.
    """

    algorithm: str
    files: dict[str, FileDigest]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Manifest:
        """Reads a manifest without trust.

        Raises:
            CheckpointNotFoundError: there is no such file.
            CheckpointReadError: it cannot be opened or read.
            CheckpointError: it is not a manifest, or names a file outside the folder.
        """
        path = os.fsdecode(path)
        fd, status = open_regular(path)
        try:
            if status.st_size > MAX_JSON_BYTES:
                raise _invalid(path, f"expected {MAX_JSON_BYTES} bytes at most, found {status.st_size}")
            text = read_at(fd, path, 0, status.st_size)
        finally:
            os.close(fd)
        members = parse_json(text, path, "manifest", ("InvalidManifest", "InvalidManifest"))
        version, algorithm, files = (members.get(key) for key in ("version", "algorithm", "files"))
        if version != _VERSION:
            raise _invalid(path, f"expected a manifest of version {_VERSION}, found {reprlib.repr(version)}")
        if algorithm not in ALGORITHMS:
            raise _invalid(path, f"expected one of {', '.join(ALGORITHMS)}, found {reprlib.repr(algorithm)}")
        if type(files) is not dict:
            raise _invalid(path, f'expected "files" by their paths, found {reprlib.repr(files)}')
        return cls(algorithm, {name: _parse_file(path, name, record, algorithm) for name, record in files.items()})

    def write(self, path: str | os.PathLike[str], *, more: Mapping[str, Any] | None = None) -> None:
        """Writes the manifest, or leaves what is there.

        Args:
            more: further members of the JSON object, which `read` passes over.

        Raises:
            CheckpointReadError: the operating system refused.
        """
        path = os.fsdecode(path)
        document = {
            "version": _VERSION,
            "algorithm": self.algorithm,
            "files": {name: asdict(record) for name, record in self.files.items()},
            **(more or {}),
        }
        unfinished = f"{path}.{os.getpid()}.part"
        try:
            Path(unfinished).write_text(json.dumps(document, indent=2) + "\n")
            os.replace(unfinished, path)
        except OSError as error:
            Path(unfinished).unlink(missing_ok=True)
            raise refused("write", path, error) from error


def _invalid(path: str, problem: str) -> CheckpointError:
    return CheckpointError(problem, path=path, reason="InvalidManifest")


def _parse_file(path: str, name: str, record: Any, algorithm: str) -> FileDigest:
    if (
        posixpath.isabs(name)
        or "\0" in name
        or posixpath.normpath(name) != name
        or name.split("/")[0] in ("", ".", "..")
    ):
        raise _invalid(path, f"expected a path inside the checkpoint's folder, found {reprlib.repr(name)}")
    if type(record) is dict and record.keys() == {"bytes", "digest"}:
        size, digest = record["bytes"], record["digest"]
        length = 2 * hashlib.new(algorithm).digest_size
        if type(size) is int and type(digest) is str and len(digest) == length and _DIGEST.fullmatch(digest):
            return FileDigest(size, digest)
    raise _invalid(path, f"expected bytes and {algorithm} digest of {reprlib.repr(name)}, found {reprlib.repr(record)}")


def digest_files(
    folder: str, names: Collection[str], algorithm: str, on_progress: Callable[[int, int], None] | None = None
) -> tuple[dict[str, FileDigest], list[CheckpointError]]:
    """Reads files whole, several at a time, through the page cache.

    Args:
        folder: where they are.
        names: relative to `folder`.
        algorithm: one of ALGORITHMS.
        on_progress: called by this thread, now and then, with bytes done and bytes in all.

    Returns:
        The digests of `names`, in their order, and an error for each that could not be read.
    """
    digests: dict[str, FileDigest] = {}
    faults: dict[str, CheckpointError] = {}
    sizes = {name: _size(os.path.join(folder, name)) for name in names}
    job = _Job(algorithm)
    num_threads = max(1, min(len(os.sched_getaffinity(0)), _MAX_THREADS, len(names)))
    with concurrent.futures.ThreadPoolExecutor(num_threads, "weightlift-digest") as threads:
        # Large files first, so that none is left to one thread in the end.
        by_size = sorted(sizes, key=lambda name: -sizes[name])
        waiting = {threads.submit(job.digest, os.path.join(folder, name)): name for name in by_size}
        try:
            while waiting:
                done, _ = concurrent.futures.wait(
                    waiting, _SECONDS_BETWEEN_UPDATES, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for future in done:
                    name = waiting.pop(future)
                    try:
                        digests[name] = future.result()
                    except CheckpointError as fault:
                        faults[name] = fault
                if on_progress is not None:
                    on_progress(job.done_bytes, sum(sizes.values()))
        finally:
            job.cancelled = True
    return {name: digests[name] for name in names if name in digests}, [
        faults[name] for name in names if name in faults
    ]


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0  # opening it says why


class _Job:
    """What the threads share."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm = algorithm
        self.cancelled = False
        self.done_bytes = 0
        self._lock = threading.Lock()

    def digest(self, path: str) -> FileDigest:
        fd, _ = open_regular(path)
        state = hashlib.new(self.algorithm)
        block = memoryview(bytearray(_BLOCK_BYTES))
        size = 0
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while not self.cancelled:
                try:
                    num_bytes = os.readv(fd, [block])
                except OSError as error:
                    raise refused("read", path, error) from error
                if not num_bytes:
                    break
                state.update(block[:num_bytes])
                size += num_bytes
                with self._lock:
                    self.done_bytes += num_bytes
        finally:
            os.close(fd)
        return FileDigest(size, state.hexdigest())


def compare(
    manifest: Manifest,
    folder: str,
    names: Collection[str],
    on_progress: Callable[[int, int], None] | None = None,
) -> list[CheckpointError]:
    """Compares files with a manifest. A file whose size differs is not read.

    Args:
        manifest: of them.
        folder: where they are.
        names: relative to `folder`.
        on_progress: as for `digest_files`.

    Returns:
        An error for each file that is not as it was: `FileMissing`, `NotInManifest`, `SizeMismatch`, `DigestMismatch`,
        or why it cannot be read.
    """
    faults: list[CheckpointError] = []
    to_read = []
    for name in names:
        path = os.path.join(folder, name)
        expected = manifest.files.get(name)
        if expected is None:
            problem = "the manifest does not have it; it was added since, or the manifest is of another checkpoint"
            faults.append(CheckpointError(problem, path=path, reason="NotInManifest"))
        elif not os.path.exists(path):
            problem = f"the manifest has it, there is no such file; {DOWNLOAD_AGAIN}"
            faults.append(CheckpointNotFoundError(problem, path=path, reason="FileMissing"))
        elif (size := _size(path)) != expected.bytes:
            problem = f"expected {expected.bytes} bytes as in the manifest, found {size}; {DOWNLOAD_AGAIN}"
            faults.append(CheckpointError(problem, path=path, reason="SizeMismatch"))
        else:
            to_read.append(name)
    digests, unreadable = digest_files(folder, to_read, manifest.algorithm, on_progress)
    for name, found in digests.items():
        expected = manifest.files[name]
        if found != expected:
            problem = (
                f"expected {manifest.algorithm} {expected.digest} as in the manifest, found {found.digest}; "
                f"its data have changed, {DOWNLOAD_AGAIN}"
            )
            faults.append(CheckpointError(problem, path=os.path.join(folder, name), reason="DigestMismatch"))
    return faults + unreadable
