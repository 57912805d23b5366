"""Filters: which names they drop and which never, with the rule; row by row as engines place experts and layers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import weightlift
from weightlift.filters import encoder_only, experts, experts_except, first_rule, layers, local_experts, unused


def test_linear_placement_gives_the_first_ranks_one_more() -> None:
    placed = [local_experts(10, ep_size=4, ep_rank=rank) for rank in range(4)]
    assert placed == [{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}]


def test_round_robin_placement_deals_like_cards() -> None:
    assert local_experts(10, ep_size=4, ep_rank=1, placement="round_robin") == {1, 5, 9}


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize(("num_experts", "ep_size"), [(0, 3), (1, 1), (3, 8), (10, 4), (256, 32), (257, 32)])
def test_every_expert_lives_on_one_rank(num_experts: int, ep_size: int, placement: Any) -> None:
    ranks = [local_experts(num_experts, ep_size=ep_size, ep_rank=rank, placement=placement) for rank in range(ep_size)]
    assert sorted(expert for rank in ranks for expert in rank) == list(range(num_experts))
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_experts": -1, "ep_size": 2, "ep_rank": 0}, "num_experts is -1"),
        ({"num_experts": 8, "ep_size": 2, "ep_rank": 2}, "ep_rank is 2 of ep_size 2"),
        ({"num_experts": 8, "ep_size": 2, "ep_rank": -1}, "ep_rank is -1 of ep_size 2"),
        ({"num_experts": 8, "ep_size": 0, "ep_rank": 0}, "ep_rank is 0 of ep_size 0"),
        (
            {"num_experts": 8, "ep_size": 2, "ep_rank": 0, "placement": "random"},
            "accepted is 'linear' or 'round_robin'",
        ),
    ],
)
def test_experts_that_can_not_be_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        local_experts(**arguments)
    with pytest.raises(ValueError, match=text):
        experts(**arguments)


@pytest.mark.parametrize(
    "name",
    [
        "m.experts.7.w1.weight",
        "m.experts.7.w1.weight_packed",
        "m.experts.7.w1.weight_scale_inv",  # scales of blocks
        "m.experts.7.w1.qweight",
        "m.experts.7.w1.qzeros",
        "m.experts.7.w1.scales",
        "experts.7.w1.weight",  # vLLM reads it: it asks for a dot before
        "model.layers.3.mlp.experts.2.down_proj.weight",
    ],
)
def test_weights_of_experts_of_other_ranks_are_dropped(name: str) -> None:
    assert experts_except({0, 1}, num_experts=8)(name) == "expert of another rank"


@pytest.mark.parametrize(
    "name",
    [
        # Kernels take the largest over all experts; `weight_scale` may be a scale of the whole tensor.
        "m.experts.7.w1.weight_scale",
        "m.experts.7.w1.weight_scale_2",
        "m.experts.7.w1.weight_global_scale",
        "m.experts.7.w1.input_scale",
        "m.experts.7.w1.input_global_scale",
        "m.experts.7.w1.bias",
        "m.experts.7.w1.g_idx",
        # All experts in one tensor.
        "m.experts.gate_up_proj",
        "m.experts.w13_weight",
        # Local ones.
        "m.experts.0.w1.weight",
        "m.experts.1.w1.qweight",
        # No experts of these layers.
        "m.experts.8.w1.weight",
        "m.shared_experts.7.w1.weight",
        "m.shared_experts.gate_proj.weight",
        "m.other_experts.7.w1.weight",
        "m.gate.weight",
        "experts.weight",
        "",
    ],
)
def test_all_else_of_experts_is_wanted(name: str) -> None:
    assert experts_except({0, 1}, num_experts=8)(name) is None


def test_experts_are_dropped_by_placement() -> None:
    linear = experts(10, ep_size=4, ep_rank=1)
    dealt = experts(10, ep_size=4, ep_rank=1, placement="round_robin")
    assert linear is not None
    assert dealt is not None
    names = [f"m.experts.{expert}.w1.weight" for expert in range(10)]
    assert [i for i, name in enumerate(names) if linear(name) is None] == [3, 4, 5]
    assert [i for i, name in enumerate(names) if dealt(name) is None] == [1, 5, 9]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_experts": 8, "ep_size": 4, "enable_eplb": True}, "balanced"),
        ({"num_experts": 8, "ep_size": 4, "num_redundant_experts": 2}, "balanced"),
        ({"num_experts": 8, "ep_size": 1}, "only rank"),
        ({"num_experts": 0, "ep_size": 4}, "has none"),
    ],
)
def test_experts_are_not_filtered_where_a_rank_may_need_all(
    arguments: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="weightlift"):
        assert experts(**arguments, ep_rank=0) is None
    (record,) = caplog.records
    assert reason in record.getMessage()


LAYERS = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(4)]
ENDS = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("start", "end", "tied", "wanted"),
    [
        (0, 1, True, [LAYERS[0], ENDS[0]]),
        (1, 3, True, [LAYERS[1], LAYERS[2]]),
        (3, 4, True, [LAYERS[3], *ENDS]),
        (3, 4, False, [LAYERS[3], *ENDS[1:]]),
    ],
)
def test_stages_of_a_pipeline_hold_their_layers_and_ends(start: int, end: int, tied: bool, wanted: list[str]) -> None:
    unwanted = layers(start, end, num_layers=4, tied=tied)
    assert unwanted is not None
    assert [name for name in [*LAYERS, *ENDS] if unwanted(name) is None] == wanted
    assert unwanted(LAYERS[0] if start else LAYERS[3]) == "layer of another stage"


def test_names_that_stages_do_not_know_are_wanted() -> None:
    unwanted = layers(1, 2, num_layers=4)
    assert unwanted is not None
    # A draft model's layer, another tower's, no number, a name that only begins like one.
    for name in (
        "model.layers.4.eh_proj.weight",
        "vision_tower.model.layers.0.weight",
        "model.layers.weight",
        "model.layers.0",
        "model.norms.weight",
    ):
        assert unwanted(name) is None


def test_prefixes_of_layers_and_ends_can_be_others() -> None:
    unwanted = layers(1, 2, num_layers=4, prefix="transformer.h.", embeddings=("transformer.wte.",), head=("ln_f.",))
    assert unwanted is not None
    dropped = ["transformer.h.0.w", "transformer.wte.weight", "ln_f.weight"]
    assert [name for name in [*dropped, "transformer.h.1.w", *ENDS] if unwanted(name)] == dropped


def test_one_stage_alone_filters_nothing() -> None:
    assert layers(0, 4, num_layers=4) is None


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 2), (3, 2), (2, 5)])
def test_stages_that_can_not_be_are_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=r"accepted is 0 <= start < end <= num_layers"):
        layers(start, end, num_layers=4)


def test_encoders_alone_drop_the_language_model() -> None:
    unwanted = encoder_only(["language_model", "lm_head."])
    assert unwanted is not None
    names = ["language_model.model.norm.weight", "lm_head.weight", "language_model_2.w", "visual.patch.weight"]
    assert [name for name in names if unwanted(name)] == names[:2]
    assert unwanted(names[0]) == "language model of an encoder"


def test_encoders_alone_go_by_the_names_in_the_model() -> None:
    def rename(name: str) -> str | None:
        return None if name.endswith("inv_freq") else name.replace("model.", "language_model.", 1)

    unwanted = encoder_only(["language_model"], rename=rename)
    assert unwanted is not None
    assert unwanted("model.norm.weight")
    assert unwanted("model.rotary.inv_freq") is None
    assert unwanted("visual.patch.weight") is None


def test_encoders_alone_without_names_filter_nothing() -> None:
    assert encoder_only([]) is None
    with pytest.raises(ValueError, match="would drop every tensor"):
        encoder_only(["language_model", ""])


def test_what_the_model_does_not_use_is_dropped() -> None:
    unwanted = unused(lambda name: name.startswith("vision_tower."), rule="vision tower is off")
    assert unwanted("vision_tower.patch.weight") == "vision tower is off"
    assert unwanted("model.norm.weight") is None


def test_the_first_rule_counts() -> None:
    filters = [None, unused(lambda name: "a" in name, rule="1st"), unused(lambda name: "b" in name, rule="2nd")]
    assert [first_rule(filters, name) for name in ("ab", "b", "c")] == ["1st", "2nd", None]


def test_a_predicate_is_not_taken_for_a_filter(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match="a filter gave False for 'a'; expected the rule"):
        weightlift.open_checkpoint(tmp_path, filters=[lambda name: name == "b"])  # type: ignore[list-item]


@pytest.mark.parametrize("filters", [None, "a", ["a"], lambda name: None])
def test_what_is_no_list_of_functions_is_refused(tmp_path: Path, filters: Any) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match="filters: expected a list of functions"):
        weightlift.open_checkpoint(tmp_path, filters=filters)
