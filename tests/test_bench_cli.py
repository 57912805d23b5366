"""`weightlift bench`: what it measures, what it recommends, and what becomes of it in `weightlift plan`."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.compare import Part, verdicts
from benchmarks.storage import figures_of
from weightlift import _C, storage_bench
from weightlift.cli import main
from weightlift.config import LoadConfig, MiB
from weightlift.cost import LoadCosts
from weightlift.filesystem import Mount
from weightlift.storage_bench import default_point, measure_storage, points
from weightlift.storage_figures import Figure, Point, StorageFigures

Output = pytest.CaptureFixture[str]

DEFAULT_POINT = default_point(Mount("/", "ext4"))
FEW_POINTS = [
    Point("pread", False, "cold", MiB, 2),
    Point("pread", False, "warm", MiB, 2),
    Point("reference", False, "cold", MiB, 2),
]


@pytest.fixture
def _few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_bench, "points", lambda default, *, quick: FEW_POINTS)


def figure(point: Point, *gb_per_second: float) -> Figure:
    return Figure(
        point, [1e9 * rate for rate in gb_per_second], dict.fromkeys(("p50", "p90", "p99"), 1.0), 0.1, 0, True
    )


def measured(*figures: Figure, kind: str = "ext4") -> StorageFigures:
    return StorageFigures("/", 1, {}, {}, default_point(Mount("/", kind)), list(figures), 4e9, [])


def recommended(*figures: Figure, kind: str = "ext4") -> Any:
    return measured(*figures, kind=kind).recommendation


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
    assert LoadCosts.from_bench(str(document)).fresh_bytes_per_second == found["costs"]["fresh_bytes_per_second"]


def test_what_a_load_takes_beyond_its_reads_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = Point("pread", False, "cold", MiB, DEFAULT_POINT.queue_depth)
    monkeypatch.setattr(storage_bench, "points", lambda default, *, quick: [point])
    file = tmp_path / "file"
    file.write_bytes(bytes(MiB))
    least = measure_storage(str(file), quick=True, rounds=1).start_seconds
    empty = torch.empty

    def empty_slowly(*arguments: Any, **options: Any) -> torch.Tensor:
        time.sleep(0.5)
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", empty_slowly)
    found = measure_storage(str(file), quick=True, rounds=1)
    assert found.start_seconds >= max(0.4, least)
    assert found.costs.start_seconds == found.start_seconds


@pytest.mark.parametrize(("per_read", "wanted"), [(1e-3, [64, 512]), (0.1, [10, 40]), (9.0, [2, 8])])
def test_a_small_and_a_large_load_say_what_loads_take_beyond_their_reads(
    monkeypatch: pytest.MonkeyPatch, per_read: float, wanted: list[int]
) -> None:
    costs = LoadCosts({"direct": ((2 * MiB, per_read),), "buffered": ()}, 1e9, 1e9)
    asked = []

    def load(file: str, num_bytes: int, costs: LoadCosts) -> tuple[float, float]:
        asked.append(num_bytes // MiB)
        estimate = num_bytes / 2e9
        return 0.25 + 1.5 * estimate, estimate

    monkeypatch.setattr(storage_bench, "_measured_and_estimated", load)
    assert storage_bench._beyond_reads("file", 1 << 30, costs) == pytest.approx((0.25, 1.5))
    assert sorted(set(asked)) == wanted  # slow storage is asked for less
    # Two loads of about one size tell no slope.
    assert storage_bench._beyond_reads("file", 2 * MiB, costs) == pytest.approx((0.25 + 0.5 * 2 * MiB / 2e9, 1.0))


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
    monkeypatch.setattr(
        storage_bench, "points", lambda default, *, quick: [Point("fio", True, "cold", MiB, 2), *FEW_POINTS]
    )
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
    assert found.settings == {"strategy": "buffered", "queue_depth": 2, "chunk_bytes": 2 * MiB}
    LoadConfig(**found.settings)
    warm = Point("pread", False, "warm", 2 * MiB, 2)
    assert recommended(figure(warm, 10)) is None


def test_what_was_not_cold_recommends_nothing() -> None:
    cached = figure(DEFAULT_POINT, 3)
    cached.cached, cached.verified = 1.0, False
    assert recommended(cached) is None
    cached.cached = None  # not to be told: better than nothing
    assert recommended(cached).settings == {}


def test_the_reason_names_the_best_and_the_defaults() -> None:
    small, large = Point("io_uring", True, "cold", MiB, 8), Point("io_uring", True, "cold", 8 * MiB, 32)
    found = recommended(figure(large, 3, 3, 3), figure(small, 2.95, 2.95, 2.95), figure(DEFAULT_POINT, 1, 1, 1))
    assert found.reason == (
        "the least memory within 3% of io_uring direct, 8 MiB x 32, 3.00 GB/s; "
        "the defaults: io_uring direct, 2 MiB x 16, 1.00 GB/s"
    )
    defaults = "the defaults, io_uring direct, 2 MiB x 16, are"
    assert recommended(figure(DEFAULT_POINT, 1, 1, 1)).reason == f"{defaults} the best"
    found = recommended(figure(small, 1.02, 1.02, 1.02), figure(DEFAULT_POINT, 1, 1, 1))
    assert found.reason == f"{defaults} within 3% of io_uring direct, 1 MiB x 8, 1.02 GB/s"


def test_what_gains_little_over_the_defaults_is_not_recommended() -> None:
    threads, other = Point("pread", True, "cold", MiB, 8), Point("io_uring", True, "cold", MiB, 64)
    found = recommended(figure(threads, 3, 3, 3), figure(other, 2.95, 2.95, 2.95), figure(DEFAULT_POINT, 2.9, 2.9, 2.9))
    assert found.settings == {}


def test_across_a_network_the_defaults_are_other_ones() -> None:
    direct, slow = Point("io_uring", True, "cold", 8 * MiB, 64), Point("pread", False, "cold", 2 * MiB, 16)
    default = default_point(Mount("/", "nfs4"))
    assert (default.direct, default.reader) == (False, "pread")
    assert recommended(figure(default, 1, 1, 1), figure(slow, 0.5, 0.5, 0.5), kind="nfs4").settings == {}
    found = recommended(figure(default, 1, 1, 1), figure(direct, 2, 2, 2), kind="nfs4")
    assert found.settings == {"strategy": "direct", "queue_depth": 64, "chunk_bytes": 8 * MiB}


@pytest.mark.parametrize("kind", ["ext4", "nfs4"])
@pytest.mark.parametrize("quick", [False, True])
def test_the_defaults_are_measured_and_reads_of_every_size_as_deep(kind: str, quick: bool) -> None:
    default = default_point(Mount("/", kind))
    found = points(default, quick=quick)
    assert default in found
    assert len(found) == len(set(found))
    for reader, direct in (("io_uring", True), ("pread", True), ("pread", False)):
        sizes = {
            point.chunk_bytes
            for point in found
            if (point.reader, point.direct, point.state) == (reader, direct, "cold")
            and point.queue_depth == default.queue_depth
        }
        assert {4 << 10, 64 << 10, 2 * MiB, 8 * MiB} <= sizes


def test_small_pieces_cost_loads_and_are_never_recommended() -> None:
    piece = Point("io_uring", True, "cold", 4096, 16, random=True)
    found = measured(
        figure(piece, 9, 9, 9), figure(DEFAULT_POINT, 2, 2, 2), figure(Point("pread", False, "warm", 1, 2), 8)
    )
    assert found.costs.read_seconds == {"direct": ((4096, 4096 / 9e9), (2 * MiB, 2 * MiB / 2e9)), "buffered": ()}
    assert (found.costs.copy_bytes_per_second, found.costs.fresh_bytes_per_second) == (8e9, 4e9)
    assert found.recommendation is not None
    assert found.recommendation.settings == {}


@pytest.mark.io_uring
@pytest.mark.direct_io
@pytest.mark.parametrize("num_bytes", [4096, 2 * MiB + 12345, 640 << 10])
def test_random_pieces_are_all_of_the_file_once(tmp_path: Path, num_bytes: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(num_bytes))
    options: dict[str, Any] = {"huge_pages": True, "max_bytes": 1 << 40, "max_seconds": 60.0}
    found = _C.measure_reads(
        str(file), reader="io_uring", direct=True, chunk_bytes=4096, queue_depth=3, random=True, **options
    )
    assert (found["bytes"], found["num_reads"]) == (num_bytes, -(-num_bytes // 4096))


def test_wrong_usage_is_told_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", str(tmp_path), "--plot", str(tmp_path / "plots")]) == 2
    assert "pip install 'weightlift[bench]'" in capsys.readouterr().err
    assert main(["bench", str(tmp_path), "--size", "1KiB"]) == 2
    assert main(["bench", str(tmp_path / "nowhere"), "--quick"]) == 1
    assert "no such file or folder; check the path" in capsys.readouterr().err
    assert main(["bench", str(tmp_path), "--json", str(tmp_path / "nowhere" / "bench.json")]) == 2
    assert "it can't be written there" in capsys.readouterr().err
    assert main(["bench", "/dev/null", "--json", str(tmp_path / "bench.json")]) == 1
    assert "/dev/null: expected a folder or a file" in capsys.readouterr().err
    assert not (tmp_path / "bench.json").exists()
    (tmp_path / "empty").touch()
    assert main(["bench", str(tmp_path / "empty")]) == 1
    assert "nothing to read in an empty file" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_is_left_behind_by_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, exit_code: int
) -> None:
    def measure(file: str, *_: object) -> None:
        assert Path(file).parent == tmp_path
        os.kill(os.getpid(), number)

    monkeypatch.setattr(storage_bench, "_measure", measure)
    try:
        found = main(["bench", str(tmp_path), "--size", "16MiB"])
    except SystemExit as error:
        found = error.code  # type: ignore[assignment]
    assert found == exit_code
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_file_that_can_not_be_written_is_one_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightlift", "bench", str(tmp_path), "--size", "16MiB", "--json", "/dev/null"]
    limit = (1 << 20, 1 << 20)
    done = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"weightlift: error: [Errno 27] File too large, after 1.00 MiB of a file to measure by: '{tmp_path}'\n"
    )
    assert list(tmp_path.iterdir()) == []


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
