"""The fused ops on CUDA tensors: the bytes of the CPU's, on the caller's stream, with no wait for the GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from golden_data import Case, cases
from test_ops import FN, FNUZ, same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weightlift import ops
from weightlift.ops import fp8
from weightlift.ops._library import Compat

gpu = pytest.mark.gpu


def moved(value: Any) -> Any:
    """The same on the GPU, with the strides that it has."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda").copy_(value)
    if isinstance(value, ops.BlockSlice):
        return ops.BlockSlice(moved(value.scale), value.shape, value.rows, value.columns)
    return [moved(one) for one in value] if isinstance(value, list) else value


def tensors_of(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, ops.AlignedScales):
        yield result.scale
    elif isinstance(result, tuple):
        for one in result:
            yield from tensors_of(one)


@contextmanager
def no_waiting() -> Iterator[None]:
    """What waits for the GPU is an error in here."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(function: Callable[..., Any], *args: Any, waits: bool = False, **kwargs: Any) -> None:
    """Runs an op on the CPU and on the GPU."""
    expected = list(tensors_of(function(*args, **kwargs)))
    on_gpu = [moved(arg) for arg in args]
    on_gpu_kwargs = {name: moved(arg) for name, arg in kwargs.items()}
    if waits:
        found = function(*on_gpu, **on_gpu_kwargs)
    else:
        with no_waiting():
            found = function(*on_gpu, **on_gpu_kwargs)
    found = list(tensors_of(found))
    assert expected
    for one, other in zip(found, expected, strict=True):
        assert one.is_cuda
        same(one.cpu(), other)


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, special: bool = True) -> Tensor:
    """Of magnitudes from 2^-30 to 2^9; some infinite, NaN, and zero."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random) * 2.0 ** torch.randint(-30, 8, shape, generator=random)
    if special and values.numel() > 8:
        flat = values.view(-1)
        places = torch.randperm(flat.numel(), generator=random)[:5]
        flat[places] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    return values.to(dtype)


def words(*shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=random)


def fp8_bytes(*shape: int, dtype: torch.dtype = FN, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).view(dtype)


# ---- golden data


@gpu
@pytest.mark.parametrize("case", cases("marlin_gptq_repack"))
def test_gptq_repack_of_golden_data(case: Case) -> None:
    p = case.parameters
    perm = case["perm"] if p["act_order"] else None
    args = (case["qweight"], p["K"], p["N"], p["bits"], p["is_a_8bit"])
    check(ops.gptq_marlin_repack, *args, perm=perm)
    same(ops.gptq_marlin_repack(*map(moved, args), perm=moved(perm)).cpu(), case["expected"])


@gpu
@pytest.mark.parametrize("case", cases("marlin_awq_repack"))
def test_awq_repack_of_golden_data(case: Case) -> None:
    p = case.parameters
    args = (case["qweight"], p["K"], p["N"], p["bits"], p["is_a_8bit"])
    check(ops.awq_marlin_repack, *args)
    same(ops.awq_marlin_repack(*map(moved, args)).cpu(), case["expected"])


@gpu
@pytest.mark.parametrize("case", cases("mxfp8_marlin"))
def test_repack_of_golden_data_whose_rows_are_outputs(case: Case) -> None:
    p = case.parameters
    check(ops.nk_marlin_repack, case["weight"], p["K"], p["N"], 8, padded_nk=(p["padded_n"], p["padded_k"]))


@gpu
@pytest.mark.parametrize("case", cases("fp8_requant_max_scale"))
@pytest.mark.parametrize("compat", [None, "vllm"])
def test_requantisation_of_golden_data(case: Case, compat: Compat) -> None:
    check(
        ops.requantize_with_max_scale,
        case["weight"],
        case["weight_scale"],
        case.parameters["logical_widths"],
        compat=compat,
    )


@gpu
@pytest.mark.parametrize("case", cases("online_quant", kind="online_quant"))
@pytest.mark.parametrize("compat", [None, "vllm"])
def test_quantising_golden_data(case: Case, compat: Compat) -> None:
    source = case.parameters.get("weight_from")
    weight = (Case(case.topic, source, {}) if source else case)["weight"]
    dtype = FN if case.parameters["target"] == "e4m3fn" else FNUZ
    check(ops.scaled_fp8_quant, weight, dtype=dtype, compat=compat)
    check(ops.scaled_fp8_quant, weight, use_per_token_if_dynamic=True, dtype=dtype, compat=compat)
    check(ops.per_block_cast_to_fp8, weight, dtype=dtype)
    check(ops.scaled_int8_quant, weight)
    if weight.shape[1] % 32 == 0:
        check(ops.mxfp8_e4m3_quantize, weight)
    if weight.shape[1] % 128 == 0:
        check(ops.per_token_group_quant_fp8, weight, 128, dtype=dtype)


# ---- every op


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (3, 17), (64, 128), (130, 384), (5, 20000), (1000, 7)]


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("to", [FN, FNUZ])
def test_quantising_to_fp8(dtype: torch.dtype, shape: tuple[int, int], to: torch.dtype) -> None:
    weight = floats(*shape, dtype=dtype)
    rows, columns = shape
    scale = torch.rand(rows, 1, generator=torch.Generator().manual_seed(1)) + 0.01
    check(ops.scaled_fp8_quant, weight, dtype=to)
    check(ops.scaled_fp8_quant, weight, dtype=to, use_per_token_if_dynamic=True)
    check(ops.scaled_fp8_quant, weight, scale[:1].reshape(1), dtype=to)
    check(ops.scaled_fp8_quant, weight, scale, dtype=to)
    check(ops.scaled_fp8_quant, weight, scale[:1].reshape(1), rows + 3, dtype=to)
    check(ops.per_block_cast_to_fp8, weight, dtype=to)
    check(ops.per_block_cast_to_fp8, weight, (3, 40), True, dtype=to)
    check(ops.shared_fp8_scale, weight, weight * 2, dtype=to)
    check(ops.scaled_int8_quant, weight)
    check(ops.scaled_int8_quant, weight, scale)
    for group in (16, 32, 128):
        if columns % group == 0:
            check(ops.per_token_group_quant_fp8, weight, group, dtype=to, use_ue8m0=True, column_major_scales=True)


@gpu
def test_quantising_with_an_upper_bound_of_magnitudes() -> None:
    bound = torch.tensor([0.5])
    check(ops.scaled_fp8_quant, floats(8, 64), scale_ub=bound, use_per_token_if_dynamic=True, waits=True)


@gpu
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", [(2, 32), (3, 5, 96), (128, 2048)])
def test_quantising_to_mxfp8(shape: tuple[int, ...], swizzled: bool) -> None:
    check(ops.mxfp8_e4m3_quantize, floats(*shape), swizzled)


@gpu
def test_block_scales_that_become_powers_of_two() -> None:
    weight = fp8_bytes(200, 300)
    scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(2)) + 0.1
    check(ops.requant_weight_ue8m0, weight, scale, waits=True)
    check(ops.dequantize_blocks, weight, scale, (128, 128), waits=True)


@gpu
@pytest.mark.parametrize("shape", [(1,), (3, 17), (2, 3, 4096)])
def test_e4m3fn_to_e4m3fnuz(shape: tuple[int, ...]) -> None:
    weight = fp8_bytes(*shape)
    for compat in (None, "vllm"):
        check(ops.normalize_e4m3fn_to_e4m3fnuz, weight, torch.ones(1), torch.ones(1), compat=compat)
        check(ops.normalize_e4m3fn_to_e4m3fnuz, weight, torch.arange(200, dtype=torch.uint8), compat=compat)


@gpu
@pytest.mark.parametrize("dtype", [FN, FNUZ])
@pytest.mark.parametrize("compat", [None, "vllm"])
@pytest.mark.parametrize("scales", [[0.3], [0.25, 1.5, 0.0], [1e-3, -448.0]])
def test_requantising_to_the_largest_scale(dtype: torch.dtype, compat: Compat, scales: list[float]) -> None:
    widths = [7, 0, 33][: len(scales)]
    weight = fp8_bytes(sum(widths), 100, dtype=dtype)
    check(ops.requantize_with_max_scale, weight, torch.tensor(scales), widths, compat=compat)
    check(ops.requantize_with_max_scale, weight, torch.tensor(0.5), widths, compat=compat)


@pytest.mark.parametrize("wrong", [-1.0, float("inf"), float("nan"), 0.0])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu), "cpu"])
def test_a_scale_that_is_none_makes_nan_of_its_part_where_nobody_waits_for_it(wrong: float, device: str) -> None:
    """What the kernel computes, the host's version of it does too."""
    scales = torch.tensor([wrong, 0.0 if wrong == 0 else 0.5], device=device)
    weight = fp8_bytes(4, 64).to(device)
    found = fp8._requantize_on_gpu(weight, scales, [2, 2], False).float()
    assert found[:2].isnan().all()
    if wrong < 0:
        same(found[2:].cpu(), weight[2:].cpu().float())
    else:
        assert found.isnan().all()


@pytest.mark.parametrize("scales", [[0.3], [0.25, 1.5, 0.0], [1e-3, -448.0]])
@pytest.mark.parametrize("through_fp16", [False, True])
def test_requantising_with_scales_at_an_address_is_that_with_known_ones(
    scales: list[float], through_fp16: bool
) -> None:
    widths = [7, 0, 33][: len(scales)]
    weight = fp8_bytes(sum(widths), 100)
    expected = ops.requantize_with_max_scale(
        weight, torch.tensor(scales), widths, compat="vllm" if through_fp16 else None
    )[1]
    same(fp8._requantize_on_gpu(weight, torch.tensor(scales), widths, through_fp16), expected)


@gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("a8", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_marlin_repacks(bits: int, a8: bool, padded: bool) -> None:
    k, n = 160, 192
    pad: dict[str, Any] = {"padded_nk": (n + 64, k + 96)} if padded else {}
    per_word = 32 // bits
    check(ops.gptq_marlin_repack, words(k // per_word, n), k, n, bits, a8, **pad)
    check(ops.awq_marlin_repack, words(k, n // per_word), k, n, bits, a8, **pad)
    check(ops.nk_marlin_repack, words(n, k // per_word), k, n, bits, a8, **pad)
    if not padded:
        for dtype in (torch.int32, torch.int64):
            perm = torch.randperm(k, generator=torch.Generator().manual_seed(0)).to(dtype)
            check(ops.gptq_marlin_repack, words(k // per_word, n), k, n, bits, a8, perm=perm)


@gpu
def test_ops_of_torch_alone_run_where_their_tensors_are() -> None:
    scales = floats(8, 256, dtype=torch.float16, special=False).abs()
    check(ops.marlin_permute_scales, scales, 1024, 256, 128, waits=True)
    check(ops.marlin_permute_bias, floats(256), waits=True)
    check(ops.fp8_fused_exponent_bias_into_scales, scales)
    check(ops.fp8_marlin_process_scales, scales[:1].T, 128, 256, torch.float16, waits=True)
    check(ops.mxfp8_marlin_process_scales, scales, waits=True)
    check(ops.mxfp4_marlin_process_scales, scales, waits=True)
    check(ops.nvfp4_marlin_process_scales, scales, waits=True)
    check(ops.nvfp4_marlin_process_global_scale, scales[0, :1])
    check(ops.marlin_act_int8_process_scales, scales)
    check(ops.swizzle_blockscale, scales.view(torch.uint8))
    zero_points = words(8, 32)
    check(ops.awq_to_marlin_zero_points, zero_points, 8, 256, 4, waits=True)
    check(ops.gptq_to_marlin_zero_points, zero_points, 8, 256, 4, waits=True)
    check(ops.marlin_zero_points, zero_points.repeat(1, 8) & 15, 8, 256, 4, waits=True)
    check(ops.pack_fp8_to_int32, fp8_bytes(64, 32))
    check(ops.convert_to_channelwise, torch.tensor([1.0, 2.0]), [3, 4])
    part = ops.BlockSlice(torch.rand(2, 2), (256, 256), (64, 192), (0, 256))
    check(ops.align_block_scales, [part], (128, 128), waits=True)
    scale = torch.rand(2, 2)
    same(ops.slice_block_scales(moved(scale), (128, 128), (0, 128), (0, 256))[0].cpu(), scale[:1])


def test_every_op_is_run_on_a_gpu_here() -> None:
    with open(__file__) as file:
        text = file.read()
    for name in ops.__all__:
        if not inspect.isclass(getattr(ops, name)) and name != "marlin_padded_nk":  # of numbers alone
            assert f"ops.{name}" in text, name


class NoDivisionsByNumbers(TorchDispatchMode):
    """torch on a GPU multiplies with the inverse instead, which is another number unless it is a power of two."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.div.Tensor or isinstance(args[1], Tensor)
        return func(*args, **(kwargs or {}))


def test_scales_are_quotients_on_a_gpu_too() -> None:
    weight = floats(64, 128)
    with NoDivisionsByNumbers():
        ops.scaled_fp8_quant(weight)
        ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=True)
        ops.shared_fp8_scale(weight, weight)
        ops.scaled_int8_quant(weight)
        ops.per_block_cast_to_fp8(weight)
        ops.mxfp8_e4m3_quantize(weight)
        ops.per_token_group_quant_fp8(weight, 128)
        with pytest.raises(AssertionError):
            weight / 448


# ---- how they run


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_that_are_not_contiguous(dtype: torch.dtype) -> None:
    memory = floats(64, 300, dtype=dtype)
    for view in (memory[:, :128], memory[:, 1:130], memory[::2], memory.T[:256], memory.T[:256].T):
        check(ops.scaled_fp8_quant, view)
        check(ops.scaled_fp8_quant, view, use_per_token_if_dynamic=True)
        check(ops.per_block_cast_to_fp8, view, (16, 32))
    check(ops.normalize_e4m3fn_to_e4m3fnuz, fp8_bytes(64, 300)[:, 3:77], torch.ones(1))
    check(ops.gptq_marlin_repack, words(20, 256)[:, 3:195], 160, 192, 4)


@gpu
@pytest.mark.parametrize("shape", [(0, 32), (0, 0), (4, 0)])
def test_empty_inputs(shape: tuple[int, int]) -> None:
    check(ops.scaled_fp8_quant, torch.empty(shape))
    check(ops.scaled_fp8_quant, torch.empty(shape), torch.ones(1))
    check(ops.per_block_cast_to_fp8, torch.empty(shape))
    check(ops.normalize_e4m3fn_to_e4m3fnuz, torch.empty(shape).to(FN), torch.ones(1))
    check(ops.shared_fp8_scale, torch.empty(shape))


@gpu
@pytest.mark.parametrize("columns", [32, 64], ids=["rows apart", "contiguous"])
@pytest.mark.parametrize("scale", [torch.tensor([0.01]), None], ids=["given", "found"])
def test_a_given_output_is_written(columns: int, scale: Tensor | None) -> None:
    weight = floats(8, columns)
    expected, _ = ops.scaled_fp8_quant(weight, scale)
    memory = torch.zeros(8, 64, dtype=FN, device="cuda")
    found, _ = ops.scaled_fp8_quant(weight.cuda(), moved(scale), output=memory[:, :columns])
    assert found.data_ptr() == memory.data_ptr()
    same(memory[:, :columns].cpu(), expected)
    assert not memory[:, columns:].float().any()


@gpu
def test_ops_wait_for_what_their_stream_does_before_and_for_no_other() -> None:
    weight = floats(512, 4096)
    expected, expected_scale = ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=True)
    source = weight.cuda()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = torch.zeros_like(source)
        late.copy_(source)  # on the side stream, behind the sleep
        q, scale = ops.scaled_fp8_quant(late, use_per_token_if_dynamic=True)
    assert not side.query()  # nothing waited, here or there
    torch.cuda.current_stream().wait_stream(side)
    same(q.cpu(), expected)
    same(scale.cpu(), expected_scale)


@gpu
def test_ops_run_on_the_gpu_that_their_tensors_are_on() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    weight = floats(64, 128)
    expected, _ = ops.scaled_fp8_quant(weight)
    found, _ = ops.scaled_fp8_quant(weight.to("cuda:1"))
    assert found.device == torch.device("cuda:1")
    same(found.cpu(), expected)


@gpu
def test_ops_are_captured_in_a_cuda_graph() -> None:
    source = floats(64, 128).cuda()
    ops.scaled_fp8_quant(source)  # what is loaded lazily is, before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scale = ops.scaled_fp8_quant(source)
    other = floats(64, 128, seed=1)
    source.copy_(other)
    graph.replay()
    expected, expected_scale = ops.scaled_fp8_quant(other)
    same(q.cpu(), expected)
    same(scale.cpu(), expected_scale)
