"""INT8 weights with a scale for each tensor or output, for activations that are INT8 too (W8A8)."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ... import ops
from ..parameter import ChannelQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
from .arrival import Converted
from .base import UNSET, QuantizedLinearMethod, Target


class Int8LinearMethod(QuantizedLinearMethod):
    """`weight` int8 [N, K], and its scales, all as on disk:

    - `weight_scale` float32, by strategy [parts] or [N, 1];
    - `weight_zero_point` int8 [N, 1], where the checkpoint has one; it is subtracted before scaling;
    - `input_scale` float32 [parts], of static activations, and `input_zero_point` int32 [parts], where these are
      asymmetric.

    Parts of a fused layer have one input, and after loading one scale and zero point for it, which hold the range of
    all.

    Args:
        strategy: what has one scale.
        is_static: activations have a scale in the checkpoint.
        is_input_symmetric: they have no zero point.
        has_weight_zero_point: weights have one.
    """

    supports_pre_processed_weights = True  # done again, it changes nothing

    def __init__(
        self,
        prefix: str,
        *,
        strategy: Literal["tensor", "channel"],
        is_static: bool = False,
        is_input_symmetric: bool = True,
        has_weight_zero_point: bool = False,
        target: Target = "plain",
    ) -> None:
        super().__init__(prefix, target=target)
        self.strategy = strategy
        self.is_static = is_static
        self.is_input_symmetric = is_input_symmetric
        self.has_weight_zero_point = has_weight_zero_point

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
        rows, parts = sum(output_partition_sizes), len(output_partition_sizes)
        layer.logical_widths = list(output_partition_sizes)  # type: ignore[assignment]

        def per_channel(dtype: torch.dtype) -> ChannelQuantScaleParameter:
            return ChannelQuantScaleParameter(
                data=torch.empty(rows, 1, dtype=dtype), output_dim=0, **extra_weight_attrs
            )

        def per_part(data: torch.Tensor, **attrs: Any) -> PerTensorScaleParameter:
            return PerTensorScaleParameter(data=data, **attrs, **extra_weight_attrs)

        unset = torch.full((parts,), UNSET, dtype=torch.float32)
        data = torch.empty(rows, input_size_per_partition, dtype=torch.int8)
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, **extra_weight_attrs)
        layer.register_parameter("weight", weight)
        scale = per_channel(torch.float32) if self.strategy == "channel" else per_part(unset)
        layer.register_parameter("weight_scale", scale)
        if self.has_weight_zero_point:
            layer.register_parameter("weight_zero_point", per_channel(torch.int8))
        if self.is_static:
            layer.register_parameter("input_scale", per_part(unset.clone()))
            if not self.is_input_symmetric:
                layout = Converted((parts,), torch.int32, torch.Tensor.int)  # int8 on disk
                layer.register_parameter("input_zero_point", per_part(layout.empty(), memory_layout=layout))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Gives the parts one input scale. Raises ValueError: a part's scale was not loaded."""
        if self.strategy == "tensor":
            self.check_loaded("weight_scale", layer.weight_scale)
        if not self.is_static:
            return
        scale = layer.input_scale.data
        self.check_loaded("input_scale", scale)
        if self.is_input_symmetric:
            scale.fill_(scale.max())
            return
        zero_point = layer.input_zero_point.data
        if bool((scale == scale[0]).all() and (zero_point == zero_point[0]).all()):
            return
        # The range that holds the ranges of all parts, in 255 steps.
        largest = (scale * (127 - zero_point)).max()
        smallest = (scale * (-128 - zero_point)).min()
        scale.fill_((largest - smallest) / 255)
        zero_point.fill_((-128 - smallest / scale[0]).round().to(torch.int32))

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight, scale = layer.weight.float(), layer.weight_scale.data
        if self.has_weight_zero_point:
            weight = weight - layer.weight_zero_point.float()
        if self.strategy == "tensor":
            scale = ops.convert_to_channelwise(scale, layer.logical_widths)
        dequantized: torch.Tensor = weight * scale
        return dequantized
