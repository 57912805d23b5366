"""Planning the load of a model: its shell is made in memory that costs nothing, and its own loaders are recorded."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from ..checkpoint import CheckpointSource
from ..config import LoadConfig
from ..plan import LoadPlan
from ..reserved import ReservedMemory
from .formats import DefaultModelLoader, loader_class, mapper_of
from .loader import plan_load
from .model_config import dtype_of
from .packed_image import PackedImage
from .parallel import ParallelConfig
from .skeleton import config_of, make_shell

if TYPE_CHECKING:
    from .quantization.base import Target


def plan_model(
    path: str | os.PathLike[str] | CheckpointSource,
    *,
    parallel: ParallelConfig | None = None,
    dtype: torch.dtype | None = None,
    target: Target | None = None,
    quantization: str | None = None,
    strict: bool = True,
    config: LoadConfig | None = None,
    explain: Collection[str] = (),
) -> LoadPlan:
    """Plans what `load_model` would do with these arguments, which it describes, on the CPU.

    The model is built in memory that costs none, so that it may be larger than the machine.

    Args:
        explain: as for `plan_load`.

    Raises:
        ValueError: the format is one whose loads are not planned; or as `plan_load`.
        Whatever `load_model` raises before it reads.
    """
    source = path if isinstance(path, CheckpointSource) else CheckpointSource(path)
    parallel = ParallelConfig.current() if parallel is None else parallel
    if PackedImage.find(source) is not None:
        raise ValueError(f"{os.fspath(source.path)} is a packed image, whose loads are not planned; load it")  # type: ignore[arg-type]
    if loader_class(source.load_format) is not DefaultModelLoader:
        raise ValueError(f"load_format is {source.load_format!r}, whose loads are not planned; load it")
    model_config = config_of(source)
    loader = DefaultModelLoader(source, model_config, parallel=parallel, strict=strict, load_config=config)
    dtype = dtype or dtype_of(model_config) or loader.dtype_of_weights() or torch.get_default_dtype()
    loader.check()
    with ReservedMemory().factories():
        model = make_shell(
            model_config,
            parallel=parallel,
            dtype=dtype,
            device="cpu",
            target=target,
            quantization=quantization,
        )
    return plan_load(
        model,
        source,
        mapper=mapper_of(model),
        strict=strict,
        config=config,
        explain=explain,
    )
