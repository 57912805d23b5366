"""The model's side of a load: what goes where.

What engines are built of is here by name, and imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .experts import FusedMoE as FusedMoE
    from .formats import register_loader as register_loader
    from .linear import ColumnParallelLinear as ColumnParallelLinear
    from .linear import MergedColumnParallelLinear as MergedColumnParallelLinear
    from .linear import QKVParallelLinear as QKVParallelLinear
    from .linear import ReplicatedLinear as ReplicatedLinear
    from .linear import RowParallelLinear as RowParallelLinear
    from .packing import pack_model as pack_model
    from .parallel import ParallelConfig as ParallelConfig
    from .postprocess import PostProcessing as PostProcessing
    from .registry import register_model as register_model
    from .skeleton import load_model as load_model
    from .vocab import ParallelLMHead as ParallelLMHead
    from .vocab import VocabParallelEmbedding as VocabParallelEmbedding

_HOMES = {
    "ColumnParallelLinear": "linear",
    "FusedMoE": "experts",
    "MergedColumnParallelLinear": "linear",
    "ParallelConfig": "parallel",
    "ParallelLMHead": "vocab",
    "PostProcessing": "postprocess",
    "QKVParallelLinear": "linear",
    "ReplicatedLinear": "linear",
    "RowParallelLinear": "linear",
    "VocabParallelEmbedding": "vocab",
    "load_model": "skeleton",
    "pack_model": "packing",
    "register_loader": "formats",
    "register_model": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
