"""Experts of packed integers with scales of groups: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch

from .arrival import MarlinScales, MarlinWeight, MarlinZeroPoints, MemoryLayout, Packing, Unused
from .base import Target
from .experts import QuantizedFusedMoEMethod
from .packed import unpack_awq, unpack_words
from .packed_linear import MARLIN_GROUP_SIZES


class _Format(NamedTuple):
    """How a format packs values, and what it calls its tensors."""

    packing: Packing
    weight: str
    scale: str
    zero_point: str


_FORMATS = {
    "gptq": _Format("gptq", "qweight", "scales", "qzeros"),
    "awq": _Format("awq", "qweight", "scales", "qzeros"),
    "compressed-tensors": _Format("nk", "weight_packed", "weight_scale", "weight_zero_point"),
}


class PackedMoEMethod(QuantizedFusedMoEMethod):
    """Integers of 4 or 8 bits, packed into words, with a scale for each group of inputs of an output.

    As `packed_linear.PackedLinearMethod`, with `w13_` and `w2_` before the names of the format, and the experts of the
    rank as first dimension. Gate and up projection lie one after the other along N. For Marlin each is padded on its
    own, the intermediate size to a multiple of 64 and of the group size.

    Args:
        layer: a FusedMoE.
        layout: the format; its names, and how it packs.
        num_bits: of an integer.
        group_size: inputs that share a scale; -1: all.
        has_zero_points: whether they are used.
        target: the layout of parameters.

    Raises:
        ValueError: groups or words that don't divide the sizes of a rank, or what Marlin has no form for.
    """

    targets: ClassVar[tuple[Target, ...]] = ("plain", "marlin")

    def __init__(
        self,
        layer: Any,
        *,
        layout: Literal["gptq", "awq", "compressed-tensors"],
        num_bits: int,
        group_size: int,
        has_zero_points: bool,
        target: Target = "plain",
    ) -> None:
        super().__init__(layer, target=target)
        self.format = _FORMATS[layout]
        self.num_bits = num_bits
        self.group_size = group_size
        self.has_zero_points = has_zero_points
        if num_bits not in (4, 8):
            raise self.error(f"Unsupported num_bits = {num_bits}. Supported num_bits = [4, 8]")
        if layout == "gptq" and has_zero_points:
            raise self.error(f"Unsupported quantization config: bits={num_bits}, sym=False")
        if target == "marlin":
            self.check_marlin(layer)
            if group_size not in MARLIN_GROUP_SIZES:
                raise self.error(
                    f"Marlin does not support group_size = {group_size}. Only group_sizes = {list(MARLIN_GROUP_SIZES)} "
                    "are supported; load with target='plain'"
                )
        if group_size > 0:
            self.check_groups(layer, group_size)
        per_word = 32 // num_bits
        for size in (layer.unpadded_hidden_size, layer.intermediate_size_per_partition):
            if size % per_word:
                raise self.error(
                    f"hidden_size ({layer.unpadded_hidden_size}) and the MoE intermediate size per partition "
                    f"({layer.intermediate_size_per_partition}) are packed {per_word} to a word, and are no "
                    "whole words; use a compatible tp_size or enable expert parallelism."
                )

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        packing, weight, scale, zero_point = self.format
        of_weights = {"is_transposed": packing != "nk", **extra_weight_attrs}
        of_groups = {"quant_method": "channel" if self.group_size == -1 else "group", **of_weights}
        for name, count, size_n, size_k in self.projections_of(layer, hidden_size, intermediate_size_per_partition):
            sizes: dict[str, Any] = {"size_n": size_n, "size_k": size_k, "group_size": self.group_size}
            tiles = MarlinWeight(packing, num_bits=self.num_bits, **sizes)
            scales = MarlinScales(**sizes, dtype=params_dtype, is_transposed=packing == "nk")
            zero_points: MemoryLayout = MarlinZeroPoints(packing, num_bits=self.num_bits, **sizes)
            if not self.has_zero_points:
                zero_points = Unused(zero_points.source_shape, torch.int32)
            along: dict[str, Any] = {"count": count, "output_dim": self._output_dim}
            self.add_for_target(layer, f"{name}_{weight}", tiles, torch.int32, **along, **of_weights)
            self.add_for_target(layer, f"{name}_{scale}", scales, params_dtype, **along, **of_groups)
            # GPTQ and AWQ have them on disk even where they are not used.
            if self.has_zero_points or packing != "nk":
                self.add_for_target(layer, f"{name}_{zero_point}", zero_points, torch.int32, **along, **of_groups)
            if packing == "nk":
                self.add(layer, f"{name}_weight_shape", (2,), torch.int64, **extra_weight_attrs)
        self.add_biases(layer, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs)

    @property
    def _output_dim(self) -> int:
        return 0 if self.format.packing == "nk" else 1

    def dequantize_projection(self, layer: Any, name: str, position: int, part: int) -> torch.Tensor:
        values = self._values(layer, name, self.format.weight, position, part).float()  # (K, N)
        scales = self._values(layer, name, self.format.scale, position, part).float()  # (G, N)
        grouped = torch.unflatten(values, 0, (len(scales), -1))
        zero_points: torch.Tensor | int = 1 << (self.num_bits - 1)
        if self.has_zero_points:
            zero_points = self._values(layer, name, self.format.zero_point, position, part).float().unsqueeze(1)
        return ((grouped - zero_points) * scales.unsqueeze(1)).flatten(0, 1).T

    def _values(self, layer: Any, name: str, what: str, position: int, part: int) -> torch.Tensor:
        """What a parameter has for one projection: (K, N) of the weight, (G, N) of the others."""
        memory = self.memory_of(layer, f"{name}_{what}", position, part, output_dim=self._output_dim)
        packing = self.format.packing
        if self.target == "marlin":
            return memory
        if what == self.format.scale:
            return memory.T if packing == "nk" else memory
        if packing == "awq":
            return unpack_awq(memory, self.num_bits)
        # Weights are packed along K, zero points along N.
        along_rows = (what == self.format.weight) == (packing == "gptq")
        values = unpack_words(memory, self.num_bits, 0 if along_rows else 1)
        return values.T if packing == "nk" else values
