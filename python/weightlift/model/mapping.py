"""Gate 3, names: from those of a checkpoint to those of a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

# One part of a stacked parameter, as its weight loader calls it; a tuple is one span of several parts.
ShardId = str | int | tuple[int, ...]


class Renaming(Protocol):
    """What transformers' `WeightRenaming` is."""

    def rename_source_key(self, source_key: str, /) -> tuple[str, Any]:
        """The new name, and anything else."""


@dataclasses.dataclass(frozen=True)
class WeightsMapper:
    """Rules that make a model's names of a checkpoint's, with the names and the meaning that they have in vLLM.

    A name passes through the groups in the order in which they are listed here, and through the rules of a group in
    theirs; each rule sees what the one before has made of the name. A rule to None drops the tensor at once.

    In one point this is not as in vLLM: no stacked rule matches inside the (longer) target of one. Of the rules q_proj,
    k_proj and v_proj to qkv_proj the last would match in what the second has made, and give `qkqkv_proj`; and would
    match in a `qkv_proj` that is fused on disk. Here the former becomes `qkv_proj`, shard "k", and the latter stays.

    Args:
        orig_to_new_renaming: objects with `rename_source_key`, such as transformers' WeightRenaming.
        orig_to_new_regex: compiled pattern to replacement; all that matches is replaced.
        orig_to_new_substr: text to text; its first occurrence is replaced.
        orig_to_new_stacked: text to (text, shard id): the tensor is a part of a parameter. Its first occurrence is
            replaced. A list of shard ids stands for several parts that are all this tensor. Of several rules that match
            the last decides the id. No rule to None.
        orig_to_new_prefix: text to text, at the start of the name.
        orig_to_new_suffix: text to text, at the end of the name.

    Raises:
        TypeError: a rule is not of that form.

    A model whose author has renamed its layers is loaded with one line:
        >>> mapper = WeightsMapper(orig_to_new_substr={".query_proj.": ".q_proj."})
        >>> mapper.map_name("model.layers.0.self_attn.query_proj.weight")
        [('model.layers.0.self_attn.q_proj.weight', None)]
        >>> weightlift.fast_load(model, folder, mapper=mapper)

    and one whose layers are fused with another:
        >>> mapper |= WeightsMapper(orig_to_new_stacked={".q_proj": (".qkv_proj", "q"), ".k_proj": (".qkv_proj", "k")})
        >>> mapper.map_name("model.layers.0.self_attn.query_proj.weight")
        [('model.layers.0.self_attn.qkv_proj.weight', 'q')]
    """

    orig_to_new_renaming: Sequence[Renaming] = ()
    orig_to_new_regex: Mapping[re.Pattern[str], str | None] = dataclasses.field(default_factory=dict)
    orig_to_new_substr: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    orig_to_new_stacked: Mapping[str, tuple[str, ShardId | list[ShardId]]] = dataclasses.field(default_factory=dict)
    orig_to_new_prefix: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    orig_to_new_suffix: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    # For each stacked rule the targets that its text is a proper part of.
    _around: Mapping[str, tuple[str, ...]] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for renaming in self.orig_to_new_renaming:
            if not hasattr(renaming, "rename_source_key"):
                raise TypeError(f"orig_to_new_renaming: expected objects with rename_source_key, found {renaming!r}")
        for pattern in self.orig_to_new_regex:
            if not hasattr(pattern, "sub"):
                raise TypeError(f"orig_to_new_regex: expected compiled patterns, found {pattern!r}; use re.compile()")
        for group in ("regex", "substr", "prefix", "suffix"):
            for old, new in getattr(self, f"orig_to_new_{group}").items():
                if not (new is None or isinstance(new, str)) or not (isinstance(old, str) or group == "regex"):
                    raise TypeError(f"orig_to_new_{group}: expected text to text or None, found {old!r}: {new!r}")
        for old, value in self.orig_to_new_stacked.items():
            if not _is_stacked_rule(old, value):
                raise TypeError(
                    f"orig_to_new_stacked: expected text to (text, shard id), found {old!r}: {value!r}; "
                    "a shard id is a text, a number, a tuple of numbers or a list of these"
                )
        targets = dict.fromkeys(new for new, _ in self.orig_to_new_stacked.values())
        around = {old: tuple(new for new in targets if old in new and old != new) for old in self.orig_to_new_stacked}
        object.__setattr__(self, "_around", around)

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        """Both, group by group: rules of this one first; of equal keys the value of `other`. `other` may be vLLM's."""
        groups = (field.name for field in dataclasses.fields(self) if field.init)
        merged: dict[str, Any] = {}
        for group in groups:
            mine, others = getattr(self, group), getattr(other, group)
            merged[group] = {**mine, **others} if isinstance(mine, Mapping) else [*mine, *others]
        return WeightsMapper(**merged)

    def get_rename_mapper(self) -> WeightsMapper:
        """The rules that only rename: for what names modules and loads nothing, such as lists of layers in a config."""

        def renames(rules: Mapping[Any, str | None]) -> dict[Any, str | None]:
            return {old: new for old, new in rules.items() if new is not None}

        return WeightsMapper(
            orig_to_new_renaming=self.orig_to_new_renaming,
            orig_to_new_regex=renames(self.orig_to_new_regex),
            orig_to_new_substr=renames(self.orig_to_new_substr),
            orig_to_new_prefix=renames(self.orig_to_new_prefix),
            orig_to_new_suffix=renames(self.orig_to_new_suffix),
        )

    def map_name(self, name: str) -> list[tuple[str, ShardId | None]]:
        """Where the tensor of that name goes: (new name, shard id or None) for each. Empty: a rule drops it."""
        name, shard_ids, rule = self._map(name)
        if rule is not None:
            return []
        if isinstance(shard_ids, list):
            return [(name, shard_id) for shard_id in shard_ids]
        return [(name, shard_ids)]

    def drop_rule(self, name: str) -> str | None:
        """The rule by which the tensor of that name is dropped; None: it is not."""
        return self._map(name)[2]

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors under their new names. A part of a stacked parameter has its shard id as attribute `shard_id`.

        For a list of shard ids there is an alias of the tensor for each.
        """
        for name, tensor in weights:
            for position, (new_name, shard_id) in enumerate(self.map_name(name)):
                part = tensor.detach() if position else tensor
                if shard_id is not None:
                    part.shard_id = shard_id  # type: ignore[attr-defined]
                yield new_name, part

    def _map(self, name: str) -> tuple[str, ShardId | list[ShardId] | None, str | None]:
        """(new name, shard ids, rule that drops it)"""
        for renaming in self.orig_to_new_renaming:
            name = renaming.rename_source_key(name)[0]
        for pattern, new in self.orig_to_new_regex.items():
            if pattern.search(name):
                if new is None:
                    return name, None, f"regex {pattern.pattern!r}: None"
                name = pattern.sub(new, name)
        for old, new in self.orig_to_new_substr.items():
            if old in name:
                if new is None:
                    return name, None, f"substr {old!r}: None"
                name = name.replace(old, new, 1)
        shard_ids: ShardId | list[ShardId] | None = None
        for old, (target, ids) in self.orig_to_new_stacked.items():
            start = _find_outside(name, old, self._around[old])
            if start >= 0:
                name = name[:start] + target + name[start + len(old) :]
                shard_ids = ids
        for old, new in self.orig_to_new_prefix.items():
            if name.startswith(old):
                if new is None:
                    return name, None, f"prefix {old!r}: None"
                name = new + name[len(old) :]
        for old, new in self.orig_to_new_suffix.items():
            if name.endswith(old):
                if new is None:
                    return name, None, f"suffix {old!r}: None"
                name = name[: len(name) - len(old)] + new
        return name, shard_ids, None


def map_in_turn(mappers: Iterable[WeightsMapper], name: str) -> tuple[list[tuple[str, ShardId | None]], str | None]:
    """`map_name` of one mapper after another, and the rule that drops the tensor.

    What a later mapper says of the shard goes before what an earlier one has said.
    """
    places: list[tuple[str, ShardId | None]] = [(name, None)]
    for mapper in mappers:
        mapped = []
        rule = None
        for old, shard_id in places:
            rule = mapper.drop_rule(old)
            mapped += [(new, shard_id if new_id is None else new_id) for new, new_id in mapper.map_name(old)]
        if not mapped:
            return [], rule
        places = mapped
    return places, None


def _is_stacked_rule(old: object, value: object) -> bool:
    def is_shard_id(value: object) -> bool:
        return isinstance(value, (str, int)) or (
            isinstance(value, tuple) and bool(value) and all(isinstance(part, int) for part in value)
        )

    if not (isinstance(old, str) and isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)):
        return False
    ids = value[1]
    return bool(ids) and all(map(is_shard_id, ids)) if isinstance(ids, list) else is_shard_id(ids)


def _find_outside(name: str, text: str, around: tuple[str, ...]) -> int:
    """Where `text` occurs first, but not as a part of one of `around`; -1: nowhere."""
    start = name.find(text)
    while start >= 0 and around:
        end = start + len(text)
        if all(name.find(longer, max(0, end - len(longer)), start + len(longer)) < 0 for longer in around):
            break
        start = name.find(text, start + 1)
    return start


# Scales of the KV cache, as every generation of tools has called them, to the attention layer's own. Idempotent.
# To be applied before rules that stack: `self_attn.k_proj.output_scale` is no part of a `qkv_proj`.
KV_CACHE_SCALES = WeightsMapper(
    orig_to_new_regex={
        re.compile(pattern): new
        for pattern, new in {
            r"\.kv_scale$": r".attn.k_scale",  # one for both; the layer takes it for v, too
            r"\.(self_attn|mixer)\.[kv]_proj\.([kv])_scale$": r".\1.attn.\2_scale",  # ModelOpt; Nemotron-H
            r"\.self_attn\.qk(?:qk)?v_proj\.([kv])_scale$": r".self_attn.attn.\1_scale",
            r"\.self_attn\.q\.scale$": r".self_attn.attn.q_scale",  # HYV3
            r"\.self_attn\.([kv])_cache\.scale$": r".self_attn.attn.\1_scale",
            # Not where it is one already, nor where it is that of multi-head latent attention.
            r"(?<!\.attn)(?<!\.mla_attn)\.([qkv])_(scale|zero_point)$": r".attn.\1_\2",
        }.items()
    },
    orig_to_new_suffix={
        ".q_proj.output_scale": ".attn.q_scale",
        ".k_proj.output_scale": ".attn.k_scale",
        ".v_proj.output_scale": ".attn.v_scale",
        ".self_attn.prob_output_scale": ".self_attn.attn.prob_scale",
    },
)

# The order of activations, which no kernel takes any more. Not `weight_g_idx`.
ACTIVATION_ORDER = WeightsMapper(orig_to_new_suffix={".g_idx": None})

# What models compute themselves, and some tools save all the same.
ROTARY_CACHES = WeightsMapper(
    orig_to_new_substr={
        "rotary_pos_emb.inv_freq": None,
        "rotary_emb.inv_freq": None,
        "rotary_emb.cos_cached": None,
        "rotary_emb.sin_cached": None,
    }
)
