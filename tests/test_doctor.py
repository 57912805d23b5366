"""`weightlift doctor` on hosts that lack something: each test takes it away and looks at what is said."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filesystems import Fuse, mounted
from processes import REFUSE_IO_URING, command, memory_cgroup, run_as_nobody, run_python

from weightlift import _C
from weightlift.cli import main
from weightlift.doctor import cuda, storage

Found = dict[tuple[str, str], dict[str, Any]]
Output = pytest.CaptureFixture[str]
MiB = 1 << 20

DOCTOR = """
import sys
from weightlift import _C
from weightlift.cli import main
sys.exit(main(["doctor", "--json", *sys.argv[1:]]))
"""


def found_in(output: str) -> Found:
    return {(finding["group"], finding["subject"]): finding for finding in json.loads(output)["findings"]}


def doctor(capsys: Output, *paths: object, exit_code: int = 0) -> Found:
    assert main(["doctor", "--json", *map(str, paths)]) == exit_code
    return found_in(capsys.readouterr().out)


def test_the_document_has_a_fixed_form(tmp_path: Path, capsys: Output) -> None:
    assert main(["doctor", "--json", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"machine", "findings"}
    assert {"weightlift", "processor", "cores", "memory_bytes", "kernel", "instructions"} <= set(document["machine"])
    for finding in document["findings"]:
        assert set(finding) == {"group", "subject", "status", "summary", "details", "effect", "remedy"}
        assert finding["status"] in ("ok", "limited", "missing", "broken")
        assert finding["summary"]
        if finding["status"] == "ok":
            assert not finding["effect"]
            assert not finding["remedy"]
    subjects = [(finding["group"], finding["subject"]) for finding in document["findings"]]
    assert subjects[:6] == [
        ("host", name) for name in ("io_uring", "registered buffers", "huge pages", "memory", "open files", "settings")
    ]
    assert subjects[6:10] == [
        (str(tmp_path), name) for name in ("file system", "direct I/O", "page cache", "RWF_DONTCACHE")
    ]
    assert {("CUDA", "build"), ("CUDA", "driver"), ("CUDA", "torch")} <= set(subjects[10:])
    assert list(tmp_path.iterdir()) == []  # what was tried with is gone


def test_folders_that_are_called_as_other_groups_are_groups_of_their_own(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("host", "CUDA"):
        Path(name).mkdir()
    found = doctor(capsys, "host", "CUDA")
    groups = list(dict.fromkeys(group for group, _ in found))
    assert groups == ["host", "./host", "./CUDA", "CUDA"]
    assert ("host", "file system") not in found
    assert ("CUDA", "file system") not in found
    assert main(["doctor", "host", "CUDA"]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines()[1:] if line and not line.startswith(" ")]
    assert headings == groups


def test_the_table_has_a_remedy_below_what_is_limited(tmp_path: Path, capsys: Output) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        assert main(["doctor", str(tmp_path)]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    lines = capsys.readouterr().out.splitlines()
    assert "weightlift" in lines[0]
    row = next(number for number, line in enumerate(lines) if "open files" in line)
    assert lines[row].split()[0] == "limited"
    assert "up to 100 of its files open (RLIMIT_NOFILE: 400)" in lines[row]
    assert lines[row + 1].strip().startswith("effect: ")
    assert lines[row + 2].strip().startswith("remedy: ulimit -n ")
    assert max(map(len, lines)) <= 140


@pytest.mark.io_uring
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_seccomp_filter_that_refuses_io_uring_is_named(tmp_path: Path, error: int) -> None:
    code = f"{REFUSE_IO_URING}\nimport weightlift\nrefuse_io_uring({error})\n{DOCTOR}"
    found = found_in(run_python(code, tmp_path))
    ring = found["host", "io_uring"]
    assert ring["status"] == "missing"
    assert errno.errorcode[error] in ring["summary"]
    assert "seccomp" in ring["summary"]
    assert ring["details"]["seccomp"] == "filter"
    assert "docker run --security-opt seccomp=" in ring["remedy"]
    assert found["host", "registered buffers"]["status"] == "missing"


@pytest.mark.io_uring
def test_the_sysctl_that_forbids_io_uring_is_named(tmp_path: Path) -> None:
    """In a mount namespace of its own, where the sysctl reads as if it were set."""
    sysctl, value = "/proc/sys/kernel/io_uring_disabled", tmp_path / "value"
    value.write_text("1\n")
    mount = f"mount --bind {value} {sysctl}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace, or no kernel.io_uring_disabled")
    arguments = command(f"{REFUSE_IO_URING}\nrefuse_io_uring(errno.EPERM)\n{DOCTOR}", tmp_path)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    ring = found_in(done.stdout)["host", "io_uring"]
    assert ring["status"] == "missing"
    assert "kernel.io_uring_disabled=1" in ring["summary"]
    assert ring["details"]["io_uring_disabled"] == "1"
    assert "sysctl kernel.io_uring_disabled=0" in ring["remedy"]
    assert "kernel.io_uring_group" in ring["remedy"]


def test_a_reader_that_is_ruled_out_by_a_variable_is_named(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTLIFT_BACKEND", "pread")
    monkeypatch.setenv("WEIGHTLIFT_STRATEGI", "direct")
    found = doctor(capsys, tmp_path)
    if found["host", "io_uring"]["details"]["refusal"] is None:
        assert found["host", "io_uring"]["status"] == "limited"
        assert found["host", "io_uring"]["remedy"] == "unset WEIGHTLIFT_BACKEND"
    assert found["host", "settings"]["details"]["variables"] == {"WEIGHTLIFT_BACKEND": "pread"}
    assert found["host", "settings"]["status"] == "limited"
    assert "WEIGHTLIFT_STRATEGI is not a setting" in found["host", "settings"]["effect"]


def test_a_bad_variable_is_wrong_usage(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTLIFT_QUEUE_DEPTH", "deep")
    assert main(["doctor", "--json", str(tmp_path)]) == 2
    assert "WEIGHTLIFT_QUEUE_DEPTH" in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.fixture
def readable_file() -> Iterator[Path]:
    """Root's, in a folder that others may enter and not write to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder) / "model.safetensors"
        file.write_bytes(bytes(MiB))
        file.chmod(0o644)
        yield file


@pytest.mark.io_uring
@pytest.mark.parametrize(
    ("memlock", "staging", "remedy"),
    [
        (f"{3 * MiB}:{3 * MiB}", 256 * MiB, "raise the hard limit: memlock"),
        (f"{3 * MiB}:{8 * MiB}", 4 * MiB, "ulimit -l 5120 (KiB)"),  # those 4 MiB and 1 more
    ],
)
def test_an_ordinary_user_is_told_of_little_memory_to_lock_and_of_files_of_others(
    readable_file: Path, monkeypatch: pytest.MonkeyPatch, memlock: str, staging: int, remedy: str
) -> None:
    monkeypatch.setenv("WEIGHTLIFT_STAGING_BYTES", str(staging))
    found = found_in(run_as_nobody(readable_file, DOCTOR, memlock=memlock))
    buffers = found["host", "registered buffers"]
    assert buffers["details"]["error"] == "ENOMEM"
    assert buffers["details"]["memlock_soft_bytes"] == int(memlock.split(":")[0])
    assert not buffers["details"]["cap_ipc_lock"]
    assert buffers["details"]["registered_buffers"] < buffers["details"]["wanted_buffers"] == staging // (2 * MiB)
    assert buffers["status"] == "limited"
    assert remedy in buffers["remedy"]
    page_cache = found[str(readable_file), "page cache"]
    assert page_cache["status"] == "limited"
    assert page_cache["details"]["method"] == "unknown"


@pytest.mark.io_uring
def test_a_ring_that_no_memory_may_be_locked_for_is_told(readable_file: Path) -> None:
    ring = found_in(run_as_nobody(readable_file, DOCTOR, memlock=0))["host", "io_uring"]
    if ring["status"] != "ok":  # kernels differ in what they count
        assert "ENOMEM" in ring["summary"]
        assert "ulimit -l" in ring["remedy"]


def test_huge_pages_that_are_switched_off_are_missed(tmp_path: Path, capsys: Output) -> None:
    if doctor(capsys, tmp_path)["host", "huge pages"]["details"]["got"] == 0:
        pytest.skip("this host gives no huge pages")
    libc, set_thp_disable = ctypes.CDLL(None), 41
    assert libc.prctl(set_thp_disable, 1, 0, 0, 0) == 0
    try:
        pages = doctor(capsys, tmp_path)["host", "huge pages"]
    finally:
        assert libc.prctl(set_thp_disable, 0, 0, 0, 0) == 0
    assert pages["status"] == "missing"
    assert pages["details"]["got"] == 0
    assert not pages["details"]["allowed_to_process"]
    assert "PR_SET_THP_DISABLE" in pages["remedy"]


def test_a_control_group_that_leaves_little_memory_is_named(tmp_path: Path) -> None:
    code = f'import sys\nwith open(sys.argv.pop(1), "w") as processes:\n    processes.write("0")\n{DOCTOR}'
    with memory_cgroup(700 * MiB) as processes:
        found = found_in(run_python(code, processes, tmp_path))
        memory = found["host", "memory"]
        assert memory["status"] == "limited"
        assert str(processes.parent) in memory["summary"]
        assert memory["details"]["group_headrooms"][str(processes.parent)] < 700 * MiB
        assert memory["details"]["staging_bytes"] < 256 * MiB
        assert "docker run --memory" in memory["remedy"]


def test_processes_of_one_machine_share_what_is_divided(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    settings = doctor(capsys, tmp_path)["host", "settings"]
    assert "divided by 8 (LOCAL_WORLD_SIZE)" in settings["summary"]
    assert settings["details"]["local_rank"] == 3
    assert settings["details"]["staging_bytes"] == 32 * MiB
    assert settings["details"]["queue_depth"] == 2


@pytest.mark.parametrize("rank", [None, "8", "-1", "x"])
def test_ranks_that_are_passed_over_are_told(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, rank: str | None
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    settings = doctor(capsys, tmp_path)["host", "settings"]
    assert settings["status"] == "limited"
    assert "LOCAL_WORLD_SIZE=8 is passed over" in settings["effect"]


@pytest.mark.parametrize("kind", ["tmpfs", "overlayfs", "ext4 with sectors of 4096", "btrfs", "fuse"])
def test_file_systems_are_told_apart(kind: str, tmp_path: Path, capsys: Output) -> None:
    with mounted(kind, tmp_path / "fs") as folder:
        if kind == "fuse":  # read-only, from here on
            (folder.parent / "behind" / "model.safetensors").write_bytes(bytes(MiB))
        found = doctor(capsys, folder)
    file_system, direct = found[str(folder), "file system"], found[str(folder), "direct I/O"]
    assert file_system["details"]["mount_point"] == str(folder)
    assert file_system["details"]["is_network"] == (kind == "fuse")
    assert ("network" in file_system["summary"]) == (kind == "fuse")
    if kind == "tmpfs":
        assert direct["status"] == "ok"
        assert "lie in memory" in direct["summary"]
    elif kind == "ext4 with sectors of 4096":
        assert direct["status"] == "ok"
        assert direct["details"]["told"]
        assert "offset 4096 B (as the file system says)" in direct["summary"]
    elif kind == "btrfs":
        assert not direct["details"]["told"]
    elif kind == "overlayfs":
        assert found[str(folder), "page cache"]["details"]["method"] == "mincore"
        assert found[str(folder), "RWF_DONTCACHE"]["status"] == "missing"


def test_direct_reads_that_are_refused_are_missed(tmp_path: Path, capsys: Output) -> None:
    direct = doctor(capsys, "/proc/self/status")["/proc/self/status", "direct I/O"]
    assert direct["status"] == "missing"
    assert "O_DIRECT" in direct["summary"]
    assert "ext4" in direct["remedy"]


def test_a_folder_is_judged_by_its_weights(tmp_path: Path, capsys: Output) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (tmp_path / "blob").write_bytes(bytes(MiB))
    (snapshot / "model.safetensors").symlink_to(tmp_path / "blob")
    found = doctor(capsys, tmp_path)
    assert found[str(tmp_path), "file system"]["details"]["file"] == str(snapshot / "model.safetensors")


def test_a_folder_that_is_full_is_not_broken(tmp_path: Path, capsys: Output) -> None:
    with mounted("tmpfs", tmp_path / "fs") as folder:
        (folder / "config.json").write_text("{}")
        (folder / "around").symlink_to("around")
        with (folder / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(bytes(MiB)):
                pass
        found = doctor(capsys, folder)
    assert found[str(folder), "file system"]["status"] == "ok"
    assert found[str(folder), "page cache"]["status"] == "ok"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/nowhere/at/all", "No such file or directory"),
        ("/dev/null", "neither a file nor a folder"),
        ("/sys/fs", "there is no file to try, and none can be written"),
    ],
)
def test_a_path_that_nothing_can_be_loaded_from_is_broken_and_the_rest_is_told(
    path: str, problem: str, tmp_path: Path, capsys: Output
) -> None:
    found = doctor(capsys, path, tmp_path, exit_code=1)
    assert found[path, "file system"]["status"] == "broken"
    assert found[path, "file system"]["summary"] == problem
    assert found[str(tmp_path), "file system"]["status"] == "ok"
    assert ("CUDA", "build") in found


def test_paths_that_are_not_utf8_are_looked_at(tmp_path: Path, capsys: Output) -> None:
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    folder.mkdir()
    found = doctor(capsys, folder)
    assert found[str(folder), "file system"]["status"] == "ok"
    assert main(["doctor", str(folder)]) == 0
    assert "\\udcff" in capsys.readouterr().out


def test_storage_that_does_not_answer_is_broken(tmp_path: Path) -> None:
    with Fuse(tmp_path / "behind", tmp_path / "mounted") as fuse:
        (fuse.behind / "model.safetensors").write_bytes(bytes(MiB))
        fuse.fails("hang_open")
        (found,) = storage.examine_place(str(fuse.folder), patience_seconds=0.3)
        fuse.fails()
    assert found.status == "broken"
    assert "has not answered within 0.3 s" in found.summary


def test_without_paths_the_usual_places_are_looked_at_once_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert storage.default_places() == [str(tmp_path)]
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no file system of its own")
    hub = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        monkeypatch.setenv("HF_HUB_CACHE", str(hub))
        assert storage.default_places() == [str(tmp_path), str(hub)]
    finally:
        shutil.rmtree(hub)


@pytest.mark.parametrize(
    ("capability", "architectures", "code"),
    [
        ((8, 0), "80-real 90-real 100", "binary"),
        ((8, 9), "80-real 90-real 100", "binary"),
        ((9, 0), "80-real 90-real 100", "binary"),
        ((10, 3), "80-real 90-real 100", "binary"),
        ((12, 0), "80-real 90-real 100", "PTX"),
        ((7, 5), "80-real 90-real 100", ""),
        ((8, 0), "86-real", ""),
        ((9, 0), "80-virtual", "PTX"),
        ((9, 0), "80-real", ""),
        ((9, 0), "90a-real", "binary"),
    ],
)
def test_a_build_has_binaries_or_ptx_for_a_device(capability: tuple[int, int], architectures: str, code: str) -> None:
    assert cuda.code_for(*capability, architectures) == code


def cuda_found(monkeypatch: pytest.MonkeyPatch, **info: object) -> dict[str, Any]:
    """What is said where the native part finds this of CUDA."""
    nothing = {
        "built": False,
        "architectures": "",
        "runtime_version": 0,
        "driver_version": 0,
        "error": "",
        "devices": [],
    }
    monkeypatch.setattr(cuda._C, "cuda_info", lambda: {**nothing, **info})
    return {finding.subject: finding for finding in cuda.examine_cuda()}


def test_a_build_without_cuda_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cuda_found(monkeypatch)
    assert found["build"].status == "missing"
    assert "nvcc" in found["build"].remedy
    assert "WEIGHTLIFT_CUDA=ON" in found["build"].remedy
    assert found["driver"].status == "missing"


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1 made of tests/fake_cuda_driver.c."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler `cc` to build tests/fake_cuda_driver.c with")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("fake_cuda_driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", folder / "libcuda.so.1", "-ldl"], check=True)
    return folder


@pytest.mark.skipif(not _C.cuda_info()["built"], reason="CUDA is not part of this build")
def test_a_driver_that_is_too_old_or_sees_no_device_is_told(fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
    from weightlift.doctor.cuda import examine_cuda
    driver = next(finding for finding in examine_cuda() if finding.subject == "driver")
    print(driver.status, driver.summary, driver.remedy, sep="\\n")
    """
    told = {}
    for version in (11040, 99000):
        env = {"LD_LIBRARY_PATH": fake_driver, "FAKE_CUDA_VERSION": version}
        told[version] = run_python(code, env=env).splitlines()
        assert told[version][0] == "missing"
    runtime = _C.cuda_info()["runtime_version"] // 1000
    assert told[11040][1] == f"serves CUDA 11.4, and this build needs CUDA {runtime}"
    assert f"a driver for CUDA {runtime}" in told[11040][2]
    assert told[99000][1] == "serves CUDA 99.0, but: no CUDA-capable device is detected"
    assert "CUDA_VISIBLE_DEVICES" in told[99000][2]


def test_devices_are_listed_with_what_the_build_has_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [
        {"name": name, "pci_bus_id": "", "compute_capability": capability, "memory_bytes": 80 << 30}
        for name, capability in (("H100", (9, 0)), ("B300", (12, 0)), ("T4", (7, 5)))
    ]
    found = cuda_found(
        monkeypatch,
        built=True,
        architectures="80-real 90-real 100",
        runtime_version=13000,
        driver_version=13010,
        devices=devices,
    )
    assert found["build"].summary.endswith("runtime 13.0, code for sm_80, sm_90, sm_100, PTX of compute_100")
    assert found["driver"].status == "ok"
    assert [found[f"device {i}"].status for i in range(3)] == ["ok", "limited", "missing"]
    assert found["device 0"].summary == "H100, 80.00 GiB, compute capability 9.0"
    assert "WEIGHTLIFT_CUDA_ARCHITECTURES=120" in found["device 1"].remedy
    assert "8.0" in found["device 2"].remedy


def test_gpus_without_a_driver_are_seen_on_the_bus(tmp_path: Path) -> None:
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x1002", "0x030000")):
        device = tmp_path / name
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    assert cuda.num_gpus(tmp_path) == 1
    assert cuda.num_gpus(tmp_path / "none") == 0
