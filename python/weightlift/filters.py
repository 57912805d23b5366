"""Filters: which tensors of a checkpoint this process does not want, told by their names before anything is read.

A filter gives the rule by which a tensor is not wanted, in a few words, or None where it is. Every function here that
makes one says which names it knows; a name that it does not know is wanted. A filter that would drop nothing is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from ._logging import logger

Filter = Callable[[str], "str | None"]
Placement = Literal["linear", "round_robin"]

_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
# What an expert has for itself: weights, packed weights, scales and zero points of groups and blocks. Not here, so
# always read: scales of whole tensors, of which kernels take the largest over all experts (`input_scale`,
# `weight_scale_2`, and `weight_scale`, which may be one), and what is too small to matter (biases, `g_idx`, shapes).
_OF_ONE_EXPERT = (".weight", ".weight_packed", ".weight_scale_inv", ".qweight", ".qzeros", ".scales")


def first_rule(filters: Iterable[Filter | None], name: str) -> str | None:
    """The rule of the first filter that does not want the tensor; None: it is wanted.

    Raises:
        TypeError: a filter gives something else, as a predicate would.
    """
    for unwanted in filters:
        rule = None if unwanted is None else unwanted(name)
        if isinstance(rule, str):
            return rule
        if rule is not None:
            raise TypeError(
                f"a filter gave {rule!r} for {name!r}; expected the rule by which the tensor is not wanted, in words, "
                "or None where it is wanted"
            )
    return None


def checked(filters: object) -> Sequence[Filter | None]:
    """What was passed as `filters`. Raises TypeError where it is no list of functions."""
    if isinstance(filters, Sequence) and all(unwanted is None or callable(unwanted) for unwanted in filters):
        return filters
    raise TypeError(f"filters: expected a list of functions from a name to a rule or None, found {filters!r}")


def local_experts(num_experts: int, *, ep_size: int, ep_rank: int, placement: Placement = "linear") -> set[int]:
    """The experts of one rank, as vLLM's layers place them.

    Args:
        num_experts: of a layer, in all ranks together.
        ep_size, ep_rank: number of ranks that share the experts, and which of them this one is, from 0.
        placement: "linear": each rank has neighbours, the first ranks one more where they do not come out even;
            "round_robin": dealt like cards.

    Example:
        >>> local_experts(10, ep_size=4, ep_rank=1), local_experts(10, ep_size=4, ep_rank=1, placement="round_robin")
        ({3, 4, 5}, {1, 5, 9})

    Raises:
        ValueError: a number that can't be, or an unknown placement.
    """
    if num_experts < 0:
        raise ValueError(f"num_experts is {num_experts}; accepted is 0 or more")
    if ep_size < 1 or not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank is {ep_rank} of ep_size {ep_size}; accepted is a rank from 0 to below the size")
    if placement == "linear":
        share, more = divmod(num_experts, ep_size)
        start = ep_rank * share + min(ep_rank, more)
        return set(range(start, start + share + (ep_rank < more)))
    if placement == "round_robin":
        return set(range(ep_rank, num_experts, ep_size))
    raise ValueError(f"placement is {placement!r}; accepted is 'linear' or 'round_robin'")


def experts(
    num_experts: int,
    *,
    ep_size: int,
    ep_rank: int,
    placement: Placement = "linear",
    enable_eplb: bool = False,
    num_redundant_experts: int = 0,
) -> Filter | None:
    """Drops the weights of experts that live on other ranks; see `experts_except`.

    Args:
        num_experts, ep_size, ep_rank, placement: as for `local_experts`. The placement is that which the layers really
            have: vLLM's go back from "round_robin" to "linear" where experts are not grouped, and on some backends.
        enable_eplb, num_redundant_experts: whether experts are balanced over the ranks, with copies of some. Any rank
            may then be given any expert.

    Returns:
        None, with the reason in the log, where every rank may need every expert: one rank only, no experts, or
        experts that are balanced.
    """
    local = local_experts(num_experts, ep_size=ep_size, ep_rank=ep_rank, placement=placement)
    if enable_eplb or num_redundant_experts:
        reason = "experts are balanced over the ranks, so that this one may be given any of them"
    elif ep_size == 1:
        reason = "this is the only rank"
    elif not num_experts:
        reason = "the model has none"
    else:
        return experts_except(local, num_experts=num_experts)
    logger.info("experts are not filtered: %s", reason)
    return None


def experts_except(local: Collection[int], *, num_experts: int) -> Filter:
    """Drops the weights of every expert that is not in `local`.

    Names hold `experts.N.`, at their start or behind a dot; N from num_experts on is of other layers (a draft model's)
    and wanted. Dropped are `.weight`, `.weight_packed`, `.qweight`, `.qzeros`, `.scales` and `.weight_scale_inv`, which
    serve one expert. Scales of whole tensors are always wanted, since kernels take the largest over all experts; so are
    biases, shared experts, and tensors that hold all experts (those are cut by the layer's own loader).

    Example:
        >>> unwanted = experts_except({0, 1}, num_experts=8)
        >>> unwanted("layers.0.experts.7.w1.weight")
        'expert of another rank'
    """
    wanted = frozenset(local)

    def unwanted(name: str) -> str | None:
        if not name.endswith(_OF_ONE_EXPERT):
            return None
        match = _EXPERT.search(name)
        if match is None or int(match[1]) in wanted or int(match[1]) >= num_experts:
            return None
        return "expert of another rank"

    return unwanted


def layers(
    start: int,
    end: int,
    *,
    num_layers: int,
    prefix: str = "model.layers.",
    embeddings: Sequence[str] = ("model.embed_tokens.",),
    head: Sequence[str] = ("model.norm.", "lm_head."),
    tied: bool = True,
) -> Filter | None:
    """Drops what other stages of a pipeline hold.

    Args:
        start, end: the stage has the layers from `start` to below `end`.
        num_layers: of all stages together. Numbers from there on (a draft model's) are wanted everywhere.
        prefix: what stands before the number of a layer.
        embeddings: prefixes of tensors that the first stage alone has; the last one too where `tied`.
        head: prefixes of tensors that the last stage alone has.
        tied: whether the head may be the embedding: the last stage then needs both.

    Example:
        >>> unwanted = layers(0, 16, num_layers=32)
        >>> unwanted("model.layers.16.mlp.up_proj.weight"), unwanted("model.layers.15.mlp.up_proj.weight")
        ('layer of another stage', None)

    Raises:
        ValueError: not 0 <= start < end <= num_layers.
    """
    if not 0 <= start < end <= num_layers:
        raise ValueError(
            f"start, end and num_layers are {start}, {end} and {num_layers}; accepted is 0 <= start < end <= num_layers"
        )
    is_first, is_last = start == 0, end == num_layers
    if is_first and is_last:
        return None
    layer = re.compile(re.escape(prefix) + r"(\d+)\.")
    others: list[str] = []
    if not is_first and not (is_last and tied):
        others += embeddings
    if not is_last:
        others += head
    prefixes = tuple(others)

    def unwanted(name: str) -> str | None:
        match = layer.match(name)
        if match is None:
            return "embedding or head of another stage" if name.startswith(prefixes) else None
        return None if start <= int(match[1]) < end or int(match[1]) >= num_layers else "layer of another stage"

    return unwanted


def encoder_only(language_model: Iterable[str], *, rename: Callable[[str], str | None] | None = None) -> Filter | None:
    """Drops the language model, for processes that run a multimodal model's encoders alone.

    Args:
        language_model: the names of its modules in the model: `language_model` drops `language_model.*`. None of them:
            nothing is dropped.
        rename: how a name in the checkpoint becomes a name in the model; None: they are equal. A name that it drops
            (None) is left to whoever renames.

    Raises:
        ValueError: an empty name, which would drop all.
    """
    names = list(language_model)
    if not all(names):
        raise ValueError("language_model has an empty name, which would drop every tensor; name its modules")
    if not names:
        logger.info("the language model is not filtered: the model names none of its modules")
        return None
    prefixes = tuple(name if name.endswith(".") else name + "." for name in names)

    def unwanted(name: str) -> str | None:
        renamed = name if rename is None else rename(name)
        return "language model of an encoder" if renamed is not None and renamed.startswith(prefixes) else None

    return unwanted


def unused(is_unused: Callable[[str], bool], *, rule: str = "not used by the model") -> Filter:
    """Drops what the model says that it does not use; tensor by tensor, also in files that hold others.

    Example:
        >>> unused(lambda name: name.startswith("vision_tower."))("vision_tower.patch.weight")
        'not used by the model'
    """
    return lambda name: rule if is_unused(name) else None
