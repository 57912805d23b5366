"""The fused ops on real tensors: against golden data, and against plain torch."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden_data import Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_packed import pack_rows
from torch import Tensor

from weightlift import ops

FN = torch.float8_e4m3fn
FNUZ = torch.float8_e4m3fnuz


def same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit; of NaN too."""
    assert found.shape == expected.shape
    if expected.dtype != torch.uint8:
        assert found.dtype == expected.dtype
    equal = found.contiguous().reshape(-1).view(torch.uint8) == expected.contiguous().reshape(-1).view(torch.uint8)
    assert equal.all(), f"{int((~equal).sum())} of {equal.numel()} bytes differ"


def test_default_dtype_of_the_caller_changes_nothing() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = [ops.scaled_fp8_quant(weight), ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=True)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [ops.scaled_fp8_quant(weight), ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=True)]
    finally:
        torch.set_default_dtype(torch.float32)
    for pair in zip(found, expected, strict=True):
        for one, other in zip(*pair, strict=True):
            same(one, other)


@pytest.mark.parametrize("scale", [torch.tensor([0.01]), None], ids=["given", "found"])
@pytest.mark.parametrize("columns", [32, 64], ids=["rows apart", "contiguous"])
def test_scaled_fp8_quant_writes_into_the_output(scale: Tensor | None, columns: int) -> None:
    weight = torch.randn(8, columns, generator=torch.Generator().manual_seed(0))
    memory = torch.zeros(8, 64, dtype=FN)
    expected, expected_scale = ops.scaled_fp8_quant(weight, scale)
    found, found_scale = ops.scaled_fp8_quant(weight, scale, output=memory[:, :columns])
    assert found.data_ptr() == memory.data_ptr()
    same(memory[:, :columns], expected)
    same(found_scale, expected_scale)
    assert not memory[:, columns:].float().any()


# ---- Marlin: golden


@pytest.mark.parametrize("case", cases("marlin_gptq_repack"))
def test_gptq_marlin_repack_is_upstreams(case: Case) -> None:
    p = case.parameters
    perm = case["perm"] if p["act_order"] else None
    same(
        ops.gptq_marlin_repack(case["qweight"], p["K"], p["N"], p["bits"], p["is_a_8bit"], perm=perm), case["expected"]
    )


@pytest.mark.parametrize("case", cases("marlin_awq_repack"))
def test_awq_marlin_repack_is_upstreams(case: Case) -> None:
    p = case.parameters
    same(ops.awq_marlin_repack(case["qweight"], p["K"], p["N"], p["bits"], p["is_a_8bit"]), case["expected"])


@pytest.mark.parametrize("case", cases("marlin_scales_zp_bias"))
def test_marlin_scales_zero_points_and_biases_are_upstreams(case: Case) -> None:
    p = case.parameters
    match p["kind"]:
        case "marlin_permute_scales":
            args = (case["scales"], p["K"], p["N"], p["group_size"])
            same(ops.marlin_permute_scales(*args), case["expected"])
            same(ops.marlin_permute_scales(*args, is_a_8bit=True), case["expected_a8"])
        case "marlin_permute_bias":
            same(ops.marlin_permute_bias(case["bias"]), case["expected"])
        case "marlin_zero_points":
            sizes = (p["groups"], p["N"], p["bits"])
            for a8, suffix in ((False, "expected"), (True, "expected_a8")):
                same(ops.marlin_zero_points(case["zp_unpacked_u8"], *sizes, is_a_8bit=a8), case[suffix])
                same(ops.awq_to_marlin_zero_points(case["zp_packed_awq"], *sizes, is_a_8bit=a8), case[suffix])
                in_order = pack_rows(case["zp_unpacked_u8"].T, p["bits"]).T.contiguous()
                same(ops.gptq_to_marlin_zero_points(in_order, *sizes, is_a_8bit=a8), case[suffix])
        case "marlin_padded_nk":
            for n, k, group, padded_n, padded_k in case["table"].tolist():
                assert ops.marlin_padded_nk(n, k, group) == (padded_n, padded_k)
        case kind:
            pytest.fail(f"unknown kind of case: {kind}")


@pytest.mark.parametrize("case", cases("fp8_marlin"))
def test_fp8_marlin_weights_and_scales_are_upstreams(case: Case) -> None:
    p = case.parameters
    if p["kind"] == "pack_fp8_to_int32":
        same(ops.pack_fp8_to_int32(case["weight"].T), case["expected_size_k_first"])
        same(ops.pack_fp8_to_int32(case["weight"], size_k_first=False), case["expected_n_first"])
        return
    if p["kind"] == "fp8_fused_exponent_bias_into_scales":
        scales, expected = case["scales"], case["expected"]
        finite = expected.isfinite()
        same(ops.fp8_fused_exponent_bias_into_scales(scales[finite]), expected[finite])
        if not finite.all():
            with pytest.raises(ValueError, match="becomes infinite"):
                ops.fp8_fused_exponent_bias_into_scales(scales)
        return
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[p["orig_dtype"]]
    is_block = "weight_scale_inv" in case
    padded = ops.marlin_padded_nk(p["N"], p["K"], 128 if is_block else -1)
    weight = case["weight"]
    same(ops.nk_marlin_repack(weight, p["K"], p["N"], 8, padded_nk=padded), case["expected_weight"])
    packed = ops.pack_fp8_to_int32(weight, size_k_first=False).T
    same(ops.gptq_marlin_repack(packed, p["K"], p["N"], 8, padded_nk=padded), case["expected_weight"])
    scale = case["weight_scale_inv" if is_block else "weight_scale"]
    found = ops.fp8_marlin_process_scales(
        scale,
        p["K"],
        p["N"],
        dtype,
        logical_widths=p.get("logical_widths"),
        block_size=(128, 128) if is_block else None,
    )
    same(found, case["expected_scale"])
    if "bias" in case:
        bias = torch.nn.functional.pad(case["bias"], (0, padded[0] - p["N"]))
        same(ops.marlin_permute_bias(bias), case["expected_bias"])


@pytest.mark.parametrize("case", cases("mxfp8_marlin"))
def test_mxfp8_marlin_is_upstreams(case: Case) -> None:
    p = case.parameters
    padded_n, padded_k = ops.marlin_padded_nk(p["N"], p["K"], 32)
    assert (padded_n, padded_k) == (p["padded_n"], p["padded_k"])
    weight = ops.nk_marlin_repack(case["weight"], p["K"], p["N"], 8, padded_nk=(padded_n, padded_k))
    same(weight, case["expected_weight"])
    scales = case["weight_scale_e8m0"].view(torch.float8_e8m0fnu).to(torch.bfloat16).T
    scales = torch.nn.functional.pad(scales, (0, padded_n - p["N"], 0, padded_k // 32 - scales.shape[0]))
    permuted = ops.marlin_permute_scales(scales, padded_k, padded_n, 32)
    same(ops.mxfp8_marlin_process_scales(permuted), case["expected_scale_e8m0"])


# ---- FP8: golden


@pytest.mark.parametrize("case", cases("fp8_fn_to_fnuz"))
def test_fnuz_normalisation_is_exact_and_upstreams_bytes_on_demand(case: Case) -> None:
    if case.name == "e8m0_scale_all256":
        weight = torch.zeros(1).to(FN)
        bytes_ = case["e8m0_bytes"]
        same(
            ops.normalize_e4m3fn_to_e4m3fnuz(weight, bytes_, compat="vllm")[1],
            case["expected_e8m0_bytes"],
        )
        possible = bytes_[bytes_ != 254]
        expected = torch.where(possible == 255, possible, possible + 1)
        same(ops.normalize_e4m3fn_to_e4m3fnuz(weight, possible)[1], expected)
        same(
            ops.normalize_e4m3fn_to_e4m3fnuz(weight, possible.view(torch.float8_e8m0fnu))[1].view(torch.uint8), expected
        )
        with pytest.raises(ValueError, match="largest power of two"):
            ops.normalize_e4m3fn_to_e4m3fnuz(weight, bytes_)
        return
    if case.name == "all256":
        weight = case["fn_bytes"].view(FN)
        exact = ops.normalize_e4m3fn_to_e4m3fnuz(weight, torch.ones(1))[0]
        same(exact.view(torch.uint8), case["exact_fnuz_bytes_of_half_value"])
        upstream = ops.normalize_e4m3fn_to_e4m3fnuz(weight, torch.ones(1), compat="vllm")[0]
        same(upstream.view(torch.uint8), case["expected_fnuz_bytes"])
        assert torch.equal((exact.float() * 2)[~weight.float().isnan()], weight.float()[~weight.float().isnan()])
        return
    weight, scale, input_scale = ops.normalize_e4m3fn_to_e4m3fnuz(
        case["weight"], case["scale"], case["input_scale"], compat="vllm"
    )
    assert input_scale is not None
    same(weight.view(torch.uint8), case["expected_fnuz_bytes"])
    same(scale, case["expected_scale"])
    same(input_scale, case["expected_input_scale"])
    again = ops.normalize_e4m3fn_to_e4m3fnuz(weight, scale, input_scale)
    assert again[0] is weight
    assert again[1] is scale
    assert again[2] is input_scale
    overflows = bool(case["expected_scale"].isinf().any())
    if overflows:
        with pytest.raises(ValueError, match="too large"):
            ops.normalize_e4m3fn_to_e4m3fnuz(case["weight"], case["scale"])


@pytest.mark.parametrize("case", cases("fp8_requant_max_scale"))
def test_requantisation_to_the_largest_scale_is_exact_and_upstreams_bytes_on_demand(case: Case) -> None:
    weight, scale, widths = case["weight"], case["weight_scale"], case.parameters["logical_widths"]
    suffix = "expected"
    if "input_scale" in case:
        suffix = "expected_fnuz_bytes"
    for compat, kind in ((None, "exact"), ("vllm", "cuda")):
        if suffix == "expected_fnuz_bytes":
            fnuz, doubled, _ = ops.normalize_e4m3fn_to_e4m3fnuz(weight, scale, compat=compat)
            largest, found = ops.requantize_with_max_scale(fnuz, doubled, widths, compat=compat)
            if kind == "exact":  # there the data have what upstream's normalisation makes of NaN
                is_nan = weight.float().isnan()
                assert torch.equal(found.float().isnan(), is_nan)
                same(found.view(torch.uint8)[~is_nan], case[f"{suffix}_{kind}"][~is_nan])
                continue
            found = found.view(torch.uint8)
        else:
            largest, found = ops.requantize_with_max_scale(weight, scale, widths, compat=compat)
        same(largest, case["expected_scale"])
        same(found, case[f"{suffix}_{kind}"])


def online(case: Case) -> Tensor:
    source = case.parameters.get("weight_from")
    return (Case(case.topic, source, {}) if source else case)["weight"]


@pytest.mark.parametrize("case", cases("online_quant", kind="online_quant"))
def test_quantising_on_arrival_is_upstreams(case: Case) -> None:
    weight = online(case)
    dtype = FN if case.parameters["target"] == "e4m3fn" else FNUZ
    q, scale = ops.scaled_fp8_quant(weight, dtype=dtype, compat="vllm")
    same(q, case["tensor_q"])
    same(scale, case["tensor_scale"])
    exact, scale = ops.scaled_fp8_quant(weight, dtype=dtype)
    same(scale, case["tensor_scale"])
    if case.parameters["data"] == "zeros":  # 0 / 0, of which upstream makes the largest number
        assert not exact.float().any()
    else:
        same(exact, case["tensor_q"])

    q, scale = ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=True, dtype=dtype)
    same(q, case["channel_q"])
    same(scale, case["channel_scale"])
    q, scale = ops.per_block_cast_to_fp8(weight, dtype=dtype)
    same(q, case["block128_q"])
    same(scale, case["block128_scale"])
    if "block128_ue8m0_q" in case:
        q, scale = ops.per_block_cast_to_fp8(weight, use_ue8m0=True)
        same(q, case["block128_ue8m0_q"])
        same(scale, case["block128_ue8m0_scale"])
    if "group128_q" in case:
        q, scale = ops.per_token_group_quant_fp8(weight, 128, dtype=dtype)
        same(q, case["group128_q"])
        same(scale, case["group128_scale"])
    if "mxfp8_q" in case:
        q, scale = ops.mxfp8_e4m3_quantize(weight)
        same(q, case["mxfp8_q"])
        same(scale, case["mxfp8_scale_e8m0"])


@pytest.mark.parametrize("case", cases("online_quant", kind="requant_weight_ue8m0_inplace"))
def test_block_scales_become_powers_of_two_as_upstream(case: Case) -> None:
    weight, scale = ops.requant_weight_ue8m0(case["weight"], case["weight_scale_inv"])
    same(weight, case["expected_weight"])
    same(scale, case["expected_scale"])


@pytest.mark.parametrize(
    "case", cases("online_quant", kind="online_quant TP: amax is MAX-all-reduced over TP before the scale is formed")
)
def test_ranks_share_the_scale_of_the_whole_weight(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = case["weight"]
    rows, columns = weight.shape
    slices = {
        "col": [weight[: rows // 2], weight[rows // 2 :]],
        "row": [weight[:, : columns // 2], weight[:, columns // 2 :]],
    }

    def others(per_token: bool) -> Callable[..., None]:
        whole = ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=per_token)[1]
        return lambda scales, op, group: scales.copy_(torch.maximum(scales, whole))

    for rank in range(2):
        for layer, parts in slices.items():
            monkeypatch.setattr(torch.distributed, "all_reduce", others(per_token=False))
            q, scale = ops.scaled_fp8_quant(parts[rank], group="ranks")
            same(scale, case["tensor_scale_all_ranks"])
            same(q, case[f"{layer}_tp2_r{rank}_tensor_q"])
            if layer == "row":
                monkeypatch.setattr(torch.distributed, "all_reduce", others(per_token=True))
                q, scale = ops.scaled_fp8_quant(parts[rank], use_per_token_if_dynamic=True, group="ranks")
                same(scale, case["channel_scale_all_ranks_row_parallel"])
            else:
                q, _ = ops.scaled_fp8_quant(parts[rank], use_per_token_if_dynamic=True)
            same(q, case[f"{layer}_tp2_r{rank}_channel_q"])


# ---- block scales: golden


def block_parts(case: Case) -> list[tuple[Tensor, ops.BlockSlice]]:
    """The parts of a rank's weight, each a slice of a weight of the checkpoint."""
    p = case.parameters
    parent = next(q.values[0] for q in cases("fp8_block_tp_slices") if q.values[0].name == p["parent"])
    spec, tp, rank = parent.parameters["spec"], p["tp"], p["rank"]
    parts = []

    def part(weight: Tensor, scale: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        parts.append((weight, ops.BlockSlice(scale, tuple(weight.shape), rows, columns)))

    def share(first: int, size: int, index: int, count: int) -> tuple[int, int]:
        return first + index * (size // count), first + (index + 1) * (size // count)

    if parent.parameters["layer"] in ("column", "row"):
        weight, scale = parent["ckpt_weight"], parent["ckpt_scale"]
        out, in_ = weight.shape
        is_column = parent.parameters["layer"] == "column"
        part(
            weight,
            scale,
            share(0, out, rank, tp) if is_column else (0, out),
            (0, in_) if is_column else share(0, in_, rank, tp),
        )
        return parts
    if "sizes" in spec:
        names = [(str(i), size, rank, tp) for i, size in enumerate(spec["sizes"])]
    else:
        kv = (rank // (tp // spec["kv"]), spec["kv"]) if tp >= spec["kv"] else (rank, tp)
        names = [
            ("q", spec["heads"] * spec["head"], rank, tp),
            *((name, spec["kv"] * spec["head"], *kv) for name in "kv"),
        ]
    first = 0
    for name, size, index, count in names:
        fused = "ckpt_weight" in parent
        suffix = "" if fused else f"_{name}"
        weight, scale = parent[f"ckpt_weight{suffix}"], parent[f"ckpt_scale{suffix}"]
        part(weight, scale, share(first if fused else 0, size, index, count), (0, weight.shape[1]))
        first += size
    return parts


def is_divisible(case: Case) -> bool:
    return "not divisible by" not in case.parameters.get("error", "") or "block" in case.parameters["error"]


@pytest.mark.parametrize(
    "case", [c for c in cases("fp8_block_tp_slices") if c.values[0] is None or "tp" in c.values[0].parameters]
)
def test_a_slices_block_scales_give_the_checkpoints_own_values(case: Case) -> None:
    p = case.parameters
    if not is_divisible(case):
        pytest.skip("the heads can't be shared among so many ranks")
    parts = block_parts(case)
    block = (128, 128)
    weight = torch.cat([w[slice(*part.rows), slice(*part.columns)] for w, part in parts])
    expected = torch.cat(
        [ops.dequantize_blocks(w, part.scale, block)[slice(*part.rows), slice(*part.columns)] for w, part in parts]
    )
    aligned = ops.align_block_scales([part for _, part in parts], block)
    assert torch.equal(ops.dequantize_blocks(weight, aligned.scale, aligned.block_size), expected)

    # Where upstream has an answer that is right, the scales are its own, if need be those of its larger blocks.
    if p["ok"] and not p.get("dequant_mismatch_elements_vs_exact_slice"):
        same(
            ops.align_block_scales([part for _, part in parts], block, allowed_blocks=[(128, 128)]).scale,
            case["expected_scale"],
        )
    elif aligned.block_size != (128, 128):
        with pytest.raises(ValueError, match=r"rows \(.*need blocks of"):
            ops.align_block_scales([part for _, part in parts], block, allowed_blocks=[(128, 128)])

    # Kept as they are, with the phase.
    for w, part in parts:
        scale, phase = ops.slice_block_scales(part.scale, block, part.rows, part.columns)
        values = ops.dequantize_blocks(w[slice(*part.rows), slice(*part.columns)], scale, block, phase)
        whole = ops.dequantize_blocks(w, part.scale, block)
        assert torch.equal(values, whole[slice(*part.rows), slice(*part.columns)])


@pytest.mark.parametrize(
    "case", [c for c in cases("moe_block") if c.values[0] is None or c.values[0].parameters.get("ok")]
)
def test_an_experts_block_scales_are_upstreams(case: Case) -> None:
    p = case.parameters
    parent = Case(case.topic, p["parent"], {})
    experts = (
        [e for e, local in enumerate(p["expert_map"]) if local >= 0]
        if "expert_map" in p
        else range(parent["ckpt_w1"].shape[0])
    )
    rank = p.get("tp_rank", 0)
    rows = (rank * p["intermediate_per_partition"], (rank + 1) * p["intermediate_per_partition"])
    for local, expert in enumerate(experts):

        def cut(name: str, along_rows: bool, expert: int = expert) -> ops.BlockSlice:
            weight, scale = parent[f"ckpt_{name}"][expert], parent[f"ckpt_{name}_scale_inv"][expert]
            whole = (0, weight.shape[1 if along_rows else 0])
            return ops.BlockSlice(scale, tuple(weight.shape), *((rows, whole) if along_rows else (whole, rows)))

        allowed = [tuple(p["block"])]
        w13 = ops.align_block_scales([cut("w1", True), cut("w3", True)], (128, 128), allowed_blocks=allowed)
        same(w13.scale, case["expected_w13_scale_inv"][local])
        w2 = ops.align_block_scales([cut("w2", False)], (128, 128), allowed_blocks=allowed)
        same(w2.scale, case["expected_w2_scale_inv"][local])


# ---- examples, small enough to check by hand


def test_nibbles_of_gptq_and_awq_words_are_where_the_formats_say() -> None:
    """Values 0..7 along the packed dimension: 0x76543210 in GPTQ, 0x75316420 in AWQ; the same weight gives the same."""
    values = (torch.arange(16 * 64) * 7 % 16).reshape(16, 64).to(torch.int32)

    def word(of: Tensor, order: tuple[int, ...]) -> Tensor:
        words = torch.zeros(of.shape[:-1], dtype=torch.int32)
        for i, column in enumerate(order):
            words |= of[..., column] << 4 * i
        return words

    assert word(torch.arange(8, dtype=torch.int32), tuple(range(8))).item() == 0x76543210
    assert word(torch.arange(8, dtype=torch.int32), (0, 2, 4, 6, 1, 3, 5, 7)).item() == 0x75316420
    gptq = word(values.reshape(2, 8, 64).transpose(1, 2), tuple(range(8)))
    awq = word(values.reshape(16, 8, 8), (0, 2, 4, 6, 1, 3, 5, 7))
    same(ops.gptq_marlin_repack(gptq, 16, 64, 4), ops.awq_marlin_repack(awq, 16, 64, 4))
    same(ops.gptq_marlin_repack(gptq, 16, 64, 4), ops.nk_marlin_repack(gptq.T.contiguous(), 16, 64, 4))
    same(
        ops.gptq_marlin_repack(gptq, 16, 64, 4), ops.nk_marlin_repack(gptq.T.contiguous().view(torch.uint8), 16, 64, 4)
    )


def test_scales_of_one_group_are_permuted_in_columns_of_32() -> None:
    scales = torch.arange(64.0).reshape(1, 64)
    for group_size in (-1, 128, 256):
        found = ops.marlin_permute_scales(scales, 128, 64, group_size)
        assert found[0, :8].tolist() == [0, 1, 8, 9, 16, 17, 24, 25]
    assert ops.marlin_permute_scales(scales.expand(4, 64), 128, 64, 32)[0, :8].tolist() == [8 * i for i in range(8)]


def test_zero_points_by_example() -> None:
    found = ops.marlin_zero_points((torch.arange(64) * 3 % 16).reshape(1, 64), 1, 64, 4)
    words = [word & 0xFFFFFFFF for word in found[0].tolist()]
    assert words[:4] == [0x88880000, 0xBBBB3333, 0xEEEE6666, 0x11119999]
    assert words[4:] == [0x4444CCCC, 0x7777FFFF, 0xAAAA2222, 0xDDDD5555]


def test_fp8_bytes_are_packed_lowest_first() -> None:
    weight = torch.arange(1.0, 9.0).reshape(2, 4).T.to(FN)  # K = 4, N = 2
    assert [word & 0xFFFFFFFF for word in ops.pack_fp8_to_int32(weight)[0].tolist()] == [0x48444038, 0x504E4C4A]


def test_nvfp4_scales_by_example() -> None:
    scales = torch.tensor([[2.0**-9, 2.0**-8, 1.0, 0.0]]).to(torch.bfloat16)
    found, factor = ops.nvfp4_marlin_process_scales(scales)
    # Columns 0 2 1 3. 1 is 2^8 times too small for what fits, so that 2^-9 * 2^8 * 2^7 = 2^6.
    assert factor == 256.0
    values = torch.tensor([2.0**-9, 1.0, 2.0**-8, 0.0]) * 256 * 128
    bits = (values.to(torch.float16).view(torch.int16).to(torch.int32) << 1) >> 8 & 0xFF
    assert found.view(torch.uint8)[0].tolist() == bits.tolist() == [168, 240, 176, 0]
    assert ops.nvfp4_marlin_process_scales(scales, a_dtype=torch.float16)[1] == 1.0
    assert ops.nvfp4_marlin_process_global_scale(torch.tensor(1.0), torch.bfloat16).item() == 2.0**119
    assert ops.nvfp4_marlin_process_global_scale(torch.tensor(1.0), torch.float16).item() == 2.0**7
    with pytest.raises(ValueError, match="must not be negative"):
        ops.nvfp4_marlin_process_scales(-scales)


def test_mxfp4_scales_take_the_difference_of_the_biases() -> None:
    scales = (2.0 ** torch.tensor([[0.0, 1.0, 2.0, 3.0]])).to(torch.bfloat16)
    assert ops.mxfp4_marlin_process_scales(scales).view(torch.uint8).tolist() == [[127, 129, 128, 130]]
    found = ops.mxfp4_marlin_process_scales(scales, torch.float8_e4m3fn)
    assert found.view(torch.uint8).tolist() == [[133, 134, 135, 136]]
    with pytest.raises(ValueError, match="2\\^6"):
        ops.mxfp4_marlin_process_scales(torch.full((1, 4), 2.0**122).to(torch.bfloat16), torch.float8_e4m3fn)


def test_block_scales_are_swizzled_in_tiles_of_128_by_4() -> None:
    scale = torch.arange(130 * 6).reshape(130, 6).to(torch.uint8)
    found = ops.swizzle_blockscale(scale).flatten()
    assert found.numel() == 256 * 8
    for row, column in ((0, 0), (1, 0), (33, 2), (127, 3), (128, 0), (129, 5), (5, 4)):
        tile = row // 128 * 2 + column // 4
        place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert found[place] == scale[row, column]
    same(ops.swizzle_blockscale(scale.expand(2, 130, 6))[1], ops.swizzle_blockscale(scale))


def test_requantisation_by_example() -> None:
    weight = torch.tensor([[448.0, 1.0]] * 3).to(FN)
    scale, found = ops.requantize_with_max_scale(weight, torch.tensor([0.1, 0.2, 0.4]), [1, 1, 1])
    assert found.float().tolist() == [[112.0, 0.25], [224.0, 0.5], [448.0, 1.0]]
    assert scale == torch.tensor(0.4)


@pytest.mark.parametrize("scale", [200.0, 1e-5, 1e-30, 3e38])
def test_a_single_scale_leaves_every_code_as_it_is(scale: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FN).reshape(2, 128)
    found = ops.requantize_with_max_scale(codes, torch.full((2,), scale), [1, 1])[1]
    same(found, codes)


def test_online_blocks_by_example() -> None:
    q, scale = ops.per_block_cast_to_fp8(torch.tensor([[1.0, -2.0, 0.0, 4.0], [0.5, 8.0, 1e-6, 0.0]]), (2, 2))
    assert q.float().tolist() == [[56.0, -112.0, 0.0, 448.0], [28.0, 448.0, 0.0, 0.0]]
    torch.testing.assert_close(scale, torch.tensor([[8 / 448, 4 / 448]]))
    zero = ops.per_block_cast_to_fp8(torch.zeros(2, 2), (2, 2))[1]
    assert zero.item() == torch.tensor(1e-4).div(448).item()


def test_mxfp8_scales_by_example() -> None:
    amaxes = torch.tensor([448.0, 449.0, 0.0])
    q, scale = ops.mxfp8_e4m3_quantize(torch.nn.functional.pad(amaxes[:, None], (0, 31)))
    assert scale.flatten().tolist() == [127, 128, 0]
    assert q[:, 0].float().tolist() == [448.0, 224.0, 0.0]
    assert ops.mxfp8_e4m3_quantize(torch.zeros(3, 32), is_sf_swizzled_layout=True)[1].shape == (512,)


# ---- against plain torch, on anything

floats = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
sizes = st.integers(1, 200)
seeds = st.integers(0, 2**31)


def random_matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, gap: int = 0) -> Tensor:
    """Numbers of all magnitudes, some rows zero; with `gap`, a slice of a wider matrix."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns + gap, generator=generator)
    values *= 10.0 ** torch.randint(-6, 4, (rows, 1), generator=generator)
    values[torch.rand(rows, generator=generator) < 0.1] = 0
    return values.to(dtype)[:, gap // 2 : gap // 2 + columns]


def to_fp8(values: Tensor, dtype: torch.dtype) -> Tensor:
    limit = 448 if dtype == FN else 224
    return values.clamp(-limit, limit).to(dtype)


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, floats, st.sampled_from([FN, FNUZ]), st.integers(0, 5), seeds)
def test_quantising_is_what_torch_does(
    rows: int, columns: int, source: torch.dtype, dtype: torch.dtype, gap: int, seed: int
) -> None:
    weight = random_matrix(rows, columns, source, seed, gap)
    limit = 448 if dtype == FN else 224
    amax = weight.float().abs().amax(1, keepdim=True)

    q, scale = ops.scaled_fp8_quant(weight, dtype=dtype)
    assert torch.equal(scale, amax.max().reshape(1) / limit)
    same(q, to_fp8(weight.float() * torch.where(scale == 0, 1, 1 / scale), dtype))
    q, scale = ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=True, dtype=dtype)
    assert torch.equal(scale, (amax / limit).clamp(1 / (limit * 512)))
    same(q, to_fp8(weight.float() / scale, dtype))
    bound = torch.tensor(1.5)
    q, scale = ops.scaled_fp8_quant(weight, scale_ub=bound, use_per_token_if_dynamic=True, dtype=dtype)
    assert torch.equal(scale, (amax.clamp(max=1.5) / limit).clamp(1 / (limit * 512)))
    same(q, to_fp8(weight.float() / scale, dtype))

    i, scale, _ = ops.scaled_int8_quant(weight)
    assert torch.equal(scale, amax / 127)
    same(i, (weight.float() / torch.where(scale == 0, 1, scale)).round().clamp(-127, 127).to(torch.int8))

    given_scale = torch.rand(rows, 1) + 0.5
    q, _ = ops.scaled_fp8_quant(weight, given_scale, group_shape=(1, -1), dtype=dtype)
    same(q, to_fp8(weight.float() * (1 / given_scale), dtype))
    by_column = torch.rand(columns) + 0.5
    q, _ = ops.scaled_fp8_quant(weight, by_column, group_shape=(-1, 1), dtype=dtype)
    same(q, to_fp8(weight.float() * (1 / by_column), dtype))


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, st.integers(1, 70), st.integers(1, 70), floats, st.booleans(), seeds)
def test_quantising_blocks_is_what_torch_does(
    rows: int, columns: int, block_rows: int, block_columns: int, source: torch.dtype, ue8m0: bool, seed: int
) -> None:
    weight = random_matrix(rows, columns, source, seed)
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % block_columns, 0, -rows % block_rows))
    blocks = padded.view(padded.shape[0] // block_rows, block_rows, -1, block_columns)
    expected = blocks.abs().amax((1, 3)).clamp(1e-4) / 448
    if ue8m0:
        mantissa, exponent = torch.frexp(expected)
        expected = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    q, scale = ops.per_block_cast_to_fp8(weight, (block_rows, block_columns), ue8m0)
    assert torch.equal(scale, expected)
    scaled = blocks * (1 / expected)[:, None, :, None]
    same(q, scaled.to(FN).view(padded.shape)[:rows, :columns].contiguous())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([4, 8]), st.booleans(), seeds)
def test_repacking_moves_every_value_once(tiles_k: int, tiles_n: int, bits: int, a8: bool, seed: int) -> None:
    """Each row of tiles has the values that it had, and the same values in another layout give the same result."""
    size_k, size_n = 32 * tiles_k, 64 * tiles_n
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (size_k * bits // 32, size_n), generator=generator).to(torch.int32)
    found = ops.gptq_marlin_repack(words, size_k, size_n, bits, a8)
    assert found.shape == (size_k // 16, size_n * bits // 2)
    same(found, ops.nk_marlin_repack(words.T.contiguous(), size_k, size_n, bits, a8))
    rows = 32 * bits // 32  # of words, in a row of tiles of either layout

    def values(of: Tensor) -> Tensor:
        fields = of.reshape(tiles_k, -1, 1) >> torch.arange(0, 32, bits, dtype=torch.int32) & ((1 << bits) - 1)
        return fields.reshape(tiles_k, -1).sort(1).values

    assert torch.equal(values(found), values(words.reshape(tiles_k, rows, size_n)))
    perm = torch.randperm(size_k, generator=generator).to(torch.int32)
    fields = words.unsqueeze(1) >> torch.arange(0, 32, bits, dtype=torch.int32)[:, None] & ((1 << bits) - 1)
    gathered = fields.reshape(size_k, size_n)[perm.long()].reshape(-1, 32 // bits, size_n)
    repacked = torch.zeros_like(words)
    for i in range(32 // bits):
        repacked |= gathered[:, i] << bits * i
    same(
        ops.gptq_marlin_repack(words, size_k, size_n, bits, a8, perm=perm),
        ops.gptq_marlin_repack(repacked, size_k, size_n, bits, a8),
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 299), st.integers(1, 300)), min_size=1, max_size=4),
    st.integers(1, 300),
    st.integers(0, 299),
    st.sampled_from([1, 4, 32, 128]),
    st.sampled_from([1, 4, 32, 128]),
    seeds,
)
def test_block_scales_of_any_cut_give_the_checkpoints_own_values(
    rows: list[tuple[int, int, int]], columns: int, first: int, block_n: int, block_k: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    first %= columns
    weights, parts, expected = [], [], []
    for size, start, length in rows:
        start %= size
        cut = (start, min(size, start + length))
        shape = (-(-size // block_n), -(-columns // block_k))
        scale = torch.rand(shape, generator=generator) + 0.1
        weight = torch.randn(size, columns, generator=generator).to(FN)
        parts.append(ops.BlockSlice(scale, (size, columns), cut, (first, columns)))
        whole = weight.float() * scale.repeat_interleave(block_n, 0)[:size].repeat_interleave(block_k, 1)[:, :columns]
        weights.append(weight[slice(*cut), first:])
        expected.append(whole[slice(*cut), first:])
        kept, phase = ops.slice_block_scales(scale, (block_n, block_k), cut, (first, columns))
        assert torch.equal(ops.dequantize_blocks(weights[-1], kept, (block_n, block_k), phase), expected[-1])
    aligned = ops.align_block_scales(parts, (block_n, block_k))
    assert block_n % aligned.block_size[0] == 0
    assert block_k % aligned.block_size[1] == 0
    found = ops.dequantize_blocks(torch.cat(weights), aligned.scale, aligned.block_size)
    assert torch.equal(found, torch.cat(expected))


def test_padding_of_a_part_has_scale_one() -> None:
    scale = torch.tensor([[2.0], [3.0]])
    part = ops.BlockSlice(scale, (200, 128), rows=(128, 384), columns=(0, 128))
    assert ops.align_block_scales([part], (128, 128)).scale.tolist() == [[3.0], [1.0]]
    exponents = ops.BlockSlice(torch.tensor([[120], [130]], dtype=torch.uint8), (200, 128), (128, 384), (0, 128))
    assert ops.align_block_scales([exponents], (128, 128)).scale.tolist() == [[130], [127]]


# ---- meta tensors, fake tensors, torch.compile

BF16 = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
FP8 = BF16.to(FN)
WORDS = torch.randint(-(2**31), 2**31, (32, 64), generator=torch.Generator().manual_seed(1)).to(torch.int32)
Result = Tensor | tuple[Any, ...]
EVERY_OP: dict[str, tuple[Callable[..., Result], tuple[Tensor, ...]]] = {
    "gptq_marlin_repack": (lambda w: ops.gptq_marlin_repack(w, 128, 64, 8), (WORDS,)),
    "gptq_marlin_repack, perm": (
        lambda w, perm: ops.gptq_marlin_repack(w, 128, 64, 8, perm=perm),
        (WORDS, torch.arange(127, -1, -1, dtype=torch.int32)),
    ),
    "awq_marlin_repack": (lambda w: ops.awq_marlin_repack(w, 32, 512, 4), (WORDS,)),
    "nk_marlin_repack": (lambda w: ops.nk_marlin_repack(w, 256, 128, 8), (FP8,)),
    "pack_fp8_to_int32": (ops.pack_fp8_to_int32, (FP8,)),
    "marlin_permute_scales": (lambda s: ops.marlin_permute_scales(s, 128 * 128, 256, 128), (BF16,)),
    "awq_to_marlin_zero_points": (lambda z: ops.awq_to_marlin_zero_points(z, 32, 512, 4), (WORDS,)),
    "gptq_to_marlin_zero_points": (lambda z: ops.gptq_to_marlin_zero_points(z, 32, 256, 8), (WORDS,)),
    "fp8_marlin_process_scales": (
        lambda s: ops.fp8_marlin_process_scales(s, 256, 128, torch.bfloat16),
        (torch.ones(128, 1),),
    ),
    "normalize_e4m3fn_to_e4m3fnuz": (ops.normalize_e4m3fn_to_e4m3fnuz, (FP8, torch.ones(1), torch.ones(1))),
    "requantize_with_max_scale": (
        lambda w, s: ops.requantize_with_max_scale(w, s, [64, 64]),
        (FP8, torch.tensor([0.1, 0.2])),
    ),
    "scaled_fp8_quant, tensor": (ops.scaled_fp8_quant, (BF16,)),
    "scaled_fp8_quant, token": (lambda w: ops.scaled_fp8_quant(w, use_per_token_if_dynamic=True), (BF16,)),
    "scaled_fp8_quant, given": (ops.scaled_fp8_quant, (BF16, torch.tensor([0.5]))),
    "per_token_group_quant_fp8": (lambda w: ops.per_token_group_quant_fp8(w, 64), (BF16,)),
    "per_block_cast_to_fp8": (ops.per_block_cast_to_fp8, (BF16,)),
    "mxfp8_e4m3_quantize": (ops.mxfp8_e4m3_quantize, (BF16,)),
    "scaled_int8_quant": (ops.scaled_int8_quant, (BF16,)),
}


def tensors(result: Result) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [part for part in result if part is not None]


@pytest.mark.parametrize("name", EVERY_OP)
def test_meta_tensors_and_compiled_functions_get_what_real_ones_do(name: str) -> None:
    op, arguments = EVERY_OP[name]
    expected = tensors(op(*arguments))
    for found, real in zip(tensors(op(*(a.to("meta") for a in arguments))), expected, strict=True):
        assert found.is_meta
        assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())
    compiled = torch.compile(op, backend="eager", fullgraph=True)
    for found, real in zip(tensors(compiled(*arguments)), expected, strict=True):
        same(found, real)


@pytest.mark.parametrize("name", [name for name in EVERY_OP if "marlin" not in name or "repack" in name])
def test_results_are_the_same_wherever_the_source_lies(name: str) -> None:
    """A column slice of a wider matrix, a transposed one, and one at an odd address."""
    op, (source, *rest) = EVERY_OP[name]
    expected = tensors(op(source, *rest))
    wide = torch.cat([source.view(torch.uint8)] * 2, 1).view(source.dtype)[:, : source.shape[1]]
    item = source.itemsize
    memory = torch.zeros(source.numel() * item + item, dtype=torch.uint8)
    odd = memory[item:].view(source.dtype).view(source.shape)
    for other in (wide, odd, source.t().contiguous().t()):
        other = other if other is not odd else odd.copy_(source)
        for found, real in zip(tensors(op(other, *rest)), expected, strict=True):
            same(found, real)


def test_registered_ops_keep_torchs_rules() -> None:
    library = torch.ops.weightlift
    torch.library.opcheck(library.marlin_repack.default, (WORDS, "gptq", 8, False, 64, 128, 64, 128, None))
    torch.library.opcheck(
        library.quantize_with.default,
        (BF16, torch.ones(1), FN, 128, 256, False, True, *[0.0] * 3, False, False),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(library.amax.default, (BF16,))


@pytest.mark.parametrize("module", [ops.blocks, ops.fp8, ops.marlin, ops.quantize])
def test_examples_in_docstrings_run(module: Any) -> None:
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.failed == 0


# ---- bad input


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ops.gptq_marlin_repack(WORDS.float(), 128, 64, 8), TypeError, "expected torch.int32, found torch.fl"),
        (lambda: ops.gptq_marlin_repack(WORDS, 128, 64, 5), ValueError, "num_bits must be 4 or 8, found 5"),
        (lambda: ops.gptq_marlin_repack(WORDS, 128, 64, 4), ValueError, r"expected a weight of shape \(16, 64\)"),
        (
            lambda: ops.gptq_marlin_repack(WORDS, 128, 96, 8),
            ValueError,
            "no Marlin tile fits size_k = 128, size_n = 96",
        ),
        (lambda: ops.gptq_marlin_repack(WORDS[:4], 16, 64, 8, True), ValueError, "must be multiples of 32 and 64"),
        (
            lambda: ops.gptq_marlin_repack(WORDS, 128, 64, 8, perm=torch.full((128,), 128, dtype=torch.int32)),
            ValueError,
            "outside",
        ),
        (lambda: ops.gptq_marlin_repack(WORDS, 128, 64, 8, perm=torch.arange(4)), ValueError, "an entry for each"),
        (lambda: ops.nk_marlin_repack(BF16, 256, 128, 8), TypeError, "found torch.bfloat16"),
        (lambda: ops.pack_fp8_to_int32(FP8[:127]), ValueError, "K = 127 is not a multiple of 4"),
        (lambda: ops.marlin_permute_scales(BF16, 128, 256, 128), ValueError, "expected 1 groups"),
        (lambda: ops.marlin_permute_bias(torch.zeros(33)), ValueError, "not a multiple of 32"),
        (lambda: ops.marlin_zero_points(torch.zeros(1, 64), 2, 64, 4), ValueError, "expected zero points of shape"),
        (lambda: ops.awq_to_marlin_zero_points(WORDS, 32, 64, 4), ValueError, "expected zero points of shape"),
        (lambda: ops.gptq_to_marlin_zero_points(WORDS[:, :4], 32, 32, 4), ValueError, "not a multiple of 64"),
        (lambda: ops.normalize_e4m3fn_to_e4m3fnuz(BF16, torch.ones(1)), TypeError, "found torch.bfloat16"),
        (lambda: ops.normalize_e4m3fn_to_e4m3fnuz(FP8, torch.tensor([3e38])), ValueError, "becomes infinite"),
        (
            lambda: ops.requantize_with_max_scale(FP8, torch.ones(2), [64, 32]),
            ValueError,
            "don't make up a weight of 128 rows",
        ),
        (
            lambda: ops.requantize_with_max_scale(FP8, torch.tensor([torch.finfo(torch.float32).min, 1.0]), [64, 64]),
            ValueError,
            "part 0 .* was never loaded",
        ),
        (
            lambda: ops.requantize_with_max_scale(FP8, torch.tensor([math.nan, 1.0]), [64, 64]),
            ValueError,
            "part 0 has the scale nan",
        ),
        (lambda: ops.requantize_with_max_scale(FP8, torch.tensor([1.0, -1.0]), [64, 64]), ValueError, "not negative"),
        (lambda: ops.requantize_with_max_scale(FP8, torch.zeros(2), [64, 64]), ValueError, "largest scale is 0"),
        (lambda: ops.scaled_fp8_quant(WORDS), TypeError, "found torch.int32"),
        (lambda: ops.scaled_fp8_quant(BF16, torch.zeros(1)), ValueError, "finite and above zero, found 0"),
        (lambda: ops.scaled_fp8_quant(BF16, torch.tensor(math.nan)), ValueError, "found nan"),
        (lambda: ops.scaled_fp8_quant(BF16, torch.ones(128)), ValueError, "need a group_shape"),
        (lambda: ops.scaled_fp8_quant(BF16, torch.ones(3, 1)), ValueError, "don't divide"),
        (lambda: ops.scaled_fp8_quant(BF16, torch.ones(3), group_shape=(1, -1)), ValueError, "128 scales are needed"),
        (lambda: ops.scaled_fp8_quant(BF16[0]), ValueError, "expected 2 dimensions"),
        (lambda: ops.scaled_fp8_quant(BF16, dtype=torch.float8_e5m2), TypeError, "can't quantise to torch.float8_e5m2"),
        (lambda: ops.per_token_group_quant_fp8(BF16, 100), ValueError, "not a multiple of group_size = 100"),
        (lambda: ops.mxfp8_e4m3_quantize(BF16[:, :40]), ValueError, "not a multiple of 32"),
        (lambda: ops.per_block_cast_to_fp8(BF16, (0, 128)), ValueError, "block_size must be positive"),
        (
            lambda: ops.align_block_scales(
                [ops.BlockSlice(torch.ones(1, 1), (256, 128), (0, 256), (0, 128))], (128, 128)
            ),
            ValueError,
            r"expected scales of shape \(2, 1\)",
        ),
        (
            lambda: ops.slice_block_scales(torch.ones(2, 1), (128, 128), (0, 300), (0, 128)),
            ValueError,
            r"\[0, 300\) is no part of 2 blocks of 128",
        ),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_marlin_scales_that_overflow_are_refused() -> None:
    same(ops.fp8_fused_exponent_bias_into_scales(torch.tensor([255.0]).half()), torch.tensor([65280.0]).half())
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=r"256\.0 is too large"):
            ops.fp8_fused_exponent_bias_into_scales(torch.tensor([256.0]).to(dtype))
    with pytest.raises(ValueError, match=r"too large for torch\.float16"):
        ops.fp8_marlin_process_scales(torch.tensor([70000.0]), 128, 64, torch.float16)


def test_numbers_that_are_none_take_no_part_in_a_scale() -> None:
    weight = torch.tensor([[math.inf, -math.inf, math.nan, 2.0, 0.0, -4.0]])
    for q, scale in (
        ops.scaled_fp8_quant(weight),
        ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=True),
        ops.per_block_cast_to_fp8(weight),
    ):
        assert scale.flatten()[0] == torch.tensor(4.0) / 448
        assert q.float()[0, [0, 1, 3, 4, 5]].tolist() == [448.0, -448.0, 224.0, 0.0, -448.0]
        assert q.float()[0, 2].isnan()
    assert ops.scaled_int8_quant(weight)[0].tolist() == [[127, -127, 0, 64, 0, -127]]


def test_parts_of_one_weight_share_the_scale_of_the_whole() -> None:
    parts = BF16.split([64, 32, 32])
    whole, scale = ops.scaled_fp8_quant(BF16)
    shared = ops.shared_fp8_scale(*parts)
    same(shared, scale)
    same(torch.cat([ops.scaled_fp8_quant(part, shared)[0] for part in parts]), whole)
    with pytest.raises(ValueError, match="no parts"):
        ops.shared_fp8_scale()


def test_empty_tensors_stay_empty() -> None:
    assert ops.scaled_fp8_quant(torch.empty(0, 4))[0].shape == (0, 4)
    assert ops.per_block_cast_to_fp8(torch.empty(4, 0))[1].shape == (1, 0)
    assert ops.normalize_e4m3fn_to_e4m3fnuz(torch.empty(0).to(FN), torch.ones(1))[0].shape == (0,)


def test_rows_are_filled_up_and_results_are_put_where_asked() -> None:
    q, _ = ops.scaled_fp8_quant(BF16, num_token_padding=130)
    same(q[:128], ops.scaled_fp8_quant(BF16)[0])
    assert not q[128:].float().any()
    output = torch.empty(128, 256).to(FN)
    assert ops.scaled_fp8_quant(BF16, output=output)[0] is output
    same(output, ops.scaled_fp8_quant(BF16)[0])
