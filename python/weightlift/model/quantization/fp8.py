"""FP8 weights (e4m3) with a scale for each tensor, output or block: vLLM's `fp8`, and what others have alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from ... import ops
from ..linear import LinearBase, QuantizeMethodBase
from ..parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from .arrival import Converted, MarlinWeight, MemoryLayout, fnuz_weight
from .base import UNSET, QuantizationConfig, QuantizedLinearMethod, Target
from .fp8_scales import MarlinFp8Scales, ModelOptBlockScales, doubled_scales
from .layer_names import LayerNames

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..experts import FusedMoE

Strategy = Literal["tensor", "channel", "block"]

# Inputs that share a scale in Marlin's kernels.
MARLIN_GROUPS = (32, 64, 128)


class Fp8Config(QuantizationConfig):
    """`quant_method` "fp8": as AutoFP8 writes it, per tensor, and DeepSeek, in blocks with `weight_scale_inv`.

    Args:
        is_static: the checkpoint has scales of the activations.
        block_size: (rows, columns) that share a scale; None: each tensor has one.
    """

    name = "fp8"
    has_cache_scales = True

    def __init__(
        self,
        *,
        is_static: bool = False,
        block_size: tuple[int, int] | None = None,
        target: Target = "plain",
        ignored: LayerNames | None = None,
    ) -> None:
        super().__init__(target=target, ignored=ignored)
        self.is_static = is_static
        self.block_size = block_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, target: Target = "plain") -> Self:
        scheme = config.get("activation_scheme", "dynamic")
        if scheme not in ("static", "dynamic"):
            raise ValueError(f"Unsupported activation scheme {scheme}; known are static and dynamic")
        block_size = read_block_size(config.get("weight_block_size"))
        if block_size is not None and scheme != "dynamic":
            raise ValueError(
                "The block-wise quantization only supports dynamic activation scheme for now, but got "
                f"{scheme} activation scheme."
            )
        ignored = LayerNames.of_config(config, "ignored_layers", "modules_to_not_convert", match="path")
        return cls(is_static=scheme == "static", block_size=block_size, target=target, ignored=ignored)

    def linear_method(self, layer: LinearBase, prefix: str) -> Fp8LinearMethod:
        return Fp8LinearMethod(
            prefix,
            strategy="tensor" if self.block_size is None else "block",
            block_size=self.block_size,
            is_static=self.is_static,
            scale_name="weight_scale" if self.block_size is None else "weight_scale_inv",
            target=self.target,
        )

    def experts_method(self, layer: FusedMoE, prefix: str) -> QuantizeMethodBase:
        from .experts_fp8 import Fp8MoEMethod

        return Fp8MoEMethod(
            layer,
            strategy="tensor" if self.block_size is None else "block",
            target=self.target,
            static_input=self.is_static,
            block_size=self.block_size,
            scale_name="weight_scale_inv",
        )


class Fp8LinearMethod(QuantizedLinearMethod):
    """`weight` [N, K] and its scales. With target "plain":

    - `weight` float8_e4m3fn [N, K];
    - `weight_scale` float32, by strategy [parts], [N, 1] or [ceil(N / block_n), ceil(K / block_k)];
    - `input_scale` float32 [parts], of static activations.

    With "fnuz" `weight` is float8_e4m3fnuz and scales are doubled. With "marlin" `weight` is int32 in tiles of 8-bit
    Marlin, and `weight_scale` [groups, N] of the dtype of the activations, as `ops.fp8_marlin_process_scales` makes it.

    Parts of a fused layer that have a scale each get the largest of them after loading, and are quantised again with
    it, unless all are the same; in place, so that the layer can be loaded again. In Marlin's form each keeps its own.

    Args:
        strategy: what has one scale.
        block_size: (block_n, block_k), with strategy "block".
        is_static: activations have a scale in the checkpoint.
        scale_name: what the parameter `weight_scale` is called.
        is_modelopt: block scales are [ceil(N / block_n), 1, ceil(K / block_k), 1] on disk.
    """

    targets: ClassVar[tuple[Target, ...]] = ("plain", "fnuz", "marlin")
    supports_pre_processed_weights = True  # done again, it changes nothing

    def __init__(
        self,
        prefix: str,
        *,
        strategy: Strategy,
        block_size: tuple[int, int] | None = None,
        is_static: bool = False,
        scale_name: str = "weight_scale",
        is_modelopt: bool = False,
        target: Target = "plain",
    ) -> None:
        super().__init__(prefix, target=target)
        self.strategy = strategy
        self.block_size = block_size
        self.is_static = is_static
        self.scale_name = scale_name
        self.is_modelopt = is_modelopt
        if target == "marlin" and block_size is not None and block_size[1] not in MARLIN_GROUPS:
            groups = ", ".join(map(str, MARLIN_GROUPS))
            raise self.error(f"weight quantization block_k = {block_size[1]} is not one that Marlin has: {groups}")

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
        widths, columns = list(output_partition_sizes), input_size_per_partition
        rows = sum(widths)
        layer.logical_widths = widths  # type: ignore[assignment]
        if self.block_size is not None:
            self._check_blocks(layer, widths, columns, input_size, output_size)
            layer.weight_block_size = list(self.block_size)  # type: ignore[assignment]
        if self.target == "marlin" and params_dtype not in (torch.float16, torch.bfloat16):
            raise self.error(f"scales of Marlin are float16 or bfloat16, as activations are; found {params_dtype}")
        group_size = -1 if self.block_size is None else self.block_size[1]
        weight = fp8_weight(rows, columns, self.target, group_size=group_size, **extra_weight_attrs)
        layer.register_parameter("weight", weight)
        scale = self._make_scale(widths, columns, params_dtype, **extra_weight_attrs)
        layer.register_parameter(self.scale_name, scale)
        if self.is_static:
            layer.register_parameter("input_scale", self._make_per_tensor(len(widths), **extra_weight_attrs))

    def _make_scale(self, widths: list[int], columns: int, dtype: torch.dtype, **attrs: Any) -> torch.nn.Parameter:
        if self.strategy == "tensor" and self.target != "marlin":
            return self._make_per_tensor(len(widths), **attrs)
        shape = (sum(widths), 1)
        if self.block_size is not None:
            shape = (-(-sum(widths) // self.block_size[0]), -(-columns // self.block_size[1]))
        layout: MemoryLayout | None = None
        if self.target == "marlin":
            layout = MarlinFp8Scales(widths, columns, dtype, self.strategy, self.block_size)
        elif self.target == "fnuz":
            layout = doubled_scales(shape)
        if self.is_modelopt:
            layout = ModelOptBlockScales(layout or Converted(shape, torch.float32, torch.Tensor.float))
        attrs["data"] = torch.empty(shape, dtype=torch.float32) if layout is None else layout.empty()
        attrs["memory_layout"] = layout
        if self.strategy == "tensor":
            return PerTensorScaleParameter(**attrs)
        if self.strategy == "channel":
            return ChannelQuantScaleParameter(output_dim=0, **attrs)
        return BlockQuantScaleParameter(output_dim=0, input_dim=2 if self.is_modelopt else 1, **attrs)

    def _make_per_tensor(self, parts: int, **attrs: Any) -> torch.nn.Parameter:
        layout = doubled_scales((parts,)) if self.target == "fnuz" else None
        data = torch.full((parts,), UNSET, dtype=torch.float32)
        return PerTensorScaleParameter(data=data, memory_layout=layout, **attrs)

    def _check_blocks(self, layer: Any, widths: Sequence[int], columns: int, input_size: int, output_size: int) -> None:
        assert self.block_size is not None
        block_n, block_k = self.block_size
        tp_size = layer.tp_size
        if tp_size > 1 and input_size // columns == tp_size and columns % block_k:
            raise self.error(
                f"Weight input_size_per_partition = {columns} is not divisible by weight quantization block_k = "
                f"{block_k}."
            )
        is_split = tp_size > 1 and output_size // sum(widths) == tp_size
        # The last block of a tensor may be a part of one; those of others go on below it.
        for width in widths if is_split else widths[:-1]:
            if width % block_n:
                raise self.error(
                    f"Weight output_partition_size = {width} is not divisible by weight quantization block_n = "
                    f"{block_n}."
                )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Brings parts of a fused layer to one scale. Raises ValueError: a part has none, or one that can't be."""
        scales = getattr(layer, self.scale_name)
        if self.strategy == "tensor" and self.target == "marlin":
            self.check_loaded(self.scale_name, scales[0])
        elif self.strategy == "tensor":
            self.check_loaded(self.scale_name, scales)
            if bool((scales != scales[0]).any()):
                largest, weight = ops.requantize_with_max_scale(layer.weight.data, scales.data, layer.logical_widths)
                layer.weight.data.copy_(weight)
                scales.data.fill_(largest)
        if self.is_static:
            self.check_loaded("input_scale", layer.input_scale)
            layer.input_scale.data.fill_(layer.input_scale.data.max())

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.weight.data
        scale = getattr(layer, self.scale_name)
        scales: torch.Tensor = scale.data
        if self.target == "marlin":
            layout = scale.memory_layout.layout if self.is_modelopt else scale.memory_layout
            scales = layout.decode(scales)
            return decode_marlin_fp8(layer.weight) * scales
        if self.block_size is not None:
            return ops.dequantize_blocks(weight, scales, self.block_size)
        if self.strategy == "tensor":
            scales = ops.convert_to_channelwise(scales, layer.logical_widths)
        return weight.float() * scales


def fp8_weight(rows: int, columns: int, target: Target, *, group_size: int = -1, **attrs: Any) -> ModelWeightParameter:
    """A parameter for a weight that is float8_e4m3fn [rows, columns] on disk. `group_size`: inputs with one scale."""
    layout: MemoryLayout | None = None
    if target == "marlin":
        layout = MarlinWeight(
            packing="nk",
            num_bits=8,
            size_n=rows,
            size_k=columns,
            group_size=group_size,
            source_dtype=torch.float8_e4m3fn,
        )
    elif target == "fnuz":
        layout = fnuz_weight((rows, columns))
    data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn) if layout is None else layout.empty()
    return ModelWeightParameter(data=data, input_dim=1, output_dim=0, memory_layout=layout, **attrs)


def decode_marlin_fp8(weight: Any) -> torch.Tensor:
    """The numbers of a weight in Marlin's tiles, float32 [N, K], without their scales."""
    values: torch.Tensor = weight.memory_layout.decode(weight.data).view(torch.float8_e4m3fn)
    return values.T.float()


def read_block_size(value: Any) -> tuple[int, int] | None:
    """Rows and columns that share a scale, as a config has them. Raises ValueError: these are not two sizes."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        found = f"{len(value)} dimensions" if isinstance(value, (list, tuple)) else repr(value)
        raise ValueError(f"The quantization block size of weight must have 2 dimensions, but got {found}")
    if not all(type(size) is int and size > 0 for size in value):
        raise ValueError(f"The quantization block size of weight must be positive, but got {value}")
    return value[0], value[1]
