"""Experts with a scale of one byte for each group of inputs: MXFP4, MXFP8 and NVFP4."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch

from ... import ops
from ...errors import CheckpointError
from ..postprocess import is_weights_pre_processed
from .arrival import MarlinScales, MarlinWeight
from .base import Target
from .experts import QuantizedFusedMoEMethod
from .fp4 import convert_nvfp4_scales, decode_nvfp4_scales, e2m1_values
from .packed import unpack_words


class MxMoEMethod(QuantizedFusedMoEMethod):
    """Base. Of each projection (N, K), by the names of the format behind `w13_` and `w2_`, experts first:

    - the weight: of e2m1, two to a byte, the lower half first, uint8 (N, K / 2), or float8_e4m3fn (N, K); for Marlin
      int32 (K / 16, N * num_bits / 2), with the intermediate size filled up to a multiple of 64;
    - `weight_scale` (N, K / group_size), for Marlin (K / group_size, N), of `scale_dtype`.

    Args:
        layer: a FusedMoE.
        target: the layout of parameters.

    Raises:
        ValueError: groups don't divide the sizes of a rank, or Marlin has no tiles for them.
    """

    num_bits: ClassVar[int] = 4
    group_size: ClassVar[int] = 32
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e8m0fnu
    weight_name: ClassVar[str] = "weight_packed"
    targets: ClassVar[tuple[Target, ...]] = ("plain", "marlin")

    def __init__(self, layer: Any, *, target: Target = "plain") -> None:
        super().__init__(layer, target=target)
        if target == "marlin":
            self.check_marlin(layer)
        self.check_groups(layer, self.group_size)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        dtype = torch.uint8 if self.num_bits == 4 else torch.float8_e4m3fn
        for name, count, size_n, size_k in self.projections_of(layer, hidden_size, intermediate_size_per_partition):
            sizes: dict[str, Any] = {"size_n": size_n, "size_k": size_k, "group_size": self.group_size}
            tiles = MarlinWeight("nk", num_bits=self.num_bits, source_dtype=dtype, **sizes)
            scales = MarlinScales(dtype=self.scale_dtype, is_transposed=True, is_interleaved=True, **sizes)
            along: dict[str, Any] = {"count": count, "output_dim": 0, **extra_weight_attrs}
            self.add_for_target(layer, f"{name}_{self.weight_name}", tiles, dtype, **along)
            along["quant_method"] = "group"
            self.add_for_target(layer, f"{name}_weight_scale", scales, self.scale_dtype, **along)
        self.add_biases(layer, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs)

    def dequantize_projection(self, layer: Any, name: str, position: int, part: int) -> torch.Tensor:
        codes = self.memory_of(layer, f"{name}_{self.weight_name}", position, part)
        if self.target == "marlin":
            codes = codes.T.contiguous()
        elif self.num_bits == 4:
            codes = unpack_words(codes, 4, 1)
        values = e2m1_values(codes) if self.num_bits == 4 else codes.view(torch.float8_e4m3fn).float()
        return values * self.scales_of(layer, name, position, part).repeat_interleave(self.group_size, 1)

    def scales_of(self, layer: Any, name: str, position: int, part: int) -> torch.Tensor:
        """What the values of a projection are multiplied with: float32 (N, K / group_size)."""
        scales = self.memory_of(layer, f"{name}_weight_scale", position, part)
        return (scales.T if self.target == "marlin" else scales).contiguous().view(self.scale_dtype).float()


class MxFp4MoEMethod(MxMoEMethod):
    """MXFP4 as compressed-tensors writes it: `weight_packed`, and `weight_scale`, powers of two (e8m0)."""


class MxFp8MoEMethod(MxMoEMethod):
    """MXFP8: `weight`, and `weight_scale`, powers of two (e8m0)."""

    num_bits: ClassVar[int] = 8
    weight_name: ClassVar[str] = "weight"


class NvFp4MoEMethod(MxMoEMethod):
    """NVFP4: e2m1, a scale (e4m3) for 16 inputs, and one for the tensor, float32 [experts, 2] and [experts].

    For Marlin `weight_scale` and the scale of the tensor become, after loading and in place, what
    `fp4.NvFp4LinearMethod` says. Gate and up projection of an expert share the latter, so that there is no form for
    those with different ones.

    Args:
        layer, target: as for MxMoEMethod.
        is_modelopt: the names are ModelOpt's: `weight`, `weight_scale_2`, `input_scale`, and the scale of the tensor is
            a multiplier; not compressed-tensors' `weight_packed`, `weight_global_scale`, `input_global_scale`, which
            are divisors.
        has_input_scale: the checkpoint has a scale of activations, float32 [experts, 2] and [experts], which is loaded
            and not used.
    """

    group_size: ClassVar[int] = 16
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    supports_pre_processed_weights = True

    def __init__(
        self, layer: Any, *, target: Target = "plain", is_modelopt: bool = False, has_input_scale: bool = False
    ) -> None:
        super().__init__(layer, target=target)
        self.is_modelopt = is_modelopt
        if is_modelopt:
            self.weight_name = "weight"  # type: ignore[misc]
        self._global_scale, self._input_scale = (
            ("weight_scale_2", "input_scale") if is_modelopt else ("weight_global_scale", "input_global_scale")
        )
        self.has_input_scale = has_input_scale
        # What has been loaded and not converted: (parameter, shard, expert).
        self._landed: set[tuple[str, str, int]] = set()

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        super().create_weights(
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
        )
        names = [self._global_scale, *([self._input_scale] if self.has_input_scale else [])]
        for name in names:
            for start, count in (("w13", layer.w13_num_shards), ("w2", 1)):
                attributes = {"quant_method": "tensor", **extra_weight_attrs}
                self.add(layer, f"{start}_{name}", (), torch.float32, count=count, **attributes)
        if self.target == "marlin":
            for start in ("w13", "w2"):
                for name in ("weight_scale", self._global_scale):
                    parameter = getattr(layer, f"{start}_{name}")
                    parameter.weight_loader = functools.partial(self._load, layer, name)

    def _load(
        self,
        layer: Any,
        name: str,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """The layer's own loader, and what it loads is noted."""
        loaded: bool = layer.weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success=True)
        if loaded:
            experts = layer.local_experts if loaded_weight.dim() == 3 else [expert_id]
            self._landed |= {(name, shard_id, expert) for expert in experts}
        return loaded if return_success else None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Brings scales into Marlin's form.

        Raises:
            CheckpointError: gate and up projection have different scales of the tensor; these are not finite numbers
                above 0; others are negative or NaN; not all have been loaded, or loaded again.
        """
        if self.target != "marlin" or is_weights_pre_processed() or not self._landed:
            return
        shards = ("w1", "w2", "w3") if layer.is_gated else ("w1", "w2")
        for name in ("weight_scale", self._global_scale):
            for expert in layer.local_experts:
                for shard in shards:
                    if (name, shard, expert) not in self._landed:
                        raise self._mismatch(
                            "all scales of a layer have to be loaded together for Marlin's form; "
                            f"{name} of {shard} of expert {expert} is missing"
                        )
        for start in ("w13", "w2"):
            scales, global_scales = (
                getattr(layer, f"{start}_{name}").data for name in ("weight_scale", self._global_scale)
            )
            for position, expert in enumerate(layer.local_experts):
                of_tensor = global_scales[position].reshape(-1)
                if not bool(((of_tensor > 0) & (of_tensor < torch.inf)).all()):
                    raise self._mismatch(
                        f"expected finite numbers above 0 in {start}_{self._global_scale} of expert {expert}, found "
                        f"{of_tensor.tolist()}"
                    )
                if bool((of_tensor != of_tensor[0]).any()):
                    raise self._mismatch(
                        f"gate and up projection of expert {expert} have different {self._global_scale}, "
                        f"{of_tensor.tolist()}, and Marlin's kernels take one for both; load with target='plain'"
                    )
                multiplier = of_tensor if self.is_modelopt else 1 / of_tensor
                dtype = layer.params_dtype
                try:
                    factor = convert_nvfp4_scales(scales[position], dtype)
                except ValueError as error:
                    raise self._mismatch(f"{start}_weight_scale of expert {expert}: {error}") from None
                of_tensor.copy_(ops.nvfp4_marlin_process_global_scale(multiplier, dtype) / factor)
        self._landed.clear()

    def scales_of(self, layer: Any, name: str, position: int, part: int) -> torch.Tensor:
        of_tensor: torch.Tensor = getattr(layer, f"{name}_{self._global_scale}").data[position].reshape(-1)[part]
        if self.target == "plain":
            return super().scales_of(layer, name, position, part) * (of_tensor if self.is_modelopt else 1 / of_tensor)
        parameter = getattr(layer, f"{name}_weight_scale")
        count = layer.w13_num_shards if name == "w13" else 1
        memory = parameter.data[position].chunk(count, 1)[part]
        return decode_nvfp4_scales(memory, of_tensor, parameter.memory_layout, layer.params_dtype)

    def _mismatch(self, problem: str) -> CheckpointError:
        return CheckpointError(problem, tensor=self.prefix, reason="QuantizationMismatch")
