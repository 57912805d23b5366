"""Llama, Mistral, Qwen2 and Qwen3: a decoder whose layers know how they are cut. The one to read first.

What an engine's model needs for loading is here, and no more: layers that are cut by `ParallelConfig`, under the names
of the checkpoint but for those that are stacked, and one mapper that says which. `forward` is the whole sequence at
once in plain PyTorch, without a cache of keys and values, to prove that what was loaded is right.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .linear import MergedColumnParallelLinear, QKVParallelLinear, QuantizationConfig, RowParallelLinear
from .mapping import WeightsMapper
from .model_config import ModelConfig, is_tied
from .parallel import ParallelConfig
from .pipeline import PPMissingLayer, is_first_stage, is_last_stage, make_layers, stage_layers
from .quantization.kv_cache import KVCacheScales
from .rotary import RotaryEmbedding, rope_parameters, rotate
from .vocab import ParallelLMHead, VocabParallelEmbedding

CosSin = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """Scales vectors to a mean square of 1, in float32, and then each element by its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Attention(nn.Module):
    """Attention with grouped queries: each rank has some of the heads.

    Args:
        config: of the model.
        window: how many positions back it looks, its own included; None: all.
        qkv_bias, o_bias: whether these projections have a bias.
        qk_norm: whether queries and keys are normalised, head by head.
    """

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
        parallel: ParallelConfig,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        num_heads = config.num_attention_heads
        self.head_dim = head_dim(config)
        self.window = window
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            num_heads,
            num_kv_heads_of(config),
            bias=qkv_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
            parallel=parallel,
        )
        self.o_proj = RowParallelLinear(
            num_heads * self.head_dim,
            config.hidden_size,
            bias=o_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
            parallel=parallel,
        )
        self.attn = KVCacheScales(quant_config, f"{prefix}.attn")
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        qkv, _ = self.qkv_proj(x)
        heads = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [batch, heads, length, head_dim]
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        q, k = rotate(self.q_norm(q), cos_sin), rotate(self.k_norm(k), cos_sin)
        mask = attention_mask(x.shape[1], self.window, x.device)
        out: torch.Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        out, _ = self.o_proj(out.transpose(1, 2).flatten(-2))
        return out


class MLP(nn.Module):
    """Two projections up, of which the one gates the other, and one down."""

    def __init__(
        self,
        config: ModelConfig,
        intermediate_size: int,
        *,
        bias: bool = False,
        parallel: ParallelConfig,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [intermediate_size] * 2,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
            parallel=parallel,
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            config.hidden_size,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
            parallel=parallel,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, dim=-1)
        out: torch.Tensor
        out, _ = self.down_proj(F.silu(gate) * up)
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin)
        added: torch.Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


class Decoder(nn.Module):
    """What checkpoints call `model`: embeddings, layers, and the last norm. A pipeline stage has a part of these."""

    def __init__(
        self,
        config: ModelConfig,
        layers: nn.ModuleList,
        *,
        parallel: ParallelConfig,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.here = stage_layers(config, parallel)
        is_tied_head = is_last_stage(parallel) and is_tied(config)
        self.embed_tokens = (
            VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                quant_config=quant_config,
                prefix=f"{prefix}.embed_tokens",
                parallel=parallel,
            )
            if is_first_stage(parallel) or is_tied_head
            else PPMissingLayer()
        )
        self.layers = layers
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if is_last_stage(parallel) else PPMissingLayer()
        self.rotary = RotaryEmbedding(config, rotary_dim(config))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = inputs if inputs.is_floating_point() else self.embed_tokens(inputs)
        cos_sin = self.rotary(x.shape[1])
        for number in self.here:
            x = self.layers[number](x, cos_sin)
        normed: torch.Tensor = self.norm(x)
        return normed


class LlamaForCausalLM(nn.Module):
    """A decoder and its head. Other architectures differ in `make_attention` and `make_mlp`.

    Args:
        config: of the model.
        parallel: the part of it that this process has.
        quant_config: gives layers their quant methods; None: weights are not quantised.
        prefix: before the names of its layers, where it is a part of another model.

    Raises:
        ConfigError: the config lacks something, or heads cannot be dealt to the ranks.
    """

    hf_to_weightlift_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj.": (".qkv_proj.", "q"),
            ".k_proj.": (".qkv_proj.", "k"),
            ".v_proj.": (".qkv_proj.", "v"),
            # Not of experts, which stack them on their own.
            ".mlp.gate_proj.": (".mlp.gate_up_proj.", 0),
            ".mlp.up_proj.": (".mlp.gate_up_proj.", 1),
        }
    )

    def __init__(
        self,
        config: ModelConfig,
        *,
        parallel: ParallelConfig,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        config.require("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        check_heads(config, parallel)
        if config.hidden_act != "silu":
            raise config.error(f"hidden_act is {config.hidden_act!r}; the models here have 'silu'")
        self.config = config
        self.quant_config = quant_config
        self.parallel = parallel
        prefix = f"{prefix}." if prefix else ""

        def make_layer(number: int) -> nn.Module:
            name = f"{prefix}model.layers.{number}"
            attention = self.make_attention(number, f"{name}.self_attn")
            return DecoderLayer(config, attention, self.make_mlp(number, f"{name}.mlp"))

        layers = make_layers(config, parallel, make_layer)
        self.model = Decoder(config, layers, parallel=parallel, quant_config=quant_config, prefix=f"{prefix}model")
        self.lm_head: nn.Module = PPMissingLayer()
        if is_last_stage(parallel):
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=quant_config,
                prefix=f"{prefix}lm_head",
                parallel=parallel,
            )
            if isinstance(self.model.embed_tokens, VocabParallelEmbedding) and is_tied(config):
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)

    def make_attention(self, number: int, prefix: str) -> nn.Module:
        # Without layer_types a window is ignored, as in transformers and vLLM: the architecture has none.
        window = sliding_window(self.config, number) if getattr(self.config, "layer_types", None) else None
        bias = getattr(self.config, "attention_bias", False)
        return Attention(
            self.config,
            window,
            qkv_bias=bias,
            o_bias=bias,
            parallel=self.parallel,
            quant_config=self.quant_config,
            prefix=prefix,
        )

    def make_mlp(self, number: int, prefix: str) -> nn.Module:
        return MLP(
            self.config,
            self.config.intermediate_size,
            bias=getattr(self.config, "mlp_bias", False),
            parallel=self.parallel,
            quant_config=self.quant_config,
            prefix=prefix,
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The whole sequence at once.

        Args:
            inputs: token ids, [batch, length]; for a later pipeline stage what the one before has returned.

        Returns:
            Logits, [batch, length, vocab_size], the same on every rank; of a pipeline stage that is not the last, its
            hidden states, [batch, length, hidden_size].
        """
        x: torch.Tensor = self.model(inputs)
        if is_last_stage(self.parallel):
            x = self.lm_head(x)
        return x


class MistralForCausalLM(LlamaForCausalLM):
    def make_attention(self, number: int, prefix: str) -> nn.Module:
        return Attention(
            self.config,
            sliding_window(self.config, number),
            parallel=self.parallel,
            quant_config=self.quant_config,
            prefix=prefix,
        )


class Qwen2ForCausalLM(LlamaForCausalLM):
    def make_attention(self, number: int, prefix: str) -> nn.Module:
        return Attention(
            self.config,
            self.window_of(number),
            qkv_bias=True,
            parallel=self.parallel,
            quant_config=self.quant_config,
            prefix=prefix,
        )

    def window_of(self, number: int) -> int | None:
        """The sliding window of a layer, which has to be switched on; None: it has none."""
        if not getattr(self.config, "use_sliding_window", False):
            return None
        return sliding_window(self.config, number, first=self.first_with_window())

    def first_with_window(self) -> int:
        """The first layer that has a window, where the config does not say it layer by layer."""
        stated: int | None = getattr(self.config, "max_window_layers", None)
        return 28 if stated is None else stated


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    def make_attention(self, number: int, prefix: str) -> nn.Module:
        bias = getattr(self.config, "attention_bias", False)
        return Attention(
            self.config,
            self.window_of(number),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            parallel=self.parallel,
            quant_config=self.quant_config,
            prefix=prefix,
        )


def head_dim(config: ModelConfig) -> int:
    """Elements of a head.

    Raises:
        ConfigError: the config does not say it, and the hidden size is no multiple of the number of heads.
    """
    stated: int | None = getattr(config, "head_dim", None)
    if stated is not None:
        return stated
    size, more = divmod(config.hidden_size, config.num_attention_heads)
    if more:
        raise config.error(
            f"hidden_size is {config.hidden_size}, no multiple of num_attention_heads, {config.num_attention_heads}; "
            "head_dim has to say how large heads are"
        )
    return int(size)


def num_kv_heads_of(config: ModelConfig) -> int:
    """Heads for keys and for values."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def rotary_dim(config: ModelConfig) -> int:
    """How many elements of each head are turned by its position."""
    of_latent_attention: int | None = getattr(config, "qk_rope_head_dim", None)
    return of_latent_attention or int(head_dim(config) * rope_parameters(config)["partial_rotary_factor"])


def check_heads(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Sees whether every rank can have as many heads as each other.

    Raises:
        ConfigError: it cannot.
    """
    num_heads, tp_size = config.num_attention_heads, parallel.tp_size
    num_kv_heads = num_kv_heads_of(config)
    if num_heads % num_kv_heads:
        raise config.error(f"num_attention_heads is {num_heads}, no multiple of num_key_value_heads, {num_kv_heads}")
    if not heads_fit(num_heads, num_kv_heads, tp_size):
        fitting = [size for size in range(1, num_heads + 1) if heads_fit(num_heads, num_kv_heads, size)]
        raise config.error(
            f"{num_heads} heads for queries and {num_kv_heads} for keys and values cannot be dealt evenly to "
            f"{tp_size} ranks; tp_size may be {', '.join(map(str, fitting))}"
        )


def heads_fit(num_heads: int, num_kv_heads: int, tp_size: int) -> bool:
    """Whether heads for queries come out even, and those for keys and values too, or else each on several ranks."""
    return num_heads % tp_size == 0 and (num_kv_heads % tp_size == 0 or tp_size % num_kv_heads == 0)


def sliding_window(config: ModelConfig, number: int, *, first: int = 0) -> int | None:
    """How many positions back a layer looks, its own included; None: all.

    Args:
        first: the first layer with a window, where `layer_types` does not say which layers have one.

    Raises:
        ConfigError: `layer_types` is not one known type for each layer.
    """
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return window if number >= first else None
    if not isinstance(kinds, list) or len(kinds) < config.num_hidden_layers:
        raise config.error(f"layer_types is {kinds!r}; expected one for each of {config.num_hidden_layers} layers")
    if kinds[number] not in ("full_attention", "sliding_attention"):
        raise config.error(f"layer_types has {kinds[number]!r}; known are full_attention and sliding_attention")
    return window if kinds[number] == "sliding_attention" else None


def attention_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which positions (columns) each position (rows) may look at."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)
