"""torchao's checkpoints: tensor subclasses, flattened into plain tensors, are put together again as they arrive."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import CheckpointError, listed
from .filters import Filter, first_rule

if TYPE_CHECKING:
    from .entries import CheckpointFiles, Shard, TensorEntry

_OLDEST = "0.15"  # as for vLLM
_NEEDED = f"strategy 'torchao' needs torchao {_OLDEST} or newer"

Unflatten = Callable[[dict[str, torch.Tensor], dict[str, str]], tuple[dict[str, torch.Tensor], Any]]


class Assembler:
    """Takes the plain tensors of a checkpoint, in any order, and gives back what was flattened into them.

    `model.layers.0.mlp.up_proj.weight` lies in files as `model.layers.0.mlp.up_proj._weight_qdata`, `..._scale`, and so
    on, in whichever shards; which those are, and what they make, the metadata of the shards says.

    Attributes:
        entries: the tensors that are to be read, in the order of the files.
    """

    def __init__(self, files: CheckpointFiles, filters: Iterable[Filter | None] = ()) -> None:
        """Checks that every part is there. Filters are asked for the names of flattened tensors too; a tensor of which
        one part is not wanted is left out.

        Raises:
            ImportError: torchao is not installed, or too old.
            CheckpointError: torchao did not write this, or parts are missing.
        """
        self._unflatten = _find_unflatten()
        self._metadata: dict[str, str] = {}  # of the tensors that were flattened
        self._parts: dict[str, list[str]] = {}  # of each, the names in the files
        self._owners: dict[str, str] = {}  # the other way round
        self._arrived: dict[str, dict[str, torch.Tensor]] = {}
        written = [shard for shard in files.shards if "tensor_names" in (shard.metadata or {})]
        if not written:
            paths = listed(shard.path for shard in files.shards)
            raise CheckpointError(
                f"expected metadata of torchao (tensor_names), found none in {paths}; use another strategy",
                reason="InvalidMetadata",
            )
        for shard in written:
            self._read_metadata(shard, shard.metadata or {})
        filters = tuple(filters)
        unwanted = set()
        for name, parts in self._parts.items():
            missing = [part for part in parts if part not in files.tensors]
            if first_rule(filters, name) is not None or any(part in files.skipped for part in missing):
                unwanted.add(name)
            elif missing:
                raise CheckpointError(
                    f"expected its parts {listed(parts)} in the files, found no {listed(missing)}; download it again",
                    path=written[0].path,
                    tensor=name,
                    reason="TensorNotFound",
                )
        self.entries: Sequence[TensorEntry] = [
            entry for name, entry in files.tensors.items() if self._owners.get(name) not in unwanted
        ]

    def _read_metadata(self, shard: Shard, metadata: dict[str, str]) -> None:
        name = None
        try:
            for name in json.loads(metadata["tensor_names"]):
                text = metadata[name]
                description = json.loads(text)
                if description["_type"] == torch.Tensor.__name__:
                    continue
                if self._metadata.setdefault(name, text) != text:
                    raise CheckpointError(
                        "its metadata is another in another shard; pass the files that belong together",
                        path=shard.path,
                        tensor=name,
                        reason="InvalidMetadata",
                    )
                module, _, attribute = name.rpartition(".")
                parts = [f"{module}._{attribute}_{part}" for part in description["_tensor_data_names"]]
                self._parts[name] = parts
                self._owners.update(dict.fromkeys(parts, name))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"expected metadata as torchao writes it, found other ({type(error).__name__}: {error})",
                path=shard.path,
                tensor=name if isinstance(name, str) else None,
                reason="InvalidMetadata",
            ) from error

    def add(self, entry: TensorEntry, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Takes a tensor that has been read. Gives the one that it completes, with its name, or nothing yet.

        Raises:
            CheckpointError: torchao can't make a tensor of the parts.
        """
        name = self._owners.get(entry.name)
        if name is None:
            return [(entry.name, tensor)]
        arrived = self._arrived.setdefault(name, {})
        arrived[entry.name] = tensor
        if len(arrived) < len(self._parts[name]):
            return []
        del self._arrived[name]
        try:
            made, _ = self._unflatten(arrived, {name: self._metadata[name], "tensor_names": json.dumps([name])})
            return [(name, made[name])]
        except Exception as error:  # whatever the constructors of its classes raise
            raise CheckpointError(
                f"torchao can't put it together: {type(error).__name__}: {error}",
                path=entry.shard.path,
                tensor=name,
                reason="InvalidMetadata",
            ) from error


def _find_unflatten() -> Unflatten:
    """torchao's function that makes tensor subclasses of plain tensors, once it is sure to be there."""
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{_NEEDED}, which is not installed: pip install torchao") from None
    if _numbers(version) < _numbers(_OLDEST):
        raise ImportError(f"{_NEEDED}; installed is {version}: pip install --upgrade torchao")
    try:
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    except ImportError as error:
        raise ImportError(f"{_NEEDED}; installed is {version}, which can't be imported: {error}") from error
    unflatten: Unflatten = unflatten_tensor_state_dict
    return unflatten


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]
