"""What a load decides by its storage, its machine and its memory; and what it leaves in the page cache."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from processes import run_as_nobody

from weightlift import _C, LoadConfig, LoadReport, fast_load, iter_weights, prefetch, settings
from weightlift.errors import CheckpointError
from weightlift.filesystem import Mount

MiB = 1 << 20
NUM_BYTES = 32 * MiB


def write_model(folder: Path) -> Path:
    path = folder / "model.safetensors"
    safetensors.torch.save_file({f"w{i}": torch.full((2 * MiB,), i, dtype=torch.int32) for i in range(4)}, path)
    path.chmod(0o644)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path)


@pytest.fixture
def readable_path() -> Iterator[Path]:
    """In a folder that others may enter; pytest's are for their owner alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield write_model(Path(folder))


def load(path: Path, **options: Any) -> LoadReport:
    into = {f"w{i}": torch.empty(2 * MiB, dtype=torch.int32) for i in range(4)}
    report = fast_load(into, path, config=LoadConfig(**options))
    assert all((into[f"w{i}"] == i).all() for i in range(4))
    return report


def settle(config: LoadConfig | None = None, *, size: int = 1 << 40) -> settings.Settings:
    shard = type("Shard", (), {"path": "/models/a", "device": 1, "size": size})()
    return settings.settle((config or LoadConfig()).resolve({}), [shard])


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda num_bytes: monkeypatch.setattr(settings, "available_bytes", lambda: num_bytes)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda kind: monkeypatch.setattr(settings, "mount_of", lambda path: Mount("/models", kind))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_processes(number: int) -> None:
        monkeypatch.setattr(settings, "local_rank", lambda: (0, number))

    return set_processes


# ---- numbers


def test_an_ordinary_machine_needs_no_note(available: Any, on: Any) -> None:
    available(8 << 30)
    on("ext4")
    assert settle() == settings.Settings(
        queue_depth=16,
        num_threads=min(8, len(os.sched_getaffinity(0))),
        chunk_bytes=2 * MiB,
        staging_bytes=256 * MiB,
        device_staging_bytes=256 * MiB,
        merge_gap_bytes=16 << 10,
        open_ahead=0,
        files_at_once=1,
        notes=(),
    )


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "ceph", "cifs", "fuse.gcsfuse", "fuse"])
def test_network_file_systems_get_larger_reads_and_more_of_them(available: Any, on: Any, kind: str) -> None:
    available(8 << 30)
    on(kind)
    found = settle()
    assert (found.queue_depth, found.chunk_bytes, found.merge_gap_bytes) == (32, 8 * MiB, 128 << 10)
    assert (found.open_ahead, found.files_at_once) == (8, 8)
    (note,) = found.notes
    assert f"/models is {kind}" in note


def test_processes_of_one_machine_share_staging_and_queue(available: Any, on: Any, processes: Any) -> None:
    available(64 << 30)
    on("xfs")
    processes(8)
    found = settle()
    assert (found.queue_depth, found.staging_bytes) == (2, 32 * MiB)
    (note,) = found.notes
    assert "divided by 8" in note
    assert "LOCAL_WORLD_SIZE" in note


def test_what_the_user_chose_is_not_divided(available: Any, on: Any, processes: Any) -> None:
    available(64 << 30)
    on("nfs")
    processes(64)
    chosen: dict[str, Any] = {
        "queue_depth": 5,
        "staging_bytes": 100 * MiB,
        "chunk_bytes": MiB,
        "merge_gap_bytes": 0,
        "num_threads": 3,
    }
    found = settle(LoadConfig(**chosen))
    assert {name: getattr(found, name) for name in chosen} == chosen


def test_more_processes_than_reads_leave_each_one(available: Any, on: Any, processes: Any) -> None:
    available(1 << 40)
    on("ext4")
    processes(1000)
    assert (settle().queue_depth, settle().staging_bytes, settle().chunk_bytes) == (1, MiB, MiB)
    assert settle(LoadConfig(chunk_bytes=64 * MiB)).staging_bytes == 64 * MiB


def test_staging_takes_a_quarter_of_the_memory_available_at_most(available: Any, on: Any, processes: Any) -> None:
    on("ext4")
    available(100 * MiB)
    assert settle().staging_bytes == 25 * MiB
    (note,) = settle().notes
    assert note.startswith("staging memory kept to 25.00 MiB: 1/4 of the 100.00 MiB")
    processes(2)
    assert settle().staging_bytes == 25 * MiB // 2
    available(0)
    assert (settle().staging_bytes, settle().chunk_bytes) == (MiB, MiB)


def test_more_staging_than_the_memory_available_is_refused(available: Any, on: Any) -> None:
    on("ext4")
    available(100 * MiB)
    with pytest.raises(CheckpointError, match=r"staging_bytes is 134217728, .* 100\.00 MiB .*lower staging_bytes"):
        settle(LoadConfig(staging_bytes=128 * MiB))
    assert settle(LoadConfig(staging_bytes=128 * MiB), size=50 * MiB).staging_bytes == 128 * MiB  # never used up


def test_memory_of_a_control_group_counts(tmp_path: Path, path: Path) -> None:
    """In a group of its own, whose limit is real; version 1 or 2, whichever this machine has."""
    groups = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    limits = {"memory": "memory.limit_in_bytes", "cgroup": "memory.max"}
    for parent in groups:
        group = parent / f"weightlift-{os.getpid()}"
        try:
            group.mkdir()
            (group / limits[parent.name]).write_text(str(400 * MiB))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        break
    else:
        pytest.skip("no control group of its own can be made here")
    program = (
        "import os, sys\n"
        f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "import weightlift\n"
        "with weightlift.open_checkpoint(sys.argv[1]) as checkpoint:\n"
        "    checkpoint['w0'] + 0\n"
        "print(checkpoint.report.strategy_notes)\n"
    )
    try:
        done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120)
    finally:
        group.rmdir()
    assert done.returncode == 0, done.stderr
    assert "staging memory kept to" in done.stdout


def test_notes_are_logged_and_reported(path: Path, processes: Any, caplog: pytest.LogCaptureFixture) -> None:
    processes(4)
    with caplog.at_level(logging.INFO, logger="weightlift"):
        report = load(path)
    (note,) = [note for note in report.strategy_notes if "LOCAL_WORLD_SIZE" in note]
    assert note in caplog.messages
    assert note in str(report)


def test_a_stream_shares_its_staging_with_what_is_ready(path: Path, processes: Any) -> None:
    processes(100)
    stream = iter_weights(path)
    for name, tensor in stream:
        assert (tensor == int(name[1:])).all()


def test_symlinks_are_resolved_before_the_file_system_is_told(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    (blobs / "abc").write_bytes(path.read_bytes())
    (snapshot / "model.safetensors").symlink_to("../blobs/abc")
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:4 / {blobs.resolve()} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr("weightlift.filesystem._MOUNTS", str(table))
    assert any("nfs4" in note for note in load(snapshot / "model.safetensors", strategy="lazy").strategy_notes)


# ---- the page cache


def resident(path: Path, begin: int = 0, end: int | None = None) -> int:
    return _C.resident_bytes(str(path), begin, (path.stat().st_size if end is None else end) - begin)


def make_cold(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not 0 <= resident(path) <= MiB:
        pytest.skip("the file stays in the page cache")


def read_part(path: Path, begin: int, end: int) -> None:
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.seek(begin)
        while begin < end:
            begin += len(file.read(min(MiB, end - begin)))


def num_drops() -> str:
    """Changes when somebody, on this machine, drops the page cache."""
    return next(line for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("drop_pagecache"))


def cached_after(prepare: Callable[[], None], load: Callable[[], object], check: Callable[[], bool]) -> bool:
    """Whether `check` is true after `load`; does all again where somebody else has dropped the page cache meanwhile."""
    for _ in range(5):
        before = num_drops()
        prepare()
        load()
        result = check()
        if result or num_drops() == before:
            return result
    pytest.skip("somebody else keeps dropping the page cache")


# The header, and what is read ahead of it.
HEADER = 2 * MiB


@pytest.mark.parametrize("backend", ["pread", "io_uring"])
def test_a_cold_file_leaves_nothing_in_the_page_cache(path: Path, backend: Any) -> None:
    make_cold(path)
    load(path, strategy="buffered", page_cache="leave", backend=backend)
    assert resident(path, HEADER) < MiB


def test_what_is_read_through_the_page_cache_stays_there_by_default(path: Path) -> None:
    assert cached_after(
        lambda: make_cold(path),
        lambda: load(path, strategy="buffered"),
        lambda: resident(path) > 0.9 * NUM_BYTES,
    )


def cache_parts(path: Path) -> None:
    make_cold(path)
    read_part(path, 10 * MiB, 13 * MiB)  # part of what is asked about at a time
    read_part(path, 24 * MiB, 25 * MiB)


def has_parts(path: Path) -> bool:
    parts = resident(path, 10 * MiB, 13 * MiB), resident(path, 24 * MiB, 25 * MiB)
    return parts == (3 * MiB, MiB) and resident(path, HEADER) < 5 * MiB


def test_what_was_cached_before_stays(path: Path) -> None:
    assert cached_after(
        lambda: cache_parts(path),
        lambda: load(path, strategy="buffered", page_cache="leave"),
        lambda: has_parts(path),
    )


NO_DONTCACHE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/uio.h>
typedef ssize_t function(int, const struct iovec *, int, off_t, int);
ssize_t preadv2(int fd, const struct iovec *iov, int count, off_t offset, int flags) {
  if (flags & 0x80) { errno = EOPNOTSUPP; return -1; }
  return ((function *)dlsym(RTLD_NEXT, "preadv2"))(fd, iov, count, offset, flags);
}
"""


def test_what_was_cached_before_stays_without_uncached_reads_too(path: Path, tmp_path: Path) -> None:
    """As on kernels and file systems that have no RWF_DONTCACHE."""
    (tmp_path / "no_dontcache.c").write_text(NO_DONTCACHE)
    library = tmp_path / "no_dontcache.so"
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "no_dontcache.c", "-ldl"], check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    program = (
        "import torch, weightlift\n"
        f"into = {{f'w{{i}}': torch.empty({2 * MiB}, dtype=torch.int32) for i in range(4)}}\n"
        "config = weightlift.LoadConfig(strategy='buffered', page_cache='leave')\n"
        f"weightlift.fast_load(into, {str(path)!r}, config=config)\n"
    )
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    assert cached_after(
        lambda: cache_parts(path),
        lambda: subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment),
        lambda: has_parts(path),
    )


@pytest.mark.direct_io
def test_direct_reads_leave_the_page_cache_alone(path: Path) -> None:
    make_cold(path)
    assert load(path, page_cache="leave").direct_bytes > 0.8 * NUM_BYTES
    assert resident(path, HEADER) < MiB


def test_a_file_that_is_cached_stays_cached(path: Path) -> None:
    assert cached_after(
        lambda: read_part(path, 0, path.stat().st_size),
        lambda: load(path, page_cache="leave"),
        lambda: resident(path) >= NUM_BYTES,
    )


@pytest.mark.parametrize("strategy", ["prefetch", "eager"])
def test_what_fills_the_page_cache_and_leaving_it_exclude_each_other(strategy: Any) -> None:
    with pytest.raises(ValueError, match=f"LoadConfig.strategy is '{strategy}'.*LoadConfig.page_cache is 'leave'"):
        LoadConfig(strategy=strategy, page_cache="leave").resolve({})


def test_auto_does_not_prefetch_where_the_page_cache_is_to_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "mount_of", lambda path: Mount("/", "nfs4"))
    monkeypatch.setattr(prefetch, "local_rank", lambda: (0, 2))
    shards: Any = [type("Shard", (), {"path": "/a", "device": 1, "size": 1})]
    assert prefetch._to_prefetch(LoadConfig().resolve({}), shards)[0] == shards
    assert prefetch._to_prefetch(LoadConfig(page_cache="leave").resolve({}), shards)[0] == []


def test_leaving_the_page_cache_that_nobody_may_see_is_refused_or_done(readable_path: Path) -> None:
    make_cold(readable_path)
    program = (
        "import sys, weightlift\n"
        "config = weightlift.LoadConfig(strategy='buffered', page_cache='leave')\n"
        "try:\n    weightlift.load_file(sys.argv[1], config=config)\n"
        "except weightlift.CheckpointError as error:\n    print(error)\n"
    )
    refusal = run_as_nobody(readable_path, program)
    if refusal:
        assert 'page_cache="leave" is not to be had here: ' in refusal
        assert 'use page_cache="keep"' in refusal
    else:  # by RWF_DONTCACHE, which may leave a folio that two reads share
        assert resident(readable_path, HEADER) < NUM_BYTES / 2


@pytest.mark.direct_io
@pytest.mark.parametrize("memlock", [0, 4 * MiB])
def test_an_ordinary_user_reads_with_little_memory_to_lock(readable_path: Path, memlock: int) -> None:
    make_cold(readable_path)
    program = (
        "import sys, torch, weightlift\n"
        f"into = {{f'w{{i}}': torch.empty({2 * MiB}, 2, dtype=torch.int32)[:, 0] for i in range(4)}}\n"  # all staged
        "config = weightlift.LoadConfig(strategy='direct')\n"
        "report = weightlift.fast_load(into, sys.argv[1], config=config)\n"
        "assert all((into[f'w{i}'] == i).all() for i in range(4))\n"
        "print(report.files[0].reader, report.fallbacks)\n"
    )
    told = run_as_nobody(readable_path, program, memlock=memlock).strip()
    if memlock == 0 and told.startswith("pread"):  # there are kernels that count the ring itself
        assert "RLIMIT_MEMLOCK" in told
    else:
        assert told == "io_uring []"
