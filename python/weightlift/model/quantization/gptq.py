"""GPTQ: integers of 4 or 8 bits, packed along the inputs, symmetric."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...errors import CheckpointError
from ..experts import FusedMoE
from ..linear import LinearBase, LinearMethodBase, QuantizeMethodBase, UnquantizedLinearMethod
from ..mapping import WeightsMapper
from ..parameter import BasevLLMParameter
from ..vocab import ParallelLMHead
from .arrival import Unused
from .base import QuantizationConfig, Target, parts_of_experts, read_object
from .packed_linear import PackedLinearMethod

if TYPE_CHECKING:
    from typing_extensions import Self

_KINDS = [(4, True), (8, True)]  # (bits, sym)

_NO_ACT_ORDER = "Use a checkpoint with static activation ordering or desc_act=False."
# There are thousands of them, alike in what they say.
_ORDERS_OF_EXPERTS = WeightsMapper(orig_to_new_regex={re.compile(r".*\.experts\..*\.g_idx$"): None})


@dataclass(frozen=True)
class _Kind:
    """How layers are quantised, by the config or by one of its rules for some of them."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool

    def check(self, of: str = "") -> None:
        if (self.bits, self.sym) not in _KINDS:
            raise ValueError(f"Unsupported quantization config: bits={self.bits!r}, sym={self.sym!r}{of}")
        if type(self.group_size) is not int:
            raise ValueError(f"group_size is {self.group_size!r}; expected a number{of}")
        # With one group there is nothing to order.
        if self.desc_act and self.group_size != -1:
            raise ValueError(
                f"GPTQ group activation ordering (desc_act=True) is no longer supported{of}. {_NO_ACT_ORDER}"
            )

    def with_rule(self, rule: Mapping[str, Any]) -> _Kind:
        fields = {name: rule.get(name, value) for name, value in vars(self).items()}
        return _Kind(**fields)


class GPTQConfig(QuantizationConfig):
    """The config of GPTQ's tools (AutoGPTQ, GPTQModel).

    Its `dynamic` has rules for some of the layers: a regular expression for the beginning of their names, and fields
    that take the place of the config's; with `-:` before it, these layers are not quantised. The first that fits
    counts. It is asked for the names that layers have in the checkpoint, and for that of a fused layer.

    Args:
        target: of QuantizationConfig.
        kind: of all layers that no rule is for.
        dynamic: the rules.
        modules: parts of names of the layers that are quantised; empty: all are.
        is_head_quantized: so is the head.

    Raises:
        ValueError: there is no method for this; so does `linear_method`, of a layer.
    """

    name = "gptq"

    def __init__(
        self,
        *,
        target: Target = "plain",
        kind: _Kind,
        dynamic: Mapping[str, Any],
        modules: list[str],
        is_head_quantized: bool = False,
    ) -> None:
        super().__init__(target=target)
        kind.check()
        self.kind = kind
        self.modules = modules
        self.is_head_quantized = is_head_quantized
        self.dynamic: dict[re.Pattern[str], _Kind | None] = {}
        for pattern, rule in dynamic.items():
            try:
                regex = re.compile(pattern.removeprefix("-:").removeprefix("+:"))
            except re.error as error:
                raise ValueError(f"dynamic: {pattern!r} is no regular expression: {error}") from None
            if pattern.startswith("-:"):
                self.dynamic[regex] = None
                continue
            if not isinstance(rule, Mapping):
                raise ValueError(f"dynamic: {pattern!r} is for {rule!r}; expected an object")
            self.dynamic[regex] = changed = kind.with_rule(rule)
            changed.check(f" (dynamic rule {pattern!r})")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, target: Target = "plain") -> Self:
        missing = [name for name in ("bits", "group_size", "desc_act", "sym") if config.get(name) is None]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing; GPTQ's config says it of all layers")
        written_as = config.get("checkpoint_format") or "gptq"
        if written_as not in ("gptq", "gptq_v2"):  # they differ in zero points, which do not count here
            raise ValueError(f"checkpoint_format is {written_as!r}; accepted is gptq and gptq_v2")
        modules = "modules_in_block_to_quantize"
        return cls(
            target=target,
            kind=_Kind(config["bits"], config["group_size"], config["sym"], config["desc_act"]),
            dynamic=read_object(config, "dynamic"),
            modules=list(_texts_in(modules, config.get(modules) or [])),
            is_head_quantized=bool(config.get("lm_head")),
        )

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        return _ORDERS_OF_EXPERTS

    def linear_method(self, layer: LinearBase, prefix: str) -> LinearMethodBase:
        return self._method(prefix) or UnquantizedLinearMethod()

    def lm_head_method(self, layer: ParallelLMHead, prefix: str) -> LinearMethodBase | None:
        return self._method(prefix) if self.is_head_quantized else None

    def _method(self, prefix: str) -> GPTQLinearMethod | None:
        kind = self._kind_of(prefix, self.parts_of(prefix))
        if kind is None:
            return None
        return GPTQLinearMethod(prefix, target=self.target, num_bits=kind.bits, group_size=kind.group_size)

    def experts_method(self, layer: FusedMoE, prefix: str) -> QuantizeMethodBase:
        from ..expert_methods import UnquantizedFusedMoEMethod
        from .experts_packed import PackedMoEMethod

        kind = self._kind_of(prefix, parts_of_experts(layer, prefix))
        if kind is None:
            return UnquantizedFusedMoEMethod()
        return PackedMoEMethod(
            layer,
            layout="gptq",
            num_bits=kind.bits,
            group_size=kind.group_size,
            has_zero_points=False,
            target=self.target,
        )

    def _kind_of(self, prefix: str, parts: list[str]) -> _Kind | None:
        """How a layer is quantised, by its name or by those of its parts; None: not at all."""
        kinds = {part: self._kind_by_name(prefix, part) for part in parts}
        if len(set(kinds.values())) > 1:
            raise ValueError(
                f"Detected some but not all shards of {prefix} are quantized. All shards of fused layers to have the "
                f"same precision. By the config they are: {kinds}"
            )
        return next(iter(kinds.values()))

    def _kind_by_name(self, prefix: str, part: str) -> _Kind | None:
        if self.modules and not any(module in part for module in self.modules):
            return None
        for regex, kind in self.dynamic.items():
            if regex.match(part) or regex.match(prefix):
                return kind
        return self.kind


def _texts_in(field: str, value: Any) -> Iterator[str]:
    """Those of a list, and of the lists in it. Raises ValueError: it has something else."""
    if not isinstance(value, list):
        raise ValueError(f"{field}: found {value!r}; expected a list of parts of the names of layers")
    for entry in value:
        if isinstance(entry, str):
            yield entry
        else:
            yield from _texts_in(field, entry)


class GPTQLinearMethod(PackedLinearMethod):
    """`qweight` (K / per, N), `scales`, and `qzeros`, which says nothing: for Marlin it has no elements.

    `g_idx`, the group of each input, is looked at and not kept, if the checkpoint has it: groups that are not one after
    the other, though the config says so, are a CheckpointError.

    Args:
        prefix, target, num_bits, group_size: as for PackedLinearMethod.
    """

    packing = "gptq"
    weight_name, scale_name, zero_point_name = "qweight", "scales", "qzeros"
    always_has_zero_points = True

    def __init__(self, prefix: str, *, target: Target = "plain", num_bits: int, group_size: int) -> None:
        super().__init__(prefix, target=target, num_bits=num_bits, group_size=group_size, has_zero_points=False)

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
        order = _InOrder(self.prefix, input_size, self.group_size)
        layer.register_parameter(
            "g_idx", BasevLLMParameter(data=order.empty(), memory_layout=order, **extra_weight_attrs)
        )


class _InOrder(Unused):
    """The groups of all inputs, of all ranks, which are one after the other."""

    def __init__(self, prefix: str, input_size: int, group_size: int) -> None:
        super().__init__((input_size,), torch.int32)
        self.prefix, self.group_size = prefix, group_size

    def place(self, target: torch.Tensor, part: torch.Tensor, begin: Sequence[int]) -> None:
        if self.group_size == -1:
            return
        in_order = torch.arange(len(part), device=part.device) // self.group_size
        # Some tools leave zeros where there is no other order.
        if not bool((part != in_order).any()) or not bool(part.any()):
            return
        raise CheckpointError(
            "these inputs are not in the order of their groups, though the config says desc_act=False. GPTQ group "
            f"activation ordering (desc_act=True) is no longer supported. {_NO_ACT_ORDER}",
            tensor=f"{self.prefix}.g_idx",
            reason="QuantizationMismatch",
        )
