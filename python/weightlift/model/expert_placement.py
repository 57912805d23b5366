"""Which experts of a mixture-of-experts layer a rank holds."""

from __future__ import annotations

import functools

import torch

from .._logging import logger
from ..filters import Placement, local_experts


def determine_expert_map(
    ep_size: int, ep_rank: int, global_num_experts: int, expert_placement_strategy: Placement = "linear"
) -> tuple[int, torch.Tensor | None]:
    """How many experts a rank holds, and where; with vLLM's name and meaning.

    Args:
        ep_size, ep_rank: number of ranks that share the experts, and which of them this one is.
        global_num_experts: of the layer, copies included.
        expert_placement_strategy: as `placement` of `filters.local_experts`.

    Returns:
        The number of experts, and a map, int32 [global_num_experts]: the position of each expert on the rank, -1 for
        one that it does not hold. No map where there is one rank.

    Raises:
        ValueError: as `filters.local_experts`.
    """
    local = sorted(
        local_experts(global_num_experts, ep_size=ep_size, ep_rank=ep_rank, placement=expert_placement_strategy)
    )
    if ep_size == 1:
        return len(local), None
    # On the CPU also where a model is built on the meta device.
    expert_map = torch.full((global_num_experts,), -1, dtype=torch.int32, device="cpu")
    expert_map[local] = torch.arange(len(local), dtype=torch.int32, device="cpu")
    return len(local), expert_map


def usable_placement(
    strategy: Placement, *, ep_size: int, num_expert_group: int | None, num_redundant_experts: int, enable_eplb: bool
) -> Placement:
    """`strategy`, or "linear", with a warning, where a layer can't be dealt out: without groups of experts between
    which a token chooses, or with experts that move between ranks. Filters of a checkpoint have to be told the same."""
    needs_linear = (num_expert_group or 1) == 1 or num_redundant_experts or enable_eplb
    if strategy == "round_robin" and ep_size > 1 and needs_linear:
        _warn_of_linear()
        return "linear"
    return strategy


@functools.cache
def _warn_of_linear() -> None:
    """Once, and not for every layer."""
    logger.warning(
        "experts are placed 'linear', not 'round_robin': that needs several expert groups, no redundant experts and no "
        "balancing of experts"
    )
