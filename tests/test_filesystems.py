"""On every file system each strategy and backend loads the right bytes, and the report says how and why."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from filesystems import KINDS, mounted
from torch import Tensor

from weightlift import CheckpointError, LoadConfig, load_file, open_checkpoint

MiB = 1 << 20

# What becomes of a file that is not cached: the strategy, and what its reason says; by default, and where direct is
# demanded.
EXPECTED = {
    "ext4": (("direct", "aligned to 512 bytes"), ("direct", "aligned to 512 bytes")),
    "ext4 with sectors of 4096": (("direct", "aligned to 4096 bytes"), ("direct", "aligned to 4096 bytes")),
    "xfs": (("direct", "aligned to 512 bytes"), ("direct", "aligned to 512 bytes")),
    "btrfs": (("direct", "aligned to 4096 bytes"), ("direct", "aligned to 4096 bytes")),
    "overlayfs": (("direct", "aligned to 512 bytes"), ("direct", "aligned to 512 bytes")),
    "tmpfs": (("buffered", "in the page cache"), ("direct (unproven)", "the file is in the page cache")),
    "ramfs": (("buffered", "the file system refuses O_DIRECT"), None),
    "fuse": (("direct", "aligned to 512 bytes"), ("direct", "aligned to 512 bytes")),
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """Ragged: no tensor but the first starts or ends at a multiple of any block."""
    random = torch.Generator().manual_seed(0)
    sizes = {"a": 3 * MiB + 1, "b": 3, "c": 5 * MiB + 4097, "d": 0, "e": 513}
    values = {name: torch.randint(0, 255, (n,), dtype=torch.uint8, generator=random) for name, n in sizes.items()}
    values["matrix"] = torch.randn(1023, 777, generator=random)
    return values


@pytest.fixture(scope="module", params=KINDS)
def file_system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]
) -> Iterator[tuple[str, Path]]:
    """Its kind, and a checkpoint on it."""
    folder = tmp_path_factory.mktemp("file_system")
    with mounted(request.param, folder) as point:
        written = folder / "behind" if request.param == "fuse" else point
        safetensors.torch.save_file(tensors, written / "model.safetensors")
        yield request.param, point / "model.safetensors"


def make_cold(path: Path) -> None:
    with path.open("rb") as file:
        with contextlib.suppress(OSError):  # of a file system that is only for reading
            os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_warm(path: Path) -> None:
    path.read_bytes()


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        *((strategy, backend) for strategy in ("auto", "buffered", "direct") for backend in ("io_uring", "pread")),
        ("eager", "auto"),
        ("prefetch", "auto"),
    ],
)
@pytest.mark.io_uring
def test_whole_tensors_and_slices_are_right(
    file_system: tuple[str, Path], tensors: dict[str, Tensor], strategy: Any, backend: Any
) -> None:
    kind, path = file_system
    if strategy == "direct" and EXPECTED[kind][1] is None:
        with pytest.raises(CheckpointError, match='strategy="direct" is not to be had here: the file system refuses'):
            load_file(path, config=LoadConfig(strategy=strategy, backend=backend))
        return
    config = LoadConfig(strategy=strategy, backend=backend, chunk_bytes=256 << 10)
    for prepare in (make_cold, make_warm):
        prepare(path)
        loaded = load_file(path, config=config)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        prepare(path)
        with open_checkpoint(path, config=config) as checkpoint:
            rows, columns = torch.empty(301, 777), torch.empty(1023, 5, dtype=torch.bfloat16)
            rows.copy_(checkpoint["matrix"][11:312])
            columns.copy_(checkpoint["matrix"][:, 700:705])
        assert torch.equal(rows, tensors["matrix"][11:312])
        assert torch.equal(columns, tensors["matrix"][:, 700:705].to(torch.bfloat16))


@pytest.mark.parametrize("strategy", ["auto", "direct"])
def test_the_report_says_how_a_cold_file_was_read_and_why(file_system: tuple[str, Path], strategy: Any) -> None:
    kind, path = file_system
    expected = EXPECTED[kind][strategy == "direct"]
    if expected is None:
        return  # refused, see above
    make_cold(path)
    with open_checkpoint(path, config=LoadConfig(strategy=strategy)) as checkpoint:
        into = torch.empty(5 * MiB + 4097, dtype=torch.uint8)
        into.copy_(checkpoint["c"])
    (file,) = checkpoint.report.files
    assert file.strategy == expected[0], file
    assert expected[1] in file.reason, file
    assert file.reader in ("io_uring", "pread")


def test_a_network_file_system_is_recognised_behind_a_symlink(tmp_path: Path, file_system: tuple[str, Path]) -> None:
    kind, path = file_system
    link = tmp_path / "model.safetensors"
    link.symlink_to(path)
    with open_checkpoint(link) as checkpoint:
        checkpoint["matrix"].sum()
    notes = checkpoint.report.strategy_notes
    assert notes[0].startswith("no prefetch: ")
    assert ("not a network file system" in notes[0]) == (kind != "fuse")
    assert ("reads of up to 8.00 MiB" in notes[-1]) == (kind == "fuse")
    assert all(str(path.parent) in note for note in notes)
