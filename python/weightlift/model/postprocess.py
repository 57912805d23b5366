"""Gate 5, the driver: layers get the form in which they are used, each when its weights are there."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .linear import QuantizeMethodBase

_pre_processed = contextvars.ContextVar("pre_processed", default=False)


def is_weights_pre_processed() -> bool:
    """For quant methods: whether the layer's parameters have been processed already, in the process that saved them.

    `process_weights_after_loading` then makes what the method itself needs, and leaves the parameters as they are.
    """
    return _pre_processed.get()


class PostProcessing:
    """Puts the layers of a model into their final form, in vLLM's order.

    First `quant_method.process_weights_after_loading(layer)` of every layer that has a method, and then the layer's own
    `update_param_tp_status()`: `process_layer`, which may be given to `fast_load` as `on_module_loaded`, so that it
    comes while other layers are still being read. All else waits for the last layer:
    `process_weights_after_loading(dtype)` of modules that have it themselves, as attention, which wants the final
    weights of its projections; and at last `process_weights_after_loading()` of the model.

    Args:
        device: where parameters go for it that are offloaded to the CPU.
        pre_processed: the weights have been processed when they were saved: methods only initialise themselves.

    Attributes:
        seconds: how long it took so far.

    Example:
        >>> processing = PostProcessing()
        >>> weightlift.fast_load(model, folder, on_module_loaded=processing.process_layer)
        >>> processing.finish(model, torch.bfloat16)
    """

    def __init__(self, *, device: str | torch.device = "cpu", pre_processed: bool = False) -> None:
        self.seconds = 0.0
        self._device = torch.device(device)
        self._pre_processed = pre_processed
        self._processed: set[nn.Module] = set()

    def process_layer(self, layer: nn.Module) -> None:
        """Processes one layer; not a second time.

        Raises:
            RuntimeError: its weights are processed, and its method can't take them.
            Whatever its method raises.
        """
        if layer in self._processed:
            return
        method: Any = getattr(layer, "quant_method", None)
        if self._pre_processed:
            _require_support(getattr(layer, "prefix", ""), method)
        with self._at_work():
            if hasattr(method, "process_weights_after_loading"):
                needs_device = getattr(method, "requires_device_loading", True)
                with device_loading_context(layer, self._device) if needs_device else contextlib.nullcontext():
                    method.process_weights_after_loading(layer)
            # In vLLM's layers parameters know how they are cut, and the method may have replaced them.
            _call(layer, "update_param_tp_status")
            release_memory_under_pressure(self._device)
        self._processed.add(layer)

    def finish(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Processes the layers that have not been, and all that waits for the last of them.

        Args:
            model: its parameters final; tied ones are tied.
            dtype: of activations.

        Raises:
            As `process_layer`.
        """
        if self._pre_processed:
            require_pre_processed_support(model)
        for layer in model.modules():
            self.process_layer(layer)
        with self._at_work():
            for module in model.modules():
                if module is not model and hasattr(module, "process_weights_after_loading"):
                    with device_loading_context(module, self._device):
                        _call(module, "process_weights_after_loading", dtype)
            _call(model, "process_weights_after_loading")

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        started = time.perf_counter()
        token = _pre_processed.set(self._pre_processed)
        try:
            with torch.no_grad():
                yield
        finally:
            _pre_processed.reset(token)
            self.seconds += time.perf_counter() - started


def require_pre_processed_support(model: nn.Module) -> None:
    """Raises RuntimeError where a layer's method can't take weights that have been processed."""
    for name, layer in model.named_modules():
        _require_support(name, getattr(layer, "quant_method", None))


def _require_support(name: str, method: object) -> None:
    process = getattr(type(method), "process_weights_after_loading", None)
    if process is None or process is QuantizeMethodBase.process_weights_after_loading:
        return  # there is nothing that could be done twice
    if not getattr(method, "supports_pre_processed_weights", False):
        raise RuntimeError(f"layer {name or '<root>'}: {type(method).__name__} does not support pre-processed weights")


@contextlib.contextmanager
def device_loading_context(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a module's parameters that are offloaded to the CPU are on `device`; afterwards they are there again.

    They get the memory back that they had, with new values; pinned memory where their size has changed. Parameters that
    have been made inside stay where they are.
    """
    if device.type == "cpu":
        yield
        return
    offloaded = {
        name: parameter.data for name, parameter in module.named_parameters() if parameter.device.type == "cpu"
    }
    try:
        for name, memory in offloaded.items():
            module.get_parameter(name).data = memory.to(device)
        yield
    finally:
        parameters = dict(module.named_parameters())
        for name in offloaded.keys() & parameters.keys():
            parameters[name].data = _copied_back(parameters[name].data, offloaded[name])


def _copied_back(values: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    if (values.shape, values.dtype, values.stride()) != (memory.shape, memory.dtype, memory.stride()):
        memory = torch.empty_like(values, device="cpu", pin_memory=torch.cuda.is_available())
    return memory.copy_(values)


def release_memory_under_pressure(device: torch.device) -> None:
    """Gives back what torch's allocator keeps of a GPU's memory and nobody uses, where that is more than what is free.

    Only on GPUs that share the memory of the host, which has none for itself then.
    """
    if device.type != "cuda" or not torch.cuda.get_device_properties(device).is_integrated:
        return
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if unused > torch.cuda.mem_get_info(device)[0]:
        torch.cuda.empty_cache()


def _call(owner: object, name: str, *args: object) -> None:
    """Calls a method, if the owner has it."""
    method = getattr(owner, name, None)
    if callable(method):
        method(*args)
