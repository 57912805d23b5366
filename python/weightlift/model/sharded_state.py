"""One rank's slices, ready: saved after a load, so that the next one reads them from end to end and cuts nothing.

Files have vLLM's names, `model-rank-R-part-P.safetensors`, or `model-pp-S-tp-R-part-P.safetensors` where there are
several pipeline stages, and are safetensors; tensors have the names of the model's own parameters.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from ..checkpoint import CheckpointSource
from ..errors import CheckpointError, listed
from ..report import LoadReport
from ..safetensors_writer import write_safetensors
from ..source import TORCH_SUFFIXES
from .formats import DefaultModelLoader
from .loader import fast_load
from .parallel import ParallelConfig
from .router import Ties

# What vLLM's example writes.
MAX_FILE_BYTES = 5 << 30

_NOT_COPIED = (".safetensors", ".index.json", ".unfinished", *TORCH_SUFFIXES)
_NUMBERS = [field.name for field in fields(ParallelConfig) if field.type == "int"]


class ShardedStateLoader(DefaultModelLoader):
    """Loads what `save_sharded_state` or vLLM has saved of this rank, straight into the parameters."""

    pre_processed = True  # they were final when they were saved

    def __init__(self, source: CheckpointSource, *args: Any, **kwargs: Any) -> None:
        super().__init__(source, *args, **kwargs)
        pattern = f"{rank_prefix(self.parallel)}-part-*.safetensors"
        self.source = replace(source, load_format="sharded_state", allow_patterns=[pattern])

    def check(self) -> None:
        for shard in self.files.shards:
            saved = {key: value for key, value in (shard.metadata or {}).items() if key in _NUMBERS}
            here = {key: value for key, value in _metadata(self.parallel).items() if key in saved}
            if saved != here:
                raise CheckpointError(
                    f"expected the slices of {_spelled(here)}, found those of {_spelled(saved)}; load with the numbers "
                    "of ranks that they were saved with, or save them anew with `weightlift save-sharded`",
                    path=shard.path,
                    reason="OtherRanks",
                )

    def load_weights(self, model: nn.Module) -> LoadReport:
        # Of tied parameters one name is saved; where several are, they had values of their own.
        ties = Ties(model)
        first_saved: dict[str, str] = {}
        for name in (*ties.first_names.values(), *ties.first_names):
            if name in self.files.tensors and first_saved.setdefault(ties.first_names.get(name, name), name) != name:
                ties.part(name, nn.Parameter(torch.empty_like(ties.parameters[name]), requires_grad=False))
        return fast_load(
            self.targets(model), self.source, strict=self.strict, config=self.load_config, progress=self.progress
        )

    def targets(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Where what was saved goes, by its names: memory of the model."""
        return model.state_dict()  # without keep_vars, tensors have no weight loaders


def save_sharded_state(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    parallel: ParallelConfig,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Saves a loaded model's parameters and persistent buffers, as they are.

    A tensor that has several names, as tied ones have, is saved under that which comes first in the alphabet, as in
    vLLM. Each file gets its name when it is whole.

    Args:
        model: of one rank.
        folder: where the files go; made if it is not there.
        parallel: which rank it is.
        max_file_bytes: a file ends before the tensor with which its data would be larger.

    Returns:
        The paths of the files.

    Raises:
        FileExistsError: the folder has files of that rank.
        ValueError: the rank has no name: tensor and expert parallelism are over different ranks.
    """
    folder = os.fspath(folder)
    require_unsaved(folder, parallel)
    os.makedirs(folder, exist_ok=True)
    return write_rank(folder, without_aliases(model.state_dict()), parallel=parallel, max_file_bytes=max_file_bytes)


def write_rank(
    folder: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    parallel: ParallelConfig,
    max_file_bytes: int,
    metadata: Mapping[str, str] | None = None,
    on_block: Callable[[str, memoryview], None] | None = None,
) -> list[str]:
    """Writes the files of one rank.

    Args:
        folder, parallel, max_file_bytes: as for `save_sharded_state`.
        metadata: more than the files say of their rank.
        on_block: called with the path of a file and every stretch of its bytes, in order.

    Returns:
        The paths of the files.
    """
    parts: list[dict[str, torch.Tensor]] = [{}]
    part_bytes = 0
    for name, tensor in tensors.items():
        if parts[-1] and part_bytes + tensor.nbytes > max_file_bytes:
            parts.append({})
            part_bytes = 0
        parts[-1][name] = tensor
        part_bytes += tensor.nbytes
    paths = []
    for number, part in enumerate(parts):
        path = os.path.join(folder, f"{rank_prefix(parallel)}-part-{number}.safetensors")
        write_safetensors(
            path,
            part,
            {"format": "pt", **_metadata(parallel), **(metadata or {})},
            on_block=None if on_block is None else functools.partial(on_block, path),
        )
        paths.append(path)
    return paths


def require_unsaved(folder: str, parallel: ParallelConfig) -> None:
    """Raises what `save_sharded_state` would raise because of these arguments."""
    existing = glob.glob(os.path.join(glob.escape(folder), f"{rank_prefix(parallel)}-part-*.safetensors"))
    if existing:
        names = listed(os.path.basename(path) for path in existing)
        raise FileExistsError(f"{folder} has slices of that rank: {names}; remove them, or save to another folder")


def rank_prefix(parallel: ParallelConfig) -> str:
    """How the names of a rank's files start."""
    rank, size = (parallel.tp_rank, parallel.tp_size) if parallel.tp_size > 1 else (parallel.ep_rank, parallel.ep_size)
    if parallel.ep_size > 1 and (rank, size) != (parallel.ep_rank, parallel.ep_size):
        raise ValueError(
            f"files of sharded_state are numbered by one rank; expected the ranks of experts to be those of tensor "
            f"parallelism, found {_spelled(_metadata(parallel))}"
        )
    return f"model-pp-{parallel.pp_rank}-tp-{rank}" if parallel.pp_size > 1 else f"model-rank-{rank}"


def _metadata(parallel: ParallelConfig) -> dict[str, str]:
    return {name: str(getattr(parallel, name)) for name in _NUMBERS}


def _spelled(numbers: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in numbers.items())


def without_aliases(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of tensors that are one, that whose name comes first in the alphabet."""
    first: dict[object, str] = {}
    for name, tensor in state.items():
        key = (
            (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        )
        first[key] = min(first.get(key, name), name)
    kept = set(first.values())
    return {name: tensor for name, tensor in state.items() if name in kept}


def all_ranks(tp_size: int, ep_size: int, pp_size: int) -> Iterator[ParallelConfig]:
    """All ranks; those that share experts are those that share layers, as in vLLM."""
    for stage in range(pp_size):
        for rank in range(max(tp_size, ep_size)):
            yield ParallelConfig(
                tp_rank=rank % tp_size,
                tp_size=tp_size,
                ep_rank=rank % ep_size,
                ep_size=ep_size,
                pp_rank=stage,
                pp_size=pp_size,
            )


def copy_others(folder: str, out: str) -> list[str]:
    """Copies what is no weights: the config, the tokenizer. Gives their names."""
    names = sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.is_file() and not entry.name.startswith(".") and not entry.name.lower().endswith(_NOT_COPIED)
    )
    for name in names:
        shutil.copyfile(os.path.join(folder, name), os.path.join(out, name))
    return names
