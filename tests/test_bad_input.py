"""Whatever is wrong with files, storage or rights: one clear error or a fallback that is told, never wrong values."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
import safetensors.torch
import torch
from processes import REFUSE_IO_URING, command, environment, faulty_libc, run_python
from torch import Tensor

import weightlift
from weightlift import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    LoadConfig,
    fast_load,
    load_file,
    open_checkpoint,
)

__all__ = ["faulty_libc"]  # a fixture

MiB = 1 << 20
WriteCheckpoint = Callable[..., Path]
STRATEGIES = ["buffered", pytest.param("direct", marks=pytest.mark.direct_io)]


def write_large(path: Path, num_bytes: int = 24 * MiB) -> dict[str, Tensor]:
    """Three tensors."""
    tensors = {name: torch.arange(num_bytes // 12, dtype=torch.int32) + i for i, name in enumerate("abc")}
    safetensors.torch.save_file(tensors, path)
    return tensors


def untouched(tensors: dict[str, Tensor]) -> bool:
    return not any(tensor.any() for tensor in tensors.values())


# ---- found before reading


def replaced(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


BAD_SHARDS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "cut in the header": (lambda path: os.truncate(path, 60), ["header ends at byte", "60 bytes", "truncated"]),
    "cut at a tensor": (
        lambda path: os.truncate(path, path.stat().st_size - 8 * MiB),
        ["c: data_offsets", "exceed the file's", "truncated"],
    ),
    "cut inside a tensor": (
        lambda path: os.truncate(path, path.stat().st_size - 12 * MiB),
        ["b: data_offsets", "exceed the file's", "truncated"],
    ),
    "empty": (lambda path: os.truncate(path, 0), ["empty file"]),
    "garbage": (replaced(b"\x10" + b"\0" * 7 + b"garbage" * 100), ["starts with '{'", "corrupt"]),
    "git-lfs pointer": (
        replaced(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        ["git-lfs pointer", "git lfs pull"],
    ),
    "web page": (replaced(b"<!DOCTYPE html><html><body>404</body></html>"), ["HTML", "download it again"]),
    "gone": (lambda path: path.unlink(), ["missing", "model-00002"]),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), ["regular file", "directory"]),
}


@pytest.mark.parametrize("damage", BAD_SHARDS)
def test_bad_shard_is_one_error_before_a_byte_is_read(tmp_path: Path, damage: str) -> None:
    spoil, words = BAD_SHARDS[damage]
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    hostile.write_tensors(first, "w")
    write_large(second)
    index = hostile.write_index(
        tmp_path / "model.safetensors.index.json", {"w": first.name, **dict.fromkeys("abc", second.name)}
    )
    spoil(second)
    into = {"w": torch.zeros(4, dtype=torch.uint8), **{name: torch.zeros(2 * MiB, dtype=torch.int32) for name in "abc"}}
    for load in (lambda: load_file(tmp_path), lambda: load_file(index), lambda: fast_load(into, tmp_path)):
        with pytest.raises(CheckpointError) as caught:
            load()
        text = str(caught.value)
        assert text.startswith(str(index if damage == "gone" else second))
        for word in words:
            assert word in text
        assert "\n" not in text
    assert untouched(into)


def test_a_path_that_is_not_utf8_is_a_path(tmp_path: Path, capsys: Any) -> None:
    from weightlift.cli import main

    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors.torch.save({"w": torch.arange(4)}))
    assert torch.equal(weightlift.load_file(folder)["w"], torch.arange(4))
    for name in ("inspect", "plan", "load", "verify"):
        assert main([name, str(folder)]) == 0
    assert main(["load", str(folder), "--verify"]) == 1  # safetensors takes UTF-8 alone
    assert "safetensors, which it is compared with, does not read it" in capsys.readouterr().err


def test_index_that_names_an_absent_tensor_is_an_error(tmp_path: Path) -> None:
    hostile.write_tensors(tmp_path / "m.safetensors", "w")
    hostile.write_index(tmp_path / "model.safetensors.index.json", {"w": "m.safetensors", "v": "m.safetensors"})
    with pytest.raises(CheckpointError, match=r"index\.json: 1 of the 2 tensors .* v \(m\.safetensors\)"):
        load_file(tmp_path)


def test_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match=r"expected \*\.safetensors, .*found config\.json"):
        load_file(tmp_path)


AS_NOBODY = """
import os, resource, sys
import torch, weightlift
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others may enter; pytest's are for their owner alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_unreadable_file_is_an_error_with_its_errno(open_folder: Path) -> None:
    path = hostile.write_tensors(open_folder / "model.safetensors", "w")
    path.chmod(0)
    code = (
        AS_NOBODY
        + """
try:
    weightlift.load_file(sys.argv[1])
except weightlift.CheckpointReadError as error:
    print(error.errno, error.filename == sys.argv[1], error)
"""
    )
    out = run_python(code, path)
    assert out.startswith(f"{errno.EACCES} True {path}: ")
    assert "check the permissions" in out


# ---- files that change during the load


def copy_all(path: Path, into: dict[str, Tensor], meanwhile: Callable[[], object]) -> None:
    """Loads, with something done after the header has been read."""
    with open_checkpoint(path) as checkpoint:
        meanwhile()
        for name, tensor in into.items():
            tensor.copy_(checkpoint[name])


def test_file_truncated_between_header_and_data_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    into = {name: torch.zeros_like(tensor) for name, tensor in write_large(path).items()}
    with pytest.raises(CheckpointReadError) as caught:
        copy_all(path, into, lambda: os.truncate(path, 10 * MiB))
    assert caught.value.path == str(path)
    assert caught.value.reason == "FileChanged"
    assert "load again" in str(caught.value)
    assert caught.value.incomplete == ["a", "b", "c"]
    assert untouched(into)


def replace(path: Path) -> None:
    write_large(path.with_name("other"))
    os.replace(path.with_name("other"), path)


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())


@pytest.mark.parametrize("change", [replace, rewrite, Path.unlink])
def test_file_that_became_another_is_an_error(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "model.safetensors"
    into = {name: torch.zeros_like(tensor) for name, tensor in write_large(path).items()}
    with pytest.raises(CheckpointReadError, match=r"changed|No such file") as caught:
        copy_all(path, into, lambda: change(path))
    assert caught.value.path == str(path)
    assert untouched(into)


def test_failure_that_is_ignored_comes_again_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    into = {name: torch.zeros_like(tensor) for name, tensor in write_large(path).items()}

    def ignore() -> None:
        with open_checkpoint(path) as checkpoint:
            os.truncate(path, 10 * MiB)
            into["a"].copy_(checkpoint["a"])
            with contextlib.suppress(CheckpointReadError):
                checkpoint.run()
            into["b"].copy_(checkpoint["b"])

    with pytest.raises(CheckpointReadError, match="has changed"):
        ignore()
    assert untouched(into)


def slow(path: Path, *, read_ms: int, **more: object) -> dict[str, object]:
    """Variables that make a load slow: reads of 1 MiB by one thread, each taking so long."""
    return {
        "FAULT_PATH": path.name,
        "FAULT_FROM": 1 << 16,
        "FAULT_READ_MS": read_ms,
        "WEIGHTLIFT_BACKEND": "pread",
        "WEIGHTLIFT_QUEUE_DEPTH": 1,
        "WEIGHTLIFT_NUM_THREADS": 1,
        "WEIGHTLIFT_CHUNK_BYTES": MiB,
        **more,
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_file_truncated_while_it_is_read_is_an_error(
    tmp_path: Path, strategy: str, faulty_libc: dict[str, object]
) -> None:
    path = tmp_path / "model.safetensors"
    write_large(path)
    code = """
    import os, sys, threading, weightlift, torch
    threading.Timer(0.2, os.truncate, (sys.argv[1], 16_000_001)).start()
    try:
        weightlift.load_file(sys.argv[1])
    except weightlift.CheckpointReadError as error:
        print(error.reason, error.tensor, error.incomplete, error)
    """
    out = run_python(code, path, env={**faulty_libc, **slow(path, read_ms=30, WEIGHTLIFT_STRATEGY=strategy)})
    assert out.startswith("FileTruncated b ['a', 'b', 'c'] ")
    assert f"{path}: b: the file ended at byte 16000001" in out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_error_of_the_device_is_an_error_with_its_place(
    tmp_path: Path, strategy: str, faulty_libc: dict[str, object]
) -> None:
    path = tmp_path / "model.safetensors"
    write_large(path)
    code = """
    import sys, weightlift, torch
    try:
        weightlift.load_file(sys.argv[1])
    except weightlift.CheckpointReadError as error:
        print(error.errno, error.reason, error.tensor, error.path == sys.argv[1], error)
    """
    faults = slow(path, read_ms=0, FAULT_FROM=20 * MiB, FAULT_READ_ERRNO=errno.EIO, WEIGHTLIFT_STRATEGY=strategy)
    out = run_python(code, path, env={**faulty_libc, **faults})
    assert out.startswith(f"{errno.EIO} ReadFailed c True {path}: c: reading at byte ")
    assert "Input/output error" in out


# ---- what the machine refuses

LOAD_AND_TELL = """
import torch
def load_and_tell(path, **options):
    with weightlift.open_checkpoint(path, config=weightlift.LoadConfig(**options)) as checkpoint:
        into = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in checkpoint.items()}
    report = weightlift.fast_load(into, path, config=weightlift.LoadConfig(**options))
    import safetensors.torch
    expected = safetensors.torch.load_file(path)
    assert all(torch.equal(into[name], expected[name]) for name in expected)
    return report
"""


@pytest.mark.direct_io
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_refused_io_uring_is_a_fallback_that_is_told(tmp_path: Path, error: int) -> None:
    path = tmp_path / "model.safetensors"
    write_large(path)
    code = (
        REFUSE_IO_URING
        + LOAD_AND_TELL
        + """
import weightlift
refuse_io_uring(int(sys.argv[2]))
report = load_and_tell(sys.argv[1], strategy="direct")
assert [file.reader for file in report.files] == ["pread"], report.files
print(*report.fallbacks, sep="; ")
try:
    weightlift.load_file(sys.argv[1], config=weightlift.LoadConfig(strategy="direct", backend="io_uring"))
except weightlift.CheckpointError as error:
    print(error.reason, error)
"""
    )
    fallback, refusal = run_python(code, path, error).splitlines()
    assert fallback.startswith("reading with threads instead of io_uring: ")
    assert "seccomp" in fallback
    assert refusal.startswith('Unavailable backend="io_uring" is not to be had here: ')
    assert "seccomp" in refusal
    assert 'backend="auto"' in refusal


def test_fallback_is_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_large(path)
    code = (
        REFUSE_IO_URING
        + """
import io, logging
import weightlift
logging.basicConfig(stream=(stderr := io.StringIO()))
refuse_io_uring(errno.EPERM)
with weightlift.open_checkpoint(sys.argv[1], config=weightlift.LoadConfig(strategy="direct")) as checkpoint:
    tensors = {name: tensor.clone() for name, tensor in checkpoint.items()}
    for tensor in tensors.values():
        tensor.sum()
checkpoint.report, checkpoint.report
print(stderr.getvalue())
"""
    )
    assert run_python(code, path).count("reading with threads instead of io_uring") == 1


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EPERM])
def test_refused_direct_io(tmp_path: Path, error: int, faulty_libc: dict[str, object]) -> None:
    path = tmp_path / "model.safetensors"
    write_large(path)
    code = (
        LOAD_AND_TELL
        + """
import sys, weightlift
(file,) = load_and_tell(sys.argv[1]).files
print(file.strategy, file.reason, sep=": ")
try:
    weightlift.load_file(sys.argv[1], config=weightlift.LoadConfig(strategy="direct"))
except weightlift.CheckpointError as error:
    print(error.reason, error)
"""
    )
    faults = {"FAULT_PATH": path.name, "FAULT_DIRECT_ERRNO": error}
    told, refusal = run_python(code, path, env={**faulty_libc, **faults}).splitlines()
    reason = "the file system refuses O_DIRECT" if error == errno.EINVAL else "Operation not permitted"
    assert told.startswith("buffered: ")
    assert reason in told
    assert refusal.startswith(f'Unavailable {path}: strategy="direct" is not to be had here: ')
    assert reason in refusal
    assert 'strategy="auto"' in refusal


def test_without_locked_memory_reads_go_on_unregistered(open_folder: Path) -> None:
    path = open_folder / "model.safetensors"
    write_large(path)
    path.chmod(0o644)
    code = (
        AS_NOBODY
        + LOAD_AND_TELL
        + """
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
for _ in range(2):
    report = load_and_tell(sys.argv[1])
    assert report.bytes_needed == 24 << 20
"""
    )
    run_python(code, path)


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    for i in range(1000):
        hostile.write_tensors(tmp_path / f"{i}.safetensors", f"w{i}", fill=i % 256)
    code = """
    import resource, sys, weightlift, torch
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    tensors = weightlift.load_file(sys.argv[1])
    assert all(tensors[f"w{i}"].tolist() == [i % 256] * 4 for i in range(1000))
    """
    run_python(code, tmp_path)


def test_too_little_memory_is_a_memory_error(tmp_path: Path) -> None:
    header = {name: hostile.tensor("F32", [128 * MiB], [i << 29, (i + 1) << 29]) for i, name in enumerate("ab")}
    path = hostile.write(tmp_path / "model.safetensors", header)
    os.truncate(path, path.stat().st_size + (1 << 30))
    code = """
    import resource, sys, weightlift, torch
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)
    try:
        weightlift.load_file(sys.argv[1])
    except MemoryError as error:
        print(error)
    """
    assert "1.00 GiB" in run_python(code, path)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("STRATEGY", "fast"),
        ("BACKEND", "mmap"),
        ("QUEUE_DEPTH", "0"),
        ("CHUNK_BYTES", "5"),
        ("STAGING_BYTES", "much"),
        ("NUM_THREADS", "-1"),
        ("ADVISE_HUGEPAGES", "maybe"),
        ("COVERAGE_WAIT_SECONDS", "nan"),
    ],
)
def test_bad_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")
    monkeypatch.setenv(f"WEIGHTLIFT_{variable}", value)
    into = {"w": torch.empty(4, dtype=torch.uint8)}
    for load in (lambda: load_file(path), lambda: fast_load(into, path), lambda: open_checkpoint(path)):
        with pytest.raises(ValueError, match=f"WEIGHTLIFT_{variable} is '{value}'"):
            load()


@pytest.mark.parametrize(
    "options",
    [
        {"queue_depth": 4096},
        {"queue_depth": 1, "num_threads": 1},
        {"num_threads": 64, "backend": "pread"},
        {"chunk_bytes": 65536, "staging_bytes": MiB},
        {"chunk_bytes": 100_001},
        {"chunk_bytes": 1 << 30, "staging_bytes": 1 << 30},
        {"staging_bytes": MiB},
        {"staging_bytes": MiB + 1},
        {"merge_gap_bytes": 1 << 30},
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_accepted_setting_loads(tmp_path: Path, options: dict[str, Any], strategy: Any) -> None:
    path = tmp_path / "model.safetensors"
    expected = write_large(path)
    loaded = load_file(path, config=LoadConfig(strategy=strategy, **options))
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


# ---- Ctrl-C


def interrupt_when_reading(arguments: list[str], env: dict[str, object]) -> tuple[int, float, str]:
    """Sends SIGINT once it reads. Gives its exit code, the seconds from there to its end, and its output."""
    with subprocess.Popen(
        arguments, env=environment(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        threads = Path(f"/proc/{process.pid}/task")
        deadline = time.monotonic() + 60
        while not any((thread / "comm").read_text().startswith("wl-pread") for thread in threads.iterdir()):
            assert process.poll() is None, process.stdout and process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        out, _ = process.communicate(timeout=60)
        return process.returncode, time.monotonic() - started, out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ctrl_c_ends_a_load_at_the_next_read(tmp_path: Path, strategy: str, faulty_libc: dict[str, object]) -> None:
    path = tmp_path / "model.safetensors"
    write_large(path)
    code = """
    import sys, time, pathlib, threading, weightlift, torch
    into = torch.empty(2 << 20, dtype=torch.int32)
    try:
        with weightlift.open_checkpoint(sys.argv[1]) as checkpoint:
            into.copy_(checkpoint["a"])
    except KeyboardInterrupt:
        names = [(task / "comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
        print("interrupted", [name for name in names if name.startswith("wl-")], flush=True)
        import os
        os._exit(7)
    """
    env = {**faulty_libc, **slow(path, read_ms=200, WEIGHTLIFT_STRATEGY=strategy)}
    exit_code, seconds, out = interrupt_when_reading(command(code, path), env)
    assert (exit_code, out) == (7, "interrupted []\n")
    assert seconds < 5  # the whole load would take 25: of its reads, those that have begun are waited for


def test_ctrl_c_ends_the_command_with_130(tmp_path: Path, faulty_libc: dict[str, object]) -> None:
    path = tmp_path / "model.safetensors"
    write_large(path)
    exit_code, _, out = interrupt_when_reading(
        [sys.executable, "-m", "weightlift", "load", str(path)], {**faulty_libc, **slow(path, read_ms=200)}
    )
    assert (exit_code, out) == (130, "weightlift: interrupted\n")


# ---- the command line


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_command_without_a_gpu_refuses_cuda(tmp_path: Path, capsys: Any, arguments: list[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    from weightlift.cli import main

    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")
    assert main(["load", "--device", "cuda", *arguments, str(path)]) == 2
    captured = capsys.readouterr()
    assert "cuda" in (captured.out + captured.err).lower()


def test_closed_checkpoint_says_so(tmp_path: Path) -> None:
    path = hostile.write_tensors(tmp_path / "model.safetensors", "w")
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint["w"]
    with pytest.raises(RuntimeError, match="w: its checkpoint has been closed"):
        tensor.sum()
    with pytest.raises(RuntimeError, match="has been closed"):
        checkpoint.__enter__()
    assert weightlift.CheckpointTensor is type(tensor)
