"""Loads across a slow link: what is asked of it. How fast that is, `python -m benchmarks.slow_link` measures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import safetensors.torch
import torch
from processes import run_python
from torch import Tensor

from benchmarks.slow_link import PARTS, Part, Profile, build, mounted
from weightlift import LoadConfig, load_file, open_checkpoint
from weightlift.checkpoint import locate
from weightlift.plan import open_plan
from weightlift.settings import NETWORK_OPEN_AHEAD

MiB = 1 << 20
NUM_SHARDS = 12
SHAPE = (256, 4096)  # of float32: 4 MiB
NO_LIMITS = Profile("a network without limits", 0.0, 0.0)
SLOW_TO_ANSWER = Profile("a network that is slow to answer", 0.05, 0.0)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    try:
        return build(tmp_path_factory.mktemp("program"))
    except SystemExit as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("behind")
    for shard in range(NUM_SHARDS):
        values = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE) + shard
        path = folder / f"model-{shard + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        safetensors.torch.save_file({f"w{shard}": values, f"b{shard}": values[0].clone()}, path)
    return folder


@pytest.fixture(scope="module")
def expected(behind: Path) -> dict[str, Tensor]:
    return {k: v for path in behind.iterdir() for k, v in safetensors.torch.load_file(path).items()}


Across = Callable[[Profile, Callable[[Path], object]], dict[str, int]]


@pytest.fixture
def across(program: Path, behind: Path) -> Across:
    """Does something with the folder across a link; gives what the link was asked for."""

    def run(profile: Profile, action: Callable[[Path], object]) -> dict[str, int]:
        asked: dict[str, int] = {}
        try:
            with mounted(program, behind, profile, asked) as folder:
                action(folder)
        except SystemExit as error:
            pytest.skip(str(error))
        return asked

    return run


def load_part(folder: Path, part: Part) -> dict[str, Tensor]:
    tensors = {}
    with open_checkpoint(folder) as checkpoint:
        for name, tensor in checkpoint.items():
            cut = part.of(tuple(tensor.shape))
            if cut is not None:
                tensors[name] = torch.empty(tensor.narrow(*cut).shape)
                tensors[name].copy_(tensor.narrow(*cut))
    return tensors


@pytest.mark.parametrize("name", ["columns", "rows"])
def test_one_rank_gets_its_part_across_a_link_of_every_kind(
    across: Across, expected: dict[str, Tensor], name: str
) -> None:
    part = PARTS[name]
    for stream in ("request", "handle", "file"):
        profile = Profile("fast", 1e-4, 4e9, 2e9, stream)
        loaded: dict[str, Tensor] = {}
        across(profile, lambda folder, into=loaded: into.update(load_part(folder, part)))  # type: ignore[misc]
        assert len(loaded) == (2 * NUM_SHARDS if name == "columns" else NUM_SHARDS)
        for key, tensor in loaded.items():
            cut = part.of(tuple(expected[key].shape))
            assert cut is not None
            assert torch.equal(tensor, expected[key].narrow(*cut)), key


def test_a_process_alone_asks_a_network_for_nothing_but_what_it_needs(across: Across) -> None:
    needed = NUM_SHARDS * 4 * MiB // 8
    asked = across(NO_LIMITS, lambda folder: load_part(folder, PARTS["columns"]))
    assert needed <= asked["bytes"] < 1.5 * needed  # with headers, and what is read ahead of them


def test_everything_passes_the_link_once(across: Across, expected: dict[str, Tensor]) -> None:
    def load(folder: Path) -> None:
        for name, tensor in load_file(folder).items():
            assert torch.equal(tensor, expected[name]), name

    total = sum(tensor.nbytes for tensor in expected.values())
    assert total <= across(NO_LIMITS, load)["bytes"] < 1.1 * total


def test_headers_are_asked_for_many_at_a_time(across: Across) -> None:
    asked = across(SLOW_TO_ANSWER, locate)
    assert asked["opens"] == NUM_SHARDS
    assert asked["most_in_flight"] > 1


def test_few_descriptors_are_enough_for_many_headers(across: Across) -> None:
    code = """
    import resource, sys
    import weightlift
    weightlift.load_file(sys.argv[1] + "/model-00001-of-00012.safetensors")  # what is imported late is there
    resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))
    assert len(weightlift.load_file(sys.argv[1])) == 24
    """
    across(SLOW_TO_ANSWER, lambda folder: run_python(code, folder))


def test_data_comes_one_round_trip_after_the_header(across: Across) -> None:
    profile = Profile("a network that is very slow to answer", 0.2, 0.0)

    def load(folder: Path) -> None:
        started = time.perf_counter()
        load_file(folder / "model-00001-of-00012.safetensors")
        counts.append((time.perf_counter() - started) / profile.latency)

    counts: list[float] = []
    while not counts or (min(counts) > 4 and len(counts) < 3):  # the machine may be busy
        across(profile, load)
    # The file is opened, its header read, its data read. Opened for that only then, and tried out, it would be six.
    assert 3 <= min(counts) < 5


def test_what_is_looked_at_does_not_wait_for_files_that_may_be_next(across: Across) -> None:
    def look(folder: Path) -> None:
        started = time.perf_counter()
        with open_checkpoint(folder) as checkpoint:
            assert checkpoint["b1"].sum().item() > 0
            counts.append((time.perf_counter() - started) / profile.latency)

    profile = Profile("a network that is very slow to answer", 0.2, 0.0)
    counts: list[float] = []
    while not counts or (min(counts) > 5 and len(counts) < 3):  # the machine may be busy
        across(profile, look)
    # The folder is listed, a file opened, its header read, its data read. To open the ninth file takes two more.
    assert 4 <= min(counts) < 6


def test_the_first_files_are_opened_to_read_them_while_headers_are_read(across: Across) -> None:
    def look(folder: Path) -> None:
        before = set(os.listdir("/proc/self/fd"))
        checkpoint = open_checkpoint(folder)
        assert len(set(os.listdir("/proc/self/fd")) - before) == 2 * NETWORK_OPEN_AHEAD
        checkpoint.close()
        assert not set(os.listdir("/proc/self/fd")) - before

    assert across(NO_LIMITS, look)["opens"] == NUM_SHARDS + 2 * NETWORK_OPEN_AHEAD


def test_files_that_may_be_read_otherwise_are_opened_later(across: Across, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(folder: Path, strategy: Literal["auto", "buffered"] = "auto") -> None:
        open_checkpoint(folder, config=LoadConfig(strategy=strategy)).close()

    assert across(NO_LIMITS, lambda folder: look(folder, "buffered"))["opens"] == NUM_SHARDS
    assert across(NO_LIMITS, lambda folder: open_plan(folder).close())["opens"] == NUM_SHARDS
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert across(NO_LIMITS, look)["opens"] == NUM_SHARDS


def test_direct_reads_are_tried_out_once_a_mount_and_not_once_a_file(across: Across) -> None:
    asked = across(NO_LIMITS, load_file)
    # A header, and two ways to read, of each; what a file was tried by serves to read it.
    assert asked["opens"] == 3 * NUM_SHARDS
