"""How much memory this process may still take: of the machine, and of the control groups that it is in."""

from __future__ import annotations

import os


def available_bytes(root: str = "/") -> int:
    """Bytes that can be had without swapping, or without being killed for them. The page cache counts as free.

    Args:
        root: where to find `proc/` and `sys/`.
    """
    meminfo = _read(os.path.join(root, "proc/meminfo")).splitlines()
    fields = dict(line.split(":", 1) for line in meminfo if ":" in line)
    available = int(fields.get("MemAvailable", "0").split()[0]) * 1024  # without it: as if there were none
    return max(0, min([available, *group_headrooms(root).values()]))


def group_headrooms(root: str = "/") -> dict[str, int]:
    """Bytes that each control group which limits this process's memory leaves it, by the group's folder."""
    headrooms = {group: _headroom(group) for group in _memory_groups(root)}
    return {group: headroom for group, headroom in headrooms.items() if headroom is not None}


def _memory_groups(root: str) -> list[str]:
    """The folders of the control groups that limit this process's memory: its own, and those that hold it."""
    groups = []
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            top = os.path.join(root, "sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            top = os.path.join(root, "sys/fs/cgroup/memory")
        else:
            continue
        # In a container, the path may be that of the host while the folder shows the container's own group at its top.
        group = os.path.normpath(os.path.join(top, path.lstrip("/")))
        while group.startswith(top + "/"):
            groups.append(group)
            group = os.path.dirname(group)
        groups.append(top)
    return groups


def _headroom(group: str) -> int | None:
    """Bytes that a group may still take; None where it has no limit."""
    for limit_file, usage_file, cache_fields in (
        ("memory.max", "memory.current", ("active_file", "inactive_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    ):
        limit = _read(os.path.join(group, limit_file)).strip()
        usage = _read(os.path.join(group, usage_file)).strip()
        if limit.isdigit() and usage.isdigit():
            stat = map(str.split, _read(os.path.join(group, "memory.stat")).splitlines())
            cached = sum(int(amount) for field, amount in stat if field in cache_fields)
            return int(limit) - (int(usage) - cached)
    return None


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
