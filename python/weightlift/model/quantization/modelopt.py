"""ModelOpt's checkpoints: which of its algorithms a layer has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..linear import LinearBase, LinearMethodBase, QuantizeMethodBase, UnquantizedLinearMethod
from ..mapping import WeightsMapper
from ..vocab import ParallelLMHead
from .base import QuantizationConfig, Target, parts_of_experts, read_object
from .fp8 import Fp8LinearMethod, Strategy
from .layer_names import LayerNames, renamed
from .mxfp8 import Mxfp8LinearMethod

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..experts import FusedMoE

# The algorithm of a config whose layers have one each.
_MIXED = "MIXED_PRECISION"

# Of FP8, what has one scale.
_STRATEGIES: dict[str, Strategy] = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel", "FP8_PB_WO": "block"}
_BLOCK_SIZE = (128, 128)

_ALGORITHMS = (*_STRATEGIES, "MXFP8", "NVFP4", "W4A16_NVFP4")


class ModelOptConfig(QuantizationConfig):
    """`quant_method` "modelopt", or ModelOpt's own file, hf_quant_config.json.

    Args:
        algorithm: "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4"; or
            "MIXED_PRECISION".
        quantized_layers: with the last, the algorithm of each layer; others are not quantised.
    """

    name = "modelopt"
    has_cache_scales = True

    def __init__(
        self,
        algorithm: str,
        quantized_layers: Mapping[str, str] | None = None,
        *,
        target: Target = "plain",
        ignored: LayerNames | None = None,
    ) -> None:
        super().__init__(target=target, ignored=ignored)
        self.algorithm = algorithm
        self.quantized_layers = dict(quantized_layers or {})
        for found in {algorithm, *self.quantized_layers.values()} - {_MIXED}:
            if found not in _ALGORITHMS:
                raise ValueError(f"quant_algo {found!r} is not known; known are {', '.join((*_ALGORITHMS, _MIXED))}")
        if algorithm == _MIXED and not self.quantized_layers:
            raise ValueError(f"quant_algo {_MIXED} needs quantized_layers, the algorithm of each layer")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, target: Target = "plain") -> Self:
        # As in hf_quant_config.json; in a config.json the fields have no object around them, and other names.
        fields = read_object(config, "quantization") or config
        if not fields.get("quant_algo"):
            raise ValueError("quant_algo is missing; expected the name of ModelOpt's algorithm")
        layers = read_object(fields, "quantized_layers")
        algorithms = {name: str(read_object(layers, name).get("quant_algo")).upper() for name in layers}
        ignored = LayerNames.of_config(fields, "exclude_modules", "ignore", match="wildcard")
        return cls(str(fields["quant_algo"]).upper(), algorithms, target=target, ignored=ignored)

    def apply_mapper(self, mapper: WeightsMapper | None) -> None:
        super().apply_mapper(mapper)
        if mapper is not None:
            renames = mapper.get_rename_mapper()
            self.quantized_layers = {renamed(name, renames): found for name, found in self.quantized_layers.items()}

    def linear_method(self, layer: LinearBase, prefix: str) -> LinearMethodBase:
        algorithm = self._algorithm_of(self.parts_of(prefix), prefix)
        return UnquantizedLinearMethod() if algorithm is None else self._method_of(algorithm, prefix)

    def lm_head_method(self, layer: ParallelLMHead, prefix: str) -> LinearMethodBase | None:
        algorithm = self._algorithm_of([prefix], prefix)
        return None if algorithm is None else self._method_of(algorithm, prefix)

    def _method_of(self, algorithm: str, prefix: str) -> LinearMethodBase:
        from .fp4 import ModelOptNvFp4Method

        if algorithm == "MXFP8":
            return Mxfp8LinearMethod(prefix, target=self.target)
        strategy = _STRATEGIES.get(algorithm)
        if strategy is None:
            return ModelOptNvFp4Method(prefix, target=self.target, has_input_scale=algorithm == "NVFP4")
        return Fp8LinearMethod(
            prefix,
            strategy=strategy,
            block_size=_BLOCK_SIZE if strategy == "block" else None,
            is_static=algorithm == "FP8",
            is_modelopt=strategy == "block",
            target=self.target,
        )

    def _algorithm_of(self, parts: list[str], prefix: str) -> str | None:
        if self.algorithm != _MIXED:
            return self.algorithm
        if prefix in self.quantized_layers:
            return self.quantized_layers[prefix]
        found = {part: self.quantized_layers.get(part) for part in parts}
        if len(set(found.values())) > 1:
            described = ", ".join(f"{part}: {algorithm or 'none'}" for part, algorithm in found.items())
            raise ValueError(
                f"Mixed quant_algo within fused layer {prefix}. All shards must use the same quantization: {described}"
            )
        return next(iter(found.values()))

    def experts_method(self, layer: FusedMoE, prefix: str) -> QuantizeMethodBase | None:
        algorithm = self._algorithm_of(parts_of_experts(layer, prefix), prefix)
        if algorithm is None:
            return None
        from .experts_fp8 import Fp8MoEMethod
        from .experts_mx import MxFp8MoEMethod, NvFp4MoEMethod

        if algorithm == "MXFP8":
            return MxFp8MoEMethod(layer, target=self.target)
        strategy = _STRATEGIES.get(algorithm)
        if strategy is None:
            return NvFp4MoEMethod(layer, target=self.target, is_modelopt=True, has_input_scale=algorithm == "NVFP4")
        return Fp8MoEMethod(
            layer,
            strategy=strategy,
            target=self.target,
            static_input=algorithm == "FP8",
            block_size=_BLOCK_SIZE if strategy == "block" else None,
            scale_name="weight_scale",
            is_modelopt=True,
        )
