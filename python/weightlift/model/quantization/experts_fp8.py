"""Experts in FP8 or INT8, with a scale for each tensor, output or block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ... import ops
from ...errors import CheckpointError
from ..expert_blocks import cut_expert_blocks
from ..postprocess import is_weights_pre_processed
from .arrival import MarlinWeight, MemoryLayout, fnuz_weight
from .base import Target
from .experts import QuantizedFusedMoEMethod
from .fp8 import MARLIN_GROUPS, Strategy
from .fp8_scales import MarlinFp8Scales, doubled_scales


class Fp8MoEMethod(QuantizedFusedMoEMethod):
    """`w13_weight` and `w2_weight` [experts, N, K], and their scales. With target "plain", by strategy:

    - "tensor": `w13_weight_scale` float32 [experts, 2], of gate and up projection, `w2_weight_scale` [experts];
    - "channel": [experts, N, 1];
    - "block": [experts, blocks of N, blocks of K], those of gate and up projection apart;
    - `w13_input_scale`, `w2_input_scale` [experts], of static activations.

    With "fnuz" weights are float8_e4m3fnuz and scales are doubled. With "marlin" weights are int32 in tiles of 8-bit
    Marlin, the intermediate size filled up to a multiple of 64, and scales [experts, groups of K, N] of the dtype of
    activations, as `ops.fp8_marlin_process_scales` makes them.

    With strategy "tensor", gate and up projection get the larger of their scales after loading, and are quantised again
    with it, unless the layout is Marlin's, where each has its own; scales of inputs become the largest of all experts.
    Both in place, so that the layer can be loaded again.

    Args:
        layer: a FusedMoE.
        strategy: what has one scale.
        target: the layout of parameters.
        static_input: activations have a scale in the checkpoint.
        block_size: (block_n, block_k), with strategy "block".
        scale_name: what scales of blocks are called.
        is_modelopt: gate and up projection may have different scales of their input, [experts, 2]; block scales are
            [ceil(N / block_n), 1, ceil(K / block_k), 1] on disk.

    Raises:
        ValueError: no cut gives each rank the checkpoint's values, or Marlin has no tiles for the sizes.
    """

    targets: ClassVar[tuple[Target, ...]] = ("plain", "fnuz", "marlin")
    weight_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    supports_pre_processed_weights = True

    def __init__(
        self,
        layer: Any,
        strategy: Strategy,
        *,
        target: Target = "plain",
        static_input: bool = False,
        block_size: tuple[int, int] | None = None,
        scale_name: str = "weight_scale_inv",
        is_modelopt: bool = False,
    ) -> None:
        super().__init__(layer, target=target)
        self.strategy = strategy
        self.static_input = static_input
        self.scale_name = scale_name if strategy == "block" else "weight_scale"
        self.is_modelopt = is_modelopt
        self.weight_block_size = self.block_shape = block_size
        if target == "marlin":
            self.check_marlin(layer)
        if block_size is not None:
            self._cut_blocks(layer, block_size)

    def _cut_blocks(self, layer: Any, block_size: tuple[int, int]) -> None:
        hidden_size, per_rank = layer.unpadded_hidden_size, layer.intermediate_size // layer.tp_size
        is_marlin, group_size = self.target == "marlin", block_size[1]
        if is_marlin and (group_size not in MARLIN_GROUPS or hidden_size % group_size or per_rank % group_size):
            groups = ", ".join(map(str, MARLIN_GROUPS))
            raise self.error(
                f"hidden_size {hidden_size} and the intermediate size of a rank, {per_rank}, are not divided by "
                f"weight quantization block_k = {group_size} into groups that Marlin has: {groups}"
            )
        try:
            blocks = cut_expert_blocks(
                block_size,
                hidden_size=hidden_size,
                intermediate_size=layer.intermediate_size,
                tp_size=layer.tp_size,
                can_refine=not is_marlin,
            )
        except ValueError as error:
            raise self.error(str(error)) from None
        if is_marlin and blocks.tp_shard_with_padding:
            raise self.error(f"blocks of {block_size[0]} rows do not divide the {per_rank} of a rank")
        if layer.has_bias and blocks.tp_shard_with_padding:
            raise self.error("experts with a bias can't be cut into whole blocks and padding")
        self.block_shape = blocks.block_shape
        self.weight_scale_refine = blocks.scale_refine
        layer.intermediate_size_per_partition = blocks.intermediate_size_per_partition
        layer.tp_shard_with_padding = blocks.tp_shard_with_padding

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        of_scales = {"quant_method": self.strategy, **extra_weight_attrs}
        if self.is_modelopt and self.strategy == "block":
            of_scales["weight_loader"] = functools.partial(_load_matrix, layer.weight_loader)
        output_dim = 1 if self.target == "marlin" else 0
        for name, count, size_n, size_k in self.projections_of(layer, hidden_size, intermediate_size_per_partition):
            for suffix, memory, attributes in (
                ("weight", self._weight(size_n, size_k), extra_weight_attrs),
                (self.scale_name, self._scale(size_n, size_k, params_dtype), of_scales),
            ):
                self.add(layer, f"{name}_{suffix}", *memory, count=count, output_dim=output_dim, **attributes)
            if self.static_input:
                layout = doubled_scales(()) if self.target == "fnuz" else None
                slots = count if self.is_modelopt else 1
                name = f"{name}_input_scale"
                self.add(layer, name, (), torch.float32, layout, count=slots, **extra_weight_attrs)
        self.add_biases(layer, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs)

    # Of one projection: shape and dtype in memory, and layout.

    def _weight(self, size_n: int, size_k: int) -> tuple[Sequence[int], torch.dtype, MemoryLayout | None]:
        if self.target == "plain":
            return (size_n, size_k), self.weight_dtype, None
        layout: MemoryLayout = fnuz_weight((size_n, size_k))
        if self.target == "marlin":
            layout = MarlinWeight(
                "nk",
                num_bits=8,
                size_n=size_n,
                size_k=size_k,
                group_size=-1 if self.block_shape is None else self.block_shape[1],
                source_dtype=self.weight_dtype,
            )
        return layout.shape, layout.dtype, layout

    def _scale(
        self, size_n: int, size_k: int, dtype: torch.dtype
    ) -> tuple[Sequence[int], torch.dtype, MemoryLayout | None]:
        shape: tuple[int, ...] = ()
        if self.strategy != "tensor":
            block_n, block_k = self.block_shape or (1, size_k)
            shape = -(-size_n // block_n), -(-size_k // block_k)
        if self.target == "plain":
            return shape, torch.float32, None
        layout: MemoryLayout = doubled_scales(shape)
        if self.target == "marlin":
            layout = MarlinFp8Scales((size_n,), size_k, dtype, self.strategy, self.block_shape)
        return layout.shape, layout.dtype, layout

    def process_weights_after_loading(self, layer: Any) -> None:
        """Brings gate and up projection to one scale, and inputs of all experts to one. Raises CheckpointError: there
        is none, as the scales are not finite and above zero."""
        if is_weights_pre_processed():
            return
        if self.strategy == "tensor" and self.target != "marlin" and layer.is_gated:
            self._share_scales(layer)
        if self.static_input and layer.local_num_experts:
            for scales in (layer.w13_input_scale, layer.w2_input_scale):
                scales.data.fill_(scales.data.max())

    def _share_scales(self, layer: Any) -> None:
        half = layer.intermediate_size_per_partition
        for position, scales in enumerate(layer.w13_weight_scale.data):
            if scales[0] == scales[1]:
                continue
            weight = layer.w13_weight.data[position]
            try:
                largest, requantized = ops.requantize_with_max_scale(weight, scales, [half, half])
            except ValueError as error:
                raise CheckpointError(
                    str(error), reason="InvalidScale", tensor=f"{self.prefix}.w13_weight_scale[{position}]"
                ) from None
            weight.copy_(requantized)
            scales.fill_(largest)

    def dequantize_projection(self, layer: Any, name: str, position: int, part: int) -> torch.Tensor:
        values = self.memory_of(layer, f"{name}_weight", position, part)
        scale: torch.Tensor = getattr(layer, f"{name}_{self.scale_name}").data[position]
        if self.target != "marlin" and scale.dim() == 0:
            return values.float() * scale
        scale = self.memory_of(layer, f"{name}_{self.scale_name}", position, part)
        if self.target == "marlin":
            return values.view(self.weight_dtype).T.float() * scale
        if self.block_shape is not None:
            return ops.dequantize_blocks(values, scale, self.block_shape)
        return values.float() * scale


class Int8MoEMethod(Fp8MoEMethod):
    """The same in INT8 [experts, N, K], with a scale for each output."""

    targets: ClassVar[tuple[Target, ...]] = ("plain",)
    weight_dtype: ClassVar[torch.dtype] = torch.int8

    def __init__(self, layer: Any, *, target: Target = "plain", static_input: bool = False) -> None:
        super().__init__(layer, "channel", target=target, static_input=static_input)


def _load_matrix(
    weight_loader: Callable[..., bool | None],
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> bool | None:
    """The layer's loader, for block scales that have two more dimensions on disk."""
    return weight_loader(param, loaded_weight[:, 0, :, 0], *args, **kwargs)
