"""Qwen3-MoE: Qwen3's decoder, with experts for the MLP of some of its layers."""

from __future__ import annotations

from torch import nn

from .experts import FusedMoE
from .linear import ReplicatedLinear
from .llama import Qwen3ForCausalLM
from .mixtral import MixtureOfExperts


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    def first_with_window(self) -> int:
        return 0

    def make_mlp(self, number: int, prefix: str) -> nn.Module:
        config = self.config
        step = getattr(config, "decoder_sparse_step", 1)
        if number in (getattr(config, "mlp_only_layers", None) or ()) or (number + 1) % step:
            return super().make_mlp(number, prefix)
        num_experts = getattr(config, "num_experts", None) or config.num_local_experts
        router = ReplicatedLinear(
            config.hidden_size,
            num_experts,
            bias=False,
            prefix=f"{prefix}.gate",
            parallel=self.parallel,
        )
        experts = FusedMoE(
            num_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            quant_config=self.quant_config,
            prefix=f"{prefix}.experts",
            parallel=self.parallel,
        )
        return MixtureOfExperts(router, experts)
