"""What is read into the page cache ahead of the load: when, which files, that it ends, and that the report says why."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from weightlift import _C as core
from weightlift import LoadConfig, LoadReport, fast_load, load_file, open_checkpoint, prefetch
from weightlift.available_memory import available_bytes
from weightlift.filesystem import Mount, find_mount, mount_of
from weightlift.local_rank import local_rank
from weightlift.prefetch import Prefetch, prefetch_pays, read_into_cache

MiB = 1 << 20
GiB = 1 << 30

# ---- file systems

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:21 / /proc rw,nosuid shared:5 - proc proc rw
36 22 0:44 / /mnt rw,noatime master:1 shared:7 - nfs4 server:/export rw,vers=4.2
37 36 0:45 /sub /mnt/models rw - lustre 10.0.0.1@tcp:/fs rw
38 36 0:46 / /mnt/with\040blank\134and rw - xfs /dev/sdb rw
39 22 0:47 / /stacked rw - autofs systemd-1 rw
40 39 0:48 / /stacked rw - nfs server:/x rw
41 22 0:49 / /bucket rw - fuse.gcsfuse bucket rw
this line is broken
42 22
"""


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/home/user/model", "/", "ext4"),
        ("/mnt", "/mnt", "nfs4"),
        ("/mnt/a/b", "/mnt", "nfs4"),
        ("/mnt/models/llama", "/mnt/models", "lustre"),
        ("/mnt/models-2/llama", "/mnt", "nfs4"),  # of the same beginning, and not below it
        ("/mnt/with blank\\and/model", "/mnt/with blank\\and", "xfs"),
        ("/stacked/model", "/stacked", "nfs"),  # the later mount hides the earlier
        ("/bucket/model", "/bucket", "fuse.gcsfuse"),
    ],
)
def test_the_longest_mount_point_tells_the_file_system(path: str, point: str, kind: str) -> None:
    assert find_mount(MOUNTS.splitlines(), path) == Mount(point, kind)


def test_without_a_table_the_file_system_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weightlift.filesystem._MOUNTS", str(tmp_path / "none"))
    assert mount_of("/x") == Mount("/", "unknown")
    assert not mount_of("/x").is_network


def test_symlinks_are_followed_to_their_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "nfs").mkdir()
    (tmp_path / "nfs" / "blob").write_bytes(b"x")
    (tmp_path / "cache" / "model").symlink_to("../nfs/blob")
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:4 / {tmp_path.resolve()}/nfs rw - nfs server:/x rw\n")
    monkeypatch.setattr("weightlift.filesystem._MOUNTS", str(table))
    assert mount_of(str(tmp_path / "cache" / "model")).kind == "nfs"
    assert mount_of(str(tmp_path / "cache")).kind == "ext4"


def test_file_systems_across_a_network() -> None:
    for kind in ("nfs", "nfs4", "lustre", "ceph", "cifs", "smb3", "fuse.sshfs", "9p", "virtiofs", "beegfs", "gpfs"):
        assert Mount("/", kind).is_network, kind
    for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "fuseblk", "zfs", "proc", "nfsd"):
        assert not Mount("/", kind).is_network, kind


# ---- memory


def write_tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


MEMINFO = {"proc/meminfo": f"MemTotal:  {200 * MiB} kB\nMemAvailable:   {100 * MiB} kB\nHugePages_Total: 0\n"}
V2 = {**MEMINFO, "proc/self/cgroup": "0::/pod/box\n"}
V1 = {**MEMINFO, "proc/self/cgroup": "9:pids:/x\n4:cpu,memory:/docker/box\n1:name=systemd:/y\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 100 * GiB),
        ({}, 0),
        (V2, 100 * GiB),
        # No limit; a limit above what the machine has.
        ({**V2, "sys/fs/cgroup/pod/box/memory.max": "max", "sys/fs/cgroup/pod/box/memory.current": "5"}, 100 * GiB),
        (
            {**V2, "sys/fs/cgroup/pod/box/memory.max": f"{200 * GiB}", "sys/fs/cgroup/pod/box/memory.current": "0"},
            100 * GiB,
        ),
        # The page cache of the group is as good as free.
        (
            {
                **V2,
                "sys/fs/cgroup/pod/box/memory.max": f"{40 * GiB}\n",
                "sys/fs/cgroup/pod/box/memory.current": f"{30 * GiB}\n",
                "sys/fs/cgroup/pod/box/memory.stat": f"anon 9\nactive_file {2 * GiB}\ninactive_file {3 * GiB}\n",
            },
            15 * GiB,
        ),
        # A group above has the tighter limit.
        (
            {
                **V2,
                "sys/fs/cgroup/pod/memory.max": f"{20 * GiB}",
                "sys/fs/cgroup/pod/memory.current": f"{14 * GiB}",
                "sys/fs/cgroup/pod/box/memory.max": f"{40 * GiB}",
                "sys/fs/cgroup/pod/box/memory.current": f"{14 * GiB}",
            },
            6 * GiB,
        ),
        # In a container: the path is the host's, and the folder shows the container's own group at its top.
        ({**V2, "sys/fs/cgroup/memory.max": f"{8 * GiB}", "sys/fs/cgroup/memory.current": f"{GiB}"}, 7 * GiB),
        (
            {
                **MEMINFO,
                "proc/self/cgroup": "0::/../../x\n",
                "sys/fs/cgroup/memory.max": f"{8 * GiB}",
                "sys/fs/cgroup/memory.current": f"{9 * GiB}",
            },
            0,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/memory/docker/box/memory.limit_in_bytes": f"{10 * GiB}",
                "sys/fs/cgroup/memory/docker/box/memory.usage_in_bytes": f"{4 * GiB}",
                "sys/fs/cgroup/memory/docker/box/memory.stat": f"cache 7\ntotal_inactive_file {GiB}\n",
            },
            7 * GiB,
        ),
    ],
)
def test_available_memory_is_that_of_the_tightest_group(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_bytes(write_tree(tmp_path, files)) == expected


def test_this_machine_has_memory() -> None:
    assert 16 * MiB < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---- the decision


@pytest.mark.parametrize(
    ("strategy", "kind", "total", "pays", "level", "words"),
    [
        ("auto", "nfs", 90, True, logging.INFO, ["/models is nfs", "network", "fit into 90%", "100.00 GiB"]),
        ("auto, alone", "nfs", 90, False, logging.INFO, ["/models is nfs", "network", "no other process"]),
        ("auto", "nfs", 91, False, logging.WARNING, ["/models is nfs", "91.00 GiB do not fit into 90%", "100.00 GiB"]),
        ("auto", "ext4", 1, False, logging.INFO, ["/models is ext4", "not a network file system"]),
        ("lazy", "nfs", 1, False, logging.INFO, ["the strategy is lazy"]),
        ("buffered", "nfs", 1, False, logging.INFO, ["the strategy is buffered"]),
        ("direct", "nfs", 1, False, logging.INFO, ["the strategy is direct"]),
        ("eager", "nfs", 1, False, logging.INFO, ["the strategy is eager"]),
        ("torchao", "nfs", 1, False, logging.INFO, ["the strategy is torchao"]),
        ("prefetch", "ext4", 90, True, logging.INFO, ["as configured"]),
        ("prefetch", "ext4", 91, True, logging.WARNING, ["as configured, though", "91.00 GiB do not fit into 90%"]),
    ],
)
def test_prefetch_pays_across_a_network_for_several_processes_where_all_fits(
    strategy: str, kind: str, total: int, pays: bool, level: int, words: list[str]
) -> None:
    strategy, _, alone = strategy.partition(", ")
    mount = Mount("/models", kind)
    decided, loud, note = prefetch_pays(strategy, mount, total * GiB, 100 * GiB, processes=1 if alone else 2)
    assert (decided, loud) == (pays, level)
    assert note.startswith("prefetch: " if pays else "no prefetch: ")
    assert all(word in note for word in words), note


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, (3, 8)),
        ({"LOCAL_RANK": "3"}, (0, 1)),
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": "8"}, (0, 1)),
        ({"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "8"}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (0, 1)),  # of other machines, with other page caches
    ],
)
def test_files_are_shared_among_the_ranks_of_the_machine(
    environment: dict[str, str], expected: tuple[int, int]
) -> None:
    assert local_rank(environment) == expected


# ---- reading

NUM_FILES = 3
FILE_BYTES = 8 * MiB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(NUM_FILES):
        tensor = torch.arange(FILE_BYTES // 4, dtype=torch.int32) + number
        safetensors.torch.save_file({f"w{number}": tensor}, tmp_path / f"model-{number}.safetensors")
    return tmp_path


def paths_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cached_share(path: Path) -> float:
    return core.resident_bytes(str(path), 0, path.stat().st_size) / path.stat().st_size


def make_cold(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        if not 0 <= cached_share(path) <= 0.1:
            pytest.skip("files stay in the page cache here")


def load(folder: Path, **options: Any) -> LoadReport:
    into = {f"w{number}": torch.empty(FILE_BYTES // 4, dtype=torch.int32) for number in range(NUM_FILES)}
    report = fast_load(into, folder, config=LoadConfig(**options))
    for number in range(NUM_FILES):
        assert torch.equal(into[f"w{number}"], torch.arange(FILE_BYTES // 4, dtype=torch.int32) + number)
    return report


@pytest.mark.parametrize("block_bytes", [64 << 10, MiB, 5 * MiB // 2, 64 * MiB, GiB])
def test_a_file_is_read_into_the_cache_whole(folder: Path, block_bytes: int) -> None:
    path = paths_of(folder)[0]
    make_cold([path])
    read_into_cache(str(path), block_bytes=block_bytes)
    assert cached_share(path) == 1


def test_reading_ahead_stops_when_it_is_cancelled(folder: Path) -> None:
    path = paths_of(folder)[0]
    make_cold([path])
    answers = iter([False, True])
    read_into_cache(str(path), block_bytes=MiB, is_cancelled=lambda: next(answers))
    assert 0 < cached_share(path) < 0.6  # a block, and what the kernel reads ahead with it


def test_all_files_are_prefetched(folder: Path) -> None:
    make_cold(paths_of(folder))
    ahead = Prefetch([str(path) for path in paths_of(folder)], num_threads=2, block_bytes=MiB)
    ahead.wait()
    ahead.close()
    assert [cached_share(path) for path in paths_of(folder)] == [1] * NUM_FILES


def test_a_rank_prefetches_its_share_of_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    make_cold(paths_of(folder))
    ahead = Prefetch([str(path) for path in paths_of(folder)], num_threads=8, block_bytes=MiB)
    ahead.wait()
    ahead.close()
    assert [cached_share(path) > 0.5 for path in paths_of(folder)] == [False, True, False]


def test_more_ranks_than_files_prefetch_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    Prefetch([str(path) for path in paths_of(folder)], num_threads=8, block_bytes=MiB).close()


def test_a_file_that_can_not_be_read_ahead_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [str(folder / "missing"), *map(str, paths_of(folder))]
    ahead = Prefetch(paths, num_threads=1, block_bytes=MiB)
    ahead.wait()
    ahead.close()
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage() == f"{folder / 'missing'}: it could not be read ahead: No such file or directory"
    assert all(cached_share(path) == 1 for path in paths_of(folder))


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes every read of a file ahead wait for the event that it gives."""
    event = threading.Event()
    started = threading.Event()

    def read(path: str, *, block_bytes: int, is_cancelled: Callable[[], bool]) -> None:
        started.set()
        while not event.wait(0.001) and not is_cancelled():
            pass

    monkeypatch.setattr(prefetch, "read_into_cache", read)
    yield started
    event.set()


def prefetching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("wl-prefetch")]


def test_prefetch_ends_with_the_load(folder: Path, stuck: threading.Event) -> None:
    checkpoint = open_checkpoint(folder, config=LoadConfig(strategy="prefetch"))
    assert not prefetching_threads()  # nothing was asked for yet
    with checkpoint:
        torch.empty(FILE_BYTES // 4, dtype=torch.int32).copy_(checkpoint["w0"])
        checkpoint.run()
        assert stuck.wait(10)
        assert len(prefetching_threads()) == NUM_FILES
    assert not prefetching_threads()


def test_prefetch_ends_with_a_failed_load(folder: Path, stuck: threading.Event) -> None:
    def load() -> None:
        config = LoadConfig(strategy="prefetch", prefetch_num_threads=2)
        with open_checkpoint(folder, config=config) as checkpoint:
            torch.empty(FILE_BYTES // 4, dtype=torch.int32).copy_(checkpoint["w0"])
            checkpoint.run()
            assert len(prefetching_threads()) == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load()
    assert not prefetching_threads()


def test_storage_that_does_not_answer_is_left_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(prefetch, "_JOIN_SECONDS", 0.05)
    monkeypatch.setattr(prefetch, "read_into_cache", lambda path, **_: answer.wait())
    ahead = Prefetch([str(path) for path in paths_of(folder)], num_threads=2, block_bytes=MiB)
    threads = prefetching_threads()
    ahead.close()
    answer.set()
    for thread in threads:
        thread.join()
    assert "2 reads were not answered within 0.05 s" in caplog.text


# ---- strategies of a load


def test_prefetch_reads_ahead_and_through_the_cache(folder: Path) -> None:
    make_cold(paths_of(folder))
    report = load(folder, strategy="prefetch", prefetch_num_threads=1, prefetch_block_bytes=MiB)
    assert report.buffered_bytes == report.bytes_read
    assert report.strategy_notes == ["prefetch: as configured"]
    assert "  strategy    prefetch: as configured" in str(report)
    assert report.to_dict()["strategy_notes"] == report.strategy_notes


def test_auto_prefetches_across_a_network_for_several_processes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"2 1 0:4 / {tmp_path.resolve()} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr("weightlift.filesystem._MOUNTS", str(table))
    make_cold(paths_of(folder))
    assert load(folder).strategy_notes[0].startswith("no prefetch: ")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    make_cold(paths_of(folder))
    with caplog.at_level(logging.INFO, logger="weightlift"):
        report = load(folder)
    note, reads, _ = report.strategy_notes
    assert reads.startswith("reads of up to 8.00 MiB, 32 in flight")
    assert note.startswith(f"prefetch: {tmp_path.resolve()} is nfs4, a network file system, and its 24.00 MiB fit into")
    assert note in caplog.messages
    assert report.buffered_bytes == report.bytes_read

    monkeypatch.setattr(prefetch, "available_bytes", lambda: 25 * MiB)
    caplog.clear()
    report = load(folder)
    note = report.strategy_notes[0]
    assert note.startswith("no prefetch: ")
    assert [record.levelno for record in caplog.records if record.getMessage() == note] == [logging.WARNING]


def test_auto_prefetches_only_files_that_are_across_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [
        type("Shard", (), {"path": f"/{device}/{number}", "device": device, "size": MiB})
        for number, device in enumerate("aba")
    ]
    kinds = {"a": "ext4", "b": "nfs"}
    monkeypatch.setattr(prefetch, "mount_of", lambda path: Mount(f"/{path[1]}", kinds[path[1]]))
    monkeypatch.setattr(prefetch, "local_rank", lambda: (0, 2))
    chosen, (note,) = prefetch._to_prefetch(LoadConfig().resolve({}), shards)
    assert chosen == [shards[1]]
    assert "/b is nfs" in note
    assert "1.00 MiB fit" in note


@pytest.mark.parametrize(
    "strategy", ["auto", "lazy", "buffered", "eager", pytest.param("direct", marks=pytest.mark.direct_io)]
)
def test_a_local_file_is_not_prefetched_and_the_report_says_why(folder: Path, strategy: Any) -> None:
    (note,) = load(folder, strategy=strategy).strategy_notes
    assert note.startswith("no prefetch: ")
    assert ("not a network file system" if strategy == "auto" else f"the strategy is {strategy}") in note


def test_a_load_that_reads_nothing_decides_nothing(folder: Path) -> None:
    with open_checkpoint(folder, config=LoadConfig(strategy="prefetch")) as checkpoint:
        pass
    assert checkpoint.report.strategy_notes == []


def test_lazy_reads_what_is_asked_for_through_the_cache(folder: Path) -> None:
    make_cold(paths_of(folder))
    with open_checkpoint(folder, config=LoadConfig(strategy="lazy")) as checkpoint:
        torch.empty(FILE_BYTES // 4, dtype=torch.int32).copy_(checkpoint["w1"])
    assert checkpoint.report.buffered_bytes == checkpoint.report.bytes_read
    assert [cached_share(path) > 0.5 for path in paths_of(folder)] == [False, True, False]


def test_eager_reads_a_file_whole_before_its_first_tensor_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    real = prefetch.read_into_cache

    def spy(path: str, **options: Any) -> None:
        read.append(Path(path))
        real(path, **options)

    monkeypatch.setattr(prefetch, "read_into_cache", spy)
    make_cold(paths_of(folder))
    first, second, third = paths_of(folder)
    with open_checkpoint(folder, config=LoadConfig(strategy="eager")) as checkpoint:
        assert checkpoint["w1"][0].item() == 1  # a value, read on the spot
        assert read == [second]
        assert cached_share(second) == 1
        assert cached_share(third) < 1
        torch.empty(FILE_BYTES // 4, dtype=torch.int32).copy_(checkpoint["w2"])
        torch.empty(FILE_BYTES // 4, dtype=torch.int32).copy_(checkpoint["w1"])
        checkpoint.run()
    assert read == [second, third]
    assert cached_share(first) < 1
    assert checkpoint.report.buffered_bytes == checkpoint.report.bytes_read


def test_eager_reads_before_what_is_looked_at_early(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(prefetch, "read_into_cache", lambda path, **_: read.append(Path(path).name))
    with open_checkpoint(folder, config=LoadConfig(strategy="eager")) as checkpoint:
        into = torch.empty(FILE_BYTES // 4, dtype=torch.int32)
        into.copy_(checkpoint["w2"])
        assert into[3].item() == 5
        assert read == ["model-2.safetensors"]


def test_eager_goes_on_where_a_file_can_not_be_read_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str, **_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(prefetch, "read_into_cache", fail)
    load(folder, strategy="eager")
    assert caplog.text.count("it could not be read ahead: Input/output error") == NUM_FILES


def test_torchao_needs_a_stream(folder: Path) -> None:
    config = LoadConfig(strategy="torchao")
    for use in (open_checkpoint, load_file):
        with pytest.raises(ValueError, match=r"strategy is 'torchao'.*iter_weights"):
            use(folder, config=config)
    with pytest.raises(ValueError, match=r"strategy is 'torchao'.*iter_weights"):
        fast_load({}, folder, config=config)
