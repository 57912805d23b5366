"""What the names of experts' tensors in a checkpoint stand for."""

from __future__ import annotations

import functools
from typing import NamedTuple

# (start of the parameter's name, start of the checkpoint's name, expert, shard)
ExpertMapping = tuple[str, str, int, str]

# What a gate and an up projection are called that are one tensor.
_FUSED = {("gate_proj", "up_proj"): "gate_up_proj", ("w1", "w3"): "w13"}


def logical_experts(num_experts: int, num_redundant_experts: int) -> list[int]:
    """Of which expert of the checkpoint each expert of a layer is a copy: all once, then the first again."""
    return [*range(num_experts), *(i % num_experts for i in range(num_redundant_experts))]


def make_expert_params_mapping(
    ckpt_gate_proj_name: str,
    ckpt_down_proj_name: str,
    ckpt_up_proj_name: str | None,
    num_experts: int,
    num_redundant_experts: int = 0,
    routed_experts_prefix: str = "",
    include_fused: bool = False,
) -> list[ExpertMapping]:
    """Which part of which parameter a name stands for; what weight loaders of models, as in vLLM, go through.

    Args:
        ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name: the projections in the checkpoint.
        num_experts: in the checkpoint.
        num_redundant_experts: copies beside these, in the layer.
        routed_experts_prefix: between `experts.` and the parameter; vLLM 0.33 has "routed_experts" there.
        include_fused: also tensors of all experts, and those of one expert's gate and up projection.

    Returns:
        (start of the parameter's name, start of the checkpoint's, expert of the layer, shard) for each expert and
        shard: "w1" gate, "w2" down, "w3" up. Gate and up projection are halves of a tensor of all experts; there the
        third says which.

    Example:
        >>> make_expert_params_mapping("gate_proj", "down_proj", "up_proj", num_experts=8)[0]
        ('experts.w13_', 'experts.0.gate_proj.', 0, 'w1')
    """
    prefix = f"experts.{routed_experts_prefix}." if routed_experts_prefix else "experts."
    w13, w2 = f"{prefix}w13_", f"{prefix}w2_"
    experts = list(enumerate(logical_experts(num_experts, num_redundant_experts)))
    mapping: list[ExpertMapping] = []
    if include_fused:
        if ckpt_up_proj_name is None:
            mapping.append((f"{w13}weight", f"experts.{ckpt_gate_proj_name}", 0, "w1"))
        elif fused := _FUSED.get((ckpt_gate_proj_name, ckpt_up_proj_name)):
            shards = ("w1", "w3")
            mapping += [(f"{w13}weight", f"experts.{fused}", half, shard) for half, shard in enumerate(shards)]
            mapping += [(w13, f"experts.{i}.{fused}.", expert, shard) for expert, i in experts for shard in shards]
        mapping.append((f"{w2}weight", f"experts.{ckpt_down_proj_name}", 0, "w2"))
    projections = [(w13, "w1", ckpt_gate_proj_name), (w2, "w2", ckpt_down_proj_name), (w13, "w3", ckpt_up_proj_name)]
    mapping += [
        (parameter, f"experts.{i}.{name}.", expert, shard)
        for expert, i in experts
        for parameter, shard, name in projections
        if name is not None
    ]
    return mapping


class Place(NamedTuple):
    """What a tensor, or a part of it, stands for."""

    param_name: str
    expert_id: int  # of the layer; of tensors of all experts it says nothing
    shard_id: str


class ExpertNames:
    """The mapping of one layer, to look names up.

    Args:
        ckpt_names: gate, down and up projection in the checkpoint.
        num_experts, num_redundant_experts: as for `make_expert_params_mapping`.
    """

    def __init__(self, ckpt_names: tuple[str, str, str | None], num_experts: int, num_redundant_experts: int) -> None:
        self._of_one: dict[str, list[Place]] = {}  # by `experts.7.gate_proj.`
        self._of_all: dict[str, list[Place]] = {}  # by `experts.gate_up_proj`
        mapping = make_expert_params_mapping(*ckpt_names, num_experts, num_redundant_experts, include_fused=True)
        for prefix, start, expert, shard in mapping:
            places = self._of_one if start.endswith(".") else self._of_all
            place = Place(prefix.removeprefix("experts.").removesuffix("weight"), expert, shard)
            places.setdefault(start, []).append(place)

    def find(self, name: str) -> tuple[list[Place], bool]:
        """What a name without that of the layer stands for, such as `7.gate_proj.weight`, `gate_up_proj_bias`; and
        whether the tensor is of all experts. Nothing: it is not a name of this layer's experts."""
        first, _, rest = name.partition(".")
        if first.isdecimal():
            projection, _, suffix = rest.partition(".")
            places = self._of_one.get(f"experts.{first}.{projection}.", [])
            return [Place(prefix + suffix, expert, shard) for prefix, expert, shard in places], False
        name = f"experts.{name}"
        for start, places in self._of_all.items():
            rest = name[len(start) :]
            if name.startswith(start) and rest[:1] in ("", ".", "_"):
                suffix = rest[1:] if rest.startswith((".", "_weight", "_bias")) else f"weight{rest}"
                return [Place(prefix + suffix, expert, shard) for prefix, expert, shard in places], True
        return [], False


@functools.lru_cache(maxsize=16)
def expert_names(ckpt_names: tuple[str, str, str | None], num_experts: int, num_redundant_experts: int) -> ExpertNames:
    """One for all layers of a model, which are alike."""
    return ExpertNames(ckpt_names, num_experts, num_redundant_experts)
