"""The loaders that are compared, each as its own documents say for the CPU: a whole checkpoint, and one rank's rows.

A loader is imported in the process that measures it, before the clock starts.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import weightlift
from benchmarks import reference


@dataclass(frozen=True)
class Checkpoint:
    """The same tensors in the same order: safetensors shards with an index, and one file of tensorizer's."""

    folder: Path
    shards: list[Path]
    tensorizer_file: Path

    @property
    def files(self) -> list[str]:
        return [str(path) for path in self.shards]

    @property
    def index(self) -> str:
        return str(self.folder / "model.safetensors.index.json")


@dataclass(frozen=True)
class Loader:
    """One way to load.

    Attributes:
        package: the distribution that it comes with.
        module: what is imported before the clock starts.
        whole: loads everything; what it gives is kept until the clock has stopped.
        slices: fills each tensor with one rank's part of the tensor of that name: given rank, world size, and the
            dimension that is cut.
        is_owned: whether the tensors have memory of their own; else they are pages of the file.
        is_streamer: whether it reads whole files, whatever part of them is wanted.
    """

    package: str
    module: str
    whole: Callable[[Checkpoint], Mapping[str, Tensor]]
    slices: Callable[[Checkpoint, Mapping[str, Tensor], int, int, int], object] | None
    is_owned: bool = True
    is_streamer: bool = False

    @property
    def version(self) -> str:
        """Raises PackageNotFoundError where the loader isn't installed."""
        return importlib.metadata.version(self.package)

    def prepare(self) -> None:
        importlib.import_module(self.module)


def _copy_slice(into: Mapping[str, Tensor], name: str, tensor: Tensor, rank: int, dim: int) -> None:
    if name in into:
        length = into[name].shape[dim]
        into[name].copy_(tensor.narrow(dim, rank * length, length))


def _weightlift_slices(
    checkpoint: Checkpoint, into: Mapping[str, Tensor], rank: int, world_size: int, dim: int
) -> None:
    with weightlift.open_checkpoint(checkpoint.folder) as tensors:
        for name in into:
            _copy_slice(into, name, tensors[name], rank, dim)


def _safetensors_mapped(checkpoint: Checkpoint) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in checkpoint.shards for name, tensor in load_file(path).items()}


def _fastsafetensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    from fastsafetensors import fastsafe_open  # type: ignore[import-not-found,unused-ignore]

    with fastsafe_open(checkpoint.files, nogds=True, device="cpu") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no mapping


def _fastsafetensors_slices(
    checkpoint: Checkpoint, into: Mapping[str, Tensor], rank: int, world_size: int, dim: int
) -> None:
    for name, tensor in _fastsafetensors(checkpoint).items():
        _copy_slice(into, name, tensor, rank, dim)


def _runai(checkpoint: Checkpoint) -> dict[str, Tensor]:
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found,unused-ignore]

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(checkpoint.files)
        return dict(streamer.get_tensors())


def _runai_slices(checkpoint: Checkpoint, into: Mapping[str, Tensor], rank: int, world_size: int, dim: int) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(checkpoint.files, owned=False)  # views of buffers that are used again: each is copied
        for name, tensor in streamer.get_tensors():
            _copy_slice(into, name, tensor, rank, dim)


def _tensorizer(checkpoint: Checkpoint) -> dict[str, Tensor]:
    from tensorizer import TensorDeserializer  # type: ignore[import-not-found,unused-ignore]

    with TensorDeserializer(str(checkpoint.tensorizer_file), device="cpu") as tensors:
        return dict(tensors.items())


def _tensorizer_slices(
    checkpoint: Checkpoint, into: Mapping[str, Tensor], rank: int, world_size: int, dim: int
) -> None:
    from tensorizer import TensorDeserializer

    with TensorDeserializer(str(checkpoint.tensorizer_file), device="cpu", lazy_load=True) as tensors:
        for name in into:
            _copy_slice(into, name, tensors[name], rank, dim)


def _safetensors_streaming(checkpoint: Checkpoint) -> dict[str, Tensor]:
    from safetensors_streaming import load_sharded  # type: ignore[import-not-found,unused-ignore]

    return dict(load_sharded(checkpoint.index, device="cpu"))


def _safetensors_streaming_slices(
    checkpoint: Checkpoint, into: Mapping[str, Tensor], rank: int, world_size: int, dim: int
) -> None:
    from safetensors_streaming import stream_sharded

    for name, tensor in stream_sharded(checkpoint.index, device="cpu"):
        _copy_slice(into, name, tensor, rank, dim)


OURS = "weightlift"
LOADERS: dict[str, Loader] = {
    OURS: Loader("weightlift", "weightlift", lambda c: weightlift.load_file(c.folder), _weightlift_slices),
    "safetensors, mapped": Loader("safetensors", "safetensors.torch", _safetensors_mapped, None, is_owned=False),
    "safetensors": Loader(
        "safetensors",
        "safetensors.torch",
        lambda c: reference.safetensors_owned(c.shards),
        lambda c, into, rank, size, dim: reference.safetensors_slices(c.shards, into, rank, size, dim),
    ),
    "fastsafetensors": Loader(
        "fastsafetensors", "fastsafetensors", _fastsafetensors, _fastsafetensors_slices, is_streamer=True
    ),
    "runai-model-streamer": Loader(
        "runai-model-streamer", "runai_model_streamer", _runai, _runai_slices, is_streamer=True
    ),
    "tensorizer": Loader("tensorizer", "tensorizer", _tensorizer, _tensorizer_slices, is_streamer=True),
    "safetensors-streaming": Loader(
        "safetensors-streaming",
        "safetensors_streaming",
        _safetensors_streaming,
        _safetensors_streaming_slices,
        is_streamer=True,
    ),
}


def write_tensorizer_file(shards: list[Path], path: Path) -> None:
    """Does nothing where there is no tensorizer."""
    with contextlib.suppress(ImportError):
        from safetensors.torch import load_file
        from tensorizer import TensorSerializer

        unfinished = path.with_name(path.name + ".unfinished")
        serializer = TensorSerializer(str(unfinished))
        serializer.write_state_dict({name: tensor for shard in shards for name, tensor in load_file(shard).items()})
        serializer.close()
        unfinished.rename(path)
