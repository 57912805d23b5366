"""Rotary position embeddings: which angle each pair of a head's elements is turned by, in the variants of the field."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from .model_config import ConfigError, ModelConfig


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """What a config says of rotary embeddings, whichever generation of transformers has written it.

    Raises:
        ConfigError: it is no object.
    """
    stated = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(stated, dict):
        raise config.error(f"rope_parameters is {stated!r}; expected an object")
    if any(isinstance(value, dict) for value in stated.values()):
        raise config.error(f"rope_parameters is {stated!r}; the models here have the same for all layers")
    parameters = dict(stated)
    parameters.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    parameters.setdefault("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    for name in ("rope_theta", "partial_rotary_factor"):
        value = parameters[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise config.error(f"{name} is {value!r}; expected a positive number")
    original = getattr(config, "original_max_position_embeddings", None)
    if original:  # goes before what the object says, as in transformers and vLLM
        parameters["original_max_position_embeddings"] = original
    parameters.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return parameters


class RotaryEmbedding(nn.Module):
    """Angles of the positions from 0 on.

    Args:
        config: of the model.
        dim: how many elements of each head are turned; the frequencies are those of a head of that size.

    Raises:
        ConfigError: a variant that is not known, or a parameter that it needs is missing.
    """

    frequencies: torch.Tensor
    frequencies_beyond: torch.Tensor

    def __init__(self, config: ModelConfig, dim: int) -> None:
        super().__init__()
        parameters = rope_parameters(config)
        kind = parameters["rope_type"]
        variants = {
            "default": _default,
            "linear": _linear,
            "llama3": _llama3,
            "yarn": _yarn,
            "longrope": _longrope,
            "su": _longrope,  # its name in the first Phi-3
        }
        if not isinstance(kind, str) or kind not in variants:
            raise config.error(f"rope_type is {kind!r}; known are {', '.join(variants)}")
        self.original_length: int = parameters["original_max_position_embeddings"]
        powers = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        try:
            variant = variants[kind](1.0 / parameters["rope_theta"] ** powers, parameters, config)
        except KeyError as error:
            raise config.error(f"rope_parameters lack {error}, which rope_type {kind!r} needs") from None
        except ConfigError:
            raise
        except (ArithmeticError, TypeError, ValueError) as error:
            raise config.error(f"rope_parameters {parameters} are not those of rope_type {kind!r}: {error}") from error
        frequencies, beyond, self.scale = variant
        self.register_buffer("frequencies", frequencies, persistent=False)
        # Of sequences longer than `original_length`; most variants make no difference.
        self.register_buffer("frequencies_beyond", beyond, persistent=False)

    def forward(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each [length, dim / 2], float32."""
        frequencies = self.frequencies if length <= self.original_length else self.frequencies_beyond
        positions = torch.arange(length, dtype=torch.float32, device=frequencies.device)
        angles = torch.outer(positions, frequencies)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], *, interleaved: bool = False) -> torch.Tensor:
    """Turns the first elements of each head, as many as there are angles for; the others stay.

    Args:
        x: [..., length, head_dim].
        cos_sin: of RotaryEmbedding.
        interleaved: whether the two elements of a pair are neighbours; else they are half of the turned part apart. In
            the result they are half of it apart in any case.
    """
    cos, sin = (part.to(x.dtype) for part in cos_sin)
    size = 2 * cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


_Variant = tuple[torch.Tensor, torch.Tensor, float]


def _default(frequencies: torch.Tensor, parameters: dict[str, Any], config: ModelConfig) -> _Variant:
    return frequencies, frequencies, 1.0


def _linear(frequencies: torch.Tensor, parameters: dict[str, Any], config: ModelConfig) -> _Variant:
    frequencies = frequencies / parameters["factor"]
    return frequencies, frequencies, 1.0


def _llama3(frequencies: torch.Tensor, parameters: dict[str, Any], config: ModelConfig) -> _Variant:
    """Long waves are stretched by `factor`, short ones are not, those between in proportion (Llama 3.1)."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    frequencies = (1 - kept) * frequencies / parameters["factor"] + kept * frequencies
    return frequencies, frequencies, 1.0


def attention_sharpness(config: ModelConfig) -> float:
    """In latent attention, the factor on queries and on keys that goes with a context stretched by YaRN."""
    parameters = rope_parameters(config)
    weight = parameters.get("mscale_all_dim") or 0.0
    return 1.0 if parameters["rope_type"] == "default" else _yarn_scale(_stretch(parameters, config), weight)


def _stretch(parameters: dict[str, Any], config: ModelConfig) -> float:
    """How many times as long the context is as that of the training."""
    ratio = config.max_position_embeddings / parameters["original_max_position_embeddings"]
    return float(parameters.get("factor") or ratio)


def _yarn_scale(factor: float, weight: float = 1.0) -> float:
    """How much sharper attention has to be in a context that is `factor` times as long (YaRN)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(frequencies: torch.Tensor, parameters: dict[str, Any], config: ModelConfig) -> _Variant:
    """As llama3, but in proportion to the position among the frequencies (YaRN)."""
    length, theta = parameters["original_max_position_embeddings"], parameters["rope_theta"]
    factor = _stretch(parameters, config)
    dim = 2 * len(frequencies)

    def position_of(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = position_of(parameters.get("beta_fast") or 32)
    high = position_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = stretched * frequencies / factor + (1 - stretched) * frequencies
    scale = parameters.get("attention_factor")
    if scale is None:
        mscale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = _yarn_scale(factor)
        if mscale and all_dims:
            scale = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dims)
    return frequencies, frequencies, float(scale)


def _longrope(frequencies: torch.Tensor, parameters: dict[str, Any], config: ModelConfig) -> _Variant:
    """A factor for each frequency, one set of them for long sequences (LongRoPE, Phi-3)."""
    length = parameters["original_max_position_embeddings"]
    sets = []
    for name in ("short_factor", "long_factor"):
        factors = torch.tensor(parameters[name], dtype=torch.float32)
        if factors.shape != frequencies.shape:
            raise config.error(f"{name} has {factors.numel()} elements; expected {frequencies.numel()}")
        sets.append(frequencies / factors)
    factor = _stretch(parameters, config)
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return sets[0], sets[1], float(scale)
