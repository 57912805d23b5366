"""What methods of quantised experts share."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ..expert_methods import FusedMoEMethodBase, add_parameter, apply_experts
from .arrival import MemoryLayout
from .base import Target


class QuantizedFusedMoEMethod(FusedMoEMethodBase):
    """How the experts of one layer are quantised. Made for the layer, before it has parameters.

    As with linear layers, parameters are in their final layout from the start, and `apply` is a reference for every
    layout and device: it dequantises each expert that a token goes to. Activations are not quantised.

    Args:
        layer: a FusedMoE, its sizes set.
        target: the layout of its parameters.

    Attributes:
        targets: the layouts that there are for this method.

    Raises:
        ValueError: there is no such layout for it.
    """

    targets: ClassVar[tuple[Target, ...]] = ("plain",)

    def __init__(self, layer: Any, *, target: Target = "plain") -> None:
        self.prefix = layer.prefix
        self.target = target
        if target not in self.targets:
            raise self.error(
                f"{type(self).__name__} has no layout for target {target!r}; it has {', '.join(self.targets)}"
            )

    @abc.abstractmethod
    def dequantize_projection(self, layer: Any, name: str, position: int, part: int) -> torch.Tensor:
        """The weight that one projection of the expert at a position of the parameters stands for.

        Args:
            name: "w13" or "w2".
            part: of "w13", 0 gate and 1 up projection; else 0.

        Returns:
            [N, K], float32, as this rank holds it.
        """

    def dequantize_expert(self, layer: Any, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up projection `[w13_num_shards * intermediate_size_per_partition, hidden]` of one expert, and down
        projection `[hidden, intermediate_size_per_partition]`."""
        parts = range(layer.w13_num_shards)
        w13 = torch.cat([self.dequantize_projection(layer, "w13", position, part) for part in parts])
        return w13, self.dequantize_projection(layer, "w2", position, 0)

    def dequantize(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all experts of the rank, stacked; of a rank without experts, with none."""
        hidden_size, intermediate_size = layer.hidden_size, layer.intermediate_size_per_partition
        count, like = layer.local_num_experts, {"dtype": torch.float32, "device": next(layer.parameters()).device}
        w13 = torch.empty(count, layer.w13_num_shards * intermediate_size, hidden_size, **like)
        w2 = torch.empty(count, hidden_size, intermediate_size, **like)
        for position in range(count):
            w13[position], w2[position] = self.dequantize_expert(layer, position)
        return w13, w2

    def apply(self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        def weights_of(position: int) -> tuple[torch.Tensor, torch.Tensor]:
            w13, w2 = self.dequantize_expert(layer, position)
            return w13.to(x.dtype), w2.to(x.dtype)

        return apply_experts(layer, x, topk_weights, topk_ids, weights_of)

    def projections_of(
        self, layer: Any, hidden_size: int, intermediate_size: int
    ) -> Iterator[tuple[str, int, int, int]]:
        """Of gate and up projection, and of the down projection: (start of parameters' names, how many, N, K)."""
        yield "w13", layer.w13_num_shards, intermediate_size, hidden_size
        yield "w2", 1, hidden_size, intermediate_size

    def add(
        self,
        layer: Any,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        layout: MemoryLayout | None = None,
        *,
        count: int = 1,
        output_dim: int = 0,
        **attributes: Any,
    ) -> None:
        """Gives the layer a parameter, not yet set, with a first dimension for the experts of the rank.

        Args:
            shape, dtype: of one projection of an expert, as it is in memory.
            layout: of that memory, if it is not as on disk.
            count: how many projections lie one after the other along `output_dim`; of numbers, `[count]`.
        """
        sizes = list(shape)
        if count > 1 and sizes:
            sizes[output_dim] *= count
        elif count > 1:
            sizes = [count]
        if layout is not None:
            attributes["memory_layout"] = layout
        add_parameter(layer, name, torch.empty(layer.local_num_experts, *sizes, dtype=dtype), **attributes)

    def add_for_target(
        self,
        layer: Any,
        name: str,
        layout: MemoryLayout,
        dtype: torch.dtype,
        *,
        count: int,
        output_dim: int,
        **attributes: Any,
    ) -> None:
        """The same, of what has a layout for Marlin, where outputs are along the last dimension.

        Args:
            dtype, output_dim: with target "plain", as on disk.
        """
        if self.target == "marlin":
            self.add(layer, name, layout.shape, layout.dtype, layout, count=count, output_dim=-1, **attributes)
        else:
            self.add(layer, name, layout.source_shape, dtype, count=count, output_dim=output_dim, **attributes)

    def memory_of(self, layer: Any, name: str, position: int, part: int, *, output_dim: int = 0) -> torch.Tensor:
        """What such a parameter has for one projection of an expert, without padding: for Marlin (K, N) or (G, N), else
        as on disk, with the outputs along `output_dim`."""
        parameter = getattr(layer, name)
        count = layer.w13_num_shards if name.startswith("w13_") else 1
        memory: torch.Tensor = parameter.data[position]
        if self.target != "marlin":
            return memory.chunk(count, output_dim)[part]
        decoded: torch.Tensor = parameter.memory_layout.decode(memory.chunk(count, -1)[part])
        return decoded

    def add_biases(
        self, layer: Any, hidden_size: int, intermediate_size: int, dtype: torch.dtype, **attributes: Any
    ) -> None:
        """Those of a layer that has some, as on disk."""
        if layer.has_bias:
            self.add(layer, "w13_bias", (intermediate_size,), dtype, count=layer.w13_num_shards, **attributes)
            self.add(layer, "w2_bias", (hidden_size,), dtype, **attributes)

    def check_groups(self, layer: Any, group_size: int) -> None:
        """Refuses a rank's part that is not one of whole groups along its inputs."""
        sizes = {
            "hidden_size": layer.unpadded_hidden_size,
            "the MoE intermediate size per partition": layer.intermediate_size_per_partition,
        }
        for what, size in sizes.items():
            if size % group_size:
                raise self.error(
                    f"{what} ({size}) is not divisible by group_size ({group_size}). Scale groups would cross the "
                    "borders of ranks; use a compatible tp_size or enable expert parallelism."
                )

    def check_marlin(self, layer: Any) -> None:
        """Refuses what the Marlin kernel for experts does not take.

        Tiles are of 64 outputs and 16 inputs, and the kernel wants 128 of the one or the other. The intermediate size
        is filled up to that; the hidden size is that of activations and can't be.
        """
        if layer.unpadded_hidden_size % 128:
            raise self.error(
                f"hidden_size {layer.unpadded_hidden_size} is not divisible by 128, and Marlin has no tiles for it"
            )
        if layer.has_bias:
            raise self.error("Marlin's layout is for experts without a bias")
        if layer.params_dtype not in (torch.float16, torch.bfloat16):
            raise self.error(
                f"Marlin takes activations of float16 and bfloat16, not {layer.params_dtype}; load with "
                "dtype=torch.bfloat16, or with target='plain'"
            )

    def error(self, problem: str) -> ValueError:
        """The error to raise for what this layer cannot be."""
        return ValueError(f"{self.prefix}: {problem}")
