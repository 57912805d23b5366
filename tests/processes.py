"""Loads in processes of their own: with fewer rights, a failing C library, or to be interrupted."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Refuses io_uring_setup to the process, with the errno given, as a container's seccomp profile does.
REFUSE_IO_URING = """
import ctypes, errno, struct, sys
def refuse_io_uring(error):
    def op(code, jt, jf, k):
        return struct.pack("HBBI", code, jt, jf, k)
    # load the number of the call; io_uring_setup (425 on every architecture): fail with `error`; else allow
    program = op(0x20, 0, 0, 0) + op(0x15, 0, 1, 425) + op(0x06, 0, 0, 0x00050000 | error) + op(0x06, 0, 0, 0x7FFF0000)
    filters = ctypes.create_string_buffer(program, len(program))
    libc = ctypes.CDLL(None, use_errno=True)
    class Fprog(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    fprog = Fprog(4, ctypes.addressof(filters))
    assert libc.prctl(38, 1, 0, 0, 0) == 0, ctypes.get_errno()  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(fprog), 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, filter
"""


def command(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]


def environment(extra: dict[str, object] | None = None) -> dict[str, str]:
    return {**os.environ, **{name: str(value) for name, value in (extra or {}).items()}}


def run_python(code: str, *arguments: object, env: dict[str, object] | None = None) -> str:
    """Runs the code; fails the test unless it ends well. Returns what it printed."""
    done = subprocess.run(
        command(code, *arguments), env=environment(env), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def faulty_libc(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The environment that preloads tests/faulty_libc.c; what fails is up to the variables that it names."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler `cc` to build tests/faulty_libc.c with")
    library = tmp_path_factory.mktemp("faulty") / "faulty_libc.so"
    source = Path(__file__).with_name("faulty_libc.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True)
    return {"LD_PRELOAD": library}


def run_as_nobody(path: Path, program: str, *, memlock: int | str | None = None) -> str:
    """Runs Python code as a user who may read the file, and not write it. `memlock`: a limit, or `soft:hard`."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    limit = [] if memlock is None else ["prlimit", f"--memlock={memlock}"]
    command = [*limit, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c", program]
    try:
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120, cwd="/")
    except FileNotFoundError:
        pytest.skip("no setpriv or prlimit")
    if "ModuleNotFoundError" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("somebody else may not read Python or the package here")
    if "failed to set the MEMLOCK" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A memory cgroup, of version 1 or 2: its file of processes. Skips the test where none can be made."""
    version_1 = Path("/sys/fs/cgroup/memory")
    root = version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    group = root / f"weightlift-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup: {error.strerror}")
    try:
        try:
            (group / ("memory.limit_in_bytes" if root == version_1 else "memory.max")).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no memory cgroup: {error.strerror}")
        yield group / "cgroup.procs"
    finally:
        for _ in range(100):  # its last process may still be ending
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)
