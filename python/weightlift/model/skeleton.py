"""The whole load of a model: a shell is made from its config, filled, put into its final form, and checked."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import torch
from torch import nn

from ..checkpoint import CheckpointSource
from ..config import LoadConfig
from ..source import LoadFormat
from .formats import loader_class, mapper_of
from .model_config import ModelConfig, dtype_of, read_config
from .packed_image import PackedImage
from .parallel import ParallelConfig
from .postprocess import PostProcessing, require_pre_processed_support
from .registry import model_class

if TYPE_CHECKING:
    from .quantization.base import QuantizationConfig, Target

_setting_default_dtype = threading.RLock()


def load_model(
    path: str | os.PathLike[str] | CheckpointSource,
    *,
    parallel: ParallelConfig | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    target: Target | None = None,
    quantization: str | None = None,
    load_format: str | None = None,
    strict: bool = True,
    config: LoadConfig | None = None,
    progress: bool = False,
) -> nn.Module:
    """Builds the model that a folder holds, or one rank's part of it, and loads its weights.

    The class comes from the registry (`register_model`), by the architecture that config.json names. Its shell is first
    built on the meta device, so that what cannot be (heads that cannot be dealt to the ranks, sizes that do not divide,
    layers that cannot be quantised so) is an error before anything is allocated; then on `device`, with `dtype` as
    torch's default. The loader of the format fills it, and each layer gets its final form as soon as its weights are
    there: see `PostProcessing`. Since torch's default dtype is that of the whole process, loads by several threads take
    turns.

    Args:
        path: the folder of the model, with its config.json; or a CheckpointSource with such a folder.
        parallel: which part of the model; by default that of `ParallelConfig.current()`.
        dtype: of the parameters that are not quantised; by default what the config says, or else that of most of the
            checkpoint.
        device: where the model goes.
        target: the layout of quantised parameters; by default that of a packed image, or "plain", as on disk.
        quantization: how weights that are in floating point are quantised while they are loaded: a name that
            `quantization.online` knows; by default not.
        load_format: a format that is registered (`register_loader`); by default that of a CheckpointSource, or "auto".
        strict, config, progress: as for `fast_load`.

    Returns:
        The model, in eval mode. Its attribute `load_report` is the LoadReport; of its `seconds`, "process" are those in
        which layers got their final form.

    Raises:
        CheckpointNotFoundError: there is no config.json, or no weights.
        ConfigError: the config cannot be read, its architecture or its kind of quantisation is not known, or it does
            not go with `parallel`, `target` or `quantization`.
        CheckpointMismatchError: as `fast_load`.
        CheckpointError: as `fast_load`.
        ValueError: the format is not registered; a layer can't be quantised so.

    Example:
        >>> model = load_model(folder, parallel=ParallelConfig(tp_rank=0, tp_size=2))
        >>> print(model.load_report.summary())
    """
    source = path if isinstance(path, CheckpointSource) else CheckpointSource(path)
    parallel = ParallelConfig.current() if parallel is None else parallel
    image = PackedImage.find(source) if load_format in (None, "auto", "packed") else None
    if image is not None:
        target, quantization, dtype = image.matched(parallel, target=target, quantization=quantization, dtype=dtype)
        load_format = "packed"
    make_loader = loader_class(load_format or source.load_format)
    if load_format in get_args(LoadFormat):
        source = replace(source, load_format=load_format)  # type: ignore[arg-type]  # as just seen
    model_config = config_of(source)
    processing = PostProcessing(device=device, pre_processed=make_loader.pre_processed)
    loader = make_loader(
        source,
        model_config,
        parallel=parallel,
        strict=strict,
        load_config=config,
        progress=progress,
        on_module_loaded=processing.process_layer,
    )
    dtype = dtype or dtype_of(model_config)
    make = functools.partial(make_shell, model_config, parallel=parallel, target=target, quantization=quantization)
    shell = make(dtype=dtype or torch.get_default_dtype(), device="meta")
    if loader.pre_processed:
        require_pre_processed_support(shell)
    loader.check()
    dtype = dtype or loader.dtype_of_weights() or torch.get_default_dtype()
    with _default_dtype(dtype):
        model = make(dtype=dtype, device=device)
        report = loader.load_weights(model)
        processing.finish(model, dtype)
    report.seconds["process"] = processing.seconds
    model.load_report = report  # type: ignore[assignment]  # torch's stubs know tensors and modules alone
    return model.eval()


def config_of(source: CheckpointSource) -> ModelConfig:
    """The config of the model that a folder holds.

    Raises:
        TypeError: the source is no folder.
        CheckpointNotFoundError: there is no config.json.
        ConfigError: it cannot be read.
    """
    if not isinstance(source.path, (str, os.PathLike)):
        raise TypeError(f"expected the folder of a model, which has a config.json, found {type(source.path).__name__}")
    return read_config(os.path.join(source.path, source.subfolder) if source.subfolder else source.path)


def make_shell(
    config: ModelConfig,
    *,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    target: Target | None = None,
    quantization: str | None = None,
) -> nn.Module:
    """Builds a model, its parameters allocated and not set. Arguments as for `load_model`.

    Raises:
        ConfigError: its architecture or its kind of quantisation is not known, or it does not go with the arguments.
        ValueError: a layer can't be quantised so.
    """
    make_model = model_class(config)
    quant_config = _quantization_of(config, target, quantization)
    if quant_config is not None:
        quant_config.apply_mapper(mapper_of(make_model))
    with _default_dtype(dtype), torch.device(device):
        return make_model(config, parallel=parallel, quant_config=quant_config)


def _quantization_of(config: ModelConfig, target: Target | None, quantization: str | None) -> QuantizationConfig | None:
    from .quantization.base import read_quantization

    target = target or "plain"
    quant_config = read_quantization(config, target=target)
    if quantization is None:
        if quant_config is None and target != "plain":
            raise config.error(f"the weights are not quantised: there is no layout {target!r} for them")
        return quant_config
    if quant_config is not None:
        raise config.error(
            f"the checkpoint is quantised ({quant_config.name}); quantization {quantization!r} is for weights in "
            "floating point: leave it out, or load the checkpoint that this one was made of"
        )
    from .quantization.online import OnlineQuantizationConfig

    return OnlineQuantizationConfig(quantization, target=target)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    with _setting_default_dtype:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
