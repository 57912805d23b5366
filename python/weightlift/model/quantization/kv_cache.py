"""Scales of the KV cache, of queries and of probabilities: one number each for a whole attention layer."""

from __future__ import annotations

from typing import Any

import torch

from ..linear import QuantizationConfig, QuantizeMethodBase
from ..parameter import BasevLLMParameter, UnfitWeightError, name_in_errors

_NAMES = ("k_scale", "v_scale", "q_scale", "prob_scale")
_UNSET = -1.0


class KVCacheScaleParameter(BasevLLMParameter):
    """One number, float32, without dimensions.

    Args:
        factor: what the checkpoint's is multiplied by.

    Attributes:
        is_default: the number is not one that a checkpoint has given.
    """

    def __init__(self, *, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor
        self.is_default = False

    def load_whole(self, loaded_weight: torch.Tensor) -> None:
        if loaded_weight.numel() != 1:
            raise UnfitWeightError(f"KV-cache scale expects a scalar weight, got shape {tuple(loaded_weight.shape)}")
        self.data.copy_(loaded_weight.reshape(()).float() * self.factor)
        self.is_default = False


class KVCacheScales(torch.nn.Module):
    """The scales of one attention layer: `k_scale`, `v_scale`, `q_scale` and `prob_scale`, if its config has them.

    It is the child `attn` of an attention module: there vLLM has them, and there `mapping.KV_CACHE_SCALES` leads. Who
    keeps keys and values in FP8 divides them by these before, and multiplies after.

    Args:
        quant_config: gives it its method. None, or no method: it has no parameters.
        prefix: its name in the model.
    """

    def __init__(self, quant_config: QuantizationConfig | None, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self.quant_method = None if quant_config is None else quant_config.get_quant_method(self, prefix)
        if self.quant_method is not None:
            self.quant_method.create_weights(self, weight_loader=self.weight_loader)

    def weight_loader(self, param: BasevLLMParameter, loaded_weight: torch.Tensor) -> None:
        """Fills a scale from a tensor of one element. Raises CheckpointMismatchError: it has more."""
        with name_in_errors(self, param):
            param.load_whole(loaded_weight)


class BaseKVCacheMethod(QuantizeMethodBase):
    """Makes the scales of an attention layer, and sets those after loading that the checkpoint does not have.

    Args:
        is_fnuz: the cache is float8_e4m3fnuz, whose numbers are half of those of the same bytes in float8_e4m3fn: the
            checkpoint's scales are doubled.
    """

    supports_pre_processed_weights = True

    def __init__(self, *, is_fnuz: bool = False) -> None:
        self.factor = 2.0 if is_fnuz else 1.0

    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        for name in _NAMES:
            parameter = KVCacheScaleParameter(
                data=torch.tensor(_UNSET, dtype=torch.float32), factor=self.factor, **extra_weight_attrs
            )
            layer.register_parameter(name, parameter)

    def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("scales of the KV cache are for what attends")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Sets what the checkpoint does not have.

        Without one for keys and one for values both are 1. One for keys, as of checkpoints with a `kv_scale`, is that
        of values and of queries, too. That of probabilities is 1.

        Raises:
            ValueError: a scale that is not positive, or one for values without one for keys.
        """
        scales = {name: layer.get_parameter(name) for name in _NAMES}
        loaded = {
            name: float(scale)
            for name, scale in scales.items()
            if float(scale) != _UNSET and not getattr(scale, "is_default", False)
        }
        prefix = getattr(layer, "prefix", "")
        for name, value in loaded.items():
            if not 0.0 < value < float("inf"):
                raise ValueError(f"{prefix}.{name} is {value}; expected a positive number")
        if "v_scale" in loaded and "k_scale" not in loaded:
            raise ValueError(
                f"{prefix}: the checkpoint has v_scale, and no k_scale; expected both, or k_scale for both, or none"
            )
        key = loaded.get("k_scale", 1.0)
        for name, value in {"k_scale": key, "v_scale": key, "q_scale": key, "prob_scale": 1.0}.items():
            if name not in loaded:
                scales[name].data.fill_(value)
                scales[name].is_default = True  # type: ignore[attr-defined]
