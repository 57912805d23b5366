"""AWQ: integers of 4 or 8 bits, packed along the outputs and interleaved, with zero points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..experts import FusedMoE
from ..linear import LinearBase, LinearMethodBase, QuantizeMethodBase
from ..vocab import ParallelLMHead
from .base import QuantizationConfig, Target
from .layer_names import LayerNames
from .packed_linear import PackedLinearMethod

if TYPE_CHECKING:
    from typing_extensions import Self


class AWQConfig(QuantizationConfig):
    """The config of AWQ's tools (AutoAWQ), of checkpoints in their form for GEMM.

    Args:
        target, ignored: as for QuantizationConfig.
        bits, group_size: as for AWQLinearMethod.
        is_head_quantized: so is the head.

    Raises:
        ValueError: there is no method for this.
    """

    name = "awq"

    def __init__(
        self,
        *,
        target: Target = "plain",
        ignored: LayerNames | None = None,
        bits: int,
        group_size: int,
        is_head_quantized: bool = False,
    ) -> None:
        super().__init__(target=target, ignored=ignored)
        if bits not in (4, 8):
            raise ValueError(f"Unsupported num_bits = {bits!r}. Supported: 4, 8.")
        if type(group_size) is not int:
            raise ValueError(f"group_size is {group_size!r}; expected a number")
        self.bits = bits
        self.group_size = group_size
        self.is_head_quantized = is_head_quantized

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, target: Target = "plain") -> Self:
        bits, group_size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
        if bits is None or group_size is None:
            raise ValueError(f"{'bits' if bits is None else 'group_size'} missing; AWQ's config says it of all layers")
        if not config.get("zero_point", True):
            raise ValueError("zero_point is false; there is no method for AWQ without zero points")
        version = str(config.get("version") or "gemm").lower()
        if version != "gemm":
            raise ValueError(f"version is {version!r}; accepted is 'gemm', whose weights are packed along the outputs")
        ignored = LayerNames.of_config(config, "modules_to_not_convert", match="path")
        return cls(
            target=target,
            ignored=ignored,
            bits=bits,
            group_size=group_size,
            is_head_quantized=bool(config.get("lm_head")),
        )

    def linear_method(self, layer: LinearBase, prefix: str) -> LinearMethodBase:
        return AWQLinearMethod(prefix, target=self.target, num_bits=self.bits, group_size=self.group_size)

    def lm_head_method(self, layer: ParallelLMHead, prefix: str) -> LinearMethodBase | None:
        if not self.is_head_quantized:
            return None
        return AWQLinearMethod(prefix, target=self.target, num_bits=self.bits, group_size=self.group_size)

    def experts_method(self, layer: FusedMoE, prefix: str) -> QuantizeMethodBase:
        from .experts_packed import PackedMoEMethod

        return PackedMoEMethod(
            layer,
            layout="awq",
            num_bits=self.bits,
            group_size=self.group_size,
            has_zero_points=True,
            target=self.target,
        )


class AWQLinearMethod(PackedLinearMethod):
    """`qweight` (K, N / per), `scales` and `qzeros`. Arguments as for PackedLinearMethod."""

    packing = "awq"
    weight_name, scale_name, zero_point_name = "qweight", "scales", "qzeros"

    def __init__(self, prefix: str, *, target: Target = "plain", num_bits: int, group_size: int) -> None:
        super().__init__(prefix, target=target, num_bits=num_bits, group_size=group_size, has_zero_points=True)
