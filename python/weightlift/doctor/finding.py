"""One answer of the doctor's: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# broken: what is needed does not work at all; everything else only costs speed.
Status = Literal["ok", "limited", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """How one thing is on this host.

    Attributes:
        group: what it belongs to: "host", "CUDA", or the path that was looked at (`./host` where it has that name).
        subject: what was looked at: "io_uring".
        summary: one line.
        details: what was found, in types that `json.dumps` takes; sizes in bytes, times in seconds.
        effect: what is lost by it; empty where all is well.
        remedy: how to have it; empty where all is well, or nothing helps.
    """

    group: str
    subject: str
    status: Status
    summary: str
    details: dict[str, Any] = field(default_factory=dict)
    effect: str = ""
    remedy: str = ""
