"""Which file system a file lies on, and whether that is one across a network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

_MOUNTS = "/proc/self/mountinfo"

# Beside these every `fuse.*` counts: buckets, sshfs, glusterfs. Not `fuseblk`, which is a disk's (NTFS, exFAT). With 9p
# and virtiofs it is the host of a virtual machine that reads, often across a network itself.
_NETWORK = frozenset(
    ("nfs", "nfs4", "lustre", "ceph", "cifs", "smb3", "9p", "virtiofs", "beegfs", "gpfs", "afs", "wekafs", "fuse")
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A mounted file system: where, and of which type (`ext4`, `nfs4`, `fuse.gcsfuse`)."""

    point: str
    kind: str

    @property
    def is_network(self) -> bool:
        return self.kind in _NETWORK or self.kind.startswith("fuse.")


def mount_of(path: str) -> Mount:
    """The mount that a file lies on, behind all symlinks: in a hub's cache the links and the data may lie on two.

    Where the table of mounts can't be read: an unknown one, that is none across a network.
    """
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as table:
            return find_mount(table, os.path.realpath(path))
    except OSError:
        return Mount("/", "unknown")


def find_mount(table: Iterable[str], path: str) -> Mount:
    """The mount with the longest point that leads to an absolute path.

    Args:
        table: lines of /proc/self/mountinfo: `36 35 98:0 / /mnt/models rw,noatime master:1 - nfs4 server:/models rw`.
            Blanks and backslashes in a mount point are octal escapes. A later mount hides an earlier one on its point.
    """
    found = Mount("/", "unknown")
    for line in table:
        mount, separator, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()
        if not separator or len(fields) < 5 or not kind:
            continue
        point = _ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
        if len(point) >= len(found.point) and (path == point or path.startswith(point.rstrip("/") + "/")):
            found = Mount(point, kind[0])
    return found
