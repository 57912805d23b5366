"""Weights of 4-bit floating point (e2m1): NVFP4 and MXFP4, as compressed-tensors and ModelOpt write them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ... import ops
from ...errors import CheckpointError
from ..parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
from ..postprocess import is_weights_pre_processed
from .arrival import MarlinScales, MarlinWeight
from .base import QuantizedLinearMethod, Target
from .packed import in_each, unpack_words
from .packed_linear import check_activations, check_groups

_E4M3_MAX, _E4M3_MINUS_ZERO = 0x7E, 0x80  # codes; NaN is 0x7f, and what is negative is above
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; the highest bit is the sign


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """The numbers of e2m1 codes, 0 to 15 of any integer dtype: float32."""
    return torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES), device=codes.device)[codes.int()]


def convert_nvfp4_scales(memory: torch.Tensor, dtype: torch.dtype) -> float:
    """Makes of NVFP4's scales of groups, in place, the bytes that Marlin's kernels read.

    The same as `ops.nvfp4_marlin_process_scales`, of scales that are in their final order already. A byte becomes a
    byte, so that the op is asked for those that there are, and the rest is one look-up.

    Args:
        memory: float8_e4m3fn, as MarlinScales with `is_interleaved` has it.
        dtype: of activations.

    Returns:
        The factor that the scale of the tensor is to be divided by.

    Raises:
        ValueError: a negative scale, or NaN.
    """
    codes = memory.view(torch.uint8)
    largest = int(codes.max()) if codes.numel() else 0
    if largest > _E4M3_MAX:
        if bool(((codes > _E4M3_MAX) & (codes != _E4M3_MINUS_ZERO)).any()):
            raise ValueError("scales must not be negative, nor NaN")
        largest = int(codes.where(codes != _E4M3_MINUS_ZERO, 0).max())
    every = torch.arange(256, device=codes.device)
    every = torch.where(every <= largest, every, 0).to(torch.uint8).view(1, -1)
    # The op exchanges two of four columns.
    every = in_each(every, (0, 2, 1, 3)).view(torch.float8_e4m3fn)
    converted, factor = ops.nvfp4_marlin_process_scales(every.to(dtype), a_dtype=dtype)
    table = converted.view(torch.uint8).flatten()
    codes.copy_(table.index_select(0, codes.flatten().int()).view_as(codes))
    return factor


def decode_nvfp4_scales(
    memory: torch.Tensor, global_scale: torch.Tensor, layout: MarlinScales, dtype: torch.dtype
) -> torch.Tensor:
    """The products of NVFP4's scales, of groups and of the tensor, in the form of Marlin's kernels.

    Args:
        memory, global_scale: as `convert_nvfp4_scales` and `ops.nvfp4_marlin_process_global_scale` have made them.
        layout: of the former.
        dtype: of activations.

    Returns:
        float32 (N, K / 16).
    """
    # Of a float16, 2^7 times the scale, bits 7 to 14: all that are not 0.
    halves = (layout.decode(memory).view(torch.uint8).to(torch.int16) << 7).view(torch.float16)
    left_out = ops.nvfp4_marlin_process_global_scale(torch.ones_like(global_scale), dtype)
    return halves.T.float() * (global_scale / left_out / 2.0**7)


class Fp4LinearMethod(QuantizedLinearMethod):
    """A weight of e2m1, two to a byte, the lower half first, with a scale of one byte for each group of inputs.

    Parameters (K and N of this rank): the weight, uint8 (N, K / 2), for Marlin int32 (K / 16, N * 2);
    `weight_scale` (N, K / group_size) as on disk, for Marlin (K / group_size, N) of `scale_dtype`. For Marlin's kernels
    both are in their order, and sizes are padded (`ops.marlin_padded_nk`), with zeros. A bias stays as it is on disk.
    Activations are not quantised.
    """

    targets = ("plain", "marlin")
    group_size: ClassVar[int]
    scale_dtype: ClassVar[torch.dtype]
    scale_dtype_on_disk: ClassVar[torch.dtype]
    weight_name: ClassVar[str] = "weight_packed"

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
        check_groups(self, size_k, self.group_size, is_cut=input_size != size_k)
        weight: dict[str, Any] = {"data": torch.empty(size_n, size_k // 2, dtype=torch.uint8)}
        scale: dict[str, Any] = {"data": torch.empty(size_n, size_k // self.group_size, dtype=self.scale_dtype_on_disk)}
        if self.target == "marlin":
            check_activations(self, params_dtype)
            sizes: dict[str, Any] = {"size_n": size_n, "size_k": size_k, "group_size": self.group_size}
            tiles = MarlinWeight("nk", num_bits=4, source_dtype=torch.uint8, **sizes)
            scales = MarlinScales(dtype=self.scale_dtype, is_transposed=True, is_interleaved=True, **sizes)
            weight = {"data": tiles.empty(), "memory_layout": tiles}
            scale = {"data": scales.empty(), "memory_layout": scales}
        both = {"input_dim": 1, "output_dim": 0, **extra_weight_attrs}
        layer.register_parameter(self.weight_name, ModelWeightParameter(**weight, **both))
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(**scale, **both))

    def dequantize(self, layer: torch.nn.Module) -> torch.Tensor:
        weight: Any = getattr(layer, self.weight_name)
        if weight.memory_layout is None:
            codes = unpack_words(weight.data, 4, 1)
        else:
            codes = weight.memory_layout.decode(weight.data).T
        scales = self.scales_of(layer)
        grouped = torch.unflatten(e2m1_values(codes), 1, (scales.shape[1], -1))
        return (grouped * scales.unsqueeze(-1)).flatten(1)

    def scales_of(self, layer: torch.nn.Module) -> torch.Tensor:
        """What the values are multiplied with: float32 (N, K / group_size)."""
        scale: Any = layer.weight_scale
        values: torch.Tensor = scale.data
        if scale.memory_layout is not None:
            values = scale.memory_layout.decode(values).T
        if values.dtype == torch.uint8:
            values = values.view(torch.float8_e8m0fnu)
        return values.float()


class CompressedTensorsMxFp4Method(Fp4LinearMethod):
    """MXFP4: a scale, a power of two (e8m0), for 32 inputs. Arguments as for QuantizedLinearMethod."""

    group_size = 32
    scale_dtype = torch.float8_e8m0fnu
    scale_dtype_on_disk = torch.uint8


class NvFp4LinearMethod(Fp4LinearMethod):
    """NVFP4: a scale (e4m3) for 16 inputs, and one for the tensor, float32 [parts].

    For Marlin `weight_scale` becomes, after loading, bytes of 5 exponent and 3 mantissa bits of which only its kernels
    know, in place; in each slot of the tensor's scale is what they multiply the output with, `ops` says how. All parts
    of a layer share that one, so that those with different ones can't be had. To these kernels scales below 2^-6 are 0
    where the largest one is above 224, or with float16.

    Args:
        prefix, target: as for QuantizedLinearMethod.
        has_input_scale: the checkpoint has a scale of activations, float32 [parts], which is loaded and not used.
    """

    group_size = 16
    scale_dtype = scale_dtype_on_disk = torch.float8_e4m3fn
    supports_pre_processed_weights = True

    global_scale_name: ClassVar[str]
    input_scale_name: ClassVar[str]
    # Whether values on disk have been multiplied with the scale of the tensor, and not divided by it.
    is_divisor: ClassVar[bool]

    def __init__(self, prefix: str, *, target: Target = "plain", has_input_scale: bool = False) -> None:
        super().__init__(prefix, target=target)
        self.has_input_scale = has_input_scale
        # Parts, by name and position, that have been loaded and not converted.
        self._landed: set[tuple[str, int]] = set()

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
        self._dtype, self._widths = params_dtype, output_partition_sizes
        names = [self.global_scale_name, *([self.input_scale_name] if self.has_input_scale else [])]
        for name in names:
            data = torch.empty(len(output_partition_sizes), dtype=torch.float32)
            layer.register_parameter(name, PerTensorScaleParameter(data=data, **extra_weight_attrs))
        if self.target == "marlin":
            self._load: Any = extra_weight_attrs["weight_loader"]
            self._positions: Any = getattr(layer, "validate_shard_id", None)  # a head has no parts
            for name in ("weight_scale", self.global_scale_name):
                getattr(layer, name).weight_loader = self._load_scale

    def _load_scale(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *shard_id: Any) -> None:
        """The layer's own loader, and what it loads is noted."""
        self._load(param, loaded_weight, *shard_id)
        name = "weight_scale" if isinstance(param, GroupQuantScaleParameter) else self.global_scale_name
        positions = self._positions(*shard_id) if shard_id else range(len(self._widths))
        self._landed |= {(name, position) for position in positions}

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Brings scales into Marlin's form.

        Raises:
            CheckpointError: scales are negative, infinite or NaN, or those of the tensor 0; these differ from part to
                part; not all parts have been loaded, or loaded again.
        """
        if self.target != "marlin" or is_weights_pre_processed() or not self._landed:
            return
        global_scales: torch.Tensor = getattr(layer, self.global_scale_name).data
        missing = {(name, i) for name in ("weight_scale", self.global_scale_name) for i in range(len(global_scales))}
        missing -= self._landed
        if missing:
            parts = ", ".join(f"{name} of part {i}" for name, i in sorted(missing))
            raise self._mismatch(f"all parts of a layer have to be loaded together for Marlin's form; {parts} missing")
        if not bool(((global_scales > 0) & (global_scales < torch.inf)).all()):
            raise self._mismatch(
                f"expected finite numbers above 0 in {self.global_scale_name}, found {global_scales.tolist()}"
            )
        if not bool((global_scales == global_scales[0]).all()):
            raise self._mismatch(
                f"the parts of this layer have different {self.global_scale_name}, {global_scales.tolist()}, and "
                "Marlin's kernels take one for all; load with target='plain', or quantise again with a shared scale"
            )
        scale: Any = layer.weight_scale
        try:
            factor = convert_nvfp4_scales(scale.data, self._dtype)
        except ValueError as error:
            raise self._mismatch(f"weight_scale: {error}") from None
        global_scales.copy_(ops.nvfp4_marlin_process_global_scale(self._multipliers(layer), self._dtype) / factor)
        self._landed.clear()

    def scales_of(self, layer: torch.nn.Module) -> torch.Tensor:
        if self.target == "plain":
            multipliers = self._multipliers(layer)
            widths = torch.tensor(self._widths, device=multipliers.device)
            return super().scales_of(layer) * multipliers.repeat_interleave(widths).unsqueeze(1)
        scale: Any = layer.weight_scale
        global_scale: torch.Tensor = getattr(layer, self.global_scale_name).data[0]
        return decode_nvfp4_scales(scale.data, global_scale, scale.memory_layout, self._dtype)

    def _multipliers(self, layer: torch.nn.Module) -> torch.Tensor:
        """The scales of the tensor, [parts], as they land."""
        scales: torch.Tensor = getattr(layer, self.global_scale_name).data
        return 1 / scales if self.is_divisor else scales

    def _mismatch(self, problem: str) -> CheckpointError:
        return CheckpointError(problem, tensor=self.prefix, reason="QuantizationMismatch")


class CompressedTensorsNvFp4Method(NvFp4LinearMethod):
    """`weight_packed`, `weight_scale`, `weight_global_scale` and `input_global_scale`, which are divisors."""

    global_scale_name, input_scale_name = "weight_global_scale", "input_global_scale"
    is_divisor = True


class ModelOptNvFp4Method(NvFp4LinearMethod):
    """`weight`, `weight_scale`, `weight_scale_2` and `input_scale`, which are multipliers."""

    weight_name = "weight"
    global_scale_name, input_scale_name = "weight_scale_2", "input_scale"
    is_divisor = False
