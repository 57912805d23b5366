"""Parameter classes: what each rank takes of a tensor, quantised or not."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from golden import Golden, golden, load_both_ways, make_layer, parents, same_bits, shards_on_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_methods import Method, awq, fp8, gptq

import weightlift
from weightlift.model.linear import LinearBase, MergedColumnParallelLinear, QuantizationConfig
from weightlift.model.parallel import ParallelConfig
from weightlift.model.parameter import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
    RowvLLMParameter,
)


def dequantised(weight: torch.Tensor, scale: torch.Tensor, block: int = 128) -> torch.Tensor:
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.float() - 127)
    scales = scale.repeat_interleave(block, 0)[: weight.shape[0]].repeat_interleave(block, 1)[:, : weight.shape[1]]
    return weight.float() * scales


def layer_of(info: dict[str, Any], child: dict[str, Any], config: Method) -> Callable[[], LinearBase]:
    parallel = ParallelConfig(tp_rank=child["rank"], tp_size=child["tp"])
    return lambda: make_layer(info["layer"], info["spec"], parallel, quant_config=config, bias=False)


# ---- values of a reference implementation


@pytest.mark.parametrize("parent", parents("tp_slices_packed"))
def test_packed_weights_scales_and_zero_points_are_cut_as_the_reference_cuts_them(parent: str) -> None:
    topic = golden("tp_slices_packed")
    info = topic.cases[parent]
    bits, group_size = info["bits"], info["group_size"]
    config = awq(bits, group_size)
    if info["method"] == "gptq":
        config = gptq(bits, group_size, whole_groups=info.get("desc_act", False))
    for case, child in topic.children(parent):
        loaded = load_both_ways(topic, parent, layer_of(info, child, config))
        expected = topic.expected(case)
        if "expected_g_idx_sorted" in expected:
            assert torch.equal(loaded["g_idx"].argsort(stable=True), expected["perm_stable"].long())
        for name, value in expected.items():
            if name in ("perm_stable", "g_idx_sorted"):
                continue
            if not value.numel():
                # The reference makes parameters of no rows, and loads nothing. Right is the one row, on every rank.
                assert (info["method"], info["layer"], group_size) == ("awq", "row", -1)
                value = topic.tensor(f"{parent}.ckpt_{name}")
            assert same_bits(loaded[name], value), f"{case}.{name}"


@pytest.mark.parametrize("parent", parents("fp8_scale_tp_slices"))
def test_scales_of_tensors_channels_and_groups_are_cut_as_the_reference_cuts_them(parent: str) -> None:
    topic = golden("fp8_scale_tp_slices")
    info = topic.cases[parent]
    scale = info.get("scale", "tensor")
    config = fp8(scale, torch.uint8 if scale == "mxfp8" else torch.float32)
    for case, child in topic.children(parent):
        loaded = load_both_ways(topic, parent, layer_of(info, child, config))
        for name, value in topic.expected(case).items():
            assert same_bits(loaded[name], value), f"{case}.{name}"


@pytest.mark.parametrize("parent", parents("fp8_block_tp_slices"))
def test_block_scales_are_cut_as_the_reference_cuts_them_or_refused(parent: str) -> None:
    topic = golden("fp8_block_tp_slices")
    info = topic.cases[parent]
    config = fp8("block", torch.uint8 if info.get("scale") == "e8m0" else torch.float32)
    for case, child in topic.children(parent):
        make = layer_of(info, child, config)
        if child["ok"] and not child.get("dequant_mismatch_elements_vs_exact_slice"):
            loaded = load_both_ways(topic, parent, make)
            for name, value in topic.expected(case).items():
                assert same_bits(loaded[name], value), f"{case}.{name}"
            digest = hashlib.sha256(loaded["weight"].view(torch.uint8).numpy().tobytes()).hexdigest()
            assert digest == child.get("expected_weight_sha256", digest)
        elif child["ok"]:
            # Scales of other rows, which the reference does not notice.
            with pytest.raises(weightlift.CheckpointMismatchError, match="does not begin at a block of 128"):
                load_both_ways(topic, parent, make)
        else:
            # The reference refuses these, some for the sake of its kernels. What we do not refuse has to be right.
            refusal = None
            try:
                loaded = load_both_ways(topic, parent, make)
            except weightlift.CheckpointMismatchError as error:
                refusal = str(error)
            if refusal is None:
                assert child["rank"] == 0
                exact = exact_slice(topic, parent, ParallelConfig(tp_rank=0, tp_size=child["tp"]))
                assert torch.equal(dequantised(loaded["weight"], loaded["scale"]), exact)
            else:
                assert "does not begin at a block of 128" in refusal


def exact_slice(topic: Golden, parent: str, parallel: ParallelConfig) -> torch.Tensor:
    """What a rank has of the dequantised checkpoint."""
    info = topic.cases[parent]
    layer = make_layer(info["layer"], info["spec"], parallel, bias=False, params_dtype=torch.float32)
    for name, shard in shards_on_disk(info, topic.names, f"{parent}.ckpt_weight"):
        plain = dequantised(topic.tensor(name), topic.tensor(name.replace("ckpt_weight", "ckpt_scale")))
        layer.weight_loader(layer.get_parameter("weight"), plain, shard)
    return layer.get_parameter("weight").data


# ---- one rule at a time


def merged(
    sizes: list[int], config: QuantizationConfig | None = None, *, rank: int = 0, tp: int = 1, inputs: int = 4
) -> MergedColumnParallelLinear:
    parallel = ParallelConfig(tp_rank=rank, tp_size=tp)
    return MergedColumnParallelLinear(
        inputs, sizes, bias=False, quant_config=config, prefix="mlp.gate_up_proj", parallel=parallel
    )


def only(parameter: Callable[..., BasevLLMParameter], block: tuple[int, int] | None = None) -> Method:
    """A method whose one parameter is `scale`."""

    def create(layer: LinearBase, *args: Any, **loader: Any) -> dict[str, BasevLLMParameter]:
        layer.weight_block_size = block
        return {"scale": parameter(**loader)}

    return Method(create)


def load(layer: LinearBase, tensor: torch.Tensor, *shard: Any) -> torch.Tensor:
    scale = layer.get_parameter("scale")
    scale.weight_loader(scale, tensor, *shard)
    return scale.data


def packed(shape: tuple[int, ...], factor: int | Fraction = 8, tile: int | None = None) -> Method:
    return only(
        lambda **loader: PackedvLLMParameter(
            data=torch.full(shape, -1, dtype=torch.int32),
            input_dim=0,
            output_dim=1,
            packed_dim=1,
            packed_factor=factor,
            marlin_tile_size=tile,
            **loader,
        )
    )


def test_packed_parts_fused_on_disk_are_cut_between_words() -> None:
    layer = merged([32, 32], packed((2, 4)), rank=1, tp=2, inputs=2)
    loaded = load(layer, torch.arange(16, dtype=torch.int32).view(2, 8))
    assert loaded.tolist() == [[2, 3, 6, 7], [10, 11, 14, 15]]


def test_marlin_tiles_multiply_what_packing_divides() -> None:
    words = torch.arange(128, dtype=torch.int32)[None]
    loaded = load(merged([32, 32], packed((1, 128), tile=16), inputs=1), words[:, 64:], 1)
    assert loaded[0].tolist() == [-1] * 64 + words[0, 64:].tolist()


def test_values_that_do_not_fill_their_word_are_packed_by_a_fraction() -> None:
    # 3 bits: 32 values in 3 words.
    words = torch.arange(6, dtype=torch.int32)[None]
    assert load(merged([64], packed((1, 3), Fraction(32, 3)), rank=1, tp=2), words).tolist() == [[3, 4, 5]]


@pytest.mark.parametrize("sizes", [(50, 100), (10, 33)])
def test_a_part_that_begins_inside_a_packed_word_is_refused(sizes: tuple[int, int]) -> None:
    layer = merged(list(sizes), packed((2, -(-sum(sizes) // 8))), inputs=2)
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"mlp\.gate_up_proj\.scale: .*packed 8 to a word"):
        load(layer, torch.zeros(2, -(-sizes[1] // 8), dtype=torch.int32), 1)


def test_a_last_word_that_is_not_full_is_loaded_and_not_lost() -> None:
    words = torch.arange(5, dtype=torch.int32)[None]
    assert load(merged([33], packed((1, 5)), inputs=1), words).tolist() == [[0, 1, 2, 3, 4]]
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"expected size torch.Size\(\[1, 5\]\)"):
        load(merged([33], packed((1, 4)), inputs=1), words[:, :4])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_packed_word_that_two_ranks_share_is_refused_on_both(rank: int) -> None:
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"takes rows \[\d+:\d+\] of 40.*not whole words"):
        load(merged([40], packed((2, 3)), rank=rank, tp=2, inputs=2), torch.zeros(2, 5, dtype=torch.int32))


def per_tensor(number: int) -> Method:
    return only(lambda **loader: PerTensorScaleParameter(data=torch.full((number,), -1.0), **loader))


def test_a_scale_of_each_part_goes_to_its_slot() -> None:
    layer = merged([4, 8, 4], per_tensor(3))
    load(layer, torch.tensor(0.5), 1)
    load(layer, torch.tensor([0.25]), 2)
    assert load(layer, torch.tensor(2.0), 0).tolist() == [2.0, 0.5, 0.25]
    assert load(layer, torch.tensor([4.0]), (1, 2)).tolist() == [2.0, 4.0, 4.0]


def test_one_scale_of_a_layer_that_is_fused_on_disk_fills_all_slots() -> None:
    assert load(merged([4, 8], per_tensor(2), rank=1, tp=2), torch.tensor([0.25])).tolist() == [0.25, 0.25]


def test_several_scales_for_one_slot_are_refused() -> None:
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"a scale of size torch.Size\(\[2\]\) to element 0"):
        load(merged([4, 8], per_tensor(2)), torch.ones(2), 0)


def block(rows: int, columns: int = 1) -> Method:
    return only(
        lambda **loader: BlockQuantScaleParameter(
            data=torch.full((rows, columns), -1.0), input_dim=1, output_dim=0, **loader
        ),
        block=(4, 4),
    )


def test_block_scales_of_merged_parts() -> None:
    layer = merged([16, 16], block(4), rank=1, tp=2)
    load(layer, torch.arange(10.0, 14)[:, None], 0)
    assert load(layer, torch.arange(20.0, 24)[:, None], 1).flatten().tolist() == [12, 13, 22, 23]


@pytest.mark.parametrize("rank", range(4))
def test_block_scales_of_parts_that_are_no_whole_blocks_are_refused(rank: int) -> None:
    layer = merged([24, 24], block(3), rank=rank, tp=4)
    with pytest.raises(weightlift.CheckpointMismatchError, match="does not begin at a block of 4 rows"):
        load(layer, torch.zeros(12, 1))


def test_a_last_part_that_is_no_whole_block_is_loaded() -> None:
    # As the latent projections of DeepSeek-V3, which every rank has whole.
    layer = merged([8, 6], block(4))
    load(layer, torch.tensor([[1.0], [2.0]]), 0)
    assert load(layer, torch.tensor([[3.0], [4.0]]), 1).flatten().tolist() == [1, 2, 3, 4]
    assert load(layer, torch.arange(4.0)[:, None]).flatten().tolist() == [0, 1, 2, 3]


def test_a_part_that_begins_inside_a_block_of_a_fused_scale_is_refused() -> None:
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"takes rows \[6:14\] of 14 .* block of 4"):
        load(merged([6, 8], block(4)), torch.zeros(4, 1))


def test_block_scales_may_have_dimensions_of_one_between() -> None:
    config = only(
        lambda **loader: BlockQuantScaleParameter(data=torch.empty(2, 1, 1, 1), input_dim=2, output_dim=0, **loader),
        block=(4, 4),
    )
    parallel = ParallelConfig(tp_rank=1, tp_size=2)
    on_disk = torch.arange(4.0)
    layer = make_layer("column", {"in": 4, "out": 16}, parallel, quant_config=config, bias=False)
    assert load(layer, on_disk.view(4, 1, 1, 1)).flatten().tolist() == [2, 3]
    layer = make_layer("row", {"in": 8, "out": 8}, parallel, quant_config=config, bias=False)
    assert load(layer, on_disk.view(2, 1, 2, 1)).flatten().tolist() == [1, 3]


def test_exponents_are_copied_as_bytes_between_their_two_dtypes() -> None:
    exponents = torch.tensor([[120], [130]], dtype=torch.uint8)
    for wanted, found in (
        (torch.empty(2, 1, dtype=torch.uint8), exponents.view(torch.float8_e8m0fnu)),
        (torch.empty(2, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu), exponents),
    ):
        config = only(
            lambda wanted=wanted, **loader: GroupQuantScaleParameter(data=wanted, input_dim=1, output_dim=0, **loader)
        )
        assert load(merged([2], config, inputs=32), found).view(torch.uint8).tolist() == [[120], [130]]


def test_what_has_no_output_dimension_is_whole_on_every_rank() -> None:
    config = only(lambda **loader: RowvLLMParameter(data=torch.empty(4), input_dim=0, **loader))
    layer = merged([4, 4], config, rank=1, tp=2)
    assert load(layer, torch.arange(4.0)).tolist() == [0, 1, 2, 3]
    assert load(layer, torch.arange(4.0) + 4, 1).tolist() == [4, 5, 6, 7]


def test_groups_along_the_inputs_are_cut_and_channels_are_not() -> None:
    parallel = ParallelConfig(tp_rank=1, tp_size=2)
    groups = only(
        lambda **loader: GroupQuantScaleParameter(data=torch.empty(4, 2), input_dim=1, output_dim=0, **loader)
    )
    channels = only(lambda **loader: ChannelQuantScaleParameter(data=torch.empty(4, 1), output_dim=0, **loader))
    spec = {"in": 128, "out": 4}
    on_disk = torch.arange(16.0).view(4, 4)
    layer = make_layer("row", spec, parallel, quant_config=groups, bias=False)
    assert torch.equal(load(layer, on_disk), on_disk[:, 2:])
    layer = make_layer("row", spec, parallel, quant_config=channels, bias=False)
    assert torch.equal(load(layer, on_disk[:, :1]), on_disk[:, :1])


def test_one_group_that_all_ranks_share_is_not_taken_for_one_of_each() -> None:
    groups = only(
        lambda **loader: GroupQuantScaleParameter(data=torch.empty(0, 4), input_dim=0, output_dim=1, **loader)
    )
    parallel = ParallelConfig(tp_rank=1, tp_size=2)
    layer = make_layer("row", {"in": 128, "out": 4}, parallel, quant_config=groups, bias=False)
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"size torch.Size\(\[1, 4\]\)"):
        load(layer, torch.zeros(1, 4))


# ---- parameters as objects


def test_a_parameter_that_is_too_small_for_the_parts_is_refused() -> None:
    config = only(lambda **loader: ChannelQuantScaleParameter(data=torch.empty(6, 1), output_dim=0, **loader))
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"parameter of size .*\[6, 1\].* to \[4:8\]"):
        load(merged([4, 4], config), torch.zeros(4, 1), 1)
    with pytest.raises(weightlift.CheckpointMismatchError, match=r"to element 2 of a parameter of size .*\[2\]"):
        load(merged([4, 4, 4], per_tensor(2)), torch.tensor(1.0), 2)


def test_block_scales_need_to_know_their_blocks() -> None:
    config = only(
        lambda **loader: BlockQuantScaleParameter(data=torch.empty(1, 1), input_dim=1, output_dim=0, **loader)
    )
    with pytest.raises(weightlift.CheckpointMismatchError, match="needs a layer with weight_block_size"):
        load(merged([4], config), torch.zeros(1, 1))


def test_blocks_need_not_be_square() -> None:
    config = only(
        lambda **loader: BlockQuantScaleParameter(data=torch.empty(2, 2), input_dim=1, output_dim=0, **loader),
        block=(4, 2),
    )
    on_disk = torch.arange(8.0)
    parallel = ParallelConfig(tp_rank=1, tp_size=2)
    layer = make_layer("row", {"in": 8, "out": 8}, parallel, quant_config=config, bias=False)
    assert load(layer, on_disk.view(2, 4)).tolist() == [[2, 3], [6, 7]]
    layer = make_layer("column", {"in": 4, "out": 16}, parallel, quant_config=config, bias=False)
    assert load(layer, on_disk.view(4, 2)).tolist() == [[4, 5], [6, 7]]


def test_words_packed_along_the_inputs_are_as_many_for_each_rank() -> None:
    def config(words: int) -> Method:
        return only(
            lambda **loader: PackedvLLMParameter(
                data=torch.empty(words, 1, dtype=torch.int32),
                input_dim=0,
                output_dim=1,
                packed_dim=0,
                packed_factor=8,
                **loader,
            )
        )

    parallel = ParallelConfig(tp_rank=1, tp_size=2)
    on_disk = torch.arange(4, dtype=torch.int32)[:, None]
    layer = make_layer("row", {"in": 32, "out": 1}, parallel, quant_config=config(2), bias=False)
    assert load(layer, on_disk).flatten().tolist() == [2, 3]
    # Four words of 30 values, two for each rank's 15: the eighth of the second rank is in the first's second word.
    layer = make_layer("row", {"in": 30, "out": 1}, parallel, quant_config=config(2), bias=False)
    with pytest.raises(weightlift.CheckpointMismatchError, match="these are not whole words"):
        load(layer, on_disk)
    # What is whole on every rank has as many words as it has.
    layer = make_layer("row", {"in": 30, "out": 1}, ParallelConfig(), quant_config=config(4), bias=False)
    assert torch.equal(load(layer, on_disk), on_disk)


def test_a_copied_layer_loads_into_its_own_parameters() -> None:
    layer = merged([4, 4], per_tensor(2))
    twin = copy.deepcopy(layer)
    assert type(twin.get_parameter("scale")) is PerTensorScaleParameter
    load(twin, torch.tensor(3.0), 1)
    assert twin.get_parameter("scale").tolist() == [-1, 3]
    assert layer.get_parameter("scale").tolist() == [-1, -1]


def test_parameters_need_no_gradient_and_know_their_dimensions() -> None:
    parameter = PackedvLLMParameter(
        data=torch.empty(2, 3), input_dim=0, output_dim=1, packed_dim=0, packed_factor=8, weight_loader=print
    )
    assert isinstance(parameter, torch.nn.Parameter)
    assert not parameter.requires_grad
    assert (parameter.input_dim, parameter.output_dim, parameter.packed_dim) == (0, 1, 0)
    assert (parameter.weight_loader, parameter.marlin_tile_size) == (print, None)


# ---- every cut, against words and blocks that are spelled out


@settings(max_examples=200, deadline=None)
@given(factor=st.integers(1, 5), parts=st.lists(st.integers(1, 12), min_size=1, max_size=3), rank=st.integers(0, 3))
def test_a_packed_parameter_has_the_values_of_its_rows_or_is_refused(factor: int, parts: list[int], rank: int) -> None:
    """A word here is the number of the first value in it."""
    tp = 4
    sizes = [part * tp for part in parts]
    words = torch.arange(0, sum(sizes), factor)[None]
    rows = []
    start = 0
    for size in sizes:
        rows += range(start + rank * size // tp, start + (rank + 1) * size // tp)
        start += size
    layer = merged(sizes, packed((1, -(-len(rows) // factor)), factor), rank=rank, tp=tp, inputs=1)
    try:
        loaded = load(layer, words.int())
    except weightlift.CheckpointMismatchError:
        assert any(part % factor for part in parts)
    else:
        values = [word + i for word in loaded[0].tolist() for i in range(factor)]
        assert values[: len(rows)] == rows


@settings(max_examples=200, deadline=None)
@given(block_rows=st.integers(1, 5), parts=st.lists(st.integers(1, 12), min_size=1, max_size=3), rank=st.integers(0, 3))
def test_a_block_scale_is_that_of_each_row_or_is_refused(block_rows: int, parts: list[int], rank: int) -> None:
    tp = 4
    sizes = [part * tp for part in parts]
    scales = torch.arange(-(-sum(sizes) // block_rows), dtype=torch.float32)
    expected = []
    start = 0
    for size in sizes:
        expected += [row // block_rows for row in range(start + rank * size // tp, start + (rank + 1) * size // tp)]
        start += size
    config = only(
        lambda **loader: BlockQuantScaleParameter(
            data=torch.full((-(-len(expected) // block_rows), 1), -1.0), input_dim=1, output_dim=0, **loader
        ),
        block=(block_rows, block_rows),
    )
    layer = merged(sizes, config, rank=rank, tp=tp, inputs=block_rows)
    try:
        loaded = load(layer, scales[:, None])
    except weightlift.CheckpointMismatchError:
        assert any(part % block_rows for part in parts)
    else:
        assert loaded.flatten().repeat_interleave(block_rows)[: len(expected)].tolist() == expected
