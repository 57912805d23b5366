"""How the experts of a layer are held and applied: the interface of quantisation, and floating point."""

from __future__ import annotations

import abc
import enum
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .linear import QuantizeMethodBase
from .parallel import ParallelConfig


class FusedMoeWeightScaleSupported(enum.Enum):
    """What a scale is of. The attribute `quant_method` of a parameter has the value of one."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"


class FusedMoEMethodBase(QuantizeMethodBase):
    """How the experts of one layer are held and applied. A method is made before the layer has parameters.

    Until then it may set the layer's `intermediate_size_per_partition` and `tp_shard_with_padding`; see ExpertBlocks.

    Attributes:
        weight_block_size: rows and columns of the blocks that have a scale in the checkpoint.
        weight_scale_refine: how often each of these is repeated, along rows and columns.
        use_global_sf: parameters named `input_scale` are of the experts of all ranks, by their global numbers.
    """

    weight_block_size: tuple[int, int] | None = None
    weight_scale_refine: tuple[int, int] | None = None
    use_global_sf: bool = False

    @abc.abstractmethod
    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Gives the layer its parameters, `w13_*` and `w2_*`, by `register_parameter`.

        Each has `extra_weight_attrs` as attributes, and may have

        - `quant_method`, as a scale or zero point: see FusedMoeWeightScaleSupported;
        - `is_transposed`: an expert is [in, out] in the checkpoint, as GPTQ and AWQ pack it, and not [out, in];
        - `memory_layout`, a quantization.arrival.MemoryLayout, where it is not laid out as the checkpoint: that of one
          projection of an expert, as this rank holds it. Gate and up projection lie one after the other.

        Args:
            layer: a FusedMoE.
            num_experts: on this rank.
            hidden_size, intermediate_size_per_partition: on this rank, padding included.
            params_dtype: of what is not quantised.
        """

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, parallel: ParallelConfig
    ) -> tuple[int, int]:
        """These two sizes, or larger ones that kernels need. The weight loader fills what is beyond."""
        return hidden_size, intermediate_size_per_partition

    @abc.abstractmethod
    def apply(self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """What the experts of this rank, or its part of them, add to the result.

        Args:
            layer: a FusedMoE.
            x: [tokens, hidden_size].
            topk_weights, topk_ids: as `route` gives them.

        Returns:
            [tokens, hidden_size].
        """


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """Experts in floating point."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        w13_size = layer.w13_num_shards * intermediate_size_per_partition
        shapes: dict[str, tuple[int, ...]] = {
            "w13_weight": (num_experts, w13_size, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        if layer.has_bias:
            shapes |= {"w13_bias": (num_experts, w13_size), "w2_bias": (num_experts, hidden_size)}
        for name, shape in shapes.items():
            add_parameter(layer, name, torch.empty(shape, dtype=params_dtype), **extra_weight_attrs)

    def apply(self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return apply_experts(
            layer,
            x,
            topk_weights,
            topk_ids,
            lambda position: (layer.w13_weight[position], layer.w2_weight[position]),
        )


def apply_experts(
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """`FusedMoEMethodBase.apply`, one expert after the other.

    Args:
        weights_of: the weights of the expert at a position of the parameters: `[w13_num_shards * intermediate, hidden]`
            and `[hidden, intermediate]`.
    """
    activate = ACTIVATIONS[layer.activation]
    output = torch.zeros_like(x)
    for position, expert in enumerate(layer.local_experts):
        # Of an expert that is there several times, only the first copy, which has its number, is asked.
        tokens, slots = torch.where(topk_ids == expert)
        if not len(tokens):
            continue
        w13, w2 = weights_of(position)
        weights = topk_weights[tokens, slots, None].to(x.dtype)
        inputs = x[tokens]
        if layer.apply_router_weight_on_input:
            inputs = inputs * weights
        hidden = F.linear(inputs, w13, layer.w13_bias[position] if layer.has_bias else None)
        # The bias is whole on every rank, and has to be in the sum once.
        has_bias = layer.has_bias and layer.tp_rank == 0
        outputs = F.linear(activate(hidden), w2, layer.w2_bias[position] if has_bias else None)
        if not layer.apply_router_weight_on_input:
            outputs = outputs * weights
        output.index_add_(0, tokens, outputs)
    return output


def add_parameter(layer: torch.nn.Module, name: str, data: torch.Tensor, **attributes: Any) -> None:
    """Gives a layer a parameter with attributes: see FusedMoEMethodBase.create_weights."""
    parameter = torch.nn.Parameter(data, requires_grad=False)
    parameter.__dict__.update(attributes)
    layer.register_parameter(name, parameter)


def _gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def activate(hidden: torch.Tensor) -> torch.Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return activation(gate) * up

    return activate


def _relu2(hidden: torch.Tensor) -> torch.Tensor:
    return F.relu(hidden).square()


# Of experts without a gate, and their names behind those of others.
UNGATED = "_no_mul"
_UNGATED_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu2": _relu2,
}
ACTIVATIONS = {name: _gated(activation) for name, activation in _UNGATED_ACTIVATIONS.items()} | {
    f"{name}{UNGATED}": activation for name, activation in _UNGATED_ACTIVATIONS.items()
}
