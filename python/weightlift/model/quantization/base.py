"""What all kinds of quantisation share: which method a layer gets, and what a method of a linear layer is."""

from __future__ import annotations

import abc
import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F

from ...errors import printable
from ..experts import FusedMoE
from ..linear import LinearBase, LinearMethodBase, QuantizeMethodBase, UnquantizedLinearMethod
from ..mapping import ACTIVATION_ORDER, KV_CACHE_SCALES, WeightsMapper
from ..model_config import ModelConfig
from ..vocab import ParallelLMHead
from .kv_cache import BaseKVCacheMethod, KVCacheScales
from .layer_names import LayerNames

if TYPE_CHECKING:
    from typing_extensions import Self

# In which layout parameters are: as on disk, in Marlin's tiles, or with FP8 in the form of AMD's MI300.
Target = Literal["plain", "marlin", "fnuz"]

# What a scale of a part holds that was not loaded, as in vLLM.
UNSET = torch.finfo(torch.float32).min


class QuantizationConfig(abc.ABC):
    """What a checkpoint's `quantization_config` says of each layer; with vLLM's names.

    Args:
        target: the layout that parameters are made in.
        ignored: layers that are not quantised.

    Attributes:
        name: the `quant_method` of the config.
        has_cache_scales: whether attention layers have scales of an FP8 cache.
        packed_modules_mapping: of a layer that is fused in the model, by the last part of its name, the last parts of
            the names that its parts have in the checkpoint.
    """

    name: ClassVar[str]
    has_cache_scales: ClassVar[bool] = False

    # Suffixes of tensors that the checkpoint may have beyond what the model takes.
    _ignore_unexpected_suffixes: tuple[str, ...] = (
        ".q_scale",
        ".k_scale",
        ".v_scale",
        ".q_zero_point",
        ".k_zero_point",
        ".v_zero_point",
    )

    def __init__(self, *, target: Target = "plain", ignored: LayerNames | None = None) -> None:
        if target not in get_args(Target):
            raise ValueError(f"target is {target!r}; accepted is {', '.join(get_args(Target))}")
        self.target = target
        self.ignored = LayerNames() if ignored is None else ignored
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Mapping[str, Any], *, target: Target = "plain") -> Self:
        """Reads a `quantization_config`. Raises ValueError: it says what this kind cannot be, or lacks something."""

    @abc.abstractmethod
    def linear_method(self, layer: LinearBase, prefix: str) -> LinearMethodBase:
        """The method of a linear layer that is not ignored. Raises ValueError, with the layer's name: there is none."""

    def experts_method(self, layer: FusedMoE, prefix: str) -> QuantizeMethodBase | None:
        """The method of experts that are not ignored; None: they are not quantised.

        Raises:
            ValueError: there is no method for them, with the layer's name.
        """
        raise ValueError(f"{prefix}: {self.name} has no method for experts")

    def lm_head_method(self, layer: ParallelLMHead, prefix: str) -> LinearMethodBase | None:
        """The method of the head; None, and so in most checkpoints: it is not quantised."""
        return None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of the layer with that name. None: layers of its kind are not quantised, or this one isn't.

        Raises:
            ValueError: it is quantised in a way that there is no method for, or its parts are not all quantised.
        """
        if isinstance(layer, KVCacheScales):
            return BaseKVCacheMethod(is_fnuz=self.target == "fnuz") if self.has_cache_scales else None
        if isinstance(layer, LinearBase):
            if self.is_ignored(self.parts_of(prefix), prefix):
                return UnquantizedLinearMethod()
            return self.linear_method(layer, prefix)
        if isinstance(layer, ParallelLMHead):
            return None if self.is_ignored([prefix], prefix) else self.lm_head_method(layer, prefix)
        if isinstance(layer, FusedMoE):
            if self.is_ignored(parts_of_experts(layer, prefix), prefix):
                return None
            return self.experts_method(layer, prefix)
        return None

    def is_ignored(self, parts: Iterable[str], prefix: str) -> bool:
        """Whether a layer is not quantised, by its name or by those of its parts.

        Raises:
            ValueError: some parts are not, and others are.
        """
        if prefix in self.ignored:
            return True
        is_ignored = {part: part in self.ignored for part in parts}
        if len(set(is_ignored.values())) > 1:
            quantized = ", ".join(part for part, ignored in is_ignored.items() if not ignored)
            raise ValueError(
                f"Detected some but not all shards of {prefix} are quantized. All shards of fused layers to have the "
                f"same precision. By the config's list of ignored layers only these are quantised: {quantized}"
            )
        return any(is_ignored.values())

    def parts_of(self, prefix: str) -> list[str]:
        """The names that the parts of a layer have in the checkpoint, as the rename-only mapper leaves them."""
        parent, dot, name = prefix.rpartition(".")
        return [f"{parent}{dot}{part}" for part in self.packed_modules_mapping.get(name, [name])]

    def apply_mapper(self, mapper: WeightsMapper | None) -> None:
        """Brings the names in the config to those of a model, and learns which layers it has fused.

        Args:
            mapper: the model's `hf_to_weightlift_mapper`: its rules that rename are for the names, those that stack
                say what is fused.
        """
        if mapper is None:
            return
        self.ignored = self.ignored.renamed(mapper.get_rename_mapper())
        for part, (fused, _) in mapper.orig_to_new_stacked.items():
            parts = self.packed_modules_mapping.setdefault(_last_part(fused), [])
            if _last_part(part) not in parts:
                parts.append(_last_part(part))

    def unmatched_ignore_names(self, modules: Iterable[str] = ()) -> list[str]:
        """Entries of the list of ignored layers that name no layer of the model, and none of these modules.

        Args:
            modules: others that there are, such as those of the checkpoint, in the model's terms.
        """
        return self.ignored.unmatched(modules)

    def get_cache_scale_mapper(self) -> WeightsMapper:
        """From the names of the scales of the KV cache to those of KVCacheScales."""
        return KV_CACHE_SCALES

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Drops what checkpoints have and no method takes."""
        return ACTIVATION_ORDER


class QuantizedLinearMethod(LinearMethodBase):
    """How one linear layer is quantised. Made for the layer, before it has parameters.

    Its parameters are in their final layout from the start; loading brings what is on disk into it. `apply` is the
    plain product with the dequantised weight: right for each layout, on each device, and slow. Activations are not
    quantised in it.

    Args:
        prefix: the name of the layer, for errors.
        target: the layout of its parameters.

    Attributes:
        targets: the layouts that there are for this method.

    Raises:
        ValueError: there is no such layout for it.
    """

    targets: ClassVar[tuple[Target, ...]] = ("plain",)

    def __init__(self, prefix: str, *, target: Target = "plain") -> None:
        if target not in self.targets:
            raise ValueError(
                f"{prefix}: {type(self).__name__} has no layout for target {target!r}; it has {', '.join(self.targets)}"
            )
        self.prefix = prefix
        self.target = target

    @abc.abstractmethod
    def dequantize(self, layer: torch.nn.Module) -> torch.Tensor:
        """The weight that this rank's parameters stand for, [outputs, inputs], floating point."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.dequantize(layer).to(x.dtype), bias)

    def check_loaded(self, name: str, scales: torch.Tensor) -> None:
        """Raises ValueError: parts whose scale is still `UNSET`, or is no number that a scale can be."""
        missing = [str(part) for part, scale in enumerate(scales.tolist()) if scale == UNSET]
        if missing:
            raise self.error(f"{name}: the checkpoint has no scale for part {', '.join(missing)} of {len(scales)}")
        wrong = [scale for scale in scales.tolist() if not 0 <= scale < float("inf")]
        if wrong:
            raise self.error(f"{name}: a scale is {wrong[0]}; it must be finite and not negative")

    def error(self, problem: str) -> ValueError:
        """The error to raise for what this layer cannot be."""
        return ValueError(f"{self.prefix}: {problem}")


def read_object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field of a config that is an object; an empty one where it is not there. Raises ValueError: it is none."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; expected an object")
    return value or {}


def parts_of_experts(layer: FusedMoE, prefix: str) -> list[str]:
    """The names that the layers of all experts have in the checkpoint."""
    names = [name for name in layer.ckpt_names if name is not None]
    return [f"{prefix}.{expert}.{name}" for expert in range(layer.num_experts) for name in names]


# By quant_method: the class, or where to import it from.
_configs: dict[str, type[QuantizationConfig] | str] = {
    "awq": "awq:AWQConfig",
    "compressed-tensors": "compressed_tensors:CompressedTensorsConfig",
    "fbgemm_fp8": "fbgemm_fp8:FBGEMMFp8Config",
    "fp8": "fp8:Fp8Config",
    "gptq": "gptq:GPTQConfig",
    "modelopt": "modelopt:ModelOptConfig",
    "torchao": "torchao:TorchAOConfig",
}


def register_quantization_config(
    name: str,
) -> Callable[[type[QuantizationConfig]], type[QuantizationConfig]]:
    """Says which class reads the `quantization_config`s of that `quant_method`; one that is known is replaced.

    Example:
        >>> @register_quantization_config("my_quant")
        ... class MyConfig(QuantizationConfig): ...
    """

    def register(cls: type[QuantizationConfig]) -> type[QuantizationConfig]:
        _configs[name] = cls
        return cls

    return register


def registered_quantization_configs() -> list[str]:
    """The `quant_method`s that are known, sorted."""
    return sorted(_configs)


def read_quantization(config: ModelConfig, *, target: Target = "plain") -> QuantizationConfig | None:
    """How the weights of a model's checkpoint are quantised.

    Args:
        config: its `quantization_config`, or, where it has none, the hf_quant_config.json of ModelOpt beside it.
        target: the layout that parameters are to have.

    Returns:
        None: they are not.

    Raises:
        ConfigError: the kind of quantisation is not known, or not complete, or has no such layout.
    """
    fields = getattr(config, "quantization_config", None) or _modelopt_file(config)
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        raise config.error(f"quantization_config is {fields!r}; expected an object")
    method = _method_of(fields)
    cls = _configs.get(method)
    if cls is None:
        raise config.error(
            f"quantization_config: quant_method {printable(method)!r} is not known; known are "
            f"{', '.join(registered_quantization_configs())}"
        )
    if isinstance(cls, str):
        module, _, name = cls.partition(":")
        cls = _configs[method] = getattr(importlib.import_module(f".{module}", __package__), name)
    try:
        return cls.from_config(fields, target=target)
    except ValueError as error:
        raise config.error(f"quantization_config: {error}") from error


def _method_of(fields: Mapping[str, Any]) -> str:
    method = str(fields.get("quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")
    # ModelOpt's own file says who has written it.
    producer = fields.get("producer")
    if not method and isinstance(producer, Mapping):
        method = str(producer.get("name"))
    return method


def _modelopt_file(config: ModelConfig) -> Mapping[str, Any] | None:
    path = os.path.join(os.path.dirname(config._path or ""), "hf_quant_config.json")
    if config._path is None or not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            fields = json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        raise config.error(f"expected a JSON object in {path}: {error}") from error
    if not isinstance(fields, dict):
        raise config.error(f"expected a JSON object in {path}, found {type(fields).__name__}")
    return fields


def _last_part(name: str) -> str:
    return name.strip(".").rpartition(".")[2]
