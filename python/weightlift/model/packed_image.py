"""A packed image: what each rank has of a model when it is loaded and processed, on disk as it lies in memory.

A folder with the files of `sharded_state`, the config and tokenizer of the model, and IMAGE_FILE, which makes it an
image: the sizes and digests of all files (a manifest, which `weightlift verify --manifest` takes), the fingerprint of
what was packed, and what processing has made of the layers of each rank beyond filling their parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._version import __version__
from ..checkpoint import CheckpointPath, CheckpointSource, locate
from ..entries import CheckpointFiles
from ..errors import CheckpointError, CheckpointNotFoundError, listed
from ..files import DOWNLOAD_AGAIN
from ..manifest import Manifest
from ..safetensors_file import MAX_JSON_BYTES, parse_json
from .model_config import architecture_of
from .parallel import ParallelConfig
from .processed_state import ProcessedState
from .sharded_state import ShardedStateLoader, rank_prefix

if TYPE_CHECKING:
    from .quantization.base import Target

IMAGE_FILE = "weightlift-image.json"

# Of the file, and of what processing makes of layers: raised whenever either is no longer what it was.
FORMAT_VERSION = 1

_SIZES = ("tp_size", "ep_size", "pp_size")
_PACK_ANEW = "pack the model anew with `weightlift pack`"


@dataclass(frozen=True)
class Fingerprint:
    """What was packed. Files of one image have the same; its digest is in the header of each.

    Attributes:
        format_version: FORMAT_VERSION of the weightlift that packed it.
        weightlift_version: of that weightlift; for people.
        source: sha256 of the names, sizes and headers of the checkpoint's files.
        architecture: the first of the config's `architectures`.
        tp_size, ep_size, pp_size: numbers of ranks.
        target: the layout of quantised parameters.
        quantization: how weights in floating point were quantised; None: they were not.
        dtype: of what is not quantised, as torch names it.
    """

    format_version: int
    weightlift_version: str
    source: str
    architecture: str
    tp_size: int
    ep_size: int
    pp_size: int
    target: str
    quantization: str | None
    dtype: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class PackedImage:
    """An image on disk.

    Attributes:
        folder: where it is.
        fingerprint: what was packed.
        manifest: sizes and digests of all files of the folder but IMAGE_FILE.
        states: what processing has made of each rank, by the prefix of its files' names.
    """

    folder: str
    fingerprint: Fingerprint
    manifest: Manifest
    states: dict[str, ProcessedState]

    @classmethod
    def find(cls, source: CheckpointSource) -> PackedImage | None:
        """The image that a source is, or None: its `load_format` is another than "auto", or there is no IMAGE_FILE.

        Raises:
            CheckpointReadError: its file cannot be read.
            CheckpointError: its file is malformed, or of another version.
        """
        if not isinstance(source.path, (str, os.PathLike)) or source.load_format != "auto" or source.allow_patterns:
            return None
        folder = os.path.join(source.path, source.subfolder) if source.subfolder else os.fspath(source.path)
        return cls.read(folder) if os.path.isfile(os.path.join(folder, IMAGE_FILE)) else None

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> PackedImage:
        """Reads IMAGE_FILE without trust. Raises as `find`, and CheckpointNotFoundError where there is none."""
        folder = os.fspath(folder)
        path = os.path.join(folder, IMAGE_FILE)
        manifest = Manifest.read(path)
        with open(path, "rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
        image: Any = parse_json(text, path, "image", ("InvalidImage", "InvalidImage")).get("image")
        try:
            version = image["fingerprint"]["format_version"]
            if version != FORMAT_VERSION:
                raise CheckpointError(
                    f"expected an image of version {FORMAT_VERSION}, which weightlift {__version__} reads, found one "
                    f"of version {reprlib.repr(version)}, packed by weightlift "
                    f"{reprlib.repr(image['fingerprint'].get('weightlift_version'))}; {_PACK_ANEW}",
                    path=path,
                    reason="ImageMismatch",
                )
            fingerprint = Fingerprint(**image["fingerprint"])
            if not all(type(getattr(fingerprint, name)) is int for name in _SIZES):
                raise TypeError("numbers of ranks that are none")
            states = {prefix: ProcessedState.from_json(state) for prefix, state in image["ranks"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"the description of the image is malformed: {error!r}; {_PACK_ANEW}", path=path, reason="InvalidImage"
            ) from None
        return cls(folder, fingerprint, manifest, states)

    def matched(
        self,
        parallel: ParallelConfig,
        *,
        target: Target | None,
        quantization: str | None,
        dtype: torch.dtype | None,
    ) -> tuple[Target, str | None, torch.dtype]:
        """Compares what is asked for with what was packed; None asks for whatever that is.

        Returns:
            target, quantization and dtype of the image.

        Raises:
            CheckpointError: they differ; with all differences.
        """
        packed = self.fingerprint
        wanted: dict[str, object] = {name: getattr(parallel, name) for name in _SIZES}
        wanted |= {"target": target or packed.target, "quantization": quantization or packed.quantization}
        wanted["dtype"] = packed.dtype if dtype is None else name_of(dtype)
        self._require(wanted)
        image_dtype = getattr(torch, packed.dtype)
        return packed.target, packed.quantization, image_dtype  # type: ignore[return-value]  # only we write targets

    def require_architecture(self, architecture: str) -> None:
        """Raises CheckpointError where the image is of another."""
        self._require({"architecture": architecture})

    def source_of(self, parallel: ParallelConfig) -> CheckpointSource:
        """Where the files of a rank are."""
        pattern = f"{rank_prefix(parallel)}-part-*.safetensors"
        return CheckpointSource(self.folder, load_format="sharded_state", allow_patterns=[pattern])

    def require_files(self, files: CheckpointFiles, prefix: str) -> None:
        """Looks whether a rank's files are those that were packed, as far as sizes and headers tell.

        Raises:
            CheckpointNotFoundError: one is missing.
            CheckpointError: one has another size, or is of another image.
        """
        found = {os.path.relpath(shard.path, self.folder): shard for shard in files.shards}
        packed = [name for name in self.manifest.files if name.startswith(f"{prefix}-part-")]
        if missing := [name for name in packed if name not in found]:
            raise CheckpointNotFoundError(
                f"{len(missing)} of the {len(packed)} files of this rank are missing: {listed(missing)}; copy the "
                f"image again, or {_PACK_ANEW}",
                path=self.folder,
                reason="ShardsMissing",
            )
        for name, shard in found.items():
            record = self.manifest.files.get(name)
            if record is None or (shard.metadata or {}).get("fingerprint") != self.fingerprint.digest:
                raise CheckpointError(
                    f"this file is not of the image that {IMAGE_FILE} describes, which was packed from another "
                    f"checkpoint or with other options; {_PACK_ANEW}",
                    path=shard.path,
                    reason="ImageMismatch",
                )
            if shard.size != record.bytes:
                raise CheckpointError(
                    f"expected {record.bytes} bytes, as were packed, found {shard.size}; {DOWNLOAD_AGAIN}",
                    path=shard.path,
                    reason="SizeMismatch",
                )

    def _require(self, wanted: Mapping[str, object]) -> None:
        packed = self.fingerprint
        differences = [
            f"expected {name} {value}, found {getattr(packed, name)}"
            for name, value in wanted.items()
            if value != getattr(packed, name)
        ]
        if differences:
            raise CheckpointError(
                f"this image was packed for something else: {'; '.join(differences)}. Load it with what it was packed "
                f"for, or {_PACK_ANEW}",
                path=os.path.join(self.folder, IMAGE_FILE),
                reason="ImageMismatch",
            )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class PackedImageLoader(ShardedStateLoader):
    """Loads a rank's part of an image: its files from end to end into memory that is laid out as they are."""

    def __init__(self, source: CheckpointSource, *args: Any, **kwargs: Any) -> None:
        super().__init__(source, *args, **kwargs)
        image = PackedImage.find(source)
        if image is None:
            raise CheckpointNotFoundError(
                f"there is no {IMAGE_FILE}; expected the folder of a packed image, which `weightlift pack` makes",
                path=os.fspath(source.path) if isinstance(source.path, (str, os.PathLike)) else None,
                reason="NoImage",
            )
        self.image = image
        self.prefix = rank_prefix(self.parallel)

    def dtype_of_weights(self) -> torch.dtype | None:
        dtype: torch.dtype = getattr(torch, self.image.fingerprint.dtype)
        return dtype

    def check(self) -> None:
        super().check()
        self.image.require_architecture(architecture_of(self.model_config))
        self.image.require_files(self.files, self.prefix)

    def targets(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return self.image.states[self.prefix].place(model, self.files, as_on_disk=True)


def open_image(
    model: nn.Module | Mapping[str, torch.Tensor], path: CheckpointPath
) -> tuple[Mapping[str, torch.Tensor], CheckpointSource] | None:
    """What `fast_load` fills, and from where, if a path is that of an image; None: it is not.

    The rank is that of `ParallelConfig.current()`. Layers of a module have the tensors of the image afterwards;
    those that have the form already stay where they are.

    Raises:
        CheckpointError: the image was packed for other numbers of ranks, or a file is not what it was.
    """
    if isinstance(path, (str, os.PathLike)):
        path = CheckpointSource(path)
    image = PackedImage.find(path) if isinstance(path, CheckpointSource) else None
    if image is None:
        return None
    parallel = ParallelConfig.current()
    image.matched(parallel, target=None, quantization=None, dtype=None)
    rank = image.source_of(parallel)
    files = locate(rank)
    image.require_files(files, rank_prefix(parallel))
    if isinstance(model, nn.Module):
        return image.states[rank_prefix(parallel)].place(model, files, as_on_disk=False), rank
    return model, rank
