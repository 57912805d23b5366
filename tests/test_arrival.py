"""Memory that is laid out another way than the checkpoint: parts that arrive are put where the whole would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from golden_data import Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st

import weightlift
from weightlift import ops
from weightlift.model.quantization.arrival import (
    MarlinLayout,
    MarlinScales,
    MarlinWeight,
    MarlinZeroPoints,
    Packing,
    fnuz_weight,
)
from weightlift.model.quantization.packed import AWQ_ORDER, in_each, marlin_pack, marlin_unpack, pack_words


def garbage(layout: MarlinLayout) -> torch.Tensor:
    memory = layout.empty()
    memory.view(torch.uint8).fill_(0xA5)
    return memory


def pack(values: torch.Tensor, num_bits: int, packing: Packing) -> torch.Tensor:
    """(K, N) as on disk."""
    if packing == "gptq":
        return pack_words(values, num_bits, 0)
    if packing == "awq":
        return pack_words(in_each(values, AWQ_ORDER[num_bits]), num_bits, 1)
    return pack_words(values, num_bits, 0).T.contiguous()


def pack_zero_points(values: torch.Tensor, num_bits: int, packing: Packing) -> torch.Tensor:
    if packing == "awq":
        return pack(values, num_bits, "awq")
    words = pack_words(values, num_bits, 1)
    return words.T.contiguous() if packing == "nk" else words


def random_values(seed: int, *shape: int, num_bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**num_bits, shape, generator=generator, dtype=torch.uint8)


def padded(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    result = values.new_zeros(rows, columns)
    result[: values.shape[0], : values.shape[1]] = values
    return result


def place_parts(
    layout: MarlinLayout, memory: torch.Tensor, source: torch.Tensor, dim: int, ends: list[int], order: list[int]
) -> None:
    """Places slices of the source along `dim`, in that order."""
    begins = [0, *ends[:-1]]
    for number in order:
        begin = [0, 0]
        begin[dim] = begins[number]
        layout.place(memory, source.narrow(dim, begins[number], ends[number] - begins[number]), begin)


def cuts(data: st.DataObject, size: int, step: int) -> tuple[list[int], list[int]]:
    """Where parts that make up `size` end, multiples of `step`; and in which order they come."""
    inner = data.draw(st.sets(st.sampled_from(range(step, size, step)), max_size=3)) if size > step else set()
    ends = [*sorted(inner), size]
    return ends, data.draw(st.permutations(range(len(ends))))


@given(data=st.data(), packing=st.sampled_from(["gptq", "awq", "nk"]), num_bits=st.sampled_from([4, 8]))
@settings(deadline=None, max_examples=60)
def test_parts_of_a_weight_repacked_on_their_own_are_the_whole_repacked(
    data: st.DataObject, packing: Packing, num_bits: int
) -> None:
    size_n, size_k = (data.draw(st.integers(1, 24)) * 8 for _ in range(2))
    values = random_values(size_n + size_k, size_k, size_n, num_bits=num_bits)
    layout = MarlinWeight(packing, num_bits=num_bits, size_n=size_n, size_k=size_k)
    source, memory = pack(values, num_bits, packing), garbage(layout)
    assert tuple(source.shape) == layout.source_shape
    dim = 0 if packing == "nk" else 1
    step = 32 // num_bits if packing == "awq" else 1
    ends, order = cuts(data, size_n // step, 8 // step if packing == "awq" else 8)
    place_parts(layout, memory, source, dim, ends, order)
    padded_n, padded_k = layout.padded_nk
    expected = ops.gptq_marlin_repack(
        pack_words(padded(values, padded_k, padded_n), num_bits, 0), padded_k, padded_n, num_bits
    )
    assert torch.equal(memory, expected)
    assert torch.equal(layout.decode(memory), values)


@given(data=st.data(), transposed=st.booleans(), interleaved=st.booleans(), group=st.sampled_from([-1, 16, 32, 64]))
@settings(deadline=None, max_examples=60)
def test_parts_of_scales_permuted_on_their_own_are_the_whole_permuted(
    data: st.DataObject, transposed: bool, interleaved: bool, group: int
) -> None:
    size_n = data.draw(st.integers(1, 24)) * 8
    size_k = data.draw(st.integers(1, 5)) * 64
    rows = size_k // group if group > 0 else 1
    scales = torch.rand(rows, size_n, generator=torch.Generator().manual_seed(size_n + size_k))
    layout = MarlinScales(
        size_n=size_n,
        size_k=size_k,
        group_size=group,
        dtype=torch.bfloat16,
        is_transposed=transposed,
        is_interleaved=interleaved,
    )
    source, memory = (scales.T.contiguous() if transposed else scales), garbage(layout)
    assert tuple(source.shape) == layout.source_shape
    ends, order = cuts(data, size_n, 8)
    place_parts(layout, memory, source, 0 if transposed else 1, ends, order)
    padded_n, padded_k = layout.padded_nk
    expected = padded(scales.bfloat16(), padded_k // group if group > 0 else 1, padded_n)
    expected = ops.marlin_permute_scales(expected, padded_k, padded_n, group)
    if interleaved:
        expected = in_each(expected, (0, 2, 1, 3))
    assert torch.equal(memory, expected)
    assert torch.equal(layout.decode(memory), scales.bfloat16())


@given(data=st.data(), packing=st.sampled_from(["gptq", "awq", "nk"]), num_bits=st.sampled_from([4, 8]))
@settings(deadline=None, max_examples=40)
def test_parts_of_zero_points_packed_on_their_own_are_the_whole_packed(
    data: st.DataObject, packing: Packing, num_bits: int
) -> None:
    size_n, group = data.draw(st.integers(1, 24)) * 8, data.draw(st.sampled_from([-1, 32, 64]))
    rows = 192 // group if group > 0 else 1
    values = random_values(size_n, rows, size_n, num_bits=num_bits)
    layout = MarlinZeroPoints(packing, num_bits=num_bits, size_n=size_n, size_k=192, group_size=group)
    source, memory = pack_zero_points(values, num_bits, packing), garbage(layout)
    assert tuple(source.shape) == layout.source_shape
    per_word = 32 // num_bits
    ends, order = cuts(data, size_n // per_word, 8 // per_word)
    place_parts(layout, memory, source, 0 if packing == "nk" else 1, ends, order)
    padded_n, padded_k = layout.padded_nk
    expected = padded(values, padded_k // group if group > 0 else 1, padded_n)
    assert torch.equal(memory, ops.marlin_zero_points(expected, *expected.shape, num_bits))
    assert torch.equal(layout.decode(memory), values)


@pytest.mark.parametrize("case", cases("marlin_gptq_repack", act_order=False, is_a_8bit=False))
def test_tiles_in_plain_torch_are_the_reference_ones(case: Case) -> None:
    num_bits = case.parameters["bits"]
    values = marlin_unpack(case["expected"], num_bits)
    assert torch.equal(pack(values, num_bits, "gptq"), case["qweight"])
    assert torch.equal(marlin_pack(values, num_bits), case["expected"])


@pytest.mark.parametrize("case", cases("marlin_awq_repack", is_a_8bit=False))
def test_awq_words_become_the_reference_tiles(case: Case) -> None:
    size_k, size_n, num_bits = (case.parameters[key] for key in ("K", "N", "bits"))
    layout = MarlinWeight("awq", num_bits=num_bits, size_n=size_n, size_k=size_k)
    memory = garbage(layout)
    layout.place(memory, case["qweight"], (0, 0))
    rows, columns = case["expected"].shape  # not padded
    assert torch.equal(memory[:rows, :columns], case["expected"])


@pytest.mark.parametrize("case", cases("marlin_scales_zp_bias", kind="marlin_permute_scales"))
def test_scales_are_in_the_reference_order(case: Case) -> None:
    size_k, size_n, group_size = (case.parameters[key] for key in ("K", "N", "group_size"))
    scales = case["scales"]
    layout = MarlinScales(size_n=size_n, size_k=size_k, group_size=group_size, dtype=scales.dtype)
    memory = garbage(layout)
    layout.place(memory, scales, (0, 0))
    assert torch.equal(memory, case["expected"])
    assert torch.equal(layout.decode(memory), scales)


@pytest.mark.parametrize("packing", ["awq", "nk"])
@pytest.mark.parametrize("case", cases("marlin_scales_zp_bias", kind="marlin_zero_points"))
def test_zero_points_are_in_the_reference_order(case: Case, packing: Packing) -> None:
    size_k, size_n, group_size, num_bits = (case.parameters[key] for key in ("K", "N", "group_size", "bits"))
    layout = MarlinZeroPoints(packing, num_bits=num_bits, size_n=size_n, size_k=size_k, group_size=group_size)
    memory = garbage(layout)
    source = case["zp_packed_awq"] if packing == "awq" else case["zp_packed_plain"].T
    layout.place(memory, source, (0, 0))
    assert torch.equal(memory, case["expected"])
    assert torch.equal(layout.decode(memory), case["zp_unpacked_u8"])


def layouts() -> Iterator[tuple[MarlinLayout, torch.Tensor, int]]:
    """Layouts, what is on disk for each, and the dimension of its outputs."""
    for packing, num_bits in (("gptq", 4), ("awq", 4), ("nk", 8)):
        weight = MarlinWeight(packing, num_bits=num_bits, size_n=192, size_k=128)
        values = random_values(num_bits, 128, 192, num_bits=num_bits)
        yield weight, pack(values, num_bits, packing), 0 if packing == "nk" else 1
    for is_transposed, group_size, dtype in ((False, 32, torch.bfloat16), (True, -1, torch.float16)):
        scales = MarlinScales(size_n=192, size_k=128, group_size=group_size, dtype=dtype, is_transposed=is_transposed)
        yield scales, torch.rand(scales.source_shape), 0 if is_transposed else 1
    exponents = MarlinScales(
        size_n=192,
        size_k=96,
        group_size=32,
        dtype=torch.float8_e8m0fnu,
        is_transposed=True,
        is_interleaved=True,
    )
    yield exponents, random_values(1, 192, 3, num_bits=8), 0
    yield fnuz_weight((192, 128)), torch.randn(192, 128).to(torch.float8_e4m3fn), 0  # type: ignore[misc]


@pytest.mark.parametrize("aligned", [True, False])
def test_parts_of_a_checkpoint_are_the_same_recorded_and_at_once(
    tmp_path: Path, write_checkpoint: Callable[..., Path], aligned: bool
) -> None:
    made = list(layouts())
    folder = write_checkpoint(tmp_path, {str(i): source for i, (_, source, _) in enumerate(made)})
    with weightlift.open_checkpoint(folder) as checkpoint:
        for i, (layout, source, dim) in enumerate(made):
            size = source.shape[dim]
            ends = [size // 3, size] if aligned else [size // 4, size // 2, size]
            order = list(reversed(range(len(ends))))
            at_once, memory = garbage(layout), garbage(layout)
            place_parts(layout, at_once, source, dim, ends, order)
            place_parts(layout, memory, checkpoint[str(i)], dim, ends, order)
            checkpoint.run()
            assert torch.equal(memory.view(torch.uint8), at_once.view(torch.uint8))


def test_whole_blocks_are_recorded_and_not_read_before_their_turn(
    tmp_path: Path, write_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list(layouts())
    folder = write_checkpoint(tmp_path, {str(i): source for i, (_, source, _) in enumerate(made)})
    with weightlift.open_checkpoint(folder) as checkpoint:
        with monkeypatch.context() as patched:
            patched.setattr(weightlift.CheckpointTensor, "_read", lambda self: pytest.fail("read"))
            for i, (layout, source, dim) in enumerate(made):
                size = source.shape[dim]
                place_parts(layout, garbage(layout), checkpoint[str(i)], dim, [size // 3, size], [0, 1])
        checkpoint.run()
