"""What outlives a load whose reads storage did not answer: its pipeline, and the memory that they may yet write to.

A read can't be taken back from a device, or a server, that is gone. All that it needs stays alive on purpose until it
is answered, however late, and nothing is loaded into that memory meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ._logging import logger
from .report import format_bytes

if TYPE_CHECKING:
    from torch import UntypedStorage

    from . import _C

# How long the end of a load waits for reads in flight; where it ends because storage is silent, hardly at all.
_END_SECONDS = 10.0
_END_SECONDS_IF_SILENT = 0.2
# How often ending looks up, for Ctrl-C; and how often it is looked whether reads were answered after all.
_POLL_SECONDS = 0.05
_LATE_POLL_SECONDS = 0.2


class _Unanswered:
    def __init__(
        self,
        pipeline: _C.Pipeline,
        memory: list[UntypedStorage],
        ranges: list[tuple[int, int]],
        ops: Sequence[_C.Op],
    ) -> None:
        self.pipeline = pipeline
        self.memory = memory
        self.ranges = ranges
        self.ops = ops


kept: list[_Unanswered] = []  # looked at by whoever records


def end(pipeline: _C.Pipeline, memory: Iterable[UntypedStorage], ops: Sequence[_C.Op] = ()) -> str | None:
    """Ends a pipeline: waits until no read is in flight, for some seconds at most, or until Ctrl-C.

    Args:
        memory: where its reads may go, apart from its own.
        ops: those that GPUs may be carrying out.

    Returns:
        None; or, where reads are still in flight, what is kept for them, in words.
    """
    fault = pipeline.fault()
    is_silent = fault is not None and fault[0] == "timeout"
    deadline = time.monotonic() + (_END_SECONDS_IF_SILENT if is_silent else _END_SECONDS)
    has_ended = False
    left = None
    try:
        while not has_ended and time.monotonic() < deadline:
            has_ended = pipeline.stop(_POLL_SECONDS)
    finally:  # Ctrl-C too
        if not has_ended:
            left = _keep(pipeline, memory, ops)
    return left


def _keep(pipeline: _C.Pipeline, memory: Iterable[UntypedStorage], ops: Sequence[_C.Op]) -> str:
    ranges = pipeline.destinations_in_flight()
    storages = {storage._cdata: storage for storage in memory}.values()
    if ranges is None:
        ranges = list(map(_span, storages))
    held = [storage for storage in storages if any(_overlap(_span(storage), other) for other in ranges)]
    entry = _Unanswered(pipeline, held, ranges, ops)
    kept.append(entry)
    # Not even the end of the interpreter, which empties modules, shall free it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(entry))
    text = "its staging memory"
    if held:
        text += f" and {format_bytes(sum(storage.nbytes() for storage in held))} of destinations"
    logger.warning("storage has not answered reads in flight; %s is kept until it does", text)
    with contextlib.suppress(RuntimeError):  # when the interpreter ends, no thread can be started, and none is needed
        threading.Thread(target=_let_go_when_answered, args=(entry,), name="wl-unanswered", daemon=True).start()
    return text


def _let_go_when_answered(entry: _Unanswered) -> None:
    while not entry.pipeline.stop(0):
        time.sleep(_LATE_POLL_SECONDS)
    kept.remove(entry)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(entry))
    logger.info("storage has answered the reads of a load that had ended; their memory is free again")


def may_be_written(span: tuple[int, int]) -> bool:
    """Whether reads that were never answered may yet write between these addresses."""
    return any(_overlap(span, other) for entry in tuple(kept) for other in entry.ranges)


def _span(storage: UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


# Answers come to the parent's memory.
os.register_at_fork(after_in_child=kept.clear)
