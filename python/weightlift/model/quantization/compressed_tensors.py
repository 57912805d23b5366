"""The checkpoints of compressed-tensors (llm-compressor): which of its schemes a layer has.

The format: QuantizationConfig, QuantizationScheme and QuantizationArgs of github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..linear import LinearBase, LinearMethodBase, QuantizeMethodBase, UnquantizedLinearMethod
from ..mapping import WeightsMapper
from ..vocab import ParallelLMHead
from .base import QuantizationConfig, Target, parts_of_experts, read_object
from .fp8 import Fp8LinearMethod, read_block_size
from .int8 import Int8LinearMethod
from .layer_names import LayerNames
from .mxfp8 import Mxfp8LinearMethod

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..experts import FusedMoE


# Of QuantizationArgs, which fields have one type; any may be null.
_KINDS = {"num_bits": int, "group_size": int, "strategy": str}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the layers of one of `config_groups` are quantised.

    Attributes:
        weights, input_activations: QuantizationArgs, as they are in the config.
        format: how weights lie in files: "float-quantized", "int-quantized", "pack-quantized", ...
    """

    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any] | None
    format: str

    @property
    def type(self) -> str:
        return str(self.weights.get("type") or "int")

    @property
    def num_bits(self) -> int:
        return int(self.weights.get("num_bits") or 8)

    @property
    def strategy(self) -> Any:
        """What has one scale: a "tensor", "channel", "group", "block"; or "tensor_group", a group and a tensor."""
        return self.weights.get("strategy")

    @property
    def family(self) -> str | None:
        """The kind of method that there is for it: "fp8", "int8", "packed", "mxfp8", "mxfp4", "nvfp4"; None: none."""
        if self.type == "float" and self.is_symmetric:
            if self.num_bits == 8 and self.strategy in ("tensor", "channel", "block"):
                return "fp8"
            kind = self.num_bits, self.strategy, self.group_size
            return {(8, "group", 32): "mxfp8", (4, "group", 32): "mxfp4", (4, "tensor_group", 16): "nvfp4"}.get(kind)
        if self.type == "int" and self.format == "pack-quantized" and self.strategy in ("channel", "group"):
            return "packed"
        is_int8 = self.type == "int" and self.num_bits == 8 and self.strategy in ("tensor", "channel")
        return "int8" if is_int8 and self.is_symmetric else None

    @property
    def group_size(self) -> int:
        """Inputs that share a scale; -1: all."""
        return int(self.weights.get("group_size") or -1) if "group" in str(self.strategy) else -1

    @property
    def is_symmetric(self) -> bool:
        return bool(self.weights.get("symmetric", True))

    @property
    def block_size(self) -> tuple[int, int] | None:
        return read_block_size(self.weights.get("block_structure")) if self.strategy == "block" else None

    @property
    def is_static(self) -> bool:
        """Whether activations have a scale in the checkpoint."""
        return self.input_activations is not None and not self.input_activations.get("dynamic")

    @property
    def is_input_symmetric(self) -> bool:
        return self.input_activations is None or bool(self.input_activations.get("symmetric", True))

    def __str__(self) -> str:
        symmetry = "" if self.is_symmetric else ", asymmetric"
        group = "" if self.group_size < 0 else f" of {self.group_size}"
        return f"{self.type} of {self.num_bits} bits by {self.strategy}{group}{symmetry}, format {self.format!r}"


class CompressedTensorsConfig(QuantizationConfig):
    """`quant_method` "compressed-tensors".

    Args:
        groups: for each of `config_groups`, what names its layers, and its scheme. A layer belongs to the first that
            names it; if none does, to the first that has the name of its class.
    """

    name = "compressed-tensors"
    has_cache_scales = True

    def __init__(
        self,
        groups: Sequence[tuple[LayerNames, Scheme]],
        *,
        target: Target = "plain",
        ignored: LayerNames | None = None,
    ) -> None:
        super().__init__(target=target, ignored=ignored)
        self.groups = list(groups)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, target: Target = "plain") -> Self:
        for name in ("sparsity_config", "transform_config"):
            section = read_object(config, name)
            if section.get("targets") or section.get("config_groups"):
                raise ValueError(f"{name}: weights that are sparse, or transformed, cannot be loaded")
        groups = []
        config_groups = read_object(config, "config_groups")
        for group_name in config_groups:
            group = read_object(config_groups, group_name)
            try:
                targets = LayerNames.of_config(group, "targets")
                weights = read_object(group, "weights")
                # Attention has no weights of its own; its scales are those of the KV cache.
                if not weights or all(entry.endswith("Attention") for entry in targets):
                    continue
                _check_weights(weights)
                activations = read_object(group, "input_activations") or None
            except ValueError as error:
                raise ValueError(f"config_groups: {group_name}: {error}") from None
            scheme = Scheme(weights, activations, str(group.get("format") or config.get("format") or ""))
            groups.append((targets, scheme))
        _check_cache(read_object(config, "kv_cache_scheme"))
        return cls(groups, target=target, ignored=LayerNames.of_config(config, "ignore"))

    def apply_mapper(self, mapper: WeightsMapper | None) -> None:
        super().apply_mapper(mapper)
        if mapper is not None:
            renames = mapper.get_rename_mapper()
            self.groups = [(names.renamed(renames), scheme) for names, scheme in self.groups]

    def scheme_of(self, parts: Iterable[str], prefix: str, class_name: str) -> Scheme | None:
        """The scheme of a layer; None: it is not quantised.

        Args:
            parts: the names that its parts have in the checkpoint.
            prefix: its name in the model; where a group has it, that counts.
            class_name: of its class.

        Raises:
            ValueError: parts have different schemes.
        """
        scheme = self._scheme_by_name(prefix)
        if scheme is not None:
            return scheme
        by_class = next((scheme for names, scheme in self.groups if _names_class(names, class_name)), None)
        found = {part: self._scheme_by_name(part) or by_class for part in parts}
        schemes = list(found.values())
        if any(other != schemes[0] for other in schemes):
            described = "; ".join(f"{part}: {scheme or 'not quantised'}" for part, scheme in found.items())
            raise ValueError(
                f"Found different quantization schemes for the shards of {prefix}. All shards of fused layers have to "
                f"use the same scheme. {described}"
            )
        return schemes[0]

    def _scheme_by_name(self, name: str) -> Scheme | None:
        return next((scheme for names, scheme in self.groups if name in names), None)

    def linear_method(self, layer: LinearBase, prefix: str) -> LinearMethodBase:
        scheme = self.scheme_of(self.parts_of(prefix), prefix, type(layer).__name__)
        return UnquantizedLinearMethod() if scheme is None else self._method_of(scheme, prefix)

    def lm_head_method(self, layer: ParallelLMHead, prefix: str) -> LinearMethodBase | None:
        scheme = self.scheme_of([prefix], prefix, type(layer).__name__)
        return None if scheme is None else self._method_of(scheme, prefix)

    def _method_of(self, scheme: Scheme, prefix: str) -> LinearMethodBase:
        from .fp4 import CompressedTensorsMxFp4Method, CompressedTensorsNvFp4Method
        from .wna16 import CompressedTensorsWNA16Method

        if scheme.family == "nvfp4":
            has_input_scale = scheme.input_activations is not None
            return CompressedTensorsNvFp4Method(prefix, target=self.target, has_input_scale=has_input_scale)
        if scheme.family == "mxfp4":
            return CompressedTensorsMxFp4Method(prefix, target=self.target)
        if scheme.family == "mxfp8":
            return Mxfp8LinearMethod(prefix, target=self.target)
        if scheme.family == "fp8":
            return Fp8LinearMethod(
                prefix,
                strategy=scheme.strategy,
                block_size=scheme.block_size,
                is_static=scheme.is_static,
                target=self.target,
            )
        if scheme.family == "packed":
            return CompressedTensorsWNA16Method(
                prefix,
                target=self.target,
                num_bits=scheme.num_bits,
                group_size=scheme.group_size,
                symmetric=scheme.is_symmetric,
                actorder=scheme.weights.get("actorder"),
            )
        if scheme.family == "int8":
            return Int8LinearMethod(
                prefix,
                strategy=scheme.strategy,
                is_static=scheme.is_static,
                is_input_symmetric=scheme.is_input_symmetric,
                target=self.target,
            )
        raise ValueError(f"{prefix}: No compressed-tensors compatible scheme was found: {scheme}")

    def experts_method(self, layer: FusedMoE, prefix: str) -> QuantizeMethodBase | None:
        # What a config calls "Linear" has become a part of this layer.
        scheme = self.scheme_of(parts_of_experts(layer, prefix), prefix, "Linear")
        if scheme is None:
            return None
        from .experts_fp8 import Fp8MoEMethod, Int8MoEMethod
        from .experts_mx import MxFp4MoEMethod, MxFp8MoEMethod, NvFp4MoEMethod
        from .experts_packed import PackedMoEMethod

        if scheme.family == "nvfp4":
            return NvFp4MoEMethod(layer, target=self.target, has_input_scale=scheme.input_activations is not None)
        if scheme.family == "mxfp4":
            return MxFp4MoEMethod(layer, target=self.target)
        if scheme.family == "mxfp8":
            return MxFp8MoEMethod(layer, target=self.target)
        if scheme.family == "fp8":
            return Fp8MoEMethod(
                layer,
                strategy=scheme.strategy,
                target=self.target,
                static_input=scheme.is_static,
                block_size=scheme.block_size,
                scale_name="weight_scale",
            )
        if scheme.family == "packed":
            return PackedMoEMethod(
                layer,
                layout="compressed-tensors",
                num_bits=scheme.num_bits,
                group_size=scheme.group_size,
                has_zero_points=not scheme.is_symmetric,
                target=self.target,
            )
        if scheme.family == "int8" and scheme.strategy == "channel":
            return Int8MoEMethod(layer, target=self.target, static_input=scheme.is_static)
        raise ValueError(f"{prefix}: No compressed-tensors compatible scheme was found for experts: {scheme}")


def _check_weights(weights: Mapping[str, Any]) -> None:
    for name, kind in _KINDS.items():
        if not isinstance(weights.get(name), (kind, type(None))):
            raise ValueError(f"{name} is {weights[name]!r}; expected {kind.__name__}")
    if weights.get("strategy") == "block" and read_block_size(weights.get("block_structure")) is None:
        raise ValueError("block_structure is missing, the rows and columns that share a scale")
    if weights.get("actorder") in ("group", "dynamic"):
        raise ValueError(
            f"Compressed-tensors group/dynamic activation ordering (actorder={weights['actorder']!r}) is no longer "
            "supported. Use a checkpoint with static/weight activation ordering or without activation ordering."
        )
    if weights.get("dynamic"):
        raise ValueError("weights are quantised as the model runs; expected them on disk")


def _check_cache(scheme: Mapping[str, Any]) -> None:
    expected = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}
    different = {name: scheme.get(name) for name, value in expected.items() if scheme.get(name, value) != value}
    if different:
        raise ValueError(f"kv_cache_scheme: found {different}; there are scales of the KV cache for {expected} alone")


def _names_class(names: LayerNames, class_name: str) -> bool:
    """Whether an entry is a part of the name of a class, as "Linear" is of those of all linear layers."""
    return any("." not in entry and ":" not in entry and entry.lower() in class_name.lower() for entry in names)
