"""LoadReport: one line for the log, a table for people, a dict for programs."""

from __future__ import annotations

import json

import pytest

from weightlift.report import FileReport, LoadReport, format_bytes


@pytest.fixture
def report() -> LoadReport:
    return LoadReport(
        missing_keys=["lm_head.bias"],
        num_tensors=3,
        num_transfers=4,
        num_dropped=1,
        num_forced=2,
        bytes_needed=2 << 30,
        bytes_read=(2 << 30) + (1 << 20),
        direct_bytes=2 << 30,
        buffered_bytes=1 << 20,
        in_place_bytes=1 << 30,
        seconds={"header": 0.01, "record": 0.2, "wait": 0.8, "total": 1.0},
        files=[
            FileReport("a.safetensors", 1 << 30, "io_uring", "direct", "not in the page cache"),
            FileReport("b.safetensors", (1 << 30) + (1 << 20), "pread", "direct", "io_uring was refused"),
        ],
        fallbacks=["io_uring: refused by seccomp; allow io_uring_setup"],
        gaps=["qkv_proj.weight[512:768]"],
        skipped={f"layers.{i}.rotary_emb.inv_freq": "computed by the model" for i in range(32)},
    )


def test_the_summary_is_one_line_that_says_what_matters(report: LoadReport) -> None:
    assert report.summary() == (
        "Loaded 2.00 GiB in 1.00 s (2.00 GiB/s) reader=mixed strategy=direct tensors=3 over_read=1.000 "
        "missing=1 skipped=32 gaps=1 fallbacks=1"
    )


def test_the_table_shows_every_file_key_gap_and_fallback(report: LoadReport) -> None:
    text = str(report)
    assert text.startswith(report.summary())
    for part in ("a.safetensors", "io_uring was refused", "lm_head.bias", "qkv_proj.weight[512:768]", "seccomp"):
        assert part in text


def test_the_table_folds_layers_and_tells_the_rule_of_what_was_skipped(report: LoadReport) -> None:
    report.missing_keys = [f"layers.{i}.norm.weight" for i in (0, 1, 2, 5)]
    report.skipped["head\n.bias"] = "not wanted"
    lines = str(report).splitlines()
    assert "  missing     layers.{0-2,5}.norm.weight (4)" in lines
    assert "  skipped     layers.{0-31}.rotary_emb.inv_freq (32): computed by the model" in lines
    assert r"  skipped     'head\n.bias': not wanted" in lines


def test_the_dict_has_every_name(report: LoadReport) -> None:
    document = json.loads(json.dumps(report.to_dict()))
    assert len(document["skipped"]) == 32
    assert document["skipped"]["layers.7.rotary_emb.inv_freq"] == "computed by the model"
    assert document["double_writes"] == []


def test_the_dict_goes_through_json(report: LoadReport) -> None:
    document = json.loads(json.dumps(report.to_dict()))
    assert document["files"][1]["reader"] == "pread"
    assert document["over_read"] == report.bytes_read / report.bytes_needed
    assert document["seconds"]["total"] == 1.0


def test_the_table_shows_hostile_names_harmlessly(report: LoadReport) -> None:
    report.unexpected_keys = ["w\x1b[2J", "a\nb"]
    report.files[0].path = "\x1b]0;title\x07.safetensors"
    text = str(report)
    assert all(line.isprintable() for line in text.splitlines())
    assert r"'w\x1b[2J'" in text
    assert r"'a\nb'" in text


def test_an_empty_load_divides_by_nothing() -> None:
    report = LoadReport()
    assert report.over_read == 1.0
    assert report.bytes_per_second == 0.0
    assert report.summary() == "Loaded 0 B in 0.00 s (0.00 GiB/s) tensors=0 over_read=1.000"
    assert str(report)


def test_two_reports_share_no_list() -> None:
    LoadReport().missing_keys.append("x")
    assert LoadReport().missing_keys == []


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (5 << 20, "5.00 MiB"), (3 << 40, "3072.00 GiB")],
)
def test_sizes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
