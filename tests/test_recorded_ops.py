"""Ops on tensors of a checkpoint: recorded, and carried out on each chunk as it lands, as if they had run at once."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import ROOT, WriteCheckpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import weightlift
from weightlift import CheckpointTensor, LoadConfig, ops

KiB = 1 << 10
SMALL_CHUNKS = LoadConfig(chunk_bytes=64 * KiB, staging_bytes=1024 * KiB)
GOLDEN = ROOT.parent / "shared" / "golden"


@dataclasses.dataclass(frozen=True)
class Case:
    """An op with all that it takes but the tensor that is recorded."""

    make: Callable[[int, int], Tensor]  # of a number of granules along each side
    op: Callable[[Tensor], Tensor]
    granule: tuple[int, int]  # rows and columns of the tensor by which it may be cut


def words(rows: int, columns: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns), dtype=torch.int32)


def fp8(rows: int, columns: int) -> Tensor:
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)


def floats(dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    return lambda rows, columns: (torch.randn(rows, columns) * torch.rand(rows, 1) * 4).to(dtype)


def shuffled(size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(1))


CASES = {
    "fnuz": Case(fp8, lambda w: ops.normalize_e4m3fn_to_e4m3fnuz(w, torch.ones(1))[0], (1, 1)),
    "gptq 4 bits": Case(words, lambda w: ops.gptq_marlin_repack(w, w.shape[0] * 8, w.shape[1], 4), (2, 64)),
    "gptq 8 bits": Case(words, lambda w: ops.gptq_marlin_repack(w, w.shape[0] * 4, w.shape[1], 8), (4, 64)),
    "gptq a8": Case(words, lambda w: ops.gptq_marlin_repack(w, w.shape[0] * 8, w.shape[1], 4, True), (4, 64)),
    "gptq act-order": Case(
        words,
        lambda w: ops.gptq_marlin_repack(w, w.shape[0] * 8, w.shape[1], 4, perm=shuffled(w.shape[0] * 8)),
        (2, 64),
    ),
    "gptq padded": Case(
        words,
        lambda w: ops.gptq_marlin_repack(
            w, w.shape[0] * 8, w.shape[1], 4, padded_nk=ops.marlin_padded_nk(w.shape[1], w.shape[0] * 8)
        ),
        (1, 1),
    ),
    "awq": Case(words, lambda w: ops.awq_marlin_repack(w, w.shape[0], w.shape[1] * 8, 4), (16, 8)),
    "fp8 as 8 bits": Case(fp8, lambda w: ops.nk_marlin_repack(w, w.shape[1], w.shape[0], 8), (64, 16)),
    "requantise": Case(
        fp8,
        lambda w: ops.requantize_with_max_scale(w, torch.tensor([0.5, 0.25]), [w.shape[0] - 1, 1])[1],
        (2, 1),
    ),
    "channels": Case(
        floats(torch.bfloat16), lambda w: ops.scaled_fp8_quant(w, use_per_token_if_dynamic=True)[0], (1, 1)
    ),
    "scales of channels": Case(
        floats(torch.float16), lambda w: ops.scaled_fp8_quant(w, use_per_token_if_dynamic=True)[1], (1, 1)
    ),
    "given scale": Case(floats(torch.float32), lambda w: ops.scaled_fp8_quant(w, torch.tensor(0.01))[0], (1, 1)),
    "blocks": Case(floats(torch.bfloat16), lambda w: ops.per_block_cast_to_fp8(w)[0], (128, 128)),
    "scales of blocks": Case(floats(torch.bfloat16), lambda w: ops.per_block_cast_to_fp8(w)[1], (128, 128)),
    "mxfp8": Case(floats(torch.bfloat16), lambda w: ops.mxfp8_e4m3_quantize(w)[0], (1, 32)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))


def recorded(case: Case, weight: Tensor) -> CheckpointTensor:
    result = case.op(weight)
    assert type(result) is CheckpointTensor
    return result


@pytest.fixture(params=["buffered", pytest.param("direct", marks=pytest.mark.direct_io)])
def config(request: pytest.FixtureRequest) -> LoadConfig:
    return dataclasses.replace(SMALL_CHUNKS, strategy=request.param)


# ---- values


@every_case
def test_a_recorded_op_gives_the_bytes_of_an_eager_one(
    case: Case, tmp_path: Path, write_checkpoint: WriteCheckpoint, config: LoadConfig
) -> None:
    rows, columns = (-(-size // granule) * granule for size, granule in zip((256, 1152), case.granule, strict=True))
    weights = {"a": case.make(rows, columns), "b": case.make(case.granule[0] * 3, columns)}
    write_checkpoint(tmp_path, weights)
    with weightlift.open_checkpoint(tmp_path, config=config) as checkpoint:
        results = {}
        for name in weights:
            result = recorded(case, checkpoint[name])
            results[name] = torch.empty(result.shape, dtype=result.dtype)
            results[name].copy_(result)
    for name, weight in weights.items():
        assert same_bytes(results[name], case.op(weight))
    assert checkpoint.report.num_forced == 0


@every_case
def test_outside_of_a_block_an_op_runs_when_it_is_copied(
    case: Case, tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    weight = case.make(case.granule[0] * 2, case.granule[1] * 3)
    checkpoint = weightlift.open_checkpoint(write_checkpoint(tmp_path, {"w": weight}))
    result = recorded(case, checkpoint["w"])
    destination = torch.empty(result.shape, dtype=result.dtype)
    destination.copy_(result)
    assert same_bytes(destination, case.op(weight))


slices = st.tuples(*[st.integers(0, 6)] * 4)


@every_case
@settings(max_examples=12, deadline=None)
@given(
    cut=slices,
    beside=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    merge_gap=st.sampled_from([0, 1 * KiB, 16 * KiB]),
    seed=st.integers(0, 99),
)
def test_ops_on_slices_land_in_parts_of_parameters(
    case: Case,
    cut: tuple[int, int, int, int],
    beside: tuple[int, int],
    merge_gap: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    torch.manual_seed(seed)
    (granule_rows, granule_columns), (first_row, first_column, num_rows, num_columns) = case.granule, cut
    weight = case.make(14 * granule_rows, 14 * granule_columns)
    folder = tmp_path_factory.mktemp("slices")
    safetensors.torch.save_file({"w": weight}, folder / "w.safetensors")

    def part(tensor: Tensor) -> Tensor:
        rows = tensor.narrow(0, first_row * granule_rows, (num_rows + 1) * granule_rows)
        return rows.narrow(1, first_column * granule_columns, (num_columns + 1) * granule_columns)

    expected = case.op(part(weight).contiguous())
    parameter = torch.zeros(
        [size + 2 * more for size, more in zip(expected.shape, beside, strict=True)], dtype=torch.float32
    ).to(expected.dtype)
    config = dataclasses.replace(SMALL_CHUNKS, merge_gap_bytes=merge_gap)
    with weightlift.open_checkpoint(folder, config=config) as checkpoint:
        inside = parameter
        for dim, more in enumerate(beside):
            inside = inside.narrow(dim, more, expected.shape[dim])
        inside.copy_(recorded(case, part(checkpoint["w"])))
    assert same_bytes(inside, expected)
    outside = bytes_of(parameter).clone()
    assert outside.count_nonzero() == bytes_of(inside).count_nonzero()


def golden_cases() -> Iterator[tuple[str, Tensor, Tensor, Callable[[Tensor], Tensor]]]:
    """Name, source, result and op. The results are right ones: see GOLDEN.md for those of upstream that are not."""

    def cases_of(file: str) -> Iterator[tuple[str, dict[str, Any], Callable[[str], Tensor]]]:
        with safetensors.safe_open(GOLDEN / f"{file}.safetensors", "pt") as golden:
            for name, case in json.loads(golden.metadata()["cases"]).items():
                yield name, case, lambda suffix, name=name: golden.get_tensor(f"{name}.{suffix}")  # type: ignore[misc]

    for file, op in (
        ("marlin_gptq_repack", ops.gptq_marlin_repack),
        ("marlin_awq_repack", ops.awq_marlin_repack),
    ):
        for name, case, get in cases_of(file):
            sizes = case["K"], case["N"], case["bits"], case["is_a_8bit"]
            perm = {"perm": get("perm")} if case.get("act_order") else {}
            yield name, get("qweight"), get("expected"), functools.partial(_call, op, sizes, perm)
    for name, case, get in cases_of("mxfp8_marlin"):
        padded = {"padded_nk": (case["padded_n"], case["padded_k"])}
        sizes = case["K"], case["N"], 8
        yield name, get("weight"), get("expected_weight"), functools.partial(_call, ops.nk_marlin_repack, sizes, padded)
    for name, case, get in cases_of("fp8_requant_max_scale"):
        if case["kind"] == "requantize_with_max_scale":
            more = get("weight_scale"), case["logical_widths"]
            op = functools.partial(_call, ops.requantize_with_max_scale, more, {}, result=1)
            yield name, get("weight"), get("expected_exact"), op
    for name, case, get in cases_of("online_quant"):
        if case.get("target") != "e4m3fn" or case["data"] != "gauss":
            continue
        channels = functools.partial(_call, ops.scaled_fp8_quant, (), {"use_per_token_if_dynamic": True})
        for result, kind in enumerate(("q", "scale")):
            yield f"{name} {kind}", get("weight"), get(f"channel_{kind}"), functools.partial(channels, result=result)
            blocks = functools.partial(_call, ops.per_block_cast_to_fp8, (), {}, result=result)
            yield f"{name} block {kind}", get("weight"), get(f"block128_{kind}"), blocks


def _call(op: Any, more: tuple[Any, ...], named: dict[str, Any], weight: Tensor, result: int | None = None) -> Any:
    results = op(weight, *more, **named)
    return results if result is None else results[result]


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden data at {GOLDEN}")
def test_recorded_ops_give_the_golden_bytes(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, config: LoadConfig
) -> None:
    cases = list(golden_cases())
    write_checkpoint(tmp_path, {name: weight.clone() for name, weight, _, _ in cases})
    results = {name: torch.empty_like(expected) for name, _, expected, _ in cases}
    with weightlift.open_checkpoint(tmp_path, config=config) as checkpoint:
        for name, _, _, op in cases:
            results[name].copy_(op(checkpoint[name]))
    for name, weight, expected, op in cases:
        assert same_bytes(results[name], expected), name
        assert same_bytes(op(weight), expected), name


# ---- as if it had run at once


@pytest.fixture
def weight() -> Tensor:
    return words(64, 256)


@pytest.fixture
def folder(tmp_path: Path, write_checkpoint: WriteCheckpoint, weight: Tensor) -> Path:
    return write_checkpoint(tmp_path, {"w": weight, "plain": words(*CASES["gptq 4 bits"].op(weight).shape)})


def repack(weight: Tensor) -> Tensor:
    return CASES["gptq 4 bits"].op(weight)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: t[3:5, 7],
        lambda t: t.t().contiguous(),
        lambda t: t.view(torch.int8),
        lambda t: t.reshape(-1),
        lambda t: t.to(torch.float32),
        lambda t: t.clone(),
        lambda t: t.detach().sum(),
        lambda t: torch.stack([t, t]),
        lambda t: torch.cat([t, t], 1),
        lambda t: torch.from_numpy(t.numpy()),
        lambda t: copy.deepcopy(t),
        lambda t: torch.nn.Parameter(t, requires_grad=False),
        lambda t: t.add_(1),
        lambda t: t.unsqueeze(0).expand(2, -1, -1),
        lambda t: ops.gptq_marlin_repack(t, t.shape[0] * 8, t.shape[1], 4),
    ],
)
def test_any_use_of_the_result_sees_its_values(folder: Path, weight: Tensor, use: Callable[[Tensor], Tensor]) -> None:
    with weightlift.open_checkpoint(folder) as checkpoint:
        result = use(repack(checkpoint["w"]))
        value = torch.empty(result.shape, dtype=result.dtype)
        value.copy_(result)
    assert torch.equal(value, use(repack(weight)))


def test_the_result_has_shape_and_dtype_without_reading(folder: Path, weight: Tensor) -> None:
    with weightlift.open_checkpoint(folder) as checkpoint:
        result = repack(checkpoint["w"])
        expected = repack(weight)
        assert (result.shape, result.dtype, result.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert torch.empty_like(result).shape == expected.shape
    assert checkpoint.report.bytes_read == 0


def test_an_op_on_what_is_no_longer_as_in_the_file_uses_its_values(folder: Path, weight: Tensor) -> None:
    with weightlift.open_checkpoint(folder) as checkpoint:
        changed = checkpoint["w"]
        changed.add_(1)
        converted = checkpoint["w"].to(torch.int64).to(torch.int32)
        joined = torch.cat([checkpoint["w"], checkpoint["w"]])
        assert torch.equal(repack(changed), repack(weight + 1))
        assert torch.equal(repack(converted), repack(weight))
        assert torch.equal(repack(joined), repack(torch.cat([weight, weight])))
        assert torch.equal(repack(checkpoint["w"].t()), repack(weight.t()))


def test_a_later_write_to_the_source_does_not_reach_the_result(folder: Path, weight: Tensor) -> None:
    destination = torch.empty_like(repack(weight))
    with weightlift.open_checkpoint(folder) as checkpoint:
        source = checkpoint["w"]
        result = repack(source)
        source.zero_()
        destination.copy_(result)
    assert torch.equal(destination, repack(weight))


def test_a_later_write_to_a_parameter_of_the_op_does_not_reach_the_result(
    tmp_path: Path, write_checkpoint: WriteCheckpoint
) -> None:
    weight = floats(torch.bfloat16)(64, 64)
    write_checkpoint(tmp_path, {"w": weight})
    scale = torch.tensor(0.25)
    destination = torch.empty(64, 64, dtype=torch.float8_e4m3fn)
    with weightlift.open_checkpoint(tmp_path) as checkpoint:
        result, _ = ops.scaled_fp8_quant(checkpoint["w"], scale)
        scale.fill_(100)
        destination.copy_(result)
    assert same_bytes(destination, ops.scaled_fp8_quant(weight, torch.tensor(0.25))[0])


def test_a_look_at_the_destination_forces_the_op(folder: Path, weight: Tensor) -> None:
    expected = repack(weight)
    destination = torch.zeros_like(expected)
    with weightlift.open_checkpoint(folder) as checkpoint:
        destination.copy_(repack(checkpoint["w"]))
        assert torch.equal(destination[1:2], expected[1:2])
        assert checkpoint.report.num_forced == 1


@pytest.mark.parametrize("op_first", [True, False])
def test_copies_that_overlap_an_op_keep_their_order(folder: Path, weight: Tensor, op_first: bool) -> None:
    expected = repack(weight)
    with weightlift.open_checkpoint(folder) as checkpoint:
        destination = torch.zeros_like(expected)
        plain = checkpoint["plain"]
        if op_first:
            destination.copy_(repack(checkpoint["w"]))
            destination[3:6].copy_(plain[3:6])
            expected[3:6] = plain.clone()[3:6]
        else:
            destination[3:6].copy_(plain[3:6])
            destination.copy_(repack(checkpoint["w"]))
    assert torch.equal(destination, expected)
    assert checkpoint.report.num_dropped == (0 if op_first else 1)


def test_coverage_knows_what_an_op_writes(folder: Path, weight: Tensor) -> None:
    rows, columns = repack(weight).shape
    destination = torch.empty(rows, columns + 4, dtype=torch.int32)
    with weightlift.open_checkpoint(folder) as checkpoint:
        program = checkpoint._program
        program.track_coverage()
        destination.narrow(1, 4, columns).copy_(repack(checkpoint["w"]))
        gaps, doubles = program.coverage(destination)
        row_bytes = 4 * (columns + 4)
        assert gaps == [(row * row_bytes, row * row_bytes + 16) for row in range(rows)]
        assert doubles == []


def test_destinations_that_are_no_rows_get_the_values(folder: Path, weight: Tensor) -> None:
    expected = repack(weight)
    with weightlift.open_checkpoint(folder) as checkpoint:
        result = repack(checkpoint["w"])
        transposed = torch.zeros(expected.shape[1], expected.shape[0], dtype=torch.int32)
        transposed.t().copy_(result)
        converted = torch.zeros(expected.shape, dtype=torch.float64)
        converted.copy_(result)
        broadcast = torch.zeros(2, *expected.shape, dtype=torch.int32)
        broadcast.copy_(result)
        with pytest.raises(RuntimeError, match="must match"):
            torch.zeros(3, 5, dtype=torch.int32).copy_(result)
    assert torch.equal(transposed.t(), expected)
    assert torch.equal(converted, expected.double())
    assert torch.equal(broadcast, expected.expand_as(broadcast))


def test_a_sum_of_recorded_parts_is_recorded(folder: Path, weight: Tensor) -> None:
    expected = torch.cat([repack(weight)] * 2, 1)
    destination = torch.zeros_like(expected)
    with weightlift.open_checkpoint(folder) as checkpoint:
        destination.copy_(torch.cat([repack(checkpoint["w"])] * 2, 1))
        assert checkpoint.report.bytes_read == 0
    assert torch.equal(destination, expected)


def test_ops_are_refused_as_on_real_tensors_when_they_are_asked_for(folder: Path) -> None:
    with weightlift.open_checkpoint(folder) as checkpoint:
        with pytest.raises(ValueError, match="no Marlin tile fits"):
            ops.gptq_marlin_repack(checkpoint["w"], 256, 100, 4)
        with pytest.raises(TypeError, match="expected"):
            ops.gptq_marlin_repack(checkpoint["w"].view(torch.float32), 256, 256, 4)


def test_a_closed_checkpoint_refuses_what_has_not_been_copied(folder: Path) -> None:
    with weightlift.open_checkpoint(folder) as checkpoint:
        result = repack(checkpoint["w"])
    with pytest.raises(RuntimeError, match="w: its checkpoint has been closed"):
        result.sum()


def test_a_file_that_ends_inside_of_an_op_is_named(folder: Path) -> None:
    checkpoint = weightlift.open_checkpoint(folder)
    result = repack(checkpoint["w"])
    path = Path(checkpoint.files.tensors["w"].shard.path)
    with path.open("r+b") as file:
        file.truncate(checkpoint.files.tensors["w"].offset + 1000)
    with pytest.raises(weightlift.CheckpointReadError, match=r"model\.safetensors.*") as caught:
        torch.empty(result.shape, dtype=result.dtype).copy_(result)
    assert caught.value.path == str(path)


def test_threads_may_record_ops_at_once(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    weights = {f"w{i}": words(32, 128) for i in range(24)}
    write_checkpoint(tmp_path, weights, shards=3)
    results = {name: torch.zeros(16, 256, dtype=torch.int32) for name in weights}
    with weightlift.open_checkpoint(tmp_path, config=SMALL_CHUNKS) as checkpoint:

        def record(names: list[str]) -> None:
            for name in names:
                results[name].copy_(repack(checkpoint[name]))

        threads = [threading.Thread(target=record, args=(list(weights)[i::3],)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name, weight in weights.items():
        assert torch.equal(results[name], repack(weight))


# ---- memory


def test_an_op_holds_a_chunk_and_no_more(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    weight = words(512, 1024)  # 2 MiB, staging memory holds one
    write_checkpoint(tmp_path, {"w": weight})
    destination = torch.zeros(repack(weight).shape, dtype=torch.int32)
    with weightlift.open_checkpoint(tmp_path, config=SMALL_CHUNKS) as checkpoint:
        destination.copy_(repack(checkpoint["w"]))
    assert torch.equal(destination, repack(weight))
    assert checkpoint.report.num_whole_tensor_ops == 0
    assert checkpoint.report.whole_tensor_bytes == 0
    assert checkpoint.report.over_read < 1.01


@pytest.mark.parametrize("rows", [32, 512])  # within staging memory, and larger than that
def test_an_op_that_needs_the_whole_tensor_is_counted(
    rows: int, tmp_path: Path, write_checkpoint: WriteCheckpoint, config: LoadConfig
) -> None:
    case, weight = CASES["gptq act-order"], words(rows, 1024)
    write_checkpoint(tmp_path, {"w": weight, "v": weight.clone()})
    results = [torch.zeros(repack(weight).shape, dtype=torch.int32) for _ in range(2)]
    with weightlift.open_checkpoint(tmp_path, config=config) as checkpoint:
        for result, name in zip(results, checkpoint, strict=True):
            result.copy_(recorded(case, checkpoint[name]))
    for result in results:
        assert torch.equal(result, case.op(weight))
    assert checkpoint.report.num_whole_tensor_ops == 2
    assert weight.nbytes <= checkpoint.report.whole_tensor_bytes <= weight.nbytes + 2 * 4096
    assert "2 ops held a whole tensor" in str(checkpoint.report)


def test_what_does_not_lie_in_rows_is_counted(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    case, weight = CASES["channels"], floats(torch.bfloat16)(256, 256)
    write_checkpoint(tmp_path, {"w": weight})
    result = torch.empty(256, 256, dtype=torch.float8_e4m3fn)
    with weightlift.open_checkpoint(tmp_path, config=SMALL_CHUNKS) as checkpoint:
        result.copy_(case.op(checkpoint["w"].t()))
    assert same_bytes(result, case.op(weight.t().contiguous()))
    assert checkpoint.report.num_whole_tensor_ops == 1


def test_columns_that_lie_apart_are_read_alone(tmp_path: Path, write_checkpoint: WriteCheckpoint) -> None:
    weight = words(64, 32 * KiB)  # rows of 128 KiB
    write_checkpoint(tmp_path, {"w": weight})
    result = torch.zeros(32, 2 * 1024, dtype=torch.int32)
    with weightlift.open_checkpoint(tmp_path) as checkpoint:
        result.copy_(repack(checkpoint["w"][:, 8 * KiB : 9 * KiB]))
    assert torch.equal(result, repack(weight[:, 8 * KiB : 9 * KiB]))
    assert checkpoint.report.bytes_needed == 64 * 4 * KiB
    assert checkpoint.report.bytes_read <= 3 * checkpoint.report.bytes_needed  # 4 KiB, and alignment on either side
