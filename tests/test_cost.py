"""How long a load takes, by the formula of weightlift/cost.py: with what is told of storage, not with what it is."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightlift import _C
from weightlift.cli import main
from weightlift.config import LoadConfig, MiB
from weightlift.cost import Estimate, LoadCosts, ReadSize
from weightlift.model.loader import plan_load
from weightlift.plan import Slice, plan_checkpoint

Output = pytest.CaptureFixture[str]

KiB = 1 << 10
COSTS: dict[str, Any] = {
    "read_seconds": {
        "direct": [[4 * KiB, 1e-4], [64 * KiB, 4e-4], [2 * MiB, 1e-2]],
        "buffered": [[4 * KiB, 2e-4], [2 * MiB, 2e-2]],
    },
    "copy_bytes_per_second": 8e9,
    "fresh_bytes_per_second": 4e9,
    "start_seconds": 0.02,
    "slowdown": 1,
}


def costs_of(tmp_path: Path, document: Any) -> LoadCosts:
    file = tmp_path / "bench.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return LoadCosts.from_bench(str(file))


def reads(size: int, count: int = 1, way: Any = "direct") -> ReadSize:
    return ReadSize(size, count, size * count, way)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"costs": null}',
        '{"costs": [1]}',
        "[" * 100_000,
        json.dumps({"costs": {**COSTS, "copy_bytes_per_second": float("nan")}}),
        json.dumps({"costs": {**COSTS, "fresh_bytes_per_second": -1}}),
        json.dumps({"costs": {**COSTS, "fresh_bytes_per_second": 10**400}}),
        json.dumps({"costs": {**COSTS, "copy_bytes_per_second": 5e-324}}),
        json.dumps({"costs": {**COSTS, "read_seconds": {"direct": [[10**400, 10**400]], "buffered": []}}}),
    ],
)
def test_figures_that_bench_does_not_write_are_one_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"bench\.json: expected what weightlift bench --json of this version writes"):
        costs_of(tmp_path, text)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (512, 1e-4),  # no less than the smallest that was measured
        (4 * KiB, 1e-4),
        (34 * KiB, 2.5e-4),  # half-way
        (64 * KiB, 4e-4),
        (2 * MiB, 1e-2),
        (8 * MiB, 4e-2),  # by its bytes
    ],
)
def test_a_read_costs_what_was_measured_and_between_sizes_what_lies_between(
    tmp_path: Path, size: int, seconds: float
) -> None:
    costs = costs_of(tmp_path, {"costs": COSTS})
    assert costs.seconds_of_reads([reads(size)]) == pytest.approx(seconds)
    assert costs.seconds_of_reads([reads(size, 10)]) == pytest.approx(10 * seconds)


def test_each_way_to_read_has_its_own_costs(tmp_path: Path) -> None:
    costs = costs_of(tmp_path, {"costs": COSTS})
    sizes = [reads(2 * MiB, 5), reads(2 * MiB, 5, "buffered"), reads(2 * MiB, 5, "cached")]
    assert costs.seconds_of_reads(sizes) == pytest.approx(0.15)  # what is cached is not read from storage
    assert costs.seconds_of_memory(8_000_000_000, 8_000_000_000) == pytest.approx(2)
    assert costs.seconds_of_memory(4_000_000_000, 24_000_000_000) == pytest.approx(3)


def test_reads_and_memory_take_longer_in_a_load(tmp_path: Path) -> None:
    costs = costs_of(tmp_path, {"costs": {**COSTS, "slowdown": 1.5}})
    assert costs.seconds_of_reads([reads(2 * MiB, 5)]) == pytest.approx(0.075)
    assert costs.seconds_of_memory(8_000_000_000, 0) == pytest.approx(3)


def test_a_way_that_was_not_measured_costs_what_the_other_does(tmp_path: Path) -> None:
    only_buffered = copy.deepcopy(COSTS)
    only_buffered["read_seconds"]["direct"] = []
    assert costs_of(tmp_path, {"costs": only_buffered}).seconds_of_reads([reads(2 * MiB)]) == pytest.approx(2e-2)


def test_a_larger_read_never_takes_less_time_whatever_noise_was_measured(tmp_path: Path) -> None:
    noisy = copy.deepcopy(COSTS)
    noisy["read_seconds"]["direct"] = [[2 * MiB, 1e-2], [4 * KiB, 1e-4], [64 * KiB, 5e-5]]
    costs = costs_of(tmp_path, {"costs": noisy})
    seconds = [costs.seconds_of_reads([reads(size)]) for size in range(KiB, 128 * KiB, KiB)]
    assert seconds == sorted(seconds)


curve = st.lists(st.tuples(st.integers(512, 1 << 24), st.floats(1e-6, 1)), min_size=1, max_size=6)


@given(curve, st.integers(1, 1 << 28), st.integers(0, 1 << 28), st.integers(1, 1000))
def test_more_bytes_or_more_reads_never_take_less_time(
    pairs: list[tuple[int, float]], size: int, more: int, count: int
) -> None:
    costs = LoadCosts.from_dict({**COSTS, "read_seconds": {"direct": pairs, "buffered": []}})
    least = costs.seconds_of_reads([reads(size, count)])
    rounding = 1e-9 * least
    assert costs.seconds_of_reads([reads(size + more, count)]) >= least - rounding
    assert costs.seconds_of_reads([reads(size, count + 1)]) >= least
    assert costs.seconds_of_reads([reads(size, count), reads(more + 1)]) >= least


def test_a_bandwidth_alone_makes_a_read_cost_32_kib_more() -> None:
    costs = LoadCosts.of_bandwidth(1e9)
    assert costs.seconds_of_reads([reads(2 * MiB, 3)]) == pytest.approx(3 * (2 * MiB + 32 * KiB) / 1e9)
    assert costs.seconds_of_reads([reads(1, 3)]) == pytest.approx(3 * (1 + 32 * KiB) / 1e9)


@pytest.mark.parametrize(
    ("estimate", "total", "bound_by"),
    [
        (Estimate(header=1, start=0.1, record=2, hold=0.5, read=5, memory=3), 6.6, "reading"),
        (Estimate(header=1, start=0.1, record=2, hold=0.5, read=5, memory=7), 8.6, "memory"),
        (Estimate(header=1, start=0.1, record=9, hold=0.5, read=5, memory=7), 10.1, "recording"),
    ],
)
def test_what_takes_longest_decides(estimate: Estimate, total: float, bound_by: str) -> None:
    assert (estimate.total, estimate.bound_by) == (total, bound_by)
    assert estimate.to_dict()["total"] == total


def changed(**changes: Any) -> dict[str, Any]:
    return {"costs": {**COSTS, **changes}}


@pytest.mark.parametrize(
    "document",
    [
        "",
        "\0",
        "[]",
        "{}",
        "7",
        {"costs": None},
        {"costs": {}},
        {"bandwidth": {"cold": 1e9, "warm": 9e9}},  # of an earlier version
        changed(read_seconds=[]),
        changed(read_seconds={"direct": []}),
        changed(read_seconds={"direct": [[1]], "buffered": []}),
        changed(read_seconds={"direct": [[4096, -1]], "buffered": []}),
        changed(read_seconds={"direct": [[0, 1]], "buffered": []}),
        changed(read_seconds={"direct": [["4096", 1]], "buffered": []}),
        changed(read_seconds={"direct": [[4096, math.inf]], "buffered": []}),
        changed(copy_bytes_per_second=0),
        changed(copy_bytes_per_second=True),
        changed(fresh_bytes_per_second=math.nan),
        changed(fresh_bytes_per_second=None),
        changed(start_seconds=-1),
        changed(slowdown=0),
        changed(start_seconds=math.nan),
        {"costs": {name: value for name, value in COSTS.items() if name != "start_seconds"}},
    ],
)
def test_plan_refuses_another_file(tmp_path: Path, write_checkpoint: Any, document: Any, capsys: Output) -> None:
    folder = write_checkpoint(tmp_path / "model", {"w": torch.zeros(4)})
    bench = tmp_path / "bench.json"
    bench.write_text(document if isinstance(document, str) else json.dumps(document))
    assert main(["plan", str(folder), "--bench", str(bench)]) == 1
    error = capsys.readouterr().err
    assert f"{bench}: expected what weightlift bench --json of this version writes, found" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: None, "no file that can be read (No such file or directory)"),
        (Path.mkdir, "no file that can be read (Is a directory)"),
        (lambda path: path.symlink_to(path), "no file that can be read (Too many levels of symbolic links)"),
        (lambda path: path.write_bytes(b"\x7fELF\xff"), "no text"),
        (Path.touch, "no JSON (Expecting value: line 1 column 1 (char 0))"),
        (lambda path: path.write_text('{"machine": {}}'), "other JSON"),
    ],
)
def test_plan_says_what_it_found_in_place_of_figures(
    tmp_path: Path, make: Callable[[Path], object], found: str, capsys: Output
) -> None:
    make(bench := tmp_path / "bench.json")
    assert main(["plan", str(tmp_path), "--bench", str(bench)]) == 1  # before it looks for a checkpoint
    assert capsys.readouterr().err == (
        f"weightlift: error: {bench}: expected what weightlift bench --json of this version writes, found {found}; "
        "measure: weightlift bench FOLDER --json FILE\n"
    )


def test_storage_that_was_not_measured_gives_no_estimate(tmp_path: Path, write_checkpoint: Any, capsys: Output) -> None:
    folder = write_checkpoint(tmp_path / "model", {"w": torch.zeros(4)})
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(changed(read_seconds={"direct": [], "buffered": []})))
    costs = LoadCosts.from_bench(str(bench))
    assert costs.seconds_of_reads([reads(4096, 1, "cached")]) == 0
    with pytest.raises(ValueError, match="nothing was read cold when it was measured"):
        costs.seconds_of_reads([reads(4096)])
    # What was written just now is in the page cache.
    assert main(["plan", str(folder), "--strategy", "buffered", "--bench", str(bench)]) == 0
    assert "time        about" in capsys.readouterr().out


def test_plan_adds_up_what_a_cold_load_would_read(tmp_path: Path, write_checkpoint: Any) -> None:
    tensors = {f"layers.{i}.weight": torch.zeros(1024, 1024) for i in range(4)}
    folder = write_checkpoint(tmp_path / "model", tensors)
    (file,) = folder.glob("*.safetensors")
    if _C.make_cold(str(file), file.stat().st_size) != 0:
        pytest.skip("the file can't be taken out of the page cache here")
    costs = costs_of(tmp_path, {"costs": COSTS})
    config = LoadConfig(strategy="buffered", chunk_bytes=2 * MiB)
    whole = plan_checkpoint(folder, config=config)
    rank = plan_checkpoint(folder, slices=[Slice.parse("*.weight:0:1/4")], config=config)
    assert whole.estimate(costs).read == pytest.approx(8 * 2e-2, rel=0.1)
    assert rank.estimate(costs).read == pytest.approx(whole.estimate(costs).read / 4, rel=0.1)
    assert whole.estimate(costs).memory >= 16 * MiB / 4e9
    assert whole.estimate(costs).start == 0.02
    assert whole.estimate(costs).header == whole.report.seconds["header"] > 0
    assert whole.estimate(costs).record == whole.report.seconds["record"] > 0


def test_reading_waits_for_recording_where_coverage_is_proven_first(tmp_path: Path, write_checkpoint: Any) -> None:
    folder = write_checkpoint(tmp_path / "model", {"weight": torch.zeros(8, 8)})
    costs = LoadCosts.of_bandwidth(1e9)
    plan = plan_checkpoint(folder)
    assert plan.estimate(costs).hold == 0
    module = torch.nn.Linear(8, 8, bias=False)
    module.weight.weight_loader = lambda param, loaded: param.data.copy_(loaded)  # type: ignore[attr-defined]
    plan = plan_load(module, folder)
    assert 0 < plan.estimate(costs).hold <= plan.estimate(costs).record
    plan = plan_load(module, folder, config=LoadConfig(coverage_wait_seconds=0.0))
    assert plan.estimate(costs).hold == 0


def test_an_estimate_needs_no_storage(tmp_path: Path, write_checkpoint: Any) -> None:
    plan = plan_checkpoint(write_checkpoint(tmp_path / "model", {"w": torch.zeros(64)}))
    at_2, at_1 = (plan.estimate(LoadCosts.of_bandwidth(rate)) for rate in (2e9, 1e9))
    assert dataclasses.replace(at_2, read=0, memory=0) == dataclasses.replace(at_1, read=0, memory=0)
    assert at_1.read + at_1.memory == pytest.approx(2 * (at_2.read + at_2.memory))
