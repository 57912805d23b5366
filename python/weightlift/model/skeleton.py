"""The whole load of a model: a shell is made from its config, filled, put into its final form, and checked."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import torch
from torch import nn

from ..checkpoint import CheckpointSource
from ..config import LoadConfig
from ..source import LoadFormat
from .formats import loader_class
from .model_config import ModelConfig, dtype_of, read_config
from .parallel import ParallelConfig
from .registry import model_class

_setting_default_dtype = threading.RLock()


def load_model(
    path: str | os.PathLike[str] | CheckpointSource,
    *,
    parallel: ParallelConfig | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    load_format: str | None = None,
    strict: bool = True,
    config: LoadConfig | None = None,
    progress: bool = False,
) -> nn.Module:
    """Builds the model that a folder holds, or one rank's part of it, and loads its weights.

    The class comes from the registry (`register_model`), by the architecture that config.json names. Its shell is first
    built on the meta device, so that what cannot be (heads that cannot be dealt to the ranks, sizes that do not divide)
    is an error before anything is allocated; then on `device`, with `dtype` as torch's default. The loader of the
    format fills it. Last comes `process_weights_after_loading`, the function. Since torch's default dtype is that of
    the whole process, loads by several threads take turns.

    Args:
        path: the folder of the model, with its config.json; or a CheckpointSource with such a folder.
        parallel: which part of the model; by default that of `ParallelConfig.current()`.
        dtype: of the parameters; by default what the config says, or else that of most of the checkpoint.
        device: where the model goes.
        load_format: a format that is registered (`register_loader`); by default that of a CheckpointSource, or "auto".
        strict, config, progress: as for `fast_load`.

    Returns:
        The model, in eval mode. Its attribute `load_report` is the LoadReport.

    Raises:
        CheckpointNotFoundError: there is no config.json, or no weights.
        ConfigError: the config cannot be read, its architecture is not registered, or does not go with `parallel`.
        CheckpointMismatchError: as `fast_load`.
        CheckpointError: as `fast_load`.
        ValueError: the format is not registered.

    Example:
        >>> model = load_model(folder, parallel=ParallelConfig(tp_rank=0, tp_size=2))
        >>> print(model.load_report.summary())
    """
    source = path if isinstance(path, CheckpointSource) else CheckpointSource(path)
    parallel = ParallelConfig.current() if parallel is None else parallel
    make_loader = loader_class(load_format or source.load_format)
    if load_format in get_args(LoadFormat):
        source = replace(source, load_format=load_format)  # type: ignore[arg-type]  # as just seen
    model_config = config_of(source)
    loader = make_loader(source, model_config, parallel=parallel, strict=strict, load_config=config, progress=progress)
    dtype = dtype or dtype_of(model_config)
    make_shell(model_config, parallel=parallel, dtype=dtype or torch.get_default_dtype(), device="meta")
    loader.check()
    dtype = dtype or loader.dtype_of_weights() or torch.get_default_dtype()
    with _default_dtype(dtype):
        model = make_shell(model_config, parallel=parallel, dtype=dtype, device=device)
        report = loader.load_weights(model)
        started = time.perf_counter()
        process_weights_after_loading(model, dtype)
    report.seconds["process"] = time.perf_counter() - started
    model.load_report = report  # type: ignore[assignment]  # torch's stubs know tensors and modules alone
    return model.eval()


def config_of(source: CheckpointSource) -> ModelConfig:
    """The config of the model that a folder holds.

    Raises:
        TypeError: the source is no folder.
        CheckpointNotFoundError: there is no config.json.
        ConfigError: it cannot be read, or its weights are quantised.
    """
    if not isinstance(source.path, (str, os.PathLike)):
        raise TypeError(f"expected the folder of a model, which has a config.json, found {type(source.path).__name__}")
    config = read_config(os.path.join(source.path, source.subfolder) if source.subfolder else source.path)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise config.error(
            f"quantization_config: the models here load no quantised weights (quant_method {method!r}); load them with "
            "your engine's own layers and fast_load(model, path)"
        )
    return config


def make_shell(
    config: ModelConfig, *, parallel: ParallelConfig, dtype: torch.dtype, device: str | torch.device
) -> nn.Module:
    """Builds a model, its parameters allocated and not set.

    Raises:
        ConfigError: its architecture is not registered, or it does not go with `parallel`.
    """
    with _default_dtype(dtype), torch.device(device):
        return model_class(config)(config, parallel=parallel)


def process_weights_after_loading(model: nn.Module, dtype: torch.dtype) -> None:
    """Puts loaded weights into the form in which layers use them, in vLLM's order.

    First `quant_method.process_weights_after_loading(layer)` of every layer that has a method; then
    `process_weights_after_loading(dtype)` of modules that have it themselves: attention, which wants the final weights
    of its projections; at last `process_weights_after_loading()` of the model.

    Args:
        model: its parameters final; tied ones are tied.
        dtype: of activations.
    """
    with torch.no_grad():
        for layer in model.modules():
            _call(getattr(layer, "quant_method", None), "process_weights_after_loading", layer)
            # In vLLM's layers parameters know how they are cut, and the method may have replaced them.
            _call(layer, "update_param_tp_status")
        for module in model.modules():
            if module is not model:
                _call(module, "process_weights_after_loading", dtype)
        _call(model, "process_weights_after_loading")


def _call(owner: object, name: str, *args: object) -> None:
    """Calls a method, if the owner has it."""
    method = getattr(owner, name, None)
    if callable(method):
        method(*args)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    with _setting_default_dtype:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
