"""Making a packed image: a model is loaded rank by rank, and written as it lies in memory."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections import Counter, defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._version import __version__
from ..checkpoint import CheckpointSource, locate
from ..config import LoadConfig
from ..entries import CheckpointFiles
from ..errors import CheckpointError, CheckpointReadError
from ..files import refused
from ..manifest import ALGORITHMS, FileDigest, Manifest, compare, digest_files
from ..progress import ProgressBar
from ..report import format_bytes
from .formats import loader_class
from .model_config import architecture_of, dtype_of
from .packed_image import FORMAT_VERSION, IMAGE_FILE, Fingerprint, PackedImage, name_of
from .parallel import ParallelConfig
from .postprocess import require_pre_processed_support
from .processed_state import ProcessedState
from .sharded_state import MAX_FILE_BYTES, all_ranks, copy_others, rank_prefix, without_aliases, write_rank
from .skeleton import config_of, load_model, make_shell

if TYPE_CHECKING:
    from .quantization.base import Target

_ALGORITHM = ALGORITHMS[0]


def pack_model(
    path: str | os.PathLike[str] | CheckpointSource,
    out: str | os.PathLike[str],
    *,
    tp_size: int = 1,
    ep_size: int = 1,
    pp_size: int = 1,
    target: Target = "plain",
    quantization: str | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    verify: bool = True,
    config: LoadConfig | None = None,
    progress: bool = False,
) -> PackedImage:
    """Loads a model rank by rank, as `load_model` does on the CPU, and writes what each rank holds as a packed image.

    `load_model(out)` then reads a rank's files from end to end, and processes nothing. The folder gets its name when
    all of it is written, on the disk and, with `verify`, read back: until then there is no image.

    Args:
        path: the folder of the model, with its config.json; or a CheckpointSource with such a folder.
        out: the folder to make. An empty one may be there.
        tp_size, ep_size, pp_size: numbers of ranks, as in ParallelConfig; `ep_size` is 1 or that of `tp_size`.
        target, quantization, dtype, config: as for `load_model`.
        max_file_bytes: a file ends before the tensor with which its data would be larger.
        verify: whether files are read back from the disk, and their digests compared with those of what was written.
        progress: shows bars on stderr.

    Raises:
        FileExistsError: there is something at `out`.
        CheckpointReadError: there is no room on the disk, or the operating system refused to write.
        CheckpointError: what was read back is not what was written.
        RuntimeError: a layer's method has no support for weights that are processed already.
        ValueError: numbers of ranks for which files of a rank have no name; the source is an image itself.
        Whatever `load_model` raises.

    Example:
        >>> pack_model("Qwen2-7B/", "Qwen2-7B-tp2/", tp_size=2)
        >>> model = load_model("Qwen2-7B-tp2/", parallel=ParallelConfig(tp_rank=0, tp_size=2))
    """
    source = path if isinstance(path, CheckpointSource) else CheckpointSource(path)
    out = os.path.abspath(os.fspath(out))
    if os.path.lexists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise FileExistsError(f"{out} is there already; remove it, or name another folder")
    model_config = config_of(source)
    folder = os.path.join(os.fspath(source.path), source.subfolder or "")  # type: ignore[arg-type]  # config_of wants one
    if PackedImage.find(source) is not None:
        raise ValueError(f"{folder} is a packed image; pack the model that it was made of")
    loader = loader_class(source.load_format)(source, model_config, parallel=ParallelConfig(), load_config=config)
    dtype = dtype or dtype_of(model_config) or loader.dtype_of_weights() or torch.get_default_dtype()
    fingerprint = Fingerprint(
        format_version=FORMAT_VERSION,
        weightlift_version=__version__,
        source=_identity(locate(source)),
        architecture=architecture_of(model_config),
        tp_size=tp_size,
        ep_size=ep_size,
        pp_size=pp_size,
        target=target,
        quantization=quantization,
        dtype=name_of(dtype),
    )

    def make_meta_shell(parallel: ParallelConfig) -> nn.Module:
        return make_shell(
            model_config, parallel=parallel, dtype=dtype, device="meta", target=target, quantization=quantization
        )

    ranks = list(all_ranks(tp_size, ep_size, pp_size))
    num_bytes = 0
    for parallel in ranks:  # what cannot be is told before anything is read
        rank_prefix(parallel)
        shell = make_meta_shell(parallel)
        require_pre_processed_support(shell)
        num_bytes += sum(tensor.nbytes for tensor in without_aliases(shell.state_dict()).values())
    _require_room(out, num_bytes)

    digests: dict[str, FileDigest] = {}
    states: dict[str, Any] = {}
    unfinished = f"{out}.{os.getpid()}.unfinished"
    try:
        os.makedirs(unfinished)
        for number, parallel in enumerate(ranks, start=1):
            model = load_model(
                source,
                parallel=parallel,
                dtype=dtype,
                target=target,
                quantization=quantization,
                config=config,
                progress=progress,
            )
            state, tensors = ProcessedState.of(model, make_meta_shell(parallel))
            with ProgressBar(enabled=progress, description=f"Packing rank {number} of {len(ranks)}") as bar:
                written = _Digests(bar, sum(tensor.nbytes for tensor in tensors.values()))
                write_rank(
                    unfinished,
                    tensors,
                    parallel=parallel,
                    max_file_bytes=max_file_bytes,
                    metadata={"fingerprint": fingerprint.digest},
                    on_block=written.add,
                )
            digests |= written.digests()
            states[rank_prefix(parallel)] = state.to_json()
            del model, tensors  # before the next rank's are made
        others, faults = digest_files(unfinished, copy_others(folder, unfinished), _ALGORITHM)
        manifest = Manifest(_ALGORITHM, digests | others)
        if verify and not faults:
            faults = _read_back(manifest, unfinished, progress=progress)
        if faults:
            raise faults[0]
        description = {"fingerprint": asdict(fingerprint), "ranks": states}
        manifest.write(os.path.join(unfinished, IMAGE_FILE), more={"image": description})
        for name in (IMAGE_FILE, *others, ""):
            _sync(os.path.join(unfinished, name))
        os.rename(unfinished, out)
        _sync(os.path.dirname(out))
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise FileExistsError(f"{out} was made meanwhile; remove it, or name another folder") from error
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise refused("write", out, error) from error
        raise
    return PackedImage.read(out)


class _Digests:
    """Digests of files that are being written, and the bar that shows how far they are."""

    def __init__(self, bar: ProgressBar, total_bytes: int) -> None:
        self._bar = bar
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._sizes: Counter[str] = Counter()
        self._hashes: defaultdict[str, Any] = defaultdict(lambda: hashlib.new(_ALGORITHM))

    def add(self, path: str, block: memoryview) -> None:
        self._hashes[path].update(block)
        self._sizes[path] += len(block)
        self._done_bytes += len(block)
        self._bar.update_to(self._done_bytes, max(self._done_bytes, self._total_bytes))  # headers are not in the total

    def digests(self) -> dict[str, FileDigest]:
        """By the names of the files."""
        return {
            os.path.basename(path): FileDigest(self._sizes[path], state.hexdigest())
            for path, state in self._hashes.items()
        }


def _identity(files: CheckpointFiles) -> str:
    """sha256 of what names, sizes and headers tell of the files of a checkpoint."""
    state = hashlib.sha256()
    for shard in files.shards:
        tensors = [(entry.name, str(entry.dtype), entry.shape, entry.offset, entry.nbytes) for entry in shard.tensors]
        state.update(repr((os.path.basename(shard.path), shard.size, tensors)).encode())
    return state.hexdigest()


def _require_room(out: str, num_bytes: int) -> None:
    folder = os.path.dirname(out)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise CheckpointReadError(
            f"expected room for {format_bytes(num_bytes)} there, found {format_bytes(free)}; make room, or name a "
            "folder on another disk",
            path=out,
            reason="NoRoom",
            cause=error,
        )


def _read_back(manifest: Manifest, folder: str, *, progress: bool) -> list[CheckpointError]:
    """Compares the files on the disk, and not what the page cache has of them, with their digests."""
    for name in manifest.files:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    with ProgressBar(enabled=progress, description="Checking files") as bar:
        return compare(manifest, folder, manifest.files, bar.update_to)


def _sync(path: str) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
