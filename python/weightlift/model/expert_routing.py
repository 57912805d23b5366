"""To which experts a token goes, and with which weights."""

from __future__ import annotations

import torch

Routing = tuple[torch.Tensor, torch.Tensor]


def route(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> Routing:
    """The experts of each token.

    Args:
        router_logits: [tokens, experts].
        top_k: how many experts a token goes to.
        renormalize: whether the weights of a token are made to sum to 1.
        num_expert_group, topk_group: the experts lie in so many groups, of which a token first chooses some, by their
            best expert, or with a bias by the sum of their best two (DeepSeek).
        scoring_func: "softmax" or "sigmoid" of the logits.
        routed_scaling_factor: by which weights are multiplied at last.
        e_score_correction_bias: [experts], added to the scores for the choice, not in the weights.

    Returns:
        Weights, float32, and numbers of experts, int64, both [tokens, top_k].

    Raises:
        ValueError: another scoring_func.
    """
    logits = router_logits.float()
    if scoring_func == "softmax":
        scores = logits.softmax(dim=-1)
    elif scoring_func == "sigmoid":
        scores = logits.sigmoid()
    else:
        raise ValueError(f"scoring_func is {scoring_func!r}; accepted is 'softmax' or 'sigmoid'")
    choice = scores if e_score_correction_bias is None else scores + e_score_correction_bias
    if num_expert_group is not None and topk_group is not None:
        groups = choice.view(*choice.shape[:-1], num_expert_group, -1)
        num_best = 1 if e_score_correction_bias is None else min(2, groups.shape[-1])
        best = groups.topk(num_best, dim=-1).values.sum(dim=-1)
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(topk_group, dim=-1).indices, True)
        choice = groups.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if renormalize:
        # Sigmoids may all be 0.
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    return weights * routed_scaling_factor, experts
