"""Loads in processes of their own: with fewer rights, a failing C library, or to be interrupted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
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
