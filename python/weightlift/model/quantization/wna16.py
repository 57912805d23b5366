"""The format pack-quantized of compressed-tensors: integer weights of 4 or 8 bits, activations of 16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..parameter import BasevLLMParameter, Cut
from .base import Target
from .packed_linear import PackedLinearMethod


class CompressedTensorsWNA16Method(PackedLinearMethod):
    """`weight_packed`, `weight_scale`, `weight_zero_point` if not symmetric, packed along K as "nk".

    `weight_shape`, int64 [2], is the size on disk, of all ranks, of the last part of the layer; nobody needs it.

    Args:
        prefix, target, num_bits, group_size: as for PackedLinearMethod; -1: channels.
        symmetric: there are no zero points.
        actorder: of the config: None, or the order in which tools have quantised. "static" (or "weight") leaves no
            trace in the checkpoint; "group" (or "dynamic") would need the order of inputs.
    """

    packing = "nk"
    weight_name, scale_name, zero_point_name = "weight_packed", "weight_scale", "weight_zero_point"

    def __init__(
        self,
        prefix: str,
        *,
        target: Target = "plain",
        num_bits: int,
        group_size: int,
        symmetric: bool = True,
        actorder: str | None = None,
    ) -> None:
        super().__init__(prefix, target=target, num_bits=num_bits, group_size=group_size, has_zero_points=not symmetric)
        if actorder in ("group", "dynamic"):
            raise self.error(
                f"Compressed-tensors group/dynamic activation ordering (actorder={actorder!r}) is no longer supported. "
                "Use a checkpoint with static/weight activation ordering or without activation ordering."
            )

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
        super().create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )
        shape = _LastPartParameter(
            data=torch.empty(2, dtype=torch.int64), last=len(output_partition_sizes) - 1, **extra_weight_attrs
        )
        layer.register_parameter("weight_shape", shape)


class _LastPartParameter(BasevLLMParameter):
    """What each part of a layer has, of the last one: the one that upstream loads last, too, from files in order."""

    def __init__(self, *, last: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.last = last

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor, cuts: Mapping[int, Cut]) -> None:
        if self.last in cuts:
            self.load_whole(loaded_weight)
