"""Linear layers of packed integers with scales of groups: what GPTQ, AWQ and compressed-tensors have in common."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
)
from .arrival import MarlinScales, MarlinWeight, MarlinZeroPoints, MemoryLayout, Packing, Unused
from .base import QuantizedLinearMethod, Target
from .packed import unpack_awq, unpack_words

MARLIN_GROUP_SIZES = (-1, 32, 64, 128)


class PackedLinearMethod(QuantizedLinearMethod):
    """A weight of integers of 4 or 8 bits, packed into words, with a scale for each group of inputs of an output.

    (integer - zero point) * scale; without zero points, in the place of one is half of 2^num_bits. Parameters, by the
    names that the format has for them (K and N of this rank, G groups, `per` values of a word, `packing` as in
    `arrival.Packing`):

    - weight: int32 (K / per, N), (K, N / per) or (N, K / per); for Marlin (K / 16, N * num_bits / 2)
    - scales: params_dtype (G, N), with "nk" (N, G); for Marlin (G, N)
    - zero points, if any: int32 (G, N / per), with "nk" (N / per, G); for Marlin (G, N / per)

    For Marlin's kernels all of it is in their order, and sizes are padded (`ops.marlin_padded_nk`), with zeros. A bias
    stays as it is on disk. Activations are not quantised.

    Args:
        prefix, target: as for QuantizedLinearMethod.
        num_bits: of an integer.
        group_size: inputs that share a scale; -1: all. Ranks that share the inputs of a layer have those scales whole.
        has_zero_points: whether they are used.

    Raises:
        ValueError: no such layer can be had; so does `create_weights`, of its sizes.
    """

    targets = ("plain", "marlin")
    packing: ClassVar[Packing]
    weight_name: ClassVar[str]
    scale_name: ClassVar[str]
    zero_point_name: ClassVar[str]
    # Whether the format has zero points on disk even where they are not used.
    always_has_zero_points: ClassVar[bool] = False

    def __init__(
        self, prefix: str, *, target: Target = "plain", num_bits: int, group_size: int, has_zero_points: bool
    ) -> None:
        super().__init__(prefix, target=target)
        if num_bits not in (4, 8):
            raise self.error(f"Unsupported num_bits = {num_bits}. Supported num_bits = [4, 8]")
        if group_size < 1 and group_size != -1:
            raise self.error(f"group_size is {group_size}; accepted is -1, all inputs, or a number of inputs")
        if target == "marlin" and group_size not in MARLIN_GROUP_SIZES:
            raise self.error(
                f"Marlin does not support group_size = {group_size}. Only group_sizes = {list(MARLIN_GROUP_SIZES)} are "
                "supported; load with target='plain'"
            )
        self.num_bits = num_bits
        self.group_size = group_size
        self.has_zero_points = has_zero_points

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
        size_n, size_k = sum(output_partition_sizes), input_size_per_partition
        if self.target == "marlin":
            check_activations(self, params_dtype)
        self._check_sizes(size_k, output_partition_sizes, input_size)
        output_dim = 0 if self.packing == "nk" else 1
        along = {"output_dim": output_dim, "input_dim": 1 - output_dim}
        packed = {"packed_factor": 32 // self.num_bits, **extra_weight_attrs}
        sizes: dict[str, Any] = {"size_n": size_n, "size_k": size_k, "group_size": self.group_size}

        weight = MarlinWeight(self.packing, num_bits=self.num_bits, **sizes)
        layer.register_parameter(
            self.weight_name,
            PackedvLLMParameter(
                packed_dim=output_dim if self.packing == "awq" else 1 - output_dim,
                **self._memory(weight),
                **along,
                **packed,
            ),
        )
        scales = MarlinScales(**sizes, dtype=params_dtype, is_transposed=self.packing == "nk")
        layer.register_parameter(
            self.scale_name,
            ChannelQuantScaleParameter(output_dim=output_dim, **self._memory(scales), **extra_weight_attrs)
            if self.group_size == -1
            else GroupQuantScaleParameter(**self._memory(scales), **along, **extra_weight_attrs),
        )
        if not self.has_zero_points and not self.always_has_zero_points:
            return
        zero_points: MemoryLayout = MarlinZeroPoints(self.packing, num_bits=self.num_bits, **sizes)
        if not self.has_zero_points:
            zero_points = Unused(zero_points.source_shape, torch.int32)
        packed |= {"packed_dim": output_dim, **self._memory(zero_points)}
        layer.register_parameter(
            self.zero_point_name,
            PackedColumnParameter(output_dim=output_dim, **packed)
            if self.group_size == -1
            else PackedvLLMParameter(**along, **packed),
        )

    def _check_sizes(self, size_k: int, output_partition_sizes: list[int], input_size: int) -> None:
        per_word = 32 // self.num_bits
        if self.group_size != -1:
            check_groups(self, size_k, self.group_size, is_cut=input_size != size_k)
        if self.packing != "awq" and size_k % per_word:
            raise self.error(
                f"The input size is not aligned with the quantized weight shape: {size_k} inputs, packed {per_word} to "
                "a word. This can be caused by too large tensor parallel size."
            )
        has_words_of_outputs = self.packing == "awq" or self.has_zero_points or self.always_has_zero_points
        unaligned = [size for size in output_partition_sizes if size % per_word]
        if has_words_of_outputs and unaligned:
            raise self.error(
                f"The output size is not aligned with the quantized weight shape: {unaligned[0]} outputs, packed "
                f"{per_word} to a word. This can be caused by too large tensor parallel size."
            )

    def _memory(self, layout: MemoryLayout) -> dict[str, Any]:
        """Arguments of a parameter of that layout, or with target "plain" as on disk."""
        if self.target == "plain":
            return {"data": torch.empty(tuple(layout.source_shape), dtype=layout.dtype)}
        return {"data": layout.empty(), "memory_layout": layout}

    def dequantize(self, layer: torch.nn.Module) -> torch.Tensor:
        values = self._values_of(layer, self.weight_name).float()  # (K, N)
        scales = self._values_of(layer, self.scale_name).float()  # (G, N)
        grouped = torch.unflatten(values, 0, (len(scales), -1))
        zero_points: torch.Tensor | int = 1 << (self.num_bits - 1)
        if self.has_zero_points:
            zero_points = self._values_of(layer, self.zero_point_name).float().unsqueeze(1)
        return ((grouped - zero_points) * scales.unsqueeze(1)).flatten(0, 1).T

    def _values_of(self, layer: torch.nn.Module, name: str) -> torch.Tensor:
        """What a parameter stands for: (K, N) of the weight, (G, N) of the others."""
        param: Any = getattr(layer, name)
        if param.memory_layout is not None:
            return param.memory_layout.decode(param.data)  # type: ignore[no-any-return]
        values: torch.Tensor = param.data
        if name != self.scale_name:
            is_awq = self.packing == "awq"
            values = (
                unpack_awq(values, self.num_bits) if is_awq else unpack_words(values, self.num_bits, param.packed_dim)
            )
        return values.T if self.packing == "nk" else values


def check_groups(method: QuantizedLinearMethod, size_k: int, group_size: int, *, is_cut: bool) -> None:
    """Raises ValueError where a rank's inputs are no whole groups. `is_cut`: ranks share the inputs."""
    if size_k % group_size == 0:
        return
    cause = (
        "This happens when tensor_parallel_size splits the layer input into shards that are not a whole number of "
        "quant groups. Consider reducing tensor_parallel_size."
        if is_cut
        else "Its config says another group size than it can have."
    )
    raise method.error(f"Weight input_size_per_partition={size_k} is not divisible by group_size={group_size}. {cause}")


def check_activations(method: QuantizedLinearMethod, dtype: torch.dtype) -> None:
    """Raises ValueError where Marlin's kernels don't take activations of that dtype."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise method.error(
            f"Marlin takes activations of float16 and bfloat16, not {dtype}; load with dtype=torch.bfloat16, or with "
            "target='plain'"
        )
