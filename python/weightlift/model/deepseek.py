"""DeepSeek-V3: latent attention (MLA), and experts in groups beside experts that all tokens share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .experts import FusedMoE
from .linear import ColumnParallelLinear, QuantizationConfig, ReplicatedLinear, RowParallelLinear
from .llama import MLP, CosSin, LlamaForCausalLM, RMSNorm, attention_mask
from .mapping import WeightsMapper
from .model_config import ModelConfig
from .parallel import ParallelConfig
from .quantization.kv_cache import KVCacheScales
from .rotary import attention_sharpness, rotate


class LatentAttention(nn.Module):
    """Attention whose keys and values are one low-rank vector a token, the latent, which all heads share.

    What makes keys and values of the latent is folded into queries and outputs: there is one head for keys and values,
    the latent itself. Each rank has some of the heads, and the projections to the latents whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        parallel: ParallelConfig,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        bias = getattr(config, "attention_bias", False)
        num_heads = config.num_attention_heads
        self.num_heads = num_heads // parallel.tp_size
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_dim, self.latent_dim = config.v_head_dim, config.kv_lora_rank
        self.is_interleaved = getattr(config, "rope_interleave", True)
        q_dim = self.nope_dim + self.rope_dim
        self.scaling = q_dim**-0.5 * attention_sharpness(config) ** 2
        hidden_size = config.hidden_size

        q_rank = getattr(config, "q_lora_rank", None)
        if q_rank is None:
            self.q_proj = ColumnParallelLinear(
                hidden_size,
                num_heads * q_dim,
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.q_proj",
                parallel=parallel,
            )
        else:
            self.q_a_proj = ReplicatedLinear(
                hidden_size,
                q_rank,
                bias=bias,
                quant_config=quant_config,
                prefix=f"{prefix}.q_a_proj",
                parallel=parallel,
            )
            self.q_a_layernorm = RMSNorm(q_rank, config.rms_norm_eps)
            self.q_b_proj = ColumnParallelLinear(
                q_rank,
                num_heads * q_dim,
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.q_b_proj",
                parallel=parallel,
            )
        self.has_q_latent = q_rank is not None
        self.attn = KVCacheScales(quant_config, f"{prefix}.attn")
        self.kv_a_proj_with_mqa = ReplicatedLinear(
            hidden_size,
            self.latent_dim + self.rope_dim,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.kv_a_proj_with_mqa",
            parallel=parallel,
        )
        self.kv_a_layernorm = RMSNorm(self.latent_dim, config.rms_norm_eps)
        self.kv_b_proj = ColumnParallelLinear(
            self.latent_dim,
            num_heads * (self.nope_dim + self.v_dim),
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.kv_b_proj",
            parallel=parallel,
        )
        self.o_proj = RowParallelLinear(
            num_heads * self.v_dim,
            hidden_size,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
            parallel=parallel,
        )

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        """Takes `kv_b_proj` apart into what makes keys and what makes values of a latent, a matrix for each head.

        Called when the weights of all linear layers are final.
        """
        method: Any = self.kv_b_proj.quant_method
        is_quantized = hasattr(method, "dequantize")
        weight = method.dequantize(self.kv_b_proj) if is_quantized else self.kv_b_proj.get_parameter("weight").detach()
        weight = weight.to(dtype)
        matrices = weight.view(self.num_heads, self.nope_dim + self.v_dim, self.latent_dim)
        self.to_key, self.to_value = matrices[:, : self.nope_dim], matrices[:, self.nope_dim :]

    def forward(self, x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        if self.has_q_latent:
            q, _ = self.q_a_proj(x)
            q, _ = self.q_b_proj(self.q_a_layernorm(q))
        else:
            q, _ = self.q_proj(x)
        q_nope, q_rope = (
            q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).split([self.nope_dim, self.rope_dim], dim=-1)
        )
        latent, _ = self.kv_a_proj_with_mqa(x)
        latent, k_rope = latent.unsqueeze(1).split([self.latent_dim, self.rope_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)  # [batch, 1, length, latent_dim]

        query = torch.cat((q_nope @ self.to_key, self._rotate(q_rope, cos_sin)), dim=-1)
        key = torch.cat((latent, self._rotate(k_rope, cos_sin)), dim=-1)
        mask = attention_mask(x.shape[1], None, x.device)
        out: torch.Tensor = F.scaled_dot_product_attention(
            query, key, latent, attn_mask=mask, scale=self.scaling, enable_gqa=True
        )
        out = out @ self.to_value.transpose(1, 2)
        out, _ = self.o_proj(out.transpose(1, 2).flatten(-2))
        return out

    def _rotate(self, x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        return rotate(x, cos_sin, interleaved=self.is_interleaved)


class SharedAndRoutedExperts(nn.Module):
    """Experts that a router chooses, and one that every token passes."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        parallel: ParallelConfig,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        config.require("moe_intermediate_size", "n_group", "n_routed_experts", "n_shared_experts", "topk_group")
        # In float32, as in training: small differences decide which experts a token goes to.
        self.gate = ReplicatedLinear(
            config.hidden_size,
            config.n_routed_experts,
            bias=False,
            params_dtype=torch.float32,
            prefix=f"{prefix}.gate",
            parallel=parallel,
        )
        # Balances the experts: added to the scores by which they are chosen, not to those by which they are weighted.
        self.gate.e_score_correction_bias = nn.Parameter(torch.empty(config.n_routed_experts, dtype=torch.float32))
        self.experts = FusedMoE(
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            use_grouped_topk=True,
            num_expert_group=config.n_group,
            topk_group=config.topk_group,
            scoring_func="sigmoid",
            routed_scaling_factor=config.routed_scaling_factor,
            e_score_correction_bias=self.gate.e_score_correction_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
            parallel=parallel,
        )
        self.shared_experts = MLP(
            config,
            config.moe_intermediate_size * config.n_shared_experts,
            parallel=parallel,
            quant_config=quant_config,
            prefix=f"{prefix}.shared_experts",
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        router_logits, _ = self.gate(tokens.float())
        routed: torch.Tensor = self.experts(tokens, router_logits)
        shared: torch.Tensor = self.shared_experts(x)
        return routed.view_as(x) + shared


class DeepseekV3ForCausalLM(LlamaForCausalLM):
    def __init__(
        self,
        config: ModelConfig,
        *,
        parallel: ParallelConfig,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(config, parallel=parallel, quant_config=quant_config, prefix=prefix)
        # Layers behind the last one are those of the draft model, which predicts several tokens ahead.
        num_drafts = getattr(config, "num_nextn_predict_layers", None) or 0
        drafts = range(config.num_hidden_layers, config.num_hidden_layers + num_drafts)
        self.hf_to_weightlift_mapper = WeightsMapper(
            orig_to_new_prefix={f"model.layers.{number}.": None for number in drafts},
            orig_to_new_stacked={
                f".{mlp}.{part}_proj.": (f".{mlp}.gate_up_proj.", shard)
                for mlp in ("mlp", "shared_experts")
                for shard, part in enumerate(("gate", "up"))
            },
        )

    def make_attention(self, number: int, prefix: str) -> nn.Module:
        return LatentAttention(self.config, parallel=self.parallel, quant_config=self.quant_config, prefix=prefix)

    def make_mlp(self, number: int, prefix: str) -> nn.Module:
        if number < self.config.first_k_dense_replace:
            return super().make_mlp(number, prefix)
        return SharedAndRoutedExperts(
            self.config, parallel=self.parallel, quant_config=self.quant_config, prefix=prefix
        )
