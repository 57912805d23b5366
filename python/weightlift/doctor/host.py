"""Kernel features, limits and memory that loads depend on, wherever their files are."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import _C
from ..available_memory import available_bytes, group_headrooms
from ..config import DEFAULT_STAGING_BYTES, OPTIONS, KiB, MiB, ResolvedConfig, environment_variable, misspelt_variables
from ..local_rank import local_rank
from ..report import format_bytes
from ..settings import Settings
from ..storage import MAX_OPEN_FILES, max_open_files
from .finding import Finding, Status

_found = functools.partial(Finding, "host")
_CAP_IPC_LOCK = 14
_UNLOCKED = "docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit"
_URING_CALLS = "io_uring_setup, io_uring_enter and io_uring_register"

_HUGE_PAGE = 2 * MiB
_NUM_HUGE_PAGES = 8  # that are tried
_SOON_SECONDS = 400e-6  # for one: what the core takes for soon (csrc/staging/pages.cpp)
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python names it from 3.14 on


def examine_host(config: ResolvedConfig, settings: Settings) -> list[Finding]:
    status = _fields("/proc/self/status")
    # What a load has, but for settings that would not fit either.
    staging_bytes = min(settings.staging_bytes, max(settings.chunk_bytes, available_bytes() // 4))
    num_buffers = staging_bytes // settings.chunk_bytes
    ring = _C.probe_uring(queue_depth=settings.queue_depth, buffer_bytes=settings.chunk_bytes, num_buffers=num_buffers)
    return [
        _io_uring(ring, config, settings, status),
        _registered_buffers(ring, settings, num_buffers, status),
        _huge_pages(config, status),
        _memory(settings),
        _open_files(),
        _settings(settings),
    ]


def _io_uring(
    ring: Mapping[str, Any], config: ResolvedConfig, settings: Settings, status: Mapping[str, str]
) -> Finding:
    refusal = ring["refusal"]
    details = {
        "refusal": refusal or None,
        "io_uring_disabled": _line("/proc/sys/kernel/io_uring_disabled") or None,
        "seccomp": {"0": "none", "1": "strict", "2": "filter"}.get(status.get("Seccomp", "")),
    }
    if refusal:
        return _found(
            "io_uring",
            "missing",
            refusal,
            details,
            "a pool of threads reads instead: as right, with more processor time and fewer reads in flight",
            _io_uring_remedy(refusal, details["seccomp"] == "filter"),
        )
    if config.backend == "pread":
        summary = f"can be had, but {environment_variable('backend')} is pread"
        remedy = f"unset {environment_variable('backend')}"
        return _found("io_uring", "limited", summary, details, "a pool of threads reads instead", remedy)
    return _found("io_uring", "ok", f"a ring of {settings.queue_depth} reads was set up", details)


def _io_uring_remedy(refusal: str, is_filtered: bool) -> str:
    allow = (
        f"let the seccomp profile allow {_URING_CALLS}: docker run --security-opt seccomp=PROFILE.json, or unconfined; "
        "in Kubernetes, securityContext.seccompProfile"
    )
    if "liburing" in refusal:
        return "apt-get install liburing-dev, and build again (WEIGHTLIFT_URING=ON makes its lack an error)"
    if "io_uring_disabled" in refusal:
        others = ", or take the process into the group of kernel.io_uring_group" if "disabled=1" in refusal else ""
        return f"as root on the host: sysctl kernel.io_uring_disabled=0{others}"
    if "EPERM" in refusal or "io_uring_register is refused" in refusal:
        return allow if is_filtered else "no seccomp filter is set: see whether SELinux or the like denies it"
    if "ENOSYS" in refusal:
        return allow if is_filtered else "a kernel with CONFIG_IO_URING, Linux 5.11 or later"
    if "ENOMEM" in refusal:
        return f"ulimit -l unlimited; {_UNLOCKED}"
    if "RLIMIT_NOFILE" in refusal:
        return "ulimit -n 65536; docker run --ulimit nofile=65536"
    return "Linux 5.11 or later" if "5.11" in refusal else ""


def _registered_buffers(
    ring: Mapping[str, Any], settings: Settings, num_buffers: int, status: Mapping[str, str]
) -> Finding:
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    registered, error = ring["registered_buffers"], ring["error"]
    may_lock = bool(int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1)
    details = {
        "registered_buffers": registered,
        "wanted_buffers": num_buffers,
        "buffer_bytes": settings.chunk_bytes,
        "error": errno.errorcode.get(error) if error else None,
        "memlock_soft_bytes": soft,
        "memlock_hard_bytes": hard,
        "cap_ipc_lock": may_lock,
    }
    subject = "registered buffers"
    if ring["refusal"]:
        return _found(subject, "missing", "there is no ring to register them with", details, remedy="see io_uring")
    limit = "RLIMIT_MEMLOCK is " + ("unlimited" if soft is None else format_bytes(soft))
    limit += ", with CAP_IPC_LOCK" if may_lock else ""
    counted = f"of {num_buffers}, {format_bytes(settings.chunk_bytes)} each"
    if not error:
        return _found(subject, "ok", f"all {counted} ({limit})", details)
    summary = f"{registered} {counted}: {os.strerror(error)} ({limit})"
    kind: Status = "limited" if registered else "missing"
    effect = "the kernel pins the pages of the others anew for each read"
    if error != errno.ENOMEM:
        return _found(subject, kind, summary, details, effect, "Linux 5.19 or later")
    kib = (settings.staging_bytes + MiB) // KiB * local_rank()[1]  # which all processes of a user share
    raised = hard is None or hard >= kib * KiB
    remedy = f"ulimit -l {kib} (KiB)" if raised else "raise the hard limit: memlock in /etc/security/limits.conf"
    return _found(subject, kind, summary, details, effect, f"{remedy}; {_UNLOCKED}")


def _huge_pages(config: ResolvedConfig, status: Mapping[str, str]) -> Finding:
    folder = "/sys/kernel/mm/transparent_hugepage"
    enabled, defrag = (_chosen(_line(f"{folder}/{name}")) for name in ("enabled", "defrag"))
    num_huge, huge_seconds, small_seconds = _try_huge_pages()
    details = {
        "enabled": enabled or None,
        "defrag": defrag or None,
        "allowed_to_process": status.get("THP_enabled") != "0",
        "tried": _NUM_HUGE_PAGES,
        "got": num_huge,
        "seconds_per_huge_page": huge_seconds,
        "seconds_per_huge_page_in_small_ones": small_seconds,
    }
    subject = "huge pages"
    effect = "direct reads into small pages are slower and take more processor time"
    if num_huge < _NUM_HUGE_PAGES:
        kind: Status = "limited" if num_huge else "missing"
        if not enabled:
            why, remedy = "this kernel has no transparent huge pages", "a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
        elif enabled == "never":
            why = "transparent_hugepage/enabled is never"
            remedy = f"as root on the host: echo madvise > {folder}/enabled"
        elif not details["allowed_to_process"]:
            why = "they are switched off for this process"
            remedy = "see what started it: it has set PR_SET_THP_DISABLE"
        else:
            why = f"memory is fragmented (enabled: {enabled}, defrag: {defrag})"
            remedy = f"as root on the host: echo 1 > /proc/sys/vm/compact_memory; echo madvise > {folder}/defrag"
        summary = f"{num_huge} of {_NUM_HUGE_PAGES} that were asked for came: {why}"
        return _found(subject, kind, summary, details, effect, remedy)
    times = f"{huge_seconds * 1e3:.2f} ms for one, {small_seconds * 1e3:.2f} ms for as much in small pages"
    if not config.advise_hugepages:
        variable = environment_variable("advise_hugepages")
        summary = f"come ({times}), but {variable} is off"
        return _found(subject, "limited", summary, details, effect, f"unset {variable}")
    if huge_seconds > max(_SOON_SECONDS, small_seconds):
        remedy = "in a virtual machine whose free memory goes back to its host: more memory for it, or no balloon"
        effect = "memory for buffered reads is left in small pages; that for direct reads comes late"
        return _found(subject, "limited", f"they come late: {times}", details, effect, remedy)
    return _found(subject, "ok", f"come when advised: {times}", details)


def _try_huge_pages() -> tuple[int, float, float]:
    """How many of those tried were huge, seconds for one, and for as much memory in small pages."""
    count, seconds = 0, []
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE):
        with mmap.mmap(-1, (_NUM_HUGE_PAGES + 1) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            handle = ctypes.c_char.from_buffer(memory)
            address = ctypes.addressof(handle)
            del handle  # it would keep the mapping open
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(advice)
            start = -address % _HUGE_PAGE
            begin = time.perf_counter()
            try:
                memory.madvise(_MADV_POPULATE_WRITE, start, _NUM_HUGE_PAGES * _HUGE_PAGE)
            except OSError:  # an old kernel: touched one by one
                for offset in range(start, start + _NUM_HUGE_PAGES * _HUGE_PAGE, mmap.PAGESIZE):
                    memory[offset] = 1
            seconds.append((time.perf_counter() - begin) / _NUM_HUGE_PAGES)
            if advice == mmap.MADV_HUGEPAGE:
                count = min(_NUM_HUGE_PAGES, _huge_bytes(address + start) // _HUGE_PAGE)
    return count, seconds[0], seconds[1]


def _huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that an address lies in."""
    inside = False
    for line in _lines("/proc/self/smaps"):
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # 7f0000000000-7f0000200000 rw-p ...
            first, _, last = name.partition("-")
            inside = int(first, 16) <= address < int(last, 16)
        elif inside and name == "AnonHugePages:":
            return int(rest.split()[0]) * KiB
    return 0


def _memory(settings: Settings) -> Finding:
    available = available_bytes()
    headrooms = group_headrooms()
    tightest = min(headrooms, key=lambda group: headrooms[group], default=None)
    details = {"available_bytes": available, "group_headrooms": headrooms, "staging_bytes": settings.staging_bytes}
    source = "MemAvailable"
    remedy = "end other processes, or run on a machine with more memory"
    if tightest is not None and headrooms[tightest] <= available:
        source = f"what the control group {tightest} leaves"
        remedy = "docker run --memory, resources.limits.memory in Kubernetes, MemoryMax in a systemd unit"
    staging = format_bytes(settings.staging_bytes)
    summary = f"{format_bytes(available)} can be taken ({source}); staging takes {staging} at most"
    if available < settings.staging_bytes:
        return _found("memory", "limited", summary, details, "a load that needs all of staging is killed", remedy)
    if settings.staging_bytes < DEFAULT_STAGING_BYTES // local_rank()[1]:
        return _found("memory", "limited", summary, details, "fewer reads in flight", remedy)
    return _found("memory", "ok", summary, details)


def _open_files() -> Finding:
    limit, files = resource.getrlimit(resource.RLIMIT_NOFILE)[0], max_open_files()
    details = {"nofile_soft": None if limit == resource.RLIM_INFINITY else limit, "max_open_files": files}
    summary = f"a load keeps up to {files} of its files open (RLIMIT_NOFILE: {details['nofile_soft'] or 'unlimited'})"
    if files == MAX_OPEN_FILES:
        return _found("open files", "ok", summary, details)
    effect = "checkpoints of more files have them closed and opened again on the way"
    remedy = f"ulimit -n {4 * MAX_OPEN_FILES}; docker run --ulimit nofile={4 * MAX_OPEN_FILES}"
    return _found("open files", "limited", summary, details, effect, remedy)


def _settings(settings: Settings) -> Finding:
    rank, processes = local_rank()
    given = {environment_variable(name) for name in OPTIONS} & set(os.environ)
    details = {
        "queue_depth": settings.queue_depth,
        "chunk_bytes": settings.chunk_bytes,
        "staging_bytes": settings.staging_bytes,
        "num_threads": settings.num_threads,
        "local_rank": rank,
        "local_world_size": processes,
        "variables": {name: os.environ[name] for name in sorted(given)},
        "notes": list(settings.notes),
    }
    most = format_bytes(settings.chunk_bytes)
    summary = f"{settings.queue_depth} reads in flight, of up to {most}; {settings.num_threads} threads"
    if processes > 1:
        summary += f"; staging and reads in flight divided by {processes} (LOCAL_WORLD_SIZE)"
    if given:
        summary += f"; set: {', '.join(sorted(given))}"
    told = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if processes == 1 and told != "1":
        effect = f"LOCAL_WORLD_SIZE={told} is passed over: staging is not divided, and nothing shared with other ranks"
        return _found("settings", "limited", summary, details, effect, "set LOCAL_RANK to one of its ranks, from 0 on")
    if misspelt := misspelt_variables(os.environ):
        effect = "they change nothing: " + ", ".join(misspelt)
        return _found("settings", "limited", summary, details, effect, "correct their names")
    return _found("settings", "ok", summary, details)


def _fields(path: str) -> dict[str, str]:
    """`name: value` lines."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in _lines(path))}


def _line(path: str) -> str:
    return next(_lines(path), "").strip()


def _lines(path: str) -> Iterator[str]:
    try:
        yield from Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return


def _chosen(choices: str) -> str:
    """Of `always [madvise] never`, what is in brackets."""
    return choices.partition("[")[2].partition("]")[0]
