"""What a model's config.json says, read and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError, CheckpointNotFoundError

CONFIG_FILE = "config.json"

# Sizes and counts. Whichever of them a config has is a positive integer, or null.
_SIZES = (
    "decoder_sparse_step",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "kv_lora_rank",
    "max_position_embeddings",
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "original_max_position_embeddings",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "topk_group",
    "v_head_dim",
    "vocab_size",
)
# Of layers; they may be 0.
_NUMBERS_OF_LAYERS = ("first_k_dense_replace", "max_window_layers", "num_nextn_predict_layers")


class ConfigError(CheckpointError, AttributeError):
    """A config.json that cannot be read, or that says what the model's class cannot do.

    Args:
        problem: what was expected, what was found, and what to do about it.
        path: the file; None: it is not known.
    """

    def __init__(self, problem: str, *, path: str | None = None) -> None:
        super().__init__(problem, reason="InvalidConfig", path=path)


class ModelConfig:
    """The fields of a config.json as attributes; those of nested objects as dictionaries.

    A field that is missing is a ConfigError, which is an AttributeError too, so that
    `getattr(config, "head_dim", None)` works.

    Args:
        fields: as in the file.
        path: of the file, for errors.

    Raises:
        ConfigError: a size or count that is not a positive integer.
    """

    def __init__(self, fields: Mapping[str, Any], *, path: str | None = None) -> None:
        self.__dict__.update(fields)
        self._path = path
        for name in _SIZES:
            value = fields.get(name)
            if value is not None and (type(value) is not int or value < 1):
                raise self.error(f"{name} is {value!r}; expected a positive integer")
        for name in _NUMBERS_OF_LAYERS:
            value = fields.get(name)
            if value is not None and (type(value) is not int or value < 0):
                raise self.error(f"{name} is {value!r}; expected a number of layers")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self.error(f"{name} is missing; the model's class needs it")

    def require(self, *names: str) -> None:
        """Raises ConfigError where a field is null, or missing."""
        for name in names:
            if getattr(self, name) is None:
                raise self.error(f"{name} is null; the model's class needs it")

    def error(self, problem: str) -> ConfigError:
        """The error to raise for something in this config."""
        return ConfigError(problem, path=self._path)


def architecture_of(config: ModelConfig) -> str:
    """The name of the model's class in transformers: the first of `architectures`.

    Raises:
        ConfigError: there is none.
    """
    names = getattr(config, "architectures", None)
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.error(f'architectures is {names!r}; expected the name of the class, as ["LlamaForCausalLM"]')
    return names[0]


def dtype_of(config: ModelConfig) -> torch.dtype | None:
    """The dtype of the weights, as the config names it (`dtype`, formerly `torch_dtype`), or None.

    Raises:
        ConfigError: it names another thing than a floating dtype of torch.
    """
    name = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if name is None:
        return None
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise config.error(f"dtype is {name!r}; expected a floating dtype of torch, as 'bfloat16'")
    return dtype


def is_tied(config: ModelConfig) -> bool:
    """Whether the head is the embedding: `tie_word_embeddings`."""
    return bool(getattr(config, "tie_word_embeddings", False))


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Reads the config.json of a model.

    Args:
        path: the folder of the model, or a file in it.

    Raises:
        CheckpointNotFoundError: there is none.
        ConfigError: it is not a JSON object, or a size in it is not a positive integer.
    """
    folder = os.fspath(path)
    if os.path.isfile(folder):
        folder = os.path.dirname(folder)
    file = os.path.join(folder, CONFIG_FILE)
    try:
        with open(file, encoding="utf-8") as stream:
            fields = json.load(stream)
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            "not found; it says of which architecture the model is. Pass the folder of a model on this machine; "
            "weights alone go into a model of yours by fast_load(model, path)",
            path=file,
            reason="NoConfig",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"expected a JSON object, found none: {error}", path=file) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"expected a JSON object, found {type(fields).__name__}", path=file)
    return ModelConfig(fields, path=file)
