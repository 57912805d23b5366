"""How the files under a path can be read: past the page cache or through it, and what is known of that cache."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from .. import _C
from ..config import MiB
from ..filesystem import Mount
from ..machine import storage_of
from .finding import Finding

# Storage that takes longer to answer is not waited for.
PATIENCE_SECONDS = 20.0

_PROBE_BYTES = MiB
_RWF_DONTCACHE = 0x80  # Linux 6.14
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "models--*/snapshots/*/*.safetensors")  # the last: a hub's cache
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


def default_places() -> list[str]:
    """The working folder, the hub's cache and the folder for temporary files; of those on one device, the first."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    places: dict[int, str] = {}
    for folder in (os.getcwd(), hub, tempfile.gettempdir()):
        with contextlib.suppress(OSError):  # it is not there
            places.setdefault(os.stat(folder).st_dev, folder)
    return list(places.values())


def examine_place(path: str, patience_seconds: float = PATIENCE_SECONDS) -> list[Finding]:
    """What is found of a file, or of one in a folder. On a thread: a server that is away answers nothing at all."""
    found: list[Finding] = []
    failed: list[Exception] = []

    def examine() -> None:
        try:
            with _file_in(path) as file:
                found.extend(_examine_file(path, file))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=examine, name="wl-doctor", daemon=True)
    thread.start()
    thread.join(patience_seconds)
    subject = "file system"
    if thread.is_alive():
        summary = f"has not answered within {patience_seconds:g} s"
        remedy = "see whether its device or server is well"
        return [Finding(path, subject, "broken", summary, {}, "loads from there end with a time-out", remedy)]
    for error in failed:
        if not isinstance(error, OSError):
            raise error
        where = "" if error.filename in (None, path) else f" ({error.filename})"
        details = {"error": errno.errorcode.get(error.errno or 0)}
        remedy = "name a file or folder that is there, and that this user may read"
        effect = "nothing can be loaded from there"
        return [Finding(path, subject, "broken", f"{error.strerror}{where}", details, effect, remedy)]
    return found


@contextlib.contextmanager
def _file_in(path: str) -> Iterator[str]:
    """The file itself; of a folder one with weights, or one that is there only meanwhile, or any that can be read."""
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        yield path
        return
    if not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "neither a file nor a folder", path)
    for pattern in _WEIGHTS:
        for file in glob.iglob(os.path.join(glob.escape(path), pattern)):
            if os.path.isfile(file) and os.access(file, os.R_OK):
                yield file
                return
    with contextlib.ExitStack() as stack:
        try:
            temporary = stack.enter_context(
                tempfile.NamedTemporaryFile(dir=path, prefix=".weightlift-doctor-", buffering=0)
            )
            temporary.write(bytes(_PROBE_BYTES))
        except OSError as unwritable:
            names = (os.path.join(path, name) for name in os.listdir(path))
            files = [name for name in names if os.path.isfile(name) and os.access(name, os.R_OK)]
            if not files:
                raise OSError(unwritable.errno, "there is no file to try, and none can be written", path) from None
            yield files[0]
        else:
            _C.make_cold(temporary.name, _PROBE_BYTES)
            yield temporary.name


def _examine_file(path: str, file: str) -> list[Finding]:
    storage = storage_of(file)
    mount = Mount(storage["mount_point"], storage["file_system"])
    return [
        _file_system(path, file, storage, mount),
        _direct_io(path, storage["direct_io"], mount),
        _page_cache(path, file),
        _uncached_reads(path, file, mount),
    ]


def _file_system(path: str, file: str, storage: dict[str, Any], mount: Mount) -> Finding:
    device = storage["device"]
    details = {
        "file": file,
        "mount_point": mount.point,
        "type": mount.kind,
        "is_network": mount.is_network,
        "device": device,
    }
    summary = f"{mount.kind} at {mount.point}"
    if device is not None:
        summary += f", on {device['name']} {device['model']}".rstrip()
    if mount.is_network:
        summary += ", taken for a network's: larger reads, more of them in flight"
    return Finding(path, "file system", "ok", summary, details)


def _direct_io(path: str, direct: dict[str, Any], mount: Mount) -> Finding:
    subject, remedy = "direct I/O", "keep checkpoints on a local file system that takes O_DIRECT, as ext4 or XFS"
    if mount.kind in _IN_MEMORY:
        return Finding(path, subject, "ok", "not needed: the files lie in memory", direct)
    if mount.kind == "overlay":
        remedy = (
            "mount the folder of the checkpoints into the container (docker run -v), from a file system as ext4 or XFS"
        )
    if not direct["usable"]:
        effect = "each byte goes through the page cache, and is copied out of it"
        return Finding(path, subject, "missing", direct["reason"], direct, effect, remedy)
    alignment = f"memory {direct['memory_alignment']} B, offset {direct['offset_alignment']} B"
    if not direct["proven"]:
        if "page cache holds" in direct["reason"]:
            remedy = "run as the owner of the files, who may see what of them is cached"
        elif "is in the page cache" in direct["reason"]:
            remedy = "as root, to find out: echo 1 > /proc/sys/vm/drop_caches, and look again"
        effect = "reads may go through the page cache all the same"
        return Finding(path, subject, "limited", f"{direct['reason']} ({alignment})", direct, effect, remedy)
    source = "as the file system says" if direct["told"] else "found by trying"
    return Finding(path, subject, "ok", f"works, aligned to {alignment} ({source})", direct)


def _page_cache(path: str, file: str) -> Finding:
    method = _C.residency_method(file)
    details = {"method": method}
    if method == "unknown":
        effect = "what is cached already is read from storage again, where direct I/O works"
        remedy = "run as the owner of the files, or with the right to write to them"
        summary = "this process may not see what of the files it holds"
        return Finding(path, "page cache", "limited", summary, details, effect, remedy)
    return Finding(path, "page cache", "ok", f"what of a file it holds is told by {method}", details)


def _uncached_reads(path: str, file: str, mount: Mount) -> Finding:
    subject = "RWF_DONTCACHE"
    if mount.kind in _IN_MEMORY:
        return Finding(path, subject, "ok", "not needed: the files lie in memory")
    with open(file, "rb") as opened:
        try:
            os.preadv(opened.fileno(), [bytearray(1)], 0, _RWF_DONTCACHE)
        except OSError as error:
            details = {"error": errno.errorcode.get(error.errno or 0)}
            effect = 'with page_cache="leave", what was read is dropped when the file is closed, and not at once'
            return Finding(
                path,
                subject,
                "missing",
                error.strerror or "",
                details,
                effect,
                "Linux 6.14, and ext4, XFS or btrfs on it",
            )
    return Finding(path, subject, "ok", 'works: page_cache="leave" needs no more of the cache than is in flight')
