"""Mixtral: Llama's decoder, with experts for its MLP."""

from __future__ import annotations

import torch
from torch import nn

from .experts import FusedMoE
from .linear import ReplicatedLinear
from .llama import LlamaForCausalLM, MistralForCausalLM
from .mapping import WeightsMapper


class MixtureOfExperts(nn.Module):
    """A router, and the experts that this rank has, or its slice of each."""

    def __init__(self, router: nn.Module, experts: FusedMoE) -> None:
        super().__init__()
        self.gate = router
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        router_logits, _ = self.gate(tokens)
        out: torch.Tensor = self.experts(tokens, router_logits)
        return out.view_as(x)


class MixtralForCausalLM(MistralForCausalLM):
    hf_to_weightlift_mapper = LlamaForCausalLM.hf_to_weightlift_mapper | WeightsMapper(
        orig_to_new_substr={".block_sparse_moe.": ".mlp."}
    )

    def make_mlp(self, number: int, prefix: str) -> nn.Module:
        config = self.config
        router = ReplicatedLinear(
            config.hidden_size,
            config.num_local_experts,
            bias=False,
            prefix=f"{prefix}.gate",
            parallel=self.parallel,
        )
        experts = FusedMoE(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.intermediate_size,
            ckpt_names=("w1", "w2", "w3"),
            quant_config=self.quant_config,
            prefix=f"{prefix}.experts",
            parallel=self.parallel,
        )
        return MixtureOfExperts(router, experts)
