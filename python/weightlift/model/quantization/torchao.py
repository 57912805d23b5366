"""torchao's checkpoints: weights whose data and scales are tensors of their own, as its safetensors files have them.

torchao itself is not needed: `weight` is on disk as `_weight_qdata`, `_weight_scale` and `_weight_zero_point`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from ..mapping import WeightsMapper
from .base import QuantizationConfig, Target, read_object
from .fp8 import Fp8LinearMethod
from .int8 import Int8LinearMethod
from .layer_names import LayerNames, renamed

if TYPE_CHECKING:
    from typing_extensions import Self

_DEFAULT = "_default"
_PARTS = WeightsMapper(
    orig_to_new_suffix={
        "._weight_qdata": ".weight",
        "._weight_scale": ".weight_scale",
        "._weight_zero_point": ".weight_zero_point",
    }
)
# By torchao's config class, and whether weights are FP8. Those for activations have the same weights.
_IS_FP8 = {
    "Float8WeightOnlyConfig": True,
    "Float8DynamicActivationFloat8WeightConfig": True,
    "Int8WeightOnlyConfig": False,
    "Int8DynamicActivationInt8WeightConfig": False,
}


class TorchAOConfig(QuantizationConfig):
    """`quant_method` "torchao": FP8 and INT8 with a scale for each output.

    Args:
        quant_types: the config of layers by their name, or a regular expression after `re:`; of all others by
            "_default". None: not quantised.
    """

    name = "torchao"

    def __init__(
        self,
        quant_types: Mapping[str, Mapping[str, Any] | None],
        *,
        target: Target = "plain",
        ignored: LayerNames | None = None,
    ) -> None:
        super().__init__(target=target, ignored=ignored)
        self.quant_types = dict(quant_types)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, target: Target = "plain") -> Self:
        quant_type = read_object(read_object(config, "quant_type"), "default")
        if not isinstance(quant_type.get("_type"), str):
            found = config.get("quant_type")
            raise ValueError(f"quant_type is {found!r}; expected an object 'default' with torchao's config")
        quant_types: dict[str, Mapping[str, Any] | None] = {_DEFAULT: quant_type}
        if quant_type["_type"] in ("FqnToConfig", "ModuleFqnToConfig"):
            data = read_object(quant_type, "_data")
            layers = read_object(data, "fqn_to_config") or read_object(data, "module_fqn_to_config")
            quant_types = {name: read_object(layers, name) or None for name in layers}
        ignored = LayerNames.of_config(config, "modules_to_not_convert", match="path")
        return cls(quant_types, target=target, ignored=ignored)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        return super().get_checkpoint_weight_mapper() | _PARTS

    def apply_mapper(self, mapper: WeightsMapper | None) -> None:
        super().apply_mapper(mapper)
        if mapper is not None:
            renames = mapper.get_rename_mapper()
            self.quant_types = {renamed(name, renames): found for name, found in self.quant_types.items()}

    def linear_method(self, layer: LinearBase, prefix: str) -> LinearMethodBase:
        found = {part: self._quant_type_of(part) for part in self.parts_of(prefix)}
        quant_types = list(found.values())
        if any(other != quant_types[0] for other in quant_types):
            raise ValueError(
                f"Found different quantization schemes for the shards of {prefix}. All shards of fused layers have to "
                f"use the same scheme. {found}"
            )
        if quant_types[0] is None:
            return UnquantizedLinearMethod()
        return self._method_of(quant_types[0], prefix)

    def _quant_type_of(self, name: str) -> Mapping[str, Any] | None:
        names = LayerNames(entry for entry in self.quant_types if entry != _DEFAULT)
        return self.quant_types.get(names.first_match(name) or _DEFAULT)

    def _method_of(self, quant_type: Mapping[str, Any], prefix: str) -> LinearMethodBase:
        kind, data = str(quant_type.get("_type")), read_object(quant_type, "_data")
        if kind not in _IS_FP8:
            raise ValueError(f"{prefix}: torchao's {kind} is not known; known are {', '.join(_IS_FP8)}")
        granularity = data.get("granularity")
        # One for activations may stand before it.
        if isinstance(granularity, (list, tuple)) and granularity:
            granularity = granularity[-1]
        unit = granularity.get("_type") if isinstance(granularity, Mapping) else "PerRow"
        if unit != "PerRow" or data.get("group_size"):
            raise ValueError(
                f"{prefix}: {kind} with granularity {unit}, group_size {data.get('group_size')}; expected PerRow, "
                "a scale for each output"
            )
        if _IS_FP8[kind]:
            return Fp8LinearMethod(prefix, strategy="channel", target=self.target)
        return Int8LinearMethod(prefix, strategy="channel", has_weight_zero_point=True, target=self.target)
