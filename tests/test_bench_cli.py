"""`weightlift bench`: what it measures, what it recommends, and what becomes of it in `weightlift plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.compare import Part, verdicts
from benchmarks.storage import figures_of
from weightlift import _C, storage_bench
from weightlift.cli import main
from weightlift.config import LoadConfig, MiB
from weightlift.storage_bench import DEFAULT_POINT, Figure, Point, StorageFigures, read_bandwidth

Output = pytest.CaptureFixture[str]

FEW_POINTS = [
    Point("pread", False, "cold", MiB, 2),
    Point("pread", False, "warm", MiB, 2),
    Point("reference", False, "cold", MiB, 2),
]


@pytest.fixture
def _few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_bench, "points", lambda *, quick: FEW_POINTS)


def figure(point: Point, *gb_per_second: float) -> Figure:
    return Figure(
        point, [1e9 * rate for rate in gb_per_second], dict.fromkeys(("p50", "p90", "p99"), 1.0), 0.1, 0, True
    )


def recommended(*figures: Figure) -> Any:
    return StorageFigures("/", 1, {}, {}, list(figures), []).recommendation


@pytest.mark.usefixtures("_few_points")
def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path, capsys: Output) -> None:
    document = tmp_path / "bench.json"
    storage = tmp_path / "storage"
    storage.mkdir()
    assert main(["bench", str(storage), "--quick", "--rounds", "2", "--size", "16MiB", "--json", str(document)]) == 0
    out = capsys.readouterr().out
    assert "pread buffered, 1 MiB x 2" in out
    # There is no cold file where the folder is in memory.
    assert "WEIGHTLIFT_STRATEGY=buffered" in out or "no recommendation" in out
    assert list(storage.iterdir()) == []
    found = json.loads(document.read_text())
    assert found["file_bytes"] == 16 * MiB
    assert [f["reader"] for f in found["figures"]] == ["pread", "pread", "reference"]
    for f in found["figures"]:
        assert len(f["samples"]) == 2
        assert 0 < f["latency"]["p50"] <= f["latency"]["p99"] <= f["latency"]["max"]
        assert f["cpu_seconds_per_gb"] >= 0
        if f["cached"] is not None:
            assert f["verified"] == (f["cached"] <= 0.01 if f["state"] == "cold" else f["cached"] >= 0.99)
    assert read_bandwidth(str(document)) in found["bandwidth"].values()


@pytest.mark.usefixtures("_few_points")
def test_a_file_is_only_read(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 * MiB + 5))
    assert main(["bench", str(file), "--quick", "--rounds", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["file_bytes"] == 3 * MiB + 5
    assert file.read_bytes() == bytes(3 * MiB + 5)


@pytest.mark.parametrize("direct", [False, pytest.param(True, marks=pytest.mark.direct_io)])
@pytest.mark.parametrize("reader", ["pread", "reference", pytest.param("io_uring", marks=pytest.mark.io_uring)])
def test_every_reader_reads_all_of_a_file_once(tmp_path: Path, reader: str, direct: bool) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(2 * MiB + 12345))
    _C.make_cold(str(file), file.stat().st_size)
    result = _C.measure_reads(
        str(file),
        reader=reader,
        direct=direct,
        chunk_bytes=256 << 10,
        queue_depth=3,
        huge_pages=True,
        max_bytes=1 << 40,
        max_seconds=60.0,
    )
    assert result["bytes"] == 2 * MiB + 12345
    assert result["num_reads"] == 9
    assert 0 < result["latency"]["max"] <= result["seconds"] < 0.9  # nobody waits for what is not coming


def test_what_can_not_be_had_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(storage_bench.shutil, "which", lambda name: None)
    monkeypatch.setattr(storage_bench, "points", lambda *, quick: [Point("fio", True, "cold", MiB, 2), *FEW_POINTS])
    assert main(["bench", str(tmp_path), "--size", "16MiB", "--rounds", "1"]) == 0
    assert "note: fio is not installed" in capsys.readouterr().out


def test_the_defaults_are_recommended_where_they_are_about_the_best() -> None:
    other = Point("io_uring", True, "cold", 8 * MiB, 64)
    assert recommended(figure(DEFAULT_POINT, 2.95, 2.95, 2.95), figure(other, 3, 3, 3)).settings == {}
    assert recommended(figure(DEFAULT_POINT, 2.8), figure(other, 3)).settings == {}  # one round tells less
    assert recommended(figure(DEFAULT_POINT, 2.5, 2.5, 2.5), figure(other, 3, 3, 3)).settings == {
        "queue_depth": 64,
        "chunk_bytes": 8 * MiB,
    }


def test_little_memory_is_recommended_where_more_gains_nothing() -> None:
    small, large = Point("io_uring", True, "cold", MiB, 8), Point("io_uring", True, "cold", 8 * MiB, 32)
    found = recommended(figure(large, 3, 3, 3), figure(small, 2.95, 2.95, 2.95))
    assert (found.settings, found.bytes_per_second) == ({"queue_depth": 8, "chunk_bytes": MiB}, 2.95e9)


def test_buffered_reads_are_recommended_only_where_direct_ones_are_slower() -> None:
    direct, buffered = Point("io_uring", True, "cold", 2 * MiB, 4), Point("pread", False, "cold", 2 * MiB, 2)
    assert "strategy" not in recommended(figure(direct, 3, 3, 3), figure(buffered, 3.05, 3.05, 3.05)).settings
    found = recommended(figure(direct, 2, 2, 2), figure(buffered, 3, 3, 3))
    assert found.settings == {"strategy": "buffered", "backend": "pread", "num_threads": 2, "chunk_bytes": 2 * MiB}
    LoadConfig(**found.settings)
    warm = Point("pread", False, "warm", 2 * MiB, 2)
    assert recommended(figure(warm, 10)) is None


def test_what_was_not_cold_recommends_nothing() -> None:
    cached = figure(DEFAULT_POINT, 3)
    cached.cached, cached.verified = 1.0, False
    assert recommended(cached) is None
    cached.cached = None  # not to be told: better than nothing
    assert recommended(cached).settings == {}


def test_plan_estimates_with_what_was_measured(tmp_path: Path, write_checkpoint: Any, capsys: Output) -> None:
    folder = write_checkpoint(tmp_path / "model", {"w": torch.zeros(1 << 20)})
    bench = tmp_path / "bench.json"
    for cold, expected in ((2e9, "at 2 GB/s"), (None, "at 9 GB/s")):
        bench.write_text(json.dumps({"bandwidth": {"cold": cold, "warm": 9e9}}))
        assert main(["plan", str(folder), "--bench", str(bench)]) == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"bandwidth": {"cold": null, "warm": null}}', '{"bandwidth": {"cold": -1}}']
)
def test_plan_refuses_another_file(tmp_path: Path, write_checkpoint: Any, content: str, capsys: Output) -> None:
    folder = write_checkpoint(tmp_path / "model", {"w": torch.zeros(4)})
    bench = tmp_path / "bench.json"
    bench.write_text(content)
    assert main(["plan", str(folder), "--bench", str(bench)]) == 1
    assert f"{bench}: expected" in capsys.readouterr().err


def test_wrong_usage_is_told_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", str(tmp_path), "--plot", str(tmp_path / "plots")]) == 2
    assert "pip install 'weightlift[bench]'" in capsys.readouterr().err
    assert main(["bench", str(tmp_path), "--size", "1KiB"]) == 2
    assert main(["bench", str(tmp_path / "nowhere"), "--quick"]) == 1
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    assert main(["bench", str(tmp_path / "empty")]) == 1
    assert "nothing to read in an empty file" in capsys.readouterr().err


def test_figures_of_google_benchmark_are_drawn_as_our_own() -> None:
    def run(gigabytes: float, **others: Any) -> dict[str, Any]:
        name = "read/io_uring/direct/cold/huge/2048/16/iterations:1/manual_time"
        latency = {"p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 3.0, "max_ms": 4.0}
        return {"run_type": "iteration", "run_name": name, "bytes_per_second": gigabytes * 1e9, **latency, **others}

    runs = [run(2), run(3), run(7), run(1, run_type="aggregate"), run(1, error_occurred=True)]
    (found,) = figures_of([*runs, run(1, run_name="copy/memcpy")])
    assert found["bytes_per_second"] == 3e9
    assert found["latency"]["p50"] == 0.001
    assert (found["chunk_bytes"], found["queue_depth"], found["direct"]) == (2 * MiB, 16, True)


def test_rivals_that_are_faster_are_named() -> None:
    parts = {
        key: Part(name, 1, {"weightlift": [0.5, 1.0, 9.0], "safetensors": [2.0], "tensorizer": [4.0]})
        for key, name in {
            (True, True): "whole, cold",
            (True, False): "whole, warm",
            (False, True): "rank, cold",
            (False, False): "rank, warm",
        }.items()
    }
    parts[True, False].samples |= {"tensorizer": [0.8], "safetensors, mapped": [0.1]}
    assert verdicts(parts) == [
        "whole, cold: 0.50 x the fastest rival with owned tensors, safetensors (goal 0.6): met",
        "whole, warm: 1.25 x the fastest rival with owned tensors, tensorizer (goal 0.9): MISSED",
        "rank, cold: 0.25 x the fastest streamer, tensorizer (goal 0.2): MISSED",
        "whole, warm: safetensors, mapped, whose tensors are the pages of the file, is faster: 0.10 x",
        "whole, warm: tensorizer, is faster: 0.80 x",
    ]
