"""Names in natural order, and the layers of a model folded into one pattern."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightlift.errors import CheckpointMismatchError, folded
from weightlift.names import fold, natural_key


def unfold(pattern: str) -> list[str]:
    """Every name that a pattern stands for."""
    braces = re.search(r"\{([^}]*)\}", pattern)
    if braces is None:
        return [pattern]
    names = []
    for run in braces[1].split(","):
        first, _, last = run.partition("-")
        for number in range(int(first), int(last or first) + 1):
            names += unfold(pattern[: braces.start()] + str(number) + pattern[braces.end() :])
    return names


def test_layers_become_one_pattern() -> None:
    names = [f"model.layers.{i}.self_attn.q_norm.weight" for i in range(32)]
    assert fold(names) == [("model.layers.{0-31}.self_attn.q_norm.weight", 32)]


def test_holes_are_told_and_one_name_stays_as_it_is() -> None:
    names = ["norm.weight", *(f"layers.{i}.w" for i in (7, 0, 2, 1, 3, 9, 10)), "layers.5.bias"]
    assert fold(names) == [("layers.{0-3,7,9,10}.w", 7), ("layers.5.bias", 1), ("norm.weight", 1)]


def test_experts_fold_inside_layers() -> None:
    names = [f"layers.{layer}.experts.{e}.w1.weight" for layer in range(4) for e in range(8)]
    assert fold(names) == [("layers.{0-3}.experts.{0-7}.w1.weight", 32)]


def test_a_layer_with_other_experts_is_a_pattern_of_its_own() -> None:
    names = [f"layers.{layer}.experts.{e}.w1" for layer in range(4) for e in range(8) if (layer, e) != (2, 5)]
    assert fold(names) == [("layers.{0,1,3}.experts.{0-7}.w1", 24), ("layers.2.experts.{0-4,6,7}.w1", 7)]


def test_only_whole_components_are_numbers() -> None:
    names = ["a.w1", "a.w2", "conv1.b", "conv2.b", "f.00", "f.01", "x[0:8]", "x[8:16]"]
    assert fold(names) == [(name, 1) for name in names]


def test_regions_fold_by_layer_and_keep_their_rows() -> None:
    gaps = [f"layers.{i}.qkv_proj.weight[512:768]" for i in range(3)]
    assert fold(gaps) == [("layers.{0-2}.qkv_proj.weight[512:768]", 3)]


def test_order_is_natural_and_does_not_depend_on_the_input() -> None:
    names = ["b.10.x.y", "b.2.z", "a", "b.9.x.y", "B.1.q"]
    assert fold(names) == fold(reversed(names)) == [("B.1.q", 1), ("a", 1), ("b.2.z", 1), ("b.{9,10}.x.y", 2)]


def test_natural_order_takes_numbers_of_any_length() -> None:
    names = ["x" + "9" * 5000, "x10", "x2", "x02", "x"]
    assert sorted(names, key=natural_key) == ["x", "x02", "x2", "x10", "x" + "9" * 5000]


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "0", "1", "2", "3", "10", "07"]), min_size=1, max_size=4), max_size=40)
)
def test_patterns_stand_for_exactly_the_names(parts: list[list[str]]) -> None:
    names = {".".join(part) for part in parts}
    patterns = fold(names)
    unfolded = [name for pattern, _ in patterns for name in unfold(pattern)]
    assert sorted(unfolded) == sorted(names)
    assert all(len(unfold(pattern)) == count for pattern, count in patterns)


def test_hostile_names_take_no_quadratic_time() -> None:
    numbers = ".1" * 200_000
    started = time.perf_counter()
    assert len(fold([f"a{numbers}.1", f"a{numbers}.2", f"a{numbers}.{'9' * 100_000}"])) == 3
    assert time.perf_counter() - started < 10


def test_texts_show_ten_patterns_and_how_many_names_are_beyond() -> None:
    names = [f"{letter}.{i}.w" for letter in "abcdefghijkl" for i in range(3)]
    text = folded(names)
    assert text.startswith("a.{0-2}.w (3), b.{0-2}.w (3), ")
    assert text.endswith("j.{0-2}.w (3) and 6 more")
    assert folded(["a.0", "a.1", "b\x1b"], quote=True) == '"a.{0,1}" (2), "\'b\\x1b\'"'


def test_a_mismatch_of_every_layer_is_one_line() -> None:
    keys = [f"model.layers.{i}.q_norm.weight" for i in range(32)]
    error = CheckpointMismatchError(
        "Net",
        missing_keys=keys,
        mismatched=[f"model.layers.{i}.o.weight: copying a param with shape torch.Size([2])." for i in range(32)],
        gaps=[f"model.layers.{i}.qkv_proj.weight[512:768]" for i in range(32)],
    )
    assert str(error).splitlines()[1:] == [
        '\tMissing key(s) in state_dict: "model.layers.{0-31}.q_norm.weight" (32).',
        "\tsize mismatch for model.layers.{0-31}.o.weight: copying a param with shape torch.Size([2]). (32 of these)",
        "\tNot filled by any transfer: model.layers.{0-31}.qkv_proj.weight[512:768] (32).",
    ]
    assert error.missing_keys == keys


@pytest.mark.parametrize("names", [[], [""], [".", "..", ".0.", ".1."]])
def test_odd_names_are_kept(names: list[str]) -> None:
    assert sum(count for _, count in fold(names)) == len(names)
