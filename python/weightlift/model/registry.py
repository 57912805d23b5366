"""Which class builds a model, by the architecture that its config.json names."""

from __future__ import annotations

import difflib
import importlib
from typing import Protocol

import torch

from ..errors import listed, printable
from .linear import QuantizationConfig
from .model_config import ModelConfig, architecture_of
from .parallel import ParallelConfig


class ModelClass(Protocol):
    """What builds a shell: a module with parameters that are allocated and not set.

    It may have a `hf_to_weightlift_mapper`, from names of the checkpoint to its own.
    """

    def __call__(
        self,
        config: ModelConfig,
        *,
        parallel: ParallelConfig,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> torch.nn.Module: ...


_models: dict[str, ModelClass | str] = {
    "DeepseekV3ForCausalLM": "weightlift.model.deepseek:DeepseekV3ForCausalLM",
    "LlamaForCausalLM": "weightlift.model.llama:LlamaForCausalLM",
    "MistralForCausalLM": "weightlift.model.llama:MistralForCausalLM",
    "MixtralForCausalLM": "weightlift.model.mixtral:MixtralForCausalLM",
    "Phi3ForCausalLM": "weightlift.model.phi3:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "weightlift.model.llama:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "weightlift.model.llama:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "weightlift.model.qwen3_moe:Qwen3MoeForCausalLM",
}


def register_model(architecture: str, cls: ModelClass | str) -> None:
    """Says which class builds the models of an architecture; one that is registered already is replaced.

    Args:
        architecture: as in `architectures` of config.json.
        cls: called as `cls(config, parallel=..., quant_config=...)`; or where to import it from, when it is first
            needed, as "package.module:Class".

    Example:
        >>> weightlift.model.registry.register_model("MyForCausalLM", MyForCausalLM)
    """
    if isinstance(cls, str) and cls.count(":") != 1:
        raise ValueError(f"{architecture}: cls is {cls!r}; expected a class, or the text 'package.module:Class'")
    _models[architecture] = cls


def registered_models() -> list[str]:
    """The architectures that are registered, sorted."""
    return sorted(_models)


def model_class(config: ModelConfig) -> ModelClass:
    """The class that builds this model.

    Raises:
        ConfigError: the architecture is not registered.
    """
    architecture = architecture_of(config)
    cls = _models.get(architecture)
    if cls is None:
        nearest = difflib.get_close_matches(architecture, _models, n=3)
        raise config.error(
            f"architecture {printable(architecture)!r} is not known"
            + (f" (nearest: {listed(nearest)})" if nearest else "")
            + f"; known are {', '.join(registered_models())}. Register its class: "
            f"weightlift.model.registry.register_model({printable(architecture)!r}, Class)"
        )
    if isinstance(cls, str):
        module, _, name = cls.partition(":")
        cls = _models[architecture] = getattr(importlib.import_module(module), name)
    return cls
