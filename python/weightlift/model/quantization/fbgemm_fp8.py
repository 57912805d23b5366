"""FP8 as FBGEMM writes it: a scale for each output, and a limit for those of activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..linear import LinearBase
from ..parameter import BasevLLMParameter
from .base import QuantizationConfig, Target
from .fp8 import Fp8LinearMethod
from .layer_names import LayerNames

if TYPE_CHECKING:
    from typing_extensions import Self


class FBGEMMFp8Config(QuantizationConfig):
    """`quant_method` "fbgemm_fp8".

    Args:
        input_scale_ub: no scale of activations is larger.
    """

    name = "fbgemm_fp8"

    def __init__(self, input_scale_ub: float, *, target: Target = "plain", ignored: LayerNames | None = None) -> None:
        super().__init__(target=target, ignored=ignored)
        self.input_scale_ub = input_scale_ub

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, target: Target = "plain") -> Self:
        limit = config.get("activation_scale_ub")
        if not isinstance(limit, (int, float)) or not 0 < limit < float("inf"):
            raise ValueError(f"activation_scale_ub is {limit!r}; expected a number above 0")
        ignored = LayerNames.of_config(config, "modules_to_not_convert", match="path")
        return cls(float(limit), target=target, ignored=ignored)

    def linear_method(self, layer: LinearBase, prefix: str) -> FBGEMMFp8LinearMethod:
        return FBGEMMFp8LinearMethod(prefix, self.input_scale_ub, target=self.target)


class FBGEMMFp8LinearMethod(Fp8LinearMethod):
    """What Fp8LinearMethod has for "channel", and `input_scale_ub` float32 [1], which the config sets."""

    def __init__(self, prefix: str, input_scale_ub: float, *, target: Target) -> None:
        super().__init__(prefix, strategy="channel", target=target)
        self.input_scale_ub = input_scale_ub

    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        super().create_weights(layer, *weight_args, **extra_weight_attrs)
        data = torch.full((1,), self.input_scale_ub, dtype=torch.float32)
        layer.register_parameter("input_scale_ub", BasevLLMParameter(data=data, **extra_weight_attrs))
