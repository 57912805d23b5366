"""MXFP8: FP8 weights (e4m3), 32 inputs of which share a power of two as their scale. The OCP's MX formats, v1.0."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..parameter import GroupQuantScaleParameter
from .arrival import MarlinScales, MemoryLayout
from .base import QuantizedLinearMethod, Target
from .fp8 import decode_marlin_fp8, fp8_weight
from .fp8_scales import doubled_scales, exponents

GROUP_SIZE = 32


class Mxfp8LinearMethod(QuantizedLinearMethod):
    """`weight` float8_e4m3fn [N, K], and `weight_scale` uint8 [N, K / 32], exponents (e8m0).

    With target "fnuz" the weight is float8_e4m3fnuz, and exponents are one more. With "marlin" the weight is int32 in
    tiles of 8-bit Marlin, and the scales are float8_e8m0fnu [K / 32, N], as `ops.mxfp8_marlin_process_scales` has them.
    """

    targets: ClassVar[tuple[Target, ...]] = ("plain", "fnuz", "marlin")

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
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        if columns % GROUP_SIZE:
            raise self.error(f"MXFP8 requires {GROUP_SIZE} inputs to a scale; this rank has {columns} inputs")
        weight = fp8_weight(rows, columns, self.target, group_size=GROUP_SIZE, **extra_weight_attrs)
        layer.register_parameter("weight", weight)
        shape = (rows, columns // GROUP_SIZE)
        layout: MemoryLayout = exponents(shape)
        if self.target == "marlin":
            layout = MarlinScales(
                size_n=rows,
                size_k=columns,
                group_size=GROUP_SIZE,
                dtype=torch.float8_e8m0fnu,
                is_transposed=True,
                is_interleaved=True,
            )
        elif self.target == "fnuz":
            layout = doubled_scales(shape, torch.uint8)
        scale = GroupQuantScaleParameter(
            data=layout.empty(), output_dim=0, input_dim=1, memory_layout=layout, **extra_weight_attrs
        )
        layer.register_parameter("weight_scale", scale)

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight, scale = layer.weight, layer.weight_scale
        if self.target == "marlin":
            values, powers = decode_marlin_fp8(weight), scale.memory_layout.decode(scale.data).T
        else:
            values, powers = weight.float(), scale.data
        scales = powers.contiguous().view(torch.float8_e8m0fnu).float()
        dequantized: torch.Tensor = values * scales.repeat_interleave(GROUP_SIZE, 1)
        return dequantized
