"""LoadConfig: argument, then environment, then automatic; bad values are refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import weightlift
from weightlift import settings
from weightlift.config import DEFAULT_STAGING_BYTES, OPTIONS, LoadConfig, ResolvedConfig, environment_variable
from weightlift.report import format_bytes


def test_nothing_said_gives_the_automatic_values() -> None:
    resolved = LoadConfig().resolve({})
    assert resolved == ResolvedConfig(
        backend="auto",
        strategy="auto",
        page_cache="keep",
        prefetch_num_threads=8,
        prefetch_block_bytes=16 << 20,
        queue_depth=None,
        chunk_bytes=None,
        staging_bytes=None,
        device_staging_bytes=None,
        merge_gap_bytes=None,
        num_threads=None,
        advise_hugepages=True,
        io_timeout_seconds=120.0,
        coverage_wait_seconds=0.25,
    )


def test_environment_decides_what_arguments_leave_open() -> None:
    environment = {
        "WEIGHTLIFT_BACKEND": "pread",
        "WEIGHTLIFT_STRATEGY": "prefetch",
        "WEIGHTLIFT_PAGE_CACHE": "keep",
        "WEIGHTLIFT_PREFETCH_NUM_THREADS": "5",
        "WEIGHTLIFT_PREFETCH_BLOCK_BYTES": "4MiB",
        "WEIGHTLIFT_QUEUE_DEPTH": "16",
        "WEIGHTLIFT_CHUNK_BYTES": "2MiB",
        "WEIGHTLIFT_STAGING_BYTES": "1 GiB",
        "WEIGHTLIFT_DEVICE_STAGING_BYTES": "64MiB",
        "WEIGHTLIFT_MERGE_GAP_BYTES": "65536",
        "WEIGHTLIFT_NUM_THREADS": "3",
        "WEIGHTLIFT_ADVISE_HUGEPAGES": "0",
        "WEIGHTLIFT_IO_TIMEOUT_SECONDS": "30",
        "WEIGHTLIFT_COVERAGE_WAIT_SECONDS": "1.5",
    }
    resolved = LoadConfig(queue_depth=4, advise_hugepages=True).resolve(environment)
    assert resolved == ResolvedConfig(
        backend="pread",
        strategy="prefetch",
        page_cache="keep",
        prefetch_num_threads=5,
        prefetch_block_bytes=4 << 20,
        queue_depth=4,
        chunk_bytes=2 << 20,
        staging_bytes=1 << 30,
        device_staging_bytes=64 << 20,
        merge_gap_bytes=1 << 16,
        num_threads=3,
        advise_hugepages=True,
        io_timeout_seconds=30.0,
        coverage_wait_seconds=1.5,
    )
    assert set(environment) == {environment_variable(name) for name in OPTIONS}


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTLIFT_QUEUE_DEPTH", "7")
    assert LoadConfig().resolve().queue_depth == 7


def test_an_empty_variable_says_nothing() -> None:
    assert LoadConfig().resolve({"WEIGHTLIFT_STAGING_BYTES": " "}).staging_bytes is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1048576", 1 << 20),
        ("1048576B", 1 << 20),
        ("1024K", 1 << 20),
        ("1024KiB", 1 << 20),
        ("3m", 3 << 20),
        ("3 MiB", 3 << 20),
        ("2g", 2 << 30),
        ("2GIB", 2 << 30),
    ],
)
def test_sizes_take_binary_suffixes(text: str, expected: int) -> None:
    assert LoadConfig().resolve({"WEIGHTLIFT_STAGING_BYTES": text}).staging_bytes == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("backend", "uring"),
        ("strategy", "Direct"),
        ("prefetch_num_threads", "0"),
        ("prefetch_block_bytes", "4KiB"),
        ("queue_depth", "0"),
        ("queue_depth", "many"),
        ("queue_depth", "4.0"),
        ("chunk_bytes", "4095"),
        ("chunk_bytes", "2GiB"),
        ("staging_bytes", "256MB"),  # 10**6 or 2**20? refused, not guessed
        ("staging_bytes", "1.5GiB"),
        ("staging_bytes", "-1"),
        ("merge_gap_bytes", "lots"),
        ("num_threads", "0"),
        ("advise_hugepages", "maybe"),
        ("io_timeout_seconds", "-1"),
        ("coverage_wait_seconds", "-0.1"),
        ("coverage_wait_seconds", "inf"),
        ("coverage_wait_seconds", "nan"),
    ],
)
def test_a_bad_variable_is_named_with_what_is_accepted(name: str, text: str) -> None:
    variable = environment_variable(name)
    with pytest.raises(ValueError, match=f"^{variable} is ") as caught:
        LoadConfig().resolve({variable: text})
    assert repr(text) in str(caught.value)
    assert OPTIONS[name].accepted in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "mmap"),
        ("strategy", 1),
        ("prefetch_num_threads", True),
        ("prefetch_block_bytes", 0),
        ("queue_depth", True),
        ("queue_depth", 4.0),
        ("queue_depth", 4097),
        ("chunk_bytes", "4MiB"),
        ("staging_bytes", (1 << 20) - 1),
        ("merge_gap_bytes", -1),
        ("num_threads", -2),
        ("advise_hugepages", 1),
        ("coverage_wait_seconds", float("nan")),
        ("coverage_wait_seconds", True),
    ],
)
def test_a_bad_argument_is_named_with_what_is_accepted(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^LoadConfig\.{name} is ") as caught:
        LoadConfig(**{name: value})
    assert OPTIONS[name].accepted in str(caught.value)


def test_a_chunk_has_to_fit_into_staging() -> None:
    with pytest.raises(ValueError, match=r"chunk_bytes .* staging_bytes"):
        LoadConfig(chunk_bytes=8 << 20).resolve({"WEIGHTLIFT_STAGING_BYTES": "4MiB"})


NEVER_PREFETCHING = ["direct", "buffered", "lazy", "eager", "torchao"]


@pytest.mark.parametrize("strategy", NEVER_PREFETCHING)
@pytest.mark.parametrize(("name", "value"), [("prefetch_num_threads", 8), ("prefetch_block_bytes", 16 << 20)])
def test_how_to_prefetch_excludes_strategies_that_do_not(strategy: Any, name: str, value: int) -> None:
    variable = environment_variable(name)
    for arguments, environment, names in [
        ({"strategy": strategy, name: value}, {}, ("LoadConfig.strategy", f"LoadConfig.{name}")),
        ({name: value}, {"WEIGHTLIFT_STRATEGY": strategy}, ("WEIGHTLIFT_STRATEGY", f"LoadConfig.{name}")),
        ({}, {"WEIGHTLIFT_STRATEGY": strategy, variable: str(value)}, ("WEIGHTLIFT_STRATEGY", variable)),
    ]:
        with pytest.raises(ValueError, match="exclude each other") as caught:
            LoadConfig(**arguments).resolve(environment)  # type: ignore[arg-type]
        assert f"{names[0]} is {strategy!r}" in str(caught.value)
        assert f"{names[1]} is {value}" in str(caught.value)
    # What the environment says is for all loads, and this one has its own strategy.
    assert LoadConfig(strategy=strategy).resolve({variable: str(value)}).strategy == strategy


@pytest.mark.parametrize("strategy", ["auto", "prefetch"])
def test_how_to_prefetch_goes_with_strategies_that_may(strategy: Any) -> None:
    assert LoadConfig(strategy=strategy, prefetch_num_threads=2).resolve({}).prefetch_num_threads == 2


def test_a_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LoadConfig().queue_depth = 3  # type: ignore[misc]


def test_automatic_values_are_those_that_programs_use() -> None:
    def short(num_bytes: int) -> str:
        return format_bytes(num_bytes).replace(".00", "")

    there = "on a network file system"
    depths = f"{settings.QUEUE_DEPTH}; {settings.NETWORK_QUEUE_DEPTH} {there}"
    assert OPTIONS["queue_depth"].automatic.startswith(depths)
    chunks = f"{short(settings.CHUNK_BYTES)}; {short(settings.NETWORK_CHUNK_BYTES)} {there}"
    assert OPTIONS["chunk_bytes"].automatic.startswith(chunks)
    assert short(settings.CHUNK_UNIT) in OPTIONS["chunk_bytes"].effect
    gaps = f"{short(settings.MERGE_GAP_BYTES)}; {short(settings.NETWORK_MERGE_GAP_BYTES)} {there}"
    assert OPTIONS["merge_gap_bytes"].automatic == gaps
    assert OPTIONS["staging_bytes"].automatic.startswith(short(DEFAULT_STAGING_BYTES))
    assert OPTIONS["num_threads"].automatic.endswith(f"at most {settings.MAX_THREADS}")
    assert OPTIONS["prefetch_num_threads"].automatic == str(LoadConfig().resolve({}).prefetch_num_threads)
    prefetch_block = format_bytes(LoadConfig().resolve({}).prefetch_block_bytes)
    assert OPTIONS["prefetch_block_bytes"].automatic == prefetch_block.replace(".00", "")


def test_every_field_is_described_and_resolved() -> None:
    names = [field.name for field in dataclasses.fields(LoadConfig)]
    assert names == list(OPTIONS)
    assert names == [field.name for field in dataclasses.fields(ResolvedConfig)]
    assert all(option.effect.endswith(".") and option.when.endswith(".") for option in OPTIONS.values())


def test_a_misspelt_variable_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    monkeypatch.setenv("WEIGHTLIFT_STRATEGI", "direct")
    with pytest.warns(UserWarning, match="WEIGHTLIFT_STRATEGI is not a setting; WEIGHTLIFT_STRATEGY is"):
        weightlift.load_file(tmp_path)
