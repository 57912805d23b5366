"""Parameters of kinds of quantisation, made of the classes of weightlift, or of vLLM's, whose names are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import weightlift.model.parameter
from weightlift.model.linear import LinearMethodBase

FP8 = torch.float8_e4m3fn
Parameters = Mapping[str, torch.nn.Parameter]


class Method(LinearMethodBase):
    """Makes a layer's parameters with `create`, which is called as `create_weights` is; computes nothing with them.

    It is also the config that gives each layer its method.
    """

    online_quantization_config = None  # vLLM asks for it

    def __init__(self, create: Callable[..., Parameters]) -> None:
        self._create = create

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        for name, parameter in self._create(layer, *args, **kwargs).items():
            layer.register_parameter(name, parameter)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> LinearMethodBase:
        return self


def fp8(scale: str, dtype: torch.dtype, *, classes: Any = weightlift.model.parameter, block: int = 128) -> Method:
    """Scales of a "tensor", a "channel", groups of 32 inputs ("mxfp8"), or a "block"."""

    def create(
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **loader: Any,
    ) -> Parameters:
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        both = {"input_dim": 1, "output_dim": 0, **loader}
        weight = classes.ModelWeightParameter(data=torch.empty(rows, columns, dtype=FP8), **both)
        if scale == "tensor":
            data = torch.empty(len(output_partition_sizes), dtype=dtype)
            return {"weight": weight, "scale": classes.PerTensorScaleParameter(data=data, **loader)}
        if scale == "channel":
            data = torch.empty(rows, 1, dtype=dtype)
            return {"weight": weight, "scale": classes.ChannelQuantScaleParameter(data=data, output_dim=0, **loader)}
        if scale == "mxfp8":
            data = torch.empty(rows, columns // 32, dtype=dtype)
            return {"weight": weight, "scale": classes.GroupQuantScaleParameter(data=data, **both)}
        layer.weight_block_size = [block, block]
        data = torch.empty(-(-rows // block), -(-columns // block), dtype=dtype)
        return {"weight": weight, "scale": classes.BlockQuantScaleParameter(data=data, **both)}

    return Method(create)


def gptq(
    bits: int, group_size: int, *, whole_groups: bool = False, classes: Any = weightlift.model.parameter
) -> Method:
    """Packed along the inputs. With `whole_groups` (act order) each rank has the scales of all groups."""
    factor = 32 // bits

    def create(
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **loader: Any,
    ) -> Parameters:
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        weight = torch.empty(columns // factor, rows, dtype=torch.int32)
        groups = {"output_dim": 1, **loader}
        packed = {"output_dim": 1, "packed_factor": factor, **loader}
        parameters = {
            "qweight": classes.PackedvLLMParameter(data=weight, input_dim=0, packed_dim=0, **packed),
            "g_idx": classes.RowvLLMParameter(data=torch.empty(columns, dtype=torch.int32), input_dim=0, **loader),
        }
        if group_size == -1 or whole_groups:
            scales, zeros = scales_and_zeros(1 if group_size == -1 else input_size // group_size, rows, factor)
            parameters["scales"] = classes.ChannelQuantScaleParameter(data=scales, **groups)
            parameters["qzeros"] = classes.PackedColumnParameter(data=zeros, packed_dim=1, **packed)
        else:
            scales, zeros = scales_and_zeros(columns // group_size, rows, factor)
            parameters["scales"] = classes.GroupQuantScaleParameter(data=scales, input_dim=0, **groups)
            parameters["qzeros"] = classes.PackedvLLMParameter(data=zeros, input_dim=0, packed_dim=1, **packed)
        return parameters

    return Method(create)


def awq(bits: int, group_size: int, *, classes: Any = weightlift.model.parameter) -> Method:
    """Packed along the outputs."""
    factor = 32 // bits

    def create(
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **loader: Any,
    ) -> Parameters:
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        packed = {"output_dim": 1, "packed_dim": 1, "packed_factor": factor, **loader}
        weight = torch.empty(columns, rows // factor, dtype=torch.int32)
        qweight = classes.PackedvLLMParameter(data=weight, input_dim=0, **packed)
        scales, zeros = scales_and_zeros(1 if group_size == -1 else columns // group_size, rows, factor)
        if group_size == -1:
            return {
                "qweight": qweight,
                "scales": classes.ChannelQuantScaleParameter(data=scales, output_dim=1, **loader),
                "qzeros": classes.PackedColumnParameter(data=zeros, **packed),
            }
        return {
            "qweight": qweight,
            "scales": classes.GroupQuantScaleParameter(data=scales, output_dim=1, input_dim=0, **loader),
            "qzeros": classes.PackedvLLMParameter(data=zeros, input_dim=0, **packed),
        }

    return Method(create)


def scales_and_zeros(groups: int, rows: int, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(groups, rows, dtype=torch.float16), torch.empty(groups, rows // factor, dtype=torch.int32)
