"""The mapper: what its rules make of a name, against a plain implementation and the cases where engines go wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weightlift
from weightlift.model.mapping import ACTIVATION_ORDER, KV_CACHE_SCALES, ROTARY_CACHES, WeightsMapper, map_in_turn
from weightlift.tensor import CheckpointTensor


def mapped(mapper: WeightsMapper, name: str) -> str | None:
    """The one new name; None: dropped."""
    places = mapper.map_name(name)
    assert all(shard_id is None for _, shard_id in places)
    return places[0][0] if places else None


# ---- against a plain implementation

names = st.text("ab._", max_size=12)
parts = st.text("ab._", min_size=1, max_size=4)
rules = st.dictionaries(parts, st.none() | names, max_size=4)
shard_ids = st.sampled_from(["q", "k", 0, 1, (0, 1), [0, 2], ["q", "k", "v"]])
mappers = st.builds(
    WeightsMapper,
    orig_to_new_regex=st.dictionaries(parts.map(re.escape).map(re.compile), st.none() | names, max_size=3),
    orig_to_new_substr=rules,
    orig_to_new_stacked=st.dictionaries(parts, st.tuples(names, shard_ids), max_size=4),
    orig_to_new_prefix=rules,
    orig_to_new_suffix=rules,
)


def plainly(mapper: WeightsMapper, name: str) -> tuple[str, Any] | None:
    for pattern, new in mapper.orig_to_new_regex.items():
        hits = list(pattern.finditer(name))
        if hits and new is None:
            return None
        for hit in reversed(hits):
            name = name[: hit.start()] + new + name[hit.end() :]
    for old, new in mapper.orig_to_new_substr.items():
        before, found, after = name.partition(old)
        if found and new is None:
            return None
        name = before + new + after if found else name
    shard_id = None
    targets = [target for target, _ in mapper.orig_to_new_stacked.values()]
    for old, (target, new_id) in mapper.orig_to_new_stacked.items():
        # Characters of a longer target around the text are not looked at.
        inside = [
            range(i, i + len(longer))
            for longer in targets
            if old in longer and old != longer
            for i in range(len(name))
            if name.startswith(longer, i)
        ]
        for i in range(len(name)):
            span = range(i, i + len(old))
            if name.startswith(old, i) and not any(set(span) <= set(other) for other in inside):
                name = name[:i] + target + name[i + len(old) :]
                shard_id = new_id
                break
    for old, new in mapper.orig_to_new_prefix.items():
        if re.match(re.escape(old), name):
            if new is None:
                return None
            name = new + name.removeprefix(old)
    for old, new in mapper.orig_to_new_suffix.items():
        if re.search(re.escape(old) + r"\Z", name):
            if new is None:
                return None
            name = name.removesuffix(old) + new
    return name, shard_id


@settings(max_examples=500, deadline=None)
@given(mapper=mappers, name=names)
def test_any_rules_are_applied_as_plainly_as_they_can_be(mapper: WeightsMapper, name: str) -> None:
    expected = plainly(mapper, name)
    if expected is None:
        assert mapper.map_name(name) == []
        assert mapper.drop_rule(name) is not None
    else:
        new_name, ids = expected
        assert mapper.map_name(name) == [(new_name, shard_id) for shard_id in (ids if isinstance(ids, list) else [ids])]
        assert mapper.drop_rule(name) is None


@given(mapper=mappers, name=names)
def test_apply_gives_what_map_name_says(mapper: WeightsMapper, name: str) -> None:
    tensor = torch.zeros(2)
    given_out = list(mapper.apply([(name, tensor)]))
    assert [(new, getattr(part, "shard_id", None)) for new, part in given_out] == mapper.map_name(name)
    assert all(part.data_ptr() == tensor.data_ptr() for _, part in given_out)


@given(left=mappers, right=mappers, name=names)
def test_union_keeps_the_order_of_the_left_and_the_values_of_the_right(
    left: WeightsMapper, right: WeightsMapper, name: str
) -> None:
    both = left | right
    for group in ("regex", "substr", "stacked", "prefix", "suffix"):
        mine, others, union = (getattr(m, f"orig_to_new_{group}") for m in (left, right, both))
        assert list(union) == [*mine, *(key for key in others if key not in mine)]
        assert union == {**mine, **others}
    assert (WeightsMapper() | left).map_name(name) == left.map_name(name) == (left | left).map_name(name)


@given(mapper=mappers, name=names)
def test_rename_mapper_drops_and_stacks_nothing(mapper: WeightsMapper, name: str) -> None:
    renames = mapper.get_rename_mapper()
    assert renames.drop_rule(name) is None
    assert [shard_id for _, shard_id in renames.map_name(name)] == [None]
    if not mapper.orig_to_new_stacked and mapper.drop_rule(name) is None:
        assert renames.map_name(name) == mapper.map_name(name)


# ---- the rules, one by one


class Renaming:
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return source_key.replace(self.old, self.new), None


def test_groups_come_in_their_order() -> None:
    mapper = WeightsMapper(
        orig_to_new_suffix={".5": ".6"},
        orig_to_new_prefix={"x.4": "x.5"},
        orig_to_new_stacked={".3": (".4", "q")},
        orig_to_new_substr={".2": ".3"},
        orig_to_new_regex={re.compile(r"\.1"): ".2"},
        orig_to_new_renaming=[Renaming(".0", ".1")],
    )
    assert mapper.map_name("x.0") == [("x.6", "q")]


def test_union_of_renamings_is_one_after_the_other() -> None:
    first, second = (WeightsMapper(orig_to_new_renaming=[Renaming(*pair)]) for pair in (("a", "b"), ("b", "c")))
    assert mapped(first | second, "a") == "c"
    assert mapped(second | first, "a") == "b"


def test_row_14_prefix_rules_chain() -> None:
    assert mapped(WeightsMapper(orig_to_new_prefix={"a.": "b.", "b.": "c."}), "a.x") == "c.x"
    assert mapped(WeightsMapper(orig_to_new_prefix={"b.": "c.", "a.": "b."}), "a.x") == "b.x"


def test_row_15_rule_with_a_dot_does_not_match_a_bare_name() -> None:
    mapper = WeightsMapper(orig_to_new_stacked={".q_proj": (".qkv_proj", "q")})
    assert mapper.map_name("q_proj.weight") == [("q_proj.weight", None)]


DOTLESS = WeightsMapper(
    orig_to_new_stacked={f"{shard_id}_proj": ("qkv_proj", shard_id) for shard_id in ("q", "k", "v")}
)


@pytest.mark.parametrize("shard_id", ["q", "k", "v"])
def test_row_16_rules_without_dots_do_not_match_what_they_have_made(shard_id: str) -> None:
    assert DOTLESS.map_name(f"{shard_id}_proj.weight") == [("qkv_proj.weight", shard_id)]


def test_row_16_rules_without_dots_leave_what_is_fused_on_disk() -> None:
    assert DOTLESS.map_name("attn.qkv_proj.weight") == [("attn.qkv_proj.weight", None)]


def test_stacked_rules_chain_where_one_names_the_target_of_another() -> None:
    mapper = WeightsMapper(orig_to_new_stacked={".a": (".b", 0), ".b": (".c", 1)})
    assert mapper.map_name("x.a") == [("x.c", 1)]


def test_stacked_rule_may_keep_the_name() -> None:
    assert WeightsMapper(orig_to_new_stacked={".w1": (".w1", 0)}).map_name("x.w1") == [("x.w1", 0)]


def test_stacked_rule_may_name_a_part_of_its_target() -> None:
    mapper = WeightsMapper(orig_to_new_stacked={".q": (".attn.q", "q")})
    assert mapper.map_name("x.q.weight") == [("x.attn.q.weight", "q")]


def test_row_17_first_occurrence_of_a_substring() -> None:
    assert mapped(WeightsMapper(orig_to_new_substr={"foo": "bar"}), "foofoo") == "barfoo"


def test_all_that_a_regex_matches_is_replaced() -> None:
    assert mapped(WeightsMapper(orig_to_new_regex={re.compile(r"(fo)o"): r"\1"}), "foofoo") == "fofo"


def test_row_18_list_of_shard_ids_is_one_alias_each() -> None:
    mapper = WeightsMapper(orig_to_new_stacked={".in_proj": (".in_out_proj", [0, 2])})
    tensor = torch.arange(4.0)
    (first_name, first), (second_name, second) = mapper.apply([("x.in_proj.weight", tensor)])
    assert first_name == second_name == "x.in_out_proj.weight"
    assert (first.shard_id, second.shard_id) == (0, 2)  # type: ignore[attr-defined]
    assert first.data_ptr() == second.data_ptr() == tensor.data_ptr()


def test_row_18_of_tensors_on_disk_too(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x.in_proj.weight": torch.arange(4.0)}, tmp_path / "model.safetensors")
    mapper = WeightsMapper(orig_to_new_stacked={".in_proj": (".in_out_proj", [0, (1, 2)])})
    into = torch.zeros(2, 4)
    with weightlift.open_checkpoint(tmp_path) as checkpoint:
        parts = [part for _, part in mapper.apply(checkpoint.items())]
        assert all(type(part) is CheckpointTensor for part in parts)
        assert [part.shard_id for part in parts] == [0, (1, 2)]  # type: ignore[attr-defined]
        for row, part in zip(into, parts, strict=True):
            row.copy_(part)
    assert into.tolist() == [[0, 1, 2, 3]] * 2
    assert checkpoint.report.num_forced == 0


def test_the_rule_that_drops_is_named() -> None:
    mapper = WeightsMapper(orig_to_new_prefix={"vision.": None}, orig_to_new_regex={re.compile(r"mtp\.\d"): None})
    assert mapper.drop_rule("vision.x") == "prefix 'vision.': None"
    assert mapper.drop_rule("mtp.3") == r"regex 'mtp\\.\\d': None"
    assert mapper.drop_rule("x.vision.") is None


@pytest.mark.parametrize(
    "rules",
    [
        {"orig_to_new_stacked": {".q_proj": None}},
        {"orig_to_new_stacked": {".q_proj": ".qkv_proj"}},
        {"orig_to_new_stacked": {".q_proj": (".qkv_proj", None)}},
        {"orig_to_new_stacked": {".q_proj": (".qkv_proj", [])}},
        {"orig_to_new_prefix": {"a.": 3}},
        {"orig_to_new_suffix": {3: "a."}},
        {"orig_to_new_regex": {"a.": "b."}},
        {"orig_to_new_renaming": ["a"]},
    ],
)
def test_what_is_no_rule_is_a_type_error_that_names_the_group(rules: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(rules))):
        WeightsMapper(**rules)


def test_mapper_of_an_engine_can_be_added() -> None:
    class Foreign:
        orig_to_new_renaming: list[Any] = []  # noqa: RUF012
        orig_to_new_regex = orig_to_new_substr = orig_to_new_stacked = orig_to_new_suffix = {}  # noqa: RUF012
        orig_to_new_prefix = {"b.": "c."}  # noqa: RUF012

    both = WeightsMapper(orig_to_new_prefix={"a.": "b."}) | Foreign()  # type: ignore[operator]
    assert mapped(both, "a.x") == "c.x"


def test_mappers_in_turn() -> None:
    first = WeightsMapper(orig_to_new_stacked={".w": (".w", [0, 1])})
    second = WeightsMapper(orig_to_new_prefix={"a.": "b.", "c.": None})
    third = WeightsMapper(orig_to_new_stacked={"b.w": ("b.x", "q")})
    assert map_in_turn([first, second], "a.w") == ([("b.w", 0), ("b.w", 1)], None)
    assert map_in_turn([first, second], "c.w") == ([], "prefix 'c.': None")
    assert map_in_turn([second, third], "a.w") == ([("b.x", "q")], None)
    assert map_in_turn([], "a.w") == ([("a.w", None)], None)


# ---- ready rules

SCALES = {
    "l.self_attn.kv_scale": "l.self_attn.attn.k_scale",
    "l.self_attn.k_proj.k_scale": "l.self_attn.attn.k_scale",
    "l.self_attn.v_proj.v_scale": "l.self_attn.attn.v_scale",
    "l.self_attn.qkv_proj.k_scale": "l.self_attn.attn.k_scale",
    "l.self_attn.qkqkv_proj.v_scale": "l.self_attn.attn.v_scale",
    "l.mixer.v_proj.v_scale": "l.mixer.attn.v_scale",
    "l.self_attn.q.scale": "l.self_attn.attn.q_scale",
    "l.self_attn.k_cache.scale": "l.self_attn.attn.k_scale",
    "l.self_attn.v_cache.scale": "l.self_attn.attn.v_scale",
    "l.self_attn.q_scale": "l.self_attn.attn.q_scale",
    "l.self_attn.v_zero_point": "l.self_attn.attn.v_zero_point",
    "l.self_attn.attn.k_scale": "l.self_attn.attn.k_scale",
    "l.self_attn.attn.k_zero_point": "l.self_attn.attn.k_zero_point",
    "l.self_attn.mla_attn.mla_attn.k_scale": "l.self_attn.mla_attn.mla_attn.k_scale",
    "l.self_attn.k_proj.output_scale": "l.self_attn.attn.k_scale",
    "l.self_attn.q_proj.output_scale": "l.self_attn.attn.q_scale",
    "l.self_attn.prob_output_scale": "l.self_attn.attn.prob_scale",
    "l.self_attn.k_proj.weight_scale": "l.self_attn.k_proj.weight_scale",
    "l.self_attn.k_proj.input_scale": "l.self_attn.k_proj.input_scale",
    "l.mlp.down_proj.output_scale": "l.mlp.down_proj.output_scale",
}


@pytest.mark.parametrize(("old", "new"), SCALES.items())
def test_row_19_scales_of_the_kv_cache_of_all_generations(old: str, new: str) -> None:
    assert mapped(KV_CACHE_SCALES, old) == new
    assert mapped(KV_CACHE_SCALES, new) == new


def test_row_20_scales_come_before_rules_that_stack() -> None:
    stacked = WeightsMapper(orig_to_new_stacked={".k_proj": (".qkv_proj", "k")})
    name = "self_attn.k_proj.output_scale"
    assert map_in_turn([KV_CACHE_SCALES, stacked], name) == ([("self_attn.attn.k_scale", None)], None)
    # As one mapper it is as in vLLM: suffixes come last.
    assert (stacked | KV_CACHE_SCALES).map_name(name) == [("self_attn.qkv_proj.output_scale", "k")]


def test_row_21_order_of_activations_is_dropped() -> None:
    assert mapped(ACTIVATION_ORDER, "o.g_idx") is None
    assert mapped(ACTIVATION_ORDER, "o.weight_g_idx") == "o.weight_g_idx"


def test_rotary_caches_are_dropped() -> None:
    for name in ("rotary_pos_emb.inv_freq", "a.rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"):
        assert mapped(ROTARY_CACHES, name) is None
    assert mapped(ROTARY_CACHES, "encoder.inv_freq") == "encoder.inv_freq"


def test_rules_of_transformers_are_renamings() -> None:
    core = pytest.importorskip("transformers.core_model_loading")
    renaming = core.WeightRenaming("query_proj", "q_proj")
    assert mapped(WeightsMapper(orig_to_new_renaming=[renaming]), "a.query_proj.weight") == "a.q_proj.weight"
