"""File systems to load from: mounted for a test, and gone after it. Where one can't be had, the test is skipped.

Mounting needs root. Debian: apt-get install e2fsprogs xfsprogs btrfs-progs libfuse3-dev fuse3 (and a C compiler).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MiB = 1 << 20
KINDS = ("ext4", "ext4 with sectors of 4096", "xfs", "btrfs", "overlayfs", "tmpfs", "ramfs", "fuse")

# Of the images, which are sparse: what mkfs asks for at least.
_IMAGE_BYTES = {"ext4": 64 * MiB, "xfs": 320 * MiB, "btrfs": 128 * MiB}
_PACKAGES = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs", "losetup": "mount"}


@contextlib.contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """Mounts an empty file system of one of KINDS; `folder` takes what it needs. Gives where files can be written."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    point = folder / "mounted"
    point.mkdir(parents=True)
    if kind == "tmpfs":
        with _mounted(["-t", "tmpfs", "-o", "size=64m", "none"], point):
            yield point
    elif kind == "ramfs":
        with _mounted(["-t", "ramfs", "none"], point):
            yield point
    elif kind == "overlayfs":
        for name in ("lower", "upper", "work"):
            (folder / name).mkdir()
        layers = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
        with _mounted(["-t", "overlay", "-o", layers, "overlay"], point):
            yield point
    elif kind == "fuse":
        with Fuse(folder / "behind", point) as fuse:
            yield fuse.folder
    else:
        name, _, sectors = kind.partition(" with sectors of ")
        with _loop_device(name, folder / "image", int(sectors or 512)) as device, _mounted([device], point):
            yield point


@contextlib.contextmanager
def _mounted(source: list[str], point: Path) -> Iterator[None]:
    _run(["mount", *source, str(point)])
    try:
        yield
    finally:
        _unmount(point)


@contextlib.contextmanager
def _loop_device(name: str, image: Path, sector_bytes: int) -> Iterator[str]:
    """A device backed by a fresh file, with a file system on it."""
    mkfs = f"mkfs.{name}"
    for tool in (mkfs, "losetup"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} (Debian: apt-get install {_PACKAGES[tool]})")
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES[name])
    device = _run(["losetup", "--find", "--show", "--sector-size", str(sector_bytes), "--direct-io=on", str(image)])
    try:
        _run([mkfs, "-F" if name == "ext4" else "-f", "-q", device])
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=False)  # in use still: detached with the last user
        image.unlink()


def _run(command: list[str]) -> str:
    """Output of a command; skips the test where that is refused."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _unmount(point: Path) -> None:
    if subprocess.run(["umount", point], capture_output=True, check=False).returncode != 0:  # busy: when it is not
        subprocess.run(["umount", "--lazy", point], check=True)


def _faulty_fuse(folder: Path) -> Path:
    """The program tests/faulty_fuse.c; skips the test where it can't be built."""
    compiler, pkg_config = shutil.which("cc"), shutil.which("pkg-config")
    flags = subprocess.run(
        [pkg_config or "false", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False
    )
    if compiler is None or flags.returncode != 0:
        pytest.skip("no C compiler, pkg-config or libfuse3 (Debian: apt-get install gcc pkg-config libfuse3-dev fuse3)")
    program = folder / "faulty_fuse"
    source = Path(__file__).with_name("faulty_fuse.c")
    subprocess.run([compiler, "-O1", str(source), "-o", str(program), *flags.stdout.split()], check=True)
    return program


class Fuse:
    """A folder seen through a file system that fails on command, see tests/faulty_fuse.c. Unless `options` of the mount
    say otherwise, names, sizes and times are asked for anew each time.

    Attributes:
        folder: where its files are read.
        behind: where they are written.
    """

    def __init__(self, behind: Path, point: Path, options: str = "attr_timeout=0,entry_timeout=0") -> None:
        self.behind, self.folder, self._options = behind, point, options

    def __enter__(self) -> Fuse:
        self.behind.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [_faulty_fuse(self.behind.parent), self.behind, self.folder, "-f", "-o", self._options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 20
        while not os.path.ismount(self.folder):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                pytest.skip(f"FUSE can't be mounted: {self._process.communicate()[1].strip()}")
            time.sleep(0.02)
        return self

    def fails(self, faults: str = "") -> None:
        """From here on reads fail as that says; not at all without."""
        control = self.behind / "control"
        if faults:
            (self.behind / "control.new").write_text(faults)
            (self.behind / "control.new").rename(control)
        else:
            control.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.fails()
        _unmount(self.folder)
        with self._process as process:
            process.kill()  # nothing is mounted any more: it has only its threads to end
