"""What this host can do for loads, found out by trying, and why not what it can't: `weightlift doctor`.

The core decides the same way when it loads: what is found here is what a load in this environment will meet.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import _C
from ..config import ResolvedConfig
from ..machine import machine
from ..settings import settle
from .cuda import examine_cuda
from .finding import Finding, Status
from .host import examine_host
from .storage import default_places, examine_place

__all__ = ["Examination", "Finding", "Status", "examine"]


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        machine: as `weightlift.machine.machine` tells, and the vector instructions that ops run with.
        findings: group by group.
    """

    machine: dict[str, Any]
    findings: list[Finding]

    @property
    def is_broken(self) -> bool:
        """Whether something does not work at all, and isn't only slower or left out."""
        return any(finding.status == "broken" for finding in self.findings)


def examine(paths: Sequence[str], config: ResolvedConfig) -> Examination:
    """Looks at this host, at the storage under some paths, and at CUDA, by trying what loads do. Takes a second or so.

    Args:
        paths: files or folders; none: the working folder, the hub's cache, and the folder for temporary files. In a
            folder without weights, a small file is written and removed again.
        config: what loads are set to.
    """
    host, cuda = examine_host(config, settle(config, [])), examine_cuda()
    others = {finding.group for finding in (*host, *cuda)}
    places: list[Finding] = []
    for path in paths or default_places():
        places += examine_place(os.path.join(os.curdir, path) if path in others else path)
    return Examination({**machine(), "instructions": _C.simd()}, [*host, *places, *cuda])
