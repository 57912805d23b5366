"""Files, opened and read so that a hostile or broken one is one clear error."""

from __future__ import annotations

import os
import stat

from .errors import CheckpointNotFoundError, CheckpointReadError

DOWNLOAD_AGAIN = "download it again"


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """A descriptor that the caller closes, and the status of what it is open on. Python opens with O_CLOEXEC."""
    try:
        # O_NONBLOCK: without it, opening a FIFO waits for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        link = os.path.islink(path)
        problem = "a symlink to a file that does not exist" if link else "no such file or folder"
        if path.startswith("~"):
            problem += ", `~` is not expanded here"
        raise CheckpointNotFoundError(f"{problem}; check the path", path=path, reason="NotFound") from None
    except OSError as error:
        raise refused("open", path, error) from error
    except ValueError:  # a NUL in the path
        raise CheckpointNotFoundError("not a path", path=path, reason="NotFound") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or device"
            raise CheckpointReadError(f"expected a regular file, found {kind}", path=path, reason="NotRegularFile")
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def read_at(fd: int, path: str, offset: int, length: int) -> bytes:
    """Exactly `length` bytes; the caller has compared it with the file's size."""
    parts = []
    end = offset + length
    while offset < end:
        try:
            part = os.pread(fd, end - offset, offset)  # Python continues after EINTR
        except OSError as error:
            raise refused("read", path, error) from error
        if not part:
            raise CheckpointReadError(
                f"expected {end} bytes or more, found {offset}: the file became shorter while it was read",
                path=path,
                reason="UnexpectedEnd",
            )
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def refused(action: str, path: str, error: OSError) -> CheckpointReadError:
    remedy = "; check the permissions of the file and of its folders" if isinstance(error, PermissionError) else ""
    return CheckpointReadError(
        f"the operating system refused to {action} it: {error.strerror}{remedy}",
        path=path,
        reason="IoError",
        cause=error,
    )


def is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False  # opening it says why


def list_names(folder: str, depth: int = 0) -> list[str]:
    """What is in a folder, and in its subfolders down to `depth`, as sorted relative paths with `/`; nothing hidden.

    Raises:
        CheckpointReadError: it cannot be listed.
    """
    try:
        # Hidden files are not weights: macOS leaves `._model.safetensors` on foreign disks.
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise refused("list", folder, error) from error
    if depth:
        for name in list(names):
            path = os.path.join(folder, name)
            if is_folder(path):
                names += [f"{name}/{inner}" for inner in list_names(path, depth - 1)]
    return names
