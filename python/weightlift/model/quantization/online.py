"""Online quantisation: weights of a checkpoint in floating point, quantised while they are loaded.

Results are those of the ops of `weightlift.ops` on this rank's part: scales are not shared among ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ... import ops
from ..experts import FusedMoE
from ..linear import LinearBase, LinearMethodBase, QuantizeMethodBase
from ..parameter import BasevLLMParameter, ModelWeightParameter
from ..postprocess import is_weights_pre_processed
from .base import QuantizationConfig, QuantizedLinearMethod, Target
from .experts import QuantizedFusedMoEMethod
from .online_layouts import Blocks, MadeOfWeight, OnlineLayout, Scheme, WholeWeight


def _scaled_int8_quant(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.scaled_int8_quant(weight)[:2]


_scaled_fp8_quant = functools.partial(ops.scaled_fp8_quant, use_per_token_if_dynamic=True)
_FP8, _FLOAT = torch.float8_e4m3fn, torch.float32

# By the names that vLLM has for them; there, too, "fp8" is fp8_per_tensor.
SCHEMES: dict[str, Scheme] = {
    "fp8": Scheme((None, None), _FP8, _FLOAT, "weight_scale", None),
    "fp8_per_tensor": Scheme((None, None), _FP8, _FLOAT, "weight_scale", None),
    "fp8_per_channel": Scheme((1, None), _FP8, _FLOAT, "weight_scale", _scaled_fp8_quant),
    "fp8_per_block": Scheme((128, 128), _FP8, _FLOAT, "weight_scale_inv", ops.per_block_cast_to_fp8),
    "mxfp8": Scheme((1, 32), _FP8, torch.uint8, "weight_scale", ops.mxfp8_e4m3_quantize),
    "int8_per_channel_weight_only": Scheme((1, None), torch.int8, _FLOAT, "weight_scale", _scaled_int8_quant),
}


class OnlineQuantizationConfig(QuantizationConfig):
    """Quantises all linear layers and experts; the head, the embedding and routers stay as they are.

    Args:
        scheme: a name in `SCHEMES`.
        target: "plain": there is no other.

    Raises:
        ValueError: there is no such scheme, or layout.
    """

    name = "online"

    def __init__(self, scheme: str, *, target: Target = "plain") -> None:
        super().__init__(target=target)
        if scheme not in SCHEMES:
            raise ValueError(f"quantization is {scheme!r}; accepted is {', '.join(sorted(SCHEMES))}")
        self.scheme = SCHEMES[scheme]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, target: Target = "plain") -> OnlineQuantizationConfig:
        return cls(config["scheme"], target=target)

    def linear_method(self, layer: LinearBase, prefix: str) -> LinearMethodBase:
        return OnlineLinearMethod(prefix, self.scheme, target=self.target)

    def experts_method(self, layer: FusedMoE, prefix: str) -> QuantizeMethodBase:
        return OnlineMoEMethod(layer, self.scheme, target=self.target)


class OnlineLinearMethod(QuantizedLinearMethod):
    """Parameters `weight` [N, K], and the scales, `weight_scale` or `weight_scale_inv`, which are made of it.

    Scales are [blocks of N, blocks of K]; of one scale, [1].

    Args:
        scheme: how it is quantised.
        prefix, target: as for QuantizedLinearMethod.

    Raises:
        ValueError: parts of a fused layer, which are quantised one by one, would share a block.
    """

    supports_pre_processed_weights = True

    def __init__(self, prefix: str, scheme: Scheme, *, target: Target = "plain") -> None:
        super().__init__(prefix, target=target)
        self.scheme = scheme

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        scheme, shape = self.scheme, (sum(output_partition_sizes), input_size_per_partition)
        layout: OnlineLayout = WholeWeight(shape, scheme)
        if scheme.quantize is not None:
            problem = _misfit(scheme, output_partition_sizes, input_size_per_partition)
            if problem is not None:
                raise self.error(problem)
            layout = Blocks(shape, scheme)
        weight = ModelWeightParameter(
            data=layout.empty(), memory_layout=layout, input_dim=1, output_dim=0, **extra_weight_attrs
        )
        scale_shape = (1,) if scheme.quantize is None else scheme.scale_shape(shape)
        refused = MadeOfWeight(scale_shape, scheme.scale_dtype)
        scale = BasevLLMParameter(data=refused.empty(), memory_layout=refused, **extra_weight_attrs)
        layout.connect(weight, scale)
        layer.register_parameter("weight", weight)
        layer.register_parameter(scheme.scale_name, scale)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        _finish(layer.weight)

    def dequantize(self, layer: torch.nn.Module) -> torch.Tensor:
        return _dequantize(self.scheme, layer.get_parameter("weight"), layer.get_parameter(self.scheme.scale_name))


class OnlineMoEMethod(QuantizedFusedMoEMethod):
    """Parameters `w13_weight` and `w2_weight` [experts, N, K], and their scales [experts, blocks of N, blocks of K].

    Blocks of gate and up projection are apart; where a weight has one scale, [experts], they share it.

    Args:
        layer: a FusedMoE.
        scheme: how each expert is quantised.
        target: as for QuantizedFusedMoEMethod.

    Raises:
        ValueError: K is no whole blocks.
    """

    supports_pre_processed_weights = True

    def __init__(self, layer: Any, scheme: Scheme, *, target: Target = "plain") -> None:
        super().__init__(layer, target=target)
        self.scheme = scheme

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        scheme = self.scheme
        for name, count, size_n, size_k in self.projections_of(layer, hidden_size, intermediate_size_per_partition):
            shape = (size_n, size_k)
            scale_shape: tuple[int, ...] = ()
            layout: OnlineLayout = WholeWeight(shape, scheme, count=count)
            if scheme.quantize is not None:
                problem = _misfit(scheme, [size_n], size_k)
                if problem is not None:
                    raise self.error(problem)
                layout, scale_shape = Blocks(shape, scheme), scheme.scale_shape(shape)
            self.add(layer, f"{name}_weight", shape, scheme.dtype, layout, count=count, **extra_weight_attrs)
            scale_name = f"{name}_{scheme.scale_name}"
            count = count if scale_shape else 1
            self.add(layer, scale_name, scale_shape, scheme.scale_dtype, count=count, **extra_weight_attrs)
            layout.connect(getattr(layer, f"{name}_weight"), getattr(layer, scale_name))
        self.add_biases(layer, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        _finish(layer.w13_weight)
        _finish(layer.w2_weight)

    def dequantize_projection(self, layer: Any, name: str, position: int, part: int) -> torch.Tensor:
        scale = getattr(layer, f"{name}_{self.scheme.scale_name}")[position]
        if self.scheme.quantize is not None:
            scale = self.memory_of(layer, f"{name}_{self.scheme.scale_name}", position, part)
        return _dequantize(self.scheme, self.memory_of(layer, f"{name}_weight", position, part), scale)


def _misfit(scheme: Scheme, output_partition_sizes: list[int], input_size: int) -> str | None:
    """Why a weight of parts that are quantised one by one can't be cut into such blocks; None: it can."""
    block_n, block_k = scheme.block_of((1, input_size))
    for size in output_partition_sizes[:-1]:
        if size % block_n:
            return f"Weight output_partition_size = {size} is not divisible by weight quantization block_n = {block_n}."
    if scheme.scale_dtype == torch.uint8 and input_size % block_k:
        return (
            f"Weight input_size_per_partition = {input_size} is not divisible by weight quantization block_k = "
            f"{block_k}."
        )
    return None


def _finish(weight: Any) -> None:
    if isinstance(weight.memory_layout, WholeWeight) and not is_weights_pre_processed():
        weight.memory_layout.finish()


def _dequantize(scheme: Scheme, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scheme.quantize is None:
        return weight.float() * scale
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return ops.dequantize_blocks(weight, scale, scheme.block_of(weight.shape))
